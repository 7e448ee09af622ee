"""Every fault test runs with poisoned fresh memory; those that fill much of a GPU run one at a time."""

import fcntl
import tempfile
from pathlib import Path

import pytest
import torch

from m3attn.testing.poison import poisoned_empty


@pytest.fixture(autouse=True)
def poison():
    with poisoned_empty():
        yield


@pytest.fixture
def large_memory():
    """Held by one test at a time among all processes; gives the memory back."""
    with (Path(tempfile.gettempdir()) / "m3attn-large-memory.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
