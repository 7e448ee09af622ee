"""sparse_mla_prefill of every implementation against fp64: the bound, the cosine distance, and what must not matter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import m3attn
from m3attn.dtypes import E4M3
from m3attn.problem import arch_number
from m3attn.reference.numerics import indexable
from m3attn.reference.quantize import saturating_cast
from m3attn.testing.bounds import product_error
from m3attn.testing.inputs import generator, normal, poisoned
from m3attn.testing.matrix import DEVICE, arch, gpu_only, keys, matrix, pick, run_or_skip, skip_if_declined
from m3attn.testing.mla import (
    COSINE_DISTANCE,
    MODES,
    OTHER_COSINE_DISTANCE,
    SparseMlaCase,
    SparseMlaInputs,
    check_sparse_mla,
    full_sparse_mla,
    sparse_mla_inputs,
    xs_sparse_mla,
)

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
SMALL = SparseMlaCase(3, 2, 64, 128)
ON_GPU = [pytest.param(p.values[0], id=p.values[0], marks=gpu_only) for p in keys("sparse_mla_prefill", kernels_only=True)]
"""Every kernel, where the interpreter of none is fast enough."""


def run(inputs: SparseMlaInputs, key: str, **changes: Any) -> Results:
    return m3attn.sparse_mla_prefill(inputs.q, inputs.kv, inputs.indices, impl=key, **(inputs.options | changes))


def inputs_for(key: str, case: SparseMlaCase) -> SparseMlaInputs:
    """The case's inputs, or a skip if the implementation declines it."""
    skip_if_declined("sparse_mla_prefill", key, case.problem(arch()))
    return sparse_mla_inputs(case, DEVICE)


def check(inputs: SparseMlaInputs, results: Results, key: str, mode: str) -> float:
    q_dtype, kv_dtype, _ = MODES[mode]
    return check_sparse_mla(
        inputs.q,
        inputs.kv,
        inputs.indices,
        results,
        error_of_products=product_error(key, arch(), q_dtype, kv_dtype),
        cosine_distance=COSINE_DISTANCE.get(mode, OTHER_COSINE_DISTANCE),
        **inputs.options,
    )


