"""Stacks of layers over one pool: steps as a server sends them, compiled whole, and captured as a CUDA graph."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import pytest
import torch
from oracle import CONFIG, hf_weights, oracle
from torch import nn

from m3attn import LayerCache, M3DenseAttention, M3SparseAttention, PagedKVPool, PlanCapacity, StepPlan
from m3attn.layers.rope import rotary_table

SIZE = 16
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
THREE = dataclasses.replace(CONFIG, sparse_layers=(False, True, True))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Model(nn.Module):
    """Three layers, each added to the residual stream."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        table = rotary_table(THREE.max_position, THREE.rotary_dim, THREE.rope_theta, device=DEVICE)
        options = {"page_size": SIZE, "dtype": dtype, "cos_sin": table, "device": DEVICE}
        self.layers = nn.ModuleList((M3SparseAttention if sparse else M3DenseAttention)(THREE, **options) for sparse in THREE.sparse_layers)
        for number, layer in enumerate(self.layers):
            layer.load_hf(hf_weights(THREE, sparse=layer.sparse, seed=number))

    def forward(self, x: torch.Tensor, plan: StepPlan, caches: list[LayerCache]) -> torch.Tensor:
        for layer, cache in zip(self.layers, caches, strict=True):
            x = x + layer(x, plan, cache)
        return x


def expected(x: torch.Tensor) -> torch.Tensor:
    x = x.double()
    for number, sparse in enumerate(THREE.sparse_layers):
        x = x + oracle(x, hf_weights(THREE, sparse=sparse, seed=number), THREE, sparse=sparse)
    return x


def make_caches(kind: str, pages: int, dtype: torch.dtype = torch.float32) -> list[LayerCache]:
    """`packed`: views of one allocation a part; `separate` K and V in such; `own`: an allocation for each layer."""
    pool = PagedKVPool(THREE, num_pages=pages, page_size=SIZE, dtype=dtype, packed=kind != "separate", device=DEVICE)
    caches = [pool.layer(number) for number in range(3)]
    for cache in caches:
        for tensor in cache.key_value() + (() if cache.index_k is None else (cache.index_key(),)):
            tensor.fill_(float("nan"))
    if kind != "own":
        return caches
    return [LayerCache(kv=cache.kv.clone(), index_k=None if cache.index_k is None else cache.index_k.clone()) for cache in caches]


def test_requests_come_and_go_over_one_pool() -> None:
    """Prefill in chunks, decode and drafts of two tokens in one batch, in changing order, on pages in no order."""
    model, caches = Model(), make_caches("packed", 24)
    plan = StepPlan.for_layers(list(model.layers), caches, 112, decode=PlanCapacity(3, 6, 2), prefill=PlanCapacity(2, 64, 48))
    generator = torch.Generator().manual_seed(5)
    pages = torch.randperm(24, generator=generator).tolist()
    streams = [torch.randn(n, THREE.hidden_size, generator=generator) for n in (57, 33, 90, 49)]
    tables = [[pages.pop() for _ in range(-(-len(x) // SIZE))] for x in streams]
    chunks = [[48, 1, 1, 2, 1, 2, 1, 1], [0, 16, 16, 1], [0, 0, 40, 48, 2], [0, 0, 0, 0, 47, 1, 1]]
    done, outputs = [0] * 4, [[] for _ in streams]
    for step in range(8):
        order = torch.randperm(4, generator=generator).tolist()
        now = [(b, chunks[b][step]) for b in order if step < len(chunks[b]) and chunks[b][step]]
        rows = [streams[b][done[b] : done[b] + n] for b, n in now]
        for b, n in now:
            done[b] += n
        plan.update([n for _, n in now], [done[b] for b, _ in now], [tables[b] for b, _ in now])
        total = sum(n for _, n in now)
        x = torch.cat([*rows, torch.full((plan.tokens - total, THREE.hidden_size), float("nan"))]).to(DEVICE)
        for (b, _), part in zip(now, model(x, plan, caches)[:total].split([n for _, n in now]), strict=True):
            outputs[b].append(part)
    assert done == [len(x) for x in streams]
    for x, parts in zip(streams, outputs, strict=True):
        torch.testing.assert_close(torch.cat(parts).cpu().double(), expected(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["packed", "separate", "own"])
@torch.no_grad()
def test_a_compiled_model_copies_no_cache(kind: str) -> None:
    from torch._inductor.utils import run_and_get_code

    model, mine, twins = Model(), make_caches(kind, 512), make_caches(kind, 512)
    plan = StepPlan.for_layers(list(model.layers), mine, 64, decode=PlanCapacity(1, 1, 1), prefill=PlanCapacity(1, 20, 20))
    x = torch.randn(plan.tokens, THREE.hidden_size, device=DEVICE)
    plan.update([20, 1], [20, 1], [[3, 400], [511]])
    want = model(x, plan, twins)
    got, code = run_and_get_code(torch.compile(model, backend="inductor", fullgraph=True), x, plan, mine)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    for a, b in zip(mine, twins, strict=True):
        for one, other in zip(a.key_value(), b.key_value(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, equal_nan=True)
    wrapper = code[0][code[0].index("def call(") :]
    pool_bytes = 512 * SIZE * 128 * 4
    for shape, dtype in re.findall(r"empty_strided(?:_\w+)?\(\(([\d, ]*)\), \([\d, ]*\), torch\.(\w+)\)", wrapper):
        size = getattr(torch, dtype).itemsize
        for n in filter(None, shape.replace(" ", "").split(",")):
            size *= int(n)
        assert size < pool_bytes, f"a buffer of {size} bytes, as large as a part of the pool: {shape} {dtype}"
    assert wrapper.count("m3attn.qk_norm_rope_insert_out.default(") == 3 and "clone" not in wrapper


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
@torch.no_grad()
def test_a_captured_decode_step_replays_what_an_eager_one_gives() -> None:
    """Lengths grow over page borders, pages move, requests leave as padded rows and join again; ids are poisoned before every replay."""
    dtype = torch.bfloat16
    model, mine, twins = Model(dtype), make_caches("packed", 40, dtype), make_caches("packed", 40, dtype)
    for cache, twin in zip(mine, twins, strict=True):
        for a, b in zip(cache.key_value(), twin.key_value(), strict=True):
            b.copy_(a.normal_())
        if cache.index_k is not None:
            twin.index_k.copy_(cache.index_k.normal_())
    capacity = PlanCapacity(4, 4, 1)
    plan, eager_plan = (StepPlan.for_layers(list(model.layers), caches, 128, decode=capacity) for caches in (mine, twins))
    x = torch.zeros(4, THREE.hidden_size, dtype=dtype, device=DEVICE)
    table = torch.randperm(40)[:32].view(4, 8)
    for each, caches in ((plan, mine), (eager_plan, twins)):
        each.update([1] * 4, [20, 31, 40, 15], table)
        model(x, each, caches)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = model(x, plan, mine)
    generator = torch.Generator().manual_seed(0)
    for step in range(100):
        running = [b for b in range(4) if (step // 10 + b) % 4]
        lengths = [(20, 31, 40, 15)[b] + step % 60 for b in running]
        for each in (plan, eager_plan):
            each.update([1] * len(running), lengths, table[running])
        x.copy_(torch.randn(x.shape, generator=generator))
        plan.ids.fill_(2**31 - 1)
        graph.replay()
        assert torch.equal(out, model(x, eager_plan, twins)), f"step {step}"
