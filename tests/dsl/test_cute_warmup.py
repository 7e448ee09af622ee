"""`m3attn warmup`: what a first process compiles, a second one finds."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from needed import need

need("nvidia-cutlass-dsl", "apache-tvm-ffi")

import scale_kernel

from m3attn.cli.main import main
from m3attn.cli.warmup import kernel_archs
from m3attn.dsl_kernels import variants
from m3attn.dsl_kernels.variants import names_for

SLOW, SMALL = "sparse_prefill-bf16", ["block_lists-all", "select_blocks-longest"]


def warmup(*arguments: str, folder: Path) -> list[str]:
    """The lines that a process of its own prints."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("CUTE_DSL_", "M3ATTN_"))}
    environment = inherited | {"M3ATTN_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "m3attn", "warmup", *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_a_second_process_is_ready_in_a_quarter_of_the_time(tmp_path: Path) -> None:
    times = []
    for state in ("compiled in", "was there"):
        first, last = warmup("--arch", "sm_90a", "--jobs", "1", SLOW, folder=tmp_path)
        assert first.startswith(f"{SLOW}: {state}")
        times.append(float(re.search(r", ([\d.]+) s$", last)[1]))
    assert times[1] <= times[0] / 4


def test_several_at_once(tmp_path: Path) -> None:
    *lines, last = warmup("--arch", "9.0", "--jobs", "2", *SMALL, folder=tmp_path)
    assert sorted(line.split(":")[0] for line in lines) == SMALL
    assert re.fullmatch(rf"2 variants for sm_90 in {re.escape(str(tmp_path))}: 2 compiled, [\d.]+ s", last)
    assert len(list(tmp_path.glob("*.bin"))) == 2


def test_the_list(capsys: pytest.CaptureFixture) -> None:
    assert main(["warmup", "--arch", "sm_90a", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == names_for("sm_90")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's own are listed")
def test_the_list_without_a_gpu_is_of_every_architecture(capsys: pytest.CaptureFixture) -> None:
    assert main(["warmup", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{arch}: {name}" for arch, named in variants.VARIANTS.items() for name in named]


def test_the_architectures_are_known_without_the_kernels() -> None:
    assert set(variants.VARIANTS) <= set(kernel_archs())


def test_an_architecture_without_named_variants(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(variants.VARIANTS, "sm_90", {})
    assert main(["warmup", "--arch", "sm_90a"]) == 2
    assert "no variants are named for sm_90" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no GPU here: name an architecture, such as --arch sm_90a"),
        (["--arch", "sm_80"], "there are no CuTe DSL kernels for sm_80"),
        (["--arch", "hopper"], "arch: expected cpu, or a form of sm_90"),
        (["--arch", "sm_90a", "nothing"], "unknown variant nothing; --list shows the names"),
        (["--arch", "sm_90a", "--jobs", "0"], "--jobs: expected at least 1, got 0"),
    ],
    ids=["no GPU", "no kernels", "no architecture", "no variant", "no processes"],
)
def test_what_can_be_put_right(arguments: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["warmup", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_variant_that_does_not_compile_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    monkeypatch.setenv("M3ATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(variants.VARIANTS, "sm_90", {"scale-0": (scale_kernel.KERNEL, scale_kernel.Variant(0))})
    assert main(["warmup", "--arch", "sm_90a", "--jobs", "1"]) == 1
    line, *_, last = capsys.readouterr().out.splitlines()
    assert line.startswith("scale-0: scale: Variant(threads=0) does not compile for sm_90a: ")
    assert ": 0 compiled, 1 failed, " in last
