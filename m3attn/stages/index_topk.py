"""index_topk: `index_score` and `select_blocks` in one, for the rule `topk`."""

from __future__ import annotations

from typing import Any

import torch

from m3attn import device_checks
from m3attn.batch import LayerCache, PagedBatch
from m3attn.calls import IndexTopkCall
from m3attn.checks import memory_of
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
from m3attn.problem import arch_settings
from m3attn.scales import Scale, ScaleLike
from m3attn.stages.execute import execute
from m3attn.stages.index_score import accept_index_inputs
from m3attn.stages.select_blocks import check_selection, ids_buffer
from m3attn.workspace import workspace_limit


def index_topk(
    index_q: torch.Tensor,
    cache: LayerCache,
    batch: PagedBatch,
    *,
    topk: int = 16,
    init_blocks: int = 0,
    local_blocks: int = 1,
    index_q_scale: ScaleLike = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """The blocks each query attends to, from index queries and keys; the ids of `select_blocks(index_score(...))`.

    Args:
        index_q: [T, Hi, Di] bf16, fp16, fp32 or e4m3.
        cache: its `index_k` [pages, page_size, Di] is read.
        batch, topk, init_blocks, local_blocks: as in `select_blocks`.
        index_q_scale: scale of e4m3 index_q.
        out: [Hi, T, K] int32 to write to, any strides.
        workspace: scratch of at least `m3attn.workspace_bytes("index_topk", ...)` bytes.
        impl: a registry key; None: the choice in force.

    Returns:
        ids [Hi, T, K] int32, strictly ascending, -1 only at the tail.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name.
        UnsupportedProblem: the named implementation cannot run this.
    """
    if torch.compiler.is_compiling():
        flat = (*_flatten(index_q, cache, batch, index_q_scale), topk, init_blocks, local_blocks, impl)
        if out is None and workspace is None:
            return _functional(*flat)
        out = _fake(*flat) if out is None else out
        _out(*flat, out, workspace)
        return out
    return _eager(index_q, cache, batch, index_q_scale, topk, init_blocks, local_blocks, impl, out, workspace)


def _eager(
    index_q: torch.Tensor,
    cache: LayerCache,
    batch: PagedBatch,
    index_q_scale: ScaleLike,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    impl: str | None,
    out: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> torch.Tensor:
    problem, shape = accept_index_inputs(*arch_settings(), workspace_limit(), index_q, cache, batch, topk)
    check_selection(topk, init_blocks, local_blocks)
    index_k, device = cache.index_key(), index_q.device
    tokens, heads, _ = index_q.shape
    memory = memory_of({"index_q": index_q, "cache.index_k": index_k})
    out = ids_buffer(out, heads, tokens, topk, memory, device)
    call = dict(
        index_q=index_q,
        index_k=index_k,
        batch=batch,
        topk=topk,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        index_q_scale=Scale.of(index_q_scale, argument="index_q_scale", device=device),
        index_k_scale=cache.scales(device)[2],
        out=out,
    )
    device_checks.check_step(batch, tokens, num_pages=index_k.shape[0])
    execute("index_topk", IndexTopkCall, call, problem, impl, (index_q, index_k), shape=shape, workspace=workspace, memory=memory, device=device)
    return out


_INPUTS = f"Tensor index_q, str? index_q_dtype, {INDEX_CACHE}, {BATCH}, {scale_schema('index_q_scale')}"
_SCHEMA = f"{_INPUTS}, SymInt topk, SymInt init_blocks, SymInt local_blocks, str? impl"
_NUM_INPUTS = 15


def _flatten(index_q: torch.Tensor, cache: LayerCache, batch: PagedBatch, index_q_scale: ScaleLike) -> tuple[Any, ...]:
    return *pack(index_q), *pack_index_cache(cache), *pack_batch(batch), *pack_scale(index_q_scale, "index_q_scale")


def _run_functional(*flat: Any) -> torch.Tensor:
    return _run(*flat, out=None, workspace=None)


def _run_out(*flat: Any) -> None:
    _run(*flat[:-2], out=flat[-2], workspace=flat[-1])


def _run(*flat: Any, out: torch.Tensor | None, workspace: torch.Tensor | None) -> torch.Tensor:
    index_q, q_dtype, *rest = flat
    cache, batch = unpack_index_cache(*rest[:4]), PagedBatch(*rest[4:11])
    scale, scale_tensor, topk, init_blocks, local_blocks, impl = rest[11:]
    index_q, index_q_scale = unpack(index_q, q_dtype, "index_q"), unpack_scale(scale, scale_tensor)
    return _eager(index_q, cache, batch, index_q_scale, topk, init_blocks, local_blocks, impl, out, workspace)


def _fake(*flat: Any) -> torch.Tensor:
    index_q, topk = flat[0], flat[_NUM_INPUTS]
    return index_q.new_empty((index_q.shape[1], index_q.shape[0], topk), dtype=torch.int32)


_functional = define("index_topk", f"({_SCHEMA}) -> Tensor", _run_functional, _fake)
_out = define("index_topk_out", f"({_SCHEMA}, Tensor(a!) out, Tensor(b!)? workspace) -> ()", _run_out, nothing)
