"""What `sparse_attention` and `dense_attention` check and allocate alike, and how they travel through operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from m3attn.batch import LayerCache, PagedBatch
from m3attn.checks import (
    MAX_TOPK,
    Memory,
    check_batch,
    check_int,
    check_key_value,
    check_memory,
    check_number,
    check_tensor,
    memory_of,
    once_per_look,
)
from m3attn.dtypes import E4M3, E5M2, FLOAT_DTYPES, dtype_name, is_fp8
from m3attn.operators import BATCH, KV_CACHE, pack, pack_batch, pack_kv_cache, pack_scale, scale_schema, unpack, unpack_kv_cache, unpack_scale
from m3attn.problem import Problem, arch_of, arch_settings
from m3attn.scales import Scale, ScaleLike
from m3attn.stages.execute import execute
from m3attn.workspace import WorkShape, workspace_limit

ATTENTION_DTYPES = (*FLOAT_DTYPES, torch.float64, E4M3)
CACHE_DTYPES = (*FLOAT_DTYPES, torch.float64, E4M3, E5M2)
SINK_DTYPES = (*FLOAT_DTYPES, torch.float64)


class AttentionInputs(NamedTuple):
    """A checked attention call.

    Attributes:
        call: the fields that the dataclasses of both stages have.
        problem, shape: its problem and its scratch shape.
        inputs: what may not require gradients.
        memory: what a workspace must not overlap.
    """

    call: dict[str, Any]
    problem: Problem
    shape: WorkShape
    inputs: tuple[torch.Tensor | None, ...]
    memory: Memory

    def execute(
        self, stage: str, call_type: Callable[..., Any], impl: str | None, workspace: torch.Tensor | None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Run the call; returns out, or (out, lse) where there is an lse."""
        (call, problem, shape, inputs, memory), out, lse = self, self.call["out"], self.call["lse"]
        execute(stage, call_type, call, problem, impl, inputs, shape=shape, workspace=workspace, memory=memory, device=out.device)
        return out if lse is None else (out, lse)


def output_dtype(q: torch.Tensor) -> torch.dtype:
    """q's dtype; bf16 for fp8 q."""
    return torch.bfloat16 if is_fp8(q.dtype) else q.dtype


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32; fp64 for fp64 queries, which only the reference takes."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Accepted(NamedTuple):
    problem: Problem
    shape: WorkShape
    out_shape: tuple[int, int, int]
    out_dtype: torch.dtype


def check_attention(
    q: Any,
    cache: LayerCache,
    batch: PagedBatch,
    *,
    sm_scale: float | None,
    q_scale: ScaleLike,
    sink_key: torch.Tensor | None,
    fp8_pv: bool,
    return_lse: bool,
    out: torch.Tensor | None,
    lse_out: torch.Tensor | None,
    has_workspace: bool,
    sparse: bool = False,
    ids: torch.Tensor | None = None,
) -> AttentionInputs:
    """Check everything the host can see and allocate what was not given.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name.
    """
    accepted = _accept(*arch_settings(), workspace_limit(), q, cache, batch, sparse, ids, sink_key, fp8_pv, return_lse, out, lse_out)
    device = q.device
    key, value = cache.key_value()
    lse = lse_out
    memory: Memory = []
    if out is not None or lse is not None or has_workspace:
        memory = memory_of({"q": q, "cache.k": key, "cache.v": value, "ids": ids, "sink_key": sink_key})
        outputs = memory_of({"out": out, "lse_out": lse})
        check_memory(outputs, memory)
        memory += outputs
    if out is None:
        out = torch.empty(accepted.out_shape, dtype=accepted.out_dtype, device=device)
    if lse is None and return_lse:
        lse = torch.empty(accepted.out_shape[:2], dtype=lse_dtype(q.dtype), device=device)
    k_scale, v_scale, _ = cache.scales(device)
    call = {
        "q": q,
        "k": key,
        "v": value,
        "batch": batch,
        "sm_scale": accepted.problem.head_dim**-0.5 if sm_scale is None else check_number("sm_scale", sm_scale),
        "q_scale": Scale.of(q_scale, argument="q_scale", device=device),
        "k_scale": k_scale,
        "v_scale": v_scale,
        "sink_key": sink_key,
        "fp8_pv": fp8_pv,
        "out": out,
        "lse": lse,
    }
    return AttentionInputs(call, accepted.problem, accepted.shape, (q, key, value, sink_key), memory)


