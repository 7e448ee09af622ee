"""Layers against the oracle: chunks, mixed steps, formats, ids reuse, rules, tensor parallelism, torch.compile, and Triton."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from oracle import CONFIG, hf_weights, make_cache, oracle

import m3attn
from m3attn import LayerCache, M3DenseAttention, M3SparseAttention, PlanCapacity, Shard, StepPlan
from m3attn.layers.rope import rotary_table
from m3attn.testing.matrix import DEVICE, MARKS, pick

SIZE, PAGES = 16, 40
FP32 = torch.float32
KINDS = {"sparse": M3SparseAttention, "dense": M3DenseAttention}
LENGTHS = (101, 70, 38)
STEPS = (((64, 20, 38), (64, 20, 38)), ((36, 1, 0), (100, 21, 38)), ((1, 49, 0), (101, 70, 0)))
"""(q_lens, seq_lens) of steps that together bring every token of LENGTHS: prefill, then chunks with decode rows before or after."""
SPLIT = {"decode": PlanCapacity(3, 4, 2), "prefill": PlanCapacity(3, 128, 64)}
WHOLE = {"prefill": PlanCapacity(4, 132, 64)}


def build(kind: str, config: m3attn.M3Config = CONFIG, *, weights: dict[str, torch.Tensor] | None = None, **options: Any) -> torch.nn.Module:
    layer = KINDS[kind](config, **{"page_size": SIZE, "dtype": FP32} | options)
    layer.load_hf(hf_weights(config, sparse=kind == "sparse") if weights is None else weights)
    return layer


def page_table(seed: int = 0) -> torch.Tensor:
    return torch.randperm(PAGES, generator=torch.Generator().manual_seed(seed))[:24].view(3, 8).int()


def hidden(seed: int, rows: int, config: m3attn.M3Config = CONFIG) -> torch.Tensor:
    return torch.randn(rows, config.hidden_size, generator=torch.Generator().manual_seed(seed))


def run_steps(layer: torch.nn.Module, plan: StepPlan, cache: LayerCache, requests: list[torch.Tensor], *, pad: bool = True) -> list[torch.Tensor]:
    """All STEPS through a layer: each request's outputs, [length, hidden]."""
    outputs: list[list[torch.Tensor]] = [[] for _ in requests]
    for q_lens, seq_lens in STEPS:
        plan.update(q_lens, seq_lens, page_table())
        rows = [x[length - n : length] for x, n, length in zip(requests, q_lens, seq_lens, strict=True)]
        x = torch.cat([*rows, torch.full(((plan.tokens - sum(q_lens)) * pad, requests[0].shape[1]), float("nan"))])
        out = layer(x.to(layer.qkv_proj), plan, cache)
        assert not out[sum(q_lens) :].any()
        for kept, part in zip(outputs, out[: sum(q_lens)].split(list(q_lens)), strict=True):
            kept.append(part)
    return [torch.cat(parts) for parts in outputs]


