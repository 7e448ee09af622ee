"""The workspace limit, long requests in chunks, tensors at odd addresses, and arguments that must be refused by name."""

from dataclasses import replace

import pytest
import torch

import m3attn
from m3attn.batch import LayerCache
from m3attn.reference.index import select_blocks
from m3attn.reference.paging import query_rows
from m3attn.testing.bounds import assert_within, attention_bound, score_bound
from m3attn.testing.cases import AttentionCase, IndexCase, Step
from m3attn.testing.ids import check_id_form, compare_ids
from m3attn.testing.inputs import AttentionInputs, attention_inputs, index_inputs
from m3attn.testing.matrix import DEVICE, arch, keys, pick, skip_if_declined, skip_if_refused, stage_keys

BLOCK = pick(16, 128)
SMALL_LIMIT = 1 << 20


@pytest.fixture
def small_limit():
    previous = m3attn.workspace_limit()

    def shrink() -> None:
        m3attn.set_workspace_limit(SMALL_LIMIT)

    yield shrink
    m3attn.set_workspace_limit(previous)


@pytest.mark.parametrize("key", keys("index_topk"))
def test_slices_of_tokens_select_the_same_ids(key: str, small_limit) -> None:
    """Scores of a call would take several times the limit: the ids are the same."""
    blocks = pick(30_000, 4_000)
    step = Step("slices", (pick(6, 300), 2), (4 * BLOCK, 3 * BLOCK), page_size=BLOCK, block_size=BLOCK, slack=blocks * BLOCK)
    dtype = pick(torch.float32, torch.bfloat16)
    case = IndexCase(step, num_heads=pick(2, 4), dim=pick(64, 128), q_dtype=dtype, k_dtype=dtype, topk=2)
    skip_if_declined("index_topk", key, case.problem(arch()))
    inputs = index_inputs(case, DEVICE)

    def run() -> torch.Tensor:
        return m3attn.index_topk(inputs.index_q, inputs.cache, inputs.batch, **inputs.selection, impl=key)

    expected = run()
    small_limit()
    shape = {"tokens": step.tokens, "max_seqlen_q": step.max_seqlen_q, "max_seqlen_k": step.max_seqlen_k, "num_requests": 2}
    needed = m3attn.workspace_bytes("index_topk", **shape, num_index_heads=case.num_heads, topk=2, block_size=BLOCK, impl=key)
    assert needed <= SMALL_LIMIT
    assert torch.equal(run(), expected)


@pytest.mark.parametrize("mode", pick(["fp32"], ["bf16", "widen_e4m3"]))
@pytest.mark.parametrize("q_len", [1, pick(3, 4), pick(3, 140)])
@pytest.mark.parametrize(("stage", "key"), stage_keys("sparse_attention", "dense_attention"))
def test_a_small_workspace_limit_changes_only_rounding(stage: str, key: str, q_len: int, mode: str, small_limit) -> None:
    step = Step("limit", (q_len,) * pick(2, 8), (3 * BLOCK + q_len,) * pick(2, 8), page_size=BLOCK, block_size=BLOCK)
    case = AttentionCase(step, pick(4, 64), pick(2, 4), pick(64, 128), topk=3 if stage == "sparse_attention" else 0, mode=mode)
    skip_if_declined(stage, key, case.problem(arch()))
    inputs = attention_inputs(case, DEVICE)
    small_limit()
    out, lse = skip_if_refused(lambda: getattr(m3attn, stage)(*inputs.arguments(), **inputs.options, return_lse=True, impl=key))
    attention_bound(inputs.q, inputs.cache, inputs.batch, inputs.ids, **inputs.options).check(out, lse)


