"""Whole steps captured once and replayed: bit-equal to eager steps while lengths grow, pages move, and requests join and leave.

Without a GPU the same steps run with a plain second call in place of the replay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from stack import Stack, layer_keys, stack_or_skip

import m3attn
from m3attn import LayerCache, M3Config, PagedBatch, PlanCapacity, StepPlan
from m3attn.dtypes import torch_dtype
from m3attn.layers.sparse import M3SparseAttention
from m3attn.testing.inputs import NAN_BYTE
from m3attn.testing.matrix import DEVICE, MARKS, needs_zeroed, pick

SMALL = dataclasses.replace(oracle.CONFIG, topk=2, sparse_layers=(False, True, True))
CONFIG = pick(SMALL, M3Config(hidden_size=256, max_position=8192, sparse_layers=(False, True, True)))
PAGE = CONFIG.block_size
REQUESTS, PAGES, SPARE = 4, pick(4, 48), 3
STARTS = pick((PAGE - 2, 5, 2 * PAGE - 1, 2 * PAGE + 3), (2_100, 37, 5_000, 17 * PAGE - 3))
"""Tokens of each request when it joins; with one more a step, some cross a page border at once and all do in 500 steps."""
EVERY = pick(2, 40)
GARBAGE_ID = 2**31 - 1


class Captured:
    """A step captured in a CUDA graph; a call replays it on what its tensors hold by then."""

    def __init__(self, step: Callable[[], torch.Tensor]) -> None:
        self.run = step
        step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = step()
            self.run = self._replay

    def _replay(self) -> torch.Tensor:
        self.graph.replay()
        return self.out

    def __call__(self) -> torch.Tensor:
        return self.run()


def fill_with_nan(tensor: torch.Tensor) -> None:
    tensor.view(torch.uint8).fill_(NAN_BYTE)


class Side:
    """One model's caches and plan. Page p of request b is logical page b * PAGES + p, which lies at `place` of it."""

    def __init__(self, stack: Stack, capacities: dict[str, PlanCapacity], *, spare: int, finite: bool = False) -> None:
        self.stack, self.num_pages = stack, REQUESTS * PAGES + spare
        self.storages, self.caches = [], []
        for layer in stack.layers:
            shapes = {"kv": ((layer.heads.kv, PAGE, 256), layer.mode.kv_dtype)}
            if layer.sparse:
                shapes["index_k"] = ((PAGE, 128), layer.mode.index_dtype)
            parts = {name: torch.zeros(self.num_pages, *shape, device=DEVICE).to(torch_dtype(dtype)) for name, (shape, dtype) in shapes.items()}
            self.storages += parts.values()
            scales = {"k_scale": torch.full((1,), 0.25, device=DEVICE), "v_scale": 0.5} if layer.mode.kv_dtype.startswith("fp8") else {}
            self.caches.append(LayerCache(**parts, **scales, zero_on_alloc=finite))
        self.place = torch.arange(self.num_pages)
        self.plan = StepPlan.for_layers(list(stack.layers), self.caches, PAGES * PAGE, **capacities)
        self.x = torch.zeros(self.plan.tokens, CONFIG.hidden_size, dtype=stack.layers[0].qkv_proj.dtype, device=DEVICE)

    def update(self, q_lens: list[int], seq_lens: list[int], requests: list[int]) -> None:
        self.plan.update(q_lens, seq_lens, self.table(requests))

    def table(self, requests: list[int]) -> torch.Tensor:
        return self.place[: REQUESTS * PAGES].view(REQUESTS, PAGES)[requests]

    def shuffle(self, generator: torch.Generator) -> None:
        """Move every page, those that nobody has included."""
        order = torch.randperm(self.num_pages, generator=generator)
        for storage in self.storages:
            data = storage.view(torch.uint8)
            data.copy_(data[order.to(DEVICE)])
        self.place = order.argsort()[self.place]

    def step(self) -> torch.Tensor:
        return self.stack(self.x, self.plan, self.caches)


