"""PagedBatch: phase, blocks, builders that check, and rows that no request owns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from stage_calls import HEAD_DIM, KV_HEADS, Q_HEADS, make_batch, make_cache, normal

import m3attn

TABLE = torch.zeros(2, 4, dtype=torch.int32)


@pytest.mark.parametrize("longest, phase", [(0, "decode"), (1, "decode"), (2, "verify"), (16, "verify"), (17, "prefill"), (4096, "prefill")])
def test_phase_follows_the_host_bound(longest: int, phase: str) -> None:
    assert replace(make_batch(), max_seqlen_q=longest).phase == phase


@pytest.mark.parametrize("bound, blocks", [(0, 0), (1, 1), (16, 1), (17, 2), (160, 10)])
def test_blocks_follow_the_host_bound(bound: int, blocks: int) -> None:
    assert replace(make_batch(), max_seqlen_k=bound).num_blocks == blocks


def test_from_lengths_makes_offsets_and_bounds() -> None:
    batch = m3attn.PagedBatch.from_lengths([3, 0], [40, 7], TABLE, page_size=16, block_size=32)
    assert batch.cu_seqlens_q.tolist() == [0, 3, 3] and batch.seq_lens.tolist() == [40, 7]
    assert (batch.max_seqlen_q, batch.max_seqlen_k, batch.num_requests, batch.num_blocks) == (3, 40, 2, 2)
    assert {t.dtype for t in (batch.cu_seqlens_q, batch.seq_lens, batch.page_table)} == {torch.int32}
    wide = m3attn.PagedBatch.from_lengths([3, 0], [40, 7], TABLE, page_size=16, max_seqlen_q=8, max_seqlen_k=64)
    assert (wide.max_seqlen_q, wide.max_seqlen_k) == (8, 64)


def test_from_lengths_keeps_the_callers_page_table() -> None:
    view = torch.zeros(2, 9, dtype=torch.int32)[:, :4]
    assert m3attn.PagedBatch.from_lengths([1, 1], [1, 1], view).page_table.data_ptr() == view.data_ptr()
    assert m3attn.PagedBatch.from_lengths([1, 1], [1, 1], view.long()).page_table.dtype == torch.int32


def test_no_requests() -> None:
    batch = m3attn.PagedBatch.from_lengths([], [], torch.zeros(0, 0, dtype=torch.int32))
    assert (batch.num_requests, batch.max_seqlen_q, batch.num_blocks) == (0, 0, 0)
    assert batch.cu_seqlens_q.tolist() == [0]


@pytest.mark.parametrize(
    "arguments, options, error, message",
    [
        (([1], [1, 1], TABLE), {}, ValueError, r"q_lens and seq_lens: expected equal lengths, got 1 and 2"),
        (([1, -1], [1, 1], TABLE), {}, ValueError, r"q_lens: expected lengths >= 0, got -1 at index 1"),
        (([1, 1], [-3, 1], TABLE), {}, ValueError, r"seq_lens: expected lengths >= 0, got -3 at index 0"),
        (([5, 1], [1, 1], TABLE), {"max_seqlen_q": 4}, ValueError, r"max_seqlen_q: expected at least 5, the longest of q_lens, got 4"),
        (([1, 1], [9, 1], TABLE), {"max_seqlen_k": 8}, ValueError, r"max_seqlen_k: expected at least 9, the longest of seq_lens, got 8"),
        (([1], [1], TABLE), {}, ValueError, r"page_table: expected \[1, max_pages\], got \(2, 4\)"),
        (([1, 1], [1, 1], TABLE[0]), {}, ValueError, r"page_table: expected \[2, max_pages\], got \(4,\)"),
        (([1, 1], [65, 1], TABLE), {"page_size": 16}, ValueError, r"page_table: expected at least 5 columns for 65 tokens in pages of 16, got 4"),
        (([1, 1], [1, 1], TABLE), {"page_size": 0}, ValueError, r"page_size: expected at least 1, got 0"),
        (([1, 1], [1, 1], [[0], [0]]), {}, TypeError, r"page_table: expected a tensor, got list"),
    ],
)
def test_lists_that_do_not_fit_are_refused(arguments: tuple, options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        m3attn.PagedBatch.from_lengths(*arguments, **options)


@pytest.mark.parametrize("extra", [1, 7])
def test_rows_beyond_the_last_request_are_empty(extra: int) -> None:
    batch = make_batch((5, 0, 2), (40, 0, 2))
    rows = 7 + extra
    q, index_q = normal(rows, Q_HEADS, HEAD_DIM), normal(rows, KV_HEADS, HEAD_DIM)
    cache = make_cache()
    scores = m3attn.index_score(index_q, cache, batch)
    ids = m3attn.index_topk(index_q, cache, batch, topk=2)
    assert scores[:, 7:].eq(float("-inf")).all() and ids[:, 7:].eq(-1).all()
    assert not ids[:, :7].eq(-1).all(dim=-1).any()
    given = torch.zeros_like(ids)
    for out, lse in (
        m3attn.sparse_attention(q, cache, given, batch, return_lse=True, sink_key=q[0]),
        m3attn.dense_attention(q, cache, batch, return_lse=True, sink_key=q[0]),
    ):
        assert out[7:].eq(0).all() and lse[7:].eq(float("-inf")).all()
        assert out[:7].abs().sum(dim=-1).gt(0).all() and lse[:7].isfinite().all()


def test_queries_at_negative_positions_are_empty() -> None:
    batch = make_batch((5,), (2,))
    q, cache = normal(5, Q_HEADS, HEAD_DIM), make_cache()
    ids = m3attn.index_topk(normal(5, KV_HEADS, HEAD_DIM), cache, batch, topk=2)
    assert ids[:, :3].eq(-1).all() and ids[:, 3:, 0].eq(0).all()
    out, lse = m3attn.sparse_attention(q, cache, ids, batch, return_lse=True)
    assert out[:3].eq(0).all() and lse[:3].eq(float("-inf")).all() and lse[3:].isfinite().all()


def test_no_rows_at_all() -> None:
    batch = make_batch((0, 0), (5, 0))
    q, index_q, cache = normal(0, Q_HEADS, HEAD_DIM), normal(0, KV_HEADS, HEAD_DIM), make_cache()
    assert m3attn.index_score(index_q, cache, batch).shape == (KV_HEADS, 0, 1)
    ids = m3attn.index_topk(index_q, cache, batch, topk=2)
    assert ids.shape == (KV_HEADS, 0, 2)
    assert m3attn.sparse_attention(q, cache, ids, batch).shape == q.shape
    assert m3attn.dense_attention(q, cache, batch).shape == q.shape


def test_a_packed_cache_equals_its_halves() -> None:
    packed, batch = make_cache(packed=True), make_batch()
    halves = m3attn.LayerCache(k=packed.kv[..., :HEAD_DIM], v=packed.kv[..., HEAD_DIM:])
    q = normal(8, Q_HEADS, HEAD_DIM)
    assert torch.equal(m3attn.dense_attention(q, packed, batch), m3attn.dense_attention(q, halves, batch))
    k, v = packed.key_value()
    assert k.data_ptr() == packed.kv.data_ptr() and v.data_ptr() == packed.kv.data_ptr() + 2 * HEAD_DIM


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_lens": [1.9, 1]}, "q_lens: expected integers, got 1.9 at index 0"),
        ({"seq_lens": [3, torch.tensor(2.0)]}, "seq_lens: expected integers, got tensor\\(2.\\) at index 1"),
        ({"page_table": torch.zeros(2, 1)}, "page_table: expected int32 or int64 page ids, got torch.float32"),
    ],
)
def test_from_lengths_takes_integers(changes: dict, message: str) -> None:
    good = {"q_lens": [1, 1], "seq_lens": [3, torch.tensor(2)], "page_table": torch.zeros(2, 1, dtype=torch.int64)}
    assert m3attn.PagedBatch.from_lengths(**good).seq_lens.tolist() == [3, 2]
    with pytest.raises(TypeError, match=message):
        m3attn.PagedBatch.from_lengths(**(good | changes))
