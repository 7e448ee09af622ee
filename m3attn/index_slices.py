"""`index_topk` by way of scores in a workspace, in slices of query rows that fit its limit: what kernels of both kinds do around their two stages."""

from __future__ import annotations

from collections.abc import Callable

import torch

from m3attn.calls import IndexTopkCall
from m3attn.workspace import WorkShape, carve


def _score_stride(num_blocks: int) -> int:
    """Elements between score rows: whole sectors, so that the selection reads 16 bytes at a time."""
    return -(-num_blocks // 16) * 16


def _slice_rows(tokens: int, num_index_heads: int, num_blocks: int, nbytes: int) -> int:
    """Query rows whose scores fit `nbytes`, at least one."""
    return min(tokens, max(1, nbytes // (num_index_heads * _score_stride(num_blocks) * 4)))


def workspace_bytes(shape: WorkShape) -> int:
    """Bytes of scratch for scores; 0 where every row keeps all its blocks."""
    if shape.num_blocks <= shape.topk or shape.tokens == 0:
        return 0
    rows = _slice_rows(shape.tokens, shape.num_index_heads, shape.num_blocks, shape.limit)
    return rows * shape.num_index_heads * _score_stride(shape.num_blocks) * 4


def topk_in_slices(call: IndexTopkCall, score_rows: Callable[..., None], select_rows: Callable[..., None]) -> None:
    """Fill `call.out` [Hkv, T, K], every element; ids equal those of the two stages, bit for bit.

    Args:
        score_rows: (call, scores [Hi, rows, at least num_blocks], begin, end, fill=False, skip_blocks=K) scores query rows [begin, end).
        select_rows: (scores, num_blocks, call, begin, end) selects for them.
    """
    tokens, num_heads, num_blocks = call.index_q.shape[0], call.index_q.shape[1], call.batch.num_blocks
    if call.workspace is None or num_blocks <= call.topk:
        select_rows(call.out.view(torch.float32), num_blocks, call, 0, tokens)  # any fp32 tensor: no score is read
        return
    rows = _slice_rows(tokens, num_heads, num_blocks, call.workspace.numel())
    for begin in range(0, tokens, rows):
        end = min(begin + rows, tokens)
        scores, _ = carve(call.workspace, 0, (num_heads, end - begin, _score_stride(num_blocks)), torch.float32)
        score_rows(call, scores, begin, end, fill=False, skip_blocks=call.topk)
        select_rows(scores, num_blocks, call, begin, end)
