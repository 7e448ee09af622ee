"""The table of cosines and sines that every layer of a model reads."""

from __future__ import annotations

import torch


def rotary_table(max_position: int, rotary_dim: int, theta: float, *, device: torch.device | str | None = None) -> torch.Tensor:
    """[max_position, rotary_dim] fp32, cosines first; angles in fp64, so that position 1,000,000 is exact to fp32."""
    frequency = theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim)
    angle = torch.arange(max_position, dtype=torch.float64, device=device)[:, None] * frequency
    return torch.cat([angle.cos().float(), angle.sin().float()], dim=1)
