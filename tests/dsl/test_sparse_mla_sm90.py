"""The Hopper kernel of sparse MLA: the matrix's small cases, and where its machinery shows: rings, turns, transposed values, last tiles, odd strides.

In the interpreter, in eager, lazy and random order, which must agree bit for bit.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from needed import need

need("nvidia-cutlass-dsl", "apache-tvm-ffi")

import ptxsim
from simulator import ORDERS, simulated
from sparse_mla_results import Results, check_orders

import m3attn
from m3attn.bench.parity import relative_error
from m3attn.choice import UnsupportedProblem
from m3attn.dsl_kernels import sparse_mla_sm90
from m3attn.dsl_kernels.sparse_mla_sm90 import num_splits, part_bytes
from m3attn.dtypes import E4M3
from m3attn.reference.mla_sparse import sparse_mla_prefill as exact_sparse_mla
from m3attn.reference.numerics import indexable
from m3attn.testing import poison
from m3attn.testing.inputs import NAN_BYTE
from m3attn.testing.matrix import skip_if_declined
from m3attn.testing.mla import SparseMlaCase, SparseMlaInputs, sparse_mla_inputs, xs_sparse_mla
from m3attn.testing.poison import poisoned_empty
from m3attn.triton_kernels import sparse_mla_prefill as triton_launcher

KEY, ARCH = "cute_sm90", "sm_90"
BASE = SparseMlaCase(2, 64, 128, 256)
BOTH = pytest.mark.parametrize("mode", ["bf16", "fp8_pv"])


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of three thread blocks takes one query after another, and all of its indices."""
    monkeypatch.setattr(sparse_mla_sm90, "num_sms", lambda device: 3)
    monkeypatch.setattr(sparse_mla_sm90, "MAX_PIECES", 1)


def run(inputs: SparseMlaInputs, order: str = "eager", edit: Callable[[str], str] | None = None, **changes: Any) -> Results:
    with simulated(order, seed=3, edit=edit), poisoned_empty():
        return m3attn.sparse_mla_prefill(inputs.q, inputs.kv, inputs.indices, impl=KEY, **(inputs.options | changes))


def check(inputs: SparseMlaInputs, mode: str = "bf16", **changes: Any) -> Results:
    """Every order within the bound, and the same bits in all."""
    results = [run(inputs, order, **changes) for order in ORDERS]
    check_orders(inputs, mode, results, **(inputs.options | changes))
    return results[0]


def marked(listed: list[SparseMlaCase]) -> list:
    """A quarter of the cases in every run; the others are slow."""
    return [pytest.param(case, id=case.id, marks=[pytest.mark.slow] if number % 4 else []) for number, case in enumerate(listed)]


@pytest.mark.parametrize("case", marked(xs_sparse_mla()))
def test_matrix(case: SparseMlaCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_mla_sm90, "MAX_PIECES", 128)
    skip_if_declined("sparse_mla_prefill", KEY, case.problem(ARCH))
    check(sparse_mla_inputs(case, "cpu"), case.mode)


@pytest.mark.parametrize(
    "case",
    [
        replace(BASE, queries=5, heads=72, topk=330, tokens=600, sink=True, length=True),  # up to six tiles, a second head tile of 8
        replace(BASE, queries=3, heads=3, topk=260, tokens=500, mode="fp8_pv", scaled=True, length=True),
        replace(BASE, queries=4, heads=16, topk=70, dim=512, mode="fp16", sink=True),
    ],
    ids=lambda case: case.id,
)
def test_within_the_bound(case: SparseMlaCase) -> None:
    check(sparse_mla_inputs(case, "cpu"), case.mode)


@BOTH
def test_queries_of_no_or_one_tile_between_longer_ones(mode: str) -> None:
    """One warpgroup is done with such a query before the other has begun it."""
    inputs = sparse_mla_inputs(replace(BASE, queries=13, heads=2, topk=140, mode=mode, length=True), "cpu")
    inputs.options["topk_length"].copy_(torch.tensor([1, 0, 0, 64, 3, 0, 65, 140, 0, 130, 1, 2, 128]))
    _, max_logits, lse = check(inputs, mode)
    empty = inputs.options["topk_length"] == 0
    assert (lse[empty] == float("inf")).all() and (max_logits[empty] == float("-inf")).all()


@BOTH
def test_tiles_without_a_valid_token(mode: str) -> None:
    """Before, between and after tiles that have some, for either warpgroup."""
    inputs = sparse_mla_inputs(replace(BASE, queries=3, heads=2, topk=320, tokens=400, mode=mode), "cpu")
    for query, empty in enumerate(((0, 1), (2, 3), (4,))):
        for tile in empty:
            inputs.indices[query, 0, tile * 64 : (tile + 1) * 64] = -1
    check(inputs, mode)


