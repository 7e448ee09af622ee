"""Public quack kernels: rmsnorm, softmax and GEMMs (sm_90a: clusters, st.async, TMA multicast; sm_100a: persistent tcgen05)."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from needed import need

need("nvidia-cutlass-dsl", "flash-attn-4", "quack-kernels")

import ptxsim
from test_flash_attn import load


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_rowwise(arch):
    load(arch)
    torch.manual_seed(0)
    x, w = torch.randn(6, 1024).bfloat16(), torch.randn(1024)
    with ptxsim.device(arch):
        from quack.rmsnorm import rmsnorm
        from quack.softmax import softmax

        y, z = rmsnorm(x, w), softmax(x)
    r = x.double() * torch.rsqrt((x.double() ** 2).mean(-1, keepdim=True) + 1e-6) * w.double()
    assert (y.double() - r).abs().max() < 0.02
    assert (z.double() - x.double().softmax(-1)).abs().max() < 1e-3


def gemm(arch, order):
    load(arch)
    torch.manual_seed(0)
    a, b = torch.randn(256, 192).bfloat16(), torch.randn(192, 256).bfloat16()
    with ptxsim.device(arch, order=order) as d:
        from quack.gemm_interface import gemm

        y = gemm(a, b, tuned=False)
    r = a.double() @ b.double()
    assert arch[:-1].replace("_", "").capitalize() in d.stats[0]["kernel"]
    assert (y.double() - r).abs().max() <= (r.bfloat16().double() - r).abs().max() * 1.01 + 1e-3


@pytest.mark.parametrize("order", ["eager", "random"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_gemm(arch, order):
    # in a process of its own: quack keeps the kernels that it built for the first device that it saw
    paths = [str(pathlib.Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    run = subprocess.run([sys.executable, __file__, arch, order], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]


if __name__ == "__main__":
    gemm(*sys.argv[1:])
