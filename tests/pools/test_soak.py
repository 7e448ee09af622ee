"""Requests arrive, fork, grow, go to the host and back, and finish, in a pool that is nearly full; every step's attention is checked."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from pool_cases import DEVICE

import m3attn
from m3attn import HostKVPool, HostPoolGroup, M3Config, OutOfPages, PagedBatch, PagedKVPool, PageTransfer
from m3attn.pools import Transfer
from m3attn.testing.bounds import attention_bound

DENSE, SPARSE = 0, 1
MIB = 1 << 20


@dataclass(frozen=True)
class Scene:
    """A model of a dense and a sparse layer, and how much of everything there is. `away`: requests on the host."""

    config: M3Config
    page_size: int
    num_pages: int
    max_pages: int
    max_requests: int
    away: int
    kv_cache_dtype: str
    host_layout: str


SMALL = M3Config(num_q_heads=8, num_kv_heads=2, num_index_heads=2, head_dim=64, index_dim=64, block_size=16, topk=2, sparse_layers=(False, True))
LARGE = M3Config(sparse_layers=(False, True))


@dataclass(eq=False)
class Request:
    """`row` of the server's store holds all that was ever written for it, `length` tokens of it. Pages are the device's, or the host's while away."""

    row: int
    length: int
    pages: list[int]


