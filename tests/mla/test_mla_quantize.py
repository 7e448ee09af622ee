"""mla_rope_quantize and mla_kv_pack_quantize: bytes of one rounding, strided inputs, the shared head, padded rows, scales."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

import m3attn
from m3attn.dtypes import E4M3, dtype_name
from m3attn.problem import Problem
from m3attn.reference.mla_quantize import join_heads, rope
from m3attn.reference.quantize import saturating_cast
from m3attn.testing.bounds import assert_within, norm_rope_bound
from m3attn.testing.inputs import generator, normal, poisoned
from m3attn.testing.matrix import DEVICE, arch, gpu_only, keys, matrix, pick, run_or_skip

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MAX_POSITION = 512


@dataclass(frozen=True, slots=True)
class MlaQuantizeCase:
    """A case of both stages; `strided`: inputs are views of larger buffers, as projections give them."""

    tokens: int
    heads: int = 4
    nope: int = 128
    rope: int = 64
    v_dim: int = 128
    dtype: torch.dtype = BF16
    table_dtype: torch.dtype = FP32
    interleaved: bool = False
    scaled: bool = False
    strided: bool = True
    integer: torch.dtype = torch.int64

    @property
    def id(self) -> str:
        parts = [f"t{self.tokens}h{self.heads}d{self.nope}+{self.rope}v{self.v_dim}", dtype_name(self.dtype), f"table_{dtype_name(self.table_dtype)}"]
        parts += [n for n, on in (("interleaved", self.interleaved), ("scaled", self.scaled), ("strided", self.strided)) if on]
        return "-".join([*parts, str(self.integer).removeprefix("torch.")])

    def problem(self) -> Problem:
        return Problem(arch(), self.heads, self.heads, head_dim=self.nope + self.rope, q_dtype=dtype_name(self.dtype), kv_dtype="fp8_e4m3")


XS = [
    MlaQuantizeCase(5),
    MlaQuantizeCase(5, interleaved=True, scaled=True),
    MlaQuantizeCase(0),
    MlaQuantizeCase(1, heads=1, strided=False),
    MlaQuantizeCase(3, heads=3, dtype=FP16, table_dtype=FP16, integer=torch.int32),
    MlaQuantizeCase(3, heads=40, nope=48, rope=16, v_dim=80, dtype=FP32, interleaved=True),
    MlaQuantizeCase(2, heads=5, nope=64, rope=32, v_dim=96, scaled=True),
]
FULL = XS + [
    replace(case, tokens=t, heads=h)
    for t, h in ((1, 128), (300, 128), (1_030, 128), (1_000, 16), (4_097, 8))
    for case in (XS[0], XS[1], replace(XS[0], dtype=FP16), replace(XS[1], table_dtype=BF16), replace(XS[0], strided=False))
]


def rotary_table(rope_dim: int, dtype: torch.dtype) -> torch.Tensor:
    angle = torch.arange(MAX_POSITION)[:, None] * 10_000.0 ** (-torch.arange(rope_dim // 2) / (rope_dim // 2))
    return torch.cat([angle.cos(), angle.sin()], dim=1).to(device=DEVICE, dtype=dtype)


def strided(x: torch.Tensor, case: MlaQuantizeCase, extra: int) -> torch.Tensor:
    """x as the first dims of a buffer whose other elements are NaN."""
    if not case.strided:
        return x
    storage = poisoned((*x.shape[:-1], x.shape[-1] + extra), x.dtype, DEVICE)
    storage[..., : x.shape[-1]] = x
    return storage[..., : x.shape[-1]]


def head_inputs(case: MlaQuantizeCase) -> tuple[torch.Tensor, ...]:
    """(q, k_nope, k_pe, v), with values beyond e4m3's largest among them."""
    gen = generator(7)
    shapes = (case.nope + case.rope, case.nope, case.rope, case.v_dim)
    tensors = []
    for number, dim in enumerate(shapes):
        heads = 1 if number == 2 else case.heads
        x = (normal((case.tokens, heads, dim), gen, DEVICE) * 3).to(case.dtype)
        x[::3, :, 1::17] *= 300
        tensors.append(strided(x, case, extra=8 * number + 16))
    return tuple(tensors)


