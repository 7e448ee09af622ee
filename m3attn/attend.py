"""The ways in for plain tensors: `paged` makes the cache and the batch, `attend` runs the whole sparse path."""

from __future__ import annotations

from itertools import pairwise

import torch

from m3attn.batch import LayerCache, PagedBatch
from m3attn.checks import BLOCK_SIZES, check_int, check_tensor
from m3attn.choice import for_stage
from m3attn.rules import find_rule
from m3attn.stages.index_score import index_score
from m3attn.stages.index_topk import index_topk
from m3attn.stages.sparse_attention import sparse_attention

PAGE_SIZES = (128, 64, 32, 16)


def _as_pages(x: torch.Tensor, tokens: int, page_size: int) -> torch.Tensor:
    """[T, ...] -> [pages, page_size, ...]: a view where T is a whole number of pages, else a zero-padded copy."""
    spare = -tokens % page_size
    if spare:
        x = torch.cat([x, x.new_zeros(spare, *x.shape[1:])])
    return x.unflatten(0, (-1, page_size))


def _repack(x: torch.Tensor, lengths: list[int], page_size: int) -> torch.Tensor:
    """[T, ...] with sequences anywhere -> [pages, page_size, ...] with every sequence at a page border (a copy)."""
    return torch.cat([_as_pages(part, part.shape[0], page_size) for part in x.split(lengths)])


def paged(
    k: torch.Tensor,
    v: torch.Tensor,
    index_k: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None = None,
    *,
    page_size: int | None = None,
    block_size: int = 128,
) -> tuple[LayerCache, PagedBatch]:
    """A cache and a batch over plain tensors, without a copy where sequences start at page borders and end with whole pages.

    Every token is also a query (prefill from nothing).

    Args:
        k, v: [B, S, Hkv, D], or packed [T, Hkv, D] with cu_seqlens.
        index_k: [B, S, Di] or [T, Di]; None for dense attention.
        cu_seqlens: [B + 1] int32 or int64 on any device, offsets of the sequences; read on the host.
        page_size: tokens of a page; None: the largest of 128, 64, 32, 16 that divides block_size and needs no copy, else a copy in pages
            of min(128, block_size).
        block_size: positions of a sparse block.

    Returns:
        (LayerCache with k and v [pages, Hkv, page_size, D], PagedBatch).

    Raises:
        ValueError: shapes or offsets that do not fit.
    """
    if not isinstance(k, torch.Tensor):
        raise TypeError(f"k: expected a tensor, got {type(k).__name__}")
    check_int("block_size", block_size, 1)
    if page_size is not None:
        check_int("page_size", page_size, 1)
    if k.dim() == 4:
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens: expected None for [B, S, Hkv, D] tensors, got offsets")
        batch, length = k.shape[:2]
        lengths = [length] * batch
        check_tensor("v", v, [batch, length, k.shape[2], "D"], [k.dtype], k.device)
        if index_k is not None:
            check_tensor("index_k", index_k, [batch, length, "Di"], None, k.device)
        k, v = k.flatten(0, 1), v.flatten(0, 1)
        index_k = None if index_k is None else index_k.flatten(0, 1)
    else:
        if cu_seqlens is None:
            raise ValueError(f"cu_seqlens: expected offsets for packed [T, Hkv, D] tensors, got None (k has shape {list(k.shape)})")
        check_tensor("k", k, ["T", "Hkv", "D"])
        check_tensor("cu_seqlens", cu_seqlens, ["B + 1"], [torch.int32, torch.int64])
        offsets = [int(x) for x in cu_seqlens.tolist()]
        lengths = [b - a for a, b in pairwise(offsets)]
        if not offsets or offsets[0] != 0 or offsets[-1] != k.shape[0] or min(lengths, default=0) < 0:
            raise ValueError(f"cu_seqlens: expected ascending offsets from 0 to {k.shape[0]}, got {offsets}")
        check_tensor("v", v, [k.shape[0], k.shape[1], "D"], [k.dtype], k.device)
        if index_k is not None:
            check_tensor("index_k", index_k, [k.shape[0], "Di"], None, k.device)
    in_place = [p for p in PAGE_SIZES if block_size % p == 0 and not any(n % p for n in lengths)]
    if page_size is None:
        page_size = in_place[0] if in_place else min(128, block_size)
    pages_of = [-(-n // page_size) for n in lengths]
    whole = not any(n % page_size for n in lengths)

    def pages(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (-1, page_size)) if whole else _repack(x, lengths, page_size)

    cache = LayerCache(
        k=pages(k).transpose(1, 2),
        v=pages(v).transpose(1, 2),
        index_k=None if index_k is None else pages(index_k),
    )
    most = max(pages_of, default=0)
    first = torch.tensor([0, *pages_of]).cumsum(0)[:-1]
    table = first[:, None] + torch.arange(most)[None, :]
    table = torch.where(torch.arange(most)[None, :] < torch.tensor(pages_of)[:, None], table, 0)
    step = PagedBatch.from_lengths(lengths, lengths, table.to(dtype=torch.int32, device=k.device), page_size=page_size, block_size=block_size)
    return cache, step


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    *,
    topk: int = 16,
    block_size: int = 128,
    rule: str = "topk",
    return_lse: bool = False,
    return_ids: bool = False,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """M3's sparse attention on plain tensors: index, select, attend, causally.

    Args:
        q: [B, S, Hq, D].
        k, v: [B, S, Hkv, D].
        index_q: [B, S, Hkv, Di]; one index head per KV group.
        index_k: [B, S, Di]; the one shared index key head.
        topk: blocks kept per query and KV group.
        block_size: positions of a block.
        rule: a selection rule's name.
        return_lse, return_ids: also return the LSE [B, S, Hq] fp32 and the ids [Hkv, B, S, K] int32, in this order.
        impl: a registry key, for the stages that have it, or `stage=key` pairs; None: the choice in force.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name.
    """
    check_tensor("q", q, ["B", "S", "Hq", "D"])
    batch_size, length, heads, dim = q.shape
    check_tensor("k", k, [batch_size, length, "Hkv", dim], [q.dtype], q.device)
    check_tensor("index_q", index_q, [batch_size, length, k.shape[2], "Di"], None, q.device)
    check_tensor("index_k", index_k, [batch_size, length, index_q.shape[3]], None, q.device)
    chosen = find_rule(rule)
    if check_int("block_size", block_size, 1) not in BLOCK_SIZES:
        raise ValueError(f"block_size: expected one of {', '.join(map(str, BLOCK_SIZES))}, got {block_size}")
    cache, batch = paged(k, v, index_k, block_size=block_size)
    flat_q, flat_index_q = q.flatten(0, 1), index_q.flatten(0, 1)
    if rule == "topk":
        ids = index_topk(flat_index_q, cache, batch, topk=topk, impl=for_stage(impl, "index_topk"))
    else:
        scores = index_score(flat_index_q, cache, batch, impl=for_stage(impl, "index_score"))
        ids = chosen(scores, batch, topk=topk, impl=for_stage(impl, "select_blocks"))
    out, lse = sparse_attention(flat_q, cache, ids, batch, return_lse=True, impl=for_stage(impl, "sparse_attention"))
    results = [out.view(batch_size, length, heads, dim)]
    if return_lse:
        results.append(lse.view(batch_size, length, heads))
    if return_ids:
        results.append(ids.unflatten(1, (batch_size, length)))
    return results[0] if len(results) == 1 else tuple(results)
