"""Scoring for Blackwell: the largest index product of every (query token, index head) with every block of 128 keys.

A persistent kernel of one CTA a multiprocessor, with Hopper's work, loads and launch. A tile of 256 rows (token, head), or of 128 where those are all
rows of a request, is one or two halves of 128: a half's products with a block of keys fill 128 columns of tensor memory, a row a lane. One warp
loads, one starts products, and a warpgroup a half takes the maxima from there, a row a thread, while the next products run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
import torch
from cutlass import Float32, Int32
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from m3attn.batch import PagedBatch
from m3attn.calls import IndexScoreCall, IndexTopkCall
from m3attn.dsl_kernels import index_score_work
from m3attn.dsl_kernels.common.kernels import CuteKernel
from m3attn.dsl_kernels.index_score_work import (
    BLOCK,
    DIM,
    NEGATIVE_INFINITY,
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


@dataclass(frozen=True)
class Accumulators:
    """Products in tensor memory: `buffers` of the first half of rows, then of the second. Barriers say that one is done, and that it is read."""

    address: cute.Pointer  # in shared memory: where tensor memory begins
    full: cute.Pointer
    empty: cute.Pointer

    def memory(self) -> cute.Pointer:
        return cute.arch.retrieve_tmem_ptr(Float32, 16, self.address)


class IndexScoreSm100(ScoreWork):
    def __init__(self, variant: Variant) -> None:
        self.halves = variant.rows // HALF
        self.buffers = COLUMNS // BLOCK // self.halves
        # A mixed variant keeps the loaded operand too.
        q_stages = 2 if variant.q_dtype == variant.k_dtype else 1
        super().__init__(variant, groups=self.halves, q_stages=q_stages, q_readers=1 + 4 * self.halves, k_readers=1, spare=2)

    def operands(self) -> tuple[cute.TiledMma, cute.ComposedLayout, cute.ComposedLayout]:
        major = OperandMajorMode.K
        mma = sm100.make_trivial_tiled_mma(self.dtype, self.dtype, major, major, Float32, tcgen05.CtaGroup.ONE, (HALF, BLOCK))
        q_layout = sm100.make_smem_layout_a(mma, (self.rows, BLOCK, DIM), self.dtype, self.q_stages)
        return mma, q_layout, sm100.make_smem_layout_b(mma, (HALF, BLOCK, DIM), self.dtype, self.stages)

    @cute.jit
    def set_up(self, smem, warp):
        places = self.halves * self.buffers
        full, empty = (smem.allocate_array(cutlass.Int64, places) for _ in range(2))
        own = Accumulators(smem.allocate_array(Int32, 1), full, empty)
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(places):
                    cute.arch.mbarrier_init(own.full + i, 1)
                    cute.arch.mbarrier_init(own.empty + i, 4)
            cute.arch.mbarrier_init_fence()
        if warp == 1:
            cute.arch.alloc_tmem(COLUMNS, own.address)
            cute.arch.relinquish_tmem_alloc_permit()
            fence_before_sync()
        return own

    @cute.jit
    def finish(self, own, warp):
        fence_before_sync()
        cute.arch.sync_threads()
        if warp == 1:
            fence_after_sync()
            cute.arch.dealloc_tmem(own.memory(), COLUMNS)

    @cute.jit
    def multiply(self, mma, q, k, sQ, sK, own):
        """One warp: the products of every item. What they read and write is released when they are done, not when they are started."""
        fence_after_sync()
        one = mma.make_fragment_C(mma.partition_shape_C((HALF, BLOCK)))
        acc = cute.make_tensor(own.memory(), cute.append(one.layout, cute.make_layout(self.halves * self.buffers, stride=BLOCK)))
        rQ, rK = mma.make_fragment_A(sQ), mma.make_fragment_B(sK)
        item, step = Int32(0), Int32(0)
        begin, end = Int32(0), Int32(1)
        while begin < end:
            q_stage = item % q.stages
            q.wait_full(item)
            begin, end = q.items[3, q_stage], q.items[4, q_stage]
            for _ in cutlass.range(begin, end, unroll=1):
                stage, buffer = step % k.stages, step % self.buffers
                k.wait_full(step)
                for half in cutlass.range_constexpr(self.halves):
                    place = half * self.buffers + buffer
                    cute.arch.mbarrier_wait(own.empty + place, (step // self.buffers + 1) % 2)
                    fence_after_sync()
                    mma.set(tcgen05.Field.ACCUMULATE, False)
                    for i in cutlass.range_constexpr(cute.size(rQ, mode=[2])):
                        product = acc[None, 0, 0, place]
                        cute.gemm(mma, product, rQ[None, half, i, q_stage], rK[None, 0, i, stage], product)
                        mma.set(tcgen05.Field.ACCUMULATE, True)
                    with cute.arch.elect_one():
                        tcgen05.commit(own.full + place)
                with cute.arch.elect_one():
                    tcgen05.commit(k.empty + stage)
                step += 1
            with cute.arch.elect_one():
                tcgen05.commit(q.empty + q_stage)
            item += 1

    @cute.jit
    def consume(self, mma, q, k, sQ, sK, own, mOut, row_begin, scale):
        """One warpgroup: the scores of its half's rows, one a thread."""
        fence_after_sync()
        acc = own.memory()
        thread = cute.arch.thread_idx()[0] % 128
        half = (cute.arch.make_warp_uniform(cute.arch.warp_idx()) - self.first_consumer) // 4
        thread_row = half * HALF + thread
        best = cute.make_rmem_tensor(STORE_BLOCKS, Float32)
        best.fill(NEGATIVE_INFINITY)
        item, step = Int32(0), Int32(0)
        begin, end = Int32(0), Int32(1)
        while begin < end:
            q_stage = item % q.stages
            q.wait_full(item)
            first_row, tokens, first_position, begin, end = (q.items[i, q_stage] for i in range(5))
            arrive(q.empty + q_stage)
            item += 1
            position = first_position + thread_row // self.num_heads
            for block in cutlass.range(begin, end, unroll=1):
                place = half * self.buffers + step % self.buffers
                cute.arch.mbarrier_wait(own.full + place, step // self.buffers % 2)
                fence_after_sync()
                maximum = Float32(NEGATIVE_INFINITY)
                if block * BLOCK + BLOCK - 1 > first_position:
                    maximum = self.row_maximum(acc, place, thread, own.empty, position - block * BLOCK)
                else:
                    maximum = self.row_maximum(acc, place, thread, own.empty)
                for i in cutlass.range_constexpr(STORE_BLOCKS):
                    best[i] = maximum if block % STORE_BLOCKS == i else best[i]
                if block % STORE_BLOCKS == STORE_BLOCKS - 1 or block == end - 1:
                    self.store(mOut, best, block, begin, first_row - row_begin, tokens, thread_row, scale)
                step += 1

    @cute.jit
    def row_maximum(self, acc, place, thread, acc_empty, last: Int32 | None = None):
        """The maximum over the row's columns, those past `last` left out, and the product given back once it is read. NaN is ignored."""
        columns = cute.make_tensor(acc + place * BLOCK, cute.make_layout((HALF, (PIECE, BLOCK // PIECE)), stride=(1 << 16, (1, PIECE))))
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


KERNEL = CuteKernel("index_score_sm100", build, sources=[__file__, *index_score_work.SOURCES])


def index_score(call: IndexScoreCall) -> None:
    """Fill `call.out` [Hi, T, num_blocks], every element."""
    score_rows(call, call.out, 0, call.index_q.shape[0], fill=True)


def score_rows(call: IndexScoreCall | IndexTopkCall, out: torch.Tensor, row_begin: int, row_end: int, *, fill: bool, skip_blocks: int = 0) -> None:
    """See `index_score_work.launch`."""
    rows = rows_of_tile(call.index_q.shape[1], call.batch)
    chunk_blocks = CHUNK_BLOCKS if rows == 256 else call.batch.num_blocks
    ctas = num_ctas(call.index_q.device)
    launch(KERNEL, call, out, row_begin, row_end, rows=rows, chunk_blocks=chunk_blocks, num_ctas=ctas, fill=fill, skip_blocks=skip_blocks)
