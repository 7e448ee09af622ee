"""Scoring for Hopper: the largest index product of every (query token, index head) with every block of 128 keys.

A persistent kernel of one CTA a multiprocessor. A tile of rows (token, head) stays in registers as operand A of wgmma while blocks of keys stream
through shared memory by TMA, so one load of a block serves all index heads of the tile's tokens. Prefill takes tiles of 256 rows, two warpgroups of
two halves each; decode and verify take 64 or 128, all rows of a request, and read every key once: rows that are not there cost products, which wait
for memory anyway. The maximum over a block's 128 columns is taken in registers while the tensor cores work on the next product.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
import torch
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

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

CHUNK_BLOCKS = 512
"""Blocks of keys that all CTAs finish before any takes the next: 16 MiB of bf16 keys, a third of an H200's L2."""
TURN_BLOCKS = 2
"""Blocks of keys in one turn of the consumers' loop."""
TILE_COST = {"bf16": 1, "fp16": 1, "fp8_e4m3": 2}
"""What another tile of 256 rows costs, in blocks: its queries go to registers, and no product runs under the last maxima."""


def rows_of_tile(num_heads: int, batch: PagedBatch) -> int:
    """As few as hold all rows of a request, or 256; 128 where heads do not divide 8: rows of a thread with little in common take more registers."""
    needed = num_heads * max(8, -(-batch.max_seqlen_q // 8) * 8)
    return 64 if needed <= 64 else 128 if needed <= 128 or 8 % num_heads else 256


class IndexScoreSm90(ScoreWork):
    def __init__(self, variant: Variant) -> None:
        # With fewer rows keys are waited for, and come meanwhile.
        super().__init__(variant, q_stages=1, tile_cost=TILE_COST[variant.dtype] if variant.rows == 256 else 0)
        self.halves, self.groups = max(1, variant.rows // 128), min(2, variant.rows // 64)

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
        mma = sm90.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            (1, 1, 1),
            (64, BLOCK),
            warpgroup.OperandSource.RMEM,
        )
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        q_layout = cute.tile_to_shape(atom, (self.rows, DIM), (0, 1))
        k_layout = cute.tile_to_shape(atom, (BLOCK, DIM, self.stages), (0, 1, 2))
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
        ).launch(grid=(num_ctas, 1, 1), block=(32 * OTHER_WARPS + 128 * self.groups, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True)

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
        sItem = smem.allocate_tensor(Int32, cute.make_layout((5, 1)), 16)
        q_full = smem.allocate_array(cutlass.Int64, 1)
        q_empty = smem.allocate_array(cutlass.Int64, 1)
        k_full = smem.allocate_array(cutlass.Int64, self.stages)
        k_empty = smem.allocate_array(cutlass.Int64, self.stages)
        if warp == 0:
            cpasync.prefetch_descriptor(tma_q)
            cpasync.prefetch_descriptor(tma_k)
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(q_full, 1)
                cute.arch.mbarrier_init(q_empty, 4 * self.groups)
                for stage in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(k_full + stage, 1)
                    cute.arch.mbarrier_init(k_empty + stage, 4 * self.groups)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        rows = QueryRows(mOffsets, mSeqLens, row_begin, row_end, max_seqlen_k)
        if warp < OTHER_WARPS:
            cute.arch.setmaxregister_decrease(40)
            if warp == 0:
                self.produce(
                    tma_q, tQ, sQ, tma_k, tK, sK, sItem, q_full, q_empty, k_full, k_empty, mPageTable, rows, num_blocks, skip_blocks, chunk_blocks
                )
            elif cutlass.const_expr(self.fill):
                self.fill_invisible(mOut, rows, num_blocks, warp - 1, OTHER_WARPS - 1)
        else:
            cute.arch.setmaxregister_increase(232)
            if cutlass.const_expr(mQScale is not None):
                scale *= mQScale[0]
            if cutlass.const_expr(mKScale is not None):
                scale *= mKScale[0]
            self.consume(mma, sQ, sK, sItem, q_full, q_empty, k_full, k_empty, mOut, row_begin, scale)

    @cute.jit
    def consume(self, mma, sQ, sK, sItem, q_full, q_empty, k_full, k_empty, mOut, row_begin, scale):
        """One warpgroup: its rows of every item, as one or two halves of 64. One product runs while the maxima of the one before are taken."""
        thread = cute.arch.thread_idx()[0] % 128
        lane = thread % 32
        group = (cute.arch.make_warp_uniform(cute.arch.warp_idx()) - OTHER_WARPS) // 4
        thread_row = (
            group * self.halves * 64 + thread // 32 * 16 + lane // 4
        )  # its rows are thread_row + 0, 8, and where there is a second half 64, 72
        thr = mma.get_slice(thread)
        rK = mma.make_fragment_B(thr.partition_B(sK))
        rQ = [mma.make_fragment_A(thr.partition_shape_A((64, DIM))) for _ in range(self.halves)]
        acc = [cute.make_rmem_tensor(thr.partition_shape_C((64, BLOCK)), Float32) for _ in range(2)]
        best = cute.make_rmem_tensor((self.halves, 2), Float32)
        item, step = Int32(0), Int32(0)
        begin, end = Int32(0), Int32(1)
        while begin < end:
            cute.arch.mbarrier_wait(q_full, item % 2)
            first_row, tokens, first_position, begin, end = (sItem[i, 0] for i in range(5))
            if begin < end:
                for half in cutlass.range_constexpr(self.halves):
                    cute.autovec_copy(thr.partition_A(cute.local_tile(sQ, (64, DIM), (group * self.halves + half, 0))), rQ[half])
            arrive(q_empty)
            item += 1
            rows = (best, begin, end, first_row - row_begin, tokens, first_position, thread_row, scale)
            block = begin
            while block <= end - TURN_BLOCKS:
                self.score(TURN_BLOCKS, mma, acc, rQ, rK, k_full, k_empty, step, mOut, block, *rows)
                block += TURN_BLOCKS
                step += TURN_BLOCKS
            while block < end:
                self.score(1, mma, acc, rQ, rK, k_full, k_empty, step, mOut, block, *rows)
                block += 1
                step += 1

    @cute.jit
    def score(
        self,
        count: cutlass.Constexpr[int],
        mma,
        acc,
        rQ,
        rK,
        k_full,
        k_empty,
        step,
        mOut,
        block,
        best,
        begin,
        end,
        first_row,
        tokens,
        first_position,
        thread_row,
        scale,
    ):
        """`count` blocks from `block` on. Products do not run on beyond it: the compiler follows them within one turn of a loop only."""
        products = self.halves * count
        for i in cutlass.range_constexpr(products + 1):
            if cutlass.const_expr(i < products):
                turn, half = i // self.halves, i % self.halves
                stage = (step + turn) % self.stages
                if cutlass.const_expr(half == 0):
                    cute.arch.mbarrier_wait(k_full + stage, (step + turn) // self.stages % 2)
                multiply(mma, rQ[half], rK[None, None, None, stage], acc[i % 2])
            if cutlass.const_expr(i > 0):
                turn, half = (i - 1) // self.halves, (i - 1) % self.halves
                warpgroup.wait_group(1 if i < products else 0)
                self.take_maxima(acc[(i - 1) % 2], best, half, block + turn, first_position, thread_row)
                if cutlass.const_expr(half == self.halves - 1):
                    arrive(k_empty + (step + turn) % self.stages)
                    self.store(mOut, best, block + turn, begin, end, first_row, tokens, thread_row, scale)

    @cute.jit
    def take_maxima(self, acc, best, half: cutlass.Constexpr[int], block, first_position, thread_row):
        """A block's maxima of one half's rows; of every STORE_BLOCKS blocks a lane keeps its own."""
        lane = cute.arch.lane_idx()
        for i in cutlass.range_constexpr(2):
            maximum = Float32(NEGATIVE_INFINITY)
            if block * BLOCK + BLOCK - 1 > first_position:
                token, _ = self.token_and_head(thread_row, half * 64 + i * 8)
                maximum = row_maximum(acc, i, first_position + token - block * BLOCK - lane % 4 * 2)
            else:
                maximum = row_maximum(acc, i)
            maximum = cute.arch.fmax(maximum, cute.arch.shuffle_sync_bfly(maximum, 1))
            maximum = cute.arch.fmax(maximum, cute.arch.shuffle_sync_bfly(maximum, 2))
            best[half, i] = maximum if lane % 4 == block % STORE_BLOCKS else best[half, i]

    @cute.jit
    def store(self, mOut, best, block, begin, end, first_row, tokens, thread_row, scale):
        """The kept maxima, once `block` is the last of its group or of the item."""
        if block % STORE_BLOCKS == STORE_BLOCKS - 1 or block == end - 1:
            column = block // STORE_BLOCKS * STORE_BLOCKS + cute.arch.lane_idx() % 4
            for half in cutlass.range_constexpr(self.halves):
                for i in cutlass.range_constexpr(2):
                    token, head = self.token_and_head(thread_row, half * 64 + i * 8)
                    if token < tokens and column >= begin and column <= block:
                        mOut[head, first_row + token, column] = best[half, i] * scale

    @cute.jit
    def token_and_head(self, thread_row, offset: cutlass.Constexpr[int]):
        """Of row thread_row + offset, a multiple of 8; the compiler does not see by itself what the thread's rows have in common."""
        if cutlass.const_expr(8 % self.num_heads == 0):
            return thread_row // self.num_heads + offset // self.num_heads, thread_row % self.num_heads
        return (thread_row + offset) // self.num_heads, (thread_row + offset) % self.num_heads


@cute.jit
def multiply(mma: cute.TiledMma, rQ: cute.Tensor, rK: cute.Tensor, acc: cute.Tensor):
    """acc = Q K^T, started and committed."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, False)
    for k in cutlass.range_constexpr(cute.size(rK, mode=[2])):
        cute.gemm(atom, acc, rQ[None, None, k], rK[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@cute.jit
def row_maximum(acc: cute.Tensor, i: cutlass.Constexpr[int], last: Int32 | None = None):
    """The maximum over the thread's columns of row i of its two, those past `last`, counted from the thread's first, left out. NaN is ignored.

    Accumulators are never written: while another product runs, that would make the compiler wait for it.
    """
    chains = [Float32(NEGATIVE_INFINITY) for _ in range(4)]
    for n in cutlass.range_constexpr(BLOCK // 8):
        for j in cutlass.range_constexpr(2):
            logit = acc[(j, i, n), 0, 0]
            if cutlass.const_expr(last is not None):
                logit = logit if n * 8 + j <= last else Float32(NEGATIVE_INFINITY)
            chains[n % 4] = cute.arch.fmax(chains[n % 4], logit)
    return cute.arch.fmax(cute.arch.fmax(chains[0], chains[1]), cute.arch.fmax(chains[2], chains[3]))


def build(variant: Variant) -> tuple[Any, tuple[Any, ...]]:
    return IndexScoreSm90(variant), arguments(variant)


KERNEL = CuteKernel("index_score_sm90", build, sources=[__file__, index_score_work.__file__, index_rows.__file__])


def index_score(call: IndexScoreCall) -> None:
    """Fill `call.out` [Hi, T, num_blocks], every element."""
    score_rows(call, call.out, 0, call.index_q.shape[0], fill=True)


def score_rows(call: IndexScoreCall | IndexTopkCall, out: torch.Tensor, row_begin: int, row_end: int, *, fill: bool, skip_blocks: int = 0) -> None:
    """See `index_score_work.launch`."""
    rows = rows_of_tile(call.index_q.shape[1], call.batch)
    chunk_blocks = CHUNK_BLOCKS if rows == 256 else call.batch.num_blocks
    ctas = num_ctas(call.index_q.device)
    launch(KERNEL, call, out, row_begin, row_end, rows=rows, chunk_blocks=chunk_blocks, num_ctas=ctas, fill=fill, skip_blocks=skip_blocks)
