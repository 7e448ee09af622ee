"""The public flash-attn-4 package, unchanged: forward and backward for sm_90a and sm_100a on tiny problems."""

import math
import sys

import pytest
import torch
from needed import need

need("nvidia-cutlass-dsl", "flash-attn-4", "quack-kernels")

import ptxsim


def load(arch):
    with ptxsim.device(arch):
        import flash_attn.cute.interface as i
    for name, mod in list(sys.modules.items()):  # the package remembers which device it first saw
        if name.startswith(("flash_attn.cute", "quack")):
            for f in list(vars(mod).values()):
                if hasattr(f, "cache_clear"):
                    f.cache_clear()
    return i


def first(x):
    return x[0] if isinstance(x, tuple) else x


def ref(q, k, v, causal):
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    if causal:
        i = torch.arange(s.shape[2])[:, None] + s.shape[3] - s.shape[2]
        s = s.masked_fill(torch.arange(s.shape[3]) > i, float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v)


def rand(*shape, dt=torch.bfloat16):
    return torch.randn(*shape).to(dt)


@pytest.mark.parametrize("order", ["eager", "lazy", "random"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("shape", [(1, 256, 256, 1, 1, 128, True), (2, 150, 150, 4, 1, 64, True), (1, 200, 300, 1, 1, 128, False)])
def test_forward(arch, shape, order):
    b, sq, sk, h, hk, d, causal = shape
    fa = load(arch)
    torch.manual_seed(0)
    q, k, v = rand(b, sq, h, d), rand(b, sk, hk, d), rand(b, sk, hk, d)
    with ptxsim.device(arch, order=order) as dev:
        o = first(fa.flash_attn_func(q, k, v, causal=causal))
    r = ref(q.double(), k.double(), v.double(), causal)
    err, low = (o.double() - r).abs().max(), (r.bfloat16().double() - r).abs().max()
    assert arch[:-1].replace("_", "") in dev.stats[0]["kernel"]
    assert err < 3 * low + 1e-3 and not dev.hazards


@pytest.mark.parametrize("order", ["eager", "random"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_backward(arch, order):
    """on sm_100a this one runs clusters of two CTAs, cta_group::2 MMAs and copies between the CTAs' shared memories"""
    fa = load(arch)
    torch.manual_seed(0)
    q, k, v = (rand(1, 128, 1, 128).requires_grad_() for _ in range(3))
    with ptxsim.device(arch, order=order) as dev:
        o = first(fa.flash_attn_func(q, k, v, causal=True))
        g = rand(*o.shape)
        got = torch.autograd.grad(o, (q, k, v), g)
    assert any(arch[:-1].replace("_", "") in s["kernel"] for s in dev.stats)
    q2, k2, v2 = (x.detach().double().requires_grad_() for x in (q, k, v))
    want = torch.autograd.grad(ref(q2, k2, v2, True), (q2, k2, v2), g.double())
    for a, b in zip(got, want, strict=False):
        assert (a.double() - b).abs().max() < 0.01 * b.abs().max()


def test_fp8_forward():
    fa = load("sm_100a")
    torch.manual_seed(0)
    q, k, v = (rand(1, 256, 2, 128, dt=torch.float8_e4m3fn) for _ in range(3))
    with ptxsim.device("sm_100a"):
        o = first(fa.flash_attn_func(q, k, v, causal=True))
    assert (o.double() - ref(q.double(), k.double(), v.double(), True)).abs().max() < 0.06


@pytest.mark.parametrize("order", ["eager", "random"])
def test_mla_sparse(order):
    """absorbed MLA over chosen keys: cp.async gathers, clusters of 2, cluster launch control"""
    fa = load("sm_100a")
    torch.manual_seed(0)
    sq, sk, h, dv, dr, topk = 2, 400, 64, 512, 64, 256
    q, qv, k, v = rand(1, sq, h, dr), rand(1, sq, h, dv), rand(1, sk, 1, dr), rand(1, sk, 1, dv)
    idx = torch.stack([torch.randperm(sk)[:topk] for _ in range(sq)]).view(1, sq, topk).int()
    with ptxsim.device("sm_100a", order=order, hazards="collect"):
        o = first(fa.flash_attn_func(q, k, v, qv=qv, causal=False, gather_kv_indices=idx))
    for t in range(sq):
        kk, vv = k[0, idx[0, t].long(), 0].double(), v[0, idx[0, t].long(), 0].double()
        s = (q[0, t].double() @ kk.T + qv[0, t].double() @ vv.T) / math.sqrt(dr + dv)
        assert (o[0, t].double() - s.softmax(-1) @ vv).abs().max() < 0.01
