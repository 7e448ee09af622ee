"""Sorting by pairs: networks, and what one lane does to lists of its values with them. No step depends on the values.

Lists are descending. None in one is a value that is known to be less than all others, so that the compiler never sees a pair with it.
"""

from __future__ import annotations

from collections.abc import Iterator

import cutlass.cute as cute
from cutlass import Float32

NEGATIVE_INFINITY = float("-inf")


def sorting_network(n: int) -> Iterator[tuple[int, int]]:
    """Batcher's odd-even merge sort of n = 2^k elements: pairs (i, j), i < j, to be put in order one after another."""
    p = 1
    while p < n:
        k = p
        while k >= 1:
            for j in range(k % p, n - k, 2 * k):
                for i in range(min(k, n - j - k)):
                    if (i + j) // (2 * p) == (i + j + k) // (2 * p):
                        yield i + j, i + j + k
            k //= 2
        p *= 2


def bitonic_merge(n: int) -> Iterator[tuple[int, int]]:
    """The same for a sequence of n = 2^k elements that rises and then falls, or the other way round."""
    distance = n // 2
    while distance:
        for i in range(n):
            if not i & distance:
                yield i, i + distance
        distance //= 2


def sorted_merge(n: int) -> Iterator[tuple[int, int]]:
    """The same for two sorted halves, the last steps of `sorting_network`: fewer pairs than `bitonic_merge` has."""
    half = n // 2
    k = half
    while k >= 1:
        for j in range(k % half, n - k, 2 * k):
            yield from ((i + j, i + j + k) for i in range(min(k, n - j - k)))
        k //= 2


def put_in_order(values: list[Float32 | None], pairs: Iterator[tuple[int, int]]) -> list[Float32 | None]:
    """Descending."""
    for i, j in pairs:
        if values[i] is None:
            values[i], values[j] = values[j], None
        elif values[j] is not None:
            values[i], values[j] = cute.arch.fmax(values[i], values[j]), cute.arch.fmin(values[i], values[j])
    return values


def larger(a: Float32 | None, b: Float32 | None) -> Float32 | None:
    if a is None or b is None:
        return b if a is None else a
    return cute.arch.fmax(a, b)


def largest_of(values: list[Float32], keep: int) -> list[Float32 | None]:
    """The `keep` largest, a power of two of them; fewer where there are fewer."""
    size = min(keep, 1 << (len(values) - 1).bit_length())
    lists = [values[i : i + size] for i in range(0, len(values), size)]
    return merge_lists([put_in_order(part + [None] * (size - len(part)), sorting_network(size)) for part in lists], keep)


def merge_lists(lists: list[list[Float32 | None]], keep: int) -> list[Float32 | None]:
    """The `keep` largest, a power of two of them, in lists of one length, which is a power of two up to `keep`; fewer where there are fewer."""
    while len(lists) > 1:
        size = len(lists[0])
        pairs, odd = zip(lists[::2], lists[1::2], strict=False), lists[len(lists) // 2 * 2 :]
        if size < keep:
            lists = [put_in_order(a + b, sorted_merge(2 * size)) for a, b in pairs] + [a + [None] * size for a in odd]
        else:
            # The larger of the i-th of one and the i-th from the end of the other: the largest of both, falling and then rising.
            lists = [put_in_order([larger(a[i], b[size - 1 - i]) for i in range(size)], bitonic_merge(size)) for a, b in pairs] + odd
    return lists[0]


def exist(values: list[Float32 | None]) -> list[Float32]:
    """-inf for None."""
    return [Float32(NEGATIVE_INFINITY) if value is None else value for value in values]
