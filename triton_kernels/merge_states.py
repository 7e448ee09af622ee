"""Joins two partial attention results over disjoint keys, each known by its output and its natural-log LSE."""

from __future__ import annotations

import triton
import triton.language as tl

from m3attn.calls import MergeAttentionStatesCall
from m3attn.triton_kernels.launch import cdiv, launch, next_power_of_2

MMA_ROWS = {"merge_states_kernel": None}
TILE_ELEMENTS = 4096


@triton.jit
def load_part(out_ptr, lse_ptr, out_strides, lse_strides, token, head, is_row, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """(output [BLOCK_R, BLOCK_D] fp32, LSE [BLOCK_R]) of one part; 0 and -inf for a row without keys, whatever its output holds.

    An LSE of +inf marks a row without keys as well: sparse_mla_prefill writes it so.
    """
    offs_d = tl.arange(0, BLOCK_D)
    lse = tl.load(lse_ptr + token * lse_strides[0] + head * lse_strides[1], mask=is_row, other=float("-inf"))
    lse = tl.where(lse == float("inf"), float("-inf"), lse)
    has_keys = lse != float("-inf")
    pointers = out_ptr + (token * out_strides[0] + head * out_strides[1])[:, None] + offs_d[None, :] * out_strides[2]
    output = tl.load(pointers, mask=has_keys[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
    return output.to(tl.float32), lse


@triton.jit
def merge_states_kernel(
    out_a_ptr,  # [T, H, D]
    lse_a_ptr,  # [T, H] fp32
    out_b_ptr,
    lse_b_ptr,
    out_ptr,  # [T, H, D]
    lse_ptr,  # [T, H] fp32
    out_a_strides,
    lse_a_strides,
    out_b_strides,
    lse_b_strides,
    out_strides,
    lse_strides,
    num_rows,  # T * H
    num_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)  # [BLOCK_R], a row is one head of one token
    token, head, is_row = rows // num_heads, rows % num_heads, rows < num_rows
    out_a, lse_a = load_part(out_a_ptr, lse_a_ptr, out_a_strides, lse_a_strides, token, head, is_row, HEAD_DIM, BLOCK_D)
    out_b, lse_b = load_part(out_b_ptr, lse_b_ptr, out_b_strides, lse_b_strides, token, head, is_row, HEAD_DIM, BLOCK_D)

    largest = tl.maximum(lse_a, lse_b, propagate_nan=tl.PropagateNan.ALL)  # [BLOCK_R]
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    weight_a, weight_b = tl.exp(lse_a - shift), tl.exp(lse_b - shift)
    total = weight_a + weight_b
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    output = (out_a * weight_a[:, None] + out_b * weight_b[:, None]) / total[:, None]  # [BLOCK_R, BLOCK_D]
    lse = tl.where(empty, float("-inf"), shift + tl.log(total))

    offs_d = tl.arange(0, BLOCK_D)
    pointers = out_ptr + (token * out_strides[0] + head * out_strides[1])[:, None] + offs_d[None, :] * out_strides[2]
    tl.store(pointers, output.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (offs_d < HEAD_DIM)[None, :])
    tl.store(lse_ptr + token * lse_strides[0] + head * lse_strides[1], lse, mask=is_row)


def merge_attention_states(call: MergeAttentionStatesCall) -> None:
    """Fill `call.out` and `call.lse`.

    A row without keys in one part (LSE -inf or +inf; its output is not read) takes the other part's output and LSE as they are; without keys
    in both it gets 0 and -inf. A NaN LSE makes its row NaN. Outputs must not overlap inputs.
    """
    num_tokens, num_heads, head_dim = call.out.shape
    block_d = next_power_of_2(head_dim)
    block_r = max(1, TILE_ELEMENTS // block_d)
    launch(
        merge_states_kernel,
        (cdiv(num_tokens * num_heads, block_r),),
        call.out_a,
        call.lse_a,
        call.out_b,
        call.lse_b,
        call.out,
        call.lse,
        call.out_a.stride(),
        call.lse_a.stride(),
        call.out_b.stride(),
        call.lse_b.stride(),
        call.out.stride(),
        call.lse.stride(),
        num_tokens * num_heads,
        num_heads,
        device=call.out.device,
        num_warps=8,
        num_stages=1,
        HEAD_DIM=head_dim,
        BLOCK_R=block_r,
        BLOCK_D=block_d,
    )
