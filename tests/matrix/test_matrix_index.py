"""Block scores within their bound; ids equal, up to exchanges that the bound explains; selection exactly equal."""

import pytest
import torch

import m3attn
from m3attn.reference.index import select_blocks
from m3attn.testing.bounds import assert_within, product_error, score_bound
from m3attn.testing.cases import IndexCase, SelectCase, full_index, full_select, xs_index, xs_select
from m3attn.testing.ids import check_id_form, compare_ids
from m3attn.testing.inputs import index_inputs, select_inputs, token_major
from m3attn.testing.matrix import DEVICE, arch, matrix, run_or_skip


@pytest.mark.parametrize(("key", "case"), matrix("index_score", xs_index(), full_index()))
def test_index_score(key: str, case: IndexCase) -> None:
    inputs = index_inputs(case, DEVICE)

    def run() -> torch.Tensor:
        return m3attn.index_score(inputs.index_q, inputs.cache, inputs.batch, index_q_scale=inputs.index_q_scale, impl=key)

    if key == "flashinfer" and case.layout != "plain":
        with pytest.raises(m3attn.UnsupportedProblem):
            run()
        pytest.skip("takes index keys in one dense tensor, which no Problem shows")
    scores = run_or_skip("index_score", key, case.problem(arch()), run)
    error = product_error(key, arch(), case.q_dtype, case.k_dtype)
    exact, tolerance = score_bound(inputs.index_q, inputs.cache, inputs.batch, index_q_scale=inputs.index_q_scale, error_of_products=error)
    assert_within(scores, exact, tolerance, name="scores")
    if DEVICE == "cuda":
        assert torch.equal(scores, run()), "two runs differ"


@pytest.mark.parametrize(("key", "case"), matrix("index_topk", xs_index(), full_index()))
def test_index_topk(key: str, case: IndexCase) -> None:
    inputs = index_inputs(case, DEVICE)

    def run() -> torch.Tensor:
        return m3attn.index_topk(inputs.index_q, inputs.cache, inputs.batch, **inputs.selection, index_q_scale=inputs.index_q_scale, impl=key)

    ids = run_or_skip("index_topk", key, case.problem(arch()), run)
    error = product_error(key, arch(), case.q_dtype, case.k_dtype)
    exact, tolerance = score_bound(inputs.index_q, inputs.cache, inputs.batch, index_q_scale=inputs.index_q_scale, error_of_products=error)
    check_id_form(ids, inputs.batch, topk=case.topk, columns=exact.shape[2])
    exchanges = compare_ids(ids, select_blocks(exact, inputs.batch, **inputs.selection), exact, tolerance)
    print(f"{len(exchanges)} exchanges of near-equal blocks among {ids.numel()} ids")
    if DEVICE == "cuda":
        assert torch.equal(ids, run()), "two runs differ"


@pytest.mark.parametrize(("key", "case"), matrix("select_blocks", xs_select(), full_select()))
def test_select_blocks(key: str, case: SelectCase) -> None:
    scores, batch, selection = select_inputs(case, DEVICE)
    expected = select_blocks(scores, batch, **selection)
    buffer, out = token_major(torch.zeros_like(expected)) if case.token_major else (None, None)
    ids = run_or_skip("select_blocks", key, case.problem(arch()), lambda: m3attn.select_blocks(scores, batch, **selection, out=out, impl=key))
    check_id_form(ids, batch, topk=case.topk, columns=scores.shape[2])
    implementation = m3attn.registry.find("select_blocks", key)
    assert implementation is not None
    if implementation.capabilities.exact_ids:
        assert torch.equal(ids, expected)
    else:
        finite = scores.double().nan_to_num(nan=-3e38, posinf=3e38, neginf=-3e38)
        near = (finite.abs() * 2**-8).clamp(min=2**-126)  # denormals have fewer bits
        print(f"{len(compare_ids(ids, expected, finite, near))} exchanges of near-equal blocks")
    if buffer is not None:
        assert ids is out and bool((buffer[expected.shape[1] :] == 2**30).all()), "rows outside the view were written"