def same(a: Results, b: Results) -> bool:
    return all(torch.equal(x.view(torch.int16), y.view(torch.int16)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("key", "case"), matrix("sparse_mla_prefill", xs_sparse_mla(), full_sparse_mla()))
def test_sparse_mla_prefill(key: str, case: SparseMlaCase) -> None:
    inputs = inputs_for(key, case)
    results = run_or_skip("sparse_mla_prefill", key, case.problem(arch()), lambda: run(inputs, key))
    out, max_logits, lse = results
    assert out.dtype == torch.bfloat16 and out.shape == (case.queries, case.heads, 512)
    assert max_logits.shape == lse.shape == (case.queries, case.heads)
    check(inputs, results, key, case.mode)
    if DEVICE == "cuda":
        assert same(results, run(inputs, key)), "two runs differ"


@pytest.mark.parametrize("invalid", pick((1, 17, 64), (1, 15, 16, 17, 31, 32, 33, 64, 127)))
@pytest.mark.parametrize("key", keys("sparse_mla_prefill"))
def test_invalid_indices_first(key: str, invalid: int) -> None:
    """A whole masked tile at the start must not spoil the running maximum."""
    inputs = inputs_for(key, replace(SMALL, topk=128, valid=1.0))
    inputs.indices[:, :, :invalid] = -1
    check(inputs, run(inputs, key), key, "bf16")


@pytest.mark.parametrize("queries", pick((2, 17), (2, 300)))
@pytest.mark.parametrize("key", keys("sparse_mla_prefill"))
def test_no_valid_index_at_all(key: str, queries: int) -> None:
    inputs = inputs_for(key, replace(SMALL, queries=queries, topk=pick(32, 128), sink=True))
    for index in (-1, 128, -(2**31), 2**31 - 1):
        inputs.indices.fill_(index)
        out, max_logits, lse = run(inputs, key)
        assert not out.any() and (max_logits == float("-inf")).all() and (lse == float("inf")).all()


@pytest.mark.parametrize("mode", ("bf16", "fp8_pv"))
@pytest.mark.parametrize("key", keys("sparse_mla_prefill"))
def test_indices_past_the_length_do_not_count(key: str, mode: str) -> None:
    """In range, out of range, and over tokens of NaN; the same as if they were -1."""
    inputs = inputs_for(key, replace(SMALL, mode=mode))
    length = torch.tensor([0, 33, 64], dtype=torch.int32, device=DEVICE)
    past = torch.arange(64, device=DEVICE) >= length[:, None]
    expected = run(replace(inputs, indices=inputs.indices.masked_fill(past[:, None], -1)), key)
    nan_token = torch.nonzero(indexable(inputs.kv)[:, 0].view(inputs.kv.dtype).isnan().any(-1))
    for value in (5, -9, 2**31 - 1, *(nan_token[:1, 0].tolist())):
        got = run(replace(inputs, indices=inputs.indices.masked_fill(past[:, None], value)), key, topk_length=length)
        assert same(got, expected)


@pytest.mark.parametrize("mode", pick(("fp32", "fp8_pv"), tuple(MODES)))
@pytest.mark.parametrize("key", keys("sparse_mla_prefill"))
def test_scale_of_one_is_none(key: str, mode: str) -> None:
    case = replace(SMALL, mode=mode)
    inputs = inputs_for(key, case)
    assert same(run(inputs, key), run(inputs, key, q_scale=1.0, kv_scale=torch.ones(1, device=DEVICE)))


@pytest.mark.parametrize("queries", (3, 17))
@pytest.mark.parametrize("key", keys("sparse_mla_prefill"))
def test_heads_of_a_larger_buffer_and_own_outputs(key: str, queries: int) -> None:
    inputs = inputs_for(key, replace(SMALL, queries=queries))
    expected = run(inputs, key)
    wide = poisoned((queries, 9, 640), torch.bfloat16, DEVICE)
    wide[:, 4:6, :576] = inputs.q
    kv = poisoned((128, 2, 640), torch.bfloat16, DEVICE)
    kv[:, :1, :576] = inputs.kv
    indices = torch.full((queries, 3, 128), 7, dtype=torch.int32, device=DEVICE)
    indices[:, 1:2, ::2] = inputs.indices
    views = SparseMlaInputs(wide[:, 4:6, :576], kv[:, :1, :576], indices[:, 1:2, ::2], inputs.options)
    buffers = {"out": poisoned((queries, 2, 512), torch.bfloat16, DEVICE)}
    buffers |= {name: poisoned((queries, 2), torch.float32, DEVICE) for name in ("max_logits", "lse")}
    got = run(views, key, **buffers)
    assert all(a is b for a, b in zip(got, buffers.values(), strict=True)) and same(got, expected)
    again = run(inputs, key)
    assert same(got, expected) and again[0].data_ptr() != expected[0].data_ptr(), "results of one call must not become another's"


@pytest.mark.parametrize("key", keys("sparse_mla_prefill", kernels_only=True))
def test_split_queries_equal_whole_ones(key: str) -> None:
    """Up to 16 queries split their indices, more do not: the same within rounding."""
    case = SparseMlaCase(17, 2, pick(128, 2_048), 512, sink=True)
    inputs = inputs_for(key, case)
    whole = run(inputs, key)
    parts = replace(inputs, q=inputs.q[:4], indices=inputs.indices[:4])
    split = run(parts, key)
    check(parts, split, key, "bf16")
    for a, b, rounding_of_weights in zip(whole, split, (2**-8, 0.0, 0.0), strict=True):
        torch.testing.assert_close(a[:4], b, rtol=2**-7, atol=1e-5 + rounding_of_weights)


@pytest.mark.parametrize("key", keys("sparse_mla_prefill"))
def test_error_against_the_16_bit_path(key: str, capsys: pytest.CaptureFixture) -> None:
    """Both q and kv quantised from the same values: stated apart from the kernel's own error."""
    queries, topk = pick((2, 64), (128, 2_048))
    gen = generator(5)
    q, kv = (normal(shape, gen, DEVICE).to(torch.bfloat16) for shape in ((queries, 2, 576), (4 * topk, 1, 576)))
    indices = torch.rand(queries, 4 * topk, generator=gen).argsort(-1)[:, None, :topk].int().to(DEVICE)
    case = SparseMlaCase(queries, 2, topk, 4 * topk, mode="fp8_pv")
    exact, _, _ = m3attn.sparse_mla_prefill(q, kv, indices, sm_scale=576**-0.5, impl="reference")
    q8, kv8 = (saturating_cast(x, E4M3) for x in (q, kv))
    for fp8_pv in (True, False):
        skip_if_declined("sparse_mla_prefill", key, replace(case, mode="fp8_pv" if fp8_pv else "fp8").problem(arch()))
        out, _, _ = m3attn.sparse_mla_prefill(q8, kv8, indices, sm_scale=576**-0.5, fp8_pv=fp8_pv, impl=key)
        error = float((out.float() - exact.float()).norm() / exact.float().norm())
        with capsys.disabled():
            print(f"\nsparse_mla_prefill {key}, e4m3 against 16 bit, fp8_pv={fp8_pv}: relative error {error:.4f}", end="")
        assert error < 0.12


def test_bad_arguments_are_named() -> None:
    inputs = sparse_mla_inputs(SMALL, DEVICE)
    q, kv, options = inputs.q, inputs.kv, inputs.options
    out, statistic = torch.empty(3, 2, 512, dtype=torch.bfloat16, device=DEVICE), torch.empty(3, 2, device=DEVICE)
    e5m2 = kv.to(torch.float8_e5m2)
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "d_v: expected 512", {"d_v": 256}),
        (ValueError, "q: expected d_qk 512 or 576, got 128", {"q": q[..., :128]}),
        (ValueError, r"kv: expected shape \[s_kv, 1, 576\]", {"kv": kv[..., :512]}),
        (TypeError, "kv: expected torch.bfloat16 or torch.float8_e4m3fn", {"kv": e5m2}),
        (TypeError, "q: expected bf16, fp16, fp32 or fp8_e4m3, got torch.float8_e5m2", {"q": q.to(torch.float8_e5m2)}),
        (TypeError, "kv: expected torch.float8_e4m3fn for q", {"q": saturating_cast(q, E4M3)}),
        (TypeError, "indices: expected torch.int32", {"indices": inputs.indices.long()}),
        (ValueError, "indices: expected shape", {"indices": inputs.indices[:2]}),
        (ValueError, "topk_length: expected shape", {"topk_length": torch.zeros(2, dtype=torch.int32, device=DEVICE)}),
        (TypeError, "attn_sink: expected torch.float32", {"attn_sink": torch.zeros(2, dtype=torch.bfloat16, device=DEVICE)}),
        (ValueError, "kv_scale: expected a finite number above 0", {"kv_scale": -1.0}),
        (ValueError, "sm_scale: expected a finite number", {"sm_scale": float("nan")}),
        (ValueError, r"out: expected shape \[3, 2, 512\]", {"out": out[..., :256]}),
        (TypeError, "out: expected torch.bfloat16", {"out": out.float()}),
        (ValueError, "out: expected a contiguous tensor", {"out": out.transpose(0, 1).contiguous().transpose(0, 1)}),
        (ValueError, "lse: expected shape", {"lse": statistic[:2]}),
        (ValueError, "max_logits: expected a buffer of its own, got one that overlaps lse", {"max_logits": statistic, "lse": statistic}),
        (ValueError, "out: expected a buffer of its own, got one that overlaps q", {"out": q.view(-1)[: out.numel()].view(out.shape)}),
    ]
    for error, message, changes in cases:
        with pytest.raises(error, match=message):
            m3attn.sparse_mla_prefill(**({"q": q, "kv": kv, "indices": inputs.indices} | options | changes))


