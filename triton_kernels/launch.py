"""The one place that launches a Triton kernel: device, capture rule, FP fusion, and compiling without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from m3attn import problem
from m3attn.problem import arch_number, arch_of, normalise_arch


class KernelNotReady(RuntimeError):
    """A kernel variant was asked for under CUDA-graph capture before it was compiled."""


@dataclass
class CompileLog:
    """Kernels that `compile_only` built: (kernel name, compile-time arguments, compiled kernel)."""

    target: Any
    kernels: list[tuple[str, dict[str, Any], Any]] = field(default_factory=list)


_compile_log: CompileLog | None = None


_HERE = nullcontext()
_ONES: dict[int, tuple[int, ...]] = {1: (1, 1), 2: (1,), 3: ()}
"""What makes a grid three-dimensional."""
_ready: dict[tuple[Any, ...], tuple[Any, Any, Any, Any, tuple[Any, ...]]] = {}
"""What a launch of such arguments ran on this device: the compiled kernel, its launcher, function and metadata, and the values of the compile-time
parameters that follow the arguments."""


def launch(
    kernel: Any, grid: Sequence[int], *args: Any, device: torch.device, num_warps: int, num_stages: int, pdl: bool = False, **meta: Any
) -> None:
    """Run `kernel[grid](*args, **meta)` on the current stream of `device`.

    FP fusion is on (multiply-add contracts to fma), set here so that it never depends on an environment. A plain tuple among the arguments holds
    numbers; tensors may stand in a NamedTuple.

    Raises:
        KernelNotReady: under capture, for a variant that is not compiled yet.
    """
    if 0 in grid:
        return
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    if pdl:
        options["launch_pdl"] = True
    if _compile_log is None and isinstance(kernel, JITFunction):
        passed, decisive = _look(args)
        key = (kernel.fn, device, num_warps, num_stages, pdl, *meta, *meta.values(), *decisive)
        with _HERE if device.index == torch.cuda.current_device() else torch.cuda.device(device):
            ready = _ready.get(key)
            if ready is None or _is_watched():
                _dispatch(key, kernel, tuple(grid), args, meta, options)
            else:
                _, run, function, metadata, constants = ready
                stream = driver.active.get_current_stream(device.index)
                run(*grid, *_ONES[len(grid)], stream, function, metadata, None, None, None, *passed, *constants)
        return
    if _compile_log is not None:
        compiled = kernel.warmup(*args, grid=tuple(grid), **options, **meta)
        _compile_log.kernels.append((kernel.fn.__name__, dict(meta), compiled))
    else:
        kernel[tuple(grid)](*args, **options, **meta)  # in the interpreter


def _look(args: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    """The arguments as a launcher takes them, tensors as addresses, and of each what decides which compiled kernel fits.

    That is a tensor's dtype and alignment, and whether an int is 1 or a multiple of 16, and its bits. Triton looks at every argument of every launch
    to find out and asks the driver about every tensor, and takes longer for it than all else that the host does for a stage.
    """
    passed, decisive = list(args), list(args)
    for i, arg in enumerate(args):
        kind = arg.__class__
        if kind is int:
            if arg != 1 and -(1 << 31) <= arg < 1 << 31:
                decisive[i] = 2 if arg % 16 else 16
        elif kind is float or kind is bool:
            decisive[i] = kind
        elif kind is not tuple and arg is not None:
            if isinstance(arg, torch.Tensor):
                passed[i] = address = arg.data_ptr()
                decisive[i] = arg.dtype, address % 16 == 0
            else:  # a NamedTuple
                inner, of_inner = _look(arg)
                passed[i], decisive[i] = tuple(inner), (kind, *of_inner)
    return passed, decisive


def _is_watched() -> bool:
    """Whether a profiler wants to be told of launches, which Triton does."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _dispatch(key: tuple[Any, ...], kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any], options: dict[str, Any]) -> None:
    """Launch the way of Triton, which finds or compiles what fits, and keep what it found."""
    with _refuse_compiling(kernel, meta) if torch.cuda.is_current_stream_capturing() else _HERE:
        compiled = kernel[grid](*args, **options, **meta)
    if len(_ready) >= 4096:
        _ready.clear()
    if compiled is not None:  # a hook of Triton's compiler may keep it from compiling
        following = list(kernel.signature.parameters.values())[len(args) :]
        constants = tuple(meta.get(parameter.name, parameter.default) for parameter in following)
        _ready[key] = compiled, compiled.run, compiled.function, compiled.packed_metadata, constants


@contextmanager
def _refuse_compiling(kernel: Any, meta: dict[str, Any]) -> Iterator[None]:
    def refuse(**_: Any) -> bool:
        variant = ", ".join(f"{name}={value}" for name, value in meta.items())
        raise KernelNotReady(
            f"{kernel.fn.__name__}({variant}) is not compiled, and nothing compiles under CUDA-graph capture: "
            "run the same call once before capturing, or m3attn.warmup(...)"
        )

    previous = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = refuse
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = previous


class _CompileOnlyDriver:
    """Stands where Triton looks for a GPU: it knows a target and nothing else."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        # Triton keeps one table of compiled kernels a device; a number no GPU has keeps the targets apart.
        return 1_000_000 + self._target.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def is_active(self) -> bool:
        return True


@contextmanager
def compile_only(arch: str) -> Iterator[CompileLog]:
    """Inside the block every launch compiles its kernel for `arch` (`sm_90`, …) and runs nothing; needs no GPU.

    Yields the log of what was compiled, with launch settings as the launchers chose them.
    """
    global _compile_log
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", arch_number(normalise_arch(arch)), 32)
    previous_log, previous_driver, previous_target = _compile_log, driver._active, problem.compile_target
    _compile_log, problem.compile_target = CompileLog(target), normalise_arch(arch)
    driver.set_active(_CompileOnlyDriver(target))
    try:
        yield _compile_log
    finally:
        _compile_log, problem.compile_target = previous_log, previous_target
        driver._active = previous_driver


def current_arch(device: torch.device) -> str:
    """The architecture launches on `device` compile for: `sm_90`, …; `cpu` in the interpreter."""
    return arch_of(device)


def num_sms(device: torch.device) -> int:
    """Multiprocessors of `device`, for grids; an H200's 132 where nothing runs, few in the interpreter."""
    if _compile_log is not None:
        return 132
    return _multiprocessors(device) if device.type == "cuda" else 2


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(0, (n - 1)).bit_length()
