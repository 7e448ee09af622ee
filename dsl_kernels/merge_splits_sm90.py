"""Split-K's second half: joins the partial attention of every split of the keys in a fixed order. A warp a row, four dims a lane."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from m3attn.dsl_kernels import finish_rows
from m3attn.dsl_kernels.decode_schedule import HEAD_DIM
from m3attn.dsl_kernels.finish_rows import LANE_DIMS, MINUS_INF, finish_row, load_scale, sink_logit

WARPS = 4
WARP = 32


def partials(mWork: cute.Tensor, splits: Int32, mOut: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
    """(outputs [splits, T, Hq, D], log2-domain LSEs [splits, T, Hq]) of the splits, fp32, in the workspace."""
    tokens, heads = mOut.shape[0], mOut.shape[1]
    row = Int64(heads) * HEAD_DIM
    strides = (cute.assume(tokens * row, divby=HEAD_DIM), cute.assume(row, divby=HEAD_DIM), HEAD_DIM, 1)
    pointer = cute.recast_ptr(mWork.iterator, dtype=Float32)
    outputs = cute.make_tensor(pointer, cute.make_layout((splits, tokens, heads, HEAD_DIM), stride=strides))
    lse_layout = cute.make_layout((splits, tokens, heads), stride=(Int64(heads) * tokens, Int64(heads), 1))
    return outputs, cute.make_tensor(pointer + splits * tokens * row, lse_layout)


class MergeSplits:
    """Its launch follows the splits' as a programmatic dependent.

    Args:
        max_splits: a power of two, at most 16, no less than the splits.
    """

    def __init__(self, max_splits: int) -> None:
        self.max_splits = max_splits

    def launch(
        self,
        mPartial: cute.Tensor,  # [splits, T, Hq, D] fp32; 0 where its LSE is -inf, rows without an owner included
        mPartialLse: cute.Tensor,  # [splits, T, Hq] fp32, log2 domain
        mQ: cute.Tensor,  # [T, Hq, D]
        mSink: Any,  # [Hq, D] or None
        mOut: cute.Tensor,  # [T, Hq, D]
        mLse: Any,  # [T, Hq] or None
        mQScale: Any,  # [1] or None
        mVScale: Any,
        sm_scale: Float32,
        q_scale: Float32,
        v_scale: Float32,
        stream: Any,
    ) -> None:
        num_rows = mOut.shape[0] * mOut.shape[1]
        self.kernel(mPartial, mPartialLse, mQ, mSink, mOut, mLse, mQScale, mVScale, sm_scale, q_scale, v_scale).launch(
            grid=(cute.ceil_div(num_rows, WARPS), 1, 1), block=(WARPS * WARP, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        mPartial: cute.Tensor,
        mPartialLse: cute.Tensor,
        mQ: cute.Tensor,
        mSink: Any,
        mOut: cute.Tensor,
        mLse: Any,
        mQScale: Any,
        mVScale: Any,
        sm_scale: Float32,
        q_scale: Float32,
        v_scale: Float32,
    ) -> None:
        block, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        index = block * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        exists = index < mOut.shape[0] * mOut.shape[1]
        index = index if exists else 0
        row, head = index // mOut.shape[1], index % mOut.shape[1]
        splits = mPartial.shape[0]
        # What follows may start beside the splits. Every block waits for them, with a row or without, so that what waits for this kernel has waited
        # for both; the next splits launch nothing before their own wait, so that no more than one kernel stands behind this one.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        # All at once, whether a part's LSE is -inf or not: it is one wait for memory. Without the barrier ptxas moves the loads of the parts behind
        # the first use of the LSEs.
        lse = mPartialLse[cutlass.min(lane, splits - 1), row, head]
        parts = cute.make_rmem_tensor((LANE_DIMS, self.max_splits), Float32)
        for split in cutlass.range_constexpr(self.max_splits):
            cute.autovec_copy(finish_rows.four(mPartial[cutlass.min(split, splits - 1), row, head, None], lane), parts[None, split])
        cute.arch.sync_threads()
        if exists:
            if lane >= splits:
                lse = Float32(MINUS_INF)
            largest = cute.arch.warp_reduction_max(lse)
            weight = cute.math.exp2(lse - (largest if largest > MINUS_INF else Float32(0.0)), fastmath=True)
            total = cute.arch.warp_reduction_sum(weight)
            output = cute.make_rmem_tensor(LANE_DIMS, Float32)
            output.fill(0.0)
            for split in cutlass.range_constexpr(self.max_splits):
                part_weight = cute.arch.shuffle_sync(weight, split)
                for i in cutlass.range_constexpr(LANE_DIMS):
                    output[i] += parts[i, split] * part_weight if part_weight > 0.0 else Float32(0.0)
            sink = None
            if const_expr(mSink is not None):
                sink = sink_logit(mQ, mSink, row, head, lane) * sm_scale * load_scale(q_scale, mQScale)
            finish_row(output, largest, total, sink, load_scale(v_scale, mVScale), mOut, mLse, row, head, lane)
