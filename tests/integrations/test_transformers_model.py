"""A prepared MiniMax-M3 of transformers against its own eager path: logits, ids, greedy tokens, caches, padding, beams, fp8."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers.models.minimax_m3_vl")

from small_m3 import configuration, kl, modeling, ours, overlap, small_m3, theirs, tokens
from transformers import CompileConfig, DynamicCache, StaticCache

import m3attn
from m3attn.integrations.transformers import prepare, unprepare
from m3attn.integrations.transformers.cache import PagedLayer

LENGTH = 100
"""Seven blocks of 16, of which three are kept."""


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def greedy(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, new: int = 24, **options: Any) -> torch.Tensor:
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **options)[:, ids.shape[1] :]


def test_prefill_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = small_m3(), tokens(2, LENGTH)
    with theirs(model) as expected_ids:
        expected = model(ids).logits
    prepare(model)
    with ours(monkeypatch) as got_ids:
        got = model(ids).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(ids, use_cache=False).logits, got, rtol=0, atol=0)
    assert len(got_ids) == len(expected_ids) == 2
    for chosen, want in zip(got_ids, expected_ids, strict=True):
        in_order = torch.where(want < 0, 1 << 20, want).sort(-1).values
        in_order = torch.where(in_order == 1 << 20, -1, in_order).transpose(0, 1).flatten(1, 2)
        assert torch.equal(chosen.long(), in_order)
    unprepare(model)
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 40},
        {"num_beams": 3},
        {"num_beams": 2, "cache_implementation": "static"},
        {"num_beams": 4, "num_return_sequences": 2},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=str,
)
def test_generate_the_same_tokens(options: dict[str, Any]) -> None:
    model = small_m3()
    ids = tokens(1 if "prompt_lookup_num_tokens" in options else 2, LENGTH, seed=1)
    expected = greedy(model, ids, **options)
    got = greedy(prepare(model), ids, **options)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_padded_rows_equal_their_sequences_alone(side: str, cache: str) -> None:
    model, lengths = prepare(small_m3()), (LENGTH, 71, 5, 33)
    alone = [tokens(1, n, seed=n) for n in lengths]
    ids, mask = torch.zeros(len(lengths), LENGTH, dtype=torch.long), torch.zeros(len(lengths), LENGTH, dtype=torch.long)
    place = [slice(LENGTH - n, None) if side == "left" else slice(0, n) for n in lengths]
    for row, (own, where) in enumerate(zip(alone, place, strict=True)):
        ids[row, where], mask[row, where] = own, 1
    logits = model(ids, attention_mask=mask).logits
    options = {"cache_implementation": "static"} if cache == "static" else {}
    generated = greedy(model, ids, mask, 20, **options)
    for row, (own, where) in enumerate(zip(alone, place, strict=True)):
        torch.testing.assert_close(logits[row, where], model(own).logits[0], rtol=1e-4, atol=1e-4)
        if side == "left":  # on the right, generate itself continues after the padding, from the padding's logits
            assert torch.equal(generated[row], greedy(model, own, new=20, **options)[0])


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}], ids=str)
def test_beams_of_a_ragged_batch_are_transformers_own(options: dict[str, Any]) -> None:
    """Each row's beams are those that transformers' eager path finds for that prompt alone: padding moves its blocks, not ours."""
    model, lengths = small_m3(), (LENGTH, 67)
    prompts = [tokens(1, n, seed=n) for n in lengths]
    expected = [greedy(model, own, new=6, num_beams=2)[0] for own in prompts]
    ids = torch.cat([torch.nn.functional.pad(own, (LENGTH - own.shape[1], 0)) for own in prompts])
    mask = (torch.arange(LENGTH) >= LENGTH - torch.tensor(lengths)[:, None]).long()
    got = greedy(prepare(model), ids, mask, new=6, num_beams=2, **options)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_right_padding_equals_transformers_own() -> None:
    model, ids = small_m3(), tokens(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[1, 60:] = 0
    expected = model(ids, attention_mask=mask).logits
    got = prepare(model)(ids, attention_mask=mask).logits
    torch.testing.assert_close(got[0], expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got[1, :60], expected[1, :60], rtol=1e-4, atol=1e-4)


def test_a_conversation_goes_on_in_one_cache() -> None:
    """Turns of different lengths, padding in the middle of a row, and growth beyond the pages that the first turn made."""
    model, cache = prepare(small_m3()), DynamicCache()
    alone, columns = tokens(1, 170), torch.zeros(2, 0, dtype=torch.long)
    first, second = tokens(2, 50, seed=2), tokens(2, 40, seed=3)
    first[0, 8:], second[0, 30:] = alone[0, :42], alone[0, 42:52]
    masks = torch.ones(2, 50), torch.ones(2, 40)
    masks[0][0, :8], masks[1][0, :30] = 0, 0

    def turn(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        nonlocal columns
        columns = torch.cat([columns, mask.long()], 1)
        positions = (columns.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        return model(ids, attention_mask=columns, position_ids=positions, past_key_values=cache).logits

    for ids, mask in zip((first, second), masks, strict=True):
        logits = turn(ids, mask)
    torch.testing.assert_close(logits[0, 30:], model(alone[:, :52]).logits[0, 42:], rtol=1e-4, atol=1e-4)
    for at in range(52, 112):
        logits = turn(torch.cat([alone[:, at : at + 1], tokens(1, 1)]), torch.ones(2, 1))
    torch.testing.assert_close(logits[0, -1], model(alone[:, :112]).logits[0, -1], rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == columns.shape[1] and cache.layers[0].pool.num_pages >= 2 * 10


@pytest.mark.parametrize("make", [lambda config: DynamicCache(config=config), lambda config: StaticCache(config=config, max_cache_len=128)])
def test_cache_operations(make: Any) -> None:
    model, ids = prepare(small_m3()), tokens(3, LENGTH)
    expected = model(ids).logits

    def step(cache: Any, rows: list[int], at: int) -> None:
        got = model(ids[rows, at : at + 1], past_key_values=cache).logits[:, 0]
        torch.testing.assert_close(got, expected[rows, at], rtol=1e-4, atol=1e-4)

    cache = make(model.config)
    model(ids[:, :90], past_key_values=cache)
    assert all(isinstance(layer, PagedLayer) for layer in cache.layers) and int(cache.get_seq_length()) == 90
    cache.crop(-4)
    step(cache, [0, 1, 2], 86)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    step(cache, [2, 0, 0], 87)
    cache.batch_select_indices(torch.tensor([0, 1]))
    step(cache, [2, 0], 88)
    cache.batch_repeat_interleave(2)
    step(cache, [2, 2, 0, 0], 89)
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    model(ids[[1, 1, 2, 0], :40], past_key_values=cache)
    step(cache, [1, 1, 2, 0], 40)


def test_a_failed_call_leaves_the_cache_as_it_was() -> None:
    model, ids, cache = prepare(small_m3()), tokens(1, LENGTH), DynamicCache()
    model(ids[:, :80], past_key_values=cache)
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids[:, 10:30], past_key_values=cache)
    handle.remove()
    got = model(ids[:, 80:], past_key_values=cache).logits
    torch.testing.assert_close(got, model(ids).logits[:, 80:], rtol=1e-4, atol=1e-4)


def test_static_cache_compiles_once_and_whole() -> None:
    from torch._dynamo.testing import CompileCounter

    model, ids = prepare(small_m3()), tokens(2, LENGTH)
    caches = [StaticCache(config=model.config, max_cache_len=128) for _ in range(2)]
    for cache in caches:
        model(ids[:, :94], past_key_values=cache)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for at in range(94, LENGTH):
        eager = model(ids[:, at : at + 1], past_key_values=caches[0]).logits
        assert torch.equal(compiled(ids[:, at : at + 1], past_key_values=caches[1]).logits, eager)
    assert counter.frame_count == 1


def test_generate_compiles_a_static_cache() -> None:
    """What transformers does by itself on a GPU: the decode step compiled, with the padding of a ragged batch."""
    model, ids = prepare(small_m3(layers=2)), tokens(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[1, :37] = 0
    compiled = CompileConfig(backend="eager", mode=None, fullgraph=True)
    compiled._compile_all_devices = True
    got = greedy(model, ids, mask, 12, cache_implementation="static", compile_config=compiled)
    assert torch.equal(got, greedy(model, ids, mask, 12))


@pytest.mark.slow
def test_chunked_prefill_compiles_too() -> None:
    """Then even the first call is compiled, which makes the pages: outside the graph."""
    model, ids = prepare(small_m3(layers=2)), tokens(1, 80)
    compiled = CompileConfig(backend="eager", mode=None)
    compiled._compile_all_devices = True
    got = greedy(model, ids, new=4, cache_implementation="static", prefill_chunk_size=40, compile_config=compiled)
    assert torch.equal(got, greedy(model, ids, new=4))


def test_bf16_is_no_further_from_fp32_than_theirs() -> None:
    ids = tokens(4, LENGTH)
    model = small_m3(torch.bfloat16)
    exact = small_m3(torch.bfloat16).float()(ids).logits
    by_them = model(ids).logits.float() - exact
    by_us = prepare(model)(ids).logits.float() - exact
    assert by_us.square().mean() <= 1.5 * by_them.square().mean()


@pytest.fixture
def fp8_on_cpu() -> Iterator[None]:
    """The reference again, declaring fp8 attention for a CPU, so that the fp8 mode is derived there."""
    target = "m3attn.reference.sparse:sparse_attention_call"
    m3attn.register("sparse_attention", "fp8_on_cpu", target, capabilities=m3attn.Capabilities(cpu="yes"), fp8_archs=("cpu",))
    yield
    m3attn.unregister("sparse_attention", "fp8_on_cpu")


def test_fp8_and_widen_differ_by_the_switch_alone(
    fp8_on_cpu: None, monkeypatch: pytest.MonkeyPatch, record_property: Any, capsys: pytest.CaptureFixture
) -> None:
    model, ids = prepare(small_m3(torch.bfloat16)), tokens(4, LENGTH)
    with ours(monkeypatch) as exact_ids:
        exact = model(ids).logits
    report = []
    for switch, mode in (("1", "widen"), ("0", "fp8")):
        monkeypatch.setenv("M3ATTN_DISABLE_FP8_ATTN_GEMM", switch)
        prepare(model, kv_cache_dtype="fp8_e4m3")
        assert model.model.layers[1].self_attn.m3attn.mode.mode == mode
        with ours(monkeypatch) as got_ids:
            got = model(ids).logits
        divergence, same = kl(exact, got).mean().item(), (got.argmax(-1) == exact.argmax(-1)).float().mean().item()
        shared = min(overlap(a, b) for a, b in zip(exact_ids, got_ids, strict=True))
        report.append(f"{mode}: KL {divergence:.4f}, ids {shared:.3f}, greedy {same:.3f}")
        record_property(mode, report[-1])
        # A random model's scores and next tokens lie close together: this bounds faults, not a trained model's quality.
        assert divergence < 0.02 and shared > 0.9 and same > 0.85, report[-1]
    with capsys.disabled():
        print("\n" + "\n".join(report))


def test_projections_and_norms_are_called_as_modules() -> None:
    model, ids = small_m3(), tokens(1, LENGTH)
    expected = model(ids).logits
    called = set()

    class Adapted(torch.nn.Module):
        def __init__(self, name: str, inner: torch.nn.Module) -> None:
            super().__init__()
            self.name, self.inner = name, inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            called.add(self.name)
            return self.inner(x)

    attention = model.model.layers[1].self_attn
    for owner, names in ((attention, ("q_proj", "k_proj", "v_proj", "o_proj")), (attention.indexer, ("q_proj", "k_proj"))):
        for name in names:
            setattr(owner, name, Adapted(f"{type(owner).__name__}.{name}", getattr(owner, name)))
    norms = [m for m in attention.modules() if isinstance(m, modeling.MiniMaxM3VLRMSNorm)]
    hooks = [norm.register_forward_hook(lambda module, *_: called.add(module)) for norm in norms]
    torch.testing.assert_close(prepare(model)(ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert len(hooks) == 4 and called >= set(norms) and len(called) == 10


class Int8Linear(torch.nn.Module):
    """A projection whose weight is bytes and a scale a row: nothing in it is called `weight`."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.register_buffer("scale", linear.weight.abs().amax(1, keepdim=True) / 127)
        self.register_buffer("rounded", (linear.weight / self.scale).round().to(torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.rounded * self.scale).T


def test_quantised_projections_keep_working() -> None:
    model, ids = small_m3(), tokens(1, LENGTH)
    for owner in [m for m in model.modules() if isinstance(m, (modeling.MiniMaxM3VLAttention, modeling.MiniMaxM3VLIndexer))]:
        for name, child in list(owner.named_children()):
            if isinstance(child, torch.nn.Linear):
                setattr(owner, name, Int8Linear(child))
    expected = model(ids).logits
    assert not torch.equal(expected, small_m3()(ids).logits)
    torch.testing.assert_close(prepare(model)(ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(unprepare(model)(ids).logits, expected)


def test_device_map_keeps_its_hooks() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, ids = small_m3(), tokens(1, LENGTH)
    expected = model(ids).logits
    accelerate.hooks.add_hook_to_module(model.model.layers[1].self_attn, accelerate.hooks.ModelHook())
    moved = []

    class Counting(accelerate.hooks.ModelHook):
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            moved.append(module)
            return args, kwargs

    accelerate.hooks.add_hook_to_module(model.model.layers[2].self_attn, Counting())
    torch.testing.assert_close(prepare(model)(ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert len(moved) == 1 and model.model.layers[2].self_attn.m3attn is not None
    unprepare(model)
    assert torch.equal(model(ids).logits, expected) and len(moved) == 2
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    assert torch.equal(model(ids).logits, expected)


def test_weights_that_accelerate_loads_for_each_call() -> None:
    """Where a device_map leaves no room, layers hold no weights until they are called."""
    accelerate = pytest.importorskip("accelerate")
    model, ids = small_m3(), tokens(1, LENGTH)
    expected = model(ids).logits
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.model.layers[1].self_attn.q_norm.weight.is_meta
    if torch.cuda.is_available():
        pytest.skip("weights on no device count as the GPU's, which these are not")
    torch.testing.assert_close(prepare(model)(ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(unprepare(model)(ids).logits, expected)


def test_the_model_with_a_vision_tower() -> None:
    """Only its text layers are prepared; the vision tower keeps its attention."""
    vision = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=28)
    config = configuration.MiniMaxM3VLConfig(
        text_config=small_m3().config.to_dict(), vision_config=vision, image_token_index=62, video_token_index=63
    )
    model, ids = modeling.MiniMaxM3SparseForConditionalGeneration(config).eval(), tokens(2, LENGTH).clamp(max=61)
    for name, weight in model.named_parameters():
        weight.data.normal_(std=0.3 if "norm" in name else weight.shape[-1] ** -0.5)
    expected, expected_tokens = model(input_ids=ids).logits, greedy(model, ids, new=8)
    before = config.vision_config._attn_implementation
    torch.testing.assert_close(prepare(model)(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(greedy(model, ids, new=8), expected_tokens) and config.vision_config._attn_implementation == before
    assert torch.equal(unprepare(model)(input_ids=ids).logits, expected)


def test_refusals() -> None:
    model, ids = small_m3(), tokens(1, 40)
    with pytest.raises(ValueError, match="model: expected one with a MiniMaxM3VLTextModel"):
        prepare(torch.nn.Linear(1, 1))
    filled = DynamicCache(config=model.config)
    model(ids, past_key_values=filled)
    prepare(model)
    with pytest.raises(ValueError, match="an empty cache, or one that a prepared model filled, got 40 other tokens"):
        model(ids, past_key_values=filled)
    with pytest.raises(ValueError, match="output_attentions: expected False, a prepared model computes no attention weights"):
        model(ids, output_attentions=True)
    with pytest.raises(ValueError, match="without offloading"):
        model(ids, past_key_values=DynamicCache(config=model.config, offloading=True))
    with pytest.raises(ValueError, match=r"attention_mask: expected .*one entry a token, got \[1, 1, 40, 40\]"):
        model(ids, attention_mask=torch.ones(1, 1, 40, 40, dtype=torch.bool))
    with pytest.raises(ValueError, match="packed sequences"):
        model(ids, position_ids=torch.arange(20).repeat(2)[None], use_cache=False)
    with pytest.raises(ValueError, match="attention_mask: expected at least 40 columns"):
        model(ids, attention_mask=torch.tensor([[1] * 38 + [0]]))
    cache = DynamicCache()
    model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="expected a batch of 1 as in the cache, got 2"):
        model(tokens(2, 3), past_key_values=cache)
    moved = torch.zeros(1, 3, 64, device="meta")
    with pytest.raises(ValueError, match="expected tensors on cpu, where prepare found the model, got meta; prepare again"):
        model.model.layers[0].self_attn(moved, (moved, moved))
    with pytest.raises(NotImplementedError, match=r"torch\.no_grad"), torch.enable_grad():
        model(ids)
    unprepare(model)
    with pytest.raises(TypeError, match="which only a prepared model reads"):
        model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="page_size"):
        prepare(model, page_size=128)
    assert model.config._attn_implementation == "eager" and not hasattr(model.model.layers[0].self_attn, "m3attn")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for a machine without a GPU")
def test_triton_in_the_interpreter() -> None:
    small = dict(layers=2, num_attention_heads=2, num_key_value_heads=1, index_n_heads=1, hidden_size=32, index_topk_blocks=2)
    model, ids = small_m3(**small), tokens(1, 50)
    expected = model(ids).logits
    prepare(model, implementation="triton")
    assert set(model.model.layers[1].self_attn.m3attn.mode.implementations.values()) == {"triton"}
    cache = DynamicCache()
    got = [model(ids[:, part], past_key_values=cache).logits for part in (slice(0, 49), slice(49, 50))]
    torch.testing.assert_close(torch.cat(got, 1), expected, rtol=1e-4, atol=1e-4)


M3_LIKE = dict(
    num_attention_heads=16, num_key_value_heads=1, index_n_heads=1, head_dim=128, index_head_dim=128, index_block_size=128, hidden_size=256
)
KEYS = [None, *sorted({i.key for i in m3attn.implementations("sparse_attention") if i.built_in})]


def cached_steps(model: Any, ids: torch.Tensor, cache: Any, new: int = 4) -> torch.Tensor:
    """Logits of the last `new` tokens, decoded one by one behind a prefill of the others."""
    model(ids[:, :-new], past_key_values=cache)
    return torch.cat([model(ids[:, at : at + 1], past_key_values=cache).logits for at in range(ids.shape[1] - new, ids.shape[1])], dim=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_on_a_gpu(key: str | None, kv_cache_dtype: str, record_property: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """auto and every implementation at M3's own block size and K, a ragged batch, both caches; transformers compiles a static cache's decode step."""
    model, ids = small_m3(torch.bfloat16, "cuda", **M3_LIKE, index_topk_blocks=16), tokens(2, 2900, "cuda")
    exact = copy.deepcopy(model).float()(ids).logits
    with theirs(model) as their_ids:
        by_them = model(ids).logits
    try:
        prepare(model, implementation=key, kv_cache_dtype=kv_cache_dtype)
    except m3attn.UnsupportedProblem as reason:
        pytest.skip(str(reason))
    with ours(monkeypatch) as our_ids:
        got = model(ids).logits
    error, their_error = ((x.float() - exact).square().mean().item() for x in (got, by_them))
    divergence, same = kl(exact, got).mean().item(), (got.argmax(-1) == exact.argmax(-1)).float().mean().item()
    shared = min(overlap(want.transpose(0, 1).flatten(1, 2), chosen) for want, chosen in zip(their_ids, our_ids, strict=True))
    mode = model.model.layers[1].self_attn.m3attn.mode
    mask = torch.ones_like(ids)
    mask[1, :400] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    padded = model(ids, attention_mask=mask, position_ids=positions).logits[1, 400:]
    apart = kl(model(ids[1:, 400:]).logits[0], padded).mean().item()
    caches = {"dynamic": DynamicCache(config=model.config), "static": StaticCache(config=model.config, max_cache_len=3072)}
    steps = {name: kl(exact[:, -4:], cached_steps(model, ids, cache)).mean().item() for name, cache in caches.items()}
    what = f"{key or mode.implementations['sparse_attention/prefill']} {mode.mode}"
    record_property(
        what,
        f"mean square error {error:.2e} (eager {their_error:.2e}), KL {divergence:.2e}, ids {shared:.3f}, greedy {same:.3f}, "
        f"padded row {apart:.2e}, decoded " + ", ".join(f"{name} {value:.2e}" for name, value in steps.items()),
    )
    assert divergence < 0.02 and apart < 0.02 and shared > 0.9 and same > 0.85 and max(steps.values()) < 0.02
    if mode.mode == "bf16":
        assert error <= 1.5 * their_error + 1e-6
    # The reference reads lengths back, so that no graph can hold it.
    static: dict[str, Any] = {"cache_implementation": "static", "disable_compile": "reference" in mode.implementations.values()}
    for options in ({}, static, {"num_beams": 2}):
        generated = greedy(model, ids, mask, new=8, **options)
        assert generated.shape == (2, 8) and bool((generated >= 0).all()), options


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_greedy_tokens_in_fp32_on_a_gpu() -> None:
    model = small_m3(torch.float32, "cuda", **M3_LIKE, index_topk_blocks=4)
    ids = tokens(2, 1000, "cuda")
    expected = greedy(model, ids)
    expected_beams = greedy(model, ids, num_beams=3)
    for key in ("reference", "triton"):
        prepare(model, implementation=key)
        assert torch.equal(greedy(model, ids), expected)
        assert torch.equal(greedy(model, ids, num_beams=3), expected_beams)
    # As transformers has it by default: the decode step compiled, in a CUDA graph.
    assert torch.equal(greedy(model, ids, cache_implementation="static"), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_long_prefill_takes_little_memory() -> None:
    """transformers' indexer alone would hold 4.3 GB of scores for one head of 32k tokens."""
    model, ids = prepare(small_m3(torch.bfloat16, "cuda", layers=2, max_position_embeddings=1 << 15, **M3_LIKE)), tokens(1, 1 << 15, "cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logits = model(ids, logits_to_keep=1).logits
    used = torch.cuda.max_memory_allocated() - before
    assert bool(logits.isfinite().all()) and used < 2 << 30, f"{used / 2**30:.2f} GiB"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_device_map_over_two_gpus() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, ids = small_m3(torch.float32, "cuda:0", **M3_LIKE, index_topk_blocks=4), tokens(2, 1000, "cuda:0")
    mask = torch.ones_like(ids)
    mask[1, :300] = 0
    expected = greedy(prepare(model), ids, mask, 8)
    places = {
        "model.embed_tokens": 0,
        "model.layers.0": 0,
        "model.layers.1": 1,
        "model.layers.2": 0,
        "model.norm": 1,
        "model.rotary_emb": 0,
        "lm_head": 1,
    }
    accelerate.dispatch_model(unprepare(model), places)
    assert torch.equal(greedy(prepare(model), ids, mask, 8), expected)
    assert torch.equal(greedy(model, ids, mask, 8, num_beams=2), greedy(model, ids, mask, 8, num_beams=2, cache_implementation="static"))
