"""`index_score`: for every query token, index head and key block, the largest <index_q, index_k> over the block's visible positions.

Two schedules. Prefill stacks the heads of neighbouring tokens into tiles of rows, so that one load of a key tile serves them all, and cuts
the key range into equal runs of blocks, so that a small chunk behind a long prefix still fills the GPU. Decode and verify read each key
byte once for all columns (token, head) of a request, keys being the rows of the product, and split the live blocks of the request.
A block's score never depends on a tile or a split: every schedule setting gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from m3attn.batch import DECODE_MAX_SEQLEN_Q
from m3attn.calls import IndexScoreCall, IndexTopkCall
from m3attn.dtypes import is_fp8
from m3attn.problem import arch_number
from m3attn.triton_kernels.launch import cdiv, current_arch, launch, next_power_of_2, num_sms
from m3attn.triton_kernels.primitives import INTERPRETED, dot, load_scale, physical_page, tile_rows, widen
from m3attn.triton_kernels.rows import block_b, num_row_tiles

MMA_ROWS: dict[str, str | int | None] = {"index_score_prefill_kernel": "BLOCK_M", "index_score_decode_kernel": "BLOCK_N"}

SIZES = ["num_requests", "row_begin", "row_end", "max_seqlen_k", "num_blocks", "max_pages", "num_pages", "skip_blocks"]
"""Arguments whose value must not make another variant of a kernel."""
GROUP_BLOCKS = tl.constexpr(8)
"""Columns that -inf is stored to at a time: 32 bytes a row, the memory's sector."""


