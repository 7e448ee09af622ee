"""Sparse attention as the contract states it: one program is one query token and one KV group, and walks the blocks selected for them."""

import triton
import triton.language as tl

from m3attn.triton_kernels.dense_tiles import load_rows
from m3attn.triton_kernels.primitives import LOG2E, find_row, load_scale, sink_share
from m3attn.triton_kernels.sparse_tiles import attend_selected, entries_to_walk, load_ids

MMA_ROWS: dict[str, str | int | None] = {"sparse_prefill_kernel": "BLOCK_M"}
COMPILE_EXCEPTIONS = {
    ("sparse_prefill_kernel", "sm_90", "spills"): "one warp with 12 spilled words a thread took 3.38 ms where two without any took 3.49 (H200, P1)"
}


@triton.jit
def sparse_prefill_kernel(
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [pages, Hkv, page_size, D]
    v_ptr,  # the same, or uint16 [pages, Hkv, page_size, D / 2] for pairs of fp8 values
    ids_ptr,  # [Hkv, T, K]
    sink_key_ptr,  # [Hq, D] or None
    out_ptr,  # [T, Hq, D]
    lse_ptr,  # [T, Hq] or None
    page_table_ptr,  # [B, max_pages]
    seq_lens_ptr,  # [B]
    cu_seqlens_ptr,  # [B + 1]
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    sm_scale,
    q_scale,
    k_scale,
    v_scale,
    q_strides,
    k_strides,
    v_strides,
    ids_strides,
    sink_key_strides,
    out_strides,
    lse_strides,
    page_table_stride,
    num_requests,
    max_seqlen_k,
    max_pages,
    num_pages,
    TOPK: tl.constexpr,
    PADDED_TOPK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,  # GROUP, padded to what a tensor core takes
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    FP8_PV: tl.constexpr,
):
    # Groups are the slow grid axis: programs that run together then read one group's keys, which fit the L2 cache longest.
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    request, position, seq_len = find_row(cu_seqlens_ptr, seq_lens_ptr, num_requests, row, max_seqlen_k, BLOCK_B)
    visible = tl.maximum(tl.minimum(position + 1, seq_len), 0)
    row = row.to(tl.int64)

    offs_g = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    heads = (kv_head * GROUP + offs_g).to(tl.int64)  # [BLOCK_M]
    is_head = offs_g < GROUP
    q = load_rows(q_ptr + row * q_strides[0], heads * q_strides[1], is_head, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    query_scale = sm_scale * load_scale(q_scale, q_scale_ptr)
    key_scale = query_scale * load_scale(k_scale, k_scale_ptr) * LOG2E

    ids_ptr += kv_head.to(tl.int64) * ids_strides[0] + row * ids_strides[1]
    entries = entries_to_walk(load_ids(ids_ptr, ids_strides[2], TOPK, PADDED_TOPK), visible, BLOCK_SIZE)
    output, lse = attend_selected(
        q,
        k_ptr,
        v_ptr,
        ids_ptr,
        page_table_ptr,
        k_strides,
        v_strides,
        ids_strides[2],
        page_table_stride,
        max_pages,
        num_pages,
        request,
        kv_head,
        0,
        entries * (BLOCK_SIZE // BLOCK_N),
        visible,
        key_scale,
        BLOCK_SIZE,
        PAGE_SIZE,
        HEAD_DIM,
        BLOCK_N,
        BLOCK_D,
        FP8_PV,
    )
    if sink_key_ptr is not None:
        sink_pointers = sink_key_ptr + heads[:, None] * sink_key_strides[0] + offs_d[None, :].to(tl.int64) * sink_key_strides[1]
        sink_key = tl.load(sink_pointers, mask=is_head[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)  # [BLOCK_M, BLOCK_D]
        output *= sink_share(q, sink_key, query_scale, lse)[:, None]
    output *= load_scale(v_scale, v_scale_ptr)
    out_pointers = out_ptr + row * out_strides[0] + heads[:, None] * out_strides[1] + offs_d[None, :]
    tl.store(out_pointers, output.to(out_ptr.dtype.element_ty), mask=is_head[:, None] & (offs_d < HEAD_DIM)[None, :])
    if lse_ptr is not None:
        tl.store(lse_ptr + row * lse_strides[0] + heads * lse_strides[1], lse, mask=is_head)