REQUESTS = [hidden(10 + i, n) for i, n in enumerate(LENGTHS)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capacities, pad", [(SPLIT, True), (WHOLE, True), (WHOLE, False)], ids=["split", "whole", "whole_unpadded"])
def test_chunked_mixed_steps_equal_the_whole_sequence(kind: str, capacities: dict[str, PlanCapacity], pad: bool) -> None:
    layer = build(kind)
    cache = make_cache(layer, PAGES)
    plan = StepPlan.for_layers([layer], [cache], 128, **capacities)
    for got, x in zip(run_steps(layer, plan, cache, REQUESTS, pad=pad), REQUESTS, strict=True):
        expected = oracle(x, hf_weights(CONFIG, sparse=kind == "sparse"), CONFIG, sparse=kind == "sparse")
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("capacities", [SPLIT, WHOLE], ids=["split", "whole"])
def test_index_keys_may_lie_on_other_pages(capacities: dict[str, PlanCapacity]) -> None:
    layer = build("sparse")
    outputs = []
    for own in (False, True):
        cache, twin = make_cache(layer, PAGES), make_cache(layer, PAGES + 7)
        cache = LayerCache(kv=cache.kv, index_k=twin.index_k if own else cache.index_k)
        plan = StepPlan.for_layers([layer], [cache], 128, own_index_pages=own, **capacities)
        if own:
            update = plan.update
            plan.update = lambda q_lens, seq_lens, table, update=update: update(q_lens, seq_lens, table, table.flip(1) + 7)
        outputs.append(run_steps(layer, plan, cache, REQUESTS))
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def test_the_selection_matters_in_these_tests() -> None:
    weights = hf_weights(CONFIG, sparse=True)
    sparse, dense = (oracle(REQUESTS[0], weights, CONFIG, sparse=s) for s in (True, False))
    assert (sparse - dense)[64:].abs().max() > 0.05


def test_both_spellings_and_a_prefix_load_and_wrong_weights_are_named() -> None:
    layer = build("sparse")
    want = {name: t.clone() for name, t in layer.state_dict().items()}
    prefix = "model.layers.3.self_attn."
    for indexer in (False, True):
        other = M3SparseAttention(CONFIG, page_size=SIZE, dtype=FP32)
        other.load_hf(hf_weights(CONFIG, sparse=True, prefix=prefix, indexer=indexer) | {"model.norm.weight": torch.ones(1)}, prefix)
        assert set(want) == set(other.state_dict()) and all(torch.equal(t, want[name]) for name, t in other.state_dict().items())
    good = hf_weights(CONFIG, sparse=True)
    with pytest.raises(ValueError, match="missing index_q_proj, index_k_proj, index_q_norm, index_k_norm"):
        layer.load_hf(hf_weights(CONFIG, sparse=False))
    with pytest.raises(ValueError, match="unknown index_k_norm, index_k_proj, index_q_norm, index_q_proj"):
        build("dense").load_hf(good)
    with pytest.raises(ValueError, match=r"k_proj: expected shape \[256, 48\], got \[128, 48\]"):
        layer.load_hf(good | {"k_proj.weight": torch.zeros(128, 48)})


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_layer_has_random_projections_and_norms_of_factor_one(kind: str) -> None:
    torch.manual_seed(0)
    layer = KINDS[kind](CONFIG, page_size=SIZE, dtype=FP32)
    weights = {name: t.clone() for name, t in layer.state_dict().items()}
    for name, weight in weights.items():
        if name.endswith("norm"):
            assert not weight.any()  # the factor is 1 + w
        else:
            assert 0.019 < weight.std() < 0.021 and weight.mean().abs() < 1e-3
    layer.qkv_proj.fill_(0)
    torch.manual_seed(0)
    layer.reset_parameters()
    assert all(torch.equal(t, weights[name]) for name, t in layer.state_dict().items())


WRONG_X = {
    "few": (torch.zeros(3, 48), ValueError, "x: expected the split plan's 132 rows .pad at the end., got 3"),
    "one_less": (torch.zeros(131, 48), ValueError, "x: expected the split plan's 132 rows .pad at the end., got 131"),
    "one_more": (torch.zeros(133, 48), ValueError, "x: expected the split plan's 132 rows .pad at the end., got 133"),
    "width": (torch.zeros(132, 64), ValueError, r"x: expected \[T, 48\], got \[132, 64\]"),
    "batched": (torch.zeros(1, 132, 48), ValueError, r"x: expected \[T, 48\], got \[1, 132, 48\]"),
    "dtype": (torch.zeros(132, 48, dtype=torch.bfloat16), TypeError, r"x: expected the layer's torch\.float32, got torch\.bfloat16"),
    "device": (torch.zeros(132, 48, device="meta"), ValueError, "x: expected a tensor on cpu, got one on meta"),
    "list": ([[0.0] * 48] * 132, TypeError, "x: expected a tensor, got list"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("x", "error", "message"), WRONG_X.values(), ids=WRONG_X)
def test_an_x_that_does_not_fit_is_refused_before_the_cache_is_written(kind: str, x: Any, error: type[Exception], message: str) -> None:
    layer = build(kind)
    cache = make_cache(layer, PAGES)
    plan = StepPlan.for_layers([layer], [cache], 128, **SPLIT)
    plan.update([3], [3], page_table()[:1])
    before = cache.kv.clone()
    with pytest.raises(error, match=f"^{message}"):
        layer(x, plan, cache)
    torch.testing.assert_close(cache.kv, before, rtol=0, atol=0, equal_nan=True)
    whole = StepPlan.for_layers([layer], [cache], 128, prefill=PlanCapacity(1, 8, 8))
    with pytest.raises(ValueError, match=r"^x: expected at most the plan's 8 rows, got 9"):
        layer(torch.zeros(9, 48), whole, cache)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_that_does_not_fit_is_refused_before_the_cache_is_written(kind: str) -> None:
    layer = build(kind)
    cache = make_cache(layer, PAGES)
    before = cache.kv.clone()
    other = build(kind, dataclasses.replace(CONFIG, num_q_heads=2))
    plan = StepPlan.for_layers([other], [make_cache(other, PAGES)], 128, **WHOLE)
    plan.update([3], [3], page_table()[:1])
    with pytest.raises(ValueError, match=r"^plan\.heads: expected \(Hq, Hkv\)"):
        layer(torch.zeros(3, 48), plan, cache)
    with pytest.raises(TypeError, match=r"^plan: expected a StepPlan, got LayerCache"):
        layer(torch.zeros(3, 48), cache, plan)
    torch.testing.assert_close(cache.kv, before, rtol=0, atol=0, equal_nan=True)


def by_stages(layer: torch.nn.Module, x: torch.Tensor, plan: StepPlan, cache: LayerCache, q_scale: Any, index_q_scale: Any) -> torch.Tensor:
    """A layer's step written with the stage functions."""
    row, tokens = x @ layer.qkv_proj.T, x.shape[0]
    q_out = torch.empty(tokens, layer.heads.q, 128, dtype=layer.q_dtype)
    index_q_out = torch.empty(tokens, layer.heads.index, 128, dtype=layer.index_q_dtype) if layer.sparse else None
    norms = [layer.q_norm, layer.k_norm, *([layer.index_q_norm, layer.index_k_norm] if layer.sparse else [])]
    slots = plan.slots[:tokens]
    q, index_q = m3attn.qk_norm_rope_insert(
        row,
        norms,
        plan.positions[:tokens],
        layer.cos_sin,
        cache,
        slots,
        slots if layer.sparse else None,
        heads=layer.heads,
        q_out=q_out,
        index_q_out=index_q_out,
        q_scale=q_scale,
        index_q_scale=index_q_scale,
    )
    batch = plan.parts[0].batch
    if layer.sparse:
        ids = m3attn.index_topk(index_q, cache, batch, topk=CONFIG.topk, index_q_scale=index_q_scale)
        out = m3attn.sparse_attention(q, cache, ids, batch, q_scale=q_scale)
    else:
        out = m3attn.dense_attention(q, cache, batch, q_scale=q_scale)
    return out.flatten(1).to(x.dtype) @ layer.o_proj.T


SCALES = {"k_scale": 0.05, "v_scale": torch.tensor([0.02])}
INDEX_SCALE = {"index_k_scale": 0.03}


@pytest.fixture
def fp8_on_cpu() -> Iterator[None]:
    """An implementation that declares fp8 attention for CPU tensors, as none of m3attn's own does."""
    from m3attn import registry

    for stage in ("sparse_attention", "dense_attention"):
        m3attn.register(stage, "fp8_here", registry.find(stage, "reference").load(), fp8_archs=("cpu",), auto=True)
    yield
    for stage in ("sparse_attention", "dense_attention"):
        m3attn.unregister(stage, "fp8_here")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "kv, index, mode, index_dtype",
    [("auto", None, "bf16", "bf16"), ("auto", "fp8", "bf16", "fp8_e4m3"), ("fp8", None, "fp8", "fp8_e4m3"), ("fp8_e5m2", None, "widen", "bf16")],
)
@pytest.mark.filterwarnings("ignore:kv_cache_dtype fp8_e5m2")
def test_formats_and_scales_reach_every_stage(kind: str, kv: str, index: str | None, mode: str, index_dtype: str, fp8_on_cpu: None) -> None:
    scale, index_scale = 0.04, torch.tensor([0.06])
    options = {"kv_cache_dtype": kv, "index_cache_dtype": index, "q_scale": scale, "index_q_scale": index_scale, "dtype": torch.bfloat16}
    layer = build(kind, **options)
    assert layer.mode.mode == mode and layer.mode.index_dtype == index_dtype
    scales = (SCALES if kv != "auto" else {}) | (INDEX_SCALE if kind == "sparse" and index_dtype != "bf16" else {})
    mine, twin = (make_cache(layer, PAGES, packed=packed, **scales) for packed in (True, False))
    plan = StepPlan.for_layers([layer], [mine], 128, prefill=PlanCapacity(3, 130, 64))
    plan.update(*STEPS[0], page_table())
    x = torch.cat([x[:n] for x, n in zip(REQUESTS, STEPS[0][0], strict=True)]).bfloat16()
    got = layer(x, plan, mine)
    is_fp8_index = kind == "sparse" and index_dtype != "bf16"
    expected = by_stages(layer, x, plan, twin, scale if mode == "fp8" else None, index_scale if is_fp8_index else None)
    assert torch.equal(got, expected)
    for a, b in zip(mine.key_value(), twin.key_value(), strict=True):
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_the_switch_gives_the_widen_results_bit_for_bit(fp8_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = {}
    for name in ("switched", "widen", "widen again"):
        if name == "switched":
            monkeypatch.setenv("M3ATTN_DISABLE_FP8_ATTN_GEMM", "1")
        elif name == "widen":
            monkeypatch.delenv("M3ATTN_DISABLE_FP8_ATTN_GEMM")
            for stage in ("sparse_attention", "dense_attention"):
                m3attn.unregister(stage, "fp8_here")
                m3attn.register(stage, "fp8_here", lambda call: None)
        layer = build("sparse", kv_cache_dtype="fp8", q_scale=0.04, fp8_pv=True, dtype=torch.bfloat16)
        cache = make_cache(layer, PAGES, **SCALES)
        assert layer.mode.mode == "widen"
        outputs[name] = run_steps(layer, StepPlan.for_layers([layer], [cache], 128, **SPLIT), cache, REQUESTS)
    if not all(torch.equal(a, b) for a, b in zip(outputs["widen"], outputs["widen again"], strict=True)):
        pytest.skip("the matrix products of this machine's torch differ from one run to the next")
    assert all(torch.equal(a, b) for a, b in zip(outputs["switched"], outputs["widen"], strict=True))


def test_ids_are_reused_only_when_asked_and_only_within_a_step() -> None:
    first, second = build("sparse"), build("sparse", reuse_ids=True)
    caches = [make_cache(first, PAGES), make_cache(second, PAGES, index=False)]
    plan = StepPlan.for_layers([first, second], caches, 128, **SPLIT)
    for q_lens, seq_lens in STEPS:
        plan.update(q_lens, seq_lens, page_table())
        rows = [x[length - n : length] for x, n, length in zip(REQUESTS, q_lens, seq_lens, strict=True)]
        x = torch.cat([*rows, torch.zeros(plan.tokens - sum(q_lens), CONFIG.hidden_size)])
        with pytest.raises(ValueError, match=r"plan\.ids: expected ids of this step for 2 KV heads, K 3 and 132 rows to reuse, got none"):
            second(x, plan, caches[1])
        expected = first(x, plan, caches[0])
        assert torch.equal(second(x, plan, caches[1]), expected)
    plan.ids_of = (2, 5, 132)
    with pytest.raises(ValueError, match="got 2 heads, K 5 and 132 rows"):
        second(x, plan, caches[1])
    whole = StepPlan.for_layers([first, second], caches, 128, **WHOLE)
    whole.update([3], [3], page_table()[:1])
    first(x[:3], whole, caches[0])
    with pytest.raises(ValueError, match="K 3 and 4 rows to reuse, got 2 heads, K 3 and 3 rows"):
        second(x[:4], whole, caches[1])


def test_the_ids_buffer_may_hold_anything_between_layers() -> None:
    layer = build("sparse")
    cache = make_cache(layer, PAGES)
    plan = StepPlan.for_layers([layer], [cache], 128, **SPLIT)
    clean = run_steps(layer, plan, cache, REQUESTS)

    def poison(*_: Any) -> None:
        plan.ids.fill_(2**31 - 1)

    layer.register_forward_pre_hook(poison)
    poisoned = run_steps(layer, plan, make_cache(layer, PAGES), REQUESTS)
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))


