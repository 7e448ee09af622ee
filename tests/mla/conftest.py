"""Every test here runs with poisoned fresh memory."""

import pytest

from m3attn.testing.poison import poisoned_empty


@pytest.fixture(autouse=True)
def poison():
    with poisoned_empty():
        yield
