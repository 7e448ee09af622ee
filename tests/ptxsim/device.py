"""The simulated device that tests enter: compile and launch CuTe DSL kernels on CPU tensors inside its block."""

import contextlib
import ctypes
import functools
import gc
import os
import re
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, Self

from . import hooks, programs, stub
from .errors import SimError
from .machine.capture import Capture
from .machine.machine import Machine

_active: "device | None" = None
_registered: list[tuple[int, int]] = []
_error = threading.local()  # raised inside a callback from C, which can only return a code


def register(pointer: int, num_bytes: int) -> None:
    """Let kernels touch this host memory too. Torch tensors that are alive at a launch are found without it."""
    _registered.append((int(pointer), int(pointer) + int(num_bytes)))


def _tensor_ranges() -> list[tuple[int, int]]:
    """[start, end) of every live CPU tensor's storage."""
    import torch
    from torch._subclasses import FakeTensor  # on the CPU by its own account, with sizes and without memory

    ranges = list(_registered)
    is_tensor: dict[type, bool] = {}  # there are few types among many objects
    for candidate in gc.get_objects():
        kind = type(candidate)
        known = is_tensor.get(kind)
        if known is None:
            known = is_tensor[kind] = issubclass(kind, torch.Tensor) and not issubclass(kind, FakeTensor)
        if known:
            with contextlib.suppress(Exception):  # half-built and exotic tensors may raise anything when looked at
                if candidate.device.type == "cpu":
                    storage = candidate.untyped_storage()
                    size = storage.nbytes()
                    start = storage.data_ptr() if isinstance(size, int) else 0  # torch.compile leaves tensors whose sizes are symbols
                    if start and size:
                        ranges.append((start, start + size))
    return ranges


def _raise_pending() -> None:
    pending, _error.exception = getattr(_error, "exception", None), None
    if pending is not None:
        raise pending


@stub.LoadCallback
def _on_load(pointer: int) -> int:
    try:
        return programs.load(pointer)
    except BaseException as exception:
        _error.exception = exception
        return 0


@stub.LaunchCallback
def _on_launch(library: int, name: bytes, dims: Any, arguments: Any) -> int:
    try:
        _launch(library, name.decode(), [dims[j] for j in range(10)], arguments)
        return 0
    except BaseException as exception:
        _error.exception = exception
        return 719  # cudaErrorLaunchFailure


def _launch(library: int, name: str, dims: list[int], arguments: Any) -> None:
    """dims: grid, block, cluster (3 each), bytes of dynamic shared memory. arguments: a pointer for each parameter of the kernel."""
    if _active is None:
        raise SimError("kernel launched outside ptxsim.device")
    module = programs.loaded(library)
    if module is None:
        raise SimError(f"no PTX is known for {name}: it was not compiled in this process (an object from a disk cache? switch that cache off)")
    if _active.edit:
        module = programs.module_of(_active.edit(module.text))
    kernel = module.kernels[name]
    parameters = bytearray(kernel.param_bytes)
    for j, (_, size, offset) in enumerate(kernel.params):
        parameters[offset : offset + size] = ctypes.string_at(arguments[j], size)
    if kernel.reqntid is None and dims[3] * dims[4] * dims[5] > 1024:
        raise SimError("more than 1024 threads")
    grid, block, cluster = tuple(dims[0:3]), tuple(dims[3:6]), tuple(dims[6:9])
    _active.machine.launch(module, name, grid, block, cluster, dims[9], bytes(parameters), _tensor_ranges())


def _arch() -> hooks.Arch:
    return hooks.ARCHS[_active.arch if _active else "sm_100a"]


@functools.cache
def _install_hooks() -> list[tuple[Any, str, Any]]:
    """Hook the DSL, once in a process; what is replaced in torch while a device is active."""
    hooks.hook_compiler(_raise_pending)
    hooks.hook_queries(_arch)
    hooks.hook_tensors()
    hooks.hook_tvm_ffi()
    return hooks.torch_replacements(_arch)


