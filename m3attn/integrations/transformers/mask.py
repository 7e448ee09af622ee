"""The mask that prepared layers get: which columns hold tokens, two-dimensional and small, instead of one entry a query and key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """transformers' mask interface: [B, kv_length] bool, True for a token; None where every column of a prefill holds one.

    Raises:
        ValueError: a pattern that is not causal, such as several sequences packed into one row; a mask with too few columns.
    """
    if mask_function is not causal_mask_function:
        raise ValueError("attention_mask: expected plain causal attention, got another pattern (packed sequences? pass them as a padded batch)")
    if attention_mask is None or (q_length > 1 and not torch.compiler.is_compiling() and bool(attention_mask.all())):
        return None
    if not isinstance(q_offset, torch.Tensor) and attention_mask.shape[1] < q_offset + q_length:
        needed = q_offset + q_length
        raise ValueError(f"attention_mask: expected at least {needed} columns, those in the cache included, got {attention_mask.shape[1]}")
    # A static cache's mask has one shape in every step, so that a compiled model is compiled once.
    spare = kv_length - attention_mask.shape[1]
    return torch.nn.functional.pad(attention_mask, (0, spare)) if spare > 0 else attention_mask
