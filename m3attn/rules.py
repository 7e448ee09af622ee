"""Selection rules: what turns block scores into ids. An implementation computes the contract; a rule changes it.

`topk` is M3's own. `shared_heads` gives every index head the list of the head-wise maximum. `window` takes init and local blocks only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from m3attn.batch import PagedBatch
from m3attn.stages.select_blocks import select_blocks

Rule = Callable[..., torch.Tensor]


def _topk(scores: torch.Tensor, batch: PagedBatch, **options: Any) -> torch.Tensor:
    return select_blocks(scores, batch, **options)


def _shared_heads(scores: torch.Tensor, batch: PagedBatch, **options: Any) -> torch.Tensor:
    """One list for all heads, from the maximum over index heads; NaN counts as -inf, as in selection."""
    best = torch.where(scores.isnan(), float("-inf"), scores).amax(dim=0, keepdim=True)
    return select_blocks(best, batch, **options).expand(scores.shape[0], -1, -1)


def _window(scores: torch.Tensor, batch: PagedBatch, *, topk: int = 16, init_blocks: int = 0, local_blocks: int = 1, **options: Any) -> torch.Tensor:
    """The init and local blocks alone: select with just enough places for them, then pad with -1."""
    places = min(topk, max(1, init_blocks + local_blocks))
    ids = select_blocks(scores, batch, topk=places, init_blocks=init_blocks, local_blocks=local_blocks, **options)
    if init_blocks + local_blocks == 0:
        ids = torch.full_like(ids, -1)
    return torch.nn.functional.pad(ids, (0, topk - places), value=-1)


_rules: dict[str, Rule] = {"topk": _topk, "shared_heads": _shared_heads, "window": _window}
_SHIPPED = tuple(_rules)


def register_rule(name: str, fn: Rule, *, replace: bool = False) -> None:
    """Add a rule `fn(scores, batch, **options) -> ids`.

    Args:
        name: what `rule=` takes.
        fn: gets scores [Hkv, T, blocks] fp32, the PagedBatch, and topk, init_blocks, local_blocks, impl as keywords; returns ids
            [Hkv, T, K] int32, strictly ascending with -1 at the tail, nothing beyond a query's own block. `m3attn.testing.check_rule` tests that.
        replace: replace a rule of yours; never a shipped one.

    Raises:
        ValueError: a name that exists.
    """
    if name in _SHIPPED:
        raise ValueError(f"name: {name!r} is m3attn's own rule and cannot be replaced; choose another name")
    if name in _rules and not replace:
        raise ValueError(f"name: rule {name!r} is already registered; pass replace=True to replace it")
    _rules[name] = fn


def unregister_rule(name: str) -> None:
    """Take a rule of yours out again."""
    if name in _SHIPPED or name not in _rules:
        raise ValueError(f"name: expected a registered rule that is not m3attn's own, got {name!r}")
    del _rules[name]


def rules() -> list[str]:
    """The names that `rule=` takes."""
    return list(_rules)


def find_rule(name: str) -> Rule:
    """The function of a rule. Raises ValueError naming those there are."""
    if name not in _rules:
        raise ValueError(f"rule: expected one of {', '.join(_rules)}, got {name!r}")
    return _rules[name]
