"""Sparse prefill on Hopper: two warpgroups attend, one half of a tile's tokens each, to the blocks that any token of the tile selected.

A tile is neighbouring tokens times the heads of one KV group. One warp merges the tokens' id lists block by block, another has the TMA unit bring
each block's keys and values once for both halves; a half passes over blocks that none of its tokens selected. Thread blocks stay on their
multiprocessor and take tiles from a counter, so that the next tile's keys arrive while this one's output leaves.
`docs/cute_sparse_prefill.md` walks through it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90_utils
import torch
from cutlass import Boolean, Float32, Int32, Uint32, const_expr
from cutlass._mlir.dialects import math as mlir_math
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.tensor_utils import LayoutEnum

from m3attn.batch import PagedBatch
from m3attn.calls import SparseAttentionCall
from m3attn.dsl_kernels import row_maximum
from m3attn.dsl_kernels.common.kernels import CuteKernel
from m3attn.dsl_kernels.row_maximum import bits_row_maxima, float_row_maxima
from m3attn.dtypes import dtype_name

BLOCK = 128
"""Keys of a block, which is a page."""
PAIRS = BLOCK // 8
"""Pairs of columns that a thread holds of a row of products."""
HALF_ROWS = 64
"""Rows of one warpgroup's matrix instruction."""
WARPGROUP = 128
SHARED_BYTES = 224 * 1024
"""Of shared memory, for pages and rows."""
MAX_STAGES = 4
ENTRIES = 8
"""Blocks that the merging warp is ahead of those who read what it writes."""
MAX_TILE_TOKENS = 32
"""One bit of a word a token."""
DEFERRED_SHARE = 0.55
"""A tile is deferred where its halves have more different blocks than this share of their ids: where fewer than 1.8 tokens of one share a block."""
MAX_TILE_IDS = 512
"""Ids of a tile that the merging warp keeps in registers, 16 a lane."""
LAZY_LOG2 = 8.0
"""A row's weights stay relative to an older maximum, and its output so far as it is, until the maximum has grown by this in base 2. So weights reach
2 ** 8 and fp16 takes 2 ** 15; relative to a smaller maximum they are larger, and no more of them fall below what 16 bits hold."""
LAST_PAIRS = 2
"""Pairs of a row's weights that are left for when the last block's product with values is done: converting the others hides behind them."""
ENTRY_PAIRS = 2
"""Pairs before those, behind which the reading of the next entry hides."""
NO_BLOCK = -1
NO_LIMIT = (1 << 31) - 1
NO_POSITION = -(1 << 30)
LOG2E = math.log2(math.e)
SMALLEST_SCALE = 2.0**-100
LN2 = math.log(2.0)

MaybeTensor = Any
"""A cute.Tensor, or None where the variant has none."""

DTYPES: dict[str, Any] = {
    "bf16": cutlass.BFloat16,
    "fp16": cutlass.Float16,
    "fp32": cutlass.Float32,
    "fp8_e4m3": cutlass.Float8E4M3FN,
}


@dataclass(frozen=True)
class Variant:
    """What is compiled.

    Attributes:
        qk_dtype: of queries and keys; v_dtype: of values, and of the weights that multiply them.
        ids: entries of a token's list, rounded up to a power of two.
        negative_scale: the softmax scale is below 0, and the least product the largest logit.
        aligned: rows of q and out lie at multiples of 16 bytes.
        defers: tiles whose tokens share few blocks are left to `sparse_prefill_by_block_sm90`.
        sink_dtype: of the sink keys, or None.
        q_scale, k_scale, v_scale: a device tensor holds a factor of it.
    """

    qk_dtype: str
    v_dtype: str
    out_dtype: str
    head_dim: int
    group: int
    ids: int
    lse: bool
    sink_dtype: str | None
    q_scale: bool
    k_scale: bool
    v_scale: bool
    negative_scale: bool
    aligned: bool
    defers: bool


