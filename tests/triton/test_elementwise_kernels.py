"""Norm, rotation and insertion, quantisation, and the rounding both share, in Triton's interpreter, against plain torch in fp64."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from dataclasses import dataclass, replace

import pytest
import torch
import triton
import triton.language as tl

from m3attn.calls import QkNormRopeInsertCall, QuantizeFp8Call
from m3attn.scales import UNIT, Scale
from m3attn.triton_kernels import qk_norm_rope_insert as norm_rope
from m3attn.triton_kernels import quantize
from m3attn.triton_kernels.launch import launch
from m3attn.triton_kernels.primitives import widen
from m3attn.triton_kernels.saturate import divide_by_scale, divisor, round_to

# numpy, under the interpreter, warns of what the formats define: overflow to infinity, NaN from a division.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
GUARD = 0xA5


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(BITS[x.element_size()])


def scale_of(value: float | torch.Tensor | None) -> Scale:
    return Scale.of(value, argument="scale")


def nearest_fp8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes of the fp8 number nearest to x by search among all of them in fp64: ties to the even code, saturating, NaN 0x7f."""
    codes = torch.arange(0x7F if dtype == E4M3 else 0x7C, dtype=torch.uint8)
    values = codes.view(dtype).double()
    magnitude = x.double().abs().nan_to_num(nan=0.0).clamp(max=float(values[-1])).contiguous()
    above = torch.searchsorted(values, magnitude).clamp(max=len(values) - 1)
    below = (above - 1).clamp(min=0)
    up, down = values[above] - magnitude, magnitude - values[below]
    code = torch.where((up < down) | ((up == down) & (above % 2 == 0)) | (magnitude == values[above]), above, below)
    code = code.to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 7)
    return torch.where(x.isnan(), 0x7F, code)


def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor whose every byte is a guard byte."""
    return torch.full((*shape, dtype.itemsize), GUARD, dtype=torch.uint8).view(dtype).squeeze(-1)


@triton.jit
def _round_kernel(x_ptr, out_ptr, value, scale_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(out_ptr + offs, round_to(divide_by_scale(widen(tl.load(x_ptr + offs)), value, scale_ptr), out_ptr.dtype.element_ty))


@triton.jit
def _widen_kernel(x_ptr, out_ptr):
    offs = tl.arange(0, 256)
    tl.store(out_ptr + offs, widen(tl.load(x_ptr + offs), out_ptr.dtype.element_ty))


def stored_as(x: torch.Tensor, dtype: torch.dtype, scale: float | torch.Tensor | None = None) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    launch(_round_kernel, (1,), x, out, *divisor(scale_of(scale)), device=x.device, num_warps=4, num_stages=1, N=x.numel())
    return out


def hard_numbers() -> torch.Tensor:
    """fp32: random bit patterns, every fp8 number, the ties between neighbours and what lies just beside them."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31, (1 << 15,), generator=generator).to(torch.int32).view(FP32)
    numbers = torch.cat([torch.arange(256, dtype=torch.uint8).view(dtype).float() for dtype in (E4M3, E5M2)])
    ties = (numbers[1:] + numbers[:-1]) / 2
    nudged = [ties * (1 + 2.0**-23), ties * (1 - 2.0**-23)]
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), -float("nan"), 464.0, 465.0, 61440.0, 3e38, 1e-45])
    x = torch.cat([patterns, numbers, ties, *nudged, special])
    return torch.nn.functional.pad(x, (0, (1 << 16) - len(x)))


@pytest.mark.parametrize("scale", (None, 1.5, torch.tensor([1e-3])), ids=("unscaled", "float", "tensor"))
def test_rounding(scale: float | torch.Tensor | None) -> None:
    x = hard_numbers()
    divided = x if scale is None else x / torch.as_tensor(scale)
    for dtype in (E4M3, E5M2):
        assert torch.equal(bits(stored_as(x, dtype, scale)), nearest_fp8(divided, dtype)), dtype
    finite = ~divided.isnan()
    for dtype in (BF16, FP16, FP32):
        stored = stored_as(x, dtype, scale)
        assert torch.equal(bits(stored[finite]), bits(divided.to(dtype)[finite])), dtype
        assert bool(stored[~finite].isnan().all()), dtype


