"""Sparse attention on Blackwell: which kernel takes a call, and the scratch it needs.

Prefill goes to `sparse_prefill_sm100`, every tile of it; decode and verify go to Hopper's `sparse_decode_sm90`, whose 16-row products are a warp's
instructions, which Blackwell has too.
"""

from __future__ import annotations

import torch

from m3attn.batch import DECODE_MAX_SEQLEN_Q
from m3attn.calls import SparseAttentionCall
from m3attn.dsl_kernels.sparse_attention_sm90 import PrefillPlan, attend_in_groups, by_phase, work_shape
from m3attn.dsl_kernels.sparse_decode_sm90 import decode_workspace_bytes
from m3attn.dsl_kernels.sparse_prefill_sm100 import sparse_prefill
from m3attn.workspace import WorkShape, carve


def workspace_bytes(shape: WorkShape) -> int:
    """Scratch of a call: decode's partials, or prefill's 256 bytes and, for an fp8 cache, copies of as many KV groups at a time as the limit takes,
    B * max_seqlen_k * 4 D bytes for each."""
    if shape.tokens == 0 or shape.num_requests == 0:
        return 0
    if shape.max_seqlen_q <= DECODE_MAX_SEQLEN_Q:
        return decode_workspace_bytes(shape)
    return _plan(shape).nbytes


def sparse_attention(call: SparseAttentionCall) -> None:
    """Attention of every query over the visible keys of its selected blocks; fills call.out and call.lse.

    Raises:
        UnsupportedProblem: a pool whose address or strides are no multiples of 16 bytes, or a workspace limit too small for an fp8 cache.
    """
    by_phase(call, _prefill)


def _prefill(call: SparseAttentionCall) -> None:
    assert call.workspace is not None
    counter, _ = carve(call.workspace, 0, (1,), torch.int32)
    attend_in_groups(call, _plan(work_shape(call)), lambda k, v, batch, kv_heads: sparse_prefill(call, k, v, batch, kv_heads, counter.zero_()))


def _plan(shape: WorkShape) -> PrefillPlan:
    return PrefillPlan.of(shape, may_defer=False)  # the kernel that attends block by block is Hopper's
