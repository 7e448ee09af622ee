"""sm_100a: GEMM tiles with TMA loads, tcgen05.mma and an epilogue from tensor memory: C = A B^T."""

import pytest
import torch
from needed import need

need("nvidia-cutlass-dsl")

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
import ptxsim
from cutlass.cute.nvgpu import cpasync, tcgen05
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
    ld: cutlass.Constexpr,
):
    M, N, K = tile
    tidx, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    bx, by, _ = cute.arch.block_idx()
    smem = cutlass.memory.SmemAllocator()
    sA = smem.allocate_tensor(dt, sl_a.outer, 1024, swizzle=sl_a.inner)
    sB = smem.allocate_tensor(dt, sl_b.outer, 1024, swizzle=sl_b.inner)
    bars = smem.allocate_array(cutlass.Int64, 2)
    tptr = smem.allocate_array(cutlass.Int32, 1)
    gA = cute.local_tile(mA, (M, K), (bx, None))
    gB = cute.local_tile(mB, (N, K), (by, None))
    gCt = cute.local_tile(gC, (M, N), (bx, by))
    thr = mma.get_slice(0)
    tCgA, tCgB = thr.partition_A(gA), thr.partition_B(gB)
    tCgC = thr.partition_C(gCt)
    tAs, tAg = cpasync.tma_partition(tma_a, 0, cute.make_layout(1), cute.group_modes(sA, 0, 3), cute.group_modes(tCgA, 0, 3))
    tBs, tBg = cpasync.tma_partition(tma_b, 0, cute.make_layout(1), cute.group_modes(sB, 0, 3), cute.group_modes(tCgB, 0, 3))
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(bars, 1)
            cute.arch.mbarrier_init(bars + 1, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.alloc_tmem(256, tptr)
    cute.arch.sync_threads()
    tm = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, tptr)
    rA, rB = mma.make_fragment_A(sA), mma.make_fragment_B(sB)
    acc0 = mma.make_fragment_C(mma.partition_shape_C((M, N)))
    acc = cute.make_tensor(tm, acc0.layout)
    phase = cutlass.Int32(0)
    mma.set(tcgen05.Field.ACCUMULATE, False)
    for t in cutlass.range(cute.size(gA, mode=[2]), unroll=1):
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(
                    bars,
                    cute.size_in_bytes(dt, cute.slice_(sl_a, (None, None, None, 0)))
                    + cute.size_in_bytes(dt, cute.slice_(sl_b, (None, None, None, 0))),
                )
            cute.copy(tma_a, tAg[None, t], tAs[None, 0], tma_bar_ptr=bars)
            cute.copy(tma_b, tBg[None, t], tBs[None, 0], tma_bar_ptr=bars)
            cute.arch.mbarrier_wait(bars, phase)
            for k in cutlass.range_constexpr(cute.size(rA, mode=[2])):
                cute.gemm(mma, acc, rA[None, None, k, 0], rB[None, None, k, 0], acc)
                mma.set(tcgen05.Field.ACCUMULATE, True)
            with cute.arch.elect_one():
                tcgen05.commit(bars + 1)
        cute.arch.mbarrier_wait(bars + 1, phase)
        phase = phase ^ 1
        cute.arch.sync_threads()
    # epilogue: tensor memory -> registers -> global
    atom = cute.make_copy_atom(ld, cutlass.Float32)
    tacc = acc[(None, None), 0, 0]
    tgc = tCgC[(None, None), 0, 0]
    cp = tcgen05.make_tmem_copy(atom, tacc)
    th = cp.get_slice(tidx)
    src = th.partition_S(tacc)
    dst = th.partition_D(tgc)
    r = cute.make_rmem_tensor(dst.shape, cutlass.Float32)
    cute.copy(cp, src, r)
    for i in cutlass.range_constexpr(cute.size(r)):
        dst[i] = r[i]
    cute.arch.sync_threads()
    if warp == 0:
        cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.dealloc_tmem(tm, 256)


