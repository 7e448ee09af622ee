"""Sparse attention of multi-head latent attention: every head of a query attends to the same gathered tokens, whose values are part of their keys."""

from __future__ import annotations

import torch
from einops import einsum

from m3attn.calls import SparseMlaPrefillCall
from m3attn.reference.numerics import compute_dtype, from_indexable, full_precision, indexable, scale_factor, token_slices
from m3attn.reference.softmax import apply_sink, masked_softmax
from m3attn.scales import Scale, ScaleLike

VALUE_DIM = 512


@full_precision
def sparse_mla_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    *,
    sm_scale: float,
    q_scale: ScaleLike | Scale = None,
    kv_scale: ScaleLike | Scale = None,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of each query to the tokens its indices name.

    for each query s, head h:
        tokens = indices[s, :topk_length[s]] that lie in [0, s_kv)
        logit[j] = q[s, h] . kv[j] * sm_scale * q_scale * kv_scale               for j of tokens
        out[s, h] = sum_j exp(logit[j]) kv[j, :512] * kv_scale / (sum_j exp(logit[j]) + exp(attn_sink[h]))
        max_logits[s, h] = max_j logit[j],  lse[s, h] = log sum_j exp(logit[j])  (without the sink)
    no tokens: out 0, max_logits -inf, lse +inf.

    Args:
        q: [s_q, h_q, d_qk].
        kv: [s_kv, d_qk].
        indices: [s_q, topk].
        topk_length: [s_q] or None (topk); clamped to [0, topk].
        attn_sink: [h_q] or None, natural-log logit.
        dtype: fp32 or fp64 to compute in; None as `numerics.compute_dtype`.

    Returns:
        out [s_q, h_q, 512], max_logits and lse [s_q, h_q], in the compute dtype.
    """
    dtype = compute_dtype(q, dtype)
    place, topk, num_tokens = torch.arange(indices.shape[1], device=q.device), indices.shape[1], kv.shape[0]
    length = torch.full_like(indices[:, 0], topk) if topk_length is None else topk_length.clamp(0, topk)
    logit_scale = sm_scale * scale_factor({"q_scale": q_scale, "kv_scale": kv_scale}, q.to(dtype))
    out_scale = scale_factor({"kv_scale": kv_scale}, q.to(dtype))

    outs, all_max, lses = [], [], []
    for rows in token_slices(q.shape[0], dtype.itemsize * topk * (2 * kv.shape[1] + 3 * q.shape[1])):
        index = indices[rows].long()
        valid = (place < length[rows, None]) & (index >= 0) & (index < num_tokens)
        tokens = _gather(kv, index, valid, dtype)
        logits = einsum(q[rows].to(dtype), tokens, "s h d, s n d -> s h n") * logit_scale
        weights, lse = masked_softmax(logits, valid[:, None])
        out = einsum(weights, tokens[..., :VALUE_DIM], "s h n, s n d -> s h d") * out_scale
        if attn_sink is not None:
            out = apply_sink(out, lse, attn_sink.to(dtype).expand_as(lse))
        outs.append(out)
        all_max.append(logits.masked_fill(~valid[:, None], float("-inf")).amax(dim=-1))
        lses.append(torch.where(valid.any(dim=-1, keepdim=True), lse, float("inf")))
    return torch.cat(outs), torch.cat(all_max), torch.cat(lses)


def _gather(kv: torch.Tensor, index: torch.Tensor, valid: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """kv[index] [s, n, d_qk], zeros where not valid: what lies elsewhere is never multiplied with anything."""
    if kv.shape[0] == 0:
        return torch.zeros(*index.shape, kv.shape[1], dtype=dtype, device=kv.device)
    tokens = from_indexable(indexable(kv)[torch.where(valid, index, 0)], kv.dtype).to(dtype)
    return torch.where(valid[..., None], tokens, 0.0)


def sparse_mla_prefill_call(call: SparseMlaPrefillCall) -> None:
    out, max_logits, lse = sparse_mla_prefill(
        call.q,
        call.kv,
        call.indices,
        sm_scale=call.sm_scale,
        q_scale=call.q_scale,
        kv_scale=call.kv_scale,
        topk_length=call.topk_length,
        attn_sink=call.attn_sink,
    )
    call.out.copy_(out)
    call.max_logits.copy_(max_logits)
    call.lse.copy_(lse)
