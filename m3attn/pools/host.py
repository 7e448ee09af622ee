"""Copies of a pool's pages in host memory: `HostKVPool` for one pool, `HostPoolGroup` for several that move together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from m3attn.checks import check_int
from m3attn.pools.pages import PageAllocator
from m3attn.pools.parts import PageSource
from m3attn.pools.transfer import (
    PageIds,
    Transfer,
    as_host_tensor,
    as_tensor,
    check_page_ids,
    check_page_pairs,
    copy_plain,
    host_list,
    resolve_backend,
)
from m3attn.stages.execute import log_launch

LAYOUTS = ("layer_first", "page_first")


@dataclass(frozen=True, eq=False)
class PageTransfer:
    """What one pool of a group copies: host_pages[i] and device_pages[i] belong together, both [N]; both None: nothing."""

    host_pages: PageIds | None = None
    device_pages: PageIds | None = None


@dataclass(frozen=True, eq=False)
class _Part:
    """One part of the pool: its layers, its device and host memory as [layers, pages, words], and what an element is."""

    name: str
    layers: tuple[int, ...]
    device: torch.Tensor
    host: torch.Tensor
    dtype: torch.dtype
    page_shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Pending:
    transfer: Transfer
    pages: frozenset[int] | None  # None: not known on the host, any page
    writes_host: bool

    def touches(self, pages: frozenset[int] | None) -> bool:
        return pages is None or self.pages is None or not self.pages.isdisjoint(pages)


@dataclass(frozen=True, eq=False)
class _Job:
    pool: HostKVPool
    host_pages: PageIds
    device_pages: PageIds


_CopyPart = Callable[[torch.Tensor, torch.Tensor, bool], None]
"""Copies between a part's device and host memory, [layers, pages, words] each; to the host if the last argument says so."""