def fill(mine: Side, twin: Side, generator: torch.Generator) -> None:
    """The same random keys and values in both. Only in `mine`, NaN stands behind each request's first tokens and in pages that nobody has."""
    for a, b in zip(mine.storages, twin.storages, strict=True):
        b.copy_(torch.randn(b.shape, generator=generator).to(DEVICE))
        a[: twin.num_pages].copy_(b)
        fill_with_nan(a[twin.num_pages :])
        for request, start in enumerate(STARTS):
            pages = a[request * PAGES : (request + 1) * PAGES]
            if not mine.caches[0].zero_on_alloc:
                fill_with_nan(pages[-(-start // PAGE) :])
                fill_with_nan(pages[start // PAGE, ..., start % PAGE :, :])


def pair(stack: Stack, capacities: dict[str, PlanCapacity], generator: torch.Generator, *, finite: bool = False) -> tuple[Side, Side]:
    mine, twin = Side(stack, capacities, spare=SPARE, finite=finite), Side(stack, capacities, spare=0, finite=finite)
    fill(mine, twin, generator)

    def poison(_: Any, arguments: tuple[Any, ...]) -> None:
        if arguments[1] is mine.plan:
            mine.plan.ids.fill_(GARBAGE_ID)
            if mine.plan.workspace is not None:
                mine.plan.workspace.fill_(NAN_BYTE)

    for layer in stack.layers:
        layer.register_forward_pre_hook(poison)
    return mine, twin


def compare(mine: Side, replay: Captured, twin: Side, tokens: int, generator: torch.Generator, what: str) -> None:
    """One step of both on fresh activations: equal outputs, zeros in the padding."""
    for side in (mine, twin):
        side.x.fill_(float("nan"))
    twin.x[:tokens].copy_(torch.randn(tokens, CONFIG.hidden_size, generator=generator))
    mine.x.copy_(twin.x)
    mine.plan.ids.fill_(GARBAGE_ID)
    got, expected = replay(), twin.step()
    assert torch.equal(got[:tokens], expected[:tokens]), what
    assert expected[:tokens].isfinite().all(), what


def compare_caches(mine: Side, twin: Side, lengths: list[int]) -> None:
    """Every token that either side holds, byte for byte."""
    for a, b in zip(mine.storages, twin.storages, strict=True):
        for request, length in enumerate(lengths):
            rows = []
            for side, storage in ((mine, a), (twin, b)):
                pages = storage.view(torch.uint8)[side.table([request])[0].to(DEVICE)]
                rows.append(pages.movedim(-2, 1).flatten(0, 1)[:length])
            assert torch.equal(*rows), f"cache of request {request}"


DTYPE = pick(torch.float32, torch.bfloat16)
VARIANTS = [pytest.param(1, {}, pick(4, 500), id="decode")]
if DEVICE == "cuda":
    VARIANTS += [pytest.param(4, {}, 80, id="drafts"), pytest.param(1, {"kv_cache_dtype": "fp8", "q_scale": 0.5}, 80, id="fp8")]


@pytest.mark.parametrize(("drafts", "formats", "steps"), VARIANTS)
@pytest.mark.parametrize("key", layer_keys())
@torch.no_grad()
def test_decode_steps(key: str, drafts: int, formats: dict[str, Any], steps: int) -> None:
    """The step that is captured also recomputes positions and slots, so that half of the steps change lengths and pages on the device alone."""
    generator = torch.Generator().manual_seed(0)
    finite = needs_zeroed("dense_attention", key)
    stack = stack_or_skip(CONFIG, key, page_size=PAGE, dtype=DTYPE, zero_on_alloc=finite, **formats)
    capacity = {"decode": PlanCapacity(REQUESTS, REQUESTS * drafts, drafts)}
    mine, twin = pair(stack, capacity, generator, finite=finite)

    def step() -> torch.Tensor:
        mine.plan.refresh()
        return mine.step()

    lengths, running = list(STARTS), []
    mine.update([], [], [])
    replay = Captured(step)
    for number in range(steps):
        before = running
        running = [b for b in range(REQUESTS) if (number // EVERY + b) % (REQUESTS + 1) and number != EVERY]
        running = running[number // EVERY % REQUESTS :] + running[: number // EVERY % REQUESTS]
        for b in running:
            lengths[b] = lengths[b] + drafts if b in before or b % 2 else STARTS[b] + drafts
        q_lens, seq_lens = [drafts] * len(running), [lengths[b] for b in running]
        if number % 5 == 0:
            mine.shuffle(generator)
        if running == before:
            batch, table = mine.plan.parts[0].batch, mine.table(running)
            batch.seq_lens[: len(running)] += drafts
            batch.page_table[: len(running)].copy_(table)
        else:
            mine.update(q_lens, seq_lens, running)
        twin.update(q_lens, seq_lens, running)
        compare(mine, replay, twin, sum(q_lens), generator, f"step {number}")
    compare_caches(mine, twin, lengths)


@pytest.mark.parametrize("steps", [pytest.param(pick(1, 60), marks=MARKS)])
@torch.no_grad()
def test_mixed_steps(steps: int) -> None:
    """Decode rows and chunks of prompts in one captured step, each part with the implementation that auto gives its phase."""
    generator = torch.Generator().manual_seed(1)
    key = pick("triton", None)
    stack = Stack(CONFIG, implementation=key, page_size=PAGE, dtype=DTYPE)
    chunk = pick(17, 96)
    capacities = {"decode": PlanCapacity(REQUESTS, REQUESTS, 1), "prefill": PlanCapacity(2, chunk + pick(1, 7), chunk)}
    mine, twin = pair(stack, capacities, generator)
    lengths = list(STARTS)
    mine.update([], [], [])
    replay = Captured(mine.step)
    for number in range(steps):
        requests = torch.randperm(REQUESTS, generator=generator)[: 2 + number % 3].tolist()
        q_lens = [1] * len(requests)
        q_lens[number % len(requests)] = int(torch.randint(2, chunk + 1, (), generator=generator))
        for b, n in zip(requests, q_lens, strict=True):
            lengths[b] = lengths[b] + n if lengths[b] + n <= PAGES * PAGE else STARTS[b] + n
        for side in (mine, twin):
            side.update(q_lens, [lengths[b] for b in requests], requests)
        compare(mine, replay, twin, sum(q_lens), generator, f"step {number}")
    compare_caches(mine, twin, lengths)


@pytest.mark.parametrize("captured", [("index", "attention"), *pick([], [("index",), ("attention",)])], ids="-".join)
@pytest.mark.parametrize("key", layer_keys())
@torch.no_grad()
def test_indexer_and_attention_share_only_the_ids(key: str, captured: tuple[str, ...]) -> None:
    """Two layers' stages as graphs of their own, or some of them eager; between them everything but the ids is poisoned, before them the ids too."""
    generator = torch.Generator().manual_seed(2)
    stack = stack_or_skip(dataclasses.replace(CONFIG, sparse_layers=(True, True)), key, page_size=PAGE, dtype=DTYPE)
    mine, twin = pair(stack, {"decode": PlanCapacity(REQUESTS, REQUESTS, 1)}, generator)
    batch, plan = mine.plan.parts[0].batch, mine.plan
    q = [torch.zeros(REQUESTS, CONFIG.num_q_heads, 128, dtype=DTYPE, device=DEVICE) for _ in stack.layers]
    index_q = [torch.zeros(REQUESTS, CONFIG.num_index_heads, 128, dtype=DTYPE, device=DEVICE) for _ in stack.layers]

    def select(layer: M3SparseAttention, cache: LayerCache, rows: torch.Tensor, step: PagedBatch, **buffers: Any) -> torch.Tensor:
        return m3attn.index_topk(rows, cache, step, topk=CONFIG.topk, impl=layer.mode.implementations["index_topk/decode"], **buffers)

    def attend(layer: M3SparseAttention, cache: LayerCache, rows: torch.Tensor, ids: torch.Tensor, step: PagedBatch, **buffers: Any) -> torch.Tensor:
        return m3attn.sparse_attention(rows, cache, ids, step, impl=layer.mode.implementations["sparse_attention/decode"], **buffers)

    mine.update([1] * REQUESTS, list(STARTS), list(range(REQUESTS)))
    runs = []
    for layer, cache, rows, index_rows in zip(stack.layers, mine.caches, q, index_q, strict=True):
        for name, function in (
            ("index", lambda a=(layer, cache, index_rows, batch): select(*a, out=plan.ids, workspace=plan.workspace)),
            ("attention", lambda a=(layer, cache, rows, plan.ids, batch): attend(*a, workspace=plan.workspace)),
        ):
            runs.append(Captured(function) if name in captured else function)
    for number in range(pick(2, 60)):
        requests = torch.randperm(REQUESTS, generator=generator)[: 1 + number % REQUESTS].tolist()
        lengths = [int(torch.randint(1, STARTS[b] + 1, (), generator=generator)) for b in requests]
        if number % 5 == 0:
            mine.shuffle(generator)
        for side in (mine, twin):
            side.update([1] * len(requests), lengths, requests)
        for rows in (*q, *index_q):
            rows.copy_(torch.randn(rows.shape, generator=generator))
        for at, (layer, cache) in enumerate(zip(stack.layers, twin.caches, strict=True)):
            fresh = dataclasses.replace(twin.plan.parts[0].batch)
            ids = select(layer, cache, index_q[at], fresh)
            expected = attend(layer, cache, q[at], ids, fresh)
            plan.ids.fill_(GARBAGE_ID)
            got = []
            for run in runs[2 * at : 2 * at + 2]:
                if plan.workspace is not None:
                    plan.workspace.fill_(NAN_BYTE)
                got.append(run().clone())
            assert torch.equal(got[0], ids) and torch.equal(plan.ids, ids), f"step {number}, layer {at}: ids"
            assert torch.equal(got[1], expected), f"step {number}, layer {at}: attention"
            assert not expected[len(requests) :].any()
