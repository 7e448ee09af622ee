"""Page tables from the descriptions that serving engines keep: on the device alone, with static shapes, into caller-owned buffers.

Rows of a buffer beyond the given requests become padded ones: page 0, length 0. Columns that a buffer lacks are dropped; the plan's or batch's
max_seqlen_k bounds what is read. None of these functions reads a device value on the host, so a CUDA graph may hold them.
"""

from __future__ import annotations

import torch

from m3attn.checks import check_int, check_tensor

INT_DTYPES = (torch.int32, torch.int64)


def _buffers(page_table_out: torch.Tensor, seq_lens_out: torch.Tensor | None, requests: int, device: torch.device) -> torch.Tensor:
    """Column numbers [columns] of a page-table buffer, after both buffers were checked."""
    check_tensor("page_table_out", page_table_out, ["B", "max_pages"], [torch.int32], device)
    if page_table_out.shape[0] < requests:
        raise ValueError(f"page_table_out: expected at least {requests} rows, got {page_table_out.shape[0]}")
    if seq_lens_out is not None:
        check_tensor("seq_lens_out", seq_lens_out, [page_table_out.shape[0]], [torch.int32], device)
    return torch.arange(page_table_out.shape[1], device=device)


def _store(
    page_table_out: torch.Tensor, seq_lens_out: torch.Tensor | None, table: torch.Tensor, seq_lens: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    requests = table.shape[0]
    page_table_out[:requests, : table.shape[1]].copy_(table)
    page_table_out[:requests, table.shape[1] :].zero_()
    page_table_out[requests:].zero_()
    if seq_lens_out is not None and seq_lens is not None:
        seq_lens_out[:requests].copy_(seq_lens)
        seq_lens_out[requests:].zero_()
    return page_table_out, seq_lens_out


def pages_from_block_table(
    block_table: torch.Tensor, seq_lens: torch.Tensor, *, page_table_out: torch.Tensor, seq_lens_out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """From vLLM's block table, whose blocks are the pages.

    Args:
        block_table: [B, max_blocks] int32.
        seq_lens: [B] int32 or int64.
        page_table_out, seq_lens_out: [B', max_pages] and [B'] int32 buffers, B' >= B.

    Returns:
        The buffers.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name.
    """
    requests = check_tensor("block_table", block_table, ["B", "max_blocks"], INT_DTYPES).shape[0]
    check_tensor("seq_lens", seq_lens, [requests], INT_DTYPES, block_table.device)
    columns = _buffers(page_table_out, seq_lens_out, requests, block_table.device)
    return _store(page_table_out, seq_lens_out, block_table[:, : columns.numel()], seq_lens)


def pages_from_csr(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    *,
    page_size: int,
    page_table_out: torch.Tensor,
    seq_lens_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """From FlashInfer's paged KV description.

    Args:
        indptr: [B + 1] int32 or int64, offsets of each request's pages in `indices`.
        indices: [pages in use, or more] int32 or int64, page ids.
        last_page_len: [B] int32 or int64, tokens in each request's last page.
        page_size: tokens of a page.
        page_table_out, seq_lens_out: [B', max_pages] and [B'] int32 buffers, B' >= B.

    Returns:
        The buffers; a request without pages has length 0.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name.
    """
    requests = check_tensor("last_page_len", last_page_len, ["B"], INT_DTYPES).shape[0]
    device = last_page_len.device
    check_tensor("indptr", indptr, [requests + 1], INT_DTYPES, device)
    check_tensor("indices", indices, ["pages"], INT_DTYPES, device)
    check_int("page_size", page_size, 1)
    columns = _buffers(page_table_out, seq_lens_out, requests, device)
    counts = indptr.diff()
    seq_lens = torch.where(counts > 0, (counts - 1) * page_size + last_page_len, 0)
    if not indices.numel():
        return _store(page_table_out, seq_lens_out, columns.new_zeros(requests, 0), torch.zeros_like(seq_lens))
    place = (indptr[:-1, None] + columns).clamp(0, indices.numel() - 1)
    return _store(page_table_out, seq_lens_out, torch.where(columns < counts[:, None], indices[place], 0), seq_lens)


def pages_from_req_to_token(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    page_size: int,
    page_table_out: torch.Tensor,
    seq_lens_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """From SGLang's table of token slots; its allocator hands out whole pages, so the first slot of a page names the page.

    Args:
        req_to_token: [requests of the pool, max_context] int32, slots.
        req_pool_indices: [B] int32 or int64, rows of `req_to_token`.
        seq_lens: [B] int32 or int64.
        page_size: tokens of a page, the allocator's own.
        page_table_out, seq_lens_out: [B', max_pages] and [B'] int32 buffers, B' >= B.

    Returns:
        The buffers.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name.
    """
    rows, context = check_tensor("req_to_token", req_to_token, ["requests", "max_context"], INT_DTYPES).shape
    device = req_to_token.device
    requests = check_tensor("req_pool_indices", req_pool_indices, ["B"], INT_DTYPES, device).shape[0]
    check_tensor("seq_lens", seq_lens, [requests], INT_DTYPES, device)
    check_int("page_size", page_size, 1)
    if rows < 1 or context < 1:
        raise ValueError(f"req_to_token: expected at least one request and one slot, got {[rows, context]}")
    first = _buffers(page_table_out, seq_lens_out, requests, device) * page_size
    row = req_pool_indices.long().clamp(0, rows - 1)
    slots = req_to_token[row[:, None], first.clamp(max=context - 1)]
    table = torch.where(first < seq_lens[:, None], slots // page_size, 0)
    return _store(page_table_out, seq_lens_out, table, seq_lens)
