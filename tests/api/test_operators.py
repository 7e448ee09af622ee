"""Operators of torch.library: opcheck, and fullgraph compiles that equal eager, recompile at most once and never copy a cache."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from stage_calls import (
    HEAD_DIM,
    KV_HEADS,
    NORM_DIM,
    PAGE,
    PAGES,
    Q_HEADS,
    TOKENS,
    TOPK,
    make_batch,
    make_cache,
    make_ids,
    normal,
)

import m3attn
from m3attn.operators import pack, pack_batch, pack_index_cache, pack_kv_cache
from m3attn.registry import STAGES

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16 = torch.bfloat16
ops = torch.ops.m3attn
device_scale = torch.tensor([0.5])
NO_SCALE = (1.0, None)
WEIGHTS = m3attn.NormWeights(*(normal(NORM_DIM, dtype=torch.float32, seed=s) for s in range(4)))
COS_SIN = normal(64, 64, dtype=torch.float32)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def fp8(tensor: torch.Tensor, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return tensor.float().to(dtype)


def scaled(cache: m3attn.LayerCache) -> m3attn.LayerCache:
    return m3attn.LayerCache(
        k=cache.k, v=cache.v, kv=cache.kv, index_k=cache.index_k, k_scale=2.0, v_scale=torch.tensor([1.5]), index_k_scale=torch.tensor([3.0])
    )


def attention(q: torch.Tensor, cache: m3attn.LayerCache, *, scale: tuple = NO_SCALE, sink: torch.Tensor | None = None, fp8_pv: bool = False) -> tuple:
    return (*pack(q), *pack_kv_cache(cache), cache.zero_on_alloc, *pack_batch(make_batch()), None, *scale, sink, fp8_pv, None)


Q, INDEX_Q = normal(TOKENS, Q_HEADS, HEAD_DIM), normal(TOKENS, KV_HEADS, HEAD_DIM)
ATTENTION: dict[str, tuple] = {
    "bf16": attention(Q, make_cache(), sink=normal(Q_HEADS, HEAD_DIM)),
    "fp32": attention(Q.float(), make_cache(torch.float32)),
    "packed": attention(Q, make_cache(packed=True)),
    "widen e5m2 packed": attention(Q, make_cache(E5M2, packed=True, index=BF16)),
    "fp8 scaled": attention(fp8(Q), scaled(make_cache(E4M3)), scale=(1.0, device_scale)),
    "fp8_pv": attention(fp8(Q), make_cache(E4M3), scale=(0.5, None), fp8_pv=True),
}


def attention_outputs(name: str) -> tuple:
    dtype = torch.float32 if name == "fp32" else BF16
    return torch.zeros(TOKENS, Q_HEADS, HEAD_DIM, dtype=dtype), torch.zeros(TOKENS, Q_HEADS)


def index(index_q: torch.Tensor, cache: m3attn.LayerCache, scale: tuple = NO_SCALE) -> tuple:
    return (*pack(index_q), *pack_index_cache(cache), *pack_batch(make_batch()), *scale)


INDEX: dict[str, tuple] = {
    "bf16": index(INDEX_Q, make_cache()),
    "fp8": index(fp8(INDEX_Q), scaled(make_cache(E4M3)), (1.0, device_scale)),
    "mixed": index(INDEX_Q, make_cache(BF16, index=E4M3)),
}
SCORES = normal(KV_HEADS, TOKENS, 3, dtype=torch.float32)
IDS = make_ids()
TOKEN_MAJOR = torch.zeros(TOKENS + 3, KV_HEADS, TOPK, dtype=torch.int32).transpose(0, 1)[:, :TOKENS]


def norm(dtype: torch.dtype = BF16, **changes: Any) -> dict[str, Any]:
    """Arguments of qk_norm_rope_insert_out by name."""
    width = (Q_HEADS + 2 * KV_HEADS + KV_HEADS + 1) * NORM_DIM
    cache = make_cache(dtype, packed=True, dim=NORM_DIM)
    slots = torch.arange(TOKENS)
    base = {
        "qkv": normal(TOKENS, width),
        **{f"{name}_weight": w for name, w in zip(WEIGHTS._fields, WEIGHTS, strict=True)},
        **{"positions": slots, "cos_sin": COS_SIN, "kv": pack(cache.kv)[0], "v": None, "kv_dtype": pack(cache.kv)[1]},
        **{"k_scale": 1.0, "k_scale_tensor": None, "v_scale": 1.0, "v_scale_tensor": None},
        **{"index_k": pack(cache.index_k)[0], "index_dtype": pack(cache.index_k)[1], "index_k_scale": 1.0, "index_k_scale_tensor": None},
        **{"slots": slots, "index_slots": slots * 2, "q_heads": Q_HEADS, "kv_heads": KV_HEADS, "index_heads": KV_HEADS, "eps": 1e-6},
        **{"q_out": None, "q_out_dtype": None, "index_q_out": None, "index_q_out_dtype": None, "skip_index": False},
        **{"q_scale": 1.0, "q_scale_tensor": None, "index_q_scale": 1.0, "index_q_scale_tensor": None, "impl": None},
    }
    return base | changes


def norm_functional(**changes: Any) -> tuple:
    names = ("qkv", "q_weight", "k_weight", "index_q_weight", "index_k_weight", "positions", "cos_sin")
    names += ("q_heads", "kv_heads", "index_heads", "eps", "skip_index", "impl")
    return tuple(norm(**changes)[name] for name in names)


E4M3_BYTES = {
    "q_out": torch.zeros(TOKENS, Q_HEADS, NORM_DIM, dtype=torch.uint8),
    "index_q_out": torch.zeros(TOKENS, KV_HEADS, NORM_DIM, dtype=torch.uint8),
}
NORM: dict[str, dict[str, Any]] = {
    "packed": norm(),
    "packed fp8": norm(E4M3, **E4M3_BYTES, q_out_dtype="fp8_e4m3", index_q_out_dtype="fp8_e4m3", q_scale_tensor=device_scale, k_scale=2.0),
    "separate": norm(kv=make_cache(dim=NORM_DIM).k, v=make_cache(dim=NORM_DIM).v),
    "in place": norm(kv=None, index_k=None, slots=None, index_slots=None),
}
X, X32 = normal(3, 5, 32), normal(6, 16, dtype=torch.float32)
QUANTIZE: dict[str, tuple] = {
    "none": (X, "static", 1.0, None, "fp8_e4m3", False, None),
    "float": (X, "static", 0.5, None, "fp8_e5m2", False, None),
    "tensor": (X32, "static", 1.0, device_scale, "fp8_e4m3", True, None),
    "dynamic": (X, "tensor", 1.0, None, "fp8_e4m3", False, None),
    "rows": (X32, "row", 1.0, None, "fp8_e4m3", False, None),
}
SCALE_OUT = {"none": None, "float": None, "tensor": None, "dynamic": torch.zeros(1), "rows": torch.zeros(6)}
PARTS = (Q, normal(TOKENS, Q_HEADS, dtype=torch.float32), Q + 1, normal(TOKENS, Q_HEADS, dtype=torch.float32, seed=1), None)

MLA_HEADS, MLA_PE = normal(TOKENS, Q_HEADS, 48), normal(TOKENS, 1, 16)
ROTATION = (torch.arange(TOKENS), normal(64, 16, dtype=torch.float32))
MLA_ROPE: dict[str, tuple] = {
    "plain": (MLA_HEADS, MLA_HEADS[..., :32], MLA_PE, *ROTATION, False, *NO_SCALE, *NO_SCALE, None),
    "scaled": (MLA_HEADS, MLA_HEADS[..., 16:], MLA_PE[:, 0], *ROTATION, True, 0.5, None, 1.0, device_scale, None),
}
MLA_PACK: dict[str, tuple] = {
    "plain": (MLA_HEADS[..., :32], MLA_PE, MLA_HEADS[..., 32:], *NO_SCALE, *NO_SCALE, None),
    "scaled": (MLA_HEADS[..., :32], MLA_PE[:, 0], MLA_HEADS, 0.5, None, 1.0, device_scale, None),
}


SPARSE_MLA_Q, LATENT_KV = normal(TOKENS, 2, 576), normal(8, 1, 576)
SPARSE_MLA_INDICES = (torch.arange(TOKENS * 4, dtype=torch.int32) % 9 - 1).view(TOKENS, 1, 4)
SPARSE_MLA: dict[str, tuple] = {
    "bf16": (SPARSE_MLA_Q, None, LATENT_KV, None, SPARSE_MLA_INDICES, 0.05, 512, *NO_SCALE, *NO_SCALE, None, None, True, None),
    "fp8": (
        *(*pack(fp8(SPARSE_MLA_Q)), *pack(fp8(LATENT_KV)), SPARSE_MLA_INDICES, 0.05, 512, 0.5, None, 1.0, device_scale),
        *(torch.arange(TOKENS, dtype=torch.int32), torch.zeros(2), True, None),
    ),
}


MLA_OFFSETS = torch.tensor([0, 3, TOKENS], dtype=torch.int32)
MLA_PREFILL: dict[str, tuple] = {
    "bf16": (Q, Q + 1, Q + 2, None, MLA_OFFSETS, MLA_OFFSETS, True, None, *NO_SCALE * 3, False, None),
    "fp8": (*(pack(fp8(Q))[0],) * 3, "fp8_e4m3", MLA_OFFSETS, MLA_OFFSETS, False, 0.1, 0.5, None, 1.0, device_scale, *NO_SCALE, True, None),
}


def e4m3_bytes(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


CHECKS: list[tuple[str, str, tuple]] = [
    *(
        (f"{s}_attention", n, (*a, *((IDS,) if s == "sparse" else ()), lse))
        for s in ("sparse", "dense")
        for n, a in ATTENTION.items()
        for lse in (True,)
    ),
    *((f"{s}_attention", "without lse", (*ATTENTION["bf16"], *((IDS,) if s == "sparse" else ()), False)) for s in ("sparse", "dense")),
    *(
        (f"{s}_attention_out", n, (*a, *((IDS,) if s == "sparse" else ()), *attention_outputs(n), None))
        for s in ("sparse", "dense")
        for n, a in ATTENTION.items()
    ),
    *(("index_score", n, (*a, None)) for n, a in INDEX.items()),
    *(("index_score_out", n, (*a, None, torch.zeros(KV_HEADS, TOKENS, 3))) for n, a in INDEX.items()),
    *(("index_topk", n, (*a, TOPK, 0, 1, None)) for n, a in INDEX.items()),
    *(("index_topk_out", n, (*a, TOPK, 0, 1, None, TOKEN_MAJOR, None)) for n, a in INDEX.items()),
    ("select_blocks", "plain", (SCORES, *pack_batch(make_batch()), TOPK, 0, 1, None)),
    ("select_blocks_out", "token-major", (SCORES, *pack_batch(make_batch()), TOPK, 0, 1, None, TOKEN_MAJOR)),
    ("merge_attention_states", "plain", PARTS),
    ("merge_attention_states_out", "plain", (*PARTS, torch.zeros_like(Q), torch.zeros(TOKENS, Q_HEADS))),
    ("qk_norm_rope_insert", "in place", norm_functional()),
    ("qk_norm_rope_insert", "skip index", norm_functional(skip_index=True)),
    *(("qk_norm_rope_insert_out", n, tuple(a.values())) for n, a in NORM.items()),
    *(("quantize_fp8", n, a) for n, a in QUANTIZE.items()),
    *(("quantize_fp8_out", n, (*a, torch.zeros(a[0].shape, dtype=torch.uint8), SCALE_OUT[n])) for n, a in QUANTIZE.items()),
    *(("mla_rope_quantize", n, a) for n, a in MLA_ROPE.items()),
    *(("mla_rope_quantize_out", n, (*a, e4m3_bytes(*a[0].shape), e4m3_bytes(*a[0].shape))) for n, a in MLA_ROPE.items()),
    *(("mla_prefill", n, (*a, lse)) for n, a in MLA_PREFILL.items() for lse in (True, False)),
    *(("mla_prefill_out", n, (*a, *attention_outputs(n))) for n, a in MLA_PREFILL.items()),
    *(("sparse_mla_prefill", n, a) for n, a in SPARSE_MLA.items()),
    *(
        ("sparse_mla_prefill_out", n, (*a, torch.zeros(TOKENS, 2, 512, dtype=BF16), torch.zeros(TOKENS, 2), torch.zeros(TOKENS, 2)))
        for n, a in SPARSE_MLA.items()
    ),
    *(("mla_kv_pack_quantize", n, a) for n, a in MLA_PACK.items()),
    *(("mla_kv_pack_quantize_out", n, (*a, e4m3_bytes(TOKENS, Q_HEADS, 48), e4m3_bytes(*a[2].shape))) for n, a in MLA_PACK.items()),
]


@pytest.mark.parametrize("name, case, arguments", CHECKS, ids=[f"{name}-{case.replace(' ', '_')}" for name, case, _ in CHECKS])
def test_opcheck(name: str, case: str, arguments: tuple) -> None:
    torch.library.opcheck(getattr(ops, name).default, arguments)


def test_every_stage_has_a_functional_and_an_out_operator_that_are_checked() -> None:
    assert {name for name, *_ in CHECKS} == {f"{stage}{suffix}" for stage in STAGES for suffix in ("", "_out")}
    for stage in STAGES:
        functional, out = (getattr(ops, f"{stage}{suffix}").default._schema for suffix in ("", "_out"))
        assert not functional.is_mutable and functional.returns
        assert out.is_mutable and not out.returns


def layer(qkv: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, cache: m3attn.LayerCache, batch: m3attn.PagedBatch) -> tuple:
    """All stages of a sparse layer, one after another."""
    kinds = {"q_out": None, "index_q_out": None}
    if cache.kv.dtype == E4M3:
        kinds = {name: torch.empty(qkv.shape[0], heads, NORM_DIM, dtype=E4M3) for name, heads in (("q_out", Q_HEADS), ("index_q_out", KV_HEADS))}
    heads = (Q_HEADS, KV_HEADS, KV_HEADS)
    q, index_q = m3attn.qk_norm_rope_insert(qkv, WEIGHTS, positions, COS_SIN, cache, slots, slots, heads=heads, **kinds)
    ids = m3attn.select_blocks(m3attn.index_score(index_q, cache, batch), batch, topk=TOPK)
    fused = m3attn.index_topk(index_q, cache, batch, topk=TOPK)
    sparse, sparse_lse = m3attn.sparse_attention(q, cache, ids, batch, return_lse=True)
    dense, dense_lse = m3attn.dense_attention(q, cache, batch, return_lse=True)
    merged, lse = m3attn.merge_attention_states(sparse, sparse_lse, dense, dense_lse)
    quantized, scale = m3attn.quantize_fp8(merged, scale="row")
    return ids, fused, dense, merged, lse, quantized, scale


def layer_inputs(q_lens: tuple[int, ...], seq_lens: tuple[int, ...], dtype: torch.dtype = BF16) -> tuple:
    tokens = sum(q_lens)
    width = (Q_HEADS + 3 * KV_HEADS + 1) * NORM_DIM
    cache = make_cache(dtype, packed=True, dim=NORM_DIM)
    return normal(tokens, width), torch.arange(tokens), torch.arange(tokens) * 2, cache, make_batch(q_lens, seq_lens)


def assert_same(got: tuple, expected: tuple) -> None:
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), f"result {number} differs from eager"


STEPS = [((5, 1, 2), (40, 17, 2)), ((7, 1, 2), (60, 17, 2)), ((3, 2, 4), (33, 25, 20)), ((4, 1, 9), (30, 20, 100))]
"""Lengths, token counts and both host bounds change."""


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["bf16", "fp8"])
@torch.no_grad()
def test_a_layer_compiles_whole_and_recompiles_at_most_once(dtype: torch.dtype) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for q_lens, seq_lens in STEPS:
        inputs, twin = layer_inputs(q_lens, seq_lens, dtype), layer_inputs(q_lens, seq_lens, dtype)
        assert_same(compiled(*inputs), layer(*twin))
        assert_same((inputs[0], inputs[3].kv, inputs[3].index_k), (twin[0], twin[3].kv, twin[3].index_k))
        assert not torch.equal(inputs[3].kv.view(torch.uint8), make_cache(dtype, packed=True, dim=NORM_DIM).kv.view(torch.uint8))
    assert counter.frame_count <= 2


@torch.no_grad()
def test_caller_owned_outputs_are_filled_under_compile() -> None:
    cache, batch = make_cache(), make_batch()

    def run(q, index_q, scores, ids, out, lse, x8) -> tuple:
        m3attn.index_score(index_q, cache, batch, out=scores)
        m3attn.index_topk(index_q, cache, batch, topk=TOPK, out=ids)
        result = m3attn.sparse_attention(q, cache, ids, batch, out=out, lse_out=lse)
        m3attn.dense_attention(q, cache, batch, lse_out=lse)
        m3attn.quantize_fp8(q, out=x8)
        return result

    def buffers() -> tuple:
        ids = torch.full((TOKENS + 3, KV_HEADS, TOPK), 2**30, dtype=torch.int32)
        return torch.zeros(KV_HEADS, TOKENS, 3), ids.transpose(0, 1)[:, :TOKENS], *attention_outputs("bf16"), torch.zeros(Q.shape).to(E4M3)

    compiled, eager = buffers(), buffers()
    got = torch.compile(run, backend="aot_eager", fullgraph=True)(Q, INDEX_Q, *compiled)
    assert_same((*compiled, *got), (*eager, *run(Q, INDEX_Q, *eager)))


def insert(pool: torch.Tensor, index_k: torch.Tensor, qkv: torch.Tensor, slots: torch.Tensor, **formats: Any) -> torch.Tensor:
    cache = m3attn.LayerCache(kv=pool, index_k=index_k, **formats)
    q, index_q = m3attn.qk_norm_rope_insert(qkv, WEIGHTS, slots, COS_SIN, cache, slots, slots, heads=(Q_HEADS, KV_HEADS, KV_HEADS))
    return m3attn.sparse_attention(q, cache, m3attn.index_topk(index_q, cache, make_batch(), topk=TOPK), make_batch())


def insert_uint8(*arguments: torch.Tensor) -> torch.Tensor:
    return insert(*arguments, kv_dtype="fp8", index_dtype="fp8_e4m3")


def insert_layers(pool: torch.Tensor, index_k: torch.Tensor, qkv: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Two layers whose caches are views of one allocation."""
    for number in range(2):
        cache = m3attn.LayerCache(k=pool[number, 0], v=pool[number, 1], index_k=index_k[number])
        q, _ = m3attn.qk_norm_rope_insert(qkv, WEIGHTS, slots, COS_SIN, cache, slots, slots, heads=(Q_HEADS, KV_HEADS, KV_HEADS))
    return m3attn.dense_attention(q, cache, make_batch())


