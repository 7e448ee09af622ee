"""What a pool holds, as bytes of pages: enough to copy pages without knowing what is in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclass(frozen=True, eq=False)
class PoolPart:
    """One kind of data (`kv`, `index_k`, …) of every layer that has it.

    Attributes:
        name: unique within its pool.
        layers: the layers' global ids, ascending.
        storage: [len(layers), pages, …], contiguous.
    """

    name: str
    layers: tuple[int, ...]
    storage: torch.Tensor

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of one layer."""
        return self.storage[0, 0].nbytes

    def words(self) -> torch.Tensor:
        """The storage as [len(layers), pages, words] of the widest integer type that divides a page; a view."""
        word = next(dtype for dtype in _WORDS if self.page_bytes % dtype.itemsize == 0)
        return self.storage.view(torch.uint8).flatten(2).view(word)


class PageSource(Protocol):
    """A pool on a device whose pages can be copied to the host and back: `PagedKVPool`, one of its sub-pools, or a pool of another kind."""

    @property
    def device(self) -> torch.device: ...

    @property
    def num_pages(self) -> int: ...

    @property
    def parts(self) -> tuple[PoolPart, ...]: ...


@dataclass(frozen=True, eq=False)
class SubPool:
    """Some parts of a pool, as a `PageSource`. `quant_method` is the pool's, for the parts that it describes."""

    device: torch.device
    num_pages: int
    parts: tuple[PoolPart, ...]
    quant_method: object | None = None
