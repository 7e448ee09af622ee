"""Sets of a pool under torch.compile: one opaque operator, the cache written in place."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pool_cases import BACKENDS, CONFIG, DEVICE, contents, make_pool, randomise, same
from torch._dynamo.testing import CompileCounter

from m3attn import PagedKVPool
from m3attn.operators import pack_index_cache, pack_kv_cache
from m3attn.pools.write import INDEX, MAIN

HEADS, DIM = CONFIG.num_kv_heads, CONFIG.head_dim


def rows(tokens: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    slots = torch.randperm(48, generator=generator)[:tokens].to(DEVICE)
    k, v = (torch.randn(tokens, HEADS, DIM, generator=generator).to(DEVICE, torch.bfloat16) for _ in range(2))
    return slots, k, v, torch.randn(tokens, CONFIG.index_dim, generator=generator).to(DEVICE, torch.bfloat16)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_sets_compile_whole_and_recompile_at_most_once(backend: str, packed: bool) -> None:
    def step(pool: PagedKVPool, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index_k: torch.Tensor) -> None:
        pool.set(1, slots, k + 1, v, index_k)
        pool.set_kv(2, slots, k, v)
        pool.set_index_k(3, slots, index_k)

    torch.compiler.reset()
    compiled_pool, eager_pool = (make_pool(backend=backend, packed=packed, kv_cache_dtype="fp8") for _ in range(2))
    for pool in (compiled_pool, eager_pool):
        randomise(pool)
        pool.set_scales(1, k_scale=2.0, v_scale=torch.tensor([0.5], device=DEVICE))
    counter = CompileCounter()
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for tokens in (3, 5, 7):
        compiled(compiled_pool, *rows(tokens))
        step(eager_pool, *rows(tokens))
    assert counter.frame_count <= 2
    assert same(contents(compiled_pool), contents(eager_pool))


@pytest.mark.parametrize("halves", ["fused", "main", "index", "quantised"])
def test_opcheck(halves: str) -> None:
    pool = make_pool(kv_cache_dtype="fp8", index_cache_dtype="fp8", backend="plain", zero_on_alloc=True)
    slots, k, v, index_k = rows(4)
    cache = pool.layer(1)
    # opcheck computes with what it is given, which torch does not do in fp8.
    as_bytes = {"kv": cache.kv.view(torch.uint8), "index_k": cache.index_k.view(torch.uint8)}
    cache = replace(cache, **as_bytes, kv_dtype="fp8_e4m3", index_dtype="fp8_e4m3", k_scale=0.5)
    main, index = pack_kv_cache(cache, mutated=True), pack_index_cache(cache, mutated=True)
    values = [k, None, v, None, index_k, None]
    if halves == "main":
        index, values[4:] = INDEX, [None, None]
    elif halves == "index":
        main, values[:4] = MAIN, [None] * 4
    elif halves == "quantised":
        values[0], values[1] = torch.ones(4, HEADS, DIM, dtype=torch.uint8, device=DEVICE), "fp8_e4m3"
    torch.library.opcheck(torch.ops.m3attn.pool_set_out.default, (*main, *index, slots, slots, *values, "plain"))
