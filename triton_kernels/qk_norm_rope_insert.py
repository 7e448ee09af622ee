"""Per-head RMSNorm and rotary embedding of a packed row, and its keys and values into the paged caches, in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from m3attn.calls import QkNormRopeInsertCall
from m3attn.scales import Scale
from m3attn.triton_kernels.launch import cdiv, current_arch, launch, next_power_of_2
from m3attn.triton_kernels.primitives import widen
from m3attn.triton_kernels.saturate import divide_by_scale, divisor, round_to

MMA_ROWS: dict[str, str | int | None] = {"_norm_rope_insert_kernel": None}
HEAD_DIM = tl.constexpr(128)
SMALL_STEP = 256
"""Steps of at most this many tokens are latency-bound and take the `small` setting."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Heads of one token that a program of q handles, where they divide a token's, heads that any other program does, its warps, and registers that a
    thread may take, where the compiler would take more than is good."""

    q_rows: int
    rows: int
    num_warps: int
    registers: int | None = None


SETTINGS: dict[tuple[str, str], Setting] = {
    ("small", "any"): Setting(16, 16, 2),
    ("large", "any"): Setting(32, 16, 2),
    ("large fp8", "any"): Setting(32, 16, 2, registers=104),
}
"""By size of the step, with q stored as fp8 or not, and architecture; `any` where no measurement says otherwise."""
CANDIDATES = [
    Setting(q_rows, rows, warps, registers)
    for q_rows in (16, 32, 64)
    for rows in (16, 32)
    for warps in (2, 4)
    for registers in (None, 104)
    if q_rows >= rows >= 8 * warps
]
"""Eight heads a warp: fewer change a thread's share of a head, and with it the order in which squares add up; a single warp loads weights singly."""
settings_override: Setting | None = None
"""Set by a tuner to force one setting."""


class Rotation(NamedTuple):
    positions: Any  # [T]
    stride: Any
    cos_sin: Any  # [max_position, rotary_dim], cosines first
    table_stride: Any
    max_position: Any


class Target(NamedTuple):
    """Where a group of heads goes: strides (token, head) without slots, (page, head, token) with them."""

    out: Any  # None: in place
    strides: Any
    value: Any  # of the scale, as `saturate.divisor` gives it
    scale: Any
    slots: Any  # [T] or None
    slot_stride: Any
    capacity: Any


@triton.jit
def _load_parts(head, mask, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, TAIL_BLOCK: tl.constexpr):
    """The 128 elements at pointers `head` [R, 1], in fp32: the two halves of the rotary dims and the two halves of the rest.

    With rotary_dim 64 the four tiles have one shape and thus one layout, and nothing moves between threads but the sums of squares.
    """
    TAIL: tl.constexpr = HEAD_DIM // 2 - HALF
    offs_half = tl.arange(0, HALF_BLOCK)[None, :]
    offs_tail = tl.arange(0, TAIL_BLOCK)[None, :]
    first = widen(tl.load(head + offs_half, mask=mask & (offs_half < HALF), other=0.0))  # [R, HALF_BLOCK]
    second = widen(tl.load(head + HALF + offs_half, mask=mask & (offs_half < HALF), other=0.0))  # [R, HALF_BLOCK]
    third = widen(tl.load(head + 2 * HALF + offs_tail, mask=mask & (offs_tail < TAIL), other=0.0))  # [R, TAIL_BLOCK]
    fourth = widen(tl.load(head + 2 * HALF + TAIL + offs_tail, mask=mask & (offs_tail < TAIL), other=0.0))  # [R, TAIL_BLOCK]
    return first, second, third, fourth


@triton.jit
def _store_parts(head, mask, parts, value, scale, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, TAIL_BLOCK: tl.constexpr):
    """The inverse of `_load_parts`, divided by the scale and rounded once.

    A thread stores 8 elements in a run whatever their size. Were it 16 of fp8, every group of the kernel would take that layout, square sums would
    add up in another order, and an fp8 index cache would change the rounding of q and k.
    """
    TAIL: tl.constexpr = HEAD_DIM // 2 - HALF
    offs_half = tl.max_contiguous(tl.arange(0, HALF_BLOCK), 8)[None, :]
    offs_tail = tl.max_contiguous(tl.arange(0, TAIL_BLOCK), 8)[None, :]
    dtype: tl.constexpr = head.dtype.element_ty
    tl.store(head + offs_half, round_to(divide_by_scale(parts[0], value, scale), dtype), mask=mask & (offs_half < HALF))
    tl.store(head + HALF + offs_half, round_to(divide_by_scale(parts[1], value, scale), dtype), mask=mask & (offs_half < HALF))
    tl.store(head + 2 * HALF + offs_tail, round_to(divide_by_scale(parts[2], value, scale), dtype), mask=mask & (offs_tail < TAIL))
    tl.store(head + 2 * HALF + TAIL + offs_tail, round_to(divide_by_scale(parts[3], value, scale), dtype), mask=mask & (offs_tail < TAIL))


