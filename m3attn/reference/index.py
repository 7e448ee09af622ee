"""The index branch: block scores, and the exact selection of blocks."""

from __future__ import annotations

import torch
from einops import einsum, reduce

from m3attn.batch import PagedBatch
from m3attn.calls import IndexScoreCall, IndexTopkCall, SelectBlocksCall
from m3attn.reference.numerics import compute_dtype, full_precision, scale_factor, token_slices
from m3attn.reference.paging import query_rows, request_tokens, requests
from m3attn.scales import Scale, ScaleLike


@full_precision
def index_score(
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    batch: PagedBatch,
    *,
    index_q_scale: ScaleLike | Scale = None,
    index_k_scale: ScaleLike | Scale = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The best index product of each block.

    for each index head h, query row t at position p of request b, block n:
        score[h, t, n] = max over j in [n * block_size, (n + 1) * block_size), j <= p of
                         index_q[t, h] . index_k[b, j]
                         * index_q_scale * index_k_scale
    A NaN product is ignored; no product left (or no visible j): -inf.

    Args:
        index_q: [T, Hi, Di].
        index_k: [pages, page_size, Di], one key head shared by all index heads.
        dtype: fp32 or fp64 to compute in; None as `numerics.compute_dtype`.

    Returns:
        [Hi, T, ceil(max_seqlen_k / block_size)] in the compute dtype.
    """
    dtype = compute_dtype(index_q, dtype)
    num_rows, num_heads, _ = index_q.shape
    index_q, block_size = index_q.to(dtype), batch.block_size
    factor = scale_factor({"index_q_scale": index_q_scale, "index_k_scale": index_k_scale}, index_q)
    scores = index_q.new_full((num_heads, num_rows, batch.num_blocks), float("-inf"))
    for request in requests(batch, num_rows):
        if request.seq_len == 0:
            continue
        keys = request_tokens(index_k[:, None], batch, request, dtype)[0]
        for rows in token_slices(request.end_row - request.first_row, dtype.itemsize * num_heads * request.seq_len * 4):
            position = torch.arange(rows.start, rows.stop, device=index_q.device) + request.first_position
            num_tokens = min(request.first_position + rows.stop, keys.shape[0])
            if num_tokens <= 0:
                continue
            here = slice(request.first_row + rows.start, request.first_row + rows.stop)
            visible = torch.arange(num_tokens, device=index_q.device) <= position[:, None]
            products = einsum(index_q[here], keys[:num_tokens], "t h d, n d -> h t n")
            products = products.masked_fill(~visible | products.isnan(), float("-inf"))
            products = torch.nn.functional.pad(products, (0, -num_tokens % block_size), value=float("-inf"))
            best = reduce(products, "h t (block s) -> h t block", "max", s=block_size)
            scores[:, here, : best.shape[-1]] = best * factor
    return scores


def select_blocks(scores: torch.Tensor, batch: PagedBatch, *, topk: int = 16, init_blocks: int = 0, local_blocks: int = 1) -> torch.Tensor:
    """The `topk` blocks each (KV group, query row) keeps.

    for each row at position p:
        nb = 0 if p < 0 else min(p // block_size + 1, columns of scores)          blocks it may keep
        take, while topk lasts and each once:
            local blocks: nb - 1, nb - 2, …  (local_blocks of them)
            init blocks: 0, 1, …             (init_blocks of them)
            the rest by score, best first: NaN counts as -inf, -0 equals +0, equal scores: lower id first
        write them ascending, then -1

    Args:
        scores: [Hkv, T, blocks]; columns at or past nb may hold anything.

    Returns:
        ids [Hkv, T, topk] int32.
    """
    num_heads, num_rows, columns = scores.shape
    _, position = query_rows(batch, num_rows)
    num_blocks = torch.where(position < 0, 0, (position // batch.block_size + 1).clamp(max=columns))
    block = torch.arange(columns, device=scores.device)

    chunks = []
    for rows in token_slices(num_rows, num_heads * columns * 64):
        row_blocks = num_blocks[rows, None]
        # Lower is taken earlier; blocks of one priority are taken by score.
        priority = torch.full((row_blocks.shape[0], columns), local_blocks + init_blocks, device=scores.device)
        priority = torch.where(block < init_blocks, local_blocks + block, priority)
        priority = torch.where(block >= row_blocks - local_blocks, row_blocks - 1 - block, priority)
        outside = block >= row_blocks
        priority = torch.where(outside, local_blocks + init_blocks + 1, priority).expand(num_heads, -1, -1)

        # Adding +0 turns -0 into +0; the stable sorts keep the lower id first among equals.
        ranked = scores[:, rows].nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf")) + 0.0
        by_score = ranked.sort(dim=-1, descending=True, stable=True).indices
        by_priority = priority.gather(-1, by_score).sort(dim=-1, stable=True).indices
        kept = by_score.gather(-1, by_priority)[..., :topk]
        kept = kept.masked_fill(outside.expand(num_heads, -1, -1).gather(-1, kept), columns).sort(dim=-1).values
        kept = torch.nn.functional.pad(kept, (0, topk - kept.shape[-1]), value=columns)
        chunks.append(kept.masked_fill(kept == columns, -1).int())
    return torch.cat(chunks, dim=1)


def index_topk(
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    batch: PagedBatch,
    *,
    topk: int = 16,
    init_blocks: int = 0,
    local_blocks: int = 1,
    index_q_scale: ScaleLike | Scale = None,
    index_k_scale: ScaleLike | Scale = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`index_score`, then `select_blocks`: ids [Hi, T, topk] int32."""
    scores = index_score(index_q, index_k, batch, index_q_scale=index_q_scale, index_k_scale=index_k_scale, dtype=dtype)
    return select_blocks(scores, batch, topk=topk, init_blocks=init_blocks, local_blocks=local_blocks)


def index_score_call(call: IndexScoreCall) -> None:
    scores = index_score(call.index_q, call.index_k, call.batch, index_q_scale=call.index_q_scale, index_k_scale=call.index_k_scale)
    call.out.copy_(scores)


def select_blocks_call(call: SelectBlocksCall) -> None:
    ids = select_blocks(call.scores, call.batch, topk=call.topk, init_blocks=call.init_blocks, local_blocks=call.local_blocks)
    call.out.copy_(ids)


def index_topk_call(call: IndexTopkCall) -> None:
    ids = index_topk(
        call.index_q,
        call.index_k,
        call.batch,
        topk=call.topk,
        init_blocks=call.init_blocks,
        local_blocks=call.local_blocks,
        index_q_scale=call.index_q_scale,
        index_k_scale=call.index_k_scale,
    )
    call.out.copy_(ids)
