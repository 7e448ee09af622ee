"""Split-K's second half: joins the partial attention of every split of the keys in a fixed order. A warp a row, four dims a lane."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float16, Float32, Int32, Uint8, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from m3attn.calls import SparseAttentionCall
from m3attn.dsl_kernels import decode_schedule, finish_rows, warp_mma
from m3attn.dsl_kernels.common.kernels import CuteKernel
from m3attn.dsl_kernels.decode_schedule import HEAD_DIM, power_of_2
from m3attn.dsl_kernels.finish_rows import LANE_DIMS, MINUS_INF, finish_row, load_scale, sink_logit
from m3attn.dtypes import dtype_name

WARPS = 4
WARP = 32
ELEMENTS = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32, "fp8_e4m3": Uint8}


@dataclass(frozen=True)
class Variant:
    """What a compiled kernel depends on.

    Attributes:
        q_dtype: read for the sink alone.
        sink: element type of sink_key, or `none`.
        q_scale, v_scale: whether the scale has a tensor.
        aligned: rows of q and out start at multiples of 16 bytes.
        max_splits: splits, rounded up to a power of two.
    """

    q_dtype: str
    lse: bool
    sink: str
    q_scale: bool
    v_scale: bool
    aligned: bool
    max_splits: int = 16


class MergeSplits:
    def __init__(self, variant: Variant) -> None:
        self.variant = variant

    @cute.jit
    def __call__(
        self,
        mPartial: cute.Tensor,  # [splits, T, Hq, D] fp32; not written where its LSE is -inf
        mPartialLse: cute.Tensor,  # [splits, T, Hq] fp32, log2 domain
        mCuSeqlens: cute.Tensor,  # [B + 1]
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
        self.kernel(mPartial, mPartialLse, mCuSeqlens, mQ, mSink, mOut, mLse, mQScale, mVScale, sm_scale, q_scale, v_scale).launch(
            grid=(cute.ceil_div(num_rows, WARPS), 1, 1), block=(WARPS * WARP, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        mPartial: cute.Tensor,
        mPartialLse: cute.Tensor,
        mCuSeqlens: cute.Tensor,
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
        row, head = index // mOut.shape[1], index % mOut.shape[1]
        splits = mPartial.shape[0]
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if row < mOut.shape[0]:
            # Read whether their LSEs are -inf or not, all at once, and before those: it is one wait for memory.
            parts = cute.make_rmem_tensor((LANE_DIMS, self.variant.max_splits), Float32)
            for split in cutlass.range_constexpr(self.variant.max_splits):
                cute.autovec_copy(finish_rows.four(mPartial[cutlass.min(split, splits - 1), row, head, None], lane), parts[None, split])
            is_owned = row >= mCuSeqlens[0] and row < mCuSeqlens[mCuSeqlens.shape[0] - 1]
            lse = Float32(MINUS_INF)
            if lane < splits and is_owned:
                lse = mPartialLse[lane, row, head]
            largest = cute.arch.warp_reduction_max(lse)
            weight = cute.math.exp2(lse - (largest if largest > MINUS_INF else Float32(0.0)), fastmath=True)
            total = cute.arch.warp_reduction_sum(weight)
            output = cute.make_rmem_tensor(LANE_DIMS, Float32)
            output.fill(0.0)
            for split in cutlass.range_constexpr(self.variant.max_splits):
                part_weight = cute.arch.shuffle_sync(weight, split)
                for i in cutlass.range_constexpr(LANE_DIMS):
                    output[i] += parts[i, split] * part_weight if part_weight > 0.0 else Float32(0.0)
            sink = None
            if const_expr(mSink is not None):
                sink = sink_logit(mQ, mSink, row, head, lane) * sm_scale * load_scale(q_scale, mQScale)
            finish_row(output, largest, total, sink, load_scale(v_scale, mVScale), mOut, mLse, row, head, lane)


def build(variant: Variant) -> tuple[MergeSplits, tuple[Any, ...]]:
    tokens, heads = cute.sym_int(), cute.sym_int()
    strides = [cute.sym_int64(divisibility=8 if variant.aligned else 1) for _ in range(4)]
    align = 16 if variant.aligned else None
    q_type = ELEMENTS[variant.q_dtype]
    out_type = BFloat16 if q_type is Uint8 else q_type
    splits = cute.sym_int()
    partial_strides = [cute.sym_int64(divisibility=HEAD_DIM) for _ in range(2)]
    partial = make_fake_tensor(Float32, (splits, tokens, heads, HEAD_DIM), (*partial_strides, HEAD_DIM, 1), assumed_align=16)
    partial_lse = make_fake_tensor(Float32, (splits, tokens, heads), (cute.sym_int64(), cute.sym_int64(), 1))
    scale = make_fake_tensor(Float32, (1,), (1,))
    return MergeSplits(variant), (
        partial,
        partial_lse,
        make_fake_tensor(Int32, (cute.sym_int(),), (cute.sym_int64(),)),
        make_fake_tensor(q_type, (tokens, heads, HEAD_DIM), (*strides[:2], 1), assumed_align=align),
        None if variant.sink == "none" else make_fake_tensor(ELEMENTS[variant.sink], (heads, HEAD_DIM), (cute.sym_int64(), cute.sym_int64())),
        make_fake_tensor(out_type, (tokens, heads, HEAD_DIM), (*strides[2:], 1), assumed_align=align),
        make_fake_tensor(Float32, (tokens, heads), (cute.sym_int64(), cute.sym_int64())) if variant.lse else None,
        scale if variant.q_scale else None,
        scale if variant.v_scale else None,
        Float32(0.0),
        Float32(0.0),
        Float32(0.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


KERNEL: CuteKernel[Variant] = CuteKernel(
    "merge_splits_sm90", build, sources=[__file__, decode_schedule.__file__, finish_rows.__file__, warp_mma.__file__]
)


def merge_splits(call: SparseAttentionCall, q: torch.Tensor, partial_out: torch.Tensor, partial_lse: torch.Tensor, aligned: bool) -> None:
    """Write call.out and call.lse from every split's normalised output and LSE.

    Args:
        q: call.q, fp8 as uint8.
        partial_out: [splits, T, Hq, D] fp32, contiguous.
        partial_lse: [splits, T, Hq] fp32, contiguous, log2 domain; -inf for a split without keys.
        aligned: rows of q and out start at multiples of 16 bytes.
    """
    has_sink = call.sink_key is not None
    sink = "none" if call.sink_key is None else dtype_name(call.sink_key.dtype)
    q_scale = call.q_scale.tensor if has_sink else None
    v_scale = call.v_scale.tensor
    max_splits = power_of_2(partial_out.shape[0])
    variant = Variant(dtype_name(call.q.dtype), call.lse is not None, sink, q_scale is not None, v_scale is not None, aligned, max_splits)
    KERNEL.get(variant, call.q.device)(
        partial_out,
        partial_lse,
        call.batch.cu_seqlens_q,
        q,
        call.sink_key,
        call.out,
        call.lse,
        None if q_scale is None else q_scale.reshape(1),
        None if v_scale is None else v_scale.reshape(1),
        call.sm_scale,
        call.q_scale.value,
        call.v_scale.value,
    )
