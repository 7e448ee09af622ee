"""Sparse MLA prefill on Hopper: 64 heads of a query attend to the tokens that its indices name, whose first 512 dims are their values.

A tile is 64 gathered tokens, read once for both products. Two warpgroups take turns with Q K^T and the softmax, tile by tile; the outputs' columns
are halved between them, so each multiplies every tile's weights with its half of the values. `docs/cute_sparse_mla.md` walks through it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90_utils
import torch
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.tensor_utils import LayoutEnum

from m3attn.calls import SparseMlaPrefillCall
from m3attn.choice import UnsupportedProblem
from m3attn.dsl_kernels import sparse_prefill_sm90
from m3attn.dsl_kernels.common.kernels import CuteKernel
from m3attn.dsl_kernels.sparse_prefill_sm90 import DTYPES, LN2, LOG2E, WARPGROUP, MaybeTensor, Ring, num_sms
from m3attn.dtypes import dtype_name
from m3attn.workspace import WorkShape, workspace_limit

HEADS = 64
"""Rows of a warpgroup's matrix instruction: heads of one query."""
TOKENS = 64
"""Gathered tokens of a tile."""
LATENT = 512
LINE = 64
"""Dims that lie together in shared memory: 128 bytes of a token, or 64 in e4m3, as wgmma's swizzle has them."""
HALF_LINES = LATENT // LINE // 2
LINES = LATENT // LINE + 1
"""The last line holds the rotated dims until they have met the queries, and then the tile's weights."""
WARP_TOKENS = TOKENS // 4
VALUE_STAGES = 2
LAG = 8.0
"""How far, base 2, a row's maximum may outgrow what its 16-bit weights are relative to before outputs are rescaled, which they then seldom are."""
FALL = 16.0
"""How far, base 2, what a row's e4m3 weights are relative to may fall below the row's maximum, so that sums stay in range."""
MERGE_THREADS = 128
LOWEST = -torch.finfo(torch.float32).max
"""Of a row without a token: unlike -inf it can be subtracted from itself, and from it."""
WEIGHT_BITS_E4M3 = 8
"""Weights of at most 1 lose less in e4m3 above its denormals: they are scaled by two to this power."""
COLUMNS = 32
"""Of the output that sums of e4m3 are made for at once."""


@dataclass(frozen=True)
class Variant:
    """What is compiled.

    Attributes:
        dtype: of queries and tokens, and of the weights that multiply the values.
        head_dim: 576, or 512 without rotated dims.
        length: a tensor says how many of each query's indices count; sink: each head has a sink.
        q_scale, kv_scale: a device tensor holds a factor of it.
        split: the indices of a query go to several thread blocks, and a second kernel joins what they find.
    """

    dtype: str
    head_dim: int
    length: bool
    sink: bool
    q_scale: bool
    kv_scale: bool
    split: bool = False


LEFT, RIGHT, LAST = range(3)
"""Parts of a tile, each a ring of its own: dims 0 to 255, dims 256 to 511, the last line."""
EACH = ((LEFT,), (RIGHT,), (LAST,))


