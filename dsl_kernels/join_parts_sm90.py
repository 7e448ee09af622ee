"""Partial outputs, and the kernel that joins those of a row: how they lie in memory, and in which order they are summed.

A part is what a pick made: normalised outputs of a KV group's heads, and their LSEs in base 2. A row's parts lie together, in its list's order.
Within a part, outputs lie as the accumulators of a warp hold them: 8 heads are a unit; a lane has every fourth pair of the columns of head lane // 4,
four pairs in a step, so that each step of a unit is 512 bytes in one piece. They find their columns when they are joined.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from m3attn.dsl_kernels.block_lists_sm90 import BLOCK, Row
from m3attn.dsl_kernels.sparse_prefill_sm90 import LN2, MaybeTensor, Ring

UNIT_ROWS = 8
STEP_COLUMNS = 32
STAGES = 3
STAGE_BYTES = 1 << 16
MAX_WARPS = 8


class Chunk:
    """Words of what the loading warp says with each chunk: whose parts, and a bit for each that exists."""

    ROW, KV_HEAD, EXISTS = range(3)


class JoinParts:
    def __init__(self, dtype: Any, head_dim: int, group: int, topk: int) -> None:
        self.dtype, self.head_dim, self.group, self.topk = dtype, head_dim, group, topk
        self.part_size = group * head_dim
        self.chunk = min(topk, STAGE_BYTES // (2 * self.part_size), 32)
        self.steps_of_unit = head_dim // STEP_COLUMNS
        steps = group // UNIT_ROWS * self.steps_of_unit
        self.warps = min(steps, MAX_WARPS)
        self.steps_of_warp = steps // self.warps

    @cute.jit
    def place(self, part: Int32, unit: Int32) -> tuple[Int64, Int64]:
        """Where this lane's (outputs, LSE) in a unit of a part begin; outputs of a step lie 8 elements together, steps 256 apart."""
        lane = cute.arch.lane_idx()
        outputs = Int64(part) * self.part_size + unit * (UNIT_ROWS * self.head_dim) + lane * 8
        return cute.assume(outputs, divby=8), Int64(part) * self.group + unit * UNIT_ROWS + lane // 4

    def launch(
        self,
        mIds: cute.Tensor,  # [Hkv, T, K]
        mOut: cute.Tensor,  # [T, Hq, D]
        mLse: MaybeTensor,  # [T, Hq]
        mVScale: MaybeTensor,  # [1]
        mNumRows: cute.Tensor,  # [1]
        mRows: cute.Tensor,  # [Hkv * T, 4]
        mPartOut: cute.Tensor,  # [rows of a slice * K * G * D]
        mPartLse: cute.Tensor,  # [rows of a slice * K * G]
        value_scale: Float32,
        slice_rows: Int32,
        which: Int32,  # slice
        max_blocks: Int32,
        stream: Any,
    ) -> None:
        self.kernel(mIds, mOut, mLse, mVScale, mNumRows, mRows, mPartOut, mPartLse, value_scale, slice_rows, which).launch(
            grid=(max_blocks, 1, 1), block=((self.warps + 1) * 32, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        mIds: cute.Tensor,
        mOut: cute.Tensor,
        mLse: MaybeTensor,
        mVScale: MaybeTensor,
        mNumRows: cute.Tensor,
        mRows: cute.Tensor,
        mPartOut: cute.Tensor,
        mPartLse: cute.Tensor,
        value_scale: Float32,
        slice_rows: Int32,
        which: Int32,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.memory.SmemAllocator()
        sOut = smem.allocate_tensor(self.dtype, cute.make_layout((self.chunk * self.part_size, STAGES)), 128)
        sLse = smem.allocate_tensor(Float32, cute.make_layout((self.chunk * self.group, STAGES)), 128)
        sChunk = smem.allocate_tensor(Int32, cute.make_layout((4, STAGES)), 16)
        barriers = smem.allocate_tensor(cutlass.Int64, cute.make_layout(2 * STAGES), 8).iterator
        chunks = Ring(barriers, barriers + STAGES, STAGES)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        number = cute.arch.block_idx()[0]
        first_number = which * slice_rows
        num_rows = min(slice_rows, mNumRows[0] - first_number)
        if number < num_rows:
            if warp == 0:
                with cute.arch.elect_one():
                    for stage in cutlass.range_constexpr(STAGES):
                        cute.arch.mbarrier_init(chunks.full + stage, 1)
                        cute.arch.mbarrier_init(chunks.empty + stage, self.warps)
                cute.arch.mbarrier_init_fence()
            cute.arch.sync_threads()
            if warp == self.warps:
                self.load(mIds, mRows, mPartOut, mPartLse, sOut, sLse, sChunk, chunks, number, num_rows, first_number)
            else:
                if const_expr(mVScale is not None):
                    value_scale *= mVScale[0]
                self.join(mOut, mLse, value_scale, sOut, sLse, sChunk, chunks, number, num_rows, warp)

    @cute.jit
    def load(
        self,
        mIds: cute.Tensor,
        mRows: cute.Tensor,
        mPartOut: cute.Tensor,
        mPartLse: cute.Tensor,
        sOut: cute.Tensor,
        sLse: cute.Tensor,
        sChunk: cute.Tensor,
        chunks: Ring,
        number: Int32,
        num_rows: Int32,
        first_number: Int32,
    ):
        """One warp: brings chunks of the parts that exist, and says which these are. The others were never written."""
        lane = cute.arch.lane_idx()
        count = Int32(0)
        while number < num_rows:
            row, kv_head, visible = (mRows[first_number + number, word] for word in (Row.ROW, Row.KV_HEAD, Row.VISIBLE))
            for first in cutlass.range_constexpr(0, self.topk, self.chunk):
                parts = min(self.chunk, self.topk - first)
                block = Int32(-1)
                if lane < parts:
                    block = mIds[kv_head, row, first + lane]
                exists = cute.arch.vote_ballot_sync(block >= 0 and block < cute.ceil_div(visible, BLOCK))
                stage = chunks.stage(count)
                full = chunks.full + stage
                chunks.wait_empty(count)
                if lane == 0:
                    sChunk[Chunk.ROW, stage] = row
                    sChunk[Chunk.KV_HEAD, stage] = kv_head
                    sChunk[Chunk.EXISTS, stage] = exists
                    cute.arch.mbarrier_arrive_and_expect_tx(full, cute.arch.popc(exists) * (2 * self.part_size + 4 * self.group))
                cute.arch.sync_warp()
                place = number * self.topk + first
                if cute.arch.popc(exists) == parts:
                    if lane == 0:
                        self.copy_parts(parts, mPartOut, mPartLse, place, sOut, sLse, stage, Int32(0), full)
                elif (exists >> lane & 1) == 1:
                    self.copy_parts(1, mPartOut, mPartLse, place + lane, sOut, sLse, stage, lane, full)
                count += 1
            number += cute.arch.grid_dim()[0]

    def copy_parts(
        self,
        parts: int,
        mPartOut: cute.Tensor,
        mPartLse: cute.Tensor,
        place: Int32,
        sOut: cute.Tensor,
        sLse: cute.Tensor,
        stage: Int32,
        shared_place: Int32,
        full: cute.Pointer,
    ) -> None:
        for size, mX, sX in ((self.part_size, mPartOut, sOut), (self.group, mPartLse, sLse)):
            atom, layout = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), mX.element_type), cute.make_layout(parts * size)
            source = mX.iterator + cute.assume(Int64(place) * size, divby=UNIT_ROWS)
            target = sX[None, stage].iterator + cute.assume(shared_place * size, divby=UNIT_ROWS)
            cute.copy(atom, cute.make_tensor(source, layout), cute.make_tensor(target, layout), mbar_ptr=full)

    @cute.jit
    def join(
        self,
        mOut: cute.Tensor,
        mLse: MaybeTensor,
        value_scale: Float32,
        sOut: cute.Tensor,
        sLse: cute.Tensor,
        sChunk: cute.Tensor,
        chunks: Ring,
        number: Int32,
        num_rows: Int32,
        warp: Int32,
    ):
        """The other warps: some steps of a unit each, of every row."""
        lane = cute.arch.lane_idx()
        unit, first_step = warp * self.steps_of_warp // self.steps_of_unit, warp * self.steps_of_warp % self.steps_of_unit
        rSum = cute.make_rmem_tensor((8, self.steps_of_warp), Float32)
        rOut = cute.make_rmem_tensor((2, 4, self.steps_of_warp), self.dtype)  # pairs of columns
        count = Int32(0)
        row, kv_head = Int32(0), Int32(0)
        while number < num_rows:
            rSum.fill(0.0)
            largest, total = -Float32.inf, Float32(0.0)
            for first in cutlass.range_constexpr(0, self.topk, self.chunk):
                parts = min(self.chunk, self.topk - first)
                stage = chunks.stage(count)
                chunks.wait_full(count)
                row, kv_head, exists = (cute.arch.make_warp_uniform(sChunk[word, stage]) for word in (Chunk.ROW, Chunk.KV_HEAD, Chunk.EXISTS))
                outputs, lses = self.place(Int32(0), unit)
                gParts = cute.make_tensor(
                    sOut[None, stage].iterator + cute.assume(Int32(outputs) + first_step * 256, divby=8),
                    cute.make_layout((8, self.steps_of_warp, parts), stride=(1, 256, self.part_size)),
                )
                rWeights = cute.make_rmem_tensor(parts, Float32)
                for i in cutlass.range_constexpr(parts):
                    rWeights[i] = sLse[Int32(lses) + i * self.group, stage]
                    rWeights[i] = rWeights[i] if exists & (1 << i) else -Float32.inf
                new_largest = cute.arch.fmax(largest, rWeights.load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0))
                shift = Float32(0.0) if new_largest == -Float32.inf else new_largest
                rescale = cute.math.exp2(largest - shift, fastmath=True)
                largest = new_largest
                rWeights.store(cute.math.exp2(rWeights.load() - shift, fastmath=True))
                total = total * rescale + rWeights.load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
                rPart = cute.make_rmem_tensor((8, parts), self.dtype)
                words = cute.recast_tensor(rPart, Int32)
                for step in cutlass.range_constexpr(self.steps_of_warp):
                    rSum[None, step].store(rSum[None, step].load() * rescale)
                    for i in cutlass.range_constexpr(parts):
                        cute.autovec_copy(gParts[None, step, i], rPart[None, i])
                        mask = -(exists >> i & 1)  # what stands in the place of a part that does not exist may be NaN
                        for word in cutlass.range_constexpr(4):
                            words[word, i] = words[word, i] & mask
                        rSum[None, step].store(rSum[None, step].load() + rPart[None, i].load().to(Float32) * rWeights[i])
                chunks.release(count)
                count += 1
            factor = value_scale / total if total > 0.0 else Float32(0.0)
            head = kv_head * self.group + unit * UNIT_ROWS + lane // 4
            cute.make_tensor(rOut.iterator, rSum.layout).store((rSum.load() * factor).to(self.dtype))
            for step in cutlass.range_constexpr(self.steps_of_warp):
                for i in cutlass.range_constexpr(4):
                    pair = ((first_step + step) * 4 + i) * 4 + lane % 4
                    cute.autovec_copy(rOut[None, i, step], cute.local_tile(mOut[row, head, None], (2,), (pair,)))
            if const_expr(mLse is not None):
                if first_step == 0 and lane % 4 == 0:
                    mLse[row, head] = (largest + cute.math.log2(total, fastmath=True)) * LN2 if total > 0.0 else -Float32.inf
            number += cute.arch.grid_dim()[0]
