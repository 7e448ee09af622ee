"""The end of a row of attention, a warp a row and four dims a lane: sink, scales, the one rounding, LSE."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, const_expr

from m3attn.dsl_kernels.warp_mma import as_halves, widen_pair

LANE_DIMS = 4
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
MINUS_INF = float("-inf")


def four(tensor: cute.Tensor, lane: Int32) -> cute.Tensor:
    """The lane's dims of a row [D]."""
    return cute.local_tile(tensor, (LANE_DIMS,), (lane,))


@cute.jit
def load_scale(value: Float32, tensor: Any) -> Float32:
    """A `Scale` on the device: the host's number, times the tensor's where there is one."""
    if const_expr(tensor is not None):
        value = value * tensor[0]
    return value


def as_float(registers: cute.Tensor) -> cute.Tensor:
    """[4] of any query dtype (Uint8 is e4m3) as fp32."""
    if registers.element_type is Uint8:
        packed, halves = cute.recast_tensor(registers, Int32), cute.make_rmem_tensor(2, Int32)
        halves[0], halves[1] = widen_pair(packed[0], "fp8_e4m3", False), widen_pair(packed[0], "fp8_e4m3", True)
        registers = as_halves(halves)
    wide = cute.make_rmem_tensor(LANE_DIMS, Float32)
    wide.store(registers.load().to(Float32))
    return wide


@cute.jit
def sink_logit(mQ: cute.Tensor, mSink: cute.Tensor, row: Int32, head: Int32, lane: Int32) -> Float32:
    """q . sink_key of one row, in every lane."""
    rQ = cute.make_rmem_tensor(LANE_DIMS, mQ.element_type)
    cute.autovec_copy(four(mQ[row, head, None], lane), rQ)
    rQ, gSink = as_float(rQ), four(mSink[head, None], lane)
    dot = Float32(0.0)
    for i in cutlass.range_constexpr(LANE_DIMS):
        dot += rQ[i] * gSink[i].to(Float32)
    return cute.arch.warp_reduction_sum(dot)


@cute.jit
def finish_row(
    output: cute.Tensor,  # [4] fp32, of this lane: sum of p v
    largest: Float32,  # log2 domain; -inf for a row without keys
    total: Float32,  # sum of p, relative to `largest`
    sink: Any,  # natural-log logit of the sink, or None
    v_scale: Float32,
    mOut: cute.Tensor,  # [T, Hq, D]
    mLse: Any,  # [T, Hq] or None
    row: Int32,
    head: Int32,
    lane: Int32,
) -> None:
    """Divide by the softmax's sum, round and store one row; 0 and -inf without keys."""
    has_keys = total > 0.0
    denominator = total
    if const_expr(sink is not None):
        denominator += cute.math.exp2(sink * LOG2E - largest, fastmath=True)
    factor = v_scale / denominator if has_keys else Float32(0.0)
    rounded = cute.make_rmem_tensor(LANE_DIMS, mOut.element_type)
    for i in cutlass.range_constexpr(LANE_DIMS):
        rounded[i] = (output[i] * factor if has_keys else Float32(0.0)).to(mOut.element_type)
    cute.autovec_copy(rounded, four(mOut[row, head, None], lane))
    if const_expr(mLse is not None):
        if lane == 0:
            mLse[row, head] = (largest + cute.math.log2(total, fastmath=True)) * LN2 if has_keys else Float32(MINUS_INF)
