"""The reference against loops over single tokens, its gradients, and its independence of the process's precision settings."""

import math

import pytest
import torch

from m3attn.batch import PagedBatch
from m3attn.reference import numerics
from m3attn.reference.dense import dense_attention
from m3attn.reference.merge import merge_attention_states
from m3attn.reference.sparse import sparse_attention
from m3attn.testing.cases import AttentionCase, Step
from m3attn.testing.inputs import AttentionInputs, attention_inputs, generator

STEP = Step("mixed", (3, 0, 5, 1, 2), (3, 9, 7, 0, 40), page_size=16, block_size=16, padded_rows=1)
SPARSE = AttentionCase(STEP, 4, 2, head_dim=16, topk=2, mode="fp32", sink=torch.float32)


def double_inputs(case: AttentionCase) -> tuple[AttentionInputs, torch.Tensor, torch.Tensor, torch.Tensor]:
    inputs = attention_inputs(case, "cpu")
    k, v = (pool.double() for pool in inputs.cache.key_value())
    return inputs, inputs.q.double(), k, v


def loop_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: PagedBatch, ids: torch.Tensor | None, sink_key: torch.Tensor | None, scales: tuple
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token, one head, one key at a time."""
    sm_scale, q_scale, k_scale, v_scale = scales
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -math.inf, dtype=q.dtype)
    group = q.shape[1] // k.shape[1]
    offsets, lengths = batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist()
    for b, seq_len in enumerate(lengths):
        for row in range(offsets[b], offsets[b + 1]):
            position = seq_len - offsets[b + 1] + row
            for h in range(q.shape[1]):
                tokens = [j for j in range(position + 1) if ids is None or j // batch.block_size in ids[h // group, row].tolist()]
                if not tokens:
                    continue
                where = [(int(batch.page_table[b, j // batch.page_size]), h // group, j % batch.page_size) for j in tokens]
                logits = torch.stack([q[row, h] @ k[w] for w in where]) * sm_scale * q_scale * k_scale
                lse[row, h] = logits.logsumexp(0)
                denominator = lse[row, h]
                if sink_key is not None:
                    denominator = torch.logaddexp(denominator, q[row, h] @ sink_key[h] * sm_scale * q_scale)
                out[row, h] = sum((x - denominator).exp() * v[w] for x, w in zip(logits, where, strict=True)) * v_scale
    return out, lse


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("with_sink", [True, False])
def test_against_loops(sparse: bool, with_sink: bool) -> None:
    inputs, q, k, v = double_inputs(SPARSE)
    sink = inputs.options["sink_key"].double() if with_sink else None
    options = {"sm_scale": 0.3, "q_scale": 1.5, "k_scale": 0.5, "v_scale": 2.0}
    expected, expected_lse = loop_attention(q, k, v, inputs.batch, inputs.ids if sparse else None, sink, tuple(options.values()))
    if sparse:
        out, lse = sparse_attention(q, k, v, inputs.ids, inputs.batch, sink_key=sink, **options)
    else:
        out, lse = dense_attention(q, k, v, inputs.batch, sink_key=sink, **options)
    assert out.dtype == lse.dtype == torch.float64
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sparse", [True, False])
def test_gradients(sparse: bool) -> None:
    step = Step("small", (2, 1, 2), (3, 0, 9), page_size=4, block_size=4, padded_rows=1)
    case = AttentionCase(step, 2, 1, head_dim=4, topk=1, mode="fp32", sink=torch.float32)
    inputs = attention_inputs(case, "cpu")
    k, v = (pool.double().nan_to_num(0.5) for pool in inputs.cache.key_value())
    tensors = [t.double().clone().requires_grad_() for t in (inputs.q, k, v, inputs.options["sink_key"])]

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if sparse:
            out, lse = sparse_attention(q, k, v, inputs.ids, inputs.batch, sink_key=sink, v_scale=2.0)
        else:
            out, lse = dense_attention(q, k, v, inputs.batch, sink_key=sink, v_scale=2.0)
        return out, torch.where(lse.isfinite(), lse, 0.0)

    assert torch.autograd.gradcheck(fn, tensors)


@pytest.mark.parametrize("sparse", [True, False])
def test_gradients_pass_by_poison(sparse: bool) -> None:
    """NaN in bytes that are not read reaches neither the result nor a gradient of a live token."""
    inputs, q, k, v = double_inputs(SPARSE)
    for t in (q, k, v):
        t.requires_grad_()
    args = (inputs.ids, inputs.batch) if sparse else (inputs.batch,)
    out, _ = (sparse_attention if sparse else dense_attention)(q, k, v, *args, sink_key=inputs.options["sink_key"])
    out.square().sum().backward()
    assert all(bool(t.grad.isfinite().all()) for t in (q, k, v))


def test_merge_gradients() -> None:
    gen = generator(0)
    tensors = [torch.randn(shape, generator=gen, dtype=torch.float64) for shape in ((3, 2, 4), (3, 2)) * 2]
    tensors[1][0] = -math.inf
    tensors[3][:2, 1] = -math.inf

    def fn(*parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lses = [torch.where(mask, x, -math.inf) for mask, x in zip(alive, parts[1::2], strict=True)]
        out, lse = merge_attention_states(parts[0], lses[0], parts[2], lses[1])
        return out, torch.where(lse.isfinite(), lse, 0.0)

    alive = [t.isfinite() for t in tensors[1::2]]
    assert torch.autograd.gradcheck(fn, [t.nan_to_num(neginf=0.0).requires_grad_() for t in tensors])


@pytest.mark.parametrize("sparse", [True, False])
def test_chunks_of_tokens_give_the_same_result(sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, q, k, v = double_inputs(SPARSE)
    args = (q, k, v, inputs.ids, inputs.batch) if sparse else (q, k, v, inputs.batch)
    fn = sparse_attention if sparse else dense_attention
    whole = fn(*args)
    monkeypatch.setattr(numerics, "CHUNK_BYTES", 1)
    for a, b in zip(fn(*args), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_precision_settings_of_the_process_do_not_matter() -> None:
    inputs = attention_inputs(SPARSE, "cpu")
    k, v = inputs.cache.key_value()
    expected = sparse_attention(inputs.q, k, v, inputs.ids, inputs.batch)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = sparse_attention(inputs.q, k, v, inputs.ids, inputs.batch)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(result, expected, strict=True))


def test_compute_dtype_on_request() -> None:
    inputs = attention_inputs(SPARSE, "cpu")
    k, v = inputs.cache.key_value()
    single, _ = sparse_attention(inputs.q, k, v, inputs.ids, inputs.batch)
    double, _ = sparse_attention(inputs.q, k, v, inputs.ids, inputs.batch, dtype=torch.float64)
    assert single.dtype == torch.float32 and double.dtype == torch.float64
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-6)


def test_a_sink_takes_its_share_and_stays_out_of_the_lse() -> None:
    inputs, q, k, v = double_inputs(AttentionCase(STEP, 4, 2, head_dim=16, topk=2, mode="fp32"))
    plain, lse = sparse_attention(q, k, v, inputs.ids, inputs.batch)
    zero = torch.zeros(4, 16, dtype=torch.float64)
    out, lse_with_sink = sparse_attention(q, k, v, inputs.ids, inputs.batch, sink_key=zero)
    torch.testing.assert_close(lse_with_sink, lse, rtol=0, atol=0)
    torch.testing.assert_close(out, plain * torch.sigmoid(lse)[..., None], rtol=1e-12, atol=1e-12)
    huge, _ = sparse_attention(q, k, v, inputs.ids, inputs.batch, sink_key=zero + 1e6 * q[:1, 0])
    assert bool(huge.isfinite().all())


def test_an_ignored_id_is_ignored_wherever_it_stands() -> None:
    inputs, q, k, v = double_inputs(SPARSE)
    expected, _ = sparse_attention(q, k, v, inputs.ids, inputs.batch)
    for value in (-1, -(2**31), 2**31 - 1, 3):
        padded = torch.full((*inputs.ids.shape[:2], 5), value, dtype=torch.int32)
        padded[..., 1], padded[..., 3] = inputs.ids[..., 1], inputs.ids[..., 0]
        out, _ = sparse_attention(q, k, v, padded, inputs.batch)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