@dataclass(frozen=True)
class Tile:
    """How rows of matrix instructions and tokens belong together: row r of half h is head r % group of token h * half_tokens + r // group."""

    group: int
    half_tokens: int
    ids_per_lane: int
    padded_ids: int
    stages: int

    @property
    def tokens(self) -> int:
        return 2 * self.half_tokens

    @classmethod
    def of(cls, variant: Variant) -> Tile:
        tokens = tile_tokens(variant.group, variant.ids)
        qk, v, out = (DTYPES[name].width * variant.head_dim // 8 for name in (variant.qk_dtype, variant.v_dtype, variant.out_dtype))  # of a row
        stages = min(MAX_STAGES, (SHARED_BYTES - 2 * HALF_ROWS * max(qk, out)) // (BLOCK * (qk + v)))
        return cls(variant.group, tokens // 2, max(1, tokens * variant.ids // 32), variant.ids, stages)


def tile_tokens(group: int, ids: int) -> int:
    """Tokens of a tile: as many as fill two times 64 rows, one word of bits and the merging warp's registers."""
    return 2 * max(1, min(HALF_ROWS // group, MAX_TILE_TOKENS // 2, MAX_TILE_IDS // 2 // ids))


def most_distinct(tokens: int, ids: int, topk: int) -> int:
    """What `SparsePrefillSm90.distinct` counts of a tile with DEFERRED_SHARE * topk ids a token, spread at random."""
    bits = tokens * ids
    return int(2 * bits * -math.expm1(-DEFERRED_SHARE * tokens * topk / 2 / bits))


class Entry:
    """Words of what the merging warp says of each block."""

    BLOCK, BITS, END, PAGE, KV_HEAD, FIRST_ROW, END_ROW, FIRST_POSITION, SEQ_LEN = range(9)


ENTRY_WORDS = 12
"""So that the first four lie together in 16 bytes."""
MORE, TILE_ENDS, ALL_ENDS = range(3)
"""Entry.END: what follows this block."""


@dataclass(frozen=True)
class Ring:
    """Stages of shared memory that the producer fills and the consumers free, told by the count of blocks so far."""

    full: Any  # mbarriers, one a stage
    empty: Any
    stages: int

    def stage(self, count):
        return Int32(Uint32(count) % self.stages)

    def parity(self, count):
        return Int32(Uint32(count) // self.stages & 1)

    def wait_full(self, count):
        cute.arch.mbarrier_wait(self.full + self.stage(count), self.parity(count))

    def is_full(self, count):
        return cute.arch.mbarrier_test_wait(self.full + self.stage(count), self.parity(count))

    def wait_empty(self, count):
        cute.arch.mbarrier_wait(self.empty + self.stage(count), self.parity(count) ^ 1)

    def release(self, count):
        """By a whole warp, each of whose lanes has finished reading."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + self.stage(count))


@dataclass(frozen=True)
class Shared:
    """A thread block's shared memory."""

    sK: Any  # [128, D, stages]
    sV: Any
    sRows: Any  # [bytes, halves]: queries and, when the last product with them is done, outputs
    sEntry: Any  # [words, ENTRIES]
    keys: Ring
    values: Ring
    entries: Ring  # full when the loads of the keys, and of the values before them, have begun
    merged: Any  # mbarriers, one an entry: it is written
    last_page: Any  # mbarrier


@dataclass(frozen=True)
class Lists:
    """What the merging warp makes tiles and their blocks of; as in `SparsePrefillSm90.__call__`."""

    ids: Any
    page_table: Any
    seq_lens: Any
    cu_seqlens: Any
    deferred: Any
    most_distinct: Any
    counter: Any
    num_rows: Any
    num_pages: Any
    max_seqlen_k: Any
    num_tiles: Any
    num_work: Any


@dataclass(frozen=True)
class Attended:
    """Queries and what becomes of them; as in `SparsePrefillSm90.__call__`."""

    q: Any
    out: Any
    lse: Any
    sink_key: Any
    query_scale: Any
    key_scale: Any
    value_scale: Any


@dataclass(frozen=True)
class Weights:
    """A block's products on their way to weights: a thread's two rows of 32 columns."""

    products: Any  # [2, 32]: weights, from pair `first_pairs` on
    scale_log2: Any
    shifts: Any  # [2]: what exponents are relative to
    totals: Any  # [2]: sums of the weights so far
    rescale: Any  # [2]: what the sum and the output of the blocks before are to be multiplied by
    first: Any  # the weights of the first pairs, in the order of accumulators

    @classmethod
    def of(cls, products, scale_log2, first_pairs):
        return cls(products, scale_log2, *(cute.make_rmem_tensor(size, Float32) for size in (2, 2, 2, 4 * first_pairs)))


@dataclass(frozen=True)
class Rows:
    """The two rows of a half that a thread holds of accumulators, and what belongs to them in this tile."""

    first: Any  # the other is 8 further on
    token_bit: tuple[Any, Any]
    visible: tuple[Any, Any]


class SparsePrefillSm90:
    variant: Any  # of this file, or of the kernel derived from this one
    half_rows = HALF_ROWS

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.tile = Tile.of(variant)
        self.qk_dtype, self.v_dtype, self.out_dtype = (DTYPES[name] for name in (variant.qk_dtype, variant.v_dtype, variant.out_dtype))
        self.head_dim = variant.head_dim
        self.stages = self.tile.stages
        # Queries and, when the last product with them is done, outputs.
        self.row_bytes = self.head_dim * max(self.qk_dtype.width, self.out_dtype.width) // 8
        ids = self.tile.ids_per_lane
        self.consumer_registers, self.producer_registers = (240, 24) if ids <= 4 else (232, 40) if ids <= 8 else (224, 56)
        # Pairs of a row's weights that are begun before the block's maximum is known: they need registers beside the products.
        self.first_pairs = 5 if ids <= 4 else 3 if ids <= 8 else 2

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [T, Hq, D]
        mK: cute.Tensor,  # [pages, Hkv, 128, D]
        mV: cute.Tensor,  # [pages, Hkv, 128, D]
        mIds: cute.Tensor,  # [Hkv, T, K]
        mPageTable: cute.Tensor,  # [B, max_pages]
        mSeqLens: cute.Tensor,  # [B]
        mCuSeqlens: cute.Tensor,  # [B + 1]
        mOut: cute.Tensor,  # [T, Hq, D]
        mLse: MaybeTensor,  # [T, Hq]
        mSinkKey: MaybeTensor,  # [Hq, D]
        mQScale: MaybeTensor,  # [1]
        mKScale: MaybeTensor,  # [1]
        mVScale: MaybeTensor,  # [1]
        mDeferred: MaybeTensor,  # [Hkv, T, 2], written: (request, or -1 for a row that is attended here; keys that the row sees)
        most_distinct: Int32,  # of a tile's blocks, by `distinct`; a tile with more is deferred
        mCounter: cute.Tensor,  # [1], 0: tiles that have been taken, beyond each thread block's first
        query_scale: Float32,  # sm_scale * q_scale, of the sink's logits
        key_scale: Float32,  # sm_scale * q_scale * k_scale
        value_scale: Float32,
        max_seqlen_k: Int32,
        max_blocks: Int32,  # thread blocks
        stream: cuda.CUstream,
    ):
        k_layout, v_layout = (self.smem_layout(dtype, BLOCK, self.stages) for dtype in (self.qk_dtype, self.v_dtype))
        (k_atom, k_pages), (v_atom, v_pages) = self.page_loads(mK, k_layout), self.page_loads(mV, v_layout)
        qk_mma, pv_mma = self.products()
        num_tiles = mQ.shape[0] // self.tile.tokens + mSeqLens.shape[0] + 1
        num_work = num_tiles * mK.shape[1]
        self.kernel(
            mQ,
            k_pages,
            v_pages,
            mIds,
            mPageTable,
            mSeqLens,
            mCuSeqlens,
            mOut,
            mLse,
            mSinkKey,
            mQScale,
            mKScale,
            mVScale,
            mDeferred,
            most_distinct,
            mCounter,
            query_scale,
            key_scale,
            value_scale,
            max_seqlen_k,
            num_tiles,
            num_work,
            k_atom,
            v_atom,
            qk_mma,
            pv_mma,
            k_layout,
            v_layout,
        ).launch(grid=(min(num_work, max_blocks), 1, 1), block=(3 * WARPGROUP, 1, 1), stream=stream, min_blocks_per_mp=1)

    def smem_layout(self, dtype, rows, stages=None):
        """Rows of head_dim elements, swizzled as wgmma and TMA want them."""
        kind = sm90_utils.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, self.head_dim)
        shape, order = ((rows, self.head_dim), (0, 1)) if stages is None else ((rows, self.head_dim, stages), (0, 1, 2))
        return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), shape, order=order)

    def page_loads(self, mX, layout):
        """The TMA unit's view of a pool: (one load, [128, D, Hkv, pages])."""
        by_page = cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=[2, 3, 1, 0]))
        tile = cute.select(layout, mode=[0, 1])
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), by_page, tile, (BLOCK, self.head_dim))

    def products(self):
        """(Q K^T, P V) of 64 rows."""
        k_major, source = OperandMajorMode.K, warpgroup.OperandSource.RMEM
        qk = sm90_utils.make_trivial_tiled_mma(self.qk_dtype, self.qk_dtype, k_major, k_major, Float32, (1, 1, 1), (HALF_ROWS, BLOCK))
        shape = (HALF_ROWS, self.head_dim)
        pv = sm90_utils.make_trivial_tiled_mma(self.v_dtype, self.v_dtype, k_major, OperandMajorMode.MN, Float32, (1, 1, 1), shape, source)
        return qk, pv

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        k_pages: cute.Tensor,  # [128, D, Hkv, pages]
        v_pages: cute.Tensor,
        mIds: cute.Tensor,
        mPageTable: cute.Tensor,
        mSeqLens: cute.Tensor,
        mCuSeqlens: cute.Tensor,
        mOut: cute.Tensor,
        mLse: MaybeTensor,
        mSinkKey: MaybeTensor,
        mQScale: MaybeTensor,
        mKScale: MaybeTensor,
        mVScale: MaybeTensor,
        mDeferred: MaybeTensor,
        most_distinct: Int32,
        mCounter: cute.Tensor,
        query_scale: Float32,
        key_scale: Float32,
        value_scale: Float32,
        max_seqlen_k: Int32,
        num_tiles: Int32,
        num_work: Int32,
        k_atom: cute.CopyAtom,
        v_atom: cute.CopyAtom,
        qk_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
        k_layout: cute.ComposedLayout,
        v_layout: cute.ComposedLayout,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.memory.SmemAllocator()
        shared = self.share(smem, k_layout, v_layout)
        own = self.own(smem)
        self.set_up(warp, k_atom, v_atom, shared, own)
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            num_rows, num_pages = mQ.shape[0], k_pages.shape[3]
            if warp == 0:
                self.load(k_pages, v_pages, k_atom, v_atom, shared)
            elif warp == 1:
                sizes = num_rows, num_pages, max_seqlen_k, num_tiles, num_work
                self.merge(Lists(mIds, mPageTable, mSeqLens, mCuSeqlens, mDeferred, most_distinct, mCounter, *sizes), shared)
            elif warp == 2:
                self.multiply_all(qk_mma, pv_mma, shared, own)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            if const_expr(mQScale is not None):
                query_scale *= mQScale[0]
                key_scale *= mQScale[0]
            if const_expr(mKScale is not None):
                key_scale *= mKScale[0]
            if const_expr(mVScale is not None):
                value_scale *= mVScale[0]
            attended = Attended(mQ, mOut, mLse, mSinkKey, query_scale, key_scale, value_scale)
            self.attend_half(attended, qk_mma, pv_mma, shared, own, warp // 4 - 1)
        self.tear_down(warp, own)

    def share(self, smem, k_layout, v_layout):
        sK = smem.allocate_tensor(self.qk_dtype, k_layout.outer, 1024, swizzle=k_layout.inner)
        sV = smem.allocate_tensor(self.v_dtype, v_layout.outer, 1024, swizzle=v_layout.inner)
        sRows = smem.allocate_tensor(cutlass.Uint8, cute.make_layout((self.half_rows * self.row_bytes, 2)), 1024)
        sEntry = smem.allocate_tensor(Int32, cute.make_layout((ENTRY_WORDS, ENTRIES)), 16)
        barriers = smem.allocate_tensor(cutlass.Int64, cute.make_layout(4 * self.stages + 3 * ENTRIES + 1), 8).iterator
        keys = Ring(barriers, barriers + self.stages, self.stages)
        values = Ring(barriers + 2 * self.stages, barriers + 3 * self.stages, self.stages)
        barriers += 4 * self.stages
        entries, merged = Ring(barriers, barriers + ENTRIES, ENTRIES), barriers + 2 * ENTRIES
        return Shared(sK, sV, sRows, sEntry, keys, values, entries, merged, barriers + 3 * ENTRIES)

    def own(self, smem):
        """Shared memory that only this architecture needs: a word of each consumer thread."""
        return smem.allocate_tensor(Float32, cute.make_layout(2 * WARPGROUP), 16)

    @cute.jit
    def set_up(self, warp: Int32, k_atom: cute.CopyAtom, v_atom: cute.CopyAtom, shared: Shared, own: cute.Tensor):
        self.init_barriers(warp, k_atom, v_atom, shared.keys, shared.values, shared.last_page)
        if warp == 1:
            self.init_entries(shared, 2 * WARPGROUP // 32)
        cute.arch.sync_threads()

    def multiply_all(self, qk_mma, pv_mma, shared, own):
        """Nothing: here each half starts its own products."""

    def tear_down(self, warp, own):
        """Nothing to give back."""

    @cute.jit
    def init_barriers(self, warp: Int32, k_atom: cute.CopyAtom, v_atom: cute.CopyAtom, keys: Ring, values: Ring, last_page: cute.Pointer):
        if warp == 0:
            cpasync.prefetch_descriptor(k_atom)
            cpasync.prefetch_descriptor(v_atom)
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(self.stages):
                    for ring in (keys, values):
                        cute.arch.mbarrier_init(ring.full + stage, 1)
                        cute.arch.mbarrier_init(ring.empty + stage, 2 * WARPGROUP // 32)
                cute.arch.mbarrier_init(last_page, 1)
            cute.arch.mbarrier_init_fence()

    @cute.jit
    def init_entries(self, shared: Shared, readers: cutlass.Constexpr):
        with cute.arch.elect_one():
            for entry in cutlass.range_constexpr(ENTRIES):
                cute.arch.mbarrier_init(shared.merged + entry, 1)
                cute.arch.mbarrier_init(shared.entries.full + entry, 1)
                cute.arch.mbarrier_init(shared.entries.empty + entry, readers)
        cute.arch.mbarrier_init_fence()

    @cute.jit
    def merge(self, lists: Lists, shared: Shared):
        """One warp: tiles, and an entry for each of their blocks, from the last to the first."""
        sEntry, entries = shared.sEntry, shared.entries
        lane = cute.arch.lane_idx()
        grid, _, _ = cute.arch.grid_dim()
        work, _, _ = cute.arch.block_idx()
        rIds = cute.make_rmem_tensor(self.tile.ids_per_lane, Int32)
        count = Int32(0)
        while work < lists.num_work:
            next_work = Int32(0)
            if lane == 0:
                next_work = cute.arch.atomic_add(lists.counter.iterator.llvm_ptr, Int32(1), sem="relaxed", scope="gpu") + grid
            kv_head = work // lists.num_tiles
            # A request's last tiles see most blocks: they go first, and short ones fill the end.
            tile = lists.num_tiles - 1 - work % lists.num_tiles
            request, first_row, end_row, first_position, seq_len = self.locate(lists, tile)
            self.read_ids(lists.ids, rIds, kv_head, first_row, end_row, first_position, seq_len)
            written_end = end_row
            if const_expr(self.variant.defers):
                is_deferred = self.distinct(rIds) > lists.most_distinct
                if lane < self.tile.tokens and first_row + lane < end_row:
                    lists.deferred[kv_head, first_row + lane, 0] = request if is_deferred else Int32(-1)
                    lists.deferred[kv_head, first_row + lane, 1] = self.clamp(first_position + lane + 1, 0, seq_len)
                if is_deferred:
                    rIds.fill(NO_BLOCK)
                    written_end = first_row
            next_work = cute.arch.shuffle_sync(next_work, 0)
            block, bits = self.pop(rIds)
            unfinished = Boolean(True)
            while unfinished:
                next_block, next_bits = self.pop(rIds)
                unfinished = next_block != NO_BLOCK
                page = self.page_of(lists.page_table, request, block, lists.page_table.shape[1], lists.num_pages)
                slot = entries.stage(count)
                entries.wait_empty(count)
                if lane == 0:
                    sEntry[Entry.BLOCK, slot] = block
                    sEntry[Entry.BITS, slot] = bits
                    sEntry[Entry.END, slot] = MORE if unfinished else (TILE_ENDS if next_work < lists.num_work else ALL_ENDS)
                    sEntry[Entry.PAGE, slot] = page
                    sEntry[Entry.KV_HEAD, slot] = kv_head
                    sEntry[Entry.FIRST_ROW, slot] = first_row
                    sEntry[Entry.END_ROW, slot] = written_end
                    sEntry[Entry.FIRST_POSITION, slot] = first_position
                    sEntry[Entry.SEQ_LEN, slot] = seq_len
                    cute.arch.mbarrier_arrive(shared.merged + slot)
                count += 1
                block, bits = next_block, next_bits
            work = next_work

    @cute.jit
    def load(self, k_pages: cute.Tensor, v_pages: cute.Tensor, k_atom: cute.CopyAtom, v_atom: cute.CopyAtom, shared: Shared):
        """One warp: keys and values of each entry's block. Values come one block behind keys, as they are needed: the keys after them do not wait
        for the stage that these take."""
        keys, entries = shared.keys, shared.entries
        count, last_page_phase = Int32(0), Int32(0)
        earlier = Int32(0), Int32(0), Int32(0), Int32(0)
        end = Int32(MORE)
        while end != ALL_ENDS:
            slot = entries.stage(count)
            cute.arch.mbarrier_wait(shared.merged + slot, entries.parity(count))
            fields = (Entry.BLOCK, Entry.BITS, Entry.END, Entry.PAGE, Entry.KV_HEAD, Entry.SEQ_LEN)
            block, bits, end, page, kv_head, seq_len = self.read_words(shared.sEntry, slot, *fields)
            num_keys = seq_len - block * BLOCK if block != NO_BLOCK else Int32(0)  # a tile without any block still says so
            tKsK, tKgK = self.partition_pages(k_atom, shared.sK, k_pages, kv_head)
            keys.wait_empty(count)
            self.load_keys(k_atom, tKgK, tKsK, page, keys.stage(count), keys, num_keys > 0)
            self.pass_over(keys, count, bits)
            if count > 0:
                last_page_phase = self.load_earlier(v_pages, v_atom, shared, count - 1, *earlier, last_page_phase)
            # A barrier tells a phase only from the one before it. Who reads this entry may wait for these keys and for the values before them even if
            # it waited for nothing that had their stages before: that has been read, or the stages would not have been free.
            self.announce(entries, count)
            earlier = bits, page, kv_head, num_keys
            count += 1
        self.load_earlier(v_pages, v_atom, shared, count - 1, *earlier, last_page_phase)
        # Nothing was merged for this one, so nobody waited for who reads the entry that had its place: after as many tiles without blocks as there
        # are entries, they may not have come to it.
        entries.wait_empty(count)
        self.announce(entries, count)

    @cute.jit
    def load_earlier(
        self,
        v_pages: cute.Tensor,
        v_atom: cute.CopyAtom,
        shared: Shared,
        count: Int32,
        bits: Int32,
        page: Int32,
        kv_head: Int32,
        num_keys: Int32,
        last_page_phase: Int32,
    ):
        """Values of a block whose keys have been asked for."""
        tVsV, tVgV = self.partition_pages(v_atom, shared.sV, v_pages, kv_head)
        tensors = v_atom, tVgV, tVsV, shared.sV
        phase = self.load_values(*tensors, page, count, shared.values, num_keys, num_keys > 0, shared.last_page, last_page_phase)
        self.pass_over(shared.values, count, bits)
        return phase

    @cute.jit
    def announce(self, entries: Ring, count: Int32):
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(entries.full + entries.stage(count))

    def bits_of(self, half):
        """A tile's tokens that belong to a half."""
        return Int32((1 << self.tile.half_tokens) - 1) << (half * self.tile.half_tokens)

    @cute.jit
    def pass_over(self, ring: Ring, count: Int32, bits: Int32):
        """Frees a block's stage in the name of halves none of whose tokens selected it: they do not even wait for the load."""
        absent = Int32(0)
        for half in cutlass.range_constexpr(2):
            if (bits & self.bits_of(half)) == 0:
                absent += WARPGROUP // 32
        if cute.arch.lane_idx() == 0 and absent > 0:
            cute.arch.mbarrier_arrive(ring.empty + ring.stage(count), arrive_count=absent)

    def partition_pages(self, atom, sX, pages, kv_head):
        """(stages in shared memory, pages of one KV head) as one load takes them, [tile, stages] and [tile, pages]."""
        gX = cute.local_tile(pages[None, None, kv_head, None], (BLOCK, self.head_dim), (0, 0, None))
        return cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2))

    def page_bytes(self, dtype):
        return BLOCK * self.head_dim * dtype.width // 8

    @cute.jit
    def load_keys(self, atom: cute.CopyAtom, tKgK: cute.Tensor, tKsK: cute.Tensor, page: Int32, stage: Int32, keys: Ring, has_keys):
        """Says that the stage's entry is written and, with the keys, that they are there."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(keys.full + stage, self.page_bytes(self.qk_dtype) if has_keys else 0)
        cute.arch.sync_warp()
        if has_keys:
            cute.copy(atom, tKgK[None, page], tKsK[None, stage], tma_bar_ptr=keys.full + stage)

    @cute.jit
    def load_values(
        self,
        atom: cute.CopyAtom,
        tVgV: cute.Tensor,
        tVsV: cute.Tensor,
        sV: cute.Tensor,
        page: Int32,
        count: Int32,
        values: Ring,
        num_keys: Int32,
        has_keys,
        last_page: cute.Pointer,
        last_page_phase: Int32,
    ):
        """Returns the phase that `last_page` comes to next."""
        lane, stage = cute.arch.lane_idx(), values.stage(count)
        values.wait_empty(count)
        if has_keys and num_keys >= BLOCK:
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(values.full + stage, self.page_bytes(self.v_dtype))
            cute.arch.sync_warp()
            cute.copy(atom, tVgV[None, page], tVsV[None, stage], tma_bar_ptr=values.full + stage)
        else:
            if has_keys:
                # Rows past the sequence's end may hold NaN, which a weight of 0 does not stop.
                if lane == 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(last_page, self.page_bytes(self.v_dtype))
                cute.arch.sync_warp()
                cute.copy(atom, tVgV[None, page], tVsV[None, stage], tma_bar_ptr=last_page)
                cute.arch.mbarrier_wait(last_page, last_page_phase)
                last_page_phase ^= 1
                self.clear_rows(sV, stage, num_keys)
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(values.full + stage)
        return last_page_phase

    @cute.jit
    def locate(self, lists: Lists, tile: Int32):
        """(request, first_row, end_row, first_position, seq_len) of a tile of query rows, found by a whole warp.

        Request b owns tiles from cu[b] // tokens + b on, an upper bound of the tiles before it, so that their number depends on shapes only. The
        rows behind the last request are a request without keys. Offsets may be anything: rows stay within [0, num_rows).
        """
        tokens, num_rows, num_requests = self.tile.tokens, lists.num_rows, lists.seq_lens.shape[0]
        lane = cute.arch.lane_idx()
        request = Int32(0)
        start = Int32(1)
        while start <= num_requests:
            other = start + lane
            begins_before = Boolean(False)
            if other <= num_requests:
                begins_before = self.clamp(lists.cu_seqlens[other], 0, num_rows) // tokens + other <= tile
            request += cute.arch.popc(cute.arch.vote_ballot_sync(begins_before))
            start += 32
        is_padding = request >= num_requests
        begin = lists.cu_seqlens[request]
        end = lists.cu_seqlens[min(request + 1, num_requests)]
        owner = request
        if is_padding:
            end = num_rows
            owner = Int32(0)
        seq_len = self.clamp(lists.seq_lens[owner], 0, lists.max_seqlen_k)
        begin_row = self.clamp(begin, 0, num_rows)
        first_row = begin_row + (tile - begin_row // tokens - request) * tokens
        first_position = seq_len - end + first_row
        if is_padding:
            seq_len = Int32(0)
            first_position = Int32(NO_POSITION)
        return owner, first_row, min(end, num_rows), first_position, seq_len

    def clamp(self, value, low, high):
        return cutlass.min(cutlass.max(value, low), high)

    @cute.jit
    def read_ids(
        self,
        mIds: cute.Tensor,
        rIds: cute.Tensor,  # ids_per_lane of the tile's ids, token by token through the warp's lanes
        kv_head: Int32,
        first_row: Int32,
        end_row: Int32,
        first_position: Int32,
        seq_len: Int32,
    ):
        """The tile's visible blocks, NO_BLOCK in place of everything else."""
        for i in cutlass.range_constexpr(self.tile.ids_per_lane):
            token, index = self.id_of(i)
            row = first_row + token
            visible = min(first_position + token + 1, seq_len)
            block = Int32(NO_BLOCK)
            if token < self.tile.tokens and row < end_row and index < mIds.shape[2]:
                found = mIds[kv_head, row, index]
                if found >= 0 and found < (visible + BLOCK - 1) // BLOCK and visible > 0:
                    block = found
            rIds[i] = block

    def id_of(self, i):
        """(token, index in its list) of a lane's i-th id."""
        flat = i * 32 + cute.arch.lane_idx()
        return flat // self.tile.padded_ids, flat % self.tile.padded_ids

    @cute.jit
    def distinct(self, rIds: cute.Tensor):
        """How many bits the blocks of each half set, together: a half has as many as the tile has ids; a block's is its id modulo their number."""
        words = self.tile.ids_per_lane
        rWords = cute.make_rmem_tensor(words, Int32)
        count = Int32(0)
        for half in cutlass.range_constexpr(2):
            rWords.fill(0)
            for i in cutlass.range_constexpr(half * words // 2, (half + 1) * words // 2):
                place = rIds[i] % (32 * words)
                for word in cutlass.range_constexpr(words):
                    if rIds[i] != NO_BLOCK and place // 32 == word:
                        rWords[word] |= Int32(1) << (place % 32)
            for word in cutlass.range_constexpr(words):
                count += cute.arch.popc(cute.arch.warp_redux_sync(rWords[word], "or"))
        return count

    @cute.jit
    def pop(self, rIds: cute.Tensor):
        """(the last block left, one bit for each token that selected it), which leaves the lists; (NO_BLOCK, 0) when they are empty."""
        last = rIds[0]
        for i in cutlass.range_constexpr(1, self.tile.ids_per_lane):
            last = max(last, rIds[i])
        block = cute.arch.warp_redux_sync(last, "max")
        bits = Int32(0)
        for i in cutlass.range_constexpr(self.tile.ids_per_lane):
            token, _ = self.id_of(i)
            if rIds[i] == block and block != NO_BLOCK:
                bits |= Int32(1) << token
                rIds[i] = Int32(NO_BLOCK)
        return block, cute.arch.warp_redux_sync(bits, "or")

    @cute.jit
    def page_of(self, mPageTable: cute.Tensor, request: Int32, block: Int32, max_pages: Int32, num_pages: Int32):
        """The block's physical page, within the pool whatever the table says."""
        page = Int32(0)
        if block >= 0 and block < max_pages:
            page = self.clamp(mPageTable[request, block], 0, num_pages - 1)
        return page

    @cute.jit
    def clear_rows(self, sV: cute.Tensor, stage: Int32, num_keys: Int32):
        """Zeros from row num_keys on, by a whole warp."""
        chunks = self.chunks(sV[None, None, stage].iterator, self.v_dtype, BLOCK)
        zeros = cute.make_rmem_tensor(chunks.shape[0], self.v_dtype)
        zeros.fill(0.0)
        row = num_keys + cute.arch.lane_idx()
        while row < BLOCK:
            for chunk in cutlass.range_constexpr(cute.size(chunks, mode=[1])):
                cute.autovec_copy(zeros, chunks[None, chunk, row])
            row += 32

    def chunks(self, pointer, dtype, rows):
        """Rows of head_dim elements in shared memory by 16-byte chunks as they lie: [elements, chunks of a row, rows]. `place` swizzles."""
        elements = 128 // dtype.width
        line = 8 * elements  # elements of a row that lie together: 128 bytes
        plain = cute.recast_ptr(pointer, dtype=dtype)
        shape = (elements, (line // elements, self.head_dim // line), rows)
        return cute.make_tensor(plain, cute.make_layout(shape, stride=(1, (elements, rows * line), line)))

    def place(self, row, chunk):
        """Where the swizzle puts chunk `chunk` of row `row`: among the 8 of its line."""
        return chunk ^ (row % 8)

    @cute.jit
    def attend_half(self, attended: Attended, qk_mma: cute.TiledMma, pv_mma: cute.TiledMma, shared: Shared, sWords: cute.Tensor, half: Int32):
        """One warpgroup: its half of each tile's rows, to the end of the work."""
        tile, keys, values = self.tile, shared.keys, shared.values
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        row = self.first_row_of_thread()
        half_tokens = self.bits_of(half)
        scale_log2 = self.exponent_scale(attended.key_scale)

        half_pointer = shared.sRows[None, half].iterator
        tSrQ, tSrK, tOrV, rO, rP = self.fragments(qk_mma, pv_mma, half_pointer, shared.sK, shared.sV)
        row_max = cute.make_rmem_tensor(2, Float32)
        row_sum = cute.make_rmem_tensor(2, Float32)

        sWords[half * WARPGROUP + thread] = scale_log2
        own_word = sWords.iterator + half * WARPGROUP + thread
        rChunks = self.query_chunks()
        count = Int32(0)
        shared.entries.wait_full(count)
        kv_head, first_row, end_row, first_position, seq_len = self.read_place(shared, count)
        self.read_queries(attended.q, rChunks, half, kv_head, first_row, end_row)
        self.store_queries(rChunks, half_pointer)
        self.sync_half(half)
        has_tiles = Boolean(True)
        while has_tiles:
            tokens = tuple(half * tile.half_tokens + (row + 8 * r) // tile.group for r in range(2))
            is_row = tuple((row + 8 * r) // tile.group < tile.half_tokens and first_row + tokens[r] < end_row for r in range(2))
            rows = Rows(
                row,
                tuple((Int32(1) << tokens[r]) if (row + 8 * r) // tile.group < tile.half_tokens else Int32(0) for r in range(2)),
                tuple(self.clamp(first_position + tokens[r] + 1, 0, seq_len) for r in range(2)),
            )
            # Blocks that every token of the half sees to their ends.
            whole_blocks = self.clamp(first_position + half * tile.half_tokens + 1, 0, seq_len) // BLOCK
            rO.fill(0.0)
            row_max.fill(-Float32.inf)
            row_sum.fill(0.0)

            is_pending = Boolean(False)
            pending = Int32(0)  # the block whose weights stand in rP and have not met its values
            count, block, bits, end, found = self.seek(shared, half_tokens, count, NO_LIMIT, Int32(0), Int32(0), Int32(MORE))
            while found or end == MORE:
                goes_on = found and is_pending and block < whole_blocks
                if goes_on:
                    key_stage, keys_came = keys.stage(count), Boolean(False)
                    while goes_on:
                        if not keys_came:
                            keys.wait_full(count)
                        rS = self.multiply_keys(qk_mma, tSrQ, tSrK, key_stage)
                        values.wait_full(pending)
                        self.multiply_values(pv_mma, rO, rP, tOrV, values.stage(pending))
                        warpgroup.wait_group(1)
                        keys.release(count)
                        # ptxas moves freeing keys down; a scale that is read from shared memory behind it, and not needed until then, holds it.
                        block_scale = cute.arch.load(own_word.llvm_ptr, Float32, sem="relaxed", scope="cta", ss="cta")
                        weights = Weights.of(self.by_row(rS), block_scale, self.first_pairs)
                        moves = self.begin_weights(weights, row_max, rows, bits)
                        next_count = count + 1
                        is_announced = shared.entries.is_full(next_count)
                        self.weigh(weights, self.first_pairs, PAIRS - LAST_PAIRS - ENTRY_PAIRS)
                        if not is_announced:
                            shared.entries.wait_full(next_count)
                        next_block, next_bits, next_end = self.read_entry(shared, next_count)
                        key_stage, keys_came = keys.stage(next_count), keys.is_full(next_count)
                        self.weigh(weights, PAIRS - LAST_PAIRS - ENTRY_PAIRS, PAIRS - LAST_PAIRS)
                        found = end == MORE and (next_bits & half_tokens) != 0
                        goes_on = found and next_block < whole_blocks
                        multiplied, pending, count = pending, count, next_count
                        if end == MORE:
                            shared.entries.release(next_count)
                            block, bits, end = next_block, next_bits, next_end
                            count += 0 if found else 1
                        warpgroup.wait_group(0)
                        values.release(multiplied)
                        if not found:
                            count, block, bits, end, found = self.seek(shared, half_tokens, count, self.limit(pending), block, bits, end)
                            goes_on = found and block < whole_blocks
                            key_stage, keys_came = keys.stage(count), Boolean(False)
                        if moves:
                            self.rescale(rO, weights.rescale)
                        self.weigh(weights, PAIRS - LAST_PAIRS, PAIRS)
                        for r in cutlass.range_constexpr(2):
                            row_sum[r] = row_sum[r] * weights.rescale[r] + weights.totals[r]
                        self.take_weights(rP, weights.first.iterator, 0, self.first_pairs)
                        self.take_weights(rP, rS.iterator + 4 * self.first_pairs, self.first_pairs, PAIRS)
                elif is_pending:
                    values.wait_full(pending)
                    self.multiply_values(pv_mma, rO, rP, tOrV, values.stage(pending))
                    warpgroup.wait_group(0)
                    values.release(pending)
                    is_pending = Boolean(False)
                    if not found:
                        count, block, bits, end, found = self.seek(shared, half_tokens, count, Int32(NO_LIMIT), block, bits, end)
                elif found:
                    keys.wait_full(count)
                    rS = self.multiply_keys(qk_mma, tSrQ, tSrK, keys.stage(count))
                    warpgroup.wait_group(0)
                    keys.release(count)
                    rescale = self.weigh_masked(rS, row_max, row_sum, rows, bits, block, scale_log2)
                    shared.entries.wait_full(count + 1)
                    pending, is_pending = count, Boolean(True)
                    count, block, bits, end, found = self.seek(shared, half_tokens, count + 1, self.limit(pending), block, bits, end)
                    self.take_weights(rP, rS.iterator, 0, PAIRS)
                    if cute.arch.vote_any_sync(rescale[0] != 1.0 or rescale[1] != 1.0):
                        self.rescale(rO, rescale)

            has_tiles = end != ALL_ENDS
            done_head, done_row, done_end = kv_head, first_row, end_row
            # The next tile's queries come while the last product runs.
            rChunks = self.query_chunks()
            if has_tiles:
                shared.entries.wait_full(count)
                kv_head, first_row, end_row, first_position, seq_len = self.read_place(shared, count)
                self.read_queries(attended.q, rChunks, half, kv_head, first_row, end_row)
            if is_pending:
                values.wait_full(pending)
                self.multiply_values(pv_mma, rO, rP, tOrV, values.stage(pending))
                warpgroup.wait_group(0)
                values.release(pending)
            rDone, logsums = self.finish(attended, scale_log2, rO, row_max, row_sum, rows, half_pointer, half, done_head)
            # The next tile's queries before this one's output: their fence would wait for stores to memory.
            if has_tiles:
                self.store_queries(rChunks, half_pointer)
                self.sync_half(half)
            self.write_output(attended.out, attended.lse, rDone, logsums, rows, is_row, half, done_head, done_row, done_end)

    def limit(self, pending):
        """Where to stop looking for the next block while one is pending: its values hold a stage, and loads stop as many blocks on. One of these may
        be the next tile's first."""
        return pending + self.stages

    @cute.jit
    def seek(self, shared: Shared, half_tokens: Int32, count: Int32, limit: Int32, block: Int32, bits: Int32, end: Int32):
        """The tile's next block that a token of the half selected, from entry `count` on and before `limit`: (its count, block, bits, what follows,
        whether there is one); else the count of the next entry to read. `end` is what follows the entry before `count`."""
        found = Boolean(False)
        while not found and end == MORE and count < limit:
            shared.entries.wait_full(count)
            block, bits, end = self.read_entry(shared, count)
            shared.entries.release(count)
            found = (bits & half_tokens) != 0
            if not found:
                count += 1
        return count, block, bits, end, found

    def read_entry(self, shared, count):
        """(block, bits, what follows) of an entry."""
        return self.read_words(shared.sEntry, shared.entries.stage(count), Entry.BLOCK, Entry.BITS, Entry.END)

    def read_place(self, shared, count):
        """(KV head, first row, end row, first position, sequence length) of the tile of an entry."""
        fields = (Entry.KV_HEAD, Entry.FIRST_ROW, Entry.END_ROW, Entry.FIRST_POSITION, Entry.SEQ_LEN)
        return self.read_words(shared.sEntry, shared.entries.stage(count), *fields)

    def read_words(self, sEntry, slot, *words):
        """Words of an entry, the same in all lanes."""
        return tuple(cute.arch.make_warp_uniform(sEntry[word, slot]) for word in words)

    def fragments(self, qk_mma, pv_mma, half_pointer, sK, sV):
        """Operands and accumulators of both products: (queries, keys, values, outputs, weights)."""
        q_layout = self.smem_layout(self.qk_dtype, HALF_ROWS)
        sQ = cute.make_tensor(cute.recast_ptr(half_pointer, q_layout.inner, self.qk_dtype), q_layout.outer)  # [64, D]
        transposed = cute.make_ordered_layout((self.head_dim, BLOCK, self.stages), order=(1, 0, 2))
        sVt = cute.composition(sV, transposed)  # [D, 128, stages]
        qk_thread, pv_thread = qk_mma.get_slice(0), pv_mma.get_slice(0)
        tSrQ = qk_thread.make_fragment_A(qk_thread.partition_A(sQ))
        tSrK = qk_thread.make_fragment_B(qk_thread.partition_B(sK))
        tOrV = pv_thread.make_fragment_B(pv_thread.partition_B(sVt))
        rO = cute.make_rmem_tensor(pv_thread.partition_shape_C((HALF_ROWS, self.head_dim)), Float32)
        rP = pv_thread.make_fragment_A(pv_thread.partition_shape_A((HALF_ROWS, BLOCK)))
        return tSrQ, tSrK, tOrV, rO, rP

    @cute.jit
    def exponent_scale(self, key_scale: Float32):
        """What turns products into exponents of 2. Never 0, of which infinite products would make NaN."""
        scale = key_scale * LOG2E
        if const_expr(self.variant.negative_scale):
            scale = -scale
        return Float32(SMALLEST_SCALE) if scale == 0.0 else scale

    def first_row_of_thread(self):
        """Of the two rows of a half that a thread holds of accumulators; the other is 8 further on."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        return thread // 32 * 16 + thread % 32 // 4

    @cute.jit
    def read_queries(self, mQ: cute.Tensor, rChunks: cute.Tensor, half: Int32, kv_head: Int32, first_row: Int32, end_row: Int32):
        """The half's query rows into registers, each warp the 16 that its lanes hold of accumulators; rows of no token become 0."""
        rChunks.fill(0.0)
        per_row = self.head_dim * self.qk_dtype.width // 128
        for step in cutlass.range_constexpr(rChunks.shape[1]):
            row, chunk = self.chunk_of(step, per_row)
            token, head = self.token_and_head(row, half, kv_head)
            if row // self.tile.group < self.tile.half_tokens and first_row + token < end_row:
                gChunk = cute.local_tile(mQ[first_row + token, head, None], (rChunks.shape[0],), (chunk,))
                cute.autovec_copy(gChunk, rChunks[None, step])

    def query_chunks(self):
        """Registers for a thread's share of a half's queries: [elements of 16 bytes, steps]."""
        return cute.make_rmem_tensor((128 // self.qk_dtype.width, self.head_dim * self.qk_dtype.width // 256), self.qk_dtype)

    @cute.jit
    def store_queries(self, rChunks: cute.Tensor, half_pointer: cute.Pointer):
        sChunks = self.chunks(half_pointer, self.qk_dtype, HALF_ROWS)
        for step in cutlass.range_constexpr(rChunks.shape[1]):
            row, chunk = self.chunk_of(step, cute.size(sChunks, mode=[1]))
            cute.autovec_copy(rChunks[None, step], sChunks[None, self.place(row, chunk), row])
        cute.arch.fence_view_async_shared()

    def chunk_of(self, step, per_row):
        """(row of the half, chunk of 16 bytes) that a lane moves in one of its warp's steps over 16 rows."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        flat = step * 32 + thread % 32
        return thread // 32 * 16 + flat // per_row, flat % per_row

    def token_and_head(self, row, half, kv_head):
        return half * self.tile.half_tokens + row // self.tile.group, kv_head * self.tile.group + row % self.tile.group

    def sync_half(self, half):
        cute.arch.barrier(barrier_id=1 + half, number_of_threads=WARPGROUP)

    @cute.jit
    def multiply_keys(self, qk_mma: cute.TiledMma, tSrQ: cute.Tensor, tSrK: cute.Tensor, stage: Int32):
        """Starts Q K^T; the products [64, 128] are there when the group is waited for."""
        rS = cute.make_rmem_tensor(qk_mma.get_slice(0).partition_shape_C((HALF_ROWS, BLOCK)), Float32)
        self.multiply(qk_mma, rS, tSrQ, tSrK[None, None, None, stage], accumulate=False)
        return rS

    @cute.jit
    def multiply_values(self, pv_mma: cute.TiledMma, rO: cute.Tensor, rP: cute.Tensor, tOrV: cute.Tensor, stage: Int32):
        """Starts O += P V."""
        self.multiply(pv_mma, rO, rP, tOrV[None, None, None, stage], accumulate=True)

    @cute.jit
    def multiply(self, mma: cute.TiledMma, accumulator: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate: cutlass.Constexpr):
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, accumulate)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
            cute.gemm(atom, accumulator, a[None, None, k], b[None, None, k], accumulator)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    def by_row(self, accumulator):
        """A thread's share of an accumulator as [2 rows, columns]."""
        columns = cute.size(accumulator) // 4
        return cute.make_tensor(accumulator.iterator, cute.make_layout((2, (2, columns)), stride=(2, (1, 4))))

    @cute.jit
    def begin_weights(self, weights: Weights, row_max: cute.Tensor, rows: Rows, bits: Int32):
        """The first part of a step of the softmax over a block that the half's tokens see to its end, for the rows whose token selected it. Returns
        whether a row of the warp has a new maximum.

        A block's maximum takes as long as dozens of weights. They are relative to the maximum so far unless the block's is larger by LAZY_LOG2, which
        is seldom, so the first ones do not wait for it.
        """
        products, scale_log2 = weights.products, weights.scale_log2
        members = tuple((bits & rows.token_bit[r]) != 0 for r in range(2))
        for r in cutlass.range_constexpr(2):
            if const_expr(self.variant.negative_scale):
                products[r, None].store(-products[r, None].load())
            weights.rescale[r] = Float32(1.0)
            weights.shifts[r] = row_max[r] * scale_log2 if members[r] else Float32.inf
        values = [[products[r, i] for i in range(2 * PAIRS)] for r in range(2)]
        self.weigh_first(weights, values)
        greatest = bits_row_maxima(values)
        grows = Boolean(False)
        for r in cutlass.range_constexpr(2):
            growth = (cute.arch.fmax(row_max[r], greatest[r].bitcast(Float32)) - row_max[r]) * scale_log2
            # Without a product above zero, their bits say nothing of the maximum, beside that it is below one so far that is not negative.
            is_unknown = (greatest[r] & row_max[r].bitcast(Int32)) < 0
            grows = grows or (members[r] and (is_unknown or growth > LAZY_LOG2))
        moves = cute.arch.vote_any_sync(grows)
        if moves:
            peaks = float_row_maxima(values)
            for r in cutlass.range_constexpr(2):
                new_max = cute.arch.fmax(row_max[r], peaks[r])
                new_max = new_max if members[r] and (new_max - row_max[r]) * scale_log2 > LAZY_LOG2 else row_max[r]
                weights.rescale[r] = cute.math.exp2((row_max[r] - new_max) * scale_log2, fastmath=True) if new_max != row_max[r] else Float32(1.0)
                weights.shifts[r] = new_max * scale_log2 if members[r] else Float32.inf
                row_max[r] = new_max
            self.weigh_first(weights, values)
        return moves

    def weight(self, product, scale_log2, shift):
        # In one instruction whatever the compiler makes of the same product where it is weighed anew.
        exponent = mlir_math.fma(product.ir_value(), scale_log2.ir_value(), (-shift).ir_value())
        return cute.math.exp2(Float32(exponent), fastmath=True)

    def weigh_first(self, weights, values):
        """Weights of the first pairs, apart from the products: these are still needed where a maximum moves."""
        for r in range(2):
            weights.totals[r] = Float32(0.0)
            for i in range(2 * self.first_pairs):
                weight = self.weight(values[r][i], weights.scale_log2, weights.shifts[r])
                weights.first[i // 2 * 4 + r * 2 + i % 2] = weight
                weights.totals[r] += weight

    def weigh(self, weights, begin, end):
        """Pairs [begin, end) of each row."""
        for i in range(2 * begin, 2 * end):
            for r in range(2):
                weight = self.weight(weights.products[r, i], weights.scale_log2, weights.shifts[r])
                weights.products[r, i] = weight
                weights.totals[r] += weight

    @cute.jit
    def weigh_masked(
        self,
        rS: cute.Tensor,  # [64, 128] products, which become weights
        row_max: cute.Tensor,  # [2], of the products: what the weights so far are relative to
        row_sum: cute.Tensor,  # [2], of this thread's columns
        rows: Rows,
        bits: Int32,
        block: Int32,
        scale_log2: Float32,
    ):
        """A step of the softmax where a row sees keys up to its position; returns what the output so far is to be multiplied by, [2]."""
        products = self.by_row(rS)
        rescale = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            if const_expr(self.variant.negative_scale):
                products[r, None].store(-products[r, None].load())
            limit = rows.visible[r] - block * BLOCK - cute.arch.lane_idx() % 4 * 2
            limit = limit if (bits & rows.token_bit[r]) != 0 else Int32(0)
            for i in cutlass.range_constexpr(BLOCK // 4):
                column = i // 2 * 8 + i % 2
                products[r, i] = products[r, i] if column < limit else -Float32.inf
        peaks = float_row_maxima([[products[r, i] for i in range(BLOCK // 4)] for r in range(2)])
        for r in cutlass.range_constexpr(2):
            row = products[r, None].load()
            new_max = cute.arch.fmax(row_max[r], peaks[r])
            finite_max = Float32(0.0) if new_max == -Float32.inf else new_max
            rescale[r] = cute.math.exp2((row_max[r] - finite_max) * scale_log2, fastmath=True)
            weights = cute.math.exp2(row * scale_log2 - finite_max * scale_log2, fastmath=True)
            row_max[r] = new_max
            row_sum[r] = row_sum[r] * rescale[r] + weights.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            products[r, None].store(weights)
        return rescale

    def take_weights(self, rP, weights, begin, end):
        """Pairs [begin, end) of each row from `weights`, a pointer, to where the next product reads them."""
        # An accumulator's elements and those of a 16-bit first operand stand in the same order.
        size = cute.make_layout(4 * (end - begin))
        cute.make_tensor(rP.iterator + 4 * begin, size).store(cute.make_tensor(weights, size).load().to(self.v_dtype))

    def rescale(self, rO, factors):
        """The output so far under new maxima."""
        output = self.by_row(rO)
        for r in range(2):
            output[r, None].store(output[r, None].load() * factors[r])

    @cute.jit
    def finish(
        self,
        attended: Attended,
        scale_log2: Float32,
        rO: cute.Tensor,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        rows: Rows,
        half_pointer: cute.Pointer,
        half: Int32,
        kv_head: Int32,
    ):
        """(outputs in chunks of whole rows, LSE of the thread's two rows), by way of the shared memory of the half's queries."""
        output = self.by_row(rO)
        logsums = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            total = cute.arch.warp_reduction_sum(row_sum[r], threads_in_group=4)
            has_keys = total > 0.0
            logsums[r] = (row_max[r] * scale_log2 + cute.math.log2(total, fastmath=True)) * LN2 if has_keys else -Float32.inf
            factor = attended.value_scale / total if has_keys else Float32(0.0)
            if const_expr(attended.sink_key is not None):
                row = rows.first + 8 * r
                _, head = self.token_and_head(row, half, kv_head)
                logit = self.sink_logit(attended.sink_key, half_pointer, row, head) * attended.query_scale
                if has_keys:
                    factor /= 1.0 + cute.math.exp2((logit - logsums[r]) * LOG2E, fastmath=True)
            output[r, None].store(output[r, None].load() * factor)
        self.sync_half(half)
        return self.whole_rows(rO, half_pointer), logsums

    @cute.jit
    def write_output(
        self,
        mOut: cute.Tensor,
        mLse: MaybeTensor,
        rDone: cute.Tensor,
        logsums: cute.Tensor,
        rows: Rows,
        is_row,
        half: Int32,
        kv_head: Int32,
        first_row: Int32,
        end_row: Int32,
    ):
        for step in cutlass.range_constexpr(rDone.shape[1]):
            row, chunk = self.chunk_of(step, 2 * rDone.shape[1])
            token, head = self.token_and_head(row, half, kv_head)
            if row // self.tile.group < self.tile.half_tokens and first_row + token < end_row:
                gChunk = cute.local_tile(mOut[first_row + token, head, None], (rDone.shape[0],), (chunk,))
                cute.autovec_copy(rDone[None, step], gChunk)
        if const_expr(mLse is not None):
            for r in cutlass.range_constexpr(2):
                token, head = self.token_and_head(rows.first + 8 * r, half, kv_head)
                if is_row[r] and cute.arch.lane_idx() % 4 == 0:
                    mLse[first_row + token, head] = logsums[r]

    @cute.jit
    def whole_rows(self, rO: cute.Tensor, half_pointer: cute.Pointer):
        """A warp's 16 rows of outputs, in the place of queries that no product needs any more, and back by chunks: [elements, steps]."""
        rOut = cute.make_rmem_tensor(cute.size(rO), self.out_dtype)
        rOut.store(cute.make_tensor(rO.iterator, cute.make_layout(cute.size(rO))).load().to(self.out_dtype))
        pairs = cute.recast_tensor(rOut, Int32)  # [2 rows of each pair of columns]
        sChunks = self.chunks(half_pointer, self.out_dtype, HALF_ROWS)
        for i in cutlass.range_constexpr(cute.size(pairs)):
            row, chunk = self.first_row_of_thread() + 8 * (i % 2), i // 2
            sPairs = cute.recast_tensor(sChunks[None, self.place(row, chunk), row], Int32)
            sPairs[cute.arch.lane_idx() % 4] = pairs[i]
        cute.arch.sync_warp()
        per_row = cute.size(sChunks, mode=[1])
        rDone = cute.make_rmem_tensor((sChunks.shape[0], per_row // 2), self.out_dtype)
        for step in cutlass.range_constexpr(per_row // 2):
            row, chunk = self.chunk_of(step, per_row)
            cute.autovec_copy(sChunks[None, self.place(row, chunk), row], rDone[None, step])
        cute.arch.sync_warp()
        return rDone

    @cute.jit
    def sink_logit(self, mSinkKey: cute.Tensor, half_pointer: cute.Pointer, row: Int32, head: Int32):
        """q . sink_key of a row, whose four lanes take every fourth chunk; all four get the sum."""
        sChunks = self.chunks(half_pointer, self.qk_dtype, HALF_ROWS)
        elements = sChunks.shape[0]
        rQ = cute.make_rmem_tensor(elements, self.qk_dtype)
        total = Float32(0.0)
        for i in cutlass.range_constexpr(cute.size(sChunks, mode=[1]) // 4):
            chunk = 4 * i + cute.arch.lane_idx() % 4
            cute.autovec_copy(sChunks[None, self.place(row, chunk), row], rQ)
            wide = rQ.load().to(Float32)
            for j in cutlass.range_constexpr(elements):
                total += wide[j] * mSinkKey[head, chunk * elements + j].to(Float32)
        return cute.arch.warp_reduction_sum(total, threads_in_group=4)


def build(variant: Variant) -> tuple[Any, tuple[Any, ...]]:
    kernel = SparsePrefillSm90(variant)
    return kernel, fake_arguments(kernel)


def fake_arguments(kernel: SparsePrefillSm90) -> tuple[Any, ...]:
    """A kernel's arguments as tensors of any lengths and strides that a call may bring."""
    variant = kernel.variant
    rows, heads, kv_heads, requests, pages = (cute.sym_int() for _ in range(5))

    def vectors(dtype: Any, shape: tuple[Any, ...], align: int = 16) -> Any:
        strides = tuple(cute.sym_int64(divisibility=align * 8 // dtype.width) for _ in shape[1:])
        return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=align)

    def scalars(dtype: Any, *shape: Any) -> Any:
        return make_fake_tensor(dtype, shape, tuple(cute.sym_int64() for _ in shape))

    def optional(exists: bool, make: Any) -> Any:
        return make() if exists else None

    dim = variant.head_dim
    return (
        vectors(kernel.qk_dtype, (rows, heads, dim), 16 if variant.aligned else kernel.qk_dtype.width // 8),
        vectors(kernel.qk_dtype, (pages, kv_heads, BLOCK, dim)),
        vectors(kernel.v_dtype, (pages, kv_heads, BLOCK, dim)),
        scalars(Int32, kv_heads, rows, cute.sym_int()),
        scalars(Int32, requests, cute.sym_int()),
        scalars(Int32, requests),
        scalars(Int32, cute.sym_int()),
        vectors(kernel.out_dtype, (rows, heads, dim), 16 if variant.aligned else kernel.out_dtype.width // 8),
        optional(variant.lse, lambda: scalars(Float32, rows, heads)),
        optional(variant.sink_dtype is not None, lambda: scalars(DTYPES[variant.sink_dtype or ""], heads, dim)),
        *(optional(exists, lambda: scalars(Float32, 1)) for exists in (variant.q_scale, variant.k_scale, variant.v_scale)),
        optional(variant.defers, lambda: scalars(Int32, kv_heads, rows, 2)),
        Int32(0),
        scalars(Int32, 1),
        Float32(0.0),
        Float32(0.0),
        Float32(0.0),
        Int32(0),
        Int32(0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


KERNEL = CuteKernel("sparse_prefill_sm90", build, sources=[__file__, row_maximum.__file__])


def sparse_prefill(
    call: SparseAttentionCall,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: PagedBatch,
    kv_heads: slice,
    counter: torch.Tensor,
    deferred: torch.Tensor | None = None,
    *,
    kernel: CuteKernel[Variant] = KERNEL,
) -> None:
    """Attention of every query for the KV groups `kv_heads`, which k and v hold.

    Args:
        k: [pages, Hkv, 128, D] of q's dtype; v: the same shape, 16 bit.
        batch: the requests, with a page table of k's and v's pages.
        counter: [1] int32, 0.
        deferred: [Hkv, T, 2] int32, written: rows of tiles whose tokens share few blocks are left out, and named here.
        kernel: this architecture's.
    """
    group, topk = call.q.shape[1] // call.k.shape[1], call.ids.shape[2]
    heads = slice(kv_heads.start * group, kv_heads.stop * group)
    q, out, ids = call.q[:, heads], call.out[:, heads], call.ids[kv_heads]
    sink_key = None if call.sink_key is None else call.sink_key[heads]
    scales = call.q_scale, call.k_scale, call.v_scale
    variant = Variant(
        qk_dtype=dtype_name(q.dtype),
        v_dtype=dtype_name(v.dtype),
        out_dtype=dtype_name(out.dtype),
        head_dim=q.shape[2],
        group=group,
        ids=max(16, next_power_of_2(topk)),
        lse=call.lse is not None,
        sink_dtype=None if sink_key is None else dtype_name(sink_key.dtype),
        q_scale=scales[0].tensor is not None,
        k_scale=scales[1].tensor is not None,
        v_scale=scales[2].tensor is not None,
        negative_scale=call.sm_scale < 0,
        aligned=is_aligned(q) and is_aligned(out),
        defers=deferred is not None,
    )
    query_scale = call.sm_scale * call.q_scale.value
    kernel.get(variant, q.device)(
        q,
        k,
        v,
        ids,
        batch.page_table,
        batch.seq_lens,
        batch.cu_seqlens_q,
        out,
        None if call.lse is None else call.lse[:, heads],
        sink_key,
        *(None if scale.tensor is None else scale.tensor.reshape(1) for scale in scales),
        deferred,
        most_distinct(tile_tokens(group, variant.ids), variant.ids, topk),
        counter,
        query_scale,
        query_scale * call.k_scale.value,
        call.v_scale.value,
        batch.max_seqlen_k,
        num_sms(q.device),
    )


def is_aligned(rows: torch.Tensor) -> bool:
    """Whether rows [T, H, D] lie at multiples of 16 bytes."""
    return rows.data_ptr() % 16 == 0 and all(stride * rows.element_size() % 16 == 0 for stride in rows.stride()[:2])


def next_power_of_2(n: int) -> int:
    return 1 << max(0, (n - 1)).bit_length()


@functools.cache
def num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
