"""Split-K sparse attention for steps with few query tokens: a row's selected keys are shared out among programs, `merge_splits` joins them."""

import triton
import triton.language as tl

from m3attn.triton_kernels.dense_tiles import load_rows
from m3attn.triton_kernels.primitives import LOG2E, find_row, load_scale
from m3attn.triton_kernels.sparse_tiles import attend_selected, entries_to_walk, load_ids

MMA_ROWS: dict[str, str | int | None] = {"sparse_decode_kernel": "BLOCK_M"}
COMPILE_EXCEPTIONS = {
    ("sparse_decode_kernel", "sm_90", "spills"): "two warps with 2 spilled words a thread took 26.6 us, the next best 27.0 (H200, B16xL32768)"
}


@triton.jit
def sparse_decode_kernel(
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [pages, Hkv, page_size, D]
    v_ptr,  # the same, or uint16 [pages, Hkv, page_size, D / 2] for pairs of fp8 values
    ids_ptr,  # [Hkv, T, K]
    partial_out_ptr,  # [SPLITS, T, Hq, D] fp32, contiguous
    partial_lse_ptr,  # [SPLITS, T, Hq] fp32, contiguous
    page_table_ptr,  # [B, max_pages]
    seq_lens_ptr,  # [B]
    cu_seqlens_ptr,  # [B + 1]
    q_scale_ptr,
    k_scale_ptr,
    sm_scale,
    q_scale,
    k_scale,
    q_strides,
    k_strides,
    v_strides,
    ids_strides,
    page_table_stride,
    num_requests,
    num_rows,
    num_q_heads,
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
    SPLITS: tl.constexpr,
    FP8_PV: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if PDL:
        # Starts beside the kernel that writes q or ids and waits for it here; the merge starts beside the splits and waits for all of them.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    ids_ptr += kv_head.to(tl.int64) * ids_strides[0] + row.to(tl.int64) * ids_strides[1]
    blocks = load_ids(ids_ptr, ids_strides[2], TOPK, PADDED_TOPK)
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

    steps = entries_to_walk(blocks, visible, BLOCK_SIZE) * (BLOCK_SIZE // BLOCK_N)
    steps_per_split = tl.cdiv(steps, SPLITS)
    begin_step = split * steps_per_split
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
        begin_step,
        tl.minimum(begin_step + steps_per_split, steps),
        visible,
        key_scale,
        BLOCK_SIZE,
        PAGE_SIZE,
        HEAD_DIM,
        BLOCK_N,
        BLOCK_D,
        FP8_PV,
    )
    partial_rows = (split.to(tl.int64) * num_rows + row) * num_q_heads + heads  # [BLOCK_M]
    out_pointers = partial_out_ptr + partial_rows[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(out_pointers, output, mask=is_head[:, None] & (offs_d < HEAD_DIM)[None, :])
    tl.store(partial_lse_ptr + partial_rows, lse, mask=is_head)
