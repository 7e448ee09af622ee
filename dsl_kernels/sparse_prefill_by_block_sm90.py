"""Sparse prefill on Hopper for queries whose neighbours select other blocks: block by block, each with all the queries that selected it.

Every pick of a block by a token makes a partial output of the token's heads; a second kernel joins a token's partials. No product is wasted on
rows that did not select a block, and 4 KB are written and read for each pick.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90_utils
import torch
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.tensor_utils import LayoutEnum

from m3attn.batch import PagedBatch
from m3attn.calls import SparseAttentionCall
from m3attn.dsl_kernels import block_lists_sm90, join_parts_sm90, row_maximum, sparse_prefill_sm90
from m3attn.dsl_kernels.block_lists_sm90 import ENTRY_BITS, Item, Row
from m3attn.dsl_kernels.common.kernels import CuteKernel
from m3attn.dsl_kernels.join_parts_sm90 import UNIT_ROWS, JoinParts
from m3attn.dsl_kernels.row_maximum import row_maxima
from m3attn.dsl_kernels.sparse_prefill_sm90 import (
    BLOCK,
    DTYPES,
    HALF_ROWS,
    PAIRS,
    WARPGROUP,
    MaybeTensor,
    Ring,
    SparsePrefillSm90,
    Tile,
    num_sms,
)
from m3attn.dtypes import dtype_name
from m3attn.workspace import carve

GROUPS = (8, 16, 32)
"""Query heads a KV head: a token's rows fill whole units of 8 rows, and tokens 64 rows."""
ITEM_PICKS = 64
"""The most picks of a block that are attended to with one load of it."""
PAGES = 2
"""Blocks in shared memory."""
SLOTS = 4
"""Batches in shared memory: the queries of as many picks as fill 64 rows."""
FILL_BLOCKS = 16
"""Thread blocks a multiprocessor that fill lists."""
PART_STORES = "cs"
"""Partials leave the L2 cache first: queries are read again sooner."""
NO_PART = -1
NO_ITEM = -1


class Batch:
    """Words of what the producer says with each batch: which item's, its first pick among the item's, the item's block, and whether the same
    warpgroup has another of the item."""

    ITEM, FIRST, BLOCK, LEFT = range(4)


class Pick:
    """Words of an item's pick: its query, where its partial goes, and the keys that the query sees."""

    ROW, PART, VISIBLE = range(3)


@dataclass(frozen=True)
class Variant:
    """What is compiled; as in `sparse_prefill_sm90`."""

    qk_dtype: str
    v_dtype: str
    out_dtype: str
    head_dim: int
    group: int
    topk: int
    lse: bool
    q_scale: bool
    k_scale: bool
    v_scale: bool
    negative_scale: bool


@dataclass(frozen=True)
class Loads:
    """What the TMA unit brings: its view of queries, keys and values, and one load of each."""

    q_rows: Any  # [Hq, D, T]
    k_pages: Any  # [128, D, Hkv, pages]
    v_pages: Any
    q_atom: Any
    k_atom: Any
    v_atom: Any


@dataclass(frozen=True)
class Work:
    """A slice's items; as in `SparsePrefillByBlockSm90.__call__`."""

    page_table: Any
    seq_lens: Any
    rows: Any
    items: Any
    picks: Any
    counter: Any  # pointer
    end: Any
    first_number: Any  # of the slice's rows
    max_seqlen_k: Any
    num_blocks: Any


@dataclass(frozen=True)
class Places:
    """A thread block's shared memory."""

    sQ: Any  # [64, D, SLOTS]
    sK: Any  # [128, D, PAGES]
    sV: Any
    sBatch: Any  # [words, SLOTS]
    sPicks: Any  # [words, ITEM_PICKS, PAGES]
    pages: Ring  # without `empty`: an item's last batches tell
    batches: Ring
    last_page: Any  # mbarrier


