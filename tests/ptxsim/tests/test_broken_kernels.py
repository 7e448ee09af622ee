"""Does a broken kernel show? Kernels of the other tests, with one thing taken out of their PTX."""

import contextlib
import math
import re

import pytest
import torch
from needed import need

need("nvidia-cutlass-dsl")

import cutlass.cute as cute
import ptxsim
import test_tcgen05
import test_wgmma
from cutlass.cute.runtime import from_dlpack


def error_of(module, arch, order, edit):
    """Largest error of one tile of the module's GEMM, three K tiles deep, whose PTX went through `edit`, which also says how much it changed."""
    torch.manual_seed(0)
    tile = (64, 64, 64) if module is test_wgmma else (128, 64, 64)
    M, N, K = tile
    a, b, c = torch.randn(M, 3 * K).bfloat16(), torch.randn(N, 3 * K).bfloat16(), torch.zeros(M, N)
    changes = []

    def apply(text):
        text, count = edit(text)
        changes.append(count)
        return text

    with ptxsim.device(arch, order=order, edit=apply):
        A, B, C = (from_dlpack(x, assumed_align=16) for x in (a, b, c))
        extra = () if module is test_wgmma else (test_tcgen05.L32,)
        cute.compile(module.host, A, B, C, tile, *extra)(A, B, C)
    assert all(changes)
    return (c.double() - a.double() @ b.double().T).abs().max().nan_to_num(nan=math.inf).item()


def drop(pattern, by=";"):
    return lambda text: re.subn(pattern, by, text)


@pytest.mark.parametrize("module,arch", [(test_wgmma, "sm_90a"), (test_tcgen05, "sm_100a")])
def test_unbroken(module, arch):
    assert error_of(module, arch, "lazy", drop(r"//.*\n", "\n")) < 1e-3


@pytest.mark.parametrize("module,arch", [(test_wgmma, "sm_90a"), (test_tcgen05, "sm_100a")])
def test_tma_not_awaited(module, arch):
    wait = drop(r"mbarrier\.try_wait\.parity\.shared\.b64 P1, [^;]*;", "setp.eq.u32 P1, 0, 0;")
    with contextlib.suppress(ptxsim.SimError):
        assert error_of(module, arch, "lazy", wait) > 1


def test_wgmma_not_awaited():
    assert error_of(test_wgmma, "sm_90a", "lazy", drop(r"wgmma\.wait_group\.sync\.aligned\s+0;", "wgmma.wait_group.sync.aligned 7;")) > 1


@pytest.mark.parametrize("order", ["eager", "lazy"])
def test_no_commit(order):
    with pytest.raises(ptxsim.Deadlock):
        error_of(test_tcgen05, "sm_100a", order, drop(r"tcgen05\.commit[^;]*;"))


@pytest.mark.parametrize("order", ["eager", "lazy"])
def test_wrong_byte_count(order):
    with pytest.raises(ptxsim.Deadlock):
        error_of(test_wgmma, "sm_90a", order, lambda t: re.subn(r"(mov\.b32 \s*%r\d+, )16384;", r"\g<1>16640;", t))


def test_wrong_swizzle():
    """descriptors that say 64-byte swizzling where the tile is stored with 128"""

    def other(m):
        return str(int(m.group(0)) ^ (6 << 61))

    assert error_of(test_tcgen05, "sm_100a", "eager", lambda t: re.subn(r"\b4611\d{15}\b", other, t)) > 1


def test_unknown_instruction_is_refused():
    with pytest.raises(ptxsim.SimError, match="unsupported instruction"):
        error_of(test_wgmma, "sm_90a", "eager", lambda t: re.subn(r"wgmma\.fence\.sync\.aligned;", "wgmma.fence.sync.aligned.novel;", t))
