"""Faults that fused norm, rotation and insertion have had, each as a check of every implementation."""

from dataclasses import replace

import pytest
import torch

import m3attn
from m3attn.batch import LayerCache
from m3attn.dtypes import E4M3, E5M2
from m3attn.reference.norm_rope import norm_rope
from m3attn.reference.numerics import indexable
from m3attn.reference.quantize import saturating_cast
from m3attn.testing.cases import NormRopeCase
from m3attn.testing.inputs import NormRopeInputs, norm_rope_inputs, poisoned
from m3attn.testing.matrix import DEVICE, keys, pick

KEYS = pytest.mark.parametrize("key", keys("qk_norm_rope_insert"))
BF16 = torch.bfloat16
BASE = NormRopeCase(pick(5, 300), pick(3, 64), pick(1, 4), pick(1, 4), cache_dtype=BF16, index_dtype=BF16, q_out_dtype=BF16)


def run(key: str, inputs: NormRopeInputs, **changes: object) -> tuple[torch.Tensor, torch.Tensor | None]:
    return m3attn.qk_norm_rope_insert(*inputs.arguments(), **{**inputs.options, **changes}, impl=key)


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def own_slots(inputs: NormRopeInputs) -> NormRopeInputs:
    """Row i in slot i of both caches, every position inside the table."""
    rows = torch.arange(inputs.qkv.shape[0], device=DEVICE)
    return replace(inputs, slots=rows, index_slots=rows, positions=inputs.positions.clamp(0, 100))


