"""Joining two partial attention results."""

from __future__ import annotations

import torch

from m3attn.calls import MergeAttentionStatesCall
from m3attn.reference.numerics import compute_dtype, full_precision


@full_precision
def merge_attention_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor, *, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over the keys of both parts, which must be disjoint.

    lse = log(exp(lse_a) + exp(lse_b))
    out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b
    A part without keys (LSE -inf) changes nothing, bit for bit, whatever its `out` holds; two of them give 0 and -inf.

    Args:
        out_a, out_b: [T, H, D].
        lse_a, lse_b: [T, H], natural log, without a sink.
        dtype: fp32 or fp64 to compute in; None as `numerics.compute_dtype`.

    Returns:
        out [T, H, D] and lse [T, H], in the compute dtype.
    """
    dtype = compute_dtype(out_a, dtype)
    lse_a, lse_b = lse_a.to(dtype), lse_b.to(dtype)
    out_a = torch.where(lse_a[..., None] == float("-inf"), 0.0, out_a.to(dtype))
    out_b = torch.where(lse_b[..., None] == float("-inf"), 0.0, out_b.to(dtype))
    largest = torch.maximum(lse_a, lse_b).detach()
    shift = torch.where(largest == float("-inf"), 0.0, largest)
    weight_a, weight_b = torch.exp(lse_a - shift), torch.exp(lse_b - shift)
    total = weight_a + weight_b
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    out = (weight_a[..., None] * out_a + weight_b[..., None] * out_b) / total[..., None]
    return out, torch.where(empty, float("-inf"), shift + total.log())


def merge_attention_states_call(call: MergeAttentionStatesCall) -> None:
    out, lse = merge_attention_states(call.out_a, call.lse_a, call.out_b, call.lse_b)
    call.out.copy_(out)
    call.lse.copy_(lse)
