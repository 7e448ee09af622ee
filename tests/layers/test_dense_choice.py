"""Which implementation a dense layer gets: what one lacks is refused, with its reason and an alternative, when a mode, layer or plan is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracle import CONFIG, make_cache

import m3attn
from m3attn import Capabilities, LayerCache, M3DenseAttention, PagedKVPool, PlanCapacity, Problem, StepPlan, UnsupportedProblem, flash_attn_4
from m3attn.builtin import POWERS_16_TO_256
from m3attn.workspace import DEFAULT_LIMIT

M3_DENSE = Problem(arch="sm_90", num_q_heads=64, num_kv_heads=4, q_dtype="bf16")


@pytest.fixture
def grouped() -> Iterator[list[Any]]:
    """An implementation that takes groups of two heads and more, equal head dims and powers of two as page sizes; yields what it was called with."""
    calls: list[Any] = []
    limits = Capabilities(cpu="yes", group_sizes=(2, 32), page_sizes=POWERS_16_TO_256)
    m3attn.register("dense_attention", "grouped", calls.append, capabilities=limits, auto=True)
    yield calls
    m3attn.unregister("dense_attention", "grouped")


REFUSALS = [
    ({"num_q_heads": 2}, {}, "group size 1: takes 2 to 32"),
    ({}, {"page_size": 48}, "page size 48: takes 16, 32, 64, 128, 256"),
]


@pytest.mark.parametrize(("geometry", "options", "reason"), REFUSALS)
def test_a_named_implementation_is_refused_when_the_layer_is_built(geometry: dict, options: dict, reason: str, grouped: list[Any]) -> None:
    config = dataclasses.replace(CONFIG, **geometry)
    with pytest.raises(UnsupportedProblem, match=rf"dense_attention: 'grouped' cannot run this: {reason}; reference can run it"):
        M3DenseAttention(config, implementation="grouped", device="cpu", **options)
    assert not grouped


@pytest.mark.parametrize(("geometry", "options", "reason"), REFUSALS)
def test_auto_passes_it_over_and_keeps_what_the_caller_asked_for(geometry: dict, options: dict, reason: str, grouped: list[Any]) -> None:
    layer = M3DenseAttention(dataclasses.replace(CONFIG, **geometry), device="cpu", **options)
    assert layer.mode.implementations["dense_attention/decode"] == "reference"
    assert any(f"grouped refused: {reason}" in why for why in layer.mode.reasons)
    assert layer.mode.page_size == options.get("page_size", 128)
    fits = M3DenseAttention(CONFIG, device="cpu")
    assert fits.mode.implementations["dense_attention/decode"] == "grouped" and not grouped


def test_head_dims_that_differ_are_refused_when_the_mode_is_resolved(grouped: list[Any]) -> None:
    problem = Problem(arch="cpu", num_q_heads=4, num_kv_heads=2, head_dim=192, v_head_dim=128, q_dtype="bf16")
    with pytest.raises(UnsupportedProblem, match="head dims 192 and 128 differ: takes equal ones; reference can run it"):
        m3attn.resolve_attention_mode(problem, implementation="grouped")


def test_a_plan_refuses_a_cache_that_its_layer_cannot_read(grouped: list[Any]) -> None:
    layer = M3DenseAttention(CONFIG, page_size=16, device="cpu", zero_on_alloc=True)
    with pytest.raises(ValueError, match=r"layer 0: cache\.zero_on_alloc: expected True, as the layer was built for, got False"):
        StepPlan.for_layers([layer], [make_cache(layer, 4)], 64, decode=PlanCapacity(1, 1, 1))
    assert not grouped


def test_pools_declare_what_they_zero() -> None:
    options = {"num_pages": 3, "page_size": 16, "device": "cpu"}
    for packed in (True, False):
        assert PagedKVPool(CONFIG, zero_on_alloc=True, packed=packed, **options).layer(0).zero_on_alloc
        assert not PagedKVPool(CONFIG, packed=packed, **options).layer(0).zero_on_alloc
    pool = PagedKVPool(CONFIG, zero_on_alloc=True, **options)
    pool.set_scales(1, k_scale=2.0)
    assert pool.layer(1).zero_on_alloc


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn-4 counts as installed."""
    monkeypatch.setattr(flash_attn_4, "installed", lambda: flash_attn_4.RELEASE)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "needs finite bytes behind each sequence in its last page: declare such a cache with zero_on_alloc=True"),
        ({"kv_dtype": "fp8_e4m3"}, "mode widen: takes bf16, fp16"),
        ({"kv_dtype": "fp8_e4m3", "q_dtype": "fp8_e4m3"}, "mode fp8: takes bf16, fp16"),
        ({"page_size": 64}, "page size 64: takes 128"),
        ({"head_dim": 256}, "head dim 256: takes 64, 128"),
        ({"num_q_heads": 12}, "group size 3: takes powers of two"),
        ({"arch": "sm_80"}, "architecture sm_80: built for sm_90, sm_100"),
        ({"sink": True}, "has no sink key"),
    ],
)
def test_what_flash_attn_4_declines(change: dict[str, Any], reason: str, installed: None) -> None:
    problem = dataclasses.replace(M3_DENSE, **{"kv_dtype": "bf16", "zero_on_alloc": bool(change)} | change)
    explanation = m3attn.explain("dense_attention", problem, impl="flash_attn_4")
    assert explanation.chosen is None and reason in explanation.reasons["flash_attn_4"]
    chosen = m3attn.explain("dense_attention", problem).chosen
    assert chosen != "flash_attn_4"