@KEYS
def test_an_fp8_index_cache_changes_nothing_else(key: str) -> None:
    """q, k, v and the main cache's bytes are those of a run with a 16-bit index cache."""
    results = []
    for index_dtype in (BF16, E4M3):
        inputs = norm_rope_inputs(replace(BASE, index_dtype=index_dtype), DEVICE)
        q, _ = run(key, inputs)
        results.append([raw(t) for t in (q, inputs.qkv, *inputs.cache.key_value())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@KEYS
@pytest.mark.parametrize("cache_dtype", [E4M3, E5M2], ids=str)
def test_one_rounding_from_fp32_to_the_cache(key: str, cache_dtype: torch.dtype) -> None:
    """Where rounding through bf16 first would give another byte, the byte is that of one rounding."""
    case = replace(BASE, cache_dtype=cache_dtype, index_dtype=E4M3, tokens=pick(24, 400))
    inputs = own_slots(norm_rope_inputs(case, DEVICE))
    run(key, inputs)
    dim, (q_heads, kv_heads, index_heads) = 128, inputs.options["heads"]
    heads = inputs.qkv.unflatten(1, (-1, dim))
    for pool, first, count, weight in (
        (inputs.cache.key_value()[0], q_heads, kv_heads, 1),
        (inputs.cache.index_key()[:, None], q_heads + 2 * kv_heads + index_heads, 1, 3),
    ):
        exact = norm_rope(heads[:, first : first + count], inputs.weights[weight], inputs.positions, inputs.cos_sin)
        once, twice = (raw(saturating_cast(x, pool.dtype)) for x in (exact, exact.to(BF16)))
        stored = raw(indexable(pool)[inputs.slots // case.page_size, :, inputs.slots % case.page_size].view(pool.dtype))
        differ = once != twice
        assert int(differ.sum()) > 20, "the inputs tell the two apart"
        assert float((stored == once)[differ].double().mean()) > 0.98
        assert float((stored == once).double().mean()) >= 0.999


@KEYS
def test_in_place_equals_separate_outputs(key: str) -> None:
    separate, in_place = (norm_rope_inputs(replace(BASE, q_out_dtype=d), DEVICE) for d in (BF16, None))
    before = separate.qkv.clone()
    q, index_q = run(key, separate)
    q_view, index_view = run(key, in_place)
    live = (separate.positions >= 0) & (separate.positions < separate.cos_sin.shape[0])
    assert torch.equal(q[live], q_view[live]) and torch.equal(index_q[live], index_view[live])
    assert q_view.untyped_storage().data_ptr() == in_place.qkv.untyped_storage().data_ptr()
    assert torch.equal(raw(separate.qkv), raw(before)), "with separate outputs and a cache the packed row stays"


@KEYS
def test_slots_outside_the_cache_write_nothing(key: str) -> None:
    """Slots just below, just above and far outside, with guard pages before and after the cache."""
    inputs = norm_rope_inputs(replace(BASE, tokens=6), DEVICE)
    kv_heads, page = inputs.options["heads"][1], BASE.page_size
    around = poisoned((6, 3, kv_heads, page, 128), BF16, DEVICE)
    inside = around[2:4]
    cache = LayerCache(k=inside[:, 0], v=inside[:, 1], index_k=inside[:, 2, 0])
    slots = torch.tensor([-1, 5, -(2**31), 2 * page - 1, 2 * page, 2**31 - 1], dtype=torch.int32, device=DEVICE)
    run(key, replace(inputs, cache=cache, slots=slots, index_slots=slots, positions=torch.zeros_like(inputs.positions)))
    written = around[..., 0].float().isfinite()
    assert written[2, 0, :, 5].all() and written[3, 0, :, page - 1].all() and written[2, 2, 0, 5]
    assert int(written.sum()) == 2 * (2 * kv_heads + 1), "a slot outside the cache was written"


@KEYS
def test_rows_with_one_slot_leave_pieces_of_theirs(key: str) -> None:
    """Programs that write one slot at a time nothing orders: every 16 bytes are those of one of the rows."""
    inputs = own_slots(norm_rope_inputs(BASE, DEVICE))
    run(key, inputs)
    k, v = inputs.cache.key_value()
    apart = [(k[i // 16, :, i % 16].clone(), v[i // 16, :, i % 16].clone()) for i in range(inputs.qkv.shape[0])]
    same = replace(inputs, slots=torch.full_like(inputs.slots, 7), index_slots=torch.full_like(inputs.slots, 7))
    run(key, same)
    k, v = same.cache.key_value()
    for place, stored in enumerate((k[0, :, 7], v[0, :, 7])):
        theirs = torch.stack([row[place] for row in apart]).unflatten(-1, (-1, 8))  # [rows, heads, pieces, 8]
        assert bool((theirs == stored.unflatten(-1, (-1, 8))).all(dim=-1).any(dim=0).all())


@KEYS
def test_padded_rows_may_hold_anything(key: str) -> None:
    """A row whose position lies outside the table: NaN in it reaches nothing, separate outputs get zeros."""
    inputs = norm_rope_inputs(BASE, DEVICE)
    padded = (inputs.positions < 0) | (inputs.positions >= inputs.cos_sin.shape[0])
    assert bool(padded.any())
    inputs.qkv[padded] = float("nan")
    q, index_q = run(key, inputs)
    assert bool((q[padded] == 0).all()) and bool((index_q[padded] == 0).all())
    assert bool(q.isfinite().all()) and bool(inputs.qkv[padded].isnan().all())


@KEYS
def test_values_beyond_the_fp8_range_saturate(key: str) -> None:
    """Never NaN or infinity from a finite row, and the range is that of the stored format."""
    inputs = own_slots(norm_rope_inputs(replace(BASE, cache_dtype=E4M3, index_dtype=E4M3, q_out_dtype=E4M3, weight_dtype=torch.float32), DEVICE))
    for weight in inputs.weights:
        weight.fill_(1e4)
    inputs.qkv[:] = inputs.qkv * 300
    q, index_q = run(key, inputs)
    rows = torch.arange(inputs.qkv.shape[0], device=DEVICE)
    k, v = (indexable(t)[rows // 16, :, rows % 16].view(E4M3) for t in inputs.cache.key_value())
    for stored in (q, index_q, k, v):
        assert bool(stored.float().isfinite().all()) and float(stored.float().abs().max()) == 448.0


@KEYS
def test_scales_mean_the_same_in_every_form(key: str) -> None:
    case = replace(BASE, cache_dtype=E4M3, index_dtype=E4M3, q_out_dtype=E4M3)

    def stored(q: object, index_q: object, k: object, v: object, index_k: object) -> list[torch.Tensor]:
        inputs = norm_rope_inputs(case, DEVICE)
        cache = replace(inputs.cache, k_scale=k, v_scale=v, index_k_scale=index_k)
        results = run(key, replace(inputs, cache=cache), q_scale=q, index_q_scale=index_q)
        return [raw(t) for t in (*results, *cache.key_value(), cache.index_key())]

    def tensor(value: float) -> torch.Tensor:
        return torch.tensor([value], device=DEVICE)

    values = (1.5, 0.037, 0.5, 2.0, 12.5)
    for a, b in (([None] * 5, [1.0] * 5), ([None] * 5, [tensor(1.0)] * 5), (list(values), [tensor(x) for x in values])):
        assert all(torch.equal(x, y) for x, y in zip(stored(*a), stored(*b), strict=True))


@KEYS
def test_uint8_caches_hold_the_same_bytes(key: str) -> None:
    expected, inputs = (norm_rope_inputs(replace(BASE, cache_dtype=E4M3, index_dtype=E4M3), DEVICE) for _ in range(2))
    run(key, expected)
    cache = inputs.cache
    cache = LayerCache(
        k=cache.k.view(torch.uint8), v=cache.v.view(torch.uint8), index_k=cache.index_k.view(torch.uint8), kv_dtype="fp8", index_dtype="fp8"
    )
    run(key, replace(inputs, cache=cache))
    for a, b in ((expected.cache.k, cache.k), (expected.cache.v, cache.v), (expected.cache.index_k, cache.index_k)):
        assert torch.equal(raw(a), raw(b))


@KEYS
def test_index_slots_may_differ_from_main_slots(key: str) -> None:
    inputs = own_slots(norm_rope_inputs(BASE, DEVICE))
    run(key, inputs)
    moved = own_slots(norm_rope_inputs(BASE, DEVICE))
    run(key, replace(moved, index_slots=moved.index_slots.flip(0).contiguous()))
    rows = inputs.slots
    there, here = moved.cache.index_key()[rows // 16, rows % 16], inputs.cache.index_key()[rows // 16, rows % 16]
    assert torch.equal(there.flip(0), here)
    assert torch.equal(raw(moved.cache.k), raw(inputs.cache.k))


@KEYS
def test_no_rows(key: str) -> None:
    inputs = norm_rope_inputs(replace(BASE, tokens=0), DEVICE)
    q, index_q = run(key, inputs)
    assert q.shape[0] == 0 and index_q.shape[0] == 0
    assert bool((raw(inputs.cache.k) == 0xFF).all())


@KEYS
def test_an_e5m2_index_cache_is_refused(key: str) -> None:
    inputs = norm_rope_inputs(replace(BASE, index_dtype=E4M3), DEVICE)
    cache = replace(inputs.cache, index_k=inputs.cache.index_k.view(E5M2))
    with pytest.raises((TypeError, ValueError), match=r"cache\.index_k"):
        run(key, replace(inputs, cache=cache))


@KEYS
def test_rows_of_zeros_and_of_huge_numbers(key: str) -> None:
    """eps keeps a zero row finite; fp32 squares of the largest 16-bit numbers that do not overflow stay exact enough."""
    inputs = own_slots(norm_rope_inputs(replace(BASE, index_dtype=BF16), DEVICE))
    inputs.qkv[0] = 0
    inputs.qkv[1] = 1e15
    inputs.qkv[2] = 1e-20
    q, index_q = run(key, inputs)
    assert bool((q[0] == 0).all()) and bool(q.isfinite().all()) and bool(index_q.isfinite().all())
    dim, heads = 128, inputs.options["heads"][0]
    exact = norm_rope(inputs.qkv[:3].unflatten(1, (-1, dim))[:, :heads], inputs.weights[0], inputs.positions[:3], inputs.cos_sin, dtype=torch.float64)
    torch.testing.assert_close(q[:3].double(), exact, rtol=2**-7, atol=2**-7 * float(exact[1].abs().max()) * 1e-2)
