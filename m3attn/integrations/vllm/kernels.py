"""vLLM 0.33's kernels for MiniMax-M3, by its names and in its arguments, on m3attn's stages.

Pages and blocks are 128 tokens. Ids come ascending, where vLLM's own come in order of score. A padded request (length 0) and a query before a
request's start give ids -1 and output 0. Which implementation runs is m3attn's choice: `M3ATTN_IMPL`, `m3attn.use(...)`, or auto.
"""

from __future__ import annotations

from typing import Any

import torch

from m3attn.batch import LayerCache, PagedBatch
from m3attn.dtypes import is_fp8
from m3attn.stages.index_score import index_score
from m3attn.stages.index_topk import index_topk
from m3attn.stages.select_blocks import select_blocks
from m3attn.stages.sparse_attention import sparse_attention

BLOCK_SIZE = 128
INIT_SCORE, LOCAL_SCORE = 1e30, 1e29
"""What stands for forced blocks in a score tensor that the caller reads; the local blocks' wins where both apply."""


@torch.no_grad()
def minimax_m3_index_score(
    idx_q: torch.Tensor,
    index_kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    num_kv_heads: int,
) -> torch.Tensor:
    """Scores of a prefill: [Hi, T, ceil(max_seq_len / 128)] fp32, -inf where a block has no visible position.

    Args:
        idx_q: [T, Hi, Di] bf16, fp16 or e4m3.
        index_kv_cache: [pages, 128, Di] in any of these.
        block_table: [B, pages of a request] int32.
        cu_seqlens_q: [B + 1] int32; seq_lens: [B] int32, prefixes included; prefix_lens follows from both and is not read.
        num_kv_heads: Hi, one index head a KV head.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name.
    """
    _check_heads(idx_q, num_kv_heads)
    batch = _batch(block_table, seq_lens, cu_seqlens_q, max_query_len, max_seq_len)
    return index_score(idx_q, LayerCache(index_k=index_kv_cache), batch)