def test_each_part_takes_the_implementation_of_its_phase() -> None:
    from m3attn import registry

    seen: dict[str, list[int]] = {"only_decode": [], "only_prefill": []}
    reference = registry.find("sparse_attention", "reference").load()
    try:
        for key, phases in (("only_decode", ("decode", "verify")), ("only_prefill", ("prefill",))):

            def target(call: Any, key: str = key) -> None:
                seen[key].append(call.q.shape[0])
                reference(call)

            limits = m3attn.Capabilities(cpu="yes", phases=phases)
            m3attn.register("sparse_attention", key, target, capabilities=limits, workspace=lambda shape: 64 * shape.tokens, auto=True)
        layer = build("sparse")
        cache = make_cache(layer, PAGES)
        plan = StepPlan.for_layers([layer], [cache], 128, **SPLIT)
        assert plan.workspace is not None and plan.workspace.numel() == 64 * 128
        torch._dynamo.reset()
        plan.update([1, 3], [1, 3], page_table()[:2])
        x = hidden(3, plan.tokens)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x, plan, make_cache(layer, PAGES)), layer(x, plan, make_cache(layer, PAGES)))
        for rows in seen.values():
            rows.clear()
        for got, x in zip(run_steps(layer, plan, cache, REQUESTS), REQUESTS, strict=True):
            expected = oracle(x, hf_weights(CONFIG, sparse=True), CONFIG, sparse=True)
            torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)
    finally:
        for key in seen:
            m3attn.unregister("sparse_attention", key)
    assert seen == {"only_decode": [4] * 3, "only_prefill": [128] * 3}


