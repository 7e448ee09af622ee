"""A GEMM tile with ldmatrix and mma.sync: C = A B^T."""

import pytest
import torch
from needed import need

need("nvidia-cutlass-dsl")

import cutlass
import cutlass.cute as cute
import ptxsim
from cutlass.cute.nvgpu import warp
from cutlass.cute.runtime import from_dlpack

M, N, K = 64, 48, 64


@cute.kernel
def kern(gA: cute.Tensor, gB: cute.Tensor, gC: cute.Tensor, mma: cute.TiledMma, sl_a: cute.ComposedLayout, sl_b: cute.ComposedLayout):
    tidx, _, _ = cute.arch.thread_idx()
    smem = cutlass.memory.SmemAllocator()
    sA = smem.allocate_tensor(gA.element_type, sl_a, 128)
    sB = smem.allocate_tensor(gB.element_type, sl_b, 128)
    for i in cutlass.range_constexpr(M * K // 128):
        e = i * 128 + tidx
        sA[e // K, e % K] = gA[e // K, e % K]
    for i in cutlass.range_constexpr(N * K // 128):
        e = i * 128 + tidx
        sB[e // K, e % K] = gB[e // K, e % K]
    cute.arch.sync_threads()
    thr = mma.get_slice(tidx)
    tCgC = thr.partition_C(gC)
    rA = mma.make_fragment_A(thr.partition_A(sA))
    rB = mma.make_fragment_B(thr.partition_B(sB))
    acc = mma.make_fragment_C(tCgC)
    acc.fill(0.0)
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), gA.element_type)
    atom2 = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 2), gB.element_type)
    cA = cute.make_tiled_copy_A(atom, mma)
    cB = cute.make_tiled_copy_B(atom2, mma)
    tA, tB = cA.get_slice(tidx), cB.get_slice(tidx)
    cute.copy(cA, tA.partition_S(sA), tA.retile(rA))
    cute.copy(cB, tB.partition_S(sB), tB.retile(rB))
    for k in cutlass.range_constexpr(cute.size(rA, mode=[2])):
        cute.gemm(mma, acc, rA[None, None, k], rB[None, None, k], acc)
    for i in cutlass.range_constexpr(cute.size(acc)):
        tCgC[i] = acc[i]


@cute.jit
def host(gA: cute.Tensor, gB: cute.Tensor, gC: cute.Tensor):
    op = warp.MmaF16BF16Op(gA.element_type, cutlass.Float32, (16, 8, 16))
    mma = cute.make_tiled_mma(op, cute.make_layout((4, 1, 1)), permutation_mnk=(M, 8, 16))
    sw = cute.make_swizzle(3, 3, 3)
    sl_a = cute.make_composed_layout(sw, 0, cute.make_layout((M, K), stride=(K, 1)))
    sl_b = cute.make_composed_layout(sw, 0, cute.make_layout((N, K), stride=(K, 1)))
    kern(gA, gB, gC, mma, sl_a, sl_b).launch(grid=(1, 1, 1), block=(128, 1, 1))


@pytest.mark.parametrize("dt", [torch.bfloat16, torch.float16])
def test_gemm(dt):
    torch.manual_seed(0)
    a, b, c = torch.randn(M, K).to(dt), torch.randn(N, K).to(dt), torch.zeros(M, N)
    with ptxsim.device("sm_90a"):
        A, B, C = (from_dlpack(x, assumed_align=16) for x in (a, b, c))
        f = cute.compile(host, A, B, C)
        assert "ldmatrix" in f.__ptx__ and "mma.sync" in f.__ptx__
        f(A, B, C)
    err = (c.double() - a.double() @ b.double().T).abs().max()
    assert err < 1e-4
