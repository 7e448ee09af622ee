"""Faults of merging and of quantisation, each as a check of every implementation."""

import numpy as np
import pytest
import torch

import m3attn
from m3attn.dtypes import E4M3, E5M2
from m3attn.testing.bounds import merge_bound
from m3attn.testing.cases import MergeCase
from m3attn.testing.inputs import generator, merge_inputs, poisoned
from m3attn.testing.matrix import DEVICE, keys, pick

MERGE = pytest.mark.parametrize("key", keys("merge_attention_states"))
QUANTIZE = pytest.mark.parametrize("key", keys("quantize_fp8"))
CASE = MergeCase(pick(12, 1_000), pick(2, 64), pick(64, 128), torch.float32)


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def merge(key: str, *parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return m3attn.merge_attention_states(*parts, impl=key)


@MERGE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_part_without_keys_changes_no_bit(key: str, dtype: torch.dtype) -> None:
    out, lse, _, _ = merge_inputs(MergeCase(CASE.tokens, CASE.heads, CASE.dim, dtype), DEVICE)
    out, lse = torch.where(lse[..., None] == float("-inf"), 0.0, out).to(dtype), lse
    empty = torch.full_like(lse, float("-inf"))
    for parts in ((out, lse, torch.full_like(out, float("nan")), empty), (torch.full_like(out, float("inf")), empty, out, lse)):
        merged, merged_lse = merge(key, *parts)
        assert torch.equal(merged, out) and torch.equal(merged_lse, lse)
    nothing, nothing_lse = merge(key, torch.full_like(out, float("nan")), empty, torch.full_like(out, float("nan")), empty)
    assert bool((nothing == 0).all()) and bool((nothing_lse == float("-inf")).all())


@MERGE
def test_merging_commutes(key: str) -> None:
    out_a, lse_a, out_b, lse_b = merge_inputs(CASE, DEVICE)
    out, lse = merge(key, out_a, lse_a, out_b, lse_b)
    swapped, swapped_lse = merge(key, out_b, lse_b, out_a, lse_a)
    assert torch.equal(lse, swapped_lse)
    merge_bound(out_a, lse_a, out_b, lse_b).check(swapped, swapped_lse)
    merge_bound(out_a, lse_a, out_b, lse_b).check(out, lse)


@MERGE
def test_merging_is_associative_within_rounding(key: str) -> None:
    a, la, b, lb = merge_inputs(CASE, DEVICE, seed=1)
    c, lc, _, _ = merge_inputs(CASE, DEVICE, seed=2)
    left, left_lse = merge(key, *merge(key, a, la, b, lb), c, lc)
    right, right_lse = merge(key, a, la, *merge(key, b, lb, c, lc))
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(left_lse, right_lse, rtol=1e-5, atol=1e-5)


@MERGE
def test_lses_far_apart_and_very_large(key: str) -> None:
    out_a, _, out_b, _ = (torch.where(t.isfinite(), t, 0.5) for t in merge_inputs(CASE, DEVICE))
    shape = out_a.shape[:2]
    for a, b in ((1e4, -1e4), (-3e4, -3e4), (500.0, 499.0), (-200.0, -201.0), (0.0, -150.0)):
        lse_a, lse_b = (torch.full(shape, x, device=DEVICE) for x in (a, b))
        merge_bound(out_a, lse_a, out_b, lse_b).check(*merge(key, out_a, lse_a, out_b, lse_b), name=f"{a}, {b}")


@MERGE
def test_strided_parts(key: str) -> None:
    parts = merge_inputs(CASE, DEVICE)
    expected = merge(key, *parts)
    around = poisoned((CASE.tokens, CASE.heads + 3, CASE.dim), torch.float32, DEVICE)
    around[:, 1 : CASE.heads + 1] = parts[0]
    lse = parts[1].t().contiguous().t()
    merged = merge(key, around[:, 1 : CASE.heads + 1], lse, *parts[2:])
    assert all(torch.equal(a, b) for a, b in zip(merged, expected, strict=True))


def quantize(key: str, x: torch.Tensor, **options: object) -> object:
    return m3attn.quantize_fp8(x, **options, impl=key)


@QUANTIZE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dynamic_rows_reach_the_largest_value_at_any_magnitude(key: str, dtype: torch.dtype) -> None:
    """amax maps to 448, never to another flavour's maximum; the scale is amax / 448."""
    largest = torch.finfo(dtype).max
    magnitudes = [m for m in (1.0, 3.0, 448.0, 1e-4, 1e4, 6e4, largest, 1e-25, 1e30) if dtype != torch.float16 or 1e-4 <= m <= 65504]
    x = torch.randn(len(magnitudes), 64, generator=generator(0)).clamp(-0.9, 0.9)
    x[:, 5] = 1.0
    x = (x.double() * torch.tensor(magnitudes, dtype=torch.float64)[:, None]).to(dtype).to(DEVICE)
    data, scale = quantize(key, x, scale="row")
    assert bool((data.float().abs().amax(dim=1) == 448.0).all())
    exact = x.float().abs().amax(dim=1).cpu().numpy() / np.float32(448.0)
    assert torch.equal(scale.cpu(), torch.from_numpy(exact))
    restored = data.double() * scale.double()[:, None]
    assert bool(((restored - x.double()).abs() <= x.double().abs() * 2**-4 + scale.double()[:, None] * 2**-10).all())


@QUANTIZE
@pytest.mark.parametrize("mode", ["row", "tensor"])
def test_zero_tiny_and_special_inputs(key: str, mode: str) -> None:
    """A zero row gives zeros and a finite scale; finite input never gives NaN; infinities saturate; NaN stays where it is."""
    tiny = torch.finfo(torch.float32).smallest_normal
    for value in (0.0, 1e-45, tiny / 3, 1e-38, 1e-30, 65504.0, torch.finfo(torch.float32).max):
        data, scale = quantize(key, torch.full((1, 40), value, device=DEVICE), scale=mode)
        assert bool(data.float().isfinite().all()) and bool(((scale > 0) & scale.isfinite()).all())
        assert value != 0.0 or bool((data.float() == 0).all())
    x = torch.tensor([[1.0, float("inf"), -2.0, float("-inf")], [4.0, 0.0, float("nan"), 1.0]], device=DEVICE)
    data, scale = quantize(key, x, scale=mode)
    assert bool(scale.isfinite().all())
    assert data[0, 1].item() == 448.0 and data[0, 3].item() == -448.0 and data[1, 2].isnan().item()
    assert int(data.float().isnan().sum()) == 1


@QUANTIZE
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("scale", [0.037, 12.5, 1.0 / 3.0, 1e-3, 7e4, 1e-30, 1e-18, 1e30])
def test_the_division_is_ieee(key: str, scale: float) -> None:
    """The very bytes of numpy's fp32 division, which a multiplication by the reciprocal misses at ties: random values, and those within two
    units in the last place of a tie, of zeros, of overflow."""
    rows = pick(4, 2_000)
    halves = torch.randint(8, 32, (rows, 1_000), generator=generator(1)) * torch.exp2(torch.randint(-16, 8, (rows, 1_000), generator=generator(2)))
    near_ties = (halves.double() * float(np.float32(scale))).float().view(torch.int32) + torch.randint(-2, 3, halves.shape, generator=generator(3))
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 3.4e38, -3.4e38, 1e-38, -1e-38, 1e-44, -1e-44]).repeat(rows, 1)
    x = torch.cat([torch.randn(rows, 1_000, generator=generator(0)) * 100 * scale, near_ties.int().view(torch.float32), special], dim=1)
    x[::2, 1_000:2_000] *= -1
    with np.errstate(over="ignore"):
        divided = torch.from_numpy(x.numpy() / np.float32(scale))
    for dtype in (E4M3, E5M2):
        largest = torch.finfo(dtype).max
        expected = divided.clamp(-largest, largest).to(dtype)
        for form in (scale, torch.tensor([scale], device=DEVICE)):
            assert torch.equal(raw(quantize(key, x.to(DEVICE), scale=form, dtype=dtype)).cpu(), raw(expected))


