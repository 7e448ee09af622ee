"""A wider copy of the pages that an fp8 prefill reads, in logical order, each element exactly: the tensor cores of a prefill take no fp8 values.

One thread block a block of keys and KV head. A thread asks for all its chunks of 16 bytes before it stores the first of them; nothing past a
sequence's end is read or written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from m3attn.batch import PagedBatch
from m3attn.dsl_kernels.common.kernels import CuteKernel
from m3attn.dtypes import dtype_name

THREADS = 128
CHUNK = 16
"""fp8 elements that a thread moves at a time."""

DTYPES: dict[str, Any] = {
    "fp8_e4m3": cutlass.Float8E4M3FN,
    "fp8_e5m2": cutlass.Float8E5M2,
    "bf16": cutlass.BFloat16,
    "fp16": cutlass.Float16,
}


@dataclass(frozen=True)
class Variant:
    """What is compiled.

    Attributes:
        dtype: of the cache; k_dtype, v_dtype: of the copies, the cache's own or 16 bit.
        aligned: rows of the cache lie at multiples of 16 bytes.
    """

    dtype: str
    k_dtype: str
    v_dtype: str
    head_dim: int
    block_size: int
    aligned: bool


class WidenPages:
    def __init__(self, variant: Variant) -> None:
        self.dtype, self.k_dtype, self.v_dtype = (DTYPES[name] for name in (variant.dtype, variant.k_dtype, variant.v_dtype))
        self.block_size = variant.block_size
        self.chunks_of_row = variant.head_dim // CHUNK
        self.steps = variant.block_size * self.chunks_of_row // THREADS

    @cute.jit
    def __call__(
        self,
        mK: cute.Tensor,  # [pages, Hkv, 128, D] bytes
        mV: cute.Tensor,  # [pages, Hkv, 128, D] bytes
        mWideK: cute.Tensor,  # [B * num_blocks, Hkv, 128, D]
        mWideV: cute.Tensor,  # [B * num_blocks, Hkv, 128, D]
        mWideTable: cute.Tensor,  # [B, num_blocks]
        mPageTable: cute.Tensor,  # [B, max_pages]
        mSeqLens: cute.Tensor,  # [B]
        mCuSeqlens: cute.Tensor,  # [B + 1]
        stream: cuda.CUstream,
    ):
        self.kernel(mK, mV, mWideK, mWideV, mWideTable, mPageTable, mSeqLens, mCuSeqlens).launch(
            grid=(mWideK.shape[0], mWideK.shape[1], 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mWideK: cute.Tensor,
        mWideV: cute.Tensor,
        mWideTable: cute.Tensor,
        mPageTable: cute.Tensor,
        mSeqLens: cute.Tensor,
        mCuSeqlens: cute.Tensor,
    ):
        target, kv_head, _ = cute.arch.block_idx()
        num_blocks = mWideTable.shape[1]
        request, block = target // num_blocks, target % num_blocks
        num_keys = mSeqLens[request] - block * self.block_size
        if num_keys > 0 and mCuSeqlens[request + 1] > mCuSeqlens[request] and block < mPageTable.shape[1]:
            page = cutlass.min(cutlass.max(mPageTable[request, block], 0), mK.shape[0] - 1)
            if cute.arch.thread_idx()[0] == 0 and kv_head == 0:
                mWideTable[request, block] = target
            rK = self.read(mK[Int64(page), kv_head, None, None], num_keys)
            rV = self.read(mV[Int64(page), kv_head, None, None], num_keys)
            self.write(rK, mWideK[Int64(target), kv_head, None, None], self.k_dtype, num_keys)
            self.write(rV, mWideV[Int64(target), kv_head, None, None], self.v_dtype, num_keys)

    def row_and_chunk(self, step):
        """Of a thread's step: neighbours take neighbouring chunks."""
        flat = step * THREADS + cute.arch.thread_idx()[0]
        return flat // self.chunks_of_row, flat % self.chunks_of_row

    @cute.jit
    def read(self, gPage: cute.Tensor, num_keys: Int32):
        rBytes = cute.make_rmem_tensor((CHUNK, self.steps), cutlass.Uint8)
        rBytes.fill(0)
        for step in cutlass.range_constexpr(self.steps):
            row, chunk = self.row_and_chunk(step)
            if row < num_keys:
                cute.autovec_copy(cute.local_tile(gPage[row, None], (CHUNK,), (chunk,)), rBytes[None, step])
        return rBytes

    @cute.jit
    def write(self, rBytes: cute.Tensor, gPage: cute.Tensor, dtype: cutlass.Constexpr, num_keys: Int32):
        for step in cutlass.range_constexpr(self.steps):
            row, chunk = self.row_and_chunk(step)
            if row < num_keys:
                narrow = cute.recast_tensor(rBytes[None, step], self.dtype)
                if const_expr(dtype is self.dtype):
                    cute.autovec_copy(narrow, cute.local_tile(gPage[row, None], (CHUNK,), (chunk,)))
                else:
                    wide = cute.make_rmem_tensor(CHUNK, dtype)
                    wide.store(narrow.load().to(dtype))
                    cute.autovec_copy(wide, cute.local_tile(gPage[row, None], (CHUNK,), (chunk,)))


