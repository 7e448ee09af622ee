"""8-bit operands: exact widening, dots that stay inside fp8's short sums, and the softmax weights as e4m3.

Which dot runs follows from the operands' types alone, so a kernel reads the same in every mode:

    q 16 bit or fp32, K and V alike    both dots in that type
    q 16 bit, K and V fp8 (widen)      K widened to q's type, V to fp16
    q, K, V e4m3 (fp8)                 q . K in e4m3, V widened to fp16
    the same with fp8_pv               weights times 2^8 in e4m3 too

fp16 holds every e4m3 and e5m2 value, is one instruction away from either, and rounds the weights eight times finer than bf16.
"""

import triton
import triton.language as tl

from m3attn.triton_kernels.primitives import INTERPRETED, dot
from m3attn.triton_kernels.saturate import round_to

WEIGHT_SCALE = tl.constexpr(256.0)
SHORT_SUM = tl.constexpr(128)


@triton.jit
def short_dot(a, b):
    """a [M, S] @ b [S, N] in fp32 from fp8 operands, started afresh: add it to an accumulator with `+`.

    Hopper's fp8 instructions keep fewer bits than fp32 inside one sum, so no sum is longer than 128 products; a longer one (and one too
    short for an instruction) runs on fp16 copies, which are exact. So do, by Triton's choice, those of fewer than 64 rows there.
    """
    S: tl.constexpr = a.shape[1]
    if INTERPRETED or S > SHORT_SUM or S < 32:
        result = dot(a.to(tl.float16), b.to(tl.float16))
    else:
        result = tl.dot(a, b, max_num_imprecise_acc=S, out_dtype=tl.float32)
    return result


@triton.jit
def query_key_dot(q, k):
    """q [M, D] @ k [N, D]^T in fp32: in e4m3 if q is, else with k widened to q's type."""
    return short_dot(q, tl.trans(k)) if q.dtype.is_fp8() else dot(q, tl.trans(k.to(q.dtype)))


@triton.jit
def weighted_values(p, v, accumulator, FP8_PV: tl.constexpr):
    """accumulator [M, D] + p [M, N] @ v [N, D]; with FP8_PV everything here is 2^8 times as large, which `finish_values` takes back."""
    if FP8_PV:
        weights = round_to(p * WEIGHT_SCALE, tl.float8e4nv)
        if v.dtype.is_fp8():
            accumulator += short_dot(weights, v)
        else:
            accumulator = dot(weights.to(v.dtype), v, accumulator)
    elif v.dtype.is_fp8():
        accumulator = dot(p.to(tl.float16), v.to(tl.float16), accumulator)
    else:
        accumulator = dot(round_to(p, v.dtype), v, accumulator)
    return accumulator


@triton.jit
def weighted_value_pairs(p, words, even, odd, DTYPE: tl.constexpr, FP8_PV: tl.constexpr):
    """`weighted_values` for fp8 values of type DTYPE read two at a time, as uint16 words [N, D / 2]: (even columns, odd columns), [M, D / 2] each.

    A tensor core wants two keys of one column side by side, a cache has two columns of one key. For 16-bit elements the load from shared
    memory transposes; single bytes would be gathered one by one.
    """
    weights = round_to(p * WEIGHT_SCALE, tl.float8e4nv).to(tl.float16) if FP8_PV else p.to(tl.float16)
    even_values = (words & 0xFF).to(tl.uint8).to(DTYPE, bitcast=True).to(tl.float16)
    odd_values = (words >> 8).to(tl.uint8).to(DTYPE, bitcast=True).to(tl.float16)
    return dot(weights, even_values, even), dot(weights, odd_values, odd)


@triton.jit
def finish_values(output, FP8_PV: tl.constexpr):
    """Undo the factor of `weighted_values`; exact."""
    return output * (1.0 / WEIGHT_SCALE) if FP8_PV else output
