"""CuTe DSL kernels on CPU tensors: the interpreter of tests/ptxsim as the device of m3attn's own launchers.

Import this module before cutlass, in a process that uses no GPU.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import ptxsim

os.environ["CUTE_DSL_KEEP"] = "ptx,cubin,ir"  # the last for the checks of what is compiled; read when cutlass is imported

from m3attn import problem

ORDERS = ("eager", "lazy", "random")
# An object that another process compiled comes without its PTX, which is what runs.
_cache = tempfile.mkdtemp(prefix="m3attn-simulated-")
atexit.register(shutil.rmtree, _cache, True)


@contextmanager
def simulated(order: str = "eager", *, arch: str = "sm_90a", seed: int = 0, edit: Callable[[str], str] | None = None) -> Iterator[Any]:
    """Inside the block every device counts as `arch`, kernels are compiled for it, and launches are interpreted in `order`; hazards are errors."""
    with (
        mock.patch.object(problem, "compile_target", arch.rstrip("a")),
        mock.patch.dict(os.environ, M3ATTN_CACHE_DIR=_cache),
        ptxsim.device(arch, order=order, seed=seed, hazards="error", edit=edit) as device,
    ):
        yield device
