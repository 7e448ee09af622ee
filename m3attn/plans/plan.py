"""`StepPlan`: one step's rows, lengths, pages, slots, ids and scratch, shared by all layers and rewritten in place for the next step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from m3attn.batch import DECODE_MAX_SEQLEN_Q, LayerCache, PagedBatch
from m3attn.checks import check_batch, check_index_key, check_int, check_key_value
from m3attn.dtypes import dtype_name, is_fp8
from m3attn.introspect import workspace_bytes
from m3attn.modes import AttentionMode
from m3attn.stages.qk_norm_rope_insert import HEAD_DIM, HeadCounts

PageTable = torch.Tensor | Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class PlanCapacity:
    """The most that a plan, or one of its parts, takes in a step: requests, query tokens of all of them, and query tokens of one."""

    requests: int
    tokens: int
    max_seqlen_q: int

    def __post_init__(self) -> None:
        for name in ("requests", "tokens", "max_seqlen_q"):
            check_int(name, getattr(self, name), 1)


@dataclass(frozen=True, eq=False)
class PlanPart:
    """Rows that run together, with one schedule.

    Attributes:
        name: `decode` or `prefill`, as the capacity was given.
        batch: these rows' requests, in buffers of fixed shape; requests not in use have length 0.
        index_batch: the same requests over the pages of the index cache; `batch` itself where both caches have the same pages.
        requests: [B] int32, which request of the caller each is; -1 where not in use.
        start, rows: the part's place in part order.
    """

    name: str
    batch: PagedBatch
    index_batch: PagedBatch
    requests: torch.Tensor
    start: int
    rows: int


class StepPlan:
    """What the layers of a step share. Shapes and bounds are fixed when it is built; `update` only writes contents, in place.

    With both capacities the rows of a step are split: requests of at most `decode.max_seqlen_q` queries go to the decode part while it has
    room and the others to the prefill part, wherever they stand, and each part runs with the implementation of its phase. Token rows are then
    gathered into part order and back through index tensors of fixed shape: one pass over q and index q, one over the output. A plan with one
    capacity gathers nothing.

    One plan serves one stream or graph at a time. A graph that was captured with a plan replays on what `update` wrote last.

    Attributes:
        parts: one or two `PlanPart`.
        tokens: token rows of a step, padding included; layers take up to so many rows in a plan of one part, exactly so many in a split one.
        positions, slots, index_slots: [tokens] int64; -1 for padding, which normalises to zero and writes no cache. `index_slots` is `slots` where
            both caches have the same pages.
        token_to_request: [tokens] int32, the caller's request of each row; -1 for padding.
        part_rows, token_rows: [tokens] int64, the token row of each part row and back; None in a plan of one part.
        ids: [Hkv, tokens, K] int32 in part order, the one buffer that indexers write and attention reads; None without index heads.
        ids_of: (heads, K, rows) of what `ids` holds for this step; None until a layer has written them. Every update clears it.
        workspace: scratch that all stages share; None if none needs any.

    Args:
        heads: (Hq, Hkv, Hi) of this rank; Hi 0 where all layers are dense.
        mode: the layers' resolved mode: page size, formats and implementations.
        max_seqlen_k: the most tokens of a request, those of the step included.
        decode, prefill: capacities; at least one.
        topk, block_size: of the sparse layers.
        num_pages, num_index_pages: pages of the caches, to check page ids that the host can see; None: not checked.
        own_index_pages: the index cache has a page table of its own, which `update` takes too.
        device: of every buffer.

    Raises:
        TypeError, ValueError: what does not fit, by name.
    """

    def __init__(
        self,
        heads: Sequence[int],
        mode: AttentionMode,
        max_seqlen_k: int,
        *,
        decode: PlanCapacity | None = None,
        prefill: PlanCapacity | None = None,
        topk: int = 16,
        block_size: int = 128,
        num_pages: int | None = None,
        num_index_pages: int | None = None,
        own_index_pages: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        self.heads, self.mode, self.topk, self.num_pages, self.num_index_pages = HeadCounts(*heads), mode, topk, num_pages, num_index_pages
        self.own_index_pages = own_index_pages
        self.max_seqlen_k, self.page_size, self.block_size = max_seqlen_k, mode.page_size, block_size
        # Through a tensor: "cuda" becomes the current GPU by number, as tensors name it.
        self.device = torch.empty(0, device=device).device
        capacities = {name: c for name, c in (("decode", decode), ("prefill", prefill)) if c is not None}
        if not capacities:
            raise ValueError("decode, prefill: expected at least one capacity, got None for both")
        check_int("max_seqlen_k", max_seqlen_k, 1)
        if own_index_pages and not self.heads.index:
            raise ValueError("own_index_pages: expected False in a plan for dense layers, got True")
        if decode is not None and prefill is not None and decode.max_seqlen_q > DECODE_MAX_SEQLEN_Q:
            raise ValueError(f"decode.max_seqlen_q: expected at most {DECODE_MAX_SEQLEN_Q} in a split plan, got {decode.max_seqlen_q}")
        self.tokens = sum(c.tokens for c in capacities.values())
        self.parts = tuple(self._parts(capacities))
        self.positions = self._full(self.tokens, torch.int64)
        self.slots = self._full(self.tokens, torch.int64)
        self.index_slots = self._full(self.tokens, torch.int64) if own_index_pages else self.slots
        self.token_to_request = self._full(self.tokens, torch.int32)
        self.part_rows = self.token_rows = None
        if len(self.parts) == 2:
            self.part_rows = torch.zeros(self.tokens, dtype=torch.int64, device=self.device)
            self.token_rows = torch.full((self.tokens,), self.tokens, dtype=torch.int64, device=self.device)
        self.ids: torch.Tensor | None = None
        if self.heads.index:
            check_int("topk", topk, 1)
            self.ids = torch.full((self.heads.kv, self.tokens, topk), -1, dtype=torch.int32, device=self.device)
        self.ids_of: tuple[int, int, int] | None = None
        needed = max(self._workspace_bytes(part) for part in self.parts)
        self.workspace = torch.empty(needed, dtype=torch.uint8, device=self.device) if needed else None

    @classmethod
    def for_layers(cls, layers: Sequence[Any], caches: Iterable[LayerCache], max_seqlen_k: int, **options: Any) -> StepPlan:
        """A plan for these layers over these caches, one cache a layer, everything checked against everything.

        Args:
            layers: `M3SparseAttention` and `M3DenseAttention`.
            caches: a `LayerCache` for each, for example a pool's.
            max_seqlen_k: as in the plan.
            options: `decode`, `prefill`, `own_index_pages`, `device` (default: the layers').

        Raises:
            TypeError, ValueError: a layer or cache that does not fit, by its number.
        """
        layers, caches = list(layers), list(caches)
        if not layers or len(layers) != len(caches):
            raise ValueError(f"caches: expected one cache for each of at least one layer, got {len(layers)} layers and {len(caches)} caches")
        first = max(layers, key=lambda layer: layer.heads.index)
        config, pages = first.config, min(cache.key_value()[0].shape[0] for cache in caches)
        index_pages = min((cache.index_k.shape[0] for cache in caches if cache.index_k is not None), default=None)
        options = {"device": first.device, "num_pages": pages, "num_index_pages": index_pages} | options
        plan = cls(first.heads, first.mode, max_seqlen_k, topk=config.topk, block_size=config.block_size, **options)
        for number, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
            try:
                layer.check(plan, cache)
            except (TypeError, ValueError) as error:
                raise type(error)(f"layer {number}: {error}") from error
        return plan

    def _full(self, rows: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), -1, dtype=dtype, device=self.device)

    def _parts(self, capacities: dict[str, PlanCapacity]) -> Iterable[PlanPart]:
        start, pages = 0, -(-self.max_seqlen_k // self.page_size)
        for name, capacity in capacities.items():
            batch = PagedBatch(
                page_table=torch.zeros(capacity.requests, pages, dtype=torch.int32, device=self.device),
                seq_lens=torch.zeros(capacity.requests, dtype=torch.int32, device=self.device),
                cu_seqlens_q=torch.zeros(capacity.requests + 1, dtype=torch.int32, device=self.device),
                max_seqlen_q=capacity.max_seqlen_q,
                max_seqlen_k=self.max_seqlen_k,
                page_size=self.page_size,
                block_size=self.block_size,
            )
            check_batch(batch, self.device, sparse=self.heads.index > 0)
            index_batch = replace(batch, page_table=torch.zeros_like(batch.page_table)) if self.own_index_pages else batch
            yield PlanPart(name, batch, index_batch, self._full(capacity.requests, torch.int32), start, capacity.tokens)
            start += capacity.tokens

    def _workspace_bytes(self, part: PlanPart) -> int:
        shape: dict[str, Any] = {"tokens": part.rows, "num_requests": part.batch.num_requests, "max_seqlen_q": part.batch.max_seqlen_q}
        shape |= {"max_seqlen_k": self.max_seqlen_k, "block_size": self.block_size}
        main = {"num_q_heads": self.heads.q, "num_kv_heads": self.heads.kv, "head_dim": HEAD_DIM, "kv_dtype": self.mode.kv_dtype}
        uses: dict[str, dict[str, Any]] = {"dense_attention": main}
        if self.heads.index:
            uses["sparse_attention"] = main | {"topk": self.topk}
            uses["index_topk"] = {"num_index_heads": self.heads.index, "head_dim": HEAD_DIM, "topk": self.topk, "kv_dtype": self.mode.index_dtype}
        keys = {stage: self.mode.implementations[f"{stage}/{part.batch.phase}"] for stage in uses}
        return max(workspace_bytes(stage, **shape, **own, impl=keys[stage]) for stage, own in uses.items())

    def check_cache(self, cache: LayerCache, *, sparse: bool) -> None:
        """That a cache has this plan's page size, heads, formats and device, so that no launch will refuse it.

        Raises:
            TypeError, ValueError: what does not fit, by name.
        """
        key, value = check_key_value(cache, self.parts[0].batch, self.device)
        cache.scales(self.device)
        if key.shape[1] != self.heads.kv:
            raise ValueError(f"cache.k: expected the plan's {self.heads.kv} KV heads, got {key.shape[1]}")
        if key.shape[3] != HEAD_DIM or value.shape[3] != HEAD_DIM:
            raise ValueError(f"cache: expected head dim {HEAD_DIM}, got {key.shape[3]} (K) and {value.shape[3]} (V)")
        if self.num_pages is not None and key.shape[0] < self.num_pages:
            raise ValueError(f"cache: expected at least the plan's {self.num_pages} pages, got {key.shape[0]}")
        formats = [("cache.k", key, self.mode.kv_dtype)]
        if sparse:
            index = check_index_key(cache, self.parts[0].batch, self.device)
            if index.shape[2] != HEAD_DIM:
                raise ValueError(f"cache.index_k: expected index dim {HEAD_DIM}, got {index.shape[2]}")
            if not self.own_index_pages and index.shape[0] < key.shape[0]:
                raise ValueError(f"cache.index_k: expected the {key.shape[0]} pages of cache.k, got {index.shape[0]}")
            if self.own_index_pages and self.num_index_pages is not None and index.shape[0] < self.num_index_pages:
                raise ValueError(f"cache.index_k: expected at least the plan's {self.num_index_pages} pages, got {index.shape[0]}")
            formats.append(("cache.index_k", index, self.mode.index_dtype))
        for name, tensor, want in formats:
            if dtype_name(tensor.dtype) != want:
                raise TypeError(f"{name}: expected {want} (mode {self.mode.mode}), got {dtype_name(tensor.dtype)}")

    def update(self, q_lens: Sequence[int], seq_lens: Sequence[int], page_table: PageTable, index_page_table: PageTable | None = None) -> None:
        """Describe the next step: write contents, in place, after everything was checked.

        Rows of the step are the requests' queries in the order given, padding after them. A request with q_len 0 takes no row.

        Args:
            q_lens, seq_lens: host lengths, one a request; seq_len includes the step's own tokens.
            page_table: [B, pages] int32 or int64 on any device, or a list of page ids a request.
            index_page_table: the index cache's, likewise, for a plan with `own_index_pages`.

        Raises:
            ValueError: lengths, requests, tokens or pages beyond the plan's capacities; nothing has been written then.
        """
        q_lens, seq_lens = [int(n) for n in q_lens], [int(n) for n in seq_lens]
        needed = self._checked_lengths(q_lens, seq_lens)
        table = self._checked_table("page_table", page_table, needed, self.num_pages)
        if (index_page_table is not None) != self.own_index_pages:
            raise ValueError(f"index_page_table: expected {'one' if self.own_index_pages else 'None'}, as the plan was built, got the other")
        index_table = None if index_page_table is None else self._checked_table("index_page_table", index_page_table, needed, self.num_index_pages)
        members = self._assign(q_lens)
        for part, numbers in zip(self.parts, members, strict=True):
            self._write(part, [q_lens[b] for b in numbers], [seq_lens[b] for b in numbers], numbers)
            _write_pages(part.batch, numbers, table)
            if index_table is not None:
                _write_pages(part.index_batch, numbers, index_table)
        if self.token_rows is not None and self.part_rows is not None:
            self._write_order(q_lens, members)
        self.refresh()

    def _checked_lengths(self, q_lens: list[int], seq_lens: list[int]) -> list[int]:
        """Pages that each request has tokens in."""
        if len(q_lens) != len(seq_lens):
            raise ValueError(f"q_lens and seq_lens: expected equal lengths, got {len(q_lens)} and {len(seq_lens)}")
        for name, lens in (("q_lens", q_lens), ("seq_lens", seq_lens)):
            bad = next((i for i, n in enumerate(lens) if n < 0), None)
            if bad is not None:
                raise ValueError(f"{name}: expected lengths >= 0, got {lens[bad]} at index {bad}")
        longest = max(seq_lens, default=0)
        if longest > self.max_seqlen_k:
            raise ValueError(f"seq_lens: expected at most the plan's max_seqlen_k {self.max_seqlen_k}, got {longest}")
        return [-(-n // self.page_size) for n in seq_lens]

    @staticmethod
    def _checked_table(name: str, page_table: PageTable, needed: list[int], num_pages: int | None) -> torch.Tensor:
        width, requests = max(needed, default=0), len(needed)
        if not isinstance(page_table, torch.Tensor):
            short = next((b for b, pages in enumerate(page_table) if b < len(needed) and len(pages) < needed[b]), None)
            if short is not None:
                raise ValueError(f"{name}: expected {needed[short]} pages for request {short}, got {len(page_table[short])}")
            rows = [[*pages[:width], *[0] * (width - len(pages))] for pages in page_table]
            page_table = torch.tensor(rows, dtype=torch.int32).reshape(len(rows), width)
        if page_table.dim() != 2 or page_table.shape[0] != requests or page_table.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name}: expected [{requests}, pages] int32 or int64, got {list(page_table.shape)} {page_table.dtype}")
        if page_table.shape[1] < width:
            raise ValueError(f"{name}: expected at least {width} columns for the longest request, got {page_table.shape[1]}")
        if page_table.device.type == "cpu" and num_pages is not None and needed:
            live = torch.arange(page_table.shape[1])[None, :] < torch.tensor(needed)[:, None]
            bad_pages = page_table[live & ((page_table < 0) | (page_table >= num_pages))]
            if bad_pages.numel():
                raise ValueError(f"{name}: expected page ids from 0 to {num_pages - 1}, got {bad_pages[0].item()}")
        return page_table

    def _assign(self, q_lens: list[int]) -> list[list[int]]:
        """The requests of each part, in the caller's order, within its capacity; what the decode part has no room for is prefill."""
        if len(self.parts) == 1:
            members = [list(range(len(q_lens)))]
        else:
            (decode, _), members = self.parts, [[], []]
            room = decode.rows
            for b, n in enumerate(q_lens):
                fits = n <= min(room, decode.batch.max_seqlen_q) and len(members[0]) < decode.batch.num_requests
                if n:
                    members[0 if fits else 1].append(b)
                    room -= n * fits
        for part, numbers in zip(self.parts, members, strict=True):
            longest, total = max((q_lens[b] for b in numbers), default=0), sum(q_lens[b] for b in numbers)
            if len(numbers) > part.batch.num_requests:
                raise ValueError(f"q_lens: expected at most {part.batch.num_requests} requests in the {part.name} part, got {len(numbers)}")
            if longest > part.batch.max_seqlen_q:
                raise ValueError(f"q_lens: expected at most max_seqlen_q {part.batch.max_seqlen_q} in the {part.name} part, got {longest}")
            if total > part.rows:
                raise ValueError(f"q_lens: expected at most {part.rows} tokens in the {part.name} part, got {total}")
        return members

    def _write(self, part: PlanPart, q_lens: list[int], seq_lens: list[int], numbers: list[int]) -> None:
        batch, spare = part.batch, part.batch.num_requests - len(numbers)
        offsets = [0, *accumulate(q_lens)]
        batch.seq_lens.copy_(torch.tensor(seq_lens + [0] * spare, dtype=torch.int32))
        batch.cu_seqlens_q.copy_(torch.tensor(offsets + [offsets[-1]] * spare, dtype=torch.int32))
        part.requests.copy_(torch.tensor(numbers + [-1] * spare, dtype=torch.int32))

    def _write_order(self, q_lens: list[int], members: list[list[int]]) -> None:
        first = [0, *accumulate(q_lens)]
        part_rows, token_rows = torch.zeros(self.tokens, dtype=torch.int64), torch.full((self.tokens,), self.tokens)
        for part, numbers in zip(self.parts, members, strict=True):
            tokens = torch.cat([torch.arange(0), *(torch.arange(first[b], first[b + 1]) for b in numbers)])
            rows = torch.arange(part.start, part.start + tokens.numel())
            part_rows[rows], token_rows[tokens] = tokens, rows
        assert self.part_rows is not None and self.token_rows is not None
        self.part_rows.copy_(part_rows)
        self.token_rows.copy_(token_rows)

    def refresh(self) -> None:
        """Recompute positions, slots and the token-to-request map from the parts' batches: on the device alone, so a graph may hold it.

        `update` does this; call it yourself after writing a part's `page_table`, `seq_lens` or `cu_seqlens_q` on the device.
        """
        located = [_locate(part) for part in self.parts]
        buffers = [self.positions, self.token_to_request, self.slots, *([self.index_slots] if self.own_index_pages else [])]
        for buffer, columns in zip(buffers, zip(*located, strict=True), strict=True):
            if self.token_rows is None:
                buffer.copy_(columns[0])
            else:
                padding = columns[0].new_full((1,), -1)
                buffer.copy_(torch.cat([*columns, padding]).index_select(0, self.token_rows))
        self.ids_of = None

    def check_rows(self, tokens: int) -> None:
        """That a layer's x may have so many rows.

        Raises:
            ValueError: more rows than the plan has, or fewer in a split plan.
        """
        if self.part_rows is not None and tokens != self.tokens:
            raise ValueError(f"x: expected the split plan's {self.tokens} rows (pad at the end), got {tokens}")
        if tokens > self.tokens:
            raise ValueError(f"x: expected at most the plan's {self.tokens} rows, got {tokens}")

    def rows_of(self, part: PlanPart, tokens: int) -> slice:
        """Where a part's rows lie in part order, in a step of `tokens` token rows."""
        return slice(part.start, part.start + part.rows) if self.part_rows is not None else slice(0, tokens)

    def arrange(self, x: torch.Tensor) -> torch.Tensor:
        """[T, …] in token order -> part order; x itself in a plan of one part. Padding rows hold any row."""
        if self.part_rows is None:
            return x
        if is_fp8(x.dtype):
            return x.view(torch.uint8).index_select(0, self.part_rows).view(x.dtype)
        return x.index_select(0, self.part_rows)

    def output(self, tokens: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer for results in part order, for `restore`; a split plan's has one zero row more, which padding reads."""
        if self.part_rows is None:
            return torch.empty(tokens, *shape, dtype=dtype, device=self.device)
        buffer = torch.empty(tokens + 1, *shape, dtype=dtype, device=self.device)
        buffer[tokens:].zero_()
        return buffer

    def restore(self, buffer: torch.Tensor) -> torch.Tensor:
        """`output`'s buffer, filled -> [T, …] in token order."""
        return buffer if self.token_rows is None else buffer.index_select(0, self.token_rows)

    def scratch(self, rows: int, part: PlanPart) -> torch.Tensor | None:
        """The shared workspace for a call with all of a part's rows, the size it was made for; None: let the stage allocate.

        Fewer rows may take more scratch, because fewer rows are split further.
        """
        return self.workspace if rows == part.rows else None


def _write_pages(batch: PagedBatch, numbers: list[int], table: torch.Tensor) -> None:
    width = min(table.shape[1], batch.page_table.shape[1])
    rows = table if len(numbers) == table.shape[0] else table[torch.tensor(numbers, dtype=torch.int64, device=table.device)]
    batch.page_table[: len(numbers), :width].copy_(rows[:, :width])


def _locate(part: PlanPart) -> tuple[torch.Tensor, ...]:
    """Position, caller's request, slot and (of a cache with own pages) index slot of each of a part's rows; -1 for padding and for queries before
    a request's start."""
    batch = part.batch
    row = torch.arange(part.rows, dtype=torch.int32, device=batch.seq_lens.device)
    offsets, last = batch.cu_seqlens_q, batch.num_requests - 1
    request = torch.searchsorted(offsets[1:], row, right=True).clamp(max=last)
    position = batch.seq_lens[request] - offsets[request + 1] + row
    live = (row < offsets[-1]) & (position >= 0)
    page = (position // batch.page_size).clamp(0, batch.page_table.shape[1] - 1).long()
    tables = [batch.page_table, *([part.index_batch.page_table] if part.index_batch is not batch else [])]
    slots = [table[request, page].long() * batch.page_size + position % batch.page_size for table in tables]
    return (
        torch.where(live, position, -1).long(),
        torch.where(row < offsets[-1], part.requests[request], -1),
        *(torch.where(live, slot, -1) for slot in slots),
    )
