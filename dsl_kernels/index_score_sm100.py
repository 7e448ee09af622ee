"""Scoring for Blackwell: the largest index product of every (query token, index head) with every block of 128 keys.

A persistent kernel of one CTA a multiprocessor, with Hopper's work, loads and launch. A tile of 256 rows (token, head), or of 128 where those are all
rows of a request, is one or two halves of 128: a half's products with a block of keys fill 128 columns of tensor memory, a row a lane. One warp
loads, one starts products, and a warpgroup a half takes the maxima from there, a row a thread, while the next products run.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
import torch
from cutlass import Float32, Int32
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05

from m3attn.batch import PagedBatch
from m3attn.calls import IndexScoreCall, IndexTopkCall
from m3attn.dsl_kernels import index_rows, index_score_work
from m3attn.dsl_kernels.common.kernels import CuteKernel
from m3attn.dsl_kernels.index_rows import QueryRows
from m3attn.dsl_kernels.index_score_work import (
    BLOCK,
    DIM,
    NEGATIVE_INFINITY,
    OTHER_WARPS,
    STORE_BLOCKS,
    ScoreWork,
    Variant,
    arguments,
    arrive,
    launch,
    num_ctas,
)

CHUNK_BLOCKS = 1024
"""Blocks of keys that all CTAs finish before any takes the next: 32 MiB of bf16 keys, a quarter of a B200's L2."""
HALF = 128
"""Rows of a product: the lanes of tensor memory."""
COLUMNS = 512
"""Of tensor memory: all, for four products."""
PIECE = 64
"""Columns that a thread reads at a time."""


