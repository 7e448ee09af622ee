"""What sparse prefill and sparse decode share: walking a row's block ids, and attention over the keys they name."""

import triton
import triton.language as tl

from m3attn.triton_kernels.dense_tiles import load_rows, tile_offsets, tile_pages
from m3attn.triton_kernels.fp8 import finish_values, query_key_dot, weighted_value_pairs, weighted_values
from m3attn.triton_kernels.primitives import finish_softmax, online_softmax


@triton.jit
def load_ids(ids_ptr, ids_stride, TOPK: tl.constexpr, PADDED_TOPK: tl.constexpr):
    """A row's ids, [PADDED_TOPK], -1 behind the last. Asked for before the row's request is known, so that both waits are one."""
    entries = tl.arange(0, PADDED_TOPK)
    return tl.load(ids_ptr + entries.to(tl.int64) * ids_stride, mask=entries < TOPK, other=-1)


@triton.jit
def entries_to_walk(blocks, visible, BLOCK_SIZE: tl.constexpr):
    """How many leading entries of a row's ids hold every usable one; ids in any order, others in between."""
    usable = (blocks >= 0) & (blocks < tl.cdiv(visible, BLOCK_SIZE))
    return tl.max(tl.where(usable, tl.arange(0, blocks.shape[0]) + 1, 0), axis=0)


@triton.jit
def selected_tile(ids_ptr, ids_stride, step, end_step, visible, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """First key of tile `step` of the selected blocks; `visible`, so that no key follows, where its id is unusable."""
    TILES: tl.constexpr = BLOCK_SIZE // BLOCK_N
    block = tl.load(ids_ptr + tl.cast(step // TILES, tl.int64) * ids_stride, mask=step < end_step, other=-1)
    usable = (block >= 0) & (block < tl.cdiv(visible, BLOCK_SIZE))
    return tl.where(usable, tl.where(usable, block, 0) * BLOCK_SIZE + step % TILES * BLOCK_N, visible)


@triton.jit
def attend_selected(
    q,  # [M, BLOCK_D]
    k_ptr,  # [pages, Hkv, page_size, D]
    v_ptr,  # the same, or fp8 values two at a time: uint16 [pages, Hkv, page_size, D / 2]
    ids_ptr,  # [K], of this row and group
    page_table_ptr,
    k_strides,
    v_strides,
    ids_stride,
    page_table_stride,
    max_pages,
    num_pages,
    request,
    kv_head,
    begin_step,  # tiles of BLOCK_N keys, counted through the entries of ids
    end_step,
    visible,  # keys that the query sees: its position + 1
    scale,  # of the logits, log2 e included
    BLOCK_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FP8_PV: tl.constexpr,
):
    """(output [M, BLOCK_D], natural-log LSE [M]) of one query's heads over tiles [begin_step, end_step) of its selected blocks."""
    M: tl.constexpr = q.shape[0]
    PAIRS: tl.constexpr = v_ptr.dtype.element_ty == tl.uint16
    COLUMNS: tl.constexpr = BLOCK_D // 2 if PAIRS else BLOCK_D
    COLUMN_DIM: tl.constexpr = HEAD_DIM // 2 if PAIRS else HEAD_DIM
    running_max = tl.full((M,), float("-inf"), tl.float32)
    running_sum = tl.zeros((M,), tl.float32)
    accumulator = tl.zeros((M, COLUMNS), tl.float32)
    odd_accumulator = tl.zeros((M, COLUMNS), tl.float32)  # only with PAIRS, where `accumulator` has the even columns
    offs_n = tl.arange(0, BLOCK_N)
    k_ptr += kv_head.to(tl.int64) * k_strides[1]
    v_ptr += kv_head.to(tl.int64) * v_strides[1]

    start = selected_tile(ids_ptr, ids_stride, begin_step, end_step, visible, BLOCK_SIZE, BLOCK_N)
    page = tile_pages(page_table_ptr, page_table_stride, request, start, visible, max_pages, num_pages, PAGE_SIZE, BLOCK_N)
    for step in range(begin_step, end_step):
        is_visible = start + offs_n < visible  # [BLOCK_N]
        k = load_rows(k_ptr, tile_offsets(page, start, k_strides, PAGE_SIZE, BLOCK_N), is_visible, HEAD_DIM, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        logits = tl.where(is_visible[None, :], query_key_dot(q, k) * scale, float("-inf"))  # [M, BLOCK_N]
        p, rescale, running_max, running_sum = online_softmax(logits, running_max, running_sum)
        v = load_rows(v_ptr, tile_offsets(page, start, v_strides, PAGE_SIZE, BLOCK_N), is_visible, COLUMN_DIM, COLUMNS)  # [BLOCK_N, COLUMNS]
        accumulator *= rescale[:, None]
        if PAIRS:
            odd_accumulator *= rescale[:, None]
            accumulator, odd_accumulator = weighted_value_pairs(p, v, accumulator, odd_accumulator, k.dtype, FP8_PV)
        else:
            accumulator = weighted_values(p, v, accumulator, FP8_PV)
        # Looked up one tile ahead: ids and page table in front of the tile they lead to would put three memory latencies in each step.
        start = selected_tile(ids_ptr, ids_stride, step + 1, end_step, visible, BLOCK_SIZE, BLOCK_N)
        page = tile_pages(page_table_ptr, page_table_stride, request, start, visible, max_pages, num_pages, PAGE_SIZE, BLOCK_N)

    if PAIRS:
        accumulator = tl.interleave(accumulator, odd_accumulator)
    output, lse = finish_softmax(accumulator, running_max, running_sum)
    return finish_values(output, FP8_PV), lse
