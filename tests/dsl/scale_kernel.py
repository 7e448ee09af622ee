"""The smallest CuTe DSL kernel in the form of dsl_kernels/: y = x * factor, through shared memory. For tests of what is around kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from m3attn.dsl_kernels.common.kernels import CuteKernel


@dataclass(frozen=True)
class Variant:
    threads: int


class Scale:
    def __init__(self, variant: Variant) -> None:
        self.threads = variant.threads

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,  # [N]
        mY: cute.Tensor,  # [N]
        factor: cutlass.Float32,
        stream: cuda.CUstream,
    ):
        grid = (cute.ceil_div(mX.shape[0], self.threads), 1, 1)
        self.kernel(mX, mY, factor).launch(grid=grid, block=(self.threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mY: cute.Tensor, factor: cutlass.Float32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        index = block * self.threads + thread
        smem = cutlass.memory.SmemAllocator()
        tile = smem.allocate_tensor(cutlass.Float32, cute.make_layout(self.threads), 128)
        if index < mX.shape[0]:
            tile[self.threads - 1 - thread] = mX[index]
        cute.arch.sync_threads()
        if index < mX.shape[0]:
            mY[index] = tile[self.threads - 1 - thread] * factor


def build(variant: Variant) -> tuple[Any, tuple[Any, ...]]:
    length = cute.sym_int()
    x, y = (make_fake_tensor(cutlass.Float32, (length,), (cute.sym_int64(),)) for _ in range(2))
    return Scale(variant), (x, y, cutlass.Float32(0), make_fake_stream(use_tvm_ffi_env_stream=True))


KERNEL = CuteKernel("scale", build, sources=[__file__])
