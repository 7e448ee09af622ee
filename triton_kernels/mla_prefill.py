"""Attention of ragged queries over ragged keys, one head a program: keys of 128 unrotated and 64 rotated dims, values of 128."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from m3attn.calls import MlaPrefillCall
from m3attn.dtypes import is_fp8
from m3attn.problem import arch_number
from m3attn.triton_kernels.dense_tiles import load_rows
from m3attn.triton_kernels.fp8 import add_query_key, add_weighted_values, finish_values
from m3attn.triton_kernels.launch import current_arch, launch, next_power_of_2
from m3attn.triton_kernels.primitives import LOG2E, find_request, finish_softmax, load_scale, online_softmax
from m3attn.triton_kernels.rows import num_row_tiles
from m3attn.triton_kernels.saturate import round_to

MMA_ROWS: dict[str, str | int | None] = {"mla_prefill_kernel": "BLOCK_M"}


@dataclass(frozen=True, slots=True)
class Settings:
    """Queries and keys of a tile, and how the kernel is launched."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


MEASURED: dict[tuple[str, str, int], Settings] = {}
"""(architecture, mode, key dim) -> the fastest settings found; `default_settings` covers the rest."""

CANDIDATES = [
    *(Settings(128, n, 8, stages) for n in (32, 64, 128) for stages in (2, 3, 4)),
    *(Settings(64, n, 4, stages) for n in (64, 128) for stages in (2, 3)),
]
"""What a GPU sweep tries; what does not fit raises."""

settings_override: Settings | None = None
"""Set by a tuner to force one."""