class Server:
    def __init__(self, scene: Scene, seed: int) -> None:
        self.scene, self.config = scene, scene.config
        self.rng, self.generator = random.Random(seed), torch.Generator(DEVICE).manual_seed(seed)
        options = {"page_size": scene.page_size, "kv_cache_dtype": scene.kv_cache_dtype, "device": DEVICE}
        self.pool = PagedKVPool(self.config, num_pages=scene.num_pages, **options)
        self.fresh = PagedKVPool(self.config, num_pages=scene.max_requests * scene.max_pages, **options)
        for part in (*self.pool.parts, *self.fresh.parts):
            part.storage.view(torch.uint8).fill_(0xFF)  # NaN
        self.host = HostPoolGroup(
            HostKVPool(self.pool.main, num_pages=scene.num_pages, layout=scene.host_layout),
            {"index_k": HostKVPool(self.pool.index, num_pages=scene.num_pages, layout="layer_first")},
        )
        self.max_tokens = scene.max_pages * scene.page_size
        rows, width = scene.max_requests + scene.away, (4 * self.config.num_kv_heads + 1) * self.config.head_dim
        self.store = torch.zeros(rows, self.max_tokens, width, dtype=torch.bfloat16, device=DEVICE)
        self.free_rows = list(range(rows))
        self.here: list[Request] = []
        self.away: list[Request] = []
        self.leaving: list[tuple[Transfer, list[int]]] = []
        self.done: dict[str, int] = dict.fromkeys(("arrive", "fork", "offload", "bring_back", "finish", "full"), 0)

    def write(self, pool: PagedKVPool, placed: list[tuple[Request, list[int]]], first: list[int]) -> None:
        """Store the tokens of each request from first[i] on in its pages of `pool`, in both layers, all in one call a layer."""
        slots, keys = [], []
        for (request, pages), start in zip(placed, first, strict=True):
            positions = torch.arange(start, request.length, device=DEVICE)
            slots.append(torch.tensor(pages, device=DEVICE)[positions // pool.page_size] * pool.page_size + positions % pool.page_size)
            keys.append(self.store[request.row, start : request.length])
        heads, dim = self.config.num_kv_heads, self.config.head_dim
        *parts, index_k = torch.cat(keys).split([heads * dim] * 4 + [dim], dim=1)
        k, v, k_dense, v_dense = (part.unflatten(1, (heads, dim)) for part in parts)
        pool.set_kv(DENSE, torch.cat(slots), k_dense, v_dense)
        pool.set(SPARSE, torch.cat(slots), k, v, index_k)

    def arrive(self) -> None:
        length = self.rng.randint(1, self.max_tokens - self.scene.page_size)
        request = Request(self.free_rows[-1], length, self.pool.alloc(self.pool.pages_for(length)))
        self.free_rows.pop()
        self.store[request.row, :length].normal_(generator=self.generator)
        self.write(self.pool, [(request, request.pages)], [0])
        self.here.append(request)

    def fork(self) -> None:
        parent = self.rng.choice(self.here)
        length = self.rng.randint(1, parent.length)
        child = Request(self.free_rows[-1], length, self.pool.fork(parent.pages, length))
        self.free_rows.pop()
        self.store[child.row, :length] = self.store[parent.row, :length]
        self.here.append(child)

    def offload(self) -> None:
        """To the host; the device pages are free when the copy is done, or at once for what waits for it."""
        request = self.here[self.rng.randrange(len(self.here))]
        extra = self.host.extra["index_k"]
        pages, index_pages = self.host.anchor.alloc(len(request.pages)), extra.alloc(len(request.pages))[::-1]
        transfer = self.host.backup(
            pages, request.pages, extra={"index_k": PageTransfer(index_pages, request.pages)}, per_layer=self.rng.random() < 0.5
        )
        if self.rng.random() < 0.5:
            transfer.wait()
            self.pool.free(request.pages)
        else:
            self.leaving.append((transfer, request.pages))
        self.here.remove(request)
        self.away.append(replace(request, pages=[*pages, *index_pages]))

    def bring_back(self) -> None:
        """From the host, whose pages are free at once: who gets them next waits for this copy."""
        request = self.away[self.rng.randrange(len(self.away))]
        pages, index_pages = request.pages[: len(request.pages) // 2], request.pages[len(request.pages) // 2 :]
        target = self.pool.alloc(len(pages))
        per_layer = self.rng.random() < 0.5
        transfer = self.host.load(pages, target, extra={"index_k": PageTransfer(index_pages, target)}, per_layer=per_layer)
        for layer in (DENSE, SPARSE) if per_layer else (None,):
            transfer.wait(layer)
        self.host.anchor.free(pages)
        self.host.extra["index_k"].free(index_pages)
        self.away.remove(request)
        self.here.append(replace(request, pages=target))

    def finish(self, request: Request) -> None:
        self.pool.free(request.pages)
        self.free_rows.append(request.row)
        self.here.remove(request)

    def make_room(self) -> None:
        if self.rng.random() < 0.5 and len(self.away) < self.scene.away:
            try:
                self.offload()
                self.done["offload"] += 1
                return
            except OutOfPages:
                pass
        self.finish(self.rng.choice(self.here))
        self.done["finish"] += 1

    def settle(self) -> None:
        """Free the pages whose copies to the host were under way during the last step."""
        for transfer, pages in self.leaving:
            transfer.synchronize()
            self.pool.free(pages)
        self.leaving.clear()

    def fill(self) -> None:
        failed = 0
        while len(self.here) < self.scene.max_requests and self.pool.allocator.num_used < 0.9 * self.scene.num_pages and failed < 3:
            kind = "bring_back" if self.away and self.rng.random() < 0.4 else "fork" if self.here and self.rng.random() < 0.3 else "arrive"
            try:
                getattr(self, kind)()
                self.done[kind] += 1
            except OutOfPages:
                self.done["full"] += 1
                failed += 1

    def grow(self) -> None:
        """One more token for every request; who has no page for it makes room."""
        for request in list(self.here):
            if request in self.here and request.length == self.max_tokens:
                self.finish(request)
            while request in self.here and request.length == len(request.pages) * self.pool.page_size:
                try:
                    request.pages.extend(self.pool.alloc(1))
                except OutOfPages:
                    self.make_room()
        for request in self.here:
            self.store[request.row, request.length].normal_(generator=self.generator)
            request.length += 1
        if self.here:
            self.write(self.pool, [(request, request.pages) for request in self.here], [request.length - 1 for request in self.here])

    def attend(self, pool: PagedKVPool, tables: list[list[int]], queries: tuple[torch.Tensor, ...]) -> tuple[PagedBatch, tuple[torch.Tensor, ...]]:
        """The step's batch over these pages, and (ids, sparse out, its LSE, dense out, its LSE)."""
        q, index_q = queries
        padded = torch.tensor([pages + [0] * (self.scene.max_pages - len(pages)) for pages in tables], dtype=torch.int32, device=DEVICE)
        batch = PagedBatch.from_lengths(
            [1] * len(tables),
            [request.length for request in self.here],
            padded,
            page_size=pool.page_size,
            block_size=self.config.block_size,
            max_seqlen_k=self.max_tokens,
        )
        ids = m3attn.index_topk(index_q, pool.layer(SPARSE), batch, topk=self.config.topk)
        sparse = m3attn.sparse_attention(q, pool.layer(SPARSE), ids, batch, return_lse=True)
        dense = m3attn.dense_attention(q, pool.layer(DENSE), batch, return_lse=True)
        return batch, (ids, *sparse, *dense)

    def check(self, *, exactly: bool) -> None:
        """Attention over the shared pool equals attention over a pool written afresh, bit for bit; that, `exactly`, is within the bound of fp64."""
        queries = tuple(
            torch.randn(len(self.here), heads, self.config.head_dim, generator=self.generator, device=DEVICE).to(torch.bfloat16)
            for heads in (self.config.num_q_heads, self.config.num_index_heads)
        )
        tables = [list(range(i * self.scene.max_pages, (i + 1) * self.scene.max_pages)) for i in range(len(self.here))]
        self.write(self.fresh, list(zip(self.here, tables, strict=True)), [0] * len(self.here))
        batch, expected = self.attend(self.fresh, tables, queries)
        _, got = self.attend(self.pool, [request.pages for request in self.here], queries)
        for name, a, b in zip(("ids", "sparse", "its LSE", "dense", "its LSE"), got, expected, strict=True):
            assert torch.equal(a, b), name
        if exactly:
            ids, out, lse, dense, dense_lse = expected
            attention_bound(queries[0], self.fresh.layer(SPARSE), batch, ids).check(out, lse)
            attention_bound(queries[0], self.fresh.layer(DENSE), batch, None).check(dense, dense_lse)
        for part in self.fresh.parts:
            part.storage.view(torch.uint8).fill_(0xFF)

    def check_pages(self) -> None:
        """Every page has as many references as owners, on the device and on the host."""
        owned = [page for request in self.here for page in request.pages] + [page for _, pages in self.leaving for page in pages]
        counts = [0] * self.scene.num_pages
        for page in owned:
            counts[page] += 1
        assert counts == [self.pool.allocator.references(page) for page in range(self.scene.num_pages)]
        on_host = sum(len(request.pages) // 2 for request in self.away)
        assert self.host.anchor.allocator.num_used == self.host.extra["index_k"].allocator.num_used == on_host
        assert len(self.here) + len(self.away) + len(self.free_rows) == self.store.shape[0]

    def close(self) -> None:
        """Everybody leaves; all pages are there again."""
        self.settle()
        while self.away:
            request = self.away.pop()
            half = len(request.pages) // 2
            self.host.anchor.free(request.pages[:half])
            self.host.extra["index_k"].free(request.pages[half:])
        for request in list(self.here):
            self.finish(request)
        for pool in (self.pool, self.host.anchor, self.host.extra["index_k"]):
            assert sorted(pool.alloc(self.scene.num_pages)) == list(range(self.scene.num_pages))


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0


def soak(scene: Scene, seed: int, steps: int, exact: int) -> tuple[float, dict[str, int]]:
    """Run `steps` steps, `exact` of them checked against fp64 too; returns the mean occupancy and what happened how often."""
    server, occupancy, memory = Server(scene, seed), 0.0, []
    for step in range(steps):
        server.settle()
        server.fill()
        server.grow()
        if server.here:
            server.check(exactly=step % max(1, steps // exact) == 0)
        server.check_pages()
        occupancy += server.pool.allocator.num_used / scene.num_pages
        if server.here and server.rng.random() < 0.4:
            server.make_room()
        if step % max(1, steps // 10) == max(1, steps // 10) - 1:
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            memory.append((torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0, resident_bytes()))
    middle, last = memory[len(memory) // 2], memory[-1]
    assert last[0] <= middle[0] + MIB, f"memory of the GPU grows: {memory}"
    assert last[1] <= middle[1] + 64 * MIB, f"memory of the process grows: {memory}"
    server.close()
    return occupancy / steps, server.done


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_soak(layout: str) -> None:
    scene = Scene(SMALL, page_size=8, num_pages=36, max_pages=8, max_requests=10, away=5, kv_cache_dtype="fp8", host_layout=layout)
    occupancy, done = soak(scene, seed=0, steps=60, exact=6)
    assert occupancy > 0.75 and all(done.values()), (occupancy, done)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("layout", "dtype"), [("layer_first", "fp8"), ("page_first", "auto")])
def test_long_soak(layout: str, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    """M3's geometry, requests of up to 40 blocks, of which 16 are selected."""
    scene = Scene(LARGE, page_size=128, num_pages=256, max_pages=40, max_requests=20, away=8, kv_cache_dtype=dtype, host_layout=layout)
    begin = time.perf_counter()
    occupancy, done = soak(scene, seed=1, steps=3000, exact=20)
    with capsys.disabled():
        print(f"\n{layout} {dtype}: 3000 steps in {time.perf_counter() - begin:.0f} s, {occupancy:.0%} of the pages in use, {done}")
    assert occupancy > 0.9 and min(done.values()) > 100, (occupancy, done)
