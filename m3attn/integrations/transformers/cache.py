"""A transformers cache whose layers are pages: K and V of every layer, index keys of the sparse ones."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, StaticLayer
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLSparseCacheLayer, MiniMaxM3VLSparseStaticCacheLayer

from m3attn.batch import LayerCache
from m3attn.config import M3Config
from m3attn.integrations.transformers.rows import Rows
from m3attn.modes import AttentionMode
from m3attn.pools.paged import PagedKVPool

REPLACED = (DynamicLayer, StaticLayer, MiniMaxM3VLSparseCacheLayer, MiniMaxM3VLSparseStaticCacheLayer)


class PagedLayer(CacheLayerMixin):
    """One layer of a paged cache, in transformers' cache interface. Prepared attention writes and reads it; `update` is not for it.

    The pages of a row are a run of its own, so that beams and batches are reordered by copying runs, as transformers' own layers do, and no
    step needs the host.

    Attributes:
        rows: shared by all layers of the cache; the first layer's operations act on it.
        pool: this layer's pages; None until the first write.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, layer: int, config: M3Config, mode: AttentionMode, max_columns: int | None, shared: list[Rows]) -> None:
        super().__init__()
        self.layer, self.config, self.mode, self.max_columns = layer, config, mode, max_columns
        self.is_compileable = max_columns is not None
        self._shared = shared
        self.pool: PagedKVPool | None = None

    @property
    def is_first(self) -> bool:
        return self.layer == 0

    @property
    def is_last(self) -> bool:
        return self.layer == self.config.num_layers - 1

    @property
    def rows(self) -> Rows | None:
        """None until the first write."""
        return self._shared[0] if self._shared else None

    def rows_for(self, batch_size: int, device: torch.device) -> Rows:
        """The rows, made at the first write.

        Raises:
            ValueError: another batch size than the cache has.
        """
        if not self._shared:
            self._shared.append(Rows(batch_size, self.mode.page_size, self.config.block_size, device, self.max_columns))
        rows = self._shared[0]
        if rows.batch_size != batch_size:
            raise ValueError(f"past_key_values: expected a batch of {rows.batch_size} as in the cache, got {batch_size}")
        return rows

    def write(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index_k: torch.Tensor | None) -> LayerCache:
        """Store k and v [T, Hkv, D] and index_k [T, Di] at slots [T], and return what attention reads."""
        pool = self.pool
        pages = self._shared[0].batch_size * self._shared[0].pages_per_row
        if pool is None or pool.num_pages != pages:
            pool = self._resize(pages, k)
        if index_k is None:
            pool.set_kv(self.layer, slots, k, v)
        else:
            pool.set(self.layer, slots, k, v, index_k)
        return pool.layer(self.layer)

    @torch.compiler.disable
    def _resize(self, num_pages: int, k: torch.Tensor) -> PagedKVPool:
        old, rows = self.pool, self._shared[0].batch_size
        self.pool = self._new_pool(num_pages, k.device, k.dtype, k.shape[1])
        if old is not None:
            for source, target in zip(_runs(old, rows), _runs(self.pool, rows), strict=True):
                target[:, : source.shape[1]] = source
        elif self.max_columns is not None and not torch.compiler.is_compiling():
            for part in self.pool.parts:
                torch._dynamo.mark_static_address(part.storage)
        self.dtype, self.device, self.is_initialized = k.dtype, k.device, True
        return self.pool

    def _new_pool(self, num_pages: int, device: torch.device, dtype: torch.dtype, heads: int) -> PagedKVPool:
        return PagedKVPool(
            self.config,
            num_pages=num_pages,
            page_size=self.mode.page_size,
            layers=[self.layer],
            num_kv_heads=heads,
            dtype=dtype,
            kv_cache_dtype=self.mode.kv_dtype,
            index_cache_dtype=self.mode.index_dtype,
            device=device,
            zero_on_alloc=True,
        )

    def _select(self, rows: torch.Tensor) -> None:
        """Become the rows with these indices, this layer's part of it; the first layer's part is also what layers share."""
        if self.pool is None:
            return
        old, per_row = self.pool, self._shared[0].pages_per_row
        count = old.num_pages // per_row
        if rows.shape[0] != count:
            self.pool = self._new_pool(rows.shape[0] * per_row, old.device, self.dtype, old.num_kv_heads)
        for source, target in zip(_runs(old, count), _runs(self.pool, rows.shape[0]), strict=True):
            target.copy_(source.index_select(0, rows.to(source.device)))
        if self.is_first:
            self._shared[0].select(rows)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: pages are made at the first write."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "past_key_values: expected a cache of transformers' own, got a paged one, which only a prepared model reads; call prepare(model)"
        )

    update_index = update

    def get_seq_length(self) -> int | torch.Tensor:
        return 0 if self.rows is None else self.rows.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.max_columns is not None:
            return self.max_columns, 0
        columns = self.get_seq_length()
        assert isinstance(columns, int)
        return columns + query_length, 0

    def get_max_length(self) -> int:
        return -1 if self.max_columns is None else self.max_columns

    @property
    def batch_size(self) -> int:
        """-1 before the first write, as transformers has it."""
        return -1 if self.rows is None else self.rows.batch_size

    def reset(self) -> None:
        if self.is_first and self.rows is not None:
            self.rows.crop(self.rows.is_token.shape[1])

    def crop(self, tokens_to_remove: int) -> None:
        """Forget as many columns at the end; a positive number is the length that is left, as older callers mean it."""
        removed = -int(tokens_to_remove)
        if self.is_first and self.rows is not None and removed:
            self.rows.crop(removed if removed > 0 else max(0, int(self.get_seq_length()) + removed))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.pool is not None:
            count = self.pool.num_pages // self._shared[0].pages_per_row
            self._select(torch.arange(count, device=self.device).repeat_interleave(repeats))

    def offload(self) -> None:
        raise NotImplementedError("past_key_values: a paged cache is not offloaded; use a cache without offloading")

    prefetch = offload


