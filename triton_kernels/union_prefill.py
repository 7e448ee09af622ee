"""Sparse prefill with keys shared among neighbours: a tile of tokens walks the union of the blocks they selected, each block read once for all.

Queries near each other select mostly the same blocks, so that a union is far shorter than its tokens' lists together, and tokens times heads
fill the 64 rows of Hopper's and Blackwell's matrix instructions. A row of a token that did not select a block sees none of its keys.
A first kernel writes every tile's union; the second attends, and gives each row the same bits whatever tile it stands in, as long as what the
union names is finite: weights of zero times NaN or infinity, of a live key that a neighbour selected, are NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from m3attn.batch import PagedBatch
from m3attn.calls import SparseAttentionCall
from m3attn.dtypes import is_fp8
from m3attn.problem import arch_number
from m3attn.triton_kernels.dense_tiles import grouped_rows, load_rows, tile_offsets, tile_pages
from m3attn.triton_kernels.fp8 import finish_values, query_key_dot, weighted_values
from m3attn.triton_kernels.launch import cdiv, current_arch, launch, next_power_of_2
from m3attn.triton_kernels.primitives import INT32_MAX, LOG2E, finish_softmax, load_scale, sink_share, tile_rows, widen
from m3attn.triton_kernels.rows import block_b, num_row_tiles
from m3attn.triton_kernels.sparse_attention import groups_to_widen, mode_of
from m3attn.triton_kernels.sparse_attention import sparse_attention as query_by_query
from m3attn.triton_kernels.sparse_attention import workspace_bytes as query_by_query_bytes
from m3attn.triton_kernels.widen_pages import widen_pages
from m3attn.workspace import WorkShape, carve, workspace_limit

MMA_ROWS: dict[str, str | int | None] = {"union_blocks_kernel": None, "union_prefill_kernel": "BLOCK_M"}

MAX_TILE_TOKENS = 32
"""One bit of a word a token."""

LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def union_blocks_kernel(
    ids_ptr,  # [Hkv, T, K]
    unions_ptr,  # [Hkv, tiles, 1 + ENTRIES] int64: whole << 32 | count, then `count` entries block << 32 | one bit a token, ascending
    seq_lens_ptr,  # [B]
    cu_seqlens_ptr,  # [B + 1]
    ids_strides,
    unions_strides,
    num_requests,
    row_begin,
    row_end,
    max_seqlen_k,
    TOPK: tl.constexpr,
    PADDED_TOPK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PADDED_T: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    _, first_row, end_row, first_position, seq_len = tile_rows(
        cu_seqlens_ptr, seq_lens_ptr, num_requests, tile, row_begin, row_end, max_seqlen_k, BLOCK_T, BLOCK_B
    )
    token = tl.arange(0, PADDED_T)
    entry = tl.arange(0, PADDED_TOPK)
    row = (first_row + token).to(tl.int64)
    visible = tl.maximum(tl.minimum(first_position + token + 1, seq_len), 0)  # [PADDED_T]
    is_id = ((token < BLOCK_T) & (row < end_row))[:, None] & (entry < TOPK)[None, :]
    pointers = ids_ptr + kv_head.to(tl.int64) * ids_strides[0] + row[:, None] * ids_strides[1] + entry[None, :].to(tl.int64) * ids_strides[2]
    blocks = tl.load(pointers, mask=is_id, other=-1)  # [PADDED_T, PADDED_TOPK]
    blocks = tl.where((blocks >= 0) & (blocks < tl.cdiv(visible, BLOCK_SIZE)[:, None]), blocks, INT32_MAX)

    unions_ptr += kv_head.to(tl.int64) * unions_strides[0] + tile.to(tl.int64) * unions_strides[1]
    # The first `whole` entries are blocks of which every token of the tile sees all keys, if it selected them.
    whole_blocks = tl.maximum(tl.minimum(first_position + 1, seq_len), 0) // BLOCK_SIZE
    count = 0
    whole = 0
    block = tl.min(blocks)
    while block != INT32_MAX:
        is_taken = blocks == block
        bits = tl.sum(tl.max(is_taken.to(tl.int32), axis=1) << token, axis=0)
        count += 1
        whole += (block < whole_blocks).to(tl.int32)
        tl.store(unions_ptr + count, block.to(tl.int64) << 32 | bits.to(tl.uint32).to(tl.int64))
        blocks = tl.where(is_taken, INT32_MAX, blocks)
        block = tl.min(blocks)
    tl.store(unions_ptr, tl.cast(whole, tl.int64) << 32 | tl.cast(count, tl.int64))


@triton.jit
def union_entry(union_ptr, step, end, TILES: tl.constexpr):
    """Entry of a union that tile `step` of BLOCK_N keys belongs to; 0, without a load, from `end` on."""
    return tl.load(union_ptr + 1 + step // TILES, mask=step < end, other=0)


@triton.jit
def first_key(entry, step, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Position of the first key of tile `step`, which lies in the block of `entry`."""
    return (entry >> 32).to(tl.int32) * BLOCK_SIZE + step % (BLOCK_SIZE // BLOCK_N) * BLOCK_N


@triton.jit
def member_softmax(products, is_member, is_seen, scale, running_max, running_sum, NEGATIVE_SCALE: tl.constexpr):
    """One step of `online_softmax` over products * scale [M, N] for the rows of `is_member` [M]; the others get p 0 and keep their state.

    A row is left out by a shift of +inf, and the scale joins the shift in one multiply-add: a key costs a row no more than in dense attention.
    A member sees at least one key: those of `is_seen` [M, N], all where that is None. The maximum starts finite, so that no row needs a check.
    """
    edge = float("inf") if NEGATIVE_SCALE else float("-inf")
    seen = products if is_seen is None else tl.where(is_seen, products, edge)
    peak = (tl.min(seen, axis=1) if NEGATIVE_SCALE else tl.max(seen, axis=1)) * scale  # [M]
    new_max = tl.where(is_member, tl.maximum(running_max, peak), running_max)
    rescale = tl.exp2(running_max - new_max)
    p = tl.exp2(products * scale - tl.where(is_member, new_max, float("inf"))[:, None])  # [M, N]
    if is_seen is not None:
        p = tl.where(is_seen, p, 0.0)
    return p, rescale, new_max, running_sum * rescale + tl.sum(p, axis=1)


@triton.jit
def attend_union(
    q,  # [BLOCK_M, BLOCK_D]
    accumulator,  # [BLOCK_M, BLOCK_D] fp32
    running_max,  # [BLOCK_M]
    running_sum,  # [BLOCK_M]
    token_bit,  # [BLOCK_M], the row's bit in an entry; 0 for a row of no token
    visible,  # [BLOCK_M], keys that the row sees
    tile_visible,  # the most of them
    k_ptr,
    v_ptr,
    union_ptr,
    k_strides,
    v_strides,
    page_table_ptr,
    page_table_stride,
    max_pages,
    num_pages,
    request,
    begin,  # tiles of BLOCK_N keys, counted through the entries of the union
    end,
    scale,  # of the logits, log2 e included
    MASKED: tl.constexpr,
    NEGATIVE_SCALE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FP8_PV: tl.constexpr,
):
    """Take tiles [begin, end) of a union into the state. MASKED, a row sees keys up to its position; else all rows see whole blocks."""
    TILES: tl.constexpr = BLOCK_SIZE // BLOCK_N
    offs_n = tl.arange(0, BLOCK_N)
    entry = union_entry(union_ptr, begin, end, TILES)
    bits, start = entry.to(tl.int32), first_key(entry, begin, BLOCK_SIZE, BLOCK_N)
    page = tile_pages(page_table_ptr, page_table_stride, request, start, tile_visible, max_pages, num_pages, PAGE_SIZE, BLOCK_N)
    entry = union_entry(union_ptr, begin + 1, end, TILES)
    for step in range(begin, end):
        is_member = (bits & token_bit) != 0  # [BLOCK_M]
        k = load_rows(k_ptr, tile_offsets(page, start, k_strides, PAGE_SIZE, BLOCK_N), None, BLOCK_D, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        products = query_key_dot(q, k)  # [BLOCK_M, BLOCK_N]
        is_seen = None
        if MASKED:
            is_member &= start < visible
            is_seen = (start + offs_n)[None, :] < visible[:, None]  # [BLOCK_M, BLOCK_N]
        p, rescale, running_max, running_sum = member_softmax(products, is_member, is_seen, scale, running_max, running_sum, NEGATIVE_SCALE)
        # Values that no row sees may be NaN, and 0 * NaN is NaN.
        is_value = start + offs_n < tile_visible if MASKED else None
        v = load_rows(v_ptr, tile_offsets(page, start, v_strides, PAGE_SIZE, BLOCK_N), is_value, BLOCK_D, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        if q.dtype == tl.float32:
            v = widen(v)
        accumulator = weighted_values(p, v, accumulator * rescale[:, None], FP8_PV)
        # Looked up ahead: entries and pages in front of the tile they lead to would put their latencies in each step.
        bits, start = entry.to(tl.int32), first_key(entry, step + 1, BLOCK_SIZE, BLOCK_N)
        page = tile_pages(page_table_ptr, page_table_stride, request, start, tile_visible, max_pages, num_pages, PAGE_SIZE, BLOCK_N)
        entry = union_entry(union_ptr, step + 2, end, TILES)
    return accumulator, running_max, running_sum


@triton.jit
def union_prefill_kernel(
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [pages, Hkv, page_size, D]
    v_ptr,
    unions_ptr,  # [Hkv, tiles, 1 + ENTRIES] int64, of union_blocks_kernel
    sink_key_ptr,  # [Hq, D] or None
    out_ptr,  # [T, Hq, D]
    lse_ptr,  # [T, Hq] or None
    page_table_ptr,  # [B, max_pages]
    seq_lens_ptr,  # [B]
    cu_seqlens_ptr,  # [B + 1]
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
    unions_strides,
    sink_key_strides,
    out_strides,
    lse_strides,
    page_table_stride,
    num_requests,
    row_begin,
    row_end,
    max_seqlen_k,
    max_pages,
    num_pages,
    BLOCK_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,  # BLOCK_T * GROUP, padded
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,  # the head dim, a power of two
    BLOCK_B: tl.constexpr,
    FP8_PV: tl.constexpr,
    NEGATIVE_SCALE: tl.constexpr,
):
    # Groups are the slow grid axis: programs that run together read one group's keys, which stay longer in the L2 cache. The last tiles of a
    # request, with the longest unions, start first, so that the short ones fill the end of the launch.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    request, first_row, end_row, first_position, seq_len = tile_rows(
        cu_seqlens_ptr, seq_lens_ptr, num_requests, tile, row_begin, row_end, max_seqlen_k, BLOCK_T, BLOCK_B
    )
    token, row, head, is_row = grouped_rows(first_row, end_row, kv_head, GROUP, BLOCK_T, BLOCK_M)
    token_bit = tl.where(is_row, 1 << token, 0)  # [BLOCK_M]
    visible = tl.where(is_row, tl.minimum(first_position + token + 1, seq_len), 0)  # [BLOCK_M]
    tile_visible = tl.max(visible, axis=0)
    q = load_rows(q_ptr, row * q_strides[0] + head * q_strides[1], is_row, BLOCK_D, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    query_scale = sm_scale * load_scale(q_scale, q_scale_ptr)
    key_scale = query_scale * load_scale(k_scale, k_scale_ptr) * LOG2E

    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    running_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    unions_ptr += kv_head.to(tl.int64) * unions_strides[0] + tile.to(tl.int64) * unions_strides[1]
    sizes = tl.load(unions_ptr)
    TILES: tl.constexpr = BLOCK_SIZE // BLOCK_N
    whole, steps = (sizes >> 32).to(tl.int32) * TILES, sizes.to(tl.int32) * TILES
    for MASKED in tl.static_range(2):
        accumulator, running_max, running_sum = attend_union(
            q,
            accumulator,
            running_max,
            running_sum,
            token_bit,
            visible,
            tile_visible,
            k_ptr + kv_head.to(tl.int64) * k_strides[1],
            v_ptr + kv_head.to(tl.int64) * v_strides[1],
            unions_ptr,
            k_strides,
            v_strides,
            page_table_ptr,
            page_table_stride,
            max_pages,
            num_pages,
            request,
            whole if MASKED else 0,
            steps if MASKED else whole,
            key_scale,
            MASKED,
            NEGATIVE_SCALE,
            BLOCK_SIZE,
            PAGE_SIZE,
            BLOCK_N,
            BLOCK_D,
            FP8_PV,
        )

    output, lse = finish_softmax(accumulator, running_max, running_sum)
    output = finish_values(output, FP8_PV) * load_scale(v_scale, v_scale_ptr)
    offs_d = tl.arange(0, BLOCK_D)
    if sink_key_ptr is not None:
        sink_pointers = sink_key_ptr + head[:, None] * sink_key_strides[0] + offs_d[None, :].to(tl.int64) * sink_key_strides[1]
        sink_key = tl.load(sink_pointers, mask=is_row[:, None], other=0.0)  # [BLOCK_M, BLOCK_D]
        output *= sink_share(q, sink_key, query_scale, lse)[:, None]
    out_pointers = out_ptr + (row * out_strides[0] + head * out_strides[1])[:, None] + offs_d[None, :]
    tl.store(out_pointers, output.to(out_ptr.dtype.element_ty), mask=is_row[:, None])
    if lse_ptr is not None:
        tl.store(lse_ptr + row * lse_strides[0] + head * lse_strides[1], lse, mask=is_row)


@dataclass(frozen=True, slots=True)
class Settings:
    """How the second kernel is launched.

    Attributes:
        block_m: rows of a tile, tokens times heads of a group.
        block_n: keys a step, at most; `fit` cuts it down to the block size and to shared memory.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


SETTINGS: dict[tuple[str, str], Settings] = {
    ("warpgroup", "half"): Settings(64, 64, 4, 3),
    ("warpgroup", "widen"): Settings(64, 64, 4, 3),
    ("warpgroup", "fp8"): Settings(64, 64, 4, 3),
    ("warpgroup", "fp32"): Settings(64, 16, 8, 1),
    ("warp", "half"): Settings(64, 32, 4, 3),
    ("warp", "widen"): Settings(64, 32, 4, 3),
    ("warp", "fp8"): Settings(64, 32, 4, 3),
    ("warp", "fp32"): Settings(64, 16, 8, 1),
}
"""(what multiplies, mode of the keys as the kernel reads them) -> settings; fp8_pv takes fp8's. Warpgroups of SM90 and SM100 read queries and
keys from shared memory, and 64 rows let two programs share a multiprocessor; elsewhere queries stand in registers, which leaves fewer for keys."""

CANDIDATES: dict[str, list[Settings]] = {
    "prefill": [Settings(64, n, 4, stages) for n, stages in ((32, 3), (32, 4), (32, 6), (64, 2), (64, 3), (64, 4), (128, 2), (128, 3))]
    + [Settings(128, n, 8, stages) for n, stages in ((64, 2), (64, 3), (64, 4), (128, 2), (128, 3))]
}
"""What a GPU sweep tries, by phase."""

settings_override: Settings | None = None
"""Set by a tuner: the settings of every launch, whatever the mode."""


def choose_settings(mode: str, arch: str) -> Settings:
    number = arch_number(arch)
    return settings_override or SETTINGS["warpgroup" if 90 <= number < 120 else "warp", mode]


def fit(settings: Settings, arch: str, row_bytes: int, key_bytes: int, block_size: int) -> Settings:
    """`settings`, shrunk until the queries and the keys in flight fit the architecture's shared memory.

    Args:
        row_bytes, key_bytes: of a query row, and of a key and its value, as they lie in shared memory.
    """
    number = arch_number(arch)
    # 99, 163 or 227 KB, less room for reductions and for weights on their way between warps.
    capacity = (94 if number in (86, 89) or number >= 120 else 155 if number < 90 else 219) << 10
    block_n, num_stages = min(settings.block_n, block_size), settings.num_stages
    while num_stages > 2 and settings.block_m * row_bytes + num_stages * block_n * key_bytes > capacity:
        num_stages -= 1
    while block_n > 16 and settings.block_m * row_bytes + num_stages * block_n * key_bytes > capacity:
        block_n //= 2
    return replace(settings, block_n=block_n, num_stages=num_stages)


@dataclass(frozen=True, slots=True)
class UnionPlan:
    """What the unions take.

    Attributes:
        tile_tokens: tokens of a tile.
        words: int64 words of the union of one tile and group, its length included.
        rows: query rows attended at a time; 0: not even one tile a request fits.
        nbytes: scratch for so many rows.
    """

    tile_tokens: int
    words: int
    rows: int
    nbytes: int


def plan_unions(settings: Settings, shape: WorkShape) -> UnionPlan:
    """Unions of all rows, or of as many at a time as a quarter of the limit takes."""
    tokens = min(MAX_TILE_TOKENS, settings.block_m // (shape.num_q_heads // shape.num_kv_heads))
    words = 1 + min(tokens * shape.topk, shape.num_blocks)
    tile_bytes = words * shape.num_kv_heads * 8
    rows = max(0, min(shape.tokens, (shape.limit // 4 // tile_bytes - shape.num_requests) * tokens - 1))
    nbytes = cdiv(num_row_tiles(rows, shape.num_requests, tokens) * tile_bytes, 256) * 256 if rows else 0
    return UnionPlan(tokens, words, rows, nbytes)


def workspace_bytes(shape: WorkShape) -> int:
    """Scratch of a call: unions, T / tile_tokens * Hkv * 8 * (1 + min(tile_tokens * K, num_blocks)), and the copies that `triton` widens.

    Rows go in slices, and groups of copies one after another, where all exceed the limit.
    """
    if shape.tokens == 0 or shape.num_requests == 0:
        return 0
    plans = [plan_unions(settings, shape) for settings in ([settings_override] if settings_override else SETTINGS.values())]
    return max(plan.nbytes + query_by_query_bytes(replace(shape, limit=shape.limit - plan.nbytes)) for plan in plans)


def sparse_attention_union(call: SparseAttentionCall) -> None:
    """Attention of every query over the visible keys of its selected blocks; fills call.out and call.lse. For prefill."""
    batch, (tokens, num_q_heads, head_dim) = call.batch, call.q.shape
    if tokens == 0:
        return
    if batch.num_requests == 0:
        call.out.zero_()
        if call.lse is not None:
            call.lse.fill_(float("-inf"))
        return
    num_kv_heads, topk = call.k.shape[1], call.ids.shape[2]
    shape = WorkShape(
        tokens=tokens,
        num_requests=batch.num_requests,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        num_index_heads=0,
        head_dim=head_dim,
        topk=topk,
        max_seqlen_q=batch.max_seqlen_q,
        max_seqlen_k=batch.max_seqlen_k,
        block_size=batch.block_size,
        limit=workspace_limit(),
    )
    plan = plan_unions(choose_settings(mode_of(call.q, call.k), current_arch(call.q.device)), shape)
    if plan.rows == 0:
        query_by_query(call)
        return
    groups = 0
    if is_fp8(call.k.dtype) and call.q.dtype != torch.float32:
        keys, limit = topk * batch.block_size, shape.limit - plan.nbytes
        groups = groups_to_widen(tokens, batch.num_requests, num_kv_heads, head_dim, keys, batch.num_blocks, batch.block_size, limit)
    if groups == 0:
        _attend(call, plan, call.k, call.v, batch, slice(0, num_kv_heads))
        return
    assert call.workspace is not None
    # e4m3 queries take e4m3 keys, so only the place of the keys changes there.
    k_dtype = call.k.dtype if is_fp8(call.q.dtype) else call.q.dtype
    for first in range(0, num_kv_heads, groups):
        heads = slice(first, min(first + groups, num_kv_heads))
        copy_shape = (batch.num_requests * batch.num_blocks, heads.stop - first, batch.block_size, head_dim)
        wide_table, offset = carve(call.workspace, plan.nbytes, (batch.num_requests, batch.num_blocks), torch.int32)
        wide_k, offset = carve(call.workspace, offset, copy_shape, k_dtype)
        wide_v, _ = carve(call.workspace, offset, copy_shape, torch.float16)
        widen_pages(call.k[:, heads], call.v[:, heads], wide_k, wide_v, wide_table, batch)
        _attend(call, plan, wide_k, wide_v, replace(batch, page_table=wide_table, page_size=batch.block_size), heads)


def _attend(call: SparseAttentionCall, plan: UnionPlan, k: torch.Tensor, v: torch.Tensor, batch: PagedBatch, kv_heads: slice) -> None:
    """The KV groups `kv_heads`, which k and v hold, slice by slice of rows."""
    group, head_dim, topk = call.q.shape[1] // call.k.shape[1], call.q.shape[2], call.ids.shape[2]
    heads = slice(kv_heads.start * group, kv_heads.stop * group)
    q, out, ids = call.q[:, heads], call.out[:, heads], call.ids[kv_heads]
    sink_key = None if call.sink_key is None else call.sink_key[heads]
    lse = None if call.lse is None else call.lse[:, heads]
    key_bytes = head_dim * (k.element_size() + v.element_size())
    arch = current_arch(q.device)
    settings = fit(choose_settings(mode_of(q, k), arch), arch, head_dim * q.element_size(), key_bytes, batch.block_size)
    sizes: dict[str, Any] = dict(BLOCK_SIZE=batch.block_size, BLOCK_T=plan.tile_tokens, BLOCK_B=block_b(batch))
    assert call.workspace is not None
    for row_begin in range(0, q.shape[0], plan.rows):
        row_end = min(row_begin + plan.rows, q.shape[0])
        tiles = num_row_tiles(row_end - row_begin, batch.num_requests, plan.tile_tokens)
        unions, _ = carve(call.workspace, 0, (k.shape[1], tiles, plan.words), torch.int64)
        launch(
            union_blocks_kernel,
            (tiles, k.shape[1]),
            ids,
            unions,
            batch.seq_lens,
            batch.cu_seqlens_q,
            ids.stride(),
            unions.stride()[:2],
            batch.num_requests,
            row_begin,
            row_end,
            batch.max_seqlen_k,
            device=q.device,
            num_warps=1,
            num_stages=1,
            TOPK=topk,
            PADDED_TOPK=next_power_of_2(topk),
            PADDED_T=next_power_of_2(plan.tile_tokens),
            **sizes,
        )
        launch(
            union_prefill_kernel,
            (tiles, k.shape[1]),
            q,
            k,
            v,
            unions,
            sink_key,
            out,
            lse,
            batch.page_table,
            batch.seq_lens,
            batch.cu_seqlens_q,
            call.q_scale.tensor,
            call.k_scale.tensor,
            call.v_scale.tensor,
            call.sm_scale,
            call.q_scale.value,
            call.k_scale.value,
            call.v_scale.value,
            q.stride(),
            k.stride(),
            v.stride(),
            unions.stride()[:2],
            (0, 0) if sink_key is None else sink_key.stride(),
            out.stride(),
            (0, 0) if lse is None else lse.stride(),
            batch.page_table.stride(0),
            batch.num_requests,
            row_begin,
            row_end,
            batch.max_seqlen_k,
            batch.page_table.shape[1],
            k.shape[0],
            device=q.device,
            num_warps=settings.num_warps,
            num_stages=settings.num_stages,
            PAGE_SIZE=batch.page_size,
            GROUP=group,
            BLOCK_M=settings.block_m,
            BLOCK_N=settings.block_n,
            BLOCK_D=head_dim,
            FP8_PV=call.fp8_pv,
            NEGATIVE_SCALE=call.sm_scale < 0,
            **sizes,
        )
