"""The functions behind the key: m3attn's calls to FlashInfer's, with what stands between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from m3attn.batch import PagedBatch
from m3attn.calls import IndexScoreCall, SelectBlocksCall, SparseAttentionCall
from m3attn.choice import UnsupportedProblem
from m3attn.scales import Scale

BLOCK_SIZE, DIM, TOPK = 128, 128, 16
POOL_LIMIT = 1 << 31
"""Page offsets are kept in 32 bits there: measured wrong from pools of 2 GiB on, without an error."""
MAX_PAGES = 4096
MAX_COLUMNS = 8192
SIGN = -(1 << 31)
SMALLEST_NORMAL = 1 << 23
"""The bits of a float32's sign, and of the smallest positive one that is not flushed to zero."""


@dataclass(frozen=True, eq=False)
class Requests:
    """A step as FlashInfer may see it: everything in bounds, contiguous, and no wider than the longest request.

    Attributes:
        position: [T] int64, each row's position, -1 where it sees no key.
        table: [B, pages] int32; seq_lens: [B] int32; offsets: [B + 1] int32. In a decode or verify step B is T, with one query each.
        longest: queries of a request, at most.
    """

    position: torch.Tensor
    table: torch.Tensor
    seq_lens: torch.Tensor
    offsets: torch.Tensor
    longest: int

    @classmethod
    def of(cls, batch: PagedBatch, tokens: int, num_pages: int) -> Requests:
        device = batch.seq_lens.device
        width = min(batch.page_table.shape[1], -(-batch.max_seqlen_k // batch.page_size))
        table = batch.page_table[:, :width].clamp(0, num_pages - 1)
        seq_lens = batch.seq_lens.clamp(0, min(batch.max_seqlen_k, width * batch.page_size))
        offsets = batch.cu_seqlens_q.clamp(0, tokens).cummax(0).values
        row = torch.arange(tokens, dtype=torch.int32, device=device)
        request = torch.searchsorted(offsets[1:].contiguous(), row, right=True).clamp(max=batch.num_requests - 1)
        position = seq_lens[request] - offsets[request + 1] + row
        position = torch.where((row >= offsets[0]) & (row < offsets[-1]) & (position >= 0), position, -1)
        if batch.phase == "prefill":
            return cls(position.long(), table.contiguous(), seq_lens.contiguous(), offsets.int(), batch.max_seqlen_q)
        alone = torch.arange(tokens + 1, dtype=torch.int32, device=device)
        return cls(position.long(), table[request].contiguous(), (position + 1).int(), alone, 1)

    @property
    def blocks(self) -> torch.Tensor:
        """[T] int64, blocks that each row may see."""
        return torch.where(self.position < 0, 0, self.position // BLOCK_SIZE + 1)


def index_score(call: IndexScoreCall) -> None:
    """Fill `call.out`.

    Raises:
        UnsupportedProblem: index keys that are not one dense tensor, or a pool of 2 GiB and more.
    """
    tokens, heads, _ = call.index_q.shape
    if tokens == 0 or call.batch.num_blocks == 0:
        return
    if 0 in call.batch.page_table.shape or call.index_k.shape[0] == 0:
        call.out.fill_(float("-inf"))
        return
    _check_pool("cache.index_k", call.index_k, dense=True)
    requests = Requests.of(call.batch, tokens, call.index_k.shape[0])
    columns = requests.table.shape[1]  # no more than there are pages for: the host bound may promise more
    scores = torch.empty(heads, columns, tokens, dtype=torch.float32, device=call.out.device)
    _ops().msa_proxy_score(
        call.index_q.contiguous(),
        call.index_k[:, None],
        requests.offsets,
        page_table=requests.table,
        seqused_k=requests.seq_lens,
        max_seqlen_q=requests.longest,
        max_k_tiles=columns,
        output=scores,
    )
    visible = torch.arange(columns, device=scores.device) < requests.blocks[:, None]
    scores = call.index_k_scale.multiply(call.index_q_scale.multiply(scores)).transpose(1, 2)
    call.out[..., :columns].copy_(torch.where(visible & ~scores.isnan(), scores, float("-inf")))
    call.out[..., columns:].fill_(float("-inf"))


def select_blocks(call: SelectBlocksCall) -> None:
    """Fill `call.out`, up to exchanges of blocks whose scores agree but for their lowest bits (see `exact_ids` in `Capabilities`).

    Raises:
        UnsupportedProblem: scores of more than 8,192 blocks.
    """
    heads, tokens, columns = call.scores.shape
    if tokens == 0:
        return
    if call.batch.num_requests == 0 or columns == 0:
        call.out.fill_(-1)
        return
    if columns > MAX_COLUMNS:
        raise UnsupportedProblem(f"flashinfer: expected at most {MAX_COLUMNS} blocks, got {columns}")
    blocks = Requests.of(call.batch, tokens, 1).blocks.clamp(max=columns)
    scores = torch.where(torch.arange(columns, device=call.scores.device) < blocks[:, None], _distinct(call.scores), float("-inf"))
    ids = torch.empty(tokens, heads, TOPK, dtype=torch.int32, device=scores.device)
    local_blocks = min(call.local_blocks, TOPK)  # they come before the first ones where K does not suffice for both
    _ops().msa_topk_select(
        scores.transpose(1, 2).contiguous(),
        TOPK,
        num_valid_pages=blocks.int(),
        output=ids,
        force_begin_blocks=min(call.init_blocks, TOPK - local_blocks),
        force_end_blocks=local_blocks,
    )
    call.out.copy_(ids.transpose(0, 1))


def _distinct(scores: torch.Tensor) -> torch.Tensor:
    """Normal numbers between -4 and 4 in the order of the scores, no two of a row equal: the lowest bits are the block's, the lower block's larger.

    FlashInfer reads numbers around zero, zero included, as block 0, drops those of -1e30 and below, places forced blocks among large ones, and may
    leave places unwritten where two are equal. -inf marks what may not be chosen there, which NaN and -inf may be here.
    """
    columns = scores.shape[2]
    bits = (scores.masked_fill(scores.isnan(), float("-inf")) + 0.0).view(torch.int32)  # + 0: -0 becomes +0
    lowest = (1 << (columns - 1).bit_length()) - 1
    near_one = (bits & SIGN) | ((bits & ~SIGN) >> 1) + SMALLEST_NORMAL  # half the exponent, which keeps the order
    block = torch.arange(columns, dtype=torch.int32, device=scores.device)
    return (near_one & ~lowest | torch.where(bits < 0, block, columns - 1 - block)).view(torch.float32)


def sparse_attention(call: SparseAttentionCall) -> None:
    """Fill `call.out`.

    Raises:
        UnsupportedProblem: K and V that are not the halves of one dense tensor, a pool of 2 GiB and more, scales on the device, or a request
            longer than 524,288 tokens.
    """
    tokens = call.q.shape[0]
    if tokens == 0:
        return
    if 0 in call.batch.page_table.shape or call.k.shape[0] == 0 or call.batch.num_blocks == 0:
        call.out.zero_()
        return
    _check_halves(call.k, call.v)
    _check_pool("cache.k", call.k, dense=False)
    if call.batch.num_blocks > MAX_PAGES:
        raise UnsupportedProblem(f"flashinfer: expected max_seqlen_k at most {MAX_PAGES * BLOCK_SIZE}, got {call.batch.max_seqlen_k}")
    scale = call.sm_scale * _on_host("q_scale", call.q_scale) * _on_host("cache.k_scale", call.k_scale)
    requests = Requests.of(call.batch, tokens, call.k.shape[0])
    out = torch.zeros(call.q.shape, dtype=call.q.dtype, device=call.q.device)
    where = {"page_table": requests.table, "seqused_k": requests.seq_lens, "causal": True}
    options: dict[str, Any] = {"softmax_scale": scale, "v_global_scale": _on_host("cache.v_scale", call.v_scale), "out": out}
    inputs = call.q.contiguous(), call.k, call.v, _clean_ids(call.ids, requests.blocks)
    if call.batch.phase == "prefill":
        _ops().msa_sparse_attention(*inputs, requests.offsets, **where, **options)
    else:
        _ops().msa_sparse_decode_attention(*inputs, **where, seqlen_q=1, **options)
    call.out.copy_(out.masked_fill_((requests.position < 0)[:, None, None], 0.0))


def _clean_ids(ids: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """ids [Hkv, T, K], ascending, with -1 at the tail only, where one is none or beyond the row's own block."""
    absent = torch.iinfo(torch.int32).max
    ids = torch.where((ids >= 0) & (ids < blocks[:, None]), ids, absent).sort(-1).values
    return torch.where(ids == absent, -1, ids).contiguous()


def _on_host(name: str, scale: Scale) -> float:
    if scale.tensor is not None:
        raise UnsupportedProblem(f"flashinfer: expected {name} as None or a float, got a tensor, whose value only the device knows")
    return scale.value


def _check_halves(k: torch.Tensor, v: torch.Tensor) -> None:
    heads, dense = k.shape[1], 2 * DIM
    wanted = (heads * BLOCK_SIZE * dense, BLOCK_SIZE * dense, dense, 1)
    if k.stride() != wanted or v.stride() != wanted or v.data_ptr() - k.data_ptr() != DIM * k.element_size():
        raise UnsupportedProblem(f"flashinfer: expected K and V as halves of one dense [pages, {heads}, 128, 256] tensor, got strides {k.stride()}")


def _check_pool(name: str, pool: torch.Tensor, *, dense: bool) -> None:
    if dense and not pool.is_contiguous():
        raise UnsupportedProblem(f"flashinfer: expected {name} as one dense tensor, got strides {pool.stride()}")
    nbytes = pool.shape[0] * pool.stride(0) * pool.element_size()
    if nbytes >= POOL_LIMIT:
        raise UnsupportedProblem(f"flashinfer: expected {name} below 2 GiB, got {nbytes} bytes (wrong results without an error were measured)")


def _ops() -> Any:
    from flashinfer import msa_ops

    return msa_ops
