"""`select_blocks`: the K blocks each (token, KV group) attends to, exactly and in ascending order.

Scores become unsigned integers in the same order, forced blocks the largest of all, so that "forced first, then the best" is one ranking.
A bisection over these integers finds the K-th largest; it counts, so it never sorts, and stops as soon as exactly K lie at or above it.
A running count of what is greater, and of ties, says where each chosen id goes, and which ties are too many: the lower ids win.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from m3attn.batch import DECODE_MAX_SEQLEN_Q
from m3attn.calls import IndexTopkCall, SelectBlocksCall
from m3attn.problem import arch_number
from m3attn.triton_kernels.launch import current_arch, launch, next_power_of_2
from m3attn.triton_kernels.primitives import tile_rows
from m3attn.triton_kernels.rows import block_b, num_row_tiles

MMA_ROWS: dict[str, str | int | None] = {"select_blocks_kernel": None}

FORCED = tl.constexpr(0xFFFFFFFF)
"""The rank of a forced block: above that of +inf. 0, below that of -inf, is no block at all."""


@triton.jit
def rank_of_score(score):
    """fp32 -> uint32 in the same order, neither 0 nor FORCED: NaN ranks as -inf, -0 as +0."""
    score = tl.where(score == score, score, float("-inf")) + 0.0  # -0.0 + 0.0 is +0.0
    bits = score.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)


@triton.jit
def kth_largest(rank, num_forced, num_chosen):
    """[R] uint32: a bound for each row of `rank` [R, C] that its num_chosen [R] largest reach, and besides them only ties of the least of them."""
    all_forced = num_forced == num_chosen
    # Off by one and back, so that in unsigned arithmetic what is no block cannot be the lowest, nor a forced block the highest.
    lowest = tl.min(rank - 1, axis=1) + 1
    highest = tl.max(rank + 1, axis=1) - 1
    low = tl.where(all_forced, FORCED, lowest).to(tl.uint32)
    width = tl.where(all_forced, 1, highest - lowest + 1).to(tl.uint32)
    # At least num_chosen reach `low`; fewer reach low + width, or exactly that many reach `low` and width is 1.
    while tl.max(width, axis=0) > 1:
        half = width // 2
        middle = low + half
        count = tl.sum((rank >= middle[:, None]).to(tl.int32), axis=1)
        low = tl.where(count >= num_chosen, middle, low).to(tl.uint32)
        width = tl.where(count == num_chosen, 1, tl.where(count > num_chosen, width - half, half)).to(tl.uint32)
    return low


@triton.jit
def select_rows(
    scores_rows,
    scores_stride,
    out_rows,
    out_stride,
    row_exists,
    num_live,
    topk,
    init_blocks,
    local_blocks,
    R: tl.constexpr,
    C: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Choose for R rows of at most C live blocks each, and store the chosen ids."""
    offs_c = tl.arange(0, C)
    num_chosen = tl.minimum(num_live, topk)  # [R]
    num_local = tl.minimum(num_chosen, local_blocks)
    num_init = tl.minimum(num_chosen - num_local, init_blocks)
    is_live = offs_c[None, :] < num_live[:, None]  # [R, C]
    is_candidate = (offs_c[None, :] >= num_init[:, None]) & (offs_c[None, :] < (num_live - num_local)[:, None])
    # A row that keeps all its blocks needs no scores. Whole groups of 4 are one load each.
    end_read = (num_live - num_local + GROUP - 1) // GROUP * GROUP
    is_read = (offs_c[None, :] < end_read[:, None]) & (num_live > topk)[:, None]
    score = tl.load(scores_rows[:, None] + offs_c.to(tl.int64)[None, :] * scores_stride, mask=is_read, other=0.0)
    rank = tl.where(is_candidate, rank_of_score(score), tl.where(is_live, FORCED, 0)).to(tl.uint32)

    threshold = kth_largest(rank, num_local + num_init, num_chosen)[:, None]
    is_greater = rank > threshold
    is_tie = rank == threshold
    ties_taken = (num_chosen - tl.sum(is_greater.to(tl.int32), axis=1))[:, None]
    # One running count of both: of the greater in the upper half, of ties in the lower.
    count = tl.cumsum((is_greater.to(tl.int32) << 16) + is_tie.to(tl.int32), axis=1)
    ties = count & 0xFFFF
    is_chosen = is_greater | (is_tie & (ties <= ties_taken))
    place = (count >> 16) + tl.minimum(ties, ties_taken) - 1
    tl.store(out_rows[:, None] + place.to(tl.int64) * out_stride, tl.broadcast_to(offs_c[None, :], [R, C]), mask=is_chosen & row_exists[:, None])


