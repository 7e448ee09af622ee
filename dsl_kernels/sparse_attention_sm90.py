"""Sparse attention on Hopper: which kernel takes a call, and the scratch it needs.

Decode and verify (at most 16 queries a request) go to `sparse_decode_sm90`. Prefill goes to `sparse_prefill_sm90`, tile by tile; a tile whose tokens
share few blocks leaves its rows to `sparse_prefill_by_block_sm90`. Their matrix instructions take 16-bit values: an fp8 cache is first copied in a
wider type, as many KV groups at a time as the workspace takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from m3attn.batch import DECODE_MAX_SEQLEN_Q, PagedBatch
from m3attn.calls import SparseAttentionCall
from m3attn.choice import UnsupportedProblem
from m3attn.dsl_kernels import sparse_prefill_by_block_sm90 as by_block
from m3attn.dsl_kernels.sparse_decode_sm90 import decode_workspace_bytes, sparse_decode
from m3attn.dsl_kernels.sparse_prefill_by_block_sm90 import attend_by_block
from m3attn.dsl_kernels.sparse_prefill_sm90 import is_aligned, sparse_prefill
from m3attn.dsl_kernels.widen_pages import widen_pages
from m3attn.dtypes import dtype_name, is_fp8
from m3attn.workspace import WorkShape, carve, workspace_limit

COUNTER_BYTES = 256


@dataclass(frozen=True)
class PrefillPlan:
    """How a prefill call goes.

    Attributes:
        groups: KV groups at a time; all, or as many as the copies of an fp8 cache fit for.
        by_block: scratch to attend to rows block by block where neighbours share few; None: all go tile by tile.
        copy_bytes: of copies of `groups` groups and their page table.
    """

    groups: int
    by_block: by_block.Plan | None
    copy_bytes: int

    @classmethod
    def of(cls, shape: WorkShape, may_defer: bool) -> PrefillPlan:
        """From static shapes. `may_defer`: rows may be attended block by block.

        Raises:
            UnsupportedProblem: the copies of not even one group fit the limit.
        """
        groups, copy_bytes = shape.num_kv_heads, 0
        if shape.kv_dtype.startswith("fp8"):
            group_bytes = shape.num_requests * shape.num_blocks * shape.block_size * shape.head_dim * 4
            fixed = COUNTER_BYTES + shape.num_requests * shape.num_blocks * 4 + 768  # the copies' page table, and what alignment takes
            groups = min(shape.num_kv_heads, (shape.limit - fixed) // max(1, group_bytes))
            if groups < 1:
                raise UnsupportedProblem(
                    f"workspace: expected a limit of at least {fixed + group_bytes} bytes, for 16-bit copies of one KV group's fp8 keys and values "
                    f"of {shape.num_requests} requests of {shape.max_seqlen_k} tokens, got {shape.limit}; m3attn.set_workspace_limit raises it, and "
                    "impl='triton' needs none"
                )
            copy_bytes = fixed + groups * group_bytes
        plan = None
        if may_defer:
            q_heads = groups * (shape.num_q_heads // shape.num_kv_heads)
            sizes = (q_heads, groups, shape.head_dim, shape.topk, shape.num_requests, shape.num_blocks)
            plan = by_block.Plan.of(shape.tokens, *sizes, shape.limit - copy_bytes)
        return cls(groups, plan, copy_bytes)

    @property
    def nbytes(self) -> int:
        return self.copy_bytes + (COUNTER_BYTES if self.by_block is None else self.by_block.nbytes)


def workspace_bytes(shape: WorkShape) -> int:
    """Scratch of a call: decode's partials, or prefill's.

    A prefill takes 256 bytes; from 2,048 rows on, with 8, 16 or 32 heads a KV head and no sink, lists turned round and partial outputs of as many
    rows at a time as the limit takes (T * Hkv * K * (G * (2 D + 4) + 4) for all); and for an fp8 cache copies of as many KV groups at a time,
    B * max_seqlen_k * 4 D for each.
    """
    if shape.tokens == 0 or shape.num_requests == 0:
        return 0
    if shape.max_seqlen_q <= DECODE_MAX_SEQLEN_Q:
        return decode_workspace_bytes(shape)
    return PrefillPlan.of(shape, may_defer=True).nbytes


def sparse_attention(call: SparseAttentionCall) -> None:
    """Attention of every query over the visible keys of its selected blocks; fills call.out and call.lse.

    Raises:
        UnsupportedProblem: a pool whose address or strides are no multiples of 16 bytes, or a workspace limit too small for an fp8 cache.
    """
    by_phase(call, _prefill)


def by_phase(call: SparseAttentionCall, prefill: Callable[[SparseAttentionCall], None]) -> None:
    """`prefill` of a prefill with keys, the decode kernel for other steps with keys, zeros for a step without."""
    if call.q.shape[0] == 0:
        return
    batch = call.batch
    if batch.num_requests == 0 or batch.num_blocks == 0 or call.k.shape[0] == 0 or batch.page_table.shape[1] == 0:
        call.out.zero_()
        if call.lse is not None:
            call.lse.fill_(float("-inf"))
    elif batch.phase == "prefill":
        prefill(call)
    else:
        sparse_decode(call)


def _prefill(call: SparseAttentionCall) -> None:
    may_defer = call.sink_key is None and is_aligned(call.q) and is_aligned(call.out)
    plan = PrefillPlan.of(work_shape(call), may_defer)
    attend_in_groups(call, plan, lambda k, v, batch, kv_heads: _attend(call, k, v, batch, kv_heads, plan))


def work_shape(call: SparseAttentionCall) -> WorkShape:
    """What `workspace_bytes` was asked for."""
    batch, (tokens, num_q_heads, head_dim) = call.batch, call.q.shape
    return WorkShape(
        tokens=tokens,
        num_requests=batch.num_requests,
        num_q_heads=num_q_heads,
        num_kv_heads=call.k.shape[1],
        num_index_heads=0,
        head_dim=head_dim,
        topk=call.ids.shape[2],
        max_seqlen_q=batch.max_seqlen_q,
        max_seqlen_k=batch.max_seqlen_k,
        block_size=batch.block_size,
        limit=workspace_limit(),
        kv_dtype=dtype_name(call.k.dtype),
    )


def attend_in_groups(call: SparseAttentionCall, plan: PrefillPlan, attend: Callable[[torch.Tensor, torch.Tensor, PagedBatch, slice], None]) -> None:
    """`attend(k, v, batch, kv_heads)` to the call's pages in place, or to copies of an fp8 cache behind the rest of the plan's scratch."""
    batch, num_kv_heads, head_dim = call.batch, call.k.shape[1], call.q.shape[2]
    if not is_fp8(call.k.dtype):
        check_pool("cache.k", call.k)
        check_pool("cache.v", call.v)
        attend(call.k, call.v, batch, slice(0, num_kv_heads))
        return
    assert call.workspace is not None
    for first in range(0, num_kv_heads, plan.groups):
        heads = slice(first, min(first + plan.groups, num_kv_heads))
        copy_shape = (batch.num_requests * batch.num_blocks, heads.stop - first, batch.block_size, head_dim)
        wide_table, offset = carve(call.workspace, plan.nbytes - plan.copy_bytes, (batch.num_requests, batch.num_blocks), torch.int32)
        wide_k, offset = carve(call.workspace, offset, copy_shape, call.q.dtype)  # e4m3 queries take e4m3 keys
        wide_v, _ = carve(call.workspace, offset, copy_shape, torch.float16)
        widen_pages(call.k[:, heads], call.v[:, heads], wide_k, wide_v, wide_table, batch)
        attend(wide_k, wide_v, replace(batch, page_table=wide_table), heads)


def _attend(call: SparseAttentionCall, k: torch.Tensor, v: torch.Tensor, batch: PagedBatch, kv_heads: slice, plan: PrefillPlan) -> None:
    """The KV groups `kv_heads`, which k and v hold."""
    assert call.workspace is not None
    if plan.by_block is None:
        counter, _ = carve(call.workspace, 0, (1,), torch.int32)
        sparse_prefill(call, k, v, batch, kv_heads, counter.zero_())
        return
    fitted = replace(plan.by_block, num_kv_heads=k.shape[1])
    scratch = by_block.Scratch.carve(call.workspace, fitted, call.out.dtype)
    sparse_prefill(call, k, v, batch, kv_heads, scratch.counter, scratch.deferred)
    attend_by_block(call, k, v, batch, kv_heads, fitted, scratch)


def check_pool(argument: str, tensor: torch.Tensor) -> None:
    size = tensor.element_size()
    if tensor.data_ptr() % 16 or any(stride * size % 16 for stride in tensor.stride()[:3]):
        raise UnsupportedProblem(
            f"{argument}: expected an address and strides in multiples of 16 bytes, which TMA needs, got address {tensor.data_ptr():#x} and strides "
            f"{tensor.stride()} of {size} bytes; impl='triton' takes any"
        )
