"""Sparse and dense attention of every implementation, within the bound around fp64."""

import pytest
import torch

import m3attn
from m3attn.testing.bounds import attention_bound, product_error
from m3attn.testing.cases import AttentionCase, full_attention, xs_attention
from m3attn.testing.inputs import AttentionInputs, attention_inputs
from m3attn.testing.matrix import DEVICE, arch, matrix, run_or_skip


def check_attention(stage: str, key: str, case: AttentionCase) -> None:
    inputs = attention_inputs(case, DEVICE)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return getattr(m3attn, stage)(*inputs.arguments(), **inputs.options, return_lse=True, impl=key)

    out, lse = run_or_skip(stage, key, case.problem(arch()), run)
    check_result(inputs, key, out, lse)
    if DEVICE == "cuda":
        again, lse_again = run()
        assert torch.equal(out, again) and torch.equal(lse, lse_again), "two runs differ"


def check_result(inputs: AttentionInputs, key: str, out: torch.Tensor, lse: torch.Tensor) -> None:
    error = product_error(key, arch(), inputs.q.dtype, inputs.cache.key_value()[0].dtype)
    bound = attention_bound(inputs.q, inputs.cache, inputs.batch, inputs.ids, **inputs.options, error_of_products=error)
    bound.check(out, lse)


@pytest.mark.parametrize(("key", "case"), matrix("sparse_attention", xs_attention(sparse=True), full_attention(sparse=True)))
def test_sparse_attention(key: str, case: AttentionCase) -> None:
    if case.ids == "scattered" and not key.startswith(("reference", "triton")):
        pytest.skip("takes ascending ids, as the contract allows")
    check_attention("sparse_attention", key, case)


@pytest.mark.parametrize(("key", "case"), matrix("dense_attention", xs_attention(sparse=False), full_attention(sparse=False)))
def test_dense_attention(key: str, case: AttentionCase) -> None:
    check_attention("dense_attention", key, case)
