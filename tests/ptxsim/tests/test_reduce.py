"""Reductions through shared memory: block barriers, named barriers, shuffles."""

import pytest
import torch
from needed import need

need("nvidia-cutlass-dsl")

import cutlass
import cutlass.cute as cute
import ptxsim
from cutlass.cute.runtime import from_dlpack

N = 256


@cute.kernel
def tree_kernel(gx: cute.Tensor, gy: cute.Tensor):
    tidx, _, _ = cute.arch.thread_idx()
    bidx, _, _ = cute.arch.block_idx()
    smem = cutlass.memory.SmemAllocator()
    s = smem.allocate_tensor(cutlass.Float32, cute.make_layout(N), byte_alignment=16)
    s[tidx] = gx[bidx, tidx]
    cute.arch.sync_threads()
    for k in cutlass.range_constexpr(8):
        h = N >> (k + 1)
        if tidx < h:
            s[tidx] = s[tidx] + s[tidx + h]
        cute.arch.sync_threads()
    if tidx == 0:
        gy[bidx] = s[0]


@cute.kernel
def warp_kernel(gx: cute.Tensor, gy: cute.Tensor):
    tidx, _, _ = cute.arch.thread_idx()
    bidx, _, _ = cute.arch.block_idx()
    smem = cutlass.memory.SmemAllocator()
    s = smem.allocate_tensor(cutlass.Float32, cute.make_layout(8), byte_alignment=16)
    v = gx[bidx, tidx]
    for k in cutlass.range_constexpr(5):
        v = v + cute.arch.shuffle_sync_bfly(v, 16 >> k)
    wid = tidx // 32
    if tidx % 32 == 0:
        s[wid] = v
    # the first half of the warps waits for all; the other half only arrives
    if wid < 4:
        cute.arch.barrier(barrier_id=3, number_of_threads=N)
    else:
        cute.arch.barrier_arrive(barrier_id=3, number_of_threads=N)
    if tidx == 0:
        t = cutlass.Float32(0.0)
        for k in cutlass.range_constexpr(8):
            t = t + s[k]
        gy[bidx] = t


@cute.kernel
def late_kernel(gx: cute.Tensor, gy: cute.Tensor):
    """a mistake: the barrier is missing"""
    tidx, _, _ = cute.arch.thread_idx()
    smem = cutlass.memory.SmemAllocator()
    s = smem.allocate_tensor(cutlass.Float32, cute.make_layout(N), byte_alignment=16)
    s[tidx] = gx[0, tidx]
    gy[tidx] = s[N - 1 - tidx]


@cute.jit
def tree(gx: cute.Tensor, gy: cute.Tensor):
    tree_kernel(gx, gy).launch(grid=(cute.size(gx, mode=[0]), 1, 1), block=(N, 1, 1))


@cute.jit
def warp(gx: cute.Tensor, gy: cute.Tensor):
    warp_kernel(gx, gy).launch(grid=(cute.size(gx, mode=[0]), 1, 1), block=(N, 1, 1))


@cute.jit
def late(gx: cute.Tensor, gy: cute.Tensor):
    late_kernel(gx, gy).launch(grid=(1, 1, 1), block=(N, 1, 1))


@pytest.mark.parametrize("order", ["eager", "random"])
@pytest.mark.parametrize("fn", [tree, warp])
def test_reduce(fn, order):
    torch.manual_seed(0)
    x = torch.randn(5, N)
    y = torch.zeros(5)
    with ptxsim.device("sm_90a", order=order):
        X, Y = from_dlpack(x), from_dlpack(y)
        cute.compile(fn, X, Y)(X, Y)
    assert (y - x.double().sum(1)).abs().max() < 1e-5


def test_missing_barrier_shows():
    x = torch.randn(1, N)
    y = torch.zeros(N)
    with ptxsim.device("sm_90a"):
        X, Y = from_dlpack(x), from_dlpack(y)
        cute.compile(late, X, Y)(X, Y)
    assert not torch.equal(y, x[0].flip(0))
    assert torch.isnan(y).any()  # what was never written reads as NaN


def test_out_of_bounds():
    x = torch.randn(5, N)
    y = torch.zeros(5)
    with pytest.raises(ptxsim.SimError, match="out of bounds"), ptxsim.device("sm_90a"):
        X, Y = from_dlpack(x).mark_layout_dynamic(), from_dlpack(y)
        cute.compile(tree, X, Y)(X, from_dlpack(torch.zeros(1)))
