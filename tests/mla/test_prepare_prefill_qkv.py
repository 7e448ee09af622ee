"""prepare_prefill_qkv: who prepares, in which dtype, what reaches the latent cache, and that both paths give the same attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import m3attn
from m3attn.calls import PreparePrefillQkvCall
from m3attn.dtypes import E4M3
from m3attn.reference.mla_quantize import join_heads, rope
from m3attn.reference.numerics import indexable
from m3attn.reference.quantize import saturating_cast
from m3attn.registry import Capabilities, find
from m3attn.stages.prepare_prefill_qkv import prepare_plain
from m3attn.testing.bounds import assert_within, norm_rope_bound
from m3attn.testing.inputs import NAN_BYTE, generator, normal, poisoned
from m3attn.testing.matrix import DEVICE, arch, gpu_only, keys, skip_if_declined
from m3attn.testing.mla import MlaPrefillCase, offsets_of

BF16 = torch.bfloat16
HEADS, NOPE, ROPE, V_DIM, LATENT, PAGE, PAGES = 2, 128, 64, 128, 96, 4, 6
MAX_POSITION = 64
SCALES = {"q_scale": 1.5, "k_scale": 0.5, "v_scale": 2.0}


@dataclass(frozen=True, eq=False)
class Step:
    """Inputs of one step: views of the projections' outputs, a latent cache of NaN, slots and positions of which some are padding."""

    arguments: dict[str, Any]
    live: torch.Tensor
    written: torch.Tensor

    @property
    def cache(self) -> torch.Tensor:
        return self.arguments["cache"].kv


