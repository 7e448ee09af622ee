"""Host side of `primitives.tile_rows`: how many tiles of query rows a launch needs, from shapes only."""

from __future__ import annotations

from m3attn.batch import PagedBatch
from m3attn.triton_kernels.launch import next_power_of_2


def num_row_tiles(rows: int, num_requests: int, block_t: int) -> int:
    """Programs that cover `rows` query rows of `num_requests` requests and the padded rows behind them."""
    return rows if block_t == 1 else rows // block_t + num_requests + 1


def block_b(batch: PagedBatch) -> int:
    """Offsets that `find_request` reads at a time."""
    return min(1024, max(16, next_power_of_2(batch.num_requests)))
