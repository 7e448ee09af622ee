"""Where tests run: on the GPU if there is one, else on the CPU with Triton's interpreter, which must be on before any kernel is imported."""

import os

import torch

# Tests run in as many processes as there are cores.
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list) -> None:
    """The compile checks first: each takes a minute, and a worker that meets them last keeps the others waiting."""
    items.sort(key=lambda item: item.path.name != "test_compile.py")
