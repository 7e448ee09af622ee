"""The code in README.md and docs runs, on a CPU; their links, variables and tables are those of the project."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from m3attn.bench import tables

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
    done = subprocess.run([sys.executable, "-m", "m3attn.bench.tables", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_executed_table_says_what_the_rows_say(tmp_path: Path) -> None:
    place = {"stage": "index_score", "heads": "64/4", "shape": "P1", "mode": "bf16", "selection": None, "gpu": "Some GPU"}
    row = {**place, "implementation": "triton", "peer": False, "versions": {"torch": "2.11.0", "triton": "3.6.0"}}
    (tmp_path / "some-gpu-index_score.json").write_text(json.dumps([row, row | {"mode": "fp8"}, row | {"implementation": "somebody", "peer": True}]))
    assert tables.executed(tmp_path).splitlines()[2:] == [
        "| Some GPU | torch 2.11.0, triton 3.6.0 | triton | index_score (bf16), index_score (fp8) |"
    ]
