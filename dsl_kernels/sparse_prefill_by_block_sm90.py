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
import torch
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from m3attn.batch import PagedBatch
from m3attn.calls import SparseAttentionCall
from m3attn.dsl_kernels import block_lists_sm90, sparse_prefill_sm90
from m3attn.dsl_kernels.block_lists_sm90 import ENTRY_BITS, Item
from m3attn.dsl_kernels.common.kernels import CuteKernel
from m3attn.dsl_kernels.sparse_prefill_sm90 import (
    BLOCK,
    DTYPES,
    HALF_ROWS,
    LN2,
    LOG2E,
    NO_BLOCK,
    WARPGROUP,
    MaybeTensor,
    Ring,
    Rows,
    SparsePrefillSm90,
    Tile,
    is_aligned,
    num_sms,
)
from m3attn.dtypes import dtype_name
from m3attn.workspace import carve

ITEM_PICKS = 64
"""The most picks of a block that are attended to with one load of it."""
STAGES = 3
COMBINE_THREADS = 128
JOINED_PARTS = 16
"""Partials that a thread reads at a time."""
NO_PICK = -1


class Entry:
    """Words of what the producer says with each block it loads."""

    COUNT, KV_HEAD, BLOCK, ENDS = range(4)


@dataclass(frozen=True)
class Variant:
    """What is compiled; as in `sparse_prefill_sm90`."""

    qk_dtype: str
    v_dtype: str
    out_dtype: str
    head_dim: int
    group: int
    lse: bool
    q_scale: bool
    k_scale: bool
    v_scale: bool
    negative_scale: bool
    aligned: bool


