"""What a step looks like: `PagedBatch` says which queries and keys there are, `LayerCache` where one layer's keys and values lie."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from m3attn.dtypes import typed_storage
from m3attn.scales import Scale, ScaleLike

DECODE_MAX_SEQLEN_Q = 16
"""Steps with at most this many queries a request take the decode and verify schedules."""


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """The requests of one step, as tensors on the device; copies nothing and reads nothing back.

    Query i of request b has position seq_lens[b] - q_len + i, where q_len = cu_seqlens_q[b + 1] - cu_seqlens_q[b]. A query at a
    negative position, and every query row at or beyond cu_seqlens_q[B], is empty: output 0, LSE -inf, ids -1.

    Attributes:
        page_table: [B, max_pages] int32, any row stride; logical page -> physical page. Entries at or past
            ceil(seq_len / page_size) never form an address.
        seq_lens: [B] int32, tokens in the cache including this step's; 0 is a padded row.
        cu_seqlens_q: [B + 1] int32, offsets of each request's queries among the T query rows.
        max_seqlen_q: host bound of q_len. Grids and buffers depend on the bounds and on shapes, never on device values.
        max_seqlen_k: host bound of seq_lens.
        page_size: token slots of a page.
        block_size: positions of a sparse block; the sparse stages need block_size % page_size == 0.
    """

    page_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    page_size: int = 128
    block_size: int = 128

    @property
    def num_requests(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def num_blocks(self) -> int:
        """Columns of a score tensor: ceil(max_seqlen_k / block_size)."""
        return -(-self.max_seqlen_k // self.block_size)

    @property
    def phase(self) -> str:
        """`decode` for one query a request, `verify` up to 16, else `prefill`; a host decision, so a captured graph keeps it."""
        if self.max_seqlen_q <= 1:
            return "decode"
        return "verify" if self.max_seqlen_q <= DECODE_MAX_SEQLEN_Q else "prefill"

    @classmethod
    def from_lengths(
        cls,
        q_lens: Sequence[int],
        seq_lens: Sequence[int],
        page_table: torch.Tensor,
        *,
        page_size: int = 128,
        block_size: int = 128,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
    ) -> PagedBatch:
        """Build from host lists; bounds default to the largest length.

        Raises:
            TypeError: lengths or page ids that are no integers.
            ValueError: lists of different lengths, negative lengths, a bound below a length, or a page table too small.
        """
        q_lens, seq_lens = _integers("q_lens", q_lens), _integers("seq_lens", seq_lens)
        if len(q_lens) != len(seq_lens):
            raise ValueError(f"q_lens and seq_lens: expected equal lengths, got {len(q_lens)} and {len(seq_lens)}")
        for name, lens in (("q_lens", q_lens), ("seq_lens", seq_lens)):
            bad = [i for i, n in enumerate(lens) if n < 0]
            if bad:
                raise ValueError(f"{name}: expected lengths >= 0, got {lens[bad[0]]} at index {bad[0]}")
        longest_q, longest_k = max(q_lens, default=0), max(seq_lens, default=0)
        max_seqlen_q = longest_q if max_seqlen_q is None else max_seqlen_q
        max_seqlen_k = longest_k if max_seqlen_k is None else max_seqlen_k
        if max_seqlen_q < longest_q:
            raise ValueError(f"max_seqlen_q: expected at least {longest_q}, the longest of q_lens, got {max_seqlen_q}")
        if max_seqlen_k < longest_k:
            raise ValueError(f"max_seqlen_k: expected at least {longest_k}, the longest of seq_lens, got {max_seqlen_k}")
        if not isinstance(page_table, torch.Tensor):
            raise TypeError(f"page_table: expected a tensor, got {type(page_table).__name__}")
        if page_table.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"page_table: expected int32 or int64 page ids, got {page_table.dtype}")
        if page_table.dim() != 2 or page_table.shape[0] != len(q_lens):
            raise ValueError(f"page_table: expected [{len(q_lens)}, max_pages], got {tuple(page_table.shape)}")
        if page_size < 1:
            raise ValueError(f"page_size: expected at least 1, got {page_size}")
        if page_table.shape[1] * page_size < longest_k:
            raise ValueError(
                f"page_table: expected at least {-(-longest_k // page_size)} columns for {longest_k} tokens in pages of {page_size}, "
                f"got {page_table.shape[1]}"
            )
        offsets = [0]
        for n in q_lens:
            offsets.append(offsets[-1] + n)
        device = page_table.device
        return cls(
            page_table=page_table.to(torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            cu_seqlens_q=torch.tensor(offsets, dtype=torch.int32, device=device),
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            page_size=page_size,
            block_size=block_size,
        )


def _integers(argument: str, values: Sequence[int]) -> list[int]:
    found = []
    for i, value in enumerate(values):
        try:
            found.append(operator.index(value))
        except TypeError:
            raise TypeError(f"{argument}: expected integers, got {value!r} at index {i}") from None
    return found


@dataclass(frozen=True, eq=False)
class LayerCache:
    """One layer's pages, read and written in place: any strides with unit last stride (HND, NHD, views of a larger allocation).

    Give either `kv` (packed) or `k` and `v`.

    Attributes:
        kv: [pages, Hkv, page_size, 2 * D], K first.
        k, v: [pages, Hkv, page_size, D], own storages.
        index_k: [pages, page_size, Di], the one shared index key head; None for a dense layer.
        kv_dtype, index_dtype: the fp8 format of uint8 storage; None means the tensor's own dtype.
        k_scale, v_scale, index_k_scale: None (= 1), a float, or a one-element fp32 device tensor; value = stored * scale.
        zero_on_alloc: the caller's word that all bytes behind a sequence, in the last of its pages, are finite, as in a pool that zeroes the pages
            it hands out. Some optional packages need that; m3attn's own kernels read caches that hold anything there.
    """

    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    index_k: torch.Tensor | None = None
    kv: torch.Tensor | None = None
    kv_dtype: str | torch.dtype | None = None
    index_dtype: str | torch.dtype | None = None
    k_scale: ScaleLike = None
    v_scale: ScaleLike = None
    index_k_scale: ScaleLike = None
    zero_on_alloc: bool = False

    def key_value(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as [pages, Hkv, page_size, D] views in their element type.

        Raises:
            ValueError: both or neither of `kv` and `k`, `v` given, or shapes that do not fit.
            TypeError: a dtype no kernel reads, or K and V of different dtypes.
        """
        if self.kv is not None:
            if self.k is not None or self.v is not None:
                raise ValueError("cache: expected either kv or k and v, got both")
            if self.kv.dim() != 4 or self.kv.shape[-1] % 2:
                raise ValueError(f"cache.kv: expected [pages, Hkv, page_size, 2 * D], got {tuple(self.kv.shape)}")
            packed = typed_storage(self.kv, self.kv_dtype, argument="cache.kv")
            head_dim = packed.shape[-1] // 2
            return packed[..., :head_dim], packed[..., head_dim:]
        if self.k is None or self.v is None:
            missing = " and ".join(n for n, t in (("k", self.k), ("v", self.v)) if t is None)
            raise ValueError(f"cache: expected kv, or both k and v, got no {missing}")
        if self.k.dim() != 4:
            raise ValueError(f"cache.k: expected [pages, Hkv, page_size, D], got {tuple(self.k.shape)}")
        if self.v.shape[:3] != self.k.shape[:3] or self.v.dim() != 4:
            raise ValueError(f"cache.v: expected {tuple(self.k.shape[:3])} + (D,) as cache.k, got {tuple(self.v.shape)}")
        if self.k.dtype != self.v.dtype:
            raise TypeError(f"cache.v: expected {self.k.dtype} as cache.k, got {self.v.dtype}")
        return (
            typed_storage(self.k, self.kv_dtype, argument="cache.k"),
            typed_storage(self.v, self.kv_dtype, argument="cache.v"),
        )

    def index_key(self) -> torch.Tensor:
        """The index keys as [pages, page_size, Di] in their element type.

        Raises:
            ValueError: this cache has none, or a shape that does not fit.
        """
        if self.index_k is None:
            raise ValueError("cache.index_k: expected [pages, page_size, Di], got None (a dense layer's cache)")
        if self.index_k.dim() != 3:
            raise ValueError(f"cache.index_k: expected [pages, page_size, Di], got {tuple(self.index_k.shape)}")
        return typed_storage(self.index_k, self.index_dtype, argument="cache.index_k")

    def scales(self, device: torch.device | None = None) -> tuple[Scale, Scale, Scale]:
        """k_scale, v_scale, index_k_scale, normalised; tensors must lie on `device` where it is given."""
        return (
            Scale.of(self.k_scale, argument="cache.k_scale", device=device),
            Scale.of(self.v_scale, argument="cache.v_scale", device=device),
            Scale.of(self.index_k_scale, argument="cache.index_k_scale", device=device),
        )


@dataclass(frozen=True, eq=False)
class LatentCache:
    """One layer's tokens of multi-head latent attention, read and written in place: any strides with unit last stride.

    Attributes:
        kv: [pages, page_size, latent + rope]: latent dims, which are keys and values of every head, then the rotated dims of the keys.
            A flat pool of rows is [tokens, 1, latent + rope], as `sparse_mla_prefill` takes it.
        kv_dtype: the fp8 format of uint8 storage; None means the tensor's own dtype.
        scale: None (= 1), a float, or a one-element fp32 device tensor; value = stored * scale.
    """

    kv: torch.Tensor
    kv_dtype: str | torch.dtype | None = None
    scale: ScaleLike = None

    def tokens(self) -> torch.Tensor:
        """`kv` in its element type.

        Raises:
            ValueError: a shape that does not fit.
            TypeError: a dtype no kernel reads.
        """
        if self.kv.dim() != 3:
            raise ValueError(f"cache.kv: expected [pages, page_size, latent + rope], got {tuple(self.kv.shape)}")
        return typed_storage(self.kv, self.kv_dtype, argument="cache.kv")
