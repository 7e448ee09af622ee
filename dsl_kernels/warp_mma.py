"""Tensor cores by the warp: products of 16 rows on packed registers, operands from swizzled shared memory, fp8 widened on the way.

An m16n8k16 product holds, in lane 4 g + c, of A the rows g and g + 8, of B and of the accumulator the columns named below. Sums do not depend on
the order of their terms, so a kernel may number the 16 summands of a product as its loads like them, in A and B alike.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32
from cutlass.cute.nvgpu import warp

SWIZZLE_BYTES = 128
CHUNK_BYTES = 16


def swizzled(row: Any, chunk: Any) -> Any:
    """Byte offset of 16-byte chunk 0..7 of a 128-byte row, as TMA with the 128-byte swizzle stores it."""
    return row * SWIZZLE_BYTES + ((chunk ^ (row & 7)) * CHUNK_BYTES)


def shared_tensor(dtype: type[cutlass.Numeric], address: Any, size: int) -> cute.Tensor:
    """`size` elements at a shared-memory byte address that is a multiple of 16."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=CHUNK_BYTES)
    return cute.make_tensor(pointer, cute.make_layout(size))


def mma_atom(dtype: type[cutlass.Numeric]) -> cute.MmaAtom:
    return cute.make_mma_atom(warp.MmaF16BF16Op(dtype, Float32, (16, 8, 16)))


def load_transposed(dtype: type[cutlass.Numeric], address: Any, out: cute.Tensor) -> None:
    """Four 8 x 8 matrices of 16-bit elements, transposed, into out [8]: lane 8 i + j names the address of row j of matrix i."""
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), dtype)
    cute.copy(atom, shared_tensor(dtype, address, 8), out)


def widen_pair(bytes_: Int32, kv_dtype: str, high: bool) -> Int32:
    """Two fp8 numbers, bits 0..15 or 16..31, as two fp16 numbers. Exact."""
    if kv_dtype == "fp8_e5m2":
        # e5m2 is the upper half of fp16.
        return Int32(cute.arch.prmt(bytes_, Int32(0), Int32(0x3424 if high else 0x1404)))
    code = "{\n.reg .b16 low, high;\nmov.b32 {low, high}, {$r0};\ncvt.rn.f16x2.e4m3x2 {$w0}, PART;\n}"
    return cute.arch.inline_ptx(code.replace("PART", "high" if high else "low"), write_only_types=[Int32], read_only_args=[bytes_])


def interleave_rows(bytes_: Int32) -> Int32:
    """[a0 a1 b0 b1] -> [a0 b0 a1 b1]: of two rows' byte pairs, as a transposed load of 16-bit units gives them, one pair a column."""
    return Int32(cute.arch.prmt(bytes_, Int32(0), Int32(0x3120)))


def as_halves(registers: cute.Tensor, dtype: type[cutlass.Numeric] = Float16) -> cute.Tensor:
    """Packed 32-bit registers [n] as 16-bit elements [2 n]."""
    return cute.recast_tensor(registers, dtype)
