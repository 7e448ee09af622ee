"""Writing rows into token slots with torch: the plain twin of `triton_kernels/insert_slots.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from m3attn.reference.quantize import saturating_cast
from m3attn.scales import UNIT, Scale

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class SlotValues(NamedTuple):
    """Rows, the slots they go to, and the scale they are divided by: unit last stride everywhere but in slots."""

    values: torch.Tensor  # [T, H, D]
    cache: torch.Tensor  # [pages, H, page_size, D]
    slots: torch.Tensor  # [T]
    scale: Scale


def insert_plain(group: SlotValues) -> None:
    """Write values / scale, rounded once to the cache's dtype; the same bytes where dtype and scale allow it.

    A slot outside [0, pages * page_size) writes nothing. Of several rows with one slot the last one is written, whole.
    """
    values, cache, slots, scale = group
    page_size, bits = cache.shape[2], _BITS[cache.element_size()]
    slots, order = slots.long().sort(stable=True)
    is_last = torch.ones_like(slots, dtype=torch.bool)
    is_last[:-1] = slots[:-1] != slots[1:]
    written = is_last & (slots >= 0) & (slots < cache.shape[0] * page_size)
    slots, rows = slots[written], order[written]
    if values.dtype == cache.dtype and scale in (UNIT, Scale(1.0)):
        stored = values.view(bits)[rows]
    else:
        stored = saturating_cast(values[rows], cache.dtype, scale).view(bits)
    cache.view(bits)[slots // page_size, :, slots % page_size] = stored
