"""Keys, values and index keys into the slots of a paged cache, in one launch: what `qk_norm_rope_insert` does with heads that are ready."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from m3attn.pools.insert import SlotValues
from m3attn.triton_kernels.launch import cdiv, current_arch, launch, next_power_of_2
from m3attn.triton_kernels.primitives import widen
from m3attn.triton_kernels.saturate import divide_by_scale, divisor, round_to

MMA_ROWS: dict[str, str | int | None] = {"insert_slots_kernel": None}


@dataclass(frozen=True, slots=True)
class Setting:
    """Heads that a program stores, and its warps."""

    block_rows: int
    num_warps: int


SETTINGS: dict[str, Setting] = {"any": Setting(32, 2)}
"""By architecture; `any` where no measurement says otherwise."""
CANDIDATES = [Setting(rows, warps) for rows in (4, 8, 16, 32, 64) for warps in (1, 2, 4) if rows >= 4 * warps]
settings_override: Setting | None = None
"""Set by a tuner to force one setting."""


class Group(NamedTuple):
    """Heads and the cache they go to; strides (token, head) of the heads, (page, head, slot) of the cache."""

    rows: Any  # [T, H, D]; None: no such group in this launch
    row_strides: Any
    cache: Any  # [pages, H, page_size, D]
    cache_strides: Any
    slots: Any  # [T]
    slot_stride: Any
    capacity: Any
    scale_value: Any  # as `saturate.divisor` gives it
    scale: Any


ABSENT = Group(*[None] * 9)


@triton.jit
def _store_group(
    tile, num_tokens, group, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr
):
    """The same bytes where dtype and scale allow it, else divided by the scale and rounded once."""
    row = tile.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]  # [BLOCK_ROWS, 1]
    token, head = row // HEADS, row % HEADS
    offs_d = tl.arange(0, BLOCK_D)[None, :]  # [1, BLOCK_D]
    slot = tl.load(group.slots + token * group.slot_stride, mask=token < num_tokens, other=-1).to(tl.int64)
    mask = (token < num_tokens) & (slot >= 0) & (slot < group.capacity) & (offs_d < DIM)
    values = tl.load(group.rows + token * group.row_strides[0] + head * group.row_strides[1] + offs_d, mask=mask, other=0.0)
    dtype: tl.constexpr = group.cache.dtype.element_ty
    if group.scale_value is not None or values.dtype != dtype:
        values = round_to(divide_by_scale(widen(values), group.scale_value, group.scale), dtype)
    address = group.cache + slot // PAGE_SIZE * group.cache_strides[0] + head * group.cache_strides[1] + slot % PAGE_SIZE * group.cache_strides[2]
    tl.store(address + offs_d, values, mask=mask)


@triton.jit
def insert_slots_kernel(
    k, v, index_k, num_tokens, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    INDEX_DIM: tl.constexpr, INDEX_BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr, INDEX_PAGE_SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Programs in turn: tiles of k, of v, of index_k; a group that is absent has none."""
    tile = tl.program_id(0)
    v_begin = tl.cdiv(num_tokens * KV_HEADS, BLOCK_ROWS)
    index_begin = 2 * v_begin
    if tile < v_begin:
        if k.rows is not None:
            _store_group(tile, num_tokens, k, KV_HEADS, HEAD_DIM, HEAD_BLOCK, PAGE_SIZE, BLOCK_ROWS)
    elif tile < index_begin:
        if v.rows is not None:
            _store_group(tile - v_begin, num_tokens, v, KV_HEADS, HEAD_DIM, HEAD_BLOCK, PAGE_SIZE, BLOCK_ROWS)
    else:
        if index_k.rows is not None:
            _store_group(tile - index_begin, num_tokens, index_k, 1, INDEX_DIM, INDEX_BLOCK, INDEX_PAGE_SIZE, BLOCK_ROWS)


def insert_slots(k: SlotValues | None, v: SlotValues | None, index_k: SlotValues | None) -> None:
    """Write each group's values / scale, rounded once to the cache's dtype, into its slots; a slot outside [0, capacity) writes nothing.

    k and v come together, with the same number of heads and dim; index_k has one head. Rows that share a slot: every 16 bytes come from one of them.
    """
    groups = [g for g in (k, v, index_k) if g is not None]
    if not groups or groups[0].values.shape[0] == 0:
        return
    num_tokens, device = groups[0].values.shape[0], groups[0].values.device
    setting = settings_override or SETTINGS.get(current_arch(device)) or SETTINGS["any"]
    kv_heads, head_dim = (0, 1) if k is None else k.values.shape[1:]
    index_dim = 1 if index_k is None else index_k.values.shape[2]
    tiles = 2 * cdiv(num_tokens * kv_heads, setting.block_rows) + (0 if index_k is None else cdiv(num_tokens, setting.block_rows))
    launch(
        insert_slots_kernel,
        (tiles,),
        _group(k),
        _group(v),
        _group(index_k),
        num_tokens,
        device=device,
        num_warps=setting.num_warps,
        num_stages=1,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HEAD_BLOCK=next_power_of_2(head_dim),
        INDEX_DIM=index_dim,
        INDEX_BLOCK=next_power_of_2(index_dim),
        PAGE_SIZE=1 if k is None else k.cache.shape[2],
        INDEX_PAGE_SIZE=1 if index_k is None else index_k.cache.shape[2],
        BLOCK_ROWS=setting.block_rows,
    )


def _group(group: SlotValues | None) -> Group:
    if group is None:
        return ABSENT
    values, cache, slots, scale = group
    capacity = cache.shape[0] * cache.shape[2]
    return Group(values, values.stride()[:2], cache, cache.stride()[:3], slots, slots.stride(0), capacity, *divisor(scale))