class SparsePrefillByBlockSm90(SparsePrefillSm90):
    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.tile = Tile(variant.group, HALF_ROWS // variant.group, 1, 1, PAGES)
        self.qk_dtype, self.v_dtype, self.out_dtype = (DTYPES[name] for name in (variant.qk_dtype, variant.v_dtype, variant.out_dtype))
        self.head_dim = variant.head_dim
        self.line = min(self.head_dim, 1024 // self.qk_dtype.width)  # elements of a row of queries that lie together in shared memory
        self.consumer_registers, self.producer_registers = 232, 40
        self.join = JoinParts(self.out_dtype, variant.head_dim, variant.group, variant.topk)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [T, Hq, D]
        mK: cute.Tensor,  # [pages, Hkv, 128, D]
        mV: cute.Tensor,  # [pages, Hkv, 128, D]
        mIds: cute.Tensor,  # [Hkv, T, K]
        mPageTable: cute.Tensor,  # [B, max_pages]
        mSeqLens: cute.Tensor,  # [B]
        mOut: cute.Tensor,  # [T, Hq, D]
        mLse: MaybeTensor,  # [T, Hq]
        mQScale: MaybeTensor,  # [1]
        mKScale: MaybeTensor,  # [1]
        mVScale: MaybeTensor,  # [1]
        mNumRows: cute.Tensor,  # [1]: deferred rows
        mRows: cute.Tensor,  # [Hkv * T, 4]
        mItems: cute.Tensor,  # [items, 3]
        mSliceItems: cute.Tensor,  # [slices + 1]
        mPicks: cute.Tensor,  # [picks]
        mPartOut: cute.Tensor,  # [rows of a slice * K * G * D], as `join_parts_sm90` has them
        mPartLse: cute.Tensor,  # [rows of a slice * K * G], base 2
        mCounters: cute.Tensor,  # [slices], 0: items that have been taken, beyond each thread block's first
        key_scale: Float32,  # sm_scale * q_scale * k_scale
        value_scale: Float32,
        max_seqlen_k: Int32,
        num_blocks: Int32,
        slice_rows: Int32,
        max_blocks: Int32,  # thread blocks
        stream: cuda.CUstream,
    ):
        k_layout, v_layout = (self.smem_layout(dtype, BLOCK, PAGES) for dtype in (self.qk_dtype, self.v_dtype))
        q_layout = self.smem_layout(self.qk_dtype, HALF_ROWS, SLOTS)
        (k_atom, k_pages), (v_atom, v_pages), (q_atom, q_rows) = self.page_loads(mK, k_layout), self.page_loads(mV, v_layout), self.query_loads(mQ)
        qk_mma, pv_mma = self.products()
        for which in cutlass.range(mSliceItems.shape[0] - 1, unroll=1):
            self.attend(
                q_rows,
                k_pages,
                v_pages,
                mPageTable,
                mSeqLens,
                mQScale,
                mKScale,
                mRows,
                mItems,
                mSliceItems,
                mPicks,
                mPartOut,
                mPartLse,
                mCounters,
                key_scale,
                max_seqlen_k,
                num_blocks,
                slice_rows,
                which,
                q_atom,
                k_atom,
                v_atom,
                qk_mma,
                pv_mma,
                q_layout,
                k_layout,
                v_layout,
            ).launch(grid=(max_blocks, 1, 1), block=(3 * WARPGROUP, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True)
            self.join.launch(mIds, mOut, mLse, mVScale, mNumRows, mRows, mPartOut, mPartLse, value_scale, slice_rows, which, max_blocks, stream)

    def query_loads(self, mQ):
        """The TMA unit's view of queries: (one load of a line of a token's heads, [Hq, D, T])."""
        by_token = cute.make_tensor(mQ.iterator, cute.select(mQ.layout, mode=[1, 2, 0]))
        tile = (self.tile.group, self.line)
        kind = sm90_utils.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.qk_dtype, self.head_dim)
        layout = cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, self.qk_dtype), tile, order=(0, 1))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), by_token, layout, tile)

    @cute.kernel
    def attend(
        self,
        q_rows: cute.Tensor,  # [Hq, D, T]
        k_pages: cute.Tensor,  # [128, D, Hkv, pages]
        v_pages: cute.Tensor,
        mPageTable: cute.Tensor,
        mSeqLens: cute.Tensor,
        mQScale: MaybeTensor,
        mKScale: MaybeTensor,
        mRows: cute.Tensor,
        mItems: cute.Tensor,
        mSliceItems: cute.Tensor,
        mPicks: cute.Tensor,
        mPartOut: cute.Tensor,
        mPartLse: cute.Tensor,
        mCounters: cute.Tensor,
        key_scale: Float32,
        max_seqlen_k: Int32,
        num_blocks: Int32,
        slice_rows: Int32,
        which: Int32,  # slice
        q_atom: cute.CopyAtom,
        k_atom: cute.CopyAtom,
        v_atom: cute.CopyAtom,
        qk_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        v_layout: cute.ComposedLayout,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        loads = Loads(q_rows, k_pages, v_pages, q_atom, k_atom, v_atom)
        places = self.lay_out(q_layout, k_layout, v_layout)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        work = mSliceItems[which] + cute.arch.block_idx()[0]
        end_work = mSliceItems[which + 1]
        if work < end_work:
            self.set_up_barriers(warp, loads, places)
            cute.arch.sync_threads()
            if warp < 4:
                cute.arch.setmaxregister_decrease(self.producer_registers)
                if warp == 0:
                    sizes = which * slice_rows, max_seqlen_k, num_blocks
                    items = Work(mPageTable, mSeqLens, mRows, mItems, mPicks, mCounters.iterator + which, end_work, *sizes)
                    self.produce_items(loads, items, places, work)
            else:
                cute.arch.setmaxregister_increase(self.consumer_registers)
                if const_expr(mQScale is not None):
                    key_scale *= mQScale[0]
                if const_expr(mKScale is not None):
                    key_scale *= mKScale[0]
                self.consume_batches(mPartOut, mPartLse, key_scale, qk_mma, pv_mma, places, warp // 4 - 1)

    def lay_out(self, q_layout, k_layout, v_layout):
        smem = cutlass.memory.SmemAllocator()
        sK = smem.allocate_tensor(self.qk_dtype, k_layout.outer, 1024, swizzle=k_layout.inner)
        sV = smem.allocate_tensor(self.v_dtype, v_layout.outer, 1024, swizzle=v_layout.inner)
        sQ = smem.allocate_tensor(self.qk_dtype, q_layout.outer, 1024, swizzle=q_layout.inner)
        sBatch = smem.allocate_tensor(Int32, cute.make_layout((4, SLOTS)), 16)
        sPicks = smem.allocate_tensor(Int32, cute.make_layout((3, ITEM_PICKS, PAGES)), 16)
        barriers = smem.allocate_tensor(cutlass.Int64, cute.make_layout(PAGES + 2 * SLOTS + 1), 8).iterator
        pages, batches = Ring(barriers, None, PAGES), Ring(barriers + PAGES, barriers + PAGES + SLOTS, SLOTS)
        return Places(sQ, sK, sV, sBatch, sPicks, pages, batches, barriers + PAGES + 2 * SLOTS)

    @cute.jit
    def set_up_barriers(self, warp: Int32, loads: Loads, places: Places):
        if warp == 0:
            for atom in (loads.q_atom, loads.k_atom, loads.v_atom):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(PAGES):
                    cute.arch.mbarrier_init(places.pages.full + stage, 1)
                for slot in cutlass.range_constexpr(SLOTS):
                    cute.arch.mbarrier_init(places.batches.full + slot, 1)
                    cute.arch.mbarrier_init(places.batches.empty + slot, WARPGROUP // 32)
                cute.arch.mbarrier_init(places.last_page, 1)
            cute.arch.mbarrier_init_fence()

    @cute.jit
    def produce_items(self, loads: Loads, items: Work, places: Places, work: Int32):
        """One warp: the slice's items, each a block and picks of it, cut into batches that the halves take in turns."""
        grid, _, _ = cute.arch.grid_dim()
        batches = places.batches
        taken_before = work - cute.arch.block_idx()[0] + grid
        batch, item, picks = Int32(0), Int32(-1), Int32(0)  # the item before the first has no picks
        kv_head, block = Int32(0), Int32(0)
        rPicks = cute.make_rmem_tensor(ITEM_PICKS // 32, Int32)
        last_page_phase = Int32(0)
        has_items = Boolean(True)
        while has_items:
            next_picks, next_head, next_block, next_page, next_keys = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
            if work < items.end:
                next_picks, next_head, next_block, next_page, next_keys = self.read_item(loads, items, rPicks, work)
                if cute.arch.lane_idx() == 0:
                    work = cute.arch.atomic_add(items.counter.llvm_ptr, Int32(1), sem="relaxed", scope="gpu") + taken_before
                work = cute.arch.shuffle_sync(work, 0)
            num_batches = cute.ceil_div(picks, self.tile.half_tokens)
            for index in cutlass.range(max(num_batches, SLOTS), unroll=1):
                batches.wait_empty(batch + index)
                if index < num_batches:
                    left = Int32(1) if index + 2 < num_batches else Int32(0)
                    self.load_batch(loads, places, batch + index, item, index * self.tile.half_tokens, kv_head, block, left)
                # Every batch of the item before this one is done now, and its place free for the next item.
                if index == SLOTS - 1 and next_picks > 0:
                    last_page_phase = self.load_block(loads, places, item + 1, next_head, next_page, next_keys, last_page_phase)
                    self.write_picks(items, places, rPicks, item + 1, next_picks)
            batch += num_batches
            item += 1
            picks, kv_head, block = next_picks, next_head, next_block
            has_items = picks > 0
        for _ in cutlass.range_constexpr(2):
            batches.wait_empty(batch)
            if cute.arch.lane_idx() == 0:
                places.sBatch[Batch.ITEM, batches.stage(batch)] = Int32(NO_ITEM)
                cute.arch.mbarrier_arrive(batches.full + batches.stage(batch))
            batch += 1

    @cute.jit
    def read_item(self, loads: Loads, items: Work, rPicks: cute.Tensor, work: Int32):
        """(picks, KV head, block, its page, keys of the sequence from the block on), and the picks into registers, lane by lane."""
        num_kv_heads, num_pages = loads.k_pages.shape[2:]
        num_requests = items.seq_lens.shape[0]
        key, begin, picks = (items.items[work, word] for word in (Item.KEY, Item.BEGIN, Item.COUNT))
        block = key % items.num_blocks
        request = key // items.num_blocks % num_requests
        kv_head = key // items.num_blocks // num_requests % num_kv_heads
        for i in cutlass.range_constexpr(ITEM_PICKS // 32):
            # Batches are always full: what is past an item's end repeats its last pick, and goes nowhere.
            rPicks[i] = items.picks[begin + min(cute.arch.lane_idx() + 32 * i, picks - 1)]
        page = self.page_of(items.page_table, request, block, items.page_table.shape[1], num_pages)
        return picks, kv_head, block, page, self.clamp(items.seq_lens[request], 0, items.max_seqlen_k) - block * BLOCK

    @cute.jit
    def write_picks(self, items: Work, places: Places, rPicks: cute.Tensor, item: Int32, picks: Int32):
        stage = places.pages.stage(item)
        for i in cutlass.range_constexpr(ITEM_PICKS // 32):
            number, entry = rPicks[i] >> ENTRY_BITS, rPicks[i] & ((1 << ENTRY_BITS) - 1)
            index = cute.arch.lane_idx() + 32 * i
            part = (number - items.first_number) * self.variant.topk + entry
            places.sPicks[Pick.ROW, index, stage] = items.rows[number, Row.ROW]
            places.sPicks[Pick.VISIBLE, index, stage] = items.rows[number, Row.VISIBLE]
            places.sPicks[Pick.PART, index, stage] = part if index < picks else Int32(NO_PART)
        cute.arch.sync_warp()

    @cute.jit
    def load_block(self, loads: Loads, places: Places, item: Int32, kv_head: Int32, page: Int32, num_keys: Int32, last_page_phase: Int32):
        """Returns the phase that `last_page` comes to next."""
        lane, k_atom, v_atom, sV, last_page = cute.arch.lane_idx(), loads.k_atom, loads.v_atom, places.sV, places.last_page
        stage = places.pages.stage(item)
        full = places.pages.full + stage
        tKsK, tKgK = self.partition_pages(k_atom, places.sK, loads.k_pages, kv_head)
        tVsV, tVgV = self.partition_pages(v_atom, sV, loads.v_pages, kv_head)
        key_bytes, value_bytes = self.page_bytes(self.qk_dtype), self.page_bytes(self.v_dtype)
        if num_keys >= BLOCK:
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(full, key_bytes + value_bytes)
            cute.arch.sync_warp()
            cute.copy(k_atom, tKgK[None, page], tKsK[None, stage], tma_bar_ptr=full)
            cute.copy(v_atom, tVgV[None, page], tVsV[None, stage], tma_bar_ptr=full)
        else:
            # Rows past the sequence's end may hold NaN, which a weight of 0 does not stop.
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(last_page, value_bytes)
            cute.arch.sync_warp()
            cute.copy(v_atom, tVgV[None, page], tVsV[None, stage], tma_bar_ptr=last_page)
            cute.arch.mbarrier_wait(last_page, last_page_phase)
            last_page_phase ^= 1
            self.clear_rows(sV, stage, num_keys)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(full, key_bytes)
            cute.arch.sync_warp()
            cute.copy(k_atom, tKgK[None, page], tKsK[None, stage], tma_bar_ptr=full)
        return last_page_phase

    @cute.jit
    def load_batch(self, loads: Loads, places: Places, batch: Int32, item: Int32, first: Int32, kv_head: Int32, block: Int32, left: Int32):
        """Queries of the item's picks from `first` on."""
        slot, stage = places.batches.stage(batch), places.pages.stage(item)
        sTiles = cute.local_tile(places.sQ, (self.tile.group, self.line), (None, None, None))  # [G, line, picks, lines, slots]
        gTiles = cute.local_tile(loads.q_rows, (self.tile.group, self.line), (kv_head, None, None))  # [G, line, lines, T]
        tiles = cute.group_modes(sTiles, 0, 2), cute.group_modes(gTiles, 0, 2)
        tQsQ, tQgQ = cpasync.tma_partition(loads.q_atom, 0, cute.make_layout(1), *tiles)
        full = places.batches.full + slot
        if cute.arch.lane_idx() == 0:
            places.sBatch[Batch.ITEM, slot] = item
            places.sBatch[Batch.FIRST, slot] = first
            places.sBatch[Batch.BLOCK, slot] = block
            places.sBatch[Batch.LEFT, slot] = left
            cute.arch.mbarrier_arrive_and_expect_tx(full, HALF_ROWS * self.head_dim * self.qk_dtype.width // 8)
        cute.arch.sync_warp()
        for pick in cutlass.range_constexpr(self.tile.half_tokens):
            row = cute.arch.make_warp_uniform(places.sPicks[Pick.ROW, first + pick, stage])
            for line in cutlass.range_constexpr(self.head_dim // self.line):
                cute.copy(loads.q_atom, tQgQ[None, line, row], tQsQ[None, pick, line, slot], tma_bar_ptr=full)

    @cute.jit
    def consume_batches(
        self,
        mPartOut: cute.Tensor,
        mPartLse: cute.Tensor,
        key_scale: Float32,
        qk_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
        places: Places,
        half: Int32,
    ):
        """One warpgroup: every second batch."""
        scale_log2 = self.exponent_scale(key_scale)
        pages, batches = places.pages, places.batches
        sVt = cute.composition(places.sV, cute.make_ordered_layout((self.head_dim, BLOCK, PAGES), order=(1, 0, 2)))  # [D, 128, pages]
        qk_thread, pv_thread = qk_mma.get_slice(0), pv_mma.get_slice(0)
        tSrQ = qk_thread.make_fragment_A(qk_thread.partition_A(places.sQ))
        tSrK = qk_thread.make_fragment_B(qk_thread.partition_B(places.sK))
        tOrV = pv_thread.make_fragment_B(pv_thread.partition_B(sVt))
        rO = cute.make_rmem_tensor(pv_thread.partition_shape_C((HALF_ROWS, self.head_dim)), Float32)
        rP = pv_thread.make_fragment_A(pv_thread.partition_shape_A((HALF_ROWS, BLOCK)))
        unit = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 * 2  # the warp's first; it has two

        rS = cute.make_rmem_tensor(qk_thread.partition_shape_C((HALF_ROWS, BLOCK)), Float32)
        batch = half
        item, first, block, left = self.read_batch(places, batch)
        while item != NO_ITEM:
            stage = pages.stage(item)
            pages.wait_full(item)
            self.multiply(qk_mma, rS, tSrQ[None, None, None, batches.stage(batch)], tSrK[None, None, None, stage], accumulate=False)
            # The half's next batch of the item, whose load waits for nothing that this one holds, is multiplied while this one's output leaves.
            while left != 0:
                parts, visible = self.read_picks(places, first, unit, stage)
                warpgroup.wait_group(0)
                shifts, sums = self.weigh_block(rS, visible, block, scale_log2)
                self.take_weights(rP, rS.iterator, 0, PAIRS)
                self.multiply(pv_mma, rO, rP, tOrV[None, None, None, stage], accumulate=False)
                _, first, _, left = self.read_batch(places, batch + 2)
                self.multiply(qk_mma, rS, tSrQ[None, None, None, batches.stage(batch + 2)], tSrK[None, None, None, stage], accumulate=False)
                factors, logsums = self.normalize(shifts, sums)
                warpgroup.wait_group(1)
                batches.release(batch)
                self.write_parts(mPartOut, mPartLse, rO, factors, logsums, parts, unit)
                batch += 2
            parts, visible = self.read_picks(places, first, unit, stage)
            warpgroup.wait_group(0)
            shifts, sums = self.weigh_block(rS, visible, block, scale_log2)
            self.take_weights(rP, rS.iterator, 0, PAIRS)
            self.multiply(pv_mma, rO, rP, tOrV[None, None, None, stage], accumulate=False)
            factors, logsums = self.normalize(shifts, sums)
            warpgroup.wait_group(0)
            batches.release(batch)
            self.write_parts(mPartOut, mPartLse, rO, factors, logsums, parts, unit)
            batch += 2
            item, first, block, left = self.read_batch(places, batch)

    @cute.jit
    def read_picks(self, places: Places, first: Int32, unit: Int32, stage: Int32):
        """(where partials go, keys that are seen) of the picks that a thread's two rows belong to."""
        picks = tuple(first + (unit + r) * UNIT_ROWS // self.tile.group for r in range(2))
        return tuple(tuple(cute.arch.make_warp_uniform(places.sPicks[word, pick, stage]) for pick in picks) for word in (Pick.PART, Pick.VISIBLE))

    @cute.jit
    def read_batch(self, places: Places, batch: Int32):
        places.batches.wait_full(batch)
        slot = places.batches.stage(batch)
        words = (Batch.ITEM, Batch.FIRST, Batch.BLOCK, Batch.LEFT)
        item, first, block, left = (cute.arch.make_warp_uniform(places.sBatch[word, slot]) for word in words)
        return item, first, block, left

    @cute.jit
    def weigh_block(self, rS: cute.Tensor, visible, block: Int32, scale_log2: Float32):
        """Products [64, 128] become weights; returns the exponents that they are relative to, [2], and the sums of this thread's columns, [2]."""
        products = self.by_row(rS)
        shifts, sums = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            if const_expr(self.variant.negative_scale):
                products[r, None].store(-products[r, None].load())
            limit = visible[r] - block * BLOCK
            if limit < BLOCK:
                limit -= cute.arch.lane_idx() % 4 * 2
                for i in cutlass.range_constexpr(BLOCK // 4):
                    products[r, i] = products[r, i] if i // 2 * 8 + i % 2 < limit else -Float32.inf
        peaks = row_maxima([[products[r, i] for i in range(BLOCK // 4)] for r in range(2)])
        for r in cutlass.range_constexpr(2):
            shifts[r] = Float32(0.0) if peaks[r] == -Float32.inf else peaks[r] * scale_log2
            weights = cute.math.exp2(products[r, None].load() * scale_log2 - shifts[r], fastmath=True)
            sums[r] = weights.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            products[r, None].store(weights)
        return shifts, sums

    @cute.jit
    def normalize(self, shifts: cute.Tensor, sums: cute.Tensor):
        """What the output is to be multiplied by, [2], and its LSE in base 2, [2]."""
        factors, logsums = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            total = cute.arch.warp_reduction_sum(sums[r], threads_in_group=4)
            factors[r] = cute.arch.rcp_approx(total) if total > 0.0 else Float32(0.0)
            logsums[r] = shifts[r] + cute.math.log2(total, fastmath=True)
        return factors, logsums

    @cute.jit
    def write_parts(
        self, mPartOut: cute.Tensor, mPartLse: cute.Tensor, rO: cute.Tensor, factors: cute.Tensor, logsums: cute.Tensor, parts, unit: Int32
    ):
        """Straight from the accumulators."""
        lane = cute.arch.lane_idx()
        steps = self.head_dim // 32
        output = cute.make_tensor(rO.iterator, cute.make_layout(((2, 4), steps, 2), stride=((1, 4), 16, 2)))  # [8 elements, steps, 2 rows]
        rOut = cute.make_rmem_tensor(8, self.out_dtype)
        for r in cutlass.range_constexpr(2):
            if parts[r] != NO_PART:
                outputs, lse = self.join.place(parts[r], (unit + r) % (self.tile.group // UNIT_ROWS))
                steps_of_part = cute.make_tensor(mPartOut.iterator + outputs, cute.make_layout((8, steps), stride=(1, 256)))
                for step in cutlass.range_constexpr(steps):
                    rOut.store((output[None, step, r].load() * factors[r]).to(self.out_dtype))
                    words = cute.recast_tensor(rOut, Int32).load()
                    cute.arch.store(steps_of_part[None, step].iterator.llvm_ptr, words, cop=PART_STORES)
                if lane % 4 == 0:
                    mPartLse[lse] = logsums[r]


def build(variant: Variant) -> tuple[Any, tuple[Any, ...]]:
    """The kernels, and their arguments as tensors of any lengths and strides that a call may bring."""
    kernel = SparsePrefillByBlockSm90(variant)
    rows, heads, kv_heads, requests, pages, topk, slices = (cute.sym_int() for _ in range(7))

    def vectors(dtype: Any, shape: tuple[Any, ...]) -> Any:
        strides = tuple(cute.sym_int64(divisibility=128 // dtype.width) for _ in shape[1:])
        return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=16)

    def scalars(dtype: Any, *shape: Any) -> Any:
        return make_fake_tensor(dtype, shape, tuple(cute.sym_int64() for _ in shape))

    def optional(exists: bool, make: Any) -> Any:
        return make() if exists else None

    dim = variant.head_dim
    return kernel, (
        vectors(kernel.qk_dtype, (rows, heads, dim)),
        vectors(kernel.qk_dtype, (pages, kv_heads, BLOCK, dim)),
        vectors(kernel.v_dtype, (pages, kv_heads, BLOCK, dim)),
        scalars(Int32, kv_heads, rows, topk),
        scalars(Int32, requests, cute.sym_int()),
        scalars(Int32, requests),
        vectors(kernel.out_dtype, (rows, heads, dim)),
        optional(variant.lse, lambda: scalars(Float32, rows, heads)),
        *(optional(exists, lambda: scalars(Float32, 1)) for exists in (variant.q_scale, variant.k_scale, variant.v_scale)),
        scalars(Int32, 1),
        scalars(Int32, cute.sym_int(), 4),
        scalars(Int32, cute.sym_int(), 3),
        scalars(Int32, cute.sym_int()),
        scalars(Int32, cute.sym_int()),
        vectors(kernel.out_dtype, (cute.sym_int64(),)),
        make_fake_tensor(Float32, (cute.sym_int64(),), (1,)),
        scalars(Int32, slices),
        Float32(0.0),
        Float32(0.0),
        *(Int32(0) for _ in range(4)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


KERNEL = CuteKernel(
    "sparse_prefill_by_block_sm90",
    build,
    sources=[__file__, sparse_prefill_sm90.__file__, row_maximum.__file__, block_lists_sm90.__file__, join_parts_sm90.__file__],
)

MIN_ROWS = 2048
"""Steps with fewer rows are attended tile by tile, whatever they select: they are over before the lists were turned round."""
MAX_LISTS = 1 << 16
"""Lists that one thread block counts together in time."""
MAX_SLICES = 32
MAX_NUMBERS = 1 << (31 - ENTRY_BITS)


@dataclass(frozen=True)
class Plan:
    """Slices of deferred rows and scratch, from static shapes. A row is a query and a KV head."""

    tokens: int
    slices: int
    num_kv_heads: int
    group: int
    head_dim: int
    topk: int
    num_requests: int
    num_blocks: int

    @classmethod
    def of(
        cls, tokens: int, num_q_heads: int, num_kv_heads: int, head_dim: int, topk: int, num_requests: int, num_blocks: int, limit: int
    ) -> Plan | None:
        """The fewest slices that fit `limit`; None where nothing is to be deferred."""
        group = num_q_heads // num_kv_heads
        if tokens < MIN_ROWS or group not in GROUPS or tokens * num_kv_heads > MAX_NUMBERS:
            return None
        for slices in range(1, MAX_SLICES + 1):
            plan = cls(tokens, slices, num_kv_heads, group, head_dim, topk, num_requests, num_blocks)
            if plan.lists > MAX_LISTS:
                return None
            if plan.nbytes <= limit:
                return plan
        return None

    @property
    def rows(self) -> int:
        return self.tokens * self.num_kv_heads

    @property
    def slice_rows(self) -> int:
        return -(-self.rows // self.slices)

    @property
    def lists(self) -> int:
        return self.slices * self.num_kv_heads * self.num_requests * self.num_blocks

    @property
    def zeros(self) -> tuple[int, ...]:
        """Words that are 0 at the start: counters of tiles, of deferred rows, of each slice's items; slices' first items; lists."""
        return 1, 1, self.slices, self.slices + 1, self.lists

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the int32 tensors: zeros, items, picks, which rows are deferred, those rows."""
        picks = self.rows * self.topk
        items = picks // ITEM_PICKS + self.lists
        return (sum(self.zeros),), (items, 3), (picks,), (self.num_kv_heads, self.tokens, 2), (self.rows, 4)

    @property
    def nbytes(self) -> int:
        parts = self.slice_rows * self.topk * self.group
        sizes = [4 * math.prod(shape) for shape in self.shapes] + [parts * self.head_dim * 2, parts * 4]
        return sum(-(-size // 256) * 256 for size in sizes)


@dataclass(frozen=True, eq=False)
class Scratch:
    """The workspace's tensors."""

    counter: torch.Tensor
    num_rows: torch.Tensor
    slice_counters: torch.Tensor
    slice_items: torch.Tensor
    lists: torch.Tensor
    items: torch.Tensor
    picks: torch.Tensor
    deferred: torch.Tensor
    rows: torch.Tensor
    part_out: torch.Tensor
    part_lse: torch.Tensor

    @classmethod
    def carve(cls, workspace: torch.Tensor, plan: Plan, dtype: torch.dtype) -> Scratch:
        """Counters set to 0."""
        offset, words = 0, []
        for shape in plan.shapes:
            tensor, offset = carve(workspace, offset, shape, torch.int32)
            words.append(tensor)
        zeros, items, picks, deferred, rows = words
        parts = plan.slice_rows * plan.topk * plan.group
        part_out, offset = carve(workspace, offset, (parts * plan.head_dim,), dtype)
        part_lse, offset = carve(workspace, offset, (parts,), torch.float32)
        counter, num_rows, slice_counters, slice_items, lists = zeros.zero_().split(plan.zeros)
        return cls(counter, num_rows, slice_counters, slice_items, lists, items, picks, deferred, rows, part_out, part_lse)


def attend_by_block(
    call: SparseAttentionCall, k: torch.Tensor, v: torch.Tensor, batch: PagedBatch, kv_heads: slice, plan: Plan, scratch: Scratch
) -> None:
    """Attention of the rows that `sparse_prefill` deferred."""
    device = call.q.device
    heads = slice(kv_heads.start * plan.group, kv_heads.stop * plan.group)
    q, out, ids = call.q[:, heads], call.out[:, heads], call.ids[kv_heads]
    scales = call.q_scale, call.k_scale, call.v_scale
    block_lists_sm90.KERNEL.get(block_lists_sm90.Variant(ITEM_PICKS), device)(
        ids,
        scratch.deferred,
        scratch.num_rows,
        scratch.rows,
        scratch.lists,
        scratch.items,
        scratch.slice_items,
        scratch.picks,
        plan.slice_rows,
        plan.num_requests,
        plan.num_blocks,
        FILL_BLOCKS * num_sms(device),
    )
    variant = Variant(
        qk_dtype=dtype_name(q.dtype),
        v_dtype=dtype_name(v.dtype),
        out_dtype=dtype_name(out.dtype),
        head_dim=plan.head_dim,
        group=plan.group,
        topk=plan.topk,
        lse=call.lse is not None,
        q_scale=scales[0].tensor is not None,
        k_scale=scales[1].tensor is not None,
        v_scale=scales[2].tensor is not None,
        negative_scale=call.sm_scale < 0,
    )
    KERNEL.get(variant, device)(
        q,
        k,
        v,
        ids,
        batch.page_table,
        batch.seq_lens,
        out,
        None if call.lse is None else call.lse[:, heads],
        *(None if scale.tensor is None else scale.tensor.reshape(1) for scale in scales),
        scratch.num_rows,
        scratch.rows,
        scratch.items,
        scratch.slice_items,
        scratch.picks,
        scratch.part_out,
        scratch.part_lse,
        scratch.slice_counters,
        call.sm_scale * call.q_scale.value * call.k_scale.value,
        call.v_scale.value,
        batch.max_seqlen_k,
        plan.num_blocks,
        plan.slice_rows,
        num_sms(device),
    )
