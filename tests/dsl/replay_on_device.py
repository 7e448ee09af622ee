"""Do a GPU and the interpreter agree about the kernels? One command on a machine with a B200 (or an H200), and its output is the report:

    python tests/dsl/replay_on_device.py

A quarter of the small cases of the matrix run in the interpreter, every launch is saved (machine code, parameters, memory before and after), and the
GPU runs the same machine code on the same memory. The two halves can also run apart, the first on any machine with the `cute` extra, the second
where there are numpy and a driver:

    python tests/dsl/replay_on_device.py --capture FOLDER --arch sm_100a
    python tests/dsl/replay_on_device.py --replay FOLDER
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "ptxsim")]

import replay

KEYS = {"sm_90a": "cute_sm90", "sm_100a": "cute_sm100", "sm_103a": "cute_sm100"}
LIMITS = {"int32": 0.0, "float32": 2.0**-9, "bfloat16": 2.0**-7, "float16": 2.0**-7}
"""The largest difference that passes, as a fraction of the largest value: ids are equal; sums are taken in another order, and 16-bit results may
round to a neighbour."""
DTYPES = "dtypes.json"


def saved_cases(arch: str, every: int) -> Iterator[tuple[str, Callable[[], list[Any]]]]:
    """(name, a call that returns its output tensors) for every n-th case of each stage that the kernels for `arch` take."""
    import m3attn
    from m3attn import registry
    from m3attn.choice import reasons_against
    from m3attn.testing.cases import tile_attention, tile_index, tile_select
    from m3attn.testing.inputs import attention_inputs, index_inputs, select_inputs

    key = KEYS[arch]

    def index_score(case: Any) -> list[Any]:
        inputs = index_inputs(case, "cpu")
        return [m3attn.index_score(inputs.index_q, inputs.cache, inputs.batch, index_q_scale=inputs.index_q_scale, impl=key)]

    def index_topk(case: Any) -> list[Any]:
        inputs = index_inputs(case, "cpu")
        return [m3attn.index_topk(inputs.index_q, inputs.cache, inputs.batch, **inputs.selection, index_q_scale=inputs.index_q_scale, impl=key)]

    def select_blocks(case: Any) -> list[Any]:
        scores, batch, selection = select_inputs(case, "cpu")
        return [m3attn.select_blocks(scores, batch, **selection, impl=key)]

    def sparse_attention(case: Any) -> list[Any]:
        inputs = attention_inputs(case, "cpu")
        return list(m3attn.sparse_attention(*inputs.arguments(), **inputs.options, return_lse=True, impl=key))

    listed = ((index_score, tile_index), (index_topk, tile_index), (select_blocks, tile_select), (sparse_attention, tile_attention))
    for stage, cases in listed:
        implementation = registry.find(stage.__name__, key)
        if implementation is None:
            continue
        for case in cases()[::every]:
            if not reasons_against(implementation, case.problem(arch.removesuffix("a"))):
                yield f"{stage.__name__}-{case.id}", lambda stage=stage, case=case: stage(case)


def capture(folder: Path, arch: str, every: int) -> None:
    """Fill `folder` with the launches of the cases, and with the dtypes of what they return.

    What was written is told from what stood there before, so that may not be what an earlier call left.
    """
    from simulator import simulated

    from m3attn.testing.poison import poisoned_empty

    dtypes: dict[str, dict[str, str]] = {}
    for name, call in saved_cases(arch, every):
        tag = re.sub(r"[^\w.-]+", "_", name) + "-"
        with poisoned_empty(), simulated(arch=arch, capture=folder, tag=tag):
            outputs = call()
        dtypes[tag] = {str(tensor.untyped_storage().data_ptr()): str(tensor.dtype).removeprefix("torch.") for tensor in outputs}
        print(f"captured {name}", flush=True)
    (folder / DTYPES).write_text(json.dumps(dtypes))


@dataclass(frozen=True)
class Compared:
    """An allocation that the launch wrote to: how many elements it changed, how many of them differ, and by how much."""

    dtype: str
    changed: int
    unequal: int
    fraction: float  # of the largest value; infinite where one of the two is not finite

    @property
    def agrees(self) -> bool:
        return self.fraction <= LIMITS[self.dtype]

    def __str__(self) -> str:
        if not self.unequal:
            return f"{self.changed} {self.dtype} equal"
        return f"{self.unequal} of {self.changed} {self.dtype} differ, by at most {self.fraction:.2g} of the largest"


def values(image: np.ndarray, dtype: str) -> np.ndarray:
    """Bytes as numbers."""
    if dtype == "bfloat16":
        return (image[: len(image) // 2 * 2].view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    numbers = np.dtype(dtype)
    return image[: len(image) // numbers.itemsize * numbers.itemsize].view(numbers)


def compare(before: np.ndarray, simulated: np.ndarray, real: np.ndarray, dtype: str) -> Compared | None:
    """Of an allocation's bytes; None where neither changed any."""
    size = 2 if dtype.endswith("16") else 4
    words = [image[: len(image) // size * size].view(f"u{size}") for image in (before, simulated, real)]
    is_changed = (words[1] != words[0]) | (words[2] != words[0])
    if not is_changed.any():
        return None
    is_unequal = (words[1] != words[2]) & is_changed
    expected, found = (values(image, dtype).astype(np.float64) for image in (simulated, real))
    is_same = (expected == found) | (np.isnan(expected) & np.isnan(found))
    pairs = is_unequal & ~is_same
    with np.errstate(invalid="ignore"):
        difference = np.nan_to_num(np.abs(expected - found)[pairs], nan=np.inf)
    largest = np.abs(expected[is_changed & np.isfinite(expected)]).max(initial=0)
    fraction = float(difference.max(initial=0) / largest) if largest else float(difference.max(initial=0))
    return Compared(dtype, int(is_changed.sum()), int(is_unequal.sum()), fraction)


def replay_one(driver: replay.Driver, saved: dict[str, np.ndarray], dtypes: dict[str, str]) -> list[Compared]:
    """Run one launch; what it wrote against what the interpreter wrote. Scratch holds fp32."""
    found = []
    for k, real in enumerate(replay.run(driver, saved)):
        dtype = dtypes.get(str(int(saved["starts"][k])), "float32")
        found.append(compare(saved[f"before{k}"], saved[f"after{k}"], real, dtype))
    return [compared for compared in found if compared is not None]


def replay_file(path: Path, driver: replay.Driver) -> tuple[bool, str]:
    """Whether device and interpreter agree about a saved launch, and a line that says how."""
    dtypes = json.loads((path.parent / DTYPES).read_text())
    known = next((found for tag, found in dtypes.items() if re.fullmatch(re.escape(tag) + r"\d+\.npz", path.name)), {})
    with np.load(path) as file, np.errstate(all="ignore"):
        compared = replay_one(driver, dict(file), known)
    agrees = bool(compared) and all(one.agrees for one in compared)
    return agrees, f"{'agrees' if agrees else 'DIFFERS'}: {path.stem}: {'; '.join(map(str, compared)) or 'nothing was written'}"


def replay_folder(folder: Path) -> bool:
    """A line a launch, each in a process of its own (an error spoils its context), and a last one; whether all agree."""
    files = sorted(folder.glob("*.npz"))
    agreed = 0
    for path in files:
        done = subprocess.run([sys.executable, __file__, "--replay", str(path)], capture_output=True, text=True)
        line = done.stdout.strip() or f"FAILS: {path.stem}: {done.stderr.strip()[-200:]}"
        agreed += line.startswith("agrees")
        print(line, flush=True)
    print(f"{agreed} of {len(files)} launches agree with the interpreter")
    return bool(files) and agreed == len(files)


def device() -> tuple[str, tuple[int, int]]:
    """(name and driver, compute capability) of the first GPU."""
    driver, name, version, numbers = replay.Driver(), ctypes.create_string_buffer(100), ctypes.c_int(), [ctypes.c_int(), ctypes.c_int()]
    driver("cuDeviceGetName", name, 100, 0)
    driver("cuDriverGetVersion", ctypes.byref(version))
    for number, attribute in zip(numbers, (75, 76), strict=True):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
        driver("cuDeviceGetAttribute", ctypes.byref(number), attribute, 0)
    return f"{name.value.decode()}, CUDA {version.value // 1000}.{version.value % 1000 // 10}", (numbers[0].value, numbers[1].value)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capture", type=Path, metavar="FOLDER", help="only save launches there")
    parser.add_argument("--replay", type=Path, metavar="FOLDER", help="only run those saved there, or one file")
    parser.add_argument("--arch", choices=KEYS, help="default: that of the GPU")
    parser.add_argument("--every", type=int, default=4, metavar="N", help="every n-th case (default 4)")
    chosen = parser.parse_args(arguments)
    if chosen.replay is not None and chosen.replay.suffix == ".npz":
        agrees, line = replay_file(chosen.replay, replay.Driver())
        print(line)
        return 0 if agrees else 1
    if chosen.capture is not None:
        if chosen.arch is None:
            parser.error("--capture: name the architecture by --arch")
        capture(chosen.capture, chosen.arch, chosen.every)
        return 0
    name, capability = device()
    print(name, "compute capability", ".".join(map(str, capability)))
    if chosen.replay is not None:
        return 0 if replay_folder(chosen.replay) else 1
    arch = f"sm_{capability[0]}{capability[1]}a"
    if arch not in KEYS:
        parser.error(f"there are no kernels for {arch}, only for {', '.join(KEYS)}")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, __file__, "--capture", folder, "--arch", arch, "--every", str(chosen.every)], check=True)
        return 0 if replay_folder(Path(folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
