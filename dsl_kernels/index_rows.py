"""Where query rows stand in their requests, on the device: shared by the index kernels."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

NOWHERE = -(1 << 30)
"""The position of a row that no request owns."""


@dataclass(frozen=True)
class QueryRows:
    """Query rows [begin, end) of a batch. Offsets and lengths may hold anything: what is found stays in range."""

    mOffsets: cute.Tensor  # [B + 1], cu_seqlens_q
    mSeqLens: cute.Tensor  # [B]
    begin: Int32
    end: Int32
    max_seqlen_k: Int32

    @cute.jit
    def offset(self, request: Int32):
        """Where a request's rows begin, within the range."""
        return cutlass.min(cutlass.max(self.mOffsets[request], self.begin), self.end)

    @cute.jit
    def seq_len(self, request: Int32):
        return cutlass.min(cutlass.max(self.mSeqLens[request], 0), self.max_seqlen_k)

    @cute.jit
    def position(self, row: Int32):
        """The position of a row, negative for an empty one; NOWHERE where no request owns it."""
        low, high = Int32(0), Int32(self.mSeqLens.shape[0])  # the last request that does not begin after the row is in [low, high)
        while high - low > 1:
            middle = (low + high) >> 1
            before = self.mOffsets[middle] <= row
            low = middle if before else low
            high = high if before else middle
        begin, end, seq_len = self.mOffsets[0], self.mOffsets[low + 1], self.seq_len(low)
        return seq_len - end + row if begin <= row and row < end else Int32(NOWHERE)

    @cute.jit
    def num_tiles(self, tokens: cutlass.Constexpr[int]):
        """Tiles of `tokens` rows, none of which spans two requests: a bound from shapes alone, so some are empty."""
        return (self.end - self.begin) // tokens + self.mSeqLens.shape[0] + 1

    @cute.jit
    def first_tile(self, request: Int32, tokens: cutlass.Constexpr[int]):
        """No fewer than the tiles of the requests before it, without a scan."""
        return (self.offset(request) - self.begin) // tokens + request

    @cute.jit
    def tile(self, tile: Int32, tokens: cutlass.Constexpr[int]):
        """(request, first_row, rows, first_position, seq_len) of a tile; 0 rows where it is empty."""
        request, high = Int32(0), self.mSeqLens.shape[0]  # the last request that does not begin after the tile is in [request, high)
        while high - request > 1:
            middle = (request + high) // 2
            before = self.first_tile(middle, tokens) <= tile
            request = middle if before else request
            high = high if before else middle
        begin, end, seq_len = self.offset(request), self.offset(request + 1), self.seq_len(request)
        first_row = begin + (tile - self.first_tile(request, tokens)) * tokens
        rows = cutlass.min(end - first_row, tokens)
        rows = rows if first_row >= begin and rows > 0 else 0  # a tile behind the last request begins at its end or after it
        return request, first_row, rows, seq_len - self.mOffsets[request + 1] + first_row, seq_len

    @cute.jit
    def request_tile(self, request: Int32, tokens: cutlass.Constexpr[int]):
        """The same where a tile holds all rows of a request: the tile is the request, and nothing is searched for."""
        exists = request < self.mSeqLens.shape[0]
        request = cutlass.min(request, self.mSeqLens.shape[0] - 1)
        begin, end, seq_len = self.offset(request), self.offset(request + 1), self.seq_len(request)
        rows = cutlass.min(end - begin, tokens)
        rows = rows if exists and rows > 0 else 0
        return request, begin, rows, seq_len - self.mOffsets[request + 1] + begin, seq_len


@cute.jit
def blocks_up_to(position: Int32, block_shift: Int32, num_blocks: Int32):
    """Blocks of 2^block_shift keys that a query at `position` sees."""
    return cutlass.min(cutlass.max((position >> block_shift) + 1, 0), num_blocks)


@cute.jit
def prefix_sum(value: Int32, lane: Int32):
    """The sum of `value` over the warp's lanes up to this one."""
    for i in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(value, 1 << i)
        value = value + below if lane >= 1 << i else value
    return value
