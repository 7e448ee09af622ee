"""Questions about the library itself: versions, sources, scratch sizes; and switching the interpreter on."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import itertools
import os
import platform
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from m3attn import registry
from m3attn.choice import UnsupportedProblem, auto_order, disabled_by_switch, m3_problem
from m3attn.dtypes import dtype_name
from m3attn.problem import PHASES, arch_of
from m3attn.registry import BrokenImplementation, Implementation
from m3attn.version import __version__
from m3attn.workspace import WorkShape, workspace_limit

ENVIRONMENT = (
    "M3ATTN_IMPL",
    "M3ATTN_ARCH",
    "M3ATTN_LOG_CALLS",
    "M3ATTN_CHECK",
    "M3ATTN_DISABLE_CUTE",
    "M3ATTN_DISABLE_FP8_ATTN_GEMM",
    "M3ATTN_CACHE_DIR",
    "TRITON_INTERPRET",
)


def interpret() -> None:
    """Run Triton kernels in Triton's interpreter, on CPU tensors too; call it before anything imports the kernels.

    Raises:
        RuntimeError: the kernels are already imported without it.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    if not registry.interpreter_enabled():
        raise RuntimeError("m3attn.interpret(): expected it before the Triton kernels are imported; set TRITON_INTERPRET=1 and start again")


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def info() -> dict[str, Any]:
    """What this installation has and sees: versions, GPU, architecture, switches, plugins."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "m3attn": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _installed("triton"),
        "nvidia-cutlass-dsl": _installed("nvidia-cutlass-dsl"),
        "flash-attn-4": _installed("flash-attn-4"),
        "einops": _installed("einops"),
        "gpu": gpu,
        "arch": arch_of(),
        "interpreter": registry.interpreter_enabled(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        "plugins": registry.load_plugins(),
    }


def source(stage: str, impl: str) -> str:
    """The text of an implementation's files, and of the reference's, without importing them.

    Raises:
        ValueError: an unknown stage or key.
    """
    implementation = registry.find(stage, impl)
    if implementation is None:
        keys = ", ".join(i.key for i in registry.implementations(stage))
        raise ValueError(f"impl: expected one of {keys} for {stage}, got {impl!r}")
    modules = list(implementation.sources)
    reference = registry.find(stage, "reference")
    if reference is not None:
        modules += [m for m in reference.sources if m not in modules]
    return "\n\n".join(f"# {module}\n{_text_of(module)}" for module in modules)


def _text_of(module: str) -> str:
    parent, _, name = module.rpartition(".")
    if parent:
        spec = importlib.util.find_spec(parent)  # imports the package, not the module
        for folder in (spec.submodule_search_locations or []) if spec is not None else []:
            path = Path(folder) / f"{name}.py"
            if path.exists():
                return path.read_text()
    loaded = sys.modules.get(module)
    path = Path(getattr(loaded, "__file__", None) or "")
    return path.read_text() if path.is_file() else f"# no source file for {module}"


def workspace_bytes(
    stage: str,
    *,
    tokens: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_requests: int = 1,
    num_q_heads: int = 0,
    num_kv_heads: int = 0,
    num_index_heads: int = 0,
    head_dim: int = 128,
    topk: int = 16,
    block_size: int = 128,
    kv_dtype: str | torch.dtype | None = None,
    impl: str | None = None,
) -> int:
    """The most scratch a call of `stage` uses, from static shapes; within `workspace_limit()`.

    Args:
        stage: a stage's name.
        tokens, num_requests, max_seqlen_q, max_seqlen_k: as the call's query rows and batch.
        num_q_heads, num_kv_heads, num_index_heads, head_dim, topk, block_size: its geometry; head_dim is Di for the indexer.
        kv_dtype: of the cache; None: the most of any.
        impl: a registry key; None: the most of those that auto may take.
    """
    base = WorkShape(
        tokens=tokens,
        num_requests=num_requests,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        num_index_heads=num_index_heads,
        head_dim=head_dim,
        topk=topk,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        block_size=block_size,
        limit=workspace_limit(),
    )
    dtypes = ("bf16", "fp8_e4m3") if kv_dtype is None else (dtype_name(kv_dtype, argument="kv_dtype"),)
    shapes = [replace(base, kv_dtype=dtype) for dtype in dtypes]
    problems = [m3_problem(stage, phase=phase) for phase in PHASES]
    keys = [impl] if impl is not None else dict.fromkeys(key for problem in problems for key in auto_order(stage, problem))
    found = [i for key in keys if (i := registry.find(stage, key)) is not None]
    if not found:
        raise ValueError(f"impl: expected one of {', '.join(i.key for i in registry.implementations(stage))} for {stage}, got {impl!r}")
    if impl is not None:
        return max(found[0].workspace_bytes(shape) for shape in shapes)
    sizes = [0]
    for implementation, shape in itertools.product(found, shapes):
        if not _auto_passes_over(implementation, problems[0].arch):
            # auto goes on to the next one too where one is broken, or declines a shape.
            with contextlib.suppress(BrokenImplementation, UnsupportedProblem):
                sizes.append(implementation.workspace_bytes(shape))
    return max(sizes)


def _auto_passes_over(implementation: Implementation, arch: str) -> bool:
    """Whether a switch, a missing package or the architecture rules it out for every problem."""
    capabilities = implementation.capabilities
    is_elsewhere = capabilities.archs is not None and arch not in capabilities.archs
    return is_elsewhere or bool(capabilities.missing_packages()) or disabled_by_switch(implementation.key) is not None
