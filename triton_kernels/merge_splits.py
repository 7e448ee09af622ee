"""Split-K's second half: joins the partial attention of every split of the keys, adds the sink, scales and rounds once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from m3attn.scales import UNIT, Scale
from m3attn.triton_kernels.launch import cdiv, launch, next_power_of_2
from m3attn.triton_kernels.primitives import load_scale, sink_share

MMA_ROWS: dict[str, str | int | None] = {"merge_splits_kernel": None}


@triton.jit
def merge_splits_kernel(
    partial_out_ptr,  # [SPLITS, T, Hq, D] fp32, contiguous
    partial_lse_ptr,  # [SPLITS, T, Hq] fp32, natural log, contiguous; -inf: a split without keys
    q_ptr,  # [T, Hq, D], only for the sink
    sink_key_ptr,  # [Hq, D] or None
    out_ptr,  # [T, Hq, D]
    lse_ptr,  # [T, Hq] or None
    q_strides,
    sink_key_strides,
    out_strides,
    lse_strides,
    num_rows,  # T * Hq
    num_q_heads,
    sm_scale,
    q_scale,
    q_scale_ptr,
    v_scale,
    v_scale_ptr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)  # [BLOCK_R], a row is one head of one token
    splits = tl.arange(0, SPLITS)
    offs_d = tl.arange(0, PADDED_D)
    in_rows = rows < num_rows
    token = (rows // num_q_heads).to(tl.int64)
    head = (rows % num_q_heads).to(tl.int64)
    tile_mask = in_rows[:, None] & (offs_d < D)[None, :]
    if PDL:
        # In this order: launched before the wait, the next kernel's programs take multiprocessors while the splits still run, and replays of
        # decode steps get slower.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    partial_rows = splits[:, None].to(tl.int64) * num_rows + rows[None, :]  # [SPLITS, BLOCK_R]
    partial_lse = tl.load(partial_lse_ptr + partial_rows, mask=in_rows[None, :], other=float("-inf"))
    largest = tl.max(partial_lse, axis=0)  # [BLOCK_R]
    empty = largest == float("-inf")
    weights = tl.exp(partial_lse - tl.where(empty, 0.0, largest)[None, :])
    total = tl.where(empty, 1.0, tl.sum(weights, axis=0))
    lse = tl.where(empty, float("-inf"), largest + tl.log(total))

    # A split without keys has written no output: its bytes are read, so as not to wait for the LSEs first, and dropped.
    partial_out = tl.load(
        partial_out_ptr + partial_rows[:, :, None] * D + offs_d[None, None, :], mask=tile_mask[None, :, :], other=0.0
    )  # [SPLITS, BLOCK_R, D]
    partial_out = tl.where((partial_lse > float("-inf"))[:, :, None], partial_out, 0.0)
    output = tl.sum(partial_out * weights[:, :, None], axis=0) / total[:, None]
    if sink_key_ptr is not None:
        q = tl.load(q_ptr + token[:, None] * q_strides[0] + head[:, None] * q_strides[1] + offs_d[None, :], mask=tile_mask, other=0.0)
        sink_key = tl.load(sink_key_ptr + head[:, None] * sink_key_strides[0] + offs_d[None, :] * sink_key_strides[1], mask=tile_mask, other=0.0)
        output *= sink_share(q, sink_key, sm_scale * load_scale(q_scale, q_scale_ptr), lse)[:, None]
    output *= load_scale(v_scale, v_scale_ptr)
    out_offsets = token[:, None] * out_strides[0] + head[:, None] * out_strides[1] + offs_d[None, :]
    tl.store(out_ptr + out_offsets, output.to(out_ptr.dtype.element_ty), mask=tile_mask)
    if lse_ptr is not None:
        tl.store(lse_ptr + token * lse_strides[0] + head * lse_strides[1], lse, mask=in_rows)


def merge_splits(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    v_scale: Scale = UNIT,
    sink_key: torch.Tensor | None = None,
    q: torch.Tensor | None = None,
    sm_scale: float = 1.0,
    q_scale: Scale = UNIT,
    pdl: bool = False,
) -> None:
    """Write the attention over all splits' keys.

    Args:
        partial_out: [splits, T, Hq, D] fp32, contiguous, splits a power of two: each split's normalised output, before v_scale and the
            sink. Ignored where partial_lse is -inf.
        partial_lse: [splits, T, Hq] fp32, contiguous, natural log; -inf for a split without keys.
        out: [T, Hq, D], unit last stride; gets 0 where every split is empty.
        lse: [T, Hq] fp32 or None; natural log, without the sink.
        v_scale: factor of the fp32 output before its one rounding.
        sink_key: [Hq, D] or None; needs `q` [T, Hq, D] and takes logit q . sink_key * sm_scale * q_scale.
        pdl: the splits were launched with `gdc_launch_dependents`; sm_90 and later.
    """
    splits, num_tokens, num_q_heads, head_dim = partial_out.shape
    num_rows, padded_d = num_tokens * num_q_heads, next_power_of_2(head_dim)
    block_r = max(1, 2048 // (splits * padded_d))
    if sink_key is None:
        q = None
    launch(
        merge_splits_kernel,
        (cdiv(num_rows, block_r),),
        partial_out,
        partial_lse,
        q,
        sink_key,
        out,
        lse,
        (0, 0) if q is None else q.stride()[:2],
        (0, 0) if sink_key is None else sink_key.stride(),
        out.stride()[:2],
        (0, 0) if lse is None else lse.stride(),
        num_rows,
        num_q_heads,
        sm_scale,
        q_scale.value,
        q_scale.tensor,
        v_scale.value,
        v_scale.tensor,
        device=out.device,
        num_warps=4 if splits * padded_d <= 8192 else 8,
        num_stages=1,
        pdl=pdl,
        D=head_dim,
        PADDED_D=padded_d,
        SPLITS=splits,
        BLOCK_R=block_r,
        PDL=pdl,
    )