@pytest.mark.parametrize("key", keys("index_topk", size="large", kernels_only=True))
def test_a_long_request_in_chunks(key: str) -> None:
    """One request in chunks up to its full length: sampled rows of each chunk against fp64, selection and attention."""
    chunk, chunks = pick(3, 8_192), pick(4, 32)
    length = chunk * chunks if DEVICE == "cuda" else 5 * BLOCK
    dtype = pick("fp32", "bf16")
    step = Step("long", (chunk,), (length,), page_size=BLOCK, block_size=BLOCK, slack_q=pick(17, 0))
    attention = AttentionCase(step, pick(2, 16), pick(1, 4), pick(64, 128), topk=pick(2, 16), mode=dtype)
    torch_dtype = pick(torch.float32, torch.bfloat16)
    index = IndexCase(step, pick(1, 4), pick(64, 128), q_dtype=torch_dtype, k_dtype=torch_dtype, topk=attention.topk)
    skip_if_declined("index_topk", key, index.problem(arch()))
    skip_if_declined("sparse_attention", key, attention.problem(arch()))
    inputs, indexer = attention_inputs(attention, DEVICE), index_inputs(index, DEVICE)
    for end in sorted({chunk, (chunks // 2) * chunk, length}):
        batch = replace(inputs.batch, seq_lens=torch.tensor([end], dtype=torch.int32, device=DEVICE))
        ids = m3attn.index_topk(indexer.index_q, indexer.cache, batch, **indexer.selection, impl=key)
        out, lse = m3attn.sparse_attention(inputs.q, inputs.cache, ids, batch, return_lse=True, impl=key)
        rows = torch.linspace(0, chunk - 1, pick(3, 64), device=DEVICE).long()
        _, position = query_rows(batch, chunk)
        sampled = replace(
            batch,
            page_table=batch.page_table.expand(len(rows), -1),
            seq_lens=(position[rows] + 1).clamp(min=0).int(),
            cu_seqlens_q=torch.arange(len(rows) + 1, dtype=torch.int32, device=DEVICE),
            max_seqlen_q=1,
        )
        exact, tolerance = score_bound(indexer.index_q[rows], indexer.cache, sampled)
        check_id_form(ids[:, rows], sampled, topk=attention.topk, columns=exact.shape[2])
        compare_ids(ids[:, rows], select_blocks(exact, sampled, **indexer.selection), exact, tolerance)
        attention_bound(inputs.q[rows], inputs.cache, sampled, ids[:, rows]).check(out[rows], lse[rows])


def misaligned(x: torch.Tensor) -> torch.Tensor:
    """The same values one element past an aligned address, in rows of an odd number of elements."""
    storage = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    view = storage[1:].view(x.shape)
    view.copy_(x)
    return view


@pytest.mark.parametrize(("stage", "key"), stage_keys("sparse_attention", "dense_attention"))
def test_attention_on_tensors_at_odd_addresses(stage: str, key: str) -> None:
    step = Step("odd", (1, 2), (2 * BLOCK + 3, 5), page_size=BLOCK, block_size=BLOCK)
    case = AttentionCase(step, pick(2, 64), pick(1, 4), pick(64, 128), topk=2 if stage == "sparse_attention" else 0, mode=pick("fp32", "bf16"))
    skip_if_declined(stage, key, case.problem(arch()))
    inputs = attention_inputs(case, DEVICE)
    k, v = inputs.cache.key_value()
    batch = replace(inputs.batch, page_table=misaligned(inputs.batch.page_table), cu_seqlens_q=misaligned(inputs.batch.cu_seqlens_q))
    ids = None if inputs.ids is None else misaligned(inputs.ids)
    odd = AttentionInputs(misaligned(inputs.q), LayerCache(k=misaligned(k), v=misaligned(v)), batch, ids, inputs.options)
    out, lse = skip_if_refused(lambda: getattr(m3attn, stage)(*odd.arguments(), **odd.options, return_lse=True, impl=key))
    attention_bound(inputs.q, inputs.cache, inputs.batch, inputs.ids).check(out, lse)


@pytest.mark.parametrize("key", keys("index_score"))
def test_scores_on_tensors_at_odd_addresses(key: str) -> None:
    step = Step("odd", (1, 2), (2 * BLOCK + 3, 5), page_size=BLOCK, block_size=BLOCK)
    dtype = pick(torch.float32, torch.bfloat16)
    case = IndexCase(step, pick(1, 4), pick(64, 128), q_dtype=dtype, k_dtype=dtype)
    skip_if_declined("index_score", key, case.problem(arch()))
    inputs = index_inputs(case, DEVICE)
    cache = LayerCache(index_k=misaligned(inputs.cache.index_key()))
    scores = skip_if_refused(lambda: m3attn.index_score(misaligned(inputs.index_q), cache, inputs.batch, impl=key))
    assert_within(scores, *score_bound(inputs.index_q, inputs.cache, inputs.batch))


def attention() -> AttentionInputs:
    step = Step("good", (1, 2), (2 * BLOCK + 3, 5), page_size=BLOCK, block_size=BLOCK)
    return attention_inputs(AttentionCase(step, 4, 2, 64, topk=2, mode="fp32"), DEVICE)


BAD_BATCHES = {
    "block_size": {"block_size": 0},
    "block_size ": {"block_size": 24},
    "page_size": {"page_size": 0},
    "max_seqlen_q": {"max_seqlen_q": -1},
    "max_seqlen_k": {"max_seqlen_k": -1},
    "max_seqlen_k ": {"max_seqlen_k": 2**40},
    "seq_lens": {"seq_lens": torch.zeros(2, dtype=torch.int64)},
    "cu_seqlens_q": {"cu_seqlens_q": torch.zeros(2, dtype=torch.int32)},
    "page_table": {"page_table": torch.zeros(3, 4, dtype=torch.int32)},
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_batches_that_do_not_fit_are_refused_by_name(name: str) -> None:
    inputs = attention()
    changes = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in BAD_BATCHES[name].items()}
    with pytest.raises((ValueError, TypeError), match=name.strip()):
        m3attn.sparse_attention(inputs.q, inputs.cache, inputs.ids, replace(inputs.batch, **changes), impl="reference")


@pytest.mark.parametrize(
    ("option", "value"),
    [("topk", 0), ("topk", -1), ("topk", 129), ("topk", 2.5), ("init_blocks", -1), ("local_blocks", -1), ("impl", "nobody")],
)
def test_selections_that_make_no_sense_are_refused_by_name(option: str, value: object) -> None:
    inputs = attention()
    scores = torch.zeros(2, 3, inputs.batch.num_blocks, device=DEVICE)
    with pytest.raises((ValueError, TypeError), match=option):
        m3attn.select_blocks(scores, inputs.batch, **{"impl": "reference", option: value})


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan"), "x", torch.ones(2), torch.ones(1, dtype=torch.float64), True])
def test_scales_that_are_none_are_refused_by_name(scale: object) -> None:
    inputs = attention()
    for argument in ("q_scale", "k_scale", "v_scale"):
        cache = replace(inputs.cache, **({argument: scale} if argument != "q_scale" else {}))
        with pytest.raises((ValueError, TypeError), match=argument):
            m3attn.sparse_attention(inputs.q, cache, inputs.ids, inputs.batch, q_scale=scale if argument == "q_scale" else None, impl="reference")


def test_tensors_that_do_not_fit_are_refused_by_name() -> None:
    inputs = attention()
    q, cache, ids, batch = inputs.arguments()
    k, v = cache.key_value()

    def attempt(match: str, q: object = q, cache: LayerCache = cache, ids: object = ids, **options: object) -> None:
        with pytest.raises((ValueError, TypeError), match=match):
            m3attn.sparse_attention(q, cache, ids, batch, **options, impl="reference")

    attempt("q", q=q[:, :3])
    attempt("q", q=q.to(torch.float8_e5m2))
    attempt("q", q=q.transpose(1, 2).contiguous().transpose(1, 2))
    attempt("q", q=q.flatten(1))
    attempt("cache", cache=LayerCache(k=k))
    attempt("cache", cache=LayerCache(k=k, v=v, kv=torch.cat([k, v], -1)))
    attempt("cache", cache=LayerCache(k=k[..., :32], v=v))
    attempt("cache", cache=LayerCache(k=k.half(), v=v.half()))
    attempt("ids", ids=ids[:1])
    attempt("ids", ids=ids.long())
    attempt("sink_key", sink_key=torch.zeros(3, 64, device=DEVICE))
    attempt("out", out=torch.empty_like(q, dtype=torch.float16))
    attempt("out", out=q)
    attempt("lse_out", lse_out=torch.empty(3, 3, device=DEVICE))
    attempt("fp8_pv", fp8_pv=True)
