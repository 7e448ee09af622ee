"""`index_topk` for Hopper."""

from __future__ import annotations

from m3attn.calls import IndexTopkCall
from m3attn.dsl_kernels.index_score_sm90 import score_rows
from m3attn.dsl_kernels.select_blocks import select_rows
from m3attn.index_slices import topk_in_slices, workspace_bytes

__all__ = ["index_topk", "workspace_bytes"]


def index_topk(call: IndexTopkCall) -> None:
    """Fill `call.out` [Hkv, T, K], every element; ids equal those of the two stages, bit for bit."""
    topk_in_slices(call, score_rows, select_rows)
