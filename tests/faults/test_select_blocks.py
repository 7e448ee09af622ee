"""Selection is an exact function of the scores: against a sort written in plain Python, and against every rule it has been known to break."""

import math
from dataclasses import replace

import pytest
import torch

import m3attn
from m3attn.batch import PagedBatch
from m3attn.problem import Problem
from m3attn.testing.cases import SCORE_KINDS, Step
from m3attn.testing.inputs import build_batch, generator, score_fill, token_major
from m3attn.testing.matrix import DEVICE, arch, keys, pick, skip_if_declined
from m3attn.testing.rules import check_rule

KEYS = pytest.mark.parametrize("key", keys("select_blocks"))


def plain_select(scores: list[float], topk: int, init: int, local: int) -> list[int]:
    """The rule for one row of nb = len(scores) blocks, by a sort."""
    nb = len(scores)
    forced = [nb - 1 - i for i in range(min(local, nb))]
    forced += [i for i in range(min(init, nb)) if i not in forced]
    rest = [i for i in range(nb) if i not in forced]
    value = [-math.inf if math.isnan(s) else s + 0.0 for s in scores]
    rest.sort(key=lambda i: (-value[i], i))
    kept = sorted((forced + rest)[:topk])
    return kept + [-1] * (topk - len(kept))


def one_row(nb: int, rows: int = 1) -> PagedBatch:
    """`rows` requests of one query each whose own block is nb - 1."""
    batch, _ = build_batch(Step("row", (1,) * rows, (16 * nb,) * rows, page_size=16, block_size=16), DEVICE)
    return batch


def select(key: str, scores: torch.Tensor, batch: PagedBatch, **options: object) -> torch.Tensor:
    problem = Problem(arch=arch(), num_index_heads=scores.shape[0], topk=options.get("topk", 16), page_size=16, block_size=16, phase=batch.phase)
    skip_if_declined("select_blocks", key, problem)
    return m3attn.select_blocks(scores, batch, impl=key, **options)


@KEYS
@pytest.mark.parametrize("kind", SCORE_KINDS)
@pytest.mark.parametrize("forced", [(0, 0), (0, 1), (1, 2), (3, 3)], ids=str)
def test_against_a_plain_sort(key: str, kind: str, forced: tuple[int, int]) -> None:
    for nb in pick((1, 5, 33), (1, 2, 15, 16, 17, 33, 64, 65, 129, 257, 512)):
        for topk in pick((4,), (1, 4, 16, 64)):
            scores = score_fill(kind, 2, 3, nb, generator(nb)).to(DEVICE)
            ids = select(key, scores, one_row(nb, 3), topk=topk, init_blocks=forced[0], local_blocks=forced[1])
            expected = [[plain_select(row, topk, *forced) for row in head] for head in scores.tolist()]
            assert ids.tolist() == expected, f"{nb} blocks, topk {topk}"


