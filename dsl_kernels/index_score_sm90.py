"""Scoring for Hopper: the largest index product of every (query token, index head) with every block of 128 keys.

A persistent kernel of one CTA a multiprocessor. A tile of rows (token, head) stays in registers as operand A of wgmma while blocks of keys stream
through shared memory by TMA, so one load of a block serves all index heads of the tile's tokens. Prefill takes tiles of 256 rows, two warpgroups of
two halves each; decode and verify take 64 or 128, all rows of a request, and read every key once: rows that are not there cost products, which wait
for memory anyway. The maximum over a block's 128 columns is taken in registers while the tensor cores work on the next product.

Work is counted in pairs (row tile, live block), which differ in nothing but where they lie: every CTA takes an equal run of them, cut at any block,
so causal and ragged batches balance, and one token, or 171, behind a long prefix fill the GPU. The count goes by chunks of CHUNK_BLOCKS blocks, one
chunk after another, so that all CTAs read the same keys at about the same time and find them in L2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
import torch
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from m3attn.batch import PagedBatch
from m3attn.calls import IndexScoreCall, IndexTopkCall
from m3attn.choice import UnsupportedProblem
from m3attn.dsl_kernels import index_rows
from m3attn.dsl_kernels.common.kernels import CuteKernel
from m3attn.dsl_kernels.index_rows import QueryRows
from m3attn.dtypes import dtype_name

BLOCK = 128
BLOCK_SHIFT = 7
DIM = 128
CHUNK_BLOCKS = 512
"""Blocks of keys that all CTAs finish before any takes the next: 16 MiB of bf16 keys, a third of an H200's L2."""
OTHER_WARPS = 4
"""The first warp loads, the next three store -inf where no key is visible; behind them come the consumers."""
SHARED_BYTES = 224 * 1024
"""What queries and stages of keys may take."""
MAX_STAGES = 12
TURN_BLOCKS = 2
"""Blocks of keys in one turn of the consumers' loop."""
STORE_BLOCKS = 4
"""Scores of so many blocks are stored together: the four lanes of a row hold one each."""

DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp8_e4m3": cutlass.Float8E4M3FN}
NEGATIVE_INFINITY = float("-inf")


@dataclass(frozen=True)
class Variant:
    """`rows` of a tile: 64, 128 or 256. `fill`: -inf is stored where a row sees no key. `q_scale`, `k_scale`: the scale lies on the device."""

    dtype: str
    rows: int
    num_heads: int
    page_size: int
    fill: bool
    q_scale: bool
    k_scale: bool


def tokens_of_tile(rows: int, num_heads: int) -> int:
    """Query tokens of a row tile: a multiple of 8, so that their rows fill whole swizzle patterns."""
    return rows // num_heads // 8 * 8


