"""Comparing block ids: exact as a function of scores, and up to exchanges of near-equal blocks as a function of q and k."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from m3attn.batch import PagedBatch
from m3attn.reference.paging import query_rows


@dataclass(frozen=True)
class Exchange:
    """Row (head, token) kept `got` where the exact scores put `expected`; `gap` is the difference of the two exact scores."""

    head: int
    token: int
    expected: int
    got: int
    gap: float


def check_id_form(ids: torch.Tensor, batch: PagedBatch, *, topk: int, columns: int, full_rows: bool = True) -> None:
    """What ids always are: strictly ascending, -1 only at the tail, nothing beyond a row's own block, min(K, nb) of them.

    Args:
        full_rows: False for a rule that may keep fewer than min(K, nb) blocks.

    Raises:
        AssertionError: naming the property and the first row without it.
    """
    _, position = query_rows(batch, ids.shape[1])
    num_blocks = torch.where(position < 0, 0, (position // batch.block_size + 1).clamp(max=columns))
    assert ids.dtype == torch.int32, f"dtype: expected int32, got {ids.dtype}"
    assert ids.shape[2] == topk, f"shape: expected {topk} ids a row, got {ids.shape[2]}"
    valid = ids >= 0
    later, earlier = ids[..., 1:], ids[..., :-1]
    _refuse(ids, (ids < -1).any(-1), "range: an id below -1")
    _refuse(ids, (ids >= num_blocks[:, None]).any(-1), "own block: an id beyond the row's own block")
    _refuse(ids, ((later >= 0) & (earlier == -1)).any(-1), "-1 at the tail: a valid id after -1")
    _refuse(ids, ((later >= 0) & (later == earlier)).any(-1), "no duplicates: an id stands twice")
    _refuse(ids, ((later >= 0) & (later < earlier)).any(-1), "ascending: an id below the one before it")
    _refuse(ids, (num_blocks == 0) & valid.any(-1), "empty rows: a valid id in an empty row")
    if full_rows:
        _refuse(ids, valid.sum(-1) != num_blocks.clamp(max=topk), "count: not min(K, nb) valid ids")


def _refuse(ids: torch.Tensor, bad: torch.Tensor, message: str) -> None:
    if bool(bad.any()):
        head, token = bad.nonzero()[0].tolist()
        raise AssertionError(f"{message}, at head {head}, token {token}: {ids[head, token].tolist()}")


def compare_ids(actual: torch.Tensor, expected: torch.Tensor, scores: torch.Tensor, tolerance: torch.Tensor) -> list[Exchange]:
    """Equal ids, except exchanges of blocks whose exact scores differ by less than twice the score bound.

    Args:
        actual, expected: [H, T, K] int32, ascending.
        scores: [H, T, blocks] fp64, exact.
        tolerance: [H, T, blocks], the score bound of the implementation.

    Returns:
        The exchanges found.

    Raises:
        AssertionError: rows of different counts, or an exchange over a gap that the bound does not explain.
    """
    assert actual.shape == expected.shape, f"ids: expected shape {tuple(expected.shape)}, got {tuple(actual.shape)}"
    exchanges = []
    for head, token in (actual != expected).any(dim=-1).nonzero().tolist():
        got, want = (set(i for i in ids[head, token].tolist() if i >= 0) for ids in (actual, expected))
        assert len(got) == len(want), f"ids at head {head}, token {token}: expected {sorted(want)}, got {sorted(got)}"
        row_scores, row_tolerance = scores[head, token], tolerance[head, token]
        missed = sorted(want - got, key=lambda i: -float(row_scores[i]))
        extra = sorted(got - want, key=lambda i: -float(row_scores[i]))
        for wanted, kept in zip(missed, reversed(extra), strict=True):
            gap = float(row_scores[wanted] - row_scores[kept])
            allowed = 2 * float(torch.maximum(row_tolerance[wanted], row_tolerance[kept]))
            assert abs(gap) < allowed, (
                f"ids at head {head}, token {token}: kept block {kept} (score {float(row_scores[kept]):.9g}) instead of {wanted} "
                f"({float(row_scores[wanted]):.9g}), a gap of {gap:.3g} where the bound explains {allowed:.3g}"
            )
            exchanges.append(Exchange(head, token, wanted, kept, gap))
    return exchanges
