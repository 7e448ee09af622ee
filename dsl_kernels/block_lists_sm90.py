"""Lists turned round: for each block, which of the deferred queries selected it; and the pieces of work that attending block by block makes of it.

Deferred rows are numbered and cut into slices, whose partial outputs fit the workspace together. Numbers and the order of lists differ from run to
run; no result depends on them. Without a deferred row every kernel is over at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from m3attn.dsl_kernels.common.kernels import CuteKernel

BLOCK = 128
THREADS = 128
SCAN_THREADS = 1024
UNIT_PICKS = 8
"""Pieces of work are multiples of it, but for a list's last."""
ENTRY_BITS = 6
"""Of a pick's word: its place in the token's list, below which the row's number stands."""


class Item:
    """Words of a piece of work: which list, where its picks begin, and how many they are."""

    KEY, BEGIN, COUNT = range(3)


class Row:
    """Words of a deferred row: a query and KV head, its request, and the keys that it sees."""

    ROW, KV_HEAD, REQUEST, VISIBLE = range(4)


@dataclass(frozen=True)
class Variant:
    """What is compiled. `item_picks`: the most picks of a piece of work, a multiple of UNIT_PICKS."""

    item_picks: int


class BlockListsSm90:
    """A list's key is (slice, KV head, request, block), the last fastest."""

    def __init__(self, variant: Variant) -> None:
        self.item_picks = variant.item_picks

    @cute.jit
    def __call__(
        self,
        mIds: cute.Tensor,  # [Hkv, T, K]
        mDeferred: cute.Tensor,  # [Hkv, T, 2]: (request or -1, visible keys)
        mNumRows: cute.Tensor,  # [1], 0; written: deferred rows
        mRows: cute.Tensor,  # [Hkv * T, 4], written
        mLists: cute.Tensor,  # [keys], 0; written: where each list ends
        mItems: cute.Tensor,  # [items, 3], written
        mSliceItems: cute.Tensor,  # [slices + 1], 0; written: each slice's first item
        mPicks: cute.Tensor,  # [picks], written: number of the row << ENTRY_BITS | place in the row's list
        slice_rows: Int32,
        num_requests: Int32,
        num_blocks: Int32,
        max_blocks: Int32,  # thread blocks of the last kernel
        stream: cuda.CUstream,
    ):
        grid = (cute.ceil_div(mIds.shape[1], THREADS), mIds.shape[0], 1)
        sizes = (slice_rows, num_requests, num_blocks)
        self.count(mIds, mDeferred, mNumRows, mRows, mLists, *sizes).launch(grid=grid, block=(THREADS, 1, 1), stream=stream, use_pdl=True)
        self.scan(mNumRows, mLists, mItems, mSliceItems).launch(grid=(1, 1, 1), block=(SCAN_THREADS, 1, 1), stream=stream, use_pdl=True)
        self.fill(mIds, mNumRows, mRows, mLists, mPicks, *sizes).launch(grid=(max_blocks, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True)

    @cute.jit
    def list_of(self, block: Int32, number: Int32, kv_head: Int32, request: Int32, num_kv_heads: Int32, sizes) -> Int32:
        slice_rows, num_requests, num_blocks = sizes
        return ((number // slice_rows * num_kv_heads + kv_head) * num_requests + request) * num_blocks + block

    @cute.kernel
    def count(
        self,
        mIds: cute.Tensor,
        mDeferred: cute.Tensor,
        mNumRows: cute.Tensor,
        mRows: cute.Tensor,
        mLists: cute.Tensor,
        slice_rows: Int32,
        num_requests: Int32,
        num_blocks: Int32,
    ):
        """Numbers the deferred rows, and counts each list's picks."""
        lane = cute.arch.lane_idx()
        kv_head = cute.arch.block_idx()[1]
        row = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        request = Int32(-1)
        if row < mIds.shape[1]:
            request = mDeferred[kv_head, row, 0]
            # Rows before the first offset, or between falling ones, belong to no tile: anything may stand there.
            request = request if request < num_requests else Int32(-1)
        found = cute.arch.vote_ballot_sync(request >= 0)
        if found != 0:
            number = Int32(0)
            if lane == 0:
                number = cute.arch.atomic_add(mNumRows.iterator.llvm_ptr, cute.arch.popc(found), sem="relaxed", scope="gpu")
            number = cute.arch.shuffle_sync(number, 0) + cute.arch.popc(found & ((Int32(1) << lane) - 1))
            if request >= 0:
                visible = min(mDeferred[kv_head, row, 1], num_blocks * BLOCK)
                mRows[number, Row.ROW] = row
                mRows[number, Row.KV_HEAD] = kv_head
                mRows[number, Row.REQUEST] = request
                mRows[number, Row.VISIBLE] = visible
                seen_blocks = cute.ceil_div(visible, BLOCK)
                first = self.list_of(Int32(0), number, kv_head, request, mIds.shape[0], (slice_rows, num_requests, num_blocks))
                for entry in cutlass.range(mIds.shape[2], unroll=4):
                    block = mIds[kv_head, row, entry]
                    if block >= 0 and block < seen_blocks:
                        cute.arch.atomic_add((mLists.iterator + first + block).llvm_ptr, Int32(1), sem="relaxed", scope="gpu")

    @cute.kernel
    def scan(self, mNumRows: cute.Tensor, mLists: cute.Tensor, mItems: cute.Tensor, mSliceItems: cute.Tensor):
        """One thread block: where lists and pieces of work begin."""
        thread = cute.arch.thread_idx()[0]
        lane, warp = thread % 32, thread // 32
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        num_keys = mLists.shape[0]
        if mNumRows[0] == 0:
            num_keys = Int32(0)
        slice_keys = mLists.shape[0] // (mSliceItems.shape[0] - 1)
        own_keys = cute.ceil_div(num_keys, SCAN_THREADS)
        first = min(thread * own_keys, num_keys)
        end = min(first + own_keys, num_keys)
        picks, items = Int32(0), Int32(0)
        for key in cutlass.range(first, end, unroll=4):
            count = mLists[key]
            picks += count
            items += cute.ceil_div(count, self.item_picks)

        smem = cutlass.memory.SmemAllocator()
        sTotals = smem.allocate_tensor(Int32, cute.make_layout((2, SCAN_THREADS // 32)), 8)
        inclusive = [picks, items]
        for which in cutlass.range_constexpr(2):
            for distance in cutlass.range_constexpr(5):
                before = cute.arch.shuffle_sync_up(inclusive[which], 1 << distance, mask_and_clamp=0)
                inclusive[which] += before if lane >= 1 << distance else Int32(0)
            if lane == 31:
                sTotals[which, warp] = inclusive[which]
        cute.arch.sync_threads()
        pick, item = inclusive[0] - picks, inclusive[1] - items
        for other in cutlass.range(warp):
            pick += sTotals[0, other]
            item += sTotals[1, other]

        for key in cutlass.range(first, end):
            left = mLists[key]
            mLists[key] = pick
            if key % slice_keys == 0:
                mSliceItems[key // slice_keys] = item
            begin = pick
            pick += left
            # A list's pieces are of one size, or its last one would be loaded for little.
            share = cute.ceil_div(left, max(1, cute.ceil_div(left, self.item_picks)))
            size = cute.ceil_div(share, UNIT_PICKS) * UNIT_PICKS
            while left > 0:
                mItems[item, Item.KEY] = key
                mItems[item, Item.BEGIN] = begin
                mItems[item, Item.COUNT] = min(left, size)
                begin += size
                left -= size
                item += 1
        if first < num_keys and end == num_keys:
            mSliceItems[mSliceItems.shape[0] - 1] = item

    @cute.kernel
    def fill(
        self,
        mIds: cute.Tensor,
        mNumRows: cute.Tensor,
        mRows: cute.Tensor,
        mLists: cute.Tensor,
        mPicks: cute.Tensor,
        slice_rows: Int32,
        num_requests: Int32,
        num_blocks: Int32,
    ):
        """Writes each list's picks, a thread a pick."""
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        topk = mIds.shape[2]
        num_picks = mNumRows[0] * topk
        index = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        while index < num_picks:
            number, entry = index // topk, index % topk
            row, kv_head, request, visible = (mRows[number, word] for word in (Row.ROW, Row.KV_HEAD, Row.REQUEST, Row.VISIBLE))
            block = mIds[kv_head, row, entry]
            if block >= 0 and block < cute.ceil_div(visible, BLOCK):
                key = self.list_of(block, number, kv_head, request, mIds.shape[0], (slice_rows, num_requests, num_blocks))
                place = cute.arch.atomic_add((mLists.iterator + key).llvm_ptr, Int32(1), sem="relaxed", scope="gpu")
                mPicks[place] = number << ENTRY_BITS | entry
            index += cute.arch.grid_dim()[0] * THREADS


def build(variant: Variant) -> tuple[Any, tuple[Any, ...]]:
    kv_heads, rows, keys = (cute.sym_int() for _ in range(3))

    def words(*shape: Any) -> Any:
        return make_fake_tensor(Int32, shape, tuple(cute.sym_int64() for _ in shape))

    return BlockListsSm90(variant), (
        words(kv_heads, rows, cute.sym_int()),
        words(kv_heads, rows, 2),
        words(1),
        words(cute.sym_int(), 4),
        words(keys),
        words(cute.sym_int(), 3),
        words(cute.sym_int()),
        words(cute.sym_int()),
        *(Int32(1) for _ in range(4)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


KERNEL = CuteKernel("block_lists_sm90", build, sources=[__file__])
