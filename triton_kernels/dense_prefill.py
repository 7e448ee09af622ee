"""Dense causal attention over a paged cache, one pass: BLOCK_T tokens times the heads of a group against all their keys."""

import triton
import triton.language as tl

from m3attn.triton_kernels.dense_tiles import attend_tiles, grouped_rows, load_rows
from m3attn.triton_kernels.fp8 import finish_values
from m3attn.triton_kernels.primitives import LOG2E, finish_softmax, load_scale, sink_share, tile_rows

MMA_ROWS = {"dense_prefill_kernel": "BLOCK_M"}


@triton.jit
def dense_prefill_kernel(
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [pages, Hkv, page_size, D]
    v_ptr,
    sink_ptr,  # [Hq, D] or None
    out_ptr,  # [T, Hq, D]
    lse_ptr,  # [T, Hq] fp32 or None
    page_table_ptr,  # [B, max_pages]
    seq_lens_ptr,  # [B]
    cu_seqlens_ptr,  # [B + 1]
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    logit_scale,  # sm_scale * q_scale
    k_scale,
    v_scale,
    q_strides,
    k_strides,
    v_strides,
    sink_stride,
    out_strides,
    lse_strides,
    page_table_stride,
    num_requests,
    num_rows,
    max_seqlen_k,
    max_pages,
    num_pages,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FP8_PV: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    # The last tiles of a request see the most keys: they start first, so that the short ones fill the end of the launch.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    request, first_row, end_row, first_position, seq_len = tile_rows(
        cu_seqlens_ptr, seq_lens_ptr, num_requests, tile, 0, num_rows, max_seqlen_k, BLOCK_T, BLOCK_B
    )
    token, row, head, is_row = grouped_rows(first_row, end_row, kv_head, GROUP, BLOCK_T, BLOCK_M)
    positions = first_position + token  # [BLOCK_M]
    q = load_rows(q_ptr, row * q_strides[0] + head * q_strides[1], is_row, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    query_scale = load_scale(logit_scale, q_scale_ptr)
    key_scale = query_scale * load_scale(k_scale, k_scale_ptr) * LOG2E

    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    # A tile without rows sees no keys. It does not return early: the branch costs Triton 3.9 its knowledge of how wide a load may be.
    seen_by_one = tl.where(first_row < end_row, tl.maximum(tl.minimum(first_position + BLOCK_T, seq_len), 0), 0)
    seen_by_all = tl.maximum(tl.minimum((first_position + 1) // BLOCK_N * BLOCK_N, seen_by_one), 0)
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
            seen_by_all if MASKED else 0,
            seen_by_one if MASKED else seen_by_all,
            key_scale,
            MASKED,
            PAGE_SIZE,
            HEAD_DIM,
            BLOCK_N,
            BLOCK_D,
            FP8_PV,
        )
    output, lse = finish_softmax(accumulator, running_max, running_sum)
    output = finish_values(output, FP8_PV) * load_scale(v_scale, v_scale_ptr)
    if sink_ptr is not None:
        sink = load_rows(sink_ptr, head * sink_stride, is_row, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
        output *= sink_share(q, sink, query_scale, lse)[:, None]
    offs_d = tl.arange(0, BLOCK_D)
    out_pointers = out_ptr + (row * out_strides[0] + head * out_strides[1])[:, None] + offs_d[None, :]
    tl.store(out_pointers, output.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (offs_d < HEAD_DIM)[None, :])
    if lse_ptr is not None:
        tl.store(lse_ptr + row * lse_strides[0] + head * lse_strides[1], lse, mask=is_row)
