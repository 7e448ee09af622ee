"""Index scoring but for its products, for Hopper and Blackwell: which row tiles and blocks a CTA takes, their loads by TMA, who does what.

Work is counted in pairs (row tile, live block), which differ in nothing but where they lie, and in what a tile itself costs: every CTA takes an equal
run, cut at any block, so causal and ragged batches balance, and one token, or 171, behind a long prefix fill the GPU. The count goes by chunks of
blocks, one chunk after another, so that all CTAs read the same keys at about the same time and find them in L2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from m3attn.calls import IndexScoreCall, IndexTopkCall
from m3attn.choice import UnsupportedProblem
from m3attn.dsl_kernels import index_rows, index_widen, warp_mma
from m3attn.dsl_kernels.common.kernels import CuteKernel
from m3attn.dsl_kernels.index_rows import QueryRows
from m3attn.dsl_kernels.index_widen import widen_tile
from m3attn.dtypes import dtype_name

BLOCK = 128
BLOCK_SHIFT = 7
DIM = 128
OTHER_WARPS = 4
"""Warps before those that take maxima; the first loads."""
SHARED_BYTES = 224 * 1024
"""What queries and stages of keys may take."""
SWIZZLE = (3, 4, 3)
"""The 128-byte swizzle of TMA and products."""
MAX_STAGES = 12
WIDE_STAGES = 3
"""Blocks of widened keys: one is multiplied, one is ready, one is written."""
STORE_BLOCKS = 4
"""Scores of so many blocks are stored together, by four neighbouring lanes a row."""

SOURCES = (__file__, index_rows.__file__, index_widen.__file__, warp_mma.__file__)
DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp8_e4m3": cutlass.Float8E4M3FN}
NEGATIVE_INFINITY = float("-inf")


@dataclass(frozen=True)
class Variant:
    """`rows` of a tile. `fill`: -inf is stored where a row sees no key. `q_scale`, `k_scale`: the scale lies on the device."""

    q_dtype: str
    k_dtype: str
    rows: int
    num_heads: int
    page_size: int
    fill: bool
    q_scale: bool
    k_scale: bool


def product_dtype(q_dtype: str, k_dtype: str) -> str:
    """The type of both operands of the products: e4m3 next to 16 bit is widened."""
    return k_dtype if q_dtype == "fp8_e4m3" else q_dtype


def span(dtype: type[cutlass.Numeric]) -> int:
    """Elements of a 128-byte row of the swizzle pattern."""
    return 128 * 8 // dtype.width


def tokens_of_tile(rows: int, num_heads: int) -> int:
    """Query tokens of a row tile: a multiple of 8, so that their rows fill whole swizzle patterns."""
    return rows // num_heads // 8 * 8


@dataclass(frozen=True)
class Ring:
    """Stages of shared memory in turn. `data`: the first element; `full`, `empty`: a barrier a stage; `items`: what belongs to stages of queries."""

    data: cute.Pointer
    full: cute.Pointer
    empty: cute.Pointer
    items: cute.Tensor  # [5, stages]: first_row, tokens, first_position, begin and end of the blocks
    stages: int

    def initialise(self, fillers: int, readers: int) -> None:
        for stage in range(self.stages):
            cute.arch.mbarrier_init(self.full + stage, fillers)
            cute.arch.mbarrier_init(self.empty + stage, readers)

    def wait_full(self, step: Int32) -> None:
        cute.arch.mbarrier_wait(self.full + step % self.stages, step // self.stages % 2)

    def wait_empty(self, step: Int32) -> None:
        cute.arch.mbarrier_wait(self.empty + step % self.stages, (step // self.stages + 1) % 2)


class ScoreWork:
    """The base of the kernels. Queries lie in shared memory as [rows, 128] with the 128-byte swizzle, in `q_stages` copies, keys likewise.

    Warp 0 loads, warps from there to `spare` are the kernel's own, and from there to OTHER_WARPS they store -inf. Last come `groups` warpgroups that
    take maxima. What a mixed variant loads is widened by the warps that store -inf too, or by a warpgroup of its own before the last ones.
    `tile_cost`: what going on to another tile costs a CTA, in blocks. `whole_requests`: a tile has room for all rows of a request. `k_readers`,
    `q_readers`: arrivals that give back a stage.
    """

    registers: tuple[int, int] = (0, 0)
    """Of a thread of the warps that take maxima and of all others; 0: as launched."""

    def __init__(
        self,
        variant: Variant,
        *,
        groups: int,
        q_stages: int,
        q_readers: int,
        k_readers: int,
        spare: int = 1,
        has_widening_group: bool = True,
        tile_cost: int = 0,
        whole_requests: bool = False,
    ) -> None:
        self.q_dtype, self.k_dtype = DTYPES[variant.q_dtype], DTYPES[variant.k_dtype]
        self.dtype = DTYPES[product_dtype(variant.q_dtype, variant.k_dtype)]
        self.widens_q, self.widens_k = self.q_dtype != self.dtype, self.k_dtype != self.dtype
        self.num_heads, self.page_size, self.fill, self.rows = variant.num_heads, variant.page_size, variant.fill, variant.rows
        self.tokens = tokens_of_tile(self.rows, self.num_heads)
        self.groups, self.q_readers, self.k_readers, self.spare = groups, q_readers, k_readers, spare
        is_mixed = self.widens_q or self.widens_k
        self.first_consumer = OTHER_WARPS + (4 if is_mixed and has_widening_group else 0)
        self.widening = range(OTHER_WARPS, self.first_consumer) if has_widening_group else range(spare, OTHER_WARPS if is_mixed else spare)
        self.threads = 32 * self.first_consumer + 128 * groups
        self.q_stages, self.tile_cost, self.whole_requests = q_stages, tile_cost, whole_requests
        free = SHARED_BYTES - q_stages * self.rows * DIM * self.dtype.width // 8 - (self.rows * DIM if self.widens_q else 0)
        block_bytes = BLOCK * DIM * self.dtype.width // 8
        self.stages = WIDE_STAGES if self.widens_k else min(MAX_STAGES, free // block_bytes)
        self.narrow_stages = min(MAX_STAGES, (free - self.stages * block_bytes) // (BLOCK * DIM))

    def operands(self) -> tuple[cute.TiledMma, cute.ComposedLayout, cute.ComposedLayout]:
        """The products, and how queries and keys lie in shared memory for them: [rows, 128] times stages, [128, 128] times stages."""
        raise NotImplementedError

    def set_up(self, smem: cutlass.memory.SmemAllocator, warp: Int32) -> Any:
        """What else the kernel's warps share, before they are synchronised."""

    def consume(self, mma, q: Ring, k: Ring, sQ, sK, own, mOut, row_begin, scale) -> None:
        """One warpgroup that takes maxima."""
        raise NotImplementedError

    def multiply(self, mma, q: Ring, k: Ring, sQ, sK, own) -> None:
        """The warps between the first and `spare`."""

    def finish(self, own: Any, warp: Int32) -> None:
        """The end of every warp."""

    def ring(self, smem: cutlass.memory.SmemAllocator, dtype: type[cutlass.Numeric], rows: int, stages: int) -> Ring:
        data = cute.recast_ptr(smem.allocate(stages * rows * DIM * dtype.width // 8, 1024), cute.make_swizzle(*SWIZZLE), dtype)
        full, empty = (smem.allocate_array(cutlass.Int64, stages) for _ in range(2))
        return Ring(data, full, empty, smem.allocate_tensor(Int32, cute.make_layout((5, stages)), 16), stages)

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
        mma, q_layout, k_layout = self.operands()
        tma_q, tQ, tma_k, tK = self.load_atoms(mQ, mK)
        tensors = (mOut, mPageTable, mSeqLens, mOffsets)
        sizes = (row_begin, row_end, max_seqlen_k, num_blocks, skip_blocks, chunk_blocks)
        self.kernel(mma, q_layout, k_layout, tma_q, tQ, tma_k, tK, *tensors, scale, mQScale, mKScale, *sizes).launch(
            grid=(num_ctas, 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True
        )

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
        # TMA fills the first of two rings, products read the second: one and the same where both operands are of one type.
        q = self.ring(smem, self.dtype, self.rows, self.q_stages)
        k = self.ring(smem, self.dtype, BLOCK, self.stages)
        loaded_q = self.ring(smem, self.q_dtype, self.rows, 1) if self.widens_q else q
        loaded_k = self.ring(smem, self.k_dtype, BLOCK, self.narrow_stages) if self.widens_k else k
        if warp == 0:
            cpasync.prefetch_descriptor(tma_q)
            cpasync.prefetch_descriptor(tma_k)
            with cute.arch.elect_one():
                # Who widens keys reads the items too.
                q.initialise(len(self.widening) if self.widens_q else 1, self.q_readers + (len(self.widening) if self.widens_k else 0))
                k.initialise(len(self.widening) if self.widens_k else 1, self.k_readers)
                if cutlass.const_expr(self.widens_q):
                    loaded_q.initialise(1, len(self.widening))
                if cutlass.const_expr(self.widens_k):
                    loaded_k.initialise(1, len(self.widening))
            cute.arch.mbarrier_init_fence()
        own = self.set_up(smem, warp)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        rows = QueryRows(mOffsets, mSeqLens, row_begin, row_end, max_seqlen_k)
        sQ, sK = cute.make_tensor(q.data, q_layout.outer), cute.make_tensor(k.data, k_layout.outer)
        if warp < self.first_consumer:
            if cutlass.const_expr(self.registers[0] > 0):
                cute.arch.setmaxregister_decrease(self.registers[1])
            if warp == 0:
                self.produce(tma_q, tQ, tma_k, tK, loaded_q, loaded_k, mPageTable, rows, num_blocks, skip_blocks, chunk_blocks)
            elif warp < self.spare:
                self.multiply(mma, q, k, sQ, sK, own)
            else:
                if cutlass.const_expr(len(self.widening) > 0):
                    if warp >= self.widening[0]:
                        self.widen(loaded_q, q, loaded_k, k, warp - self.widening[0])
                if cutlass.const_expr(self.fill):
                    if warp < OTHER_WARPS:
                        self.fill_invisible(mOut, rows, num_blocks, warp - self.spare, OTHER_WARPS - self.spare)
        else:
            if cutlass.const_expr(self.registers[0] > 0):
                cute.arch.setmaxregister_increase(self.registers[0])
            if cutlass.const_expr(mQScale is not None):
                scale *= mQScale[0]
            if cutlass.const_expr(mKScale is not None):
                scale *= mKScale[0]
            self.consume(mma, q, k, sQ, sK, own, mOut, row_begin, scale)
        self.finish(own, warp)

    @cute.jit
    def load_atoms(self, mQ: cute.Tensor, mK: cute.Tensor):
        """A box of TMA is as wide as the swizzle pattern; rows of keys follow one another there, page by page."""
        q_span, k_span = span(self.q_dtype), span(self.k_dtype)
        swizzle = cute.make_swizzle(*SWIZZLE)
        q_box = (self.num_heads, self.tokens, q_span)
        q_box_layout = cute.make_composed_layout(swizzle, 0, cute.make_layout(q_box, stride=(q_span, q_span * self.num_heads, 1)))
        k_box = (self.page_size, k_span)
        k_box_layout = cute.make_composed_layout(swizzle, 0, cute.make_layout(k_box, stride=(k_span, 1)))
        load = cpasync.CopyBulkTensorTileG2SOp()
        mQ = cute.make_tensor(mQ.iterator, cute.select(mQ.layout, [1, 0, 2]))
        mK = cute.make_tensor(mK.iterator, cute.select(mK.layout, [1, 2, 0]))
        tma_q, tQ = cpasync.make_tiled_tma_atom(load, mQ, q_box_layout, q_box)
        tma_k, tK = cpasync.make_tiled_tma_atom(load, mK, k_box_layout, k_box)
        return tma_q, tQ, tma_k, tK

    @cute.jit
    def live_blocks(self, rows: QueryRows, tile: Int32, num_blocks: Int32, skip_blocks: Int32):
        """(request, first_row, tokens, first_position, seq_len) of a row tile, and the blocks that need scores: those its last row sees."""
        if cutlass.const_expr(self.whole_requests):
            request, first_row, tokens, first_position, seq_len = rows.request_tile(tile, self.tokens)
        else:
            request, first_row, tokens, first_position, seq_len = rows.tile(tile, self.tokens)
        live = index_rows.blocks_up_to(first_position + tokens - 1, BLOCK_SHIFT, num_blocks)
        live = live if tokens > 0 and live > skip_blocks else 0
        return request, first_row, tokens, first_position, seq_len, live

    @cute.jit
    def cost(self, work: Int32):
        """Of `work` blocks of a tile, which come after its own cost."""
        if cutlass.const_expr(self.tile_cost == 0):
            return work
        return work + self.tile_cost if work > 0 else 0

    @cute.jit
    def produce(self, tma_q, tQ, tma_k, tK, q, k, mPageTable, rows, num_blocks, skip_blocks, chunk_blocks):
        """One warp: its CTA's items, each a row tile and a run of its blocks, then their loads."""
        lane = cute.arch.lane_idx()
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        num_tiles = rows.mSeqLens.shape[0] if cutlass.const_expr(self.whole_requests) else rows.num_tiles(self.tokens)
        lane_tiles = cute.ceil_div(num_tiles, 32 * 32) * 32  # of so many tiles a lane remembers the cost
        item, step = Int32(0), Int32(0)
        request, first_row, tokens, first_position, seq_len, live = (Int32(0) for _ in range(6))
        for first_block in cutlass.range(0, num_blocks, chunk_blocks, unroll=1):
            total, own_total = Int32(0), Int32(0)
            for base in cutlass.range(0, num_tiles, 32, unroll=4 if self.whole_requests else 1):
                request, first_row, tokens, first_position, seq_len, live = self.live_blocks(rows, base + lane, num_blocks, skip_blocks)
                cost = cute.arch.warp_redux_sync(self.cost(cutlass.min(cutlass.max(live - first_block, 0), chunk_blocks)), "add")
                total += cost
                own_total += cost if base // lane_tiles == lane else 0
            share = cute.ceil_div(total, num_ctas)
            begin = cutlass.min(cta * share, total)
            end = cutlass.min(begin + share, total)
            before, base = Int32(0), Int32(0)
            if num_tiles > 32:
                up_to = index_rows.prefix_sum(own_total, lane)
                passed = Int32(cute.arch.popc(cute.arch.vote_ballot_sync(up_to <= begin)))  # lanes whose tiles belong to other CTAs
                base = passed * lane_tiles
                before = cute.arch.shuffle_sync(up_to - own_total, cutlass.min(passed, 31))
            while base < num_tiles and before < end:
                if num_tiles > 32:  # else they are known since they were counted, which a short step waits for less
                    request, first_row, tokens, first_position, seq_len, live = self.live_blocks(rows, base + lane, num_blocks, skip_blocks)
                work = cutlass.min(cutlass.max(live - first_block, 0), chunk_blocks)
                up_to = before + index_rows.prefix_sum(self.cost(work), lane)
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
                    self.load_queries(tma_q, tQ, q, item, item_row, item_tokens, item_position, item_begin, item_end)
                    item += 1
                    item_request = cute.arch.shuffle_sync(request, source)
                    item_seq_len = cute.arch.shuffle_sync(seq_len, source)
                    for block in cutlass.range(item_begin, item_end, unroll=1):
                        self.load_keys(tma_k, tK, k, step, mPageTable, item_request, item_seq_len, block)
                        step += 1
                before = cute.arch.shuffle_sync(up_to, 31)
                base += 32
        self.load_queries(tma_q, tQ, q, item, Int32(0), Int32(0), Int32(0), Int32(0), Int32(0))

    @cute.jit
    def load_queries(self, tma_q, tQ, q, item, first_row, tokens, first_position, begin, end):
        """Hand an item on; one without blocks ends the work."""
        stage = item % q.stages
        q.wait_empty(item)
        if cute.arch.lane_idx() == 0:
            for i, value in enumerate((first_row, tokens, first_position, begin, end)):
                q.items[i, stage] = value
            if begin < end:
                cute.arch.mbarrier_arrive_and_expect_tx(q.full + stage, self.tokens * self.num_heads * DIM * self.q_dtype.width // 8)
            else:
                cute.arch.mbarrier_arrive(q.full + stage)
        cute.arch.sync_warp()
        if begin < end:
            width = span(self.q_dtype)
            gQ = cute.local_tile(cute.domain_offset((0, first_row, 0), tQ), (self.num_heads, self.tokens, width), (0, 0, None))
            for piece in cutlass.range_constexpr(DIM // width):
                box = cute.make_tensor(q.data + (stage * DIM + piece * width) * self.rows, cute.make_layout(self.num_heads * self.tokens * width))
                tQs, tQg = cpasync.tma_partition(tma_q, 0, cute.make_layout(1), box, cute.group_modes(gQ[None, None, None, piece], 0, 3))
                cute.copy(tma_q, tQg, tQs, tma_bar_ptr=q.full + stage)

    @cute.jit
    def load_keys(self, tma_k, tK, k, step, mPageTable, request, seq_len, block):
        """One block of keys into the next stage. Pages past seq_len are read from the last one: what lies there is masked."""
        stage, width = step % k.stages, span(self.k_dtype)
        pages = cute.make_rmem_tensor(BLOCK // self.page_size, Int32)
        last = cutlass.min(cute.ceil_div(seq_len, self.page_size), mPageTable.shape[1]) - 1
        for i in cutlass.range_constexpr(BLOCK // self.page_size):
            pages[i] = mPageTable[request, cutlass.min(block * (BLOCK // self.page_size) + i, last)]
        k.wait_empty(step)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(k.full + stage, BLOCK * DIM * self.k_dtype.width // 8)
        for i in cutlass.range_constexpr(BLOCK // self.page_size):
            gK = cute.local_tile(tK[None, None, pages[i]], (self.page_size, width), (0, None))
            for piece in cutlass.range_constexpr(DIM // width):
                offset = stage * BLOCK * DIM + (piece * BLOCK + i * self.page_size) * width
                box = cute.make_tensor(k.data + offset, cute.make_layout(self.page_size * width))
                tKs, tKg = cpasync.tma_partition(tma_k, 0, cute.make_layout(1), box, cute.group_modes(gK[None, None, piece], 0, 2))
                cute.copy(tma_k, tKg, tKs, tma_bar_ptr=k.full + stage)

    @cute.jit
    def widen(self, loaded_q, q, loaded_k, k, warp):
        """One of the widening warps: what TMA loads of one operand in e4m3, as 16 bit where products read it."""
        item, step = Int32(0), Int32(0)
        begin, end = Int32(0), Int32(1)
        while begin < end:
            stage = item % loaded_q.stages
            loaded_q.wait_full(item)
            begin, end = loaded_q.items[3, stage], loaded_q.items[4, stage]
            if cutlass.const_expr(self.widens_q):
                q.wait_empty(item)
                if warp == 0 and cute.arch.lane_idx() == 0:
                    for i in cutlass.range_constexpr(5):
                        q.items[i, item % q.stages] = loaded_q.items[i, stage]
                if begin < end:
                    tiles = (loaded_q.data + stage * self.rows * DIM, q.data + item % q.stages * self.rows * DIM)
                    widen_tile(*tiles, self.rows, self.dtype, warp, len(self.widening))
                cute.arch.fence_view_async_shared()
                arrive(q.full + item % q.stages)
            arrive(loaded_q.empty + stage)
            item += 1
            if cutlass.const_expr(self.widens_k):
                for _ in cutlass.range(begin, end, unroll=1):
                    loaded_k.wait_full(step)
                    k.wait_empty(step)
                    source, target = step % loaded_k.stages, step % k.stages
                    tiles = (loaded_k.data + source * BLOCK * DIM, k.data + target * BLOCK * DIM)
                    widen_tile(*tiles, BLOCK, self.dtype, warp, len(self.widening))
                    cute.arch.fence_view_async_shared()
                    arrive(k.full + target)
                    arrive(loaded_k.empty + source)
                    step += 1

    @cute.jit
    def fill_invisible(self, mOut, rows, num_blocks, warp, warps: cutlass.Constexpr[int]):
        """`warps` spare warps of every CTA: -inf from the first block on that a row does not see."""
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        for row in cutlass.range(rows.begin + cta * warps + warp, rows.end, num_ctas * warps, unroll=1):
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


def arguments(variant: Variant) -> tuple[Any, ...]:
    """What a scoring kernel is compiled on."""
    q_dtype, k_dtype = DTYPES[variant.q_dtype], DTYPES[variant.k_dtype]

    def tensor(dtype: Any, *shape: Any, unit: bool = True, divisibility: int = 1, align: int = 4) -> Any:
        strides = [cute.sym_int64(divisibility=divisibility) for _ in shape]
        if unit:
            strides[-1] = 1
        return make_fake_tensor(dtype, shape, tuple(strides), assumed_align=align)

    requests = cute.sym_int()
    scales = [tensor(Float32, 1) if on_device else None for on_device in (variant.q_scale, variant.k_scale)]
    return (
        # TMA's addresses are multiples of 16 bytes.
        tensor(q_dtype, cute.sym_int(), variant.num_heads, DIM, divisibility=128 // q_dtype.width, align=16),
        tensor(k_dtype, cute.sym_int(), variant.page_size, DIM, divisibility=128 // k_dtype.width, align=16),
        tensor(Float32, variant.num_heads, cute.sym_int(), cute.sym_int(), unit=False),
        tensor(Int32, requests, cute.sym_int()),
        tensor(Int32, requests),
        tensor(Int32, cute.sym_int()),
        Float32(1),
        *scales,
        *(Int32(0) for _ in range(7)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def launch(
    kernel: CuteKernel,
    call: IndexScoreCall | IndexTopkCall,
    out: torch.Tensor,
    row_begin: int,
    row_end: int,
    *,
    rows: int,
    chunk_blocks: int,
    num_ctas: int,
    fill: bool,
    skip_blocks: int,
) -> None:
    """Scores of query rows [row_begin, row_end) into `out` [Hi, row_end - row_begin, at least num_blocks], in tiles of `rows`.

    Without `fill`, blocks that a row does not see, and rows that see at most `skip_blocks`, are not written. All CTAs finish `chunk_blocks` blocks
    before any takes the next.

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
    names = (dtype_name(q.dtype), dtype_name(k.dtype))
    variant = Variant(*names, rows, q.shape[1], batch.page_size, fill, on_device[0] is not None, on_device[1] is not None)
    kernel.get(variant, q.device)(
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
        chunk_blocks,
        num_ctas,
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
