"""Lists turned round: for each block, which of the deferred queries selected it; and the pieces of work that attending block by block makes of it.

Rows are cut into slices, whose partial outputs fit the workspace together. A list's order differs from run to run, and no result depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from m3attn.dsl_kernels.common.kernels import CuteKernel

BLOCK = 128
THREADS = 128
SCAN_THREADS = 1024
ENTRY_BITS = 6
"""Of a pick's word: its place in the token's list, below which the row stands."""


class Item:
    """Words of a piece of work: which list, where its picks begin, and how many they are."""

    KEY, BEGIN, COUNT = range(3)


@dataclass(frozen=True)
class Variant:
    """What is compiled. `item_picks`: the most picks of a piece of work."""

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
        mCounts: cute.Tensor,  # [keys], 0
        mCursors: cute.Tensor,  # [keys], written: where each list begins, then where it ends
        mItems: cute.Tensor,  # [items, 3], written
        mSliceItems: cute.Tensor,  # [slices + 1], written: each slice's first item
        mPicks: cute.Tensor,  # [picks], written: row << ENTRY_BITS | place in the row's list
        slice_rows: Int32,
        num_requests: Int32,
        num_blocks: Int32,
        stream: cuda.CUstream,
    ):
        grid = (cute.ceil_div(mIds.shape[1], THREADS), mIds.shape[0], 1)
        sizes = (slice_rows, num_requests, num_blocks)
        self.visit(mIds, mDeferred, mCounts, mPicks, *sizes, False).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)
        self.scan(mCounts, mCursors, mItems, mSliceItems).launch(grid=(1, 1, 1), block=(SCAN_THREADS, 1, 1), stream=stream)
        self.visit(mIds, mDeferred, mCursors, mPicks, *sizes, True).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def visit(
        self,
        mIds: cute.Tensor,
        mDeferred: cute.Tensor,
        mCounts: cute.Tensor,
        mPicks: cute.Tensor,
        slice_rows: Int32,
        num_requests: Int32,
        num_blocks: Int32,
        writes: cutlass.Constexpr,
    ):
        """Counts each list's picks; or, with its beginning in place of a count of 0, writes them."""
        kv_head = cute.arch.block_idx()[1]
        row = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        if row < mIds.shape[1]:
            request = mDeferred[kv_head, row, 0]
            if request >= 0:
                seen_blocks = (mDeferred[kv_head, row, 1] + BLOCK - 1) // BLOCK
                first_key = ((row // slice_rows * mIds.shape[0] + kv_head) * num_requests + request) * num_blocks
                for entry in cutlass.range(mIds.shape[2]):
                    block = mIds[kv_head, row, entry]
                    if block >= 0 and block < seen_blocks:
                        place = cute.arch.atomic_add((mCounts.iterator + first_key + block).llvm_ptr, Int32(1), sem="relaxed", scope="gpu")
                        if const_expr(writes):
                            mPicks[place] = row << ENTRY_BITS | entry

    @cute.kernel
    def scan(self, mCounts: cute.Tensor, mCursors: cute.Tensor, mItems: cute.Tensor, mSliceItems: cute.Tensor):
        """One thread block: where lists and pieces of work begin."""
        thread = cute.arch.thread_idx()[0]
        lane, warp = thread % 32, thread // 32
        num_keys = mCounts.shape[0]
        slice_keys = num_keys // (mSliceItems.shape[0] - 1)
        own_keys = cute.ceil_div(num_keys, SCAN_THREADS)
        first = min(thread * own_keys, num_keys)
        end = min(first + own_keys, num_keys)
        picks, items = Int32(0), Int32(0)
        for key in cutlass.range(first, end):
            picks += mCounts[key]
            items += cute.ceil_div(mCounts[key], self.item_picks)

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
            mCursors[key] = pick
            if key % slice_keys == 0:
                mSliceItems[key // slice_keys] = item
            left = mCounts[key]
            begin = pick
            pick += left
            while left > 0:
                mItems[item, Item.KEY] = key
                mItems[item, Item.BEGIN] = begin
                mItems[item, Item.COUNT] = min(left, self.item_picks)
                begin += self.item_picks
                left -= self.item_picks
                item += 1
        if first < num_keys and end == num_keys:
            mSliceItems[mSliceItems.shape[0] - 1] = item


def build(variant: Variant) -> tuple[Any, tuple[Any, ...]]:
    kv_heads, rows, keys = (cute.sym_int() for _ in range(3))

    def words(*shape: Any) -> Any:
        return make_fake_tensor(Int32, shape, tuple(cute.sym_int64() for _ in shape))

    return BlockListsSm90(variant), (
        words(kv_heads, rows, cute.sym_int()),
        words(kv_heads, rows, 2),
        words(keys),
        words(keys),
        words(cute.sym_int(), 3),
        words(cute.sym_int()),
        words(cute.sym_int()),
        Int32(1),
        Int32(1),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


KERNEL = CuteKernel("block_lists_sm90", build, sources=[__file__])