def test_widening_is_exact() -> None:
    for dtype in (BF16, FP16):
        x = torch.arange(1 << 16).to(torch.int16).view(dtype)
        assert torch.equal(bits(stored_as(x, FP32)[~x.isnan()]), bits(x.float()[~x.isnan()])), dtype
    for dtype in (E4M3, E5M2):
        x = torch.arange(256, dtype=torch.uint8).view(dtype)
        number = ~x.float().isnan()
        for wider in (FP32, FP16, BF16):
            wide = torch.empty(256, dtype=wider)
            launch(_widen_kernel, (1,), x, wide, device=x.device, num_warps=4, num_stages=1)
            assert torch.equal(bits(wide[number]), bits(x.to(wider)[number])), (dtype, wider)
            assert bool(wide[~number].isnan().all()), (dtype, wider)


GUARD_ROWS = 4


def quantize_call(x: torch.Tensor, mode: str, dtype: torch.dtype = E4M3, scale: float | torch.Tensor | None = None) -> QuantizeFp8Call:
    """A call whose output has a guard of 3 elements after every row, and of `GUARD_ROWS` rows after the last."""
    rows, width = (x.shape[:-1].numel(), x.shape[-1]) if x.dim() else (1, 1)
    out = guarded((rows + GUARD_ROWS, width + 3), dtype)[:rows].view(*x.shape[:-1], width + 3)[..., :width]
    scale_out = None if mode == "static" else torch.full((rows if mode == "row" else 1,), float("nan"))
    return QuantizeFp8Call(x, mode, scale_of(scale), out if x.dim() else out[0], scale_out, False)


def check_quantize(x: torch.Tensor, mode: str, dtype: torch.dtype = E4M3, scale: float | torch.Tensor | None = None) -> None:
    call = quantize_call(x, mode, dtype, scale)
    quantize.quantize_fp8(call)
    value = x.float()
    if mode == "static":
        divided = value if scale is None else value / torch.as_tensor(scale).reshape(())
    else:
        rows = value.reshape(-1, x.shape[-1]) if mode == "row" else value.reshape(1, -1)
        amax = rows.abs().where(rows.isfinite(), torch.tensor(0.0)).amax(dim=1).clamp(min=2.0**-100)
        expected_scale = (amax.double() / torch.finfo(dtype).max).float()
        assert torch.equal(call.scale_out, expected_scale)
        divided = (rows / expected_scale[:, None]).reshape(x.shape)
    assert torch.equal(bits(call.out), nearest_fp8(divided, dtype))
    width = x.shape[-1] if x.dim() else 1
    whole = torch.empty(0, dtype=torch.uint8).set_(call.out.untyped_storage()).view(-1, width + 3)
    assert bool((whole[:, width:] == GUARD).all()), "bytes after a row were written"
    assert bool((whole[-GUARD_ROWS:] == GUARD).all()), "rows after the last were written"