def build(variant: Variant) -> tuple[Any, tuple[Any, ...]]:
    kernel = WidenPages(variant)
    pages, copies, kv_heads, requests = (cute.sym_int() for _ in range(4))
    align = 16 if variant.aligned else 1

    def pool(dtype: Any, count: Any, align: int) -> Any:
        shape = (count, kv_heads, variant.block_size, variant.head_dim)
        strides = (*(cute.sym_int64(divisibility=max(1, align * 8 // dtype.width)) for _ in range(3)), 1)
        return make_fake_tensor(dtype, shape, strides, assumed_align=align)

    def ints(*shape: Any) -> Any:
        return make_fake_tensor(Int32, shape, tuple(cute.sym_int64() for _ in shape))

    return kernel, (
        *(pool(cutlass.Uint8, pages, align) for _ in range(2)),
        pool(kernel.k_dtype, copies, 16),
        pool(kernel.v_dtype, copies, 16),
        ints(requests, cute.sym_int()),
        ints(requests, cute.sym_int()),
        ints(requests),
        ints(cute.sym_int()),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


KERNEL = CuteKernel("widen_pages", build, sources=[__file__])


def widen_pages(k: torch.Tensor, v: torch.Tensor, wide_k: torch.Tensor, wide_v: torch.Tensor, wide_table: torch.Tensor, batch: PagedBatch) -> None:
    """Copy every request's keys and values in logical order, each element exactly in the copy's type.

    Args:
        k, v: [pages, Hkv, 128, D] e4m3 or e5m2, any strides with unit last stride; pages are blocks.
        wide_k, wide_v: [B * num_blocks, Hkv, 128, D] bf16, fp16 or the cache's type, contiguous: a cache whose pages are blocks.
        wide_table: [B, num_blocks] int32, that cache's page table. Blocks past seq_len, and of requests without queries, stay unwritten in
            all three.
    """
    variant = Variant(
        dtype=dtype_name(k.dtype),
        k_dtype=dtype_name(wide_k.dtype),
        v_dtype=dtype_name(wide_v.dtype),
        head_dim=k.shape[3],
        block_size=k.shape[2],
        aligned=all(pool.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in pool.stride()[:3]) for pool in (k, v)),
    )
    bytes_of_k, bytes_of_v = k.view(torch.uint8), v.view(torch.uint8)
    KERNEL.get(variant, k.device)(bytes_of_k, bytes_of_v, wide_k, wide_v, wide_table, batch.page_table, batch.seq_lens, batch.cu_seqlens_q)
