"""How far a result may be from fp64: twice what plain torch at the same precision is off, plus a band from rounding theory.

A tolerance is a tensor beside the exact result, so that rows of very different size are each judged by their own rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from einops import einsum, rearrange

from m3attn.batch import LayerCache, PagedBatch
from m3attn.dtypes import E4M3, is_fp8
from m3attn.reference import index, sparse
from m3attn.reference.dense import dense_attention
from m3attn.reference.numerics import full_precision, scale_factor, token_slices
from m3attn.reference.paging import gather_tokens, query_rows
from m3attn.reference.softmax import masked_softmax
from m3attn.scales import ScaleLike

FP32_ERROR = 2.0**-20
"""Error of an fp32 sum of up to 256 products, tensor cores included, as a fraction of sum |q||k|."""

HOPPER_E4M3_PRODUCT_ERROR = 2.0**-11
"""Error of a sum of up to 128 e4m3 products on Hopper's fp8 tensor cores as a fraction of sum |q||k|: they keep fewer bits inside one sum.

Measured on an H200 with Triton 3.6 (64 and 128 rows, dims 64 and 128): at most 2^-11.6 for normally distributed operands, which the test inputs
are; 2^-9.5 for operands whose sizes spread over 12 to 18 powers of two. 16 rows are multiplied in fp16 and keep fp32's accuracy.
"""


def product_error(key: str, arch: str, q_dtype: torch.dtype, k_dtype: torch.dtype) -> float:
    """The error of one q . k as a fraction of sum |q||k|, for an implementation on an architecture."""
    if key == "reference" or arch != "sm_90" or q_dtype != E4M3 or k_dtype != E4M3:
        return FP32_ERROR
    return HOPPER_E4M3_PRODUCT_ERROR


def rounding(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The most that one rounding of `exact` to `dtype` changes, denormals included; 0 for a rounding to fp64."""
    if dtype == torch.float64:
        return torch.zeros_like(exact)
    info = torch.finfo(dtype)
    return (exact.abs() * (info.eps / 2)).clamp(min=info.smallest_normal * info.eps / 2)


def assert_within(actual: torch.Tensor, exact: torch.Tensor, tolerance: torch.Tensor, *, name: str = "result") -> None:
    """`actual` within `tolerance` of `exact`, NaN and infinities at the same places.

    Raises:
        AssertionError: with the worst coordinate and both values there.
    """
    assert actual.shape == exact.shape, f"{name}: expected shape {tuple(exact.shape)}, got {tuple(actual.shape)}"
    actual, exact = actual.double(), exact.double()
    special = ~exact.isfinite() | ~actual.isfinite()
    same = (actual == exact) | (actual.isnan() & exact.isnan())
    wrong = special & ~same
    if bool(wrong.any()):
        where = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(f"{name}: expected {exact[where].item()} at {where}, got {actual[where].item()} ({int(wrong.sum())} such places)")
    error = torch.where(special, 0.0, (actual - exact).abs())
    excess = error - tolerance
    if error.numel() and float(excess.max()) > 0:
        ratio = torch.where(error > 0, error / tolerance, 0.0)
        where = tuple(int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape))
        raise AssertionError(
            f"{name}: {float(ratio[where]):.2f} times the bound at {where}: expected {exact[where].item():.9g}, got {actual[where].item():.9g}, "
            f"bound {tolerance.expand_as(error)[where].item():.3g} ({int((excess > 0).sum())} of {error.numel()} places beyond theirs)"
        )


@dataclass(frozen=True, eq=False)
class AttentionBound:
    """The exact result in fp64 and how far from it an implementation may be."""

    out: torch.Tensor
    lse: torch.Tensor
    out_tolerance: torch.Tensor
    lse_tolerance: torch.Tensor

    def check(self, out: torch.Tensor, lse: torch.Tensor | None, *, name: str = "") -> None:
        if lse is not None:
            assert_within(lse, self.lse, self.lse_tolerance, name=f"{name} lse".strip())
        assert_within(out, self.out, self.out_tolerance, name=f"{name} out".strip())