@KEYS
def test_forced_blocks_have_precedence_in_a_stated_order(key: str) -> None:
    """Local blocks from the highest id downward, then init blocks from 0 upward, each once, while places last."""
    cases = [
        # blocks, init, local, topk, expected
        (2, 1, 2, 2, [0, 1]),
        (2, 1, 2, 1, [1]),
        (5, 2, 2, 1, [4]),
        (5, 2, 2, 3, [0, 3, 4]),
        (5, 2, 2, 4, [0, 1, 3, 4]),
        (5, 4, 3, 6, [0, 1, 2, 3, 4, -1]),
        (3, 9, 9, 2, [1, 2]),
        (5, 3, 0, 2, [0, 1]),
        (1, 0, 1, 3, [0, -1, -1]),
    ]
    for nb, init, local, topk, expected in cases:
        scores = torch.zeros(1, 1, nb, device=DEVICE)
        scores[..., nb // 2] = float("inf")
        ids = select(key, scores, one_row(nb), topk=topk, init_blocks=init, local_blocks=local)
        assert ids.flatten().tolist() == expected, (nb, init, local, topk)


@KEYS
def test_no_score_displaces_a_forced_block(key: str) -> None:
    """Forced blocks' scores are never looked at: NaN and -inf there, +inf and 1e30 elsewhere, more of them than places."""
    nb, topk = 24, 6
    scores = torch.full((1, 1, nb), float("inf"), device=DEVICE)
    scores[..., 0], scores[..., 1], scores[..., nb - 1] = float("nan"), float("-inf"), float("nan")
    scores[..., 5:9] = 1e30
    ids = select(key, scores, one_row(nb), topk=topk, init_blocks=2, local_blocks=1)
    assert ids.flatten().tolist() == [0, 1, 2, 3, 4, nb - 1]


@KEYS
def test_infinite_winners_do_not_hide_finite_ones(key: str) -> None:
    nb = 32
    scores = torch.zeros(1, 1, nb, device=DEVICE)
    scores[..., 4:8] = float("inf")
    scores[..., 20] = 5.0
    ids = select(key, scores, one_row(nb), topk=5, local_blocks=0)
    assert ids.flatten().tolist() == [4, 5, 6, 7, 20]


@KEYS
@pytest.mark.parametrize("width", pick([1, 5, 33], [1, 2, 3, 17, 64, 127, 1_000, 5_000]))
def test_nan_is_never_an_id_and_never_wins(key: str, width: int) -> None:
    nan, inf = float("nan"), float("inf")
    for pattern in ([nan], [nan, 1.0], [inf], [-inf], [nan, inf, -inf, 0.0], [nan, -inf]):
        scores = torch.tensor((pattern * width)[:width], device=DEVICE)[None, None]
        ids = select(key, scores, one_row(width), topk=8, local_blocks=0)
        assert ids.flatten().tolist() == plain_select(scores.flatten().tolist(), 8, 0, 0)


@KEYS
def test_ties_go_to_the_lower_id_whatever_the_width(key: str) -> None:
    for width in pick((40, 70), (40, 200, 1_000, 5_000)):
        scores = torch.full((1, 1, width), 0.25, device=DEVICE)
        scores[..., width // 2] = 1.0
        ids = select(key, scores, one_row(width), topk=4, local_blocks=1)
        assert ids.flatten().tolist() == [0, 1, width // 2, width - 1]


@KEYS
def test_zeros_of_both_signs_are_equal(key: str) -> None:
    scores = torch.zeros(1, 2, 20, device=DEVICE)
    scores[0, 0, ::2] = -0.0
    scores[0, 1, 1::2] = -0.0
    ids = select(key, scores, one_row(20, 2), topk=5, local_blocks=0)
    assert ids[0].tolist() == [[0, 1, 2, 3, 4]] * 2


@KEYS
def test_one_unit_in_the_last_place_decides(key: str) -> None:
    for start in (0x3F800000, 0x00000001, 0x7F7FFF00, 0x00800000 - 12):
        bits = start + torch.arange(24, dtype=torch.int32)
        order = torch.randperm(24, generator=generator(start & 1023))
        for sign in (1.0, -1.0):
            scores = (bits.view(torch.float32) * sign)[order][None, None].to(DEVICE)
            ids = select(key, scores, one_row(24), topk=7, local_blocks=0)
            assert ids.flatten().tolist() == plain_select(scores.flatten().tolist(), 7, 0, 0), (start, sign)


@KEYS
@pytest.mark.parametrize("nb", [0, 1, 2, 15, 16, 17])
def test_fewer_blocks_than_places(key: str, nb: int) -> None:
    batch, _ = build_batch(Step("few", (1, 1), (16 * nb, 16 * 17), page_size=16, block_size=16), DEVICE)
    scores = score_fill("permutation", 1, 2, 17, generator(nb)).to(DEVICE)
    ids = select(key, scores, batch, topk=16)
    assert ids[0, 0].tolist() == plain_select(scores[0, 0, :nb].tolist(), 16, 0, 1)


@KEYS
def test_a_row_is_independent_of_its_batch(key: str) -> None:
    """The same row alone, among others, with wider columns of garbage, and in another phase: the same ids."""
    nb = 21
    row = score_fill("specials", 2, 1, nb, generator(3)).to(DEVICE)
    expected = select(key, row, one_row(nb), topk=5)
    step = Step("among", (1, 1, 1), (16 * 9, 16 * nb, 5), page_size=16, block_size=16, slack=16 * 40)
    batch, _ = build_batch(step, DEVICE)
    wide = torch.full((2, 3, batch.num_blocks), float("inf"), device=DEVICE)
    wide[:, 1, :nb] = row[:, 0]
    assert torch.equal(select(key, wide, batch, topk=5)[:, 1], expected[:, 0])
    assert torch.equal(select(key, wide, replace(batch, max_seqlen_q=40), topk=5)[:, 1], expected[:, 0]), "as prefill"


@KEYS
def test_strided_scores_and_token_major_ids(key: str) -> None:
    batch = one_row(19, 4)
    scores = score_fill("few_values", 3, 4, 19, generator(1)).to(DEVICE)
    expected = select(key, scores, batch, topk=6)
    around = torch.full((4, 3, 30), float("nan"), device=DEVICE)
    around[..., 5:24] = scores.transpose(0, 1)
    strided = around.transpose(0, 1)[..., 5:24]
    buffer, view = token_major(torch.zeros_like(expected))
    assert select(key, strided, batch, topk=6, out=view) is view
    assert torch.equal(view, expected) and bool((buffer[4:] == 2**30).all())
    columns_first = scores.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert torch.equal(select(key, columns_first, batch, topk=6), expected)


@KEYS
def test_rows_of_every_kind_of_emptiness(key: str) -> None:
    """Padded requests, negative positions, rows behind the last request and no requests at all: ids all -1."""
    batch, _ = build_batch(Step("empty", (1, 3, 0), (0, 1, 40), page_size=16, block_size=16, padded_rows=2), DEVICE)
    ids = select(key, torch.full((2, 6, 3), float("inf"), device=DEVICE), batch, topk=4)
    assert ids[:, [0, 1, 2, 4, 5]].unique().tolist() == [-1] and ids[:, 3].tolist() == [[0, -1, -1, -1]] * 2
    batch, _ = build_batch(Step("none", (), (), page_size=16, block_size=16, padded_rows=3, slack=40), DEVICE)
    assert select(key, torch.zeros(2, 3, 3, device=DEVICE), batch, topk=4).unique().tolist() == [-1]


@pytest.mark.parametrize("nb", pick([33], [33, 300, 5_000]))
def test_every_implementation_gives_the_same_ids(nb: int) -> None:
    scores = score_fill("few_values", 4, 3, nb, generator(0)).to(DEVICE)
    batch = one_row(nb, 3)
    problem = Problem(arch=arch(), num_index_heads=4, topk=7, page_size=16, block_size=16, phase=batch.phase)
    able = [i.key for i in m3attn.implementations("select_blocks") if not i.supports(problem)]
    results = [m3attn.select_blocks(scores, batch, topk=7, impl=key) for key in able]
    assert len(able) > 1 and all(torch.equal(ids, results[0]) for ids in results)


@pytest.mark.parametrize("rule", m3attn.rules())
def test_rules_keep_what_every_rule_keeps(rule: str) -> None:
    check_rule(rule, device=DEVICE)


BAD_RULES = {
    "shape": lambda ids, scores, batch: ids[..., :-1],
    "own block": lambda ids, scores, batch: torch.where((ids == ids.max()) & (ids >= 0), 2**20, ids),
    "-1 at the tail": lambda ids, scores, batch: ids.flip(-1),
    "no duplicates": lambda ids, scores, batch: torch.where(ids > 0, 0, ids),
    "ascending": lambda ids, scores, batch: torch.where(ids >= 0, ids.amax(-1, keepdim=True) - ids, ids),
    "empty rows|own block": lambda ids, scores, batch: torch.cat([ids[..., :1].clamp(min=0), ids[..., 1:]], dim=-1),
    "scores changed": lambda ids, scores, batch: (scores.fill_(0.0), ids)[1],
}


@pytest.mark.parametrize("name", BAD_RULES)
def test_check_rule_names_the_property_that_breaks(name: str) -> None:
    def rule(scores: torch.Tensor, batch: PagedBatch, **options: int) -> torch.Tensor:
        ids = m3attn.select_blocks(scores, batch, **options, impl="reference")
        return BAD_RULES[name](ids, scores, batch)

    with pytest.raises(AssertionError, match=name):
        check_rule(rule)


def test_check_rule_finds_a_rule_that_depends_on_chance_or_on_the_chunk() -> None:
    def chance(scores: torch.Tensor, batch: PagedBatch, **options: int) -> torch.Tensor:
        return m3attn.select_blocks(torch.rand_like(scores), batch, **options, impl="reference")

    def first_row(scores: torch.Tensor, batch: PagedBatch, **options: int) -> torch.Tensor:
        return m3attn.select_blocks(scores[:, :1].expand_as(scores).nan_to_num(), batch, **options, impl="reference")

    with pytest.raises(AssertionError, match="determinism"):
        check_rule(chance)
    with pytest.raises(AssertionError, match="chunk independence"):
        check_rule(first_row)