@pytest.mark.parametrize("formats", [{}, {"kv_cache_dtype": "fp8"}], ids=["fp32", "fp8"])
def test_the_plan_asks_for_scratch_with_the_shapes_that_calls_have(formats: dict[str, Any], fp8_on_cpu: None) -> None:
    from m3attn import registry

    stages, shapes = ("index_topk", "sparse_attention", "dense_attention"), []
    try:
        for stage in stages:

            def scratch(shape: Any, stage: str = stage) -> int:
                shapes.append((stage, shape))
                return 256

            m3attn.register(stage, "asks", registry.find(stage, "reference").load(), workspace=scratch, fp8_archs=("cpu",), auto=True)
        layers = [build(kind, **formats) for kind in KINDS]
        caches = [make_cache(layer, PAGES) for layer in layers]
        plan = StepPlan.for_layers(layers, caches, 128, **SPLIT)
        asked = list(shapes)
        assert len(asked) == 6 and plan.workspace is not None
        shapes.clear()
        plan.update(*STEPS[0], page_table())
        for layer, cache in zip(layers, caches, strict=True):
            layer(hidden(1, plan.tokens), plan, cache)
        assert sorted(map(str, shapes)) == sorted(map(str, asked))
    finally:
        for stage in stages:
            m3attn.unregister(stage, "asks")


