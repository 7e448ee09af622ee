"""Reads of memory that no launch wrote: plain, bulk and tensor copies have one check in common."""

import pytest
import torch
from needed import need

need("nvidia-cutlass-dsl")

import cutlass.cute as cute
import ptxsim
from cutlass.cute.runtime import from_dlpack


@cute.kernel
def copy_kernel(gx: cute.Tensor, gy: cute.Tensor):
    i, _, _ = cute.arch.thread_idx()
    gy[i] = gx[i]


@cute.jit
def copy(gx: cute.Tensor, gy: cute.Tensor):
    copy_kernel(gx, gy).launch(grid=(1, 1, 1), block=(cute.size(gy), 1, 1))


def test_what_a_launch_wrote_may_be_read():
    x, y, z = (torch.full((size,), 7, dtype=torch.int32) for size in (64, 64, 64))
    first, last = x[:40], y[:40]
    with ptxsim.device("sm_90a") as device:
        device.watch(y)
        X, Y = from_dlpack(first), from_dlpack(last)
        cute.compile(copy, X, Y)(X, Y)
        Z = from_dlpack(z[:40])
        cute.compile(copy, Y, Z)(Y, Z)
        Y, Z = from_dlpack(y[:41]), from_dlpack(z[:41])
        with pytest.raises(ptxsim.SimError, match="4 bytes that nobody wrote"):
            cute.compile(copy, Y, Z)(Y, Z)


def test_a_strided_tensor_is_refused():
    with ptxsim.device("sm_90a") as device, pytest.raises(ValueError, match="contiguous"):
        device.watch(torch.zeros(8, 8)[:, :4])
