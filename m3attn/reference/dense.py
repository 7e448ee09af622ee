"""Causal grouped-query attention over the whole paged cache."""

from __future__ import annotations

import torch
from einops import einsum, rearrange

from m3attn.batch import PagedBatch
from m3attn.calls import DenseAttentionCall
from m3attn.reference.numerics import compute_dtype, full_precision, scale_factor, token_slices
from m3attn.reference.paging import request_tokens, requests
from m3attn.reference.softmax import apply_sink, masked_softmax
from m3attn.scales import Scale, ScaleLike


@full_precision
def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: PagedBatch,
    *,
    sm_scale: float | None = None,
    q_scale: ScaleLike | Scale = None,
    k_scale: ScaleLike | Scale = None,
    v_scale: ScaleLike | Scale = None,
    sink_key: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query to every token at or before its position.

    for each query row t at position p of request b, KV group g, query head h of g:
        logit[j] = q[t, h] . k[b, g, j] * sm_scale * q_scale * k_scale           for 0 <= j <= p
        sink     = q[t, h] . sink_key[h] * sm_scale * q_scale                    (its value is 0)
        out[t, h] = sum_j exp(logit[j]) v[b, g, j] * v_scale / (sum_j exp(logit[j]) + exp(sink))
        lse[t, h] = log sum_j exp(logit[j])                                      (without the sink)
    no tokens: out 0, lse -inf.

    Args:
        q: [T, Hq, D].
        k, v: [pages, Hkv, page_size, D]; the values' D may differ.
        sm_scale: None means D ** -0.5.
        q_scale, k_scale, v_scale: None, a float or a one-element fp32 tensor; value = stored * scale.
        sink_key: [Hq, D] or None.
        dtype: fp32 or fp64 to compute in; None as `numerics.compute_dtype`.

    Returns:
        out [T, Hq, D of v] and lse [T, Hq] (natural log), in the compute dtype.
    """
    dtype = compute_dtype(q, dtype)
    (num_rows, num_heads, head_dim), num_groups = q.shape, k.shape[1]
    sm_scale = head_dim**-0.5 if sm_scale is None else sm_scale
    q = rearrange(q.to(dtype), "t (g h) d -> t g h d", g=num_groups)
    sink = None if sink_key is None else rearrange(sink_key.to(dtype), "(g h) d -> g h d", g=num_groups)
    logit_scale = sm_scale * scale_factor({"q_scale": q_scale, "k_scale": k_scale}, q)
    sink_scale = sm_scale * scale_factor({"q_scale": q_scale}, q)
    out_scale = scale_factor({"v_scale": v_scale}, q)

    all_out = q.new_zeros(num_rows, num_heads, v.shape[-1])
    all_lse = q.new_full((num_rows, num_heads), float("-inf"))
    for request in requests(batch, num_rows):
        if request.seq_len == 0:
            continue
        keys = request_tokens(k, batch, request, dtype)
        values = request_tokens(v, batch, request, dtype)
        for rows in token_slices(request.end_row - request.first_row, dtype.itemsize * num_heads * request.seq_len * 4):
            position = torch.arange(rows.start, rows.stop, device=q.device) + request.first_position
            num_tokens = min(request.first_position + rows.stop, keys.shape[1])
            if num_tokens <= 0:
                continue
            here = slice(request.first_row + rows.start, request.first_row + rows.stop)
            visible = torch.arange(num_tokens, device=q.device) <= position[:, None]
            logits = einsum(q[here], keys[:, :num_tokens], "t g h d, g n d -> t g h n") * logit_scale
            weights, lse = masked_softmax(logits, visible[:, None, None])
            out = einsum(weights, values[:, :num_tokens], "t g h n, g n d -> t g h d") * out_scale
            if sink is not None:
                out = apply_sink(out, lse, einsum(q[here], sink, "t g h d, g h d -> t g h") * sink_scale)
            all_out[here] = rearrange(out, "t g h d -> t (g h) d")
            all_lse[here] = rearrange(lse, "t g h -> t (g h)")
    return all_out, all_lse


def dense_attention_call(call: DenseAttentionCall) -> None:
    out, lse = dense_attention(
        call.q,
        call.k,
        call.v,
        call.batch,
        sm_scale=call.sm_scale,
        q_scale=call.q_scale,
        k_scale=call.k_scale,
        v_scale=call.v_scale,
        sink_key=call.sink_key,
    )
    call.out.copy_(out)
    if call.lse is not None:
        call.lse.copy_(lse)