@BOTH
def test_queries_in_parts(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four parts of up to three tiles; some have none, or none that is valid. Every part writes all that the merge reads: the scratch is NaN."""
    monkeypatch.setattr(sparse_mla_sm90, "MAX_PIECES", 24)
    monkeypatch.setattr(poison, "GARBAGE_BYTE", NAN_BYTE)
    inputs = sparse_mla_inputs(replace(BASE, queries=6, heads=5, topk=530, tokens=600, mode=mode, length=True, sink=True), "cpu")
    assert num_splits(6, 5, 530, limit=1 << 30) == 4
    inputs.options["topk_length"].copy_(torch.tensor([530, 530, 1, 64, 200, 390]))
    inputs.indices[5, 0, 128:320] = -1
    check(inputs, mode)


def test_how_many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as keep the GPU busy, of two tiles at least, within the workspace; none where that saves little beside joining them."""
    monkeypatch.setattr(sparse_mla_sm90, "MAX_PIECES", 128)
    assert [num_splits(s, 128, 2_048, 1 << 30) for s in (1, 2, 4, 16, 32, 64, 4_096)] == [16, 16, 16, 4, 2, 1, 1]
    assert [num_splits(1, 64, k, 1 << 30) for k in (1, 128, 256, 384, 512, 1_024)] == [1, 1, 1, 1, 4, 8]
    assert [num_splits(64, 64, k, 1 << 30) for k in (512, 704, 768, 1_024)] == [1, 1, 2, 2]
    for limit in (0, 300_000, 600_000, 1 << 20):
        splits = num_splits(1, 128, 2_048, limit)
        assert splits == 1 or part_bytes(splits, 1, 128) <= limit
        assert part_bytes(splits + 1, 1, 128) > limit


@BOTH
@pytest.mark.parametrize("sm_scale", [-0.04, 0.0])
def test_scales_of_either_sign_and_zero(mode: str, sm_scale: float) -> None:
    check(sparse_mla_inputs(replace(BASE, heads=2, mode=mode), "cpu"), mode, sm_scale=sm_scale)


@pytest.mark.parametrize("step", [0.5, 0.13])
def test_a_token_named_many_times_and_maxima_that_grow(step: float) -> None:
    """Each tile's logits are larger than all before it, so that every output so far is rescaled, by whichever warpgroup; or every second one."""
    inputs = sparse_mla_inputs(replace(BASE, queries=1, heads=2, topk=256, tokens=4), "cpu")
    inputs.kv.copy_((torch.arange(4)[:, None, None] + 1) * inputs.q[0, 0].sign() * step + torch.arange(576) % 7 * 0.01)
    inputs.indices.copy_((torch.arange(256) // 64)[None, None])
    check(inputs)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("step", "within"), [(-1.5, 0.0), (-0.06, -1.5), (0.5, 2.0)])
def test_e4m3_maxima_that_fall_and_grow(step: float, within: float, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles' maxima far below those before them, as tokens in the order of their scores have them, or a little, or above; and those of halves."""
    monkeypatch.setattr(sparse_mla_sm90, "MAX_PIECES", parts)
    inputs = sparse_mla_inputs(replace(BASE, queries=1, heads=2, topk=384, tokens=384, mode="fp8_pv"), "cpu")
    token = torch.arange(384)[:, None, None]
    inputs.q.copy_(inputs.q[:1, :1].float().sign())
    inputs.kv.copy_(((token // 64 - 3) * step + token % 8 // 4 * within) * inputs.q[0, 0].float() + torch.arange(576) % 7 * 0.05)
    inputs.indices.copy_(token[None, None, :, 0, 0])
    inputs.indices[:, :, 128:192] = -1
    inputs.indices[:, :, :64].masked_fill_(token[:64, 0, 0] % 8 > 3, -1)
    check(inputs, "fp8_pv")


@pytest.mark.parametrize("parts", [False, True], ids=["whole", "parts"])
def test_error_no_larger_than_that_of_triton(parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 rows over 512 tokens, whole or in parts as few queries are, against fp64 on the e4m3 inputs: less by several times what is chance."""
    if parts:
        monkeypatch.setattr(sparse_mla_sm90, "MAX_PIECES", 128)
    else:
        monkeypatch.setattr(triton_launcher, "SPLIT_PROGRAMS", 1)
    inputs = sparse_mla_inputs(SparseMlaCase(1, 64, 512, 1_024, mode="fp8_pv", valid=1.0), "cpu")
    exact, _, _ = exact_sparse_mla(inputs.q, inputs.kv[:, 0], inputs.indices[:, 0], sm_scale=inputs.options["sm_scale"], dtype=torch.float64)
    by_triton, _, _ = m3attn.sparse_mla_prefill(inputs.q, inputs.kv, inputs.indices, impl="triton", **inputs.options)
    ours, theirs = (relative_error(out, exact) for out in (run(inputs)[0], by_triton))
    assert 0.01 < ours < 0.98 * theirs < 0.03, f"relative errors: cute_sm90 {ours:.4g}, triton {theirs:.4g}"


@BOTH
def test_strides(mode: str) -> None:
    """Rows of q, kv and indices apart from each other, with NaN and ids of tokens between them."""
    inputs = sparse_mla_inputs(replace(BASE, queries=3, heads=5, mode=mode), "cpu")
    nan = torch.full((), float("nan")).to(inputs.q.dtype)
    q = indexable(nan).expand(3, 7, 640).clone().view(inputs.q.dtype)[:, 1:6, 32:608]
    kv = indexable(nan).expand(256, 3, 608).clone().view(inputs.q.dtype)[:, 1:2, 16:592]
    indices = torch.zeros(3, 128, 2, dtype=torch.int32).transpose(1, 2)[:, 1:]
    for view, values in ((q, inputs.q), (kv, inputs.kv)):
        indexable(view).copy_(indexable(values))
    indices.copy_(inputs.indices)
    strided = replace(inputs, q=q, kv=kv, indices=indices)
    assert all(torch.equal(x, y) for x, y in zip(run(strided), run(inputs), strict=True))


@pytest.mark.parametrize("argument", ["q", "kv"])
def test_rows_off_16_bytes_are_declined(argument: str) -> None:
    inputs = sparse_mla_inputs(replace(BASE, heads=2), "cpu")
    tensor = getattr(inputs, argument)
    odd = torch.zeros(*tensor.shape[:2], 577, dtype=tensor.dtype)[..., 1:]
    with pytest.raises(UnsupportedProblem, match=f"{argument}: expected an address and strides in multiples of 16 bytes"):
        run(replace(inputs, **{argument: odd}))


def test_modes_that_are_declined() -> None:
    for mode in ("widen", "widen_fp16", "fp8", "fp32"):
        inputs = sparse_mla_inputs(replace(BASE, heads=2, mode=mode), "cpu")
        with pytest.raises(UnsupportedProblem, match="takes bf16, fp16, fp8_pv"):
            run(inputs)


def without(pattern: str) -> Callable[[str], str]:
    def edit(ptx: str) -> str:
        edited = re.sub(pattern, "", ptx)
        assert edited != ptx
        return edited

    return edit


def wrong(inputs: SparseMlaInputs, edit: Callable[[str], str]) -> bool:
    """Whether some order shows that the kernel was broken."""
    right = run(inputs)
    for order in ORDERS:
        try:
            results = run(inputs, order, edit)
        except ptxsim.SimError:
            return True
        if any(not torch.equal(x, y) for x, y in zip(right, results, strict=True)):
            return True
    return False


@pytest.mark.parametrize(
    ("mode", "pattern"),
    [
        pytest.param(mode, pattern, id=f"{name}-{mode}")
        for name, pattern, modes in (
            ("fences", r"fence\.proxy\.async[^;]*;", ("bf16", "fp8_pv")),
            ("waits", r"wgmma\.wait_group[^;]*;", ("bf16", "fp8_pv")),
            ("values given back", r"wgmma\.wait_group[^;]*\s1;", ("bf16",)),
            ("weights in place of keys", r"(?:bar|barrier)\.(?:cta\.)?sync(?:\.aligned)?\s+%r\d+, 128;", ("bf16",)),
            ("both sums", r"(?:bar|barrier)\.(?:cta\.)?sync(?:\.aligned)?\s+3, 256;", ("bf16", "fp8_pv")),
        )
        for mode in modes
    ],
)
def test_what_is_missing_is_seen(mode: str, pattern: str) -> None:
    assert wrong(sparse_mla_inputs(replace(BASE, topk=256, mode=mode), "cpu"), without(pattern))


@BOTH
def test_indices_past_the_length_do_not_count(mode: str) -> None:
    """In range, out of range, and over a token of NaN; the same as if they were -1."""
    inputs = sparse_mla_inputs(replace(BASE, queries=3, heads=2, mode=mode, length=True), "cpu")
    inputs.options["topk_length"].copy_(torch.tensor([0, 33, 128]))
    past = torch.arange(128) >= inputs.options["topk_length"][:, None]
    expected = run(replace(inputs, indices=inputs.indices.masked_fill(past[:, None], -1)))
    nan_token = int(torch.nonzero(inputs.kv[:, 0].float().isnan().any(-1))[0, 0])
    for value in (5, nan_token, -9, 256, 2**31 - 1):
        results = run(replace(inputs, indices=inputs.indices.masked_fill(past[:, None], value)))
        assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


def test_offsets_past_32_bits() -> None:
    """Rows of kv and q that lie 2^28 and 2^32 elements apart: only their own pages of a sparse mapping exist."""
    inputs = sparse_mla_inputs(replace(BASE, queries=2, heads=2, topk=64, tokens=12, mode="fp8_pv"), "cpu")

    def spread(x: torch.Tensor, stride: int) -> torch.Tensor:
        far = torch.empty(len(x) * stride, dtype=torch.uint8).view(E4M3).as_strided(x.shape, (stride, *x.stride()[1:]))
        indexable(far).copy_(indexable(x))
        return far

    results = run(replace(inputs, q=spread(inputs.q, 2**32), kv=spread(inputs.kv, 2**28)))
    assert all(torch.equal(x, y) for x, y in zip(results, run(inputs), strict=True))
