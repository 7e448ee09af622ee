"""What the host does in an eager call: bounded, and launches that take the short way pass what Triton would.

Counts of functions entered stand for time, which other work on a machine would spoil: at about 0.15 us each they are the larger part of it. A call
that enters more than its bound has work that it did not have; lower the bound where a change takes work away.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "eager_calls" / "worker.py"
RELEASES = sorted(Path(sys.prefix).glob("triton-3*")) or [None]
MOST_FUNCTIONS = {
    "index_topk, triton": 245,
    "sparse_attention, triton": 250,
    "sparse_attention, cute_sm90": 175,
    "sparse_mla_prefill, cute_sm90": 105,
    "quantize_fp8, triton": 115,
    "qk_norm_rope_insert, triton": 310,
}


def work(what: str, release: Path | None) -> str:
    """The worker's output with the Triton of a folder, or with the installed one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET" and not name.startswith("M3ATTN_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(release or "")}
    environment.setdefault("TRITON_CACHE_DIR", str(Path(sys.prefix) / "triton-cache"))
    done = subprocess.run([sys.executable, str(WORKER), what], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name if release else "installed")
def test_a_launch_seen_before_passes_what_triton_passes(release: Path | None) -> None:
    assert "27 launches" in work("launches", release)


def test_an_eager_call_enters_few_functions() -> None:
    found = {name: int(number) for name, number in (line.split(": ") for line in work("calls", None).splitlines())}
    assert {name for name in MOST_FUNCTIONS if "triton" in name} <= set(found) <= set(MOST_FUNCTIONS)
    assert not {name: number for name, number in found.items() if number > MOST_FUNCTIONS[name]}, found