def rows_of_tile(num_heads: int, batch: PagedBatch) -> int:
    """128 where they hold all rows of a request, else 256."""
    return 128 if num_heads * max(8, -(-batch.max_seqlen_q // 8) * 8) <= 128 else 256


class IndexScoreSm100(ScoreWork):
    def __init__(self, variant: Variant) -> None:
        super().__init__(variant, q_stages=2)
        self.halves = variant.rows // HALF
        self.buffers = COLUMNS // BLOCK // self.halves

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [T, Hi, 128]
        mK: cute.Tensor,  # [pages, page_size, 128]
        mOut: cute.Tensor,  # [Hi, row_end - row_begin, blocks] fp32
        mPageTable: cute.Tensor,  # [B, max_pages]
        mSeqLens: cute.Tensor,  # [B]
        mOffsets: cute.Tensor,  # [B + 1], cu_seqlens_q
        scale: Float32,
        mQScale: Any,  # [1] fp32, or None
        mKScale: Any,  # [1] fp32, or None
        row_begin: Int32,
        row_end: Int32,
        max_seqlen_k: Int32,
        num_blocks: Int32,
        skip_blocks: Int32,  # tiles whose rows all see at most so many blocks need no scores
        chunk_blocks: Int32,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ):
        mma = sm100.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.K, Float32, tcgen05.CtaGroup.ONE, (HALF, BLOCK)
        )
        q_layout = sm100.make_smem_layout_a(mma, (self.rows, BLOCK, DIM), self.dtype, self.q_stages)
        k_layout = sm100.make_smem_layout_b(mma, (HALF, BLOCK, DIM), self.dtype, self.stages)
        tma_q, tQ, tma_k, tK = self.load_atoms(mQ, mK, k_layout.inner)
        self.kernel(
            mma,
            q_layout,
            k_layout,
            tma_q,
            tQ,
            tma_k,
            tK,
            mOut,
            mPageTable,
            mSeqLens,
            mOffsets,
            scale,
            mQScale,
            mKScale,
            row_begin,
            row_end,
            max_seqlen_k,
            num_blocks,
            skip_blocks,
            chunk_blocks,
        ).launch(grid=(num_ctas, 1, 1), block=(32 * OTHER_WARPS + 128 * self.halves, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True)

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        tma_q: cute.CopyAtom,
        tQ: cute.Tensor,
        tma_k: cute.CopyAtom,
        tK: cute.Tensor,
        mOut: cute.Tensor,
        mPageTable: cute.Tensor,
        mSeqLens: cute.Tensor,
        mOffsets: cute.Tensor,
        scale: Float32,
        mQScale: Any,
        mKScale: Any,
        row_begin: Int32,
        row_end: Int32,
        max_seqlen_k: Int32,
        num_blocks: Int32,
        skip_blocks: Int32,
        chunk_blocks: Int32,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.memory.SmemAllocator()
        sQ = smem.allocate_tensor(self.dtype, q_layout.outer, 1024, swizzle=q_layout.inner)
        sK = smem.allocate_tensor(self.dtype, k_layout.outer, 1024, swizzle=k_layout.inner)
        sItem = smem.allocate_tensor(Int32, cute.make_layout((5, self.q_stages)), 16)
        q_full = smem.allocate_array(cutlass.Int64, self.q_stages)
        q_empty = smem.allocate_array(cutlass.Int64, self.q_stages)
        k_full = smem.allocate_array(cutlass.Int64, self.stages)
        k_empty = smem.allocate_array(cutlass.Int64, self.stages)
        acc_full = smem.allocate_array(cutlass.Int64, self.halves * self.buffers)
        acc_empty = smem.allocate_array(cutlass.Int64, self.halves * self.buffers)
        tmem_address = smem.allocate_array(Int32, 1)
        if warp == 0:
            cpasync.prefetch_descriptor(tma_q)
            cpasync.prefetch_descriptor(tma_k)
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(self.q_stages):
                    cute.arch.mbarrier_init(q_full + stage, 1)
                    cute.arch.mbarrier_init(q_empty + stage, 1 + 4 * self.halves)
                for stage in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(k_full + stage, 1)
                    cute.arch.mbarrier_init(k_empty + stage, 1)
                for i in cutlass.range_constexpr(self.halves * self.buffers):
                    cute.arch.mbarrier_init(acc_full + i, 1)
                    cute.arch.mbarrier_init(acc_empty + i, 4)
            cute.arch.mbarrier_init_fence()
        if warp == 1:
            cute.arch.alloc_tmem(COLUMNS, tmem_address)
            cute.arch.relinquish_tmem_alloc_permit()
            fence_before_sync()
        cute.arch.sync_threads()
        fence_after_sync()
        accumulators = cute.arch.retrieve_tmem_ptr(Float32, 16, tmem_address)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        rows = QueryRows(mOffsets, mSeqLens, row_begin, row_end, max_seqlen_k)
        # Of every half one product a buffer, side by side in tensor memory.
        product = mma.make_fragment_C(mma.partition_shape_C((HALF, BLOCK)))
        acc = cute.make_tensor(accumulators, cute.append(product.layout, cute.make_layout(self.halves * self.buffers, stride=BLOCK)))
        if warp == 0:
            self.produce(
                tma_q, tQ, sQ, tma_k, tK, sK, sItem, q_full, q_empty, k_full, k_empty, mPageTable, rows, num_blocks, skip_blocks, chunk_blocks
            )
        elif warp == 1:
            self.multiply(mma, sQ, sK, acc, sItem, q_full, q_empty, k_full, k_empty, acc_full, acc_empty)
        elif warp < OTHER_WARPS:
            if cutlass.const_expr(self.fill):
                self.fill_invisible(mOut, rows, num_blocks, warp - 2, OTHER_WARPS - 2)
        else:
            if cutlass.const_expr(mQScale is not None):
                scale *= mQScale[0]
            if cutlass.const_expr(mKScale is not None):
                scale *= mKScale[0]
            self.take_maxima(acc, sItem, q_full, q_empty, acc_full, acc_empty, mOut, row_begin, scale)
            fence_before_sync()
        cute.arch.sync_threads()
        if warp == 1:
            fence_after_sync()
            cute.arch.dealloc_tmem(accumulators, COLUMNS)

    @cute.jit
    def multiply(self, mma, sQ, sK, acc, sItem, q_full, q_empty, k_full, k_empty, acc_full, acc_empty):
        """One warp: the products of every item. What they read and write is released when they are done, not when they are started."""
        rQ, rK = mma.make_fragment_A(sQ), mma.make_fragment_B(sK)
        item, step = Int32(0), Int32(0)
        begin, end = Int32(0), Int32(1)
        while begin < end:
            q_stage = item % self.q_stages
            cute.arch.mbarrier_wait(q_full + q_stage, item // self.q_stages % 2)
            begin, end = sItem[3, q_stage], sItem[4, q_stage]
            for _ in cutlass.range(begin, end, unroll=1):
                stage, buffer = step % self.stages, step % self.buffers
                cute.arch.mbarrier_wait(k_full + stage, step // self.stages % 2)
                for half in cutlass.range_constexpr(self.halves):
                    place = half * self.buffers + buffer
                    cute.arch.mbarrier_wait(acc_empty + place, (step // self.buffers + 1) % 2)
                    fence_after_sync()
                    mma.set(tcgen05.Field.ACCUMULATE, False)
                    for k in cutlass.range_constexpr(cute.size(rQ, mode=[2])):
                        product = acc[None, 0, 0, place]
                        cute.gemm(mma, product, rQ[None, half, k, q_stage], rK[None, 0, k, stage], product)
                        mma.set(tcgen05.Field.ACCUMULATE, True)
                    with cute.arch.elect_one():
                        tcgen05.commit(acc_full + place)
                with cute.arch.elect_one():
                    tcgen05.commit(k_empty + stage)
                step += 1
            with cute.arch.elect_one():
                tcgen05.commit(q_empty + q_stage)
            item += 1

    @cute.jit
    def take_maxima(self, acc, sItem, q_full, q_empty, acc_full, acc_empty, mOut, row_begin, scale):
        """One warpgroup: the scores of its half's rows, one a thread."""
        thread = cute.arch.thread_idx()[0] % 128
        half = (cute.arch.make_warp_uniform(cute.arch.warp_idx()) - OTHER_WARPS) // 4
        thread_row = half * HALF + thread
        best = cute.make_rmem_tensor(STORE_BLOCKS, Float32)
        best.fill(NEGATIVE_INFINITY)
        item, step = Int32(0), Int32(0)
        begin, end = Int32(0), Int32(1)
        while begin < end:
            q_stage = item % self.q_stages
            cute.arch.mbarrier_wait(q_full + q_stage, item // self.q_stages % 2)
            first_row, tokens, first_position, begin, end = (sItem[i, q_stage] for i in range(5))
            arrive(q_empty + q_stage)
            item += 1
            position = first_position + thread_row // self.num_heads
            for block in cutlass.range(begin, end, unroll=1):
                place = half * self.buffers + step % self.buffers
                cute.arch.mbarrier_wait(acc_full + place, step // self.buffers % 2)
                fence_after_sync()
                maximum = Float32(NEGATIVE_INFINITY)
                if block * BLOCK + BLOCK - 1 > first_position:
                    maximum = self.row_maximum(acc, place, thread, acc_empty, position - block * BLOCK)
                else:
                    maximum = self.row_maximum(acc, place, thread, acc_empty)
                for i in cutlass.range_constexpr(STORE_BLOCKS):
                    best[i] = maximum if block % STORE_BLOCKS == i else best[i]
                if block % STORE_BLOCKS == STORE_BLOCKS - 1 or block == end - 1:
                    self.store(mOut, best, block, begin, first_row - row_begin, tokens, thread_row, scale)
                step += 1

    @cute.jit
    def row_maximum(self, acc, place, thread, acc_empty, last: Int32 | None = None):
        """The maximum over the row's columns, those past `last` left out, and the product given back once it is read. NaN is ignored."""
        columns = cute.make_tensor(acc.iterator + place * BLOCK, cute.make_layout((HALF, (PIECE, BLOCK // PIECE)), stride=(1 << 16, (1, PIECE))))
        load = tcgen05.make_tmem_copy(cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(PIECE)), Float32), columns[None, (None, 0)])
        mine = load.get_slice(thread)
        chains = [Float32(NEGATIVE_INFINITY) for _ in range(4)]
        for piece in cutlass.range_constexpr(BLOCK // PIECE):
            source = mine.partition_S(columns[None, (None, piece)])
            logits = cute.make_rmem_tensor(mine.partition_D(cute.make_identity_tensor((HALF, PIECE))).shape, Float32)
            cute.copy(load, source, logits)
            cute.arch.fence_view_async_tmem_load()
            if cutlass.const_expr(piece == BLOCK // PIECE - 1):
                fence_before_sync()
                arrive(acc_empty + place)
            for n in cutlass.range_constexpr(0, PIECE, 2):
                pair = [logits[n], logits[n + 1]]
                if cutlass.const_expr(last is not None):
                    pair = [value if piece * PIECE + n + j <= last else Float32(NEGATIVE_INFINITY) for j, value in enumerate(pair)]
                chains[n // 2 % 4] = largest(chains[n // 2 % 4], *pair)
        return cute.arch.fmax(largest(chains[0], chains[1], chains[2]), chains[3])

    @cute.jit
    def store(self, mOut, best, block, begin, first_row, tokens, thread_row, scale):
        """The kept maxima up to `block`, the last of its group or of the item. Four lanes exchange values: each stores one column of four rows."""
        lane = cute.arch.lane_idx()
        values = transpose([best[i] for i in range(STORE_BLOCKS)], lane)
        column = block // STORE_BLOCKS * STORE_BLOCKS + lane % STORE_BLOCKS
        for i in cutlass.range_constexpr(STORE_BLOCKS):
            row = thread_row - lane % STORE_BLOCKS + i
            token = row // self.num_heads
            if token < tokens and column >= begin and column <= block:
                mOut[row % self.num_heads, first_row + token, column] = values[i] * scale


@cute.jit
def transpose(values: list[Float32], lane: Int32):
    """Four values of each of four neighbouring lanes: lane j's i-th becomes lane i's j-th."""
    for bit in cutlass.range_constexpr(2):
        other = 1 << bit
        is_upper = lane & other != 0
        turned = list(values)
        for i in cutlass.range_constexpr(4):
            if cutlass.const_expr(i & other == 0):
                given = values[i] if is_upper else values[i + other]
                taken = cute.arch.shuffle_sync_bfly(given, other)
                turned[i] = taken if is_upper else values[i]
                turned[i + other] = values[i + other] if is_upper else taken
        values = turned
    return values


@cute.jit
def largest(a: Float32, b: Float32, c: Float32):
    """Of three, in one instruction."""
    return Float32(nvvm.fmax(a.ir_value(), b.ir_value(), c=c.ir_value()))


@cute.jit
def fence_before_sync():
    """What the thread has done in tensor memory comes before what is done after a synchronisation that follows."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC)


@cute.jit
def fence_after_sync():
    """What the thread will do in tensor memory comes after what others did before the synchronisation."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)


def build(variant: Variant) -> tuple[Any, tuple[Any, ...]]:
    return IndexScoreSm100(variant), arguments(variant)


KERNEL = CuteKernel("index_score_sm100", build, sources=[__file__, index_score_work.__file__, index_rows.__file__])


def index_score(call: IndexScoreCall) -> None:
    """Fill `call.out` [Hi, T, num_blocks], every element."""
    score_rows(call, call.out, 0, call.index_q.shape[0], fill=True)


def score_rows(call: IndexScoreCall | IndexTopkCall, out: torch.Tensor, row_begin: int, row_end: int, *, fill: bool, skip_blocks: int = 0) -> None:
    """See `index_score_work.launch`."""
    rows = rows_of_tile(call.index_q.shape[1], call.batch)
    chunk_blocks = CHUNK_BLOCKS if rows == 256 else call.batch.num_blocks
    ctas = num_ctas(call.index_q.device)
    launch(KERNEL, call, out, row_begin, row_end, rows=rows, chunk_blocks=chunk_blocks, num_ctas=ctas, fill=fill, skip_blocks=skip_blocks)
