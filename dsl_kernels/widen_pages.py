"""A wider copy of the pages that an fp8 prefill reads, in logical order, each element exactly: the tensor cores of a prefill take no fp8 values.

One thread block a quarter of a page and KV head. A thread asks for all that it moves before it stores the first of it; nothing past a sequence's end
is read, and zeros stand there in the copy of its last page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64, Uint32, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from m3attn.batch import PagedBatch
from m3attn.dsl_kernels.common.kernels import CuteKernel
from m3attn.dtypes import dtype_name

THREADS = 128
ROWS = 32
"""Of a page, for one thread block."""
STORE_BYTES = 16

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
        self.block_size, self.head_dim = variant.block_size, variant.head_dim
        self.parts = self.block_size // ROWS

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
            grid=(mWideK.shape[0] * self.parts * mWideK.shape[1], 1, 1), block=(THREADS, 1, 1), stream=stream
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
        # Heads fastest: those of a token may be neighbours in the pool.
        index, kv_heads, num_blocks = Uint32(cute.arch.block_idx()[0]), Uint32(mWideK.shape[1]), Uint32(mWideTable.shape[1])
        kv_head, index = Int32(index % kv_heads), index // kv_heads
        part, target = Int32(index % self.parts), index // self.parts
        request, block, target = Int32(target // num_blocks), Int32(target % num_blocks), Int32(target)
        if block < mPageTable.shape[1]:
            seq_len = mSeqLens[request]
            page = cutlass.min(cutlass.max(mPageTable[request, block], 0), mK.shape[0] - 1)
            # The page's part in the condition has it loaded with the others: it is one wait for memory.
            if seq_len > block * self.parts * ROWS and mCuSeqlens[request + 1] > mCuSeqlens[request] and page >= 0:
                num_keys = seq_len - (block * self.parts + part) * ROWS
                rK = self.read(mK[Int64(page), kv_head, None, None], self.k_dtype, part, num_keys)
                rV = self.read(mV[Int64(page), kv_head, None, None], self.v_dtype, part, num_keys)
                if cute.arch.thread_idx()[0] == 0 and kv_head == 0 and part == 0:
                    mWideTable[request, block] = target
                self.write(rK, mWideK[Int64(target), kv_head, None, None], self.k_dtype, part)
                self.write(rV, mWideV[Int64(target), kv_head, None, None], self.v_dtype, part)

    def chunks(self, gPage: cute.Tensor, dtype: Any, part: Int32) -> tuple[cute.Tensor, list[Int32]]:
        """What this thread moves of a part: (its chunks [elements, steps], each one's row in the part).

        A chunk is one store of 16 bytes, and neighbours take neighbouring chunks: so each load and each store of a warp is in one piece. From
        loads of 16 bytes of fp8, stores would have gaps.
        """
        size = STORE_BYTES * 8 // dtype.width
        chunks_of_row = self.head_dim // size
        rows = THREADS // chunks_of_row  # of a step
        thread = cute.arch.thread_idx()[0]
        row, chunk = thread // chunks_of_row, thread % chunks_of_row
        gPart = cute.local_tile(gPage, (ROWS, self.head_dim), (part, 0))
        return cute.local_tile(gPart, (rows, size), (None, chunk))[row, None, None], [row + first for first in range(0, ROWS, rows)]

    @cute.jit
    def read(self, gPage: cute.Tensor, dtype: cutlass.Constexpr, part: Int32, num_keys: Int32):
        chunks, rows = self.chunks(gPage, dtype, part)
        rBytes = cute.make_rmem_tensor(chunks.shape, cutlass.Uint8)
        rBytes.fill(0)
        for step, row in enumerate(rows):
            if row < num_keys:
                cute.autovec_copy(chunks[None, step], rBytes[None, step])
        return rBytes

    @cute.jit
    def write(self, rBytes: cute.Tensor, gPage: cute.Tensor, dtype: cutlass.Constexpr, part: Int32):
        """Zeros past the sequence's end, so that a load of the whole page reads nothing that nobody wrote."""
        chunks, rows = self.chunks(gPage, dtype, part)
        for step in range(len(rows)):
            elements = cute.recast_tensor(rBytes[None, step], self.dtype)
            if const_expr(dtype is not self.dtype):
                wide = cute.make_rmem_tensor(elements.shape, dtype)
                wide.store(elements.load().to(dtype))
                elements = wide
            cute.autovec_copy(elements, chunks[None, step])


def build(variant: Variant) -> tuple[Any, tuple[Any, ...]]:
    kernel = WidenPages(variant)
    pages, copies, kv_heads, requests = (cute.sym_int() for _ in range(4))
    align = 16 if variant.aligned else 1
    shape = (kv_heads, variant.block_size, variant.head_dim)

    def cache(count: Any) -> Any:
        strides = (*(cute.sym_int64(divisibility=align) for _ in range(3)), 1)
        return make_fake_tensor(cutlass.Uint8, (count, *shape), strides, assumed_align=align)

    def copy(dtype: Any) -> Any:
        page = cute.sym_int64(divisibility=shape[1] * shape[2])
        return make_fake_tensor(dtype, (copies, *shape), (page, shape[1] * shape[2], shape[2], 1), assumed_align=16)

    def ints(*shape: Any) -> Any:
        return make_fake_tensor(Int32, shape, tuple(cute.sym_int64() for _ in shape))

    return kernel, (
        cache(pages),
        cache(pages),
        copy(kernel.k_dtype),
        copy(kernel.v_dtype),
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
            all three; the last block of each request is filled up with zeros.
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
