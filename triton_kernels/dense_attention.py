"""Dense causal attention: which schedule and which launch settings a call takes.

Long queries run in one pass over their keys. Few queries (max_seqlen_q <= 16) run in one pass too where the requests fill the GPU; where they
do not, the keys are split, and a second kernel joins the parts. Either choice follows from shapes and host bounds alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from m3attn.batch import DECODE_MAX_SEQLEN_Q
from m3attn.calls import DenseAttentionCall
from m3attn.dtypes import is_fp8
from m3attn.problem import arch_number
from m3attn.triton_kernels.dense_decode import dense_decode_kernel
from m3attn.triton_kernels.dense_prefill import dense_prefill_kernel
from m3attn.triton_kernels.launch import cdiv, current_arch, launch, next_power_of_2
from m3attn.triton_kernels.merge_splits import merge_splits
from m3attn.triton_kernels.rows import block_b, num_row_tiles
from m3attn.workspace import WorkShape, carve, workspace_limit


@dataclass(frozen=True, slots=True)
class Settings:
    """Launch settings of either kernel.

    Attributes:
        block_m: query rows (tokens times heads of a group) of a tile, at most; fewer where a step has fewer.
        block_n: keys of a tile.
        num_warps, num_stages: as Triton takes them.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


MEASURED: dict[tuple[str, str, str, int], Settings] = {
    ("prefill", "sm_90", "half", 128): Settings(64, 64, 4, 3),
    ("prefill", "sm_90", "fp8", 128): Settings(128, 128, 8, 3),
    ("decode", "sm_90", "half", 128): Settings(32, 64, 4, 3),
    ("decode", "sm_90", "fp8", 128): Settings(32, 128, 4, 3),
}
"""(phase, arch, mode, head dim) -> the fastest settings found; `default_settings` covers the rest."""

