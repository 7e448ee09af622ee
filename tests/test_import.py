"""What `import m3attn` may and may not do, each in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = ("triton", "cutlass", "matplotlib", "tqdm", "transformers")

ATTEND = """
import torch, m3attn
q, k = torch.randn(1, 40, 4, 128), torch.randn(1, 40, 2, 128)
index_q, index_k = torch.randn(1, 40, 2, 128), torch.randn(1, 40, 128)
with torch.no_grad():
    out = m3attn.attend(q, k, k, index_q, index_k, topk=2, block_size=16)
assert out.shape == q.shape and out.isfinite().all()
assert m3attn.explain("sparse_attention") and m3attn.implementations() and m3attn.info()
"""


def python(program: str, **env: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", **env})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_no_kernel_package_and_touches_no_gpu() -> None:
    python("""
import torch
def refuse(*args, **kwargs):
    raise AssertionError("CUDA was asked for")
torch.cuda.is_available = torch.cuda.device_count = torch.cuda.get_device_capability = torch.cuda.init = torch.cuda._lazy_init = refuse
import sys
before = set(sys.modules)
import m3attn
new = {name.split(".")[0] for name in set(sys.modules) - before}
assert not new & {"triton", "cutlass", "matplotlib", "transformers", "flash_attn", "flashinfer"}, new
assert not torch.cuda.is_initialized()
""")


@pytest.mark.parametrize("absent", [("triton",), ("cutlass",), PACKAGES], ids=["triton", "cutlass", "all"])
def test_reference_works_without_optional_packages(absent: tuple[str, ...]) -> None:
    python(f"import torch, sys\nfor name in {absent}: sys.modules[name] = None\n{ATTEND}")


@pytest.mark.parametrize("error", ["ImportError", "AttributeError"])
def test_reference_works_beside_a_broken_cutlass(error: str, tmp_path: Path) -> None:
    # Both are what CuTe DSL raises where its driver or a dependency of its own is missing.
    (tmp_path / "cutlass").mkdir()
    (tmp_path / "cutlass" / "__init__.py").write_text(f"raise {error}('this cutlass is broken')")
    python(ATTEND, PYTHONPATH=str(tmp_path))


def test_import_takes_under_two_seconds_beside_torch() -> None:
    program = "import time, torch; start = time.perf_counter(); import m3attn; print(time.perf_counter() - start)"
    seconds = float(python(program))
    assert seconds < 2, f"import m3attn took {seconds:.2f} s beside torch"
