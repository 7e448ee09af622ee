"""The paged cache of a model: K and V of every layer, index K of the sparse ones, and the pages that requests hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import torch

from m3attn.batch import LayerCache
from m3attn.checks import check_int
from m3attn.choice import UnsupportedProblem
from m3attn.config import M3Config
from m3attn.dtypes import E4M3, dtype_name, torch_dtype
from m3attn.pools.pages import PageAllocator
from m3attn.pools.parts import PoolPart, SubPool
from m3attn.pools.transfer import WARMUP_TOKENS, PageIds, as_tensor, check_page_ids, check_page_pairs, copy_plain, host_list, resolve_backend
from m3attn.pools.write import write_slots
from m3attn.problem import arch_number, arch_of
from m3attn.scales import ScaleLike
from m3attn.stages.execute import log_launch

KV_DTYPES = ("auto", "bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e5m2")
INDEX_DTYPES = ("auto", "bf16", "fp16", "fp32", "fp8_e4m3")
LAYOUTS = ("HND", "NHD")


class PagedKVPool:
    """Pages of `page_size` token slots for every layer of a model; page p of every layer belongs to the same tokens.

    Each part lies in one allocation: `kv` packed (K first), or `k` and `v`, for all layers, and `index_k` for the sparse ones. `layer(i)` views
    it as a `LayerCache`, without a copy. Slot s is token s % page_size of page s // page_size.

    Args:
        config: geometry, and which layers are sparse.
        num_pages, num_tokens, num_bytes: the size, by one of them: pages; tokens, rounded up to whole pages; or bytes of device memory,
            rounded down to whole pages.
        page_size: token slots of a page; divides config.block_size if a layer is sparse.
        layers: global ids of the layers held here (one stage of a pipeline); None: all.
        num_kv_heads: KV heads of this rank; None: config's.
        dtype: bf16, fp16 or fp32, what `auto` means below.
        kv_cache_dtype: auto, bf16, fp16, fp32, fp8_e4m3 (or fp8) or fp8_e5m2.
        index_cache_dtype: auto, bf16, fp16, fp32 or fp8_e4m3 (or fp8), independent of kv_cache_dtype.
        packed: K and V in one tensor, or in two.
        layout: how a page lies in memory: HND (head, token, dim) or NHD (token, head, dim). `LayerCache` has the same shapes either way.
        device: None: the current GPU, or the CPU without one.
        zero_on_alloc: the pool starts as zeros and `alloc` zeroes the pages that it returns, so that all bytes behind a sequence are finite;
            its layers' caches declare that, and implementations that need it take them.
        quant_method: anything; kept as `quant_method`, of the pool and of `main`, for the code that loads scales.
        backend: auto (Triton on a GPU), triton, or plain (torch; reads slots and page ids back to the host, so not for CUDA graphs).

    Raises:
        TypeError, ValueError: an argument that does not fit, by name.
        UnsupportedProblem: an e4m3 cache on a GPU before SM89.
    """

    def __init__(
        self,
        config: M3Config,
        *,
        num_pages: int | None = None,
        num_tokens: int | None = None,
        num_bytes: int | None = None,
        page_size: int = 128,
        layers: Sequence[int] | None = None,
        num_kv_heads: int | None = None,
        dtype: str | torch.dtype = torch.bfloat16,
        kv_cache_dtype: str | torch.dtype = "auto",
        index_cache_dtype: str | torch.dtype = "auto",
        packed: bool = True,
        layout: str = "HND",
        device: str | torch.device | None = None,
        zero_on_alloc: bool = False,
        quant_method: object | None = None,
        backend: str = "auto",
    ) -> None:
        if layout not in LAYOUTS:
            raise ValueError(f"layout: expected HND or NHD, got {layout!r}")
        self.config = config
        self.page_size = check_int("page_size", page_size, 1)
        self.layers = _layer_ids(config, layers)
        self.sparse_layers = tuple(i for i in self.layers if config.sparse_layers[i])
        if self.sparse_layers and config.block_size % page_size:
            raise ValueError(f"page_size: expected a divisor of config.block_size {config.block_size}, got {page_size}")
        self.num_kv_heads = check_int("num_kv_heads", config.num_kv_heads if num_kv_heads is None else num_kv_heads, 1)
        auto = dtype_name(dtype, argument="dtype", accepted=("bf16", "fp16", "fp32"))
        self.dtype = torch_dtype(auto)
        self.kv_dtype = _cache_dtype("kv_cache_dtype", kv_cache_dtype, auto, KV_DTYPES)
        self.index_dtype = _cache_dtype("index_cache_dtype", index_cache_dtype, auto, INDEX_DTYPES)
        self.packed, self.layout = packed, layout
        self.device = _full_device(device)
        self.backend = resolve_backend(backend, self.device)
        if E4M3 in (self.kv_dtype, self.index_dtype if self.sparse_layers else None) and 0 < arch_number(arch_of(self.device)) < 89:
            raise UnsupportedProblem(f"kv_cache_dtype, index_cache_dtype: fp8_e4m3 needs SM89 or later, got {arch_of(self.device)}")
        self.zero_on_alloc, self.quant_method = zero_on_alloc, quant_method

        self.num_pages = self._pages(num_pages, num_tokens, num_bytes)
        self.allocator = PageAllocator(self.num_pages)
        self.parts = tuple(self._allocate(name) for name in self._part_names())
        self._words = [part.words() for part in self.parts]
        self._caches = {layer: self._view(layer) for layer in self.layers}

    @property
    def num_tokens(self) -> int:
        """Token slots of the pool."""
        return self.num_pages * self.page_size

    @property
    def main(self) -> SubPool:
        """K and V of every layer, as a pool whose pages can be copied to the host."""
        return SubPool(self.device, self.num_pages, tuple(p for p in self.parts if p.name != "index_k"), self.quant_method)

    @property
    def index(self) -> SubPool:
        """Index K of the sparse layers, likewise. Raises ValueError without sparse layers."""
        if not self.sparse_layers:
            raise ValueError("index: expected sparse layers in this pool, got none")
        return SubPool(self.device, self.num_pages, tuple(p for p in self.parts if p.name == "index_k"))

    def bytes_per_token(self) -> dict[str, int]:
        """Bytes that a token takes in each part, over all its layers; their sum is what a token takes."""
        sizes = {}
        for name in self._part_names():
            layers, dims, dtype = self._geometry(name)
            sizes[name] = len(layers) * dims[0] * dims[1] * dtype.itemsize
        return sizes

    def layer(self, layer: int) -> LayerCache:
        """The cache of layer `layer`, by its global id: kv [pages, Hkv, page_size, 2 * D] or k and v, index_k [pages, page_size, Di].

        Raises:
            ValueError: a layer that this pool does not hold.
        """
        if layer not in self._caches:
            raise ValueError(f"layer: expected one of {_ids_text(self.layers)}, got {layer!r}")
        return self._caches[layer]

    def set_scales(self, layer: int, *, k_scale: ScaleLike = None, v_scale: ScaleLike = None, index_k_scale: ScaleLike = None) -> None:
        """Replace the scales of a layer: None (= 1), a float, or a one-element fp32 device tensor; `layer(i)` from now on carries them.

        Scales are None at first. A value is stored as value / scale, in whatever dtype.

        Raises:
            TypeError, ValueError: a scale of another form; an index scale for a layer without an index.
        """
        cache = self.layer(layer)
        if index_k_scale is not None and cache.index_k is None:
            raise ValueError(f"index_k_scale: expected None for dense layer {layer}, got {index_k_scale!r}")
        scaled = replace(cache, k_scale=k_scale, v_scale=v_scale, index_k_scale=index_k_scale)
        scaled.scales(self.device)
        self._caches[layer] = scaled

    def set_kv(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write keys and values into token slots.

        Args:
            layer: global id.
            slots: [T] int32 or int64 on the pool's device; one outside [0, num_tokens) writes nothing; of two rows with one slot either is stored.
            k, v: [T, Hkv, D] bf16, fp16 or fp32, divided by the layer's scales and rounded once (saturating for fp8); or of the cache's own fp8
                dtype: quantised already, stored as they are.

        Raises:
            TypeError, ValueError: an argument that does not fit, by name.
            NotImplementedError: k or v requires grad while gradients are enabled.
        """
        write_slots(self.layer(layer), self.backend, slots, k, v)

    def set_index_k(self, layer: int, slots: torch.Tensor, index_k: torch.Tensor) -> None:
        """Write index keys [T, Di] (or [T, 1, Di]) of a sparse layer into token slots; otherwise as `set_kv`."""
        write_slots(self._sparse_layer(layer), self.backend, index_slots=slots, index_k=index_k)

    def set(
        self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index_k: torch.Tensor, index_slots: torch.Tensor | None = None
    ) -> None:
        """`set_kv` and `set_index_k` in one launch, the same bytes. index_slots None: `slots`."""
        write_slots(self._sparse_layer(layer), self.backend, slots, k, v, slots if index_slots is None else index_slots, index_k)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens take."""
        return -(-check_int("num_tokens", num_tokens, 0) // self.page_size)

    def alloc(self, num_pages: int) -> list[int]:
        """Ids of `num_pages` free pages, zeroed with `zero_on_alloc`. Raises `OutOfPages` with the needed and the free number."""
        pages = self.allocator.alloc(num_pages)
        if self.zero_on_alloc and pages:
            ids = as_tensor(pages, self.device)
            for words in self._words:
                words.index_fill_(1, ids.long(), 0)
        return pages

    def free(self, pages: Sequence[int]) -> list[int]:
        """Give back a reference to each page; returns those that became free. Raises ValueError for a page that is free already."""
        return self.allocator.free(pages)

    def fork(self, pages: Sequence[int], num_tokens: int | None = None) -> list[int]:
        """Pages of a second request with the same first `num_tokens` tokens (None: whole pages).

        Full pages are shared, each with one more reference. A partly filled last page is copied to a new one, since both requests write to it.

        Raises:
            ValueError: too few pages for num_tokens, or a page that is free.
            OutOfPages: no page for the copy.
        """
        if num_tokens is None:
            return self.allocator.fork(pages)
        if self.pages_for(num_tokens) > len(pages):
            raise ValueError(f"pages: expected {self.pages_for(num_tokens)} pages for {num_tokens} tokens, got {len(pages)}")
        full = num_tokens // self.page_size
        if full == self.pages_for(num_tokens):
            return self.allocator.fork(pages[:full])
        shared = self.allocator.fork(pages[: full + 1])  # the last one only until its copy exists
        try:
            own = self.alloc(1)
            self.copy_pages(pages[full : full + 1], own)
        except BaseException:
            self.free(shared)
            raise
        self.free(shared[full:])
        return [*shared[:full], *own]

    def copy_pages(self, source: PageIds, target: PageIds) -> None:
        """Copy page source[i] to page target[i] in every part and layer, on the current stream. References do not change.

        Args:
            source, target: ids, as sequences or [N] int32 or int64 tensors, each target once. Given on the host, pages may be both source and
                target: all are read first. Tensors on the GPU are not read back: pages must not be both, and an id out of range copies nothing.

        Raises:
            TypeError, ValueError: ids of another type or shape, of different lengths, or (on the host) out of range.
        """
        source = check_page_ids("source", source, self.num_pages)
        target = check_page_ids("target", target, self.num_pages)
        check_page_pairs("source", source, "target", target)
        on_host = all(not isinstance(ids, torch.Tensor) or ids.device.type == "cpu" for ids in (source, target))
        overlap = on_host and not set(host_list(source)).isdisjoint(host_list(target))
        if self.backend == "plain" or overlap:
            for words in self._words:
                log_launch("pool_copy_pages", "plain", words=words, pages=len(source))
                copy_plain(words, words, source, target)
            return
        from m3attn.triton_kernels.copy_pages import copy_pages

        source_ids, target_ids = as_tensor(source, self.device), as_tensor(target, self.device)
        for words in self._words:
            log_launch("pool_copy_pages", self.backend, words=words, source=source_ids, target=target_ids)
            copy_pages(words, words, source_ids, target_ids, device=self.device)

    def move_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy pages as `copy_pages` and hand their references over: sources that are no targets become free. Page tables are the caller's.

        Raises:
            ValueError: a source that is free or a target that is neither free nor a source; nothing has changed then.
        """
        source, target = list(source), list(target)
        self.allocator.move(source, target)
        self.copy_pages(source, target)

    def warmup(self) -> None:
        """Compile the kernels of the sets, for rows of the pool's `dtype` and scales as they are now, and of `copy_pages`; writes nothing.

        `m3attn.warmup(pools=[pool])` calls it. The plain backend has nothing to compile.
        """
        if self.backend != "triton":
            return
        from m3attn.triton_kernels.copy_pages import copy_pages

        for layer, tokens in product(self.layers, WARMUP_TOKENS):
            slots = torch.full((tokens,), -1, device=self.device)
            k, v = (torch.zeros(tokens, self.num_kv_heads, self.config.head_dim, dtype=self.dtype, device=self.device) for _ in range(2))
            self.set_kv(layer, slots, k, v)
            if layer in self.sparse_layers:
                index_k = torch.zeros(tokens, self.config.index_dim, dtype=self.dtype, device=self.device)
                self.set_index_k(layer, slots, index_k)
                self.set(layer, slots, k, v, index_k)
        nowhere = torch.full((1,), -1, device=self.device)
        for words in self._words:
            copy_pages(words, words, nowhere, nowhere, device=self.device)

    def _sparse_layer(self, layer: int) -> LayerCache:
        if self.layer(layer).index_k is None:
            raise ValueError(f"layer: expected a sparse layer, one of {_ids_text(self.sparse_layers)}, got dense layer {layer}")
        return self.layer(layer)

    def _part_names(self) -> tuple[str, ...]:
        main = ("kv",) if self.packed else ("k", "v")
        return (*main, "index_k") if self.sparse_layers else main

    def _geometry(self, name: str) -> tuple[tuple[int, ...], tuple[int, int], torch.dtype]:
        """Layers, (heads, dim) of a token, and dtype of a part."""
        if name == "index_k":
            return self.sparse_layers, (1, self.config.index_dim), self.index_dtype
        dim = self.config.head_dim * (2 if name == "kv" else 1)
        return self.layers, (self.num_kv_heads, dim), self.kv_dtype

    def _pages(self, num_pages: int | None, num_tokens: int | None, num_bytes: int | None) -> int:
        given = {name: value for name, value in (("num_pages", num_pages), ("num_tokens", num_tokens), ("num_bytes", num_bytes)) if value is not None}
        if len(given) != 1:
            raise ValueError(f"num_pages, num_tokens, num_bytes: expected one of them, got {' and '.join(given) or 'none'}")
        if num_pages is not None:
            return check_int("num_pages", num_pages, 1)
        if num_tokens is not None:
            return self.pages_for(check_int("num_tokens", num_tokens, 1))
        page_bytes = self.page_size * sum(self.bytes_per_token().values())
        return check_int("num_bytes", num_bytes, page_bytes) // page_bytes

    def _allocate(self, name: str) -> PoolPart:
        layers, (heads, dim), dtype = self._geometry(name)
        inner = (self.page_size,) if name == "index_k" else (heads, self.page_size) if self.layout == "HND" else (self.page_size, heads)
        storage = torch.empty(len(layers), self.num_pages, *inner, dim, dtype=dtype, device=self.device)
        if self.zero_on_alloc:
            storage.view(torch.uint8).zero_()
        return PoolPart(name, layers, storage)

    def _view(self, layer: int) -> LayerCache:
        views: dict[str, Any] = {p.name: p.storage[p.layers.index(layer)] for p in self.parts if layer in p.layers}
        if self.layout == "NHD":
            views = {name: view if name == "index_k" else view.transpose(1, 2) for name, view in views.items()}
        return LayerCache(**views, zero_on_alloc=self.zero_on_alloc)


def _layer_ids(config: M3Config, layers: Sequence[int] | None) -> tuple[int, ...]:
    if layers is None:
        return tuple(range(config.num_layers))
    ids = tuple(layers)
    for index, layer in enumerate(ids):
        check_int(f"layers[{index}]", layer, 0, config.num_layers - 1)
    if not ids or any(a >= b for a, b in pairwise(ids)):
        raise ValueError(f"layers: expected ascending layer ids, got {list(ids)}")
    return ids


def _cache_dtype(argument: str, value: str | torch.dtype, auto: str, accepted: tuple[str, ...]) -> torch.dtype:
    name = dtype_name(value, argument=argument, accepted=accepted)
    return torch_dtype(auto if name == "auto" else name)


def _full_device(device: str | torch.device | None) -> torch.device:
    """A device with its index, as tensors carry it."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.empty(0, device=device).device


def _ids_text(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers)) or "none"
