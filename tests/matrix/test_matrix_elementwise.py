"""Norm, rotation and insertion; merging; quantisation."""

import pytest
import torch

import m3attn
from m3attn.dtypes import dtype_name
from m3attn.problem import Problem
from m3attn.reference.norm_rope import norm_rope
from m3attn.reference.numerics import indexable
from m3attn.reference.quantize import quantize_fp8, saturating_cast
from m3attn.testing.bounds import assert_within, merge_bound, norm_rope_bound
from m3attn.testing.cases import (
    MergeCase,
    NormRopeCase,
    QuantizeCase,
    full_merge,
    full_norm_rope,
    full_quantize,
    xs_merge,
    xs_norm_rope,
    xs_quantize,
)
from m3attn.testing.inputs import NAN_BYTE, NormRopeInputs, merge_inputs, norm_rope_inputs, poisoned, quantize_input
from m3attn.testing.matrix import DEVICE, arch, matrix, run_or_skip


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def check_stored(stored: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor, scale: float | None, name: str) -> None:
    """Stored heads within one rounding of fp64, and nearly always the very bytes of fp32 rounded once."""
    scale = scale or 1.0
    largest = torch.finfo(stored.dtype).max * scale
    assert_within(stored.double() * scale, exact.clamp(-largest, largest), norm_rope_bound(exact, stored.dtype, scale), name=name)
    expected = saturating_cast(plain, stored.dtype, scale)
    if stored.dtype.itemsize == 1 and stored.numel() > 5_000:
        same = (as_bytes(stored) == as_bytes(expected)).double().mean()
        assert same >= 0.999, f"{name}: {float(1 - same):.2%} of the bytes are not fp32 rounded once"


