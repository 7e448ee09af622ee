"""Where a query row stands in its request, and where a request's tokens lie in a pool of pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from einops import rearrange

from m3attn.batch import PagedBatch
from m3attn.reference.numerics import from_indexable, indexable


def query_rows(batch: PagedBatch, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(request, position) of each query row, int64 [T].

    request = the b with cu_seqlens_q[b] <= row < cu_seqlens_q[b + 1]
    position = seq_len - q_len + (row - cu_seqlens_q[b]);  -1 for a row that no request owns
    """
    rows = torch.arange(num_rows, device=batch.seq_lens.device)
    if batch.num_requests == 0:
        return torch.zeros_like(rows), torch.full_like(rows, -1)
    offsets = batch.cu_seqlens_q.long()
    request = torch.searchsorted(offsets[1:].contiguous(), rows, right=True)
    owned = (request < batch.num_requests) & (rows >= offsets[0])
    request = request.clamp(max=batch.num_requests - 1)
    seq_len = batch.seq_lens.long().clamp(0, batch.max_seqlen_k)[request]
    position = seq_len - offsets[request + 1] + rows
    return request, torch.where(owned, position, -1)


@dataclass(frozen=True)
class RequestRows:
    """Rows [first_row, end_row) of request `index`, at positions first_position, first_position + 1, …"""

    index: int
    first_row: int
    end_row: int
    first_position: int
    seq_len: int


def requests(batch: PagedBatch, num_rows: int) -> Iterator[RequestRows]:
    """The requests that have query rows, read back to the host."""
    offsets = batch.cu_seqlens_q.tolist()
    for index, seq_len in enumerate(batch.seq_lens.tolist()):
        first_row, end_row = max(0, offsets[index]), min(num_rows, offsets[index + 1])
        seq_len = min(max(0, seq_len), batch.max_seqlen_k)
        if first_row < end_row:
            yield RequestRows(index, first_row, end_row, seq_len - offsets[index + 1] + first_row, seq_len)


def gather_tokens(
    pool: torch.Tensor,
    batch: PagedBatch,
    request: torch.Tensor,
    head: torch.Tensor,
    position: torch.Tensor,
    visible: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Rows of `pool` [pages, H, page_size, D] at (request, head, position), which broadcast to `visible`'s shape; zeros where not visible.

    What lies in an invisible token is never multiplied with anything, so NaN there stays there.
    """
    if pool.shape[0] == 0 or batch.page_table.numel() == 0:
        return torch.zeros(*visible.shape, pool.shape[-1], dtype=dtype, device=pool.device)
    position = torch.where(visible, position, 0)
    logical = (position // batch.page_size).clamp(max=batch.page_table.shape[1] - 1)
    page = batch.page_table[request, logical].long().clamp(0, pool.shape[0] - 1)
    tokens = from_indexable(indexable(pool)[page, head, position % batch.page_size], pool.dtype).to(dtype)
    return torch.where(visible[..., None], tokens, 0.0)


def request_tokens(pool: torch.Tensor, batch: PagedBatch, request: RequestRows, dtype: torch.dtype) -> torch.Tensor:
    """The tokens of a request in the cache, [H, seq_len, D], from `pool` [pages, H, page_size, D]."""
    pages = batch.page_table[request.index, : -(-request.seq_len // batch.page_size)].long().clamp(0, pool.shape[0] - 1)
    tokens = from_indexable(indexable(pool)[pages], pool.dtype).to(dtype)
    return rearrange(tokens, "page head slot dim -> head (page slot) dim")[:, : request.seq_len]
