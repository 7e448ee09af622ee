"""Captured launches, replayed on a driver that is simulated too: its device memory is host memory, its kernel doubles every word."""

import ctypes
import pathlib
import struct

import numpy as np
import torch
from needed import need
from torch._subclasses import FakeTensorMode

need()

from ptxsim import replay
from ptxsim.device import _tensor_ranges
from ptxsim.machine.capture import Capture
from ptxsim.machine.machine import Machine
from ptxsim.translate.ptx import Module

DOUBLE = """
.version 8.6
.target sm_90a
.address_size 64
.visible .entry double_words(.param .u32 double_words_param_0, .param .u64 double_words_param_1)
{
    .reg .b32 %r<4>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [double_words_param_1];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd1, %rd1, %rd2;
    ld.global.u32 %r2, [%rd1];
    add.u32 %r2, %r2, %r2;
    st.global.u32 [%rd1], %r2;
    ret;
}
"""


class HostDriver(replay.Driver):
    """Answers the calls that replay makes, with `num_words` words at the kernel's second parameter."""

    def __init__(self, num_words: int) -> None:
        self.num_words = num_words
        self.kept = []
        self.calls = []

    def __call__(self, name: str, *arguments) -> None:
        self.calls.append(name)
        if name == "cuMemAlloc_v2":
            self.kept.append(ctypes.create_string_buffer(arguments[1].value))
            arguments[0]._obj.value = ctypes.addressof(self.kept[-1])
        elif name in ("cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2"):
            ctypes.memmove(*(argument.value for argument in arguments))
        elif name == "cuLaunchKernelEx":
            config, parameters = arguments[0]._obj, arguments[2]
            assert list(config.grid) == [1, 1, 1] and list(config.block) == [32, 1, 1] and config.smem == 0
            address = ctypes.c_uint64.from_address(parameters[1]).value
            words = np.frombuffer((ctypes.c_uint32 * self.num_words).from_address(address), np.uint32)
            words *= 2


def test_capture_and_replay(tmp_path: pathlib.Path) -> None:
    data = torch.arange(32, dtype=torch.int32)
    machine = Machine(capture=Capture(str(tmp_path / "captured"), "double-", lambda module: b"cubin of " + module.text[:9].encode()))
    bounds = (data.data_ptr(), data.data_ptr() + data.nbytes)
    parameters = struct.pack("<IxxxxQ", 5, data.data_ptr())
    machine.launch(Module(DOUBLE), "double_words", (1, 1, 1), (32, 1, 1), params=parameters, ranges=[bounds])
    assert data.tolist() == list(range(0, 64, 2))

    [path] = (tmp_path / "captured").iterdir()
    assert path.name == "double-000.npz"
    saved = dict(np.load(path))
    assert saved["before0"].view(np.int32).tolist() == list(range(32)) and saved["cubin"].tobytes() == b"cubin of \n.version"
    driver = HostDriver(32)
    assert "[128 B: bytes equal 1.00000, 16-bit words equal 1.00000, max diff as f32 0, as bf16 0]" in replay.replay(driver, saved)
    assert driver.calls.count("cuLaunchKernelEx") == 1 and "cuFuncSetAttribute" not in driver.calls
    assert "bytes equal 0.8" in replay.replay(HostDriver(16), saved)  # a device that does half of it
    assert data.tolist() == list(range(0, 64, 2))  # replay touches its own copies only


def test_memory_of_tensors_that_have_none() -> None:
    """A leaked fake tensor says that it is on the CPU, at address 0: a kernel's small integers would count as pointers into it."""
    with FakeTensorMode():
        fake = torch.empty(16)
    real = torch.empty(16)
    ranges = _tensor_ranges()
    assert (real.data_ptr(), real.data_ptr() + 64) in ranges and fake.numel() == 16
    assert all(start for start, _ in ranges)
