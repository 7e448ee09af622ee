"""Maxima of a matrix instruction's accumulators, by row, by way of integers.

Hopper takes the maximum of three integers in one instruction, VIMNMX3, and of floats only that of two. As signed integers, the bits of non-negative
floats are in the floats' order, and those of negative ones below them all: a row with any non-negative product has the same maximum either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

INFINITY_BITS = 0x7F800000
CHAINS = 4
"""Sequences of maxima side by side: each instruction waits for the one before it."""


@cute.jit
def row_maxima(rows: Sequence[Sequence[Float32]]) -> tuple[Float32, ...]:
    """Maxima over accumulators [64, N], to be called by whole warps: a row's columns lie with four lanes, which all get its maximum.

    `rows` holds the products in each of this thread's rows. They are read only: writing accumulators while another product runs makes the compiler
    wait for it. NaN is ignored; a row of nothing else has -inf.
    """
    bits = bits_row_maxima(rows)
    maxima = cute.make_rmem_tensor(len(rows), Float32)
    is_wrong = cutlass.Boolean(False)
    for r in cutlass.range_constexpr(len(rows)):
        maxima[r] = bits[r].bitcast(Float32)
        # Nothing but negative products, of which that is the least, or a NaN.
        is_wrong = is_wrong or Uint32(bits[r]) > INFINITY_BITS
    if cute.arch.vote_any_sync(is_wrong):
        floats = float_row_maxima(rows)
        for r in cutlass.range_constexpr(len(rows)):
            maxima[r] = floats[r]
    return tuple(maxima[r] for r in range(len(rows)))


def bits_row_maxima(rows: Sequence[Sequence[Float32]]) -> tuple[Int32, ...]:
    """The maxima of the products' bits: a negative one is not that of the products, nor is one beyond infinity's."""
    return tuple(over_lanes([over_columns([product.bitcast(Int32) for product in products], cutlass.max) for products in rows], cutlass.max))


def float_row_maxima(rows: Sequence[Sequence[Float32]]) -> tuple[Float32, ...]:
    """The same for rows that are often without a non-negative product, as those are that a mask leaves little of."""
    return tuple(over_lanes([over_columns([Float32(-Float32.inf), *products], cute.arch.fmax) for products in rows], cute.arch.fmax))


def over_columns(values: Sequence[Any], maximum: Any) -> Any:
    chains = list(values[:CHAINS])
    for i, value in enumerate(values[CHAINS:]):
        chains[i % CHAINS] = maximum(chains[i % CHAINS], value)
    result = chains[0]
    for chain in chains[1:]:
        result = maximum(result, chain)
    return result


def over_lanes(values: Sequence[Any], maximum: Any) -> Sequence[Any]:
    """The maxima over four lanes: one step for all values, and then the other, which waits for the first."""
    for offset in (2, 1):
        others = [cute.arch.shuffle_sync_bfly(value, offset) for value in values]
        values = [maximum(value, other) for value, other in zip(values, others, strict=True)]
    return values
