"""Scoring for Hopper: the largest index product of every (query token, index head) with every block of 128 keys.

A persistent kernel of one CTA a multiprocessor. A tile of rows (token, head) stays in registers as operand A of wgmma while blocks of keys stream
through shared memory by TMA, so one load of a block serves all index heads of the tile's tokens. Prefill takes tiles of 256 rows, two warpgroups of
two halves each; decode and verify take 64 or 128, all rows of a request, and read every key once: rows that are not there cost products, which wait
for memory anyway. The maximum over a block's 128 columns is taken in registers while the tensor cores work on the next product.
"""

from __future__ import annotations

import enum
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
import torch
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from m3attn.batch import PagedBatch
from m3attn.calls import IndexScoreCall, IndexTopkCall
from m3attn.dsl_kernels import index_score_work, row_maximum
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
    product_dtype,
)
from m3attn.dsl_kernels.row_maximum import INFINITY_BITS, over_columns

CHUNK_BLOCKS = 512
"""Blocks of keys that all CTAs finish before any takes the next: 16 MiB of bf16 keys, a third of an H200's L2."""
TURN_BLOCKS = 2
"""Blocks of keys in one turn of the consumers' loop; 1 for 16 bit with 256 rows, whose code is short that way and whose products last."""
BITS_TURN_BLOCKS = 8
"""The same where maxima are taken by bits: a multiple of STORE_BLOCKS, and fewer than there are stages, since a turn's keys are held to its end."""
TILE_COST = {"bf16": 1, "fp16": 1, "fp8_e4m3": 2}
"""What another tile of 256 rows costs, in blocks: its queries go to registers, and no product runs under the last maxima."""


