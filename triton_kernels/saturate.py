"""The one way to a stored element: fp32 divided by its scale, rounded once to nearest even, and for fp8 saturated."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from m3attn.scales import Scale
from m3attn.triton_kernels.primitives import INTERPRETED


def divisor(scale: Scale) -> tuple[float | None, torch.Tensor | None]:
    """What a kernel takes for `scale`: (value, tensor), both None for a scale of 1, which then costs no division."""
    if scale.tensor is None and scale.value == 1.0:
        return None, None
    return scale.value, scale.tensor


@triton.jit
def divide_by_scale(x, value, scale_ptr):
    """x / scale, an IEEE fp32 division, for the two results of `divisor`; x itself where both are None."""
    if value is None:
        result = x
    elif scale_ptr is None:
        result = _divide_by_scalar(x, value)
    else:
        result = _divide_by_scalar(x, value * tl.load(scale_ptr))
    return result


@triton.jit
def _divide_by_scalar(x, scalar):
    """x / scalar as the IEEE division rounds it, wherever the quotient matters to an fp8 result: in [2^-40, 2^60).

    A division is some twenty instructions an element, more than memory leaves time for. The reciprocal is the same for all elements, and a product
    corrected by its own remainder is the rounded quotient (Markstein, 1990). Smaller quotients all become zero, larger ones all saturate.
    """
    if INTERPRETED:  # has no fused multiply-add
        result = tl.div_rn(x, scalar)
    else:
        # Remainders of very small and very large scales leave fp32: a power of two, exact wherever the quotient matters, brings both nearer 1.
        factor = tl.where(tl.abs(scalar) < 2.0**-60, 2.0**64, tl.where(tl.abs(scalar) > 2.0**60, 2.0**-64, 1.0))
        if factor != 1.0:
            x *= factor
        scalar *= factor
        reciprocal = tl.div_rn(1.0, scalar)
        near = x * reciprocal
        # Triton's -x is 0 - x, an operation of its own that has no -0; a factor of -1 becomes a sign of the operand.
        excess = tl.fma(near, scalar, x * -1.0)
        result = tl.where(tl.abs(near) < 2.0**60, tl.fma(excess, -reciprocal, near), near)
    return result


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """fp32 x as DTYPE, in one rounding to nearest even.

    fp8: what lies beyond the largest finite value, infinities too, becomes the largest finite value; NaN stays NaN, as byte 0x7f whatever
    its sign.
    """
    if DTYPE.is_fp8e4nv():
        stored = _to_fp8(x, DTYPE, 3, 7, 448.0)
    elif DTYPE.is_fp8e5():
        stored = _to_fp8(x, DTYPE, 2, 15, 57344.0)
    elif INTERPRETED and DTYPE.is_bf16():
        stored = _round_to_bf16(x)
    else:
        stored = x.to(DTYPE)
    return stored


@triton.jit
def _to_fp8(x, DTYPE: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """SM90 and later convert as the contract says, in one instruction; elsewhere Triton goes through fp16 or truncates, so integers do it."""
    if cuda_capability_geq(9, 0) and not INTERPRETED:
        stored = x.to(DTYPE)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        sign = (bits >> 24) & 0x80
        magnitude = tl.minimum(tl.abs(x), LARGEST)
        DROPPED: tl.constexpr = 23 - MANTISSA
        # Normal numbers: add half of the last kept bit, less one unless that bit is odd, then drop bits and move the exponent's bias.
        kept = magnitude.to(tl.uint32, bitcast=True)
        rounded = (kept + ((kept >> DROPPED) & 1) + ((1 << (DROPPED - 1)) - 1)) >> DROPPED
        normal = rounded - ((127 - BIAS) << MANTISSA)
        # Subnormal numbers: an fp32 addition whose last bit weighs as much as theirs rounds them, and leaves the code in the low bits.
        ALIGN: tl.constexpr = 2.0 ** (1 - BIAS - MANTISSA + 23)
        subnormal = (magnitude + ALIGN).to(tl.uint32, bitcast=True) & 0xFF
        code = tl.where(magnitude < 2.0 ** (1 - BIAS), subnormal, normal) | sign
        stored = tl.where(x != x, 0x7F, code).to(tl.uint8).to(DTYPE, bitcast=True)
    return stored


@triton.jit
def _round_to_bf16(x):
    """The interpreter's cast to bf16 truncates; this makes it exact."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
    return tl.where(x != x, 0x7FFF, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
