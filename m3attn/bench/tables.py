"""Tables of README and docs, generated from the result files: `python -m m3attn.bench.tables [--check] [FILE …]`.

In a Markdown file, what stands between `<!-- bench: STAGE … -->` and `<!-- end bench -->` is replaced by the tables of these stages, one a GPU;
`<!-- bench: executed -->` marks the table of what ran where, `<!-- bench: headline -->` that of a few shapes of M3's own.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from m3attn.bench import results
from m3attn.bench.peers import VLLM_RELEASE
from m3attn.bench.report import us
from m3attn.bench.results import Row
from m3attn.bench.stages import STAGES

REGION = re.compile(r"(<!-- bench:(?P<stages>[^>]*?)-->\n).*?(<!-- end bench -->)", re.DOTALL)
PLACE = ("heads", "shape", "mode", "selection")
HEADLINE = {"index_topk": (None,), "sparse_attention": ("N", "R")}
"""The stages of that table and the selections that they are shown with."""
PACKAGES = {"flash_attn_4": "flash-attn-4"}
"""Implementations that are a package of their own."""
SHAPES = {"P1": "prefill, 8,192 tokens", "P3": "8,192 more behind 122,880", "B64xL131072": "decode, 64 requests of 131,072"}


def markdown(rows: Sequence[Row]) -> str:
    """The rows of one result file: implementations side by side, each time with its ratio to the measured floor."""
    first = rows[0]
    names = sorted({row["implementation"] for row in rows}, key=lambda name: (any(r.get("peer") for r in rows if r["implementation"] == name), name))
    places = list(dict.fromkeys(tuple(row[part] for part in PLACE) for row in sorted(rows, key=_order)))
    by_place = {(*(row[part] for part in PLACE), row["implementation"]): row for row in rows}
    shown = [i for i in range(len(PLACE)) if any(place[i] is not None for place in places)]
    lines = [
        f"`{first['stage']}` on {first['gpu']}, commit {first['commit'][:12]}, {versions(*rows)}; in brackets the share of the floor.",
        "",
        _line([*(PLACE[i] for i in shown), "floor", *names]),
        _line(["---"] * len(shown) + ["---:"] * (1 + len(names))),
    ]
    for place in places:
        here = {name: by_place.get((*place, name)) for name in names}
        floor = next(row["floor_us"] for row in here.values() if row is not None)
        cells = ["" if row is None else f"{us(row['median_us'])} ({100 * row['share']:.0f}%)" for row in here.values()]
        lines.append(_line([*("" if place[i] is None else place[i] for i in shown), us(floor), *cells]))
    return "\n".join(lines)


def _order(row: Row) -> tuple[object, ...]:
    """Heads from many to few, then shapes, modes and selections as they are named."""
    heads = row["heads"].partition("/")[0]
    return (-int(heads) if heads.isdigit() else 0, row["shape"], row["mode"], row["selection"] or "")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def versions(*rows: Row) -> str:
    """Of one machine's rows: the versions of what all of them may use, and of a package that one of them is by."""
    named = {"torch", "triton", "nvidia-cutlass-dsl"} | {PACKAGES[row["implementation"]] for row in rows if row["implementation"] in PACKAGES}
    return ", ".join(f"{name} {version}" for name, version in rows[0]["versions"].items() if name in named)


def executed(folder: Path) -> str:
    """Which versions ran which implementations on which GPU: no more than the result files say."""
    runs: dict[tuple[str, str, str], list[str]] = {}
    for stage in STAGES:
        for path in sorted(folder.glob(f"*-{stage}.json")):
            for row in results.read(path):
                if not row.get("peer"):
                    runs.setdefault((row["gpu"], versions(row), row["implementation"]), []).append(f"{stage} ({row['mode']})")
    if not runs:
        return "No GPU run is recorded yet."
    lines = [_line(["GPU", "versions", "implementation", "stages (modes)"]), _line(["---"] * 4)]
    return "\n".join([*lines, *(_line([*run, ", ".join(dict.fromkeys(stages))]) for run, stages in sorted(runs.items()))])