def rows_of_tile(num_heads: int, batch: PagedBatch) -> int:
    """As few as hold all rows of a request, or 256; 128 where heads do not divide 8: rows of a thread with little in common take more registers."""
    needed = num_heads * max(8, -(-batch.max_seqlen_q // 8) * 8)
    return 64 if needed <= 64 else 128 if needed <= 128 or 8 % num_heads else 256


class Maxima(enum.Enum):
    """How a block's maxima are taken."""

    BITS = enum.auto()
    """By the products' bits: not their maximum where a row has nothing but negative products, or a NaN."""
    FLOATS = enum.auto()
    MASKED = enum.auto()
    """As FLOATS, of what a row sees."""


class IndexScoreSm90(ScoreWork):
    def __init__(self, variant: Variant) -> None:
        groups = min(2, variant.rows // 64)
        # With fewer rows keys are waited for, and come meanwhile.
        tile_cost = TILE_COST[product_dtype(variant.q_dtype, variant.k_dtype)] if variant.rows == 256 else 0
        # Beside two groups with so many registers there is no room for a third, nor need: a block's products take four times as long as with 64 rows.
        super().__init__(
            variant,
            groups=groups,
            q_stages=1,
            q_readers=4 * groups,
            k_readers=4 * groups,
            has_widening_group=groups == 1,
            tile_cost=tile_cost,
            whole_requests=variant.rows == 64,
        )
        self.halves = max(1, variant.rows // 128)
        self.by_bits = variant.rows == 256 and self.dtype.width == 8
        self.turn = 1 if self.halves == 2 and not self.by_bits else TURN_BLOCKS
        self.registers = (232, 40 if groups == 2 else 104)

    def operands(self) -> tuple[cute.TiledMma, cute.ComposedLayout, cute.ComposedLayout]:
        source, major = warpgroup.OperandSource.RMEM, OperandMajorMode.K
        mma = sm90.make_trivial_tiled_mma(self.dtype, self.dtype, major, major, Float32, (1, 1, 1), (64, BLOCK), source)
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        return mma, cute.tile_to_shape(atom, (self.rows, DIM, 1), (0, 1, 2)), cute.tile_to_shape(atom, (BLOCK, DIM, self.stages), (0, 1, 2))

    def set_up(self, smem: cutlass.memory.SmemAllocator, warp: Int32) -> cute.Tensor:
        """Where the warps of a group vote: twice, since the first may be at the next vote while the last still counts this one."""
        return smem.allocate_tensor(Int32, cute.make_layout((4, self.groups, 2)), 16)

    @cute.jit
    def consume(self, mma, q, k, sQ, sK, sVotes, mOut, row_begin, scale):
        """One warpgroup: its rows of every item, as one or two halves of 64. One product runs while the maxima of the one before are taken."""
        thread = cute.arch.thread_idx()[0] % 128
        lane = thread % 32
        group = (cute.arch.make_warp_uniform(cute.arch.warp_idx()) - self.first_consumer) // 4
        # Its rows are thread_row + 0, 8, and where there is a second half 64, 72.
        thread_row = group * self.halves * 64 + thread // 32 * 16 + lane // 4
        thr = mma.get_slice(thread)
        rK = mma.make_fragment_B(thr.partition_B(sK))
        rQ = [mma.make_fragment_A(thr.partition_shape_A((64, DIM))) for _ in range(self.halves)]
        acc = [cute.make_rmem_tensor(thr.partition_shape_C((64, BLOCK)), Float32) for _ in range(2)]
        best = cute.make_rmem_tensor((self.halves, 2), Float32)
        item, step, turns = Int32(0), Int32(0), Int32(0)
        begin, end = Int32(0), Int32(1)
        while begin < end:
            q.wait_full(item)
            first_row, tokens, first_position, begin, end = (q.items[i, 0] for i in range(5))
            if begin < end:
                for half in cutlass.range_constexpr(self.halves):
                    cute.autovec_copy(thr.partition_A(cute.local_tile(sQ, (64, DIM), (group * self.halves + half, 0, 0))), rQ[half])
            arrive(q.empty)
            item += 1
            where = (begin, end, *self.rows_of_scores(mOut, first_row - row_begin, tokens, thread_row), first_position, thread_row, scale)
            # Blocks that every row sees to their ends.
            whole = cutlass.min(cutlass.max(first_position + 1, 0) // BLOCK, end)
            block = begin
            if cutlass.const_expr(self.by_bits):
                is_wrong = cutlass.Boolean(False)
                while not is_wrong and block <= whole - BITS_TURN_BLOCKS:
                    turns += 1
                    votes = sVotes[None, group, turns % 2]
                    is_wrong = self.score(BITS_TURN_BLOCKS, Maxima.BITS, mma, acc, rQ, rK, k, step, best, block, *where, votes)
                    if not is_wrong:
                        for i in cutlass.range_constexpr(BITS_TURN_BLOCKS):
                            arrive(k.empty + (step + i) % k.stages)
                        block += BITS_TURN_BLOCKS
                        step += BITS_TURN_BLOCKS
            while block <= whole - self.turn:
                self.score(self.turn, Maxima.FLOATS, mma, acc, rQ, rK, k, step, best, block, *where)
                block += self.turn
                step += self.turn
            while block < end:
                self.score(1, Maxima.MASKED, mma, acc, rQ, rK, k, step, best, block, *where)
                block += 1
                step += 1

    @cute.jit
    def score(
        self,
        count: cutlass.Constexpr[int],
        maxima: cutlass.Constexpr[Maxima],
        mma,
        acc,
        rQ,
        rK,
        k,
        step,
        best,
        block,
        begin,
        end,
        gRows,
        has_row,
        first_position,
        thread_row,
        scale,
        sVotes=None,
    ):
        """`count` blocks from `block` on. Products do not run on beyond it: the compiler follows them within one turn of a loop only.

        Maxima.BITS: returns whether any maximum of the warpgroup's rows is not that of the products. Then the blocks are to be scored once more, and
        keep their keys. The last product's maxima are mended at once: the vote on all others runs beside that product.
        """
        products = self.halves * count
        is_wrong = cutlass.Boolean(False)
        for i in cutlass.range_constexpr(products + 1):
            if cutlass.const_expr(i < products):
                turn, half = i // self.halves, i % self.halves
                if cutlass.const_expr(half == 0):
                    k.wait_full(step + turn)
                multiply(mma, rQ[half], rK[None, None, None, (step + turn) % k.stages], acc[i % 2])
            if cutlass.const_expr(i > 0):
                turn, half = (i - 1) // self.halves, (i - 1) % self.halves
                if cutlass.const_expr(i == products and maxima == Maxima.BITS):
                    is_wrong = self.any_of_group(sVotes, is_wrong)
                warpgroup.wait_group(1 if i < products else 0)
                if cutlass.const_expr(half == self.halves - 1 and maxima != Maxima.BITS):
                    arrive(k.empty + (step + turn) % k.stages)
                maximum = self.row_maximum(acc[(i - 1) % 2], half, block + turn, maxima, first_position, thread_row)
                if cutlass.const_expr(maxima == Maxima.BITS):
                    is_row_wrong = Uint32(maximum.bitcast(Int32)) > INFINITY_BITS
                    if cutlass.const_expr(i < products):
                        is_wrong = is_wrong | is_row_wrong
                    elif cute.arch.vote_any_sync(is_row_wrong):
                        maximum = self.row_maximum(acc[(i - 1) % 2], half, block + turn, Maxima.FLOATS, first_position, thread_row)
                # A long turn begins with a group of blocks that are stored together.
                nth = turn if cutlass.const_expr(count >= STORE_BLOCKS) else block + turn - begin
                self.keep(maximum, best, half, nth)
                if cutlass.const_expr(half == self.halves - 1):
                    if cutlass.const_expr(count >= STORE_BLOCKS):
                        if cutlass.const_expr(turn % STORE_BLOCKS == STORE_BLOCKS - 1):
                            self.store(best, block + turn - STORE_BLOCKS + 1, None, gRows, has_row, scale)
                    elif nth % STORE_BLOCKS == STORE_BLOCKS - 1 or block + turn == end - 1:
                        self.store(best, begin + nth // STORE_BLOCKS * STORE_BLOCKS, block + turn, gRows, has_row, scale)
        return is_wrong

    @cute.jit
    def row_maximum(self, acc, half: cutlass.Constexpr[int], block, maxima: cutlass.Constexpr[Maxima], first_position, thread_row):
        """A block's maximum in one of the thread's two rows of a half."""
        if cutlass.const_expr(maxima == Maxima.MASKED):
            rows = []
            for i in cutlass.range_constexpr(2):
                token, _ = self.token_and_head(thread_row, half * 64 + i * 8)
                rows.append(columns_of_row(acc, i, first_position + token - block * BLOCK - cute.arch.lane_idx() % 4 * 2))
            return float_maximum(*rows)
        rows = [columns_of_row(acc, i) for i in range(2)]
        if cutlass.const_expr(maxima == Maxima.FLOATS):
            return float_maximum(*rows)
        bits = one_of_two(*(over_columns([logit.bitcast(Int32) for logit in row], cutlass.max) for row in rows), cutlass.max)
        return bits.bitcast(Float32)

    @cute.jit
    def keep(self, maximum, best, half: cutlass.Constexpr[int], nth):
        """Of every STORE_BLOCKS blocks of an item, `nth` counted from its first, two of a row's four lanes keep two each."""
        is_kept = (nth >> 1) & 1 == (cute.arch.lane_idx() >> 1) & 1
        for i in cutlass.range_constexpr(2):
            best[half, i] = maximum if is_kept and nth & 1 == i else best[half, i]

    @cute.jit
    def store(self, best, block, last, gRows, has_row, scale):
        """The kept maxima of blocks `block` to `last`, or of STORE_BLOCKS."""
        for half in cutlass.range_constexpr(self.halves):
            for i in cutlass.range_constexpr(2):
                column = block + (cute.arch.lane_idx() & 2) + i
                is_scored = has_row[half]
                if cutlass.const_expr(last is not None):
                    is_scored = is_scored and column <= last
                if is_scored:
                    gRows[half][column] = best[half, i] * scale

    @cute.jit
    def rows_of_scores(self, mOut, first_row, tokens, thread_row):
        """For each half the row whose scores this lane stores, and whether there is one."""
        gRows, has_row = [], []
        for half in cutlass.range_constexpr(self.halves):
            token, head = self.token_and_head(thread_row + cute.arch.lane_idx() % 2 * 8, half * 64)
            gRows.append(mOut[head, first_row + token, None])
            has_row.append(token < tokens)
        return gRows, has_row

    @cute.jit
    def any_of_group(self, sVotes, flag):
        """Whether it holds for any thread of the warpgroup. `sVotes` [4]: not those of the call before."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - self.first_consumer
        is_any = cute.arch.vote_any_sync(flag)
        if cute.arch.lane_idx() == 0:
            sVotes[warp % 4] = Int32(1) if is_any else Int32(0)
        cute.arch.barrier(barrier_id=1 + warp // 4, number_of_threads=128)
        return (sVotes[0] | sVotes[1] | sVotes[2] | sVotes[3]) != 0

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
def columns_of_row(acc: cute.Tensor, i: cutlass.Constexpr[int], last: Int32 | None = None):
    """The thread's columns of row i of its two; -inf for those past `last`, counted from the thread's first.

    Accumulators are never written: while another product runs, that would make the compiler wait for it.
    """
    columns = []
    for n in cutlass.range_constexpr(BLOCK // 8):
        for j in cutlass.range_constexpr(2):
            logit = acc[(j, i, n), 0, 0]
            if cutlass.const_expr(last is not None):
                logit = logit if n * 8 + j <= last else Float32(NEGATIVE_INFINITY)
            columns.append(logit)
    return columns


def float_maximum(*rows):
    """NaN is ignored."""
    return one_of_two(*(over_columns([Float32(NEGATIVE_INFINITY), *row], cute.arch.fmax) for row in rows), cute.arch.fmax)


@cute.jit
def one_of_two(upper, lower, maximum: cutlass.Constexpr):
    """The maximum over a row's four lanes: of `upper` in even lanes, of `lower` in odd ones."""
    is_odd = cute.arch.lane_idx() % 2 == 1
    own, other = (lower, upper) if is_odd else (upper, lower)
    own = maximum(own, cute.arch.shuffle_sync_bfly(other, 1))
    return maximum(own, cute.arch.shuffle_sync_bfly(own, 2))


def build(variant: Variant) -> tuple[Any, tuple[Any, ...]]:
    return IndexScoreSm90(variant), arguments(variant)


KERNEL = CuteKernel("index_score_sm90", build, sources=[__file__, row_maximum.__file__, *index_score_work.SOURCES])


def index_score(call: IndexScoreCall) -> None:
    """Fill `call.out` [Hi, T, num_blocks], every element."""
    score_rows(call, call.out, 0, call.index_q.shape[0], fill=True)


def score_rows(call: IndexScoreCall | IndexTopkCall, out: torch.Tensor, row_begin: int, row_end: int, *, fill: bool, skip_blocks: int = 0) -> None:
    """See `index_score_work.launch`."""
    rows = rows_of_tile(call.index_q.shape[1], call.batch)
    chunk_blocks = CHUNK_BLOCKS if rows == 256 else call.batch.num_blocks
    ctas = num_ctas(call.index_q.device)
    launch(KERNEL, call, out, row_begin, row_end, rows=rows, chunk_blocks=chunk_blocks, num_ctas=ctas, fill=fill, skip_blocks=skip_blocks)