class SparsePrefillByBlockSm90(SparsePrefillSm90):
    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.tile = Tile(variant.group, HALF_ROWS // variant.group, 1, 1, STAGES)
        self.qk_dtype, self.v_dtype, self.out_dtype = (DTYPES[name] for name in (variant.qk_dtype, variant.v_dtype, variant.out_dtype))
        self.head_dim = variant.head_dim
        self.stages = STAGES
        self.row_bytes = self.head_dim * max(self.qk_dtype.width, self.out_dtype.width) // 8
        self.consumer_registers, self.producer_registers = 240, 24

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
        mDeferred: cute.Tensor,  # [Hkv, T, 2]: (request or -1, visible keys)
        mItems: cute.Tensor,  # [items, 3]
        mSliceItems: cute.Tensor,  # [slices + 1]
        mPicks: cute.Tensor,  # [picks]
        mPartOut: cute.Tensor,  # [rows of a slice, Hkv, K, G, D]
        mPartLse: cute.Tensor,  # [rows of a slice, Hkv, K, G], base 2
        mCounters: cute.Tensor,  # [slices], 0: items that have been taken, beyond each thread block's first
        key_scale: Float32,  # sm_scale * q_scale * k_scale
        value_scale: Float32,
        max_seqlen_k: Int32,
        num_blocks: Int32,
        max_blocks: Int32,  # thread blocks
        stream: cuda.CUstream,
    ):
        k_layout, v_layout = (self.smem_layout(dtype, BLOCK, self.stages) for dtype in (self.qk_dtype, self.v_dtype))
        (k_atom, k_pages), (v_atom, v_pages) = self.page_loads(mK, k_layout), self.page_loads(mV, v_layout)
        qk_mma, pv_mma = self.products()
        for which in cutlass.range(mSliceItems.shape[0] - 1, unroll=1):
            self.attend(
                mQ,
                k_pages,
                v_pages,
                mPageTable,
                mSeqLens,
                mQScale,
                mKScale,
                mDeferred,
                mItems,
                mSliceItems,
                mPicks,
                mPartOut,
                mPartLse,
                mCounters,
                key_scale,
                max_seqlen_k,
                num_blocks,
                which,
                k_atom,
                v_atom,
                qk_mma,
                pv_mma,
                k_layout,
                v_layout,
            ).launch(grid=(max_blocks, 1, 1), block=(3 * WARPGROUP, 1, 1), stream=stream, min_blocks_per_mp=1)
            self.combine(mIds, mOut, mLse, mVScale, mDeferred, mPartOut, mPartLse, value_scale, which).launch(
                grid=(8 * max_blocks, 1, 1), block=(COMBINE_THREADS, 1, 1), stream=stream
            )

    @cute.kernel
    def attend(
        self,
        mQ: cute.Tensor,
        k_pages: cute.Tensor,  # [128, D, Hkv, pages]
        v_pages: cute.Tensor,
        mPageTable: cute.Tensor,
        mSeqLens: cute.Tensor,
        mQScale: MaybeTensor,
        mKScale: MaybeTensor,
        mDeferred: cute.Tensor,
        mItems: cute.Tensor,
        mSliceItems: cute.Tensor,
        mPicks: cute.Tensor,
        mPartOut: cute.Tensor,
        mPartLse: cute.Tensor,
        mCounters: cute.Tensor,
        key_scale: Float32,
        max_seqlen_k: Int32,
        num_blocks: Int32,
        which: Int32,  # slice
        k_atom: cute.CopyAtom,
        v_atom: cute.CopyAtom,
        qk_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
        k_layout: cute.ComposedLayout,
        v_layout: cute.ComposedLayout,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.memory.SmemAllocator()
        sK = smem.allocate_tensor(self.qk_dtype, k_layout.outer, 1024, swizzle=k_layout.inner)  # [128, D, stages]
        sV = smem.allocate_tensor(self.v_dtype, v_layout.outer, 1024, swizzle=v_layout.inner)
        sRows = smem.allocate_tensor(cutlass.Uint8, cute.make_layout((HALF_ROWS * self.row_bytes, 2)), 1024)  # [bytes, halves]
        sEntry = smem.allocate_tensor(Int32, cute.make_layout((8, self.stages)), 16)
        sPicks = smem.allocate_tensor(Int32, cute.make_layout((ITEM_PICKS, 2, self.stages)), 16)  # (pick, keys that its row sees)
        barriers = smem.allocate_tensor(cutlass.Int64, cute.make_layout(4 * self.stages + 1), 8).iterator
        keys = Ring(barriers, barriers + self.stages, self.stages)
        values = Ring(barriers + 2 * self.stages, barriers + 3 * self.stages, self.stages)
        last_page = barriers + 4 * self.stages
        work = mSliceItems[which] + cute.arch.block_idx()[0]
        end_work = mSliceItems[which + 1]
        if work < end_work:
            self.init_barriers(warp, k_atom, v_atom, keys, values, last_page)
            cute.arch.sync_threads()
            if warp < 4:
                cute.arch.setmaxregister_decrease(self.producer_registers)
                if warp == 0:
                    self.produce_items(
                        k_pages,
                        v_pages,
                        mPageTable,
                        mSeqLens,
                        mDeferred,
                        mItems,
                        mPicks,
                        mCounters,
                        work,
                        end_work,
                        max_seqlen_k,
                        num_blocks,
                        which,
                        k_atom,
                        v_atom,
                        sK,
                        sV,
                        sEntry,
                        sPicks,
                        keys,
                        values,
                        last_page,
                    )
            else:
                cute.arch.setmaxregister_increase(self.consumer_registers)
                if const_expr(mQScale is not None):
                    key_scale *= mQScale[0]
                if const_expr(mKScale is not None):
                    key_scale *= mKScale[0]
                self.consume_items(
                    mQ, mPartOut, mPartLse, key_scale, qk_mma, pv_mma, sK, sV, sRows, sEntry, sPicks, keys, values, which, warp // 4 - 1
                )

    @cute.jit
    def produce_items(
        self,
        k_pages: cute.Tensor,
        v_pages: cute.Tensor,
        mPageTable: cute.Tensor,
        mSeqLens: cute.Tensor,
        mDeferred: cute.Tensor,
        mItems: cute.Tensor,
        mPicks: cute.Tensor,
        mCounters: cute.Tensor,
        work: Int32,
        end_work: Int32,
        max_seqlen_k: Int32,
        num_blocks: Int32,
        which: Int32,
        k_atom: cute.CopyAtom,
        v_atom: cute.CopyAtom,
        sK: cute.Tensor,
        sV: cute.Tensor,
        sEntry: cute.Tensor,
        sPicks: cute.Tensor,
        keys: Ring,
        values: Ring,
        last_page: cute.Pointer,
    ):
        """One warp: the slice's pieces of work, each a block and picks of it."""
        lane = cute.arch.lane_idx()
        grid, _, _ = cute.arch.grid_dim()
        first_work = work - cute.arch.block_idx()[0]
        num_requests = mSeqLens.shape[0]
        num_kv_heads = k_pages.shape[2]
        count = Int32(0)
        last_page_phase = Int32(0)
        while work < end_work:
            next_work = Int32(0)
            if lane == 0:
                next_work = cute.arch.atomic_add((mCounters.iterator + which).llvm_ptr, Int32(1), sem="relaxed", scope="gpu") + grid + first_work
            next_work = cute.arch.shuffle_sync(next_work, 0)
            key = mItems[work, Item.KEY]
            block = key % num_blocks
            request = key // num_blocks % num_requests
            kv_head = key // num_blocks // num_requests % num_kv_heads
            page = self.page_of(mPageTable, request, block, mPageTable.shape[1], k_pages.shape[3])
            num_keys = self.clamp(mSeqLens[request], 0, max_seqlen_k) - block * BLOCK
            begin, picks = mItems[work, Item.BEGIN], mItems[work, Item.COUNT]
            rPicks = cute.make_rmem_tensor((ITEM_PICKS // 32, 2), Int32)
            for i in cutlass.range_constexpr(ITEM_PICKS // 32):
                pick, visible = Int32(NO_PICK), Int32(0)
                if lane + 32 * i < picks:
                    pick = mPicks[begin + lane + 32 * i]
                    visible = mDeferred[kv_head, pick >> ENTRY_BITS, 1]
                rPicks[i, 0], rPicks[i, 1] = pick, visible
            stage = keys.stage(count)
            keys.wait_empty(count)
            for i in cutlass.range_constexpr(ITEM_PICKS // 32):
                for word in cutlass.range_constexpr(2):
                    sPicks[lane + 32 * i, word, stage] = rPicks[i, word]
            if lane == 0:
                sEntry[Entry.COUNT, stage] = picks
                sEntry[Entry.KV_HEAD, stage] = kv_head
                sEntry[Entry.BLOCK, stage] = block
                sEntry[Entry.ENDS, stage] = Int32(next_work >= end_work)
            tKsK, tKgK = self.partition_pages(k_atom, sK, k_pages, kv_head)
            tVsV, tVgV = self.partition_pages(v_atom, sV, v_pages, kv_head)
            self.load_keys(k_atom, tKgK, tKsK, page, stage, keys, True)
            last_page_phase = self.load_values(v_atom, tVgV, tVsV, sV, page, count, values, num_keys, True, last_page, last_page_phase)
            count += 1
            work = next_work

    @cute.jit
    def consume_items(
        self,
        mQ: cute.Tensor,
        mPartOut: cute.Tensor,
        mPartLse: cute.Tensor,
        key_scale: Float32,
        qk_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
        sK: cute.Tensor,
        sV: cute.Tensor,
        sRows: cute.Tensor,
        sEntry: cute.Tensor,
        sPicks: cute.Tensor,
        keys: Ring,
        values: Ring,
        which: Int32,
        half: Int32,
    ):
        """One warpgroup: every second group of picks that fills its 64 rows."""
        picks_of_group = self.tile.half_tokens
        scale_log2 = key_scale * LOG2E
        if const_expr(self.variant.negative_scale):
            scale_log2 = -scale_log2
        half_pointer = sRows[None, half].iterator
        tSrQ, tSrK, tOrV, rO, rP = self.fragments(qk_mma, pv_mma, half_pointer, sK, sV)
        row_max = cute.make_rmem_tensor(2, Float32)
        row_sum = cute.make_rmem_tensor(2, Float32)
        rChunks = self.query_chunks()
        rPick = cute.make_rmem_tensor(2, Int32)  # of this thread's two rows
        rVisible = cute.make_rmem_tensor(2, Int32)
        rDone = cute.make_rmem_tensor((8, self.head_dim // 16), self.out_dtype)  # partials that are not written yet, and whose they are
        rDone.fill(0.0)
        logsums = cute.make_rmem_tensor(2, Float32)
        logsums.fill(0.0)
        rDonePick = cute.make_rmem_tensor(2, Int32)
        rDonePick.fill(NO_PICK)
        done_head = Int32(0)
        first_row = which * mPartOut.shape[0]

        count = Int32(0)
        has_items = Boolean(True)
        while has_items:
            keys.wait_full(count)
            stage = keys.stage(count)
            picks, kv_head, block, ends = (
                cute.arch.make_warp_uniform(sEntry[field, stage]) for field in (Entry.COUNT, Entry.KV_HEAD, Entry.BLOCK, Entry.ENDS)
            )
            group = half
            self.read_picks(mQ, sPicks, rChunks, rPick, rVisible, group, picks, stage, kv_head)
            values.wait_full(count)
            while group * picks_of_group < picks:
                # The queries before the last group's partials: their fence would wait for stores to memory.
                self.store_queries(rChunks, half_pointer)
                self.sync_half(half)
                self.write_partials(mPartOut, mPartLse, rDone, logsums, rDonePick, done_head, first_row)
                rS = self.multiply_keys(qk_mma, tSrQ, tSrK, stage)
                warpgroup.wait_group(0)
                pick = tuple(Int32(rPick[r]) for r in range(2))
                rows = Rows(
                    self.first_row_of_thread(),
                    tuple(Int32(1) if pick[r] != NO_PICK else Int32(0) for r in range(2)),
                    tuple(Int32(rVisible[r]) for r in range(2)),
                )
                self.read_picks(mQ, sPicks, rChunks, rPick, rVisible, group + 2, picks, stage, kv_head)
                rO.fill(0.0)
                row_max.fill(-Float32.inf)
                row_sum.fill(0.0)
                rescale = self.weigh(rS, row_max, row_sum, rows, Int32(1), block, scale_log2, masked=True)
                self.take_weights(rS, rP, rO, rescale)
                self.multiply_values(pv_mma, rO, rP, tOrV, stage)
                warpgroup.wait_group(0)
                self.finish_partials(rO, row_max, row_sum, scale_log2, half_pointer, half, rDone, logsums)
                rDonePick[0], rDonePick[1], done_head = pick[0], pick[1], kv_head
                group += 2
            keys.release(count)
            values.release(count)
            has_items = ends == 0
            count += 1
        self.write_partials(mPartOut, mPartLse, rDone, logsums, rDonePick, done_head, first_row)

    @cute.jit
    def read_picks(
        self,
        mQ: cute.Tensor,
        sPicks: cute.Tensor,
        rChunks: cute.Tensor,
        rPick: cute.Tensor,
        rVisible: cute.Tensor,
        group: Int32,
        picks: Int32,
        stage: Int32,
        kv_head: Int32,
    ):
        """A group's queries into registers; NO_PICK and zeros past the last."""
        tile = self.tile
        first = self.first_row_of_thread()
        for r in cutlass.range_constexpr(2):
            token = (first + 8 * r) // tile.group
            index = group * tile.half_tokens + token
            pick, visible = Int32(NO_PICK), Int32(0)
            if token < tile.half_tokens and index < picks:
                pick = sPicks[index, 0, stage]
                visible = sPicks[index, 1, stage]
            rPick[r] = pick
            rVisible[r] = visible
        per_row = self.head_dim * self.qk_dtype.width // 128
        for step in cutlass.range_constexpr(16 * per_row // 32):
            row, chunk = self.chunk_of(step, per_row)
            pick = self.pick_of_row(rPick, row)
            if pick != NO_PICK:
                query = mQ[pick >> ENTRY_BITS, kv_head * tile.group + row % tile.group, None]
                gChunk = cute.local_tile(query, (rChunks.shape[0],), (chunk,))
                cute.autovec_copy(gChunk, rChunks[None, step])
            else:
                rChunks[None, step].fill(0.0)

    @cute.jit
    def pick_of_row(self, pick, row: Int32):
        """From the lane that holds the row of accumulators."""
        low = cute.arch.shuffle_sync(pick[0], row % 8 * 4)
        high = cute.arch.shuffle_sync(pick[1], row % 8 * 4)
        return low if row % 16 < 8 else high

    @cute.jit
    def finish_partials(
        self,
        rO: cute.Tensor,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        scale_log2: Float32,
        half_pointer: cute.Pointer,
        half: Int32,
        rDone: cute.Tensor,
        logsums: cute.Tensor,
    ):
        output = self.by_row(rO)
        for r in cutlass.range_constexpr(2):
            total = cute.arch.warp_reduction_sum(row_sum[r], threads_in_group=4)
            has_keys = total > 0.0
            logsums[r] = row_max[r] * scale_log2 + cute.math.log2(total, fastmath=True) if has_keys else -Float32.inf
            factor = 1.0 / total if has_keys else Float32(0.0)
            output[r, None].store(output[r, None].load() * factor)
        self.sync_half(half)
        rDone.store(self.whole_rows(rO, half_pointer).load())

    @cute.jit
    def write_partials(
        self,
        mPartOut: cute.Tensor,
        mPartLse: cute.Tensor,
        rDone: cute.Tensor,
        logsums: cute.Tensor,
        rPick: cute.Tensor,
        kv_head: Int32,
        first_row: Int32,
    ):
        group = self.tile.group
        for step in cutlass.range_constexpr(rDone.shape[1]):
            row, chunk = self.chunk_of(step, 2 * rDone.shape[1])
            pick = self.pick_of_row(rPick, row)
            if pick != NO_PICK:
                part = mPartOut[(pick >> ENTRY_BITS) - first_row, kv_head, pick & ((1 << ENTRY_BITS) - 1), row % group, None]
                cute.autovec_copy(rDone[None, step], cute.local_tile(part, (rDone.shape[0],), (chunk,)))
        for r in cutlass.range_constexpr(2):
            if rPick[r] != NO_PICK and cute.arch.lane_idx() % 4 == 0:
                place = (rPick[r] >> ENTRY_BITS) - first_row, kv_head, rPick[r] & ((1 << ENTRY_BITS) - 1)
                mPartLse[place[0], place[1], place[2], (self.first_row_of_thread() + 8 * r) % group] = logsums[r]

    @cute.kernel
    def combine(
        self,
        mIds: cute.Tensor,
        mOut: cute.Tensor,
        mLse: MaybeTensor,
        mVScale: MaybeTensor,
        mDeferred: cute.Tensor,
        mPartOut: cute.Tensor,
        mPartLse: cute.Tensor,
        value_scale: Float32,
        which: Int32,  # slice
    ):
        """Joins the partials of each deferred row: every warp of a thread block looks 32 rows ahead for one."""
        lane = cute.arch.lane_idx()
        if const_expr(mVScale is not None):
            value_scale *= mVScale[0]
        num_kv_heads = mIds.shape[0]
        first_row = which * mPartOut.shape[0]
        num_rows = min(mPartOut.shape[0], mIds.shape[1] - first_row) * num_kv_heads
        start = cute.arch.block_idx()[0] * 32
        while start < num_rows:
            is_deferred = Boolean(False)
            if start + lane < num_rows:
                is_deferred = mDeferred[(start + lane) % num_kv_heads, first_row + (start + lane) // num_kv_heads, 0] >= 0
            found = cute.arch.vote_ballot_sync(is_deferred)
            while found != 0:
                bit = cute.arch.popc(~found & (found - 1))
                found = found & (found - 1)
                kv_head, row = (start + bit) % num_kv_heads, (start + bit) // num_kv_heads
                self.combine_row(mIds, mOut, mLse, mDeferred, mPartOut, mPartLse, value_scale, kv_head, row, first_row)
            start += cute.arch.grid_dim()[0] * 32

    @cute.jit
    def combine_row(
        self,
        mIds: cute.Tensor,
        mOut: cute.Tensor,
        mLse: MaybeTensor,
        mDeferred: cute.Tensor,
        mPartOut: cute.Tensor,
        mPartLse: cute.Tensor,
        value_scale: Float32,
        kv_head: Int32,
        row: Int32,
        first_row: Int32,
    ):
        group, per_row = self.tile.group, self.head_dim // 8
        seen_blocks = (mDeferred[kv_head, first_row + row, 1] + BLOCK - 1) // BLOCK
        rBlocks = cute.make_rmem_tensor(JOINED_PARTS, Int32)
        rLse = cute.make_rmem_tensor(JOINED_PARTS, Float32)
        rParts = cute.make_rmem_tensor((8, JOINED_PARTS), self.out_dtype)
        rSum = cute.make_rmem_tensor(8, Float32)
        chunk = cute.arch.thread_idx()[0]
        while chunk < group * per_row:
            head, place = chunk // per_row, chunk % per_row
            largest, total = -Float32.inf, Float32(0.0)
            rSum.fill(0.0)
            for first in cutlass.range(0, mIds.shape[2], JOINED_PARTS):
                # Everything is asked for before anything is waited for.
                for i in cutlass.range_constexpr(JOINED_PARTS):
                    rBlocks[i] = Int32(NO_BLOCK)
                    if first + i < mIds.shape[2]:
                        rBlocks[i] = mIds[kv_head, first_row + row, first + i]
                for i in cutlass.range_constexpr(JOINED_PARTS):
                    rLse[i] = -Float32.inf
                    rParts[None, i].fill(0.0)
                    if rBlocks[i] >= 0 and rBlocks[i] < seen_blocks:
                        rLse[i] = mPartLse[row, kv_head, first + i, head]
                        part = cute.local_tile(mPartOut[row, kv_head, first + i, head, None], (8,), (place,))
                        cute.autovec_copy(part, rParts[None, i])
                new_largest = cute.arch.fmax(largest, rLse.load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0))
                shift = Float32(0.0) if new_largest == -Float32.inf else new_largest
                rescale = cute.math.exp2(largest - shift, fastmath=True)
                total *= rescale
                rSum.store(rSum.load() * rescale)
                for i in cutlass.range_constexpr(JOINED_PARTS):
                    weight = cute.math.exp2(rLse[i] - shift, fastmath=True)
                    total += weight
                    rSum.store(rSum.load() + rParts[None, i].load().to(Float32) * weight)
                largest = new_largest
            factor = value_scale / total if total > 0.0 else Float32(0.0)
            rOut = cute.make_rmem_tensor(8, self.out_dtype)
            rOut.store((rSum.load() * factor).to(self.out_dtype))
            cute.autovec_copy(rOut, cute.local_tile(mOut[first_row + row, kv_head * group + head, None], (8,), (place,)))
            if const_expr(mLse is not None):
                if place == 0:
                    logsum = (largest + cute.math.log2(total, fastmath=True)) * LN2 if total > 0.0 else -Float32.inf
                    mLse[first_row + row, kv_head * group + head] = logsum
            chunk += COMBINE_THREADS


def build(variant: Variant) -> tuple[Any, tuple[Any, ...]]:
    """The kernels, and their arguments as tensors of any lengths and strides that a call may bring."""
    kernel = SparsePrefillByBlockSm90(variant)
    rows, heads, kv_heads, requests, pages, topk, slices = (cute.sym_int() for _ in range(7))

    def vectors(dtype: Any, shape: tuple[Any, ...], align: int = 16) -> Any:
        strides = tuple(cute.sym_int64(divisibility=align * 8 // dtype.width) for _ in shape[1:])
        return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=align)

    def scalars(dtype: Any, *shape: Any) -> Any:
        return make_fake_tensor(dtype, shape, tuple(cute.sym_int64() for _ in shape))

    def optional(exists: bool, make: Any) -> Any:
        return make() if exists else None

    dim, slice_rows = variant.head_dim, cute.sym_int()
    return kernel, (
        vectors(kernel.qk_dtype, (rows, heads, dim), 16 if variant.aligned else kernel.qk_dtype.width // 8),
        vectors(kernel.qk_dtype, (pages, kv_heads, BLOCK, dim)),
        vectors(kernel.v_dtype, (pages, kv_heads, BLOCK, dim)),
        scalars(Int32, kv_heads, rows, topk),
        scalars(Int32, requests, cute.sym_int()),
        scalars(Int32, requests),
        vectors(kernel.out_dtype, (rows, heads, dim), 16 if variant.aligned else kernel.out_dtype.width // 8),
        optional(variant.lse, lambda: scalars(Float32, rows, heads)),
        *(optional(exists, lambda: scalars(Float32, 1)) for exists in (variant.q_scale, variant.k_scale, variant.v_scale)),
        scalars(Int32, kv_heads, rows, 2),
        scalars(Int32, cute.sym_int(), 3),
        scalars(Int32, cute.sym_int()),
        scalars(Int32, cute.sym_int()),
        vectors(kernel.out_dtype, (slice_rows, kv_heads, topk, variant.group, dim)),
        scalars(Float32, slice_rows, kv_heads, topk, variant.group),
        scalars(Int32, slices),
        Float32(0.0),
        Float32(0.0),
        Int32(0),
        Int32(0),
        Int32(0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


KERNEL = CuteKernel("sparse_prefill_by_block_sm90", build, sources=[__file__, sparse_prefill_sm90.__file__, block_lists_sm90.__file__])

MIN_ROWS = 2048
"""Steps with fewer rows are attended tile by tile, whatever they select: they are over before the lists were turned round."""
MAX_KEYS = 1 << 16
"""Lists that one thread block counts together in time."""
MAX_SLICES = 32


@dataclass(frozen=True)
class Plan:
    """Slices of rows and scratch, from static shapes."""

    rows: int
    slice_rows: int
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
        if tokens < MIN_ROWS:
            return None
        for slices in range(1, MAX_SLICES + 1):
            plan = cls(tokens, -(-tokens // slices), num_kv_heads, num_q_heads // num_kv_heads, head_dim, topk, num_requests, num_blocks)
            if plan.keys > MAX_KEYS:
                return None
            if plan.nbytes <= limit:
                return plan
        return None

    @property
    def slices(self) -> int:
        return -(-self.rows // self.slice_rows)

    @property
    def keys(self) -> int:
        return self.slices * self.num_kv_heads * self.num_requests * self.num_blocks

    @property
    def picks(self) -> int:
        return self.rows * self.num_kv_heads * self.topk

    @property
    def zeros(self) -> int:
        """Words that are 0 at the start: counters of tiles, of each slice's items, and of each list's picks."""
        return 1 + self.slices + self.keys

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the int32 tensors: zeros, cursors, items, slices' first items, picks, deferred rows."""
        items = self.picks // ITEM_PICKS + self.keys
        return (self.zeros,), (self.keys,), (items, 3), (self.slices + 1,), (self.picks,), (self.num_kv_heads, self.rows, 2)

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """Partials: a slice's rows, KV heads, entries of a list, heads of a group."""
        return self.slice_rows, self.num_kv_heads, self.topk, self.group

    @property
    def nbytes(self) -> int:
        parts = self.slice_rows * self.num_kv_heads * self.topk * self.group
        sizes = [4 * math.prod(shape) for shape in self.shapes] + [parts * self.head_dim * 2, parts * 4]
        return sum(-(-size // 256) * 256 for size in sizes)


@dataclass(frozen=True, eq=False)
class Scratch:
    """The workspace's tensors."""

    counter: torch.Tensor
    slice_counters: torch.Tensor
    counts: torch.Tensor
    cursors: torch.Tensor
    items: torch.Tensor
    slice_items: torch.Tensor
    picks: torch.Tensor
    deferred: torch.Tensor
    part_out: torch.Tensor
    part_lse: torch.Tensor

    @classmethod
    def carve(cls, workspace: torch.Tensor, plan: Plan, dtype: torch.dtype) -> Scratch:
        """Counters set to 0."""
        offset, words = 0, []
        for shape in plan.shapes:
            tensor, offset = carve(workspace, offset, shape, torch.int32)
            words.append(tensor)
        zeros, cursors, items, slice_items, picks, deferred = words
        part_out, offset = carve(workspace, offset, (*plan.parts, plan.head_dim), dtype)
        part_lse, offset = carve(workspace, offset, plan.parts, torch.float32)
        counter, slice_counters, counts = zeros.zero_().split((1, plan.slices, plan.keys))
        return cls(counter, slice_counters, counts, cursors, items, slice_items, picks, deferred, part_out, part_lse)


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
        scratch.counts,
        scratch.cursors,
        scratch.items,
        scratch.slice_items,
        scratch.picks,
        plan.slice_rows,
        plan.num_requests,
        plan.num_blocks,
    )
    variant = Variant(
        qk_dtype=dtype_name(q.dtype),
        v_dtype=dtype_name(v.dtype),
        out_dtype=dtype_name(out.dtype),
        head_dim=plan.head_dim,
        group=plan.group,
        lse=call.lse is not None,
        q_scale=scales[0].tensor is not None,
        k_scale=scales[1].tensor is not None,
        v_scale=scales[2].tensor is not None,
        negative_scale=call.sm_scale < 0,
        aligned=is_aligned(q) and is_aligned(out),
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
        scratch.deferred,
        scratch.items,
        scratch.slice_items,
        scratch.picks,
        scratch.part_out,
        scratch.part_lse,
        scratch.slice_counters,
        call.sm_scale * call.q_scale.value * call.k_scale.value,
        call.v_scale.value,
        batch.max_seqlen_k,
        batch.num_blocks,
        num_sms(device),
    )
