"""A compiled kernel on its way through memory, disk and processes, with the compiler and the loader that ship."""

import hashlib
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from needed import need

need("nvidia-cutlass-dsl", "apache-tvm-ffi")

from scale_kernel import KERNEL, Variant, build
from simulator import ORDERS, simulated

from m3attn.dsl_kernels.common import cache, kernels
from m3attn.dsl_kernels.common.cache import MAGIC, VariantNotReady
from m3attn.dsl_kernels.common.kernels import CuteKernel, host_cpu
from m3attn.registry import BrokenImplementation

SOURCE = Path(__file__).with_name("scale_kernel.py")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("M3ATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", False)
    return tmp_path / "cache"


class Counted:
    """A new `CuteKernel`, as a new process has it, that counts its compilations."""

    def __init__(self, name: str = "scale", sources: tuple[str, ...] = (str(SOURCE),)) -> None:
        self.compiled = 0
        self.kernel = CuteKernel(name, self.build, sources)

    def build(self, variant: Variant):
        self.compiled += 1
        return build(variant)

    def get(self, threads: int = 64):
        return self.kernel.for_arch(Variant(threads), "sm_90a")


def test_another_cpu_compiles_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host code built for wider vectors than a CPU has would end the process."""
    Counted().get()
    monkeypatch.setitem(kernels.VERSIONS, "host", f"{host_cpu()} avx1024")
    other = Counted()
    other.get()
    assert other.compiled == 1
    monkeypatch.setattr(Path, "read_text", lambda path: "processor : 0\nflags\t\t: fpu avx512f md_clear avx\n")
    assert host_cpu().split()[1:] == ["avx", "avx512f"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("threads", [32, 64])
def test_launches_on_cpu_tensors(threads: int, order: str) -> None:
    x, out = torch.randn(100), torch.full((100, 3), float("nan"))
    with simulated(order) as device:
        kernel = KERNEL.get(Variant(threads), x.device)
        kernel(x, out[:, 1], 2.5)
        assert KERNEL.get(Variant(threads), x.device) is kernel
    assert [stats["grid"] for stats in device.stats] == [(-(-100 // threads), 1, 1)]
    assert torch.equal(out[:, 1], x * 2.5) and bool(out[:, ::2].isnan().all())


def test_a_cpu_tensor_outside_the_interpreter_is_refused() -> None:
    with pytest.raises(ValueError, match="device: expected a GPU, got the CPU"):
        KERNEL.get(Variant(32), torch.device("cpu"))


def test_from_disk_without_compiling(folder: Path) -> None:
    first, second = Counted(), Counted()
    start = time.perf_counter()
    first.get()
    between = time.perf_counter()
    second.get()
    assert (first.compiled, second.compiled) == (1, 0)
    assert time.perf_counter() - between < (between - start) / 4
    assert {path.suffix for path in folder.iterdir()} == {".bin", ".lock"}


def test_what_counts(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.py"
    copy.write_text("another text")
    kernels = (Counted(), Counted(name="other"), Counted(sources=(str(SOURCE), str(copy))))
    for kernel in kernels:
        kernel.get()
    kernels[0].get(32)
    kernels[0].kernel.for_arch(Variant(64), "sm_100a")
    assert [kernel.compiled for kernel in kernels] == [3, 1, 1]


def envelope(path: Path, payload: bytes) -> bytes:
    """A file that is whole, with a payload of ours."""
    identity = path.read_bytes().split(b"\n", 3)[1]
    return b"\n".join((MAGIC, identity, hashlib.sha256(payload).hexdigest().encode(), payload))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: b"",
        lambda path: path.read_bytes()[:-100],
        lambda path: path.read_bytes()[:-1] + b"!",
        lambda path: envelope(path, b""),
        lambda path: envelope(path, b"no object file"),
    ],
    ids=["empty", "cut short", "altered", "no object", "another object"],
)
def test_a_broken_file_is_compiled_again(folder: Path, damage) -> None:
    Counted().get()
    path = KERNEL.path(Variant(64), "sm_90a")
    path.write_bytes(damage(path))
    second, third = Counted(), Counted()
    second.get()
    third.get()
    assert (second.compiled, third.compiled) == (1, 0)


def test_a_folder_that_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write_text("a file")
    kernel = Counted()
    with pytest.warns(RuntimeWarning, match="M3ATTN_CACHE_DIR") as seen:
        for threads in (64, 32, 64):
            kernel.get(threads)
    assert len(seen) == 1 and kernel.compiled == 2


def test_under_capture_runs_what_has_run_on_the_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M3ATTN_ARCH", "sm_90a")
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    kernel, first, second = Counted(), torch.device("cuda:0"), torch.device("cuda:1")
    kernel.get()  # loaded, and never launched: its device code is not on a device yet
    message = r"scale: Variant\(threads=64\) has not run on cuda:0, .*m3attn\.warmup"
    with pytest.raises(VariantNotReady, match=message):
        kernel.kernel.get(Variant(64), first)
    capturing[0] = False
    ready = kernel.kernel.get(Variant(64), first)
    capturing[0] = True
    assert kernel.kernel.get(Variant(64), first) is ready
    for variant, device in ((Variant(32), first), (Variant(64), second)):
        with pytest.raises(VariantNotReady):
            kernel.kernel.get(variant, device)
    assert kernel.compiled == 1


def test_what_the_compiler_refuses_names_the_variant(folder: Path) -> None:
    kernel = Counted()
    for _ in range(2):
        with pytest.raises(BrokenImplementation, match=r"scale: Variant\(threads=0\) does not compile for sm_90a: .*"):
            kernel.get(0)
    assert not list(folder.glob("*.bin"))


WORKER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from scale_kernel import KERNEL, Variant
from m3attn.dsl_kernels.common.kernels import CuteKernel, host_cpu
compiled = CuteKernel.compile
def announce(self, variant, arch):
    print("compiled", flush=True)
    return compiled(self, variant, arch)
CuteKernel.compile = announce
assert callable(KERNEL.for_arch(Variant(64), "sm_90a"))
"""


def test_two_processes_on_an_empty_cache(folder: Path) -> None:
    command = [sys.executable, "-c", WORKER, str(SOURCE.parent)]
    environment = os.environ | {"PYTHONPATH": str(SOURCE.parents[2])}
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    printed = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert sorted(printed) == ["", "compiled\n"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        third = Counted()
        third.get()
    assert third.compiled == 0
