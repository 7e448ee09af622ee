"""Hooks into the DSL, the CUDA bindings and torch, so that all of them see the simulated device."""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

from . import programs, stub


class Arch(NamedTuple):
    """What queries of the device answer."""

    major: int
    minor: int
    num_sms: int
    name: str

    @property
    def capability(self) -> tuple[int, int]:
        return self.major, self.minor


ARCHS = {
    "sm_90a": Arch(9, 0, 132, "ptxsim sm_90a"),
    "sm_100a": Arch(10, 0, 148, "ptxsim sm_100a"),
    "sm_100f": Arch(10, 0, 148, "ptxsim sm_100f"),
    "sm_103a": Arch(10, 3, 148, "ptxsim sm_103a"),
}

TOTAL_MEMORY = 180 << 30
L2_BYTES = 50 << 20


def hook_compiler(raise_pending: Callable[[], None]) -> None:
    """Pair every cubin with its PTX, and turn error codes of a launch back into the exceptions behind them."""
    from cutlass.base_dsl import jit_executor

    artifacts = jit_executor.JitFunctionArtifacts
    post_init = artifacts.__post_init__

    def post_init_and_remember(self: Any) -> None:
        post_init(self)
        if isinstance(self.PTX, str) and ".entry" in self.PTX and isinstance(self.CUBIN, (bytes, bytearray)):
            programs.remember(self.PTX, bytes(self.CUBIN))

    artifacts.__post_init__ = post_init_and_remember
    run_program = jit_executor.JitExecutor.run_compiled_program

    def run_and_raise(self: Any, *args: Any, **options: Any) -> Any:
        try:
            result = run_program(self, *args, **options)
        except Exception:
            raise_pending()
            raise
        raise_pending()
        return result

    jit_executor.JitExecutor.run_compiled_program = run_and_raise


def hook_queries(arch: Callable[[], Arch]) -> None:
    """Answer the DSL's questions about driver and device."""
    import cuda.bindings.driver as driver
    import cuda.bindings.runtime as runtime
    import cutlass.base_dsl.env_manager as env_manager
    from cutlass.base_dsl.runtime import cuda as dsl_cuda
    from cutlass.utils.hardware_info import HardwareInfo

    ok = runtime.cudaError_t(0)
    runtime.cudaGetDeviceCount = lambda: (ok, 1)
    runtime.cudaGetDevice = lambda: (ok, 0)
    runtime.cudaLibraryUnload = lambda library: (ok,)
    runtime.cudaDeviceSynchronize = lambda: (ok,)
    runtime.cudaStreamSynchronize = lambda stream: (ok,)

    success = driver.CUresult(0)
    driver.cuInit = lambda flags=0: (success,)
    driver.cuDriverGetVersion = lambda: (success, 12090)
    driver.cuDeviceGetCount = lambda: (success, 1)
    driver.cuDeviceGet = lambda ordinal=0: (success, driver.CUdevice(0))
    driver.cuCtxGetDevice = lambda: (success, driver.CUdevice(0))
    driver.cuCtxGetCurrent = lambda: (success, driver.CUcontext(1))
    driver.cuDevicePrimaryCtxRetain = lambda device: (success, driver.CUcontext(1))
    driver.cuCtxSetCurrent = lambda context: (success,)
    driver.cuCtxSynchronize = lambda: (success,)
    driver.cuDeviceGetName = lambda length, device: (success, b"ptxsim")
    driver.cuDeviceTotalMem = lambda device: (success, TOTAL_MEMORY)
    driver.cuOccupancyMaxActiveClusters = lambda *args: (success, max(1, arch().num_sms // 2))

    def attribute(which: Any, device: int = 0) -> tuple[Any, int]:
        value = ctypes.c_int()
        stub.library._cudaDeviceGetAttribute(ctypes.byref(value), int(which), 0)
        return success, value.value

    driver.cuDeviceGetAttribute = attribute
    runtime.cudaDeviceGetAttribute = lambda which, device=0: (ok, attribute(int(which))[1])

    def capability(device_id: int = 0) -> tuple[int, int]:
        return arch().capability

    dsl_cuda.get_compute_capability_major_minor = capability
    env_manager.get_compute_capability_major_minor = capability
    HardwareInfo.__init__ = lambda self, device_id=0: None
    HardwareInfo.get_max_active_clusters = lambda self, cluster_size, stream=None: max(1, arch().num_sms // cluster_size)
    HardwareInfo.get_device_multiprocessor_count = lambda self: arch().num_sms
    HardwareInfo.get_l2_cache_size_in_bytes = lambda self: L2_BYTES


def hook_tensors() -> None:
    """CPU tensors stand for device tensors: their DLPack data says device type 2 (CUDA)."""
    import cutlass.cute.runtime as cute_runtime

    tensor_init = cute_runtime._Tensor.__init__
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    get_name = ctypes.pythonapi.PyCapsule_GetName
    get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]

    def init_as_cuda(self: Any, *args: Any, **options: Any) -> None:
        tensor_init(self, *args, **options)
        name = get_name(self._dlpack_data)
        device_type = get_pointer(self._dlpack_data, name) + (40 if name == b"dltensor_versioned" else 8)
        ctypes.c_int32.from_address(device_type).value = 2

    cute_runtime._Tensor.__init__ = init_as_cuda


def hook_tvm_ffi() -> None:
    """The same for host code that takes torch tensors through TVM-FFI, where that package is installed."""
    try:
        import cutlass.base_dsl.tvm_ffi_builder.tvm_ffi_builder as builder
        import cutlass.cute._tvm_ffi_args_spec_converter as converter
        from cutlass.base_dsl.tvm_ffi_builder import spec
    except ImportError:
        return
    for cls in vars(builder).values():
        if isinstance(cls, type) and "load_dltensor_device_type" in vars(cls):
            cls.load_dltensor_device_type = lambda self, pointer: self.i32(2)
    spec_init = spec.Tensor.__init__

    def init_spec_as_cuda(self: Any, *args: Any, **options: Any) -> None:
        if options.get("device_type") == "cpu":
            options["device_type"] = "cuda"
        spec_init(self, *args, **options)

    spec.Tensor.__init__ = init_spec_as_cuda
    for cls in vars(converter).values():
        if isinstance(cls, type) and "alloc_or_reuse_device_id" in vars(cls):
            original = cls.alloc_or_reuse_device_id
            cls.alloc_or_reuse_device_id = lambda self, device_type, value, original=original: original(self, "cuda", value)


def torch_replacements(arch: Callable[[], Arch]) -> list[tuple[Any, str, Any]]:
    """(owner, name, value) of what libraries ask torch, to be set while a device is active."""
    import torch

    class Properties:
        name = property(lambda self: arch().name)
        major = property(lambda self: arch().major)
        minor = property(lambda self: arch().minor)
        multi_processor_count = property(lambda self: arch().num_sms)
        total_memory = TOTAL_MEMORY
        shared_memory_per_block_optin = 232448
        L2_cache_size = L2_BYTES
        warp_size = 32

    class Stream:
        cuda_stream = 0

        def synchronize(self) -> None:
            pass

    return [
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "get_device_capability", lambda device=None: arch().capability),
        (torch.cuda, "get_device_properties", lambda device=None: Properties()),
        (torch.cuda, "get_device_name", lambda device=None: arch().name),
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch.cuda, "current_stream", lambda device=None: Stream()),
        (torch.Tensor, "is_cuda", property(lambda self: True)),
    ]
