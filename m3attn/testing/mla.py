"""Cases, inputs and bounds of the MLA stages."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from einops import einsum

from m3attn.dtypes import E4M3, dtype_name
from m3attn.problem import Problem
from m3attn.reference.mla_prefill import mla_prefill
from m3attn.reference.mla_sparse import VALUE_DIM, sparse_mla_prefill
from m3attn.reference.numerics import from_indexable, full_precision, indexable, scale_factor
from m3attn.reference.quantize import saturating_cast
from m3attn.testing.bounds import FP32_ERROR, assert_within, rounding
from m3attn.testing.inputs import generator, normal, poisoned

MODES: dict[str, tuple[torch.dtype, torch.dtype, bool]] = {
    "bf16": (torch.bfloat16, torch.bfloat16, True),
    "fp16": (torch.float16, torch.float16, True),
    "fp32": (torch.float32, torch.float32, True),
    "widen": (torch.bfloat16, E4M3, True),
    "widen_fp16": (torch.float16, E4M3, True),
    "fp8": (E4M3, E4M3, False),
    "fp8_pv": (E4M3, E4M3, True),
}
"""Mode -> dtypes of q and kv, fp8_pv."""
SCALES = (1.5, 0.037)
COSINE_DISTANCE = {"fp8_pv": 4e-4}
OTHER_COSINE_DISTANCE = 1e-4


@dataclass(frozen=True, slots=True)
class SparseMlaCase:
    """A case of sparse_mla_prefill. `length`, `sink`: whether the call gives them; `valid`: the share of indices that name a token."""

    queries: int
    heads: int
    topk: int
    tokens: int
    dim: int = 576
    mode: str = "bf16"
    length: bool = False
    sink: bool = False
    scaled: bool = False
    valid: float = 0.9

    @property
    def id(self) -> str:
        parts = [f"s{self.queries}h{self.heads}d{self.dim}k{self.topk}n{self.tokens}", self.mode]
        return "-".join(parts + [name for name, on in (("length", self.length), ("sink", self.sink), ("scaled", self.scaled)) if on])

    def problem(self, arch: str) -> Problem:
        q_dtype, kv_dtype, fp8_pv = MODES[self.mode]
        return Problem(
            arch=arch,
            num_q_heads=self.heads,
            num_kv_heads=1,
            head_dim=self.dim,
            v_head_dim=VALUE_DIM,
            topk=self.topk,
            q_dtype=dtype_name(q_dtype),
            kv_dtype=dtype_name(kv_dtype),
            sink=self.sink,
            lse=True,
            fp8_pv=fp8_pv and q_dtype == E4M3,
            phase="decode" if self.queries <= 1 else "verify" if self.queries <= 16 else "prefill",
        )


def xs_sparse_mla() -> list[SparseMlaCase]:
    base = SparseMlaCase(2, 3, 128, 256)
    cases = [replace(base, mode=mode, dim=dim) for mode in MODES for dim in (512, 576) if dim == 576 or mode in ("bf16", "fp8_pv")]
    cases += [replace(base, mode=mode, queries=s, sink=True, length=True, scaled=mode != "bf16") for mode in ("bf16", "fp8_pv") for s in (1, 8)]
    cases += [replace(base, topk=256, tokens=512, sink=True, mode="fp8", scaled=True), replace(base, topk=32, length=True)]
    cases += [SparseMlaCase(65, 2, 96, 592, dim=512, mode="fp8_pv"), SparseMlaCase(17, 1, 40, 300, sink=True, length=True)]
    return [*cases, replace(base, heads=40, topk=48), replace(base, queries=0), replace(base, tokens=0, topk=8), replace(base, topk=1)]


def full_sparse_mla() -> list[SparseMlaCase]:
    """Published shapes, then every head count, width and option."""
    cases = [SparseMlaCase(2, 64, 128, 256, dim=dim, mode=mode) for dim in (512, 576) for mode in MODES]
    for mode in ("bf16", "widen", "fp8", "fp8_pv"):
        both = SparseMlaCase(1, 64, 128, 256, mode=mode, sink=True, length=True, scaled=mode != "bf16")
        cases += [both, replace(both, queries=8), replace(both, queries=2, heads=128, topk=256, tokens=512), replace(both, queries=2, dim=512)]
        cases += [SparseMlaCase(65, 64, 256, 592, dim=dim, mode=mode) for dim in (512, 576)]
        cases += [SparseMlaCase(s, h, 2_048, 8_192, mode=mode, sink=True) for s in (1, 16, 17, 130) for h in (64, 128)]
        cases += [SparseMlaCase(33, h, 512, 4_096, mode=mode, length=True) for h in (1, 2, 8, 16, 24, 32, 40, 65, 192)]
        cases += [SparseMlaCase(s, 128, k, 10_000, mode=mode, sink=True, length=True) for s in (3, 40) for k in (1, 64, 192, 1_152, 2_047, 4_096)]
    return list(dict.fromkeys(cases + xs_sparse_mla()))


@dataclass(frozen=True, eq=False)
class SparseMlaInputs:
    """The arguments of sparse_mla_prefill."""

    q: torch.Tensor
    kv: torch.Tensor
    indices: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)


def sparse_mla_inputs(case: SparseMlaCase, device: torch.device | str, *, seed: int = 0) -> SparseMlaInputs:
    """Inputs of a case: indices in any order, invalid ones of every kind between them, a query without any; tokens that no index names are NaN."""
    gen = generator(seed)
    q_dtype, kv_dtype, fp8_pv = MODES[case.mode]
    q_scale = SCALES[0] if case.scaled and q_dtype == E4M3 else None
    kv_scale = torch.tensor([SCALES[1]], device=device) if case.scaled and kv_dtype == E4M3 else None
    q = saturating_cast(normal((case.queries, case.heads, case.dim), gen, device), q_dtype, q_scale)
    tokens = saturating_cast(normal((case.tokens, 1, case.dim), gen, device), kv_dtype, kv_scale)

    index = torch.rand(case.queries, max(case.tokens, case.topk), generator=gen).argsort(dim=-1)[:, : case.topk]
    invalid = torch.tensor((-1, -(2**31), 2**31 - 1, case.tokens, -7))[torch.randint(5, index.shape, generator=gen)]
    index = torch.where((torch.rand(index.shape, generator=gen) < case.valid) & (index < case.tokens), index, invalid)
    if case.queries > 1:
        index[1] = -1
    used = torch.zeros(case.tokens, dtype=torch.bool)
    used[index[(index >= 0) & (index < case.tokens)]] = True
    kv = poisoned((case.tokens, 1, case.dim), kv_dtype, device)
    indexable(kv)[used.to(device)] = indexable(tokens)[used.to(device)]

    options: dict[str, Any] = {"sm_scale": case.dim**-0.5, "q_scale": q_scale, "kv_scale": kv_scale, "fp8_pv": fp8_pv}
    if case.length:
        length = torch.randint(case.topk + 1, (case.queries,), generator=gen)
        length[::3] = torch.tensor((case.topk + 5, -3, case.topk))[torch.arange(len(length[::3])) % 3]
        options["topk_length"] = length.int().to(device)
    if case.sink:
        sink = normal((case.heads,), gen, "cpu") * 2
        sink[1::3] = torch.tensor((float("-inf"), float("inf")))[torch.arange(len(sink[1::3])) % 2]
        options["attn_sink"] = sink.to(device)
    return SparseMlaInputs(q, kv, index[:, None].int().to(device), options)


@full_precision
def check_sparse_mla(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    fp8_pv: bool,
    error_of_products: float,
    cosine_distance: float,
    **options: Any,
) -> float:
    """(out, max_logits, lse) against fp64: within the bound, and the whole output within the cosine distance, which is returned.

    Bound of a row: rounding of the output, of its P (up to u |p v| each, independent), and of its logits by `error_of_products` sum |q||k|.
    """
    out, max_logits, lse = results
    exact, exact_max, exact_lse = sparse_mla_prefill(q, kv[:, 0], indices[:, 0], dtype=torch.float64, **options)
    index, length = indices[:, 0].long(), options.get("topk_length")
    valid = (index >= 0) & (index < kv.shape[0])
    if length is not None:
        valid &= torch.arange(index.shape[1], device=q.device) < length[:, None]
    p_dtype = E4M3 if fp8_pv and q.dtype == E4M3 else torch.float16 if kv.dtype == E4M3 else q.dtype
    unit = torch.finfo(p_dtype).eps / 2
    floor = float(rounding(torch.zeros(()), p_dtype)) / (256.0 if p_dtype == E4M3 else 1.0)
    scale = options["sm_scale"] * scale_factor({"q": options["q_scale"], "kv": options["kv_scale"]}, exact)
    out_scale = scale_factor({"kv": options["kv_scale"]}, exact)

    out_tolerance, lse_tolerance = torch.zeros_like(exact), torch.zeros_like(exact_lse)
    for row in range(q.shape[0]):
        if not bool(valid[row].any()):
            continue
        tokens = from_indexable(indexable(kv)[index[row][valid[row]], 0], kv.dtype).double()
        logits = einsum(q[row].double(), tokens, "h d, n d -> h n") * scale
        weights = torch.softmax(logits, dim=-1)
        logit_error = error_of_products * (einsum(q[row].double().abs(), tokens.abs(), "h d, n d -> h n") * scale.abs()).amax(-1) + FP32_ERROR
        values = tokens[:, :VALUE_DIM].square()
        squares = einsum(weights.square(), values, "h n, n d -> h d").sqrt() * out_scale
        weight_squares = weights.square().sum(-1, keepdim=True).sqrt()
        out_tolerance[row] = (
            4 * rounding(exact[row], torch.bfloat16)
            + 4 * (unit * squares + floor * values.sum(0).sqrt() * out_scale)
            + 8 * logit_error[:, None] * (squares + exact[row].abs() * weight_squares)
        )
        lse_tolerance[row] = 2 * logit_error + 4 * FP32_ERROR * (1 + exact_lse[row].abs())
    assert_within(max_logits, exact_max, lse_tolerance + 4 * FP32_ERROR * exact_max.abs().nan_to_num(posinf=0.0, neginf=0.0), name="max_logits")
    assert_within(lse, exact_lse, lse_tolerance, name="lse")
    assert_within(out, exact, out_tolerance, name="out")
    assert not out[~valid.any(-1)].any(), "a query without a token: out 0"
    if not bool(exact.any()):
        return 0.0
    distance = 1 - float(torch.nn.functional.cosine_similarity(out.double().flatten(), exact.flatten(), dim=0))
    assert distance < cosine_distance, f"cosine distance: expected below {cosine_distance:g}, got {distance:.3g}"
    return distance


PREFILL_MODES: dict[str, tuple[torch.dtype, bool]] = {
    "bf16": (torch.bfloat16, False),
    "fp16": (torch.float16, False),
    "fp32": (torch.float32, False),
    "fp8": (E4M3, False),
    "fp8_pv": (E4M3, True),
}
"""Mode -> dtype of q, k and v, fp8_pv."""
PREFILL_SCALES = (1.5, 0.037, 2.0)


@dataclass(frozen=True, slots=True)
class MlaPrefillCase:
    """A case of mla_prefill. `padded`: query rows behind the last request; `packed`: k and v are views of one buffer."""

    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    heads: int = 2
    dim: int = 192
    value_dim: int = 128
    mode: str = "bf16"
    causal: bool = True
    scaled: bool = False
    padded: int = 0
    packed: bool = False

    @property
    def id(self) -> str:
        lens = "+".join(map(str, self.q_lens)) or "none"
        parts = [
            f"q{lens}k{'+'.join(map(str, self.k_lens))}h{self.heads}d{self.dim}v{self.value_dim}",
            self.mode,
            "causal" if self.causal else "full",
        ]
        return "-".join(parts + [n for n, on in (("scaled", self.scaled), ("padded", self.padded), ("packed", self.packed)) if on])

    def problem(self, arch: str) -> Problem:
        dtype, fp8_pv = PREFILL_MODES[self.mode]
        name = dtype_name(dtype)
        return Problem(
            arch=arch,
            num_q_heads=self.heads,
            num_kv_heads=self.heads,
            head_dim=self.dim,
            v_head_dim=self.value_dim,
            q_dtype=name,
            kv_dtype=name,
            lse=True,
            fp8_pv=fp8_pv,
        )


def xs_mla_prefill() -> list[MlaPrefillCase]:
    base = MlaPrefillCase((5, 1, 9), (37, 1, 9), padded=2)
    cases = [replace(base, mode=mode, causal=causal, heads=1) for mode in PREFILL_MODES for causal in (True, False)]
    cases += [replace(base, mode="fp8_pv", scaled=True), replace(base, packed=True), MlaPrefillCase((40,), (40,), heads=1, mode="fp32")]
    cases += [replace(base, q_lens=(4, 0, 7), k_lens=(2, 9, 0)), replace(base, q_lens=(4, 0, 7), k_lens=(2, 9, 0), causal=False)]
    cases += [replace(base, dim=d, value_dim=v, heads=1) for d, v in ((64, 64), (96, 96), (128, 192), (256, 64))]
    return [*cases, MlaPrefillCase((), (), padded=3), MlaPrefillCase((0,), (5,))]


def full_mla_prefill() -> list[MlaPrefillCase]:
    ragged = MlaPrefillCase((129, 1, 300, 0, 65, 17), (129, 700, 2_500, 12, 65, 9), heads=16, padded=5)
    one = MlaPrefillCase((1_024,), (4_096,), heads=128)
    cases = [replace(c, mode=m, causal=causal) for c in (ragged, one) for m in PREFILL_MODES for causal in (True, False)]
    cases += [replace(ragged, mode=mode, scaled=True, packed=True) for mode in ("fp8", "fp8_pv")]
    cases += [replace(ragged, mode=m, dim=d, value_dim=v) for m in ("bf16", "fp8", "fp8_pv") for d in (64, 96, 128, 192, 256) for v in (64, 128, 256)]
    cases += [replace(ragged, heads=h) for h in (1, 3, 128)]
    return list(dict.fromkeys(cases + xs_mla_prefill()))


@dataclass(frozen=True, eq=False)
class MlaPrefillInputs:
    """The arguments of mla_prefill."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k, self.v, self.cu_seqlens_q, self.cu_seqlens_k


