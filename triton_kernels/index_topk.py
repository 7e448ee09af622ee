"""`index_topk`: `index_score` and `select_blocks` through scores in a workspace, in slices of query rows that fit its limit."""

from __future__ import annotations

from m3attn.calls import IndexTopkCall
from m3attn.index_slices import topk_in_slices, workspace_bytes
from m3attn.triton_kernels.index_score import score_rows
from m3attn.triton_kernels.select_blocks import launch_select

__all__ = ["index_topk", "workspace_bytes"]

MMA_ROWS: dict[str, str | int | None] = {}


def index_topk(call: IndexTopkCall) -> None:
    """Fill `call.out` [Hkv, T, K], every element; ids equal those of the two stages, bit for bit."""
    topk_in_slices(call, score_rows, launch_select)