def pools(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    if kind == "layers":
        return normal(2, 2, PAGES, KV_HEADS, PAGE, NORM_DIM), normal(2, PAGES, PAGE, NORM_DIM)
    cache = make_cache(BF16 if kind == "bf16" else E4M3, packed=True, dim=NORM_DIM)
    return (cache.kv.view(torch.uint8), cache.index_k.view(torch.uint8)) if kind == "uint8" else (cache.kv, cache.index_k)


INSERTS: dict[str, Callable[..., torch.Tensor]] = {"bf16": insert, "fp8": insert, "uint8": insert_uint8, "layers": insert_layers}


@pytest.mark.parametrize("kind", INSERTS)
@torch.no_grad()
def test_inductor_writes_the_cache_in_place_and_copies_no_pool(kind: str) -> None:
    from torch._inductor.utils import run_and_get_code

    run = INSERTS[kind]
    slots = torch.arange(TOKENS)
    rows = [normal(TOKENS, (Q_HEADS + 3 * KV_HEADS + 1) * NORM_DIM) for _ in range(2)]
    mine, twins = pools(kind), pools(kind)
    got, code = run_and_get_code(torch.compile(run, backend="inductor", fullgraph=True), *mine, rows[0], slots)
    assert_same((got, *mine, rows[0]), (run(*twins, rows[1], slots), *twins, rows[1]))
    assert not torch.equal(mine[0].view(torch.uint8), pools(kind)[0].view(torch.uint8))
    wrapper = code[0][code[0].index("def call(") :]
    pool_bytes = min(p.nbytes for p in mine)
    for shape, dtype in re.findall(r"empty_strided_cpu\(\(([\d, ]*)\), \([\d, ]*\), torch\.(\w+)\)", wrapper):
        size = getattr(torch, dtype).itemsize
        for n in filter(None, shape.replace(" ", "").split(",")):
            size *= int(n)
        assert size < pool_bytes, f"a buffer of {size} bytes, as large as a pool: {shape} {dtype}"
    assert not re.search(r"\bcpp_fused_\w+\(.*\barg[01]_1\b", wrapper), "a generated kernel touches a pool"
    assert "clone" not in wrapper


def test_gradients_are_refused_by_operators_and_under_compile() -> None:
    cache, batch = make_cache(torch.float32), make_batch()
    q = Q.float().requires_grad_()
    remedy = r"m3attn::dense_attention is forward only and an input requires grad: call under torch.no_grad\(\), or pass impl='reference'"
    with pytest.raises(NotImplementedError, match=remedy):
        ops.dense_attention(*attention(q, cache), False)
    compiled = torch.compile(lambda q: m3attn.dense_attention(q, cache, batch), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"NotImplementedError"):
        compiled(q)
    with torch.no_grad():
        assert torch.equal(compiled(q), m3attn.dense_attention(q, cache, batch))


@torch.no_grad()
def test_choices_in_force_hold_for_compiled_calls() -> None:
    def run(scores: torch.Tensor) -> torch.Tensor:
        return m3attn.select_blocks(scores, make_batch(), topk=TOPK)

    m3attn.register("select_blocks", "fives", lambda call: call.out.__setitem__(..., 5))
    try:
        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(SCORES), run(SCORES))
        with m3attn.use("fives"):
            assert compiled(SCORES).eq(5).all()
        assert torch.equal(compiled(SCORES), run(SCORES))
    finally:
        m3attn.unregister("select_blocks", "fives")


def test_operators_check_their_input_too() -> None:
    with pytest.raises(ValueError, match=r"scores: expected 3 columns, .*got 2"):
        ops.select_blocks(SCORES[..., :2], *pack_batch(make_batch()), TOPK, 0, 1, None)
    with pytest.raises(TypeError, match=r"out: expected torch.int32, got torch.int64"):
        ops.select_blocks_out(SCORES, *pack_batch(make_batch()), TOPK, 0, 1, None, TOKEN_MAJOR.long())
    out, lse = torch.zeros_like(Q), torch.zeros(TOKENS, Q_HEADS)
    with pytest.raises(ValueError, match=r"out: expected a buffer of its own, got one that overlaps out_a"):
        ops.merge_attention_states_out(*PARTS, PARTS[0], lse)
    with pytest.raises(ValueError, match=r"out: expected shape \[8, 4, 64\], got \[7, 4, 64\]"):
        ops.merge_attention_states_out(*PARTS, out[1:], lse)
    with pytest.raises(TypeError, match=r"lse: expected torch.float32, got torch.bfloat16"):
        ops.merge_attention_states_out(*PARTS, out, lse.to(BF16))
