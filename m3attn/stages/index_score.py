"""index_score: how well each block of keys answers each query, the maximum over the block's visible index keys."""

from __future__ import annotations

from typing import Any

import torch

from m3attn import device_checks
from m3attn.batch import LayerCache, PagedBatch
from m3attn.calls import IndexScoreCall
from m3attn.checks import check_batch, check_index_key, check_outputs, check_tensor, once_per_look
from m3attn.dtypes import E4M3, FLOAT_DTYPES, dtype_name
from m3attn.operators import (
    BATCH,
    INDEX_CACHE,
    define,
    nothing,
    pack,
    pack_batch,
    pack_index_cache,
    pack_scale,
    scale_schema,
    unpack,
    unpack_index_cache,
    unpack_scale,
)
from m3attn.problem import Problem, arch_of, arch_settings
from m3attn.scales import Scale, ScaleLike
from m3attn.stages.execute import execute
from m3attn.workspace import WorkShape, workspace_limit

INDEX_DTYPES = (*FLOAT_DTYPES, torch.float64, E4M3)


def index_score(
    index_q: torch.Tensor,
    cache: LayerCache,
    batch: PagedBatch,
    *,
    index_q_scale: ScaleLike = None,
    out: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """score[h, t, b] = max over the visible positions j of block b of <index_q[t, h], index_k[j]>, in fp32.

    Times `index_q_scale * cache.index_k_scale` where given; never times a softmax scale, which no ranking needs. A block without a visible
    position is -inf. A NaN product is ignored unless all of a block's are NaN, which counts as -inf.

    Args:
        index_q: [T, Hi, Di] bf16, fp16, fp32 or e4m3.
        cache: its `index_k` [pages, page_size, Di] is read, in any of these dtypes too.
        batch: the step; `block_size % page_size == 0`.
        index_q_scale: scale of e4m3 index_q.
        out: [Hi, T, ceil(max_seqlen_k / block_size)] fp32 to write to, any strides.
        impl: a registry key; None: the choice in force.

    Returns:
        out, [Hi, T, ceil(max_seqlen_k / block_size)] fp32.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name.
        UnsupportedProblem: the named implementation cannot run this.
    """
    if torch.compiler.is_compiling():
        flat = _flatten(index_q, cache, batch, index_q_scale, impl)
        if out is None:
            return _functional(*flat)
        _out(*flat, out)
        return out
    return _eager(index_q, cache, batch, index_q_scale, out, impl)


@once_per_look
def accept_index_inputs(
    _compile_target: str | None, _arch_override: str | None, limit: int, index_q: Any, cache: LayerCache, batch: PagedBatch, topk: int
) -> tuple[Problem, WorkShape]:
    """The problem and the scratch shape of inputs that fit one another; shared with `index_topk`."""
    index_q = check_tensor("index_q", index_q, ["T", "Hi", "Di"], INDEX_DTYPES)
    device = index_q.device
    check_batch(batch, device, sparse=True)
    index_k = check_index_key(cache, batch, device)
    if index_k.dtype not in INDEX_DTYPES:
        raise TypeError(f"cache.index_k: expected bf16, fp16, fp32 or fp8_e4m3, got {index_k.dtype}")
    if index_k.shape[2] != index_q.shape[2]:
        raise ValueError(f"cache.index_k: expected index dim {index_q.shape[2]} as index_q, got {index_k.shape[2]}")
    if index_q.shape[1] < 1:
        raise ValueError("index_q: expected at least one index head, got 0")
    problem = Problem(
        arch=arch_of(device),
        num_index_heads=index_q.shape[1],
        index_dim=index_q.shape[2],
        page_size=batch.page_size,
        block_size=batch.block_size,
        topk=topk,
        index_q_dtype=dtype_name(index_q.dtype),
        index_dtype=dtype_name(index_k.dtype),
        phase=batch.phase,
    )
    shape = WorkShape(
        tokens=index_q.shape[0],
        num_requests=batch.num_requests,
        num_q_heads=0,
        num_kv_heads=0,
        num_index_heads=index_q.shape[1],
        head_dim=index_q.shape[2],
        topk=topk,
        max_seqlen_q=batch.max_seqlen_q,
        max_seqlen_k=batch.max_seqlen_k,
        block_size=batch.block_size,
        limit=limit,
        kv_dtype=problem.index_dtype,
    )
    return problem, shape


def _eager(
    index_q: torch.Tensor, cache: LayerCache, batch: PagedBatch, index_q_scale: ScaleLike, out: torch.Tensor | None, impl: str | None
) -> torch.Tensor:
    topk = 16  # a problem names one, whatever is done with the scores
    problem, _ = accept_index_inputs(*arch_settings(), workspace_limit(), index_q, cache, batch, topk)
    index_k, (tokens, heads, _) = cache.index_key(), index_q.shape
    if out is None:
        out = torch.empty(heads, tokens, batch.num_blocks, dtype=torch.float32, device=index_q.device)
    else:
        check_tensor("out", out, [heads, tokens, batch.num_blocks], [torch.float32], index_q.device, unit_last_stride=False)
        check_outputs({"out": out}, {"index_q": index_q, "cache.index_k": index_k})
    call = dict(
        index_q=index_q,
        index_k=index_k,
        batch=batch,
        index_q_scale=Scale.of(index_q_scale, argument="index_q_scale", device=index_q.device),
        index_k_scale=cache.scales(index_q.device)[2],
        out=out,
    )
    device_checks.check_step(batch, tokens, num_pages=index_k.shape[0])
    execute("index_score", IndexScoreCall, call, problem, impl, (index_q, index_k), device=index_q.device)
    return out


_SCHEMA = f"Tensor index_q, str? index_q_dtype, {INDEX_CACHE}, {BATCH}, {scale_schema('index_q_scale')}, str? impl"


def _flatten(index_q: torch.Tensor, cache: LayerCache, batch: PagedBatch, index_q_scale: ScaleLike, impl: str | None) -> tuple[Any, ...]:
    return *pack(index_q), *pack_index_cache(cache), *pack_batch(batch), *pack_scale(index_q_scale, "index_q_scale"), impl


def _run_functional(*flat: Any) -> torch.Tensor:
    return _run(*flat, out=None)


def _run_out(*flat: Any) -> None:
    *inputs, out = flat
    _run(*inputs, out=out)


def _run(*flat: Any, out: torch.Tensor | None) -> torch.Tensor:
    index_q, q_dtype, *rest = flat
    cache, batch, (scale, scale_tensor, impl) = unpack_index_cache(*rest[:4]), PagedBatch(*rest[4:11]), rest[11:]
    return _eager(unpack(index_q, q_dtype, "index_q"), cache, batch, unpack_scale(scale, scale_tensor), out, impl)


def _fake(*flat: Any) -> torch.Tensor:
    index_q, max_seqlen_k, block_size = flat[0], flat[10], flat[12]
    blocks = (max_seqlen_k + block_size - 1) // block_size
    return index_q.new_empty((index_q.shape[1], index_q.shape[0], blocks), dtype=torch.float32)


_functional = define("index_score", f"({_SCHEMA}) -> Tensor", _run_functional, _fake)
_out = define("index_score_out", f"({_SCHEMA}, Tensor(a!) out) -> ()", _run_out, nothing)
