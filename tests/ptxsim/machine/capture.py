"""Launches saved to files, so that replay.py can run the same cubin on a real device and compare memory."""

import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ..formats import u1, u8
from ..translate.ptx import Module
from .layout import Launch
from .memory import HOST_BASE, HOST_BYTES

Range = tuple[int, int]


class Capture:
    """One .npz file a launch: cubin, geometry, parameters, and every allocation that a parameter points into, before and after.

    folder: made when the first launch is saved. tag: start of the files' names. cubin_of: what a module was compiled to."""

    def __init__(self, folder: str, tag: str, cubin_of: Callable[[Module], bytes]) -> None:
        self.folder, self.tag, self.cubin_of = pathlib.Path(folder), tag, cubin_of
        self.count = 0

    def before(self, launch: Launch, module: Module, name: str, params: bytes, ranges: Iterable[Range]) -> tuple[dict[str, Any], list[Range]]:
        """What is known of the launch now, and the allocations to look at afterwards."""
        words = np.frombuffer(params[: len(params) // 8 * 8], u8)
        used: list[Range] = []
        for start, end in sorted(set(ranges)):
            if any(start <= int(word) < end for word in words) and not any(a <= start and end <= b for a, b in used):
                used.append((start, end))
        saved = dict(
            name=name,
            grid=launch.grid,
            block=launch.block,
            cluster=launch.cluster,
            smem=launch.smem,
            params=np.frombuffer(params, u1),
            offsets=np.array([offset for _, _, offset in module.kernels[name].params]),
            cubin=np.frombuffer(self.cubin_of(module), u1),
            starts=np.array([start for start, _ in used], u8),
        )
        return saved | self._memory("before", used), used

    def after(self, saved: dict[str, Any], used: list[Range]) -> None:
        """Write the file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(self.folder / f"{self.tag}{self.count:03d}.npz", **saved, **self._memory("after", used))
        self.count += 1

    @staticmethod
    def _memory(when: str, used: list[Range]) -> dict[str, np.ndarray]:
        return {f"{when}{k}": HOST_BYTES[start - HOST_BASE : end - HOST_BASE].copy() for k, (start, end) in enumerate(used)}
