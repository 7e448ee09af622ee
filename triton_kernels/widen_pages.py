"""A 16-bit copy of the pages that an fp8 prefill reads: widened once here, each page would else be widened again by every query that selects it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from m3attn.batch import PagedBatch
from m3attn.triton_kernels.dense_tiles import load_rows, tile_offsets, tile_pages
from m3attn.triton_kernels.fp8 import widen_to
from m3attn.triton_kernels.launch import launch, next_power_of_2

MMA_ROWS: dict[str, str | int | None] = {"widen_pages_kernel": None}


@triton.jit
def widen_pages_kernel(
    k_ptr,  # [pages, Hkv, page_size, D]
    v_ptr,
    wide_k_ptr,  # [B * num_blocks, Hkv, block_size, D], contiguous
    wide_v_ptr,
    wide_table_ptr,  # [B, num_blocks]
    page_table_ptr,  # [B, max_pages]
    seq_lens_ptr,  # [B]
    cu_seqlens_ptr,  # [B + 1]
    k_strides,
    v_strides,
    page_table_stride,
    num_kv_heads,
    num_blocks,
    max_pages,
    num_pages,
    BLOCK_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    request = tl.program_id(0)
    kv_head = tl.program_id(1)
    tile = tl.program_id(2)
    seq_len = tl.minimum(tl.load(seq_lens_ptr + request), num_blocks * BLOCK_SIZE)
    has_queries = tl.load(cu_seqlens_ptr + request + 1) > tl.load(cu_seqlens_ptr + request)
    start = tile * BLOCK_N
    if has_queries & (start < seq_len):
        block = request.to(tl.int64) * num_blocks + start // BLOCK_SIZE
        if (kv_head == 0) & (start % BLOCK_SIZE == 0):
            tl.store(wide_table_ptr + block, block.to(tl.int32))
        offs_n = tl.arange(0, BLOCK_N)
        offs_d = tl.arange(0, BLOCK_D)
        is_key = start + offs_n < seq_len  # [BLOCK_N]
        page = tile_pages(page_table_ptr, page_table_stride, request, start, seq_len, max_pages, num_pages, PAGE_SIZE, BLOCK_N)
        head = kv_head.to(tl.int64)
        k = load_rows(k_ptr + head * k_strides[1], tile_offsets(page, start, k_strides, PAGE_SIZE, BLOCK_N), is_key, HEAD_DIM, BLOCK_D)
        v = load_rows(v_ptr + head * v_strides[1], tile_offsets(page, start, v_strides, PAGE_SIZE, BLOCK_N), is_key, HEAD_DIM, BLOCK_D)
        wide_rows = (block * num_kv_heads + head) * BLOCK_SIZE + start % BLOCK_SIZE + offs_n  # [BLOCK_N]
        offsets = wide_rows[:, None] * HEAD_DIM + offs_d[None, :]
        mask = is_key[:, None] & (offs_d < HEAD_DIM)[None, :]
        tl.store(wide_k_ptr + offsets, widen_to(k, wide_k_ptr.dtype.element_ty), mask=mask)
        tl.store(wide_v_ptr + offsets, widen_to(v, wide_v_ptr.dtype.element_ty), mask=mask)


def widen_pages(k: torch.Tensor, v: torch.Tensor, wide_k: torch.Tensor, wide_v: torch.Tensor, wide_table: torch.Tensor, batch: PagedBatch) -> None:
    """Copy every request's keys and values in logical order, each element exactly in the copy's type.

    Args:
        k, v: [pages, Hkv, page_size, D] fp8, any strides with unit last stride.
        wide_k, wide_v: [B * num_blocks, Hkv, block_size, D], contiguous: a cache whose pages are blocks.
        wide_table: [B, num_blocks] int32, that cache's page table. Blocks past seq_len, and of requests without queries, stay unwritten in
            all three.
    """
    num_pages, num_kv_heads, _, head_dim = k.shape
    block_n = min(64, batch.block_size)
    launch(
        widen_pages_kernel,
        (batch.num_requests, num_kv_heads, batch.num_blocks * (batch.block_size // block_n)),
        k,
        v,
        wide_k,
        wide_v,
        wide_table,
        batch.page_table,
        batch.seq_lens,
        batch.cu_seqlens_q,
        k.stride(),
        v.stride(),
        batch.page_table.stride(0),
        num_kv_heads,
        batch.num_blocks,
        batch.page_table.shape[1],
        num_pages,
        device=k.device,
        num_warps=4,
        num_stages=1,
        BLOCK_SIZE=batch.block_size,
        PAGE_SIZE=batch.page_size,
        HEAD_DIM=head_dim,
        BLOCK_N=block_n,
        BLOCK_D=next_power_of_2(head_dim),
    )
