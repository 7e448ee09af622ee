"""Scales of fp8 data. stored = value / scale; value = stored * scale. One type everywhere, normalised once at the launch border."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

ScaleLike = float | torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Scale:
    """A scale as kernels take it: `value` when the number is known on the host, `tensor` (one fp32 element) when only the device knows it.

    With a tensor, `value` is 1.0 and the kernel multiplies by both; None costs nothing because 1.0 * x is x, bit for bit.
    """

    value: float = 1.0
    tensor: torch.Tensor | None = None

    @classmethod
    def of(cls, scale: ScaleLike | Scale, *, argument: str, device: torch.device | None = None) -> Scale:
        """Normalise None, a float or a one-element fp32 tensor on `device` (None: any).

        Raises:
            ValueError: a float that is not finite and positive, or a tensor of another size or device.
            TypeError: another type, or a tensor that is not fp32.
        """
        if scale is None:
            return UNIT
        if isinstance(scale, Scale):
            return scale
        if isinstance(scale, torch.Tensor):
            if scale.dtype != torch.float32:
                raise TypeError(f"{argument}: expected a one-element float32 tensor, got {scale.dtype}")
            if scale.numel() != 1:
                raise ValueError(f"{argument}: expected a one-element float32 tensor, got shape {tuple(scale.shape)}")
            if device is not None and scale.device != device:
                raise ValueError(f"{argument}: expected a tensor on {device}, got one on {scale.device}")
            return cls(1.0, scale)
        if isinstance(scale, bool) or not isinstance(scale, (int, float)):
            raise TypeError(f"{argument}: expected None, a float or a one-element float32 tensor, got {type(scale).__name__}")
        value = float(scale)
        if not math.isfinite(value) or value <= 0.0:
            raise ValueError(f"{argument}: expected a finite number above 0, got {scale!r}")
        return cls(value, None)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x * scale in x's dtype; x itself when the scale is 1."""
        if self.tensor is not None:
            return x * self.tensor.to(device=x.device, dtype=x.dtype).reshape(())
        return x if self.value == 1.0 else x * self.value

    def divide(self, x: torch.Tensor) -> torch.Tensor:
        """x / scale in x's dtype; x itself when the scale is 1."""
        if self.tensor is not None:
            return x / self.tensor.to(device=x.device, dtype=x.dtype).reshape(())
        return x if self.value == 1.0 else x / self.value


UNIT = Scale()