def layouts(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    base = (torch.randn(3, 4, 5, 70, generator=torch.Generator().manual_seed(1)) * 30).to(dtype)
    return {
        "contiguous": base,
        "slices of every dim": base[::2, 1:, ::2, 3:40],
        "permuted": base.permute(2, 0, 1, 3),
        "broadcast": base[:, :1].expand(3, 4, 5, 70),
        "one column": base[..., 7:8],
        "vector": base[1, 2, 3],
        "scalar": base[0, 0, 0, 0],
    }


@pytest.mark.parametrize("dtype", (BF16, FP16, FP32))
@pytest.mark.parametrize(("mode", "scale"), (("static", None), ("static", 0.7), ("static", torch.tensor([1.3])), ("tensor", None), ("row", None)))
def test_quantize_layouts(mode: str, scale: float | torch.Tensor | None, dtype: torch.dtype) -> None:
    for name, x in layouts(dtype).items():
        if mode != "row" or name != "scalar":
            check_quantize(x, mode, E5M2 if name == "permuted" else E4M3, scale)


@pytest.mark.parametrize("mode", ("static", "tensor", "row"))
def test_quantize_odd_magnitudes(mode: str) -> None:
    inf, nan = float("inf"), float("nan")
    rows = [[0.0] * 6, [1e-42] * 6, [1e-30] * 6, [65504.0, -3.0, 1.0, 0.1, 7.0, -65504.0], [3.38e38, 1.0, -3.38e38, 0, 1, 2]]
    finite = torch.tensor(rows)
    odd = torch.tensor([[1.0, inf, -inf, 2.0, 0.5, -1.0], [nan, 1.0, 2.0, 3.0, inf, -0.0], [nan] * 6, [inf] * 6])
    for dtype in (FP32, BF16):
        for out_dtype in (E4M3, E5M2):
            for x in (*finite.to(dtype)[:, None], finite.to(dtype), torch.cat([finite, odd]).to(dtype)):
                check_quantize(x, mode, out_dtype)


@pytest.mark.parametrize("mode", ("static", "tensor", "row"))
def test_quantize_in_many_tiles(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "settings_override", quantize.Setting(16, 1))
    monkeypatch.setattr(quantize, "LONGEST_HELD_ROW", 32)
    x = layouts(BF16)["contiguous"][:1, :3]
    check_quantize(x, mode)
    for width in (64, 9, 8):  # tiles that cover x exactly, and that reach beyond its columns and beyond its rows
        check_quantize(x[..., :width], mode)


@pytest.mark.parametrize("mode", ("static", "tensor", "row"))
def test_quantize_nothing(mode: str) -> None:
    for shape in ((0, 8), (3, 0), (0,)):
        call = quantize_call(torch.empty(shape), mode)
        quantize.quantize_fp8(call)
        assert call.scale_out is None or torch.equal(call.scale_out, torch.full_like(call.scale_out, 2.0**-100 / 448))


def test_quantize_refuses_five_strides() -> None:
    x = torch.empty(4, 4, 4, 4, 4)[::2, ::2, ::2, ::2, :3]
    with pytest.raises(ValueError, match=r"x: expected strides .* three leading dimensions .* \(2, 2, 2, 2, 3\)"):
        quantize.quantize_fp8(quantize_call(x, "static"))


@dataclass(frozen=True)
class Case:
    """A step of qk_norm_rope_insert. Cache layouts: `hnd`, `nhd` (both packed), `layer` (separate, every second layer of one allocation)."""

    heads: tuple[int, int, int] = (8, 2, 2)
    dtype: torch.dtype = BF16
    weight_dtype: torch.dtype = FP32
    table_dtype: torch.dtype = FP32
    rotary_dim: int = 64
    cache_dtype: torch.dtype | None = None
    index_dtype: torch.dtype | None = None
    q_out: torch.dtype | None = None
    index_q_out: torch.dtype | None = None
    layout: str = "hnd"
    page_size: int = 4
    integers: torch.dtype = torch.int64
    scales: tuple[float | torch.Tensor | None, ...] = (None,) * 5
    skip_index: bool = False


PAGES, TOKENS, MAX_POSITION = 5, 7, 40
TAKES_NOTHING = (3, 6)
"""Rows whose position is outside the table."""


def make_cache(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    dtype, heads = case.cache_dtype, case.heads[1]
    if case.layout == "layer":
        pools = (guarded((PAGES, 2, heads, case.page_size, 128), dtype) for _ in "kv")
        k, v = (pool[:, 1] for pool in pools)
        return k, v
    packed = guarded((PAGES, heads, case.page_size, 256), dtype)
    if case.layout == "nhd":
        packed = guarded((PAGES, case.page_size, heads, 256), dtype).transpose(1, 2)
    return packed[..., :128], packed[..., 128:]


def make_call(case: Case) -> QkNormRopeInsertCall:
    generator = torch.Generator().manual_seed(5)
    num_q, num_kv, num_index = case.heads
    width = (num_q + 2 * num_kv + (num_index + 1 if num_index else 0)) * 128
    qkv = guarded((TOKENS + 1, width + 24), case.dtype)[:TOKENS, :width]
    qkv.copy_(torch.randn(TOKENS, width, generator=generator) * 2)
    q_weight, k_weight, index_q_weight, index_k_weight = (torch.randn(4, 128, generator=generator) * 0.1).to(case.weight_dtype)
    capacity = PAGES * case.page_size
    positions = torch.randint(MAX_POSITION, (TOKENS,), generator=generator)
    positions[list(TAKES_NOTHING)] = torch.tensor([-1, MAX_POSITION])
    qkv[list(TAKES_NOTHING), ::3] = float("nan")
    slots = torch.tensor([-1, 5, capacity - 1, 9, capacity, 2**31 - 1, 0])
    k_cache, v_cache = make_cache(case) if case.cache_dtype else (None, None)
    has_index = num_index > 0 and not case.skip_index
    index_cache = guarded((PAGES, case.page_size, 128), case.index_dtype) if case.index_dtype else None
    return QkNormRopeInsertCall(
        qkv,
        q_weight,
        k_weight,
        index_q_weight if has_index else None,
        index_k_weight if has_index else None,
        positions.to(case.integers),
        (torch.rand(MAX_POSITION, case.rotary_dim, generator=generator) * 2 - 1).to(case.table_dtype),
        k_cache,
        v_cache,
        index_cache,
        slots.to(case.integers) if case.cache_dtype else None,
        slots.roll(1).to(case.integers) if case.index_dtype else None,
        num_q,
        num_kv,
        num_index if has_index else 0,
        1e-6,
        guarded((TOKENS + 1, num_q, 128), case.q_out)[:TOKENS] if case.q_out else None,
        guarded((TOKENS + 1, num_index, 128), case.index_q_out)[:TOKENS] if case.index_q_out else None,
        *map(scale_of, case.scales),
    )


def exact_heads(x: torch.Tensor, weight: torch.Tensor, call: QkNormRopeInsertCall) -> torch.Tensor:
    """x [T, H, 128] normalised and rotated in fp64; positions are clamped into the table."""
    x = x.double()
    x = x / (x.square().mean(-1, keepdim=True) + call.eps).sqrt() * (1 + weight.double())
    half = call.cos_sin.shape[1] // 2
    cos, sin = call.cos_sin.double()[call.positions.long().clamp(0, MAX_POSITION - 1)][:, None].split(half, dim=-1)
    first, second = x[..., :half].clone(), x[..., half : 2 * half].clone()
    x[..., :half], x[..., half : 2 * half] = first * cos - second * sin, second * cos + first * sin
    return x


def assert_stored(stored: torch.Tensor, exact: torch.Tensor, scale: Scale, name: str) -> None:
    """fp8: within fp32's error of a value that rounds to these bytes; other dtypes: within one rounding and fp32's error of the value."""
    exact = scale.divide(exact)
    slack = 4e-6 * exact.abs().amax(-1, keepdim=True)
    if stored.element_size() == 1:
        low, high = (nearest_fp8(exact + sign * slack, stored.dtype).view(stored.dtype).double() for sign in (-1, 1))
        assert bool(((stored.double() >= low) & (stored.double() <= high)).all()), name
    else:
        allowed = slack + exact.abs() * torch.finfo(stored.dtype).eps / 2
        assert bool(((stored.double() - exact).abs() <= allowed).all()), name


def check_call(case: Case) -> None:
    call, before = make_call(case), make_call(case)
    norm_rope.qk_norm_rope_insert(call)
    num_q, num_kv, num_index = case.heads
    sizes = [num_q, num_kv, num_kv] + ([num_index, 1] if num_index else [])
    old, new = (c.qkv.unflatten(1, (-1, 128)).split(sizes, dim=1) for c in (before, call))
    live = torch.ones(TOKENS, dtype=torch.bool)
    live[list(TAKES_NOTHING)] = False
    changed = set()

    def check_rows(part: int, weight: torch.Tensor, out: torch.Tensor | None, scale: Scale) -> None:
        stored, idle = (new[part], old[part]) if out is None else (out, torch.zeros_like(out))
        assert_stored(stored[live], exact_heads(old[part], weight, before)[live], UNIT if out is None else scale, f"part {part}")
        assert torch.equal(bits(stored[~live]), bits(idle[~live])), f"part {part}, rows outside the table"
        if out is None:
            changed.add(part)

    def check_cache(cache: torch.Tensor, slots: torch.Tensor, exact: torch.Tensor, scale: Scale, raw: torch.Tensor | None, name: str) -> None:
        rows = live & (slots >= 0) & (slots < PAGES * case.page_size)
        page, offset = slots[rows].long() // case.page_size, slots[rows].long() % case.page_size
        stored = bits(cache)[page, :, offset].view(cache.dtype)
        assert_stored(stored, exact[rows], scale, name)
        if raw is not None and raw.dtype == cache.dtype and scale == UNIT:
            assert torch.equal(bits(stored), bits(raw[rows])), name
        cache.view(BITS[cache.element_size()])[page, :, offset] = guarded((1,), cache.dtype).view(BITS[cache.element_size()])

    check_rows(0, call.q_weight, call.q_out, call.q_scale)
    caches = []
    if call.k_cache is None:
        check_rows(1, call.k_weight, None, UNIT)
    else:
        caches = [call.k_cache, call.v_cache]
        check_cache(call.k_cache, call.slots, exact_heads(old[1], call.k_weight, before), call.k_scale, None, "k")
        check_cache(call.v_cache, call.slots, old[2].double(), call.v_scale, old[2], "v")
    if call.num_index_heads:
        check_rows(3, call.index_q_weight, call.index_q_out, call.index_q_scale)
        if call.index_k_cache is None:
            check_rows(4, call.index_k_weight, None, UNIT)
        else:
            caches.append(call.index_k_cache)
            exact = exact_heads(old[4], call.index_k_weight, before)
            check_cache(call.index_k_cache[:, None], call.index_slots, exact, call.index_k_scale, None, "index_k")
    for part in set(range(len(sizes))) - changed:
        assert torch.equal(bits(new[part]), bits(old[part])), f"part {part} of the packed row changed"
    for guard in (*caches, call.qkv[:, :0].as_strided((TOKENS, 24), call.qkv.stride(), call.qkv.shape[1])):
        whole = guard if guard.shape[-1] == 24 else torch.empty(0, dtype=torch.uint8).set_(guard.untyped_storage())
        assert bool((whole.contiguous().view(torch.uint8) == GUARD).all()), "bytes that belong to nobody were written"
    for rows in (call.qkv, call.q_out, call.index_q_out):
        if rows is not None:
            after = torch.empty(0, dtype=torch.uint8).set_(rows.untyped_storage())[TOKENS * rows.stride(0) * rows.element_size() :]
            assert len(after) > 0 and bool((after == GUARD).all()), "a token that is not there was written"


CASES = {
    "in place": Case(),
    "in place, fp32": Case(dtype=FP32, rotary_dim=128, integers=torch.int32),
    "dense": Case(heads=(8, 2, 0), weight_dtype=BF16, table_dtype=BF16, rotary_dim=6),
    "dense cache": Case(heads=(8, 2, 0), cache_dtype=BF16, q_out=BF16, layout="nhd"),
    "skip index": Case(skip_index=True, cache_dtype=E4M3, q_out=E4M3, layout="layer", rotary_dim=2),
    "tp1": Case(heads=(64, 4, 4), cache_dtype=BF16, index_dtype=BF16, q_out=BF16, index_q_out=BF16),
    "tp4": Case(heads=(16, 1, 1), cache_dtype=E4M3, index_dtype=E4M3, q_out=E4M3, index_q_out=E4M3, layout="nhd", integers=torch.int32),
    "fp16 to e5m2": Case(dtype=FP16, weight_dtype=FP16, table_dtype=FP16, cache_dtype=E5M2, index_dtype=FP16, layout="layer", rotary_dim=96),
    "fp32 caches": Case(dtype=FP32, cache_dtype=FP32, index_dtype=FP32, q_out=FP32, index_q_out=FP32, page_size=3),
    "narrowing": Case(dtype=FP32, cache_dtype=BF16, index_dtype=E4M3, q_out=FP16, rotary_dim=34),
    "scaled": Case(
        cache_dtype=E4M3, index_dtype=E4M3, q_out=E4M3, index_q_out=E4M3, scales=(1.5, torch.tensor([0.7]), torch.tensor([0.3]), 2.0, 0.9)
    ),
    "scaled 16 bit": Case(cache_dtype=BF16, index_dtype=BF16, q_out=BF16, scales=(2.0, None, 0.5, 0.25, 4.0)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_norm_rope_insert(case: Case) -> None:
    check_call(case)


@pytest.mark.parametrize(
    "setting", (norm_rope.Setting(4, 4, 1), norm_rope.Setting(8, 16, 2), norm_rope.Setting(64, 32, 4), norm_rope.Setting(32, 16, 2, 104)), ids=str
)
def test_settings_change_no_byte(setting: norm_rope.Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, call = make_call(CASES["tp4"]), make_call(CASES["tp4"])
    norm_rope.qk_norm_rope_insert(expected)
    monkeypatch.setattr(norm_rope, "settings_override", setting)
    norm_rope.qk_norm_rope_insert(call)
    for name in ("q_out", "index_q_out", "k_cache", "v_cache", "index_k_cache"):
        assert torch.equal(bits(getattr(call, name)), bits(getattr(expected, name))), name


def test_fp8_index_changes_no_other_byte() -> None:
    case = Case(cache_dtype=E4M3, index_dtype=BF16, q_out=BF16, index_q_out=BF16)
    wide, narrow = make_call(case), make_call(replace(case, index_dtype=E4M3, index_q_out=E4M3))
    for call in (wide, narrow):
        norm_rope.qk_norm_rope_insert(call)
    for name in ("qkv", "q_out", "k_cache", "v_cache"):
        assert torch.equal(bits(getattr(wide, name)), bits(getattr(narrow, name))), name


def test_one_rounding() -> None:
    """Where rounding to bf16 first would give another byte, the stored byte is that of the fp32 value."""
    case = Case(dtype=FP32, q_out=FP32, index_q_out=E4M3, cache_dtype=E4M3, index_dtype=E4M3)
    once, plain = make_call(case), make_call(replace(case, cache_dtype=FP32, index_dtype=FP32, index_q_out=FP32))
    for call in (once, plain):
        norm_rope.qk_norm_rope_insert(call)
    live = torch.tensor([t for t in range(TOKENS) if t not in TAKES_NOTHING])
    for name, rows in (("index_q_out", live), ("k_cache", torch.tensor([1, 4])), ("index_k_cache", torch.tensor([1]))):
        stored, value = getattr(once, name)[rows], getattr(plain, name)[rows]
        if name != "index_q_out":
            written = bits(value) != bits(guarded((1,), FP32))
            stored, value = stored[written], value[written]
        expected, twice = nearest_fp8(value, E4M3), nearest_fp8(value.to(BF16).float(), E4M3)
        assert bool((expected != twice).any()), "the inputs of this test cannot tell"
        assert torch.equal(bits(stored), expected), name


def test_no_tokens() -> None:
    call = make_call(CASES["tp4"])
    none = {name: getattr(call, name)[:0] for name in ("qkv", "positions", "slots", "index_slots", "q_out", "index_q_out")}
    norm_rope.qk_norm_rope_insert(replace(call, **none))
    assert bool((torch.empty(0, dtype=torch.uint8).set_(call.k_cache.untyped_storage()) == GUARD).all())