class SparseMlaSm90:
    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.dtype = DTYPES[variant.dtype]
        self.lines = variant.head_dim // LINE
        # wgmma reads 16-bit values as they lie, token by token; those of 8 bits only dim by dim.
        self.transposes = self.dtype.width == 8
        self.stages = 3 if self.transposes else 2
        self.line_chunks = LINE * self.dtype.width // 128  # copies of 16 bytes that make a line of a token
        self.copied_tokens = 32 // self.line_chunks  # by a warp at once
        self.weight_bits = WEIGHT_BITS_E4M3 if self.transposes else 0
        # Of a tile's e4m3 weights: halves have their own in few queries' short parts, where another addition an output takes next to no time.
        self.bases = 2 if self.transposes and variant.split else 1
        self.consumer_registers, self.producer_registers = 224, 56

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [s_q, h_q, 576 | 512]
        mKV: cute.Tensor,  # [s_kv, 576 | 512]
        mIndices: cute.Tensor,  # [s_q, topk]
        mLength: MaybeTensor,  # [s_q]
        mSink: MaybeTensor,  # [h_q]
        mQScale: MaybeTensor,  # [1]
        mKVScale: MaybeTensor,  # [1]
        mOut: cute.Tensor,  # [s_q, h_q, 512]
        mMaxLogits: cute.Tensor,  # [s_q, h_q]
        mLse: cute.Tensor,  # [s_q, h_q]
        mParts: MaybeTensor,  # fp32 scratch for `parts_of`
        logit_scale: Float32,  # sm_scale * q_scale * kv_scale
        value_scale: Float32,
        max_blocks: Int32,  # thread blocks
        splits: Int32,  # parts of a query's indices
        stream: cuda.CUstream,
    ):
        k_major, source = OperandMajorMode.K, warpgroup.OperandSource.SMEM
        qk_mma = sm90_utils.make_trivial_tiled_mma(self.dtype, self.dtype, k_major, k_major, Float32, (1, 1, 1), (HEADS, TOKENS), source)
        v_major = k_major if self.transposes else OperandMajorMode.MN
        columns, source = COLUMNS if self.transposes else LATENT // 2, warpgroup.OperandSource.RMEM
        pv_mma = sm90_utils.make_trivial_tiled_mma(self.dtype, self.dtype, k_major, v_major, Float32, (1, 1, 1), (HEADS, columns), source)
        num_work = mQ.shape[0] * ((mQ.shape[1] + HEADS - 1) // HEADS)
        # A query's whole rows, or its parts.
        results = (mOut, mMaxLogits, mLse)
        if const_expr(self.variant.split):
            num_work *= splits
            results = self.parts_of(mParts, splits, mQ.shape[0], mQ.shape[1])
        self.kernel(mQ, mKV, mIndices, mLength, mSink, mQScale, mKVScale, *results, logit_scale, value_scale, num_work, qk_mma, pv_mma).launch(
            grid=(min(num_work, max_blocks), 1, 1), block=(3 * WARPGROUP, 1, 1), stream=stream, min_blocks_per_mp=1
        )
        if const_expr(self.variant.split):
            self.merge(mSink, mOut, mMaxLogits, mLse, *results).launch(
                grid=(mQ.shape[0] * mQ.shape[1], 1, 1), block=(MERGE_THREADS, 1, 1), stream=stream
            )

    def parts_of(self, mParts, splits, queries, heads):
        """What the parts of a query find, before the sink: out [splits, s_q, h_q, 512]; largest logit and LSE, -inf without a token."""
        rows = splits * queries * heads  # MAX_PIECES * HEADS at most
        by_row = cute.make_layout((splits, queries, heads), stride=(queries * heads, heads, 1))
        strides = (*(cute.assume(n * LATENT, divby=LATENT) for n in (queries * heads, heads)), LATENT, 1)
        return (
            cute.make_tensor(mParts.iterator, cute.make_layout((splits, queries, heads, LATENT), stride=strides)),
            cute.make_tensor(mParts.iterator + rows * LATENT, by_row),
            cute.make_tensor(mParts.iterator + rows * (LATENT + 1), by_row),
        )

    def staged(self, pointer, rows, lines, stages, stride):
        """Rows of `lines` lines in every stage, swizzled as wgmma wants them: [rows, lines * 64, stages]."""
        kind = sm90_utils.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.dtype, LINE)
        layout = cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, self.dtype), (rows, lines * LINE), order=(0, 1))
        layout_of_stages = cute.append(layout.outer, cute.make_layout(stages, stride=stride))
        return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, self.dtype), layout_of_stages)

    def chunk_offset(self, row, chunk):
        """Of 16 bytes of a row in a line, in elements, where the swizzle puts them."""
        return row * LINE + (chunk ^ row // (8 // self.line_chunks) % self.line_chunks) * (LINE // self.line_chunks)

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mKV: cute.Tensor,
        mIndices: cute.Tensor,
        mLength: MaybeTensor,
        mSink: MaybeTensor,
        mQScale: MaybeTensor,
        mKVScale: MaybeTensor,
        mOut: cute.Tensor,  # these three, or their parts
        mMaxLogits: cute.Tensor,
        mLse: cute.Tensor,
        logit_scale: Float32,
        value_scale: Float32,
        num_work: Int32,
        qk_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.memory.SmemAllocator()
        sQ = smem.allocate_tensor(self.dtype, cute.make_layout(HEADS * LINE * self.lines), 1024)
        sTiles = smem.allocate_tensor(self.dtype, cute.make_layout(TOKENS * LINE * LINES * self.stages), 1024)
        sValues, sWeights = sTiles, cute.make_tensor(sTiles.iterator + (LINES - 1) * (TOKENS * LINE), cute.make_layout(1))
        if const_expr(self.transposes):
            sValues = smem.allocate_tensor(self.dtype, cute.make_layout(TOKENS * LATENT * VALUE_STAGES), 1024)
            sWeights = smem.allocate_tensor(self.dtype, cute.make_layout(HEADS * TOKENS * self.stages), 1024)
        sBase = smem.allocate_tensor(Float32, cute.make_layout((HEADS, self.bases, self.stages)), 16)  # what each row's weights are relative to
        sRows = smem.allocate_tensor(Float32, cute.make_layout((HEADS, 2, 2, 2)), 16)  # [rows, sum or peak, warpgroups, every second piece of work]
        sValid = smem.allocate_tensor(Int32, cute.make_layout((4, self.stages)), 16)  # 16 tokens a word
        barriers = smem.allocate_tensor(cutlass.Int64, cute.make_layout(8 * self.stages + 2 * VALUE_STAGES + 2), 8).iterator
        rings = [Ring(barriers + 2 * i * self.stages, barriers + (2 * i + 1) * self.stages, self.stages) for i in range(4)]
        parts, weights = tuple(rings[:3]), rings[3]
        barriers += 8 * self.stages
        values = Ring(barriers, barriers + VALUE_STAGES, VALUE_STAGES)
        queries = Ring(barriers + 2 * VALUE_STAGES, barriers + 2 * VALUE_STAGES + 1, 1)

        if warp == 0:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(self.stages):
                    # The last part comes with words about the tokens. Values are freed by the warpgroup that multiplies them, or by the one that
                    # multiplies them as keys and the one that transposes them. Weights in the last part are freed by both that multiply them.
                    for part in (LEFT, RIGHT, LAST):
                        cute.arch.mbarrier_init(parts[part].full + stage, WARPGROUP + (4 if part == LAST else 0))
                        cute.arch.mbarrier_init(parts[part].empty + stage, 8 if (part == LAST) != self.transposes else 4)
                    cute.arch.mbarrier_init(weights.full + stage, 4)
                for stage in cutlass.range_constexpr(VALUE_STAGES):
                    cute.arch.mbarrier_init(values.full + stage, 4)
                    cute.arch.mbarrier_init(values.empty + stage, 8)
                cute.arch.mbarrier_init(queries.full, WARPGROUP)
                cute.arch.mbarrier_init(queries.empty, 8)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            self.produce(mQ, mKV, mIndices, mLength, self.splits_of(mOut), num_work, sQ, sTiles, sValues, sValid, parts, values, queries, warp)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            if const_expr(mQScale is not None):
                logit_scale *= mQScale[0]
            if const_expr(mKVScale is not None):
                logit_scale *= mKVScale[0]
                value_scale *= mKVScale[0]
            self.consume(
                mQ,
                mIndices,
                mLength,
                mSink,
                mOut,
                mMaxLogits,
                mLse,
                logit_scale * LOG2E,
                value_scale,
                num_work,
                qk_mma,
                pv_mma,
                sQ,
                sTiles,
                sValues,
                sWeights,
                sBase,
                sRows,
                sValid,
                parts,
                weights,
                values,
                queries,
                warp // 4 - 1,
            )

    def place_of(self, work, num_queries, num_heads):
        """(query, its first head, part of its indices) of a piece of work: neighbours share tokens, which then come from L2."""
        head_tiles = (num_heads + HEADS - 1) // HEADS
        return work // head_tiles % num_queries, work % head_tiles * HEADS, work // head_tiles // num_queries

    @cute.jit
    def tiles_of(self, mIndices: cute.Tensor, mLength: MaybeTensor, query: Int32, split: Int32, splits: Int32):
        """(first tile, end tile, how many of the query's indices count)."""
        length = Int32(mIndices.shape[1])
        if const_expr(mLength is not None):
            length = cutlass.min(cutlass.max(mLength[query], 0), length)
        tiles = (length + TOKENS - 1) // TOKENS
        first = Int32(0)
        if const_expr(self.variant.split):
            per_split = (tiles + splits - 1) // splits
            first = cutlass.min(split * per_split, tiles)
            tiles = cutlass.min(first + per_split, tiles)
        return first, tiles, length

    def splits_of(self, mOut):
        return mOut.shape[0] if self.variant.split else 1

    @cute.jit
    def produce(
        self,
        mQ: cute.Tensor,
        mKV: cute.Tensor,
        mIndices: cute.Tensor,
        mLength: MaybeTensor,
        splits: Int32,
        num_work: Int32,
        sQ: cute.Tensor,
        sTiles: cute.Tensor,
        sValues: cute.Tensor,
        sValid: cute.Tensor,
        parts: tuple[Ring, Ring, Ring],
        values: Ring,
        queries: Ring,
        warp: Int32,
    ):
        """One warpgroup: queries and gathered tokens, each warp 16 rows of a tile, by asynchronous copies of 16 bytes."""
        lane = cute.arch.lane_idx()
        row = warp * WARP_TOKENS + lane // self.line_chunks  # and others of the warp's, `copied_tokens` apart
        place = warp * WARP_TOKENS + lane % WARP_TOKENS
        num_heads, num_tokens = mQ.shape[1], mKV.shape[0]
        grid, _, _ = cute.arch.grid_dim()
        work, _, _ = cute.arch.block_idx()
        sources = cute.make_rmem_tensor(WARP_TOKENS // self.copied_tokens, cutlass.Int64)
        sizes = cute.make_rmem_tensor(WARP_TOKENS // self.copied_tokens, Int32)
        query_count, count = Int32(0), Int32(0)
        query, first_tile, end_tile, length = self.piece_of(mQ, mIndices, mLength, work, splits)
        index = self.read_index(mIndices, query, first_tile * TOKENS + place, length)
        while work < num_work:
            next_query, next_tile, next_end, next_length = self.piece_of(mQ, mIndices, mLength, work + grid, splits)
            if first_tile >= end_tile:
                index = self.read_index(mIndices, next_query, next_tile * TOKENS + place, next_length)
            tile = first_tile
            while tile < end_tile:
                is_valid = index >= 0 and index < num_tokens
                valid = cute.arch.vote_ballot_sync(is_valid) & 0xFFFF
                for i in cutlass.range_constexpr(WARP_TOKENS // self.copied_tokens):
                    token = cute.arch.shuffle_sync(index if is_valid else Int32(-1), i * self.copied_tokens + lane // self.line_chunks)
                    sources[i] = mKV[token if token >= 0 else 0, None].iterator.toint()
                    sizes[i] = Int32(16) if token >= 0 else Int32(0)
                # One tile ahead: the indices in front of the tokens they lead to would put two memory latencies in each tile.
                is_last = tile + 1 == end_tile
                index = self.read_index(
                    mIndices,
                    next_query if is_last else query,
                    (next_tile if is_last else tile + 1) * TOKENS + place,
                    next_length if is_last else length,
                )
                stage = count % self.stages
                lines = sTiles.iterator + stage * (TOKENS * LINE * LINES)
                for part in cutlass.range_constexpr(3):
                    parts[part].wait_empty(count)
                    first = part * HALF_LINES
                    self.copy_lines(sources, sizes, lines, row, first, min(first + HALF_LINES, self.lines))
                    if const_expr(part == LAST):
                        if lane == 0:
                            sValid[warp, stage] = valid
                            cute.arch.mbarrier_arrive(parts[part].full + stage)
                    cute.arch.cp_async_mbarrier_arrive_noinc(parts[part].full + stage)
                if const_expr(self.transposes):
                    if count > 0:
                        self.transpose(sTiles, sValues, count - 1, parts, values, warp)
                if tile == first_tile:
                    # Behind the first tokens, which do not have to wait until the queries before these have met theirs.
                    _, first_head, _ = self.place_of(work, mQ.shape[0], num_heads)
                    for i in cutlass.range_constexpr(WARP_TOKENS // self.copied_tokens):
                        head = first_head + row + i * self.copied_tokens
                        is_head = head < num_heads
                        sources[i] = mQ[query, head if is_head else 0, None].iterator.toint()
                        sizes[i] = Int32(16) if is_head else Int32(0)
                    queries.wait_empty(query_count)
                    self.copy_lines(sources, sizes, sQ.iterator, row, 0, self.lines)
                    cute.arch.cp_async_mbarrier_arrive_noinc(queries.full)
                    query_count += 1
                count += 1
                tile += 1
            query, first_tile, end_tile, length = next_query, next_tile, next_end, next_length
            work += grid
        if const_expr(self.transposes):
            if count > 0:
                self.transpose(sTiles, sValues, count - 1, parts, values, warp)

    @cute.jit
    def piece_of(self, mQ: cute.Tensor, mIndices: cute.Tensor, mLength: MaybeTensor, work: Int32, splits: Int32):
        """(query, first tile, end tile, how many of the query's indices count) of a piece of work, even of one that is none any more."""
        query, _, split = self.place_of(work, mQ.shape[0], mQ.shape[1])
        return query, *self.tiles_of(mIndices, mLength, query, split, splits)

    @cute.jit
    def read_index(self, mIndices: cute.Tensor, query: Int32, place: Int32, length: Int32):
        index = Int32(-1)
        if place < length:
            index = mIndices[query, place]
        return index

    @cute.jit
    def copy_lines(
        self, sources: cute.Tensor, sizes: cute.Tensor, destination: cute.Pointer, row: Int32, first: cutlass.Constexpr, end: cutlass.Constexpr
    ):
        """Lines `first` to `end` of this lane's rows, its chunk of each; zeros where a size is 0, without a read."""
        chunk = cute.arch.lane_idx() % self.line_chunks
        for line in cutlass.range_constexpr(first, end):
            for i in cutlass.range_constexpr(WARP_TOKENS // self.copied_tokens):
                copied_row = row + i * self.copied_tokens
                place = destination + (line * (TOKENS * LINE) + self.chunk_offset(copied_row, chunk))
                cute.arch.inline_ptx(
                    "cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16, {$r2};",
                    read_only_args=[place.toint(), sources[i] + (line * LINE * self.dtype.width // 8 + chunk * 16), sizes[i]],
                )

    @cute.jit
    def transpose(self, sTiles: cute.Tensor, sValues: cute.Tensor, count: Int32, parts: tuple[Ring, Ring, Ring], values: Ring, warp: Int32):
        """A tile's values [64 tokens, 512] of 8 bits to [512, 64 tokens], by the producers; each warp a quarter of the dims, 16 at a time.

        A lane's four words of a dim are 16 tokens in the order in which a lane holds their weights: any order does that both operands have.
        """
        lane = cute.arch.lane_idx()
        first_dim = warp * (LATENT // 4)
        tile = sTiles.iterator + (count % self.stages * LINES + warp * (LATENT // LINE // 4)) * (TOKENS * LINE)
        transposed = sValues.iterator + count % VALUE_STAGES * (TOKENS * LATENT)
        # Lanes next to each other write the even dim first or the odd one, so that their banks differ.
        parities = [lane // 4 % 2 ^ step for step in range(2)]
        selectors = [0x6420 + parity * 0x1111 for parity in parities]
        targets = [(transposed + self.chunk_offset(first_dim + lane // 4 * 2 + parity, lane % 4)).toint() for parity in parities]
        sources = [(tile + self.chunk_offset(lane, chunk)).toint() for chunk in range(self.line_chunks)]

        def read(step):
            # ldmatrix takes pairs of dims for one value: a lane gets two dims of tokens 2 (lane % 4) and the next, of each 8.
            line, chunk = divmod(step, self.line_chunks)
            pairs = []
            for first_token in (0, 32):
                pairs += cute.arch.inline_ptx(
                    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
                    write_only_types=[Int32] * 4,
                    read_only_args=[sources[chunk] + (line * TOKENS + first_token) * LINE],
                )
            return pairs

        parts[LEFT].wait_full(count)
        parts[RIGHT].wait_full(count)
        values.wait_empty(count)
        steps = LATENT // 16 // 4
        ahead = read(0)
        for step in cutlass.range_constexpr(steps):
            pairs = ahead
            if const_expr(step + 1 < steps):
                ahead = read(step + 1)
            for half in cutlass.range_constexpr(2):
                words = [
                    cute.arch.inline_ptx(
                        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};",
                        write_only_types=[Int32],
                        read_only_args=[pairs[2 * group], pairs[2 * group + 1], selectors[half]],
                    )
                    for group in range(4)
                ]
                cute.arch.inline_ptx(
                    "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                    read_only_args=[targets[half] + step * 16 * LINE, *words],
                )
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(values.full + count % VALUE_STAGES)
        parts[LEFT].release(count)
        parts[RIGHT].release(count)

    @cute.jit
    def consume(
        self,
        mQ: cute.Tensor,
        mIndices: cute.Tensor,
        mLength: MaybeTensor,
        mSink: MaybeTensor,
        mOut: cute.Tensor,
        mMaxLogits: cute.Tensor,
        mLse: cute.Tensor,
        scale_log2: Float32,
        value_scale: Float32,
        num_work: Int32,
        qk_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
        sQ: cute.Tensor,
        sTiles: cute.Tensor,
        sValues: cute.Tensor,
        sWeights: cute.Tensor,
        sBase: cute.Tensor,
        sRows: cute.Tensor,
        sValid: cute.Tensor,
        parts: tuple[Ring, Ring, Ring],
        weights: Ring,
        values: Ring,
        queries: Ring,
        half: Int32,
    ):
        """One warpgroup: the softmax of every second tile, and its half of the outputs' columns."""
        tSrQ, tSrK, tOrP, tOrV = self.operands(qk_mma, pv_mma, sQ, sTiles, sValues, half)
        rO = cute.make_rmem_tensor(LATENT // 4, Float32)
        row_base = cute.make_rmem_tensor(2, Float32)
        row_peak = cute.make_rmem_tensor(2, Float32)
        row_sum = cute.make_rmem_tensor(2, Float32)
        num_heads = mQ.shape[1]
        grid, _, _ = cute.arch.grid_dim()
        work, _, _ = cute.arch.block_idx()
        query_count, first = Int32(0), Int32(0)  # tiles before this piece of work's
        while work < num_work:
            query, first_head, split = self.place_of(work, mQ.shape[0], num_heads)
            first_tile, end_tile, _ = self.tiles_of(mIndices, mLength, query, split, self.splits_of(mOut))
            tiles = end_tile - first_tile
            rO.fill(0.0)
            row_base.fill(LOWEST)
            row_peak.fill(LOWEST)
            row_sum.fill(0.0)
            if tiles > 0:
                queries.wait_full(query_count)
            as_it_is = cute.make_rmem_tensor((2, 1), Float32)
            as_it_is.fill(1.0)
            if half == 0 and tiles > 0:
                rS = self.multiply_keys(qk_mma, tSrQ, tSrK, first, parts, EACH)
                warpgroup.wait_group(0)
                valid = self.release_keys(sValid, parts, first)
                if tiles <= 2:
                    queries.release(query_count)
                rescale = self.weigh(rS, row_base, row_peak, row_sum, valid, scale_log2, sBase, first)
                self.publish(rS, tOrP, sWeights, first, weights, half)
                self.add_values(pv_mma, rO, rescale if const_expr(self.transposes) else as_it_is, tOrP, tOrV, sWeights, first, weights, values, True)
                self.release_values(parts, values, first, half)
            tile = 2 - half
            while tile < tiles:
                count = first + tile
                if const_expr(self.transposes):
                    # Their registers are those of Q K^T, which the other warpgroup's products run beside.
                    rS = self.multiply_keys(qk_mma, tSrQ, tSrK, count, parts, EACH)
                    warpgroup.wait_group(0)
                    valid = self.release_keys(sValid, parts, count)
                    if tile + 2 >= tiles:
                        queries.release(query_count)
                    before = self.follow(row_base, row_peak, row_sum, sBase, count - 1, weights)
                    rescale = self.weigh(rS, row_base, row_peak, row_sum, valid, scale_log2, sBase, count)
                    self.publish(rS, tOrP, sWeights, count, weights, half)
                    self.add_values(pv_mma, rO, before, tOrP, tOrV, sWeights, count - 1, weights, values, False)
                    self.release_values(parts, values, count - 1, half)
                else:
                    rS = self.multiply_keys(qk_mma, tSrQ, tSrK, count, parts, ((LEFT,),))
                    before = self.follow(row_base, row_peak, row_sum, sBase, count - 1, weights)
                    self.add_values(pv_mma, rO, before, tOrP, tOrV, sWeights, count - 1, weights, values, False)
                    # All of Q K^T is started before those values are given back: it is what the next weights wait for.
                    rS = self.multiply_keys(qk_mma, tSrQ, tSrK, count, parts, ((RIGHT, LAST),), rS)
                    self.release_values(parts, values, count - 1, half, 1)
                    warpgroup.wait_group(0)
                    valid = self.release_keys(sValid, parts, count)
                    if tile + 2 >= tiles:
                        queries.release(query_count)
                    rescale = self.weigh(rS, row_base, row_peak, row_sum, valid, scale_log2, sBase, count)
                    self.publish(rS, tOrP, sWeights, count, weights, half)
                self.add_values(pv_mma, rO, rescale, tOrP, tOrV, sWeights, count, weights, values, True)
                self.release_values(parts, values, count, half)
                tile += 2
            if half == 1 and tiles == 1:
                queries.release(query_count)
            if tile == tiles:
                before = self.follow(row_base, row_peak, row_sum, sBase, first + tile - 1, weights)
                self.add_values(pv_mma, rO, before, tOrP, tOrV, sWeights, first + tile - 1, weights, values, False)
                self.release_values(parts, values, first + tile - 1, half)
            self.finish(
                mSink, mOut, mMaxLogits, mLse, value_scale, rO, row_base, row_peak, row_sum, sRows, work // grid, query, first_head, split, half
            )
            first += tiles
            query_count += Int32(1) if tiles > 0 else Int32(0)
            work += grid

    def operands(self, qk_mma, pv_mma, sQ, sTiles, sValues, half):
        """Both products' operands: queries and keys in shared memory, weights in registers, this warpgroup's half of the values."""
        tile = TOKENS * LINE * LINES
        sQ = self.staged(sQ.iterator, HEADS, self.lines, 1, 0)[None, None, 0]  # [64, D]
        sK = self.staged(sTiles.iterator, TOKENS, self.lines, self.stages, tile)  # [64, D, stages]
        first = sValues.iterator + half * (TOKENS * LATENT // 2)
        if const_expr(self.transposes):
            sVt = self.staged(first, LATENT // 2, TOKENS // LINE, VALUE_STAGES, TOKENS * LATENT)  # [256, 64, stages]
        else:
            sV = self.staged(first, TOKENS, HALF_LINES, self.stages, tile)  # [64, 256, stages]
            sVt = cute.make_tensor(sV.iterator, cute.select(sV.layout, mode=[1, 0, 2]))
        qk_thread, pv_thread = qk_mma.get_slice(0), pv_mma.get_slice(0)
        if const_expr(self.transposes):
            sVt = cute.local_tile(sVt, (COLUMNS, TOKENS), (None, 0, None))  # [32, 64, 8, stages]
        return (
            qk_thread.make_fragment_A(qk_thread.partition_A(sQ)),
            qk_thread.make_fragment_B(qk_thread.partition_B(sK)),
            cute.make_rmem_tensor(pv_thread.partition_shape_A((HEADS, TOKENS)), self.dtype),
            pv_thread.make_fragment_B(pv_thread.partition_B(sVt)),
        )

    def weights_stride(self):
        return HEADS * TOKENS if self.transposes else TOKENS * LINE * LINES

    def first_row_of_thread(self):
        """Of the two rows that a thread holds of accumulators; the other is 8 further on."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        return thread // 32 * 16 + thread % 32 // 4

    def by_row(self, accumulator):
        """A thread's share of an accumulator as [2 rows, columns]."""
        columns = cute.size(accumulator) // 4
        return cute.make_tensor(accumulator.iterator, cute.make_layout((2, (2, columns)), stride=(2, (1, 4))))

    @cute.jit
    def multiply_keys(
        self,
        qk_mma: cute.TiledMma,
        tSrQ: cute.Tensor,
        tSrK: cute.Tensor,
        count: Int32,
        parts: tuple[Ring, Ring, Ring],
        groups: cutlass.Constexpr,
        rS: MaybeTensor = None,
    ):
        """Starts Q K^T over each group of parts as it arrives, on top of `rS`; the products [64, 64] are there when they are waited for."""
        atom = cute.make_mma_atom(qk_mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, rS is not None)
        if const_expr(rS is None):
            rS = cute.make_rmem_tensor(qk_mma.get_slice(0).partition_shape_C((HEADS, TOKENS)), Float32)
        steps = cute.size(tSrQ, mode=[2])
        per_part = steps * LINE * HALF_LINES // self.variant.head_dim
        stage = count % self.stages
        for group in cutlass.range_constexpr(len(groups)):
            for part in cutlass.range_constexpr(groups[group][0], groups[group][-1] + 1):
                parts[part].wait_full(count)
            # The copies were no asynchronous ones to wgmma, and a thread that starts one cannot fence when they have arrived.
            cute.arch.fence_view_async_shared()
            warpgroup.fence()
            for k in cutlass.range_constexpr(groups[group][0] * per_part, min((groups[group][-1] + 1) * per_part, steps)):
                cute.gemm(atom, rS, tSrQ[None, None, k], tSrK[None, None, k, stage], rS)
                atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        return rS

    @cute.jit
    def add_values(
        self,
        pv_mma: cute.TiledMma,
        rO: cute.Tensor,
        rescale: cute.Tensor,
        tOrP: cute.Tensor,
        tOrV: cute.Tensor,
        sWeights: cute.Tensor,
        count: Int32,
        weights: Ring,
        values: Ring,
        is_own: cutlass.Constexpr,
    ):
        """O = O * rescale + P V of a tile; in 16 bits the last of it is there when it is waited for."""
        atom = cute.make_mma_atom(pv_mma.op)
        # What a lane computes in 16 bits is what wgmma wants of it.
        if const_expr(self.transposes or not is_own):
            weights.wait_full(count)
            if const_expr(not self.transposes):
                cute.arch.fence_view_async_shared()  # the other warpgroup waited for these values
            self.read_weights(tOrP, sWeights.iterator + count % self.stages * self.weights_stride())
        if const_expr(self.transposes):
            values.wait_full(count)
            num_sums = LATENT // 2 // COLUMNS * self.bases
            steps = cute.size(tOrP, mode=[2]) // self.bases
            sums = [cute.make_rmem_tensor(pv_mma.get_slice(0).partition_shape_C((HEADS, COLUMNS)), Float32) for _ in range(2)]
            for turn in cutlass.range_constexpr(num_sums + 1):
                if const_expr(turn < num_sums):
                    chunk, base = divmod(turn, self.bases)
                    atom.set(warpgroup.Field.ACCUMULATE, False)
                    warpgroup.fence()
                    rSum = sums[turn % 2]
                    for k in cutlass.range_constexpr(base * steps, (base + 1) * steps):
                        cute.gemm(atom, rSum, tOrP[None, None, k], tOrV[None, None, k, chunk, count % VALUE_STAGES], rSum)
                        atom.set(warpgroup.Field.ACCUMULATE, True)
                    warpgroup.commit_group()
                if const_expr(turn > 0):
                    chunk, base = divmod(turn - 1, self.bases)
                    warpgroup.wait_group(1 if turn < num_sums else 0)
                    rPart = cute.make_tensor(rO.iterator + chunk * (COLUMNS // 2), cute.make_layout(COLUMNS // 2))
                    output, products = self.by_row(rPart), self.by_row(sums[(turn - 1) % 2])
                    for r in cutlass.range_constexpr(2):
                        output[r, None].store(output[r, None].load() * rescale[r, base] + products[r, None].load())
        else:
            if cute.arch.vote_any_sync(rescale[0, 0] != 1.0 or rescale[1, 0] != 1.0):
                output = self.by_row(rO)
                for r in cutlass.range_constexpr(2):
                    output[r, None].store(output[r, None].load() * rescale[r, 0])
            atom.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.fence()
            rSum = cute.make_tensor(rO.iterator, pv_mma.get_slice(0).partition_shape_C((HEADS, LATENT // 2)))
            for k in cutlass.range_constexpr(cute.size(tOrP, mode=[2])):
                cute.gemm(atom, rSum, tOrP[None, None, k], tOrV[None, None, k, count % self.stages], rSum)
            warpgroup.commit_group()

    @cute.jit
    def read_weights(self, tOrP: cute.Tensor, line: cute.Pointer):
        """A tile's weights as wgmma wants them in registers."""
        lane = cute.arch.lane_idx()
        row = cute.arch.warp_idx() % 4 * 16 + lane % 16
        words = cute.recast_tensor(tOrP, Int32)
        for k in cutlass.range_constexpr(cute.size(tOrP, mode=[2])):
            read = cute.arch.inline_ptx(
                "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
                write_only_types=[Int32] * 4,
                read_only_args=[(line + self.chunk_offset(row, 2 * k + lane // 16)).toint()],
            )
            for i in cutlass.range_constexpr(4):
                words[4 * k + i] = read[i]

    @cute.jit
    def weigh(
        self,
        rS: cute.Tensor,
        row_base: cute.Tensor,
        row_peak: cute.Tensor,
        row_sum: cute.Tensor,
        valid: cute.Tensor,
        scale_log2: Float32,
        sBase: cute.Tensor,
        count: Int32,
    ):
        """One step of the softmax on products [64, 64], which become weights; returns what the output so far is to be multiplied by, [2, bases]."""
        logits, lane = self.by_row(rS), cute.arch.lane_idx() % 4
        lanes = 4 // self.bases  # whose weights have a base in common
        rescale = cute.make_rmem_tensor((2, self.bases), Float32)
        # The scale is part of the exponent's one instruction, so that a maximum of products must be one of logits. Of 0 it would make NaN of -inf.
        scale = cute.arch.fmax(cute.arch.fmax(scale_log2, -scale_log2), Float32(2.0**-126))
        if (valid[0] & valid[1] & valid[2] & valid[3]) != 0xFFFF or scale_log2 < 0.0:
            rS.store(rS.load() * (Float32(-1.0) if scale_log2 < 0.0 else Float32(1.0)))
            for i in cutlass.range_constexpr(TOKENS // 4):
                bits = valid[i // 4] >> lane * 2
                if (bits & (1 << (i // 2 % 2 * 8 + i % 2))) == 0:
                    for r in cutlass.range_constexpr(2):
                        logits[r, i] = -Float32.inf
        for r in cutlass.range_constexpr(2):
            row = logits[r, None].load()
            peak = cute.arch.warp_reduction_max(row.reduce(cute.ReductionOp.MAX, -Float32.inf, 0), threads_in_group=lanes) * scale
            if const_expr(self.transposes):
                peaks = [peak]
                if const_expr(self.bases == 2):
                    other = cute.arch.shuffle_sync_bfly(peak, 2)
                    peaks = [peak if lane < 2 else other, other if lane < 2 else peak]
                    row_peak[r] = cute.arch.fmax(row_peak[r], cute.arch.fmax(peak, other))
                # The tokens' own maximum: e4m3 holds its weight exactly, and those not far below it with the smallest error.
                floor = row_peak[r] - FALL
                bases = tuple(cute.arch.fmax(p, floor) for p in peaks)
                base = cute.arch.fmax(peak, floor)
            else:
                base = peak if peak > row_base[r] + LAG else row_base[r]
                bases = (base,)
            row_peak[r] = cute.arch.fmax(row_peak[r], peak)
            if lane % lanes == 0:
                sBase[self.first_row_of_thread() + 8 * r, lane // lanes, count % self.stages] = base
            tile_weights = cute.math.exp2(row * scale - (base - self.weight_bits), fastmath=True)
            logits[r, None].store(tile_weights)
            tile_sum = self.total([logits[r, i] for i in range(TOKENS // 4)])
            if const_expr(self.bases == 2):
                tile_sum *= cute.math.exp2(base - bases[1], fastmath=True)
            self.rebase(row_base, row_sum, rescale, r, bases)
            row_sum[r] += tile_sum
        return rescale

    @cute.jit
    def rebase(self, row_base: cute.Tensor, row_sum: cute.Tensor, rescale: cute.Tensor, r: cutlass.Constexpr, bases: tuple[Float32, ...]):
        """Makes a row's sum relative to the last of `bases`, and `rescale` the steps to each."""
        for i in cutlass.range_constexpr(self.bases):
            rescale[r, i] = cute.math.exp2(row_base[r] - bases[i], fastmath=True)
            row_sum[r] *= rescale[r, i]
            row_base[r] = bases[i]

    def total(self, values):
        """By four sums side by side, which are done before the products begin that need the values' registers."""
        sums = list(values[:4])
        for i, value in enumerate(values[4:]):
            sums[i % 4] += value
        return sums[0] + sums[1] + (sums[2] + sums[3])

    @cute.jit
    def publish(
        self,
        rS: cute.Tensor,
        tOrP: cute.Tensor,
        sWeights: cute.Tensor,
        count: Int32,
        weights: Ring,
        half: Int32,
    ):
        """The tile's weights to where the other warpgroup reads them, in e4m3 this one too; what they are relative to is there."""
        # Where they have a place of their own, both warpgroups read what was there before the last tile's weights, which are there, were published.
        if const_expr(not self.transposes):
            # The other warps may still multiply the rotated dims that the weights replace.
            cute.arch.barrier(barrier_id=1 + half, number_of_threads=WARPGROUP)
        stage = count % self.stages
        row, lane = self.first_row_of_thread(), cute.arch.lane_idx()
        line = sWeights.iterator + stage * self.weights_stride()
        logits = self.by_row(rS)
        if const_expr(self.transposes):
            for r in cutlass.range_constexpr(2):
                rP = cute.make_rmem_tensor(TOKENS // 4, self.dtype)
                rP.store(logits[r, None].load().to(self.dtype))
                target = (line + self.chunk_offset(row + 8 * r, lane % 4)).align(16)
                cute.autovec_copy(rP, cute.make_tensor(target, cute.make_layout(TOKENS // 4)))
        else:
            own = cute.make_tensor(tOrP.iterator, rS.layout)
            own.store(rS.load().to(self.dtype))
            pairs = cute.recast_tensor(tOrP, Int32)
            for chunk in cutlass.range_constexpr(self.line_chunks):
                for r in cutlass.range_constexpr(2):
                    words = cute.recast_ptr(line + self.chunk_offset(row + 8 * r, chunk), dtype=Int32)
                    cute.make_tensor(words, cute.make_layout(4))[lane % 4] = pairs[2 * chunk + r]
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(weights.full + stage)

    @cute.jit
    def follow(self, row_base: cute.Tensor, row_peak: cute.Tensor, row_sum: cute.Tensor, sBase: cute.Tensor, count: Int32, weights: Ring):
        """Makes sums relative to the same as the other warpgroup's weights of a tile; returns what the output is to be multiplied by, [2, bases]."""
        weights.wait_full(count)
        rescale = cute.make_rmem_tensor((2, self.bases), Float32)
        for r in cutlass.range_constexpr(2):
            bases = tuple(sBase[self.first_row_of_thread() + 8 * r, i, count % self.stages] for i in range(self.bases))
            self.rebase(row_base, row_sum, rescale, r, bases)
            if const_expr(self.transposes):
                for i in cutlass.range_constexpr(self.bases):
                    row_peak[r] = cute.arch.fmax(row_peak[r], bases[i])  # where they are a new maximum, it is one of these
        return rescale

    @cute.jit
    def release_keys(self, sValid: cute.Tensor, parts: tuple[Ring, Ring, Ring], count: Int32):
        """After Q K^T; returns the words about the tokens. Values of 16 bits are still to be read from the same place."""
        valid = cute.make_rmem_tensor(4, Int32)
        cute.autovec_copy(sValid[None, count % self.stages], valid)
        if const_expr(self.transposes):
            for part in cutlass.range_constexpr(LAST + 1):
                parts[part].release(count)
        return valid

    @cute.jit
    def release_values(self, parts: tuple[Ring, Ring, Ring], values: Ring, count: Int32, half: Int32, started_since: cutlass.Constexpr = 0):
        """After O += P V: this warpgroup's half of the values, and its share of the weights' place."""
        if const_expr(self.transposes):
            values.release(count)
        else:
            warpgroup.wait_group(started_since)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive((parts[LEFT].empty if half == 0 else parts[RIGHT].empty) + count % self.stages)
                cute.arch.mbarrier_arrive(parts[LAST].empty + count % self.stages)

    @cute.jit
    def finish(
        self,
        mSink: MaybeTensor,
        mOut: cute.Tensor,
        mMaxLogits: cute.Tensor,
        mLse: cute.Tensor,
        value_scale: Float32,
        rO: cute.Tensor,
        row_base: cute.Tensor,
        row_peak: cute.Tensor,
        row_sum: cute.Tensor,
        sRows: cute.Tensor,
        work_count: Int32,
        query: Int32,
        first_head: Int32,
        split: Int32,
        half: Int32,
    ):
        """The warpgroup's columns of the output, and the first one's LSE and maxima."""
        lane, first_row = cute.arch.lane_idx(), self.first_row_of_thread()
        output = self.by_row(rO)
        num_heads = mOut.shape[2 if self.variant.split else 1]
        without_tokens = Float32.inf
        if const_expr(self.variant.split):
            mOut, mMaxLogits, mLse = mOut[split, None, None, None], mMaxLogits[split, None, None], mLse[split, None, None]
            without_tokens = -Float32.inf
        for r in cutlass.range_constexpr(2):
            row_sum[r] = cute.arch.warp_reduction_sum(row_sum[r], threads_in_group=4)
            if lane % 4 == 0:
                sRows[first_row + 8 * r, 0, half, work_count % 2] = row_sum[r]
                sRows[first_row + 8 * r, 1, half, work_count % 2] = row_peak[r]
        cute.arch.barrier(barrier_id=3, number_of_threads=2 * WARPGROUP)
        for r in cutlass.range_constexpr(2):
            row = first_row + 8 * r
            head = first_head + row
            is_head = head < num_heads
            # Both warpgroups add in the same order.
            total = sRows[row, 0, 0, work_count % 2] + sRows[row, 0, 1, work_count % 2]
            has_tokens = total > 0.0
            largest = cute.arch.fmax(sRows[row, 1, 0, work_count % 2], sRows[row, 1, 1, work_count % 2])
            largest = largest * LN2 if largest > LOWEST else -Float32.inf
            logsum = (row_base[r] + cute.math.log2(total, fastmath=True) - self.weight_bits) * LN2 if has_tokens else without_tokens
            factor = value_scale / total if has_tokens else Float32(0.0)
            if const_expr(mSink is not None and not self.variant.split):
                if has_tokens:
                    factor /= 1.0 + cute.math.exp2((mSink[head if is_head else 0] - logsum) * LOG2E, fastmath=True)
            rOut = cute.make_rmem_tensor((2, LATENT // 16), mOut.element_type)
            rOut.store((output[r, None].load() * factor).to(mOut.element_type))
            width = 2 if self.variant.split else 8
            if const_expr(not self.variant.split):
                self.gather_columns(rOut)
            if is_head:
                gOut = cute.local_tile(mOut[query, head, None], (LATENT // 2,), (half,))
                for i in cutlass.range_constexpr(LATENT // 8 // width):
                    part = cute.make_tensor(rOut.iterator + i * width, cute.make_layout(width))
                    cute.autovec_copy(part, cute.local_tile(gOut, (width,), (4 * i + lane % 4,)))
                if half == 0 and lane % 4 == 0:
                    mMaxLogits[query, head] = largest
                    mLse[query, head] = logsum

    @cute.jit
    def gather_columns(self, rOut: cute.Tensor):
        """Pairs [2, 64] of 16 bits, whose four lanes hold every 8 columns together, become [8, 16]: each lane holds all of every fourth 8.

        Four pairs of four lanes are transposed by exchanging half of them with the neighbour, and then with the lane two further on.
        """
        lane = cute.arch.lane_idx()
        words = cute.recast_tensor(rOut, Int32)
        for i in cutlass.range_constexpr(LATENT // 16 // 4):
            for bit in cutlass.range_constexpr(2):
                is_upper = (lane >> bit & 1) != 0
                for j in cutlass.range_constexpr(2):
                    low = 4 * i + (j << (1 - bit))
                    high = low + (1 << bit)
                    received = cute.arch.shuffle_sync_bfly(words[low] if is_upper else words[high], 1 << bit)
                    words[low] = received if is_upper else words[low]
                    words[high] = words[high] if is_upper else received

    @cute.kernel
    def merge(
        self,
        mSink: MaybeTensor,
        mOut: cute.Tensor,
        mMaxLogits: cute.Tensor,
        mLse: cute.Tensor,
        mPartOut: cute.Tensor,  # these three of `parts_of`
        mPartMax: cute.Tensor,
        mPartLse: cute.Tensor,
    ):
        """Joins the parts of one head of a query, always in the same order."""
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        query, head = row // mOut.shape[1], row % mOut.shape[1]
        dims = LATENT // MERGE_THREADS
        rPart = cute.make_rmem_tensor(dims, Float32)
        rSum = cute.make_rmem_tensor(dims, Float32)
        rSum.fill(0.0)
        largest, most, total = -Float32.inf, -Float32.inf, Float32(0.0)
        for split in cutlass.range(mPartOut.shape[0], unroll=4):
            largest = cute.arch.fmax(largest, mPartMax[split, query, head])
            most = cute.arch.fmax(most, mPartLse[split, query, head])
        has_tokens = most != -Float32.inf
        shift = most if has_tokens else Float32(0.0)
        for split in cutlass.range(mPartOut.shape[0], unroll=4):
            weight = cute.math.exp2((mPartLse[split, query, head] - shift) * LOG2E, fastmath=True)
            total += weight
            cute.autovec_copy(cute.local_tile(mPartOut[split, query, head, None], (dims,), (thread,)), rPart)
            rSum.store(rSum.load() + rPart.load() * weight)
        logsum = shift + cute.math.log2(total, fastmath=True) * LN2 if has_tokens else Float32.inf
        factor = 1.0 / total if has_tokens else Float32(0.0)
        if const_expr(mSink is not None):
            if has_tokens:
                factor /= 1.0 + cute.math.exp2((mSink[head] - logsum) * LOG2E, fastmath=True)
        rOut = cute.make_rmem_tensor(dims, mOut.element_type)
        rOut.store((rSum.load() * factor).to(mOut.element_type))
        cute.autovec_copy(rOut, cute.local_tile(mOut[query, head, None], (dims,), (thread,)))
        if thread == 0:
            mMaxLogits[query, head] = largest
            mLse[query, head] = logsum


def build(variant: Variant) -> tuple[Any, tuple[Any, ...]]:
    """The kernel, and its arguments as tensors of any lengths and strides that a call may bring."""
    kernel = SparseMlaSm90(variant)
    queries, heads = cute.sym_int(), cute.sym_int()

    def vectors(dtype: Any, *shape: Any) -> Any:
        strides = tuple(cute.sym_int64(divisibility=128 // dtype.width) for _ in shape[1:])
        return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=16)

    def scalars(dtype: Any, *shape: Any) -> Any:
        return make_fake_tensor(dtype, shape, tuple(cute.sym_int64() for _ in shape))

    def optional(exists: bool, dtype: Any, *shape: Any) -> Any:
        return scalars(dtype, *shape) if exists else None

    return kernel, (
        vectors(kernel.dtype, queries, heads, variant.head_dim),
        vectors(kernel.dtype, cute.sym_int(), variant.head_dim),
        scalars(Int32, queries, cute.sym_int()),
        optional(variant.length, Int32, queries),
        optional(variant.sink, Float32, heads),
        optional(variant.q_scale, Float32, 1),
        optional(variant.kv_scale, Float32, 1),
        vectors(cutlass.BFloat16, queries, heads, LATENT),
        scalars(Float32, queries, heads),
        scalars(Float32, queries, heads),
        vectors(Float32, cute.sym_int()) if variant.split else None,
        Float32(0.0),
        Float32(0.0),
        Int32(0),
        Int32(0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


KERNEL = CuteKernel("sparse_mla_sm90", build, sources=[__file__, sparse_prefill_sm90.__file__])


MAX_PIECES = 128
"""Pieces of work that few queries are split into: about as many as there are multiprocessors."""
JOIN_TILES = 5
"""Tiles that are worked off in the time in which the second kernel joins parts: no fewer have to be saved."""
SPLIT_TOKENS = 2 * TOKENS
"""Indices that a piece has at least, a tile for either warpgroup."""
MAX_SPLITS = 16


def num_splits(queries: int, heads: int, topk: int, limit: int) -> int:
    """Into how many parts a query's indices are cut; their outputs fit `limit`."""
    pieces = max(1, queries * -(-heads // HEADS))
    splits = max(1, min(MAX_PIECES // pieces, topk // SPLIT_TOKENS, MAX_SPLITS, limit // max(1, part_bytes(1, queries, heads))))
    tiles = -(-topk // TOKENS)
    return splits if tiles - -(-tiles // splits) > JOIN_TILES else 1


def part_bytes(splits: int, queries: int, heads: int) -> int:
    return splits * queries * heads * (LATENT + 2) * 4


def workspace_bytes(shape: WorkShape) -> int:
    """Scratch of a call: splits * s_q * h_q * (512 + 2) * 4; 0 where there are queries enough."""
    splits = num_splits(shape.tokens, shape.num_q_heads, shape.topk, shape.limit)
    return 0 if splits == 1 else part_bytes(splits, shape.tokens, shape.num_q_heads)


def sparse_mla_prefill(call: SparseMlaPrefillCall) -> None:
    """Fill call.out, call.max_logits and call.lse.

    Raises:
        UnsupportedProblem: q, kv or out whose address or strides are no multiples of 16 bytes.
    """
    queries, heads, head_dim = call.q.shape
    if queries == 0:
        return
    for argument, tensor in (("q", call.q), ("kv", call.kv), ("out", call.out)):
        check_address(argument, tensor)
    parts, splits = None, 1
    if call.workspace is not None:
        splits = num_splits(queries, heads, call.indices.shape[1], workspace_limit())
        parts = call.workspace.view(torch.float32)
    variant = Variant(
        dtype=dtype_name(call.q.dtype),
        head_dim=head_dim,
        length=call.topk_length is not None,
        sink=call.attn_sink is not None,
        q_scale=call.q_scale.tensor is not None,
        kv_scale=call.kv_scale.tensor is not None,
        split=splits > 1,
    )
    KERNEL.get(variant, call.q.device)(
        call.q,
        call.kv,
        call.indices,
        call.topk_length,
        call.attn_sink,
        *(None if scale.tensor is None else scale.tensor.reshape(1) for scale in (call.q_scale, call.kv_scale)),
        call.out,
        call.max_logits,
        call.lse,
        parts,
        call.sm_scale * call.q_scale.value * call.kv_scale.value,
        call.kv_scale.value,
        num_sms(call.q.device),
        splits,
    )


def check_address(argument: str, tensor: torch.Tensor) -> None:
    size, bits = tensor.element_size(), tensor.data_ptr()
    for stride in tensor.stride()[:-1]:
        bits |= stride * size
    if bits % 16:
        raise UnsupportedProblem(
            f"{argument}: expected an address and strides in multiples of 16 bytes, which are what is copied at a time, got address "
            f"{tensor.data_ptr():#x} and strides {tensor.stride()} of {size} bytes; impl='triton' takes any"
        )
