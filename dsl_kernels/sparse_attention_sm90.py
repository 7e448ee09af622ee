"""Sparse attention on Hopper: which kernel takes a call, and the scratch it needs.

Decode and verify (at most 16 queries a request) go to `sparse_decode_sm90`, the rest to `sparse_prefill_sm90`, whose matrix instructions take
16-bit values: an fp8 cache is first copied in a wider type, as many KV groups at a time as the workspace takes.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from m3attn.batch import DECODE_MAX_SEQLEN_Q
from m3attn.calls import SparseAttentionCall
from m3attn.choice import UnsupportedProblem
from m3attn.dsl_kernels.sparse_decode_sm90 import decode_workspace_bytes, sparse_decode
from m3attn.dsl_kernels.sparse_prefill_sm90 import sparse_prefill
from m3attn.dtypes import is_fp8
from m3attn.workspace import WorkShape, carve, workspace_limit

COUNTER_BYTES = 256


def groups_to_widen(num_requests: int, num_kv_heads: int, head_dim: int, num_blocks: int, block_size: int, limit: int) -> int:
    """KV groups whose widened copies fit `limit` at a time.

    Raises:
        UnsupportedProblem: not even one does.
    """
    group_bytes = num_requests * num_blocks * block_size * head_dim * 4
    fixed = COUNTER_BYTES + table_bytes(num_requests, num_blocks)
    groups = min(num_kv_heads, (limit - fixed) // max(1, group_bytes))
    if groups < 1:
        raise UnsupportedProblem(
            f"workspace: expected a limit of at least {fixed + group_bytes} bytes, for 16-bit copies of one KV group's fp8 keys and values of "
            f"{num_requests} requests of {num_blocks * block_size} tokens, got {limit}; set_workspace_limit raises it, impl='triton' needs none"
        )
    return groups


def table_bytes(num_requests: int, num_blocks: int) -> int:
    """The page table of the copies, and what carving three tensors may lose to alignment."""
    return num_requests * num_blocks * 4 + 768


def workspace_bytes(shape: WorkShape) -> int:
    """Scratch of a call: decode's partials, or prefill's counter of tiles and, for an fp8 cache, B * max_seqlen_k * groups * 4 D of copies."""
    if shape.tokens == 0 or shape.num_requests == 0:
        return 0
    if shape.max_seqlen_q <= DECODE_MAX_SEQLEN_Q:
        return decode_workspace_bytes(shape)
    if not shape.kv_dtype.startswith("fp8"):
        return COUNTER_BYTES
    sizes = (shape.num_requests, shape.num_kv_heads, shape.head_dim, shape.num_blocks, shape.block_size)
    copies = shape.num_requests * shape.num_blocks * shape.block_size * groups_to_widen(*sizes, shape.limit) * shape.head_dim * 4
    return COUNTER_BYTES + copies + table_bytes(shape.num_requests, shape.num_blocks)


def sparse_attention(call: SparseAttentionCall) -> None:
    """Attention of every query over the visible keys of its selected blocks; fills call.out and call.lse.

    Raises:
        UnsupportedProblem: a pool whose address or strides are no multiples of 16 bytes, or a workspace limit too small for an fp8 cache.
    """
    if call.q.shape[0] == 0:
        return
    batch = call.batch
    if batch.num_requests == 0 or batch.num_blocks == 0 or call.k.shape[0] == 0 or batch.page_table.shape[1] == 0:
        call.out.zero_()
        if call.lse is not None:
            call.lse.fill_(float("-inf"))
    elif batch.phase == "prefill":
        _prefill(call)
    else:
        sparse_decode(call)


def _prefill(call: SparseAttentionCall) -> None:
    batch, num_kv_heads, head_dim = call.batch, call.k.shape[1], call.q.shape[2]
    assert call.workspace is not None
    counter, offset = carve(call.workspace, 0, (1,), torch.int32)
    if not is_fp8(call.k.dtype):
        check_pool("cache.k", call.k)
        check_pool("cache.v", call.v)
        sparse_prefill(call, call.k, call.v, batch, slice(0, num_kv_heads), counter)
        return
    from m3attn.triton_kernels.widen_pages import widen_pages

    groups = groups_to_widen(batch.num_requests, num_kv_heads, head_dim, batch.num_blocks, batch.block_size, workspace_limit())
    for first in range(0, num_kv_heads, groups):
        heads = slice(first, min(first + groups, num_kv_heads))
        copy_shape = (batch.num_requests * batch.num_blocks, heads.stop - first, batch.block_size, head_dim)
        wide_table, next_offset = carve(call.workspace, offset, (batch.num_requests, batch.num_blocks), torch.int32)
        wide_k, next_offset = carve(call.workspace, next_offset, copy_shape, call.q.dtype)  # e4m3 queries take e4m3 keys
        wide_v, _ = carve(call.workspace, next_offset, copy_shape, torch.float16)
        widen_pages(call.k[:, heads], call.v[:, heads], wide_k, wide_v, wide_table, batch)
        sparse_prefill(call, wide_k, wide_v, replace(batch, page_table=wide_table), heads, counter)


def check_pool(argument: str, tensor: torch.Tensor) -> None:
    size = tensor.element_size()
    if tensor.data_ptr() % 16 or any(stride * size % 16 for stride in tensor.stride()[:3]):
        raise UnsupportedProblem(
            f"{argument}: expected an address and strides in multiples of 16 bytes, which TMA needs, got address {tensor.data_ptr():#x} and strides "
            f"{tensor.stride()} of {size} bytes; impl='triton' takes any"
        )
