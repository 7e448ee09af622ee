"""The code in README.md and docs runs, on a CPU; their links, variables and tables are those of the project."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import m3attn.analysis
from m3attn.bench import tables

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted((ROOT / "docs").glob("*.md"))
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ALONE = {"README.md", "CONTRIBUTING.md"}  # each snippet of these stands for itself; those of a page in docs/ follow one another
SNIPPETS = [
    pytest.param(page, code, id=f"{page.name}-{number}" if page.name in ALONE else page.name)
    for page in PAGES
    if page != TROUBLESHOOTING
    for number, code in enumerate(CODE.findall(page.read_text()) if page.name in ALONE else ["\n".join(CODE.findall(page.read_text()))], start=1)
    if code
]


@pytest.mark.parametrize(("page", "code"), SNIPPETS)
def test_snippet_runs(page: Path, code: str) -> None:
    if re.search(r"^from transformers", code, re.MULTILINE):
        pytest.importorskip("transformers.models.minimax_m3_vl")
    torch.manual_seed(0)
    exec(compile(code, page.name, "exec"), {"__name__": "snippet"})


RAISE = """
import json, sys
blocks, names, messages = json.load(sys.stdin), {}, []
for code, raises in blocks:
    try:
        exec(code, names)
    except Exception as error:
        messages.append(f"{type(error).__name__}: {error}")
    else:
        if raises:
            messages.append("nothing was raised by " + code)
print(json.dumps(messages))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the page shows what a CPU says")
def test_errors_are_those_of_the_troubleshooting_page() -> None:
    """In a process of its own, because the interpreter is off at first. `…` stands for anything."""
    text = TROUBLESHOOTING.read_text()
    blocks = [(code, bool(raises)) for raises, code in re.findall(r"^```python( raises)?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]
    expected = re.findall(r"^```text\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET" and not name.startswith("M3ATTN_")}
    done = subprocess.run([sys.executable, "-c", RAISE], input=json.dumps(blocks), cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    messages = json.loads(done.stdout)
    assert len(messages) == len(expected) == sum(raises for _, raises in blocks) >= 12
    for message, shown in zip(messages, expected, strict=True):
        assert re.fullmatch(".*".join(map(re.escape, shown.split("…"))), message), f"shown: {shown}\nraised: {message}"


def test_the_api_page_lists_what_there_is() -> None:
    """Names of `m3attn` that it does not list are added when the site is built (docs/hooks)."""
    listed = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    found = {}
    for name in listed:
        module, _, member = name.rpartition(".")
        found[member] = getattr(importlib.import_module(module), member)
        assert found[member].__doc__, f"{name} has no docstring"
    assert {*m3attn.analysis.__all__, "check_rule"} <= set(found)
    for name in set(m3attn.__all__) - {"__version__"}:
        assert getattr(m3attn, name).__doc__ and getattr(m3attn, name) is found.get(name, getattr(m3attn, name))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_every_kernel_file_has_a_page_of_its_own() -> None:
    pytest.importorskip("mkdocs", reason="needs mkdocs, from the extra `docs`")
    spec = importlib.util.spec_from_file_location("pages", ROOT / "docs" / "hooks" / "pages.py")
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    files = {path: module for module, path in pages.kernel_files()}
    assert len({pages.kernel_address(path) for path in files}) == len(files)
    for name in ("triton_kernels/select_blocks.py", "dsl_kernels/select_blocks.py", "dsl_kernels/index_score_sm90.py"):
        page = pages.kernel_page(files[ROOT / name], ROOT / name)
        assert "\n| `" in page.partition("| kernel | lines | |")[2].partition("````")[0], f"{name} has a page without a kernel"


def test_every_notebook_is_in_the_readme() -> None:
    named = set(re.findall(r"\(notebooks/(\w+\.py)\)", (ROOT / "README.md").read_text()))
    assert named == {path.name for path in (ROOT / "notebooks").glob("*.py")}


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


def test_headline_takes_the_fastest_of_each(tmp_path: Path) -> None:
    shared = {"heads": "64/4", "shape": "P1", "mode": "bf16", "gpu": "Some GPU", "commit": "abc", "versions": {"torch": "2.11.0"}, "share": 0.5}
    for stage, selection in (("index_topk", None), ("sparse_attention", "N")):
        row = {**shared, "stage": stage, "selection": selection, "implementation": "slow", "peer": False, "median_us": 200.0}
        fast, peer = row | {"implementation": "fast", "median_us": 100.0}, row | {"implementation": "theirs", "peer": True, "median_us": 50.0}
        others = [row | {"heads": "16/1", "median_us": 1.0}, row | {"mode": "widen", "median_us": 1.0}, row | {"selection": "R", "median_us": 70.0}]
        (tmp_path / f"some-gpu-{stage}.json").write_text(json.dumps([row, fast, peer, *others]))
    lines = tables.headline(tmp_path).splitlines()
    assert lines[0] == "Some GPU, 64 query and 4 KV heads, commit abc, torch 2.11.0."
    assert lines[2] == "| stage | step | mode | selection | time | implementation | of the floor | vLLM 0.33.0 |"
    assert lines[4:] == [
        "| `index_topk` | prefill, 8,192 tokens | bf16 |  | 100 us | `fast` | 50% | 50.0 us |",
        "| `sparse_attention` | prefill, 8,192 tokens | bf16 | N | 100 us | `fast` | 50% | 50.0 us |",
        "| `sparse_attention` | prefill, 8,192 tokens | bf16 | R | 70.0 us | `slow` | 50% |  |",
    ]
    assert tables.headline(tmp_path / "nothing") == "No measurement is recorded yet."


def test_executed_table_says_what_the_rows_say(tmp_path: Path) -> None:
    place = {"stage": "index_score", "heads": "64/4", "shape": "P1", "mode": "bf16", "selection": None, "gpu": "Some GPU"}
    row = {**place, "implementation": "triton", "peer": False, "versions": {"torch": "2.11.0", "triton": "3.6.0"}}
    (tmp_path / "some-gpu-index_score.json").write_text(json.dumps([row, row | {"mode": "fp8"}, row | {"implementation": "somebody", "peer": True}]))
    assert tables.executed(tmp_path).splitlines()[2:] == [
        "| Some GPU | torch 2.11.0, triton 3.6.0 | triton | index_score (bf16), index_score (fp8) |"
    ]


def test_tables_name_the_release_of_a_package_where_its_rows_are(tmp_path: Path) -> None:
    place = {"stage": "dense_attention", "heads": "64/4", "shape": "P1", "mode": "bf16", "selection": None, "gpu": "Some GPU", "commit": "abc"}
    figures = {"median_us": 2.0, "floor_us": 1.0, "share": 0.5, "versions": {"torch": "2.11.0", "flash-attn-4": "4.0.0"}}
    ours, package = ({**place, **figures, "implementation": key} for key in ("triton", "flash_attn_4"))
    assert "abc, torch 2.11.0;" in tables.markdown([ours]) and "abc, torch 2.11.0, flash-attn-4 4.0.0;" in tables.markdown([ours, package])
    (tmp_path / "some-gpu-dense_attention.json").write_text(json.dumps([ours, package]))
    assert tables.executed(tmp_path).splitlines()[2:] == [
        "| Some GPU | torch 2.11.0 | triton | dense_attention (bf16) |",
        "| Some GPU | torch 2.11.0, flash-attn-4 4.0.0 | flash_attn_4 | dense_attention (bf16) |",
    ]