class device:
    """`with ptxsim.device("sm_100a") as d:` compile and launch CuTe DSL kernels on CPU tensors. Devices do not nest.

    arch: "sm_90a" or "sm_100a" ("sm_100f" and "sm_103a" by name only); ValueError for another.
    order: "eager" runs TMA, wgmma and tcgen05 work at once; "lazy" only when it must, so that a missing wait shows as wrong numbers; "random"
    picks, from `seed`.
    fill: the byte that shared memory starts with (0xFF makes NaNs of what was never written), or None for zeros.
    check_bounds: every access outside a live torch tensor or a registered range is a SimError.
    hazards: "warn", "error" or "collect" for mistakes that leave the numbers right here (a missing fence.proxy.async, misuse of cluster
    barriers); `hazards` of the device lists them as (kind, text).
    edit: function from PTX text to PTX text, for tests that break a kernel on purpose.
    torch_cuda: answer torch's queries for the simulated device inside the block.
    capture: a folder that receives every launch for replay.py, its files' names starting with `tag` (environment: PTXSIM_CAPTURE)."""

    def __init__(
        self,
        arch: str = "sm_100a",
        order: Literal["eager", "lazy", "random"] = "eager",
        seed: int = 0,
        fill: int | None = 0xFF,
        check_bounds: bool = True,
        verbose: bool = False,
        torch_cuda: bool = True,
        capture: str | None = None,
        tag: str = "",
        hazards: Literal["warn", "error", "collect"] = "warn",
        edit: Callable[[str], str] | None = None,
    ) -> None:
        if arch not in hooks.ARCHS:
            raise ValueError(f"arch: one of {', '.join(hooks.ARCHS)}, got {arch!r}")
        self.arch = arch
        self.torch_cuda = torch_cuda
        self.edit = edit
        if capture is None and os.environ.get("PTXSIM_CAPTURE"):
            capture = os.environ["PTXSIM_CAPTURE"]
            tag = re.sub(r"[^A-Za-z0-9]+", "_", os.environ.get("PYTEST_CURRENT_TEST", "x").split("::")[-1])[:60] + "-"
        self.machine = Machine(
            hooks.ARCHS[arch].num_sms,
            order,
            seed,
            fill,
            check_bounds,
            verbose,
            hazards=hazards,
            capture=Capture(capture, tag, programs.cubin_of) if capture else None,
        )

    @property
    def hazards(self) -> list[tuple[str, str]]:
        return self.machine.found

    @property
    def stats(self) -> list[dict[str, Any]]:
        """One entry a launch: kernel, grid, block, seconds, warp blocks run."""
        return self.machine.stats

    def watch(self, tensor: Any) -> None:
        """From now on a kernel that reads bytes of this contiguous CPU tensor which no kernel wrote since is a SimError.

        What the host writes does not count.
        """
        if not tensor.is_contiguous():
            raise ValueError(f"tensor: contiguous, got strides {tensor.stride()} of shape {tuple(tensor.shape)}")
        self.machine.mem.watch(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def __enter__(self) -> Self:
        global _active
        if _active is not None:
            raise RuntimeError("ptxsim devices do not nest")
        _active = self
        arch = hooks.ARCHS[self.arch]
        stub.library.ptxsim_setup(_on_launch, _on_load, arch.major, arch.minor, arch.num_sms)
        replacements = _install_hooks()
        from cutlass.cutlass_dsl import CuTeDSL

        self._dsl = CuTeDSL._get_dsl()
        self._old_arch = self._dsl.envar._arch
        self._dsl.envar.arch = self.arch
        self._old_environment = os.environ.get("CUTE_DSL_ARCH")
        os.environ["CUTE_DSL_ARCH"] = self.arch
        self._replaced: list[tuple[Any, str, Any]] = []
        for owner, name, value in replacements if self.torch_cuda else ():
            self._replaced.append((owner, name, owner.__dict__.get(name)))
            setattr(owner, name, value)
        return self

    def __exit__(self, kind: type[BaseException] | None, exception: BaseException | None, trace: TracebackType | None) -> None:
        global _active
        for owner, name, value in self._replaced:
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._dsl.envar._arch = self._old_arch
        if self._old_environment is None:
            os.environ.pop("CUTE_DSL_ARCH", None)
        else:
            os.environ["CUTE_DSL_ARCH"] = self._old_environment
        _active = None
        if exception is not None:
            pending, _error.exception = getattr(_error, "exception", None), None
            if pending is not None and pending is not exception:
                raise pending from exception
        _raise_pending()
