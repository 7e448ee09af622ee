"""M3ATTN_CHECK=1 names argument, first bad index and value; M3ATTN_LOG_CALLS=1 writes a line a call; both are silent when off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from stage_calls import BUILDERS, PAGES, TOKENS, make_batch

import m3attn
from m3attn.registry import STAGES


def table(row: int, column: int, value: int) -> m3attn.PagedBatch:
    batch = make_batch()
    batch.page_table[row, column] = value
    return batch


def vector(name: str, values: list[int]) -> m3attn.PagedBatch:
    return replace(make_batch(), **{name: torch.tensor(values, dtype=torch.int32)})


def ids_with(row: int, values: list[int]) -> torch.Tensor:
    ids = BUILDERS["sparse_attention"]().arguments["ids"].clone()
    ids[1, row] = torch.tensor(values)
    return ids


STEP = ("index_score", "index_topk", "sparse_attention", "dense_attention")
CASES: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    (STEP, {"batch": table(0, 2, PAGES)}, rf"batch.page_table: expected page ids from 0 to {PAGES - 1}, got {PAGES} at index \(0, 2\)"),
    (STEP, {"batch": table(1, 0, -1)}, rf"batch.page_table: expected page ids from 0 to {PAGES - 1}, got -1 at index \(1, 0\)"),
    (
        (*STEP, "select_blocks"),
        {"batch": vector("seq_lens", [40, 17, 41])},
        r"batch.seq_lens: expected lengths from 0 to max_seqlen_k 40, got 41 at index 2",
    ),
    ((*STEP, "select_blocks"), {"batch": vector("seq_lens", [40, -1, 2])}, r"batch.seq_lens: expected lengths from 0 to .*got -1 at index 1"),
    (STEP, {"batch": vector("cu_seqlens_q", [1, 5, 6, 8])}, r"batch.cu_seqlens_q: expected offsets that start at 0, got 1 at index 0"),
    (STEP, {"batch": vector("cu_seqlens_q", [0, 5, 4, 8])}, r"batch.cu_seqlens_q \(differences\): expected 0 to max_seqlen_q 5, got -1 at index 1"),
    (STEP, {"batch": vector("cu_seqlens_q", [0, 6, 7, 8])}, r"batch.cu_seqlens_q \(differences\): expected 0 to max_seqlen_q 5, got 6 at index 0"),
    (
        STEP,
        {"batch": vector("cu_seqlens_q", [0, 5, 6, 9])},
        rf"batch.cu_seqlens_q: expected offsets of at most {TOKENS} query rows, got 9 at index 3",
    ),
    (("sparse_attention",), {"ids": ids_with(3, [0, 3])}, r"ids: expected block ids from 0 to 2, or -1, got 3 at index \(1, 3, 1\)"),
    (("sparse_attention",), {"ids": ids_with(3, [-2, 1])}, r"ids: expected block ids from 0 to 2, or -1, got -2 at index \(1, 3, 0\)"),
    (("sparse_attention",), {"ids": ids_with(3, [1, 1])}, r"ids: expected each block once in a list, got 1 at index \(1, 3, 1\)"),
    (("qk_norm_rope_insert",), {"slots": torch.tensor([4, 9, 0, 7, 9, 5, 9, -1])}, r"slots: expected each slot once, got 9 at index 4"),
    (("qk_norm_rope_insert",), {"index_slots": torch.tensor([3, 3, 0, 1, 2, 5, 6, 7])}, r"index_slots: expected each slot once, got 3 at index 1"),
]
ROWS = [(stage, changes, message) for stages, changes, message in CASES for stage in stages]


@pytest.mark.parametrize("stage, changes, message", ROWS, ids=[f"{s}-{m.split(':')[0]}-{i}" for i, (s, _, m) in enumerate(ROWS)])
def test_bad_device_values_are_named(stage: str, changes: dict, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M3ATTN_CHECK", "1")
    with pytest.raises(ValueError, match=message + r" \(M3ATTN_CHECK=1\)"):
        BUILDERS[stage]()(**changes)


@pytest.mark.parametrize("stage, changes, message", ROWS, ids=[f"{s}-{m.split(':')[0]}-{i}" for i, (s, _, m) in enumerate(ROWS)])
def test_off_they_are_not_looked_at_and_harmless(stage: str, changes: dict, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("M3ATTN_CHECK", raising=False)
    BUILDERS[stage]()(**changes)


@pytest.mark.parametrize("stage", STAGES)
def test_good_values_pass(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M3ATTN_CHECK", "1")
    call = BUILDERS[stage]()
    call()
    if stage == "qk_norm_rope_insert":
        call(slots=torch.tensor([-1, -1, 2**40, 2**40, 0, 1, 2, 3]))  # slots that write nothing may repeat
    if stage == "sparse_attention":
        call(ids=ids_with(3, [-1, 2]))  # the order is the implementation's to declare


def test_pages_past_a_request_and_padded_rows_may_hold_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M3ATTN_CHECK", "1")
    batch = make_batch((5, 0, 2), (40, 0, 2))
    batch.page_table[0, 3:], batch.page_table[1], batch.page_table[2, 1:] = 2**30, -5, -1
    BUILDERS["dense_attention"]()(batch=batch)


@pytest.mark.parametrize("stage", STAGES)
def test_a_call_is_logged_in_one_line(stage: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    call = BUILDERS[stage]()
    call()
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("M3ATTN_LOG_CALLS", "1")
    call()
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"m3attn: {stage} reference ")


def test_the_line_gives_shapes_dtypes_strides_bounds_and_scales(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("M3ATTN_LOG_CALLS", "1")
    call = BUILDERS["sparse_attention"]()
    cache = call.arguments["cache"]
    e4m3 = torch.float8_e4m3fn
    cache = replace(cache, k=cache.k.float().to(e4m3), v=cache.v.float().to(e4m3), k_scale=0.5, v_scale=torch.ones(1))
    call(cache=cache)
    line = capfd.readouterr().err
    for part in (
        "q=bfloat16[8, 4, 64]/[256, 64, 1]",
        "k=float8_e4m3fn[8, 2, 16, 64]/[2048, 1024, 64, 1]",
        "ids=int32[2, 8, 2]/[16, 2, 1]",
        "batch=B3 max_seqlen_q=5 max_seqlen_k=40 page_size=16 block_size=16",
        "k_scale=0.5",
        "v_scale=device",
        "sm_scale=0.125",
    ):
        assert part in line
    assert "q_scale" not in line


def test_a_refused_call_is_not_logged(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    call = BUILDERS["sparse_attention"]()
    monkeypatch.setenv("M3ATTN_LOG_CALLS", "1")
    with pytest.raises(TypeError):
        call(q=None)
    assert capfd.readouterr().err == ""
