"""Number formats against torch: every code, and rounding at every tie."""

import numpy as np
import pytest
import torch
from needed import need

need()

from ptxsim import formats

CODES = torch.arange(256, dtype=torch.int16).to(torch.uint8)
HALVES = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)


def same(got: np.ndarray, want: torch.Tensor) -> None:
    np.testing.assert_array_equal(got, want.numpy())  # NaN equals NaN


@pytest.mark.parametrize("name,dtype", [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_fp8_decodes(name: str, dtype: torch.dtype) -> None:
    same(formats.DEC[name](CODES.numpy()), CODES.view(dtype).float())


@pytest.mark.parametrize("name,dtype", [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_halves_decode(name: str, dtype: torch.dtype) -> None:
    with np.errstate(invalid="ignore"):
        same(formats.DEC[name](HALVES.numpy()), HALVES.view(dtype).float())


def around_ties(dtype: torch.dtype, largest: float) -> torch.Tensor:
    """Each finite value of a format, the middle to its neighbour, and what lies next to that middle."""
    codes = CODES.view(dtype) if dtype.itemsize == 1 else HALVES[::7].view(dtype)
    values = codes.float()
    values = values[values.isfinite()].sort().values
    middles = ((values[1:].double() + values[:-1].double()) / 2).float()
    ends = torch.tensor([float("inf"), -float("inf")])
    all_values = torch.cat([values, middles, torch.nextafter(middles, ends[0]), torch.nextafter(middles, ends[1])])
    return all_values[all_values.abs() <= largest]


@pytest.mark.parametrize("encode,dtype", [(formats.f32_to_e4m3, torch.float8_e4m3fn), (formats.f32_to_e5m2, torch.float8_e5m2)])
def test_fp8_rounds_to_nearest_even(encode, dtype: torch.dtype) -> None:
    values = around_ties(dtype, torch.finfo(dtype).max)
    same(formats.DEC["e4m3" if dtype is torch.float8_e4m3fn else "e5m2"](encode(values.numpy())), values.to(dtype).float())


@pytest.mark.parametrize("encode,dtype", [(formats.f32_to_e4m3, torch.float8_e4m3fn), (formats.f32_to_e5m2, torch.float8_e5m2)])
def test_fp8_saturates_and_keeps_nan(encode, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    codes = encode(np.array([1e9, -1e9, np.inf, -np.inf, np.nan], np.float32))
    values = torch.from_numpy(codes).view(dtype).float()
    assert values[:4].tolist() == [largest, -largest, largest, -largest] and values[4].isnan()


@pytest.mark.parametrize("encode,dtype", [(formats.f32_to_bf16, torch.bfloat16), (formats.f32_to_f16, torch.float16)])
def test_halves_round_to_nearest_even(encode, dtype: torch.dtype) -> None:
    values = around_ties(dtype, torch.finfo(dtype).max)
    name = "bf16" if dtype is torch.bfloat16 else "f16"
    same(formats.DEC[name](encode(values.numpy())), values.to(dtype).float())


@pytest.mark.parametrize("mode,towards", [("rm", -np.inf), ("rp", np.inf), ("rz", 0.0)])
def test_directed_rounding(mode: str, towards: float) -> None:
    nearest = np.linspace(-3, 3, 101).astype(np.float32)
    nudged = nearest.astype(np.float64) + np.where(np.arange(101) % 2, 1e-12, -1e-12)
    rounded = formats.round_dir(nudged, mode).astype(np.float64)
    if mode == "rz":
        assert (np.abs(rounded) <= np.abs(nudged)).all()
    else:
        assert (rounded <= nudged).all() if towards < 0 else (rounded >= nudged).all()
    assert (np.abs(rounded - nudged) < 1e-6).all()