def offsets_of(lengths: tuple[int, ...], device: torch.device | str) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int().to(device)


def mla_prefill_inputs(case: MlaPrefillCase, device: torch.device | str, *, seed: int = 0) -> MlaPrefillInputs:
    """Inputs of a case; rows that no request owns are NaN."""
    gen = generator(seed)
    dtype, fp8_pv = PREFILL_MODES[case.mode]
    scales = PREFILL_SCALES if case.scaled else (None, None, None)
    rows, keys = sum(case.q_lens), sum(case.k_lens)
    values = [normal((n, case.heads, d), gen, device) for n, d in ((rows, case.dim), (keys, case.dim), (keys, case.value_dim))]
    stored = [saturating_cast(x, dtype, scale) for x, scale in zip(values, scales, strict=True)]
    q = poisoned((rows + case.padded, case.heads, case.dim), dtype, device)
    kv = poisoned((keys + case.padded, case.heads, case.dim + case.value_dim + (0 if case.packed else 16)), dtype, device)
    indexable(q)[:rows] = indexable(stored[0])
    indexable(kv)[:keys, :, : case.dim] = indexable(stored[1])
    indexable(kv)[:keys, :, case.dim : case.dim + case.value_dim] = indexable(stored[2])
    k, v = kv[..., : case.dim], kv[..., case.dim : case.dim + case.value_dim]
    if not case.packed:
        k, v = k.contiguous(), v.contiguous()
    options = {"causal": case.causal, "q_scale": scales[0], "k_scale": scales[1], "v_scale": scales[2], "fp8_pv": fp8_pv}
    return MlaPrefillInputs(q, k, v, offsets_of(case.q_lens, device), offsets_of(case.k_lens, device), options)