@pytest.mark.parametrize("topk", (64, 128, 192, 256, 512, 1_152, 2_048, 4_096))
def test_every_width_and_head_count_is_supported(topk: int) -> None:
    for heads in (1, 8, 16, 24, 32, 64, 128):
        for name in ("sm_80", "sm_90", "sm_100", "sm_120"):
            problem = SparseMlaCase(64, heads, topk, 65_536).problem(name)
            explained = m3attn.explain("sparse_mla_prefill", problem)
            assert explained.chosen in ({"sm_90": ("cute_sm90", "triton")}.get(name, ("triton",))) and not explained.reasons["triton"]
    refused = m3attn.explain("sparse_mla_prefill", SparseMlaCase(64, 8, 5_000, 65_536).problem("sm_90"), impl="triton")
    assert refused.reasons["triton"] == ("topk 5000: takes 1 to 4096",)


@pytest.mark.parametrize("mode", ("bf16", "fp8_pv"))
@pytest.mark.parametrize("key", ON_GPU)
def test_seventy_thousand_queries(key: str, mode: str) -> None:
    case = SparseMlaCase(70_000, 2, 64, 4_096, mode=mode)
    inputs = inputs_for(key, case)
    results = run(inputs, key)
    rows = torch.tensor([0, 1, 2, 32_767, 32_768, 65_535, 65_536, 69_999], device=DEVICE)
    sampled = replace(inputs, q=indexable(inputs.q)[rows].view(inputs.q.dtype), indices=inputs.indices[rows])
    check(sampled, tuple(x[rows] for x in results), key, mode)


