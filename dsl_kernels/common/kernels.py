"""Compiled CuTe DSL kernels as functions of torch tensors: built on fake tensors, exported to the cache, loaded back."""

from __future__ import annotations

import contextlib
import pathlib
import platform
import re
import tempfile
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import cutlass
import cutlass.cute as cute
import torch
import tvm_ffi

from m3attn.dsl_kernels.common.cache import KernelCache, VariantNotReady, describe
from m3attn.problem import arch_of
from m3attn.registry import BrokenImplementation

Variant = TypeVar("Variant")

FUNCTION = "kernel"


def host_cpu() -> str:
    """What the host code of an object file needs: LLVM compiles it for the very CPU, vector instructions included."""
    found = None
    with contextlib.suppress(OSError):
        found = re.search(r"^(?:flags|Features)\s*:(.*)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    features = sorted(set(found[1].split())) if found else []
    vectors = [name for name in features if name.startswith(("amx", "avx", "bmi", "f16c", "fma", "sse", "asimd", "sve"))]
    return " ".join([platform.machine(), *vectors])


VERSIONS = {
    "nvidia-cutlass-dsl": cutlass.__version__,
    "CUDA toolkit": f"{cutlass.CUDA_VERSION.major}.{cutlass.CUDA_VERSION.minor}",
    "apache-tvm-ffi": tvm_ffi.__version__,
    "host": host_cpu(),
}


class Compiled:
    """The object file of one variant, loaded: call it with what its `@cute.jit` function takes, without the stream."""

    def __init__(self, object_file: bytes) -> None:
        self.object_file = object_file
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "kernel.o")
            path.write_bytes(object_file)
            self.function = getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), FUNCTION)


class CuteKernel(Generic[Variant]):
    """One kernel in all its variants. A kernel's file has one at module level:

        @dataclass(frozen=True)
        class Variant:
            dtype: str
            has_sink: bool

        def build(variant: Variant) -> tuple[Any, tuple[Any, ...]]:
            tokens = cute.sym_int()
            q = make_fake_tensor(DTYPES[variant.dtype], (tokens, 128), (cute.sym_int64(divisibility=8), 1), assumed_align=16)
            return Kernel(variant), (q, cutlass.Float32(0), make_fake_stream(use_tvm_ffi_env_stream=True))

        KERNEL = CuteKernel("a_kernel", build, sources=[__file__])

        def a_stage(call: AStageCall) -> None:
            KERNEL.get(Variant("bf16", has_sink=False), call.q.device)(call.q, call.sm_scale)  # on the current stream of q's device

    The tests run the same functions on CPU tensors: `with simulated("random"):` of tests/dsl/simulator.py.

    Args:
        name: the start of the cache's file names.
        build: variant -> (a `@cute.jit` callable, its arguments as fake tensors and example scalars, a fake stream that stands for TVM-FFI's last).
        sources: the files whose text decides what is compiled; the modules of `dsl_kernels/common` that the kernel uses belong to them.
    """

    def __init__(self, name: str, build: Callable[[Variant], tuple[Any, tuple[Any, ...]]], sources: Iterable[str]) -> None:
        self.name, self.build, self.sources = name, build, tuple(sources)
        self._launched: dict[tuple[Variant, torch.device], Callable[..., None]] = {}  # by `get`'s caller, for whom it was looked up
        self._cache: KernelCache[Variant, Compiled] = KernelCache(
            name,
            sources=[__file__, *self.sources],
            versions=VERSIONS,
            compile=self._compile_and_load,
            save=lambda compiled: compiled.object_file,
            load=Compiled,
        )

    def get(self, variant: Variant, device: torch.device) -> Callable[..., None]:
        """The variant for the architecture of `device`: from memory, from the cache's folder, or compiled now.

        Raises:
            VariantNotReady: a CUDA graph is being captured, and the variant has not run on `device`.
            BrokenImplementation: the DSL or ptxas refused it.
        """
        if device.type != "cuda":
            return self.for_arch(variant, arch_of(device))
        function = self._launched.get((variant, device))
        if function is None:
            if torch.cuda.is_current_stream_capturing():
                raise VariantNotReady(
                    f"{self.name}: {describe(variant)} has not run on {device}, and nothing is compiled, read or loaded under CUDA-graph capture: "
                    "run the same call once before capturing, or m3attn.warmup(...)"
                )
            function = self._launched[variant, device] = self.for_arch(variant, arch_of(device))
        return function

    def for_arch(self, variant: Variant, arch: str) -> Callable[..., None]:
        """The variant for an architecture (`sm_90`, `sm_90a`), with or without such a GPU in this machine."""
        return self._cache.get(variant, compile_arch(arch)).function

    def path(self, variant: Variant, arch: str) -> pathlib.Path:
        """The variant's file in the cache's folder."""
        return self._cache.path(variant, compile_arch(arch))

    def compile(self, variant: Variant, arch: str) -> Any:
        """What `cute.compile` gives, past every cache: `__ptx__` and `__cubin__` are there where `CUTE_DSL_KEEP=ptx,cubin` was set in time."""
        jit_function, arguments = self.build(variant)
        try:
            return cute.compile(jit_function, *arguments, options=f"--enable-tvm-ffi --gpu-arch {compile_arch(arch)}")
        except Exception as error:  # whatever the DSL or ptxas raises: no GPU code came of it
            text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()  # the DSL colours its messages
            raise BrokenImplementation(f"{self.name}: {describe(variant)} does not compile for {arch}: {type(error).__name__}: {text}") from error

    def _compile_and_load(self, variant: Variant, arch: str) -> Compiled:
        compiled = self.compile(variant, arch)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "kernel.o")
            compiled.export_to_c(object_file_path=str(path), function_name=FUNCTION)
            return Compiled(path.read_bytes())


def compile_arch(arch: str) -> str:
    """`sm_90` -> `sm_90a`: these kernels use instructions of one architecture only."""
    if arch == "cpu":
        raise ValueError("device: expected a GPU, got the CPU; CuTe DSL kernels run on CPU tensors in the simulator of the tests alone")
    return arch if arch.endswith("a") else f"{arch}a"
