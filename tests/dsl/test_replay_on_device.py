"""The script that compares a GPU with the interpreter, up to the driver: one that is made of host memory stands for it."""

import contextlib
import ctypes
import io
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from needed import need

need("nvidia-cutlass-dsl", "apache-tvm-ffi")

import replay_on_device
from replay_on_device import DTYPES, LIMITS, capture, compare, main, replay, replay_file

from m3attn.testing.inputs import NAN_BYTE
from m3attn.testing.poison import GARBAGE_BYTE

ARCHS = ("sm_90a", "sm_100a")


class HostDriver(replay.Driver):
    """Allocations are host memory, and a launch writes there what the interpreter wrote, or what `spoil` makes of it."""

    def __init__(self, saved: dict[str, np.ndarray], spoil: object = None) -> None:
        self.after = [saved[f"after{k}"].copy() for k in range(len(saved["starts"]))]
        if spoil is not None:
            spoil(self.after)
        self.kept: list[ctypes.Array] = []
        self.places: list[int] = []

    def __call__(self, name: str, *arguments: object) -> None:
        if name == "cuMemAlloc_v2":
            self.kept.append(ctypes.create_string_buffer(arguments[1].value))
            arguments[0]._obj.value = ctypes.addressof(self.kept[-1])
        elif name in ("cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2"):
            if name == "cuMemcpyHtoD_v2":
                self.places.append(arguments[0].value)
            ctypes.memmove(*(argument.value for argument in arguments))
        elif name == "cuLaunchKernelEx":
            for place, image in zip(self.places, self.after, strict=True):
                ctypes.memmove(place, image.ctypes.data, len(image))


@pytest.fixture(scope="module", params=ARCHS)
def captured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    cases = list(replay_on_device.saved_cases(request.param, every=12))
    chosen = [next(case for case in cases if case[0].startswith(stage)) for stage in ("index_topk", "select_blocks")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay_on_device, "saved_cases", lambda arch, every: chosen)
        capture(folder, request.param, every=12)
    return folder


def test_every_stage_has_cases() -> None:
    for arch in ARCHS:
        stages = {name.split("-")[0] for name, _ in replay_on_device.saved_cases(arch, every=4)}
        assert stages == {"index_score", "index_topk", "select_blocks", "sparse_attention"}


def test_what_is_written_is_never_there_before(captured: Path) -> None:
    """Fresh memory may hold what an earlier call wrote, and the same bits written again would count for nothing written."""
    for path in captured.glob("*.npz"):
        saved = dict(np.load(path))
        for k in range(len(saved["starts"])):
            before, after = saved[f"before{k}"], saved[f"after{k}"]
            assert np.isin(before[before != after], (NAN_BYTE, GARBAGE_BYTE)).all()


def test_an_equal_device_agrees(captured: Path) -> None:
    files = sorted(captured.glob("*.npz"))
    assert {path.name.split("-")[0] for path in files} == {"index_topk", "select_blocks"}
    for path in files:
        agrees, line = replay_file(path, HostDriver(dict(np.load(path))))
        assert agrees and "equal" in line and "differ" not in line


def test_another_id_differs(captured: Path) -> None:
    dtypes = json.loads((captured / DTYPES).read_text())
    (path,) = captured.glob("select_blocks*.npz")
    saved = dict(np.load(path))
    (start,) = next(found for tag, found in dtypes.items() if path.name.startswith(tag))
    place = saved["starts"].tolist().index(int(start))

    def spoil(images: list[np.ndarray]) -> None:
        images[place].view(np.int32)[0] += 1

    agrees, line = replay_file(path, HostDriver(saved, spoil))
    assert not agrees and line.startswith("DIFFERS") and "1 of" in line and "int32 differ" in line


def test_a_launch_that_writes_nothing_differs(captured: Path) -> None:
    path = next(captured.glob("select_blocks*.npz"))
    saved = dict(np.load(path))

    def spoil(images: list[np.ndarray]) -> None:
        images[:] = [saved[f"before{k}"].copy() for k in range(len(images))]

    agrees, _ = replay_file(path, HostDriver(saved, spoil))
    assert not agrees


@pytest.mark.parametrize(("dtype", "storage"), [("float32", np.float32), ("bfloat16", np.uint16), ("float16", np.float16)])
def test_limits_of_rounding(dtype: str, storage: type) -> None:
    def image(numbers: list[float]) -> np.ndarray:
        array = np.array(numbers, np.float32)
        return ((array.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else array.astype(storage)).view(np.uint8)

    before, expected = image([9, 9, 9, 9]), image([1, -2, float("-inf"), 9])
    assert compare(before, before, before, dtype) is None
    same = compare(before, expected, expected, dtype)
    assert same.agrees and (same.changed, same.unequal) == (3, 0)
    near, far = (compare(before, expected, image([1 + factor * LIMITS[dtype], -2, float("-inf"), 9]), dtype) for factor in (1, 4))
    assert near.agrees and near.unequal == 1 and not far.agrees
    assert not compare(before, expected, image([1, -2, 5, 9]), dtype).agrees
    assert not compare(before, expected, image([1, float("nan"), float("-inf"), 9]), dtype).agrees


def test_capture_names_its_architecture(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["--capture", "somewhere"])
    assert "--capture: name the architecture by --arch" in capsys.readouterr().err


def test_the_one_command(captured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """With a driver of host memory in the place of the GPU's, and launches that are there already in that of new ones."""
    arch = next(arch for arch in ARCHS if captured.name.startswith(arch))

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess:
        if "--capture" in command:
            assert command[command.index("--arch") + 1] == arch
            shutil.copytree(captured, command[command.index("--capture") + 1], dirs_exist_ok=True)
            return subprocess.CompletedProcess(command, 0)
        path = Path(command[-1])
        monkeypatch.setattr(replay, "Driver", lambda: HostDriver(dict(np.load(path))))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = main(command[2:])
        return subprocess.CompletedProcess(command, code, printed.getvalue(), "")

    monkeypatch.setattr(replay_on_device, "device", lambda: ("A GPU, CUDA 13.0", tuple(map(int, (arch[3:-2], arch[-2])))))
    monkeypatch.setattr(replay_on_device.subprocess, "run", run)
    assert main([]) == 0
    _, *launches, last = capsys.readouterr().out.splitlines()
    assert len(launches) == len(list(captured.glob("*.npz"))) and all(line.startswith("agrees: ") for line in launches)
    assert last == f"{len(launches)} of {len(launches)} launches agree with the interpreter"


def test_a_gpu_without_kernels(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(replay_on_device, "device", lambda: ("An older GPU", (8, 0)))
    with pytest.raises(SystemExit):
        main([])
    assert "there are no kernels for sm_80a" in capsys.readouterr().err
