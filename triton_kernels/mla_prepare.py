"""What `mla_prefill` owns before it runs: q, k and v rotated and quantised, and the step's tokens written to the latent cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from m3attn.calls import MlaRopeQuantizeCall, PreparePrefillQkvCall, QuantizeFp8Call
from m3attn.dtypes import is_fp8
from m3attn.triton_kernels.launch import launch, next_power_of_2
from m3attn.triton_kernels.mla_quantize import mla_rope_quantize, rotated_rows, store_rounded
from m3attn.triton_kernels.primitives import widen
from m3attn.triton_kernels.quantize import quantize_fp8
from m3attn.triton_kernels.saturate import divisor

MMA_ROWS: dict[str, str | int | None] = {"latent_insert_kernel": None}


@triton.jit
def latent_insert_kernel(
    latent_ptr,  # [T, LATENT]
    k_pe_ptr,  # [T, ROPE]
    positions_ptr,  # [T]
    cos_sin_ptr,  # [max_position, ROPE]
    slots_ptr,  # [T]
    cache_ptr,  # [pages, page_size, LATENT + ROPE]
    scale,
    scale_ptr,
    latent_stride,
    k_pe_stride,
    cos_sin_stride,
    positions_stride,
    slots_stride,
    cache_strides,
    max_position,
    capacity,
    page_size,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
):
    """One token a program; a slot outside [0, capacity) or a position outside the table writes nothing."""
    token = tl.program_id(0).to(tl.int64) + tl.zeros([1, 1], tl.int64)  # [1, 1]
    position = tl.load(positions_ptr + token * positions_stride)
    slot = tl.load(slots_ptr + token * slots_stride).to(tl.int64)
    in_table = (position >= 0) & (position < max_position)
    is_written = in_table & (slot >= 0) & (slot < capacity)
    slot = tl.where(is_written, slot, 0)
    row = cache_ptr + slot // page_size * cache_strides[0] + slot % page_size * cache_strides[1]
    cos_sin_row = cos_sin_ptr + tl.where(in_table, position, 0).to(tl.int64) * cos_sin_stride

    offs_l = tl.arange(0, BLOCK_LATENT)[None, :]
    offs_r = tl.arange(0, BLOCK_ROPE)[None, :]
    latent_mask = is_written & (offs_l < LATENT)
    latent = tl.load(latent_ptr + token * latent_stride + offs_l, mask=latent_mask, other=0.0)  # [1, BLOCK_LATENT]
    k_pe = rotated_rows(k_pe_ptr + token * k_pe_stride, is_written, cos_sin_row, in_table, ROPE, BLOCK_ROPE, INTERLEAVED)  # [1, BLOCK_ROPE]
    store_rounded(row + offs_l, widen(latent), scale, scale_ptr, latent_mask)
    store_rounded(row + LATENT + offs_r, k_pe, scale, scale_ptr, is_written & (offs_r < ROPE))


def insert_latent(call: PreparePrefillQkvCall) -> None:
    """Write latent and rotated k_pe, each divided by the cache's scale and rounded once, to the tokens' slots."""
    latent, rope = call.latent.shape[1], call.k_pe.shape[1]
    launch(
        latent_insert_kernel,
        (call.latent.shape[0],),
        call.latent,
        call.k_pe,
        call.positions,
        call.cos_sin,
        call.slots,
        call.cache,
        *divisor(call.cache_scale),
        call.latent.stride(0),
        call.k_pe.stride(0),
        call.cos_sin.stride(0),
        call.positions.stride(0),
        call.slots.stride(0),
        call.cache.stride()[:2],
        call.cos_sin.shape[0],
        call.cache.shape[0] * call.cache.shape[1],
        call.cache.shape[1],
        device=call.latent.device,
        num_warps=1,
        num_stages=1,
        LATENT=latent,
        ROPE=rope,
        INTERLEAVED=call.interleaved,
        BLOCK_LATENT=next_power_of_2(latent),
        BLOCK_ROPE=next_power_of_2(rope),
    )


def prepare_prefill_qkv(call: PreparePrefillQkvCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, k, v) in call.dtype; v itself where it needs no other dtype."""
    tokens, heads, nope = call.q_nope.shape
    shape, device = (tokens, heads, nope + call.q_pe.shape[2]), call.q_nope.device
    q, k = (torch.empty(shape, dtype=call.dtype, device=device) for _ in range(2))
    if tokens == 0:
        return q, k, call.v if call.v.dtype == call.dtype else torch.empty(call.v.shape, dtype=call.dtype, device=device)
    insert_latent(call)
    inputs = (call.q_nope, call.q_pe, call.k_nope, call.k_pe, call.positions, call.cos_sin, call.interleaved)
    mla_rope_quantize(MlaRopeQuantizeCall(*inputs, call.q_scale, call.k_scale, q, k))
    if not is_fp8(call.dtype):
        return q, k, call.v
    v = torch.empty(call.v.shape, dtype=call.dtype, device=device)
    quantize_fp8(QuantizeFp8Call(call.v, "static", call.v_scale, v, None, False))
    return q, k, v
