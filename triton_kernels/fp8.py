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
from triton.language.target_info import cuda_capability_geq

from m3attn.triton_kernels.primitives import INTERPRETED, dot, widen
from m3attn.triton_kernels.saturate import round_to

WEIGHT_SCALE = tl.constexpr(256.0)
SHORT_SUM = tl.constexpr(128)
_PAIRS = """{
    .reg .b32 sorted;
    .reg .b16 even, odd;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {even, odd}, sorted;
    cvt.rn.f16x2.FORMAT $0, even;
    cvt.rn.f16x2.FORMAT $1, odd;
}"""
E4M3_PAIRS = tl.constexpr(_PAIRS.replace("FORMAT", "e4m3x2"))
E5M2_PAIRS = tl.constexpr(_PAIRS.replace("FORMAT", "e5m2x2"))


@triton.jit
def short_dot(a, b):
    """a [M, S] @ b [S, N] in fp32 from fp8 operands, started afresh: add it to an accumulator with `+`.

    Hopper's fp8 instructions keep fewer bits than fp32 inside one sum, so no sum is longer than 128 products; a longer one (and one too
    short for an instruction) runs on fp16 copies, which are exact. So do, by Triton's choice, those of fewer than 64 rows there.
    """
    S: tl.constexpr = a.shape[1]
    if INTERPRETED or S > SHORT_SUM or S < 32:
        result = dot(widen(a, tl.float16), widen(b, tl.float16))
    else:
        result = tl.dot(a, b, max_num_imprecise_acc=S, out_dtype=tl.float32)
    return result


@triton.jit
def add_short_sums(a, b, accumulator):
    """accumulator + a [M, S] @ b [S, N] from fp8 operands, S of any length: Hopper adds to the accumulator in fp32 after every 128 products.

    The hardware that has no short sums adds as it goes.
    """
    S: tl.constexpr = a.shape[1]
    LONGEST: tl.constexpr = S if S < SHORT_SUM else SHORT_SUM
    if INTERPRETED or S < 32:
        result = dot(widen(a, tl.float16), widen(b, tl.float16), accumulator)
    else:
        result = tl.dot(a, b, accumulator, max_num_imprecise_acc=LONGEST, out_dtype=tl.float32)
    return result


@triton.jit
def widen_to(x, DTYPE: tl.constexpr):
    """x exactly in the wider type DTYPE; fp8 reaches bf16 through fp16 and fp32, as Hopper's direct conversions run at a quarter of the rate."""
    return widen(x, tl.float16).to(tl.float32).to(DTYPE) if x.dtype.is_fp8() and DTYPE.is_bf16() else widen(x, DTYPE)


@triton.jit
def query_key_dot(q, k):
    """q [M, D] @ k [N, D]^T in fp32: in e4m3 if q is, else with k widened to q's type."""
    return short_dot(q, tl.trans(k)) if q.dtype.is_fp8() else dot(q, tl.trans(widen_to(k, q.dtype)))


@triton.jit
def weighted_values(p, v, accumulator, FP8_PV: tl.constexpr):
    """accumulator [M, D] + p [M, N] @ v [N, D]; with FP8_PV everything here is 2^8 times as large, which `finish_values` takes back."""
    if FP8_PV:
        weights = round_to(p * WEIGHT_SCALE, tl.float8e4nv)
        if v.dtype.is_fp8():
            accumulator += short_dot(weights, v)
        else:
            accumulator = dot(widen(weights, v.dtype), v, accumulator)
    elif v.dtype.is_fp8():
        accumulator = dot(p.to(tl.float16), widen(v, tl.float16), accumulator)
    else:
        accumulator = dot(round_to(p, v.dtype), v, accumulator)
    return accumulator


@triton.jit
def add_query_key(q, k, logits):
    """logits [M, N] + q [M, S] @ k [N, S]^T: in e4m3 if q is, else with k widened to q's type."""
    return add_short_sums(q, tl.trans(k), logits) if q.dtype.is_fp8() else dot(q, tl.trans(widen_to(k, q.dtype)), logits)


@triton.jit
def add_weighted_values(p, v, accumulator, FP8_PV: tl.constexpr):
    """`weighted_values`, whose e4m3 products are added to the accumulator in place."""
    return add_short_sums(round_to(p * WEIGHT_SCALE, v.dtype), v, accumulator) if FP8_PV else weighted_values(p, v, accumulator, FP8_PV)


@triton.jit
def split_pairs(words, DTYPE: tl.constexpr):
    """(even columns, odd columns), [N, D / 2] fp16 each, of fp8 values of type DTYPE that were read two at a time, as uint16 words [N, D / 2].

    A tensor core wants two keys of one column side by side, a cache has two columns of one key. For 16-bit elements the load from shared
    memory transposes; single bytes would be gathered one by one.
    """
    if INTERPRETED or not cuda_capability_geq(8, 9):
        even = widen((words & 0xFF).to(tl.uint8).to(DTYPE, bitcast=True), tl.float16)
        odd = widen((words >> 8).to(tl.uint8).to(DTYPE, bitcast=True), tl.float16)
    else:
        # Two words at a time: bytes 0 and 2 are even columns, 1 and 3 odd ones.
        even, odd = tl.inline_asm_elementwise(
            E4M3_PAIRS if DTYPE.is_fp8e4nv() else E5M2_PAIRS, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    return even, odd


@triton.jit
def weighted_value_pairs(p, words, even, odd, DTYPE: tl.constexpr, FP8_PV: tl.constexpr):
    """`weighted_values` for the words of `split_pairs`: the accumulators of the even and the odd columns, [M, D / 2] each."""
    weights = widen(round_to(p * WEIGHT_SCALE, tl.float8e4nv), tl.float16) if FP8_PV else p.to(tl.float16)
    even_values, odd_values = split_pairs(words, DTYPE)
    return dot(weights, even_values, even), dot(weights, odd_values, odd)


@triton.jit
def finish_values(output, FP8_PV: tl.constexpr):
    """Undo the factor of `weighted_values`; exact."""
    return output * (1.0 / WEIGHT_SCALE) if FP8_PV else output
