"""The small cases of the matrix for `cute_sm90` and `cute_sm100`, through the public functions, in the interpreter: every order, hazards as errors.

One test a case: its variant is compiled once, and the orders must agree bit for bit.
"""

from collections.abc import Callable

import pytest
import torch
from needed import need

need("nvidia-cutlass-dsl", "apache-tvm-ffi")

from simulator import ORDERS, simulated

import m3attn
from m3attn import registry
from m3attn.problem import Problem
from m3attn.reference.index import select_blocks
from m3attn.testing.bounds import assert_within, attention_bound, product_error, score_bound
from m3attn.testing.cases import AttentionCase, IndexCase, SelectCase, tile_attention, tile_index, tile_select
from m3attn.testing.ids import check_id_form, compare_ids
from m3attn.testing.inputs import attention_inputs, index_inputs, select_inputs, token_major
from m3attn.testing.matrix import skip_if_declined
from m3attn.testing.poison import poisoned_empty

ARCHS = {"cute_sm90": "sm_90", "cute_sm100": "sm_100"}


def cases(stage: str, listed: list):
    """For each key that has the stage. Every sixth case in every run, other ones for each key; the rest are slow."""
    marked = [
        pytest.param(key, case, id=f"{key}-{case.id}", marks=[pytest.mark.slow] if number % 6 else [])
        for start, key in enumerate(ARCHS)
        if registry.find(stage, key) is not None
        for number, case in enumerate(listed, start)
    ]
    return pytest.mark.parametrize(("key", "case"), marked)


def in_every_order(stage: str, key: str, problem: Problem, call: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """What `call` returns; skips what the implementation declines."""
    skip_if_declined(stage, key, problem)
    results = []
    for order in ORDERS:
        with simulated(order, arch=f"{ARCHS[key]}a", seed=len(problem.phase)), poisoned_empty():
            results.append(call())
    for order, result in zip(ORDERS[1:], results[1:], strict=True):
        for tensor, expected in zip(result, results[0], strict=True):
            equal = torch.equal(tensor.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
            assert equal, f"order {order} differs from {ORDERS[0]}"
    return results[0]


@cases("sparse_attention", tile_attention())
def test_sparse_attention(key: str, case: AttentionCase) -> None:
    inputs = attention_inputs(case, "cpu")

    def call() -> tuple[torch.Tensor, ...]:
        return m3attn.sparse_attention(*inputs.arguments(), **inputs.options, return_lse=True, impl=key)

    out, lse = in_every_order("sparse_attention", key, case.problem(ARCHS[key]), call)
    error = product_error(key, ARCHS[key], inputs.q.dtype, inputs.cache.key_value()[0].dtype)
    attention_bound(inputs.q, inputs.cache, inputs.batch, inputs.ids, **inputs.options, error_of_products=error).check(out, lse)


@cases("index_score", tile_index())
def test_index_score(key: str, case: IndexCase) -> None:
    inputs = index_inputs(case, "cpu")

    def call() -> tuple[torch.Tensor, ...]:
        return (m3attn.index_score(inputs.index_q, inputs.cache, inputs.batch, index_q_scale=inputs.index_q_scale, impl=key),)

    (scores,) = in_every_order("index_score", key, case.problem(ARCHS[key]), call)
    error = product_error(key, ARCHS[key], case.q_dtype, case.k_dtype)
    exact, tolerance = score_bound(inputs.index_q, inputs.cache, inputs.batch, index_q_scale=inputs.index_q_scale, error_of_products=error)
    assert_within(scores, exact, tolerance, name="scores")


@cases("index_topk", tile_index())
def test_index_topk(key: str, case: IndexCase) -> None:
    inputs = index_inputs(case, "cpu")

    def call() -> tuple[torch.Tensor, ...]:
        return (m3attn.index_topk(inputs.index_q, inputs.cache, inputs.batch, **inputs.selection, index_q_scale=inputs.index_q_scale, impl=key),)

    (ids,) = in_every_order("index_topk", key, case.problem(ARCHS[key]), call)
    error = product_error(key, ARCHS[key], case.q_dtype, case.k_dtype)
    exact, tolerance = score_bound(inputs.index_q, inputs.cache, inputs.batch, index_q_scale=inputs.index_q_scale, error_of_products=error)
    check_id_form(ids, inputs.batch, topk=case.topk, columns=exact.shape[2])
    compare_ids(ids, select_blocks(exact, inputs.batch, **inputs.selection), exact, tolerance)


@cases("select_blocks", tile_select())
def test_select_blocks(key: str, case: SelectCase) -> None:
    scores, batch, selection = select_inputs(case, "cpu")
    expected = select_blocks(scores, batch, **selection)

    def call() -> tuple[torch.Tensor, ...]:
        buffer, out = token_major(torch.zeros_like(expected)) if case.token_major else (None, None)
        ids = m3attn.select_blocks(scores, batch, **selection, out=out, impl=key)
        assert buffer is None or bool((buffer[expected.shape[1] :] == 2**30).all()), "rows outside the view were written"
        return (ids,)

    (ids,) = in_every_order("select_blocks", key, case.problem(ARCHS[key]), call)
    assert torch.equal(ids, expected)