@full_precision
def check_mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    fp8_pv: bool,
    error_of_products: float,
    roundings: float = 1.0,
    **options: Any,
) -> None:
    """(out, lse) against fp64, by the bound of `check_sparse_mla`; `roundings` of the output, as merged chunks have.

    What is rounded on the way is a partial sum, which need not be as small as its total.
    """
    offsets = (cu_seqlens_q, cu_seqlens_k)
    exact, exact_lse = mla_prefill(q, k, v, *offsets, dtype=torch.float64, **options)
    p_dtype = E4M3 if fp8_pv else torch.float16 if q.dtype == E4M3 else q.dtype
    unit = torch.finfo(p_dtype).eps / 2
    floor = float(rounding(torch.zeros(()), p_dtype)) / (256.0 if fp8_pv else 1.0)
    scale = q.shape[2] ** -0.5 * scale_factor({"q": options["q_scale"], "k": options["k_scale"]}, exact)
    out_scale = scale_factor({"v": options["v_scale"]}, exact)
    out_tolerance, lse_tolerance = torch.zeros_like(exact), torch.zeros_like(exact_lse)
    (begin_q, begin_k), (end_q, end_k) = ([o[:-1].tolist() for o in offsets], [o[1:].tolist() for o in offsets])
    for first, last, first_key, last_key in zip(begin_q, end_q, begin_k, end_k, strict=True):
        if first == last or first_key == last_key:
            continue
        queries, keys, values = (x.double() for x in (q[first:last], k[first_key:last_key], v[first_key:last_key]))
        place = torch.arange(last_key - first_key, device=q.device)
        position = torch.arange(last - first, device=q.device)[:, None] + (last_key - first_key) - (last - first)
        visible = (place <= position)[:, None] if options["causal"] else torch.ones(1, 1, 1, dtype=torch.bool, device=q.device)
        logits = einsum(queries, keys, "t h d, n h d -> t h n") * scale
        weights = torch.softmax(logits.masked_fill(~visible, float("-inf")), dim=-1).nan_to_num()
        size = (einsum(queries.abs(), keys.abs(), "t h d, n h d -> t h n") * scale.abs()).masked_fill(~visible, 0.0).amax(-1)
        logit_error = error_of_products * size + FP32_ERROR
        squares = einsum(weights.square(), values.square(), "t h n, n h d -> t h d").sqrt() * out_scale
        weight_squares = weights.square().sum(-1, keepdim=True).sqrt()
        here = slice(first, last)
        rounded = exact[here].abs() + squares if roundings > 1 else exact[here]
        out_tolerance[here] = (
            4 * roundings * rounding(rounded, out.dtype)
            + 4 * roundings * (unit * squares + floor * values.square().sum(0).sqrt() * out_scale)
            + 8 * logit_error[..., None] * (squares + exact[here].abs() * weight_squares)
        )
        lse_tolerance[here] = 2 * logit_error + 4 * FP32_ERROR * (1 + exact_lse[here].abs().nan_to_num(posinf=0.0))
    assert_within(lse, exact_lse, lse_tolerance, name="lse")
    assert_within(out, exact, out_tolerance, name="out")