def positions_of(case: MlaQuantizeCase) -> torch.Tensor:
    """Every third row's position lies outside the table."""
    positions = torch.randint(MAX_POSITION, (case.tokens,), generator=generator(3))
    far = 2**32 + 3 if case.integer == torch.int64 else 2**31 - 1
    positions[2::3] = torch.tensor((-1, far, MAX_POSITION))[torch.arange(len(positions[2::3])) % 3]
    return positions.to(device=DEVICE, dtype=case.integer)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def scales(case: MlaQuantizeCase) -> tuple[float | None, torch.Tensor | None]:
    return (1.5, torch.tensor([0.037], device=DEVICE)) if case.scaled else (None, None)


@pytest.mark.parametrize(("key", "case"), matrix("mla_rope_quantize", XS, FULL))
def test_mla_rope_quantize(key: str, case: MlaQuantizeCase) -> None:
    q, k_nope, k_pe, _ = head_inputs(case)
    positions, table = positions_of(case), rotary_table(case.rope, case.table_dtype)
    live = (positions >= 0) & (positions < MAX_POSITION)
    for x in (q, k_nope, k_pe):
        x[~live, ..., ::3] = float("nan")
    q_scale, k_scale = scales(case)
    before = [x.clone() for x in (q, k_nope, k_pe)]

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return m3attn.mla_rope_quantize(q, k_nope, k_pe, positions, table, interleaved=case.interleaved, q_scale=q_scale, k_scale=k_scale, impl=key)

    results = run_or_skip("mla_rope_quantize", key, case.problem(), run)
    assert all(torch.equal(as_bytes(x), as_bytes(y)) for x, y in zip((q, k_nope, k_pe), before, strict=True)), "an input changed"
    for stored, nope, pe, scale in ((results[0], q[..., : case.nope], q[..., case.nope :], q_scale), (results[1], k_nope, k_pe[:, 0], k_scale)):
        assert stored.dtype == E4M3 and stored.is_contiguous() and stored.shape == q.shape
        assert not as_bytes(stored)[~live].any(), "rows outside the table are zeros"
        expected_nope = saturating_cast(nope[live], E4M3, scale)
        assert torch.equal(as_bytes(stored[live][..., : case.nope]), as_bytes(expected_nope))
        roped = rope(pe[live], positions[live], table, interleaved=case.interleaved, dtype=torch.float64)
        exact = join_heads(nope[live].double(), roped)[..., case.nope :]
        factor = 1.0 if scale is None else float(scale)
        got = stored[live][..., case.nope :].double() * factor
        assert_within(got, exact.clamp(-448 * factor, 448 * factor), norm_rope_bound(exact, E4M3, factor), name="rope")


@pytest.mark.parametrize(("key", "case"), matrix("mla_kv_pack_quantize", XS, FULL))
def test_mla_kv_pack_quantize(key: str, case: MlaQuantizeCase) -> None:
    _, k_nope, k_pe, v = head_inputs(case)
    k_scale, v_scale = scales(case)
    run = lambda: m3attn.mla_kv_pack_quantize(k_nope, k_pe, v, k_scale=k_scale, v_scale=v_scale, impl=key)  # noqa: E731
    k_out, v_out = run_or_skip("mla_kv_pack_quantize", key, case.problem(), run)
    assert k_out.is_contiguous() and v_out.is_contiguous()
    assert torch.equal(as_bytes(k_out), as_bytes(saturating_cast(join_heads(k_nope, k_pe[:, 0]), E4M3, k_scale)))
    assert torch.equal(as_bytes(v_out), as_bytes(saturating_cast(v, E4M3, v_scale)))


def test_the_size_of_a_step_changes_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    from m3attn.triton_kernels import mla_quantize

    _, k_nope, k_pe, v = head_inputs(XS[5])
    few = m3attn.mla_kv_pack_quantize(k_nope, k_pe, v, impl="triton")
    monkeypatch.setattr(mla_quantize, "FEW_TOKENS", 0)
    many = m3attn.mla_kv_pack_quantize(k_nope, k_pe, v, impl="triton")
    assert all(torch.equal(as_bytes(x), as_bytes(y)) for x, y in zip(few, many, strict=True))


@pytest.mark.parametrize("key", keys("mla_kv_pack_quantize"))
def test_values_beyond_the_format_saturate_and_nan_stays(key: str) -> None:
    k_nope = torch.tensor([float("inf"), float("-inf"), float("nan"), 1e6, -464.0, 0.0, -0.0, 2.0**-11], device=DEVICE).repeat(2).view(1, 1, 16)
    k, _ = m3attn.mla_kv_pack_quantize(k_nope, k_nope[:, 0], k_nope, impl=key)
    assert torch.equal(as_bytes(k[..., :16]), as_bytes(saturating_cast(k_nope, E4M3)))
    assert torch.equal(as_bytes(k[..., 16:]), as_bytes(k[..., :16]))


