"""Quantise a tensor to fp8: with a given scale, or with one taken from the largest finite magnitude of the tensor or of each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from m3attn.calls import QuantizeFp8Call
from m3attn.problem import arch_number
from m3attn.triton_kernels.launch import cdiv, current_arch, launch, next_power_of_2
from m3attn.triton_kernels.primitives import widen
from m3attn.triton_kernels.saturate import divide_by_scale, divisor, round_to

MMA_ROWS: dict[str, str | int | None] = {"_quantize_kernel": None, "_scale_kernel": None, "_quantize_rows_kernel": None}
MIN_AMAX = tl.constexpr(2.0**-100)


@dataclass(frozen=True, slots=True)
class Setting:
    """Elements of a program's tile, and warps for a full tile."""

    elements: int
    num_warps: int


SETTINGS: dict[tuple[str, str], Setting] = {
    ("static", "any"): Setting(2048, 4),
    ("tensor", "any"): Setting(4096, 4),
    ("row", "any"): Setting(4096, 4),
}
"""By mode and architecture; `any` where no measurement says otherwise."""
CANDIDATES = [Setting(elements, num_warps) for elements in (1024, 2048, 4096, 8192, 16384) for num_warps in (2, 4, 8) if elements >= 256 * num_warps]
settings_override: Setting | None = None
"""Set by a tuner to force one setting."""

LONGEST_HELD_ROW = 16384
"""Rows up to this length stay in registers between their maximum and their cast; longer ones are read twice."""
TILES_PER_MAXIMUM = 4
"""Tiles that a program of the per-tensor maximum reads before its one atomic."""