def sum_of_ranks(config: m3attn.M3Config, size: int, requests: list[torch.Tensor], kind: str, **options: Any) -> list[torch.Tensor]:
    """Every rank in turn, without a process group; the outputs added."""
    table = rotary_table(config.max_position, config.rotary_dim, config.rope_theta, device=options.get("device"))
    total: list[torch.Tensor] = []
    for rank in range(size):
        weights = hf_weights(config, sparse=kind == "sparse")
        layer = build(kind, config, weights=weights, shard=Shard(rank, size), cos_sin=table, **options)
        cache = make_cache(layer, PAGES)
        plan = StepPlan.for_layers([layer], [cache], 128, **WHOLE)
        part = run_steps(layer, plan, cache, requests, pad=False)
        total = [a + b for a, b in zip(total, part, strict=True)] if total else part
    return total


@pytest.mark.parametrize("rule", ["topk", "shared_heads", "window"])
@pytest.mark.parametrize("kv_heads, size", [(2, 2), (1, 2), (2, 4)])
def test_ranks_in_turn_sum_to_one(kv_heads: int, size: int, rule: str) -> None:
    config = dataclasses.replace(CONFIG, num_kv_heads=kv_heads, num_index_heads=kv_heads)
    one, many = (sum_of_ranks(config, n, REQUESTS, "sparse", rule=rule) for n in (1, size))
    for a, b in zip(one, many, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=MARKS) for kind in KINDS])