def paged_layer(cache: Any, layer: int, config: M3Config, mode: AttentionMode) -> PagedLayer:
    """The paged layer of a cache; an empty cache of transformers' becomes a paged one, in place.

    Raises:
        TypeError: not a cache that can be replaced.
        ValueError: one that holds tokens already, or is offloaded.
    """
    layers = getattr(cache, "layers", ())
    if layer >= len(layers) or not isinstance(layers[layer], PagedLayer):
        _adopt(cache, config, mode)
    return cache.layers[layer]


@torch.compiler.disable
def _adopt(cache: Any, config: M3Config, mode: AttentionMode) -> None:
    if not isinstance(cache, Cache) or any(type(own) not in REPLACED for own in cache.layers):
        kinds = ", ".join(sorted({type(own).__name__ for own in getattr(cache, "layers", ())})) or "no layers"
        raise TypeError(
            f"past_key_values: expected a DynamicCache or StaticCache, got {type(cache).__name__} ({kinds}); for fp8 see prepare(kv_cache_dtype=)"
        )
    if cache.offloading:
        raise ValueError("past_key_values: expected a cache without offloading, got one with it")
    filled = [int(own.get_seq_length()) for own in cache.layers]
    if any(filled):
        raise ValueError(f"past_key_values: expected an empty cache, or one that a prepared model filled, got {max(filled)} other tokens")
    static = [own.max_cache_len for own in cache.layers if isinstance(own, StaticLayer)]
    shared: list[Rows] = []
    cache.layers[:] = [PagedLayer(number, config, mode, static[0] if static else None, shared) for number in range(config.num_layers)]


def _runs(pool: PagedKVPool, rows: int) -> list[torch.Tensor]:
    """Each part's storage as [rows, pages, words]."""
    return [part.words()[0].unflatten(0, (rows, -1)) for part in pool.parts]
