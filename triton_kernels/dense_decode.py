"""Dense causal attention for few queries: every request's keys are cut into SPLITS parts, so that one long request fills the GPU."""

import triton
import triton.language as tl

from m3attn.triton_kernels.dense_tiles import attend_tiles, grouped_rows, load_rows
from m3attn.triton_kernels.fp8 import finish_values
from m3attn.triton_kernels.primitives import LOG2E, finish_softmax, load_scale, tile_rows

MMA_ROWS = {"dense_decode_kernel": "BLOCK_M"}
COMPILE_EXCEPTIONS = {
    (
        "dense_decode_kernel",
        "sm_90",
        "spills",
    ): "fp8: 128 keys a step, 12 words spilled, took 51.9 us where 64 took 55.6 (H200, B1xL131072)"
}


@triton.jit
def dense_decode_kernel(
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [pages, Hkv, page_size, D]
    v_ptr,
    partial_out_ptr,  # [SPLITS, row_end - row_begin, Hq, D] fp32, normalised; not written where the LSE is -inf
    partial_lse_ptr,  # [SPLITS, row_end - row_begin, Hq] fp32
    page_table_ptr,  # [B, max_pages]
    seq_lens_ptr,  # [B]
    cu_seqlens_ptr,  # [B + 1]
    q_scale_ptr,
    k_scale_ptr,
    logit_scale,  # sm_scale * q_scale
    k_scale,
    q_strides,
    k_strides,
    v_strides,
    page_table_stride,
    num_requests,
    row_begin,
    row_end,
    max_seqlen_k,
    max_pages,
    num_pages,
    num_q_heads,
    SPLITS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FP8_PV: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PDL: tl.constexpr,
):
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request, first_row, end_row, first_position, seq_len = tile_rows(
        cu_seqlens_ptr, seq_lens_ptr, num_requests, tile, row_begin, row_end, max_seqlen_k, BLOCK_T, BLOCK_B
    )
    token, row, head, is_row = grouped_rows(first_row, end_row, kv_head, GROUP, BLOCK_T, BLOCK_M)
    positions = first_position + token  # [BLOCK_M]
    q = load_rows(q_ptr, row * q_strides[0] + head * q_strides[1], is_row, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    key_scale = load_scale(logit_scale, q_scale_ptr) * load_scale(k_scale, k_scale_ptr) * LOG2E

    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    # A tile without rows sees no keys. It does not return early: the branch costs Triton 3.9 its knowledge of how wide a load may be.
    seen_by_one = tl.where(first_row < end_row, tl.maximum(tl.minimum(first_position + BLOCK_T, seq_len), 0), 0)
    split_keys = tl.cdiv(tl.cdiv(seen_by_one, BLOCK_N), SPLITS) * BLOCK_N
    begin = tl.minimum(split * split_keys, seen_by_one)
    end = tl.minimum(begin + split_keys, seen_by_one)
    seen_by_all = tl.maximum(tl.minimum((first_position + 1) // BLOCK_N * BLOCK_N, end), begin)
    for MASKED in tl.static_range(2):
        accumulator, running_max, running_sum = attend_tiles(
            q,
            accumulator,
            running_max,
            running_sum,
            positions,
            k_ptr,
            v_ptr,
            k_strides,
            v_strides,
            page_table_ptr,
            page_table_stride,
            max_pages,
            num_pages,
            request,
            kv_head,
            seen_by_all if MASKED else begin,
            end if MASKED else seen_by_all,
            key_scale,
            MASKED,
            PAGE_SIZE,
            HEAD_DIM,
            BLOCK_N,
            BLOCK_D,
            FP8_PV,
        )
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    output, lse = finish_softmax(accumulator, running_max, running_sum)
    partial_row = (split * (row_end - row_begin) + row - row_begin) * num_q_heads + head  # [BLOCK_M], int64
    offs_d = tl.arange(0, BLOCK_D)
    has_keys = is_row & (lse > float("-inf"))
    out_pointers = partial_out_ptr + partial_row[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(out_pointers, finish_values(output, FP8_PV), mask=has_keys[:, None] & (offs_d < HEAD_DIM)[None, :])
    tl.store(partial_lse_ptr + partial_row, lse, mask=is_row)