@triton.jit
def ragged_tile(cu_q_ptr, cu_k_ptr, num_requests, tile, num_rows, num_keys, BLOCK_M: tl.constexpr, BLOCK_B: tl.constexpr):
    """(first_row, end_row, first_position, first_key, key_len) of tile `tile` of BLOCK_M query rows; rows that no request owns have no keys.

    Offsets are clamped into the rows and keys there are. The last query of a request stands at its last key.
    """
    request = find_request(cu_q_ptr, num_requests, tile, 0, num_rows, BLOCK_M, BLOCK_B)
    is_padding = request >= num_requests
    following = tl.minimum(request + 1, num_requests)
    begin, end = tl.load(cu_q_ptr + request), tl.load(cu_q_ptr + following)
    begin = tl.minimum(tl.maximum(begin, 0), num_rows)
    end = tl.where(is_padding, num_rows, tl.minimum(end, num_rows))
    first_row = begin + (tile - (begin // BLOCK_M + request)) * BLOCK_M
    first_key = tl.minimum(tl.maximum(tl.load(cu_k_ptr + request), 0), num_keys)
    end_key = tl.minimum(tl.maximum(tl.load(cu_k_ptr + following), 0), num_keys)
    key_len = tl.where(is_padding, 0, tl.maximum(end_key - first_key, 0))
    return first_row, end, key_len - end + first_row, first_key, key_len


@triton.jit
def attend_keys(
    q,  # [BLOCK_M, MAIN]
    q_rest,  # [BLOCK_M, REST] or None
    accumulator,  # [BLOCK_M, BLOCK_V] fp32
    running_max,  # [BLOCK_M]
    running_sum,  # [BLOCK_M]
    positions,  # [BLOCK_M], the last key that each row sees
    k_ptr,  # at the request's first key
    v_ptr,
    k_stride,
    v_stride,
    begin,  # first key, a multiple of BLOCK_N
    end,
    scale,
    MASKED: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FP8_PV: tl.constexpr,
):
    """Take keys [begin, end) into the state. Unmasked, every row sees all of them; MASKED, a row sees those up to its position."""
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        in_range = keys < end
        is_key = in_range if MASKED else None
        k_rows, v_rows = keys.to(tl.int64) * k_stride, keys.to(tl.int64) * v_stride
        logits = tl.zeros([q.shape[0], BLOCK_N], tl.float32)  # [BLOCK_M, BLOCK_N]
        logits = add_query_key(q, load_rows(k_ptr, k_rows, is_key, MAIN, MAIN), logits)
        if REST > 0:
            logits = add_query_key(q_rest, load_rows(k_ptr + MAIN, k_rows, is_key, REST, REST), logits)
        logits *= scale
        if MASKED:
            logits = tl.where((keys[None, :] <= positions[:, None]) & in_range[None, :], logits, float("-inf"))
        p, rescale, running_max, running_sum = online_softmax(logits, running_max, running_sum)
        v = load_rows(v_ptr, v_rows, is_key, V_DIM, BLOCK_V)  # [BLOCK_N, BLOCK_V]
        accumulator = add_weighted_values(p, v, accumulator * rescale[:, None], FP8_PV)
    return accumulator, running_max, running_sum


@triton.jit
def mla_prefill_kernel(
    q_ptr,  # [T, H, MAIN + REST]
    k_ptr,  # [Tk, H, MAIN + REST]
    v_ptr,  # [Tk, H, V_DIM]
    out_ptr,  # [T, H, V_DIM]
    lse_ptr,  # [T, H] fp32 or None
    cu_q_ptr,  # [B + 1]
    cu_k_ptr,  # [B + 1]
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    sm_scale,
    q_scale,
    k_scale,
    v_scale,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    lse_strides,
    num_requests,
    num_rows,
    num_keys,
    CAUSAL: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr,
    FP8_PV: tl.constexpr,
):
    # The last tiles of a request see the most keys: they start first, so that the short ones fill the end of the launch.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    first_row, end_row, first_position, first_key, key_len = ragged_tile(cu_q_ptr, cu_k_ptr, num_requests, tile, num_rows, num_keys, BLOCK_M, BLOCK_B)
    offs_m = tl.arange(0, BLOCK_M)
    rows = (first_row + offs_m).to(tl.int64)  # [BLOCK_M]
    is_row = rows < end_row
    positions = first_position + offs_m if CAUSAL else key_len + offs_m
    q_rows = rows * q_strides[0] + head * q_strides[1]
    q = load_rows(q_ptr, q_rows, is_row, MAIN, MAIN)  # [BLOCK_M, MAIN]
    q_rest = load_rows(q_ptr + MAIN, q_rows, is_row, REST, REST) if REST > 0 else None  # [BLOCK_M, REST]
    k_ptr += first_key.to(tl.int64) * k_strides[0] + head * k_strides[1]
    v_ptr += first_key.to(tl.int64) * v_strides[0] + head * v_strides[1]
    scale = tl.cast(sm_scale, tl.float32) * load_scale(q_scale, q_scale_ptr) * load_scale(k_scale, k_scale_ptr) * LOG2E

    accumulator = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    seen_by_one = tl.maximum(tl.minimum(first_position + BLOCK_M, key_len), 0) if CAUSAL else key_len
    seen_by_one = tl.where(first_row < end_row, seen_by_one, 0)
    seen_by_all = tl.minimum(first_position + 1, seen_by_one) if CAUSAL else seen_by_one
    seen_by_all = tl.maximum(seen_by_all, 0) // BLOCK_N * BLOCK_N
    for MASKED in tl.static_range(2):
        accumulator, running_max, running_sum = attend_keys(
            q,
            q_rest,
            accumulator,
            running_max,
            running_sum,
            positions,
            k_ptr,
            v_ptr,
            k_strides[0],
            v_strides[0],
            seen_by_all if MASKED else 0,
            seen_by_one if MASKED else seen_by_all,
            scale,
            MASKED,
            MAIN,
            REST,
            V_DIM,
            BLOCK_N,
            BLOCK_V,
            FP8_PV,
        )
    output, lse = finish_softmax(accumulator, running_max, running_sum)
    output = finish_values(output, FP8_PV) * load_scale(v_scale, v_scale_ptr)
    offs_v = tl.arange(0, BLOCK_V)
    out_pointers = out_ptr + (rows * out_strides[0] + head * out_strides[1])[:, None] + offs_v[None, :]
    tl.store(out_pointers, round_to(output, out_ptr.dtype.element_ty), mask=is_row[:, None] & (offs_v < V_DIM)[None, :])
    if lse_ptr is not None:
        tl.store(lse_ptr + rows * lse_strides[0] + head * lse_strides[1], lse, mask=is_row)


def mode_of(q: torch.Tensor, fp8_pv: bool) -> str:
    """`fp32`, `half`, `fp8` or `fp8_pv`."""
    if is_fp8(q.dtype):
        return "fp8_pv" if fp8_pv else "fp8"
    return "fp32" if q.dtype == torch.float32 else "half"


def default_settings(arch: str, mode: str, key_dim: int, value_dim: int) -> Settings:
    """Tiles whose keys and values in flight fit shared memory (227, 163 or 99 KB) and whose logits and outputs stay in registers."""
    number = arch_number(arch)
    wide = max(key_dim, value_dim) > 192 or value_dim > 128
    if mode == "fp32":
        return Settings(32, 16, 8, 1)
    if number in (86, 89) or number >= 120:
        return Settings(64, 32, 8 if wide else 4, 2)
    if number < 90:
        return Settings(64, 32, 8, 2) if wide else Settings(128, 32, 8, 2)
    return Settings(64, 32, 8, 3) if wide else Settings(128, 64, 8, 3)


def mla_prefill(call: MlaPrefillCall) -> None:
    """Fill call.out and call.lse."""
    tokens, heads, key_dim = call.q.shape
    value_dim, num_requests = call.v.shape[2], call.cu_seqlens_q.shape[0] - 1
    if tokens == 0:
        return
    if num_requests == 0:
        call.out.zero_()
        if call.lse is not None:
            call.lse.fill_(float("-inf"))
        return
    arch, mode = current_arch(call.q.device), mode_of(call.q, call.fp8_pv)
    settings = settings_override or MEASURED.get((arch, mode, key_dim)) or default_settings(arch, mode, key_dim, value_dim)
    # 192 as 128 and 64: both are whole tensor-core operands, and the longest sum that fp8 takes.
    main = key_dim if key_dim == next_power_of_2(key_dim) else next_power_of_2(key_dim) // 2
    launch(
        mla_prefill_kernel,
        (num_row_tiles(tokens, num_requests, settings.block_m), heads),
        call.q,
        call.k,
        call.v,
        call.out,
        call.lse,
        call.cu_seqlens_q,
        call.cu_seqlens_k,
        call.q_scale.tensor,
        call.k_scale.tensor,
        call.v_scale.tensor,
        call.sm_scale,
        call.q_scale.value,
        call.k_scale.value,
        call.v_scale.value,
        call.q.stride()[:2],
        call.k.stride()[:2],
        call.v.stride()[:2],
        call.out.stride()[:2],
        (0, 0) if call.lse is None else call.lse.stride(),
        num_requests,
        tokens,
        call.k.shape[0],
        device=call.q.device,
        num_warps=settings.num_warps,
        num_stages=settings.num_stages,
        CAUSAL=call.causal,
        MAIN=main,
        REST=key_dim - main,
        V_DIM=value_dim,
        BLOCK_M=settings.block_m,
        BLOCK_N=settings.block_n,
        BLOCK_V=next_power_of_2(value_dim),
        BLOCK_B=min(1024, max(16, next_power_of_2(num_requests))),
        FP8_PV=call.fp8_pv,
    )
