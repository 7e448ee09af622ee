"""The reference indexer against loops over single tokens. Selection is checked against a plain sort in tests/faults/test_select_blocks.py."""

import math

import pytest
import torch

from m3attn.reference import numerics
from m3attn.reference.index import index_score, index_topk, select_blocks
from m3attn.testing.cases import IndexCase, Step
from m3attn.testing.inputs import index_inputs

STEP = Step("mixed", (3, 0, 5, 1, 2), (3, 9, 7, 0, 40), page_size=16, block_size=16, padded_rows=1, slack=20)
CASE = IndexCase(STEP, num_heads=3, dim=16, q_dtype=torch.float32, k_dtype=torch.float32, topk=2)


def loop_scores(q: torch.Tensor, pool: torch.Tensor, batch, factor: float) -> torch.Tensor:
    scores = torch.full((q.shape[1], q.shape[0], batch.num_blocks), -math.inf, dtype=q.dtype)
    offsets = batch.cu_seqlens_q.tolist()
    for b, seq_len in enumerate(batch.seq_lens.tolist()):
        for row in range(offsets[b], offsets[b + 1]):
            for j in range(seq_len - offsets[b + 1] + row + 1):
                key = pool[int(batch.page_table[b, j // batch.page_size]), j % batch.page_size]
                for h in range(q.shape[1]):
                    product, block = q[row, h] @ key * factor, j // batch.block_size
                    if product > scores[h, row, block]:
                        scores[h, row, block] = product
    return scores


@pytest.mark.parametrize("poisoned_key", [False, True])
def test_against_loops(poisoned_key: bool) -> None:
    inputs = index_inputs(CASE, "cpu")
    pool = inputs.cache.index_key().double()
    if poisoned_key:
        pool[int(inputs.batch.page_table[4, 1]), 2] = math.nan
        pool[int(inputs.batch.page_table[4, 0])] = math.nan
    expected = loop_scores(inputs.index_q.double(), pool, inputs.batch, 0.3)
    scores = index_score(inputs.index_q.double(), pool, inputs.batch, index_q_scale=0.1, index_k_scale=3.0)
    torch.testing.assert_close(scores, expected, rtol=1e-7, atol=1e-12)


def test_chunks_of_tokens_give_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = index_inputs(CASE, "cpu")
    q, pool = inputs.index_q.double(), inputs.cache.index_key().double()
    scores, ids = index_score(q, pool, inputs.batch), index_topk(q, pool, inputs.batch, topk=2)
    monkeypatch.setattr(numerics, "CHUNK_BYTES", 1)
    torch.testing.assert_close(index_score(q, pool, inputs.batch), scores, rtol=1e-12, atol=0)
    assert torch.equal(index_topk(q, pool, inputs.batch, topk=2), ids)
    assert torch.equal(select_blocks(scores, inputs.batch, topk=2), ids)


def test_scores_are_differentiable() -> None:
    inputs = index_inputs(IndexCase(Step("two", (2,), (20,), page_size=16, block_size=16), num_heads=1, dim=4), "cpu")
    pool = inputs.cache.index_key().double().nan_to_num(0.1)

    def fn(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return index_score(q, k, inputs.batch)

    assert torch.autograd.gradcheck(fn, [inputs.index_q.double().requires_grad_(), pool.requires_grad_()])
