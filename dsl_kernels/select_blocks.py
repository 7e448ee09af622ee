"""The selection, for Hopper and Blackwell: for every (KV group, query token) the K best blocks of its scores, exactly and in ascending order.

A few lanes of a warp share a row. Where their registers hold all of it and K is 16, 32 or 64, select_held.py reads it once. What it leaves over, rows
with NaN or infinities among the best or with too many of these in one lane, takes the general way, and so do longer rows and other K.

The general way: first the K-th largest score. Each lane sorts `width` of the row's scores at a time by a network, keeps the largest
`width` it has seen, and the lanes merge what they kept, halving each one's part at every merge. No step depends on the values. Then the row is read
again (from L1 or L2) and what reaches that score is written in order of its id. Only where ties leave too many does a third walk, in order of ids,
keep the lowest. Nothing is sorted by id, and no score moves together with one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from m3attn.calls import IndexTopkCall, SelectBlocksCall
from m3attn.dsl_kernels import index_rows, select_held, sorting_networks
from m3attn.dsl_kernels.common.kernels import CuteKernel
from m3attn.dsl_kernels.index_rows import QueryRows
from m3attn.dsl_kernels.select_held import HeldRow, HeldRows
from m3attn.dsl_kernels.sorting_networks import NEGATIVE_INFINITY, bitonic_merge, put_in_order, sorting_network

WARPS = 4
NAN = float("nan")
STEP = 16
"""Scores that a lane looks at in one step of the second walk: four groups of four neighbours, a byte of bits for each."""

WIDE_STEP = 32
"""The same where a lane's chosen need no order: as many loads under way, as many bits as a word has."""


@dataclass(frozen=True)
class Variant:
    """`width`: a power of two from 16 on that is at least K. `lanes` share a row. `vector`: scores can be read 16 bytes at a time.

    `after_scores`: the kernel before this one writes scores only, and has waited for all earlier ones before this one can begin.
    `held`: K is `width`, a row's ids are neighbours in memory, and its lanes' registers hold any row.
    """

    width: int
    lanes: int
    vector: bool
    after_scores: bool
    held: bool


def bit(i: int) -> int:
    """Bit i of an Int32."""
    return 1 << i if i < 31 else -(1 << 31)


def assign(tensor: cute.Tensor, values: list[Float32]) -> None:
    for i, value in enumerate(values):
        tensor[i] = value