def step(dtype: torch.dtype = BF16, cache_dtype: torch.dtype = E4M3, *, tokens: int = 7, scale: Any = 0.25, padding: bool = True) -> Step:
    gen = generator(11)
    q = normal((tokens, HEADS, NOPE + ROPE), gen, DEVICE).to(dtype)
    kv = normal((tokens, HEADS, NOPE + V_DIM), gen, DEVICE).to(dtype)
    latent = normal((tokens, 1, LATENT + ROPE), gen, DEVICE).to(dtype)
    positions = torch.randint(MAX_POSITION, (tokens,), generator=gen)
    slots = torch.randperm(PAGE * PAGES, generator=gen)[:tokens]
    if padding:
        positions[2::5] = MAX_POSITION + 2**32
        slots[1::4] = torch.tensor((-1, PAGE * PAGES))[torch.arange(len(slots[1::4])) % 2]
    angle = torch.arange(MAX_POSITION)[:, None] * 10_000.0 ** (-torch.arange(ROPE // 2) / (ROPE // 2))
    live = positions < MAX_POSITION
    written = live & (slots >= 0) & (slots < PAGE * PAGES)
    storage = poisoned((PAGES, 2, PAGE, LATENT + ROPE), cache_dtype, DEVICE)
    arguments = {
        "q_nope": q[..., :NOPE],
        "q_pe": q[..., NOPE:],
        "k_nope": kv[..., :NOPE],
        "v": kv[..., NOPE:],
        "latent": latent[..., :LATENT],
        "k_pe": latent[..., LATENT:],
        "positions": positions.to(DEVICE),
        "cos_sin": torch.cat([angle.cos(), angle.sin()], dim=1).to(DEVICE),
        "cache": m3attn.LatentCache(storage[:, 1], scale=scale),
        "slots": slots.to(DEVICE),
    }
    return Step(arguments, live.to(DEVICE), written.to(DEVICE))


@contextmanager
def registered(key: str, prepare: Callable[..., Any] | None = None, **capabilities: Any) -> Iterator[None]:
    reference = find("mla_prefill", "reference").load()
    caps = Capabilities(cpu="yes", equal_head_dims=False, **capabilities)
    m3attn.register("mla_prefill", key, reference, capabilities=caps, fp8_archs=(arch(),), prepare_qkv=prepare)
    try:
        yield
    finally:
        m3attn.unregister("mla_prefill", key)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def prepares_fp8(key: str) -> bool:
    implementation = find("mla_prefill", key)
    return implementation.prepare_qkv is not None and (arch() == "cpu" or arch() in implementation.fp8_archs)


@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("cache_dtype", (BF16, E4M3), ids=str)
@pytest.mark.parametrize("key", keys("mla_prefill"))
def test_rotation_quantisation_and_the_latent_cache(key: str, cache_dtype: torch.dtype, interleaved: bool) -> None:
    skip_if_declined("mla_prefill", key, MlaPrefillCase((7,), (7,), HEADS).problem(arch()))
    scale = torch.tensor([0.25], device=DEVICE) if cache_dtype == E4M3 else None
    s = step(cache_dtype=cache_dtype, scale=scale)
    a = s.arguments
    before = {name: x.clone() for name, x in a.items() if isinstance(x, torch.Tensor)}
    q, k, v = m3attn.prepare_prefill_qkv(**a, interleaved=interleaved, impl=key, **SCALES)
    assert all(torch.equal(before[name], a[name]) for name in before), "an input changed"

    fp8 = cache_dtype == E4M3 and prepares_fp8(key)
    dtype, factors = (E4M3, tuple(SCALES.values())) if fp8 else (BF16, (1.0, 1.0, 1.0))
    assert q.dtype == k.dtype == v.dtype == dtype
    table, live = a["cos_sin"], s.live
    rotated = {n: rope(a[n][live], a["positions"][live], table, interleaved=interleaved, dtype=torch.float64) for n in ("q_pe", "k_pe")}
    for name, got, nope, pe, factor in (("q", q, "q_nope", "q_pe", factors[0]), ("k", k, "k_nope", "k_pe", factors[1])):
        exact = join_heads(a[nope][live].double(), rotated[pe] if pe == "q_pe" else rotated[pe][:, 0])
        assert_within(got[live].double() * factor, exact, norm_rope_bound(exact, dtype, factor), name=name)
        assert not indexable(got)[~live].any(), f"{name}: rows outside the table are zeros"
    assert torch.equal(as_bytes(v), as_bytes(saturating_cast(a["v"], dtype, factors[2])))

    slots = a["slots"][s.written]
    rows = indexable(s.cache)[slots // PAGE, slots % PAGE].view(cache_dtype)
    cache_scale = 0.25 if cache_dtype == E4M3 else 1.0
    exact_pe = rotated["k_pe"][:, 0][s.written[live]]
    assert torch.equal(as_bytes(rows[:, :LATENT]), as_bytes(saturating_cast(a["latent"][s.written, 0], cache_dtype, cache_scale)))
    assert_within(rows[:, LATENT:].double() * cache_scale, exact_pe, norm_rope_bound(exact_pe, cache_dtype, cache_scale), name="cache")
    indexable(s.cache)[slots // PAGE, slots % PAGE] = indexable(poisoned((len(slots), LATENT + ROPE), cache_dtype, DEVICE))
    storage = torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(s.cache.untyped_storage())
    assert bool((storage == NAN_BYTE).all()), "bytes outside the slots were written"


@pytest.mark.parametrize("cache_dtype", (BF16, E4M3), ids=str)
@pytest.mark.parametrize("key", keys("mla_prefill"))
def test_zero_tokens_write_nothing(key: str, cache_dtype: torch.dtype) -> None:
    s = step(cache_dtype=cache_dtype, tokens=0, scale=None)
    q, k, v = m3attn.prepare_prefill_qkv(**s.arguments, impl=key)
    assert q.shape == k.shape == (0, HEADS, NOPE + ROPE) and v.shape == (0, HEADS, V_DIM)
    assert bool((as_bytes(s.cache) == NAN_BYTE).all())


@pytest.mark.parametrize("key", keys("mla_prefill", kernels_only=True))
def test_both_paths_give_the_same_attention(key: str, capsys: pytest.CaptureFixture) -> None:
    """A prefix of two chunks through the pack kernel, then the step's own tokens, merged: fp8 against 16 bit throughout."""
    skip_if_declined("mla_prefill", key, MlaPrefillCase((7,), (7,), HEADS, mode="fp8").problem(arch()))
    if not prepares_fp8(key):
        pytest.skip(f"{key} prepares no fp8 on {arch()}")
    gen = generator(2)
    chunks = [(normal((n, HEADS, NOPE + V_DIM), gen, DEVICE).to(BF16), normal((n, 1, ROPE), gen, DEVICE).to(BF16)) for n in (9, 5)]
    results = {}
    for path in ("fp8", "16 bit"):
        s = step(cache_dtype=E4M3 if path == "fp8" else BF16, scale=None, padding=False)
        scales = SCALES if path == "fp8" else {}
        q, k, v = m3attn.prepare_prefill_qkv(**s.arguments, impl=key, **scales)
        own = offsets_of((7,), DEVICE)
        out, lse = m3attn.mla_prefill(q, k, v, own, own, return_lse=True, impl=key, **scales)
        for kv, k_pe in chunks:
            if path == "fp8":
                packed = {"k_scale": scales["k_scale"], "v_scale": scales["v_scale"]}
                keys_, values = m3attn.mla_kv_pack_quantize(kv[..., :NOPE], k_pe, kv[..., NOPE:], impl=key, **packed)
            else:
                keys_, values = join_heads(kv[..., :NOPE], k_pe[:, 0]), kv[..., NOPE:]
            offsets = offsets_of((kv.shape[0],), DEVICE)
            part = m3attn.mla_prefill(q, keys_, values, own, offsets, causal=False, return_lse=True, impl=key, **scales)
            out, lse = m3attn.merge_attention_states(out, lse, *part, impl=key)
        results[path] = out.double()
    error = float((results["fp8"] - results["16 bit"]).norm() / results["16 bit"].norm())
    with capsys.disabled():
        print(f"\nprepare_prefill_qkv {key}, e4m3 against 16 bit: relative error {error:.4f}", end="")
    # Rounding of q, k and v to 4 significant bits: 2^-4 * 3^-0.5 each, and the logits' error on top.
    assert error < 0.12


def test_an_implementation_without_the_capability_takes_the_16_bit_path(monkeypatch: pytest.MonkeyPatch) -> None:
    with registered("bare"):
        s = step()
        q, k, v = m3attn.prepare_prefill_qkv(**s.arguments, impl="bare", **SCALES)
        assert q.dtype == k.dtype == v.dtype == BF16 and bool(s.written.any())
    with registered("own", lambda call: tuple(x.to(call.dtype) for x in prepare_plain(call))):
        assert m3attn.prepare_prefill_qkv(**step().arguments, impl="own")[0].dtype == E4M3
        assert m3attn.prepare_prefill_qkv(**step(cache_dtype=BF16).arguments, impl="own")[0].dtype == BF16
        monkeypatch.setenv("M3ATTN_DISABLE_FP8_ATTN_GEMM", "1")
        assert m3attn.prepare_prefill_qkv(**step().arguments, impl="own")[0].dtype == BF16
        monkeypatch.delenv("M3ATTN_DISABLE_FP8_ATTN_GEMM")
    with registered("no_fp8", prepare_plain, q_dtypes=("bf16",)):
        assert m3attn.prepare_prefill_qkv(**step().arguments, impl="no_fp8")[0].dtype == BF16
    with registered("fp16", prepare_plain, q_dtypes=("fp16",)), pytest.raises(m3attn.UnsupportedProblem, match="q dtype bf16: takes fp16"):
        m3attn.prepare_prefill_qkv(**step().arguments, impl="fp16")


def test_what_an_implementation_returns_is_checked() -> None:
    def returns(change: Callable[..., Any]) -> Callable[[PreparePrefillQkvCall], Any]:
        return lambda call: change(*(x.to(call.dtype) for x in prepare_plain(call)), call)

    cases: list[tuple[type[Exception], str, Callable[..., Any]]] = [
        (TypeError, r"prepare_qkv of 'mine': expected \(q, k, v\), got Tensor", lambda q, k, v, call: q),
        (TypeError, r"prepare_qkv of 'mine': expected \(q, k, v\), got 2 values", lambda q, k, v, call: (q, k)),
        (ValueError, "prepare_qkv of 'mine': k: expected shape", lambda q, k, v, call: (q, k[..., :NOPE], v)),
        (TypeError, "prepare_qkv of 'mine': q: expected torch.float8_e4m3fn, got torch.float32", lambda q, k, v, call: (q.float(), k, v)),
        (TypeError, "prepare_qkv of 'mine': v: expected a tensor, got NoneType", lambda q, k, v, call: (q, k, None)),
        (ValueError, "prepare_qkv of 'mine': v: expected a buffer of its own", lambda q, k, v, call: (q, k, overlapping(call, v))),
    ]

    def overlapping(call: PreparePrefillQkvCall, v: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(call.cache, v.shape, (1, 1, 1))

    for error, message, change in cases:
        with registered("mine", returns(change)), pytest.raises(error, match=message):
            m3attn.prepare_prefill_qkv(**step().arguments, impl="mine")
    with pytest.raises(ValueError, match="prepare_qkv: expected None for dense_attention"):
        m3attn.register("dense_attention", "mine", prepare_plain, prepare_qkv=prepare_plain)


def test_bad_arguments_are_named() -> None:
    a = step().arguments
    for error, message, changes in (
        (ValueError, "q_pe: expected shape", {"q_pe": a["q_pe"][:3]}),
        (TypeError, "v: expected torch.bfloat16", {"v": a["v"].float()}),
        (ValueError, "k_pe: expected shape", {"k_pe": a["k_pe"][..., :32]}),
        (ValueError, "latent: expected shape", {"latent": a["latent"].expand(-1, 2, -1)}),
        (TypeError, "cache: expected a LatentCache, got Tensor", {"cache": a["cache"].kv}),
        (ValueError, "cache.kv: expected shape", {"cache": m3attn.LatentCache(a["cache"].kv[..., :100])}),
        (TypeError, "cache.kv: expected", {"cache": m3attn.LatentCache(a["cache"].kv.view(torch.uint8))}),
        (TypeError, "slots: expected", {"slots": a["slots"].float()}),
        (ValueError, "cos_sin: expected shape", {"cos_sin": a["cos_sin"][:, :32]}),
        (ValueError, "k_scale: expected a finite number above 0", {"k_scale": float("inf")}),
    ):
        with pytest.raises(error, match=message):
            m3attn.prepare_prefill_qkv(**(a | changes))


@pytest.mark.parametrize("cache_dtype", (BF16, E4M3), ids=str)
@torch.no_grad()
def test_it_compiles_and_writes_the_cache_in_place(cache_dtype: torch.dtype) -> None:
    mine, twin = step(cache_dtype=cache_dtype, scale=None), step(cache_dtype=cache_dtype, scale=None)
    with registered("own", lambda call: tuple(x.to(call.dtype) for x in prepare_plain(call))):
        run = lambda arguments: m3attn.prepare_prefill_qkv(**arguments, impl="own", **SCALES)  # noqa: E731
        got = torch.compile(run, backend="aot_eager", fullgraph=True)(mine.arguments)
        for a, b in zip((*got, mine.cache), (*run(twin.arguments), twin.cache), strict=True):
            assert a.dtype == b.dtype and torch.equal(as_bytes(a), as_bytes(b))


def test_opcheck() -> None:
    a = step(cache_dtype=BF16, scale=None).arguments
    tensors = tuple(a[n] for n in ("q_nope", "q_pe", "k_nope", "v", "latent", "k_pe", "positions", "cos_sin"))
    flat = (*tensors, a["cache"].kv, None, 1.0, None, a["slots"], False, 1.0, None, 1.0, None, 1.0, None, None)
    torch.library.opcheck(torch.ops.m3attn.prepare_prefill_qkv.default, flat)


@pytest.mark.parametrize("key", [pytest.param("triton", marks=gpu_only)])
def test_graph_replay_equals_eager(key: str) -> None:
    skip_if_declined("mla_prefill", key, MlaPrefillCase((7,), (7,), HEADS, mode="fp8").problem(arch()))
    mine, twin = step(scale=None), step(scale=None)
    m3attn.prepare_prefill_qkv(**mine.arguments, impl=key)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = m3attn.prepare_prefill_qkv(**mine.arguments, impl=key)
    for s in (mine, twin):
        s.arguments["slots"].copy_(s.arguments["slots"].roll(1))
        s.arguments["positions"].copy_(s.arguments["positions"].roll(2))
    as_bytes(mine.cache.zero_() if mine.cache.dtype == BF16 else mine.cache.view(torch.uint8).zero_())
    twin.cache.view(torch.uint8).zero_()
    graph.replay()
    expected = m3attn.prepare_prefill_qkv(**twin.arguments, impl=key)
    assert all(torch.equal(as_bytes(x), as_bytes(y)) for x, y in zip((*captured, mine.cache), (*expected, twin.cache), strict=True))
