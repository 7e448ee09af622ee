"""The page allocator: nothing leaks, nothing is freed twice, and what raises changes nothing."""

import random
from collections import Counter

import pytest

from m3attn import OutOfPages, PageAllocator


def test_alloc_gives_each_page_once_and_all_of_them() -> None:
    allocator = PageAllocator(5)
    pages = allocator.alloc(2) + allocator.alloc(3)
    assert sorted(pages) == list(range(5))
    assert (allocator.num_free, allocator.num_used) == (0, 5)
    assert allocator.alloc(0) == []


def test_out_of_pages_names_both_numbers_and_takes_nothing() -> None:
    allocator = PageAllocator(4)
    allocator.alloc(1)
    with pytest.raises(OutOfPages, match="needed 5 pages, 3 of 4 are free") as error:
        allocator.alloc(5)
    assert (error.value.needed, error.value.free, allocator.num_free) == (5, 3, 3)


def test_forked_pages_are_free_when_the_last_owner_goes() -> None:
    allocator = PageAllocator(3)
    pages = allocator.alloc(2)
    assert allocator.fork(pages) == pages
    assert allocator.free(pages) == []
    assert allocator.num_free == 1
    assert allocator.free(pages) == pages
    assert allocator.num_free == 3


@pytest.mark.parametrize("pages", [[0, 0], [1, 0, 2], [0, 1, 1]])
def test_double_free_is_refused_whole(pages: list[int]) -> None:
    allocator = PageAllocator(3)
    allocator.alloc(2)
    with pytest.raises(ValueError, match="double free"):
        allocator.free(pages)
    assert [allocator.references(page) for page in range(3)] == [1, 1, 0]


@pytest.mark.parametrize(("pages", "error"), [([0, 3], "page 3, which is free"), ([4], r"pages\[0\]"), ([-1], r"pages\[0\]")])
def test_fork_of_a_page_that_nobody_has_is_refused_whole(pages: list[int], error: str) -> None:
    allocator = PageAllocator(4)
    allocator.alloc(1)
    with pytest.raises(ValueError, match=error):
        allocator.fork(pages)
    assert allocator.references(0) == 1


def test_move_hands_references_over() -> None:
    allocator = PageAllocator(4)
    allocator.fork(allocator.alloc(2)[:1])  # page 0 twice, page 1 once
    allocator.move([0, 1], [3, 0])
    assert [allocator.references(page) for page in range(4)] == [1, 0, 0, 2]
    assert sorted(allocator.alloc(2)) == [1, 2]


@pytest.mark.parametrize(
    ("source", "target", "error"),
    [
        ([0], [1], "target.0.: expected a free page or one of source, got page 1"),
        ([0, 0], [2, 3], "source: expected each page once"),
        ([0, 1], [2, 2], "target: expected each page once"),
        ([2], [3], "source.0.: expected a page in use"),
        ([0, 1], [2], "target: expected 2 pages"),
        ([0], [4], "target.0."),
    ],
)
def test_move_that_does_not_fit_changes_nothing(source: list[int], target: list[int], error: str) -> None:
    allocator = PageAllocator(4)
    allocator.alloc(2)
    with pytest.raises(ValueError, match=error):
        allocator.move(source, target)
    assert [allocator.references(page) for page in range(4)] == [1, 1, 0, 0]


@pytest.mark.parametrize("seed", range(20))
def test_random_operations_agree_with_a_list_of_owners(seed: int) -> None:
    """Every page has as many references as owners, and free and used pages add up, after every step."""
    rng, allocator = random.Random(seed), PageAllocator(24)
    owners: list[list[int]] = []
    for _ in range(400):
        kind = rng.choice(["alloc", "alloc", "fork", "free", "free", "move", "double free"])
        if kind == "alloc":
            wanted = rng.randint(0, 8)
            try:
                owners.append(allocator.alloc(wanted))
            except OutOfPages as error:
                assert error.free == allocator.num_free < wanted == error.needed
        elif kind == "fork" and owners:
            held = rng.choice(owners)
            owners.append(allocator.fork(held[: rng.randint(0, len(held))]))
        elif kind == "free" and owners:
            allocator.free(owners.pop(rng.randrange(len(owners))))
        elif kind == "move":
            used = [page for page in range(24) if allocator.references(page)]
            source = rng.sample(used, rng.randint(0, len(used)))
            candidates = [page for page in range(24) if not allocator.references(page)] + source
            target = rng.sample(candidates, len(source))
            allocator.move(source, target)
            places = dict(zip(source, target, strict=True))
            owners = [[places.get(page, page) for page in held] for held in owners]
        elif kind == "double free" and allocator.num_free:
            page = next(page for page in range(24) if not allocator.references(page))
            with pytest.raises(ValueError, match="double free"):
                allocator.free([page])
        references = Counter(page for held in owners for page in held)
        assert [allocator.references(page) for page in range(24)] == [references[page] for page in range(24)]
        assert allocator.num_used == len(references) == 24 - allocator.num_free
    for held in owners:
        allocator.free(held)
    assert sorted(allocator.alloc(24)) == list(range(24))
