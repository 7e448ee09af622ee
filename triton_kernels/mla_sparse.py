"""Attention of one query's heads to gathered latent tokens, and the kernel that joins the parts of a split query.

A token is 512 latent dims, which are its value too, and up to 64 rotated ones. It is read once, for both products. How many dims a tile of it
has is the launcher's choice: one wide output tile suits tensor memory, four narrow ones suit registers. Tuples hold the tiles.
"""

import triton
import triton.language as tl

from m3attn.triton_kernels.fp8 import add_query_key, add_weighted_values, finish_values
from m3attn.triton_kernels.primitives import LN2, LOG2E, finish_softmax, load_scale, online_softmax
from m3attn.triton_kernels.saturate import round_to

MMA_ROWS: dict[str, str | int | None] = {"sparse_mla_kernel": "BLOCK_M", "merge_sparse_mla_kernel": None}
COMPILE_EXCEPTIONS = {
    ("sparse_mla_kernel", arch, "spills"): "the outputs of 64 heads take half of the registers; a few addresses do not fit beside them"
    for arch in ("sm_90", "sm_100", "sm_103")
}
LATENT = tl.constexpr(512)
MERGED = tl.constexpr(128)


@triton.jit
def append(tiles, tile):
    return tiles + (tile,)  # noqa: RUF005  # Triton knows no unpacking


