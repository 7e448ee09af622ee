"""Selection rules: those that ship keep what every rule keeps, others can be registered, and attend takes them by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from stage_calls import make_batch, normal

import m3attn
from m3attn.rules import find_rule
from m3attn.testing import check_rule


@contextmanager
def registered_rule(name: str, fn: Callable[..., torch.Tensor]) -> Iterator[None]:
    m3attn.register_rule(name, fn)
    try:
        yield
    finally:
        m3attn.unregister_rule(name)


def first_blocks(scores: torch.Tensor, batch: m3attn.PagedBatch, **options: Any) -> torch.Tensor:
    """A rule of a user: the earliest blocks."""
    falling = -torch.arange(scores.shape[2], dtype=torch.float32).expand_as(scores)
    return m3attn.select_blocks(falling, batch, **options | {"local_blocks": 0})


def test_rules_list_those_that_ship() -> None:
    assert m3attn.rules() == ["topk", "shared_heads", "window"]


@pytest.mark.parametrize("rule", ["topk", "shared_heads", "window"])
def test_shipped_rules_keep_what_every_rule_keeps(rule: str) -> None:
    check_rule(rule)


def test_a_registered_rule_is_found_checked_and_taken_out() -> None:
    with registered_rule("first", first_blocks):
        assert "first" in m3attn.rules() and find_rule("first") is first_blocks
        check_rule("first")
        with pytest.raises(ValueError, match=r"name: rule 'first' is already registered; pass replace=True"):
            m3attn.register_rule("first", first_blocks)
        m3attn.register_rule("first", find_rule("window"), replace=True)
        assert find_rule("first") is find_rule("window")
    assert "first" not in m3attn.rules()


@pytest.mark.parametrize("name", ["topk", "shared_heads", "window"])
def test_shipped_rules_cannot_be_replaced_or_taken_out(name: str) -> None:
    with pytest.raises(ValueError, match=rf"name: '{name}' is m3attn's own rule and cannot be replaced"):
        m3attn.register_rule(name, first_blocks, replace=True)
    with pytest.raises(ValueError, match=rf"not m3attn's own, got '{name}'"):
        m3attn.unregister_rule(name)


def test_an_unknown_rule_names_those_there_are() -> None:
    for ask in (
        lambda: find_rule("widow"),
        lambda: m3attn.explain("index_topk", arch="cpu", rule="widow"),
        lambda: m3attn.attend(*plain(), rule="widow"),
    ):
        with pytest.raises(ValueError, match=r"rule: expected one of topk, shared_heads, window, got 'widow'"):
            ask()
    with pytest.raises(ValueError, match=r"name: expected a registered rule .*got 'widow'"):
        m3attn.unregister_rule("widow")


def broken(how: str) -> Callable[..., torch.Tensor]:
    def rule(scores: torch.Tensor, batch: m3attn.PagedBatch, **options: Any) -> torch.Tensor:
        ids = m3attn.select_blocks(scores, batch, **options)
        if how == "descending":
            return ids.flip(-1)
        if how == "beyond the own block":
            return ids.masked_fill(ids == -1, batch.num_blocks - 1)
        if how == "repeated":
            return torch.cat([ids[..., :1], ids[..., :-1]], dim=-1)
        if how == "short":
            return torch.cat([ids, ids[..., :1]], dim=-1)
        if how == "random":
            return m3attn.select_blocks(torch.rand_like(scores), batch, **options | {"local_blocks": 0, "init_blocks": 0})
        if how == "of the chunk":
            return m3attn.select_blocks(scores - scores.mean(dim=1, keepdim=True) * 100, batch, **options)
        scores.zero_()
        return ids

    return rule


@pytest.mark.parametrize("how", ["descending", "beyond the own block", "repeated", "short", "random", "of the chunk", "writing to scores"])
def test_check_rule_finds_each_fault(how: str) -> None:
    with pytest.raises(AssertionError):
        check_rule(broken(how))


def test_shared_heads_gives_one_list_from_the_head_wise_maximum() -> None:
    batch = make_batch((1, 1, 1), (80, 128, 17))
    scores = normal(3, 3, batch.num_blocks, dtype=torch.float32)
    scores[1, 1, 0] = float("nan")  # counts as -inf, so that the other heads decide
    scores[0, 1, 0] = 9.0
    ids = find_rule("shared_heads")(scores, batch, topk=3)
    assert ids.shape == (3, 3, 3) and ids.dtype == torch.int32
    assert torch.equal(ids[0], ids[1]) and torch.equal(ids[0], ids[2])
    best = scores.nan_to_num(nan=float("-inf")).amax(0, keepdim=True)
    assert torch.equal(ids[:1], m3attn.select_blocks(best, batch, topk=3))
    assert 0 in ids[0, 1].tolist()


@pytest.mark.parametrize("init, local, expected", [(1, 2, [0, 3, 4, -1]), (0, 1, [4, -1, -1, -1]), (2, 9, [1, 2, 3, 4]), (0, 0, [-1] * 4)])
def test_window_is_init_and_local_blocks_alone(init: int, local: int, expected: list[int]) -> None:
    batch = make_batch((1,), (80,))
    scores = normal(2, 1, batch.num_blocks, dtype=torch.float32)
    assert find_rule("window")(scores, batch, topk=4, init_blocks=init, local_blocks=local)[0, 0].tolist() == expected


def plain(length: int = 70) -> tuple[torch.Tensor, ...]:
    return (
        normal(1, length, 4, 64, dtype=torch.float32),
        normal(1, length, 2, 64, dtype=torch.float32, seed=1),
        normal(1, length, 2, 64, dtype=torch.float32, seed=2),
        normal(1, length, 2, 64, dtype=torch.float32, seed=3),
        normal(1, length, 64, dtype=torch.float32, seed=4),
    )


def test_attend_runs_a_rule_and_not_the_fused_stage() -> None:
    def refuse(call: object) -> None:
        raise AssertionError("the fused stage ran")

    options = {"topk": 3, "block_size": 16, "return_ids": True}
    m3attn.register("index_topk", "refuse", refuse, auto=True)
    try:
        with pytest.raises(AssertionError, match="the fused stage ran"):
            m3attn.attend(*plain(), **options)
        _, window = m3attn.attend(*plain(), rule="window", **options)
        _, shared = m3attn.attend(*plain(), rule="shared_heads", **options)
        with registered_rule("first", first_blocks):
            _, first = m3attn.attend(*plain(), rule="first", **options)
    finally:
        m3attn.unregister("index_topk", "refuse")
    assert window[:, 0, 69].tolist() == [[4, -1, -1]] * 2
    assert torch.equal(shared[0], shared[1])
    assert first[:, 0, 69].tolist() == [[0, 1, 2]] * 2


def test_auto_never_picks_a_rule() -> None:
    options = {"topk": 3, "block_size": 16, "return_ids": True}
    with registered_rule("first", first_blocks):
        _, ids = m3attn.attend(*plain(), **options)
        _, named = m3attn.attend(*plain(), rule="topk", **options)
    assert torch.equal(ids, named)
    assert (ids[:, 0, 69] == 4).any(dim=-1).all()


def test_rules_get_the_named_implementation() -> None:
    seen: list[object] = []

    def rule(scores: torch.Tensor, batch: m3attn.PagedBatch, **options: Any) -> torch.Tensor:
        seen.append(options)
        return m3attn.select_blocks(scores, batch, **options)

    with registered_rule("watch", rule):
        m3attn.attend(*plain(), topk=3, block_size=16, rule="watch", impl="reference")
    assert seen == [{"topk": 3, "impl": "reference"}]
