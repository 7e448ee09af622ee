"""select_blocks: the K best blocks of each query, exactly, in ascending order."""

from __future__ import annotations

from typing import Any

import torch

from m3attn import device_checks
from m3attn.batch import PagedBatch
from m3attn.calls import SelectBlocksCall
from m3attn.checks import MAX_TOPK, Memory, check_batch, check_int, check_memory, check_tensor, memory_of, once_per_look
from m3attn.operators import BATCH, define, nothing, pack_batch
from m3attn.problem import Problem, arch_of, arch_settings
from m3attn.stages.execute import execute


def select_blocks(
    scores: torch.Tensor,
    batch: PagedBatch,
    *,
    topk: int = 16,
    init_blocks: int = 0,
    local_blocks: int = 1,
    out: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """The blocks each (head, token) attends to: forced ones first, then the best of the rest, ties to the lower id.

    A query at position p >= 0 chooses among nb = min(p // block_size + 1, columns of scores) blocks. While K lasts, the `local_blocks`
    highest ids are taken downward, then the `init_blocks` lowest upward; their scores are never looked at. Then the exact best of the rest:
    NaN counts as -inf, -0 equals +0. A negative position chooses nothing.

    Args:
        scores: [Hkv, T, ceil(max_seqlen_k / block_size)] fp32, any strides; columns beyond a query's own block may hold anything.
        batch: the step.
        topk: K, 1 to 128.
        init_blocks, local_blocks: forced blocks at the beginning and at the query's end.
        out: [Hkv, T, K] int32 to write to, any strides (a token-major buffer too).
        impl: a registry key; None: the choice in force.

    Returns:
        ids [Hkv, T, K] int32, strictly ascending, -1 only at the tail; min(K, nb) of them are valid.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name.
        UnsupportedProblem: the named implementation cannot run this.
    """
    if torch.compiler.is_compiling():
        flat = (scores, *pack_batch(batch), topk, init_blocks, local_blocks, impl)
        if out is None:
            return _functional(*flat)
        _out(*flat, out)
        return out
    return _eager(scores, batch, topk, init_blocks, local_blocks, out, impl)


def check_selection(topk: int, init_blocks: int, local_blocks: int) -> None:
    """The three numbers of a selection."""
    check_int("topk", topk, 1, MAX_TOPK)
    check_int("init_blocks", init_blocks, 0)
    check_int("local_blocks", local_blocks, 0)


def ids_buffer(out: torch.Tensor | None, heads: int, tokens: int, topk: int, memory: Memory, device: torch.device) -> torch.Tensor:
    """`out` checked, and added to `memory`, the inputs'; or a fresh [heads, tokens, topk] int32."""
    if out is None:
        return torch.empty(heads, tokens, topk, dtype=torch.int32, device=device)
    check_tensor("out", out, [heads, tokens, topk], [torch.int32], device, unit_last_stride=False)
    outputs = memory_of({"out": out})
    check_memory(outputs, memory)
    memory += outputs
    return out


def _eager(
    scores: torch.Tensor, batch: PagedBatch, topk: int, init_blocks: int, local_blocks: int, out: torch.Tensor | None, impl: str | None
) -> torch.Tensor:
    problem = _accept(*arch_settings(), scores, batch, topk)
    check_selection(topk, init_blocks, local_blocks)
    device, (heads, tokens, _) = scores.device, scores.shape
    out = ids_buffer(out, heads, tokens, topk, memory_of({"scores": scores}), device)
    call = {"scores": scores, "batch": batch, "topk": topk, "init_blocks": init_blocks, "local_blocks": local_blocks, "out": out}
    device_checks.check_step(batch, tokens, num_pages=None)
    execute("select_blocks", SelectBlocksCall, call, problem, impl, (scores,), device=device)
    return out


@once_per_look
def _accept(_compile_target: str | None, _arch_override: str | None, scores: Any, batch: PagedBatch, topk: int) -> Problem:
    heads, _, columns = check_tensor("scores", scores, ["Hkv", "T", "blocks"], [torch.float32], unit_last_stride=False).shape
    check_batch(batch, scores.device, sparse=True)
    if columns != batch.num_blocks:
        raise ValueError(f"scores: expected {batch.num_blocks} columns, ceil(max_seqlen_k / block_size), got {columns}")
    return Problem(
        arch=arch_of(scores.device),
        num_index_heads=heads,
        page_size=batch.page_size,
        block_size=batch.block_size,
        topk=topk,
        phase=batch.phase,
    )


_SCHEMA = f"Tensor scores, {BATCH}, SymInt topk, SymInt init_blocks, SymInt local_blocks, str? impl"


def _run_functional(*flat: Any) -> torch.Tensor:
    return _run(*flat, out=None)


def _run_out(*flat: Any) -> None:
    *inputs, out = flat
    _run(*inputs, out=out)


def _run(*flat: Any, out: torch.Tensor | None) -> torch.Tensor:
    scores, *rest = flat
    topk, init_blocks, local_blocks, impl = rest[7:]
    return _eager(scores, PagedBatch(*rest[:7]), topk, init_blocks, local_blocks, out, impl)


def _fake(scores: torch.Tensor, *rest: Any) -> torch.Tensor:
    return scores.new_empty((scores.shape[0], scores.shape[1], rest[7]), dtype=torch.int32)


_functional = define("select_blocks", f"({_SCHEMA}) -> Tensor", _run_functional, _fake)
_out = define("select_blocks_out", f"({_SCHEMA}, Tensor(a!) out) -> ()", _run_out, nothing)
