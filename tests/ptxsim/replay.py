"""Runs launches that were captured (`device(capture=FOLDER)`) on a real GPU, and compares memory with the simulation's.

`python replay.py FOLDER` needs numpy and libcuda only."""

import ctypes
import pathlib
import subprocess
import sys

import numpy as np

MAX_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
ALIGNMENT = 256  # addresses keep their remainder


class LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint32 * 16))


class LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class Driver:
    """libcuda with a context on the first device; a call that fails raises RuntimeError."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuInit", 0)
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)

    def __call__(self, name: str, *arguments) -> None:
        code = getattr(self.library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"{name}: {code} {(text.value or b'').decode()}")


def upload(driver: Driver, saved: dict[str, np.ndarray]) -> list[int]:
    """Device addresses of copies of all captured allocations."""
    addresses = []
    for k, start in enumerate(saved["starts"].tolist()):
        content = np.ascontiguousarray(saved[f"before{k}"])
        base = ctypes.c_uint64()
        driver("cuMemAlloc_v2", ctypes.byref(base), ctypes.c_size_t(len(content) + ALIGNMENT))
        address = base.value + (start - base.value) % ALIGNMENT
        driver("cuMemcpyHtoD_v2", ctypes.c_uint64(address), content.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(len(content)))
        addresses.append(address)
    return addresses


def moved_parameters(saved: dict[str, np.ndarray], addresses: list[int]) -> np.ndarray:
    """The kernel's parameters with every pointer moved to the device's copies, TMA descriptors made as a driver makes them."""
    sizes = [len(saved[f"before{k}"]) for k in range(len(addresses))]
    parameters = saved["params"].copy()
    words = parameters[: len(parameters) // 8 * 8].view(np.uint64)
    for j, word in enumerate(words.tolist()):
        for start, size, address in zip(saved["starts"].tolist(), sizes, addresses, strict=True):
            if start <= word < start + size:
                words[j] = address + word - start
    # The DSL's host code leaves 2 in the version field and rubbish after 64 bytes; what the driver of a Hopper card writes there is 0, the box
    # size and the swizzle span.
    halves = parameters[: len(parameters) // 4 * 4].view(np.uint32)
    moved = words.tolist()
    for offset in range(0, len(parameters) - 127, 64):
        k = offset // 4
        points_in = any(address <= moved[offset // 8] < address + size for address, size in zip(addresses, sizes, strict=True))
        if halves[k + 2] & 15 == 2 and halves[k + 2] > 15 and points_in:
            halves[k + 2] &= 0xFFFFFFF0
            halves[k + 16 : k + 32] = 0
    return parameters


def launch(driver: Driver, function: ctypes.c_void_p, saved: dict[str, np.ndarray], parameters: np.ndarray) -> None:
    smem, cluster = int(saved["smem"]), saved["cluster"].tolist()
    if smem > 48 * 1024:
        driver("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED_SIZE, smem)
    attribute = LaunchAttribute(id=CLUSTER_DIMENSION)
    attribute.value[:3] = cluster
    config = LaunchConfig(smem=smem)
    config.grid[:], config.block[:] = saved["grid"].tolist(), saved["block"].tolist()
    if max(cluster) > 1:
        config.attributes, config.num_attributes = ctypes.addressof(attribute), 1
    pointers = [parameters.ctypes.data + offset for offset in saved["offsets"].tolist()]
    driver("cuLaunchKernelEx", ctypes.byref(config), function, (ctypes.c_void_p * len(pointers))(*pointers), None)
    driver("cuCtxSynchronize")


def largest_difference(a: np.ndarray, b: np.ndarray) -> float:
    """Among the values that are finite in both."""
    finite = np.isfinite(a) & np.isfinite(b)
    return float(np.abs(a - b)[finite].max()) if finite.any() else 0.0


def compare(simulated: np.ndarray, real: np.ndarray) -> str:
    """How two images of an allocation differ, read as bytes, 16-bit words, fp32 and bf16."""
    whole = len(simulated) // 4 * 4
    words = [image[:whole].view(np.uint16) for image in (simulated, real)]
    as_f32 = largest_difference(*(image[:whole].view(np.float32) for image in (simulated, real)))
    as_bf16 = largest_difference(*((word.astype(np.uint32) << 16).view(np.float32) for word in words))
    equal_bytes = float((simulated == real).mean())
    equal_words = float((words[0] == words[1]).mean()) if whole else 1.0
    return (
        f"[{len(simulated)} B: bytes equal {equal_bytes:.5f}, 16-bit words equal {equal_words:.5f}, "
        f"max diff as f32 {as_f32:.3g}, as bf16 {as_bf16:.3g}]"
    )


def run(driver: Driver, saved: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Run one captured launch; its allocations afterwards, as bytes."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    driver("cuModuleLoadData", ctypes.byref(module), saved["cubin"].tobytes())
    driver("cuModuleGetFunction", ctypes.byref(function), module, str(saved["name"]).encode())
    addresses = upload(driver, saved)
    launch(driver, function, saved, moved_parameters(saved, addresses))
    images = [np.empty_like(saved[f"after{k}"]) for k in range(len(addresses))]
    for image, address in zip(images, addresses, strict=True):
        driver("cuMemcpyDtoH_v2", image.ctypes.data_as(ctypes.c_void_p), ctypes.c_uint64(address), ctypes.c_size_t(len(image)))
    return images


def replay(driver: Driver, saved: dict[str, np.ndarray]) -> str:
    """Run one captured launch, and say how the memory it changed compares."""
    differences = []
    for k, real in enumerate(run(driver, saved)):
        before, simulated = saved[f"before{k}"], saved[f"after{k}"]
        if not (np.array_equal(simulated, before) and np.array_equal(real, before)):
            differences.append(compare(simulated, real))
    place = f"grid {saved['grid'].tolist()} cluster {saved['cluster'].tolist()}"
    return " ".join([str(saved["name"])[:50], place, *(differences or ["memory unchanged on both"])])


def main(path: pathlib.Path) -> None:
    if path.suffix == ".npz":
        with np.load(path) as file, np.errstate(all="ignore"):
            print(path.name, replay(Driver(), dict(file)))
        return
    for file in sorted(path.glob("*.npz")):  # one process each: an error spoils its context
        run = subprocess.run([sys.executable, __file__, file], capture_output=True, text=True)
        print(run.stdout.strip() if not run.returncode else f"{file.name}: {run.stderr.strip()[-160:]}", flush=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
