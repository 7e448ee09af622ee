"""sm_90a: GEMM tiles with TMA loads, an mbarrier and wgmma, several K tiles through one stage: C = A B^T."""

import pytest
import torch
from needed import need

need("nvidia-cutlass-dsl")

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
import ptxsim
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import from_dlpack
from cutlass.tensor_utils import LayoutEnum


@cute.kernel
def kern(
    tma_a: cute.CopyAtom,
    mA: cute.Tensor,
    tma_b: cute.CopyAtom,
    mB: cute.Tensor,
    gC: cute.Tensor,
    mma: cute.TiledMma,
    sl_a: cute.ComposedLayout,
    sl_b: cute.ComposedLayout,
    dt: cutlass.Constexpr,
    tile: cutlass.Constexpr,
):
    M, N, K = tile
    tidx, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    bx, by, _ = cute.arch.block_idx()
    smem = cutlass.memory.SmemAllocator()
    sA = smem.allocate_tensor(dt, sl_a.outer, 1024, swizzle=sl_a.inner)
    sB = smem.allocate_tensor(dt, sl_b.outer, 1024, swizzle=sl_b.inner)
    bar = smem.allocate_array(cutlass.Int64, 1)
    gA = cute.local_tile(mA, (M, K), (bx, None))
    gB = cute.local_tile(mB, (N, K), (by, None))
    tAs, tAg = cpasync.tma_partition(tma_a, 0, cute.make_layout(1), cute.group_modes(sA, 0, 2), cute.group_modes(gA, 0, 2))
    tBs, tBg = cpasync.tma_partition(tma_b, 0, cute.make_layout(1), cute.group_modes(sB, 0, 2), cute.group_modes(gB, 0, 2))
    if tidx == 0:
        cute.arch.mbarrier_init(bar, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    thr = mma.get_slice(tidx)
    rA = mma.make_fragment_A(thr.partition_A(sA))
    rB = mma.make_fragment_B(thr.partition_B(sB))
    tCgC = thr.partition_C(cute.local_tile(gC, (M, N), (bx, by)))
    acc = mma.make_fragment_C(tCgC.shape)
    mma.set(warpgroup.Field.ACCUMULATE, False)
    phase = cutlass.Int32(0)
    for t in cutlass.range(cute.size(gA, mode=[2]), unroll=1):
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(
                    bar, cute.size_in_bytes(dt, cute.slice_(sl_a, (None, None, 0))) + cute.size_in_bytes(dt, cute.slice_(sl_b, (None, None, 0)))
                )
            cute.copy(tma_a, tAg[None, t], tAs[None, 0], tma_bar_ptr=bar)
            cute.copy(tma_b, tBg[None, t], tBs[None, 0], tma_bar_ptr=bar)
        cute.arch.mbarrier_wait(bar, phase)
        phase = phase ^ 1
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(rA, mode=[2])):
            cute.gemm(mma, acc, rA[None, None, k, 0], rB[None, None, k, 0], acc)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        cute.arch.sync_threads()
    for i in cutlass.range_constexpr(cute.size(acc)):
        tCgC[i] = acc[i]


@cute.jit
def host(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, tile: cutlass.Constexpr):
    dt = a.element_type
    la, lb = LayoutEnum.from_tensor(a), LayoutEnum.from_tensor(b)
    M, N, K = tile
    mma = sm90.make_trivial_tiled_mma(
        dt, b.element_type, la.sm90_mma_major_mode(), lb.sm90_mma_major_mode(), cutlass.Float32, (M // 64, 1, 1), (64, N)
    )
    sl_a = sm90.make_smem_layout_a(la, tile, dt, 1)
    sl_b = sm90.make_smem_layout_b(lb, tile, dt, 1)
    op = cpasync.CopyBulkTensorTileG2SOp()
    tma_a, mA = cpasync.make_tiled_tma_atom(op, a, cute.slice_(sl_a, (None, None, 0)), (M, K))
    tma_b, mB = cpasync.make_tiled_tma_atom(op, b, cute.slice_(sl_b, (None, None, 0)), (N, K))
    kern(tma_a, mA, tma_b, mB, c, mma, sl_a, sl_b, dt, tile).launch(
        grid=(cute.ceil_div(cute.size(a, mode=[0]), M), cute.ceil_div(cute.size(b, mode=[0]), N), 1), block=(128 * (M // 64), 1, 1)
    )


CASES = [
    ("bf16", torch.bfloat16, (64, 64, 64), "kk"),
    ("bf16 2 warpgroups", torch.bfloat16, (128, 128, 64), "kk"),
    ("bf16 sw64", torch.bfloat16, (64, 32, 32), "kk"),
    ("bf16 sw32", torch.bfloat16, (64, 32, 48), "kk"),
    ("bf16 A transposed", torch.bfloat16, (64, 64, 64), "mk"),
    ("bf16 B transposed", torch.bfloat16, (64, 128, 64), "kn"),
    ("f16 both transposed", torch.float16, (128, 64, 32), "mn"),
    ("e4m3", torch.float8_e4m3fn, (64, 64, 128), "kk"),
    ("e4m3 sw64", torch.float8_e4m3fn, (64, 96, 64), "kk"),
    ("e5m2 sw32", torch.float8_e5m2, (64, 64, 96), "kk"),
]


@pytest.mark.parametrize("order", ["eager", "lazy", "random"])
@pytest.mark.parametrize("name,dt,tile,major", CASES, ids=[c[0] for c in CASES])
def test_gemm(name, dt, tile, major, order):
    torch.manual_seed(0)
    M, N, K = tile
    m, n, k = 2 * M, 2 * N, 3 * K
    a = torch.randn(m, k).to(dt) if major[0] == "k" else torch.randn(k, m).to(dt).T
    b = torch.randn(n, k).to(dt) if major[1] == "k" else torch.randn(k, n).to(dt).T
    c = torch.zeros(m, n)
    with ptxsim.device("sm_90a", order=order):
        A, B, C = (from_dlpack(x, assumed_align=16) for x in (a, b, c))
        f = cute.compile(host, A, B, C, tile)
        assert "wgmma" in f.__ptx__ and "cp.async.bulk.tensor" in f.__ptx__
        f(A, B, C)
    ref = a.double() @ b.double().T
    err = (c.double() - ref).abs().max()
    assert err < 1e-3
