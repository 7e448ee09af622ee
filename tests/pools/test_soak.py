"""Requests arrive, fork, grow, go to the host and back, and finish, in a pool that is nearly full; every step's attention is checked."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from pool_cases import DEVICE

import m3attn
from m3attn import HostKVPool, HostPoolGroup, M3Config, OutOfPages, PagedBatch, PagedKVPool, PageTransfer

CONFIG = M3Config(num_q_heads=8, num_kv_heads=2, num_index_heads=2, head_dim=64, index_dim=64, block_size=16, topk=3, sparse_layers=(False, True))
MAX_PAGES, MAX_REQUESTS, LAYER = 8, 12, 1


@dataclass(eq=False)
class Request:
    """`keys` [length, …] is all that was ever written for it, k, v and index_k side by side; pages are device pages, or host pages while away."""

    keys: torch.Tensor
    pages: list[int]


class Server:
    def __init__(self, seed: int, num_pages: int, page_size: int, layout: str) -> None:
        self.rng, self.generator = random.Random(seed), torch.Generator(DEVICE).manual_seed(seed)
        options = {"page_size": page_size, "kv_cache_dtype": "fp8", "device": DEVICE}
        self.pool = PagedKVPool(CONFIG, num_pages=num_pages, **options)
        self.fresh = PagedKVPool(CONFIG, num_pages=MAX_REQUESTS * MAX_PAGES, **options)
        self.host = HostPoolGroup(
            HostKVPool(self.pool.main, num_pages=num_pages, layout=layout),
            {"index_k": HostKVPool(self.pool.index, num_pages=num_pages, layout="layer_first")},
        )
        self.here: list[Request] = []
        self.away: list[Request] = []

    def random_keys(self, tokens: int) -> torch.Tensor:
        width = (2 * CONFIG.num_kv_heads + 1) * 64
        return torch.randn(tokens, width, generator=self.generator, device=DEVICE).to(torch.bfloat16)

    def write(self, pool: PagedKVPool, pages: list[int], keys: torch.Tensor, first: int) -> None:
        """Put keys [n, …] at positions first, first + 1, … of a request with these pages."""
        positions = torch.arange(first, first + len(keys), device=DEVICE)
        slots = torch.tensor(pages, device=DEVICE)[positions // pool.page_size] * pool.page_size + positions % pool.page_size
        k, v, index_k = keys.split([CONFIG.num_kv_heads * 64, CONFIG.num_kv_heads * 64, 64], dim=1)
        pool.set(LAYER, slots, k.unflatten(1, (-1, 64)), v.unflatten(1, (-1, 64)), index_k)

    def arrive(self) -> None:
        keys = self.random_keys(self.rng.randint(1, 3 * self.pool.page_size))
        request = Request(keys, self.pool.alloc(self.pool.pages_for(len(keys))))
        self.write(self.pool, request.pages, keys, 0)
        self.here.append(request)

    def fork(self) -> None:
        parent = self.rng.choice(self.here)
        length = self.rng.randint(1, len(parent.keys))
        self.here.append(Request(parent.keys[:length], self.pool.fork(parent.pages, length)))

    def offload(self) -> None:
        request = self.here[self.rng.randrange(len(self.here))]
        extra = self.host.extra["index_k"]
        pages, index_pages = self.host.anchor.alloc(len(request.pages)), extra.alloc(len(request.pages))
        assert pages == index_pages, "both pools see the same requests"
        self.host.backup(pages, request.pages, extra={"index_k": PageTransfer(pages, request.pages)}, per_layer=self.rng.random() < 0.5).wait()
        self.pool.free(request.pages)
        self.here.remove(request)
        self.away.append(replace(request, pages=pages))

    def bring_back(self) -> None:
        request = self.away[0]
        pages = self.pool.alloc(len(request.pages))
        self.host.load(request.pages, pages, extra={"index_k": PageTransfer(request.pages, pages)}, per_layer=self.rng.random() < 0.5).wait(LAYER)
        for pool in (self.host.anchor, self.host.extra["index_k"]):
            pool.free(request.pages)
        self.here.append(replace(self.away.pop(0), pages=pages))

    def finish(self) -> None:
        self.pool.free(self.here.pop(self.rng.randrange(len(self.here))).pages)

    def make_room(self) -> None:
        if self.rng.random() < 0.5 and len(self.away) < MAX_REQUESTS:
            try:
                return self.offload()
            except OutOfPages:
                pass
        self.finish()

    def fill(self) -> None:
        while len(self.here) < MAX_REQUESTS and self.pool.allocator.num_used < 0.9 * self.pool.num_pages:
            try:
                if self.away and self.rng.random() < 0.4:
                    self.bring_back()
                elif self.here and self.rng.random() < 0.3:
                    self.fork()
                else:
                    self.arrive()
            except OutOfPages:
                return

    def grow(self) -> None:
        """One more token for every request; who has no page for it makes room."""
        for request in list(self.here):
            if request not in self.here:
                continue
            if len(request.keys) == MAX_PAGES * self.pool.page_size:
                self.pool.free(request.pages)
                self.here.remove(request)
                continue
            while len(request.keys) == len(request.pages) * self.pool.page_size:
                try:
                    request.pages.extend(self.pool.alloc(1))
                except OutOfPages:
                    self.make_room()
                    if request not in self.here:
                        break
            else:
                key = self.random_keys(1)
                self.write(self.pool, request.pages, key, len(request.keys))
                request.keys = torch.cat([request.keys, key])

    def attend(self, pool: PagedKVPool, tables: list[list[int]], q: torch.Tensor, index_q: torch.Tensor) -> torch.Tensor:
        table = torch.tensor([pages + [0] * (MAX_PAGES - len(pages)) for pages in tables], dtype=torch.int32, device=DEVICE)
        lengths, bound = [len(request.keys) for request in self.here], MAX_PAGES * pool.page_size
        batch = PagedBatch.from_lengths([1] * len(tables), lengths, table, page_size=pool.page_size, block_size=16, max_seqlen_k=bound)
        ids = m3attn.index_topk(index_q, pool.layer(LAYER), batch, topk=CONFIG.topk)
        return m3attn.sparse_attention(q, pool.layer(LAYER), ids, batch)

    def check(self) -> None:
        """Attention over the shared pool equals attention over a pool written afresh, bit for bit; every page has as many references as owners."""
        q, index_q = (
            torch.randn(len(self.here), heads, 64, generator=self.generator, device=DEVICE).to(torch.bfloat16)
            for heads in (CONFIG.num_q_heads, CONFIG.num_index_heads)
        )
        tables = [list(range(i * MAX_PAGES, (i + 1) * MAX_PAGES)) for i in range(len(self.here))]
        for pages, request in zip(tables, self.here, strict=True):
            self.write(self.fresh, pages, request.keys, 0)
        assert torch.equal(self.attend(self.pool, [r.pages for r in self.here], q, index_q), self.attend(self.fresh, tables, q, index_q))
        owned = [page for request in self.here for page in request.pages]
        assert all(self.pool.allocator.references(page) == owned.count(page) for page in range(self.pool.num_pages))
        assert self.host.anchor.allocator.num_used == sum(len(request.pages) for request in self.away)


def soak(seed: int, steps: int, num_pages: int, page_size: int, layout: str) -> float:
    """Run `steps` steps; returns the mean occupancy."""
    server, occupancy = Server(seed, num_pages, page_size, layout), 0.0
    memory = []
    for step in range(steps):
        server.fill()
        server.grow()
        if server.here:
            server.check()
        occupancy += server.pool.allocator.num_used / num_pages
        if server.here and server.rng.random() < 0.2:
            server.make_room()
        if DEVICE.type == "cuda" and step % max(1, steps // 10) == 0:
            torch.cuda.synchronize()
            memory.append(torch.cuda.memory_allocated())
    assert not memory or memory[-1] <= memory[len(memory) // 2] + (4 << 20), f"memory grows: {memory}"
    for request in server.here:
        server.pool.free(request.pages)
    assert sorted(server.pool.alloc(num_pages)) == list(range(num_pages))
    return occupancy / steps


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_soak(layout: str) -> None:
    assert soak(seed=0, steps=60, num_pages=20, page_size=8, layout=layout) > 0.7


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_long_soak(layout: str) -> None:
    assert soak(seed=1, steps=3000, num_pages=48, page_size=16, layout=layout) > 0.85
