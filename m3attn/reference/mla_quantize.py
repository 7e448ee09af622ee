"""Rotation and quantisation of multi-head latent attention's queries and keys, where the rotated part of a key is shared by all heads."""

from __future__ import annotations

import torch
from einops import rearrange

from m3attn.calls import MlaKvPackQuantizeCall, MlaRopeQuantizeCall
from m3attn.reference.numerics import compute_dtype, full_precision, indexable, token_slices
from m3attn.reference.quantize import saturating_cast


@full_precision
def rope(
    x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, interleaved: bool = False, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Rotate every dim of x [T, ..., R].

    for i < R/2, with (a, b) = (i, i + R/2), or (2i, 2i + 1) if interleaved:
        y[a], y[b] = x[a] cos[i] - x[b] sin[i], x[b] cos[i] + x[a] sin[i]
    with cos, sin the halves of cos_sin[position].

    Args:
        positions: [T], each inside the table.
        cos_sin: [max_position, R], cosines first.
        dtype: fp32 or fp64 to compute in; None as `numerics.compute_dtype`.

    Returns:
        y like x, in the compute dtype.
    """
    dtype = compute_dtype(x, dtype)
    pairs = "t ... (r part) -> part t ... r" if interleaved else "t ... (part r) -> part t ... r"
    a, b = rearrange(x.to(dtype), pairs, part=2)
    cos, sin = rearrange(cos_sin[positions.long()].to(dtype), "t (part r) -> part t r", part=2)
    middle = (1,) * (x.dim() - 2)
    cos, sin = (table.reshape(table.shape[0], *middle, table.shape[1]) for table in (cos, sin))
    rotated = torch.stack([a * cos - b * sin, b * cos + a * sin])
    return rearrange(rotated, "part t ... r -> t ... (r part)" if interleaved else "part t ... r -> t ... (part r)")


def join_heads(nope: torch.Tensor, pe: torch.Tensor) -> torch.Tensor:
    """[T, H, nope + rope] of nope [T, H, nope] and pe [T, H, rope], or [T, rope] that every head shares."""
    if pe.dim() == 2:
        pe = pe[:, None].expand(-1, nope.shape[1], -1)
    return torch.cat([nope.to(pe.dtype), pe], dim=-1)


def mla_rope_quantize_call(call: MlaRopeQuantizeCall) -> None:
    """q = [q_nope | rope(q_pe)], k = [k_nope | rope(k_pe), the same for all heads], each rounded once.

    A row whose position is outside the table: zeros.
    """
    for out in (call.q_out, call.k_out):
        indexable(out).zero_()
    live = ((call.positions >= 0) & (call.positions < call.cos_sin.shape[0])).nonzero().squeeze(1)
    for chunk in token_slices(live.numel(), call.q_out[0].numel() * 4 * 8 if live.numel() else 1):
        rows = live[chunk]
        for out, nope, pe, scale in ((call.q_out, call.q_nope, call.q_pe, call.q_scale), (call.k_out, call.k_nope, call.k_pe, call.k_scale)):
            roped = rope(pe[rows], call.positions[rows], call.cos_sin, interleaved=call.interleaved)
            indexable(out)[rows] = indexable(saturating_cast(join_heads(nope[rows], roped), out.dtype, scale))


def mla_kv_pack_quantize_call(call: MlaKvPackQuantizeCall) -> None:
    """k = [k_nope | k_pe, the same for all heads] and v, each rounded once."""
    for rows in token_slices(call.v.shape[0], call.k_out.shape[1:].numel() * 4 * 8):
        indexable(call.k_out)[rows] = indexable(saturating_cast(join_heads(call.k_nope[rows], call.k_pe[rows]), call.k_out.dtype, call.k_scale))
        indexable(call.v_out)[rows] = indexable(saturating_cast(call.v[rows], call.v_out.dtype, call.v_scale))
