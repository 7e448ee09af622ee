"""The ways in for plain tensors, and gradients: refused by kernels, given by the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stage_calls import BUILDERS, registered

import m3attn

Tensors = tuple[torch.Tensor, ...]


def plain(length: int = 70, batch: int = 2, dtype: torch.dtype = torch.float32, heads: int = 4, kv_heads: int = 2, dim: int = 32) -> Tensors:
    gen = torch.Generator().manual_seed(length)
    shapes = ((heads, dim), (kv_heads, dim), (kv_heads, dim), (kv_heads, dim), (dim,))
    return tuple(torch.randn(batch, length, *shape, generator=gen, dtype=torch.float32).to(dtype) for shape in shapes)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


@pytest.mark.parametrize("length", [1, 15, 16, 64, 70, 128])
def test_with_room_for_every_block_it_is_causal_attention(length: int) -> None:
    q, k, v, index_q, index_k = plain(length)
    out = m3attn.attend(q, k, v, index_q, index_k, topk=16, block_size=16)
    assert torch.allclose(out, dense(q, k, v), atol=2e-5)


def test_it_is_the_stages_one_after_another() -> None:
    q, k, v, index_q, index_k = plain()
    out, lse, ids = m3attn.attend(q, k, v, index_q, index_k, topk=2, block_size=16, return_lse=True, return_ids=True)
    assert (out.shape, lse.shape, ids.shape) == (q.shape, q.shape[:3], (2, 2, 70, 2))
    assert (lse.dtype, ids.dtype) == (torch.float32, torch.int32)
    cache, batch = m3attn.paged(k, v, index_k, block_size=16)
    expected_ids = m3attn.index_topk(index_q.flatten(0, 1), cache, batch, topk=2)
    expected, expected_lse = m3attn.sparse_attention(q.flatten(0, 1), cache, expected_ids, batch, return_lse=True)
    assert torch.equal(ids.flatten(1, 2), expected_ids) and torch.equal(out.flatten(0, 1), expected) and torch.equal(lse.flatten(0, 1), expected_lse)
    assert (ids >= 0).sum(-1).amax() == 2  # blocks competed
    only_ids = m3attn.attend(q, k, v, index_q, index_k, topk=2, block_size=16, return_ids=True)
    assert len(only_ids) == 2 and torch.equal(only_ids[1], ids)


def test_sequences_do_not_see_one_another() -> None:
    inputs = plain(37, batch=3)
    whole = m3attn.attend(*inputs, topk=2, block_size=16)
    for number in range(3):
        alone = m3attn.attend(*(x[number : number + 1] for x in inputs), topk=2, block_size=16)
        assert torch.equal(whole[number : number + 1], alone)


@pytest.mark.parametrize("batch, length", [(0, 32), (2, 0), (0, 0)])
def test_nothing_in_nothing_out(batch: int, length: int) -> None:
    q, *rest = plain(length, batch)
    out, lse, ids = m3attn.attend(q, *rest, topk=2, block_size=16, return_lse=True, return_ids=True)
    assert (out.shape, lse.shape, ids.shape) == (q.shape, q.shape[:3], (2, batch, length, 2))


@pytest.mark.parametrize("choice", ["impl", "use"])
def test_the_named_implementation_runs_every_stage(choice: str) -> None:
    inputs = plain(40)
    expected = m3attn.attend(*inputs, topk=2, block_size=16)
    with registered("sparse_attention", "mine", lambda call: [call.out.zero_(), call.lse.zero_()].clear()), m3attn.use("sparse_attention=mine"):
        assert m3attn.attend(*inputs, topk=2, block_size=16).eq(0).all()
    if choice == "impl":
        assert torch.equal(m3attn.attend(*inputs, topk=2, block_size=16, impl="reference"), expected)
    else:
        with m3attn.use("reference"):
            assert torch.equal(m3attn.attend(*inputs, topk=2, block_size=16), expected)


@pytest.mark.parametrize(
    "number, change, error, message",
    [
        (0, lambda t: None, TypeError, r"q: expected a tensor, got NoneType"),
        (0, lambda t: t[0], ValueError, r"q: expected shape \[B, S, Hq, D\], got \[70, 4, 32\]"),
        (0, lambda t: t[:, :, :3], ValueError, r"q: expected a multiple of the cache's 2 KV heads, got 3 heads"),
        (1, lambda t: t.half(), TypeError, r"k: expected torch.float32, got torch.float16"),
        (1, lambda t: t[:, 1:], ValueError, r"k: expected shape \[2, 70, Hkv, 32\], got \[2, 69, 2, 32\]"),
        (2, lambda t: t[:1], ValueError, r"v: expected shape \[2, 70, 2, D\], got \[1, 70, 2, 32\]"),
        (2, lambda t: t.to("meta"), ValueError, r"v: expected a tensor on cpu, got one on meta"),
        (3, lambda t: t[:, :, :1], ValueError, r"index_q: expected shape \[2, 70, 2, Di\], got \[2, 70, 1, 32\]"),
        (4, lambda t: t[..., :16], ValueError, r"index_k: expected shape \[2, 70, 32\], got \[2, 70, 16\]"),
        (4, lambda t: t[:, :, None], ValueError, r"index_k: expected shape \[2, 70, 32\], got \[2, 70, 1, 32\]"),
    ],
)
def test_bad_input_of_attend(number: int, change: Any, error: type, message: str) -> None:
    inputs = list(plain())
    inputs[number] = change(inputs[number])
    with pytest.raises(error, match=message):
        m3attn.attend(*inputs, topk=2, block_size=16)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"topk": 0}, ValueError, r"topk: expected an int from 1 to 128, got 0"),
        ({"block_size": 24}, ValueError, r"block_size: expected one of 16, 32, 64, 128, 256, got 24"),
        ({"block_size": 0}, ValueError, r"block_size: expected an int of at least 1, got 0"),
        ({"impl": "tritom"}, ValueError, r"'tritom' is not a key of any stage"),
        ({"rule": "widow"}, ValueError, r"rule: expected one of topk, shared_heads, window, got 'widow'"),
    ],
)
def test_bad_options_of_attend(options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        m3attn.attend(*plain(), **{"topk": 2, "block_size": 16} | options)


@pytest.mark.parametrize("length, page", [(128, 128), (256, 128), (64, 64), (192, 64), (32, 32), (48, 16)])
def test_paged_makes_views_where_pages_fit(length: int, page: int) -> None:
    _, k, v, _, index_k = plain(length)
    cache, batch = m3attn.paged(k, v, index_k)
    assert batch.page_size == page
    assert (cache.k.data_ptr(), cache.v.data_ptr(), cache.index_k.data_ptr()) == (k.data_ptr(), v.data_ptr(), index_k.data_ptr())
    assert cache.k.shape == (2 * length // page, 2, page, 32) and cache.index_k.shape == (2 * length // page, page, 32)
    k[1, 0, 1, 3] = 7.0
    assert cache.k[length // page, 1, 0, 3] == 7.0
    assert batch.page_table.tolist() == [list(range(length // page)), list(range(length // page, 2 * length // page))]
    assert batch.seq_lens.tolist() == [length] * 2 and batch.cu_seqlens_q.tolist() == [0, length, 2 * length]


def test_paged_packed_sequences_at_page_borders_are_views() -> None:
    k, v, index_k = torch.randn(96, 2, 32), torch.randn(96, 2, 32), torch.randn(96, 32)
    cache, batch = m3attn.paged(k, v, index_k, torch.tensor([0, 32, 32, 96]), block_size=32)
    assert batch.page_size == 32 and cache.k.data_ptr() == k.data_ptr() and cache.index_k.data_ptr() == index_k.data_ptr()
    assert batch.page_table.tolist() == [[0, 0], [0, 0], [1, 2]] and batch.seq_lens.tolist() == [32, 0, 64]


def test_paged_copies_only_where_it_must_and_pads() -> None:
    k, v, index_k = torch.randn(50, 2, 32), torch.randn(50, 2, 32), torch.randn(50, 32)
    offsets = torch.tensor([0, 17, 50], dtype=torch.int32)
    cache, batch = m3attn.paged(k, v, index_k, offsets, page_size=16, block_size=16)
    assert batch.page_table.tolist() == [[0, 1, 0], [2, 3, 4]] and cache.k.shape == (5, 2, 16, 32)
    assert torch.equal(cache.k[2].transpose(0, 1), k[17:33])
    q = torch.randn(50, 4, 32)
    out = m3attn.dense_attention(q, cache, batch)
    for begin, end in ((0, 17), (17, 50)):
        part = slice(begin, end)
        assert torch.allclose(out[part], dense(q[None, part], k[None, part], v[None, part])[0], atol=2e-5)


def test_paged_without_an_index_serves_dense_layers() -> None:
    _, k, v, _, _ = plain(48)
    cache, batch = m3attn.paged(k, v, None)
    assert cache.index_k is None
    with pytest.raises(ValueError, match=r"cache.index_k: expected \[pages, page_size, Di\], got None \(a dense layer's cache\)"):
        m3attn.index_score(torch.randn(96, 2, 32), cache, batch)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (([1.0], None, None), TypeError, r"k: expected a tensor, got list"),
        ((torch.zeros(4, 2, 8), torch.zeros(4, 2, 8), None), ValueError, r"cu_seqlens: expected offsets for packed \[T, Hkv, D\] tensors, got None"),
        ((torch.zeros(4, 2, 8), torch.zeros(4, 2, 8), None, [0, 4]), TypeError, r"cu_seqlens: expected a tensor, got list"),
        ((torch.zeros(4, 2, 8), torch.zeros(4, 2, 8), None, torch.tensor([0.0, 4.0])), TypeError, r"cu_seqlens: expected torch.int32 or torch.int64"),
        (
            (torch.zeros(4, 2, 8), torch.zeros(4, 2, 8), None, torch.tensor([0, 3])),
            ValueError,
            r"cu_seqlens: expected ascending offsets from 0 to 4, got \[0, 3\]",
        ),
        (
            (torch.zeros(4, 2, 8), torch.zeros(4, 2, 8), None, torch.tensor([0, 3, 2, 4])),
            ValueError,
            r"cu_seqlens: expected ascending offsets from 0 to 4",
        ),
        ((torch.zeros(4, 2, 8), torch.zeros(4, 2, 8), None, torch.tensor([1, 4])), ValueError, r"cu_seqlens: expected ascending offsets from 0 to 4"),
        ((torch.zeros(4, 2, 8), torch.zeros(3, 2, 8), None, torch.tensor([0, 4])), ValueError, r"v: expected shape \[4, 2, D\], got \[3, 2, 8\]"),
        (
            (torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 8), None, torch.tensor([0, 4])),
            ValueError,
            r"cu_seqlens: expected None for \[B, S, Hkv, D\]",
        ),
        ((torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 1, 8), None), ValueError, r"v: expected shape \[1, 4, 2, D\], got \[1, 4, 1, 8\]"),
        (
            (torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 8), torch.zeros(1, 3, 8)),
            ValueError,
            r"index_k: expected shape \[1, 4, Di\], got \[1, 3, 8\]",
        ),
    ],
)
def test_bad_input_of_paged(arguments: tuple, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        m3attn.paged(*arguments)
    with pytest.raises(ValueError, match=r"page_size: expected an int of at least 1, got 0"):
        m3attn.paged(*plain()[1:3], None, page_size=0)


GRADIENTS = [
    ("qk_norm_rope_insert", "qkv"),
    ("index_score", "index_q"),
    ("select_blocks", "scores"),
    ("index_topk", "index_q"),
    ("sparse_attention", "q"),
    ("sparse_attention", "sink_key"),
    ("dense_attention", "q"),
    ("merge_attention_states", "out_a"),
    ("merge_attention_states", "lse_b"),
    ("quantize_fp8", "x"),
]


@pytest.mark.parametrize("stage, name", GRADIENTS)
def test_kernels_refuse_inputs_that_require_grad(stage: str, name: str) -> None:
    call = BUILDERS[stage]()
    wants = call.arguments[name].clone().requires_grad_()
    with registered(stage, "kernel", lambda call: None):
        with pytest.raises(
            NotImplementedError, match=r"kernel is forward only and an input requires grad: call under torch.no_grad\(\), or pass impl='reference'"
        ):
            call(**{name: wants}, impl="kernel")
        with torch.no_grad():
            call(**{name: wants}, impl="kernel")
        call(**{name: wants.detach()}, impl="kernel")


def test_kernels_refuse_a_cache_or_weights_that_require_grad() -> None:
    for stage, change in (
        ("dense_attention", lambda a: {"cache": m3attn.LayerCache(k=a["cache"].k, v=a["cache"].v.clone().requires_grad_())}),
        ("index_score", lambda a: {"cache": m3attn.LayerCache(index_k=a["cache"].index_k.clone().requires_grad_())}),
        ("qk_norm_rope_insert", lambda a: {"weights": (*a["weights"][:3], a["weights"][3].clone().requires_grad_())}),
    ):
        call = BUILDERS[stage]()
        with registered(stage, "kernel", lambda call: None), pytest.raises(NotImplementedError, match=r"torch.no_grad\(\)"):
            call(**change(call.arguments), impl="kernel")


def doubles(length: int = 19) -> Tensors:
    return plain(length, batch=1, dtype=torch.float64, dim=4)


def test_the_reference_is_differentiable_through_the_public_functions() -> None:
    q, k, v, index_q, index_k = (x.requires_grad_() if n < 3 else x for n, x in enumerate(doubles()))
    sink = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)

    def sparse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cache, batch = m3attn.paged(k, v, index_k, page_size=16, block_size=16)
        ids = m3attn.index_topk(index_q.flatten(0, 1), cache, batch, topk=1, impl="reference")
        return m3attn.sparse_attention(q.flatten(0, 1), cache, ids, batch, sink_key=sink, return_lse=True, impl="reference")

    def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cache, batch = m3attn.paged(k, v, None, page_size=16, block_size=16)
        return m3attn.dense_attention(q.flatten(0, 1), cache, batch, sink_key=sink, return_lse=True, impl="reference")

    for run in (sparse, whole):
        assert torch.autograd.gradcheck(run, (q, k, v, sink), fast_mode=True)


def test_attend_is_differentiable_with_the_reference() -> None:
    q, k, v, index_q, index_k = doubles()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(
        lambda q, k, v: m3attn.attend(q, k, v, index_q, index_k, topk=1, block_size=16, impl="reference"), inputs, fast_mode=True
    )
    index_q.requires_grad_()
    grads = torch.autograd.grad(m3attn.attend(*inputs, index_q, index_k, topk=1, block_size=16).sum(), [*inputs, index_q], allow_unused=True)
    assert all(g is not None and g.abs().sum() > 0 for g in grads[:3]) and grads[3] is None  # the selection has no gradient


def test_scores_and_merging_are_differentiable() -> None:
    _, _, _, index_q, index_k = doubles()
    wants = index_q.flatten(0, 1).clone().requires_grad_(), index_k.clone().requires_grad_()

    def score(index_q: torch.Tensor, index_k: torch.Tensor) -> torch.Tensor:
        cache, batch = m3attn.paged(
            torch.zeros(1, 19, 2, 4, dtype=torch.float64), torch.zeros(1, 19, 2, 4, dtype=torch.float64), index_k, block_size=16
        )
        scores = m3attn.index_score(index_q, cache, batch, impl="reference")
        return scores[scores.isfinite()]

    assert torch.autograd.gradcheck(score, wants, fast_mode=True, eps=1e-3, atol=1e-3)
    parts = [torch.randn(3, 2, 4, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)] * 2
    assert torch.autograd.gradcheck(m3attn.merge_attention_states, [p.clone().requires_grad_() for p in parts], fast_mode=True)


def test_normalisation_is_differentiable_where_the_row_may_be_written() -> None:
    row = torch.randn(3, 4 * 128, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(128, dtype=torch.float64, requires_grad=True)
    cos_sin = torch.randn(8, 8, dtype=torch.float64)

    def run(row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        mine = row * 1.0  # in place on an intermediate, as after a projection
        q, _ = m3attn.qk_norm_rope_insert(mine, (weight, weight), torch.arange(3), cos_sin, heads=(2, 1), impl="reference")
        return torch.cat([q.flatten(1), mine[:, 256:]], dim=1)

    assert torch.autograd.gradcheck(run, (row, weight), fast_mode=True)


def test_a_choice_may_name_keys_by_stage() -> None:
    inputs, options = plain(64), {"topk": 2, "block_size": 32}
    expected = m3attn.attend(*inputs, **options)
    m3attn.register("sparse_attention", "zeros", lambda call: call.out.__setitem__(..., 0))
    try:
        for choice in ("sparse_attention=zeros", "zeros", "reference,sparse_attention=zeros"):
            assert m3attn.attend(*inputs, impl=choice, **options).abs().sum() == 0, "a bare key applies to the stages that have it"
        assert torch.equal(m3attn.attend(*inputs, impl="index_topk=reference", **options), expected)
    finally:
        m3attn.unregister("sparse_attention", "zeros")
