"""The tests' own tools: bounds reject small mistakes and say where, ids may differ only where the bound explains it, poison poisons."""

from dataclasses import replace

import pytest
import torch

import m3attn
from m3attn.reference.index import select_blocks
from m3attn.testing.bounds import assert_within, attention_bound, score_bound
from m3attn.testing.cases import MODES, AttentionCase, IndexCase, Step
from m3attn.testing.ids import check_id_form, compare_ids
from m3attn.testing.inputs import AttentionInputs, attention_inputs, build_batch, index_inputs, random_ids
from m3attn.testing.poison import poisoned_empty


def step_of(length: int) -> Step:
    block = 128 if length > 128 else 16
    return Step("decode", (1,), (length,), page_size=block, block_size=block)


def judge(inputs: AttentionInputs, **changes: object) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the reference on changed inputs, as multiples of the bound of the unchanged ones."""
    bound = attention_bound(inputs.q, inputs.cache, inputs.batch, inputs.ids, **inputs.options)
    wrong = replace(inputs, **changes)
    out, lse = m3attn.sparse_attention(*wrong.arguments(), **wrong.options, return_lse=True, impl="reference")
    return (out.double() - bound.out).abs() / bound.out_tolerance, (lse.double() - bound.lse).abs() / bound.lse_tolerance


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [60, 2_048])
def test_one_key_too_few_among_many_is_out_of_bounds(mode: str, length: int) -> None:
    inputs = attention_inputs(AttentionCase(step_of(length), 8, 1, mode=mode), "cpu")
    out, lse = judge(inputs)
    assert float(out.max()) < 0.7 and float(lse.max()) < 0.7
    out, lse = judge(inputs, batch=replace(inputs.batch, seq_lens=inputs.batch.seq_lens - 1))
    assert float(lse.max()) > 50 and (mode == "fp8_pv" or float(out.max()) > 2)


@pytest.mark.parametrize("mode", ["widen_e4m3", "fp8"])
def test_a_sink_that_takes_k_scale_is_out_of_bounds(mode: str) -> None:
    inputs = attention_inputs(AttentionCase(step_of(3), 8, 1, mode=mode, scaled=True, sink=torch.float32), "cpu")
    out, _ = judge(inputs, options={**inputs.options, "sink_key": inputs.options["sink_key"] * 0.5})
    assert float(out.max()) > 2


def test_a_score_off_by_one_rounding_of_bf16_is_out_of_bounds() -> None:
    inputs = index_inputs(IndexCase(step_of(60), num_heads=2), "cpu")
    exact, tolerance = score_bound(inputs.index_q, inputs.cache, inputs.batch)
    assert_within(exact.float(), exact, tolerance)
    with pytest.raises(AssertionError, match="times the bound"):
        assert_within(exact.to(torch.bfloat16), exact, tolerance)


def test_the_worst_place_is_named() -> None:
    exact, tolerance = torch.zeros(2, 3), torch.full((2, 3), 0.1)
    actual = exact.clone()
    actual[1, 2] = 0.5
    with pytest.raises(AssertionError, match=r"x: 5\.00 times the bound at \(1, 2\): expected 0, got 0\.5"):
        assert_within(actual, exact, tolerance, name="x")


@pytest.mark.parametrize(("expected", "got"), [(0.0, float("nan")), (float("nan"), 0.0), (float("inf"), float("-inf")), (float("-inf"), -1e38)])
def test_special_values_must_stand_at_the_same_places(expected: float, got: float) -> None:
    with pytest.raises(AssertionError, match=r"at \(1,\)"):
        assert_within(torch.tensor([0.0, got]), torch.tensor([0.0, expected]), torch.full((2,), 1e38))
    assert_within(torch.tensor([expected]), torch.tensor([expected]), torch.zeros(1))


def test_exchanges_are_counted_or_refused() -> None:
    batch, _ = build_batch(Step("row", (1,), (16 * 6,), page_size=16, block_size=16), "cpu")
    scores = torch.tensor([[[5.0, 3.0, 3.0 + 1e-6, 1.0, 0.0, 0.0]]], dtype=torch.float64)
    expected = select_blocks(scores.float(), batch, topk=3)
    assert expected.flatten().tolist() == [0, 2, 5]
    exchanged = torch.tensor([[[0, 1, 5]]], dtype=torch.int32)
    assert compare_ids(expected, expected, scores, torch.zeros_like(scores)) == []
    (exchange,) = compare_ids(exchanged, expected, scores, torch.full_like(scores, 1e-6))
    assert (exchange.expected, exchange.got) == (2, 1) and exchange.gap == pytest.approx(1e-6)
    for wrong, tolerance in ((exchanged, 1e-7), (torch.tensor([[[0, 3, 5]]]).int(), 1e-6), (torch.tensor([[[0, 5, -1]]]).int(), 1.0)):
        with pytest.raises(AssertionError, match="ids"):
            compare_ids(wrong, expected, scores, torch.full_like(scores, tolerance))


def test_id_forms_that_break_are_named() -> None:
    batch, _ = build_batch(Step("row", (1,), (16 * 3,), page_size=16, block_size=16), "cpu")
    for ids, name in (([0, 1, 3], "own block"), ([0, -1, 2], "tail"), ([2, 1, 0], "ascending"), ([0, 0, 1], "duplicates"), ([0, 1, -1], "count")):
        with pytest.raises(AssertionError, match=name):
            check_id_form(torch.tensor([[ids]], dtype=torch.int32), batch, topk=3, columns=3)


def test_inputs_depend_on_the_seed_and_not_on_pages_or_layout() -> None:
    case = AttentionCase(Step("two", (1, 2), (20, 33), page_size=16, block_size=16), 2, 1, 64, topk=2, mode="fp32")
    a, b, c = (attention_inputs(x, "cpu", pages_seed=s) for x, s in ((case, 0), (case, 1), (replace(case, layout="packed"), 0)))
    assert torch.equal(a.q, b.q) and torch.equal(a.ids, b.ids) and torch.equal(a.q, c.q)
    assert not torch.equal(a.batch.page_table, b.batch.page_table)
    k, _ = a.cache.key_value()
    assert int(k.isfinite().sum()) == 53 * 64, "all but the live tokens is poison"


def test_random_ids_end_with_the_own_block() -> None:
    batch, _ = build_batch(Step("two", (3, 1), (70, 0), page_size=16, block_size=16, padded_rows=1), "cpu")
    ids = random_ids(batch, 5, 2, 3, seed=0)
    check_id_form(ids, batch, topk=3, columns=batch.num_blocks)
    assert ids[:, :3].amax(-1).tolist() == [[4, 4, 4]] * 2


SOURCE = """
def make():
    return torch.empty(3), torch.empty_like(torch.ones(2)), torch.ones(1).new_empty(2), torch.empty(2, dtype=torch.int32)
"""


def test_poison_reaches_m3attn_and_nobody_else() -> None:
    inside, outside = ({"__name__": name, "torch": torch} for name in ("m3attn.somewhere", "elsewhere"))
    exec(SOURCE, inside)
    exec(SOURCE.replace("torch.empty(3)", "torch.empty(3, out=torch.zeros(3))"), outside)
    with poisoned_empty():
        *floats, integers = inside["make"]()
        assert all(bool(t.isnan().all()) for t in floats) and bool((integers > 2**30).all())
        assert bool((outside["make"]()[0] == 0).all())
