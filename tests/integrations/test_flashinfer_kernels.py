"""FlashInfer's own kernels behind the key, on a Hopper GPU with the package: against the reference, on ragged steps with padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_steps import engine_step

import m3attn
from m3attn.batch import LayerCache, PagedBatch
from m3attn.integrations.flashinfer.limits import RELEASE, installed
from m3attn.testing.bounds import attention_bound
from m3attn.testing.cases import STEPS as MATRIX_STEPS
from m3attn.testing.cases import AttentionCase
from m3attn.testing.ids import check_id_form, compare_ids
from m3attn.testing.inputs import attention_inputs

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0) or installed() != RELEASE:
    pytest.skip(f"needs a Hopper GPU and flashinfer-python {RELEASE}", allow_module_level=True)

E4M3 = torch.float8_e4m3fn
STEPS = {
    "decode": ([1, 1, 0, 1, 1], [6000, 0, 500, 1, 129]),
    "verify": ([4, 1, 0, 3], [5000, 1, 128, 2]),
    "prefill": ([300, 3, 0, 40], [5000, 3, 128, 40]),
}
HEADS = [(64, 4), (16, 1), (8, 1), (8, 2)]


def step(phase: str, heads: tuple[int, int], **options: Any) -> tuple[torch.Tensor, torch.Tensor, LayerCache, PagedBatch]:
    """q, index q (three rows of each belong to no request), cache and batch; zeros behind each sequence."""
    q_lens, seq_lens = STEPS[phase]
    own = engine_step(q_lens, seq_lens, heads=heads, dtype=torch.bfloat16, device="cuda", **options)
    batch = PagedBatch.from_lengths(q_lens, seq_lens, own.table)
    q, index_q = (torch.cat([x.float(), torch.ones(3, *x.shape[1:], device="cuda")]).to(x.dtype) for x in (own.q, own.index_q))
    for pool in (own.kv, own.index_k):
        pool.copy_(pool.float().nan_to_num(0.0).to(pool.dtype))
    return q, index_q, LayerCache(kv=own.kv, index_k=own.index_k, zero_on_alloc=True), batch


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("phase, dtype", [(p, d) for p in STEPS for d in (E4M3, torch.bfloat16) if (p, d) != ("prefill", torch.bfloat16)], ids=str)
def test_scores_and_selection(phase: str, dtype: torch.dtype, heads: tuple[int, int]) -> None:
    _, index_q, cache, batch = step(phase, heads, index_dtype=dtype)
    expected = m3attn.index_score(index_q, cache, batch, impl="reference")
    scores = m3attn.index_score(index_q, cache, batch, impl="flashinfer")
    torch.testing.assert_close(scores, expected, rtol=2e-3, atol=2e-2)
    for init, local in ((0, 1), (2, 3)):
        forced = {"init_blocks": init, "local_blocks": local}
        want = m3attn.select_blocks(scores, batch, **forced, impl="reference")
        ids = m3attn.select_blocks(scores, batch, **forced, impl="flashinfer")
        check_id_form(ids, batch, topk=16, columns=scores.shape[2])
        finite = scores.double().nan_to_num(nan=-3e38, neginf=-3e38)
        print(f"{len(compare_ids(ids, want, finite, finite.abs() * 2**-8))} exchanges among {ids.numel()} ids")


@pytest.mark.parametrize("scales", [None, (0.5, 2.0)], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("phase", STEPS)
def test_attention(phase: str, heads: tuple[int, int], scales: tuple[float, float] | None) -> None:
    q, index_q, cache, batch = step(phase, heads, cache_dtype=E4M3)
    if scales is not None:
        cache = replace(cache, k_scale=scales[0], v_scale=scales[1])
    ids = m3attn.index_topk(index_q, cache, batch, impl="reference")
    expected = m3attn.sparse_attention(q, cache, ids, batch, impl="reference").float()
    out = m3attn.sparse_attention(q, cache, ids, batch, impl="flashinfer").float()
    torch.testing.assert_close(out, expected, rtol=3e-2, atol=3e-2)
    assert (out - expected).abs().mean() <= 4e-3 * expected.abs().mean()


MATRIX = [
    AttentionCase(step, *heads, mode="widen_e4m3", layout="packed", scaled=scaled, zero_on_alloc=True)
    for step in MATRIX_STEPS
    for heads, scaled in (((64, 4), False), ((64, 4), True), ((16, 2), False), ((8, 2), True))
]
"""The shared matrix asks every sparse attention for the LSE, which this one declines: its steps, poison and bound, without the LSE."""


@pytest.mark.parametrize("case", MATRIX, ids=lambda case: case.id)
def test_attention_of_the_matrix(case: AttentionCase) -> None:
    inputs = attention_inputs(case, "cuda")
    out = m3attn.sparse_attention(*inputs.arguments(), **inputs.options, impl="flashinfer")
    attention_bound(inputs.q, inputs.cache, inputs.batch, inputs.ids, **inputs.options).check(out, None)
    assert torch.equal(out, m3attn.sparse_attention(*inputs.arguments(), **inputs.options, impl="flashinfer")), "two runs differ"