class HostKVPool:
    """Host copies of a pool's pages, pinned where there is a GPU. A host page holds what a device page does: every part, every layer.

    Backups and loads run on a stream of the pool's own, after what the current stream holds when they are called; a page's load comes after its
    backup, and a backup comes after the loads of what it overwrites. `synchronize` before dropping a pool.

    Args:
        source: the pool on the device: a `PagedKVPool`, its `main` or `index`, or any other `PageSource`.
        num_pages, num_bytes: the size, by one of them: pages, or bytes of host memory, rounded down to whole pages.
        layout: `layer_first`, a layer's pages side by side, or `page_first`, a page's layers side by side (one run of bytes a page and part).
        backend: auto (Triton for a pool on a GPU), triton (a kernel reads and writes host memory), or plain (copies of torch; reads
            page ids back to the host).

    Raises:
        TypeError, ValueError: an argument that does not fit, by name.
    """

    def __init__(
        self,
        source: PageSource,
        *,
        num_pages: int | None = None,
        num_bytes: int | None = None,
        layout: str = "layer_first",
        backend: str = "auto",
    ) -> None:
        if layout not in LAYOUTS:
            raise ValueError(f"layout: expected {' or '.join(LAYOUTS)}, got {layout!r}")
        if (num_pages is None) == (num_bytes is None):
            raise ValueError(f"num_pages, num_bytes: expected one of them, got {'none' if num_pages is None else 'both'}")
        self.source, self.layout = source, layout
        self.device = source.device
        self.backend = resolve_backend(backend, self.device)
        self.page_bytes = sum(part.page_bytes * len(part.layers) for part in source.parts)
        if num_pages is None:
            num_pages = check_int("num_bytes", num_bytes, self.page_bytes) // self.page_bytes
        self.num_pages = check_int("num_pages", num_pages, 1)
        self.allocator = PageAllocator(self.num_pages)
        self.parts = tuple(self._allocate(part.name, part.layers, part.storage, part.words()) for part in source.parts)
        self.layers = tuple(sorted({layer for part in self.parts for layer in part.layers}))
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._pending: list[_Pending] = []

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream that copies run on; None on a CPU."""
        return self._stream

    @property
    def takes_host_indices(self) -> bool:
        """Whether the copy kernel reads host page ids from host memory: page-first pools; others get them on the device."""
        return self.backend == "triton" and self.layout == "page_first"

    def alloc(self, num_pages: int) -> list[int]:
        """Ids of free host pages; waits, on the host, for copies that still read or write them. Raises `OutOfPages`."""
        pages = self.allocator.alloc(num_pages)
        self._synchronize(frozenset(pages), writes_only=False)
        return pages

    def free(self, pages: Sequence[int]) -> list[int]:
        """Give back a reference to each host page, in use by a copy under way or not; returns those that became free."""
        return self.allocator.free(pages)

    def fork(self, pages: Sequence[int]) -> list[int]:
        """One more reference to each host page."""
        return self.allocator.fork(pages)

    def backup(self, host_pages: PageIds, device_pages: PageIds, *, layers: Sequence[int] | None = None, per_layer: bool = False) -> Transfer:
        """Copy device page device_pages[i] to host page host_pages[i].

        Args:
            host_pages, device_pages: sequences of ints or [N] int32 or int64 tensors; host pages each once. Tensors on the GPU are not read back
                by the Triton backend, which copies nothing for an id out of range; it takes device_pages as they are, in memory it can read.
            layers: global ids; None: all.
            per_layer: one copy and one event a layer, so that `Transfer.wait(layer)` waits for no more than that one.

        Returns:
            A handle; what writes to the device pages next comes after its `wait`.

        Raises:
            TypeError, ValueError: ids of another type, shape or length, or (on the host) out of range; a layer that the pool does not hold.
        """
        return _run([self._job(host_pages, device_pages)], self._stream, self.layers, layers, per_layer, is_backup=True)

    def load(self, host_pages: PageIds, device_pages: PageIds, *, layers: Sequence[int] | None = None, per_layer: bool = False) -> Transfer:
        """Copy host page host_pages[i] to device page device_pages[i], after backups of these host pages that are under way; otherwise as `backup`.

        Returns:
            A handle; what reads the device pages comes after its `wait`.
        """
        return _run([self._job(host_pages, device_pages)], self._stream, self.layers, layers, per_layer, is_backup=False)

    def view(self, part: str, page: int) -> torch.Tensor:
        """One host page of a part, [layers of the part, …] in its dtype, no copy; waits, on the host, for copies into this page.

        Raises:
            ValueError: a part or page that the pool does not have.
        """
        found = next((p for p in self.parts if p.name == part), None)
        if found is None:
            raise ValueError(f"part: expected one of {', '.join(p.name for p in self.parts)}, got {part!r}")
        check_int("page", page, 0, self.num_pages - 1)
        self._synchronize(frozenset([page]), writes_only=True)
        return found.host[:, page].view(found.dtype).unflatten(1, found.page_shape)

    def synchronize(self) -> None:
        """Wait, on the host, for every copy under way."""
        self._synchronize(None, writes_only=False)

    def warmup(self) -> None:
        """Compile the kernels of backups and loads; copies nothing. The plain backend has nothing to compile."""
        if self.backend != "triton":
            return
        from m3attn.triton_kernels.copy_pages import copy_pages

        transfer = Transfer(self.device)
        with _behind_current(self._stream):
            device_pages = _record(as_tensor([-1], self.device))
            host_pages = self.normalise_host_pages([-1], transfer)
            for part in self.parts:
                copy_pages(part.device, part.host, device_pages, host_pages, device=self.device)
                copy_pages(part.host, part.device, host_pages, device_pages, device=self.device)
            transfer.record(self._stream)
        transfer.synchronize()

    def normalise_host_pages(self, host_pages: PageIds, transfer: Transfer) -> torch.Tensor:
        """Host page ids where the copy kernel reads them: pinned CPU memory for a page-first pool, else the device, copied without waiting."""
        if self.takes_host_indices:
            return transfer.keep(as_host_tensor(host_pages))
        return _record(as_tensor(host_pages, self.device))

    def _allocate(self, name: str, layers: tuple[int, ...], storage: torch.Tensor, words: torch.Tensor) -> _Part:
        shape = (len(layers), self.num_pages) if self.layout == "layer_first" else (self.num_pages, len(layers))
        host = torch.empty(*shape, words.shape[2], dtype=words.dtype, pin_memory=torch.cuda.is_available())
        if self.layout == "page_first":
            host = host.transpose(0, 1)
        return _Part(name, layers, words, host, storage.dtype, tuple(storage.shape[2:]))

    def _job(self, host_pages: PageIds, device_pages: PageIds, names: tuple[str, str] = ("host_pages", "device_pages")) -> _Job:
        host_pages = check_page_ids(names[0], host_pages, self.num_pages)
        device_pages = check_page_ids(names[1], device_pages, self.source.num_pages)
        check_page_pairs(names[0], host_pages, names[1], device_pages)
        if (
            self.backend == "triton"
            and isinstance(device_pages, torch.Tensor)
            and device_pages.device != self.device
            and not device_pages.is_pinned()
        ):
            raise ValueError(f"{names[1]}: expected a tensor on {self.device} or in pinned memory, it is not moved; got one on {device_pages.device}")
        return _Job(self, host_pages, device_pages)

    def _copies(self, job: _Job, transfer: Transfer, *, is_backup: bool) -> Callable[[int | None], None]:
        """A function that copies one layer, or with None all of them."""
        copy_part = self._plain_copy(job) if self.backend == "plain" else self._kernel_copy(job, transfer)

        def copy(layer: int | None) -> None:
            for part in self.parts:
                if layer is None or layer in part.layers:
                    first = 0 if layer is None else part.layers.index(layer)
                    at = slice(first, len(part.layers) if layer is None else first + 1)
                    copy_part(part.device[at], part.host[at], is_backup)

        return copy

    def _plain_copy(self, job: _Job) -> _CopyPart:
        host_pages, device_pages = host_list(job.host_pages), host_list(job.device_pages)

        def copy(device: torch.Tensor, host: torch.Tensor, is_backup: bool) -> None:
            log_launch("host_backup" if is_backup else "host_load", "plain", device=device, host=host, pages=len(host_pages))
            if is_backup:
                copy_plain(device, host, device_pages, host_pages)
            else:
                copy_plain(host, device, host_pages, device_pages)

        return copy

    def _kernel_copy(self, job: _Job, transfer: Transfer) -> _CopyPart:
        from m3attn.triton_kernels.copy_pages import copy_pages

        host_pages = self.normalise_host_pages(job.host_pages, transfer)
        device_pages = job.device_pages
        if not isinstance(device_pages, torch.Tensor):
            device_pages = as_tensor(device_pages, self.device)
        _record(device_pages)
        transfer.keep(device_pages)

        def copy(device: torch.Tensor, host: torch.Tensor, is_backup: bool) -> None:
            what = "host_backup" if is_backup else "host_load"
            log_launch(what, self.backend, device=device, host=host, host_pages=host_pages, device_pages=device_pages)
            if is_backup:
                copy_pages(device, host, device_pages, host_pages, device=self.device)
            else:
                copy_pages(host, device, host_pages, device_pages, device=self.device)

        return copy

    def _order(self, pages: frozenset[int] | None, stream: torch.cuda.Stream | None, *, writes_host: bool) -> None:
        """Make `stream` wait for copies under way that this one must not overtake."""
        self._pending = [p for p in self._pending if not p.transfer.is_done()]
        for pending in self._pending:
            if (writes_host or pending.writes_host) and pending.touches(pages):
                pending.transfer.wait(stream=stream)

    def _synchronize(self, pages: frozenset[int] | None, *, writes_only: bool) -> None:
        for pending in self._pending:
            if (pending.writes_host or not writes_only) and pending.touches(pages):
                pending.transfer.synchronize()
        self._pending = [p for p in self._pending if not p.transfer.is_done()]


class HostPoolGroup:
    """Host pools that are backed up and loaded together: an anchor and extra ones, each with page ids of its own.

    All copies of the group run on the anchor's stream.

    Args:
        anchor: the pool that every transfer copies, such as the host copy of `PagedKVPool.main`.
        extra: further pools by name, of any layouts, dtypes and backends, on the anchor's device.

    Raises:
        ValueError: pools on several devices.
    """

    def __init__(self, anchor: HostKVPool, extra: Mapping[str, HostKVPool] | None = None) -> None:
        self.anchor = anchor
        self.extra = dict(extra or {})
        for name, pool in self.extra.items():
            if pool.device != anchor.device:
                raise ValueError(f"extra[{name!r}]: expected a pool on {anchor.device}, as the anchor, got one on {pool.device}")
        self.layers = tuple(sorted({layer for pool in (anchor, *self.extra.values()) for layer in pool.layers}))

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream that copies run on; None on a CPU."""
        return self.anchor.stream

    def backup(
        self,
        host_pages: PageIds,
        device_pages: PageIds,
        *,
        extra: Mapping[str, PageTransfer | None] | None = None,
        layers: Sequence[int] | None = None,
        per_layer: bool = False,
    ) -> Transfer:
        """Copy pages of the anchor, and of the extra pools that `extra` has ids for, to the host; arguments as `HostKVPool.backup`.

        Raises:
            ValueError: a name in `extra` that is no pool of the group, or as `HostKVPool.backup`; nothing is copied then.
        """
        jobs = self._jobs(host_pages, device_pages, extra)
        return _run(jobs, self.stream, self.layers, layers, per_layer, is_backup=True)

    def load(
        self,
        host_pages: PageIds,
        device_pages: PageIds,
        *,
        extra: Mapping[str, PageTransfer | None] | None = None,
        layers: Sequence[int] | None = None,
        per_layer: bool = False,
    ) -> Transfer:
        """The way back; arguments and errors as `backup`. With `per_layer` a layer is loaded in all pools before the next one is."""
        jobs = self._jobs(host_pages, device_pages, extra)
        return _run(jobs, self.stream, self.layers, layers, per_layer, is_backup=False)

    def synchronize(self) -> None:
        """Wait, on the host, for every copy under way."""
        for pool in (self.anchor, *self.extra.values()):
            pool.synchronize()

    def _jobs(self, host_pages: PageIds, device_pages: PageIds, extra: Mapping[str, PageTransfer | None] | None) -> list[_Job]:
        jobs = [self.anchor._job(host_pages, device_pages)]
        for name, pages in (extra or {}).items():
            if name not in self.extra:
                raise ValueError(f"extra: expected names among {', '.join(self.extra) or 'none'}, got {name!r}")
            if pages is None or (pages.host_pages is None and pages.device_pages is None):
                continue
            if pages.host_pages is None or pages.device_pages is None:
                missing = "host_pages" if pages.host_pages is None else "device_pages"
                raise ValueError(f"extra[{name!r}].{missing}: expected page ids beside the other ones, got None")
            names = (f"extra[{name!r}].host_pages", f"extra[{name!r}].device_pages")
            jobs.append(self.extra[name]._job(pages.host_pages, pages.device_pages, names))
        return jobs


