"""What the MLA stages check alike."""

from __future__ import annotations

import torch

from m3attn.checks import check_outputs, check_tensor
from m3attn.dtypes import E4M3, FLOAT_DTYPES

INT_DTYPES = (torch.int32, torch.int64)
Inputs = dict[str, torch.Tensor | None]


def check_heads(argument: str, x: object, shape: list[int | str], like: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, H, dim] of a 16-bit or fp32 dtype, that of `like` where it is given."""
    dtypes = FLOAT_DTYPES if like is None else (like.dtype,)
    return check_tensor(argument, x, shape, dtypes, None if like is None else like.device)


def shared_head(argument: str, x: object, tokens: int, like: torch.Tensor) -> torch.Tensor:
    """The one head that all heads share, [T, dim] or [T, 1, dim], as [T, dim]."""
    if isinstance(x, torch.Tensor) and x.dim() == 3:
        return check_heads(argument, x, [tokens, 1, "dim"], like)[:, 0]
    return check_heads(argument, x, [tokens, "dim"], like)


def check_rotation(positions: object, cos_sin: object, tokens: int, rope: int, like: torch.Tensor) -> None:
    """positions [T] and cos_sin [max_position, rope]."""
    if rope % 2 or rope < 2:
        raise ValueError(f"k_pe: expected an even number of rotated dims, got {rope}")
    check_tensor("positions", positions, [tokens], INT_DTYPES, like.device)
    check_tensor("cos_sin", cos_sin, ["max_position", rope], (torch.float32, like.dtype), like.device)


def e4m3_buffer(argument: str, out: torch.Tensor | None, shape: list[int], inputs: Inputs, like: torch.Tensor) -> torch.Tensor:
    """The caller's contiguous e4m3 buffer, or a fresh one."""
    if out is None:
        return torch.empty(shape, dtype=E4M3, device=like.device)
    return contiguous_buffer(argument, out, shape, E4M3, inputs, like)


def contiguous_buffer(argument: str, out: torch.Tensor, shape: list[int], dtype: torch.dtype, inputs: Inputs, like: torch.Tensor) -> torch.Tensor:
    """The caller's buffer, of this shape and dtype, contiguous, and no part of an input."""
    check_tensor(argument, out, shape, [dtype], like.device)
    if not out.is_contiguous():
        raise ValueError(f"{argument}: expected a contiguous tensor, got strides {out.stride()}")
    check_outputs({argument: out}, inputs)
    return out
