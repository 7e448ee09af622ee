"""The one cast to fp8, and the stage that quantises a tensor."""

from __future__ import annotations

import torch

from m3attn.calls import QuantizeFp8Call
from m3attn.dtypes import E4M3, is_fp8
from m3attn.reference.numerics import scale_tensor
from m3attn.scales import Scale, ScaleLike

MIN_AMAX = 2.0**-100
NAN_BYTE = 0x7F


def saturating_cast(x: torch.Tensor, dtype: torch.dtype, scale: ScaleLike | Scale | torch.Tensor = None) -> torch.Tensor:
    """x / scale in `dtype`; for fp8, out-of-range values become the largest finite one.

    stored = round_to_nearest_even(clamp(fp32(x) / scale, -max, +max));  +-inf -> +-max, NaN -> the byte 0x7f, as hardware writes it
    Other dtypes round without the clamp.

    Args:
        x: any floating dtype; the division is IEEE, in fp32 (fp64 for an fp64 x that is not stored as fp8).
        scale: as everywhere, or an fp32 tensor that broadcasts against x.
    """
    value = x.to(torch.float64 if x.dtype == torch.float64 and not is_fp8(dtype) else torch.float32)
    divisor = scale if isinstance(scale, torch.Tensor) else scale_tensor(Scale.of(scale, argument="scale"), x.device)
    # The divisor stays a tensor: torch multiplies by the reciprocal of a Python number on a GPU, which rounds twice.
    value = value / divisor.to(value.dtype)
    if not is_fp8(dtype):
        return value.to(dtype)
    largest = torch.finfo(dtype).max
    stored = value.clamp(-largest, largest).to(dtype)
    return torch.where(value.isnan(), NAN_BYTE, stored.view(torch.uint8)).view(dtype)


def dynamic_scale(x: torch.Tensor, dtype: torch.dtype, *, per_row: bool) -> torch.Tensor:
    """max(amax, 2^-100) / finfo(dtype).max in fp32, over all of x ([1]) or over its last axis ([rows]).

    amax is the largest magnitude among finite elements, so the scale is finite and positive for every input.
    """
    magnitude = x.float().abs()
    magnitude = torch.where(magnitude.isfinite(), magnitude, 0.0)
    rows = magnitude.reshape(x.shape[:-1].numel(), x.shape[-1]) if per_row else magnitude.reshape(1, x.numel())
    amax = torch.nn.functional.pad(rows, (0, 1), value=MIN_AMAX).amax(dim=-1)
    return amax / torch.full_like(amax, torch.finfo(dtype).max)


def quantize_fp8(
    x: torch.Tensor, *, scale: ScaleLike | Scale | str = None, dtype: torch.dtype = E4M3
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """x [..., N] in fp8.

    scale None or a number: out = saturating_cast(x, dtype, scale)
    scale "tensor" or "row": scale = dynamic_scale(x); returned beside out, [1] or [rows] fp32
    """
    if not isinstance(scale, str):
        return saturating_cast(x, dtype, scale)
    dynamic = dynamic_scale(x, dtype, per_row=scale == "row")
    divisor = dynamic.reshape(*x.shape[:-1], 1) if scale == "row" else dynamic
    return saturating_cast(x, dtype, divisor), dynamic


def quantize_fp8_call(call: QuantizeFp8Call) -> None:
    if call.mode == "static":
        call.out.copy_(saturating_cast(call.x, call.out.dtype, call.scale))
        return
    assert call.scale_out is not None, "a dynamic scale is written out"
    out, scale = quantize_fp8(call.x, scale=call.mode, dtype=call.out.dtype)
    call.out.copy_(out)
    call.scale_out.copy_(scale.reshape(call.scale_out.shape))
