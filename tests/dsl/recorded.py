"""Which variants of which kernels a call takes, without compiling or running any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from simulator import simulated

from m3attn.dsl_kernels.common.kernels import CuteKernel


@contextmanager
def recorded(arch: str = "sm_90a") -> Iterator[list[tuple[CuteKernel, Any]]]:
    """Inside the block every device counts as `arch`, and launches on CPU tensors do nothing; yields the list of (kernel, variant) asked for."""
    asked: list[tuple[CuteKernel, Any]] = []

    def get(kernel: CuteKernel, variant: Any, device: object) -> Any:
        asked.append((kernel, variant))
        return lambda *arguments: None

    with simulated(arch=arch), mock.patch.object(CuteKernel, "get", get):
        yield asked
