"""Replaying a captured step with other lengths, pages, slots and values equals an eager call with the same static shapes and bounds, bit for bit.

Without a GPU the same steps run with a plain second call in place of the replay.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import m3attn
from m3attn.batch import PagedBatch
from m3attn.dtypes import E4M3
from m3attn.reference.numerics import indexable
from m3attn.registry import find
from m3attn.testing.cases import AttentionCase, IndexCase, MergeCase, NormRopeCase, SelectCase, Step
from m3attn.testing.inputs import attention_inputs, generator, index_inputs, merge_inputs, norm_rope_inputs, normal, random_ids, score_fill
from m3attn.testing.matrix import DEVICE, arch, gpu_only, keys, needs_zeroed, pick, skip_if_declined

BLOCK = pick(16, 128)
DECODE = Step("decode", (1, 1, 1, 1), (3 * BLOCK, 2 * BLOCK + 9, 5 * BLOCK, BLOCK), page_size=BLOCK, block_size=BLOCK, padded_rows=1)
VERIFY = Step("verify", (4, 1, 2, 3), (3 * BLOCK, 2 * BLOCK + 9, 5 * BLOCK, 7), page_size=BLOCK, block_size=BLOCK, padded_rows=2)
PREFILL = Step("prefill", (pick(3, 140), 1, pick(2, 33), 1), (5 * BLOCK, BLOCK, 3 * BLOCK, 2), page_size=BLOCK, block_size=BLOCK, slack_q=17)
STEPS = pytest.mark.parametrize("step", [DECODE, VERIFY, PREFILL], ids=lambda step: step.name)


def kernels(stage: str) -> list[Any]:
    """The implementations that can be captured: all but the reference."""
    return keys(stage, kernels_only=True)


class Captured:
    """A call captured in a CUDA graph; `replay` runs it again on what its inputs hold by then."""

    def __init__(self, call: Callable[[], tuple[torch.Tensor, ...]]) -> None:
        self.call, self.graph = call, None
        call()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.results = call()

    def replay(self) -> tuple[torch.Tensor, ...]:
        if self.graph is None:
            return self.call()
        self.graph.replay()
        return self.results


def assert_replays(captured: Captured, call: Callable[[], tuple[torch.Tensor, ...]], what: str) -> None:
    replayed = [t.clone() for t in captured.replay()]
    for a, b in zip(replayed, call(), strict=True):
        assert torch.equal(indexable(a).view(torch.uint8), indexable(b).contiguous().view(torch.uint8)), what


def change(batch: PagedBatch, round_number: int) -> None:
    """Other lengths, pages and query counts in the tensors of `batch`, within its bounds: requests swap, shrink, become empty or padded."""
    shift = torch.arange(batch.num_requests, device=batch.seq_lens.device).roll(1)
    lengths, table, q_lens = batch.seq_lens[shift], batch.page_table[shift], batch.cu_seqlens_q.diff()[shift]
    lengths = (lengths - round_number * 3).clamp(min=0)
    if round_number % 3 == 2:
        lengths[0] = 0
        q_lens[-1] = max(0, int(q_lens[-1]) - 1)
    batch.seq_lens.copy_(lengths)
    batch.page_table.copy_(table)
    batch.cu_seqlens_q[1:].copy_(q_lens.cumsum(0))


ROUNDS = pick(2, 8)


@STEPS
@pytest.mark.parametrize("mode", pick(["fp32"], ["bf16", "widen_e4m3", "fp8", "fp8_pv"]))
@pytest.mark.parametrize("key", kernels("sparse_attention"))
def test_sparse_attention(key: str, mode: str, step: Step) -> None:
    case = AttentionCase(step, pick(2, 64), pick(1, 4), pick(64, 128), topk=pick(2, 16), mode=mode, sink=torch.float32)
    check_attention("sparse_attention", key, case)


@STEPS
@pytest.mark.parametrize("mode", pick(["fp32"], ["bf16", "widen_e4m3", "fp8"]))
@pytest.mark.parametrize("key", kernels("dense_attention"))
def test_dense_attention(key: str, mode: str, step: Step) -> None:
    case = AttentionCase(step, pick(2, 64), pick(1, 4), pick(64, 128), topk=0, mode=mode, zero_on_alloc=needs_zeroed("dense_attention", key))
    check_attention("dense_attention", key, case)


def check_attention(stage: str, key: str, case: AttentionCase) -> None:
    skip_if_declined(stage, key, case.problem(arch()))
    inputs = attention_inputs(case, DEVICE)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        return getattr(m3attn, stage)(*inputs.arguments(), **inputs.options, return_lse=True, impl=key)

    captured = Captured(call)
    assert_replays(captured, call, "unchanged")
    for number in range(ROUNDS):
        change(inputs.batch, number)
        indexable(inputs.q).copy_(indexable(inputs.q).flip(0))
        if inputs.ids is not None:
            inputs.ids.copy_(random_ids(inputs.batch, inputs.q.shape[0], inputs.ids.shape[0], inputs.ids.shape[2], seed=number))
        assert_replays(captured, call, f"round {number}")


@STEPS
@pytest.mark.parametrize("dtype", pick([torch.float32], [torch.bfloat16, E4M3]), ids=str)
@pytest.mark.parametrize("stage", ["index_score", "index_topk"])
@pytest.mark.parametrize("key", kernels("index_topk"))
def test_indexer(key: str, stage: str, dtype: torch.dtype, step: Step) -> None:
    case = IndexCase(step, num_heads=pick(2, 4), dim=pick(64, 128), q_dtype=dtype, k_dtype=dtype, topk=2)
    skip_if_declined(stage, key, case.problem(arch()))
    inputs = index_inputs(case, DEVICE)
    selection = inputs.selection if stage == "index_topk" else {}

    def call() -> tuple[torch.Tensor]:
        return (getattr(m3attn, stage)(inputs.index_q, inputs.cache, inputs.batch, **selection, impl=key),)

    captured = Captured(call)
    for number in range(ROUNDS):
        change(inputs.batch, number)
        indexable(inputs.index_q).copy_(indexable(inputs.index_q).flip(0))
        assert_replays(captured, call, f"round {number}")


REPLAYS = pick(2, 500)
LAST = pick(5 * BLOCK, 700)
"""Keys of the longest request in the last replay; each replay before it has one key less."""
GROWING = [
    Step("decode", (1, 1, 1, 1), (LAST, LAST - 7, LAST - BLOCK // 2, LAST - BLOCK), page_size=BLOCK, block_size=BLOCK, padded_rows=1),
    Step("verify", (4, 1, 2, 3), (LAST, LAST - 7, LAST - BLOCK // 2, LAST - BLOCK), page_size=BLOCK, block_size=BLOCK, padded_rows=2),
    Step("prefill", (pick(3, 140), 1, 2), (LAST, LAST - 7, LAST - BLOCK // 2), page_size=BLOCK, block_size=BLOCK, slack_q=17),
]


@pytest.mark.parametrize("step", GROWING, ids=lambda step: step.name)
@pytest.mark.parametrize("mode", pick(["fp32"], ["bf16", "widen_e4m3", "fp8"]))
@pytest.mark.parametrize("key", kernels("sparse_attention"))
def test_attention_as_requests_grow(key: str, mode: str, step: Step) -> None:
    """Requests grow by a key a replay, over page borders; pages are shuffled and blocks selected anew now and then; a request leaves and joins."""
    case = AttentionCase(step, pick(2, 64), pick(1, 4), pick(64, 128), topk=pick(2, 4), mode=mode)
    skip_if_declined("sparse_attention", key, case.problem(arch()))
    inputs = attention_inputs(case, DEVICE)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        return m3attn.sparse_attention(*inputs.arguments(), **inputs.options, return_lse=True, impl=key)

    captured = Captured(call)
    for number in growing(inputs.batch, inputs.cache.key_value()):
        if number % 50 == 0:
            inputs.ids.copy_(random_ids(inputs.batch, inputs.q.shape[0], inputs.ids.shape[0], inputs.ids.shape[2], seed=number))
        assert_replays(captured, call, f"replay {number}")


@pytest.mark.parametrize("step", GROWING, ids=lambda step: step.name)
@pytest.mark.parametrize("dtype", pick([torch.float32], [torch.bfloat16, E4M3]), ids=str)
@pytest.mark.parametrize("key", kernels("index_topk"))
def test_selection_as_requests_grow(key: str, dtype: torch.dtype, step: Step) -> None:
    case = IndexCase(step, num_heads=pick(2, 4), dim=pick(64, 128), q_dtype=dtype, k_dtype=dtype, topk=2)
    skip_if_declined("index_topk", key, case.problem(arch()))
    inputs = index_inputs(case, DEVICE)

    def call() -> tuple[torch.Tensor]:
        return (m3attn.index_topk(inputs.index_q, inputs.cache, inputs.batch, **inputs.selection, impl=key),)

    captured = Captured(call)
    for number in growing(inputs.batch, (inputs.cache.index_key(),)):
        assert_replays(captured, call, f"replay {number}")


def growing(batch: PagedBatch, pools: tuple[torch.Tensor, ...]) -> Iterator[int]:
    """Numbers of replays, with the lengths of each in `batch`; every 25th has other pages, and every 40th one request less."""
    last = batch.seq_lens.clone()
    num_pages = pools[0].shape[0]
    for number in range(REPLAYS):
        batch.seq_lens.copy_((last - (REPLAYS - 1 - number)).clamp(min=0))
        if number % 40 == 39:
            batch.seq_lens[1] = 0
        if number % 25 == 24:
            order = torch.randperm(num_pages, generator=generator(number)).to(batch.page_table.device)
            for pool in pools:
                indexable(pool).copy_(indexable(pool)[order.argsort()].clone())
            is_page = (batch.page_table >= 0) & (batch.page_table < num_pages)
            batch.page_table.copy_(torch.where(is_page, order[batch.page_table.clamp(0, num_pages - 1).long()].int(), batch.page_table))
        yield number


@STEPS
@pytest.mark.parametrize("key", kernels("select_blocks"))
def test_select_blocks(key: str, step: Step) -> None:
    skip_if_declined("select_blocks", key, SelectCase(step, num_heads=2, topk=2).problem(arch()))
    inputs = index_inputs(IndexCase(step, num_heads=2), DEVICE)
    scores = score_fill("permutation", 2, step.tokens, inputs.batch.num_blocks, generator(0)).to(DEVICE)

    def call() -> tuple[torch.Tensor]:
        return (m3attn.select_blocks(scores, inputs.batch, topk=2, impl=key),)

    captured = Captured(call)
    for number in range(ROUNDS):
        change(inputs.batch, number)
        scores.copy_(scores.flip(-1))
        assert_replays(captured, call, f"round {number}")


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (E4M3, E4M3)], ids=str)
@pytest.mark.parametrize("key", kernels("qk_norm_rope_insert"))
def test_qk_norm_rope_insert(key: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Other rows, positions and slots, some of them -1: the caches' bytes are those of an eager call."""
    case = NormRopeCase(8, pick(2, 64), pick(1, 4), pick(1, 4), cache_dtype=dtypes[0], index_dtype=dtypes[1], q_out_dtype=dtypes[0])
    inputs = norm_rope_inputs(case, DEVICE)
    caches = [indexable(t) for t in (*inputs.cache.key_value(), inputs.cache.index_key())]
    before = [t.clone() for t in caches]

    def call() -> tuple[torch.Tensor, ...]:
        q, index_q = m3attn.qk_norm_rope_insert(*inputs.arguments(), **inputs.options, impl=key)
        return q, index_q

    captured = Captured(call)
    capacity = inputs.cache.k.shape[0] * case.page_size
    for number in range(pick(3, 20)):
        gen = generator(100 + number)
        inputs.qkv.copy_(normal(tuple(inputs.qkv.shape), gen, DEVICE))
        inputs.positions.copy_(torch.randint(-2, 515, (8,), generator=gen))
        for slots in (inputs.slots, inputs.index_slots):
            slots.copy_(torch.randperm(capacity, generator=gen)[:8])
            slots[torch.randint(8, (2,), generator=gen)] = -1
        written = []
        for replayed in (True, False):
            for cache, old in zip(caches, before, strict=True):
                cache.copy_(old)
            results = captured.replay() if replayed else call()
            written.append([indexable(t).clone() for t in (*results, *caches)])
        for a, b in zip(*written, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"round {number}"


@pytest.mark.parametrize("key", kernels("merge_attention_states"))
def test_merge_attention_states(key: str) -> None:
    parts = merge_inputs(MergeCase(12, 4, 64), DEVICE)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        return m3attn.merge_attention_states(*parts, impl=key)

    captured = Captured(call)
    for part, other in zip(parts, merge_inputs(MergeCase(12, 4, 64), DEVICE, seed=1), strict=True):
        part.copy_(other)
    assert_replays(captured, call, "other parts")


@pytest.mark.parametrize("scale", [None, "tensor", "row", "device"])
@pytest.mark.parametrize("key", kernels("quantize_fp8"))
def test_quantize_fp8(key: str, scale: str | None) -> None:
    x = normal((6, 300), generator(0), DEVICE)
    number = torch.full((1,), 0.5, device=DEVICE)

    def call() -> tuple[torch.Tensor, ...]:
        result = m3attn.quantize_fp8(x, scale=number if scale == "device" else scale, impl=key)
        return result if isinstance(result, tuple) else (result,)

    captured = Captured(call)
    for factor in (10.0, 1e-3):
        x.mul_(factor)
        number.mul_(factor)
        assert_replays(captured, call, f"times {factor}")


@pytest.mark.parametrize("key", kernels("sparse_attention"))
def test_a_long_decode(key: str) -> None:
    """Step after step one token longer, across page borders, pages reshuffled each step: replay N equals eager N."""
    step = Step("decode", (1, 1), (6 * BLOCK, 4 * BLOCK), page_size=BLOCK, block_size=BLOCK)
    attention = AttentionCase(step, pick(2, 64), pick(1, 4), pick(64, 128), topk=pick(2, 4), mode=pick("fp32", "bf16"))
    index = IndexCase(step, pick(1, 4), pick(64, 128), q_dtype=pick(torch.float32, torch.bfloat16), k_dtype=pick(torch.float32, torch.bfloat16))
    skip_if_declined("sparse_attention", key, attention.problem(arch()))
    index_key = key if find("index_topk", key) is not None else "triton"
    skip_if_declined("index_topk", index_key, index.problem(arch()))
    inputs, indexer = attention_inputs(attention, DEVICE), index_inputs(index, DEVICE)
    batch = replace(inputs.batch)
    steps = pick(3, 500)
    start = inputs.batch.seq_lens - steps

    def call() -> tuple[torch.Tensor, ...]:
        ids = m3attn.index_topk(indexer.index_q, indexer.cache, batch, topk=attention.topk, impl=index_key)
        out, lse = m3attn.sparse_attention(inputs.q, inputs.cache, ids, batch, return_lse=True, impl=key)
        return ids, out, lse

    captured = Captured(call)
    for number in range(steps):
        batch.seq_lens.copy_(start + number)
        full = torch.randperm(3, generator=generator(number)).to(DEVICE)
        batch.page_table[:, :3].copy_(batch.page_table[:, full])
        assert_replays(captured, call, f"step {number}")


SCRIPT = """
import torch, m3attn
from m3attn.testing.cases import AttentionCase, VERIFY
from m3attn.testing.inputs import attention_inputs
inputs = attention_inputs(AttentionCase(VERIFY, 14, 2), "cuda")
torch.cuda.synchronize()
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        m3attn.sparse_attention(*inputs.arguments(), impl="triton")
except Exception as error:
    text = f"{type(error).__name__}: {error}"
    raise SystemExit(0 if "KernelNotReady" in text and "warmup" in text else text)
raise SystemExit("captured a kernel that was not compiled")
"""


@pytest.mark.parametrize("script", [pytest.param(SCRIPT, id="cold", marks=gpu_only)])
def test_nothing_compiles_under_capture(script: str, tmp_path) -> None:
    result = subprocess.run([sys.executable, "-c", script], env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_refusal_under_capture_names_the_variant_and_the_remedy() -> None:
    """What Triton calls before it compiles; the test above captures for real."""
    knobs = pytest.importorskip("triton").knobs
    from m3attn.triton_kernels.launch import KernelNotReady, _refuse_compiling
    from m3attn.triton_kernels.merge_splits import merge_splits_kernel

    before = knobs.runtime.jit_cache_hook
    message = r"merge_splits_kernel\(D=64, SPLITS=2\) is not compiled, .* capture: run the same call once .*, or m3attn\.warmup"
    with pytest.raises(KernelNotReady, match=message), _refuse_compiling(merge_splits_kernel, {"D": 64, "SPLITS": 2}):
        knobs.runtime.jit_cache_hook()
    assert knobs.runtime.jit_cache_hook is before


@pytest.mark.parametrize("key", [pytest.param(p.values[0], id=p.values[0], marks=gpu_only) for p in kernels("sparse_attention")])
def test_no_call_waits_for_the_device(key: str) -> None:
    """No synchronisation in any stage, after one call that may compile."""
    case = AttentionCase(VERIFY, 64, 4)
    skip_if_declined("sparse_attention", key, case.problem(arch()))
    inputs, indexer = attention_inputs(case, DEVICE), index_inputs(IndexCase(VERIFY), DEVICE)

    def call() -> None:
        ids = m3attn.index_topk(indexer.index_q, indexer.cache, inputs.batch)
        out, lse = m3attn.sparse_attention(inputs.q, inputs.cache, ids, inputs.batch, return_lse=True, impl=key)
        dense, dense_lse = m3attn.dense_attention(inputs.q, inputs.cache, inputs.batch, return_lse=True)
        m3attn.merge_attention_states(out, lse, dense, dense_lse)
        m3attn.quantize_fp8(out, scale="row")

    call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
