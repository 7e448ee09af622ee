"""The index kernels against a plain loop over tokens, in Triton's interpreter: schedules, layouts, ties, forced blocks, poison."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import math

import pytest
import torch

from m3attn.batch import PagedBatch
from m3attn.calls import IndexScoreCall, IndexTopkCall, SelectBlocksCall
from m3attn.scales import UNIT, Scale
from m3attn.triton_kernels.index_score import index_score
from m3attn.triton_kernels.index_topk import index_topk, workspace_bytes
from m3attn.triton_kernels.select_blocks import select_blocks
from m3attn.workspace import WorkShape

E4M3 = torch.float8_e4m3fn
INF = float("inf")


def make_step(q_lens, seq_lens, *, heads=2, dim=64, page_size=16, block_size=32, rows_behind=0, q_dtype=torch.float32, k_dtype=torch.float32, seed=0):
    """(index_q, index_k, batch): shuffled pages, and NaN in every slot and page that no query may see."""
    generator = torch.Generator().manual_seed(seed)
    max_pages = max(-(-n // page_size) for n in seq_lens) + 1
    num_pages = len(seq_lens) * max_pages + 2
    order = torch.randperm(num_pages, generator=generator)
    table = order[: len(seq_lens) * max_pages].reshape(len(seq_lens), max_pages).to(torch.int32)
    index_k = torch.full((num_pages, page_size, dim), float("nan"))
    for request, seq_len in enumerate(seq_lens):
        for position in range(seq_len):
            index_k[table[request, position // page_size], position % page_size] = torch.randn(dim, generator=generator)
        table[request, -(-seq_len // page_size) :] = 1 << 30
    index_q = torch.randn(sum(q_lens) + rows_behind, heads, dim, generator=generator)
    batch = PagedBatch.from_lengths(q_lens, seq_lens, table, page_size=page_size, block_size=block_size)
    return index_q.to(q_dtype), index_k.to(k_dtype), batch


def row_positions(batch, num_rows):
    """(request, position) of each query row; padded rows are at position -1."""
    rows = [(0, -1)] * num_rows
    offsets = batch.cu_seqlens_q.tolist()
    for request, seq_len in enumerate(batch.seq_lens.tolist()):
        for row in range(offsets[request], offsets[request + 1]):
            rows[row] = (request, seq_len - (offsets[request + 1] - offsets[request]) + row - offsets[request])
    return rows


def expected_scores(index_q, index_k, batch, scale=1.0):
    scores = torch.full((index_q.shape[1], index_q.shape[0], batch.num_blocks), -INF, dtype=torch.float64)
    index_k = index_k.to(torch.float64)
    for row, (request, position) in enumerate(row_positions(batch, index_q.shape[0])):
        for block in range(position // batch.block_size + 1):
            visible = torch.arange(block * batch.block_size, min((block + 1) * batch.block_size, position + 1))
            pages = batch.page_table[request, visible // batch.page_size].long()
            keys = index_k[pages, visible % batch.page_size]
            products = keys @ index_q[row].to(torch.float64).T
            scores[:, row, block] = torch.where(products.isnan(), -INF, products).max(dim=0).values * scale
    return scores


def expected_ids(scores, batch, topk, init_blocks, local_blocks):
    heads, num_rows, columns = scores.shape
    ids = torch.full((heads, num_rows, topk), -1, dtype=torch.int32)
    for row, (_, position) in enumerate(row_positions(batch, num_rows)):
        num_live = 0 if position < 0 else min(position // batch.block_size + 1, columns)
        forced = list(range(num_live - 1, max(num_live - local_blocks, 0) - 1, -1))
        forced = (forced + [b for b in range(min(init_blocks, num_live)) if b not in forced])[:topk]
        for head in range(heads):
            value = [-INF if math.isnan(s) else s for s in scores[head, row].tolist()]
            rest = sorted((b for b in range(num_live) if b not in forced), key=lambda b: (-value[b], b))
            chosen = sorted(forced + rest[: topk - len(forced)])
            ids[head, row, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return ids


def run_score(index_q, index_k, batch, *, q_scale=UNIT, k_scale=UNIT, token_major=False):
    shape = (index_q.shape[1], index_q.shape[0], batch.num_blocks)
    out = torch.full((shape[1], shape[0], shape[2]) if token_major else shape, float("nan"))
    out = out.transpose(0, 1) if token_major else out
    index_score(IndexScoreCall(index_q, index_k, batch, q_scale, k_scale, out))
    return out


def run_select(scores, batch, topk, init_blocks, local_blocks):
    out = torch.full((scores.shape[1], scores.shape[0], topk), 7, dtype=torch.int32).transpose(0, 1)
    select_blocks(SelectBlocksCall(scores, batch, topk, init_blocks, local_blocks, out))
    return out


def assert_scores(actual, expected, tolerance=1e-5):
    assert torch.equal(actual == -INF, expected == -INF)
    torch.testing.assert_close(actual.to(torch.float64), expected, rtol=tolerance, atol=tolerance)


STEPS = {
    "prefill, ragged, prefix, padded request and rows": dict(q_lens=[20, 1, 0, 9], seq_lens=[50, 70, 33, 4], rows_behind=3),
    "prefill, three heads": dict(q_lens=[17, 3], seq_lens=[40, 90], heads=3),
    "prefill, block 16": dict(q_lens=[18], seq_lens=[75], block_size=16),
    "prefill, block 128 in pages of 64": dict(q_lens=[17], seq_lens=[150], block_size=128, page_size=64),
    "decode": dict(q_lens=[1, 1, 1], seq_lens=[130, 1, 0], heads=4, rows_behind=2),
    "verify, ragged, negative positions": dict(q_lens=[5, 2, 7], seq_lens=[100, 1, 64], heads=3),
    "verify, block 256": dict(q_lens=[3], seq_lens=[300], block_size=256, page_size=256),
    "verify, block 16": dict(q_lens=[2], seq_lens=[75], block_size=16, rows_behind=1),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_scores(step):
    index_q, index_k, batch = make_step(**step)
    assert_scores(run_score(index_q, index_k, batch, token_major=batch.num_requests > 1), expected_scores(index_q, index_k, batch))


@pytest.mark.parametrize(
    "q_dtype, k_dtype",
    [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, E4M3), (E4M3, torch.float16), (E4M3, E4M3), (torch.bfloat16, torch.float16)],
)
@pytest.mark.parametrize("q_len", [18, 2])
def test_dtypes_and_scales(q_dtype, k_dtype, q_len):
    index_q, index_k, batch = make_step([q_len], [70], q_dtype=q_dtype, k_dtype=k_dtype)
    actual = run_score(index_q, index_k, batch, q_scale=Scale(0.5), k_scale=Scale(1.0, torch.tensor([3.0])))
    assert_scores(actual, expected_scores(index_q, index_k, batch, scale=1.5))


@pytest.mark.parametrize("q_len", [17, 1])
def test_nan_products(q_len):
    index_q, index_k, batch = make_step([q_len], [70])
    page = batch.page_table[0]
    index_k[page[0], 3] = float("nan")
    index_k[page[2:4]] = float("nan")
    actual = run_score(index_q, index_k, batch)
    assert_scores(actual, expected_scores(index_q, index_k, batch))
    assert (actual[:, -1, 1] == -INF).all() and actual[:, -1, 0].isfinite().all()


SPECIAL = torch.tensor([float("nan"), -INF, INF, -0.0, 0.0, 1.0, -1.0, 1e-40, 3e38, -3e38])


@pytest.mark.parametrize("topk, init_blocks, local_blocks", [(1, 0, 1), (4, 0, 1), (4, 2, 1), (5, 3, 3), (3, 2, 9), (16, 0, 0), (6, 40, 0)])
def test_select(topk, init_blocks, local_blocks):
    _, _, batch = make_step([18, 1, 2, 0, 3], [330, 1, 1, 70, 200], block_size=16, rows_behind=2)
    generator = torch.Generator().manual_seed(topk)
    scores = SPECIAL[torch.randint(0, len(SPECIAL), (2, 26, batch.num_blocks), generator=generator)]
    scores[1, ::2] = torch.randn(13, batch.num_blocks, generator=generator)
    expected = expected_ids(scores, batch, topk, init_blocks, local_blocks)
    assert torch.equal(run_select(scores, batch, topk, init_blocks, local_blocks), expected)


def test_select_equal_scores_and_wide_rows():
    _, _, batch = make_step([2, 1], [80, 16 * 70], block_size=16)
    scores = torch.full((1, 3, batch.num_blocks), float("nan"))
    assert torch.equal(run_select(scores, batch, 7, 0, 1), expected_ids(scores, batch, 7, 0, 1))


@pytest.mark.parametrize("q_lens, seq_lens", [([18, 2], [130, 400]), ([3, 1], [130, 400])])
def test_fused_equals_stages(q_lens, seq_lens):
    index_q, index_k, batch = make_step(q_lens, seq_lens, rows_behind=2, block_size=16)
    heads, tokens = index_q.shape[1], index_q.shape[0]
    expected = run_select(run_score(index_q, index_k, batch), batch, 4, 1, 1)
    shape = WorkShape(tokens, batch.num_requests, 0, heads, heads, 128, 4, batch.max_seqlen_q, batch.max_seqlen_k, 16, 1 << 30)
    whole = workspace_bytes(shape)
    assert whole == tokens * heads * 32 * 4
    for nbytes in (whole, whole // 3):
        out = torch.full((heads, tokens, 4), 7, dtype=torch.int32)
        workspace = torch.full((nbytes,), 255, dtype=torch.uint8)
        index_topk(IndexTopkCall(index_q, index_k, batch, 4, 1, 1, UNIT, UNIT, out, workspace))
        assert torch.equal(out, expected)


def test_few_blocks_and_no_requests():
    index_q, index_k, batch = make_step([17], [40])
    out = torch.full((2, 17, 8), 7, dtype=torch.int32)
    index_topk(IndexTopkCall(index_q, index_k, batch, 8, 0, 1, UNIT, UNIT, out, None))
    assert torch.equal(out, expected_ids(torch.zeros(2, 17, 2), batch, 8, 0, 1))
    empty = PagedBatch(torch.zeros(0, 4, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 17, 40, 16, 32)
    index_topk(IndexTopkCall(index_q, index_k, empty, 8, 0, 1, UNIT, UNIT, out, None))
    assert (out == -1).all()
    assert (run_score(index_q, index_k, empty) == -INF).all()