def storage_bytes(x: torch.Tensor) -> torch.Tensor:
    """Every byte of the allocation that x is a view of."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def take_slots(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """What pool [pages, H, page_size, D] holds at valid token slots, [n, H, D]; leaves poison there."""
    page, offset = slots.long() // pool.shape[2], slots.long() % pool.shape[2]
    stored = indexable(pool)[page, :, offset].view(pool.dtype)
    indexable(pool)[page, :, offset] = indexable(poisoned(stored.shape, pool.dtype, pool.device))
    return stored


def norm_rope_problem(case: NormRopeCase) -> Problem:
    with_index = case.num_index_heads > 0 and not case.skip_index
    q_dtype = case.q_out_dtype or case.dtype
    return Problem(
        arch=arch(),
        num_q_heads=case.num_q_heads,
        num_kv_heads=case.num_kv_heads,
        num_index_heads=case.num_index_heads,
        q_dtype=dtype_name(case.dtype),
        kv_dtype=dtype_name(case.cache_dtype or case.dtype),
        index_q_dtype=dtype_name(q_dtype) if with_index else "none",
        index_dtype=dtype_name(case.index_dtype or case.dtype) if with_index else "none",
    )


@pytest.mark.parametrize(("key", "case"), matrix("qk_norm_rope_insert", xs_norm_rope(), full_norm_rope()))
def test_qk_norm_rope_insert(key: str, case: NormRopeCase) -> None:
    inputs = norm_rope_inputs(case, DEVICE)
    before = inputs.qkv.clone()

    def run() -> tuple[torch.Tensor, torch.Tensor | None]:
        return m3attn.qk_norm_rope_insert(*inputs.arguments(), **inputs.options, impl=key)

    q, index_q = run_or_skip("qk_norm_rope_insert", key, norm_rope_problem(case), run)
    check_norm_rope(case, inputs, before, q, index_q)


def check_norm_rope(case: NormRopeCase, inputs: NormRopeInputs, before: torch.Tensor, q: torch.Tensor, index_q: torch.Tensor | None) -> None:
    """Every part that must be written, and that nothing else was."""
    live = (inputs.positions >= 0) & (inputs.positions < inputs.cos_sin.shape[0])
    with_index = case.num_index_heads > 0 and not case.skip_index
    sizes = [case.num_q_heads, case.num_kv_heads, case.num_kv_heads] + ([case.num_index_heads, 1] if case.num_index_heads else [])
    old = before.unflatten(1, (-1, 128)).split(sizes, dim=1)
    new = inputs.qkv.unflatten(1, (-1, 128)).split(sizes, dim=1)
    in_place: set[int] = set()

    def check_heads(stored: torch.Tensor, rows: torch.Tensor, part: int, weight: int, scale: float | None, name: str) -> None:
        heads = (old[part][rows], inputs.weights[weight], inputs.positions[rows], inputs.cos_sin)
        check_stored(stored, norm_rope(*heads, dtype=torch.float64), norm_rope(*heads), scale, name)

    def check_rows(stored: torch.Tensor, part: int, weight: int, out: torch.Tensor | None, scale: float | None, name: str) -> None:
        check_heads(stored[live], live, part, weight, scale, name)
        idle = torch.zeros_like(stored[~live]) if out is not None else old[part][~live]
        assert torch.equal(as_bytes(stored[~live]), as_bytes(idle)), f"{name}: rows outside the table"
        if out is None:
            in_place.add(part)

    def written(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return live & (slots >= 0) & (slots < pool.shape[0] * pool.shape[2])

    check_rows(q, 0, 0, inputs.options.get("q_out"), inputs.options.get("q_scale"), "q")
    if with_index:
        check_rows(index_q, 3, 2, inputs.options.get("index_q_out"), inputs.options.get("index_q_scale"), "index_q")
    if inputs.cache is None:
        check_rows(new[1], 1, 1, None, None, "k")
        if with_index:
            check_rows(new[4], 4, 3, None, None, "index_k")
    else:
        k, v = inputs.cache.key_value()
        rows = written(k, inputs.slots)
        check_heads(take_slots(k, inputs.slots[rows]), rows, 1, 1, inputs.cache.k_scale, "k")
        stored, expected = take_slots(v, inputs.slots[rows]), saturating_cast(old[2][rows], v.dtype, inputs.cache.v_scale)
        assert torch.equal(as_bytes(stored), as_bytes(expected)), "v: other bytes than one rounding of v"
        pools = [k, v]
        if with_index:
            pools.append(inputs.cache.index_key()[:, None])
            rows = written(pools[2], inputs.index_slots)
            check_heads(take_slots(pools[2], inputs.index_slots[rows]), rows, 4, 3, inputs.cache.index_k_scale, "index_k")
        assert all(bool((storage_bytes(pool) == NAN_BYTE).all()) for pool in pools), "caches: bytes outside the slots were written"
    for part in set(range(len(sizes))) - in_place:
        assert torch.equal(as_bytes(new[part]), as_bytes(old[part])), f"part {part} of the packed row changed"


@pytest.mark.parametrize(("key", "case"), matrix("merge_attention_states", xs_merge(), full_merge()))
def test_merge_attention_states(key: str, case: MergeCase) -> None:
    parts = merge_inputs(case, DEVICE)
    run = lambda: m3attn.merge_attention_states(*parts, impl=key)  # noqa: E731
    out, lse = run_or_skip("merge_attention_states", key, case.problem(arch()), run)
    merge_bound(*parts).check(out, lse)


@pytest.mark.parametrize(("key", "case"), matrix("quantize_fp8", xs_quantize(), full_quantize()))
def test_quantize_fp8(key: str, case: QuantizeCase) -> None:
    x = quantize_input(case, DEVICE)
    before = x.clone()
    dynamic = case.scale in ("tensor", "row")
    problem = Problem(arch=arch(), q_dtype=dtype_name(case.dtype), kv_dtype=dtype_name(case.out_dtype), dynamic_scale=dynamic)
    result = run_or_skip("quantize_fp8", key, problem, lambda: m3attn.quantize_fp8(x, scale=case.scale, dtype=case.out_dtype, impl=key))
    expected = quantize_fp8(x, scale=case.scale, dtype=case.out_dtype)
    if dynamic:
        (result, scale), (expected, expected_scale) = result, expected
        assert torch.equal(scale.reshape(-1), expected_scale)
    assert torch.equal(as_bytes(result), as_bytes(expected))
    assert torch.equal(as_bytes(x), as_bytes(before)), "x changed"