def _run(
    jobs: list[_Job],
    stream: torch.cuda.Stream | None,
    known_layers: tuple[int, ...],
    layers: Sequence[int] | None,
    per_layer: bool,
    *,
    is_backup: bool,
) -> Transfer:
    for index, layer in enumerate(layers or ()):
        if layer not in known_layers:
            raise ValueError(f"layers[{index}]: expected one of {', '.join(map(str, known_layers))}, got {layer!r}")
    steps: Sequence[int | None] = [None] if layers is None and not per_layer else known_layers if layers is None else layers
    transfer = Transfer(jobs[0].pool.device)
    with _behind_current(stream):
        copies = []
        for job in jobs:
            pages = _known_pages(job.host_pages)
            job.pool._order(pages, stream, writes_host=is_backup)
            copies.append(job.pool._copies(job, transfer, is_backup=is_backup))
        for step in steps:
            for copy in copies:
                copy(step)
            if step is not None and per_layer:
                transfer.record(stream, step)
        transfer.record(stream)
    if stream is not None:
        for job in jobs:
            job.pool._pending.append(_Pending(transfer, _known_pages(job.host_pages), is_backup))
    return transfer


def _record(ids: torch.Tensor) -> torch.Tensor:
    """Keep the memory of a device tensor until the current stream has read it; returns it."""
    if ids.is_cuda:
        ids.record_stream(torch.cuda.current_stream(ids.device))
    return ids


def _known_pages(ids: PageIds) -> frozenset[int] | None:
    if isinstance(ids, torch.Tensor) and ids.device.type != "cpu":
        return None
    return frozenset(host_list(ids))


@contextmanager
def _behind_current(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Put what follows on `stream`, after what the current stream holds."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield
