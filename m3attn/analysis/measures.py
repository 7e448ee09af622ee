"""Three numbers about a selection, per query row: what it shares with another, and what it keeps and changes of dense attention."""

from __future__ import annotations

import torch
from einops import einsum, rearrange

from m3attn.batch import LayerCache, PagedBatch
from m3attn.checks import check_batch, check_key_value, check_tensor
from m3attn.choice import for_stage
from m3attn.reference.numerics import full_precision, scale_factor, token_slices
from m3attn.reference.paging import request_tokens, requests
from m3attn.scales import ScaleLike
from m3attn.stages.dense_attention import dense_attention
from m3attn.stages.sparse_attention import sparse_attention


def overlap(ids: torch.Tensor, baseline: torch.Tensor) -> torch.Tensor:
    """The share of a baseline's blocks that another selection holds too.

    Args:
        ids: [Hkv, T, K], -1 where there is no block.
        baseline: [Hkv, T, K2], likewise.

    Returns:
        [Hkv, T] fp32 from 0 to 1; 1 for a row whose baseline holds no block.

    Raises:
        ValueError: different KV heads or rows.
    """
    check_tensor("ids", ids, ["Hkv", "T", "K"], unit_last_stride=False)
    check_tensor("baseline", baseline, [*ids.shape[:2], "K2"], None, ids.device, unit_last_stride=False)
    valid = baseline >= 0
    shared = (valid[..., None] & (baseline[..., None] == ids[..., None, :])).any(dim=-1).sum(dim=-1)
    count = valid.sum(dim=-1)
    return torch.where(count > 0, shared / count.clamp(min=1), 1.0)


@full_precision
def attention_mass(
    q: torch.Tensor,
    cache: LayerCache,
    batch: PagedBatch,
    ids: torch.Tensor,
    *,
    sm_scale: float | None = None,
    q_scale: ScaleLike = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The share of each query's dense softmax that lies in its chosen blocks.

    Goes through the keys a block at a time and keeps two log-sum-exps a row, so memory grows with the number of tokens and not with its square.

    Args:
        q: [T, Hq, D].
        cache, batch: as in `sparse_attention`.
        ids: [Hkv, T, K] int32, in any order; ids outside a query's visible blocks count as none.
        sm_scale: None: D ** -0.5.
        q_scale: of e4m3 q.
        dtype: fp32 or fp64 to compute in.

    Returns:
        [T, Hq] in `dtype`, from 0 to 1; 0 for empty rows.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name.
    """
    check_tensor("q", q, ["T", "Hq", "D"])
    check_batch(batch, q.device, sparse=True)
    k, _ = check_key_value(cache, batch, q.device)
    num_rows, num_heads, head_dim = q.shape
    num_groups = k.shape[1]
    check_tensor("ids", ids, [num_groups, num_rows, "K"], [torch.int32], q.device, unit_last_stride=False)
    grouped = rearrange(q.to(dtype), "t (g h) d -> t g h d", g=num_groups)
    scale = (head_dim**-0.5 if sm_scale is None else sm_scale) * scale_factor({"q_scale": q_scale, "k_scale": cache.k_scale}, grouped)
    total = grouped.new_full((num_rows, num_groups, num_heads // num_groups), float("-inf"))
    chosen = total.clone()
    size = batch.block_size
    for request in requests(batch, num_rows):
        keys = request_tokens(k, batch, request, dtype)  # [Hkv, tokens, D]
        for start in range(0, keys.shape[1], size):
            seeing = request.first_row + max(0, start - request.first_position)
            for part in token_slices(max(0, request.end_row - seeing), dtype.itemsize * num_heads * size * 4):
                rows = slice(seeing + part.start, seeing + part.stop)
                if rows.start >= request.end_row:
                    continue
                position = torch.arange(rows.start, rows.stop, device=q.device) - request.first_row + request.first_position
                block = keys[:, start : start + size]
                visible = start + torch.arange(block.shape[1], device=q.device) <= position[:, None]
                logits = einsum(grouped[rows], block, "t g h d, g n d -> t g h n") * scale
                lse = logits.masked_fill(~visible[:, None, None], float("-inf")).logsumexp(dim=-1)
                is_chosen = (ids[:, rows] == start // size).any(dim=-1).t()[..., None]
                total[rows] = torch.logaddexp(total[rows], lse)
                chosen[rows] = torch.where(is_chosen, torch.logaddexp(chosen[rows], lse), chosen[rows])
    mass = torch.where(total == float("-inf"), 0.0, (chosen - total).exp())
    return rearrange(mass, "t g h -> t (g h)")


def output_error(
    q: torch.Tensor,
    cache: LayerCache,
    batch: PagedBatch,
    ids: torch.Tensor,
    *,
    sm_scale: float | None = None,
    q_scale: ScaleLike = None,
    impl: str | None = None,
) -> torch.Tensor:
    """How far attention over the chosen blocks is from attention over all of them: |sparse - dense| / |dense|, a number a row and head.

    Args:
        q, cache, batch, ids, sm_scale, q_scale: as in `sparse_attention`.
        impl: a registry key for the stages that have it, or `stage=key` pairs; None: the choice in force.

    Returns:
        [T, Hq] fp32; 0 for empty rows.

    Raises:
        TypeError, ValueError, UnsupportedProblem: as the two stages.
    """
    sparse = sparse_attention(q, cache, ids, batch, sm_scale=sm_scale, q_scale=q_scale, impl=for_stage(impl, "sparse_attention"))
    dense = dense_attention(q, cache, batch, sm_scale=sm_scale, q_scale=q_scale, impl=for_stage(impl, "dense_attention"))
    assert isinstance(sparse, torch.Tensor) and isinstance(dense, torch.Tensor)
    norm = dense.float().norm(dim=-1)
    return torch.where(norm > 0, (sparse.float() - dense.float()).norm(dim=-1) / norm.clamp(min=torch.finfo(torch.float32).tiny), 0.0)
