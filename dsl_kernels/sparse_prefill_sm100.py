"""Sparse prefill on Blackwell: two halves of a tile take turns between the matrix unit and their softmax, over the blocks that any token selected.

Tiles, their merged id lists and the loads of pages are Hopper's (`sparse_prefill_sm90`), and so are the warps that make them. Here one further warp
starts all products; their operands and results stay in shared and tensor memory, and each thread of a half's warpgroup weighs one row.
`docs/cute_sm100.md` walks through it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100_utils
import torch
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05

from m3attn.batch import PagedBatch
from m3attn.calls import SparseAttentionCall
from m3attn.dsl_kernels import sparse_prefill_sm90
from m3attn.dsl_kernels.common.kernels import CuteKernel
from m3attn.dsl_kernels.sparse_prefill_sm90 import (
    ALL_ENDS,
    BLOCK,
    DTYPES,
    LAZY_LOG2,
    LN2,
    LOG2E,
    MAX_TILE_IDS,
    MAX_TILE_TOKENS,
    MORE,
    WARPGROUP,
    Attended,
    Entry,
    Ring,
    Shared,
    SparsePrefillSm90,
    Tile,
    Variant,
)

HALF_ROWS = 128
"""Rows of a matrix instruction, which are the lanes of tensor memory."""
STEP = 32
"""Columns of tensor memory that a thread moves at a time."""
PRODUCTS, WEIGHTS, OUTPUTS = 0, BLOCK // 2, 2 * BLOCK
"""Columns of tensor memory: the first half's. The other's products, and the weights that take their place, are BLOCK further on, outputs head_dim."""
TENSOR_COLUMNS = 512
SHARED_BYTES = 208 * 1024
"""Of shared memory, for pages and rows."""
FEW_REGISTERS, MANY_REGISTERS = (24, 240), (48, 232)


def half_tokens(group: int, ids: int) -> int:
    """Tokens of half a tile: as many as fill 128 rows, half a word of bits and the merging warp's registers."""
    return max(1, min(HALF_ROWS // group, MAX_TILE_TOKENS // 2, MAX_TILE_IDS // 2 // ids))


@dataclass(frozen=True)
class Turns:
    """Barriers between the warp that multiplies and the halves, one a half each, told by how often a half has used them."""

    queries: Any  # stored
    products: Any  # there
    weights: Any  # stored, and the output so far rescaled
    outputs: Any  # complete


@dataclass(frozen=True)
class Own:
    """Shared memory that only this architecture needs."""

    turns: Turns
    tensor_base: Any  # where tensor memory begins


class SparsePrefillSm100(SparsePrefillSm90):
    half_rows = HALF_ROWS

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.qk_dtype, self.v_dtype, self.out_dtype = (DTYPES[name] for name in (variant.qk_dtype, variant.v_dtype, variant.out_dtype))
        self.head_dim = variant.head_dim
        self.row_bytes = self.head_dim * max(self.qk_dtype.width, self.out_dtype.width) // 8
        page_bytes = self.page_bytes(self.qk_dtype) + self.page_bytes(self.v_dtype)
        self.stages = (SHARED_BYTES - 2 * HALF_ROWS * self.row_bytes) // page_bytes
        tokens = half_tokens(variant.group, variant.ids)
        self.tile = Tile(variant.group, tokens, max(1, 2 * tokens * variant.ids // 32), variant.ids, self.stages)
        self.producer_registers, self.consumer_registers = FEW_REGISTERS if self.tile.ids_per_lane <= 4 else MANY_REGISTERS

    def products(self):
        """(Q K^T, P V) of 128 rows."""
        k_major, group = OperandMajorMode.K, tcgen05.CtaGroup.ONE
        qk = sm100_utils.make_trivial_tiled_mma(self.qk_dtype, self.qk_dtype, k_major, k_major, Float32, group, (HALF_ROWS, BLOCK))
        shape, source = (HALF_ROWS, self.head_dim), tcgen05.OperandSource.TMEM
        pv = sm100_utils.make_trivial_tiled_mma(self.v_dtype, self.v_dtype, k_major, OperandMajorMode.MN, Float32, group, shape, source)
        return qk, pv

    def own(self, smem):
        barriers = smem.allocate_tensor(cutlass.Int64, cute.make_layout(8), 8).iterator
        return Own(Turns(*(barriers + 2 * i for i in range(4))), smem.allocate_tensor(Int32, cute.make_layout(1), 16).iterator)

    @cute.jit
    def set_up(self, warp: Int32, k_atom: cute.CopyAtom, v_atom: cute.CopyAtom, shared: Shared, own: Own):
        self.init_all_barriers(warp, k_atom, v_atom, shared.keys, shared.values, own.turns, shared.last_page)
        if warp == 1:
            self.init_entries(shared, 2 * WARPGROUP // 32 + 1)  # the halves, and the warp that multiplies
            cute.arch.alloc_tmem(TENSOR_COLUMNS, own.tensor_base)
        cute.arch.sync_threads()

    @cute.jit
    def tear_down(self, warp: Int32, own: Own):
        cute.arch.sync_threads()
        if warp == 1:
            cute.arch.relinquish_tmem_alloc_permit()
            cute.arch.dealloc_tmem(self.tensor_memory(own), TENSOR_COLUMNS)

    def tensor_memory(self, own):
        return cute.arch.retrieve_tmem_ptr(Float32, 16, own.tensor_base)

    def pass_over(self, ring, count, bits):
        """Nothing: the warp that multiplies frees every stage."""

    @cute.jit
    def init_all_barriers(
        self, warp: Int32, k_atom: cute.CopyAtom, v_atom: cute.CopyAtom, keys: Ring, values: Ring, turns: Turns, last_page: cute.Pointer
    ):
        warps = WARPGROUP // 32
        if warp == 0:
            cpasync.prefetch_descriptor(k_atom)
            cpasync.prefetch_descriptor(v_atom)
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(keys.full + stage, 1)
                    cute.arch.mbarrier_init(keys.empty + stage, 1)
                    cute.arch.mbarrier_init(values.full + stage, 1)
                    cute.arch.mbarrier_init(values.empty + stage, 1)
                for half in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_init(turns.queries + half, warps)
                    cute.arch.mbarrier_init(turns.products + half, 1)
                    cute.arch.mbarrier_init(turns.weights + half, warps)
                    cute.arch.mbarrier_init(turns.outputs + half, 1)
                cute.arch.mbarrier_init(last_page, 1)
            cute.arch.mbarrier_init_fence()

    def tensor_views(self, qk_mma, pv_mma, tensor_memory):
        """Tensor memory as the products see it: (products [.., halves], weights of the first half, outputs [.., halves])."""
        qk, pv = qk_mma.get_slice(0), pv_mma.get_slice(0)
        products = qk.make_fragment_C(cute.append(qk.partition_shape_C((HALF_ROWS, BLOCK)), 2))
        outputs = pv.make_fragment_C(cute.append(pv.partition_shape_C((HALF_ROWS, self.head_dim)), 2))
        weights_layout = sm100_utils.make_smem_layout_a(pv_mma, (HALF_ROWS, self.head_dim, BLOCK), self.v_dtype, 1)
        weights = pv.make_fragment_A(cute.make_tensor(tensor_memory, weights_layout.outer))
        per_column = 32 // self.v_dtype.width
        return (
            cute.make_tensor(tensor_memory + PRODUCTS, products.layout),
            cute.make_tensor(weights.iterator + WEIGHTS * per_column, weights[None, None, None, 0].layout),
            cute.make_tensor(tensor_memory + OUTPUTS, outputs.layout),
        )

    @cute.jit
    def multiply_all(self, qk_mma: cute.TiledMma, pv_mma: cute.TiledMma, shared: Shared, own: Own):
        """One warp: both products of both halves. A half's weights meet their values when the next block's keys are there, so that the matrix unit
        has the other half's products to work on while they are made."""
        keys, values, turns, tensor_memory = shared.keys, shared.values, own.turns, self.tensor_memory(own)
        shape = (HALF_ROWS, BLOCK, self.head_dim)
        q_layout = sm100_utils.make_smem_layout_a(qk_mma, shape, self.qk_dtype, 1)
        k_layout = sm100_utils.make_smem_layout_b(qk_mma, shape, self.qk_dtype, self.stages)
        v_layout = sm100_utils.make_smem_layout_b(pv_mma, (HALF_ROWS, self.head_dim, BLOCK), self.v_dtype, self.stages)
        queries = []
        for half in cutlass.range_constexpr(2):
            pointer = cute.recast_ptr(shared.sRows[None, half].iterator, q_layout.inner, self.qk_dtype)
            queries.append(qk_mma.make_fragment_A(cute.make_tensor(pointer, q_layout.outer))[None, None, None, 0])
        tSrK = qk_mma.make_fragment_B(cute.make_tensor(cute.recast_ptr(shared.sK.iterator, k_layout.inner), k_layout.outer))
        tOrV = pv_mma.make_fragment_B(cute.make_tensor(cute.recast_ptr(shared.sV.iterator, v_layout.inner), v_layout.outer))
        products, weights, outputs = self.tensor_views(qk_mma, pv_mma, tensor_memory)

        count, tiles = Int32(0), Int32(0)
        weighed = cute.make_rmem_tensor(2, Int32)  # how often a half's weights have been waited for
        weighed.fill(0)
        has_tiles = Boolean(True)
        while has_tiles:
            for half in cutlass.range_constexpr(2):
                cute.arch.mbarrier_wait(turns.queries + half, tiles & 1)
            earlier, started = Int32(0), Int32(0)  # tokens of the last block, and of all whose values have been multiplied
            is_first, unfinished = Boolean(True), Boolean(True)
            end = Int32(0)
            while unfinished:
                keys.wait_full(count)
                bits, end = self.read_words(shared.sEntry, shared.entries.stage(count), Entry.BITS, Entry.END)
                shared.entries.release(count)
                self.fence_after_wait()
                for half in cutlass.range_constexpr(2):
                    if (bits & self.bits_of(half)) != 0 and (earlier & self.bits_of(half)) == 0:
                        self.start_products(qk_mma, products[None, None, None, half], queries[half], tSrK[None, None, None, keys.stage(count)])
                        self.commit(turns.products + half)
                if not is_first:
                    values.wait_full(count - 1)
                for half in cutlass.range_constexpr(2):
                    if (earlier & self.bits_of(half)) != 0:
                        self.start_outputs(pv_mma, half, outputs, weights, tOrV[None, None, None, values.stage(count - 1)], weighed, started, turns)
                        if (bits & self.bits_of(half)) != 0:
                            self.start_products(qk_mma, products[None, None, None, half], queries[half], tSrK[None, None, None, keys.stage(count)])
                            self.commit(turns.products + half)
                self.commit(keys.empty + keys.stage(count))
                if not is_first:
                    self.commit(values.empty + values.stage(count - 1))
                started |= earlier
                earlier = bits
                is_first = Boolean(False)
                count += 1
                unfinished = end == MORE
            values.wait_full(count - 1)
            for half in cutlass.range_constexpr(2):
                if (earlier & self.bits_of(half)) != 0:
                    self.start_outputs(pv_mma, half, outputs, weights, tOrV[None, None, None, values.stage(count - 1)], weighed, started, turns)
                self.commit(turns.outputs + half)
            self.commit(values.empty + values.stage(count - 1))
            has_tiles = end != ALL_ENDS
            tiles += 1

    @cute.jit
    def start_products(self, mma: cute.TiledMma, accumulator: cute.Tensor, a: cute.Tensor, b: cute.Tensor):
        """Starts Q K^T."""
        atom = cute.make_mma_atom(mma.op)
        for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
            atom.set(tcgen05.Field.ACCUMULATE, k != 0)
            cute.gemm(atom, accumulator, a[None, None, k], b[None, None, k], accumulator)

    @cute.jit
    def start_outputs(
        self,
        mma: cute.TiledMma,
        half: cutlass.Constexpr,
        outputs: cute.Tensor,
        weights: cute.Tensor,
        b: cute.Tensor,
        weighed: cute.Tensor,
        started: Int32,
        turns: Turns,
    ):
        """Starts O += P V when the half has stored its weights; the first product of a tile overwrites what was there."""
        cute.arch.mbarrier_wait(turns.weights + half, weighed[half] & 1)
        weighed[half] += 1
        self.fence_after_wait()
        a = cute.make_tensor(weights.iterator + half * BLOCK * (32 // self.v_dtype.width), weights.layout)
        accumulator = outputs[None, None, None, half]
        atom = cute.make_mma_atom(mma.op)
        for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
            atom.set(tcgen05.Field.ACCUMULATE, True if const_expr(k != 0) else (started & self.bits_of(half)) != 0)
            cute.gemm(atom, accumulator, a[None, None, k], b[None, None, k], accumulator)

    def commit(self, barrier):
        """One arrival when all products started so far are done."""
        with cute.arch.elect_one():
            tcgen05.commit(barrier)

    def fence_after_wait(self):
        """Tensor memory after a barrier, as the threads left it that arrived there."""
        nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)

    @cute.jit
    def arrive(self, barrier: cute.Pointer):
        """By a whole warp, for what its lanes have done."""
        nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def attend_half(self, attended: Attended, qk_mma: cute.TiledMma, pv_mma: cute.TiledMma, shared: Shared, own: Own, half: Int32):
        """One warpgroup: the softmax of its half of each tile, a row a thread, to the end of the work."""
        entries, turns, tensor_memory = shared.entries, own.turns, self.tensor_memory(own)
        tile = self.tile
        row = cute.arch.thread_idx()[0] % WARPGROUP
        token = half * tile.half_tokens + row // tile.group
        scale_log2 = self.exponent_scale(attended.key_scale)
        half_pointer = shared.sRows[None, half].iterator
        products, _, outputs = self.tensor_views(qk_mma, pv_mma, tensor_memory)
        tS = self.half_of(products, half)
        tO = self.half_of(outputs, half)
        tP = cute.make_tensor(tS.iterator + WEIGHTS, cute.composition(tS.layout, cute.make_layout((HALF_ROWS, BLOCK * self.v_dtype.width // 32))))

        rChunks = self.query_chunks()
        count, tiles, blocks = Int32(0), Int32(0), Int32(0)
        entries.wait_full(count)
        kv_head, first_row, end_row, first_position, seq_len = self.read_place(shared, count)
        self.read_queries(attended.q, rChunks, half, kv_head, first_row, end_row)
        self.store_queries(rChunks, half_pointer)
        self.arrive(turns.queries + half)
        has_tiles = Boolean(True)
        while has_tiles:
            is_row = row // tile.group < tile.half_tokens and first_row + token < end_row
            token_bit = (Int32(1) << token) if row // tile.group < tile.half_tokens else Int32(0)
            visible = self.clamp(first_position + token + 1, 0, seq_len)
            # Blocks that every token of the half sees to their ends.
            whole_blocks = self.clamp(first_position + half * tile.half_tokens + 1, 0, seq_len) // BLOCK
            row_max = -Float32.inf
            row_sum = Float32(0.0)
            unfinished = Boolean(True)
            end = Int32(0)
            while unfinished:
                entries.wait_full(count)
                block, bits, end = self.read_words(shared.sEntry, entries.stage(count), Entry.BLOCK, Entry.BITS, Entry.END)
                entries.release(count)
                if (bits & self.bits_of(half)) != 0:
                    is_member = (bits & token_bit) != 0
                    limit = visible - block * BLOCK
                    cute.arch.mbarrier_wait(turns.products + half, blocks & 1)
                    blocks += 1
                    self.fence_after_wait()
                    if block < whole_blocks:
                        row_max, row_sum = self.weigh_row(tS, tP, tO, row, row_max, row_sum, is_member, None, scale_log2)
                    else:
                        row_max, row_sum = self.weigh_row(tS, tP, tO, row, row_max, row_sum, is_member, limit, scale_log2)
                    self.arrive(turns.weights + half)
                unfinished = end == MORE
                count += 1

            has_tiles = end != ALL_ENDS
            done_head, done_row, done_end = kv_head, first_row, end_row
            rNext = self.query_chunks()
            rNext.fill(0.0)
            if has_tiles:
                entries.wait_full(count)
                kv_head, first_row, end_row, first_position, seq_len = self.read_place(shared, count)
                self.read_queries(attended.q, rNext, half, kv_head, first_row, end_row)
            logsum = -Float32.inf
            factor = Float32(0.0)
            late_row = self.late(row)
            late_token, head = self.token_and_head(late_row, half, done_head)
            if row_sum > 0.0:
                logsum = (row_max * scale_log2 + cute.math.log2(row_sum, fastmath=True)) * LN2
                factor = attended.value_scale / row_sum
            if const_expr(attended.sink_key is not None):
                logit = self.sink_logit_of(attended.sink_key, half_pointer, late_row, head) * attended.query_scale
                if row_sum > 0.0:
                    factor /= 1.0 + cute.math.exp2((logit - logsum) * LOG2E, fastmath=True)
            cute.arch.mbarrier_wait(turns.outputs + half, tiles & 1)
            tiles += 1
            self.fence_after_wait()
            rDone = self.finish_rows(tO, late_row, row_sum > 0.0, factor, half_pointer)
            # The next tile's queries before this one's output: their fence would wait for stores to memory.
            if has_tiles:
                self.store_queries(rNext, half_pointer)
                self.arrive(turns.queries + half)
            self.write_rows(attended.out, rDone, half, done_head, done_row, done_end)
            if const_expr(attended.lse is not None):
                if is_row:
                    attended.lse[done_row + late_token, head] = logsum

    def half_of(self, views, half):
        """The [128, columns] of a half, in tensor memory."""
        first = views[(None, None), 0, 0, 0]
        return cute.make_tensor(first.iterator + half * cute.size(first, mode=[1]), first.layout)

    def columns_of(self, tX, first, number):
        """Columns `first` to `first + number` of a half in tensor memory."""
        return cute.make_tensor(tX.iterator + first, cute.composition(tX.layout, cute.make_layout((HALF_ROWS, number))))

    @cute.jit
    def read_columns(self, tX: cute.Tensor, row: Int32):
        """A row's columns of tensor memory, in registers when it returns."""
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(STEP)), Float32)
        copy = tcgen05.make_tmem_copy(atom, tX).get_slice(row)
        rX = cute.make_rmem_tensor(copy.partition_D(cute.make_identity_tensor(tX.shape)).shape, Float32)
        cute.copy(copy, copy.partition_S(tX), rX)
        cute.arch.fence_view_async_tmem_load()
        return cute.make_tensor(rX.iterator, cute.make_layout(cute.size(rX)))

    @cute.jit
    def write_columns(self, rX: cute.Tensor, tX: cute.Tensor, row: Int32):
        """Starts the way back of what `read_columns` reads."""
        atom = cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(cute.size(rX))), Float32)
        copy = tcgen05.make_tmem_copy(atom, tX).get_slice(row)
        shape = copy.partition_S(cute.make_identity_tensor(tX.shape)).shape
        cute.copy(copy, cute.make_tensor(rX.iterator, cute.make_layout(shape)), copy.partition_D(tX))

    @cute.jit
    def weigh_row(
        self,
        tS: cute.Tensor,  # [128, 128] products
        tP: cute.Tensor,  # [128, 128 weights in pairs]
        tO: cute.Tensor,  # [128, D]
        row: Int32,
        row_max: Float32,  # of the products that the weights so far are relative to
        row_sum: Float32,
        is_member: Boolean,
        limit: Int32 | None,  # keys of the block that the row sees; None: all
        scale_log2: Float32,
    ):
        """One step of the softmax; returns the new (row_max, row_sum). Rows whose token did not select the block get weights of 0."""
        rS = self.read_columns(tS, row)
        if const_expr(self.variant.negative_scale):
            rS.store(-rS.load())
        if const_expr(limit is not None):
            for step in cutlass.range_constexpr(BLOCK // STEP):
                for i in cutlass.range_constexpr(STEP):
                    rS[step * STEP + i] = rS[step * STEP + i] if step * STEP + i < limit else -Float32.inf
        peak = rS.load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
        new_max = cute.arch.fmax(row_max, peak)
        moves = is_member and (new_max - row_max) * scale_log2 > LAZY_LOG2
        has_output = row_max != -Float32.inf
        rescale = cute.math.exp2((row_max - new_max) * scale_log2, fastmath=True) if moves and has_output else Float32(1.0)
        row_max = new_max if moves else row_max
        shift = row_max * scale_log2 if is_member and row_max != -Float32.inf else Float32.inf
        row_sum *= rescale
        packed = STEP * self.v_dtype.width // 32
        for step in cutlass.range_constexpr(BLOCK // STEP):
            rStep = cute.make_tensor(rS.iterator + step * STEP, cute.make_layout(STEP))
            rWeights = cute.make_rmem_tensor(packed, Float32)
            weights = cute.math.exp2(rStep.load() * scale_log2 - shift, fastmath=True)
            row_sum += weights.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            cute.make_tensor(cute.recast_ptr(rWeights.iterator, dtype=self.v_dtype), cute.make_layout(STEP)).store(weights.to(self.v_dtype))
            self.write_columns(rWeights, self.columns_of(tP, step * packed, packed), row)
        if cute.arch.vote_any_sync(rescale != 1.0):
            for step in cutlass.range_constexpr(self.head_dim // STEP):
                tStep = self.columns_of(tO, step * STEP, STEP)
                rO = self.read_columns(tStep, row)
                rO.store(rO.load() * rescale)
                self.write_columns(rO, tStep, row)
        cute.arch.fence_view_async_tmem_store()
        return row_max, row_sum

    @cute.jit
    def finish_rows(self, tO: cute.Tensor, row: Int32, has_keys: Boolean, factor: Float32, half_pointer: cute.Pointer):
        """A warp's 32 rows of outputs, in the place of queries that no product needs any more, and back by chunks: [elements, steps]."""
        sChunks = self.chunks(half_pointer, self.out_dtype, HALF_ROWS)
        elements, per_row = sChunks.shape[0], cute.size(sChunks, mode=[1])
        for step in cutlass.range_constexpr(self.head_dim // STEP):
            rO = self.read_columns(self.columns_of(tO, step * STEP, STEP), row)
            rOut = cute.make_rmem_tensor((elements, STEP // elements), self.out_dtype)
            for i in cutlass.range_constexpr(STEP):
                rOut[i] = (rO[i] * factor if has_keys else Float32(0.0)).to(self.out_dtype)
            for chunk in cutlass.range_constexpr(STEP // elements):
                place = self.place(row, step * (STEP // elements) + chunk)
                cute.autovec_copy(rOut[None, chunk], sChunks[None, place, row])
        cute.arch.sync_warp()
        rDone = cute.make_rmem_tensor((elements, per_row), self.out_dtype)
        for step in cutlass.range_constexpr(per_row):
            source, chunk = self.chunk_of(step, per_row)
            cute.autovec_copy(sChunks[None, self.place(source, chunk), source], rDone[None, step])
        cute.arch.sync_warp()
        return rDone

    @cute.jit
    def write_rows(self, mOut: cute.Tensor, rDone: cute.Tensor, half: Int32, kv_head: Int32, first_row: Int32, end_row: Int32):
        for step in cutlass.range_constexpr(rDone.shape[1]):
            row, chunk = self.chunk_of(step, rDone.shape[1])
            token, head = self.token_and_head(row, half, kv_head)
            if row // self.tile.group < self.tile.half_tokens and first_row + token < end_row:
                gChunk = cute.local_tile(mOut[first_row + token, head, None], (rDone.shape[0],), (chunk,))
                cute.autovec_copy(rDone[None, step], gChunk)

    def query_chunks(self):
        """Registers for a thread's share of a half's queries: [elements of 16 bytes, steps]."""
        return cute.make_rmem_tensor((128 // self.qk_dtype.width, self.head_dim * self.qk_dtype.width // 128), self.qk_dtype)

    @cute.jit
    def store_queries(self, rChunks: cute.Tensor, half_pointer: cute.Pointer):
        sChunks = self.chunks(half_pointer, self.qk_dtype, HALF_ROWS)
        for step in cutlass.range_constexpr(rChunks.shape[1]):
            row, chunk = self.chunk_of(step, cute.size(sChunks, mode=[1]))
            cute.autovec_copy(rChunks[None, step], sChunks[None, self.place(row, chunk), row])
        cute.arch.fence_view_async_shared()

    def chunk_of(self, step, per_row):
        """(row of the half, chunk of 16 bytes) that a lane moves in one of its warp's steps over 32 rows."""
        lane = self.late(cute.arch.lane_idx())
        first = cute.arch.thread_idx()[0] % WARPGROUP // 32 * 32
        return first + step * (32 // per_row) + lane // per_row, lane % per_row

    def late(self, value):
        """`value`, by a shuffle that stays where it is: addresses that follow from it are not computed before all loops and kept, in registers that
        the softmax needs."""
        return cute.arch.shuffle_sync(value, cute.arch.lane_idx())

    @cute.jit
    def sink_logit_of(self, mSinkKey: cute.Tensor, half_pointer: cute.Pointer, row: Int32, head: Int32):
        """q . sink_key of a thread's row."""
        sChunks = self.chunks(half_pointer, self.qk_dtype, HALF_ROWS)
        elements = sChunks.shape[0]
        rQ = cute.make_rmem_tensor(elements, self.qk_dtype)
        total = Float32(0.0)
        for chunk in cutlass.range_constexpr(cute.size(sChunks, mode=[1])):
            cute.autovec_copy(sChunks[None, self.place(row, chunk), row], rQ)
            wide = rQ.load().to(Float32)
            for j in cutlass.range_constexpr(elements):
                total += wide[j] * mSinkKey[head, chunk * elements + j].to(Float32)
        return total


def build(variant: Variant) -> tuple[Any, tuple[Any, ...]]:
    kernel = SparsePrefillSm100(variant)
    return kernel, sparse_prefill_sm90.fake_arguments(kernel)


KERNEL = CuteKernel("sparse_prefill_sm100", build, sources=[__file__, sparse_prefill_sm90.__file__])


def sparse_prefill(call: SparseAttentionCall, k: torch.Tensor, v: torch.Tensor, batch: PagedBatch, kv_heads: slice, counter: torch.Tensor) -> None:
    """Attention of every query for the KV groups `kv_heads`, which k and v hold; as in `sparse_prefill_sm90`, and no tile is deferred."""
    sparse_prefill_sm90.sparse_prefill(call, k, v, batch, kv_heads, counter, kernel=KERNEL)