CANDIDATES: dict[str, list[Settings]] = {
    "prefill": [Settings(128, n, 8, stages) for n, stages in ((32, 4), (64, 2), (64, 3), (64, 4), (128, 2), (128, 3))]
    + [Settings(64, n, 4, stages) for n, stages in ((64, 2), (64, 3), (128, 2))],
    "decode": [Settings(32, n, 4, stages) for n, stages in ((32, 4), (32, 7), (64, 3), (64, 4), (64, 6), (128, 2), (128, 3))]
    + [Settings(32, n, 8, stages) for n, stages in ((64, 4), (128, 2), (128, 3), (128, 4))],
    "verify": [Settings(m, n, m // 16, stages) for m in (64, 128) for n, stages in ((64, 2), (64, 3), (64, 4), (128, 2))],
}
"""What a sweep tries, per phase; what does not fit raises."""

SCRATCH = 4 << 10
"""Shared memory left for reductions and layout changes."""

settings_override: Settings | None = None
"""Set by a tuner to force one."""

SPLIT_PROGRAMS = 264
"""Programs a decode step is split into: two for each multiprocessor of an H200. One number for every GPU keeps the workspace a function of
shapes."""
MAX_SPLITS = 64
MIN_SPLIT_KEYS = 256


def mode_of(q: torch.Tensor, k: torch.Tensor, fp8_pv: bool) -> str:
    """`fp32`, `half`, `widen`, `fp8` or `fp8_pv`."""
    if is_fp8(q.dtype):
        return "fp8_pv" if fp8_pv else "fp8"
    if q.dtype == torch.float32:
        return "fp32"
    return "widen" if is_fp8(k.dtype) else "half"


def shared_memory(arch: str) -> int:
    """Bytes of shared memory a program may take."""
    number = arch_number(arch)
    if 90 <= number < 120:
        return 227 << 10
    return 163 << 10 if number in (80, 87) else 99 << 10


def default_settings(phase: str, arch: str, mode: str, head_dim: int) -> Settings:
    """As many keys in flight as shared memory holds, up to four tiles: for one prefill program a multiprocessor, two of decode or verify."""
    block_d = next_power_of_2(head_dim)
    wide = block_d > 128
    if mode == "fp32":
        return Settings(32, 32 if block_d <= 64 else 16, 4 if block_d <= 64 else 8, 1)
    # Wide heads take fewer keys and rows, and more warps, so that logits and accumulator stay in registers.
    few_rows = wide and (mode != "half" or not 90 <= arch_number(arch) < 120)
    rows = {"prefill": 64 if few_rows else 128, "verify": 64, "decode": 32}[phase]
    keys = 32 if wide else 64
    memory = shared_memory(arch) // (1 if phase == "prefill" else 2) - SCRATCH
    query_bytes, key_bytes = 2 if mode in ("half", "widen") else 1, 2 if mode == "half" else 1
    for block_m, block_n in ((rows, keys), (min(rows, 64), keys), (min(rows, 64), 32), (32, 32)):
        keys_and_values = 2 * block_n * block_d
        widened = 0 if mode == "half" else 2 * keys_and_values
        tiles = (memory - block_m * block_d * query_bytes - widened) // (keys_and_values * key_bytes)
        if tiles >= 2:
            break
    num_warps = 8 if block_m >= 64 and (wide or phase == "prefill") else 4
    return Settings(block_m, block_n, num_warps, min(max(tiles, 1), 3 if wide else 4) + (phase == "decode"))


def choose_settings(call: DenseAttentionCall) -> Settings:
    if settings_override is not None:
        return settings_override
    phase, group = call.batch.phase, call.q.shape[1] // call.k.shape[1]
    if phase == "verify" and call.batch.max_seqlen_q * group <= 32:
        phase = "decode"  # as few rows
    key = (phase, current_arch(call.q.device), mode_of(call.q, call.k, call.fp8_pv), call.q.shape[2])
    return MEASURED.get(key) or default_settings(*key)


def num_splits(shape: WorkShape) -> int:
    """Parts that the keys of each request are cut into; a power of two."""
    if shape.max_seqlen_q > DECODE_MAX_SEQLEN_Q or shape.tokens == 0 or shape.num_requests == 0:
        return 1
    programs = min(shape.tokens, shape.num_requests) * shape.num_kv_heads
    most = min(SPLIT_PROGRAMS // programs, MAX_SPLITS, shape.max_seqlen_k // MIN_SPLIT_KEYS, shape.limit // _partial_bytes(shape, 1, 1))
    return 1 << max(1, most).bit_length() - 1


def workspace_bytes(shape: WorkShape) -> int:
    """Bytes of scratch: the partial outputs and LSEs of one slice of tokens; 0 where nothing is split."""
    splits = num_splits(shape)
    return 0 if splits == 1 else _partial_bytes(shape, splits, _slice_rows(shape, splits))


def _partial_bytes(shape: WorkShape, splits: int, rows: int) -> int:
    values = splits * rows * shape.num_q_heads
    return cdiv(values * shape.head_dim * 4, 256) * 256 + cdiv(values * 4, 256) * 256


def _slice_rows(shape: WorkShape, splits: int) -> int:
    return max(1, min(shape.tokens, shape.limit // _partial_bytes(shape, splits, 1)))


def dense_attention(call: DenseAttentionCall) -> None:
    """Fill `call.out` and `call.lse`."""
    if call.q.shape[0] == 0:
        return
    if call.batch.num_requests == 0 or call.k.shape[0] == 0:
        call.out.zero_()
        if call.lse is not None:
            call.lse.fill_(float("-inf"))
        return
    batch, tokens = call.batch, call.q.shape[0]
    shape = WorkShape(
        tokens=tokens,
        num_requests=batch.num_requests,
        num_q_heads=call.q.shape[1],
        num_kv_heads=call.k.shape[1],
        num_index_heads=0,
        head_dim=call.q.shape[2],
        topk=0,
        max_seqlen_q=batch.max_seqlen_q,
        max_seqlen_k=batch.max_seqlen_k,
        block_size=batch.block_size,
        limit=workspace_limit(),
    )
    splits = num_splits(shape)
    if splits == 1:
        _one_pass(call)
        return
    slice_rows = _slice_rows(shape, splits)
    for row_begin in range(0, tokens, slice_rows):
        _split_keys(call, splits, row_begin, min(row_begin + slice_rows, tokens))


def _tile_arguments(call: DenseAttentionCall) -> dict[str, Any]:
    """What both kernels take: compile-time sizes and launch options."""
    settings = choose_settings(call)
    group = call.q.shape[1] // call.k.shape[1]
    block_m = settings.block_m
    if call.batch.phase != "prefill":
        block_m = min(block_m, max(16, next_power_of_2(call.batch.max_seqlen_q * group)))
    return {
        "num_warps": settings.num_warps,
        "num_stages": settings.num_stages,
        "PAGE_SIZE": call.batch.page_size,
        "GROUP": group,
        "HEAD_DIM": call.q.shape[2],
        "FP8_PV": call.fp8_pv,
        "BLOCK_T": min(block_m // group, max(1, call.batch.max_seqlen_q)),
        "BLOCK_M": block_m,
        "BLOCK_N": settings.block_n,
        "BLOCK_D": next_power_of_2(call.q.shape[2]),
        "BLOCK_B": block_b(call.batch),
    }


def _one_pass(call: DenseAttentionCall) -> None:
    batch, tiles = call.batch, _tile_arguments(call)
    launch(
        dense_prefill_kernel,
        (num_row_tiles(call.q.shape[0], batch.num_requests, tiles["BLOCK_T"]), call.k.shape[1]),
        call.q,
        call.k,
        call.v,
        call.sink_key,
        call.out,
        call.lse,
        batch.page_table,
        batch.seq_lens,
        batch.cu_seqlens_q,
        call.q_scale.tensor,
        call.k_scale.tensor,
        call.v_scale.tensor,
        call.sm_scale * call.q_scale.value,
        call.k_scale.value,
        call.v_scale.value,
        call.q.stride(),
        call.k.stride(),
        call.v.stride(),
        call.sink_key.stride(0) if call.sink_key is not None else 0,
        call.out.stride(),
        call.lse.stride() if call.lse is not None else (0, 0),
        batch.page_table.stride(0),
        batch.num_requests,
        call.q.shape[0],
        batch.max_seqlen_k,
        batch.page_table.shape[1],
        call.k.shape[0],
        device=call.q.device,
        **tiles,
    )


def _split_keys(call: DenseAttentionCall, splits: int, row_begin: int, row_end: int) -> None:
    batch, tiles = call.batch, _tile_arguments(call)
    rows, (_, num_q_heads, head_dim) = row_end - row_begin, call.q.shape
    assert call.workspace is not None, "workspace: the runtime gives what workspace_bytes asks for"
    partial_out, offset = carve(call.workspace, 0, (splits, rows, num_q_heads, head_dim), torch.float32)
    partial_lse, _ = carve(call.workspace, offset, (splits, rows, num_q_heads), torch.float32)
    pdl = arch_number(current_arch(call.q.device)) >= 90
    launch(
        dense_decode_kernel,
        (num_row_tiles(rows, batch.num_requests, tiles["BLOCK_T"]), call.k.shape[1], splits),
        call.q,
        call.k,
        call.v,
        partial_out,
        partial_lse,
        batch.page_table,
        batch.seq_lens,
        batch.cu_seqlens_q,
        call.q_scale.tensor,
        call.k_scale.tensor,
        call.sm_scale * call.q_scale.value,
        call.k_scale.value,
        call.q.stride(),
        call.k.stride(),
        call.v.stride(),
        batch.page_table.stride(0),
        batch.num_requests,
        row_begin,
        row_end,
        batch.max_seqlen_k,
        batch.page_table.shape[1],
        call.k.shape[0],
        num_q_heads,
        device=call.q.device,
        SPLITS=splits,
        PDL=pdl,
        **tiles,
    )
    merge_splits(
        partial_out,
        partial_lse,
        call.out[row_begin:row_end],
        call.lse[row_begin:row_end] if call.lse is not None else None,
        v_scale=call.v_scale,
        sink_key=call.sink_key,
        q=call.q[row_begin:row_end],
        sm_scale=call.sm_scale,
        q_scale=call.q_scale,
        pdl=pdl,
    )
