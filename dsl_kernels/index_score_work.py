"""The work of index scoring that precedes its products, for Hopper and Blackwell: which row tiles and blocks a CTA takes, and their loads by TMA.

Work is counted in pairs (row tile, live block), which differ in nothing but where they lie, and in what a tile itself costs: every CTA takes an equal
run, cut at any block, so causal and ragged batches balance, and one token, or 171, behind a long prefix fill the GPU. The count goes by chunks of
blocks, one chunk after another, so that all CTAs read the same keys at about the same time and find them in L2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from m3attn.calls import IndexScoreCall, IndexTopkCall
from m3attn.choice import UnsupportedProblem
from m3attn.dsl_kernels import index_rows
from m3attn.dsl_kernels.common.kernels import CuteKernel
from m3attn.dsl_kernels.index_rows import QueryRows
from m3attn.dtypes import dtype_name

BLOCK = 128
BLOCK_SHIFT = 7
DIM = 128
OTHER_WARPS = 4
"""Warps before those that take maxima; the first loads."""
SHARED_BYTES = 224 * 1024
"""What queries and stages of keys may take."""
MAX_STAGES = 12
STORE_BLOCKS = 4
"""Scores of so many blocks are stored together, by four neighbouring lanes a row."""

DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp8_e4m3": cutlass.Float8E4M3FN}
NEGATIVE_INFINITY = float("-inf")


@dataclass(frozen=True)
class Variant:
    """`rows` of a tile. `fill`: -inf is stored where a row sees no key. `q_scale`, `k_scale`: the scale lies on the device."""

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


class ScoreWork:
    """The base of the kernels. Queries lie in shared memory as [rows, 128] with the 128-byte swizzle, in `q_stages` copies, keys likewise.
    `tile_cost`: what going on to another tile costs a CTA, in blocks."""

    def __init__(self, variant: Variant, q_stages: int, tile_cost: int = 0) -> None:
        self.dtype = DTYPES[variant.dtype]
        self.num_heads, self.page_size, self.fill, self.rows = variant.num_heads, variant.page_size, variant.fill, variant.rows
        self.tokens = tokens_of_tile(self.rows, self.num_heads)
        self.span = 128 * 8 // self.dtype.width  # elements of a 128-byte row of the swizzle pattern
        self.q_bytes = self.tokens * self.num_heads * DIM * self.dtype.width // 8
        self.k_bytes = BLOCK * DIM * self.dtype.width // 8
        self.q_stages, self.tile_cost = q_stages, tile_cost
        self.stages = min(MAX_STAGES, (SHARED_BYTES - q_stages * self.rows * DIM * self.dtype.width // 8) // self.k_bytes)

    @cute.jit
    def load_atoms(self, mQ: cute.Tensor, mK: cute.Tensor, swizzle: cute.Swizzle):
        """A box of TMA is as wide as the swizzle pattern; rows of keys follow one another there, page by page."""
        q_box = (self.num_heads, self.tokens, self.span)
        q_box_layout = cute.make_composed_layout(swizzle, 0, cute.make_layout(q_box, stride=(self.span, self.span * self.num_heads, 1)))
        k_box = (self.page_size, self.span)
        k_box_layout = cute.make_composed_layout(swizzle, 0, cute.make_layout(k_box, stride=(self.span, 1)))
        load = cpasync.CopyBulkTensorTileG2SOp()
        mQ = cute.make_tensor(mQ.iterator, cute.select(mQ.layout, [1, 0, 2]))
        mK = cute.make_tensor(mK.iterator, cute.select(mK.layout, [1, 2, 0]))
        tma_q, tQ = cpasync.make_tiled_tma_atom(load, mQ, q_box_layout, q_box)
        tma_k, tK = cpasync.make_tiled_tma_atom(load, mK, k_box_layout, k_box)
        return tma_q, tQ, tma_k, tK

    @cute.jit
    def live_blocks(self, rows: QueryRows, tile: Int32, num_blocks: Int32, skip_blocks: Int32):
        """(request, first_row, tokens, first_position, seq_len) of a row tile, and the blocks that need scores: those its last row sees."""
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
                total += self.cost(cutlass.min(cutlass.max(live - first_block, 0), chunk_blocks))
            total = cute.arch.warp_reduction_sum(total)
            share = cute.ceil_div(total, num_ctas)
            begin = cutlass.min(cta * share, total)
            end = cutlass.min(begin + share, total)
            before, base = Int32(0), Int32(0)
            while base < num_tiles and before < end:
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
        stage = item % self.q_stages
        cute.arch.mbarrier_wait(q_empty + stage, (item // self.q_stages + 1) % 2)
        if cute.arch.lane_idx() == 0:
            for i, value in enumerate((first_row, tokens, first_position, begin, end)):
                sItem[i, stage] = value
            if begin < end:
                cute.arch.mbarrier_arrive_and_expect_tx(q_full + stage, self.q_bytes)
            else:
                cute.arch.mbarrier_arrive(q_full + stage)
        cute.arch.sync_warp()
        if begin < end:
            gQ = cute.local_tile(cute.domain_offset((0, first_row, 0), tQ), (self.num_heads, self.tokens, self.span), (0, 0, None))
            for piece in cutlass.range_constexpr(DIM // self.span):
                box = cute.make_tensor(
                    sQ.iterator + (stage * DIM + piece * self.span) * self.rows, cute.make_layout(self.num_heads * self.tokens * self.span)
                )
                tQs, tQg = cpasync.tma_partition(tma_q, 0, cute.make_layout(1), box, cute.group_modes(gQ[None, None, None, piece], 0, 3))
                cute.copy(tma_q, tQg, tQs, tma_bar_ptr=q_full + stage)

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
    dtype = DTYPES[variant.dtype]
    wide = 128 // dtype.width  # elements of the 16 bytes that TMA's addresses are multiples of

    def tensor(dtype: Any, *shape: Any, unit: bool = True, divisibility: int = 1, align: int = 4) -> Any:
        strides = [cute.sym_int64(divisibility=divisibility) for _ in shape]
        if unit:
            strides[-1] = 1
        return make_fake_tensor(dtype, shape, tuple(strides), assumed_align=align)

    requests = cute.sym_int()
    scales = [tensor(Float32, 1) if on_device else None for on_device in (variant.q_scale, variant.k_scale)]
    return (
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
    variant = Variant(dtype_name(q.dtype), rows, q.shape[1], batch.page_size, fill, on_device[0] is not None, on_device[1] is not None)
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
