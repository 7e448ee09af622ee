"""Tests of CuTe DSL kernels: they compile and run without a GPU, in the interpreter, which takes the place of the DSL's runtime in its process."""

import sys
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "ptxsim" / "tests")]

EVERY = 4
"""Of how many parametrised cases of a kernel's own tests `make test` runs one; `make check-kernels` and `make test-all` run the others."""
KERNEL_TESTS = ("test_hostile_values", "test_index_", "test_sparse_")


@pytest.hookimpl(tryfirst=True)  # before cases are left out by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name.startswith(KERNEL_TESTS):
            function = f"{item.path.name}::{getattr(item, 'originalname', item.name)}"
            if seen[function] % EVERY:
                item.add_marker(pytest.mark.slow)
            seen[function] += 1
