"""Putting m3attn's functions in the place of vLLM's, in the one version whose argument lists they have."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from m3attn.integrations.vllm import kernels

logger = logging.getLogger("m3attn")

ENGINE = "0.33"
"""The release of vLLM whose functions are replaced, any patch level."""

OPS = "vllm.models.minimax_m3.common.ops"
REPLACED: dict[str, tuple[Callable[..., Any], ...]] = {
    "index_topk": (kernels.minimax_m3_index_score, kernels.minimax_m3_index_topk, kernels.minimax_m3_index_decode),
    "sparse_attn": (kernels.minimax_m3_sparse_attn, kernels.minimax_m3_sparse_attn_decode),
}
"""Module of vLLM's -> our functions, each in the place of the one of its name."""

_undo: list[tuple[ModuleType, str, Any]] = []


class UnknownEngine(RuntimeError):
    """vLLM is absent, of another release, or has functions with other arguments. The message names what was expected and what is there."""


def install() -> None:
    """Let vLLM's MiniMax-M3 layers call m3attn. Without effect where it is installed already.

    vLLM calls this by itself in each of its processes, before a model is loaded. Modules that have imported the functions already are changed too.

    Raises:
        UnknownEngine: another vLLM than `ENGINE`, or functions with other arguments than its own; nothing has been changed then.
    """
    if _undo:
        return
    _check_version()
    found = [(theirs, ours) for module, functions in REPLACED.items() for theirs, ours in _pairs(module, functions)]
    for theirs, ours in found:
        for module in [m for name, m in list(sys.modules.items()) if m is not None and name.partition(".")[0] == "vllm"]:
            for name, value in list(vars(module).items()):
                if value is theirs:
                    _undo.append((module, name, theirs))
                    setattr(module, name, ours)
    logger.info("vllm: %d kernels of MiniMax-M3 run on m3attn", len(found))


def uninstall() -> None:
    """Give vLLM its own functions back."""
    while _undo:
        module, name, theirs = _undo.pop()
        setattr(module, name, theirs)


def _check_version() -> None:
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise UnknownEngine(f"vllm: expected release {ENGINE}, got none installed") from None
    if version.split(".")[:2] != ENGINE.split("."):
        raise UnknownEngine(f"vllm: expected release {ENGINE}, whose argument lists m3attn's functions have, got {version}")


def _pairs(module: str, functions: tuple[Callable[..., Any], ...]) -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
    """vLLM's functions with ours, checked against one another."""
    pairs = []
    for ours in functions:
        name = ours.__name__
        theirs = getattr(importlib.import_module(f"{OPS}.{module}"), name, None)
        if theirs is None:
            raise UnknownEngine(f"{OPS}.{module}: expected a function {name}, got none")
        expected, got = argument_list(ours), argument_list(theirs)
        if expected != got:
            raise UnknownEngine(f"{OPS}.{module}.{name}: expected the arguments ({', '.join(expected)}), got ({', '.join(got)})")
        pairs.append((theirs, ours))
    return pairs


def argument_list(function: Callable[..., Any]) -> list[str]:
    """Names and defaults, without annotations: `["q", "out=None"]`."""
    parameters = inspect.signature(function).parameters.values()
    return [str(p.replace(annotation=inspect.Parameter.empty)) for p in parameters]
