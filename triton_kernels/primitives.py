"""The vocabulary of the kernels: where a row's request is, where a page lies, which dot to use, how a softmax runs.

Naming, in every kernel of this folder: `x_ptr` a tensor, `x_strides` its strides in elements as one tuple, `offs_*` an index vector,
words for state (`running_max`, `accumulator`), capitals for compile-time values (`BLOCK_*` tile sizes). A shape comment stands at each tile.
"""

from importlib.metadata import version

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INT32_MAX = tl.constexpr(2147483647)


@triton.jit
def _count_to(n):
    for _ in range(0, n):
        pass


if INTERPRETED.value:
    try:
        _count_to[(1,)](1)
    except Exception as error:  # Triton 3.6 makes an index of a one-element array, which numpy 2.4 no longer does
        raise RuntimeError(f"the interpreter of Triton {triton.__version__} does not run with numpy {version('numpy')}: install numpy<2.4") from error


@triton.jit
def widen(x, DTYPE: tl.constexpr = tl.float32):
    """x exactly in DTYPE, which has every value of x's type; NaN and infinities stay what they are.

    The interpreter's own casts get subnormal bf16 wrong, NaN of e4m3 (480 to it), NaN and infinities of e5m2, and its subnormals.
    """
    if INTERPRETED and x.dtype == tl.bfloat16:
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif INTERPRETED and x.dtype == tl.float8e5 and x.dtype != DTYPE:  # the high byte of an fp16
        x = (x.to(tl.uint8, bitcast=True).to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif INTERPRETED and x.dtype == tl.float8e4nv and x.dtype != DTYPE:  # one exponent bit less than fp16: shifted into place it is 2^-8 of itself
        code = x.to(tl.uint8, bitcast=True).to(tl.uint16)
        half = (((code & 0x80) << 8) | ((code & 0x7F) << 7)).to(tl.float16, bitcast=True)
        x = tl.where((code & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)
    return x.to(DTYPE)


@triton.jit
def dot(a, b, accumulator=None):
    """a @ b (+ accumulator) in fp32. fp32 operands use IEEE products; the interpreter multiplies 16- and 8-bit operands as fp32, which is exact."""
    if INTERPRETED:
        a = widen(a) if a.dtype.is_fp8() else a.to(tl.float32)
        b = widen(b) if b.dtype.is_fp8() else b.to(tl.float32)
    if accumulator is None:
        result = tl.dot(a, b, input_precision="ieee", out_dtype=tl.float32)
    else:
        result = tl.dot(a, b, accumulator, input_precision="ieee", out_dtype=tl.float32)
    return result


@triton.jit
def find_request(cu_seqlens_ptr, num_requests, tile, row_begin, row_end, BLOCK_T: tl.constexpr, BLOCK_B: tl.constexpr):
    """The request that owns tile `tile` of BLOCK_T query rows within rows [row_begin, row_end); num_requests for the padded rows at the end.

    Request b owns tiles from cu[b] // BLOCK_T + b on (from cu[b] if BLOCK_T is 1): an upper bound of the tiles before it that needs no scan,
    so the grid, `num_row_tiles`, depends on shapes only. Offsets are read BLOCK_B at a time and clamped into the rows.
    """
    request = 0
    for start in range(0, num_requests, BLOCK_B):
        offs_b = start + 1 + tl.arange(0, BLOCK_B)  # [BLOCK_B]
        ends = tl.load(cu_seqlens_ptr + offs_b, mask=offs_b <= num_requests, other=INT32_MAX)
        ends = tl.minimum(tl.maximum(ends, row_begin), row_end) - row_begin
        first_tile = ends if BLOCK_T == 1 else ends // BLOCK_T + offs_b
        request += tl.sum(((first_tile <= tile) & (offs_b <= num_requests)).to(tl.int32), axis=0)
    return request


@triton.jit
def tile_rows(cu_seqlens_ptr, seq_lens_ptr, num_requests, tile, row_begin, row_end, max_seqlen_k, BLOCK_T: tl.constexpr, BLOCK_B: tl.constexpr):
    """(request, first_row, end_row, first_position, seq_len) of tile `tile`.

    The tile's rows are first_row, first_row + 1, … below min(first_row + BLOCK_T, end_row), at positions first_position, first_position + 1, …;
    a negative position is an empty row. Padded rows at the end get request 0, seq_len 0 and positions far below zero.
    """
    request = find_request(cu_seqlens_ptr, num_requests, tile, row_begin, row_end, BLOCK_T, BLOCK_B)
    is_padding = request >= num_requests
    begin = tl.load(cu_seqlens_ptr + request)
    end = tl.load(cu_seqlens_ptr + tl.minimum(request + 1, num_requests))
    end = tl.where(is_padding, row_end, end)
    clamped = tl.minimum(tl.maximum(begin, row_begin), row_end) - row_begin
    own_tile = tile - clamped if BLOCK_T == 1 else tile - (clamped // BLOCK_T + request)
    first_row = row_begin + clamped + own_tile * BLOCK_T
    end_row = tl.minimum(end, row_end)
    request = tl.where(is_padding, 0, request)
    seq_len = tl.load(seq_lens_ptr + request)
    seq_len = tl.where(is_padding, 0, tl.minimum(tl.maximum(seq_len, 0), max_seqlen_k))
    first_position = tl.where(is_padding, -(1 << 30), seq_len - (end - begin) + (first_row - begin))
    return request, first_row, end_row, first_position, seq_len


@triton.jit
def find_row(cu_seqlens_ptr, seq_lens_ptr, num_requests, row, max_seqlen_k, BLOCK_B: tl.constexpr):
    """(request, position, seq_len) of query row `row`; a padded row gets request 0, seq_len 0 and a position far below zero.

    What `tile_rows` finds for tiles of one row, with one wait for memory in place of two: offsets and lengths are read together.
    """
    request = 0
    end = 1 << 30
    seq_len = 0
    for start in range(0, num_requests, BLOCK_B):
        offs_b = start + tl.arange(0, BLOCK_B)  # [BLOCK_B]
        exists = offs_b < num_requests
        begins = tl.load(cu_seqlens_ptr + offs_b, mask=exists, other=INT32_MAX)
        ends = tl.load(cu_seqlens_ptr + offs_b + 1, mask=exists, other=INT32_MAX)
        lengths = tl.load(seq_lens_ptr + offs_b, mask=exists, other=0)
        # Offsets that do not ascend may name several requests: the last one counts.
        owner = tl.max(tl.where((begins <= row) & (row < ends), offs_b, -1), axis=0)
        is_owner = offs_b == owner
        request = tl.maximum(request, owner)
        seq_len = tl.where(owner >= 0, tl.sum(tl.where(is_owner, lengths, 0), axis=0), seq_len)
        end = tl.where(owner >= 0, tl.sum(tl.where(is_owner, ends, 0), axis=0), end)
    seq_len = tl.minimum(tl.maximum(seq_len, 0), max_seqlen_k)
    return request, seq_len - end + row, seq_len


@triton.jit
def physical_page(page_table_ptr, page_table_stride, request, logical_page, max_pages, num_pages, mask):
    """Physical page ids as int64, inside [0, num_pages); 0 where `mask` is false, without a load."""
    inside = mask & (logical_page >= 0) & (logical_page < max_pages)
    page = tl.load(page_table_ptr + request.to(tl.int64) * page_table_stride + logical_page, mask=inside, other=0)
    return tl.minimum(tl.maximum(page, 0), num_pages - 1).to(tl.int64)


@triton.jit
def load_scale(value, scale_ptr):
    """A scale in fp32: the host's number, times the device's where there is one (`scale_ptr` None costs nothing)."""
    if scale_ptr is None:
        return value
    else:
        return value * tl.load(scale_ptr)


@triton.jit
def online_softmax(logits, running_max, running_sum):
    """One step of the base-2 softmax over `logits` [M, N] (already times log2 e, -inf where masked).

    Returns (p [M, N], rescale [M], new running_max [M], new running_sum [M]). A row that has seen no key keeps max -inf, sum 0.
    """
    new_max = tl.maximum(running_max, tl.max(logits, axis=1))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(running_max - shift)
    p = tl.exp2(logits - shift[:, None])
    return p, rescale, new_max, running_sum * rescale + tl.sum(p, axis=1)


@triton.jit
def finish_softmax(accumulator, running_max, running_sum):
    """(output [M, D], natural-log LSE [M]); a row without keys gives 0 and -inf."""
    empty = running_sum == 0.0
    output = accumulator / tl.where(empty, 1.0, running_sum)[:, None]
    lse = tl.where(empty, float("-inf"), (running_max + tl.log2(tl.where(empty, 1.0, running_sum))) * LN2)
    return output, lse


@triton.jit
def sink_share(q, sink_key, scale, lse):
    """What is left of each output row [M] when one more logit q . sink_key * scale with value 0 joins a softmax of natural-log LSE `lse` [M].

    q and sink_key [M, D] are widened here, so the logit is fp32 whatever q is. A row without keys keeps 0.
    """
    logit = tl.sum(widen(q) * widen(sink_key), axis=1) * scale
    return tl.where(lse == float("-inf"), 0.0, 1.0 / (1.0 + tl.exp(logit - lse)))
