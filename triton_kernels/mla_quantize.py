"""Queries and keys of multi-head latent attention as fp8: rotation, the shared part of a key copied to every head, one rounding, one write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from m3attn.calls import MlaKvPackQuantizeCall, MlaRopeQuantizeCall
from m3attn.triton_kernels.launch import cdiv, current_arch, launch, next_power_of_2
from m3attn.triton_kernels.primitives import widen
from m3attn.triton_kernels.saturate import divide_by_scale, divisor, round_to

MMA_ROWS: dict[str, str | int | None] = {"mla_rope_quantize_kernel": None, "mla_kv_pack_quantize_kernel": None}


@dataclass(frozen=True, slots=True)
class Setting:
    """Heads of a token that a program takes, at most, and its warps."""

    heads: int
    num_warps: int


SETTINGS: dict[tuple[str, str], Setting] = {
    ("rope", "any"): Setting(32, 8),
    ("pack", "any"): Setting(128, 8),
    ("pack few", "any"): Setting(32, 4),
}
"""By kernel and architecture; `any` where no measurement says otherwise."""
FEW_TOKENS = 1024
"""Up to here a program for every head of a token would leave multiprocessors with too few of them."""
CANDIDATES = [Setting(heads, warps) for heads in (8, 16, 32, 64, 128) for warps in (1, 2, 4, 8) if 4 * warps <= heads <= 16 * warps]
"""At most 16 heads a warp, and at least the four that `_tile` leaves it where heads have 128 elements."""
settings_override: Setting | None = None
"""Set by a tuner to force one setting."""


@triton.jit
def rotated_rows(rows, is_row, cos_sin_row, in_table, ROPE: tl.constexpr, BLOCK_ROPE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rotated [N, BLOCK_ROPE] fp32 of the rows at pointers `rows` [N, 1]; `cos_sin_row` [1, 1] points to the table's row: ROPE / 2 cosines,
    then sines.

    Dim d turns with its partner: y[d] = x[d] cos - x[partner] sin where d is the first of the pair, + where it is the second. Partners next to
    each other lie in one thread; those half a row apart are read a second time, from L1.
    """
    offs_r = tl.arange(0, BLOCK_ROPE)[None, :]
    mask = is_row & (offs_r < ROPE)
    x = widen(tl.load(rows + offs_r, mask=mask, other=0.0))  # [N, BLOCK_ROPE]
    if INTERLEAVED:
        offs_p = tl.arange(0, BLOCK_ROPE // 2)[None, :]
        in_table = in_table & (offs_p < ROPE // 2)
        cos = widen(tl.load(cos_sin_row + offs_p, mask=in_table, other=0.0))  # [1, BLOCK_ROPE / 2]
        sin = widen(tl.load(cos_sin_row + ROPE // 2 + offs_p, mask=in_table, other=0.0))
        first, second = tl.split(tl.reshape(x, [x.shape[0], BLOCK_ROPE // 2, 2]))
        result = tl.reshape(tl.join(first * cos - second * sin, second * cos + first * sin), x.shape)
    else:
        partner, turn, is_first = (offs_r + ROPE // 2) % ROPE, offs_r % (ROPE // 2), offs_r < ROPE // 2
        in_table = in_table & (offs_r < ROPE)
        y = widen(tl.load(rows + partner, mask=mask, other=0.0))
        cos = widen(tl.load(cos_sin_row + turn, mask=in_table, other=0.0))  # [1, BLOCK_ROPE]
        sin = widen(tl.load(cos_sin_row + ROPE // 2 + turn, mask=in_table, other=0.0))
        result = x * cos + y * tl.where(is_first, -sin, sin)
    return result


@triton.jit
def store_rounded(pointers, x, scale_value, scale_ptr, mask):
    """x / scale, rounded once to the pointers' type."""
    tl.store(pointers, round_to(divide_by_scale(x, scale_value, scale_ptr), pointers.dtype.element_ty), mask=mask)


@triton.jit
def _store_rounded_or_zero(pointers, x, scale_value, scale_ptr, mask, is_rotated):
    """`store_rounded`, and zeros where the position is outside the table: what to load need not wait for the position then."""
    store_rounded(pointers, x, scale_value, scale_ptr, mask & is_rotated)
    tl.store(pointers, tl.zeros([1, 1], tl.float32).to(pointers.dtype.element_ty), mask=mask & ~is_rotated)


@triton.jit
def mla_rope_quantize_kernel(
    q_nope_ptr,  # [T, H, NOPE]
    q_pe_ptr,  # [T, H, ROPE]
    k_nope_ptr,  # [T, H, NOPE]
    k_pe_ptr,  # [T, ROPE]
    positions_ptr,  # [T]
    cos_sin_ptr,  # [max_position, ROPE]
    q_out_ptr,  # [T, H, NOPE + ROPE], contiguous
    k_out_ptr,
    q_scale,
    q_scale_ptr,
    k_scale,
    k_scale_ptr,
    q_nope_strides,
    q_pe_strides,
    k_nope_strides,
    k_pe_stride,
    cos_sin_stride,
    num_heads,
    max_position,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_NOPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]  # [BLOCK_H, 1]
    is_head = heads < num_heads
    offs_n = tl.arange(0, BLOCK_NOPE)[None, :]
    offs_r = tl.arange(0, BLOCK_ROPE)[None, :]
    position = tl.load(positions_ptr + token + tl.zeros([1, 1], tl.int64))  # [1, 1]
    in_table = (position >= 0) & (position < max_position)
    cos_sin_row = cos_sin_ptr + tl.where(in_table, position, 0).to(tl.int64) * cos_sin_stride
    nope_mask = is_head & (offs_n < NOPE)
    rope_mask = is_head & (offs_r < ROPE)
    out_rows = (token * num_heads + heads) * (NOPE + ROPE)  # [BLOCK_H, 1]

    q_nope = tl.load(q_nope_ptr + token * q_nope_strides[0] + heads * q_nope_strides[1] + offs_n, mask=nope_mask, other=0.0)
    k_nope = tl.load(k_nope_ptr + token * k_nope_strides[0] + heads * k_nope_strides[1] + offs_n, mask=nope_mask, other=0.0)
    q_pe_rows = q_pe_ptr + token * q_pe_strides[0] + heads * q_pe_strides[1]
    q_pe = rotated_rows(q_pe_rows, is_head, cos_sin_row, in_table, ROPE, BLOCK_ROPE, INTERLEAVED)
    k_pe_row = k_pe_ptr + token * k_pe_stride + tl.zeros([1, 1], tl.int64)
    k_pe = rotated_rows(k_pe_row, True, cos_sin_row, in_table, ROPE, BLOCK_ROPE, INTERLEAVED)  # [1, BLOCK_ROPE]
    k_pe = tl.broadcast_to(k_pe, [BLOCK_H, BLOCK_ROPE])

    _store_rounded_or_zero(q_out_ptr + out_rows + offs_n, widen(q_nope), q_scale, q_scale_ptr, nope_mask, in_table)
    _store_rounded_or_zero(q_out_ptr + out_rows + NOPE + offs_r, q_pe, q_scale, q_scale_ptr, rope_mask, in_table)
    _store_rounded_or_zero(k_out_ptr + out_rows + offs_n, widen(k_nope), k_scale, k_scale_ptr, nope_mask, in_table)
    _store_rounded_or_zero(k_out_ptr + out_rows + NOPE + offs_r, k_pe, k_scale, k_scale_ptr, rope_mask, in_table)


@triton.jit
def mla_kv_pack_quantize_kernel(
    k_nope_ptr,  # [T, H, NOPE]
    k_pe_ptr,  # [T, ROPE]
    v_ptr,  # [T, H, V_DIM]
    k_out_ptr,  # [T, H, NOPE + ROPE], contiguous
    v_out_ptr,  # [T, H, V_DIM], contiguous
    k_scale,
    k_scale_ptr,
    v_scale,
    v_scale_ptr,
    k_nope_strides,
    k_pe_stride,
    v_strides,
    num_heads,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_NOPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]  # [BLOCK_H, 1]
    is_head = heads < num_heads
    offs_n = tl.arange(0, BLOCK_NOPE)[None, :]
    offs_r = tl.arange(0, BLOCK_ROPE)[None, :]
    offs_v = tl.arange(0, BLOCK_V)[None, :]
    nope_mask = is_head & (offs_n < NOPE)
    value_mask = is_head & (offs_v < V_DIM)
    k_rows = (token * num_heads + heads) * (NOPE + ROPE)
    v_rows = (token * num_heads + heads) * V_DIM

    k_nope = tl.load(k_nope_ptr + token * k_nope_strides[0] + heads * k_nope_strides[1] + offs_n, mask=nope_mask, other=0.0)
    v = tl.load(v_ptr + token * v_strides[0] + heads * v_strides[1] + offs_v, mask=value_mask, other=0.0)
    k_pe = tl.load(k_pe_ptr + token * k_pe_stride + offs_r, mask=offs_r < ROPE, other=0.0)  # [1, BLOCK_ROPE]
    k_pe = tl.broadcast_to(widen(k_pe), [BLOCK_H, BLOCK_ROPE])

    store_rounded(k_out_ptr + k_rows + offs_n, widen(k_nope), k_scale, k_scale_ptr, nope_mask)
    store_rounded(k_out_ptr + k_rows + NOPE + offs_r, k_pe, k_scale, k_scale_ptr, is_head & (offs_r < ROPE))
    store_rounded(v_out_ptr + v_rows + offs_v, widen(v), v_scale, v_scale_ptr, value_mask)


def mla_rope_quantize(call: MlaRopeQuantizeCall) -> None:
    """Fill call.q_out and call.k_out, every row; zeros where the position is outside the table."""
    tokens, heads, nope = call.q_nope.shape
    setting = _setting("rope", call.q_nope.device)
    launch(
        mla_rope_quantize_kernel,
        (tokens, cdiv(heads, _block_heads(setting, heads))),
        call.q_nope,
        call.q_pe,
        call.k_nope,
        call.k_pe,
        call.positions,
        call.cos_sin,
        call.q_out,
        call.k_out,
        *divisor(call.q_scale),
        *divisor(call.k_scale),
        call.q_nope.stride()[:2],
        call.q_pe.stride()[:2],
        call.k_nope.stride()[:2],
        call.k_pe.stride(0),
        call.cos_sin.stride(0),
        heads,
        call.cos_sin.shape[0],
        INTERLEAVED=call.interleaved,
        **_tile(setting, heads, nope, call.q_pe.shape[2], call.q_nope.device),
    )


def mla_kv_pack_quantize(call: MlaKvPackQuantizeCall) -> None:
    """Fill call.k_out and call.v_out, every row."""
    tokens, heads, nope = call.k_nope.shape
    setting = _setting("pack few" if tokens <= FEW_TOKENS else "pack", call.v.device)
    launch(
        mla_kv_pack_quantize_kernel,
        (tokens, cdiv(heads, _block_heads(setting, heads))),
        call.k_nope,
        call.k_pe,
        call.v,
        call.k_out,
        call.v_out,
        *divisor(call.k_scale),
        *divisor(call.v_scale),
        call.k_nope.stride()[:2],
        call.k_pe.stride(0),
        call.v.stride()[:2],
        heads,
        V_DIM=call.v.shape[2],
        BLOCK_V=next_power_of_2(call.v.shape[2]),
        **_tile(setting, heads, nope, call.k_pe.shape[1], call.v.device),
    )


def _setting(kernel: str, device: torch.device) -> Setting:
    return settings_override or SETTINGS.get((kernel, current_arch(device))) or SETTINGS[(kernel, "any")]


def _block_heads(setting: Setting, heads: int) -> int:
    return min(setting.heads, next_power_of_2(heads))


def _tile(setting: Setting, heads: int, nope: int, rope: int, device: torch.device) -> dict[str, Any]:
    """Launch options and the compile-time arguments that both kernels share; a tile of few heads takes fewer warps."""
    block_h, block_nope = _block_heads(setting, heads), next_power_of_2(nope)
    return {
        "device": device,
        "num_warps": max(1, min(setting.num_warps, block_h * block_nope // 512)),
        "num_stages": 1,
        "NOPE": nope,
        "ROPE": rope,
        "BLOCK_H": block_h,
        "BLOCK_NOPE": block_nope,
        "BLOCK_ROPE": next_power_of_2(rope),
    }