@triton.jit
def load_chunks(rows, mask, CHUNK: tl.constexpr):
    """The latent dims at pointers `rows` [N], as tiles [N, CHUNK]; 0 where `mask` [N] is false, without a read."""
    pointers = rows[:, None] + tl.arange(0, CHUNK)[None, :]
    tiles = ()
    for i in tl.static_range(LATENT // CHUNK):
        tiles = append(tiles, tl.load(pointers + i * CHUNK, mask=mask[:, None], other=0.0))
    return tiles


@triton.jit
def zero_chunks(M: tl.constexpr, CHUNK: tl.constexpr):
    """Tiles [M, CHUNK] of fp32 zeros."""
    tiles = ()
    for _ in tl.static_range(LATENT // CHUNK):
        tiles = append(tiles, tl.zeros([M, CHUNK], tl.float32))
    return tiles


@triton.jit
def add_values(p, v, outputs, rescale, CHUNK: tl.constexpr, FP8_PV: tl.constexpr):
    """Each outputs[i] [M, CHUNK] * rescale [M] + p [M, N] @ v[i] [N, CHUNK]."""
    sums = ()
    for i in tl.static_range(LATENT // CHUNK):
        sums = append(sums, add_weighted_values(p, v[i], outputs[i] * rescale[:, None], FP8_PV))
    return sums


@triton.jit
def load_indices(indices_ptr, stride, step, end, BLOCK_N: tl.constexpr):
    """The row's indices of tile `step` [BLOCK_N]; -1, which no token has, from place `end` on."""
    places = step * BLOCK_N + tl.arange(0, BLOCK_N)
    return tl.load(indices_ptr + places.to(tl.int64) * stride, mask=places < end, other=-1)


@triton.jit
def sparse_mla_kernel(
    q_ptr,  # [s_q, h_q, 512 + ROPE]
    kv_ptr,  # [s_kv, 512 + ROPE]
    indices_ptr,  # [s_q, TOPK]
    topk_length_ptr,  # [s_q] or None
    sink_ptr,  # [h_q] fp32 or None
    out_ptr,  # [s_q, h_q, 512], or with splits [SPLITS, s_q, h_q, 512] fp32 before kv_scale and sink; contiguous
    max_logits_ptr,  # [s_q, h_q] fp32, or [SPLITS, s_q, h_q]; contiguous
    lse_ptr,  # the same; natural log; without a token +inf, or -inf in a split
    q_scale_ptr,
    kv_scale_ptr,
    sm_scale,
    q_scale,
    kv_scale,
    q_strides,
    kv_stride,
    indices_strides,
    num_queries,
    num_heads,
    num_tokens,
    TOPK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # heads
    BLOCK_N: tl.constexpr,  # tokens
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    FP8_PV: tl.constexpr,
    PDL: tl.constexpr,
):
    # Neighbouring programs share a query: its tokens come from L2 for all tiles of heads but the first.
    head_tiles = tl.cdiv(num_heads, BLOCK_M)
    row = (tl.program_id(0) // head_tiles).to(tl.int64)
    heads = (tl.program_id(0) % head_tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    split = tl.program_id(1)
    if PDL:
        # The merge may start while splits still run; it waits for all of them before it reads.
        tl.extra.cuda.gdc_launch_dependents()
    is_head = heads < num_heads
    q_rows = q_ptr + row * q_strides[0] + heads * q_strides[1]
    q = load_chunks(q_rows, is_head, CHUNK)  # [BLOCK_M, CHUNK] each
    if ROPE > 0:
        offs_r = tl.arange(0, ROPE)[None, :]
        q_pe = tl.load(q_rows[:, None] + LATENT + offs_r, mask=is_head[:, None], other=0.0)  # [BLOCK_M, ROPE]
    value_scale = load_scale(kv_scale, kv_scale_ptr)
    scale = tl.cast(sm_scale, tl.float32) * load_scale(q_scale, q_scale_ptr) * value_scale * LOG2E
    length = TOPK
    if topk_length_ptr is not None:
        length = tl.minimum(tl.maximum(tl.load(topk_length_ptr + row), 0), TOPK)
    steps = tl.cdiv(tl.cdiv(length, BLOCK_N), SPLITS)
    begin = split * steps
    end = tl.minimum((begin + steps) * BLOCK_N, length)

    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    outputs = zero_chunks(BLOCK_M, CHUNK)
    indices_ptr += row * indices_strides[0]
    index = load_indices(indices_ptr, indices_strides[1], begin, end, BLOCK_N)  # [BLOCK_N]
    for step in range(begin, tl.cdiv(end, BLOCK_N)):
        is_token = (index >= 0) & (index < num_tokens)
        kv_rows = kv_ptr + tl.where(is_token, index, 0).to(tl.int64) * kv_stride
        kv = load_chunks(kv_rows, is_token, CHUNK)  # [BLOCK_N, CHUNK] each
        logits = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if ROPE > 0:
            k_pe = tl.load(kv_rows[:, None] + LATENT + offs_r, mask=is_token[:, None], other=0.0)  # [BLOCK_N, ROPE]
            logits = add_query_key(q_pe, k_pe, logits)
        for i in tl.static_range(LATENT // CHUNK):
            logits = add_query_key(q[i], kv[i], logits)
        logits = tl.where(is_token[None, :], logits * scale, float("-inf"))
        p, rescale, running_max, running_sum = online_softmax(logits, running_max, running_sum)
        outputs = add_values(p, kv, outputs, rescale, CHUNK, FP8_PV)
        # Read one tile ahead: the indices in front of the tokens they lead to would put two memory latencies in each step.
        index = load_indices(indices_ptr, indices_strides[1], step + 1, end, BLOCK_N)

    _, lse = finish_softmax(outputs[0], running_max, running_sum)
    out_row = (split.to(tl.int64) * num_queries + row) * num_heads + heads  # [BLOCK_M]
    factor = tl.full([BLOCK_M], 1.0, tl.float32)
    if SPLITS == 1:
        factor *= value_scale * sink_factor(sink_ptr, heads, is_head, lse)
        lse = tl.where(lse == float("-inf"), float("inf"), lse)
    out_pointers = out_ptr + out_row[:, None] * LATENT + tl.arange(0, CHUNK)[None, :]
    for i in tl.static_range(LATENT // CHUNK):
        output, _ = finish_softmax(outputs[i], running_max, running_sum)
        output = finish_values(output, FP8_PV) * factor[:, None]
        tl.store(out_pointers + i * CHUNK, round_to(output, out_ptr.dtype.element_ty), mask=is_head[:, None])
    tl.store(max_logits_ptr + out_row, running_max * LN2, mask=is_head)
    tl.store(lse_ptr + out_row, lse, mask=is_head)


@triton.jit
def sink_factor(sink_ptr, heads, is_head, lse):
    """What is left of each head's output [M] when exp(sink) joins the denominator of a softmax of natural-log LSE `lse` [M]."""
    factor = tl.full(lse.shape, 1.0, tl.float32)
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + heads, mask=is_head, other=0.0)
        is_empty = lse == float("-inf")
        factor = tl.where(is_empty, 0.0, 1.0 / (1.0 + tl.exp(sink - tl.where(is_empty, 0.0, lse))))
    return factor


@triton.jit
def merge_sparse_mla_kernel(
    partial_out_ptr,  # [SPLITS, s_q, h_q, 512] fp32
    partial_max_ptr,  # [SPLITS, s_q, h_q] fp32
    partial_lse_ptr,  # [SPLITS, s_q, h_q] fp32; -inf: a split without tokens
    sink_ptr,  # [h_q] fp32 or None
    out_ptr,  # [s_q, h_q, 512]
    max_logits_ptr,  # [s_q, h_q]
    lse_ptr,  # [s_q, h_q]
    kv_scale_ptr,
    kv_scale,
    num_rows,  # s_q * h_q
    num_heads,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row's chunk a program; the splits are always summed in the same order."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    partial_rows = tl.arange(0, SPLITS).to(tl.int64) * num_rows + row  # [SPLITS]
    offs_d = chunk * MERGED + tl.arange(0, MERGED)
    if PDL:
        tl.extra.cuda.gdc_wait()

    partial_lse = tl.load(partial_lse_ptr + partial_rows)
    largest = tl.max(partial_lse, axis=0)
    is_empty = largest == float("-inf")
    weights = tl.exp(partial_lse - tl.where(is_empty, 0.0, largest))  # [SPLITS]
    total = tl.where(is_empty, 1.0, tl.sum(weights, axis=0))
    lse = tl.where(is_empty, float("inf"), largest + tl.log(total))
    partial_out = tl.load(partial_out_ptr + partial_rows[:, None] * LATENT + offs_d[None, :])  # [SPLITS, MERGED]
    output = tl.sum(partial_out * weights[:, None], axis=0) / total * load_scale(kv_scale, kv_scale_ptr)  # [MERGED]
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + row % num_heads)
        output *= 1.0 / (1.0 + tl.exp(sink - tl.where(is_empty, 0.0, lse)))
    tl.store(out_ptr + row * LATENT + offs_d, round_to(output, out_ptr.dtype.element_ty))
    if chunk == 0:
        tl.store(max_logits_ptr + row, tl.max(tl.load(partial_max_ptr + partial_rows), axis=0))
        tl.store(lse_ptr + row, lse)
