"""Scratch memory: its size is known beforehand, bounded, and a caller's own buffer is used or refused with both sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from stage_calls import BUILDERS, HEAD_DIM, KV_HEADS, Q_HEADS, TOKENS, TOPK, make_batch, registered

import m3attn
from m3attn.builtin import PRIORITIES, Rank
from m3attn.registry import Capabilities
from m3attn.workspace import DEFAULT_LIMIT, WorkShape, carve

STAGES = ("index_topk", "sparse_attention", "dense_attention")


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    yield
    m3attn.set_workspace_limit(DEFAULT_LIMIT)


def geometry(**changes: int) -> dict[str, Any]:
    base = dict(tokens=8192, max_seqlen_q=8192, max_seqlen_k=131_072, num_requests=1, num_q_heads=64, num_kv_heads=4, num_index_heads=4)
    return base | changes


def needing(nbytes: int, seen: list[torch.Tensor]):
    """An implementation that asks for `nbytes` and keeps what it got."""

    def run(call: Any) -> None:
        seen.append(call.workspace)

    return run, (lambda shape: nbytes)


@pytest.mark.parametrize("stage", STAGES)
def test_a_buffer_of_the_right_size_is_used_as_it_is(stage: str) -> None:
    seen: list[torch.Tensor] = []
    run, size = needing(1000, seen)
    with registered(stage, "hungry", run, workspace=size):
        mine = torch.zeros(250, dtype=torch.float32)
        BUILDERS[stage]()(workspace=mine, impl="hungry")
        assert seen[-1].data_ptr() == mine.data_ptr() and seen[-1].dtype == torch.uint8 and seen[-1].shape == (1000,)
        BUILDERS[stage]()(impl="hungry")
        assert seen[-1].shape == (1000,) and seen[-1].dtype == torch.uint8


@pytest.mark.parametrize("stage", STAGES)
def test_a_workspace_that_does_not_fit_is_refused(stage: str) -> None:
    run, size = needing(1000, [])
    call = BUILDERS[stage]()
    output = call.arguments["out"]
    before = output.clone()
    with registered(stage, "hungry", run, workspace=size):
        for workspace, error, message in (
            (torch.zeros(999, dtype=torch.uint8), ValueError, rf"workspace: expected at least 1000 bytes for {stage} \(hungry\), got 999"),
            (torch.zeros(249), ValueError, r"expected at least 1000 bytes .*got 996; m3attn.workspace_bytes\(...\) gives the size"),
            (torch.zeros(1000, device="meta"), ValueError, r"workspace: expected a tensor on cpu, got one on meta"),
            (torch.zeros(2000)[::2], ValueError, r"workspace: expected a contiguous tensor"),
            (torch.zeros(2000, dtype=torch.uint8)[1:], ValueError, r"workspace: expected a contiguous tensor that starts at a multiple of 16 bytes"),
            ([0] * 1000, TypeError, r"workspace: expected a tensor, got list"),
        ):
            with pytest.raises(error, match=message):
                call(workspace=workspace, impl="hungry")
    assert torch.equal(output, before)


@pytest.mark.parametrize("stage", STAGES)
def test_a_workspace_that_is_an_input_or_output_is_refused(stage: str) -> None:
    run, size = needing(16, [])
    call = BUILDERS[stage]()
    with registered(stage, "hungry", run, workspace=size):
        for name in ("out", "q" if "attention" in stage else "index_q"):
            with pytest.raises(ValueError, match=rf"workspace: expected a buffer of its own, got one that overlaps {name}"):
                call(workspace=call.arguments[name], impl="hungry")


@pytest.mark.parametrize("stage", STAGES)
def test_a_workspace_that_is_not_needed_is_ignored(stage: str) -> None:
    BUILDERS[stage]()(workspace=torch.zeros(1), impl="reference")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("changes", [{}, {"max_seqlen_q": 1, "tokens": 64, "num_requests": 64}, {"max_seqlen_k": 1_048_576}, {"tokens": 0}])
def test_the_size_is_a_function_of_static_shapes_within_the_limit(stage: str, changes: dict) -> None:
    for limit in (1 << 20, 1 << 26, DEFAULT_LIMIT):
        m3attn.set_workspace_limit(limit)
        size = m3attn.workspace_bytes(stage, impl="triton", **geometry(**changes))
        assert 0 <= size <= limit
        assert m3attn.workspace_bytes(stage, impl="triton", **geometry(**changes)) == size
        assert m3attn.workspace_bytes(stage, impl="reference", **geometry(**changes)) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="CPU tensors, which kernels take in the interpreter only")
@pytest.mark.parametrize("stage", STAGES)
def test_what_workspace_bytes_says_is_enough_for_the_kernels(stage: str) -> None:
    call = BUILDERS[stage]()
    heads = dict(num_q_heads=Q_HEADS, num_kv_heads=KV_HEADS) if "attention" in stage else dict(num_index_heads=KV_HEADS)
    step = make_batch((1,) * TOKENS, (40, 17, 2, 100, 5, 90, 33, 16), max_seqlen_k=512)
    call.arguments["batch"] = step
    call.arguments |= {"out": None} | ({"topk": 2 * TOPK} if stage == "index_topk" else {})
    if stage == "sparse_attention":
        call.arguments["ids"] = torch.nn.functional.pad(call.arguments["ids"], (0, 2), value=-1)
    shape = dict(tokens=TOKENS, max_seqlen_q=1, max_seqlen_k=step.max_seqlen_k, num_requests=TOKENS, head_dim=HEAD_DIM, topk=2 * TOPK, block_size=16)
    size = m3attn.workspace_bytes(stage, impl="triton", **shape, **heads)
    assert size > 0
    call(workspace=torch.full((size,), 0xFF, dtype=torch.uint8), impl="triton")
    with pytest.raises(ValueError, match=rf"expected at least {size} bytes for {stage} \(triton\), got {size - 1}"):
        call(workspace=torch.zeros(size - 1, dtype=torch.uint8), impl="triton")


def test_without_a_key_it_is_the_most_of_what_auto_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    def declines(shape: WorkShape) -> int:
        raise m3attn.UnsupportedProblem("workspace: expected more")

    monkeypatch.setenv("M3ATTN_ARCH", "sm_90")
    monkeypatch.delenv("M3ATTN_DISABLE_CUTE", raising=False)

    def size() -> int:
        return m3attn.workspace_bytes("index_topk", **geometry())

    own, most = size(), 1 << 28
    assert 0 < own < most
    elsewhere, without = Capabilities(archs=("sm_100",)), Capabilities(needs=("no_such_package",))
    with (
        registered("index_topk", "elsewhere", print, workspace=lambda shape: 2 * most, capabilities=elsewhere, auto=True),
        registered("index_topk", "without", print, workspace=lambda shape: 2 * most, capabilities=without, auto=True),
        registered("index_topk", "broken", print, workspace="no_such_module:workspace_bytes", auto=True),
        registered("index_topk", "declines", print, workspace=declines, auto=True),
    ):
        assert size() == own
    with registered("index_topk", "cute_mine", print, workspace=lambda shape: most, auto=True):
        assert size() == most
        monkeypatch.setenv("M3ATTN_DISABLE_CUTE", "1")
        assert size() == own


@pytest.mark.parametrize("hungry", ["bf16", "fp8_e4m3"])
def test_without_a_cache_dtype_it_is_the_most_of_any(hungry: str) -> None:
    with registered("sparse_attention", "mine", print, workspace=lambda shape: 1000 if shape.kv_dtype == hungry else 10):
        assert m3attn.workspace_bytes("sparse_attention", impl="mine", **geometry()) == 1000
        assert m3attn.workspace_bytes("sparse_attention", impl="mine", kv_dtype=hungry, **geometry()) == 1000
        assert m3attn.workspace_bytes("sparse_attention", impl="mine", kv_dtype="fp16", **geometry()) == 10


def test_a_phase_of_its_own_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M3ATTN_ARCH", "sm_90")
    with registered("index_topk", "decodes", print, workspace=lambda shape: 1 << 28):
        monkeypatch.setitem(PRIORITIES, "index_topk", (Rank("decodes", ("decode",)), *PRIORITIES["index_topk"]))
        assert m3attn.workspace_bytes("index_topk", **geometry()) == 1 << 28


def test_unknown_stages_and_keys_are_named() -> None:
    with pytest.raises(ValueError, match=r"stage: expected one of .*got 'nope'"):
        m3attn.workspace_bytes("nope", **geometry())
    with pytest.raises(ValueError, match=r"impl: expected one of reference, triton.* for index_topk, got 'tritom'"):
        m3attn.workspace_bytes("index_topk", impl="tritom", **geometry())


def test_the_limit_can_be_set_and_reaches_implementations() -> None:
    assert m3attn.workspace_limit() == 1 << 30
    shapes: list[WorkShape] = []
    with registered("index_topk", "watch", lambda call: None, workspace=lambda shape: shapes.append(shape) or 0):
        m3attn.set_workspace_limit(1 << 20)
        BUILDERS["index_topk"]()(impl="watch")
    assert m3attn.workspace_limit() == 1 << 20
    (shape,) = shapes
    assert (shape.limit, shape.tokens, shape.num_requests, shape.num_index_heads) == (1 << 20, TOKENS, 3, KV_HEADS)
    assert (shape.head_dim, shape.topk, shape.max_seqlen_q, shape.max_seqlen_k, shape.num_blocks) == (HEAD_DIM, TOPK, 5, 40, 3)


@pytest.mark.parametrize("nbytes", [0, -1, (1 << 20) - 1, 1.5e9, "1G", True])
def test_a_limit_that_is_none_is_refused(nbytes: object) -> None:
    with pytest.raises(ValueError, match=r"nbytes: expected an int of at least 1048576 \(1 MiB\)"):
        m3attn.set_workspace_limit(nbytes)  # type: ignore[arg-type]
    assert m3attn.workspace_limit() == DEFAULT_LIMIT


def test_carving_gives_aligned_tensors_that_do_not_overlap() -> None:
    buffer = torch.zeros(4096, dtype=torch.uint8)
    first, offset = carve(buffer, 0, (3, 5), torch.float32)
    second, end = carve(buffer, offset, (7,), torch.int32)
    assert (offset, end) == (256, 512) and first.shape == (3, 5) and second.dtype == torch.int32
    first.fill_(1)
    second.fill_(-1)
    assert first.eq(1).all() and second.data_ptr() == buffer.data_ptr() + 256
