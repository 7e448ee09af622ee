"""Selected blocks as page tables: what a paged kernel of dense attention needs to read only them."""

from __future__ import annotations

from dataclasses import replace

import torch

from m3attn.batch import LayerCache, PagedBatch
from m3attn.checks import check_batch, check_int, check_outputs, check_tensor
from m3attn.reference.paging import query_rows


def selected_page_table(
    ids: torch.Tensor,
    batch: PagedBatch,
    *,
    heads_as_pages: bool = False,
    page_table_out: torch.Tensor | None = None,
    seq_lens_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A page table and a length for each query row and KV group: a request of one query, whose tokens are those of the selected blocks.

    Dense attention over them is sparse attention over `ids`: the query stands behind the last of its tokens and sees them all. Blocks follow each
    other in ascending order, the query's own, of which it sees a part, last; ids that are -1, out of range or beyond the own block are left out.
    Nothing is read back, so a CUDA graph may hold the call.

    Args:
        ids: [Hkv, T, K] int32, any strides and order, as `sparse_attention` takes them; no block twice in a list.
        batch: the step that `ids` belong to; `block_size % page_size == 0`.
        heads_as_pages: number pages as page * Hkv + head, for a cache in which every head's part of a page is a page of its own
            (`heads_as_pages`), so that one call serves all groups; else pages are the batch's.
        page_table_out: [T, Hkv, K * block_size // page_size] int32, contiguous, to write to.
        seq_lens_out: [T, Hkv] int32, contiguous, to write to.

    Returns:
        page_table [T, Hkv, K * block_size // page_size] and seq_lens [T, Hkv], int32; entries past a length are 0. A row that sees nothing has
        length 0.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name.
    """
    check_tensor("ids", ids, ["Hkv", "T", "K"], [torch.int32], unit_last_stride=False)
    device = ids.device
    check_batch(batch, device, sparse=True)
    heads, tokens, topk = ids.shape
    check_int("ids.shape[2]", topk, 1)
    pages_of_block = batch.block_size // batch.page_size
    page_table = _buffer("page_table_out", page_table_out, [tokens, heads, topk * pages_of_block], device)
    seq_lens = _buffer("seq_lens_out", seq_lens_out, [tokens, heads], device)
    if not torch.compiler.is_compiling():
        read: dict[str, torch.Tensor | None] = {"ids": ids}
        read |= {"batch.page_table": batch.page_table, "batch.seq_lens": batch.seq_lens, "batch.cu_seqlens_q": batch.cu_seqlens_q}
        check_outputs({"page_table_out": page_table_out, "seq_lens_out": seq_lens_out}, read)
    if batch.num_requests == 0 or batch.page_table.shape[1] == 0:
        return page_table.zero_(), seq_lens.zero_()

    request, position = query_rows(batch, tokens)
    own = torch.where(position < 0, -1, position // batch.block_size)[:, None, None]  # [T, 1, 1]
    beyond = batch.num_blocks
    block = ids.permute(1, 0, 2)  # [T, Hkv, K]
    block = torch.where((block >= 0) & (block <= own), block, beyond).sort(dim=-1).values
    is_selected = block < beyond
    count = is_selected.sum(dim=-1)
    own_part = position[:, None] % batch.block_size + 1  # [T, 1]
    has_own = (block == own).any(dim=-1)
    seq_lens.copy_(count * batch.block_size - torch.where(has_own, batch.block_size - own_part, 0))

    logical = block[..., None] * pages_of_block + torch.arange(pages_of_block, device=device)  # [T, Hkv, K, pages of a block]
    logical = logical.flatten(2).clamp(max=batch.page_table.shape[1] - 1)
    page = batch.page_table[request[:, None, None], logical]
    if heads_as_pages:
        page = page * heads + torch.arange(heads, device=device)[:, None]
    is_read = torch.arange(page.shape[2], device=device) * batch.page_size < seq_lens[..., None]
    page_table.copy_(torch.where(is_read, page, 0))
    return page_table, seq_lens


def heads_as_pages(cache: LayerCache) -> LayerCache:
    """A view of a cache in which every head's part of a page is a page: [pages * Hkv, 1, page_size, D], page * Hkv + head in the place of both.

    Raises:
        ValueError: pages that are more than their heads one behind the other, as in an NHD cache or one that holds other layers between; nothing
            is copied.
    """

    def split(name: str, tensor: torch.Tensor) -> torch.Tensor:
        pages, heads = tensor.shape[:2]
        if pages > 1 and heads > 1 and tensor.stride(0) != heads * tensor.stride(1):
            raise ValueError(
                f"cache.{name}: expected pages of {heads} heads one behind the other and nothing else, got strides {tensor.stride()}; "
                "without heads_as_pages a dense kernel can take one head's view at a time"
            )
        return tensor.view(pages * heads, 1, *tensor.shape[2:])

    cache.key_value()
    if cache.kv is not None:
        return replace(cache, kv=split("kv", cache.kv), index_k=None)
    assert cache.k is not None and cache.v is not None
    return replace(cache, k=split("k", cache.k), v=split("v", cache.v), index_k=None)


def _buffer(name: str, given: torch.Tensor | None, shape: list[int], device: torch.device) -> torch.Tensor:
    if given is None:
        return torch.empty(shape, dtype=torch.int32, device=device)
    check_tensor(name, given, shape, [torch.int32], device)
    if not given.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {given.stride()}")
    return given