def test_eight_ranks_of_m3_sum_to_one(kind: str) -> None:
    config = m3attn.M3Config(hidden_size=32, block_size=16, topk=2, max_position=128, sparse_layers=(True,))
    requests = [hidden(20 + i, n, config) for i, n in enumerate(LENGTHS)]
    one, many = (sum_of_ranks(config, size, requests, kind, device=DEVICE) for size in (1, 8))
    for a, b in zip(one, many, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_shards_that_do_not_divide_the_heads_are_refused() -> None:
    config = dataclasses.replace(CONFIG, num_q_heads=12, num_kv_heads=4, num_index_heads=4)
    for size, message in ((5, "divides the 12 query heads, got 5"), (6, "divides the 4 KV heads or is a multiple of them, got 6")):
        with pytest.raises(ValueError, match=message):
            M3SparseAttention(config, page_size=SIZE, shard=Shard(0, size))
    with pytest.raises(ValueError, match="shard: expected a rank from 0 to size - 1, got rank 2 of 2"):
        Shard(2, 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capacities", [SPLIT, WHOLE], ids=["split", "whole"])
@pytest.mark.parametrize("formats", [{}, {"kv_cache_dtype": "fp8", "index_q_scale": 0.1}], ids=["fp32", "fp8"])
def test_a_layer_compiles_whole_and_recompiles_at_most_once(
    kind: str, capacities: dict[str, PlanCapacity], formats: dict[str, Any], fp8_on_cpu: None
) -> None:
    torch._dynamo.reset()
    layer = build(kind, **formats)
    assert layer.mode.mode == ("fp8" if formats else "fp32")
    mine, twin = make_cache(layer, PAGES), make_cache(layer, PAGES)
    plan = StepPlan.for_layers([layer], [mine], 128, **capacities)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    pad = capacities is SPLIT
    expected = run_steps(layer, plan, twin, REQUESTS, pad=pad)

    class Compiled:
        qkv_proj = layer.qkv_proj

        def __call__(self, *arguments: Any) -> torch.Tensor:
            return compiled(*arguments)

    got = run_steps(Compiled(), plan, mine, REQUESTS, pad=pad)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert torch.equal(mine.kv.view(torch.uint8), twin.kv.view(torch.uint8))
    assert counter.frame_count <= 2


@pytest.mark.skipif(not m3attn.registry.interpreter_enabled() and not torch.cuda.is_available(), reason="needs a GPU or Triton's interpreter")
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=MARKS) for kind in KINDS])
def test_triton_runs_a_mixed_step(kind: str) -> None:
    """A decoded token behind another request's prompt; on a GPU with M3's heads, blocks and K, and more blocks than it keeps."""
    config = pick(dataclasses.replace(CONFIG, topk=2), m3attn.M3Config(hidden_size=512, max_position=4096, sparse_layers=(False, True)))
    size, (short, long) = pick(SIZE, 128), pick((20, 34), (2_300, 2_400))
    layer = build(kind, config, implementation="triton", page_size=size, device=DEVICE)
    assert set(layer.mode.implementations.values()) == {"triton"}
    xs, counts = [hidden(30, short, config), hidden(31, long, config)], [-(-short // size), -(-long // size)]
    cache = make_cache(layer, sum(counts) + 1)
    pages = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(0)).tolist()
    table = [pages[: counts[0]], pages[counts[0] : sum(counts)]]
    capacity = max(counts) * size
    plan = StepPlan.for_layers([layer], [cache], capacity, decode=PlanCapacity(1, 1, 1), prefill=PlanCapacity(1, long + 2, long))
    whole = StepPlan.for_layers([layer], [cache], capacity, prefill=PlanCapacity(1, short, short))
    whole.update([short - 1], [short - 1], table[:1])
    layer(xs[0][:-1].to(DEVICE), whole, cache)
    plan.update([long, 1], [long, short], table[::-1])
    padding = torch.full((2, config.hidden_size), float("nan"))
    got = layer(torch.cat([xs[1], xs[0][-1:], padding]).to(DEVICE), plan, cache)
    assert not got[-2:].any()
    weights = hf_weights(config, sparse=kind == "sparse")
    expected = [oracle(x.to(DEVICE), weights, config, sparse=kind == "sparse") for x in xs]
    torch.testing.assert_close(got[:-2].double(), torch.cat([expected[1], expected[0][-1:]]), rtol=1e-3, atol=1e-3)
