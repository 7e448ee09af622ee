"""What every stage does with a checked call: choose, refuse gradients, find scratch, log, run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Any

import torch

from m3attn import switches
from m3attn.batch import PagedBatch
from m3attn.checks import Memory, check_memory, check_no_grad, memory_of
from m3attn.choice import UnsupportedProblem, is_autos, leave_out, resolve
from m3attn.problem import Problem
from m3attn.registry import BrokenImplementation, Implementation
from m3attn.scales import Scale
from m3attn.workspace import WorkShape


def execute(
    stage: str,
    call_type: Callable[..., Any],
    values: dict[str, Any],
    problem: Problem,
    impl: str | None,
    inputs: Collection[torch.Tensor | None],
    *,
    shape: WorkShape | None = None,
    workspace: torch.Tensor | None = None,
    memory: Memory | None = None,
    device: torch.device,
) -> None:
    """Run the call `call_type(**values)` with the implementation that `impl` or the choice in force names.

    Args:
        values: the call's fields, but for `workspace` where there is a `shape`.
        inputs: the tensors that may not require gradients.
        shape: what the scratch depends on; None: the stage has none.
        workspace: the caller's scratch, and `memory`, what else the caller gave, which it must not overlap.

    Raises:
        UnsupportedProblem, NotImplementedError, ValueError: as `resolve`, gradients, workspace.
        BrokenImplementation: a named implementation cannot be imported or compiled; auto goes on to the next one.
        TypeError: the implementation returned something.
    """
    declined: tuple[str, ...] = ()
    while True:
        implementation = resolve(stage, problem, impl, declined)
        check_no_grad(implementation.key, inputs)
        try:
            if shape is None:
                call = call_type(**values)
            else:
                scratch = scratch_for(implementation, shape, workspace, device)
                if scratch is not None and workspace is not None and memory is not None:
                    check_memory(memory_of({"workspace": workspace}), memory)
                call = call_type(**values, workspace=scratch)
            log_call(stage, implementation.key, call)
            returned = implementation.load()(call)
        except BrokenImplementation as error:
            if not is_autos(stage, problem, impl):
                raise
            leave_out(implementation, problem, error)
        except UnsupportedProblem:
            if not is_autos(stage, problem, impl):
                raise
            declined += (implementation.key,)
        else:
            if returned is not None:  # it may have made its results beside the outputs and left these as they were
                raise TypeError(
                    f"{implementation.key!r} of {stage}: expected to fill the call's outputs and return None, got {type(returned).__name__}"
                )
            return


def log_call(stage: str, key: str, call: Any) -> None:
    """One line before a launch, if `M3ATTN_LOG_CALLS=1`."""
    if _logs_calls():
        log_launch(stage, key, **{f.name: getattr(call, f.name) for f in fields(call)})


def log_launch(what: str, key: str, **values: Any) -> None:
    """`log_call` for a launch that is no stage: what it is called, which implementation it takes, and what it was given by name."""
    if _logs_calls():
        print(f"m3attn: {what} {key} {_describe(values)}", file=sys.stderr)


def _logs_calls() -> bool:
    return switches.log_calls() == "1"


def scratch_for(implementation: Implementation, shape: WorkShape, workspace: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """The caller's workspace as flat bytes if it is large enough, or a fresh one; None if the implementation needs none."""
    needed = implementation.workspace_bytes(shape)
    if needed == 0:
        return None
    if workspace is None:
        return torch.empty(needed, dtype=torch.uint8, device=device)
    if not isinstance(workspace, torch.Tensor):
        raise TypeError(f"workspace: expected a tensor, got {type(workspace).__name__}")
    if not workspace.is_contiguous() or workspace.data_ptr() % 16:
        raise ValueError(f"workspace: expected a contiguous tensor that starts at a multiple of 16 bytes, got strides {workspace.stride()}")
    if workspace.device != device:
        raise ValueError(f"workspace: expected a tensor on {device}, got one on {workspace.device}")
    flat = workspace if workspace.dtype == torch.uint8 and workspace.dim() == 1 else workspace.reshape(-1).view(torch.uint8)
    if flat.numel() < needed:
        raise ValueError(
            f"workspace: expected at least {needed} bytes for {implementation.stage} ({implementation.key}), got {flat.numel()}; "
            "m3attn.workspace_bytes(...) gives the size"
        )
    return flat


def _describe(values: dict[str, Any]) -> str:
    parts = []
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            parts.append(f"{name}={str(value.dtype).removeprefix('torch.')}{list(value.shape)}/{list(value.stride())}")
        elif isinstance(value, PagedBatch):
            parts.append(
                f"batch=B{value.num_requests} max_seqlen_q={value.max_seqlen_q} max_seqlen_k={value.max_seqlen_k} "
                f"page_size={value.page_size} block_size={value.block_size}"
            )
        elif isinstance(value, Scale):
            if value.tensor is not None or value.value != 1.0:
                parts.append(f"{name}={'device' if value.tensor is not None else value.value}")
        elif value is not None:
            parts.append(f"{name}={value}")
    return " ".join(parts)
