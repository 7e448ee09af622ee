"""Gemma RMSNorm of query and key heads, rotary embedding, and insertion into the paged caches."""

from __future__ import annotations

from itertools import accumulate

import torch
from einops import rearrange

from m3attn.calls import QkNormRopeInsertCall
from m3attn.reference.numerics import compute_dtype, full_precision, indexable, token_slices
from m3attn.reference.quantize import saturating_cast
from m3attn.scales import UNIT, Scale


@full_precision
def norm_rope(
    x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, eps: float = 1e-6, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Normalise and rotate heads x [T, H, D].

    y = x * rsqrt(mean(x^2) + eps) * (1 + weight)
    for i < R/2:  y[i], y[i + R/2] = y[i] cos[i] - y[i + R/2] sin[i], y[i + R/2] cos[i] + y[i] sin[i]
    with cos, sin the halves of cos_sin[position] (R = rotary_dim); dims from R on are not rotated.

    Args:
        weight: [D].
        positions: [T], each inside the table.
        cos_sin: [max_position, R], cosines first.
        dtype: fp32 or fp64 to compute in; None as `numerics.compute_dtype`.

    Returns:
        [T, H, D] in the compute dtype.
    """
    dtype = compute_dtype(x, dtype)
    x = x.to(dtype)
    y = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * (1 + weight.to(dtype))
    rotary_dim = cos_sin.shape[1]
    cos, sin = rearrange(cos_sin[positions.long()].to(dtype), "t (part r) -> part t 1 r", part=2)
    first, second, rest = y.split([rotary_dim // 2, rotary_dim // 2, x.shape[-1] - rotary_dim], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def insert(cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, scale: Scale = UNIT) -> None:
    """Write values [T, H, D] / scale into cache [pages, H, page_size, D] at token slots [T], rounded once to the cache's dtype.

    A slot outside [0, pages * page_size) writes nothing. Of several rows with one slot the last one is written, whole.
    """
    slots, page_size = slots.long(), cache.shape[2]
    slots, order = slots.sort(stable=True)
    is_last = torch.ones_like(slots, dtype=torch.bool)
    is_last[:-1] = slots[:-1] != slots[1:]
    written = is_last & (slots >= 0) & (slots < cache.shape[0] * page_size)
    slots, stored = slots[written], saturating_cast(values[order[written]], cache.dtype, scale)
    indexable(cache)[slots // page_size, :, slots % page_size] = indexable(stored)


def qk_norm_rope_insert_call(call: QkNormRopeInsertCall) -> None:
    """Split the packed row, normalise and rotate q, k and the index heads, and store each part once rounded.

    packed row = [q Hq | k Hkv | v Hkv | index_q Hi | index_k 1] x D
    q, index_q           -> q_out, index_q_out, or back in place
    k, v -> main caches at `slots`; index_k -> index cache at `index_slots`; without caches k and index_k go back in place
    a row whose position is outside the table: nothing is written but zeros to q_out, index_q_out
    """
    head_dim = call.q_weight.shape[0]
    parts = [call.num_q_heads, call.num_kv_heads, call.num_kv_heads]
    if call.num_index_heads:
        parts += [call.num_index_heads, 1]
    packed = call.qkv[:, : sum(parts) * head_dim].unflatten(1, (-1, head_dim))
    # narrow, not split: autograd allows no writes to the views that split gives.
    q, k, v, *index = (packed.narrow(1, start, heads) for start, heads in zip(accumulate(parts, initial=0), parts, strict=False))
    for out in (call.q_out, call.index_q_out):
        if out is not None:
            indexable(out).zero_()

    live = ((call.positions >= 0) & (call.positions < call.cos_sin.shape[0])).nonzero().squeeze(1)
    index_k_cache = None if call.index_k_cache is None else call.index_k_cache[:, None]
    for chunk in token_slices(live.numel(), sum(parts) * head_dim * 4 * 4):
        rows = live[chunk]

        def roped(heads: torch.Tensor, weight: torch.Tensor | None, rows: torch.Tensor = rows) -> torch.Tensor:
            assert weight is not None, "index heads come with norm weights"
            return norm_rope(heads[rows], weight, call.positions[rows], call.cos_sin, eps=call.eps)

        _store(q if call.q_out is None else call.q_out, rows, roped(q, call.q_weight), call.q_scale)
        if call.k_cache is None or call.v_cache is None:
            _store(k, rows, roped(k, call.k_weight), UNIT)
        else:
            assert call.slots is not None, "a cache comes with slots"
            insert(call.k_cache, call.slots[rows], roped(k, call.k_weight), call.k_scale)
            insert(call.v_cache, call.slots[rows], v[rows], call.v_scale)
        if index:
            index_q, index_k = index
            _store(index_q if call.index_q_out is None else call.index_q_out, rows, roped(index_q, call.index_q_weight), call.index_q_scale)
            if index_k_cache is None:
                _store(index_k, rows, roped(index_k, call.index_k_weight), UNIT)
            else:
                assert call.index_slots is not None, "an index cache comes with slots"
                insert(index_k_cache, call.index_slots[rows], roped(index_k, call.index_k_weight), call.index_k_scale)


def _store(out: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, scale: Scale) -> None:
    indexable(out)[rows] = indexable(saturating_cast(values, out.dtype, scale))
