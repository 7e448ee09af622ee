"""Networks sort and merge, and so do the lists that a lane keeps."""

import random
from collections.abc import Callable, Iterator

import pytest
from needed import need

need("nvidia-cutlass-dsl", "apache-tvm-ffi")

from simulator import simulated  # noqa: F401, before cutlass

from m3attn.dsl_kernels import sorting_networks
from m3attn.dsl_kernels.sorting_networks import bitonic_merge, largest_of, merge_lists, sorted_merge, sorting_network


def sorted_halves(n: int) -> list[list[int]]:
    return [[int(i < a) for i in range(n // 2)] + [int(i < b) for i in range(n // 2)] for a in range(n // 2 + 1) for b in range(n // 2 + 1)]


def hills(n: int) -> list[list[int]]:
    return [[int(a <= i < b) for i in range(n)] for a in range(n + 1) for b in range(a, n + 1)]


def draws(n: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randint(0, 1) for _ in range(n)] for _ in range(300)]


@pytest.mark.parametrize("n", [2, 8, 16, 32, 64])
@pytest.mark.parametrize(("network", "inputs"), [(sorting_network, draws), (bitonic_merge, hills), (sorted_merge, sorted_halves)])
def test_networks_sort(network: Callable[[int], Iterator[tuple[int, int]]], inputs: Callable[[int], list[list[int]]], n: int) -> None:
    """By the zero-one principle: over a sample for sorting, over all inputs for merging."""
    for values in inputs(n):
        expected = sorted(values, reverse=True)
        for i, j in network(n):
            values[i], values[j] = max(values[i], values[j]), min(values[i], values[j])
        assert values == expected


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> random.Random:
    """Python's numbers in the place of registers."""
    monkeypatch.setattr(sorting_networks.cute.arch, "fmax", max)
    monkeypatch.setattr(sorting_networks.cute.arch, "fmin", min)
    return random.Random(0)


def padded(values: list[int], keep: int) -> list[int | None]:
    best = sorted(values, reverse=True)[:keep]
    return best + [None] * (keep - len(best))


@pytest.mark.parametrize("keep", [4, 8, 16, 32, 64])
@pytest.mark.parametrize("number", [1, 2, 3, 5, 8, 12, 20, 24, 32])
def test_the_largest_of_a_list(numbers: random.Random, number: int, keep: int) -> None:
    for most in (3, 1000):
        values = [numbers.randint(0, most) for _ in range(number)]
        found = largest_of(list(values), keep)
        assert found == padded(values, keep)[: len(found)] and (len(found) == keep or len(found) >= number)


@pytest.mark.parametrize(("lists", "size", "keep"), [(2, 4, 8), (4, 4, 8), (3, 8, 8), (5, 2, 16), (4, 16, 16), (1, 8, 8), (4, 8, 32)])
def test_lists_merge(numbers: random.Random, lists: int, size: int, keep: int) -> None:
    """Lists that end in None, values that are known to be least, too."""
    for _ in range(50):
        parts = [[numbers.randint(0, 20) for _ in range(numbers.randint(0, size))] for _ in range(lists)]
        found = merge_lists([padded(part, size) for part in parts], keep)
        assert found == padded([value for part in parts for value in part], keep)[: len(found)]
        assert len(found) == min(keep, size * (1 << (lists - 1).bit_length()))