@torch.no_grad()
def minimax_m3_index_topk(
    score: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_query_len: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The chosen blocks of a prefill: [Hi, T, K] int32; in out[:, :T] where out [Hi, at least T, K] is given.

    Args:
        score: [Hi, T, blocks] fp32; what stands past a query's own block is not read.
        cu_seqlens_q: [B + 1] int32; prefix_lens: [B] int32.
    """
    seq_lens = prefix_lens + cu_seqlens_q[1:] - cu_seqlens_q[:-1]
    # The selection reads no page; a table of one column is as good as any.
    batch = _batch(seq_lens[:, None], seq_lens, cu_seqlens_q, max_query_len, score.shape[2] * BLOCK_SIZE)
    out = None if out is None else out[:, : score.shape[1]]
    return select_blocks(score, batch, topk=topk, init_blocks=init_blocks, local_blocks=local_blocks, out=out)


@torch.no_grad()
def minimax_m3_index_decode(
    idx_q: torch.Tensor,
    index_kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    num_kv_heads: int,
    decode_query_len: int,
    max_decode_query_len: int,
    out: torch.Tensor | None = None,
    score_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The chosen blocks of a decode or verify step: [Hi, T, K] int32; in out[:, :T] where out [Hi, at least T, K] is given.

    Args:
        idx_q: [B * decode_query_len, Hi, Di], request after request.
        index_kv_cache, block_table, seq_lens, num_kv_heads: as in `minimax_m3_index_score`; seq_lens 0 is a padded request.
        decode_query_len: queries of each request; max_decode_query_len bounds it.
        score_out: [Hi, at least T, at least ceil(max_seq_len / 128)] fp32, any strides: takes the scores of visible blocks too, 1e30 for
            forced first and 1e29 for forced last ones.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name.
    """
    _check_heads(idx_q, num_kv_heads)
    if decode_query_len > max_decode_query_len:
        raise ValueError(f"decode_query_len: expected at most max_decode_query_len {max_decode_query_len}, got {decode_query_len}")
    tokens = idx_q.shape[0]
    batch = _uniform_batch(idx_q, block_table, seq_lens, decode_query_len, max_seq_len)
    cache = LayerCache(index_k=index_kv_cache)
    options: dict[str, Any] = {"topk": topk, "init_blocks": init_blocks, "local_blocks": local_blocks}
    out = None if out is None else out[:, :tokens]
    if score_out is None:
        return index_topk(idx_q, cache, batch, **options, out=out)
    scores = score_out[:, :tokens, : batch.num_blocks]
    index_score(idx_q, cache, batch, out=scores)
    ids = select_blocks(scores, batch, **options, out=out)
    _write_forced(scores, seq_lens, decode_query_len, init_blocks, local_blocks)
    return ids


@torch.no_grad()
def minimax_m3_sparse_attn(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    topk_idx: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_query_len: int,
    num_kv_heads: int,
    sm_scale: float,
    output: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Attention of a prefill over the chosen blocks, into output.

    Args:
        q, output: [T, Hq, D] bf16 or fp16.
        kv_cache: [pages, Hkv, 128, 2 * D], K first, of any strides with unit last stride; of q's dtype, e4m3 or e5m2.
        topk_idx: [Hkv, T, K] int32, in any order.
        block_table, cu_seqlens_q, seq_lens, prefix_lens: as in `minimax_m3_index_score`.
        k_scale, v_scale: one-element fp32 tensors, both or neither; read with an fp8 cache only.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name.
        NotImplementedError: scales a token and head.
    """
    batch = _batch(block_table, seq_lens, cu_seqlens_q, max_query_len, block_table.shape[1] * BLOCK_SIZE)
    sparse_attention(q, _cache(kv_cache, num_kv_heads, k_scale, v_scale), topk_idx, batch, sm_scale=sm_scale, out=output)


@torch.no_grad()
def minimax_m3_sparse_attn_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    topk_idx: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    num_kv_heads: int,
    sm_scale: float,
    output: torch.Tensor,
    decode_query_len: int,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Attention of a decode or verify step over the chosen blocks, into output [B * decode_query_len, Hq, D]; as `minimax_m3_sparse_attn`."""
    batch = _uniform_batch(q, block_table, seq_lens, decode_query_len, block_table.shape[1] * BLOCK_SIZE)
    sparse_attention(q, _cache(kv_cache, num_kv_heads, k_scale, v_scale), topk_idx, batch, sm_scale=sm_scale, out=output)


def _batch(block_table: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor, max_query_len: int, max_seq_len: int) -> PagedBatch:
    return PagedBatch(block_table, seq_lens, cu_seqlens_q, max_query_len, max_seq_len, BLOCK_SIZE, BLOCK_SIZE)


def _uniform_batch(x: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, decode_query_len: int, max_seq_len: int) -> PagedBatch:
    requests = seq_lens.shape[0]
    if x.shape[0] != requests * decode_query_len:
        raise ValueError(f"decode_query_len: expected {requests} requests of {decode_query_len} queries, got {x.shape[0]} query rows")
    offsets = torch.arange(0, x.shape[0] + 1, decode_query_len, dtype=torch.int32, device=x.device)
    return _batch(block_table, seq_lens, offsets, decode_query_len, max_seq_len)


def _cache(kv_cache: torch.Tensor, num_kv_heads: int, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> LayerCache:
    if kv_cache.dim() != 4 or kv_cache.shape[1:3] != (num_kv_heads, BLOCK_SIZE):
        raise ValueError(f"kv_cache: expected [pages, {num_kv_heads}, {BLOCK_SIZE}, 2 * D], got {list(kv_cache.shape)}")
    if not is_fp8(kv_cache.dtype):
        return LayerCache(kv=kv_cache)
    if (k_scale is None) != (v_scale is None):
        raise ValueError(f"k_scale, v_scale: expected both or neither, got {'v_scale' if k_scale is None else 'k_scale'} alone")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and scale.numel() != 1:
            raise NotImplementedError(f"{name}: expected one element, got {list(scale.shape)}; scales a token and head are not built")
    return LayerCache(kv=kv_cache, k_scale=k_scale, v_scale=v_scale)


def _check_heads(idx_q: torch.Tensor, num_kv_heads: int) -> None:
    if idx_q.shape[1] != num_kv_heads:
        raise ValueError(f"idx_q: expected num_kv_heads {num_kv_heads} index heads, got {idx_q.shape[1]}")


def _write_forced(scores: torch.Tensor, seq_lens: torch.Tensor, queries: int, init_blocks: int, local_blocks: int) -> None:
    position = (seq_lens[:, None] - queries + torch.arange(queries, device=seq_lens.device)).flatten()[:, None]
    blocks = (position + BLOCK_SIZE) // BLOCK_SIZE
    block = torch.arange(scores.shape[2], device=scores.device)
    visible = (position >= 0) & (block < blocks)
    scores.masked_fill_(visible & (block < init_blocks), INIT_SCORE)
    scores.masked_fill_(visible & (block >= blocks - local_blocks), LOCAL_SCORE)