class SelectBlocks:
    def __init__(self, variant: Variant) -> None:
        self.width, self.lanes, self.vector, self.after_scores = variant.width, variant.lanes, variant.vector, variant.after_scores
        self.held, self.held_rows = variant.held, HeldRows(self.width, self.lanes, self.vector)
        self.short_cut = self.lanes == 32 and self.width <= 32 and not self.held

    @cute.jit
    def __call__(
        self,
        mScores: cute.Tensor,  # [Hkv, row_end - row_begin, at least num_blocks] fp32
        mOut: cute.Tensor,  # [Hkv, T, K]
        mSeqLens: cute.Tensor,  # [B]
        mOffsets: cute.Tensor,  # [B + 1], cu_seqlens_q
        row_begin: Int32,
        row_end: Int32,
        max_seqlen_k: Int32,
        num_blocks: Int32,
        block_shift: Int32,  # log2 of the block size
        init_blocks: Int32,
        local_blocks: Int32,
        stream: cuda.CUstream,
    ):
        rows_of_cta = WARPS * (32 // self.lanes)
        self.kernel(mScores, mOut, mSeqLens, mOffsets, row_begin, row_end, max_seqlen_k, num_blocks, block_shift, init_blocks, local_blocks).launch(
            grid=(cute.ceil_div(row_end - row_begin, rows_of_cta), mOut.shape[0], 1),
            block=(32 * WARPS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        mScores: cute.Tensor,
        mOut: cute.Tensor,
        mSeqLens: cute.Tensor,
        mOffsets: cute.Tensor,
        row_begin: Int32,
        row_end: Int32,
        max_seqlen_k: Int32,
        num_blocks: Int32,
        block_shift: Int32,
        init_blocks: Int32,
        local_blocks: Int32,
    ):
        if cutlass.const_expr(not self.after_scores):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        tile, head, _ = cute.arch.block_idx()
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        # Last rows first: they see most blocks, and short rows fill the gaps at the end.
        row = row_end - 1 - ((tile * WARPS + warp) * (32 // self.lanes) + lane // self.lanes)
        lane = lane % self.lanes
        exists = row >= row_begin
        row = cutlass.max(row, row_begin)
        topk = self.width if cutlass.const_expr(self.held) else mOut.shape[2]

        position = QueryRows(mOffsets, mSeqLens, row_begin, row_end, max_seqlen_k).position(row)
        live = index_rows.blocks_up_to(position, block_shift, num_blocks)
        chosen = cutlass.min(live, topk)
        num_local = cutlass.min(chosen, local_blocks)
        first = cutlass.min(chosen - num_local, init_blocks)
        last = live - num_local
        wanted = chosen - num_local - first  # of the scores [first, last)
        ranked = exists and live > topk and wanted > 0
        last = last if ranked else first
        gOut = mOut[head, row, None]
        gScores = mScores[head, row - row_begin, None]
        if exists and (not ranked or cutlass.const_expr(not self.held)):
            self.write_forced(gOut, first, wanted, live, chosen, topk, lane)

        if cutlass.const_expr(self.after_scores):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        longest = cute.arch.warp_redux_sync((live if cutlass.const_expr(self.held) else last) if ranked else 0, "max")
        if cutlass.const_expr(self.held):
            if longest > 0:
                shortest = cute.arch.warp_redux_sync(last if ranked else 0, "min")
                row_first, row_last, row_live = [end if ranked else 0 for end in (first, last, live)]
                if self.held_rows.write(HeldRow(gScores, gOut, row_first, row_last, row_live, shortest, ranked, lane), longest):
                    longest = 0
            if longest > 0 and ranked:
                self.write_forced(gOut, first, wanted, live, chosen, topk, lane)
        if cutlass.const_expr(self.short_cut):
            smem = cutlass.memory.SmemAllocator()
            sScores = smem.allocate_tensor(Float32, cute.make_layout((32, WARPS)), 16)[None, warp]
            sIds = smem.allocate_tensor(Int32, cute.make_layout((32, WARPS)), 16)[None, warp]
            if longest > 0:
                longest = self.write_few(gScores, gOut, sScores, sIds, first, last, longest, lane, wanted)
        if longest > 0:
            bound = self.nth_largest(gScores, first, last, longest, lane, wanted)
            count = self.write_ids(gScores, gOut, first, last, longest, lane, bound, wanted)
            is_tied = ranked and (count > wanted or bound == Float32(NEGATIVE_INFINITY))  # NaN, which reaches nothing, counts as -inf
            if cute.arch.vote_any_sync(is_tied):
                cute.arch.sync_warp()
                self.write_ids_of_ties(gScores, gOut, first, last, longest, lane, bound, wanted, is_tied)

    @cute.jit
    def write_forced(self, gOut, first, wanted, live, chosen, topk, lane):
        """Ids that no score decides."""
        for i in cutlass.range(lane, topk, self.lanes, unroll=1):
            if i < first or i >= first + wanted or live <= topk:
                gOut[i] = (i if i < first or live <= topk else live - chosen + i) if i < chosen else -1

    @cute.jit
    def load(
        self,
        gScores,
        start,
        groups: cutlass.Constexpr[int],
        lane,
        first,
        last,
        absent: cutlass.Constexpr[float],
        nan_is_lowest: cutlass.Constexpr[bool] = False,
    ):
        """The lane's groups of four scores among those from `start` on, `absent` outside [first, last). `nan_is_lowest`: -inf for NaN.
        Lanes take groups in turn."""
        scores = [cute.make_rmem_tensor(4, Float32) for _ in range(groups)]
        for group in cutlass.range_constexpr(groups):
            column = start + (group * self.lanes + lane) * 4
            scores[group].fill(NEGATIVE_INFINITY)
            if cutlass.const_expr(self.vector):
                if column < last:
                    cute.autovec_copy(cute.local_tile(gScores, (4,), (column // 4,)), scores[group])
            else:
                for i in cutlass.range_constexpr(4):
                    if column + i < last:
                        scores[group][i] = gScores[column + i]
        # No score is looked at before all are on their way.
        for group in cutlass.range_constexpr(groups):
            column = start + (group * self.lanes + lane) * 4
            if cutlass.const_expr(nan_is_lowest):
                for i in cutlass.range_constexpr(4):
                    scores[group][i] = cute.arch.fmax(scores[group][i], Float32(NEGATIVE_INFINITY))
            if column < first or column + 4 > last:
                for i in cutlass.range_constexpr(4):
                    is_inside = column + i >= first and column + i < last
                    scores[group][i] = scores[group][i] if is_inside else Float32(absent)
        return [scores[i // 4][i % 4] for i in range(4 * groups)]

    @cute.jit
    def write_few(self, gScores, gOut, sScores, sIds, first, last, longest, lane, wanted):
        """Most rows' short cut: the ids by way of at most 32 candidates, one a lane. 0 if it came to an end, else `longest`.

        The wanted-th largest of the lanes' maxima is a bound that at least so many scores reach, and few more where large scores do not crowd in few
        lanes. Too many candidates, ties too many, NaN among what is wanted: nothing is written.
        """
        best = Float32(NEGATIVE_INFINITY)
        for start in cutlass.range(0, longest, WIDE_STEP * 32, unroll=1):
            scores = self.load(gScores, start, WIDE_STEP // 4, lane, first, last, NAN)  # which a maximum ignores
            for i in cutlass.range_constexpr(WIDE_STEP):
                best = cute.arch.fmax(best, scores[i])
        bound = cute.arch.shuffle_sync(sort_lanes(best, lane), wanted - 1)

        count = Int32(0)
        for start in cutlass.range(0, longest, WIDE_STEP * 32, unroll=1):
            scores = self.load(gScores, start, WIDE_STEP // 4, lane, first, last, NAN)
            reach = Int32(0)
            for i in cutlass.range_constexpr(WIDE_STEP):
                reach = reach | bit(i) if scores[i] >= bound else reach
            own = Int32(cute.arch.popc(reach))
            up_to = index_rows.prefix_sum(own, lane)
            place = count + up_to - own
            while reach != 0:
                i = 31 - Int32(cute.arch.clz(reach & -reach))
                reach = reach & (reach - 1)
                if place < 32:
                    column = start + (i // 4 * 32 + lane) * 4 + i % 4
                    sIds[place] = column
                    sScores[place] = gScores[column]
                place += 1
            count += cute.arch.shuffle_sync(up_to, 31)
        cute.arch.sync_warp()

        if count >= wanted and count <= 32 and bound > Float32(NEGATIVE_INFINITY):
            score = sScores[lane] if lane < count else Float32(NEGATIVE_INFINITY)
            bound = cute.arch.shuffle_sync(sort_lanes(score, lane), wanted - 1)
            # Ids negated, so that the lowest come first; as fp32 they are exact.
            key = Float32(-sIds[lane]) if lane < count else Float32(NEGATIVE_INFINITY)
            is_chosen = score >= bound
            if Int32(cute.arch.popc(cute.arch.vote_ballot_sync(is_chosen))) > wanted:
                greater = Int32(cute.arch.popc(cute.arch.vote_ballot_sync(score > bound)))
                ties = sort_lanes(key if score == bound else Float32(NEGATIVE_INFINITY), lane)
                last_tie = cute.arch.shuffle_sync(ties, wanted - greater - 1)
                is_chosen = score > bound or (score == bound and key >= last_tie)
            order = sort_lanes(key if is_chosen else Float32(NEGATIVE_INFINITY), lane)
            if lane < wanted:
                gOut[first + lane] = Int32(-order)
            longest = Int32(0)
        return longest

    @cute.jit
    def nth_largest(self, gScores, first, last, longest, lane, wanted):
        """The wanted-th largest score, in every lane of the row."""
        width = self.width
        largest = cute.make_rmem_tensor(width, Float32)
        largest.fill(NEGATIVE_INFINITY)
        for start in cutlass.range(0, longest, width * self.lanes, unroll=1):
            fresh = self.load(gScores, start, width // 4, lane, first, last, NEGATIVE_INFINITY, nan_is_lowest=True)
            fresh = put_in_order(fresh, sorting_network(width))
            if start > 0:
                fresh = put_in_order([cute.arch.fmax(largest[i], fresh[width - 1 - i]) for i in range(width)], bitonic_merge(width))
            assign(largest, fresh)
        kept, shift = merge_lanes([largest[i] for i in range(width)], self.lanes, lane)
        # Element n of the merged sequence lies in lane n // len(kept), times 2^shift where lanes hold copies.
        index = cutlass.max(wanted - 1, 0)
        bound = Float32(NEGATIVE_INFINITY)
        for i in cutlass.range_constexpr(len(kept)):
            from_lane = self.shuffle(kept[i], (index // len(kept)) << shift)
            bound = from_lane if index % len(kept) == i else bound
        return bound

    @cute.jit
    def shuffle(self, value, source):
        """`value` of lane `source` of the row's lanes."""
        return cute.arch.shuffle_sync(value, cute.arch.lane_idx() // self.lanes * self.lanes + source)

    @cute.jit
    def write_ids(self, gScores, gOut, first, last, longest, lane, bound, wanted):
        """Ids of scores that reach `bound`, ascending, from gOut[first] on; how many there are. Where too many, those written mean nothing."""
        count = Int32(0)
        for start in cutlass.range(0, longest, STEP * self.lanes, unroll=1):
            reach = Int32(0)  # bit i of byte g: neighbour i of group g
            scores = self.load(gScores, start, STEP // 4, lane, first, last, NAN)
            for i in cutlass.range_constexpr(STEP):
                reach = reach | (1 << (i // 4 * 8 + i % 4)) if scores[i] >= bound else reach
            # Bytes of `up_to` count the chosen of each group in the lanes up to this one: a row's order is by group, then lane, then neighbour.
            own = reach - ((reach >> 1) & 0x05050505)
            own = (own & 0x03030303) + ((own >> 2) & 0x03030303)
            up_to = own
            for i in cutlass.range_constexpr(self.lanes.bit_length() - 1):
                below = cute.arch.shuffle_sync_up(up_to, 1 << i)
                up_to = up_to + below if lane >= 1 << i else up_to
            total = self.shuffle(up_to, self.lanes - 1)
            place = up_to - own + (total << 8) + (total << 16) + (total << 24)
            while reach != 0:
                bit = 31 - Int32(cute.arch.clz(reach & -reach))
                reach = reach & (reach - 1)
                i = count + ((place >> (bit & 24)) & 255)
                place += 1 << (bit & 24)
                if i < wanted:
                    gOut[first + i] = start + ((bit >> 3) * self.lanes + lane) * 4 + (bit & 7)
            pairs = (total & 0x00FF00FF) + ((total >> 8) & 0x00FF00FF)
            count += (pairs & 0xFFFF) + (pairs >> 16)
        return count

    @cute.jit
    def write_ids_of_ties(self, gScores, gOut, first, last, longest, lane, bound, wanted, is_tied):
        """The same for rows with more ties of `bound` than there is room for: the lowest ids among them. NaN counts as -inf here."""
        greater = Int32(0)
        for start in cutlass.range(0, longest, STEP * self.lanes, unroll=1):
            scores = self.load(gScores, start, STEP // 4, lane, first, last, NAN)
            for i in cutlass.range_constexpr(STEP):
                greater += 1 if scores[i] > bound else 0
        for i in cutlass.range_constexpr(self.lanes.bit_length() - 1):
            greater += cute.arch.shuffle_sync_bfly(greater, 1 << i)
        ties_taken = wanted - greater
        before = Int32(0)  # of the greater in the upper half, of ties in the lower: an id's place is the sum, as far as ties are taken
        for start in cutlass.range(0, longest, 4 * self.lanes, unroll=1):
            scores = self.load(gScores, start, 1, lane, first, last, NAN, nan_is_lowest=True)
            counts = [count_score(score, bound) for score in scores]
            own = counts[0] + counts[1] + counts[2] + counts[3]
            up_to = own
            for i in cutlass.range_constexpr(self.lanes.bit_length() - 1):
                below = cute.arch.shuffle_sync_up(up_to, 1 << i)
                up_to = up_to + below if lane >= 1 << i else up_to
            place = before + up_to - own
            for i in cutlass.range_constexpr(4):
                ties = place & 0xFFFF
                if is_tied and (scores[i] > bound or (scores[i] == bound and ties < ties_taken)):
                    gOut[first + (place >> 16) + cutlass.min(ties, ties_taken)] = start + lane * 4 + i
                place += counts[i]
            before += self.shuffle(up_to, self.lanes - 1)


@cute.jit
def count_score(score: Float32, bound: Float32):
    """One of the ties, which the lower half of a word counts, or of the greater."""
    above = Int32(1 << 16) if score > bound else Int32(0)
    return Int32(1) if score == bound else above


@cute.jit
def merge_lanes(values: list[Float32], lanes: cutlass.Constexpr[int], lane: Int32):
    """The len(values) largest of what `lanes` lanes hold, each a descending sequence of that length.

    Returns (values, shift): element n of the descending result is values[n % len(values)] in lane (n // len(values)) << shift. At every merge two
    groups of lanes become one, and each lane keeps half of what it held: an index's upper bits name its lane, from the lane's highest bit down.
    """
    bits = len(values).bit_length() - 1
    for stage in cutlass.range_constexpr(lanes.bit_length() - 1):
        lane_bits = min(stage, bits)
        reverse = (1 << (stage + 1)) - 1
        values = [cute.arch.fmax(values[i], cute.arch.shuffle_sync_bfly(values[len(values) - 1 - i], reverse)) for i in range(len(values))]
        # Both groups hold the same rising and falling sequence now: split it by one bit of its index after another.
        for level in cutlass.range_constexpr(bits):
            if cutlass.const_expr(level < lane_bits):
                partner = 1 << (stage - 1 - level)
                keep_large = lane & (2 * partner) == 0
                others = [cute.arch.shuffle_sync_bfly(value, partner) for value in values]
                values = [keep(keep_large, a, b) for a, b in zip(values, others, strict=True)]
            elif cutlass.const_expr(level == lane_bits):
                keep_large = lane & (1 << (stage - level)) == 0
                values = [keep(keep_large, values[i], values[i + len(values) // 2]) for i in range(len(values) // 2)]
        values = put_in_order(values, bitonic_merge(len(values)))
    return values, max(0, lanes.bit_length() - 1 - bits)  # low bits of a lane's number tell copies apart


@cute.jit
def sort_lanes(value: Float32, lane: Int32):
    """The warp's values, the largest in lane 0."""
    for size in cutlass.range_constexpr(1, 6):
        for step in cutlass.range_constexpr(size):
            partner = 1 << (size - 1 - step)
            is_first = (lane & partner) == 0
            descends = (lane & (1 << size)) == 0
            value = keep(is_first == descends, value, cute.arch.shuffle_sync_bfly(value, partner))
    return value


@cute.jit
def keep(large: cutlass.Boolean, a: Float32, b: Float32):
    """The larger of two, or the smaller."""
    return cute.arch.fmax(a, b) if large else cute.arch.fmin(a, b)


def build(variant: Variant) -> tuple[Any, tuple[Any, ...]]:
    divisibility = 4 if variant.vector else 1

    def symbols(n: int, divisibility: int = 1) -> tuple[Any, ...]:
        return tuple(cute.sym_int64(divisibility=divisibility) for _ in range(n))

    heads, requests = cute.sym_int(), cute.sym_int()
    score_strides = (*symbols(2, divisibility), 1 if variant.vector else cute.sym_int64())
    return SelectBlocks(variant), (
        make_fake_tensor(Float32, (heads, cute.sym_int(), cute.sym_int()), score_strides, assumed_align=4 * divisibility),
        make_fake_tensor(Int32, (heads, cute.sym_int(), cute.sym_int()), (*symbols(2), 1 if variant.held else cute.sym_int64()), assumed_align=4),
        make_fake_tensor(Int32, (requests,), (1,), assumed_align=4),
        make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=4),
        *(Int32(0) for _ in range(7)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


KERNEL = CuteKernel("select_blocks", build, sources=[__file__, select_held.__file__, sorting_networks.__file__, index_rows.__file__])
lanes_override: int | None = None
"""Forces the lanes of a row; a tuner's hook."""


def lanes_of_row(rows: int, num_blocks: int) -> int:
    """Few lanes merge little, but a warp of many rows takes long: where there are few rows, too long for what runs beside and after it. Registers of
    4 lanes hold 128 blocks, of 8 256, and so on."""
    if lanes_override is not None:
        return lanes_override
    if num_blocks <= 128:
        return 4 if rows >= 16384 else 8
    if num_blocks > 512 or rows < 4096:
        return 32
    return 8 if num_blocks <= 256 else 16


def select_blocks(call: SelectBlocksCall) -> None:
    """Fill `call.out` [Hkv, T, K], every element."""
    select_rows(call.scores, call.scores.shape[2], call, 0, call.out.shape[1])


def select_rows(scores: torch.Tensor, num_blocks: int, call: SelectBlocksCall | IndexTopkCall, row_begin: int, row_end: int) -> None:
    """Ids of query rows [row_begin, row_end) into their rows of `call.out`, from `scores` [Hkv, row_end - row_begin, num_blocks or more]."""
    batch, out = call.batch, call.out
    if row_begin == row_end or out.shape[2] == 0:
        return
    if batch.num_requests == 0:
        out.fill_(-1)
        return
    vector = scores.stride(2) == 1 and scores.stride(0) % 4 == scores.stride(1) % 4 == scores.data_ptr() % 16 == 0 and scores.shape[2] % 4 == 0
    width = max(16, 1 << (out.shape[2] - 1).bit_length())
    lanes = lanes_of_row(out.shape[0] * (row_end - row_begin), num_blocks)
    # Where rows are ranked, `index_topk` scores them right before, by a kernel that waited for all that came earlier.
    after_scores = isinstance(call, IndexTopkCall) and num_blocks > call.topk
    held = out.shape[2] == width and out.stride(2) == 1 and num_blocks <= lanes * select_held.SCORES_OF_LANE
    KERNEL.get(Variant(width, lanes, vector, after_scores, held), out.device)(
        scores,
        out,
        batch.seq_lens,
        batch.cu_seqlens_q,
        row_begin,
        row_end,
        batch.max_seqlen_k,
        num_blocks,
        batch.block_size.bit_length() - 1,
        call.init_blocks,
        call.local_blocks,
    )
