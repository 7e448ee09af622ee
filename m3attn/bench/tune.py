"""Launch settings on trial: every candidate that a stage's kernel files list, checked and timed like an implementation of its own.

A kernel file takes part by listing settings in `CANDIDATES` (a list, or a list by phase) or `<PHASE>_CANDIDATES`, and by obeying its module
variable `settings_override`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

import m3attn
from m3attn.bench.report import aligned, us
from m3attn.bench.timing import Call

Row = dict[str, Any]
CURRENT = "as shipped"


@dataclass(frozen=True, slots=True)
class Variant:
    """One candidate of one kernel file; module None: the settings as shipped."""

    module: ModuleType | None
    settings: Any = None

    @property
    def label(self) -> str:
        return CURRENT if self.module is None else f"{self.module.__name__.rpartition('.')[2]} {self.settings}"

    @contextmanager
    def in_force(self) -> Iterator[None]:
        if self.module is None:
            yield
            return
        # A kernel file's own variable, which no type declares.
        kernels: Any = self.module
        previous = kernels.settings_override
        kernels.settings_override = self.settings
        try:
            yield
        finally:
            kernels.settings_override = previous

    def apply(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call` with the candidate forced."""

        def forced(*arguments: Any) -> Any:
            with self.in_force():
                return call(*arguments)

        return forced


def candidates(module: ModuleType, phase: str) -> list[Any]:
    """What a kernel file lists for a phase; verify takes decode's where it has no list of its own."""
    phases = (phase, "decode") if phase == "verify" else (phase,)
    by_phase = getattr(module, "CANDIDATES", {})
    if isinstance(by_phase, Sequence):
        return list(by_phase)
    for name in phases:
        found = by_phase.get(name) or getattr(module, f"{name.upper()}_CANDIDATES", None)
        if found:
            return list(found)
    return []


def variants(stages: Sequence[str], key: str, phase: str) -> list[Variant]:
    """The settings as shipped, then every candidate of the kernel files behind implementation `key` of `stages`."""
    sources: list[str] = []
    for stage in stages:
        for implementation in m3attn.implementations(stage):
            if implementation.key == key and key != "reference":
                implementation.load()
                sources += [name for name in implementation.sources if name not in sources]
    found = [Variant(None)]
    for name in sources:
        module = importlib.import_module(name)
        if hasattr(module, "settings_override"):
            found += [Variant(module, settings) for settings in candidates(module, phase)]
    return found


def precompile(calls: Sequence[Call], device: torch.device) -> None:
    """Compile the kernels of all calls side by side, into Triton's cache; what does not compile fails again, with its reason, when timed."""
    from triton import AsyncCompileMode

    from m3attn.problem import arch_of
    from m3attn.triton_kernels.launch import compile_only

    with ThreadPoolExecutor(os.cpu_count()) as pool, compile_only(arch_of(device)), AsyncCompileMode(pool, ignore_errors=True):
        for call in calls:
            try:
                call()
            except Exception:  # a candidate that its launcher refuses is reported when it is timed
                continue


def table(rows: Sequence[Row]) -> str:
    """The shipped settings and the best five candidates of each kernel file, for every shape."""
    body = []
    places: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        places.setdefault(tuple(str(row[name]) for name in ("stage", "heads", "shape", "mode", "selection", "implementation")), []).append(row)
    for (stage, heads, shape, mode, selection, key), here in places.items():
        shipped = next((row["median_us"] for row in here if row["settings"] == CURRENT), None)
        files = {row["settings"].partition(" ")[0] for row in here if row["settings"] != CURRENT}
        best = [row for row in here if row["settings"] == CURRENT]
        for file in sorted(files):
            mine = [row for row in here if row["settings"].startswith(f"{file} ")]
            best += sorted(mine, key=lambda row: row["median_us"])[:5]
        for row in best:
            gain = "" if shipped is None else f"{row['median_us'] / shipped:.3f}x"
            body.append((stage, heads, shape, mode, selection.replace("None", ""), key, us(row["median_us"]), gain, row["settings"]))
    return aligned(("stage", "heads", "shape", "mode", "sel", "implementation", "time", "of shipped", "settings"), body)
