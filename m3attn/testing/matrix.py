"""The test matrix: implementations from the registry times cases. What an implementation declines is skipped with the registry's own reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest
import torch

import m3attn
from m3attn.choice import reasons_against
from m3attn.problem import Problem, arch_of
from m3attn.registry import find

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MARKS = [pytest.mark.gpu] if DEVICE == "cuda" else []
gpu_only = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")]
R = TypeVar("R")


def arch() -> str:
    return arch_of(torch.device(DEVICE))


def keys(stage: str, *, size: str = "xs", kernels_only: bool = False) -> list[Any]:
    """One parameter an implementation of `stage`; `size` ends its id, where `xs` says that a memory checker can run it."""
    pairs = stage_keys(stage, size=size, kernels_only=kernels_only)
    return [pytest.param(p.values[1], id=f"{p.values[1]}-{size}", marks=MARKS) for p in pairs]


def stage_keys(*stages: str, size: str = "xs", kernels_only: bool = False) -> list[Any]:
    """One (stage, key) parameter an implementation of each of `stages`; `kernels_only` leaves the reference out."""
    pairs = [(s, i.key) for s in stages for i in m3attn.implementations(s) if i.key != "reference" or not kernels_only]
    return [pytest.param(stage, key, id=f"{stage}-{key}-{size}", marks=MARKS) for stage, key in pairs]


def pick(xs: R, full: R) -> R:
    """What the interpreter can do in a moment on a CPU, the real size on a GPU."""
    return full if DEVICE == "cuda" else xs


def matrix(stage: str, xs: Iterable[Any], full: Iterable[Any]) -> list[Any]:
    """(key, case) parameters: the small cases everywhere, the full list on a GPU."""
    named = {f"xs-{case.id}": case for case in xs}
    if DEVICE == "cuda":
        named |= {case.id: case for case in full}
    marks = [pytest.mark.gpu] if DEVICE == "cuda" else []
    return [pytest.param(i.key, case, id=f"{i.key}-{name}", marks=marks) for i in m3attn.implementations(stage) for name, case in named.items()]


def needs_zeroed(stage: str, key: str) -> bool:
    """Whether an implementation takes only caches that declare `zero_on_alloc`."""
    implementation = find(stage, key)
    return implementation is not None and implementation.capabilities.needs_zero_on_alloc


def skip_if_declined(stage: str, key: str, problem: Problem) -> None:
    """Skip with every reason the implementation gives against `problem`."""
    implementation = find(stage, key)
    assert implementation is not None, f"{stage} has no implementation {key!r}"
    if reasons := reasons_against(implementation, problem):
        pytest.skip("; ".join(reasons))


def run_or_skip(stage: str, key: str, problem: Problem, call: Callable[[], R]) -> R:
    """The result of `call`, or a skip if the implementation declines `problem`; declining and refusing must agree."""
    implementation = find(stage, key)
    assert implementation is not None, f"{stage} has no implementation {key!r}"
    reasons = reasons_against(implementation, problem)
    if reasons:
        with pytest.raises(m3attn.UnsupportedProblem):
            call()
        pytest.skip("; ".join(reasons))
    return call()


def skip_if_refused(call: Callable[[], R]) -> R:
    """The result of `call`, or a skip with its message if the implementation refuses these tensors: their addresses, strides, or scratch limit,
    which no `Problem` shows."""
    try:
        return call()
    except m3attn.UnsupportedProblem as refusal:
        pytest.skip(str(refusal))
