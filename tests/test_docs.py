"""The code in README.md and docs runs, on a CPU; their links, variables and tables are those of the project."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted((ROOT / "docs").glob("*.md"))
SNIPPETS = [
    pytest.param(page, code, id=f"{page.name}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL), start=1)
]


@pytest.mark.parametrize(("page", "code"), SNIPPETS)
def test_snippet_runs(page: Path, code: str) -> None:
    torch.manual_seed(0)
    exec(compile(code, page.name, "exec"), {"__name__": "snippet"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_every_environment_variable_is_documented() -> None:
    documented = set(re.findall(r"M3ATTN_\w+", (ROOT / "docs" / "environment.md").read_text()))
    sources = [path for folder in ("m3attn", "triton_kernels", "dsl_kernels") for path in (ROOT / folder).rglob("*.py")]
    sources.remove(ROOT / "m3attn" / "introspect.py")  # lists them and acts on none
    used = {name for path in sources for name in re.findall(r'"(M3ATTN_[A-Z0-9_]+)"', path.read_text())}
    assert used == documented


def test_documented_versions_are_the_tested_ones() -> None:
    releases = re.findall(r"^(?:OLDEST|NEWEST)_TRITON := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    text = (ROOT / "docs" / "compatibility.md").read_text()
    assert f"oldest supported Triton ({releases[0]})" in text and f"({releases[1]})" in text
    assert f"triton<={releases[1]}\n" in (ROOT / "constraints.txt").read_text()
    assert f'"triton>={releases[0].rsplit(".", 1)[0]};' in (ROOT / "pyproject.toml").read_text()


def test_tables_agree_with_the_results() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "tools" / "results_tables.py"), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_tables_show_what_a_row_says() -> None:
    tables = runpy.run_path(str(ROOT / "tools" / "results_tables.py"))
    place = {"stage": "index_score", "heads": "64/4", "shape": "P1", "mode": "bf16", "selection": None, "gpu": "Some GPU"}
    run = {"commit": "0123456789abcdef", "versions": {"torch": "2.11.0", "triton": "3.6.0"}}
    row = {
        "implementation": "triton",
        "peer": False,
        "median_us": 250.0,
        "floor_us": 100.0,
        "share": 0.4,
        "tflops": 300.0,
        "tbps": 1.5,
        **place,
        **run,
    }
    peer = row | {"implementation": "somebody", "median_us": 500.0, "peer": True}
    older_peer = peer | {"median_us": 1.0, "commit": "fedcba9876543210"}
    rows = json.loads(json.dumps([row, peer, older_peer]))
    assert "| Some GPU | index_score | P1 | triton | 250 µs | 40 % | 500 µs | 0.50 |" in tables["summary"](rows)
    full = tables["full"](rows)
    assert "| 64/4 | P1 | bf16 |  | triton | 250 µs | 100 µs | 300 | 1.50 | 40 % | 0.50 |" in full and "somebody (peer)" in full
    assert "| Some GPU | torch 2.11.0, triton 3.6.0 | index_score (triton) |" in tables["executed"](rows)
