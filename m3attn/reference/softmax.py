"""The softmax that sparse and dense attention share, and the attention sink."""

from __future__ import annotations

import torch


def masked_softmax(logits: torch.Tensor, visible: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the last axis of `logits` [..., N] among `visible` entries, and the natural-log LSE [...].

    weights[n] = exp(logits[n]) / sum of exp(logits[m]) over visible m;  0 where not visible
    lse        = log of that sum
    A row without a visible entry has weights 0 and LSE -inf.
    """
    logits = logits.masked_fill(~visible, float("-inf"))
    largest = logits.detach().amax(dim=-1, keepdim=True)
    shift = torch.where(largest == float("-inf"), 0.0, largest)
    weights = torch.exp(logits - shift)
    total = weights.sum(dim=-1, keepdim=True)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    lse = torch.where(empty, float("-inf"), shift + total.log())
    return weights / total, lse.squeeze(-1)


def apply_sink(out: torch.Tensor, lse: torch.Tensor, sink_logit: torch.Tensor) -> torch.Tensor:
    """`out` [..., D] as if the softmax had one more entry of logit `sink_logit` [...] and value 0.

    out * exp(lse) / (exp(lse) + exp(sink_logit)), as a sigmoid so that neither exponential overflows; 0 without keys.
    The LSE itself stays without the sink.
    """
    share = torch.where(lse == float("-inf"), 0.0, torch.sigmoid(lse - sink_logit))
    return out * share[..., None]
