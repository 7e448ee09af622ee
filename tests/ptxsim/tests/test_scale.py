"""Elementwise scaling to e4m3: conversions, predicated tails."""

import pytest
import torch
from needed import need

need("nvidia-cutlass-dsl")

import cutlass
import cutlass.cute as cute
import ptxsim
from cutlass.cute.runtime import from_dlpack


@cute.kernel
def scale_kernel(gx: cute.Tensor, gy: cute.Tensor, s: cutlass.Float32):
    tidx, _, _ = cute.arch.thread_idx()
    bidx, _, _ = cute.arch.block_idx()
    bdim, _, _ = cute.arch.block_dim()
    i = bidx * bdim + tidx
    if i < cute.size(gx):
        gy[i] = (gx[i].to(cutlass.Float32) * s).to(gy.element_type)


@cute.jit
def scale(gx: cute.Tensor, gy: cute.Tensor, s: cutlass.Float32):
    scale_kernel(gx, gy, s).launch(grid=(cute.ceil_div(cute.size(gx), 128), 1, 1), block=(128, 1, 1))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_scale(arch):
    torch.manual_seed(0)
    x = (torch.randn(1000) * 50).to(torch.bfloat16)
    y = torch.zeros(1000, dtype=torch.float8_e4m3fn)
    with ptxsim.device(arch):
        X, Y = from_dlpack(x).mark_layout_dynamic(), from_dlpack(y).mark_layout_dynamic()
        cute.compile(scale, X, Y, 2.5)(X, Y, 2.5)
    ref = (x.float() * 2.5).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(y.view(torch.uint8), ref.view(torch.uint8))
