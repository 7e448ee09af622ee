"""Every CuTe kernel with so few thread blocks that each takes many tiles, of which long runs have no keys, no queries or nothing selected.

What a thread block carries from one tile to the next, rings and the phases of their barriers above all, may go wrong only after more tiles in a row
than there are places. Drawn from seeds, in the interpreter, where a deadlock, a missing fence or an access outside of tensors is an error.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from unittest import mock

import pytest
import torch
from needed import need

need("nvidia-cutlass-dsl", "apache-tvm-ffi")

from attention_calls import call_of
from prefills import SM90, SM100, Prefill
from scorers import SM90 as SCORE90
from scorers import SM100 as SCORE100
from scorers import Scorer, call_for
from scorers import check as check_scores
from simulator import ORDERS, simulated
from sparse_mla_results import check_orders

import m3attn
from m3attn.calls import IndexTopkCall, SparseAttentionCall
from m3attn.dsl_kernels import (
    index_topk_sm90,
    index_topk_sm100,
    sparse_attention_sm90,
    sparse_mla_sm90,
    sparse_prefill_by_block_sm90,
    sparse_prefill_sm90,
)
from m3attn.dsl_kernels.decode_schedule import settings_override
from m3attn.dtypes import E4M3
from m3attn.index_slices import workspace_bytes as index_workspace_bytes
from m3attn.reference.index import select_blocks
from m3attn.scales import UNIT
from m3attn.testing.cases import AttentionCase, IndexCase, Step
from m3attn.testing.inputs import AttentionInputs, attention_inputs, index_inputs
from m3attn.testing.mla import SparseMlaCase, sparse_mla_inputs
from m3attn.testing.poison import poisoned_empty
from m3attn.workspace import WorkShape

LENGTHS = (1, 5, 127, 128, 129, 255, 257, 640, 1_409)
MAX_ROWS = 150
GARBAGE = (2**30, -(2**31), 2**31 - 1, -7)


def draw_requests(draw: random.Random, longest_q: int) -> tuple[list[int], list[int]]:
    """(query lengths, lengths) of runs of requests: with keys, without keys, without queries, with queries before the first position."""
    q_lens: list[int] = []
    lens: list[int] = []
    runs = draw.randint(1, 5)
    with_keys = draw.sample(range(runs), min(runs, draw.choice((1, 1, 2))))
    for number in range(runs):
        kind = draw.choice(("no_keys", "no_keys", "no_queries", "negative", "nothing"))
        if number in with_keys:
            length = draw.choice(LENGTHS)
            run = [(min(draw.randint(1, longest_q), length, 4 if length > 300 else 12), length)]
        elif kind == "no_keys":
            run = [(draw.randint(1, longest_q), 0) for _ in range(draw.randint(1, 12))]
        elif kind == "negative":
            run = [(draw.randint(6, max(6, longest_q)), draw.randint(1, 5)) for _ in range(draw.randint(1, 2))]
        elif kind == "nothing":
            run = [(0, 0)] * draw.randint(1, 40)
        else:
            run = [(0, draw.choice(LENGTHS[:6])) for _ in range(draw.randint(1, 12))]
        for q_len, length in run:
            if sum(q_lens) + q_len <= MAX_ROWS:
                q_lens.append(min(q_len, longest_q))
                lens.append(length)
    return q_lens, lens


def draw_step(draw: random.Random, *, longest_q: int, slack_q: int) -> Step:
    q_lens, lens = draw_requests(draw, longest_q)
    padded = draw.choice((0, 0, 3, 60))
    if not sum(q_lens) + padded:
        padded = 7
    return Step("drawn", tuple(q_lens), tuple(lens), padded_rows=padded, slack_q=slack_q, slack=draw.choice((0, 130, 1_000)))


def draw_ids(draw: random.Random, inputs: AttentionInputs) -> None:
    """Writes other ids over all or some of them, or over none."""
    ids = inputs.ids
    assert ids is not None
    rows, topk = ids.shape[1:]
    row = torch.arange(rows)
    kind = draw.choice(("kept", "kept", "none", "one_block", "halves", "halves", "rows_without", "ends_without", "garbage", "own_block"))
    period = draw.choice((1, 2, 4, 8))
    if kind == "none":
        ids.fill_(-1)
    elif kind == "one_block":
        ids.fill_(-1)
        ids[..., 0] = draw.choice((0, 1))
    elif kind == "halves":  # neighbouring halves of a tile have no block in common; one has more of them
        both = torch.full((2, topk), -1, dtype=torch.int32)
        both[0, :1] = draw.choice((0, 3))
        others = torch.tensor([block for block in range(1, 20) if block != 3][:topk], dtype=torch.int32)
        both[1, : len(others)] = others
        ids.copy_(both[row // period % 2].expand_as(ids))
    elif kind == "rows_without":
        ids[:, torch.tensor([draw.random() < 0.6 for _ in range(rows)])] = -1
    elif kind == "ends_without":
        ids[:, : draw.randint(0, rows)] = -1
        ids[:, draw.randint(0, rows) :] = -1
    elif kind == "garbage":
        places = torch.tensor([draw.random() < 0.5 for _ in range(ids.numel())]).view(ids.shape)
        ids[places] = torch.tensor([draw.choice(GARBAGE) for _ in range(int(places.sum()))], dtype=torch.int32)
    elif kind == "own_block":
        ids[..., :-1] = -1


def draw_orders(draw: random.Random) -> list[tuple[str, int]]:
    return [(order, draw.randint(0, 99)) for order in ORDERS]


@contextmanager
def few_blocks(number: int, *modules: ModuleType) -> Iterator[None]:
    with mock.patch.object(modules[0], "num_sms", lambda device: number), mock.patch.object(modules[-1], "num_sms", lambda device: number):
        yield


def attend(prefill: Prefill, call: SparseAttentionCall, order: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = sparse_attention_sm90.work_shape(call)
    garbage = 0xFF if seed % 2 else 0x01  # as numbers NaN, or what looks valid
    workspace = torch.full((prefill.stage.workspace_bytes(shape),), garbage, dtype=torch.uint8)
    assert call.lse is not None
    call = replace(call, out=call.out.clone(), lse=call.lse.clone(), workspace=workspace)
    with simulated(order, arch=f"{prefill.arch}a", seed=seed), poisoned_empty():
        prefill.stage.sparse_attention(call)
    assert call.lse is not None
    return call.out, call.lse


def check_attention(prefill: Prefill, inputs: AttentionInputs, orders: list[tuple[str, int]], sm_scale: float | None = None) -> None:
    """Within the bound, and the same bits in every order."""
    bound = prefill.bound(inputs, sm_scale)
    results = [attend(prefill, call_of(inputs, sm_scale=sm_scale), *order) for order in orders]
    bound.check(*results[0])
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


def run_prefill(seed: int, prefill: Prefill, orders: list[tuple[str, int]] | None = None) -> None:
    draw = random.Random(seed)
    group = draw.choice((8, 16))
    kv_heads = draw.choice((1, 1, 1, 2))
    topk = draw.choice((1, 4, 16, 64))
    step = draw_step(draw, longest_q=draw.choice((3, 20, 40)), slack_q=17)
    case = AttentionCase(step, group * kv_heads, kv_heads, topk=topk, mode=draw.choice(("bf16", "bf16", "fp8", "widen_e4m3")))
    inputs = attention_inputs(case, "cpu", seed=seed)
    draw_ids(draw, inputs)
    with few_blocks(draw.choice((1, 1, 2, 3)), sparse_prefill_sm90):
        check_attention(prefill, inputs, orders or draw_orders(draw), draw.choice((None, None, None, -0.2)))


def run_by_block(seed: int, orders: list[tuple[str, int]] | None = None) -> None:
    """Tiles that are deferred, all or some, in slices."""
    draw = random.Random(seed)
    group = draw.choice((8, 16))
    kv_heads = draw.choice((1, 1, 2))
    step = draw_step(draw, longest_q=draw.choice((3, 20, 40)), slack_q=17)
    case = AttentionCase(step, group * kv_heads, kv_heads, topk=draw.choice((1, 4, 16)), mode=draw.choice(("bf16", "bf16", "fp8")))
    inputs = attention_inputs(case, "cpu", seed=seed)
    draw_ids(draw, inputs)
    share = draw.choice((0.0, 0.0, 0.2, 0.55))
    limit = draw.choice((1 << 30, 2_000_000)) if case.mode == "bf16" else 1 << 30
    with (
        few_blocks(draw.choice((1, 1, 2, 3)), sparse_prefill_sm90, sparse_prefill_by_block_sm90),
        mock.patch.object(sparse_prefill_sm90, "DEFERRED_SHARE", share),
        mock.patch.object(sparse_prefill_by_block_sm90, "MIN_ROWS", 1),
        mock.patch.object(sparse_attention_sm90, "workspace_limit", lambda: limit),
    ):
        check_attention(SM90, inputs, orders or draw_orders(draw), draw.choice((None, -0.2)))


def run_decode(seed: int, orders: list[tuple[str, int]] | None = None) -> None:
    draw = random.Random(seed)
    group = draw.choice((8, 16))
    kv_heads = draw.choice((1, 1, 2))
    longest_q = draw.choice((1, 1, 4, 8))
    step = draw_step(draw, longest_q=longest_q, slack_q=0)
    step = replace(step, slack_q=draw.choice((longest_q, 16)) - step.max_seqlen_q)
    topk = draw.choice((1, 4, 16, 64))
    case = AttentionCase(step, group * kv_heads, kv_heads, topk=topk, mode=draw.choice(("bf16", "bf16", "fp8", "widen_e4m3")))
    inputs = attention_inputs(case, "cpu", seed=seed)
    draw_ids(draw, inputs)
    splits = draw.choice((1, 1, 2, 3, 16))
    with mock.patch.dict(settings_override, splits=splits):
        check_attention(SM90, inputs, orders or draw_orders(draw), draw.choice((None, -0.2)))


def run_index(seed: int, scorer: Scorer, orders: list[tuple[str, int]] | None = None) -> None:
    """Scores within the bound; ids of the whole stage, in slices, are those of the scores."""
    draw = random.Random(seed)
    longest_q = draw.choice((1, 3, 20, 40))
    step = draw_step(draw, longest_q=longest_q, slack_q=draw.choice((0, 17)))
    floats = (torch.bfloat16, E4M3)
    page_size = draw.choice((128, 128, 32))
    case = IndexCase(
        replace(step, page_size=page_size),
        num_heads=draw.choice((1, 4)),
        q_dtype=draw.choice(floats),
        k_dtype=draw.choice(floats),
        topk=draw.choice((1, 4, 16)),
        local_blocks=draw.choice((0, 1)),
        init_blocks=draw.choice((0, 1)),
    )
    inputs = index_inputs(case, "cpu", seed=seed)
    batch, (tokens, heads, _) = inputs.batch, inputs.index_q.shape
    ctas, chunk = draw.choice((1, 1, 2, 3)), draw.choice((1, 2, 64))
    rows = draw.choice((tokens, max(1, tokens // 3)))
    stage = index_topk_sm90 if scorer is SCORE90 else index_topk_sm100
    orders = orders or draw_orders(draw)
    with mock.patch.object(scorer.module, "num_ctas", lambda device: ctas), mock.patch.object(scorer.module, "CHUNK_BLOCKS", chunk):
        scores = [scorer.score(call_for(inputs), order, seed=seed) for order, seed in orders]
        check_scores(inputs, scores[0])
        assert all(torch.equal(other, scores[0]) for other in scores[1:])
        shape = WorkShape(rows, batch.num_requests, heads, heads, heads, 128, case.topk, batch.max_seqlen_q, batch.max_seqlen_k, 128, 1 << 30)
        workspace = torch.full((index_workspace_bytes(shape),), 0xFF, dtype=torch.uint8)
        expected = select_blocks(scores[0], batch, **inputs.selection)
        for order, order_seed in orders:
            out = torch.full((heads, tokens, case.topk), 2**30, dtype=torch.int32)
            call = IndexTopkCall(
                index_q=inputs.index_q,
                index_k=inputs.cache.index_key(),
                batch=batch,
                **inputs.selection,
                index_q_scale=UNIT,
                index_k_scale=UNIT,
                out=out,
                workspace=workspace.clone() if workspace.numel() else None,
            )
            with simulated(order, arch=scorer.arch, seed=order_seed), poisoned_empty():
                stage.index_topk(call)
            assert torch.equal(out, expected)


def run_mla(seed: int, orders: list[tuple[str, int]] | None = None) -> None:
    draw = random.Random(seed)
    mode = draw.choice(("bf16", "fp8_pv"))
    queries, topk = draw.randint(1, 24), draw.choice((1, 64, 140, 330))
    case = SparseMlaCase(queries, draw.choice((2, 8, 72)), topk, 400, mode=mode, length=True, sink=draw.random() < 0.3)
    inputs = sparse_mla_inputs(case, "cpu", seed=seed)
    lengths = [draw.choice((0, 0, 0, 1, 63, 64, 65, 128, topk)) for _ in range(queries)]
    if draw.random() < 0.5:
        begin, end = sorted(draw.randint(0, queries) for _ in range(2))
        lengths[begin:end] = [0] * (end - begin)
    inputs.options["topk_length"].copy_(torch.tensor(lengths))
    for query in range(queries):
        if draw.random() < 0.3:  # a tile, or more, without a valid token
            first = draw.randrange(0, topk, 64)
            inputs.indices[query, 0, first : first + draw.choice((64, 128, 1_000))] = -1
    results = []
    with few_blocks(draw.choice((1, 1, 2, 3)), sparse_mla_sm90), mock.patch.object(sparse_mla_sm90, "MAX_PIECES", draw.choice((1, 1, 24))):
        for order, order_seed in orders or draw_orders(draw):
            with simulated(order, seed=order_seed), poisoned_empty():
                results.append(m3attn.sparse_mla_prefill(inputs.q, inputs.kv, inputs.indices, impl="cute_sm90", **inputs.options))
    check_orders(inputs, mode, results, **inputs.options)


def drawn(*quick: int) -> pytest.MarkDecorator:
    """A dozen seeds, of which `make test` takes `quick`."""
    return pytest.mark.parametrize("seed", [pytest.param(seed, marks=[] if seed in quick else [pytest.mark.slow]) for seed in range(12)])


BOTH = pytest.mark.parametrize("prefill", [SM90, SM100], ids=["sm90", "sm100"])


@BOTH
@pytest.mark.parametrize("q_lens", [(144, 3, 0), (0, 3, 144)], ids=["keys_first", "keys_last"])
def test_more_tiles_without_keys_than_entries(q_lens: tuple[int, ...], prefill: Prefill) -> None:
    """Behind and before one with keys: tiles go from the last to the first."""
    inputs = attention_inputs(AttentionCase(Step("ends", q_lens, (0, 300, 0)), 16, 1, topk=2), "cpu")
    with few_blocks(1, sparse_prefill_sm90):
        check_attention(prefill, inputs, [("eager", 0), ("random", 3)])


@drawn(2)
def test_prefill_sm90(seed: int) -> None:
    run_prefill(seed, SM90)


@drawn()
def test_prefill_sm100(seed: int) -> None:
    run_prefill(seed, SM100)


@drawn(4)
def test_prefill_by_block(seed: int) -> None:
    run_by_block(seed)


@drawn()
def test_decode(seed: int) -> None:
    run_decode(seed)


@drawn(0)
def test_index_sm90(seed: int) -> None:
    run_index(seed, SCORE90)


@drawn(0)
def test_index_sm100(seed: int) -> None:
    run_index(seed, SCORE100)


@drawn(1)
def test_mla(seed: int) -> None:
    run_mla(seed)
