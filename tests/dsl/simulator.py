"""CuTe DSL kernels on CPU tensors: the interpreter of tests/ptxsim as the device of m3attn's own launchers.

Import this module before cutlass, in a process that uses no GPU. What is compiled is kept in a folder of the virtual environment with its PTX, which
is what the interpreter runs, so that processes and runs share it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import ptxsim
from ptxsim import programs

from m3attn import problem
from m3attn.dsl_kernels.common.kernels import CuteKernel

ORDERS = ("eager", "lazy", "random")
FOLDER = Path(sys.prefix) / "cute-cache"


@dataclass(frozen=True)
class Artifacts:
    """What the compiler made of a variant."""

    ptx: str
    cubin: bytes
    ir: str

    @classmethod
    def path(cls, kernel: CuteKernel, variant: Any, arch: str, suffix: str) -> Path:
        return kernel.path(variant, arch).with_suffix(suffix)

    @classmethod
    def read(cls, kernel: CuteKernel, variant: Any, arch: str) -> Artifacts:
        ptx, cubin, ir = (cls.path(kernel, variant, arch, suffix) for suffix in (".ptx", ".cubin", ".mlir"))
        return cls(ptx.read_text(), cubin.read_bytes(), ir.read_text())

    def write(self, kernel: CuteKernel, variant: Any, arch: str) -> None:
        for suffix, content in ((".ptx", self.ptx.encode()), (".cubin", self.cubin), (".mlir", self.ir.encode())):
            path = self.path(kernel, variant, arch, suffix)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


_compile, _for_arch = CuteKernel.compile, CuteKernel.for_arch
_remembered: set[Path] = set()


def _compile_and_keep(self: CuteKernel, variant: Any, arch: str) -> Any:
    compiled = _compile(self, variant, arch)
    Artifacts(compiled.__ptx__, compiled.__cubin__, compiled.__mlir__).write(self, variant, arch)
    return compiled


def _for_arch_with_ptx(self: CuteKernel, variant: Any, arch: str) -> Any:
    function = _for_arch(self, variant, arch)
    path = self.path(variant, arch)
    if path not in _remembered:
        found = Artifacts.read(self, variant, arch)
        programs.remember(found.ptx, found.cubin)
        _remembered.add(path)
    return function


@contextmanager
def shared_cache() -> Iterator[None]:
    """Compiled kernels come from `FOLDER` or are kept there, with their artifacts."""
    with (
        mock.patch.dict(os.environ, M3ATTN_CACHE_DIR=str(FOLDER)),
        mock.patch.object(CuteKernel, "compile", _compile_and_keep),
        mock.patch.object(CuteKernel, "for_arch", _for_arch_with_ptx),
    ):
        yield


class Replaced:
    """An `edit` for `simulated`: every match of a pattern by something else, counted in each text."""

    def __init__(self, pattern: str, by: str) -> None:
        self.pattern, self.by = pattern, by
        self.counts: list[int] = []

    def __call__(self, ptx: str) -> str:
        ptx, count = re.subn(self.pattern, self.by, ptx)
        self.counts.append(count)
        return ptx

    @property
    def found_all(self) -> bool:
        """Whether it was asked for, and found something in each text."""
        return bool(self.counts) and all(self.counts)


@contextmanager
def simulated(
    order: str = "eager",
    *,
    arch: str = "sm_90a",
    seed: int = 0,
    edit: Callable[[str], str] | None = None,
    capture: Path | None = None,
    tag: str = "",
) -> Iterator[Any]:
    """Inside the block every device counts as `arch`, kernels are compiled for it, and launches are interpreted in `order`; hazards are errors.

    `capture`: launches are saved in this folder, in files whose names start with `tag`.
    """
    with (
        mock.patch.object(problem, "compile_target", arch.rstrip("a")),
        shared_cache(),
        ptxsim.device(arch, order=order, seed=seed, hazards="error", edit=edit, capture=str(capture) if capture else None, tag=tag) as device,
    ):
        yield device


def artifacts(kernel: CuteKernel, variant: Any, arch: str) -> Artifacts:
    """What the compiler makes of a variant for `arch`."""
    with simulated(arch=f"{arch}a"):  # its host code takes CPU tensors, like all in the folder
        kernel.for_arch(variant, arch)
        return Artifacts.read(kernel, variant, arch)