@pytest.mark.parametrize(
    ("declared", "arch", "prefill"),
    [(True, "sm_90", "flash_attn_4"), (False, "sm_90", "triton"), (True, "sm_100", "triton"), (True, "sm_80", "triton")],
)
def test_auto_takes_flash_attn_4_where_it_was_faster_and_the_cache_is_declared(declared: bool, arch: str, prefill: str, installed: None) -> None:
    mode = m3attn.resolve_attention_mode(dataclasses.replace(M3_DENSE, zero_on_alloc=declared, arch=arch))
    chosen = {phase: mode.implementations[f"dense_attention/{phase}"] for phase in ("prefill", "decode", "verify")}
    assert chosen == {"prefill": prefill, "decode": "triton", "verify": "triton"}


def test_auto_takes_triton_over_an_fp8_cache(installed: None) -> None:
    fp8 = m3attn.resolve_attention_mode(dataclasses.replace(M3_DENSE, zero_on_alloc=True), kv_cache_dtype="fp8")
    assert fp8.mode == "fp8" and fp8.implementations["dense_attention/prefill"] == "triton"


def test_scratch_of_flash_attn_4_beyond_the_limit_is_declined(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name with an error, by auto for the next one."""
    monkeypatch.setenv("M3ATTN_ARCH", "sm_90")
    shape = dict(tokens=8192, max_seqlen_q=8192, max_seqlen_k=8192, num_q_heads=64, num_kv_heads=4)
    needed = m3attn.workspace_bytes("dense_attention", impl="flash_attn_4", **shape)
    assert 8192 * 64 * 4 <= needed == m3attn.workspace_bytes("dense_attention", **shape)
    m3attn.set_workspace_limit(1 << 20)
    try:
        with pytest.raises(UnsupportedProblem, match=rf"workspace: flash_attn_4 needs {needed} bytes for 8192 tokens, 1 requests and 8192 keys"):
            m3attn.workspace_bytes("dense_attention", impl="flash_attn_4", **shape)
        assert m3attn.workspace_bytes("dense_attention", **shape) == m3attn.workspace_bytes("dense_attention", impl="triton", **shape)
    finally:
        m3attn.set_workspace_limit(DEFAULT_LIMIT)


def test_another_release_of_flash_attn_4_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = dataclasses.replace(M3_DENSE, kv_dtype="bf16", zero_on_alloc=True)
    for release, text in ((None, "which is not installed"), ("4.1.0", "4.1.0 is installed")):
        monkeypatch.setattr(flash_attn_4, "installed", lambda release=release: release)
        assert m3attn.explain("dense_attention", problem, impl="flash_attn_4").reasons["flash_attn_4"] == (
            f"needs the package flash-attn-4 {flash_attn_4.RELEASE}, {text}",
        )


def test_the_operators_carry_the_declaration(grouped: list[Any]) -> None:
    """A compiled call is judged by the cache it was given."""
    limits = Capabilities(cpu="yes", needs_zero_on_alloc=True)
    m3attn.register("dense_attention", "finite", lambda call: call.out.__setitem__(..., 0), capabilities=limits)
    try:
        kv = torch.zeros(2, 2, 16, 256)
        batch = m3attn.PagedBatch.from_lengths([1], [5], torch.zeros(1, 1, dtype=torch.int32), page_size=16)
        q = torch.ones(1, 4, 128)
        run = torch.compile(lambda cache: m3attn.dense_attention(q, cache, batch, impl="finite"), backend="eager", fullgraph=True)
        assert not run(LayerCache(kv=kv, zero_on_alloc=True)).any()
        with pytest.raises(UnsupportedProblem, match="declare such a cache with zero_on_alloc=True"):
            run(LayerCache(kv=kv))
    finally:
        m3attn.unregister("dense_attention", "finite")
