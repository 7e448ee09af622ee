"""What a call costs beyond its result: no copy of a pool, no variant a length, no other device than the tensors' own."""

from dataclasses import replace

import pytest
import torch

import m3attn
from m3attn.batch import LayerCache
from m3attn.reference.numerics import indexable
from m3attn.testing.cases import AttentionCase, IndexCase, MergeCase, QuantizeCase, Step
from m3attn.testing.inputs import attention_inputs, index_inputs, merge_inputs, quantize_input
from m3attn.testing.matrix import DEVICE, arch, gpu_only, skip_if_declined, stage_keys

pytestmark = [*gpu_only, pytest.mark.usefixtures("large_memory")]

ATTENTION = stage_keys("sparse_attention", "dense_attention", size="large", kernels_only=True)
BOUNDED = (Step("verify", (4,) * 3, (300, 700, 2_048)), Step("prefill", (40,) * 3, (300, 700, 2_048)))
STEPS = (Step("decode", (1,) * 4, (2_000, 1_000, 128, 3_000)), Step("prefill", (200, 100), (2_000, 300)))


@pytest.mark.parametrize("layout", ["hnd", "nhd"])
@pytest.mark.parametrize("mode", ["bf16", "widen_e4m3", "fp8"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
@pytest.mark.parametrize(("stage", "key"), ATTENTION)
def test_attention_copies_no_pool(stage: str, key: str, step: Step, mode: str, layout: str) -> None:
    """A pool of 2 GiB with a few live megabytes: the peak grows by the result, the workspace and little else."""
    case = AttentionCase(step, 64, 4, topk=16 if stage == "sparse_attention" else 0, mode=mode)
    skip_if_declined(stage, key, case.problem(arch()))
    inputs = attention_inputs(case, DEVICE)
    k, v = inputs.cache.key_value()
    pages = (1 << 30) // (4 * 128 * 128 * k.element_size())
    shape = (pages, 4, 128, 128) if layout == "hnd" else (pages, 128, 4, 128)
    pools = []
    for small in (k, v):
        pool = torch.zeros(shape, dtype=small.dtype, device=DEVICE)
        pool = pool if layout == "hnd" else pool.transpose(1, 2)
        indexable(pool)[: small.shape[0]] = indexable(small)
        pools.append(pool)
    cache = LayerCache(k=pools[0], v=pools[1])
    large = replace(inputs, cache=cache)

    def call() -> torch.Tensor:
        return getattr(m3attn, stage)(*large.arguments(), **large.options, impl=key)

    out = call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    again = call()
    torch.cuda.synchronize()
    batch, (tokens, heads, dim) = inputs.batch, inputs.q.shape
    scratch = m3attn.workspace_bytes(
        stage,
        tokens=tokens,
        num_requests=batch.num_requests,
        max_seqlen_q=batch.max_seqlen_q,
        max_seqlen_k=batch.max_seqlen_k,
        num_q_heads=heads,
        num_kv_heads=4,
        head_dim=dim,
        impl=key,
    )
    grown = torch.cuda.max_memory_allocated() - before
    assert grown < again.nbytes + scratch + (64 << 20), f"{grown >> 20} MiB beside {scratch >> 20} MiB of workspace"
    assert torch.equal(out, again)


@pytest.mark.parametrize("layout", ["plain", "layers", "interleaved"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
@pytest.mark.parametrize(("stage", "key"), stage_keys("index_score", "index_topk", size="large", kernels_only=True))
def test_the_indexer_copies_no_pool(stage: str, key: str, step: Step, layout: str) -> None:
    case = IndexCase(step)
    skip_if_declined(stage, key, case.problem(arch()))
    inputs = index_inputs(case, DEVICE)
    small = inputs.cache.index_key()
    pages = (1 << 30) // (128 * 128 * 2)
    if layout == "layers":
        pool = torch.zeros(pages // 2, 2, 128, 128, dtype=torch.bfloat16, device=DEVICE)[:, 1]
    elif layout == "interleaved":
        pool = torch.zeros(pages // 2, 128, 256, dtype=torch.bfloat16, device=DEVICE)[..., 128:]
    else:
        pool = torch.zeros(pages, 128, 128, dtype=torch.bfloat16, device=DEVICE)
    pool[: small.shape[0]] = small
    options = inputs.selection if stage == "index_topk" else {}

    def call() -> torch.Tensor:
        return getattr(m3attn, stage)(inputs.index_q, LayerCache(index_k=pool), inputs.batch, **options, impl=key)

    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    scores = 4 * inputs.index_q.shape[0] * inputs.batch.num_blocks * inputs.index_q.shape[1]
    assert torch.cuda.max_memory_allocated() - before < result.nbytes + scores + (64 << 20)


@pytest.mark.parametrize(
    "step", [Step(name, (most,) * 3, (300, 700, 2_048)) for name, most in (("verify", 4), ("prefill", 40))], ids=lambda s: s.name
)
@pytest.mark.parametrize(("stage", "key"), [p for p in ATTENTION if p.values[1].startswith("triton")])
def test_lengths_compile_nothing_new(stage: str, key: str, step: Step) -> None:
    """One host bound, every actual length below it: one set of kernels."""
    from triton import knobs

    case = AttentionCase(step, 64, 4, topk=16 if stage == "sparse_attention" else 0)
    skip_if_declined(stage, key, case.problem(arch()))
    inputs = attention_inputs(case, DEVICE)

    def call() -> None:
        getattr(m3attn, stage)(*inputs.arguments(), impl=key)

    call()
    compiled: list[str] = []

    def count(**arguments: object) -> None:
        compiled.append(str(arguments.get("repr")))

    previous = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = count
    try:
        for q_len, seq_len in ((1, 1), (2, 129), (3, 2_000), (4, 16), (0, 0)):
            inputs.batch.cu_seqlens_q.copy_(torch.tensor([0, q_len, q_len + 4, q_len + step.q_lens[0] + 4]))
            inputs.batch.seq_lens.copy_(torch.tensor([seq_len, 700, 2_048 - seq_len]))
            call()
    finally:
        knobs.runtime.jit_post_compile_hook = previous
    assert not compiled, compiled


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("key", ["triton"])
def test_tensors_on_another_device_than_the_current_one(key: str) -> None:
    results = []
    for device in ("cuda:0", "cuda:1"):
        inputs = attention_inputs(AttentionCase(STEPS[1], 64, 4), device)
        indexer = index_inputs(IndexCase(STEPS[1]), device)
        ids = m3attn.index_topk(indexer.index_q, indexer.cache, indexer.batch, impl=key)
        sparse, lse = m3attn.sparse_attention(*inputs.arguments(), return_lse=True, impl=key)
        dense, dense_lse = m3attn.dense_attention(inputs.q, inputs.cache, inputs.batch, return_lse=True, impl=key)
        merged, _ = m3attn.merge_attention_states(*merge_inputs(MergeCase(9, 4), device), impl=key)
        quantised = m3attn.quantize_fp8(quantize_input(QuantizeCase((9, 64)), device), impl=key).view(torch.uint8)
        results.append([t.cpu() for t in (ids, sparse, lse, dense, dense_lse, merged, quantised)])
    assert torch.cuda.current_device() == 0
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    inputs = attention_inputs(AttentionCase(STEPS[1], 64, 4), "cuda:0")
    with pytest.raises(ValueError, match="cuda:1"):
        m3attn.sparse_attention(inputs.q.to("cuda:1"), *inputs.arguments()[1:], impl=key)
