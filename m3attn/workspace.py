"""Scratch memory: what a stage may use is a function of static shapes and stays within one limit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DEFAULT_LIMIT = 1 << 30
_limit = DEFAULT_LIMIT


@dataclass(frozen=True, slots=True)
class WorkShape:
    """The static shapes a stage's scratch depends on. `limit` is the byte limit in force; `kv_dtype` by default the one that needs most."""

    tokens: int
    num_requests: int
    num_q_heads: int
    num_kv_heads: int
    num_index_heads: int
    head_dim: int
    topk: int
    max_seqlen_q: int
    max_seqlen_k: int
    block_size: int
    limit: int
    kv_dtype: str = "fp8_e4m3"

    @property
    def num_blocks(self) -> int:
        return -(-self.max_seqlen_k // self.block_size)


def workspace_limit() -> int:
    """Bytes that one call's scratch may take; 1 GiB unless set."""
    return _limit


def set_workspace_limit(nbytes: int) -> None:
    """Set the limit for calls from now on. Raises ValueError below 1 MiB."""
    global _limit
    if not isinstance(nbytes, int) or nbytes < 1 << 20:
        raise ValueError(f"nbytes: expected an int of at least {1 << 20} (1 MiB), got {nbytes!r}")
    _limit = nbytes


def carve(workspace: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """A contiguous tensor at byte `offset` of a flat uint8 workspace, and the next offset (a multiple of 256)."""
    size = dtype.itemsize
    for n in shape:
        size *= n
    return workspace[offset : offset + size].view(dtype).view(shape), offset + -(-size // 256) * 256