def headline(folder: Path) -> str:
    """For a few shapes of M3's geometry in bf16 and fp8 the fastest implementation, its share of the floor, and the fastest peer in its own time."""
    parts = []
    for path in sorted(folder.glob(f"*-{next(iter(HEADLINE))}.json")):
        gpu = path.name.removesuffix(f"-{next(iter(HEADLINE))}.json")
        files = [folder / f"{gpu}-{stage}.json" for stage in HEADLINE]
        rows = [row for file in files if file.exists() for row in results.read(file)]
        kept = [r for r in rows if r["heads"] == "64/4" and r["mode"] in ("bf16", "fp8")]
        places = [(stage, shape, mode, kind) for stage, kinds in HEADLINE.items() for shape in SHAPES for kind in kinds for mode in ("bf16", "fp8")]
        lines = [headline_line(kept, *place) for place in places]
        if any(lines):
            commits = ", ".join(dict.fromkeys(row["commit"][:12] for row in kept))
            head = [
                _line(["stage", "step", "mode", "selection", "time", "implementation", "of the floor", f"vLLM {VLLM_RELEASE}"]),
                _line(["---"] * 4 + ["---:", "---", "---:", "---:"]),
            ]
            parts.append(
                "\n".join([f"{rows[0]['gpu']}, 64 query and 4 KV heads, commit {commits}, {versions(rows[0])}.", "", *head, *filter(None, lines)])
            )
    return "\n\n".join(parts) or "No measurement is recorded yet."


def headline_line(rows: Sequence[Row], stage: str, shape: str, mode: str, selection: str | None) -> str:
    """A line of `headline`; empty where nothing was measured."""
    place = (stage, shape, mode, selection)
    here = sorted((r for r in rows if (r["stage"], r["shape"], r["mode"], r["selection"]) == place), key=lambda row: row["median_us"])
    ours, peers = ([row for row in here if bool(row.get("peer")) == is_peer] for is_peer in (False, True))
    if not ours:
        return ""
    best = ours[0]
    peer = us(peers[0]["median_us"]) if peers else ""
    name, share = f"`{best['implementation']}`", f"{100 * best['share']:.0f}%"
    return _line([f"`{stage}`", SHAPES[shape], mode, selection or "", us(best["median_us"]), name, share, peer])


def region(stages: Sequence[str], folder: Path) -> str:
    """The tables of `stages` from every GPU's file in `folder`, or of what was executed; a line that says so where there is none.

    Raises:
        ValueError: an unknown stage.
    """
    if list(stages) == ["executed"]:
        return executed(folder)
    if list(stages) == ["headline"]:
        return headline(folder)
    parts = []
    for stage in stages:
        if stage not in STAGES:
            raise ValueError(f"bench marker: expected stages among {', '.join(STAGES)}, got {stage!r}")
        for path in sorted(folder.glob(f"*-{stage}.json")):
            rows = results.read(path)
            if rows:
                parts.append(markdown(rows))
    return "\n\n".join(parts) or f"No measurement of {', '.join(stages)} is recorded yet."


def regenerate(content: str, folder: Path) -> str:
    """A Markdown text with every region filled anew."""
    return REGION.sub(lambda found: f"{found[1]}{region(found['stages'].split(), folder)}\n{found[3]}", content)


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the files, or with --check say which ones are out of date; returns 1 if any is."""
    parser = argparse.ArgumentParser(prog="python -m m3attn.bench.tables", description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("files", nargs="*", type=Path, help="Markdown files; default: README.md and docs/*.md of the checkout")
    parser.add_argument("--results", type=Path, default=results.default_folder(), help="folder of the result files")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a table is out of date")
    options = parser.parse_args(arguments)
    root = results.checkout() or Path.cwd()
    stale = 0
    for path in options.files or [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        old = path.read_text()
        new = regenerate(old, options.results)
        if new == old:
            continue
        stale += 1
        if not options.check:
            path.write_text(new)
        print(f"{path}: {'out of date' if options.check else 'written'}", file=sys.stderr)
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
