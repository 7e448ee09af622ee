"""One name for each element type, one kind of scale, and what fp8 storage may be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from stage_calls import BUILDERS, HEAD_DIM, KV_HEADS, Q_HEADS, TOKENS, make_batch, make_cache, normal

import m3attn
from m3attn.dtypes import NAME_TO_DTYPE, dtype_name, torch_dtype, typed_storage
from m3attn.scales import UNIT, Scale

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SPELLINGS = {
    "bf16": ("bf16", "bfloat16", "torch.bfloat16", "BF16", torch.bfloat16),
    "fp16": ("fp16", "float16", "half", torch.float16),
    "fp32": ("fp32", "float32", "float", torch.float32),
    "fp64": ("fp64", "float64", torch.float64),
    "fp8_e4m3": ("fp8", "fp8_e4m3", "e4m3", "float8_e4m3fn", "fp8_e4m3fn", "torch.float8_e4m3fn", E4M3),
    "fp8_e5m2": ("fp8_e5m2", "e5m2", "float8_e5m2", E5M2),
    "auto": ("auto", "AUTO"),
}


@pytest.mark.parametrize("name, spelling", [(name, s) for name, spellings in SPELLINGS.items() for s in spellings], ids=str)
def test_every_spelling_has_one_name(name: str, spelling: str | torch.dtype) -> None:
    assert dtype_name(spelling) == name
    if name != "auto":
        assert torch_dtype(name) == NAME_TO_DTYPE[name] and dtype_name(torch_dtype(name)) == name


@pytest.mark.parametrize(
    "unknown", ["fp7", "float8_e4m3fnuz", "e5m2fnuz", "int8", "", torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.int8, torch.uint8]
)
def test_unknown_and_foreign_names_raise_with_the_accepted_ones(unknown: str | torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"kind: expected one of auto, bf16, fp16, fp32, fp64, fp8_e4m3, fp8_e5m2 \(or a spelling of it\), got "):
        dtype_name(unknown, argument="kind")
    with pytest.raises(ValueError, match=r"kind: expected one of bf16, fp8_e4m3 "):
        dtype_name("fp16", argument="kind", accepted=("bf16", "fp8_e4m3"))


def test_another_type_is_no_name() -> None:
    with pytest.raises(TypeError, match=r"kind: expected a dtype name or torch.dtype, got int"):
        dtype_name(8, argument="kind")  # type: ignore[arg-type]


@pytest.mark.parametrize("declared", ["fp8", "fp8_e4m3", "float8_e4m3fn", E4M3])
def test_uint8_storage_is_viewed_as_what_is_declared(declared: str | torch.dtype) -> None:
    data = torch.arange(256, dtype=torch.uint8).view(4, 64)
    typed = typed_storage(data, declared, argument="cache.k")
    assert typed.dtype == E4M3 and typed.data_ptr() == data.data_ptr()
    assert typed_storage(data.view(E4M3), declared, argument="cache.k").dtype == E4M3
    assert typed_storage(data, "e5m2", argument="cache.k").dtype == E5M2


@pytest.mark.parametrize("declared", [None, "auto", "bf16"])
def test_uint8_storage_without_an_fp8_type_is_refused(declared: str | None) -> None:
    with pytest.raises(TypeError, match=rf"cache.k: expected .* or uint8 with a declared fp8 dtype, got uint8 declared as {declared!r}"):
        typed_storage(torch.zeros(4, dtype=torch.uint8), declared, argument="cache.k")


@pytest.mark.parametrize("stage", ["sparse_attention", "dense_attention", "index_score", "index_topk"])
@pytest.mark.parametrize("spelling", ["fp8", "float8_e4m3fn", E4M3, "fp8_e5m2"], ids=str)
def test_uint8_storage_gives_the_results_of_its_type(stage: str, spelling: str | torch.dtype) -> None:
    dtype = torch_dtype(dtype_name(spelling))
    if dtype == E5M2 and stage.startswith("index"):
        with pytest.raises(TypeError, match=r"cache.index_k: expected bf16, fp16, fp32 or fp8_e4m3"):
            BUILDERS[stage]()(cache=replace(make_cache(E5M2)))
        return
    cache = make_cache(dtype)
    untyped = m3attn.LayerCache(
        k=cache.k.view(torch.uint8), v=cache.v.view(torch.uint8), index_k=cache.index_k.view(torch.uint8), kv_dtype=spelling, index_dtype=spelling
    )
    outputs = [BUILDERS[stage]()(cache=c) for c in (cache, untyped)]
    for typed, raw in zip(*(o if isinstance(o, tuple) else (o,) for o in outputs), strict=True):
        assert torch.equal(typed, raw)


@pytest.mark.parametrize("scale", [None, 1, 1.0])
def test_no_scale_is_one(scale: float | None) -> None:
    assert Scale.of(scale, argument="s") == UNIT == Scale(1.0, None)
    x = torch.randn(3)
    assert Scale.of(scale, argument="s").multiply(x) is x and Scale.of(scale, argument="s").divide(x) is x


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_element_tensors_are_scales_without_a_read_back(shape: tuple[int, ...]) -> None:
    tensor = torch.full(shape, 0.5)
    scale = Scale.of(tensor, argument="s")
    assert scale.tensor is tensor and scale.value == 1.0
    assert Scale.of(torch.ones(1, device="meta"), argument="s").tensor is not None
    assert scale.multiply(torch.ones(2)).tolist() == [0.5, 0.5] and scale.divide(torch.ones(2)).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "scale, error, message",
    [
        (0.0, ValueError, "s: expected a finite number above 0, got 0.0"),
        (-1, ValueError, "s: expected a finite number above 0, got -1"),
        (float("nan"), ValueError, "s: expected a finite number above 0, got nan"),
        (float("inf"), ValueError, "s: expected a finite number above 0, got inf"),
        (True, TypeError, "s: expected None, a float or a one-element float32 tensor, got bool"),
        ("1", TypeError, "s: expected None, a float or a one-element float32 tensor, got str"),
        (torch.ones(1).half(), TypeError, "s: expected a one-element float32 tensor, got torch.float16"),
        (torch.ones(1, dtype=torch.int32), TypeError, "s: expected a one-element float32 tensor, got torch.int32"),
        (torch.ones(0), ValueError, r"s: expected a one-element float32 tensor, got shape \(0,\)"),
        (torch.ones(2), ValueError, r"s: expected a one-element float32 tensor, got shape \(2,\)"),
    ],
)
def test_what_is_no_scale(scale: object, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        Scale.of(scale, argument="s")  # type: ignore[arg-type]


def fp8(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float().to(E4M3)


@pytest.mark.parametrize("kind", ["float", "tensor"])
def test_scales_go_where_the_contract_puts_them(kind: str) -> None:
    """q_scale and k_scale on the logits, q_scale alone on the sink, v_scale on the output; q, K and V then equal those they stand for."""

    def given(value: float) -> float | torch.Tensor:
        return value if kind == "float" else torch.tensor([value])

    q, k, v = fp8(normal(TOKENS, Q_HEADS, HEAD_DIM)), make_cache(E4M3).k, make_cache(E4M3).v
    sink = normal(Q_HEADS, HEAD_DIM, dtype=torch.float32)
    cache = m3attn.LayerCache(k=k, v=v, k_scale=given(2.0), v_scale=given(0.5))
    out, lse = m3attn.dense_attention(q, cache, make_batch(), q_scale=given(4.0), sink_key=sink, return_lse=True)
    wide = m3attn.LayerCache(k=k.float() * 2, v=v.float() * 0.5)
    expected, expected_lse = m3attn.dense_attention(q.float() * 4, wide, make_batch(), sink_key=sink, return_lse=True)
    assert torch.allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
    assert torch.allclose(out.float(), expected, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("stage", ["sparse_attention", "dense_attention"])
def test_no_scale_is_bit_equal_to_one(stage: str) -> None:
    results = []
    for scale in (None, 1.0, torch.ones(1)):
        cache = replace(make_cache(E4M3), k_scale=scale, v_scale=scale)
        results.append(BUILDERS[stage]()(q=fp8(normal(TOKENS, Q_HEADS, HEAD_DIM)), cache=cache, q_scale=scale))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


def test_index_scales_multiply_scores_and_never_change_ids() -> None:
    index_q, plain = fp8(normal(TOKENS, KV_HEADS, HEAD_DIM)), make_cache(E4M3)
    scaled = replace(plain, index_k_scale=torch.tensor([3.0]))
    base = m3attn.index_score(index_q, plain, make_batch())
    assert torch.allclose(m3attn.index_score(index_q, scaled, make_batch(), index_q_scale=0.5), base * 1.5)
    ids = m3attn.index_topk(index_q, plain, make_batch(), topk=2)
    assert torch.equal(m3attn.index_topk(index_q, scaled, make_batch(), topk=2, index_q_scale=0.5), ids)


def test_fp8_queries_give_bf16_and_fp8_caches_keep_the_dtype_of_q() -> None:
    cache, batch = make_cache(E4M3), make_batch()
    q = normal(TOKENS, Q_HEADS, HEAD_DIM)
    assert m3attn.dense_attention(fp8(q), cache, batch).dtype == torch.bfloat16
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for kind in (E4M3, E5M2):
            assert m3attn.dense_attention(q.to(dtype), make_cache(kind), batch).dtype == dtype
