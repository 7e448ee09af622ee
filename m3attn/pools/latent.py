"""The cache of multi-head latent attention: one latent row a token and layer, and the pages that requests hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch

from m3attn import device_checks
from m3attn.batch import LatentCache
from m3attn.checks import check_int, check_outputs, check_tensor
from m3attn.choice import UnsupportedProblem
from m3attn.dtypes import E4M3, FLOAT_DTYPES, dtype_name, is_fp8, torch_dtype
from m3attn.pools.insert import SlotValues, insert_plain
from m3attn.pools.pages import PageAllocator
from m3attn.pools.parts import PoolPart, SubPool
from m3attn.pools.transfer import WARMUP_TOKENS, resolve_backend
from m3attn.problem import arch_number, arch_of
from m3attn.scales import UNIT, Scale, ScaleLike
from m3attn.stages.execute import log_launch

DTYPES = ("bf16", "fp16", "fp32", "fp8_e4m3")


class LatentKVPool:
    """Pages of `page_size` token rows [latent | rotated key] for every layer; page p of every layer belongs to the same tokens.

    All layers lie in one allocation. `layer(i)` views it as a `LatentCache` for `prepare_prefill_qkv`, `rows(i)` as the kv of
    `sparse_mla_prefill`, both without a copy. Slot s is token s % page_size of page s // page_size, and row s of `rows(i)`.

    Args:
        num_layers: layers held here.
        num_pages, num_tokens, num_bytes: the size, by one of them: pages; tokens, rounded up to whole pages; or bytes of device memory,
            rounded down to whole pages.
        page_size: token rows of a page.
        latent_dim, rope_dim: 512 and 64 for DeepSeek-V3.
        dtype: bf16, fp16, fp32 or fp8_e4m3 (or fp8).
        device: None: the current GPU, or the CPU without one.
        zero_on_alloc: the pool starts as zeros and `alloc` zeroes the pages that it returns, so that all bytes behind a sequence are finite.
        quant_method: anything; kept as `quant_method`, of the pool and of `main`, for the code that loads scales.
        backend: auto (Triton on a GPU), triton, or plain (torch; reads slots back to the host, so not for CUDA graphs).

    Raises:
        TypeError, ValueError: an argument that does not fit, by name.
        UnsupportedProblem: an e4m3 cache on a GPU before SM89.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        num_pages: int | None = None,
        num_tokens: int | None = None,
        num_bytes: int | None = None,
        page_size: int = 64,
        latent_dim: int = 512,
        rope_dim: int = 64,
        dtype: str | torch.dtype = torch.bfloat16,
        device: str | torch.device | None = None,
        zero_on_alloc: bool = False,
        quant_method: object | None = None,
        backend: str = "auto",
    ) -> None:
        self.num_layers, self.page_size = check_int("num_layers", num_layers, 1), check_int("page_size", page_size, 1)
        self.latent_dim, self.rope_dim = check_int("latent_dim", latent_dim, 1), check_int("rope_dim", rope_dim, 0)
        self.dtype = torch_dtype(dtype_name(dtype, argument="dtype", accepted=DTYPES))
        self.device = torch.empty(0, device=device or ("cuda" if torch.cuda.is_available() else "cpu")).device
        self.backend = resolve_backend(backend, self.device)
        if self.dtype == E4M3 and 0 < arch_number(arch_of(self.device)) < 89:
            raise UnsupportedProblem(f"dtype: fp8_e4m3 needs SM89 or later, got {arch_of(self.device)}")
        self.zero_on_alloc, self.quant_method = zero_on_alloc, quant_method
        self.num_pages = self._pages(num_pages, num_tokens, num_bytes)
        self.allocator = PageAllocator(self.num_pages)
        shape = (self.num_layers, self.num_pages, self.page_size, self.latent_dim + self.rope_dim)
        storage = torch.empty(shape, dtype=self.dtype, device=self.device)
        if zero_on_alloc:
            storage.view(torch.uint8).zero_()
        self.parts = (PoolPart("latent", tuple(range(num_layers)), storage),)
        self._caches = [LatentCache(storage[layer]) for layer in range(num_layers)]

    @property
    def num_tokens(self) -> int:
        """Token rows of a layer."""
        return self.num_pages * self.page_size

    @property
    def main(self) -> SubPool:
        """Every layer's rows, as a pool whose pages can be copied to the host."""
        return SubPool(self.device, self.num_pages, self.parts, self.quant_method)

    def bytes_per_token(self) -> dict[str, int]:
        """Bytes that a token takes over all layers, by part."""
        return {"latent": self.num_layers * (self.latent_dim + self.rope_dim) * self.dtype.itemsize}

    def layer(self, layer: int) -> LatentCache:
        """The cache of a layer, [pages, page_size, latent + rope]. Raises ValueError for a layer that is not here."""
        return self._caches[check_int("layer", layer, 0, self.num_layers - 1)]

    def rows(self, layer: int) -> torch.Tensor:
        """The same bytes as [num_tokens, 1, latent + rope], whose row s is slot s."""
        return self.layer(layer).kv.view(self.num_tokens, 1, -1)

    def set_scale(self, layer: int, scale: ScaleLike) -> None:
        """Replace the scale of a layer: None (= 1), a float, or a one-element fp32 device tensor; `layer(i)` from now on carries it."""
        Scale.of(scale, argument="scale", device=self.device)
        self._caches[layer] = replace(self.layer(layer), scale=scale)

    def set(self, layer: int, slots: torch.Tensor, latent: torch.Tensor, k_pe: torch.Tensor) -> None:
        """Write latent rows and rotated keys into token slots.

        Args:
            layer: from 0 to num_layers - 1.
            slots: [T] int32 or int64; one outside [0, num_tokens) writes nothing; of two rows with one slot either is stored.
            latent: [T, latent] or [T, 1, latent] bf16, fp16 or fp32, divided by the layer's scale and rounded once (saturating for e4m3); or of an
                e4m3 pool's own dtype: quantised already, stored as it is.
            k_pe: [T, rope] or [T, 1, rope], already rotated, likewise.

        Raises:
            TypeError, ValueError: an argument that does not fit, by name.
        """
        cache = self.layer(layer)
        check_tensor("slots", slots, ["T"], (torch.int32, torch.int64), self.device)
        device_checks.check_slots("slots", slots, self.num_tokens)
        heads, scale = cache.kv[:, None], Scale.of(cache.scale, argument="scale")
        parts = {"latent": (latent, heads[..., : self.latent_dim]), "k_pe": (k_pe, heads[..., self.latent_dim :])}
        groups = []
        for name, (values, target) in parts.items():
            values = values[:, None] if isinstance(values, torch.Tensor) and values.dim() == 2 else values
            accepted = (*FLOAT_DTYPES, self.dtype) if is_fp8(self.dtype) else FLOAT_DTYPES
            check_tensor(name, values, [slots.shape[0], 1, target.shape[3]], accepted, self.device)
            check_outputs({"cache": target}, {name: values, "slots": slots})
            groups.append(SlotValues(values, target, slots, UNIT if is_fp8(values.dtype) else scale))
        for name, group in zip(parts, groups, strict=True):
            log_launch("latent_pool_set", self.backend, **{name: group.values, "slots": slots, "cache": group.cache, "scale": group.scale})
            if self.backend == "plain":
                insert_plain(group)
            else:
                from m3attn.triton_kernels.insert_slots import insert_slots

                insert_slots(None, None, group)

    def warmup(self) -> None:
        """Compile the kernels of `set`, for rows in bf16 (or the pool's own 16 or 32 bits) and the layers' scales as they are now; writes nothing."""
        if self.backend != "triton":
            return
        dtype = torch.bfloat16 if is_fp8(self.dtype) else self.dtype
        for layer, tokens in product(range(self.num_layers), WARMUP_TOKENS):
            slots = torch.full((tokens,), -1, device=self.device)
            latent, k_pe = (torch.zeros(tokens, dim, dtype=dtype, device=self.device) for dim in (self.latent_dim, self.rope_dim))
            self.set(layer, slots, latent, k_pe)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens take."""
        return -(-check_int("num_tokens", num_tokens, 0) // self.page_size)

    def alloc(self, num_pages: int) -> list[int]:
        """Ids of `num_pages` free pages, zeroed with `zero_on_alloc`. Raises `OutOfPages` with the needed and the free number."""
        pages = self.allocator.alloc(num_pages)
        if self.zero_on_alloc and pages:
            self.parts[0].words().index_fill_(1, torch.tensor(pages, device=self.device), 0)
        return pages

    def free(self, pages: Sequence[int]) -> list[int]:
        """Give back a reference to each page; returns those that became free. Raises ValueError for a page that is free already."""
        return self.allocator.free(pages)

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