def rows_of_tile(num_heads: int, batch: PagedBatch) -> int:
    """As few as hold all rows of a request, or 256; 128 where heads do not divide 8: rows of a thread with little in common take more registers."""
    needed = num_heads * max(8, -(-batch.max_seqlen_q // 8) * 8)
    return 64 if needed <= 64 else 128 if needed <= 128 or 8 % num_heads else 256


class IndexScoreSm90:
    def __init__(self, variant: Variant) -> None:
        self.dtype = DTYPES[variant.dtype]
        self.num_heads, self.page_size, self.fill = variant.num_heads, variant.page_size, variant.fill
        self.rows, self.halves, self.groups = variant.rows, max(1, variant.rows // 128), min(2, variant.rows // 64)
        self.tokens = tokens_of_tile(self.rows, self.num_heads)
        self.span = 128 * 8 // self.dtype.width  # elements of a 128-byte row of the swizzle pattern
        self.q_bytes = self.tokens * self.num_heads * DIM * self.dtype.width // 8
        self.k_bytes = BLOCK * DIM * self.dtype.width // 8
        self.stages = min(MAX_STAGES, (SHARED_BYTES - self.rows * DIM * self.dtype.width // 8) // self.k_bytes)

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
        # A box of TMA is as wide as the swizzle pattern; rows of keys follow one another there, page by page.
        q_box = (self.num_heads, self.tokens, self.span)
        q_box_layout = cute.make_composed_layout(q_layout.inner, 0, cute.make_layout(q_box, stride=(self.span, self.span * self.num_heads, 1)))
        k_box = (self.page_size, self.span)
        k_box_layout = cute.make_composed_layout(k_layout.inner, 0, cute.make_layout(k_box, stride=(self.span, 1)))
        load = cpasync.CopyBulkTensorTileG2SOp()
        mQ = cute.make_tensor(mQ.iterator, cute.select(mQ.layout, [1, 0, 2]))
        mK = cute.make_tensor(mK.iterator, cute.select(mK.layout, [1, 2, 0]))
        tma_q, tQ = cpasync.make_tiled_tma_atom(load, mQ, q_box_layout, q_box)
        tma_k, tK = cpasync.make_tiled_tma_atom(load, mK, k_box_layout, k_box)
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
        sItem = smem.allocate_tensor(Int32, cute.make_layout(5), 16)
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
                self.fill_invisible(mOut, rows, num_blocks, warp - 1)
        else:
            cute.arch.setmaxregister_increase(232)
            if cutlass.const_expr(mQScale is not None):
                scale *= mQScale[0]
            if cutlass.const_expr(mKScale is not None):
                scale *= mKScale[0]
            self.consume(mma, sQ, sK, sItem, q_full, q_empty, k_full, k_empty, mOut, row_begin, scale)

    @cute.jit
    def live_blocks(self, rows: QueryRows, tile: Int32, num_blocks: Int32, skip_blocks: Int32):
        """(request, first_row, tokens, first_position, seq_len) of a row tile, and the blocks that need scores: those its last row sees."""
        request, first_row, tokens, first_position, seq_len = rows.tile(tile, self.tokens)
        live = index_rows.blocks_up_to(first_position + tokens - 1, BLOCK_SHIFT, num_blocks)
        live = live if tokens > 0 and live > skip_blocks else 0
        return request, first_row, tokens, first_position, seq_len, live

    @cute.jit
    def produce(self, tma_q, tQ, sQ, tma_k, tK, sK, sItem, q_full, q_empty, k_full, k_empty, mPageTable, rows, num_blocks, skip_blocks, chunk_blocks):
        """One warp: its CTA's items, each a row tile and a run of its blocks, then their loads."""
        lane = cute.arch.lane_idx()
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        num_tiles = rows.num_tiles(self.tokens)
        item, step = Int32(0), Int32(0)
        for first_block in cutlass.range(0, num_blocks, chunk_blocks, unroll=1):
            total = Int32(0)
            for base in cutlass.range(0, num_tiles, 32, unroll=1):
                _, _, _, _, _, live = self.live_blocks(rows, base + lane, num_blocks, skip_blocks)
                total += cutlass.min(cutlass.max(live - first_block, 0), chunk_blocks)
            total = cute.arch.warp_reduction_sum(total)
            share = cute.ceil_div(total, num_ctas)
            begin = cutlass.min(cta * share, total)
            end = cutlass.min(begin + share, total)
            before, base = Int32(0), Int32(0)
            while base < num_tiles and before < end:
                request, first_row, tokens, first_position, seq_len, live = self.live_blocks(rows, base + lane, num_blocks, skip_blocks)
                work = cutlass.min(cutlass.max(live - first_block, 0), chunk_blocks)
                up_to = before + index_rows.prefix_sum(work, lane)
                tile_begin = cutlass.max(begin - (up_to - work), 0)
                tile_end = cutlass.min(end - (up_to - work), work)
                pending = cute.arch.vote_ballot_sync(tile_begin < tile_end)
                while pending != 0:
                    source = 31 - cute.arch.clz(pending & -pending)
                    pending = pending & (pending - 1)
                    item_begin = first_block + cute.arch.shuffle_sync(tile_begin, source)
                    item_end = first_block + cute.arch.shuffle_sync(tile_end, source)
                    item_row = cute.arch.shuffle_sync(first_row, source)
                    item_tokens = cute.arch.shuffle_sync(tokens, source)
                    item_position = cute.arch.shuffle_sync(first_position, source)
                    self.load_queries(tma_q, tQ, sQ, sItem, q_full, q_empty, item, item_row, item_tokens, item_position, item_begin, item_end)
                    item += 1
                    item_request = cute.arch.shuffle_sync(request, source)
                    item_seq_len = cute.arch.shuffle_sync(seq_len, source)
                    for block in cutlass.range(item_begin, item_end, unroll=1):
                        self.load_keys(tma_k, tK, sK, k_full, k_empty, step, mPageTable, item_request, item_seq_len, block)
                        step += 1
                before = cute.arch.shuffle_sync(up_to, 31)
                base += 32
        self.load_queries(tma_q, tQ, sQ, sItem, q_full, q_empty, item, Int32(0), Int32(0), Int32(0), Int32(0), Int32(0))

    @cute.jit
    def load_queries(self, tma_q, tQ, sQ, sItem, q_full, q_empty, item, first_row, tokens, first_position, begin, end):
        """Hand an item to the consumers; one without blocks ends their work."""
        cute.arch.mbarrier_wait(q_empty, (item + 1) % 2)
        if cute.arch.lane_idx() == 0:
            for i, value in enumerate((first_row, tokens, first_position, begin, end)):
                sItem[i] = value
            if begin < end:
                cute.arch.mbarrier_arrive_and_expect_tx(q_full, self.q_bytes)
            else:
                cute.arch.mbarrier_arrive(q_full)
        cute.arch.sync_warp()
        if begin < end:
            gQ = cute.local_tile(cute.domain_offset((0, first_row, 0), tQ), (self.num_heads, self.tokens, self.span), (0, 0, None))
            for piece in cutlass.range_constexpr(DIM // self.span):
                box = cute.make_tensor(sQ.iterator + piece * self.rows * self.span, cute.make_layout(self.num_heads * self.tokens * self.span))
                tQs, tQg = cpasync.tma_partition(tma_q, 0, cute.make_layout(1), box, cute.group_modes(gQ[None, None, None, piece], 0, 3))
                cute.copy(tma_q, tQg, tQs, tma_bar_ptr=q_full)

    @cute.jit
    def load_keys(self, tma_k, tK, sK, k_full, k_empty, step, mPageTable, request, seq_len, block):
        """One block of keys into the next stage. Pages past seq_len are read from the last one: what lies there is masked."""
        stage = step % self.stages
        pages = cute.make_rmem_tensor(BLOCK // self.page_size, Int32)
        last = cutlass.min(cute.ceil_div(seq_len, self.page_size), mPageTable.shape[1]) - 1
        for i in cutlass.range_constexpr(BLOCK // self.page_size):
            pages[i] = mPageTable[request, cutlass.min(block * (BLOCK // self.page_size) + i, last)]
        cute.arch.mbarrier_wait(k_empty + stage, (step // self.stages + 1) % 2)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(k_full + stage, self.k_bytes)
        for i in cutlass.range_constexpr(BLOCK // self.page_size):
            gK = cute.local_tile(tK[None, None, pages[i]], (self.page_size, self.span), (0, None))
            for piece in cutlass.range_constexpr(DIM // self.span):
                offset = stage * BLOCK * DIM + (piece * BLOCK + i * self.page_size) * self.span
                box = cute.make_tensor(sK.iterator + offset, cute.make_layout(self.page_size * self.span))
                tKs, tKg = cpasync.tma_partition(tma_k, 0, cute.make_layout(1), box, cute.group_modes(gK[None, None, piece], 0, 2))
                cute.copy(tma_k, tKg, tKs, tma_bar_ptr=k_full + stage)

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
            first_row, tokens, first_position, begin, end = (sItem[i] for i in range(5))
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
    def fill_invisible(self, mOut, rows, num_blocks, warp):
        """Three warps of every CTA: -inf from the first block on that a row does not see."""
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        spare_warps = OTHER_WARPS - 1
        for row in cutlass.range(rows.begin + cta * spare_warps + warp, rows.end, num_ctas * spare_warps, unroll=1):
            position = rows.position(row)
            live = index_rows.blocks_up_to(position, BLOCK_SHIFT, num_blocks)
            for head in cutlass.range_constexpr(self.num_heads):
                for column in cutlass.range(live + lane, num_blocks, 32, unroll=1):
                    mOut[head, row - rows.begin, column] = Float32(NEGATIVE_INFINITY)


@cute.jit
def arrive(barrier: cute.Pointer):
    """One arrival for the warp, after all its lanes."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


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
    dtype = DTYPES[variant.dtype]
    wide = 128 // dtype.width  # elements of the 16 bytes that TMA's addresses are multiples of

    def tensor(dtype: Any, *shape: Any, unit: bool = True, divisibility: int = 1, align: int = 4) -> Any:
        strides = [cute.sym_int64(divisibility=divisibility) for _ in shape]
        if unit:
            strides[-1] = 1
        return make_fake_tensor(dtype, shape, tuple(strides), assumed_align=align)

    requests = cute.sym_int()
    scales = [tensor(Float32, 1) if on_device else None for on_device in (variant.q_scale, variant.k_scale)]
    return IndexScoreSm90(variant), (
        tensor(dtype, cute.sym_int(), variant.num_heads, DIM, divisibility=wide, align=16),
        tensor(dtype, cute.sym_int(), variant.page_size, DIM, divisibility=wide, align=16),
        tensor(Float32, variant.num_heads, cute.sym_int(), cute.sym_int(), unit=False),
        tensor(Int32, requests, cute.sym_int()),
        tensor(Int32, requests),
        tensor(Int32, cute.sym_int()),
        Float32(1),
        *scales,
        *(Int32(0) for _ in range(7)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


KERNEL = CuteKernel("index_score_sm90", build, sources=[__file__, index_rows.__file__])


def index_score(call: IndexScoreCall) -> None:
    """Fill `call.out` [Hi, T, num_blocks], every element."""
    score_rows(call, call.out, 0, call.index_q.shape[0], fill=True)


def score_rows(call: IndexScoreCall | IndexTopkCall, out: torch.Tensor, row_begin: int, row_end: int, *, fill: bool, skip_blocks: int = 0) -> None:
    """Scores of query rows [row_begin, row_end) into `out` [Hi, row_end - row_begin, at least num_blocks].

    Without `fill`, blocks that a row does not see, and rows that see at most `skip_blocks`, are not written.

    Raises:
        UnsupportedProblem: index_q or the index keys do not lie at multiples of 16 bytes.
    """
    batch, q, k = call.batch, call.index_q, call.index_k
    if row_begin == row_end or batch.num_blocks == 0:
        return
    if batch.num_requests == 0 or k.shape[0] == 0 or batch.page_table.shape[1] == 0:
        out.fill_(NEGATIVE_INFINITY)
        return
    check_alignment("index_q", q)
    check_alignment("cache.index_k", k)
    scales = (call.index_q_scale, call.index_k_scale)
    on_device = [None if scale.tensor is None else scale.tensor.view(1) for scale in scales]
    rows = rows_of_tile(q.shape[1], batch)
    variant = Variant(dtype_name(q.dtype), rows, q.shape[1], batch.page_size, fill, on_device[0] is not None, on_device[1] is not None)
    KERNEL.get(variant, q.device)(
        q,
        k,
        out,
        batch.page_table,
        batch.seq_lens,
        batch.cu_seqlens_q,
        scales[0].value * scales[1].value,
        *on_device,
        row_begin,
        row_end,
        batch.max_seqlen_k,
        batch.num_blocks,
        skip_blocks,
        CHUNK_BLOCKS if rows == 256 else batch.num_blocks,
        num_ctas(q.device),
    )


def check_alignment(argument: str, tensor: torch.Tensor) -> None:
    """TMA reads from addresses that are multiples of 16 bytes."""
    strides = [stride * tensor.element_size() for stride, n in zip(tensor.stride()[:-1], tensor.shape, strict=False) if n > 1]
    if tensor.data_ptr() % 16 or any(stride % 16 for stride in strides):
        raise UnsupportedProblem(
            f"{argument}: expected an address and strides that are multiples of 16 bytes, got address {tensor.data_ptr():#x} and strides of "
            f"{', '.join(map(str, strides))} bytes; impl='triton' takes any"
        )


def num_ctas(device: torch.device) -> int:
    """One a multiprocessor; three in the simulator of the tests."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
