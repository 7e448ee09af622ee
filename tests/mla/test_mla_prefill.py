"""mla_prefill of every implementation against fp64: ragged, causal and not, every mode, in chunks, and under graphs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import m3attn
from m3attn.dtypes import E4M3
from m3attn.problem import arch_number
from m3attn.reference.numerics import indexable
from m3attn.testing.bounds import product_error
from m3attn.testing.inputs import poisoned
from m3attn.testing.matrix import DEVICE, arch, gpu_only, keys, matrix, pick, run_or_skip, skip_if_declined
from m3attn.testing.mla import (
    PREFILL_MODES,
    MlaPrefillCase,
    MlaPrefillInputs,
    check_mla_prefill,
    full_mla_prefill,
    mla_prefill_inputs,
    offsets_of,
    xs_mla_prefill,
)

RAGGED = pick(MlaPrefillCase((5, 9), (12, 9), heads=1), MlaPrefillCase((150, 33), (700, 33), heads=4))
GPU_KEY = [pytest.param("triton", marks=gpu_only)]


def run(inputs: MlaPrefillInputs, key: str, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return m3attn.mla_prefill(*inputs.arguments(), return_lse=True, impl=key, **(inputs.options | changes))


def check(inputs: MlaPrefillInputs, results: tuple[torch.Tensor, torch.Tensor], key: str, **options: Any) -> None:
    error = product_error(key, arch(), inputs.q.dtype, inputs.k.dtype)
    check_mla_prefill(*inputs.arguments(), *results, error_of_products=error, **(inputs.options | options))


@pytest.mark.parametrize(("key", "case"), matrix("mla_prefill", xs_mla_prefill(), full_mla_prefill()))
def test_mla_prefill(key: str, case: MlaPrefillCase) -> None:
    inputs = mla_prefill_inputs(case, DEVICE)
    out, lse = run_or_skip("mla_prefill", key, case.problem(arch()), lambda: run(inputs, key))
    assert out.dtype == (torch.bfloat16 if inputs.q.dtype == E4M3 else inputs.q.dtype)
    rows = sum(case.q_lens)
    assert not out[rows:].any() and (lse[rows:] == float("-inf")).all(), "rows that no request owns"
    check(inputs, (out, lse), key)
    if DEVICE == "cuda":
        again = run(inputs, key)
        assert torch.equal(out, again[0]) and torch.equal(lse, again[1]), "two runs differ"


@pytest.mark.parametrize("mode", pick(("fp32", "fp8"), tuple(PREFILL_MODES)))
@pytest.mark.parametrize("key", keys("mla_prefill"))
def test_a_prefix_in_chunks_equals_one_pass(key: str, mode: str) -> None:
    """Own keys causally, the prefix before them chunk by chunk without a mask, merged; against fp64 and against one pass."""
    own, prefix, chunks = pick((7, 20, (0, 9, 20)), (130, 1_500, (0, 512, 1_024, 1_500)))
    case = MlaPrefillCase((own,), (prefix + own,), heads=pick(1, 8), mode=mode)
    skip_if_declined("mla_prefill", key, case.problem(arch()))
    inputs = mla_prefill_inputs(case, DEVICE)

    def part(first: int, last: int, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (indexable(x)[first:last].view(x.dtype) for x in (inputs.k, inputs.v))
        return run(replace(inputs, k=k, v=v, cu_seqlens_k=offsets_of((last - first,), DEVICE)), key, causal=causal)

    out, lse = part(prefix, prefix + own, causal=True)
    for first, last in pairwise(chunks):
        out, lse = m3attn.merge_attention_states(out, lse, *part(first, last, causal=False), impl=key)
    check(inputs, (out, lse), key, roundings=len(chunks))
    whole, whole_lse = run(inputs, key)
    # Outputs are rounded to their dtype, and sums of values in fp32, where an average over a thousand is small beside its terms.
    unit, largest_value = torch.finfo(whole.dtype).eps, float(inputs.v.float().abs().max())
    atol = 8 * unit * float(whole.float().abs().max()) + 8 * torch.finfo(torch.float32).eps * largest_value
    torch.testing.assert_close(out, whole, rtol=8 * unit, atol=atol)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", pick(("fp32", "fp8_pv"), tuple(PREFILL_MODES)))
@pytest.mark.parametrize("key", keys("mla_prefill"))
def test_scale_of_one_is_none_and_outputs_of_the_caller(key: str, mode: str) -> None:
    case = replace(RAGGED, mode=mode)
    skip_if_declined("mla_prefill", key, case.problem(arch()))
    inputs = mla_prefill_inputs(case, DEVICE)
    out, lse = run(inputs, key)
    wide = poisoned((out.shape[0], out.shape[1] + 2, 2 * out.shape[2]), out.dtype, DEVICE)[:, 1:-1, : out.shape[2]]
    heads_first = poisoned((lse.shape[1], lse.shape[0]), torch.float32, DEVICE).t()
    one = torch.ones(1, device=DEVICE)
    got = run(inputs, key, q_scale=1.0, k_scale=one, v_scale=one, out=wide, lse_out=heads_first)
    assert got[0] is wide and got[1] is heads_first and torch.equal(wide, out) and torch.equal(heads_first, lse)
    alone = m3attn.mla_prefill(*inputs.arguments(), impl=key, **inputs.options)
    assert torch.equal(alone, out)


def test_bad_arguments_are_named() -> None:
    inputs = mla_prefill_inputs(RAGGED, DEVICE)
    q, k, v, cu_q, cu_k = inputs.arguments()
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
    for error, message, changes in (
        (ValueError, "k: expected shape", {"k": k[..., :128]}),
        (TypeError, "v: expected torch.bfloat16", {"v": v.float()}),
        (ValueError, "v: expected shape", {"v": v[:-1]}),
        (ValueError, "cu_seqlens_k: expected shape", {"cu_seqlens_k": cu_k[:-1]}),
        (TypeError, "cu_seqlens_q: expected torch.int32", {"cu_seqlens_q": cu_q.long()}),
        (ValueError, "fp8_pv: expected e4m3 q, k and v", {"fp8_pv": True}),
        (TypeError, "q: expected", {"q": q.to(torch.float8_e5m2)}),
        (ValueError, "out: expected a buffer of its own", {"out": v[: q.shape[0]]}),
        (ValueError, "lse_out: expected shape", {"lse_out": torch.empty(3, 1, device=DEVICE)}),
        (ValueError, "v_scale: expected a finite number above 0", {"v_scale": 0.0}),
    ):
        with pytest.raises(error, match=message):
            m3attn.mla_prefill(**(dict(zip(names, inputs.arguments(), strict=True)) | changes))


def test_other_dims_are_refused_with_a_reason() -> None:
    case = MlaPrefillCase((3,), (3,), dim=80, value_dim=48)
    refused = m3attn.explain("mla_prefill", case.problem("sm_90"), impl="triton").reasons["triton"]
    assert refused == ("head dim 80: takes 64, 96, 128, 192, 256", "value head dim 48: takes 64, 96, 128, 192, 256")
    inputs = mla_prefill_inputs(case, DEVICE)
    check(inputs, run(inputs, "reference"), "reference")


@pytest.mark.parametrize("key", keys("mla_prefill"))
def test_offsets_out_of_range_do_no_harm(key: str) -> None:
    inputs = mla_prefill_inputs(RAGGED, DEVICE)
    for cu_q, cu_k in (((0, 2**31 - 1, 7), (0, 5, 9)), ((0, 9, 3), (0, -5, 2**31 - 1)), ((-9, 5, 14), (9, 3, 1))):
        offsets = (torch.tensor(o, dtype=torch.int32, device=DEVICE) for o in (cu_q, cu_k))
        m3attn.mla_prefill(inputs.q, inputs.k, inputs.v, *offsets, impl=key)


@pytest.mark.parametrize("key", GPU_KEY)
def test_offsets_past_two_to_the_31(key: str) -> None:
    inputs = mla_prefill_inputs(MlaPrefillCase((3, 60), (70, 60), heads=2), DEVICE)

    def far(x: torch.Tensor) -> torch.Tensor:
        rows, heads, dim = x.shape
        stride = (2**31 // (rows - 2) + 15) // 16 * 16
        view = torch.empty((rows - 1) * stride + heads * dim, dtype=x.dtype, device=DEVICE).as_strided(x.shape, (stride, dim, 1))
        return view.copy_(x)

    expected = run(inputs, key)
    for name in ("q", "k", "v"):
        got = run(replace(inputs, **{name: far(getattr(inputs, name))}), key)
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
        torch.cuda.empty_cache()


@pytest.mark.parametrize("key", GPU_KEY)
def test_graph_replay_equals_eager(key: str) -> None:
    mode = "fp8_pv" if arch_number(arch()) >= 89 else "bf16"
    inputs, other = (mla_prefill_inputs(MlaPrefillCase(q, k, heads=4, mode=mode), DEVICE) for q, k in (((90, 41), (300, 99)), ((1, 130), (7, 392))))
    run(inputs, key)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run(inputs, key)
    for mine, new in zip(inputs.arguments(), other.arguments(), strict=True):
        indexable(mine).copy_(indexable(new))
    graph.replay()
    expected = run(other, key)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