@triton.jit
def _tile_offsets(
    tile, rows, cols, sizes, x_strides, out_strides, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, TILES: tl.constexpr, RUN: tl.constexpr
):
    """(rows [R, 1], columns [1, C], offsets of the rows in x and in out [R, 1]); a program owns TILES neighbouring tiles of C columns,
    and a thread at most RUN neighbouring columns at a time.

    Row r is (r // (s1 s2), r // s2 % s1, r % s2) of the leading dimensions, sizes = (s1, s2).
    """
    if rows == 1:  # what contiguous tensors are: known when compiling, and without the division loads start earlier
        row_tile, col_tile = tl.cast(0, tl.int64), tl.cast(tile, tl.int64)
    else:
        tiles_across = tl.cdiv(cols, BLOCK_COLS * TILES)
        row_tile, col_tile = tl.cast(tile // tiles_across, tl.int64), tl.cast(tile % tiles_across, tl.int64)
    offs_row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    offs_col = col_tile * (BLOCK_COLS * TILES) + tl.max_contiguous(tl.arange(0, BLOCK_COLS), RUN)[None, :]
    outer, middle, inner = offs_row // (sizes[0] * sizes[1]), offs_row // sizes[1] % sizes[0], offs_row % sizes[1]
    x_offset = outer * x_strides[0] + middle * x_strides[1] + inner * x_strides[2]
    out_offset = outer * out_strides[0] + middle * out_strides[1] + inner * out_strides[2]
    return offs_row, offs_col, x_offset, out_offset


@triton.jit
def _finite_magnitude(x):
    """|x| in fp32, 0 for infinities and NaN: they never set a scale."""
    magnitude = tl.abs(widen(x))
    return tl.where(magnitude < float("inf"), magnitude, 0.0)


@triton.jit
def _wait_for_producer(PDL: tl.constexpr):
    """Programmatic dependent launch: read nothing before the producer's writes are visible, and let the consumer start coming up."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _quantize_kernel(
    x_ptr, out_ptr, value, scale_ptr, rows, cols, sizes, x_strides, out_strides, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = x / scale, one tile a program; WHOLE: tiles cover x exactly, and nothing is masked."""
    _wait_for_producer(PDL)
    offs_row, offs_col, x_offset, out_offset = _tile_offsets(
        tl.program_id(0), rows, cols, sizes, x_strides, out_strides, BLOCK_ROWS, BLOCK_COLS, 1, 8
    )
    mask = True if WHOLE else (offs_row < rows) & (offs_col < cols)
    # Whoever comes next reads out, not x.
    x = widen(tl.load(x_ptr + x_offset + offs_col, mask=mask, other=0.0, eviction_policy="evict_first"))  # [BLOCK_ROWS, BLOCK_COLS]
    stored = round_to(divide_by_scale(x, value, scale_ptr), out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_offset + offs_col, stored, mask=mask)


@triton.jit
def _scale_kernel(
    x_ptr, scale_out_ptr, rows, cols, sizes, x_strides, LARGEST: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """scale_out = max(scale_out, amax / LARGEST). Division by a constant keeps order: the largest quotient is the quotient of the largest."""
    _wait_for_producer(PDL)
    offs_row, offs_col, x_offset, _ = _tile_offsets(tl.program_id(0), rows, cols, sizes, x_strides, x_strides, BLOCK_ROWS, BLOCK_COLS, TILES, 16)
    amax = tl.zeros([BLOCK_ROWS, BLOCK_COLS], dtype=tl.float32)
    for step in tl.static_range(TILES):
        columns = offs_col + step * BLOCK_COLS
        x = tl.load(x_ptr + x_offset + columns, mask=(offs_row < rows) & (columns < cols), other=0.0)  # [BLOCK_ROWS, BLOCK_COLS]
        amax = tl.maximum(amax, _finite_magnitude(x))
    tl.atomic_max(scale_out_ptr, tl.div_rn(tl.max(tl.max(amax, axis=1), axis=0), LARGEST), sem="relaxed")


@triton.jit
def _quantize_rows_kernel(
    x_ptr, out_ptr, scale_out_ptr, rows, cols, sizes, x_strides, out_strides, LARGEST: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr, HELD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """scale_out[row] = max(amax of the row, 2^-100) / LARGEST, out = x / scale_out[row]; HELD: a row is one tile, read once."""
    _wait_for_producer(PDL)
    tile = tl.program_id(0)
    offs_row, offs_col, x_offset, out_offset = _tile_offsets(tile, rows, BLOCK_COLS, sizes, x_strides, out_strides, BLOCK_ROWS, BLOCK_COLS, 1, 16)
    x = tl.load(x_ptr + x_offset + offs_col, mask=(offs_row < rows) & (offs_col < cols), other=0.0)  # [BLOCK_ROWS, BLOCK_COLS]
    amax = _finite_magnitude(x)
    if not HELD:
        for start in range(BLOCK_COLS, cols, BLOCK_COLS):
            later = tl.load(x_ptr + x_offset + offs_col + start, mask=(offs_row < rows) & (offs_col + start < cols), other=0.0)
            amax = tl.maximum(amax, _finite_magnitude(later))
    scale = tl.div_rn(tl.maximum(tl.max(amax, axis=1), MIN_AMAX), LARGEST)[:, None]  # [BLOCK_ROWS, 1]
    tl.store(scale_out_ptr + offs_row, scale, mask=offs_row < rows)
    tl.store(
        out_ptr + out_offset + offs_col,
        round_to(tl.div_rn(widen(x), scale), out_ptr.dtype.element_ty),
        mask=(offs_row < rows) & (offs_col < cols),
    )
    if not HELD:
        for start in range(BLOCK_COLS, cols, BLOCK_COLS):
            mask = (offs_row < rows) & (offs_col + start < cols)
            later = widen(tl.load(x_ptr + x_offset + offs_col + start, mask=mask, other=0.0))
            tl.store(out_ptr + out_offset + offs_col + start, round_to(tl.div_rn(later, scale), out_ptr.dtype.element_ty), mask=mask)


def quantize_fp8(call: QuantizeFp8Call) -> None:
    """Fill out (and scale_out) with x / scale as fp8.

    A dynamic scale is max(amax, 2^-100) / finfo.max, amax over finite elements only: infinities saturate, NaN is kept, and neither sets
    a scale. Per tensor takes three launches (the least scale, an order-free atomic maximum, the cast), per row and static one.

    Raises:
        ValueError: strides of x and out that leave more than three leading dimensions after merging neighbours.
    """
    x, out, scale_out = call.x, call.out, call.scale_out
    largest = torch.finfo(out.dtype).max
    if scale_out is not None and (call.mode == "tensor" or x.numel() == 0):
        scale_out.fill_(MIN_AMAX.value / largest)
    if x.numel() == 0:
        return
    arch = current_arch(x.device)
    setting = settings_override or SETTINGS.get((call.mode, arch)) or SETTINGS[(call.mode, "any")]
    pdl = call.pdl and arch_number(arch) >= 90
    shape, x_strides, out_strides = _merge_dims(x, out, keep_rows=call.mode == "row")
    rows, cols = shape[0] * shape[1] * shape[2], shape[3]
    longest = LONGEST_HELD_ROW if call.mode == "row" else setting.elements
    held = cols <= longest
    block_cols = next_power_of_2(cols) if held else setting.elements
    block_rows = min(max(1, setting.elements // block_cols), next_power_of_2(rows))
    num_warps = max(1, min(setting.num_warps * max(1, block_cols // setting.elements), block_rows * block_cols // 256, 16))
    row_tiles = cdiv(rows, block_rows)
    options: dict[str, Any] = {"device": x.device, "num_warps": num_warps, "num_stages": 1, "BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols}
    layout = (rows, cols, shape[1:3], x_strides)
    if call.mode == "row":
        options |= {"LARGEST": largest, "HELD": held, "PDL": pdl, "pdl": pdl}
        launch(_quantize_rows_kernel, (row_tiles,), x, out, scale_out, *layout, out_strides, **options)
        return
    value, tensor = divisor(call.scale)
    if call.mode == "tensor":
        tiles = min(TILES_PER_MAXIMUM, cdiv(cols, block_cols))
        grid = (row_tiles * cdiv(cols, block_cols * tiles),)
        launch(_scale_kernel, grid, x, scale_out, *layout, LARGEST=largest, TILES=tiles, PDL=False, **options)
        value, tensor = 1.0, scale_out
    grid = (row_tiles * cdiv(cols, block_cols),)
    whole = rows % block_rows == 0 and cols % block_cols == 0
    launch(_quantize_kernel, grid, x, out, value, tensor, *layout, out_strides, WHOLE=whole, PDL=pdl, pdl=pdl, **options)


def _merge_dims(x: torch.Tensor, out: torch.Tensor, *, keep_rows: bool) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """x's shape as four dims, and the strides of x and out over the first three: neighbours that lie alike in both become one.

    The last dim stays as it is if `keep_rows`, else it is merged too, so that contiguous tensors are one long row.
    """
    dims = [(n, a, b) for n, a, b in zip(x.shape, x.stride(), out.stride(), strict=True) if n != 1]
    if not dims or (keep_rows and x.shape[-1] == 1) or dims[-1][1:] != (1, 1):
        dims.append((1, 1, 1))
    merged = [dims.pop()]
    while dims:
        size, x_stride, out_stride = dims.pop()
        inner, x_inner, out_inner = merged[-1]
        if (x_stride, out_stride) == (inner * x_inner, inner * out_inner) and not (keep_rows and len(merged) == 1):
            merged[-1] = (size * inner, x_inner, out_inner)
        else:
            merged.append((size, x_stride, out_stride))
    if len(merged) > 4:
        raise ValueError(
            f"x: expected strides that leave at most three leading dimensions after merging neighbours, got shape {tuple(x.shape)} "
            f"with strides {x.stride()} for x and {out.stride()} for out"
        )
    merged[1:1] = [(1, 0, 0)] * (4 - len(merged))
    shape, x_strides, out_strides = zip(*reversed(merged), strict=True)
    return shape, x_strides[:3], out_strides[:3]
