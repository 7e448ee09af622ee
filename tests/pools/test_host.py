"""Host pools: round trips of any bytes, what indices become, and copies that are still under way."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from pool_cases import BACKENDS, CONFIG, DEVICE, DTYPES, PAGE_SIZE, contents, make_pool, randomise, same

from m3attn import HostKVPool, HostPoolGroup, OutOfPages, PagedKVPool, PageTransfer
from m3attn.pools import PoolPart, SubPool, Transfer

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
HOST_LAYOUTS = ("layer_first", "page_first")


def scramble(pool: PagedKVPool) -> None:
    for part in pool.parts:
        part.storage.view(torch.uint8).fill_(0xA5)


def id_forms(ids: list[int], form: str) -> Any:
    return ids if form == "list" else torch.tensor(ids, dtype=torch.int32, device=DEVICE if form == "device" else "cpu")


@pytest.mark.parametrize(("kv_dtype", "index_dtype"), DTYPES)
@pytest.mark.parametrize("layout", HOST_LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_round_trip_keeps_every_byte(backend: str, layout: str, kv_dtype: str, index_dtype: str) -> None:
    pool = make_pool(kv_cache_dtype=kv_dtype, index_cache_dtype=index_dtype, packed=layout == "layer_first", layout="NHD")
    host = HostKVPool(pool, num_pages=5, layout=layout, backend=backend)
    randomise(pool)
    before = contents(pool)
    pages = host.alloc(4)[::-1]
    host.backup(pages, [5, 0, 3, 2]).wait()
    scramble(pool)
    host.load(pages, [1, 2, 5, 0]).wait()
    for name, data in contents(pool).items():
        assert torch.equal(data[:, [1, 2, 5, 0]], before[name][:, [5, 0, 3, 2]])
        assert bool((data[:, [3, 4]] == 0xA5).all())


@pytest.mark.parametrize("layout", HOST_LAYOUTS)
def test_both_paths_write_the_same_bytes(layout: str) -> None:
    pool = make_pool(kv_cache_dtype="fp8")
    randomise(pool)
    hosts = [HostKVPool(pool, num_pages=3, layout=layout, backend=backend) for backend in BACKENDS]
    for host in hosts:
        for part in host.parts:
            part.host.zero_()
        host.backup([2, 0], [1, 4])
        host.synchronize()
    for plain, kernel in zip(hosts[0].parts, hosts[1].parts, strict=True):
        assert torch.equal(plain.host, kernel.host)


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_one_at_a_time(backend: str, per_layer: bool) -> None:
    """Backed up layer by layer as a model produces them, loaded layer by layer as it needs them; other layers stay."""
    pool = make_pool()
    host = HostKVPool(pool, num_pages=2, backend=backend)
    randomise(pool)
    before = contents(pool)
    pages = host.alloc(2)
    for layer in pool.layers:
        host.backup(pages, [0, 5], layers=[layer], per_layer=per_layer).wait(layer)
    scramble(pool)
    transfer = host.load(pages, [0, 5], layers=[1, 2], per_layer=per_layer)
    transfer.wait(1)
    transfer.wait(2)
    for part in pool.parts:
        data, old = contents(pool)[part.name], before[part.name]
        for row, layer in enumerate(part.layers):
            is_loaded = torch.equal(data[row, [0, 5]], old[row, [0, 5]])
            assert is_loaded == (layer in (1, 2))
    host.load(pages, [0, 5], per_layer=True).wait()
    assert all(torch.equal(contents(pool)[name][:, [0, 5]], old[:, [0, 5]]) for name, old in before.items())


@pytest.mark.parametrize("backend", BACKENDS)
def test_group_of_mixed_pools(backend: str) -> None:
    """fp8 and 16-bit pools in both layouts, each with ids of its own; an extra pool without ids is left out."""
    pool, draft = make_pool(kv_cache_dtype="fp8"), make_pool(layers=[0, 3], num_pages=4)
    group = HostPoolGroup(
        HostKVPool(pool.main, num_pages=4, layout="page_first", backend=backend),
        {
            "index_k": HostKVPool(pool.index, num_pages=5, backend="plain"),
            "draft": HostKVPool(draft, num_pages=3, layout="layer_first", backend=backend),
        },
    )
    for p in (pool, draft):
        randomise(p)
    before, draft_before = contents(pool), contents(draft)
    extra = {"index_k": PageTransfer([4, 1], [2, 3]), "draft": PageTransfer(torch.tensor([1]), torch.tensor([3], device=DEVICE))}
    group.backup([0, 3], [2, 3], extra=extra).wait()
    scramble(pool)
    scramble(draft)
    scrambled = contents(draft)
    group.load([3, 0], [0, 1], extra={"index_k": PageTransfer([1, 4], [0, 1]), "draft": None}, per_layer=True).wait()
    for name, data in contents(pool).items():
        assert torch.equal(data[:, [0, 1]], before[name][:, [3, 2]])
    assert same(contents(draft), scrambled)
    group.load([0], [5], extra={"draft": PageTransfer([1], [0]), "index_k": PageTransfer()}).wait()
    assert torch.equal(contents(pool)["kv"][:, 5], before["kv"][:, 2])
    assert bool((contents(pool)["index_k"][:, 5] == 0xA5).all())
    for name, data in contents(draft).items():
        assert torch.equal(data[:, 0], draft_before[name][:, 3])


def test_group_refuses_before_it_copies() -> None:
    pool = make_pool()
    randomise(pool)
    group = HostPoolGroup(HostKVPool(pool.main, num_pages=2), {"index_k": HostKVPool(pool.index, num_pages=2)})
    for part in group.anchor.parts:
        part.host.zero_()
    with pytest.raises(ValueError, match="extra: expected names among index_k, got 'state'"):
        group.backup([0], [0], extra={"state": PageTransfer([0], [0])})
    with pytest.raises(ValueError, match=r"extra\['index_k'\].device_pages: expected page ids beside the other ones, got None"):
        group.backup([0], [0], extra={"index_k": PageTransfer([0])})
    with pytest.raises(ValueError, match=r"extra\['index_k'\].host_pages\[0\]: expected an int from 0 to 1, got 2"):
        group.backup([0], [0], extra={"index_k": PageTransfer([2], [0])})
    with pytest.raises(ValueError, match=r"layers\[0\]: expected one of 0, 1, 2, 3, got 7"):
        group.backup([0], [0], layers=[7])
    assert not any(part.host.any() for part in group.anchor.parts)


@pytest.mark.parametrize("form", ["list", "host", "device"])
@pytest.mark.parametrize("layout", HOST_LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_in_every_form(backend: str, layout: str, form: str) -> None:
    pool = make_pool()
    randomise(pool)
    before = contents(pool)
    host = HostKVPool(pool, num_pages=4, layout=layout, backend=backend)
    device_pages = id_forms([4, 2], "device" if form == "host" else form)
    host.backup(id_forms([3, 1], form), device_pages).wait()
    scramble(pool)
    host.load(id_forms([1, 3], form), device_pages).wait()
    assert all(torch.equal(data[:, [2, 4]], before[name][:, [4, 2]]) for name, data in contents(pool).items())


def meta_source() -> SubPool:
    """A pool on a device other than the CPU, on any machine: where tensors are is all that it shows."""
    storage = torch.empty(2, 3, 4, device="meta")
    return SubPool(storage.device, 3, (PoolPart("kv", (0, 1), storage),))


@pytest.mark.parametrize("ids", [[2, 0], torch.tensor([2, 0], dtype=torch.int32)])
def test_host_ids_go_where_the_kernel_reads_them(ids: Any) -> None:
    transfer = Transfer(torch.device("cpu"))
    layer_first = HostKVPool(meta_source(), num_pages=3, layout="layer_first", backend="triton")
    assert layer_first.normalise_host_pages(ids, transfer).device.type == "meta"
    page_first = HostKVPool(meta_source(), num_pages=3, layout="page_first", backend="triton")
    normal = page_first.normalise_host_pages(ids, transfer)
    assert normal.device.type == "cpu" and normal.tolist() == [2, 0] and normal is not ids


def test_device_ids_are_never_moved() -> None:
    host = HostKVPool(meta_source(), num_pages=3, backend="triton")
    with pytest.raises(ValueError, match="device_pages: expected a tensor on meta or in pinned memory, it is not moved; got one on cpu"):
        host.backup([0], torch.tensor([1]))


@pytest.mark.parametrize("layout", HOST_LAYOUTS)
def test_view_shows_a_page_as_it_was(layout: str) -> None:
    pool = make_pool(kv_cache_dtype="fp8_e5m2")
    randomise(pool)
    host = HostKVPool(pool, num_pages=3, layout=layout)
    host.backup([2], [4])
    view = host.view("kv", 2)
    part = pool.parts[0]
    assert view.dtype == torch.float8_e5m2 and view.shape == part.storage[:, 4].shape
    assert torch.equal(view.view(torch.uint8).cpu(), part.storage[:, 4].view(torch.uint8).cpu())
    assert host.view("index_k", 2).shape == (2, PAGE_SIZE, CONFIG.index_dim)
    with pytest.raises(ValueError, match="part: expected one of kv, index_k, got 'v'"):
        host.view("v", 0)
    with pytest.raises(ValueError, match="page: expected an int from 0 to 2, got 3"):
        host.view("kv", 3)


def test_sizes_and_pages() -> None:
    pool = make_pool()
    assert HostKVPool(pool, num_pages=1).page_bytes == PAGE_SIZE * sum(pool.bytes_per_token().values())
    page_bytes = HostKVPool(pool.index, num_pages=1).page_bytes
    host = HostKVPool(pool.index, num_bytes=3 * page_bytes + 1)
    assert host.num_pages == 3
    assert all(part.host.is_pinned() == torch.cuda.is_available() for part in host.parts)
    pages = host.alloc(2)
    host.fork(pages)
    assert host.free(pages) == [] and host.free(pages) == pages
    with pytest.raises(OutOfPages, match="needed 4 pages, 3 of 3"):
        host.alloc(4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_pages": 2, "num_bytes": 9}, "num_pages, num_bytes: expected one of them, got both"),
        ({}, "num_pages, num_bytes: expected one of them, got none"),
        ({"num_bytes": 9}, "num_bytes: expected an int of at least"),
        ({"num_pages": 2, "layout": "page"}, "layout: expected layer_first or page_first, got 'page'"),
        ({"num_pages": 2, "backend": "kernel"}, "backend: expected one of auto, triton, plain, got 'kernel'"),
    ],
)
def test_refused_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HostKVPool(make_pool(), **options)


@pytest.mark.parametrize(
    ("host_pages", "device_pages", "error", "message"),
    [
        ([0, 1], [0], ValueError, "device_pages: expected 2 page ids, one for each of host_pages, got 1"),
        ([2], [0], ValueError, r"host_pages\[0\]: expected an int from 0 to 1, got 2"),
        ([0], torch.tensor([-1]), ValueError, r"device_pages\[0\]: expected an int from 0 to 5, got -1"),
        (torch.zeros(1), [0], TypeError, "host_pages: expected int32 or int64 page ids, got torch.float32"),
        (torch.zeros(1, 1, dtype=torch.int32), [0], ValueError, r"host_pages: expected page ids of shape \[N\]"),
        (3, [0], TypeError, "host_pages: expected a sequence of page ids or a tensor, got int"),
    ],
)
def test_refused_ids(host_pages: Any, device_pages: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        HostKVPool(make_pool(), num_pages=2).backup(host_pages, device_pages)


class SlowEvent:
    """An event that is done once the host has waited for it, and remembers which streams wait for it."""

    def __init__(self) -> None:
        self.done, self.waits = False, 0

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True

    def wait(self, stream: object) -> None:
        self.waits += 1


def start(host: HostKVPool, pages: list[int] | None, *, is_backup: bool) -> SlowEvent:
    """Mark host pages (None: unknown ones) as those of a copy that is under way."""
    from m3attn.pools.host import _Pending

    transfer, event = Transfer(host.device), SlowEvent()
    transfer._end = event  # type: ignore[assignment]
    host._pending.append(_Pending(transfer, None if pages is None else frozenset(pages), is_backup))
    return event


@pytest.mark.parametrize("unknown", [False, True])
def test_a_page_in_flight_is_not_handed_out(unknown: bool) -> None:
    """alloc and view wait for the copies that touch their pages, and for no others."""
    host = HostKVPool(make_pool(), num_pages=3)
    [page, other] = host.alloc(2)
    backup, elsewhere = start(host, None if unknown else [page], is_backup=True), start(host, [other], is_backup=True)
    load = start(host, [page], is_backup=False)
    host.view("kv", page)
    assert (backup.done, elsewhere.done, load.done) == (True, False, False)
    host.free([page])
    assert page in host.alloc(2)
    assert load.done and not elsewhere.done
    host.synchronize()
    assert elsewhere.done


def test_a_copy_waits_for_those_it_must_not_overtake() -> None:
    """A load for the backup of its pages; a backup for the loads and backups of what it overwrites; a load not for other loads."""
    host = HostKVPool(make_pool(), num_pages=3)
    stream: Any = object()
    backup, load, elsewhere = start(host, [0], is_backup=True), start(host, [1], is_backup=False), start(host, [2], is_backup=True)
    host._order(frozenset([0, 1]), stream, writes_host=False)
    assert (backup.waits, load.waits, elsewhere.waits) == (1, 0, 0)
    host._order(frozenset([0, 1]), stream, writes_host=True)
    assert (backup.waits, load.waits, elsewhere.waits) == (2, 1, 0)
    backup.done = True
    host._order(None, stream, writes_host=False)
    assert (backup.waits, load.waits, elsewhere.waits) == (2, 1, 1)


@pytest.mark.parametrize("seed", range(4))
def test_random_offloading_returns_what_was_there(seed: int) -> None:
    """Requests come, go to the host, come back to other pages; host pages are used again; nothing is lost or leaked."""
    rng = random.Random(seed)
    pool = make_pool(num_pages=10, kv_cache_dtype="fp8")
    backend = "triton" if DEVICE.type == "cuda" else "plain"
    host = HostKVPool(pool, num_pages=8, layout=HOST_LAYOUTS[seed % 2], backend=backend)
    resident: list[tuple[list[int], dict[str, torch.Tensor]]] = []
    away: list[tuple[list[int], dict[str, torch.Tensor]]] = []

    def read(pages: list[int]) -> dict[str, torch.Tensor]:
        return {name: data[:, pages] for name, data in contents(pool).items()}

    for step in range(60):
        kind = rng.choice(["arrive", "offload", "return", "leave"])
        if kind == "arrive" and pool.allocator.num_free:
            pages = pool.alloc(rng.randint(1, pool.allocator.num_free))
            for part in pool.parts:
                data = part.storage.view(torch.uint8)
                data[:, pages] = torch.randint(0, 256, data[:, pages].shape, dtype=torch.uint8, device=DEVICE)
            resident.append((pages, read(pages)))
        elif kind == "offload" and resident:
            pages, data = resident.pop(rng.randrange(len(resident)))
            if len(pages) <= host.allocator.num_free:
                host_pages = host.alloc(len(pages))
                host.backup(host_pages, pages, per_layer=bool(step % 2)).wait()
                away.append((host_pages, data))
            pool.free(pages)
        elif kind == "return" and away and pool.allocator.num_free >= len(away[0][0]):
            host_pages, data = away.pop(0)
            pages = pool.alloc(len(host_pages))
            host.load(host_pages, pages, per_layer=bool(step % 2)).wait()
            host.free(host_pages)
            resident.append((pages, data))
        elif kind == "leave" and resident:
            pool.free(resident.pop(rng.randrange(len(resident)))[0])
        assert all(same(read(pages), data) for pages, data in resident)
    assert pool.allocator.num_used == sum(len(pages) for pages, _ in resident)
    assert host.allocator.num_used == sum(len(pages) for pages, _ in away)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("layout", HOST_LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_round_trips_beside_compute(backend: str, layout: str) -> None:
    """The current stream overwrites what it may as soon as it may, and a busy GPU keeps transfers in flight: orders hold without host syncs."""
    pool = make_pool(num_pages=64, kv_cache_dtype="fp8", page_size=16)
    host = HostKVPool(pool, num_pages=64, layout=layout, backend=backend)
    busy = torch.randn(4096, 4096, device=DEVICE)
    for seed in range(8):
        randomise(pool, seed)
        before = contents(pool)
        order = torch.randperm(64, generator=torch.Generator().manual_seed(seed)).tolist()
        host_pages = host.alloc(64)
        for _ in range(4):
            busy = (busy @ busy).clamp(-1, 1)
        backup = host.backup(host_pages, order, per_layer=bool(seed % 2))
        backup.wait()
        for part in pool.parts:
            part.storage.view(torch.uint8).zero_()
        load = host.load(host_pages, list(range(64)), per_layer=True)
        for layer in pool.layers:
            load.wait(layer)
        after = contents(pool)
        host.free(host_pages)
        assert all(torch.equal(after[name], old[:, order]) for name, old in before.items())


@pytest.mark.gpu
@needs_gpu
def test_where_ids_are_on_a_gpu() -> None:
    pool, transfer = make_pool(), Transfer(DEVICE)
    ids = torch.tensor([1, 0], dtype=torch.int32)
    kernel = HostKVPool(pool, num_pages=2, layout="layer_first", backend="triton")
    assert kernel.normalise_host_pages(ids, transfer).is_cuda
    write_back = HostKVPool(pool, num_pages=2, layout="page_first", backend="triton")
    assert write_back.normalise_host_pages(ids.to(DEVICE), transfer).is_pinned()
