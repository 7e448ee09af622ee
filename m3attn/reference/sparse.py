"""Sparse attention over selected blocks of a paged cache."""

from __future__ import annotations

import torch
from einops import einsum, rearrange

from m3attn.batch import PagedBatch
from m3attn.calls import SparseAttentionCall
from m3attn.reference.numerics import compute_dtype, full_precision, scale_factor, token_slices
from m3attn.reference.paging import gather_tokens, query_rows
from m3attn.reference.softmax import apply_sink, masked_softmax
from m3attn.scales import Scale, ScaleLike


@full_precision
def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ids: torch.Tensor,
    batch: PagedBatch,
    *,
    sm_scale: float | None = None,
    q_scale: ScaleLike | Scale = None,
    k_scale: ScaleLike | Scale = None,
    v_scale: ScaleLike | Scale = None,
    sink_key: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query to the visible tokens of the blocks selected for its KV group.

    for each query row t at position p of request b, KV group g, query head h of g:
        tokens = the j of blocks ids[g, t] with j <= p;  ids outside [0, p // block_size] are ignored
        logit[j] = q[t, h] . k[b, g, j] * sm_scale * q_scale * k_scale
        sink     = q[t, h] . sink_key[h] * sm_scale * q_scale                    (its value is 0)
        out[t, h] = sum_j exp(logit[j]) v[b, g, j] * v_scale / (sum_j exp(logit[j]) + exp(sink))
        lse[t, h] = log sum_j exp(logit[j])                                      (without the sink)
    no tokens: out 0, lse -inf.

    Args:
        q: [T, Hq, D].
        k, v: [pages, Hkv, page_size, D].
        ids: [Hkv, T, K] int32, in any order; an id stands at most once in a row.
        sm_scale: None means D ** -0.5.
        q_scale, k_scale, v_scale: None, a float or a one-element fp32 tensor; value = stored * scale.
        sink_key: [Hq, D] or None.
        dtype: fp32 or fp64 to compute in; None as `numerics.compute_dtype`.

    Returns:
        out [T, Hq, D] and lse [T, Hq] (natural log), in the compute dtype.
    """
    dtype = compute_dtype(q, dtype)
    (num_rows, _, head_dim), num_groups = q.shape, k.shape[1]
    sm_scale = head_dim**-0.5 if sm_scale is None else sm_scale
    request, position = query_rows(batch, num_rows)
    head = torch.arange(num_groups, device=q.device)[:, None]
    in_block = torch.arange(batch.block_size, device=q.device)
    q = rearrange(q.to(dtype), "t (g h) d -> t g h d", g=num_groups)
    sink = None if sink_key is None else rearrange(sink_key.to(dtype), "(g h) d -> g h d", g=num_groups)
    logit_scale = sm_scale * scale_factor({"q_scale": q_scale, "k_scale": k_scale}, q)
    sink_scale = sm_scale * scale_factor({"q_scale": q_scale}, q)
    out_scale = scale_factor({"v_scale": v_scale}, q)

    outs, lses = [], []
    token_bytes = dtype.itemsize * num_groups * ids.shape[2] * batch.block_size * 4 * head_dim
    for rows in token_slices(num_rows, token_bytes):
        row_position = position[rows, None, None]
        row_ids = rearrange(ids[:, rows], "g t k -> t g k").long()
        selected = (row_ids >= 0) & (row_ids <= row_position // batch.block_size) & (row_position >= 0)
        token = rearrange(row_ids[..., None] * batch.block_size + in_block, "t g k s -> t g (k s)")
        visible = selected.repeat_interleave(batch.block_size, dim=2) & (token <= row_position)
        keys = gather_tokens(k, batch, request[rows, None, None], head, token, visible, dtype)
        values = gather_tokens(v, batch, request[rows, None, None], head, token, visible, dtype)

        logits = einsum(q[rows], keys, "t g h d, t g n d -> t g h n") * logit_scale
        weights, lse = masked_softmax(logits, visible[:, :, None])
        out = einsum(weights, values, "t g h n, t g n d -> t g h d") * out_scale
        if sink is not None:
            out = apply_sink(out, lse, einsum(q[rows], sink, "t g h d, g h d -> t g h") * sink_scale)
        outs.append(rearrange(out, "t g h d -> t (g h) d"))
        lses.append(rearrange(lse, "t g h -> t (g h)"))
    return torch.cat(outs), torch.cat(lses)


def sparse_attention_call(call: SparseAttentionCall) -> None:
    out, lse = sparse_attention(
        call.q,
        call.k,
        call.v,
        call.ids,
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
