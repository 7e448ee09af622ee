"""The reference's norm and rotation against complex numbers, its insertion, and its cast to fp8 bit by bit."""

import pytest
import torch

from m3attn.dtypes import E4M3, E5M2
from m3attn.reference.norm_rope import insert, norm_rope
from m3attn.reference.quantize import dynamic_scale, quantize_fp8, saturating_cast
from m3attn.scales import Scale
from m3attn.testing.inputs import generator


def heads_and_table(rotary_dim: int, dim: int = 16) -> tuple[torch.Tensor, ...]:
    gen = generator(rotary_dim)
    x = torch.randn(5, 3, dim, generator=gen, dtype=torch.float64)
    weight = torch.randn(dim, generator=gen, dtype=torch.float64)
    angle = torch.rand(9, rotary_dim // 2, generator=gen, dtype=torch.float64) * 6
    positions = torch.tensor([0, 8, 3, 3, 1])
    return x, weight, positions, torch.cat([angle.cos(), angle.sin()], dim=1)


@pytest.mark.parametrize("rotary_dim", [2, 8, 16])
def test_rotation_is_a_product_of_complex_numbers(rotary_dim: int) -> None:
    x, weight, positions, cos_sin = heads_and_table(rotary_dim)
    y = torch.nn.functional.rms_norm(x, (16,), eps=1e-3) * (1 + weight)
    pairs = torch.complex(y[..., : rotary_dim // 2], y[..., rotary_dim // 2 : rotary_dim])
    turned = pairs * torch.complex(*cos_sin.chunk(2, dim=1))[positions][:, None]
    expected = torch.cat([turned.real, turned.imag, y[..., rotary_dim:]], dim=-1)
    torch.testing.assert_close(norm_rope(x, weight, positions, cos_sin, eps=1e-3), expected, rtol=1e-12, atol=1e-12)


def test_norm_rope_gradients() -> None:
    x, weight, positions, cos_sin = heads_and_table(8)

    def fn(x: torch.Tensor, weight: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        return norm_rope(x, weight, positions, cos_sin)

    assert torch.autograd.gradcheck(fn, [t.requires_grad_() for t in (x, weight, cos_sin)])


def test_insertion_keeps_the_last_of_rows_with_one_slot() -> None:
    cache = torch.zeros(2, 1, 4, 3)
    values = torch.arange(6.0)[:, None, None].expand(6, 1, 3) + 1
    insert(cache, torch.tensor([5, -1, 8, 5, 2**40, 0]), values)
    assert cache.flatten(0, 2)[:, 0].tolist() == [6, 0, 0, 0, 0, 4, 0, 0]


def test_insertion_divides_by_the_scale_and_rounds_once() -> None:
    values = torch.randn(4, 1, 3, generator=generator(0))
    cache = torch.zeros(1, 1, 4, 3).to(E4M3)
    insert(cache, torch.arange(4), values, Scale.of(0.037, argument="scale"))
    assert torch.equal(cache[0, 0].float(), saturating_cast(values[:, 0], E4M3, 0.037).float())


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_every_fp8_number_and_every_tie(dtype: torch.dtype) -> None:
    """Each number maps to itself, each midpoint to its even neighbour, what lies beyond the largest to it."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    finite = numbers[numbers.isfinite()].unique()
    assert torch.equal(saturating_cast(finite, dtype).float(), finite)
    middle = (finite[1:].double() + finite[:-1].double()) / 2
    stored = saturating_cast(middle.float(), dtype).float()
    codes = saturating_cast(stored, dtype).view(torch.uint8)
    assert bool(((stored == finite[1:]) | (stored == finite[:-1])).all()) and bool((codes % 2 == 0).all())
    largest = torch.finfo(dtype).max
    beyond = torch.tensor([largest * 1.01, largest * 100, float("inf")])
    assert saturating_cast(beyond, dtype).float().tolist() == [largest] * 3
    assert saturating_cast(-beyond, dtype).float().tolist() == [-largest] * 3
    assert bool(saturating_cast(torch.tensor([float("nan")]), dtype).float().isnan())


def test_dynamic_scales() -> None:
    x = torch.tensor([[0.0, 0.0], [3.0, -4.0], [float("inf"), 2.0], [float("nan"), -1.0], [1e-45, 0.0]])
    scale = dynamic_scale(x, E4M3, per_row=True)
    amax = torch.tensor([2.0**-100, 4.0, 2.0, 1.0, 2.0**-100])
    assert torch.equal(scale, amax / torch.tensor(448.0))
    assert torch.equal(dynamic_scale(x, E4M3, per_row=False), amax.max()[None] / torch.tensor(448.0))
    data, _ = quantize_fp8(x, scale="row")
    assert data.float()[1].tolist() == [320.0, -448.0], "336 lies between 320 and 352, and 320 is even"
    assert data.float()[2].tolist() == [448.0, 448.0] and bool(data.float()[3, 0].isnan())
