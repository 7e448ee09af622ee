"""Attention of ragged queries over ragged keys of as many heads, as multi-head latent attention has it while it prefills."""

from __future__ import annotations

import torch
from einops import einsum

from m3attn.calls import MlaPrefillCall
from m3attn.reference.numerics import compute_dtype, full_precision, scale_factor, token_slices
from m3attn.reference.softmax import masked_softmax
from m3attn.scales import Scale, ScaleLike


@full_precision
def mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    causal: bool = True,
    sm_scale: float | None = None,
    q_scale: ScaleLike | Scale = None,
    k_scale: ScaleLike | Scale = None,
    v_scale: ScaleLike | Scale = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each request's queries to its keys.

    for each query i of a request with q_len queries and k_len keys, head h:
        logit[j] = q[i, h] . k[j, h] * sm_scale * q_scale * k_scale      for 0 <= j < k_len, and if causal j <= k_len - q_len + i
        out[i, h] = sum_j exp(logit[j]) v[j, h] * v_scale / sum_j exp(logit[j])
        lse[i, h] = log sum_j exp(logit[j])
    no keys, or a row that no request owns: out 0, lse -inf.

    Args:
        q: [T, H, d_qk].
        k, v: [Tk, H, d_qk], [Tk, H, d_v].
        cu_seqlens_q, cu_seqlens_k: [B + 1], offsets of each request's rows.
        sm_scale: None means d_qk ** -0.5.
        q_scale, k_scale, v_scale: None, a float or a one-element fp32 tensor; value = stored * scale.
        dtype: fp32 or fp64 to compute in; None as `numerics.compute_dtype`.

    Returns:
        out [T, H, d_v] and lse [T, H] (natural log), in the compute dtype.
    """
    dtype = compute_dtype(q, dtype)
    (num_rows, num_heads, dim), num_keys = q.shape, k.shape[0]
    logit_scale = (dim**-0.5 if sm_scale is None else sm_scale) * scale_factor({"q_scale": q_scale, "k_scale": k_scale}, q.to(dtype))
    out_scale = scale_factor({"v_scale": v_scale}, q.to(dtype))
    all_out = torch.zeros(num_rows, num_heads, v.shape[-1], dtype=dtype, device=q.device)
    all_lse = torch.full((num_rows, num_heads), float("-inf"), dtype=dtype, device=q.device)
    offsets_q, offsets_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for request in range(len(offsets_q) - 1):
        first_row, end_row = max(0, offsets_q[request]), min(num_rows, offsets_q[request + 1])
        first_key, end_key = max(0, offsets_k[request]), min(num_keys, offsets_k[request + 1])
        if first_row >= end_row or first_key >= end_key:
            continue
        keys, values = k[first_key:end_key].to(dtype), v[first_key:end_key].to(dtype)
        place = torch.arange(end_key - first_key, device=q.device)
        for rows in token_slices(end_row - first_row, dtype.itemsize * num_heads * len(place) * 4):
            here = slice(first_row + rows.start, first_row + rows.stop)
            position = torch.arange(here.start, here.stop, device=q.device) - offsets_q[request + 1] + len(place)
            visible = (place <= position[:, None]) if causal else torch.ones(len(position), len(place), dtype=torch.bool, device=q.device)
            logits = einsum(q[here].to(dtype), keys, "t h d, n h d -> t h n") * logit_scale
            weights, lse = masked_softmax(logits, visible[:, None])
            all_out[here] = einsum(weights, values, "t h n, n h d -> t h d") * out_scale
            all_lse[here] = lse
    return all_out, all_lse


def mla_prefill_call(call: MlaPrefillCall) -> None:
    out, lse = mla_prefill(
        call.q,
        call.k,
        call.v,
        call.cu_seqlens_q,
        call.cu_seqlens_k,
        causal=call.causal,
        sm_scale=call.sm_scale,
        q_scale=call.q_scale,
        k_scale=call.k_scale,
        v_scale=call.v_scale,
    )
    call.out.copy_(out)
    if call.lse is not None:
        call.lse.copy_(lse)
