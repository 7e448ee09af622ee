"""Workloads of the stages that are bound by memory, on plain sizes: element-wise ones and the merge."""

from __future__ import annotations

import torch

import m3attn
from m3attn.batch import LayerCache
from m3attn.bench import parity
from m3attn.bench.ceilings import Cost
from m3attn.bench.inputs import HEAD_DIM, MODES, PAGE_SIZE, random
from m3attn.bench.parity import ROUNDING, Parity
from m3attn.bench.shapes import Heads
from m3attn.bench.workloads import Workload
from m3attn.dtypes import E4M3
from m3attn.layers.rope import rotary_table
from m3attn.reference import merge as reference_merge
from m3attn.reference.norm_rope import norm_rope
from m3attn.reference.quantize import saturating_cast

MAX_SETS = 32
ROTARY_DIM = 64
ROPE_THETA = 5e6


def num_sets(bytes_per_call: float, l2_bytes: int) -> int:
    """Sets of buffers that outgrow L2 twice, at most MAX_SETS: what is smaller comes from L2 in real use too."""
    return 1 if bytes_per_call > 2 * l2_bytes else min(MAX_SETS, int(2 * l2_bytes // bytes_per_call) + 1)


def qk_norm_rope_insert(size: tuple[int, ...], heads: Heads, mode_name: str, sample_rows: int, l2_bytes: int, generator: torch.Generator) -> Workload:
    """One launch over packed rows [q | k | v | index_q | index_k] into caches and query buffers; `size` is (tokens,)."""
    (tokens,) = size
    device, mode = generator.device, MODES[mode_name]
    row_dtype = torch.float16 if mode_name == "fp16" else torch.bfloat16
    num_q, num_kv, num_index = heads.num_q, heads.num_kv, heads.num_kv
    row_heads = num_q + 2 * num_kv + num_index + 1
    moved = tokens * row_heads * HEAD_DIM * (row_dtype.itemsize + mode.q.itemsize)
    rows = [random((tokens, row_heads * HEAD_DIM), row_dtype, generator) for _ in range(num_sets(moved, l2_bytes))]
    weights = tuple(0.1 * torch.randn(HEAD_DIM, device=device, generator=generator) for _ in range(4))
    positions = torch.arange(tokens, device=device)
    cos_sin = rotary_table(tokens, ROTARY_DIM, ROPE_THETA).to(device)
    pages = -(-tokens // PAGE_SIZE) + 1
    cache = LayerCache(
        kv=torch.zeros(pages, num_kv, PAGE_SIZE, 2 * HEAD_DIM, dtype=mode.kv, device=device),
        index_k=torch.zeros(pages, PAGE_SIZE, HEAD_DIM, dtype=mode.index, device=device),
    )
    slots = torch.randperm(pages * PAGE_SIZE, device=device, generator=generator)[:tokens]
    q_out = torch.empty(tokens, num_q, HEAD_DIM, dtype=mode.q, device=device)
    index_q_out = torch.empty(tokens, num_index, HEAD_DIM, dtype=mode.index, device=device)
    sample = parity.sample_rows(tokens, sample_rows).to(device)

    def run(i: int, key: str) -> torch.Tensor:
        m3attn.qk_norm_rope_insert(
            rows[i],
            weights,
            positions,
            cos_sin,
            cache,
            slots,
            slots,
            heads=(num_q, num_kv, num_index),
            q_out=q_out,
            index_q_out=index_q_out,
            impl=key,
        )
        return q_out

    def check(_: torch.Tensor) -> Parity:
        packed = rows[0][sample].view(len(sample), row_heads, HEAD_DIM)
        q, k, v, index_q, index_k = packed.split([num_q, num_kv, num_kv, num_index, 1], dim=1)
        key, value = cache.key_value()
        page, slot = slots[sample] // PAGE_SIZE, slots[sample] % PAGE_SIZE
        found = []
        for got, x, weight in (
            (q_out[sample], q, weights[0]),
            (token_rows(key, page, slot), k, weights[1]),
            (index_q_out[sample], index_q, weights[2]),
            (token_rows(cache.index_key()[:, None], page, slot), index_k, weights[3]),
        ):
            expected = norm_rope(x, weight, positions[sample], cos_sin, dtype=torch.float64)
            found.append(parity.relative_error(got.float(), expected))
        exact = torch.equal(token_rows(value, page, slot).float(), saturating_cast(v, mode.kv).float())
        error = max(found) if exact else float("inf")
        return Parity(error, ROUNDING[mode.q], rows=len(sample))

    return Workload(Cost(moved), run, check, len(rows), (q_out, index_q_out))


def token_rows(pool: torch.Tensor, page: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    """[N, H, D] of pool [pages, H, page_size, D]."""
    if pool.dtype.itemsize == 1:
        return pool.view(torch.uint8)[page, :, slot].view(pool.dtype)
    return pool[page, :, slot]


def quantize_fp8(size: tuple[int, ...], sample_rows: int, l2_bytes: int, generator: torch.Generator) -> Workload:
    """bf16 to e4m3 with a static scale in a device tensor; `size` is (rows, columns)."""
    elements = size[0] * size[1]
    moved = elements * 3
    inputs = [random(size, torch.bfloat16, generator) for _ in range(num_sets(moved, l2_bytes))]
    scale = torch.full((1,), 0.037, device=generator.device)
    out = torch.empty(size, dtype=E4M3, device=generator.device)
    sample = parity.sample_rows(size[0], sample_rows).to(generator.device)

    def run(i: int, key: str) -> torch.Tensor:
        m3attn.quantize_fp8(inputs[i], scale=scale, out=out, impl=key)
        return out

    def check(result: torch.Tensor) -> Parity:
        expected = saturating_cast(inputs[0][sample], E4M3, scale).view(torch.uint8)
        wrong = (result.view(torch.uint8)[sample] != expected).sum().item()
        return Parity(float(wrong), 0.0, rows=len(sample))

    return Workload(Cost(moved), run, check, len(inputs), (out,))


def merge_attention_states(
    size: tuple[int, ...], heads: Heads, mode_name: str, sample_rows: int, l2_bytes: int, generator: torch.Generator
) -> Workload:
    """Two partial results of every query head; `size` is (tokens,)."""
    (tokens,) = size
    device, dtype = generator.device, MODES[mode_name].q
    shape = (tokens, heads.num_q, HEAD_DIM)
    moved = 3 * tokens * heads.num_q * (HEAD_DIM * dtype.itemsize + 4)
    part = ((shape, dtype), (shape[:2], torch.float32))
    sets = [tuple(random(size, kind, generator) for size, kind in part * 2) for _ in range(num_sets(moved, l2_bytes))]
    sample = parity.sample_rows(tokens, sample_rows).to(device)
    expected, _ = reference_merge.merge_attention_states(*(t[sample] for t in sets[0]), dtype=torch.float64)

    def run(i: int, key: str) -> torch.Tensor:
        return m3attn.merge_attention_states(*sets[i], impl=key)[0]

    def check(out: torch.Tensor) -> Parity:
        return Parity(parity.relative_error(out[sample], expected), ROUNDING[dtype], rows=len(sample))

    return Workload(Cost(moved), run, check, len(sets))
