"""`check_rule`: what every selection rule keeps, whatever it selects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from m3attn.batch import PagedBatch
from m3attn.testing.cases import Step
from m3attn.testing.ids import check_id_form
from m3attn.testing.inputs import build_batch, generator, score_fill

STEPS = (
    Step("prefill", (18, 1, 0, 3), (18, 50, 30, 2), page_size=16, block_size=16, padded_rows=2),
    Step("decode", (1, 1, 1), (1, 0, 37), page_size=16, block_size=16, padded_rows=1),
    Step("many_blocks", (3, 2), (16 * 70, 16 * 33 + 5), page_size=16, block_size=16),
)
SCORES = ("permutation", "equal", "specials", "all_nan")


def check_rule(rule: str | Callable[..., torch.Tensor], *, device: torch.device | str = "cpu", heads: int = 4) -> None:
    """Check a selection rule on random, equal and special scores.

    Args:
        rule: the name of a registered rule, or its function `fn(scores, batch, **options) -> ids`.
        device: where to run it.
        heads: index heads of the scores.

    Raises:
        AssertionError: naming the property that does not hold: shape, range, own block, -1 at the tail, no duplicates, ascending, empty
            rows, scores changed, determinism, chunk independence.
    """
    if isinstance(rule, str):
        from m3attn.rules import find_rule

        rule = find_rule(rule)
    for step in STEPS:
        batch, _ = build_batch(step, device)
        for number, kind in enumerate(SCORES):
            scores = score_fill(kind, heads, step.tokens, batch.num_blocks, generator(number)).to(device)
            for options in ({"topk": 1}, {"topk": 4, "init_blocks": 1, "local_blocks": 2}, {"topk": 16, "init_blocks": 0, "local_blocks": 1}):
                _check_form(rule, scores, batch, options)
    _check_chunks(rule, device, heads)


def _check_form(rule: Callable[..., torch.Tensor], scores: torch.Tensor, batch: PagedBatch, options: dict[str, int]) -> None:
    before = scores.clone()
    ids = rule(scores, batch, **options)
    assert torch.equal(scores.view(torch.int32), before.view(torch.int32)), "scores changed: a rule must not write to its scores"
    expected = (scores.shape[0], scores.shape[1], options["topk"])
    assert ids.shape == expected, f"shape: expected {expected}, got {tuple(ids.shape)}"
    check_id_form(ids, batch, topk=options["topk"], columns=scores.shape[2], full_rows=False)
    again = rule(scores, batch, **options)
    assert torch.equal(ids, again), "determinism: two calls with the same scores gave different ids"


def _check_chunks(rule: Callable[..., torch.Tensor], device: torch.device | str, heads: int) -> None:
    """The ids of one request computed whole equal those of its queries in two chunks."""
    step = Step("whole", (20,), (16 * 20 + 9,), page_size=16, block_size=16)
    batch, _ = build_batch(step, device)
    scores = score_fill("permutation", heads, 20, batch.num_blocks, generator(7)).to(device)
    options = {"topk": 4, "init_blocks": 1, "local_blocks": 1}
    whole = rule(scores, batch, **options)
    for first in (1, 7, 19):
        parts = []
        for begin, end in ((0, first), (first, 20)):
            part = replace(
                batch,
                seq_lens=batch.seq_lens - (20 - end),
                cu_seqlens_q=torch.tensor([0, end - begin], dtype=torch.int32, device=device),
                max_seqlen_q=end - begin,
            )
            parts.append(rule(scores[:, begin:end], part, **options))
        assert torch.equal(torch.cat(parts, dim=1), whole), f"chunk independence: queries split after {first} got other ids than in one chunk"