@triton.jit(
    do_not_specialize=["num_requests", "row_begin", "row_end", "max_seqlen_k", "num_blocks", "block_size", "topk", "init_blocks", "local_blocks"]
)
def select_blocks_kernel(
    scores_ptr,  # [Hkv, T, num_blocks]; row `row_begin` of a slice is its row 0
    out_ptr,  # [Hkv, T, K]
    seq_lens_ptr,
    cu_seqlens_ptr,
    scores_strides,
    out_strides,
    num_requests,
    row_begin,
    row_end,
    max_seqlen_k,
    num_blocks,
    block_size,
    topk,
    init_blocks,
    local_blocks,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_B: tl.constexpr,
    GROUP: tl.constexpr,  # a row of scores may be read up to a multiple of so many columns
    PDL: tl.constexpr,  # the kernel before writes the scores and nothing else, and waited for all that came earlier
):
    _, first_row, end_row, first_position, _ = tile_rows(
        cu_seqlens_ptr, seq_lens_ptr, num_requests, tl.program_id(0), row_begin, row_end, max_seqlen_k, BLOCK_T, BLOCK_B
    )
    head = tl.program_id(1).to(tl.int64)
    offs_t = tl.arange(0, BLOCK_T)
    row = (first_row + offs_t).to(tl.int64)  # [BLOCK_T]
    row_exists = row < end_row
    position = tl.where(row_exists, first_position + offs_t, -1)
    num_live = tl.where(position < 0, 0, tl.minimum(position // block_size + 1, num_blocks))
    scores_rows = scores_ptr + head * scores_strides[0] + (row - row_begin) * scores_strides[1]
    out_rows = out_ptr + head * out_strides[0] + row * out_strides[1]

    offs_k = tl.arange(0, BLOCK_K)
    is_tail = (offs_k[None, :] >= tl.minimum(num_live, topk)[:, None]) & (offs_k[None, :] < topk) & row_exists[:, None]  # [BLOCK_T, BLOCK_K]
    tl.store(out_rows[:, None] + offs_k.to(tl.int64)[None, :] * out_strides[2], tl.full([BLOCK_T, BLOCK_K], -1, tl.int32), mask=is_tail)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    # The tile is as wide as the rows are long, not as the buffer is: three widths.
    most_live = tl.max(num_live, axis=0)
    scores_stride, out_stride = scores_strides[2], out_strides[2]
    if most_live > BLOCK_C // 4:
        select_rows(scores_rows, scores_stride, out_rows, out_stride, row_exists, num_live, topk, init_blocks, local_blocks, BLOCK_T, BLOCK_C, GROUP)
    elif most_live > BLOCK_C // 16:
        select_rows(
            scores_rows, scores_stride, out_rows, out_stride, row_exists, num_live, topk, init_blocks, local_blocks, BLOCK_T, BLOCK_C // 4, GROUP
        )
    elif most_live > 0:
        select_rows(
            scores_rows, scores_stride, out_rows, out_stride, row_exists, num_live, topk, init_blocks, local_blocks, BLOCK_T, BLOCK_C // 16, GROUP
        )


@dataclass(frozen=True, slots=True)
class SelectSettings:
    """block_t rows of neighbouring tokens a program."""

    block_t: int
    num_warps: int


# By (schedule, columns rounded up to a power of two). A whole row lies in registers; while one warp holds it, no reduction leaves the warp.
# Decode has few rows and spreads each over more warps.
SETTINGS: dict[tuple[str, int], SelectSettings] = {
    ("prefill", 64): SelectSettings(2, 1),
    ("prefill", 128): SelectSettings(4, 1),
    ("prefill", 256): SelectSettings(4, 1),
    ("prefill", 512): SelectSettings(2, 1),
    ("prefill", 1024): SelectSettings(1, 1),
    ("prefill", 2048): SelectSettings(1, 2),
    ("prefill", 4096): SelectSettings(1, 4),
    ("prefill", 8192): SelectSettings(1, 8),
    ("prefill", 16384): SelectSettings(1, 16),
    ("prefill", 32768): SelectSettings(1, 16),
    ("decode", 64): SelectSettings(1, 1),
    ("decode", 128): SelectSettings(1, 1),
    ("decode", 256): SelectSettings(1, 1),
    ("decode", 512): SelectSettings(1, 2),
    ("decode", 1024): SelectSettings(1, 4),
    ("decode", 2048): SelectSettings(1, 4),
    ("decode", 4096): SelectSettings(1, 8),
    ("decode", 8192): SelectSettings(1, 8),
    ("decode", 16384): SelectSettings(1, 16),
    ("decode", 32768): SelectSettings(1, 16),
}
CANDIDATES = [SelectSettings(block_t, num_warps) for block_t in (1, 2, 4, 8, 16) for num_warps in (1, 2, 4, 8, 16, 32)]
settings_override: SelectSettings | None = None
"""Forces one setting; a tuner's hook."""


def select_blocks(call: SelectBlocksCall) -> None:
    """Fill `call.out` [Hkv, T, K], every element."""
    launch_select(call.scores, call.scores.shape[2], call, 0, call.out.shape[1])


def launch_select(scores: torch.Tensor, num_blocks: int, call: SelectBlocksCall | IndexTopkCall, row_begin: int, row_end: int) -> None:
    """Ids of query rows [row_begin, row_end) into their rows of `call.out` [Hkv, T, K], from `scores` [Hkv, row_end - row_begin, num_blocks].

    Scores are not read where num_blocks <= K.
    """
    batch, out = call.batch, call.out
    if batch.num_requests == 0:
        out.fill_(-1)
        return
    width = max(64, next_power_of_2(num_blocks))
    schedule = "decode" if batch.max_seqlen_q <= DECODE_MAX_SEQLEN_Q else "prefill"
    settings = settings_override or SETTINGS[schedule, width]
    beside_scores = isinstance(call, IndexTopkCall) and num_blocks > call.topk and call.index_k.shape[0] > 0
    pdl = beside_scores and arch_number(current_arch(out.device)) >= 90
    launch(
        select_blocks_kernel,
        (num_row_tiles(row_end - row_begin, batch.num_requests, settings.block_t), out.shape[0]),
        scores,
        out,
        batch.seq_lens,
        batch.cu_seqlens_q,
        scores.stride(),
        out.stride(),
        batch.num_requests,
        row_begin,
        row_end,
        batch.max_seqlen_k,
        num_blocks,
        batch.block_size,
        call.topk,
        call.init_blocks,
        call.local_blocks,
        device=out.device,
        num_warps=settings.num_warps,
        num_stages=1,
        pdl=pdl,
        BLOCK_T=settings.block_t,
        BLOCK_C=width,
        BLOCK_K=next_power_of_2(call.topk),
        BLOCK_B=block_b(batch),
        GROUP=4 if beside_scores else 1,
        PDL=pdl,
    )
