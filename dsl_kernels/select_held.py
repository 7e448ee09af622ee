"""The selection of rows that registers hold: each score is read once.

A row's lanes hold up to 32 of its scores each, in groups of four neighbours that lanes take in turn. Each lane sorts what it holds and keeps its
largest few, the lanes merge these, and the least of the K that are left is the bound.

Nothing says that the bound is right: a lane may have held more of the K best than it keeps, and NaN confuses networks. What proves the choice is a
count. If exactly K scores reach the bound, all others are less (or NaN, which is less than any bound that is accepted): these K are the best,
however the bound was found. If more reach it, but fewer than K are greater, the K-th best equals the bound: the greater are chosen, and the lowest
ids of its ties. Otherwise nothing is written, and the row is left to the general way, with all rows of its warp.

The forced blocks stand among the scores as +inf, and are counted and written with the others. Minima and maxima share one pipe with integers and
comparisons, and that is what takes the time; so what can be, is done by multiplications, which have a pipe of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from m3attn.dsl_kernels.sorting_networks import NEGATIVE_INFINITY, bitonic_merge, exist, larger, largest_of, merge_lists, put_in_order

INFINITY = -NEGATIVE_INFINITY
SCORES_OF_LANE = 32
"""What a lane holds at most: a bit of a word for each."""

GROUPS_APART = 2
"""There is code for every so many groups: rows of other lengths hold -inf besides."""

LEAST_BOUND = 2.0**-100
"""Bounds nearer to 0 are left to the general way, 0 among them: `bits_that_reach` scales by powers of two, which have an end."""


@dataclass(frozen=True)
class HeldRow:
    """A row in each of its lanes. Scores [first, last) are looked at; blocks before and from there up to `live` are forced. All three are 0 where
    the row chooses nothing by scores.
    """

    gScores: cute.Tensor
    gOut: cute.Tensor
    first: Int32
    last: Int32
    live: Int32
    shortest: Int32  # the least `last` of the warp's rows
    is_ranked: Boolean
    lane: Int32  # of the row's lanes


class HeldRows:
    """`width`: K, a power of two. `lanes` share a row. `vector`: scores can be read 16 bytes at a time."""

    def __init__(self, width: int, lanes: int, vector: bool) -> None:
        self.width, self.lanes, self.vector = width, lanes, vector
        self.stride = 4 * lanes  # from one of a lane's groups to the next
        # That more of the K best lie in one lane is rare, and noticed.
        self.keep = {4: width, 8: width // 2, 16: width // 2, 32: width // 4}[lanes]

    @cute.jit
    def write(self, row, longest, fewer: cutlass.Constexpr[int] = 0, groups: cutlass.Constexpr[int] = SCORES_OF_LANE // 4):
        """The K ids of each of the warp's rows, where lanes hold more than `fewer` and at most `groups` groups of the `longest`, the warp's largest
        `live`. Whether they were written: those of all rows, or of none.
        """
        done = Boolean(False)
        if cutlass.const_expr(groups - fewer > GROUPS_APART):
            middle = (fewer + groups) // 2
            if longest <= middle * self.stride:
                done = self.write(row, longest, fewer, middle)
            else:
                done = self.write(row, longest, middle, groups)
        else:
            done = self.write_groups(row, groups)
        return done

    @cute.jit
    def write_groups(self, row, groups: cutlass.Constexpr[int]):
        scores = self.load(row, groups)
        bound = self.bound_of(scores, row.lane)
        reach = in_order_of_ids(bits_that_reach(scores, bound), self.lanes, row.lane)
        up_to = sum_of_lanes(Int32(cute.arch.popc(reach)), self.lanes)
        can_tell = abs_of(bound) >= Float32(LEAST_BOUND)
        is_wrong = row.is_ranked and ((row.lane == self.lanes - 1 and up_to != self.width) or not can_tell)
        done = Boolean(cute.arch.vote_all_sync(not is_wrong))
        if not done:
            greater = in_order_of_ids(bits_that_reach(scores, bound, strictly=True), self.lanes, row.lane)
            ties = reach ^ greater
            both_up_to = sum_of_lanes((Int32(cute.arch.popc(greater)) << 16) + Int32(cute.arch.popc(ties)), self.lanes)
            total = cute.arch.shuffle_sync(both_up_to, cute.arch.lane_idx() | (self.lanes - 1))
            room = self.width - (total >> 16)  # for ties
            # +inf would tie with forced blocks, and NaN with -inf.
            can_tell = can_tell and abs_of(bound) < Float32(INFINITY)
            is_wrong = row.is_ranked and not (can_tell and room > 0 and room <= (total & 0xFFFF))
            done = Boolean(cute.arch.vote_all_sync(not is_wrong))
            excess = cutlass.min((both_up_to & 0xFFFF) - room, Int32(cute.arch.popc(ties)))
            while excess > 0:
                ties = ties ^ (Int32(1) << Int32(cute.arch.bfind(Uint32(ties))))
                excess -= 1
            reach = greater | ties
            up_to = (both_up_to >> 16) + cutlass.min(both_up_to & 0xFFFF, room)
        if done:
            place = up_to
            while reach != 0:
                i = Int32(cute.arch.bfind(Uint32(reach)))
                reach = reach ^ (Int32(1) << i)
                place -= 1
                row.gOut[place] = row.lane * SCORES_OF_LANE + i
        return done

    @cute.jit
    def load(self, row, groups: cutlass.Constexpr[int]):
        """The lane's groups of four. Forced blocks are +inf, columns that do not exist -inf."""
        scores = [cute.make_rmem_tensor(4, Float32) for _ in range(groups)]
        start = row.lane * 4
        last, live = row.last - start, row.live - start
        # A warp's rows are mostly about as long, and all their groups but the last are there.
        whole = groups - GROUPS_APART
        are_whole = row.shortest >= whole * self.stride
        if are_whole:
            for group in cutlass.range_constexpr(whole):
                self.load_group(row.gScores, scores[group], start, group, last)
        else:
            for group in cutlass.range_constexpr(whole):
                if group * self.stride < last:
                    self.load_group(row.gScores, scores[group], start, group, last)
        for group in cutlass.range_constexpr(whole, groups):
            if group * self.stride < last:
                self.load_group(row.gScores, scores[group], start, group, last)
        # No score is looked at before all are on their way.
        if not are_whole:
            for group in cutlass.range_constexpr(whole):
                self.mask_group(scores[group], group, last, live)
        for group in cutlass.range_constexpr(whole, groups):
            self.mask_group(scores[group], group, last, live)
        if row.first > 0:
            for group in cutlass.range_constexpr(groups):
                for i in cutlass.range_constexpr(4):
                    is_forced = group * self.stride + i < row.first - start
                    scores[group][i] = Float32(INFINITY) if is_forced else scores[group][i]
        return [[scores[group][i] for i in range(4)] for group in range(groups)]

    @cute.jit
    def load_group(self, gScores, scores, start, group: cutlass.Constexpr[int], last):
        offset = group * self.stride
        if cutlass.const_expr(self.vector):
            cute.autovec_copy(cute.local_tile(gScores, (4,), ((start + offset) // 4,)), scores)
        else:
            for i in cutlass.range_constexpr(4):
                if offset + i < last:
                    scores[i] = gScores[start + offset + i]

    @cute.jit
    def mask_group(self, scores, group: cutlass.Constexpr[int], last, live):
        offset = group * self.stride
        if offset + 4 > last:
            for i in cutlass.range_constexpr(4):
                beyond = Float32(INFINITY) if offset + i < live else Float32(NEGATIVE_INFINITY)
                scores[i] = scores[i] if offset + i < last else beyond

    @cute.jit
    def bound_of(self, scores, lane):
        """The K-th largest score, in every lane of the row, unless a lane, or the i-th of all its groups, holds more of the K best than it keeps.

        Groups of 1, 2, 4, … lanes hold a descending list each, cut into equal parts of which the lowest lane has the largest values. At every stage
        two groups merge, as in `bitonic_merge`: the larger of the i-th of one and the i-th from the end of the other, then pairs at falling
        distances, first of lanes and then within one. While lists are shorter than K, nothing is dropped: one group takes the larger of each
        pair, the other the smaller. Afterwards both groups have the K largest, so that every lane need keep only half of its values, at each distance
        those of the half that its number names. After the last stage order does not matter, only the minimum does.

        Whether a lane keeps the larger or the smaller depends on a bit of its number. The smaller of two is the larger of their negatives, so values
        are multiplied by -1 in lanes that have that bit, for one `max` in place of `max`, `min` and a choice.
        """
        keep, lanes = self.keep, self.lanes
        if cutlass.const_expr(len(scores) * 4 <= 2 * keep or lanes < 8):
            values = largest_of([score for group in scores for score in group], keep)
        else:
            # Neighbours, which are often large together, go to different lists.
            columns = [largest_of([group[i] for group in scores], max(4, keep // 2)) for i in range(4)]
            values = merge_lists(columns, keep)
        values = values + [None] * (keep - len(values))
        stages = lanes.bit_length() - 1
        grows = (self.width // keep).bit_length() - 1
        # signs[i]: -1 in lanes with bit i, else 1.
        signs = [(Int32(0x3F800000) | ((lane << (31 - i)) & Int32(-(1 << 31)))).bitcast(Float32) for i in range(stages)]
        for stage in cutlass.range_constexpr(stages):
            others = [None if value is None else cute.arch.shuffle_sync_bfly(value, (2 << stage) - 1) for value in reversed(values)]
            if cutlass.const_expr(stage < grows):
                values, others = exist(values), exist(others)
                sign = signs[stage]
                values = [cute.arch.fmax(a * sign, b * sign) for a, b in zip(values, others, strict=True)]
                for distance in cutlass.range_constexpr(stage - 1, -1, -1):
                    # The partner has the other sign.
                    values = [value * (sign * signs[distance]) for value in values]
                    others = [cute.arch.shuffle_sync_bfly(value, 1 << distance) for value in values]
                    values = [cute.arch.fmax(a, -b) for a, b in zip(values, others, strict=True)]
                    sign = signs[distance]
                values = [value * sign for value in values]
            else:
                values = exist([larger(a, b) for a, b in zip(values, others, strict=True)])
                if cutlass.const_expr(stage < stages - 1):
                    sign = None
                    for distance in cutlass.range_constexpr(stage - 1, -1, -1):
                        # The partner has the same sign: which half a lane keeps is the next higher bit.
                        change = signs[distance + 1] if sign is None else sign * signs[distance + 1]
                        values = [value * change for value in values]
                        others = [cute.arch.shuffle_sync_bfly(value, 1 << distance) for value in values]
                        values = [cute.arch.fmax(a, b) for a, b in zip(values, others, strict=True)]
                        sign = signs[distance + 1]
                    change = signs[0] if sign is None else sign * signs[0]
                    values = [value * change for value in values]
                    half = len(values) // 2
                    values = [cute.arch.fmax(values[i], values[i + half]) * signs[0] for i in range(half)]
            if cutlass.const_expr(stage < stages - 1):
                values = put_in_order(values, bitonic_merge(len(values)))
        bound = values[0]
        for i in cutlass.range_constexpr(1, len(values)):
            bound = cute.arch.fmin(bound, values[i])
        for i in cutlass.range_constexpr(stages - 1):
            bound = cute.arch.fmin(bound, cute.arch.shuffle_sync_bfly(bound, 1 << i))
        return bound


def abs_of(value: Float32) -> Float32:
    return (value.bitcast(Int32) & 0x7FFFFFFF).bitcast(Float32)


@cute.jit
def bits_that_reach(scores, bound: Float32, strictly: cutlass.Constexpr[bool] = False):
    """Bit 4 g + i: scores[g][i] >= bound, or > bound; 0 for NaN. |bound| >= LEAST_BOUND, and is not infinite if strictly.

    Without a comparison. Let `under` be the bound itself if strictly, else the next number below it; 2^e <= |bound| < 2^(e + 1), s = 2^(24 - e).
    A score that is too small is at most `under`: (score - under) s <= 0. Any other is at least the next number above `under`, which is 2^(e - 23)
    away, or 2^(e - 24) if |bound| is 2^e: (score - under) s >= 1. A fused multiply-add computes this from s and -under s with one rounding, which
    takes nothing across 0 or 1; saturated to [0, 1], it is exactly 0 or 1.

    s is a normal number for e from -103 to 128, and -under s, a product with a power of two, is exact and at most 2^25. Beyond 1 nothing matters, so
    results may be infinite. Below the lowest number `under` is -inf: all numbers give +inf, and -inf gives NaN, which saturates to 0. Below +inf it
    is the largest number; below -inf it is NaN, and nothing reaches that bound.

    The sum of 2^23 and such ones times 2^0 to 2^15 is exact, and shows them as the low bits of its mantissa.
    """
    bits = bound.bitcast(Int32)
    under = bound if cutlass.const_expr(strictly) else (bits - 1 if bits >= 0 else bits + 1).bitcast(Float32)
    scale = (Int32((2 * 127 + 24) << 23) - (bits & 0x7F800000)).bitcast(Float32)
    offset = -under * scale
    words = []
    for part in cutlass.range_constexpr(0, len(scores), 4):
        word = Float32(float(1 << 23))
        for i in cutlass.range_constexpr(4 * len(scores[part : part + 4])):
            word = multiply_add(multiply_add(scores[part + i // 4][i % 4], scale, offset, ".sat"), Float32(float(1 << i)), word)
        words.append(word.bitcast(Int32))
    return words[0] & 0xFFFF if len(words) == 1 else Int32(cute.arch.prmt(words[0], words[1], Int32(0x5410)))


def multiply_add(a: Float32, b: Float32, c: Float32, saturate: str = "") -> Float32:
    """a b + c, rounded once. Saturated to [0, 1], NaN is 0."""
    return cute.arch.inline_ptx(f"fma.rn{saturate}.f32 {{$w0}}, {{$r0}}, {{$r1}}, {{$r2}};", write_only_types=[Float32], read_only_args=[a, b, c])


@cute.jit
def in_order_of_ids(word: Int32, lanes: cutlass.Constexpr[int], lane: Int32):
    """From bit 4 g + i for column 4 (g lanes + lane) + i, bit n for column 32 lane + n.

    Number the nibbles by their columns: q = g lanes + lane, which belongs to lane q / 8, at q % 8. With 8 lanes that transposes 8 x 8 nibbles:
    lanes at distance 4 exchange halves of their words, then at 2 bytes, at 1 nibbles, each keeping the one that its own number names.
    Of 16 or 32 lanes, eights transpose theirs: lane 8 c + l had q = g lanes + 8 c + l, so lane 8 c + g then has a whole word, that of
    lane g lanes / 8 + c, which fetches it. Of 4 lanes, lane l wants all lanes' nibbles 2 l, then their nibbles 2 l + 1: byte l of each, so
    4 x 4 bytes are transposed, and in the result the low nibbles go before the high ones.
    """
    if cutlass.const_expr(lanes >= 8):
        other = cute.arch.shuffle_sync_bfly(word, 4)
        word = Int32(cute.arch.prmt(word, other, Int32(0x5410) if lane & 4 == 0 else Int32(0x3276)))
        other = cute.arch.shuffle_sync_bfly(word, 2)
        word = Int32(cute.arch.prmt(word, other, Int32(0x6240) if lane & 2 == 0 else Int32(0x3715)))
        other = cute.arch.shuffle_sync_bfly(word, 1)
        is_even = lane & 1 == 0
        other = Int32(cute.arch.shf(other, other, Int32(4) if is_even else Int32(28)))  # rotated by a nibble
        mine = Int32(0x0F0F0F0F) if is_even else Int32(-0x0F0F0F10)
        word = (word & mine) | (other & ~mine)
        if cutlass.const_expr(lanes > 8):
            eights = lanes // 8
            word = cute.arch.shuffle_sync(word, (cute.arch.lane_idx() & (32 - lanes)) + lane % eights * 8 + lane // eights)
    else:
        other = cute.arch.shuffle_sync_bfly(word, 2)
        word = Int32(cute.arch.prmt(word, other, Int32(0x5410) if lane & 2 == 0 else Int32(0x3276)))
        other = cute.arch.shuffle_sync_bfly(word, 1)
        word = Int32(cute.arch.prmt(word, other, Int32(0x6240) if lane & 1 == 0 else Int32(0x3715)))
        low, high = word & 0x0F0F0F0F, (word >> 4) & 0x0F0F0F0F
        low, high = low | (low >> 4), high | (high >> 4)  # bytes 0 and 2 hold two each
        word = Int32(cute.arch.prmt(low, high, Int32(0x6420)))
    return word


@cute.jit
def sum_of_lanes(value: Int32, lanes: cutlass.Constexpr[int]):
    """The sum over the row's lanes up to this one. The shuffle itself says whether there is a lane below."""
    for i in cutlass.range_constexpr(lanes.bit_length() - 1):
        value = cute.arch.inline_ptx(
            "{ .reg .pred p; .reg .b32 below, sum; mov.b32 sum, {$r0}; shfl.sync.up.b32 below|p, {$r0}, {$r1}, {$r2}, -1;"
            " @p add.s32 sum, sum, below; mov.b32 {$w0}, sum; }",
            write_only_types=[Int32],
            read_only_args=[value, Int32(1 << i), Int32((32 - lanes) << 8)],
        )
    return value
