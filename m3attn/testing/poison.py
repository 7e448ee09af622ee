"""Fresh memory that hurts: inside `poisoned_empty` every torch.empty* that m3attn calls returns garbage."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from m3attn.testing.inputs import NAN_BYTE

GARBAGE_BYTE = 0x5B
"""Repeated, an integer far outside every range of ids, lengths and pages."""


def fill_with_garbage(tensor: torch.Tensor) -> torch.Tensor:
    """NaN in floating tensors, huge numbers in integer ones; booleans stay."""
    if tensor.numel() and tensor.device.type != "meta" and tensor.dtype != torch.bool:
        value = NAN_BYTE if tensor.dtype.is_floating_point else GARBAGE_BYTE
        tensor.view(-1).view(torch.uint8).fill_(value)
    return tensor


def _caller_is_m3attn() -> bool:
    name = sys._getframe(2).f_globals.get("__name__", "")
    return name.startswith("m3attn.") and not name.startswith("m3attn.testing")


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """torch.empty, empty_like, empty_strided and Tensor.new_empty return garbage when m3attn calls them."""

    def wrap(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = original(*args, **kwargs)
            return fill_with_garbage(tensor) if _caller_is_m3attn() and tensor.is_contiguous() else tensor

        return empty

    places = [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")]
    originals = [getattr(owner, name) for owner, name in places]
    for (owner, name), original in zip(places, originals, strict=True):
        setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)