@once_per_look
def _accept(
    _compile_target: str | None,
    _arch_override: str | None,
    limit: int,
    q: Any,
    cache: LayerCache,
    batch: PagedBatch,
    sparse: bool,
    ids: torch.Tensor | None,
    sink_key: torch.Tensor | None,
    fp8_pv: bool,
    return_lse: bool,
    out: torch.Tensor | None,
    lse_out: torch.Tensor | None,
) -> _Accepted:
    topk = 16
    if sparse:
        columns = check_tensor("ids", ids, ["Hkv", "T", "K"], [torch.int32], unit_last_stride=False).shape[2]
        topk = check_int("ids.shape[2]", columns, 1, MAX_TOPK)
    q = check_tensor("q", q, ["T", "Hq", "D"])
    if q.dtype not in ATTENTION_DTYPES:
        raise TypeError(f"q: expected bf16, fp16, fp32 or fp8_e4m3, got {q.dtype}{' (e5m2 holds too few bits of q)' if q.dtype == E5M2 else ''}")
    device = q.device
    tokens, heads, dim = q.shape
    check_batch(batch, device, sparse=sparse)
    key, value = check_key_value(cache, batch, device)
    kv_heads = key.shape[1]
    if key.shape[3] != dim:
        raise ValueError(f"cache.k: expected head dim {dim} as q, got {key.shape[3]}")
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"q: expected a multiple of the cache's {kv_heads} KV heads, got {heads} heads")
    if q.dtype == E4M3 and key.dtype != E4M3:
        raise TypeError(f"cache: expected an e4m3 cache for e4m3 q, got {key.dtype}; pass 16-bit q to read it")
    if key.dtype not in CACHE_DTYPES:
        raise TypeError(f"cache: expected bf16, fp16, fp32, fp8_e4m3 or fp8_e5m2, got {key.dtype}")
    if not is_fp8(key.dtype) and key.dtype != q.dtype:
        raise TypeError(f"cache: expected {q.dtype} as q, or an fp8 cache, got {key.dtype}")
    if fp8_pv and q.dtype != E4M3:
        raise ValueError(f"fp8_pv: expected e4m3 q, K and V, got q {q.dtype}")
    if sink_key is not None:
        check_tensor("sink_key", sink_key, [heads, dim], SINK_DTYPES, device)
    out_shape = (tokens, heads, value.shape[3])
    if out is not None:
        check_tensor("out", out, out_shape, [output_dtype(q)], device)
    if lse_out is not None:
        check_tensor("lse_out", lse_out, [tokens, heads], [lse_dtype(q.dtype)], device)
        if not lse_out.is_contiguous():
            raise ValueError(f"lse_out: expected a contiguous tensor, got strides {lse_out.stride()}")
    if sparse:
        check_tensor("ids", ids, [kv_heads, tokens, topk], None, device, unit_last_stride=False)
    problem = Problem(
        arch=arch_of(device),
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        v_head_dim=value.shape[3],
        page_size=batch.page_size,
        block_size=batch.block_size,
        topk=topk,
        q_dtype=dtype_name(q.dtype),
        kv_dtype=dtype_name(key.dtype),
        sink=sink_key is not None,
        lse=return_lse or lse_out is not None,
        fp8_pv=fp8_pv,
        zero_on_alloc=cache.zero_on_alloc,
        phase=batch.phase,
    )
    shape = WorkShape(
        tokens=tokens,
        num_requests=batch.num_requests,
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        num_index_heads=0,
        head_dim=dim,
        topk=topk,
        max_seqlen_q=batch.max_seqlen_q,
        max_seqlen_k=batch.max_seqlen_k,
        block_size=batch.block_size,
        limit=limit,
        kv_dtype=dtype_name(key.dtype),
    )
    return _Accepted(problem, shape, out_shape, output_dtype(q))


OPTIONS = f"float? sm_scale, {scale_schema('q_scale')}, Tensor? sink_key, bool fp8_pv, str? impl"
COMMON = f"Tensor q, str? q_dtype, {KV_CACHE}, bool zero_on_alloc, {BATCH}, {OPTIONS}"
NUM_COMMON = 23


def flatten(
    q: torch.Tensor,
    cache: LayerCache,
    batch: PagedBatch,
    sm_scale: float | None,
    q_scale: ScaleLike,
    sink_key: torch.Tensor | None,
    fp8_pv: bool,
    impl: str | None,
) -> tuple[Any, ...]:
    """The COMMON schema's arguments."""
    options = (sm_scale, *pack_scale(q_scale, "q_scale"), sink_key, fp8_pv, impl)
    return (*pack(q), *pack_kv_cache(cache), cache.zero_on_alloc, *pack_batch(batch), *options)


def unflatten(flat: tuple[Any, ...]) -> dict[str, Any]:
    """The inverse of `flatten`, as keyword arguments."""
    q, q_dtype, *rest = flat
    sm_scale, q_scale, q_scale_tensor, sink_key, fp8_pv, impl = rest[15:]
    return {
        "q": unpack(q, q_dtype, "q"),
        "cache": replace(unpack_kv_cache(*rest[:7]), zero_on_alloc=rest[7]),
        "batch": PagedBatch(*rest[8:15]),
        "sm_scale": sm_scale,
        "q_scale": unpack_scale(q_scale, q_scale_tensor),
        "sink_key": sink_key,
        "fp8_pv": fp8_pv,
        "impl": impl,
    }


def fake_outputs(flat: tuple[Any, ...], return_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a functional attention operator; lse has no elements when not asked for."""
    q, q_dtype, kv, v = flat[:4]
    dim = kv.shape[-1] // 2 if v is None else v.shape[-1]
    out = q.new_empty((q.shape[0], q.shape[1], dim), dtype=torch.bfloat16 if q_dtype is not None else q.dtype)
    return out, q.new_empty((q.shape[0], q.shape[1]) if return_lse else (0,), dtype=lse_dtype(q.dtype))


def output_buffers(
    flat: tuple[Any, ...], out: torch.Tensor | None, lse_out: torch.Tensor | None, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The caller's buffers, or fresh ones for those that are missing; for the `_out` operator while compiling."""
    fresh_out, fresh_lse = fake_outputs(flat, return_lse)
    lse = lse_out if lse_out is not None else fresh_lse if return_lse else None
    return (fresh_out if out is None else out), lse
