"""What the GPU at hand can do at most, measured on it, and the floor these ceilings put under a stage's time."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from m3attn.bench.timing import Timer
from m3attn.dtypes import E4M3

COPY_BYTES = 1 << 30
MATMUL_SIZE = 8192


@dataclass(frozen=True, slots=True)
class Cost:
    """The least a stage must do: bytes that cross the memory bus and floating-point operations, by the width of the operands."""

    bytes: float
    flops_16: float = 0.0
    flops_8: float = 0.0

    @property
    def flops(self) -> float:
        return self.flops_16 + self.flops_8


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured rates of one GPU: bytes read plus written by a copy, and products of random square matrices. fp8_tflops is None before SM89."""

    copy_tbps: float
    bf16_tflops: float
    fp8_tflops: float | None

    def floor_us(self, cost: Cost) -> float:
        """The larger of the time its bytes take and the time its operations take, in microseconds."""
        fp8_tflops = self.fp8_tflops or self.bf16_tflops
        operations = cost.flops_16 / (self.bf16_tflops * 1e6) + cost.flops_8 / (fp8_tflops * 1e6)
        return max(operations, cost.bytes / (self.copy_tbps * 1e6))

    def as_dict(self) -> dict[str, float | None]:
        return asdict(self)


def measure(device: torch.device, timer: Timer) -> Ceilings:
    """Time a copy and the products on `device`; about a second of GPU time."""
    has_fp8 = torch.cuda.get_device_capability(device) >= (8, 9)
    return Ceilings(_copy_tbps(device, timer), _bf16_tflops(device, timer), _fp8_tflops(device, timer) if has_fp8 else None)


def _copy_tbps(device: torch.device, timer: Timer) -> float:
    source = torch.zeros(COPY_BYTES // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return 2.0 * COPY_BYTES / timer.cold(lambda: target.copy_(source)) / 1e6


def _factors(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Random, because zeros draw less power than data and let the clock rise."""
    shape = (MATMUL_SIZE, MATMUL_SIZE)
    return torch.randn(shape, dtype=torch.bfloat16, device=device), torch.randn(shape, dtype=torch.bfloat16, device=device)


def _bf16_tflops(device: torch.device, timer: Timer) -> float:
    a, b = _factors(device)
    product = torch.empty_like(a)
    return 2.0 * MATMUL_SIZE**3 / timer.cold(lambda: torch.mm(a, b, out=product)) / 1e6


def _fp8_tflops(device: torch.device, timer: Timer) -> float:
    a, b = (x.to(E4M3) for x in _factors(device))
    one = torch.ones((), dtype=torch.float32, device=device)
    us = timer.cold(lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True))
    return 2.0 * MATMUL_SIZE**3 / us / 1e6
