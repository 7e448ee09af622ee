"""`M3ATTN_CHECK=1`: verify, with a sync, what device values must satisfy, naming argument, first bad index and value. Off: no cost."""

from __future__ import annotations

import torch

from m3attn import switches
from m3attn.batch import PagedBatch


def enabled() -> bool:
    return switches.check() == "1"


def _refuse_first(argument: str, values: torch.Tensor, bad: torch.Tensor, expected: str) -> None:
    if bool(bad.any()):
        index = tuple(bad.nonzero()[0].tolist())
        where = index[0] if len(index) == 1 else index
        raise ValueError(f"{argument}: expected {expected}, got {values[index].item()} at index {where} (M3ATTN_CHECK=1)")


def check_step(batch: PagedBatch, tokens: int, *, num_pages: int | None) -> None:
    """Lengths within the bounds, offsets ascending from 0 and within T; live page ids in range, where a stage reads pages at all."""
    if not enabled():
        return
    lengths, offsets = batch.seq_lens, batch.cu_seqlens_q
    _refuse_first("batch.seq_lens", lengths, (lengths < 0) | (lengths > batch.max_seqlen_k), f"lengths from 0 to max_seqlen_k {batch.max_seqlen_k}")
    _refuse_first("batch.cu_seqlens_q", offsets[:1], offsets[:1] != 0, "offsets that start at 0")
    steps = offsets.diff()
    _refuse_first("batch.cu_seqlens_q (differences)", steps, (steps < 0) | (steps > batch.max_seqlen_q), f"0 to max_seqlen_q {batch.max_seqlen_q}")
    _refuse_first("batch.cu_seqlens_q", offsets, offsets > tokens, f"offsets of at most {tokens} query rows")
    if num_pages is None:
        return
    pages = batch.page_table
    live = torch.arange(pages.shape[1], device=pages.device)[None, :] * batch.page_size < lengths[:, None]
    _refuse_first("batch.page_table", pages, live & ((pages < 0) | (pages >= num_pages)), f"page ids from 0 to {num_pages - 1}")
    needed = (lengths + batch.page_size - 1) // batch.page_size
    _refuse_first("batch.seq_lens", lengths, needed > pages.shape[1], f"at most {pages.shape[1]} pages of {batch.page_size}")


def check_slots(argument: str, slots: torch.Tensor | None, capacity: int) -> None:
    """No slot named twice; negative ones and those at or beyond the capacity write nothing and are allowed."""
    if not enabled() or slots is None:
        return
    ordered, rows = slots.sort(stable=True)
    again = torch.zeros_like(slots, dtype=torch.bool)
    again[rows[1:]] = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0) & (ordered[1:] < capacity)
    _refuse_first(argument, slots, again, "each slot once")


def check_ids(ids: torch.Tensor, num_blocks: int) -> None:
    """Ids within the blocks or -1, no block twice in a list; the order is the implementation's to declare."""
    if not enabled():
        return
    _refuse_first("ids", ids, (ids < -1) | (ids >= num_blocks), f"block ids from 0 to {num_blocks - 1}, or -1")
    ordered, places = ids.sort(dim=-1)
    again = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != -1)
    repeated = torch.zeros_like(ids, dtype=torch.bool).scatter_(-1, places, torch.nn.functional.pad(again, (1, 0)))
    _refuse_first("ids", ids, repeated, "each block once in a list")


def check_offsets(argument: str, offsets: torch.Tensor, total: int) -> None:
    """Offsets ascend from 0 and stay within the `total` rows."""
    if not enabled():
        return
    _refuse_first(argument, offsets[:1], offsets[:1] != 0, "offsets that start at 0")
    _refuse_first(f"{argument} (differences)", offsets.diff(), offsets.diff() < 0, "ascending offsets")
    _refuse_first(argument, offsets, offsets > total, f"offsets of at most {total} rows")
