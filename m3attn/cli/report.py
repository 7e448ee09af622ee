"""`m3attn report OUT.html`: a run as one page."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

NAME = "report"
HELP = """Write one self-contained HTML page from what `m3attn demo --json` or `m3attn bench --json` wrote.

It shows time and error of each stage, the roofline, and, of a demo, the blocks that were selected. Without files it runs the demo first."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="OUT.html")
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN.json", help="files of demo --json and bench --json, or of results/")


def run(options: argparse.Namespace) -> int:
    from m3attn.cli.errors import UserError
    from m3attn.report import page, runs

    if options.out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"OUT.html: expected an .html file, got {options.out.name}")
    if not options.out.parent.is_dir():
        raise UserError(f"OUT.html: there is no folder {options.out.parent}")
    try:
        found = [run for path in options.runs for run in runs.read(path)] if options.runs else demo_runs()
    except ValueError as error:
        raise UserError(str(error)) from error
    options.out.write_text(page.render(found), encoding="utf-8")
    print(f"wrote {options.out}")
    return 0


def demo_runs() -> list:
    """The demo with its own choices, run now."""
    from m3attn.demo.run import Options
    from m3attn.demo.run import run as run_demo
    from m3attn.report import runs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        run_demo(Options(json=path))
        return runs.read(path)
