"""A call whose like has passed skips checks that would say the same again. Whatever has changed since is seen all the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from stage_calls import BUILDERS, make_batch, normal, registered

import m3attn
from m3attn import switches
from m3attn.checks import once_per_look
from m3attn.workspace import DEFAULT_LIMIT


def taken(stage: str, **options: Any) -> str:
    """Which of two test implementations a repeated call runs."""
    call = BUILDERS[stage]()
    ran: list[str] = []
    with registered(stage, "first", lambda _: ran.append("first"), auto=True):
        call(**options)
        call(**options)
        with registered(stage, "second", lambda _: ran.append("second"), auto=True):
            call(**options)
        call(**options)
    call(**options)
    return " ".join(ran)


@pytest.mark.parametrize("stage", BUILDERS)
def test_what_is_registered_or_taken_away_counts_at_once(stage: str) -> None:
    assert taken(stage) == "first first second first"


@pytest.mark.parametrize("stage", BUILDERS)
def test_a_choice_in_the_environment_counts_at_once(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, ran = BUILDERS[stage](), []
    with registered(stage, "mine", lambda _: ran.append("mine")):
        call()
        monkeypatch.setenv("M3ATTN_IMPL", f"{stage}=mine")
        call()
        monkeypatch.setenv("M3ATTN_IMPL", f"{stage}=reference")
        call()
        os.environ["M3ATTN_IMPL"] = "mine"
        call()
        with m3attn.use("reference"):
            call()
        monkeypatch.delenv("M3ATTN_IMPL")
        call()
    assert ran == ["mine", "mine"]


def test_logs_and_checks_are_switched_on_and_off_between_calls(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    call = BUILDERS["sparse_attention"]()
    wrong = {"ids": torch.full_like(call.arguments["ids"], 9)}
    call(**wrong)
    monkeypatch.setenv("M3ATTN_LOG_CALLS", "1")
    call()
    assert capsys.readouterr().err.count("sparse_attention") == 1
    monkeypatch.setenv("M3ATTN_LOG_CALLS", "0")
    monkeypatch.setenv("M3ATTN_CHECK", "1")
    with pytest.raises(ValueError, match=r"ids: expected block ids from 0 to"):
        call(**wrong)
    monkeypatch.delenv("M3ATTN_CHECK")
    call(**wrong)
    assert capsys.readouterr().err == ""


def test_another_architecture_is_another_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    call, archs = BUILDERS["quantize_fp8"](), []
    with registered("quantize_fp8", "mine", lambda _: None, extra_reasons=lambda problem: archs.append(problem.arch) or ()):
        for target in (None, "sm_90", "sm_80", None):
            monkeypatch.setattr(m3attn.problem, "compile_target", target)
            call(impl="mine")
    assert archs == ["cpu", "sm_90", "sm_80"]  # the first is remembered


def test_the_workspace_limit_of_the_moment_counts() -> None:
    call, limits = BUILDERS["index_topk"](), []

    def size(shape: m3attn.WorkShape) -> int:
        limits.append(shape.limit)
        return 0

    with registered("index_topk", "mine", lambda _: None, workspace=size):
        call(impl="mine")
        m3attn.set_workspace_limit(1 << 20)
        try:
            call(impl="mine")
        finally:
            m3attn.set_workspace_limit(DEFAULT_LIMIT)
    assert limits == [DEFAULT_LIMIT, 1 << 20]


def resized(tensor: torch.Tensor) -> None:
    tensor.resize_(tensor.shape[0] + 1, *tensor.shape[1:])


def restrided(tensor: torch.Tensor) -> None:
    tensor.as_strided_((*tensor.shape[:-1], tensor.shape[-1] // 2), (*tensor.stride()[:-1], 2))


def retyped(tensor: torch.Tensor) -> None:
    tensor.data = torch.zeros(tensor.shape, dtype=torch.int64)


IN_PLACE = [
    ("sparse_attention", "ids", resized, r"ids: expected shape"),
    ("sparse_attention", "q", restrided, r"q: expected unit stride in the last dimension"),
    ("dense_attention", "out", resized, r"out: expected shape"),
    ("dense_attention", "out", retyped, r"out: expected torch.bfloat16, got torch.int64"),
    ("index_score", "index_q", retyped, r"index_q: expected .* got torch.int64"),
    ("index_topk", "out", resized, r"out: expected shape"),
    ("select_blocks", "scores", retyped, r"scores: expected torch.float32, got torch.int64"),
    ("qk_norm_rope_insert", "qkv", resized, r"positions: expected shape"),
    ("quantize_fp8", "out", restrided, r"out: expected shape"),
    ("quantize_fp8", "x", retyped, r"x: expected .* got torch.int64"),
]


@pytest.mark.parametrize("stage, name, change, message", IN_PLACE)
def test_a_tensor_changed_in_place_is_checked_again(stage: str, name: str, change: Callable[[torch.Tensor], None], message: str) -> None:
    call = BUILDERS[stage]()
    call()
    change(call.arguments[name])
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@pytest.mark.parametrize("field, name", [("page_table", "batch.page_table"), ("seq_lens", "batch.seq_lens"), ("cu_seqlens_q", "batch.cu_seqlens_q")])
def test_a_batch_changed_in_place_is_checked_again(field: str, name: str) -> None:
    call = BUILDERS["sparse_attention"]()
    call()
    tensor = getattr(call.arguments["batch"], field)
    tensor.data = tensor.data.long()
    with pytest.raises(TypeError, match=rf"{name}: expected torch.int32, got torch.int64"):
        call()


@pytest.mark.parametrize("value", [1.0, True])
@pytest.mark.parametrize("field", ["max_seqlen_q", "max_seqlen_k", "page_size", "block_size"])
def test_a_number_of_another_type_is_no_number_seen_before(field: str, value: Any) -> None:
    call = BUILDERS["sparse_attention"]()
    batch = make_batch()
    call(batch=batch)
    equal = float(getattr(batch, field)) if value == 1.0 and value is not True else value
    with pytest.raises(TypeError, match=rf"batch.{field}: expected an int, got {type(value).__name__}"):
        call(batch=replace(batch, **{field: equal}))


def test_what_no_layout_shows_is_looked_at_in_every_call() -> None:
    call = BUILDERS["sparse_attention"]()
    q, cache = call.arguments["q"], call.arguments["cache"]
    call(q_scale=None)
    with pytest.raises(ValueError, match=r"q_scale: expected a finite number above 0"):
        call(q_scale=-1.0)
    with pytest.raises(ValueError, match=r"cache.v_scale: expected a finite number above 0"):
        call(cache=replace(cache, v_scale=float("nan")))
    with pytest.raises(ValueError, match=r"sm_scale: expected a finite number"):
        call(sm_scale=float("inf"))
    with pytest.raises(ValueError, match=r"out: expected a buffer of its own, got one that overlaps q"):
        call(out=q)
    with pytest.raises(NotImplementedError, match="forward only"), registered("sparse_attention", "mine", lambda _: None):
        call(impl="mine")
        call(q=q.clone().requires_grad_(), impl="mine")


def test_buffers_of_layouts_seen_before_are_compared_by_address() -> None:
    memory = normal(2, 64)
    apart, within = memory[1], memory.view(-1)[32:96]
    m3attn.quantize_fp8(memory[0], out=apart.view(torch.float8_e4m3fn)[:64])
    with pytest.raises(ValueError, match=r"out: expected a buffer of its own, got one that overlaps x"):
        m3attn.quantize_fp8(memory[0], out=within.view(torch.float8_e4m3fn)[:64])


def test_a_check_runs_once_for_what_looks_the_same_and_again_after_it_refused() -> None:
    ran: list[Any] = []

    @once_per_look
    def check(value: Any, limit: int) -> int:
        ran.append(value)
        if limit < 0:
            raise ValueError("limit")
        return limit

    x, y = torch.zeros(2, 3), torch.ones(2, 3)
    assert [check(x, 1), check(y, 1), check(x, 1)] == [1, 1, 1] and len(ran) == 1
    for other in (x.T, x[:1], x.double(), torch.zeros(2, 3, device="meta"), None, [x], (x, 1), (x, 1.0), (x, True)):
        check(other, 1)
    assert len(ran) == 10
    for _ in range(2):
        with pytest.raises(ValueError, match="limit"):
            check(x, -1)
    assert len(ran) == 12
    check([x], 1)  # no key of a dictionary: never remembered
    assert len(ran) == 13


def test_a_switch_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    read = switches.reader("M3ATTN_TEST_SWITCH")
    assert read() is None
    os.environ["M3ATTN_TEST_SWITCH"] = "é"
    assert read() == "é"
    monkeypatch.setenv("M3ATTN_TEST_SWITCH", "1")
    assert read() == "1"
    os.environ.pop("M3ATTN_TEST_SWITCH")
    assert read() is None
    monkeypatch.setattr(os, "environ", {"M3ATTN_TEST_SWITCH": "2"})  # a mapping without CPython's store
    assert switches.reader("M3ATTN_TEST_SWITCH")() == "2"