@pytest.mark.parametrize("queries", (3, 40))
@pytest.mark.parametrize("key", ON_GPU)
def test_offsets_past_two_to_the_31(key: str, queries: int) -> None:
    """Token and query strides that put the last rows past 2^31 elements."""
    inputs = inputs_for(key, SparseMlaCase(queries, 2, 64, 128))
    kv_stride, q_stride = (2**31 // 126 + 15) // 16 * 16, (2**31 // (queries - 1) + 15) // 16 * 16
    kv = torch.empty(127 * kv_stride + 576, dtype=torch.bfloat16, device=DEVICE).as_strided((128, 1, 576), (kv_stride, 576, 1))
    q = torch.empty((queries - 1) * q_stride + 2 * 576, dtype=torch.bfloat16, device=DEVICE).as_strided((queries, 2, 576), (q_stride, 576, 1))
    kv.copy_(inputs.kv)
    q.copy_(inputs.q)
    assert same(run(replace(inputs, q=q, kv=kv), key), run(inputs, key))


@pytest.mark.parametrize("queries", (1, 8, 40))
@pytest.mark.parametrize("key", ON_GPU)
def test_graph_replay_equals_eager(key: str, queries: int) -> None:
    case = SparseMlaCase(queries, 64, 512, 4_096, mode="fp8_pv" if arch_number(arch()) >= 89 else "bf16", length=True, sink=True)
    inputs, other = (sparse_mla_inputs(case, DEVICE, seed=seed) for seed in (0, 1))
    run(inputs, key)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(inputs, key)
    for name in ("q", "kv", "indices"):
        indexable(getattr(inputs, name)).copy_(indexable(getattr(other, name)))
    for name in ("topk_length", "attn_sink"):
        inputs.options[name].copy_(other.options[name])
    graph.replay()
    assert same(captured, run(other, key))
