"""What dense prefill and dense decode share: rows of queries times heads, and a run of key tiles read through the page table."""

import triton
import triton.language as tl

from m3attn.triton_kernels.fp8 import query_key_dot, weighted_values
from m3attn.triton_kernels.primitives import online_softmax, physical_page, widen


@triton.jit
def grouped_rows(first_row, end_row, kv_head, GROUP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr):
    """(token, row, head, is_row), each [BLOCK_M]: the heads of a group lie side by side, so that a key tile serves BLOCK_T tokens of all of them."""
    offs_m = tl.arange(0, BLOCK_M)
    token = offs_m // GROUP
    row = first_row + token
    head = kv_head * GROUP + offs_m % GROUP
    return token, row.to(tl.int64), head.to(tl.int64), (token < BLOCK_T) & (row < end_row)


@triton.jit
def load_rows(ptr, rows, is_row, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """[N, BLOCK_D] from offsets `rows` [N]; 0 where `is_row` is false (None: every row is read) and past HEAD_DIM."""
    offs_d = tl.arange(0, BLOCK_D)
    pointers = ptr + rows[:, None] + offs_d[None, :]
    is_dim = (offs_d < HEAD_DIM)[None, :]
    if HEAD_DIM == BLOCK_D:
        tile = tl.load(pointers) if is_row is None else tl.load(pointers, mask=is_row[:, None], other=0.0)
    else:
        tile = tl.load(pointers, mask=is_dim if is_row is None else is_row[:, None] & is_dim, other=0.0)
    return tile


@triton.jit
def tile_pages(page_table_ptr, page_table_stride, request, start, end, max_pages, num_pages, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Physical pages of keys start … start + BLOCK_N: one where a tile lies inside a page, else [BLOCK_N]; 0 for keys at or past `end`."""
    if PAGE_SIZE >= BLOCK_N:
        page = physical_page(page_table_ptr, page_table_stride, request, start // PAGE_SIZE, max_pages, num_pages, start < end)
    else:
        keys = start + tl.arange(0, BLOCK_N)
        page = physical_page(page_table_ptr, page_table_stride, request, keys // PAGE_SIZE, max_pages, num_pages, keys < end)
    return page


@triton.jit
def tile_offsets(page, start, strides, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Offsets [BLOCK_N] of the keys' rows in their pages; within one page only a scalar changes from tile to tile."""
    offs_n = tl.arange(0, BLOCK_N).to(tl.int64)
    first_slot = tl.cast(start % PAGE_SIZE, tl.int64)
    if PAGE_SIZE >= BLOCK_N:
        offsets = page * strides[0] + first_slot * strides[2] + offs_n * strides[2]
    else:
        offsets = page * strides[0] + (first_slot + offs_n) % PAGE_SIZE * strides[2]
    return offsets


@triton.jit
def attend_tiles(
    q,  # [BLOCK_M, BLOCK_D]
    accumulator,  # [BLOCK_M, BLOCK_D] fp32
    running_max,  # [BLOCK_M]
    running_sum,  # [BLOCK_M]
    positions,  # [BLOCK_M]
    k_ptr,
    v_ptr,
    k_strides,
    v_strides,
    page_table_ptr,
    page_table_stride,
    max_pages,
    num_pages,
    request,
    kv_head,
    begin,  # first key, a multiple of BLOCK_N
    end,
    scale,
    MASKED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FP8_PV: tl.constexpr,
):
    """Take keys [begin, end) into the state. Unmasked, every row sees all of them; MASKED, a row sees those up to its position.

    A masked tile reaches past `end`, where the cache may hold NaN: a logit is replaced, but 0 * NaN is NaN, so values there are read as 0.
    """
    offs_n = tl.arange(0, BLOCK_N)
    k_ptr += kv_head.to(tl.int64) * k_strides[1]
    v_ptr += kv_head.to(tl.int64) * v_strides[1]
    page = tile_pages(page_table_ptr, page_table_stride, request, begin, end, max_pages, num_pages, PAGE_SIZE, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        keys = start + offs_n  # [BLOCK_N]
        k = load_rows(k_ptr, tile_offsets(page, start, k_strides, PAGE_SIZE, BLOCK_N), None, HEAD_DIM, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        logits = query_key_dot(q, k) * scale  # [BLOCK_M, BLOCK_N]
        if MASKED:
            logits = tl.where((keys[None, :] <= positions[:, None]) & (keys < end)[None, :], logits, float("-inf"))
        p, rescale, running_max, running_sum = online_softmax(logits, running_max, running_sum)
        is_value = keys < end if MASKED else None
        v = load_rows(v_ptr, tile_offsets(page, start, v_strides, PAGE_SIZE, BLOCK_N), is_value, HEAD_DIM, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        if q.dtype == tl.float32:
            v = widen(v)
        accumulator = weighted_values(p, v, accumulator * rescale[:, None], FP8_PV)
        # Looked up one tile ahead: a lookup in front of the tile it leads to would put two memory latencies in each step of the pipeline.
        page = tile_pages(page_table_ptr, page_table_stride, request, start + BLOCK_N, end, max_pages, num_pages, PAGE_SIZE, BLOCK_N)
    return accumulator, running_max, running_sum
