"""Every Triton kernel, compiled without a GPU for the architectures it claims, with the oldest and the newest supported Triton.

Each process of `tests/compile/worker.py` imports one Triton from the folder that `make` puts it in, and checks the tensor core instruction each
kernel declares, shared memory, and, where speed is promised (M3's geometry with the newest release), spilled registers.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RELEASES = re.findall(r"^(?:OLDEST|NEWEST)_TRITON := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")
MORE_ARCHS = ("sm_86", "sm_89")
IN_EVERY_RUN = [*((RELEASES[-1], arch) for arch in ARCHS), (RELEASES[0], "sm_90")]


def compile_all(release: str, arch: str, *options: str) -> None:
    folder = Path(sys.prefix) / f"triton-{release}"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there: `make check-kernels` installs it")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    environment.setdefault("TRITON_CACHE_DIR", str(Path(sys.prefix) / "triton-cache"))
    worker = ROOT / "tests" / "compile" / "worker.py"
    done = subprocess.run([sys.executable, str(worker), arch, *options], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    closing = done.stdout.splitlines()[-1]
    assert closing.startswith(f"triton {release}, {arch}: "), closing
    print(closing)


@pytest.mark.parametrize(("release", "arch"), IN_EVERY_RUN)
def test_every_kernel_compiles(release: str, arch: str) -> None:
    compile_all(release, arch, "--fast", *(["--spills"] if release == RELEASES[-1] else []))


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("arch", ARCHS + MORE_ARCHS)
def test_every_variant_compiles(release: str, arch: str) -> None:
    compile_all(release, arch)
