"""Which columns of a padded batch hold tokens, and the pages, slots and lengths that follow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from m3attn.batch import PagedBatch


@dataclass(frozen=True, eq=False)
class Step:
    """One forward call of a model, as its layers need it.

    Attributes:
        batch: lengths and pages.
        slots: [B * S] int64, where each column's token goes; -1 for padding.
        packed: [B * S] int64, the column of each packed query row, padding last; None where queries stay in place.
        place: [B * S] int64, the inverse of `packed`.
    """

    batch: PagedBatch
    slots: torch.Tensor
    packed: torch.Tensor | None = None
    place: torch.Tensor | None = None

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """[B * S, …] by column -> by query row."""
        return x if self.packed is None else x.index_select(0, self.packed)

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `pack`."""
        return x if self.place is None else x.index_select(0, self.place)

    def to(self, device: torch.device) -> Step:
        """The same step on another device of the model."""
        if self.slots.device == device:
            return self
        tensors = ("page_table", "seq_lens", "cu_seqlens_q")
        moved: dict[str, Any] = {name: getattr(self.batch, name).to(device) for name in tensors}
        order = (None if self.packed is None else self.packed.to(device), None if self.place is None else self.place.to(device))
        return Step(replace(self.batch, **moved), self.slots.to(device), *order)


class Rows:
    """The rows of one cache, shared by its layers. Row b owns the pages b * pages_per_row and following, in every layer.

    Attributes:
        columns: columns seen so far: an int, or with `max_columns` a device tensor, which a compiled or captured step reads.
        pages_per_row: grows with the columns, unless `max_columns` fixes it.
        is_token: [B, pages_per_row * page_size] bool; what stands at or past `columns` counts for nothing.

    Args:
        batch_size: B.
        page_size, block_size: as in `PagedBatch`.
        max_columns: columns of a static cache; None: as many as come.
    """

    def __init__(self, batch_size: int, page_size: int, block_size: int, device: torch.device, max_columns: int | None = None) -> None:
        self.page_size, self.block_size, self.max_columns = page_size, block_size, max_columns
        self.pages_per_row = 0 if max_columns is None else -(-max_columns // page_size)
        self.is_token = torch.zeros(batch_size, self.capacity, dtype=torch.bool, device=device)
        self.columns: int | torch.Tensor = 0 if max_columns is None else torch.zeros((), dtype=torch.int64, device=device)
        if max_columns is not None and not torch.compiler.is_compiling():
            for buffer in (self.is_token, self.columns):
                torch._dynamo.mark_static_address(buffer)
        self._steps: dict[torch.device, Step] = {}

    @property
    def batch_size(self) -> int:
        return self.is_token.shape[0]

    @property
    def capacity(self) -> int:
        """Token slots of a row."""
        return self.pages_per_row * self.page_size

    def begin(self, new_columns: int, mask: torch.Tensor | None) -> Step:
        """Describe a forward call with `new_columns` columns more; the first layer's part.

        Args:
            mask: [B, at least columns + new_columns] bool, True for a token; None: all are. What it says of older columns is not read.

        Raises:
            ValueError: a mask of another shape, or more columns than a static cache has.
        """
        if mask is not None and (mask.dim() != 2 or mask.shape[0] != self.batch_size):
            raise ValueError(f"attention_mask: expected [{self.batch_size}, columns], one entry a token, got {list(mask.shape)}")
        if self.max_columns is None:
            new, columns = self._grow(new_columns, mask)
        else:
            new, columns = self._fill(new_columns, mask, self.max_columns)
        tokens = new.sum(1)
        before = columns.sum(1) - tokens
        base = torch.arange(self.batch_size, device=new.device)[:, None] * self.capacity
        slots = torch.where(new, base + before[:, None] + new.cumsum(1) - 1, -1).flatten()
        # One query a row stays in its place even if it is padding: it writes nothing, and nobody reads what it attends to.
        packs = mask is not None and new_columns > 1
        offsets = torch.arange(self.batch_size + 1, device=new.device) * new_columns
        packed = place = None
        if packs:
            offsets = torch.nn.functional.pad(tokens.cumsum(0), (1, 0))
            packed = (~new).flatten().int().argsort(stable=True)
            place = packed.argsort()
        pages = torch.arange(self.batch_size * self.pages_per_row, dtype=torch.int32, device=new.device)
        batch = PagedBatch(
            page_table=pages.view(self.batch_size, self.pages_per_row),
            seq_lens=(before + tokens).int(),
            cu_seqlens_q=offsets.int(),
            max_seqlen_q=new_columns,
            max_seqlen_k=columns.shape[1],
            page_size=self.page_size,
            block_size=self.block_size,
        )
        step = Step(batch, slots, packed, place)
        self._steps = {new.device: step}
        return step

    def _grow(self, count: int, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of `count` columns more, and which of all, hold tokens; makes room for them."""
        assert isinstance(self.columns, int)
        start, end = self.columns, self.columns + count
        if mask is not None and mask.shape[1] < end:
            raise ValueError(f"attention_mask: expected at least {end} columns, those in the cache included, got {mask.shape[1]}")
        if end > self.capacity:
            # Half as much again, so that a long generation copies its pages a few times and not at every page.
            self.pages_per_row = max(-(-end // self.page_size), self.pages_per_row * 3 // 2)
            self.is_token = torch.nn.functional.pad(self.is_token, (0, self.capacity - self.is_token.shape[1]))
        if mask is None:
            self.is_token[:, start:end] = True
        else:
            self.is_token[:, start:end] = mask[:, start:end]
        return self.is_token[:, start:end], self.is_token[:, :end]

    def _fill(self, count: int, mask: torch.Tensor | None, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As `_grow`, with a start that only the device knows; the second result covers the whole capacity."""
        if count > limit:
            raise ValueError(f"past_key_values: expected at most its {limit} columns, got {count}")
        column = torch.arange(count, device=self.is_token.device) + self.columns
        if mask is None:
            new = torch.ones(self.batch_size, count, dtype=torch.bool, device=column.device)
        elif mask.shape[1] < limit:
            raise ValueError(f"attention_mask: expected all {limit} columns of a static cache, as padding_mask makes it, got {mask.shape[1]}")
        else:
            new = mask.bool().index_select(1, column)
        self.is_token.index_copy_(1, column, new)
        seen = torch.arange(self.capacity, device=column.device) < self.columns + count
        return new, (self.is_token & seen)[:, :limit]

    def step(self, device: torch.device) -> Step:
        """What `begin` described, on a layer's device."""
        if device not in self._steps:
            self._steps[device] = next(iter(self._steps.values())).to(device)
        return self._steps[device]

    def end(self, new_columns: int) -> None:
        """The last layer's part: from now on the columns count. A forward call that failed before leaves the rows as they were."""
        self._steps = {}
        if isinstance(self.columns, int):
            self.columns += new_columns
        else:
            self.columns.add_(new_columns)

    def crop(self, columns: int) -> None:
        """Forget the last `columns` columns."""
        if isinstance(self.columns, int):
            self.columns = max(0, self.columns - columns)
        else:
            self.columns.sub_(columns).clamp_(min=0)

    def select(self, rows: torch.Tensor) -> None:
        """Become the rows with these indices; in place where the number stays, as captured steps need it."""
        chosen = self.is_token.index_select(0, rows.to(self.is_token.device))
        if chosen.shape == self.is_token.shape:
            self.is_token.copy_(chosen)
        else:
            self.is_token = chosen
