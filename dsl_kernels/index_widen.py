"""A tile of e4m3 in shared memory as 16 bit, exactly: for a product of e4m3 with 16 bit, which no tensor core has."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32

from m3attn.dsl_kernels.warp_mma import SWIZZLE_BYTES, shared_tensor, swizzled, widen_pair

GROUP = 8
"""Rows that a warp widens at a time: as many as the swizzle tells apart."""


@cute.jit
def widen_tile(source, target, rows: cutlass.Constexpr[int], dtype: cutlass.Constexpr, warp, warps: cutlass.Constexpr[int]):
    """`warps` warps, this one being number `warp`, widen [rows, 128] e4m3 at pointer `source` to bf16 or fp16 at `target`, where dims 0 to 63 of all
    rows come first, then the others.

    Eight lanes that move 16 bytes each at once take four chunks of two rows, r and r ^ 5. Of the chunks' places in a row, which the swizzle
    permutes, bit 2 differs between the rows as they are read and bit 0 as they are written, so that the eight meet in no bank.
    """
    lane = cute.arch.lane_idx()
    chunk, row = lane % 4, (lane // 8) ^ (5 if lane % 8 >= 4 else 0)
    # Where turns do not come out even, several warps write the last rows alike.
    groups = [cutlass.min(turn * warps + warp, rows // GROUP - 1) for turn in range(-(-rows // GROUP // warps))]
    ahead = load_group(source, chunk, row, groups[0])
    for turn in cutlass.range_constexpr(len(groups)):
        narrow = ahead
        if cutlass.const_expr(turn + 1 < len(groups)):
            ahead = load_group(source, chunk, row, groups[turn + 1])  # before the stores, which the compiler would not let it pass
        for part in cutlass.range_constexpr(4):
            half, odd = part // 2, part % 2
            wide = cute.make_rmem_tensor(4, Int32)
            for i in cutlass.range_constexpr(4):
                pair = widen_pair(narrow[half][2 * odd + i // 2], "fp8_e4m3", bool(i % 2))
                wide[i] = as_bf16(pair) if dtype is BFloat16 else pair
            offset = groups[turn] * GROUP * SWIZZLE_BYTES + half * rows * SWIZZLE_BYTES
            cute.autovec_copy(wide, shared_tensor(Int32, target.toint() + swizzled(row, 2 * chunk + odd) + offset, 4))


def load_group(source, chunk, row, group) -> list[cute.Tensor]:
    """The lane's chunks of the first 64 and of the other dims."""
    narrow = [cute.make_rmem_tensor(4, Int32) for _ in range(2)]
    for half in range(2):
        place = source.toint() + swizzled(row, chunk + 4 * half) + group * GROUP * SWIZZLE_BYTES
        cute.autovec_copy(shared_tensor(Int32, place, 4), narrow[half])
    return narrow


def as_bf16(pair: Int32) -> Int32:
    """Two fp16 numbers that were e4m3 as bf16, exactly. NaN stays NaN."""
    code = """{
.reg .f16 low, high;
.reg .f32 a, b;
mov.b32 {low, high}, {$r0};
cvt.f32.f16 a, low;
cvt.f32.f16 b, high;
cvt.rn.bf16x2.f32 {$w0}, b, a;
}"""
    return cute.arch.inline_ptx(code, write_only_types=[Int32], read_only_args=[pair])
