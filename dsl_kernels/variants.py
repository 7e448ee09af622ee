"""The variants of the CuTe DSL kernels by name: `m3attn warmup` compiles them beforehand, and the tests look at what comes out.

They cover every value of every option of every kernel, and MiniMax-M3's own combinations. What is called with another combination is compiled at its
first use. At most 40 an architecture, so that all of them compile in minutes.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from m3attn.dsl_kernels.common.kernels import CuteKernel
from m3attn.registry import BrokenImplementation

SM90: dict[str, tuple[CuteKernel, Any]] = {}

VARIANTS = {"sm_90": SM90}


@dataclass(frozen=True)
class Done:
    """What became of one variant."""

    name: str
    seconds: float
    was_there: bool
    error: str | None

    def __str__(self) -> str:
        if self.error is not None:
            return f"{self.name}: {self.error}"
        return f"{self.name}: {'was there' if self.was_there else f'compiled in {self.seconds:.1f} s'}"


def names_for(arch: str) -> list[str]:
    """The variants for `sm_90`, …; none for an architecture without kernels."""
    return list(VARIANTS.get(arch, {}))


def compile_variant(name: str, arch: str) -> Done:
    """Have one variant in the cache's folder."""
    kernel, variant = VARIANTS[arch][name]
    was_there, start, error = kernel.path(variant, arch).exists(), time.perf_counter(), None
    try:
        kernel.for_arch(variant, arch)
    except BrokenImplementation as failure:
        error = str(failure)
    return Done(name, time.perf_counter() - start, was_there, error)


def compile_variants(names: Sequence[str], arch: str, processes: int) -> Iterator[Done]:
    """Have variants in the cache's folder, each reported when it is there."""
    if processes == 1:
        yield from (compile_variant(name, arch) for name in names)
        return
    # A process forked from one that has used CUDA or a compiler's threads is not to be trusted.
    with ProcessPoolExecutor(min(processes, len(names)), multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(compile_variant, name, arch) for name in names]):
            yield future.result()