@QUANTIZE
@pytest.mark.parametrize("out_dtype", [E4M3, E5M2], ids=str)
def test_every_16_bit_number(key: str, out_dtype: torch.dtype) -> None:
    """All bit patterns of bf16 and fp16: nearest even, saturation, denormals, signs, NaN."""
    bits = torch.arange(65_536, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        x = bits.view(dtype).reshape(64, 1_024)
        largest = torch.finfo(out_dtype).max
        expected = x.float().clamp(-largest, largest).to(out_dtype)
        stored = quantize(key, x.to(DEVICE), dtype=out_dtype).cpu()
        nan = expected.float().isnan()
        assert torch.equal(stored.float().isnan(), nan)
        assert torch.equal(raw(stored)[~nan], raw(expected)[~nan])


@QUANTIZE
def test_no_scale_is_a_scale_of_one(key: str) -> None:
    x = torch.randn(7, 50, generator=generator(2)).to(DEVICE) * 50
    expected = raw(quantize(key, x))
    assert torch.equal(raw(quantize(key, x, scale=1.0)), expected)
    assert torch.equal(raw(quantize(key, x, scale=torch.ones(1, device=DEVICE))), expected)
    assert torch.equal(raw(quantize(key, x, pdl=True)), expected)


@QUANTIZE
def test_views_and_caller_owned_output(key: str) -> None:
    x = torch.randn(4, 3, 40, generator=generator(3)).to(DEVICE)
    expected = raw(quantize(key, x, scale=0.5))
    around = poisoned((4, 5, 56), torch.float32, DEVICE)
    around[:, 1:4, 8:48] = x
    out = torch.full((4, 3, 40), 7.0, device=DEVICE).to(E4M3)
    assert quantize(key, around[:, 1:4, 8:48], scale=0.5, out=out) is out
    assert torch.equal(raw(out), expected)
    with pytest.raises(ValueError, match="stride"):
        quantize(key, x.transpose(1, 2), scale=0.5)


@QUANTIZE
def test_empty_tensors(key: str) -> None:
    for shape in ((0, 16), (3, 0), (0,)):
        assert quantize(key, torch.empty(shape, device=DEVICE)).shape == shape
    data, scale = quantize(key, torch.empty(0, 16, device=DEVICE), scale="row")
    assert data.shape == (0, 16) and scale.numel() == 0


@pytest.mark.parametrize("key", keys("quantize_fp8"))
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_nan_is_one_byte_in_every_implementation(key: str, dtype: torch.dtype) -> None:
    x = torch.tensor([[float("nan"), -float("nan"), 1.0, -float("inf")] * 8], device=DEVICE)
    out = m3attn.quantize_fp8(x, dtype=dtype, impl=key).view(torch.uint8)
    assert bool((out[:, 0::4] == 0x7F).all()) and bool((out[:, 1::4] == 0x7F).all())
    assert bool((out[:, 3::4] == out[:, 3]).all()) and bool((out.view(dtype)[:, 2::4].float() == 1).all())
