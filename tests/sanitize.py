"""Small calls of every kernel, for compute-sanitizer: no references, and inputs made on the CPU, so that what runs on the GPU is what is looked at.

    compute-sanitizer --tool memcheck --report-api-errors no python tests/sanitize.py cute_sm90

`make sanitize` runs it under each tool. Prints a line a call; the named keys are those of the implementations.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # or torch's pool hides what lies behind a tensor

import torch

import m3attn
from m3attn.dtypes import E4M3
from m3attn.testing.cases import AttentionCase, IndexCase, Step
from m3attn.testing.inputs import attention_inputs, index_inputs

STEPS = (
    Step("decode", (1, 1, 1), (389, 40, 1_152), padded_rows=1),
    Step("verify", (4, 1, 8), (389, 40, 1_152), padded_rows=2),
    Step("prefill", (70, 0, 33), (500, 0, 1_152), padded_rows=3, slack_q=17),
)
Call = tuple[str, Callable[[], object]]


def on_gpu(x: Any) -> Any:
    """The same with its tensors there."""
    if isinstance(x, torch.Tensor):
        return x.cuda()
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return dataclasses.replace(x, **{field.name: on_gpu(getattr(x, field.name)) for field in dataclasses.fields(x)})
    return {name: on_gpu(value) for name, value in x.items()} if isinstance(x, dict) else x


def attention(key: str) -> Iterator[Call]:
    for step in STEPS:
        for mode in ("bf16", "widen_e4m3", "fp8"):
            sink = torch.bfloat16 if mode == "bf16" and step.phase != "prefill" else None
            inputs = on_gpu(attention_inputs(AttentionCase(step, 32, 2, topk=4, mode=mode, sink=sink), "cpu"))

            def call(inputs: Any = inputs) -> object:
                return m3attn.sparse_attention(*inputs.arguments(), **inputs.options, return_lse=True, impl=key)

            yield f"sparse_attention {step.name} {mode}", call
            if key == "cute_sm90" and step.phase == "prefill":
                yield f"sparse_attention {step.name} {mode}, block by block", lambda call=call: block_by_block(call)


def block_by_block(call: Callable[[], object]) -> object:
    from m3attn.dsl_kernels import sparse_prefill_by_block_sm90, sparse_prefill_sm90

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(sparse_prefill_by_block_sm90, "MIN_ROWS", 1))
        patches.enter_context(mock.patch.object(sparse_prefill_sm90, "DEFERRED_SHARE", 0.0))
        return call()


def indexer(key: str) -> Iterator[Call]:
    for step in STEPS:
        for q, k in ((torch.bfloat16, torch.bfloat16), (E4M3, E4M3), (torch.bfloat16, E4M3)):
            inputs = on_gpu(index_inputs(IndexCase(step, 4, q_dtype=q, k_dtype=k, topk=4), "cpu"))
            tensors = inputs.index_q, inputs.cache, inputs.batch
            yield f"index_topk {step.name} {q} {k}", lambda t=tensors, i=inputs: m3attn.index_topk(*t, **i.selection, impl=key)
            yield f"index_score {step.name} {q} {k}", lambda t=tensors: m3attn.index_score(*t, impl=key)


def long_rows(key: str) -> Iterator[Call]:
    """Scores of long runs of blocks, products below 0 among them, and selections from rows of every length that has code of its own."""
    # All rows see 28 blocks: four scores are read at once, and initcheck does not know that those past a row's end are masked.
    inputs = on_gpu(index_inputs(IndexCase(Step("long", (100,), (3_560,)), 2, q_dtype=E4M3, k_dtype=E4M3), "cpu"))
    for name in ("mixed", "negative"):
        yield f"index_topk long {name}", lambda i=inputs: in_long_runs(lambda: m3attn.index_topk(i.index_q, i.cache, i.batch, impl=key), key)
        inputs.index_q.copy_(-inputs.index_q.float().abs())
        inputs.cache.index_k.copy_(inputs.cache.index_k.float().abs())
    generator = torch.Generator().manual_seed(0)
    for blocks in (40, 130, 250, 300, 500, 700, 1_000, 1_100):
        scores = torch.randn(2, 20, blocks, generator=generator).cuda()
        scores[:, :7] = scores[:, :7].round()
        scores[1, 3, ::2] = float("nan")
        batch = m3attn.PagedBatch.from_lengths([20], [128 * blocks - 5], torch.zeros(1, blocks, dtype=torch.int32, device="cuda"))
        for init in (0, 1):
            yield f"select_blocks {blocks} {init}", lambda s=scores, b=batch, n=init: m3attn.select_blocks(s, b, init_blocks=n, impl=key)


def in_long_runs(call: Callable[[], object], key: str) -> object:
    """All blocks for two thread blocks, as many as they get in long prefills."""
    if key != "cute_sm90":
        return call()
    from m3attn.dsl_kernels import index_score_sm90

    with mock.patch.object(index_score_sm90, "num_ctas", lambda device: 2):
        return call()


def sparse_mla(key: str) -> Iterator[Call]:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, E4M3):
        for queries, heads, topk in ((3, 16, 128), (40, 64, 192), (140, 64, 64), (3, 16, 520)):
            q, kv = (torch.randn(*shape, generator=generator).bfloat16().to(dtype).cuda() for shape in ((queries, heads, 576), (300, 1, 576)))
            indices = torch.randint(-3, 303, (queries, 1, topk), generator=generator).int().cuda()
            indices[:2, :, 192:] = -1  # of a long query's parts most are without a token
            options = {"sm_scale": 576**-0.5, "fp8_pv": dtype == E4M3, "impl": key}
            yield f"sparse_mla_prefill {queries} {topk} {dtype}", lambda t=(q, kv, indices), o=options: m3attn.sparse_mla_prefill(*t, **o)


def quantize(key: str) -> Iterator[Call]:
    x = torch.randn(300, 384, generator=torch.Generator().manual_seed(0)).bfloat16().cuda()
    for scale in (None, 0.5, "row", "tensor"):
        yield f"quantize_fp8 {scale}", lambda scale=scale: m3attn.quantize_fp8(x, scale=scale, impl=key)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("keys", nargs="*", default=["cute_sm90", "triton", "triton_union"])
    for key in parser.parse_args().keys:
        stages = {implementation.stage for implementation in m3attn.implementations() if implementation.key == key}
        calls = {
            "sparse_attention": attention,
            "index_topk": indexer,
            "select_blocks": long_rows,
            "sparse_mla_prefill": sparse_mla,
            "quantize_fp8": quantize,
        }
        for stage in sorted(stages & calls.keys()):
            for name, call in calls[stage](key):
                try:
                    call()
                    torch.cuda.synchronize()
                    print(f"{key}: {name}", flush=True)
                except m3attn.UnsupportedProblem as declined:
                    print(f"{key}: {name} declined: {declined}", flush=True)


if __name__ == "__main__":
    main()
