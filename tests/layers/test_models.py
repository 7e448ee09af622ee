"""Stacks of layers over one pool: steps as a server sends them, and compiled whole."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

import pytest
import torch
from oracle import CONFIG, hf_weights, oracle
from stack import Stack

from m3attn import LayerCache, PagedKVPool, PlanCapacity, StepPlan
from m3attn.testing.matrix import DEVICE, MARKS

SIZE = 16
THREE = dataclasses.replace(CONFIG, sparse_layers=(False, True, True))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def expected(x: torch.Tensor) -> torch.Tensor:
    x = x.double()
    for number, sparse in enumerate(THREE.sparse_layers):
        x = x + oracle(x, hf_weights(THREE, sparse=sparse, seed=number), THREE, sparse=sparse)
    return x


def make_caches(kind: str, pages: int, dtype: torch.dtype = torch.float32) -> list[LayerCache]:
    """`packed`: layers side by side in one allocation a part; `separate`: K and V in such; `interleaved`: one allocation of all parts, a page's
    layers side by side; `own`: an allocation for each layer."""
    if kind == "interleaved":
        heads, width = THREE.num_kv_heads, 2 * THREE.head_dim
        sizes = [heads * SIZE * width, heads * SIZE * width, SIZE * THREE.index_dim, heads * SIZE * width, SIZE * THREE.index_dim]
        storage = torch.full((pages, sum(sizes)), float("nan"), dtype=dtype, device=DEVICE)
        first, second, second_index, third, third_index = storage.split(sizes, dim=1)
        kv = [part.unflatten(1, (heads, SIZE, width)) for part in (first, second, third)]
        index = [None, *(part.unflatten(1, (SIZE, THREE.index_dim)) for part in (second_index, third_index))]
        return [LayerCache(kv=a, index_k=b) for a, b in zip(kv, index, strict=True)]
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
    model, caches = Stack(THREE, page_size=SIZE, dtype=torch.float32), make_caches("packed", 24)
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


def check_uses(wrapper: str, cache_elements: int) -> None:
    """Inputs as large as a cache go to m3attn's operators and to nothing else."""
    caches = {name for name, shape in re.findall(r"assert_size_stride\((\w+), \(([\d, ]*)\)", wrapper) if elements(shape) >= cache_elements}
    assert caches, "no input is a cache"
    for line in wrapper.splitlines():
        code = line.split("#")[0].strip()
        if caches.isdisjoint(re.findall(r"\w+", code)):
            continue
        if renamed := re.fullmatch(r"(\w+) = (\w+)(; del \w+)?", code):
            caches.add(renamed[1])
            continue
        assert code.startswith(("torch.ops.m3attn.", "assert_size_stride(", "del ")) or code.endswith("= args"), f"a cache is used in: {code}"


def elements(shape: str) -> int:
    return math.prod(int(n) for n in shape.replace(" ", "").split(",") if n)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=MARKS) for kind in ("packed", "separate", "interleaved", "own")])
@torch.no_grad()
def test_a_compiled_model_copies_no_cache(kind: str) -> None:
    """Its code hands caches to operators alone; what it allocates is the same for any pool, and so is, on a GPU, the peak of its memory."""
    from torch._inductor.utils import run_and_get_code

    model, buffers, peaks = Stack(THREE, page_size=SIZE, dtype=torch.float32), [], []
    for pages in (64, 512):
        torch._dynamo.reset()
        mine, twins = make_caches(kind, pages), make_caches(kind, pages)
        plan = StepPlan.for_layers(list(model.layers), mine, 64, decode=PlanCapacity(1, 1, 1), prefill=PlanCapacity(1, 20, 20))
        compiled = torch.compile(model, backend="inductor", fullgraph=True)
        for step, (q_lens, seq_lens) in enumerate((([20, 1], [20, 1]), ([1, 7], [2, 27]))):
            plan.update(q_lens, seq_lens, [[3, pages - 1], [pages - 2]] if step == 0 else [[pages - 2], [3, pages - 1]])
            x = torch.randn(plan.tokens, THREE.hidden_size, device=DEVICE)
            want = model(x, plan, twins)
            if step == 0:
                got, code = run_and_get_code(compiled, x, plan, mine)
            else:
                if DEVICE == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                got = compiled(x, plan, mine)
                if DEVICE == "cuda":
                    peaks.append(torch.cuda.max_memory_allocated() - before)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        for a, b in zip(mine, twins, strict=True):
            for one, other in zip(a.key_value(), b.key_value(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, equal_nan=True)
        assert len(code) == 1, "other lengths compile nothing new"
        wrapper = code[0][code[0].index("def call(") :]
        wrapper = wrapper[: wrapper.index("return (")]
        assert wrapper.count("torch.ops.m3attn.qk_norm_rope_insert_out.default(") == 3
        check_uses(wrapper, pages * SIZE * THREE.index_dim)
        buffers.append(re.findall(r"empty_strided\w*\(\(([\d, ]*)\), \([\d, ]*\), (torch\.\w+)", wrapper))
    assert buffers[0] and buffers[0] == buffers[1]
    assert len(set(peaks)) <= 1, f"peaks of memory in pools of 64 and 512 pages: {peaks}"
