"""The cache of compiled kernels: what is a hit, what is a miss, and what happens when files or folders are bad."""

import dataclasses
import pathlib
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable

import pytest

from m3attn.dsl_kernels.common import cache
from m3attn.dsl_kernels.common.cache import KernelCache


@dataclasses.dataclass(frozen=True)
class Variant:
    head_dim: int
    dtype: str = "bf16"
    sink: bool = False
    tile: tuple[int, int] = (128, 128)


class Compiler:
    """Compiles a variant to its description, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, key: Variant, arch: str) -> str:
        self.count += 1
        return f"{key} {arch}"


def make(
    compiler: Callable[[Variant, str], str],
    source: pathlib.Path,
    version: str = "4.8.1",
    load: Callable[[bytes], str] = bytes.decode,
) -> KernelCache[Variant, str]:
    return KernelCache("a_kernel", sources=[source], versions={"cutlass": version}, compile=compiler, save=str.encode, load=load)


@pytest.fixture
def source(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A kernel's file, with a cache folder beside it that does not exist yet."""
    monkeypatch.setenv("M3ATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", False)
    (tmp_path / "kernel.py").write_text("one")
    return tmp_path / "kernel.py"


def test_memory_then_disk(source: pathlib.Path) -> None:
    compiler = Compiler()
    first = make(compiler, source)
    assert first.get(Variant(128), "sm_90a") is first.get(Variant(128), "sm_90a")
    assert make(compiler, source).get(Variant(128), "sm_90a") == first.get(Variant(128), "sm_90a")
    assert compiler.count == 1
    first.path(Variant(128), "sm_90a").unlink()
    first.get(Variant(128), "sm_90a")  # memory asks no file
    assert compiler.count == 1


@pytest.mark.parametrize("key", [Variant(64), Variant(128, "fp16"), Variant(128, sink=True), Variant(128, tile=(64, 128))])
def test_every_field_counts(source: pathlib.Path, key: Variant) -> None:
    compiler = Compiler()
    compiled = make(compiler, source)
    assert compiled.get(Variant(128), "sm_90a") != compiled.get(key, "sm_90a")
    assert compiler.count == 2


def test_source_version_and_arch_count(source: pathlib.Path) -> None:
    compiler = Compiler()
    make(compiler, source).get(Variant(128), "sm_90a")
    make(compiler, source).get(Variant(128), "sm_100a")
    make(compiler, source, version="4.9.0").get(Variant(128), "sm_90a")
    source.write_text("two")
    make(compiler, source).get(Variant(128), "sm_90a")
    assert compiler.count == 4


def test_a_hit_reads_back_any_bytes(source: pathlib.Path) -> None:
    payload = bytes(range(256)) + b"\n\n"
    options = {"sources": [source], "versions": {}, "save": bytes, "load": bytes}
    KernelCache("a_kernel", compile=lambda key, arch: payload, **options).get(Variant(128), "sm_90a")
    assert KernelCache("a_kernel", compile=lambda key, arch: b"", **options).get(Variant(128), "sm_90a") == payload


@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: data[:-1], lambda data: data[:20], lambda data: data[:-1] + b"!", lambda data: data.replace(b"bf16", b"fp16")],
    ids=["empty", "cut short", "no payload", "altered", "another variant's"],
)
def test_a_broken_file_is_a_miss_and_is_replaced(source: pathlib.Path, damage: Callable[[bytes], bytes]) -> None:
    compiler = Compiler()
    first = make(compiler, source)
    expected = first.get(Variant(128), "sm_90a")
    path = first.path(Variant(128), "sm_90a")
    path.write_bytes(damage(path.read_bytes()))
    assert make(compiler, source).get(Variant(128), "sm_90a") == expected
    assert compiler.count == 2
    assert make(compiler, source).get(Variant(128), "sm_90a") == expected
    assert compiler.count == 2


