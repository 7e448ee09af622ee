"""What stands between m3attn's calls and FlashInfer's kernels, on a stand-in that keeps their published arguments and refusals."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import m3attn
from m3attn.batch import LayerCache, PagedBatch
from m3attn.calls import IndexScoreCall, SelectBlocksCall, SparseAttentionCall
from m3attn.choice import explain
from m3attn.integrations.flashinfer import kernels, limits
from m3attn.scales import Scale
from m3attn.testing.cases import SCORE_KINDS
from m3attn.testing.ids import check_id_form, compare_ids
from m3attn.testing.inputs import score_fill

E4M3 = torch.float8_e4m3fn
PUBLISHED = {
    "proxy_score.py:msa_proxy_score": (
        "q k cu_seqlens_q cu_seqlens_k=None | page_table seqused_k causal max_seqlen_q max_k_tiles output reduce_heads q_offset use_fp32_acc"
    ),
    "sparse_topk_select.py:msa_topk_select": "max_score topk num_valid_pages output force_begin_blocks force_end_blocks |",
    "sparse_prefill.py:msa_sparse_attention": (
        "q k v q2k_indices cu_seqlens_q cu_seqlens_k causal softmax_scale page_table seqused_k return_softmax_lse k_scale v_scale k_global_scale "
        "v_global_scale q_offset return_temperature_lse lse_temperature_scale workspace out |"
    ),
    "sparse_decode.py:msa_sparse_decode_attention": (
        "q k v q2k_indices | page_table seqused_k cu_seqlens_k seqlen_q causal softmax_scale return_softmax_lse k_scale v_scale k_global_scale "
        "v_global_scale q_offset partial_dtype force_fused workspace out"
    ),
}
"""Arguments of FlashInfer 0.7.4, positional ones before the bar and keyword-only ones behind it."""


def test_published_arguments_are_those_of_the_source() -> None:
    folder = Path(os.environ.get("M3ATTN_TEST_FLASHINFER", "absent")) / "msa_ops"
    if not folder.is_dir():
        pytest.skip("no folder with FlashInfer's sources: M3ATTN_TEST_FLASHINFER names the package's folder")
    for where, published in PUBLISHED.items():
        file, name = where.split(":")
        tree = ast.parse((folder / file).read_text())
        (arguments,) = [node.args for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
        positional, keywords = (part.split() for part in published.replace("=None", "").split("|"))
        assert [a.arg for a in arguments.args] == positional and [a.arg for a in arguments.kwonlyargs] == keywords


def need(condition: bool, what: str) -> None:
    assert condition, f"FlashInfer would refuse or misread this: {what}"


class StandIn:
    """FlashInfer's functions for SM90 in eager torch, with what they require of their arguments; page ids are used as they come."""

    def tokens(self, cache: torch.Tensor, pages: torch.Tensor, end: int) -> torch.Tensor:
        flat = torch.cat([cache[int(page)].float() for page in pages[: -(-end // 128)]] or [cache[0, :, :0].float()], dim=-2)
        return flat[..., :end, :]

    def rows(self, offsets: torch.Tensor, seqused_k: torch.Tensor) -> Iterator[tuple[int, int, int]]:
        for request, length in enumerate(seqused_k.tolist()):
            begin, end = int(offsets[request]), int(offsets[request + 1])
            for row in range(begin, end):
                yield request, row, length - end + row

    def msa_proxy_score(
        self, q: Any, k: Any, cu_seqlens_q: Any, *, page_table: Any, seqused_k: Any, max_seqlen_q: int, max_k_tiles: int, output: torch.Tensor
    ) -> torch.Tensor:
        need(q.is_contiguous() and k.is_contiguous() and k.shape[1:] == (1, 128, 128) and q.dtype == k.dtype, "index q or K")
        need(output.shape == (q.shape[1], max_k_tiles, q.shape[0]) and output.is_contiguous(), "output")
        need(all(t.dtype == torch.int32 and t.is_contiguous() for t in (cu_seqlens_q, page_table, seqused_k)), "metadata")
        uniform = max_seqlen_q <= 4 and seqused_k.numel() * max_seqlen_q == q.shape[0]
        need(uniform or q.dtype == E4M3, "16-bit scores of a prefill")
        need(page_table.shape[1] >= max_k_tiles > 0, "page_table narrower than max_k_tiles")
        offsets = torch.arange(0, q.shape[0] + 1, max_seqlen_q) if uniform else cu_seqlens_q
        output.fill_(float("nan"))  # rows that no request owns hold anything
        for request, row, position in self.rows(offsets, seqused_k):
            output[:, :, row] = float("-inf")
            if position >= 0:
                products = q[row].float() @ self.tokens(k, page_table[request], position + 1)[0].T
                best = torch.nn.functional.pad(products, (0, -products.shape[1] % 128), value=float("-inf")).unflatten(1, (-1, 128)).amax(2)
                output[:, : best.shape[1], row] = best
        return output

    def msa_topk_select(
        self, max_score: Any, topk: int, num_valid_pages: Any, output: Any, force_begin_blocks: int, force_end_blocks: int
    ) -> torch.Tensor:
        heads, tiles, tokens = max_score.shape
        need(topk == 16 and max_score.is_contiguous() and max_score.dtype == torch.float32, "scores")
        need(num_valid_pages.dtype == torch.int32 and num_valid_pages.shape == (tokens,) and int(num_valid_pages.max()) <= tiles, "num_valid_pages")
        need(output.shape == (tokens, heads, 16) and force_begin_blocks + force_end_blocks <= topk, "output, forced blocks")
        for token, valid in enumerate(num_valid_pages.tolist()):
            for head in range(heads):
                scores = max_score[head, :valid, token].clone()
                self.check_scores(scores)
                scores[:force_begin_blocks] = scores[max(0, valid - force_end_blocks) :] = float("inf")
                order = scores.sort(descending=True, stable=True)
                best = order.indices[:16][order.values[:16] > float("-inf")].sort().values
                output[token, head] = -1
                output[token, head, : best.numel()] = best.int()
        return output

    def check_scores(self, scores: torch.Tensor) -> None:
        """What its kernels select rightly: no denormals, which they flush, nothing below what they leave out, no forced block's number, no ties."""
        smallest = torch.finfo(torch.float32).smallest_normal
        need(bool((scores.abs() >= smallest).all()) and bool((scores > -1e30).all()) and bool((scores < 1e13).all()), "a score out of range")
        need(scores.unique().numel() == scores.numel(), "equal scores")

    def attend(self, q: Any, k: Any, v: Any, ids: Any, offsets: Any, table: Any, lens: Any, scale: float, v_scale: float, out: Any) -> torch.Tensor:
        need(q.dtype == torch.bfloat16 and q.is_contiguous() and k.dtype == v.dtype == E4M3, "q, K, V")
        need(ids.dtype == torch.int32 and ids.is_contiguous() and ids.shape[2] == 16, "ids")
        need(out.is_contiguous() and out.shape == q.shape and out.dtype == q.dtype, "out")
        heads, group = k.shape[1], q.shape[1] // k.shape[1]
        for request, row, position in self.rows(offsets, lens):
            out[row] = float("nan")
            if position < 0:
                continue
            keys, values = (self.tokens(x, table[request], position + 1) for x in (k, v))
            for head in range(heads):
                own = ids[head, row]
                valid = own[own >= 0]
                need(bool((valid.diff() > 0).all()) and bool((own[: valid.numel()] >= 0).all()), "ids in order, -1 at the tail")
                kept = torch.isin(torch.arange(position + 1) // 128, valid.long())
                weights = (q[row, head * group : (head + 1) * group].float() @ keys[head, kept].T * scale).softmax(-1)
                out[row, head * group : (head + 1) * group] = (weights @ values[head, kept] * v_scale).to(q.dtype)
        return out

    def msa_sparse_attention(
        self, q: Any, k: Any, v: Any, q2k_indices: Any, cu_seqlens_q: Any, *, page_table: Any, seqused_k: Any, causal: bool, softmax_scale: float,
        v_global_scale: float, out: Any,
    ) -> torch.Tensor:  # fmt: skip
        need(causal, "causal")
        return self.attend(q, k, v, q2k_indices, cu_seqlens_q, page_table, seqused_k, softmax_scale, v_global_scale, out)

    def msa_sparse_decode_attention(
        self, q: Any, k: Any, v: Any, q2k_indices: Any, *, page_table: Any, seqused_k: Any, causal: bool, seqlen_q: int, softmax_scale: float,
        v_global_scale: float, out: Any,
    ) -> torch.Tensor:  # fmt: skip
        need(causal and q.shape[0] == seqused_k.numel() * seqlen_q == page_table.shape[0] * seqlen_q, "uniform queries")
        offsets = torch.arange(0, q.shape[0] + 1, seqlen_q)
        return self.attend(q, k, v, q2k_indices, offsets, page_table, seqused_k, softmax_scale, v_global_scale, out)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    module.msa_ops = StandIn()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)


STEPS = {
    "decode": ([1, 1, 0, 1, 1], [3000, 0, 500, 1, 129]),
    "verify": ([4, 1, 0, 3], [2600, 1, 128, 2]),
    "prefill": ([20, 3, 0, 40], [2500, 3, 128, 40]),
}
"""Ragged steps, with a request of no queries, padded ones, and queries before a request's start; three rows belong to none."""


def step(phase: str, dtype: torch.dtype = E4M3, heads: tuple[int, int] = (8, 2)) -> SimpleNamespace:
    q_lens, seq_lens = STEPS[phase]
    generator = torch.Generator().manual_seed(0)
    pages = [-(-n // 128) for n in seq_lens]
    table = torch.full((len(q_lens), max(pages) + 2), 1 << 30, dtype=torch.int32)
    order = iter(torch.randperm(sum(pages) + 1, generator=generator).tolist())
    for request, count in enumerate(pages):
        table[request, :count] = torch.tensor([next(order) for _ in range(count)], dtype=torch.int32)
    batch = PagedBatch.from_lengths(q_lens, seq_lens, table)
    tokens, (num_q, num_kv) = sum(q_lens) + 3, heads
    kv = torch.randn(sum(pages) + 1, num_kv, 128, 256, generator=generator).to(E4M3)
    index_k = torch.randn(sum(pages) + 1, 128, 128, generator=generator).to(dtype)
    q = torch.randn(tokens, num_q, 128, generator=generator).bfloat16()
    index_q = torch.randn(tokens, num_kv, 128, generator=generator).to(dtype)
    return SimpleNamespace(batch=batch, tokens=tokens, q=q, index_q=index_q, cache=LayerCache(kv=kv, index_k=index_k))


def with_poison(batch: PagedBatch) -> PagedBatch:
    """The same step with a wrong bound on nothing, and pages that no token needs out of range."""
    table = batch.page_table.clone()
    table[table == 1 << 30] = -7
    return replace(batch, page_table=table)


CASES = [("decode", E4M3), ("decode", torch.bfloat16), ("verify", E4M3), ("verify", torch.bfloat16), ("prefill", E4M3)]


@pytest.mark.parametrize("phase, dtype", CASES, ids=str)
def test_scores(phase: str, dtype: torch.dtype) -> None:
    own = step(phase, dtype)
    own.cache = replace(own.cache, index_k_scale=2.0)
    expected = m3attn.index_score(own.index_q, own.cache, own.batch, index_q_scale=0.5, impl="reference")
    out = torch.full_like(expected.transpose(1, 2).contiguous(), float("nan")).transpose(1, 2)
    for batch in (own.batch, with_poison(own.batch)):
        kernels.index_score(IndexScoreCall(own.index_q, own.cache.index_k, batch, Scale(0.5), Scale(2.0), out))
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_scores_under_a_bound_that_promises_more_pages() -> None:
    own = step("decode")
    batch = replace(own.batch, page_table=own.batch.page_table[:, :-2], max_seqlen_k=4000)
    assert batch.page_table.shape[1] < batch.num_blocks
    for given in (batch, replace(batch, page_table=batch.page_table[:, :0], seq_lens=torch.zeros_like(batch.seq_lens))):
        expected = m3attn.index_score(own.index_q, own.cache, given, impl="reference")
        out = torch.full_like(expected, float("nan"))
        kernels.index_score(IndexScoreCall(own.index_q, own.cache.index_k, given, Scale(), Scale(), out))
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("init, local", [(0, 1), (2, 3), (0, 0), (40, 40), (12, 9), (30, 2)])
@pytest.mark.parametrize("phase", STEPS)
def test_selection(phase: str, init: int, local: int) -> None:
    own = step(phase)
    scores = torch.randn(2, own.tokens, own.batch.num_blocks, generator=torch.Generator().manual_seed(1))
    scores[:, 0, 3:6], scores[:, 0, 7] = float("-inf"), float("nan")
    expected = m3attn.select_blocks(scores, own.batch, init_blocks=init, local_blocks=local, impl="reference")
    out = torch.full((own.tokens, 2, 16), 99, dtype=torch.int32).transpose(0, 1)
    kernels.select_blocks(SelectBlocksCall(scores, own.batch, 16, init, local, out))
    assert torch.equal(out, expected)


@pytest.mark.parametrize("kind", SCORE_KINDS)
def test_selection_of_any_scores(kind: str) -> None:
    """The matrix's own rule for ids that are not exact."""
    own = step("verify")
    scores = score_fill(kind, 2, own.tokens, own.batch.num_blocks, torch.Generator().manual_seed(2))
    expected = m3attn.select_blocks(scores, own.batch, impl="reference")
    out = torch.full_like(expected, 99)
    kernels.select_blocks(SelectBlocksCall(scores, own.batch, 16, 0, 1, out))
    check_id_form(out, own.batch, topk=16, columns=scores.shape[2])
    finite = scores.double().nan_to_num(nan=-3e38, posinf=3e38, neginf=-3e38)
    exchanges = compare_ids(out, expected, finite, (finite.abs() * 2**-8).clamp(min=2**-126))
    assert not exchanges or kind in ("one_ulp", "one_bin", "denormals", "specials")  # the others are too far apart, or equal


@pytest.mark.parametrize("columns", [1, 2, 17, 513, 8192])
def test_given_scores_keep_their_order(columns: int) -> None:
    random = torch.randint(-(1 << 31), (1 << 31) - 1, (8, columns), generator=torch.Generator().manual_seed(3)).int().view(torch.float32)
    equal = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), -1e-45])[:, None].repeat(1, columns)
    equal[1, ::2] = 0.0
    given = kernels._distinct(torch.cat([random, equal])[None])[0]
    for row in given:
        StandIn().check_scores(row)
    order = given.argsort(dim=-1, descending=True)
    assert all(torch.equal(row, torch.arange(columns)) for row in order[8:]), "equal scores: the lower block first"
    ranked = random.double().nan_to_num(nan=-1e39, posinf=1e39, neginf=-1e39).gather(-1, order[:8])
    near = (ranked.abs() * 2**-8).clamp(min=2**-126)
    assert bool((ranked.diff(dim=-1) <= near[:, 1:]).all()), "a lower score before a higher one, and not near it"


@pytest.mark.parametrize("phase", STEPS)
def test_attention(phase: str) -> None:
    own = step(phase)
    own.cache = replace(own.cache, k_scale=0.5, v_scale=2.0)
    ids = m3attn.index_topk(own.index_q, own.cache, own.batch, impl="reference")
    expected = m3attn.sparse_attention(own.q, own.cache, ids, own.batch, impl="reference")
    mixed = torch.where(ids < 0, 1 << 28, ids)[..., torch.randperm(16, generator=torch.Generator().manual_seed(0))]
    k, v = own.cache.key_value()
    for batch, given in ((own.batch, ids), (with_poison(own.batch), mixed.transpose(0, 1).contiguous().transpose(0, 1))):
        out = torch.full_like(own.q, float("nan"))
        call = SparseAttentionCall(
            own.q, k, v, given, batch, 128**-0.5, Scale(), Scale(0.5), Scale(2.0), None, fp8_pv=False, out=out, lse=None, workspace=None
        )
        kernels.sparse_attention(call)
        torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
    for wrong, match in (
        (replace(call, k_scale=Scale(1.0, torch.ones(1))), "cache.k_scale as None or a float"),
        (replace(call, k=k.clone()), "halves of one dense"),
    ):
        with pytest.raises(m3attn.UnsupportedProblem, match=match):
            kernels.sparse_attention(wrong)


def test_large_pools_are_refused() -> None:
    pool = torch.empty(1, dtype=E4M3).expand(1 << 17, 128, 128)
    large = torch.empty(pool.shape, dtype=E4M3, device="meta")
    with pytest.raises(m3attn.UnsupportedProblem, match=r"cache\.index_k below 2 GiB"):
        kernels._check_pool("cache.index_k", large, dense=True)
    kernels._check_pool("cache.index_k", large[1:], dense=True)
    with pytest.raises(m3attn.UnsupportedProblem, match="one dense tensor"):
        kernels._check_pool("cache.index_k", pool, dense=True)


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    def pretend(version: str | None) -> None:
        monkeypatch.setattr(limits, "installed", lambda: version)

    monkeypatch.setitem(m3attn.registry._importable, "flashinfer", True)
    return pretend


HOPPER = {"arch": "sm_90", "q_dtype": "bf16", "kv_dtype": "fp8_e4m3", "zero_on_alloc": True}
LIMITS = [
    ("sparse_attention", {"num_q_heads": 48}, "group size 12: wrong results without an error"),
    ("sparse_attention", {"num_q_heads": 28}, "group size 7: takes 4, 8, 16"),
    ("sparse_attention", {"kv_dtype": "bf16"}, "takes fp8_e4m3"),
    ("sparse_attention", {"q_dtype": "fp8_e4m3"}, "takes bf16"),
    ("sparse_attention", {"topk": 8}, "topk 8"),
    ("sparse_attention", {"zero_on_alloc": False}, "declare such a cache with zero_on_alloc=True"),
    ("sparse_attention", {"lse": True}, "returns no LSE"),
    ("sparse_attention", {"sink": True}, "has no sink key"),
    ("sparse_attention", {"arch": "sm_100"}, "built for sm_90"),
    ("sparse_attention", {"arch": "cpu"}, "NVIDIA GPUs only"),
    ("index_score", {"num_index_heads": 3, "index_q_dtype": "fp8_e4m3", "index_dtype": "fp8_e4m3"}, "index heads 3: takes 1, 2, 4"),
    ("index_score", {}, "bf16 in a prefill: takes fp8_e4m3"),
    ("index_score", {"index_q_dtype": "fp8_e4m3"}, "takes equal formats"),
    ("index_score", {"page_size": 64}, "page size 64"),
    ("select_blocks", {"topk": 8}, "topk 8"),
]


@pytest.mark.parametrize("stage, fields, reason", LIMITS)
def test_limits_are_declared(stage: str, fields: dict[str, Any], reason: str, release: Callable[[str | None], None]) -> None:
    release("0.7.4")
    base = HOPPER if stage == "sparse_attention" else {"arch": "sm_90"}
    found = explain(stage, impl="flashinfer", **(base | fields))
    assert found.chosen is None and any(reason in r for r in found.reasons["flashinfer"]), found


def test_named_and_never_automatic(release: Callable[[str | None], None]) -> None:
    release("0.7.4")
    for stage, fields in (("sparse_attention", HOPPER), ("select_blocks", {"arch": "sm_90"}), ("index_score", {"arch": "sm_90", "phase": "decode"})):
        assert explain(stage, impl="flashinfer", **fields).chosen == "flashinfer"
        assert "flashinfer" not in explain(stage, **fields).reasons
    release("0.8.0")
    assert "needs the package flashinfer-python 0.7.4, got 0.8.0" in str(explain("select_blocks", impl="flashinfer", arch="sm_90"))
    release(None)
    assert "which is not installed" in str(explain("select_blocks", impl="flashinfer", arch="sm_90"))