@full_precision
def attention_bound(
    q: torch.Tensor,
    cache: LayerCache,
    batch: PagedBatch,
    ids: torch.Tensor | None,
    *,
    sm_scale: float | None = None,
    q_scale: ScaleLike = None,
    sink_key: torch.Tensor | None = None,
    fp8_pv: bool = False,
    error_of_products: float = FP32_ERROR,
) -> AttentionBound:
    """The bound of sparse attention (`ids` given) or dense attention.

    Beside twice the error of torch at the same precision, a row may be off by
        the rounding of its output,
        the rounding of its P: independent errors of up to u |p v| each, four times their root of squares,
        errors of its logits, `error_of_products` * max over keys of sum |q||k| scale, through the same root of squares.
    """
    k, v = cache.key_value()
    k_scale, v_scale, _ = cache.scales()
    options: dict[str, Any] = {
        "sm_scale": sm_scale,
        "q_scale": q_scale,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "sink_key": sink_key,
        "dtype": torch.float64,
    }
    if ids is None:
        exact, exact_lse = dense_attention(q, k, v, batch, **options)
        ids = torch.arange(batch.num_blocks, device=q.device).expand(k.shape[1], q.shape[0], -1)
    else:
        exact, exact_lse = sparse.sparse_attention(q, k, v, ids, batch, **options)

    num_groups, head_dim = k.shape[1], q.shape[2]
    out_dtype = torch.bfloat16 if is_fp8(q.dtype) else q.dtype
    p_dtype, p_factor = (E4M3, 256.0) if fp8_pv else (out_dtype, 1.0)
    p_unit, p_floor = torch.finfo(p_dtype).eps / 2, float(rounding(torch.zeros(()), p_dtype)) / p_factor
    logit_scale = (head_dim**-0.5 if sm_scale is None else sm_scale) * scale_factor({"q": q_scale, "k": k_scale}, exact)
    sink_scale = (head_dim**-0.5 if sm_scale is None else sm_scale) * scale_factor({"q": q_scale}, exact)
    out_scale = scale_factor({"v": v_scale}, exact)
    request, position = query_rows(batch, q.shape[0])
    head = torch.arange(num_groups, device=q.device)[:, None]
    in_block = torch.arange(batch.block_size, device=q.device)

    out_tolerance, lse_tolerance = torch.zeros_like(exact), torch.zeros_like(exact_lse)
    for rows in token_slices(q.shape[0], 8 * num_groups * ids.shape[2] * batch.block_size * 6 * head_dim):
        row_position = position[rows, None, None]
        row_ids = rearrange(ids[:, rows], "g t k -> t g k").long()
        selected = (row_ids >= 0) & (row_ids <= row_position // batch.block_size) & (row_position >= 0)
        token = rearrange(row_ids[..., None] * batch.block_size + in_block, "t g k s -> t g (k s)")
        visible = selected.repeat_interleave(batch.block_size, dim=2) & (token <= row_position)
        if visible.shape[-1] == 0:
            continue
        keys, values = (gather_tokens(pool, batch, request[rows, None, None], head, token, visible, torch.float64) for pool in (k, v))
        queries = rearrange(q[rows].double(), "t (g h) d -> t g h d", g=num_groups)
        shown = visible[:, :, None]

        logits = einsum(queries.float(), keys.float(), "t g h d, t g n d -> t g h n") * logit_scale.float()
        plain, plain_lse = _same_precision_attention(logits, shown, values.float(), p_dtype, p_factor)
        plain = plain * out_scale.float()
        if sink_key is not None:
            sink = einsum(queries, rearrange(sink_key.double(), "(g h) d -> g h d", g=num_groups), "t g h d, g h d -> t g h") * sink_scale
            plain = torch.where(plain_lse.isfinite()[..., None], plain * torch.sigmoid(plain_lse - sink.float())[..., None], 0.0)
        plain = rearrange(plain.to(out_dtype).double(), "t g h d -> t (g h) d")
        plain_error = (plain - exact[rows]).abs().amax(dim=-1, keepdim=True)

        weights, _ = masked_softmax(einsum(queries, keys, "t g h d, t g n d -> t g h n") * logit_scale, shown)
        size = einsum(queries.abs(), keys.abs(), "t g h d, t g n d -> t g h n") * logit_scale.abs()
        size = size.masked_fill(~shown, 0.0).amax(dim=-1)
        logit_error = rearrange(error_of_products * size, "t g h -> t (g h)")
        squares = rearrange(einsum(weights.square(), values.square(), "t g h n, t g n d -> t g h d"), "t g h d -> t (g h) d").sqrt() * out_scale
        floor = rearrange(values.square().sum(dim=2).sqrt() * p_floor, "t g d -> t g 1 d").expand(-1, -1, queries.shape[2], -1)
        floor = rearrange(floor, "t g h d -> t (g h) d") * out_scale
        weight_squares = rearrange(weights.square().sum(dim=-1).sqrt(), "t g h -> t (g h) 1")
        out_tolerance[rows] = (
            2 * plain_error
            + 2 * rounding(exact[rows], out_dtype)
            + 4 * (p_unit * squares + floor)
            + 4 * (logit_error + FP32_ERROR)[..., None] * (squares + exact[rows].abs() * weight_squares)
        )
        plain_lse = rearrange(plain_lse.double(), "t g h -> t (g h)")
        finite = exact_lse[rows].isfinite()
        lse_error = torch.where(finite, (plain_lse - exact_lse[rows]).abs(), 0.0)
        lse_tolerance[rows] = 2 * lse_error + logit_error + torch.where(finite, FP32_ERROR * (1 + exact_lse[rows].abs()), 0.0)
    return AttentionBound(exact, exact_lse, out_tolerance, lse_tolerance)


def _same_precision_attention(
    logits: torch.Tensor, visible: torch.Tensor, values: torch.Tensor, p_dtype: torch.dtype, p_factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 softmax with P rounded to `p_dtype` before the product with V, row sums from the unrounded P, division at the end."""
    logits = logits.masked_fill(~visible, float("-inf"))
    largest = logits.amax(dim=-1, keepdim=True)
    largest = torch.where(largest == float("-inf"), 0.0, largest)
    p = torch.exp(logits - largest)
    total = p.sum(dim=-1)
    stored = (p * p_factor).to(p_dtype).float() / p_factor
    out = einsum(stored, values, "t g h n, t g n d -> t g h d") / torch.where(total == 0, 1.0, total)[..., None]
    lse = torch.where(total == 0, float("-inf"), largest.squeeze(-1) + total.log())
    return out, lse


def score_bound(
    index_q: torch.Tensor, cache: LayerCache, batch: PagedBatch, *, index_q_scale: ScaleLike = None, error_of_products: float = FP32_ERROR
) -> tuple[torch.Tensor, torch.Tensor]:
    """(exact scores in fp64, tolerance), both [Hi, T, blocks]; the tolerance is 0 where no token is visible."""
    keys = cache.index_key()
    scales: dict[str, Any] = {"index_q_scale": index_q_scale, "index_k_scale": cache.scales()[2]}
    exact = index.index_score(index_q, keys, batch, dtype=torch.float64, **scales)
    plain = index.index_score(index_q, keys, batch, dtype=torch.float32, **scales).double()
    size = index.index_score(index_q.float().abs(), keys.float().abs(), batch, dtype=torch.float64, **scales)
    finite = exact.isfinite()
    error = torch.where(finite, (plain - exact).abs(), 0.0)
    return exact, torch.where(finite, 2 * error + error_of_products * size + 2 * rounding(exact, torch.float32), 0.0)


def merge_bound(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> AttentionBound:
    """The bound of merge_attention_states: fp32 arithmetic and one rounding of the output."""
    from m3attn.reference.merge import merge_attention_states

    exact, exact_lse = merge_attention_states(out_a, lse_a, out_b, lse_b, dtype=torch.float64)
    size = torch.maximum(out_a.double().abs().nan_to_num(), out_b.double().abs().nan_to_num())
    largest = torch.maximum(lse_a, lse_b).double().nan_to_num(neginf=0.0).abs()
    # exp turns the rounding of its argument, up to the size of the LSEs, into a relative error of a weight.
    out_tolerance = 2 * rounding(exact, out_a.dtype) + FP32_ERROR / 8 * (1 + largest[..., None]) * size
    lse_tolerance = torch.where(exact_lse.isfinite(), FP32_ERROR / 8 * (1 + largest), 0.0)
    return AttentionBound(exact, exact_lse, out_tolerance, lse_tolerance)


def norm_rope_bound(exact: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Tolerance of a normalised head stored as `dtype`, in units of the value: one rounding, and fp32 arithmetic before it.

    Rotation mixes two dims of a head, so fp32 errors are relative to the head's largest one.
    """
    arithmetic = FP32_ERROR * exact.abs().amax(dim=-1, keepdim=True)
    return rounding(exact / scale, dtype) * scale * (1 + 2.0**-10) + arithmetic
