"""Write the tables of README.md and docs/ from the files in results/, between their markers.

    python tools/results_tables.py [--check]

`--check` changes nothing and exits 1 if a page differs from what the results say.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md", ROOT / "docs" / "compatibility.md")
NOTHING = "*No measurement is recorded yet.*"
SUMMARY_HEADS, SUMMARY_MODE = "64/4", "bf16"

Row = dict[str, Any]


def read_rows() -> list[Row]:
    """Every row of every result file, peers included, in the order of the files' names."""
    return [row for path in sorted(RESULTS.glob("*.json")) if not path.name.startswith("ceilings-") for row in json.loads(path.read_text())]


def read_ceilings() -> list[Row]:
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("ceilings-*.json"))]


def markdown(header: Sequence[str], body: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def time_text(us: float) -> str:
    if us >= 1000:
        return f"{us / 1000:.2f} ms"
    return f"{us:.0f} µs" if us >= 100 else f"{us:.1f} µs"


def place(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("gpu", "stage", "heads", "shape", "mode", "selection"))


def peer_time(row: Row, rows: Iterable[Row]) -> float | None:
    """The fastest peer on the same inputs in the same run."""
    return min(
        (other["median_us"] for other in rows if other["peer"] and place(other) == place(row) and other["commit"] == row["commit"]), default=None
    )


def versions_text(row: Row) -> str:
    return ", ".join(f"{name} {version}" for name, version in row["versions"].items())


def summary(rows: list[Row]) -> str:
    """Ours and the fastest peer, at M3's own geometry."""
    body = []
    for row in rows:
        if row["peer"] or row["implementation"] == "reference" or row["heads"] not in (SUMMARY_HEADS, "-") or row["mode"] != SUMMARY_MODE:
            continue
        peer = peer_time(row, rows)
        ratio = "" if peer is None else f"{row['median_us'] / peer:.2f}"
        share = f"{100 * row['share']:.0f} %"
        what = f"{row['shape']}{' ' + row['selection'] if row['selection'] else ''}"
        cells = (
            row["gpu"],
            row["stage"],
            what,
            row["implementation"],
            time_text(row["median_us"]),
            share,
            "" if peer is None else time_text(peer),
            ratio,
        )
        body.append(cells)
    if not body:
        return NOTHING
    header = ("GPU", "stage", "shape", "implementation", "time", "of the ceiling", "fastest peer", "ours / peer")
    return f"M3's geometry ({SUMMARY_HEADS} heads), {SUMMARY_MODE}:\n\n" + markdown(header, body)


def full(rows: list[Row]) -> str:
    """Every row, one table a GPU and stage, under the commit and versions it was measured with."""
    parts = []
    for ceilings in read_ceilings():
        fp8 = "" if ceilings["fp8_tflops"] is None else f", {ceilings['fp8_tflops']:.0f} TFLOP/s in e4m3"
        parts.append(
            f"**{ceilings['gpu']}**, measured: {ceilings['copy_tbps']:.2f} TB/s copying, {ceilings['bf16_tflops']:.0f} TFLOP/s in bf16{fp8}."
        )
    for gpu, stage in dict.fromkeys((row["gpu"], row["stage"]) for row in rows):
        group = [row for row in rows if (row["gpu"], row["stage"]) == (gpu, stage)]
        body = []
        for row in group:
            peer = None if row["peer"] else peer_time(row, group)
            what = (row["heads"], row["shape"], row["mode"], row["selection"] or "", row["implementation"] + (" (peer)" if row["peer"] else ""))
            rates = (f"{row['tflops']:.0f}", f"{row['tbps']:.2f}", f"{100 * row['share']:.0f} %")
            ratio = "" if peer is None else f"{row['median_us'] / peer:.2f}"
            body.append((*what, time_text(row["median_us"]), time_text(row["floor_us"]), *rates, ratio))
        header = ("heads", "shape", "mode", "selection", "implementation", "time", "floor", "TFLOP/s", "TB/s", "of the ceiling", "ours / peer")
        runs = dict.fromkeys(f"commit {row['commit'][:12]}; {versions_text(row)}" for row in group)
        parts.append(f"### {stage} on {gpu}\n\n{markdown(header, body)}\n\n{' / '.join(runs)}")
    return "\n\n".join(parts) or NOTHING


def executed(rows: list[Row]) -> str:
    """Which versions ran what on which GPU; only what a result file says."""
    runs: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if not row["peer"]:
            runs.setdefault((row["gpu"], versions_text(row)), []).append(f"{row['stage']} ({row['implementation']})")
    if not runs:
        return "*No GPU run is recorded yet.*"
    return markdown(("GPU", "versions", "stages"), ((gpu, versions, ", ".join(dict.fromkeys(stages))) for (gpu, versions), stages in runs.items()))


TABLES: dict[str, Callable[[list[Row]], str]] = {"summary": summary, "full": full, "executed": executed}


def rewritten(text: str, rows: list[Row]) -> str:
    """The page with every marked section replaced."""

    def section(match: re.Match[str]) -> str:
        return f"<!-- results: {match['name']} -->\n{TABLES[match['name']](rows)}\n<!-- end of results -->"

    return re.sub(r"<!-- results: (?P<name>\w+) -->\n.*?<!-- end of results -->", section, text, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether a page is behind the results")
    options = parser.parse_args()
    rows, behind = read_rows(), []
    for page in PAGES:
        old = page.read_text()
        new = rewritten(old, rows)
        if new != old:
            behind.append(page.relative_to(ROOT))
            if not options.check:
                page.write_text(new)
    print("\n".join(f"{'behind the results' if options.check else 'wrote'}: {page}" for page in behind) or "every page agrees with the results")
    sys.exit(bool(behind) and options.check)


if __name__ == "__main__":
    main()
