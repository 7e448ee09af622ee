"""Sparse MLA: which launch settings a call takes, and when few queries split their indices among programs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from m3attn.batch import DECODE_MAX_SEQLEN_Q
from m3attn.calls import SparseMlaPrefillCall
from m3attn.dtypes import is_fp8
from m3attn.problem import arch_number
from m3attn.triton_kernels.launch import cdiv, current_arch, launch, next_power_of_2
from m3attn.triton_kernels.mla_sparse import LATENT, MERGED, merge_sparse_mla_kernel, sparse_mla_kernel
from m3attn.workspace import WorkShape, carve, workspace_limit


@dataclass(frozen=True, slots=True)
class Settings:
    """How the kernel is launched.

    Attributes:
        block_m: heads of a program, at most; fewer where a call has fewer.
        block_n: tokens of a step.
        chunk: latent dims of a tile, 128 to 512.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    chunk: int = 128


MEASURED: dict[tuple[str, str], Settings] = {}
"""(architecture, mode) -> the fastest settings found; `default_settings` covers the rest."""

CANDIDATES: list[Settings] = [
    *(Settings(64, 32, 8, stages, chunk) for stages in (1, 2, 3) for chunk in (128, 256, 512)),
    *(Settings(64, 64, 8, stages, chunk) for stages in (1, 2) for chunk in (128, 512)),
    *(Settings(64, n, 4, 2) for n in (32, 64)),
    *(Settings(64, 16, 8, stages) for stages in (3, 4)),
    *(Settings(32, n, 8, stages) for n in (32, 64) for stages in (2, 3)),
]
"""What a GPU sweep tries; what does not fit raises."""

settings_override: Settings | None = None
"""Set by a tuner to force one."""

SPLIT_PROGRAMS = 128
"""Programs that the indices of few queries are split into; a sweep tries 64 to 512."""
MAX_SPLITS = 16
SPLIT_HEADS, SPLIT_TOKENS = 64, 64
"""Heads and tokens of a part, whatever the settings are, so that the workspace is a function of shapes alone."""


def mode_of(q: torch.Tensor, kv: torch.Tensor, fp8_pv: bool) -> str:
    """`fp32`, `half`, `widen`, `fp8` or `fp8_pv`."""
    if is_fp8(q.dtype):
        return "fp8_pv" if fp8_pv else "fp8"
    if q.dtype == torch.float32:
        return "fp32"
    return "widen" if is_fp8(kv.dtype) else "half"


def default_settings(arch: str, mode: str) -> Settings:
    """Tiles whose outputs stay in registers, or tensor memory, and whose tokens in flight fit shared memory (227, 163 or 99 KB)."""
    number = arch_number(arch)
    if mode == "fp32":
        return Settings(16, 16, 8, 1)
    if number < 90:
        return Settings(32, 32, 8, 2) if number in (0, 80, 87) else Settings(32, 16, 8, 2)
    if number >= 120:
        return Settings(32, 16, 8, 2)
    # Tensor memory holds the outputs of 64 heads as one tile; as four they would take all of it.
    return Settings(64, 32, 8, 2 if mode == "widen" else 3, 128 if number == 90 else 512)


def choose_settings(arch: str, mode: str, heads: int) -> Settings:
    """The settings for `heads` query heads."""
    settings = settings_override or MEASURED.get((arch, mode)) or default_settings(arch, mode)
    return replace(settings, block_m=min(settings.block_m, max(16, next_power_of_2(heads))))


def num_splits(queries: int, heads: int, topk: int, limit: int) -> int:
    """Into how many parts a query's indices are cut: a power of two whose partials fit `limit`."""
    if queries > DECODE_MAX_SEQLEN_Q:
        return 1
    programs = max(1, queries * cdiv(heads, SPLIT_HEADS))
    splits = max(1, min(SPLIT_PROGRAMS // programs, topk // SPLIT_TOKENS, MAX_SPLITS))
    splits = 1 << (splits.bit_length() - 1)
    while splits > 1 and _partial_bytes(splits, queries, heads) > limit:
        splits //= 2
    return splits


def workspace_bytes(shape: WorkShape) -> int:
    """Scratch of a call of at most 16 queries: splits * s_q * h_q * (512 + 2) * 4; 0 where nothing is split."""
    return _partial_bytes(num_splits(shape.tokens, shape.num_q_heads, shape.topk, shape.limit), shape.tokens, shape.num_q_heads)


def _partial_bytes(splits: int, queries: int, heads: int) -> int:
    return 0 if splits == 1 else splits * queries * heads * (LATENT.value + 2) * 4 + 3 * 256


def sparse_mla_prefill(call: SparseMlaPrefillCall) -> None:
    """Fill call.out, call.max_logits and call.lse."""
    queries, heads, _ = call.q.shape
    arch = current_arch(call.q.device)
    settings = choose_settings(arch, mode_of(call.q, call.kv, call.fp8_pv), heads)
    splits = num_splits(queries, heads, call.indices.shape[1], workspace_limit())
    if splits == 1:
        _attend(call, settings, 1, False, call.out, call.max_logits, call.lse)
        return
    assert call.workspace is not None
    partial_out, offset = carve(call.workspace, 0, (splits, queries, heads, LATENT.value), torch.float32)
    partial_max, offset = carve(call.workspace, offset, (splits, queries, heads), torch.float32)
    partial_lse, _ = carve(call.workspace, offset, (splits, queries, heads), torch.float32)
    pdl = arch_number(arch) >= 90
    _attend(call, settings, splits, pdl, partial_out, partial_max, partial_lse)
    launch(
        merge_sparse_mla_kernel,
        (queries * heads, LATENT.value // MERGED.value),
        partial_out,
        partial_max,
        partial_lse,
        call.attn_sink,
        call.out,
        call.max_logits,
        call.lse,
        call.kv_scale.tensor,
        call.kv_scale.value,
        queries * heads,
        heads,
        device=call.q.device,
        num_warps=1 if splits <= 8 else 2,
        num_stages=1,
        pdl=pdl,
        SPLITS=splits,
        PDL=pdl,
    )


def _attend(
    call: SparseMlaPrefillCall, settings: Settings, splits: int, pdl: bool, out: torch.Tensor, max_logits: torch.Tensor, lse: torch.Tensor
) -> None:
    """Whole rows into the call's outputs, or parts of them into the workspace."""
    queries, heads, dim = call.q.shape
    launch(
        sparse_mla_kernel,
        (queries * cdiv(heads, settings.block_m), splits),
        call.q,
        call.kv,
        call.indices,
        call.topk_length,
        call.attn_sink,
        out,
        max_logits,
        lse,
        call.q_scale.tensor,
        call.kv_scale.tensor,
        call.sm_scale,
        call.q_scale.value,
        call.kv_scale.value,
        call.q.stride()[:2],
        call.kv.stride(0),
        call.indices.stride(),
        queries,
        heads,
        call.kv.shape[0],
        device=call.q.device,
        num_warps=settings.num_warps,
        num_stages=settings.num_stages,
        TOPK=call.indices.shape[1],
        ROPE=dim - LATENT.value,
        BLOCK_M=settings.block_m,
        BLOCK_N=settings.block_n,
        CHUNK=settings.chunk,
        SPLITS=splits,
        FP8_PV=call.fp8_pv,
        PDL=pdl,
    )
