"""Overlap, attention mass and output error against what they are defined as."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import m3attn
from m3attn.analysis import attention_mass, output_error, overlap

SIZE = 16


def step(q_lens=(40, 1, 0, 7), seq_lens=(40, 33, 9, 50), heads=(4, 2), dim=64, dtype=torch.float32, seed=0):
    """q, cache, batch and ids of a step with poisoned pages, and each request's keys and values."""
    generator = torch.Generator().manual_seed(seed)
    pages = sum(-(-n // SIZE) for n in seq_lens) + 2
    order = torch.randperm(pages, generator=generator)
    kv = torch.full((pages, heads[1], SIZE, 2 * dim), float("nan"))
    table = torch.full((len(q_lens), max(-(-n // SIZE) for n in seq_lens)), 10**6, dtype=torch.int32)
    first, keys = 0, []
    for b, n in enumerate(seq_lens):
        own = order[first : first + -(-n // SIZE)]
        first += len(own)
        table[b, : len(own)] = own.int()
        tokens = torch.randn(heads[1], n, 2 * dim, generator=generator)
        for i, page in enumerate(own):
            part = tokens[:, i * SIZE : (i + 1) * SIZE]
            kv[page, :, : part.shape[1]] = part
        keys.append(tokens)
    batch = m3attn.PagedBatch.from_lengths(q_lens, seq_lens, table, page_size=SIZE, block_size=SIZE)
    q = 3 * torch.randn(sum(q_lens) + 2, heads[0], dim, generator=generator)
    ids = m3attn.select_blocks(torch.randn(heads[1], q.shape[0], batch.num_blocks, generator=generator), batch, topk=2)
    return q.to(dtype), m3attn.LayerCache(kv=kv.to(dtype)), batch, ids, keys


def test_overlap():
    ids = torch.tensor([[[0, 2, 5, -1], [1, -1, -1, -1], [-1, -1, -1, -1]]], dtype=torch.int32)
    baseline = torch.tensor([[[0, 1, 2], [2, 3, -1], [-1, -1, -1]]], dtype=torch.int32)
    torch.testing.assert_close(overlap(ids, baseline), torch.tensor([[2 / 3, 0.0, 1.0]]))
    torch.testing.assert_close(overlap(baseline, ids), torch.tensor([[2 / 3, 0.0, 1.0]]))
    assert overlap(ids, ids).eq(1).all()
    with pytest.raises(ValueError, match=r"baseline: expected shape \[1, 3, K2\], got \[1, 2, 3\]"):
        overlap(ids, baseline[:, :2])


def test_mass_is_the_share_of_the_dense_softmax():
    q, cache, batch, ids, keys = step()
    mass = attention_mass(q, cache, batch, ids, dtype=torch.float64)
    row = 0
    for b, (n, length) in enumerate(zip((40, 1, 0, 7), (40, 33, 9, 50), strict=True)):
        for position in range(length - n, length):
            for head in range(4):
                weights = (keys[b][head // 2, : position + 1, :64].double() @ q[row, head].double() / 8).softmax(dim=0)
                chosen = torch.isin(torch.arange(position + 1) // SIZE, ids[head // 2, row])
                assert mass[row, head].item() == pytest.approx(weights[chosen].sum().item(), abs=1e-9)
            row += 1
    assert row == 48 and mass[row:].eq(0).all() and 0.1 < mass[:row].mean() < 0.99


def test_mass_agrees_with_the_stages_lse():
    q, cache, batch, ids, _ = step(seed=1)
    _, sparse = m3attn.sparse_attention(q, cache, ids, batch, return_lse=True)
    _, dense = m3attn.dense_attention(q, cache, batch, return_lse=True)
    torch.testing.assert_close(attention_mass(q, cache, batch, ids)[:48], (sparse - dense).exp()[:48], rtol=1e-4, atol=1e-5)


def test_mass_ignores_ids_of_blocks_that_are_not_there_and_reads_fp8_with_its_scales():
    q, cache, batch, ids, _ = step(seed=2)
    wild = torch.cat([torch.full_like(ids[..., :1], 10**6), ids, torch.full_like(ids[..., :1], -7)], dim=2)
    assert torch.equal(attention_mass(q, cache, batch, wild), attention_mass(q, cache, batch, ids))
    small = m3attn.LayerCache(kv=cache.kv.to(torch.float8_e4m3fn), k_scale=2.0, v_scale=3.0)
    same = m3attn.LayerCache(kv=small.kv.float() * 2.0)
    torch.testing.assert_close(attention_mass(q.bfloat16(), small, batch, ids), attention_mass(q.bfloat16().float(), same, batch, ids))


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return result


def test_mass_forms_no_square():
    tokens, heads = 2048, 2
    q, cache, batch, ids, _ = step((tokens,), (tokens,), heads=(heads, 1), dim=16)
    with Largest() as seen:
        attention_mass(q, cache, batch, ids)
    assert seen.numel <= 3 * tokens * heads * SIZE < tokens * tokens / 16


def test_output_error_is_relative_to_dense_attention():
    q, cache, batch, ids, _ = step()
    everything = torch.arange(batch.num_blocks, dtype=torch.int32).expand(2, q.shape[0], -1)
    assert output_error(q, cache, batch, everything).max() < 1e-5
    error = output_error(q, cache, batch, ids)
    sparse, dense = m3attn.sparse_attention(q, cache, ids, batch), m3attn.dense_attention(q, cache, batch)
    row, head = 30, 3
    assert error[row, head].item() == pytest.approx(((sparse - dense)[row, head].norm() / dense[row, head].norm()).item())
    assert error[48:].eq(0).all() and error[:48].max() > 0.1
    with pytest.raises(ValueError, match="'nobody' is not a key of stage sparse_attention"):
        output_error(q, cache, batch, ids, impl="sparse_attention=nobody")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, cache, ids: (q[0], cache, ids), r"q: expected shape \[T, Hq, D\]"),
        (lambda q, cache, ids: (q, cache, ids[:, :5]), r"ids: expected shape \[2, 50, K\], got \[2, 5, 2\]"),
        (lambda q, cache, ids: (q, cache, ids.long()), r"ids: expected torch.int32, got torch.int64"),
        (lambda q, cache, ids: (q, "cache", ids), r"cache: expected a LayerCache"),
    ],
)
def test_mass_names_what_does_not_fit(change, message):
    q, cache, batch, ids, _ = step()
    q, cache, ids = change(q, cache, ids)
    with pytest.raises((TypeError, ValueError), match=message):
        attention_mass(q, cache, batch, ids)
