"""Precision of the reference: which dtype it computes in, and nothing that could lower it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from m3attn.dtypes import is_fp8
from m3attn.scales import Scale, ScaleLike

P = ParamSpec("P")
R = TypeVar("R")

CHUNK_BYTES = 256 << 20
"""Intermediates of one chunk of tokens; what bounds the memory of every stage."""


def compute_dtype(x: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """`dtype` if asked for, else fp64 for fp64 inputs and fp32 for everything else."""
    if dtype is not None:
        return dtype
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def scale_factor(scales: dict[str, ScaleLike | Scale], like: torch.Tensor) -> torch.Tensor:
    """The product of the scales as a 0-dim tensor in `like`'s dtype; each scale is first rounded to fp32, as kernels hold it."""
    factor = torch.ones((), dtype=like.dtype, device=like.device)
    for name, scale in scales.items():
        factor = factor * scale_tensor(Scale.of(scale, argument=name), like.device).to(like.dtype)
    return factor


def scale_tensor(scale: Scale, device: torch.device) -> torch.Tensor:
    """A scale as a 0-dim fp32 tensor on `device`."""
    value = torch.full((), scale.value, dtype=torch.float32, device=device)
    return value if scale.tensor is None else value * scale.tensor.to(device).reshape(())


def indexable(x: torch.Tensor) -> torch.Tensor:
    """`x`, or its bytes if it is fp8: not every torch device indexes fp8."""
    return x.view(torch.uint8) if is_fp8(x.dtype) else x


def from_indexable(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `indexable`. Only bytes are viewed: a view as another dtype passes no gradient on."""
    return x.view(dtype) if is_fp8(dtype) else x


def full_precision(fn: Callable[P, R]) -> Callable[P, R]:
    """Run `fn` with autocast off and fp32 products in IEEE arithmetic, whatever the process has set."""

    @wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        device = next(a.device.type for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor))
        with torch.autocast(device, enabled=False), _ieee_matmul():
            return fn(*args, **kwargs)

    return wrapper


@contextmanager
def _ieee_matmul() -> Iterator[None]:
    previous = torch.get_float32_matmul_precision()
    if previous == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous)


def token_slices(num_tokens: int, bytes_per_token: int) -> Iterator[slice]:
    """Slices of the token axis whose intermediates stay within CHUNK_BYTES; at least one, so that zero tokens need no special case."""
    step = max(1, CHUNK_BYTES // max(1, bytes_per_token))
    for start in range(0, max(1, num_tokens), step):
        yield slice(start, min(start + step, num_tokens))