@triton.jit
def _slot_address(target, token, head, mask, PAGE_SIZE: tl.constexpr):
    """(pointers [R, 1] to `head` of each token's slot, whether the slot is inside the cache)."""
    slot = tl.load(target.slots + token * target.slot_stride, mask=mask, other=-1).to(tl.int64)
    address = target.out + slot // PAGE_SIZE * target.strides[0] + head.to(tl.int64) * target.strides[1] + slot % PAGE_SIZE * target.strides[2]
    return address, mask & (slot >= 0) & (slot < target.capacity)


@triton.jit
def _group_rows(tile, num_tokens, HEADS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """A group's rows are its T * HEADS heads, token by token: (token, head, whether there is one), of all rows [BLOCK_ROWS, 1].

    Where tiles divide a token's heads, a tile has one token: a scalar, and with it one position, one slot and one row of angles for the tile.
    """
    rows = tl.arange(0, BLOCK_ROWS)[:, None]
    if HEADS % BLOCK_ROWS == 0:
        TILES: tl.constexpr = HEADS // BLOCK_ROWS
        token, head, inside = (tile // TILES).to(tl.int64), tile % TILES * BLOCK_ROWS + rows, True
    else:
        row = tile * BLOCK_ROWS + rows
        token, head = (row // HEADS).to(tl.int64), row % HEADS
        inside = token < num_tokens
    return token, head, inside


@triton.jit
def _rotated_group(
    tile, qkv_ptr, qkv_stride, num_tokens, first_head, weight_ptr, rotation, target, eps,
    HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, TAIL_BLOCK: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate BLOCK_ROWS heads of a group, and store them at `target`, or in place without one."""
    token, head, inside = _group_rows(tile, num_tokens, HEADS, BLOCK_ROWS)
    source = qkv_ptr + token * qkv_stride + (first_head + head) * HEAD_DIM
    first, second, third, fourth = _load_parts(source, inside, HALF, HALF_BLOCK, TAIL_BLOCK)
    position = tl.load(rotation.positions + token * rotation.stride, mask=inside, other=-1).to(tl.int64)
    live = inside & (position >= 0) & (position < rotation.max_position)
    offs_half = tl.arange(0, HALF_BLOCK)[None, :]
    angle = rotation.cos_sin + position * rotation.table_stride + offs_half
    cos = widen(tl.load(angle, mask=live & (offs_half < HALF), other=0.0))  # [BLOCK_ROWS, HALF_BLOCK]
    sin = widen(tl.load(angle + HALF, mask=live & (offs_half < HALF), other=0.0))  # [BLOCK_ROWS, HALF_BLOCK]

    # Written as fma where a product meets a sum, so that every variant of this kernel contracts, and thus rounds, alike.
    square_sum = tl.sum(tl.fma(second, second, first * first), axis=1) + tl.sum(tl.fma(fourth, fourth, third * third), axis=1)
    inverse_rms = tl.div_rn(1.0, tl.sqrt_rn(tl.fma(square_sum, 1.0 / HEAD_DIM, eps)))[:, None]  # [BLOCK_ROWS, 1]
    # From L1, and only now: read with the rest they take registers while loads are in flight, and fewer programs fit.
    weight_1, weight_2, weight_3, weight_4 = _load_parts(weight_ptr + tl.zeros([1, 1], tl.int32), True, HALF, HALF_BLOCK, TAIL_BLOCK)
    first = first * inverse_rms * (1.0 + weight_1)
    second = second * inverse_rms * (1.0 + weight_2)
    third = third * inverse_rms * (1.0 + weight_3)
    fourth = fourth * inverse_rms * (1.0 + weight_4)
    parts = tl.fma(first, cos, -(second * sin)), tl.fma(second, cos, first * sin), third, fourth

    if target.out is None:
        tl.debug_barrier()  # a warp that repeats rows of another one must have read them before they change
        _store_parts(source, live, parts, None, None, HALF, HALF_BLOCK, TAIL_BLOCK)
    elif target.slots is None:
        address = target.out + token * target.strides[0] + head.to(tl.int64) * target.strides[1]
        _store_parts(address, live, parts, target.value, target.scale, HALF, HALF_BLOCK, TAIL_BLOCK)
        # Stores that hardly ever run cost less than a selection of every element.
        zero = tl.zeros([BLOCK_ROWS, 1], tl.float32)
        _store_parts(address, inside & ~live, (zero, zero, zero, zero), None, None, HALF, HALF_BLOCK, TAIL_BLOCK)
    else:
        address, is_stored = _slot_address(target, token, head, live, PAGE_SIZE)
        _store_parts(address, is_stored, parts, target.value, target.scale, HALF, HALF_BLOCK, TAIL_BLOCK)


@triton.jit
def _copied_group(
    tile, qkv_ptr, qkv_stride, num_tokens, first_head, rotation, target, HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr
):
    """Values into their cache: the same bytes where dtype and scale allow it, else divided by the scale and rounded once."""
    token, head, inside = _group_rows(tile, num_tokens, HEADS, BLOCK_ROWS)
    offs_d = tl.arange(0, HEAD_DIM)[None, :]
    values = tl.load(qkv_ptr + token * qkv_stride + (first_head + head) * HEAD_DIM + offs_d, mask=inside, other=0.0)  # [BLOCK_ROWS, 128]
    position = tl.load(rotation.positions + token * rotation.stride, mask=inside, other=-1).to(tl.int64)
    live = inside & (position >= 0) & (position < rotation.max_position)
    address, is_stored = _slot_address(target, token, head, live, PAGE_SIZE)
    dtype: tl.constexpr = target.out.dtype.element_ty
    if target.value is not None or values.dtype != dtype:
        values = round_to(divide_by_scale(widen(values), target.value, target.scale), dtype)
    tl.store(address + offs_d, values, mask=is_stored)


@triton.jit
def _norm_rope_insert_kernel(
    qkv_ptr, qkv_stride, num_tokens, rotation, eps, q_weight_ptr, k_weight_ptr, index_q_weight_ptr, index_k_weight_ptr,
    q_target, k_target, v_target, index_q_target, index_k_target,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, INDEX_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, INDEX_PAGE_SIZE: tl.constexpr,
    HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, TAIL_BLOCK: tl.constexpr, Q_ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Every BLOCK_ROWS tokens have their programs next to each other: tiles of q, of k, of v where there is a cache, of index_q, of index_k.

    A group in a stretch of its own would leave too few loads in flight where heads are few and tiles small.
    """
    K_BEGIN: tl.constexpr = Q_HEADS * BLOCK_ROWS // Q_ROWS
    V_BEGIN: tl.constexpr = K_BEGIN + KV_HEADS
    INDEX_Q_BEGIN: tl.constexpr = V_BEGIN if v_target.out is None else V_BEGIN + KV_HEADS
    INDEX_K_BEGIN: tl.constexpr = INDEX_Q_BEGIN + INDEX_HEADS
    TILES: tl.constexpr = INDEX_K_BEGIN if INDEX_HEADS == 0 else INDEX_K_BEGIN + 1
    block, part = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    if part < K_BEGIN:
        tile = block * K_BEGIN + part
        if tile * Q_ROWS < num_tokens * Q_HEADS:
            _rotated_group(
                tile, qkv_ptr, qkv_stride, num_tokens, 0, q_weight_ptr, rotation, q_target, eps,
                Q_HEADS, PAGE_SIZE, HALF, HALF_BLOCK, TAIL_BLOCK, Q_ROWS,
            )  # fmt: skip
    elif part < V_BEGIN:
        _rotated_group(
            block * KV_HEADS + part - K_BEGIN, qkv_ptr, qkv_stride, num_tokens, Q_HEADS, k_weight_ptr, rotation, k_target, eps,
            KV_HEADS, PAGE_SIZE, HALF, HALF_BLOCK, TAIL_BLOCK, BLOCK_ROWS,
        )  # fmt: skip
    elif part < INDEX_Q_BEGIN:
        if v_target.out is not None:
            _copied_group(
                block * KV_HEADS + part - V_BEGIN, qkv_ptr, qkv_stride, num_tokens, Q_HEADS + KV_HEADS, rotation, v_target,
                KV_HEADS, PAGE_SIZE, BLOCK_ROWS,
            )  # fmt: skip
    elif part < INDEX_K_BEGIN:
        if INDEX_HEADS > 0:
            _rotated_group(
                block * INDEX_HEADS + part - INDEX_Q_BEGIN, qkv_ptr, qkv_stride, num_tokens, Q_HEADS + 2 * KV_HEADS, index_q_weight_ptr, rotation,
                index_q_target, eps, INDEX_HEADS, PAGE_SIZE, HALF, HALF_BLOCK, TAIL_BLOCK, BLOCK_ROWS,
            )  # fmt: skip
    else:
        if INDEX_HEADS > 0:
            _rotated_group(
                block, qkv_ptr, qkv_stride, num_tokens, Q_HEADS + 2 * KV_HEADS + INDEX_HEADS, index_k_weight_ptr, rotation,
                index_k_target, eps, 1, INDEX_PAGE_SIZE, HALF, HALF_BLOCK, TAIL_BLOCK, BLOCK_ROWS,
            )  # fmt: skip


def qk_norm_rope_insert(call: QkNormRopeInsertCall) -> None:
    """Normalise and rotate q, k, index_q, index_k of every row, and insert k, v, index_k where there are caches.

    y = x * (1 / sqrt(mean(x^2) + eps)) * (1 + w) in fp32, from left to right; then for i < rotary_dim / 2
    y[i], y[i + rotary_dim / 2] = fma(y[i], cos, -(y[i + rotary_dim / 2] * sin)), fma(y[i + rotary_dim / 2], cos, y[i] * sin);
    then / scale and one rounding. A scale of 1 divides nothing, and values then reach a cache of the row's dtype as the bytes they are.

    A row whose position is outside the table writes zeros to q_out and index_q_out, and nothing else: caches and the packed row stay.
    Rows that share a slot: every 16 bytes come from one of them.

    Weights and cos_sin have unit last stride, as do the heads of every output.
    """
    num_tokens = call.qkv.shape[0]
    if num_tokens == 0:
        return
    arch = current_arch(call.qkv.device)
    is_fp8 = call.q_out is not None and call.q_out.element_size() == 1
    size = "small" if num_tokens <= SMALL_STEP else "large fp8" if is_fp8 else "large"
    setting = settings_override or SETTINGS.get((size, arch)) or SETTINGS[(size, "any")]
    half = call.cos_sin.shape[1] // 2
    q_rows = setting.q_rows if call.num_q_heads % setting.q_rows == 0 else setting.rows
    tiles = call.num_q_heads * setting.rows // q_rows + call.num_kv_heads * (1 if call.v_cache is None else 2)
    if call.num_index_heads:
        tiles += call.num_index_heads + 1
    launch(
        _norm_rope_insert_kernel,
        (cdiv(num_tokens, setting.rows) * tiles,),
        call.qkv,
        call.qkv.stride(0),
        num_tokens,
        Rotation(call.positions, call.positions.stride(0), call.cos_sin, call.cos_sin.stride(0), call.cos_sin.shape[0]),
        call.eps,
        call.q_weight,
        call.k_weight,
        call.index_q_weight,
        call.index_k_weight,
        _rows_target(call.q_out, call.q_scale),
        _cache_target(call.k_cache, call.k_scale, call.slots),
        _cache_target(call.v_cache, call.v_scale, call.slots),
        _rows_target(call.index_q_out, call.index_q_scale),
        _cache_target(None if call.index_k_cache is None else call.index_k_cache[:, None], call.index_k_scale, call.index_slots),
        device=call.qkv.device,
        num_warps=setting.num_warps,
        num_stages=1,
        maxnreg=setting.registers,
        Q_HEADS=call.num_q_heads,
        KV_HEADS=call.num_kv_heads,
        INDEX_HEADS=call.num_index_heads,
        PAGE_SIZE=1 if call.k_cache is None else call.k_cache.shape[2],
        INDEX_PAGE_SIZE=1 if call.index_k_cache is None else call.index_k_cache.shape[1],
        HALF=half,
        HALF_BLOCK=next_power_of_2(half),
        TAIL_BLOCK=next_power_of_2(HEAD_DIM.value // 2 - half),
        Q_ROWS=q_rows,
        BLOCK_ROWS=setting.rows,
    )


IN_PLACE = Target(out=None, strides=None, value=None, scale=None, slots=None, slot_stride=None, capacity=None)


def _rows_target(out: torch.Tensor | None, scale: Scale) -> Target:
    if out is None:
        return IN_PLACE
    return Target(out, out.stride()[:2], *divisor(scale), slots=None, slot_stride=None, capacity=None)


def _cache_target(cache: torch.Tensor | None, scale: Scale, slots: torch.Tensor | None) -> Target:
    if cache is None or slots is None:  # a cache never comes without its slots
        return IN_PLACE
    return Target(cache, cache.stride()[:3], *divisor(scale), slots=slots, slot_stride=slots.stride(0), capacity=cache.shape[0] * cache.shape[2])