def test_what_the_loader_refuses_is_a_miss(source: pathlib.Path) -> None:
    def refuse(data: bytes) -> str:
        raise OSError("not an object of this release")

    compiler = Compiler()
    make(compiler, source).get(Variant(128), "sm_90a")
    make(compiler, source, load=refuse).get(Variant(128), "sm_90a")
    assert compiler.count == 2


def test_unwritable_folder_means_memory_and_one_warning(source: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M3ATTN_CACHE_DIR", str(source / "below a file"))  # root may write where permissions forbid it
    compiler = Compiler()
    compiled = make(compiler, source)
    with pytest.warns(RuntimeWarning, match="M3ATTN_CACHE_DIR") as seen:
        compiled.get(Variant(128), "sm_90a")
        compiled.get(Variant(64), "sm_90a")
        compiled.get(Variant(128), "sm_90a")
    assert len(seen) == 1 and compiler.count == 2


def test_failing_compile_raises_and_leaves_nothing(source: pathlib.Path) -> None:
    def fail(key: Variant, arch: str) -> str:
        raise ValueError("no such instruction")

    compiled = make(fail, source)
    for _ in range(2):
        with pytest.raises(ValueError, match="no such instruction"):
            compiled.get(Variant(128), "sm_90a")
    assert not compiled.path(Variant(128), "sm_90a").exists()
    assert make(Compiler(), source).get(Variant(128), "sm_90a")  # the lock is free


def test_keys_are_frozen_dataclasses_of_plain_values(source: pathlib.Path) -> None:
    compiled = make(Compiler(), source)
    for key in ((128, "bf16"), Variant):
        with pytest.raises(TypeError, match="frozen dataclass"):
            compiled.get(key, "sm_90a")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"key\.dtype: expected str, int, bool, None or a tuple"):
        compiled.get(Variant(128, dtype=1.5), "sm_90a")  # type: ignore[arg-type]


def test_threads_compile_once(source: pathlib.Path) -> None:
    compiler = Compiler()

    def slow(key: Variant, arch: str) -> str:
        time.sleep(0.05)
        return compiler(key, arch)

    compiled = make(slow, source)
    threads = [threading.Thread(target=compiled.get, args=(Variant(128), "sm_90a")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiler.count == 1


# The module is loaded by its path: it needs nothing but the standard library, and importing torch would take most of the time.
WORKER = """
import dataclasses, importlib.util, sys, time

spec = importlib.util.spec_from_file_location("cache", sys.argv[1])
cache = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cache)

@dataclasses.dataclass(frozen=True)
class Variant:
    head_dim: int
    dtype: str = "bf16"
    sink: bool = False
    tile: tuple = (128, 128)

def slow(key, arch):
    print("compiled", flush=True)
    time.sleep(0.5)
    return f"{key} {arch}"

kernels = cache.KernelCache(
    "a_kernel", sources=[sys.argv[2]], versions={"cutlass": "4.8.1"}, compile=slow, save=str.encode, load=bytes.decode
)
print(kernels.get(Variant(128), "sm_90a"))
"""


@pytest.mark.parametrize("locks", [True, False])
def test_processes_racing_on_an_empty_cache(source: pathlib.Path, locks: bool) -> None:
    """With locks one compiles and the others read; without, each compiles and the file is whole."""
    worker = WORKER if locks else "import sys; sys.modules['fcntl'] = None\n" + WORKER
    started = [subprocess.Popen([sys.executable, "-c", worker, cache.__file__, source], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate(timeout=120)[0].split("\n") for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert {lines[-2] for lines in printed} == {f"{Variant(128)} sm_90a"}
    compiled = sum("compiled" in lines for lines in printed)
    assert compiled == 1 if locks else compiled in (1, 2)
    compiler = Compiler()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(compiler, source).get(Variant(128), "sm_90a")
    assert compiler.count == 0
    left = {path.suffix for path in (source.parent / "cache").iterdir()}
    assert left <= {".bin", ".lock"}


def test_default_folder_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("M3ATTN_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.cache_folder() == pathlib.Path("/somewhere/m3attn")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_folder() == pathlib.Path.home() / ".cache" / "m3attn"
