"""What a page shows of a run, whether the demo or the bench wrote it."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m3attn.bench.report import parity_text, us
from m3attn.bench.results import KEY

DEMO = "m3attn demo 1"


@dataclass(frozen=True, slots=True)
class Roof:
    """What the device can do at most: bytes through memory, and peaks by name in TFLOP/s."""

    copy_tbps: float
    peaks: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement under the roof: operations a byte, and TFLOP/s reached; `series` decides the colour."""

    name: str
    series: str
    intensity: float
    tflops: float


@dataclass(frozen=True, slots=True)
class SelectionMap:
    """For each KV group the share of a row's queries that chose a block, 0 to 255, `rows` x `blocks` bytes; rows are runs of queries."""

    panels: tuple[bytes, ...]
    rows: int
    blocks: int
    tokens: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Run:
    """One run as a page shows it. `table` has a header and, for each line, its cells and a length of 0 to 1 for its bar."""

    title: str
    facts: tuple[tuple[str, str], ...]
    header: tuple[str, ...]
    table: tuple[tuple[tuple[str, ...], float], ...]
    notes: tuple[str, ...]
    roof: Roof | None
    points: tuple[Point, ...]
    selection: SelectionMap | None = None
    passages: tuple[str, ...] = ()


def read(path: Path) -> list[Run]:
    """The runs of a file: one of a demo, or one for each stage and GPU of a bench.

    Raises:
        ValueError: no such file, or another kind of file.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: expected JSON, it cannot be read: {error}") from error
    if isinstance(content, dict) and content.get("kind") == DEMO:
        return [of_demo(content)]
    if isinstance(content, list) and content and all(isinstance(row, dict) and all(name in row for name in KEY) for row in content):
        places = list(dict.fromkeys((row["gpu"], row["stage"]) for row in content))
        return [of_bench([row for row in content if (row["gpu"], row["stage"]) == place]) for place in places]
    raise ValueError(f"{path}: expected what `m3attn demo --json` or `m3attn bench --json` writes")


def of_demo(content: dict[str, Any]) -> Run:
    """From what `m3attn.demo.record.summary` gives."""
    stages = content["stages"]
    longest = max((stage["us"] for stage in stages), default=0.0)
    lines = []
    for stage in stages:
        error = "" if stage["error"] is None else f"{stage['error']:.1e}"
        cells = (stage["stage"], stage["phase"], stage["implementation"], str(stage["calls"]), us(stage["us"]), error, stage["ids"])
        lines.append((cells, stage["us"] / longest if longest else 0.0))
    measured = [stage for stage in stages if stage["flops"] and stage["bytes"] and stage["us"]]
    points = tuple(
        Point(f"{s['stage']} ({s['phase']})", s["implementation"], s["flops"] / s["bytes"], s["flops"] / (s["us"] * s["calls"]) / 1e6)
        for s in measured
    )
    roof = content["roof"]
    found = content["selection"]
    selection = None
    if found is not None:
        panels = tuple(base64.b64decode(panel) for panel in found["panels"])
        selection = SelectionMap(panels, found["rows"], found["blocks"], found["tokens"], found["block_size"])
    return Run(
        title=f"Demo on {content['device']}",
        facts=tuple((name, str(value)) for name, value in content["facts"].items()),
        header=("stage", "phase", "implementation", "calls", "time a call", "error", "ids equal"),
        table=tuple(lines),
        notes=(
            "Time: wall clock of a call, launch included. Error: root mean square against the fp64 reference, relative, the worst call. "
            "Ids: rows equal to the reference's, up to near ties.",
            *content["notes"],
        ),
        roof=None if roof is None else Roof(roof["copy_tbps"], tuple((name, float(value)) for name, value in roof["peaks"])),
        points=points,
        selection=selection,
        passages=tuple(content["passages"]),
    )


def of_bench(rows: list[dict[str, Any]]) -> Run:
    """From the bench's rows of one stage on one GPU."""
    first = rows[0]
    lines, points = [], []
    for row in sorted(rows, key=lambda row: tuple(str(row[name]) for name in ("heads", "shape", "mode", "selection", "implementation"))):
        share = row["share"] or 0.0
        place = (row["heads"], row["shape"], row["mode"], row["selection"] or "")
        cells = (*place, row["implementation"], us(row["median_us"]), us(row["floor_us"]), f"{100 * share:.0f}%", parity_text(row))
        lines.append((cells, min(1.0, share)))
        if row["tflops"] and row["tbps"]:
            name = " ".join(part for part in (*place, row["implementation"]) if part)
            points.append(Point(name, row["implementation"], row["tflops"] / row["tbps"], row["tflops"]))
    ceilings = first["ceilings"]
    peaks = [("bf16 product", ceilings["bf16_tflops"])] + ([("fp8 product", ceilings["fp8_tflops"])] if ceilings["fp8_tflops"] else [])
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    return Run(
        title=f"{first['stage']} on {first['gpu']}",
        facts=(("commit", first["commit"][:12]), ("versions", versions)),
        header=("heads", "shape", "mode", "selection", "implementation", "time", "floor", "share of the floor", "parity"),
        table=tuple(lines),
        notes=(
            "Time: median; prefill with a cold L2, decode and verify in a CUDA graph over data that L2 cannot hold. Floor: the larger of the time "
            "the bytes and the time the operations take at the measured ceilings. Parity: of sampled rows against the fp64 reference.",
        ),
        roof=Roof(ceilings["copy_tbps"], tuple(peaks)),
        points=tuple(points),
    )