@triton.jit
def page_of_keys(page_table_ptr, page_table_stride, request, start, seq_len, max_pages, num_pages, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the keys at positions [start, start + BLOCK_N) of a request lie: one physical page, or [BLOCK_N] of them where a page is smaller."""
    position = start if PAGE_SIZE % BLOCK_N == 0 else start + tl.arange(0, BLOCK_N)
    return physical_page(page_table_ptr, page_table_stride, request, position // PAGE_SIZE, max_pages, num_pages, position < seq_len)


@triton.jit
def load_index_keys(index_k_ptr, k_strides, page, start, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr):
    """The index keys at positions start, start + 1, …, [BLOCK_N, DIM], from `page_of_keys`; past seq_len they may be anything."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, DIM)
    if PAGE_SIZE % BLOCK_N == 0:
        first_key = index_k_ptr + page * k_strides[0] + tl.cast(start % PAGE_SIZE, tl.int64) * k_strides[1]
        pointers = first_key + (offs_n.to(tl.int64) * k_strides[1])[:, None] + offs_d[None, :]
    else:
        key_offset = page * k_strides[0] + ((start + offs_n) % PAGE_SIZE).to(tl.int64) * k_strides[1]
        pointers = index_k_ptr + key_offset[:, None] + offs_d[None, :]
    return tl.load(pointers)


@triton.jit
def max_of_numbers(logits, axis):
    """The maximum along `axis` ignoring NaN: -inf or NaN where there is nothing else."""
    # Compiled, tl.max ignores NaN by itself; the interpreter's propagates it.
    if INTERPRETED:
        logits = tl.where(logits == logits, logits, float("-inf"))
    return tl.max(logits, axis=axis)


@triton.jit
def store_columns(out_rows, out_stride, first_column, end_column, scores, row_exists, GROUP: tl.constexpr):
    """Store `scores` [rows, GROUP] at columns first_column, … below end_column of the rows `out_rows` points at."""
    columns = first_column + tl.arange(0, GROUP)
    pointers = out_rows[:, None] + (columns.to(tl.int64) * out_stride)[None, :]
    tl.store(pointers, scores, mask=row_exists[:, None] & (columns < end_column)[None, :])


@triton.jit
def fill_columns(out_rows, out_stride, first_column, end_column, step, row_exists, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Store -inf in columns [first_column, end_column), GROUP at every `step`."""
    nothing = tl.full([ROWS, GROUP], float("-inf"), tl.float32)
    for column in range(first_column, end_column, step):
        store_columns(out_rows, out_stride, column, end_column, nothing, row_exists, GROUP)


@triton.jit(do_not_specialize=[*SIZES, "run_blocks"])
def index_score_prefill_kernel(
    index_q_ptr,  # [T, NUM_HEADS, DIM]
    index_k_ptr,  # [num_pages, PAGE_SIZE, DIM]
    out_ptr,  # [NUM_HEADS, T, num_blocks]; row `row_begin` of a slice is its row 0
    page_table_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    q_scale,
    q_scale_ptr,
    k_scale,
    k_scale_ptr,
    q_strides,
    k_strides,
    out_strides,
    page_table_stride,
    num_requests,
    row_begin,
    row_end,
    max_seqlen_k,
    num_blocks,
    max_pages,
    num_pages,
    skip_blocks,  # tiles whose rows all see at most so many blocks need no scores
    run_blocks,  # blocks a program scores, a multiple of 8
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    FILL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        # Starts beside what came before and waits for it here; the selection starts beside the scores and waits for all of them.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    BLOCK_T: tl.constexpr = BLOCK_M // NUM_HEADS
    BLOCKS_PER_TILE: tl.constexpr = max(1, BLOCK_N // BLOCK_SIZE)
    # Row tiles run fastest: programs that run together read the same keys.
    request, first_row, end_row, first_position, seq_len = tile_rows(
        cu_seqlens_ptr, seq_lens_ptr, num_requests, tl.program_id(0), row_begin, row_end, max_seqlen_k, BLOCK_T, BLOCK_B
    )
    if first_row >= end_row:
        return
    first_block = tl.program_id(1) * run_blocks
    end_block = tl.minimum(first_block + run_blocks, num_blocks)
    num_visible = tl.maximum(first_position + tl.minimum(BLOCK_T, end_row - first_row), 0)  # keys that the tile's last row sees
    num_live = (num_visible + BLOCK_SIZE - 1) // BLOCK_SIZE
    live_end = tl.minimum(num_live, end_block)

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, DIM)
    token = offs_m // NUM_HEADS
    head = (offs_m % NUM_HEADS).to(tl.int64)
    row = (first_row + token).to(tl.int64)  # [BLOCK_M]
    row_exists = (token < BLOCK_T) & (row < end_row)
    position = first_position + token
    out_rows = out_ptr + head * out_strides[0] + (row - row_begin) * out_strides[1]

    if (num_live > skip_blocks) & (first_block < live_end):
        queries = tl.load(
            index_q_ptr + (row * q_strides[0] + head * q_strides[1])[:, None] + offs_d[None, :], mask=row_exists[:, None], other=0.0
        )  # [BLOCK_M, DIM]
        queries = widen(queries, DOT_TYPE)
        scale = load_scale(q_scale, q_scale_ptr) * load_scale(k_scale, k_scale_ptr)
        nothing = tl.full([BLOCK_M, BLOCKS_PER_TILE], float("-inf"), tl.float32)
        best = nothing
        end_key = tl.minimum(num_visible, live_end * BLOCK_SIZE)
        page = page_of_keys(page_table_ptr, page_table_stride, request, first_block * BLOCK_SIZE, seq_len, max_pages, num_pages, PAGE_SIZE, BLOCK_N)
        for start in range(first_block * BLOCK_SIZE, end_key, BLOCK_N):
            keys = load_index_keys(index_k_ptr, k_strides, page, start, PAGE_SIZE, BLOCK_N, DIM)  # [BLOCK_N, DIM]
            # One tile ahead, which keeps it out of the pipeline of loads: every stage of that holds keys.
            page = page_of_keys(page_table_ptr, page_table_stride, request, start + BLOCK_N, seq_len, max_pages, num_pages, PAGE_SIZE, BLOCK_N)
            logits = dot(queries, tl.trans(widen(keys, DOT_TYPE)))  # [BLOCK_M, BLOCK_N]
            if start + BLOCK_N - 1 > first_position:
                offs_n = start + tl.arange(0, BLOCK_N)
                logits = tl.where(offs_n[None, :] <= position[:, None], logits, float("-inf"))
            blocks = tl.reshape(logits, [BLOCK_M, BLOCKS_PER_TILE, BLOCK_N // BLOCKS_PER_TILE])
            best = tl.maximum(best, max_of_numbers(blocks, axis=2))  # [BLOCK_M, BLOCKS_PER_TILE]
            is_block_end = True if BLOCK_N >= BLOCK_SIZE else ((start + BLOCK_N) % BLOCK_SIZE == 0) | (start + BLOCK_N >= end_key)
            if is_block_end:
                store_columns(out_rows, out_strides[2], start // BLOCK_SIZE, end_block, best * scale, row_exists, BLOCKS_PER_TILE)
                best = nothing
    if FILL:
        fill_columns(out_rows, out_strides[2], tl.maximum(first_block, live_end), end_block, GROUP_BLOCKS, row_exists, BLOCK_M, GROUP_BLOCKS)


@triton.jit(do_not_specialize=SIZES)
def index_score_decode_kernel(
    index_q_ptr,  # [T, NUM_HEADS, DIM]
    index_k_ptr,  # [num_pages, PAGE_SIZE, DIM]
    out_ptr,  # [NUM_HEADS, T, num_blocks]; row `row_begin` of a slice is its row 0
    page_table_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    q_scale,
    q_scale_ptr,
    k_scale,
    k_scale_ptr,
    q_strides,
    k_strides,
    out_strides,
    page_table_stride,
    num_requests,
    row_begin,
    row_end,
    max_seqlen_k,
    num_blocks,
    max_pages,
    num_pages,
    skip_blocks,  # requests whose rows all see at most so many blocks need no scores
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    FILL: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    BLOCKS_PER_TILE: tl.constexpr = max(1, BLOCK_N // BLOCK_SIZE)
    request = tl.program_id(1)
    begin = tl.load(cu_seqlens_ptr + request)
    end = tl.load(cu_seqlens_ptr + request + 1)
    seq_len = tl.minimum(tl.maximum(tl.load(seq_lens_ptr + request), 0), max_seqlen_k)
    first_row = tl.minimum(tl.maximum(begin, row_begin), row_end)
    end_row = tl.minimum(end, row_end)
    first_position = seq_len - (end - begin) + (first_row - begin)

    offs_c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_d = tl.arange(0, DIM)
    token = offs_c // NUM_HEADS
    head = (offs_c % NUM_HEADS).to(tl.int64)
    row = (first_row + token).to(tl.int64)  # [BLOCK_C]
    row_exists = row < end_row
    position = first_position + token
    out_rows = out_ptr + head * out_strides[0] + (row - row_begin) * out_strides[1]

    num_visible = tl.maximum(first_position + tl.maximum(end_row - first_row, 0), 0)  # keys that the last row sees
    num_visible = tl.where(first_row < end_row, tl.minimum(num_visible, num_blocks * BLOCK_SIZE), 0)
    num_live = (num_visible + BLOCK_SIZE - 1) // BLOCK_SIZE
    if num_live > skip_blocks:
        run = (num_live + tl.num_programs(0) * BLOCKS_PER_TILE - 1) // (tl.num_programs(0) * BLOCKS_PER_TILE) * BLOCKS_PER_TILE
        first_key = tl.program_id(0) * run * BLOCK_SIZE
        end_key = tl.minimum(first_key + run * BLOCK_SIZE, num_visible)
        queries = tl.load(
            index_q_ptr + (row * q_strides[0] + head * q_strides[1])[:, None] + offs_d[None, :], mask=row_exists[:, None], other=0.0
        )  # [BLOCK_C, DIM]
        queries = tl.trans(widen(queries, DOT_TYPE))
        scale = load_scale(q_scale, q_scale_ptr) * load_scale(k_scale, k_scale_ptr)
        nothing = tl.full([BLOCKS_PER_TILE, BLOCK_C], float("-inf"), tl.float32)
        best = nothing
        page = page_of_keys(page_table_ptr, page_table_stride, request, first_key, seq_len, max_pages, num_pages, PAGE_SIZE, BLOCK_N)
        for start in range(first_key, end_key, BLOCK_N):
            keys = load_index_keys(index_k_ptr, k_strides, page, start, PAGE_SIZE, BLOCK_N, DIM)  # [BLOCK_N, DIM]
            # One tile ahead, which keeps it out of the pipeline of loads: every stage of that holds keys.
            page = page_of_keys(page_table_ptr, page_table_stride, request, start + BLOCK_N, seq_len, max_pages, num_pages, PAGE_SIZE, BLOCK_N)
            logits = dot(widen(keys, DOT_TYPE), queries)  # [BLOCK_N, BLOCK_C]
            if start + BLOCK_N - 1 > first_position:
                offs_n = start + tl.arange(0, BLOCK_N)
                logits = tl.where(offs_n[:, None] <= position[None, :], logits, float("-inf"))
            blocks = tl.reshape(logits, [BLOCKS_PER_TILE, BLOCK_N // BLOCKS_PER_TILE, BLOCK_C])
            best = tl.maximum(best, max_of_numbers(blocks, axis=1))  # [BLOCKS_PER_TILE, BLOCK_C]
            is_block_end = True if BLOCK_N >= BLOCK_SIZE else ((start + BLOCK_N) % BLOCK_SIZE == 0) | (start + BLOCK_N >= end_key)
            if is_block_end:
                columns = start // BLOCK_SIZE + tl.arange(0, BLOCKS_PER_TILE)
                out_pointers = out_rows[None, :] + (columns.to(tl.int64) * out_strides[2])[:, None]
                tl.store(out_pointers, best * scale, mask=row_exists[None, :] & (columns < num_live)[:, None])
                best = nothing
    if FILL:
        column = tl.program_id(0) * GROUP_BLOCKS
        step = tl.num_programs(0) * GROUP_BLOCKS
        fill_columns(out_rows, out_strides[2], num_live + column, num_blocks, step, row_exists, BLOCK_C, GROUP_BLOCKS)
        # Rows behind the last request are dealt out among the requests; most steps have none.
        TOKENS: tl.constexpr = BLOCK_C // NUM_HEADS
        token = tl.arange(0, BLOCK_C) // NUM_HEADS
        head = (tl.arange(0, BLOCK_C) % NUM_HEADS).to(tl.int64)
        first_padded = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + num_requests), row_begin), row_end)
        for padded in range(first_padded + request * TOKENS, row_end, num_requests * TOKENS):
            row = (padded + token).to(tl.int64)
            row_exists = (token < TOKENS) & (row < row_end)
            out_rows = out_ptr + head * out_strides[0] + (row - row_begin) * out_strides[1]
            fill_columns(out_rows, out_strides[2], column, num_blocks, step, row_exists, BLOCK_C, GROUP_BLOCKS)


@dataclass(frozen=True, slots=True)
class PrefillSettings:
    """block_m rows (token, head) by block_n keys a tile; a program scores the largest run of blocks that still leaves
    `programs_per_sm` programs for each multiprocessor."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """block_n keys a tile; at most block_c columns (token, head) at a time; requests are split into `programs_per_sm` programs for
    each multiprocessor."""

    block_n: int
    block_c: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


# By (class of the architecture, bytes of an operand's element). Classes differ in shared memory and in the matrix instruction.
PREFILL_SETTINGS: dict[tuple[str, int], PrefillSettings] = {
    ("sm_90", 2): PrefillSettings(256, 64, 8, 2, 16),
    ("sm_90", 1): PrefillSettings(256, 64, 8, 3, 16),
    ("sm_90", 4): PrefillSettings(32, 32, 4, 2, 16),
    ("sm_100", 2): PrefillSettings(128, 128, 4, 3, 16),
    ("sm_100", 1): PrefillSettings(128, 128, 4, 3, 16),
    ("sm_100", 4): PrefillSettings(32, 32, 4, 2, 16),
    ("sm_80", 2): PrefillSettings(128, 64, 4, 3, 16),
    ("sm_80", 4): PrefillSettings(32, 32, 4, 2, 16),
    ("small", 2): PrefillSettings(128, 64, 4, 3, 16),
    ("small", 1): PrefillSettings(128, 64, 4, 3, 16),
    ("small", 4): PrefillSettings(32, 32, 4, 2, 16),
}
DECODE_SETTINGS: dict[tuple[str, int], DecodeSettings] = {
    ("sm_90", 2): DecodeSettings(64, 128, 4, 3, 2),
    ("sm_90", 1): DecodeSettings(64, 128, 4, 3, 4),
    ("sm_90", 4): DecodeSettings(32, 32, 4, 2, 4),
    ("sm_100", 2): DecodeSettings(128, 128, 4, 3, 2),
    ("sm_100", 1): DecodeSettings(128, 128, 4, 4, 2),
    ("sm_100", 4): DecodeSettings(32, 32, 4, 2, 4),
    ("sm_80", 2): DecodeSettings(128, 64, 4, 3, 2),
    ("sm_80", 4): DecodeSettings(32, 32, 4, 2, 4),
    ("small", 2): DecodeSettings(64, 128, 4, 3, 2),
    ("small", 1): DecodeSettings(128, 128, 4, 3, 2),
    ("small", 4): DecodeSettings(32, 32, 4, 2, 4),
}
PREFILL_CANDIDATES = [
    PrefillSettings(block_m, block_n, num_warps, num_stages, programs_per_sm)
    for block_m, block_n, num_warps in ((64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8), (256, 64, 8), (256, 128, 8))
    for num_stages in (2, 3, 4)
    for programs_per_sm in (4, 8, 16)
]
DECODE_CANDIDATES = [
    DecodeSettings(block_n, 128, num_warps, num_stages, programs_per_sm)
    for block_n, num_warps in ((64, 4), (128, 4), (128, 8))
    for num_stages in (2, 3, 4, 6)
    for programs_per_sm in (1, 2, 4, 8)
]
settings_override: PrefillSettings | DecodeSettings | None = None
"""Forces one setting on the schedule it belongs to; a tuner's hook."""


def settings_class(arch: str) -> str:
    """The row of the settings tables that an architecture reads."""
    return arch if arch in ("sm_80", "sm_90", "sm_100") else {"cpu": "sm_90", "sm_103": "sm_100"}.get(arch, "small")


_TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32, torch.float8_e4m3fn: tl.float8e4nv}


def dot_dtype(q: torch.dtype, k: torch.dtype) -> torch.dtype:
    """The type both operands of the product are brought to, exactly: e4m3 widens to its partner's; bf16 with fp16 meet in fp32."""
    if q == k or is_fp8(k):
        return q
    return k if is_fp8(q) else torch.float32


def index_score(call: IndexScoreCall) -> None:
    """Fill `call.out` [Hi, T, num_blocks], every element; -inf where a block has no visible position."""
    if call.batch.num_requests == 0 or call.index_k.shape[0] == 0:
        call.out.fill_(float("-inf"))
        return
    score_rows(call, call.out, 0, call.index_q.shape[0], fill=True, skip_blocks=0)


def score_rows(call: IndexScoreCall | IndexTopkCall, out: torch.Tensor, row_begin: int, row_end: int, *, fill: bool, skip_blocks: int) -> None:
    """Scores of query rows [row_begin, row_end) into `out` [Hi, row_end - row_begin, num_blocks].

    Args:
        fill: write -inf where a block has no visible position; otherwise those elements are left as they are.
        skip_blocks: rows that see at most so many blocks may be left out.
    """
    batch, q, k = call.batch, call.index_q, call.index_k
    num_heads, dim = q.shape[1], q.shape[2]
    num_rows, num_requests, num_blocks = row_end - row_begin, batch.num_requests, batch.num_blocks
    if num_rows == 0 or num_blocks == 0 or num_requests == 0 or k.shape[0] == 0:
        return
    dot_type = dot_dtype(q.dtype, k.dtype)
    key = (settings_class(current_arch(q.device)), dot_type.itemsize)
    decode = batch.max_seqlen_q <= DECODE_MAX_SEQLEN_Q
    table: dict[tuple[str, int], Any] = DECODE_SETTINGS if decode else PREFILL_SETTINGS
    settings: Any = settings_override if isinstance(settings_override, DecodeSettings if decode else PrefillSettings) else table[key]
    programs = settings.programs_per_sm * num_sms(q.device)
    pdl = arch_number(current_arch(q.device)) >= 90
    schedule: dict[str, Any] = {"FILL": fill, "BLOCK_N": settings.block_n, "PDL": pdl, "pdl": pdl}
    if decode:
        kernel = index_score_decode_kernel
        columns = max(16, next_power_of_2(num_heads * max(1, batch.max_seqlen_q)))
        schedule["BLOCK_C"] = min(settings.block_c, columns)
        column_tiles = cdiv(num_heads * max(1, batch.max_seqlen_q), schedule["BLOCK_C"])
        unsplit = num_requests * column_tiles
        # One full wave where splitting can make one; else short programs, so that the last wave is a small part.
        splits = programs // unsplit if 2 * unsplit <= programs else cdiv(4 * programs, unsplit)
        grid = (min(splits, num_blocks), num_requests, column_tiles)
    else:
        kernel = index_score_prefill_kernel
        tiles = num_row_tiles(num_rows, num_requests, settings.block_m // num_heads)
        run = 64
        while run > 8 and tiles * cdiv(num_blocks, run) < programs:
            run //= 2
        schedule |= {"run_blocks": run, "BLOCK_M": settings.block_m, "BLOCK_B": block_b(batch)}
        grid = (tiles, cdiv(num_blocks, run), 1)
    launch(
        kernel,
        grid,
        q,
        k,
        out,
        batch.page_table,
        batch.seq_lens,
        batch.cu_seqlens_q,
        call.index_q_scale.value,
        call.index_q_scale.tensor,
        call.index_k_scale.value,
        call.index_k_scale.tensor,
        q.stride(),
        k.stride(),
        out.stride(),
        batch.page_table.stride(0),
        num_requests,
        row_begin,
        row_end,
        batch.max_seqlen_k,
        num_blocks,
        batch.page_table.shape[1],
        k.shape[0],
        skip_blocks,
        device=q.device,
        num_warps=settings.num_warps,
        num_stages=settings.num_stages,
        NUM_HEADS=num_heads,
        DIM=dim,
        BLOCK_SIZE=batch.block_size,
        PAGE_SIZE=batch.page_size,
        DOT_TYPE=_TRITON_DTYPES[dot_type],
        **schedule,
    )