@pytest.mark.parametrize("key", keys("mla_rope_quantize"))
def test_scale_of_one_is_none_and_buffers_are_filled(key: str) -> None:
    case = MlaQuantizeCase(4, strided=False)
    q, k_nope, k_pe, _ = head_inputs(case)
    positions, table = positions_of(case), rotary_table(case.rope, FP32)
    plain = m3attn.mla_rope_quantize(q, k_nope, k_pe, positions, table, impl=key)
    buffers = [poisoned(tuple(q.shape), E4M3, DEVICE) for _ in range(2)]
    one = torch.ones(1, device=DEVICE)
    given = m3attn.mla_rope_quantize(q, k_nope, k_pe[:, 0], positions, table, q_scale=1.0, k_scale=one, q_out=buffers[0], k_out=buffers[1], impl=key)
    for a, b, buffer in zip(plain, given, buffers, strict=True):
        assert b is buffer and torch.equal(as_bytes(a), as_bytes(b))


def test_bad_arguments_are_named() -> None:
    case = MlaQuantizeCase(4, strided=False)
    q, k_nope, k_pe, v = head_inputs(case)
    positions, table = positions_of(case), rotary_table(case.rope, FP32)
    rotate, pack = m3attn.mla_rope_quantize, m3attn.mla_kv_pack_quantize
    buffer = torch.empty(4, 4, 192, dtype=E4M3, device=DEVICE)
    for error, message, call in (
        (ValueError, "q: expected 184 dims", lambda: rotate(q, k_nope[..., :120], k_pe, positions, table)),
        (ValueError, "k_pe: expected shape", lambda: rotate(q, k_nope, k_pe.expand(-1, 2, -1), positions, table)),
        (TypeError, "k_nope: expected torch.bfloat16", lambda: rotate(q, k_nope.float(), k_pe, positions, table)),
        (ValueError, "positions: expected shape", lambda: rotate(q, k_nope, k_pe, positions[:3], table)),
        (ValueError, "cos_sin: expected shape", lambda: rotate(q, k_nope, k_pe, positions, table[:, :32])),
        (ValueError, "q_scale: expected a finite number above 0", lambda: rotate(q, k_nope, k_pe, positions, table, q_scale=0.0)),
        (ValueError, "q_out: expected a contiguous tensor", lambda: rotate(q, k_nope, k_pe, positions, table, q_out=buffer.transpose(0, 1))),
        (ValueError, "q_out: expected a buffer of its own", lambda: rotate(q, k_nope, k_pe, positions, table, q_out=buffer, k_out=buffer)),
        (TypeError, "k_out: expected torch.float8_e4m3fn", lambda: pack(k_nope, k_pe, v, k_out=q)),
        (ValueError, "v: expected shape", lambda: pack(k_nope, k_pe, v[:3])),
        (ValueError, "q: expected unit stride", lambda: rotate(q.transpose(1, 2).contiguous().transpose(1, 2), k_nope, k_pe, positions, table)),
    ):
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize("key", [pytest.param("triton", marks=gpu_only)])
def test_rows_past_two_to_the_31_elements(key: str) -> None:
    """Token strides that no 32-bit offset passes, in every input."""
    tokens, far = 3, pick(1 << 12, 1 << 31)
    storage = torch.zeros(2 * far + 4 * 256, dtype=BF16, device=DEVICE)
    wide = storage.as_strided((tokens, 2, 192), (far, 256, 1))
    wide.copy_(normal(tuple(wide.shape), generator(1), DEVICE))
    positions, table = torch.arange(tokens, device=DEVICE), rotary_table(64, FP32)
    for q in (wide, wide.contiguous()):
        result = m3attn.mla_rope_quantize(q, q[..., :128], q[:, 0, 128:], positions, table, impl=key)
        packed = m3attn.mla_kv_pack_quantize(q[..., :128], q[:, 0, 128:], q[..., 64:], impl=key)
        first = (*result, *packed) if q is wide else first  # noqa: F821
    assert all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(first, (*result, *packed), strict=True))