@cute.jit
def host(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, tile: cutlass.Constexpr, ld: cutlass.Constexpr):
    dt = a.element_type
    la, lb = LayoutEnum.from_tensor(a), LayoutEnum.from_tensor(b)
    M, N, _K = tile
    mma = sm100.make_trivial_tiled_mma(dt, b.element_type, la.mma_major_mode(), lb.mma_major_mode(), cutlass.Float32, tcgen05.CtaGroup.ONE, (M, N))
    sl_a = sm100.make_smem_layout_a(mma, tile, dt, 1)
    sl_b = sm100.make_smem_layout_b(mma, tile, b.element_type, 1)
    op = cpasync.CopyBulkTensorTileG2SOp()
    tma_a, mA = cute.nvgpu.make_tiled_tma_atom_A(op, a, cute.slice_(sl_a, (None, None, None, 0)), tile, mma)
    tma_b, mB = cute.nvgpu.make_tiled_tma_atom_B(op, b, cute.slice_(sl_b, (None, None, None, 0)), tile, mma)
    kern(tma_a, mA, tma_b, mB, c, mma, sl_a, sl_b, dt, tile, ld).launch(
        grid=(cute.ceil_div(cute.size(a, mode=[0]), M), cute.ceil_div(cute.size(b, mode=[0]), N), 1), block=(128, 1, 1)
    )


R = tcgen05.Repetition
L32 = tcgen05.Ld32x32bOp(R.x32)
CASES = [
    ("bf16", torch.bfloat16, (128, 64, 64), "kk", L32),
    ("bf16 n256", torch.bfloat16, (128, 256, 64), "kk", tcgen05.Ld32x32bOp(R.x64)),
    ("bf16 sw64", torch.bfloat16, (128, 64, 32), "kk", L32),
    ("bf16 A transposed", torch.bfloat16, (128, 64, 64), "mk", L32),
    ("bf16 B transposed", torch.bfloat16, (128, 128, 64), "kn", L32),
    ("f16 both transposed", torch.float16, (128, 64, 64), "mn", L32),
    ("bf16 m64", torch.bfloat16, (64, 64, 64), "kk", tcgen05.Ld16x256bOp(R.x8)),
    ("bf16 m64 16x128b", torch.bfloat16, (64, 64, 64), "kk", tcgen05.Ld16x128bOp(R.x8)),
    ("bf16 m64 16x64b", torch.bfloat16, (64, 64, 64), "kk", tcgen05.Ld16x64bOp(R.x16)),
    ("e4m3", torch.float8_e4m3fn, (128, 64, 128), "kk", L32),
    ("e4m3 sw64", torch.float8_e4m3fn, (128, 96, 64), "kk", L32),
    ("e5m2", torch.float8_e5m2, (128, 64, 96), "kk", L32),
    ("e4m3 both transposed", torch.float8_e4m3fn, (128, 128, 64), "mn", L32),
]


@pytest.mark.parametrize("order", ["eager", "lazy", "random"])
@pytest.mark.parametrize("name,dt,tile,major,ld", CASES, ids=[c[0] for c in CASES])
def test_gemm(name, dt, tile, major, ld, order):
    torch.manual_seed(0)
    M, N, K = tile
    m, n, k = 2 * M, 2 * N, 3 * K
    a = torch.randn(m, k).to(dt) if major[0] == "k" else torch.randn(k, m).to(dt).T
    b = torch.randn(n, k).to(dt) if major[1] == "k" else torch.randn(k, n).to(dt).T
    c = torch.zeros(m, n)
    with ptxsim.device("sm_100a", order=order):
        A, B, C = (from_dlpack(x, assumed_align=16) for x in (a, b, c))
        f = cute.compile(host, A, B, C, tile, ld)
        assert "tcgen05.mma" in f.__ptx__ and "cp.async.bulk.tensor" in f.__ptx__
        f(A, B, C)
    ref = a.double() @ b.double().T
    err = (c.double() - ref).abs().max()
    assert err < 1e-3
