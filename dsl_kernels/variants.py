"""The variants of the CuTe DSL kernels by name: `m3attn warmup` compiles them beforehand, and the tests look at what comes out.

They cover every value of every option of every kernel, and MiniMax-M3's own combinations. What is called with another combination is compiled at its
first use. At most 40 an architecture, so that all of them compile in minutes.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any

from m3attn.dsl_kernels import (
    block_lists_sm90,
    index_score_sm90,
    merge_splits_sm90,
    select_blocks_sm90,
    sparse_decode_sm90,
    sparse_prefill_by_block_sm90,
    sparse_prefill_sm90,
)
from m3attn.dsl_kernels.common.kernels import CuteKernel
from m3attn.registry import BrokenImplementation

_PREFILL = sparse_prefill_sm90.Variant(
    qk_dtype="bf16",
    v_dtype="bf16",
    out_dtype="bf16",
    head_dim=128,
    group=16,
    ids=16,
    lse=False,
    sink_dtype=None,
    q_scale=False,
    k_scale=False,
    v_scale=False,
    negative_scale=False,
    aligned=True,
    defers=True,
)
_PREFILL_FP8 = replace(_PREFILL, qk_dtype="fp8_e4m3", v_dtype="fp16")
_PREFILL_WIDEN = replace(_PREFILL, v_dtype="fp16")
_BY_BLOCK = sparse_prefill_by_block_sm90.Variant(
    qk_dtype="bf16",
    v_dtype="bf16",
    out_dtype="bf16",
    head_dim=128,
    group=16,
    lse=False,
    q_scale=False,
    k_scale=False,
    v_scale=False,
    negative_scale=False,
    aligned=True,
)
_DECODE = sparse_decode_sm90.Variant(
    q_dtype="bf16", kv_dtype="bf16", tokens=1, token_rows=16, max_topk=16, key_warps=4, step_keys=64, stages=3, split=True
)
_DECODE_FP8 = replace(_DECODE, q_dtype="fp8_e4m3", kv_dtype="fp8_e4m3", step_keys=128)
_VERIFY = replace(_DECODE, tokens=8, key_warps=1, stages=6)
_MERGE = merge_splits_sm90.Variant(q_dtype="bf16", lse=False, sink="none", q_scale=False, v_scale=False, aligned=True)
_SCORE = index_score_sm90.Variant("bf16", rows=256, num_heads=4, page_size=128, fill=False, q_scale=False, k_scale=False)
_SELECT = select_blocks_sm90.Variant(width=16, lanes=8, vector=True)


def _named(kernel: CuteKernel, **variants: Any) -> dict[str, tuple[CuteKernel, Any]]:
    return {f"{kernel.name.removesuffix('_sm90')}-{name}": (kernel, variant) for name, variant in variants.items()}


SM90: dict[str, tuple[CuteKernel, Any]] = {
    **_named(
        sparse_prefill_sm90.KERNEL,
        bf16=_PREFILL,
        fp8=_PREFILL_FP8,
        widen=_PREFILL_WIDEN,
        fp16_group1_ids64=replace(_PREFILL, qk_dtype="fp16", v_dtype="fp16", out_dtype="fp16", group=1, ids=64, sink_dtype="bf16", defers=False),
        group8=replace(_PREFILL, group=8),
        fp8_group8=replace(_PREFILL_FP8, group=8),
        widen_group8=replace(_PREFILL_WIDEN, group=8),
        group2_ids32_sink=replace(_PREFILL, group=2, ids=32, aligned=False, negative_scale=True, sink_dtype="fp32"),
        group32=replace(_PREFILL, group=32, defers=False),
        fp8_group4_scales_sink=replace(_PREFILL_FP8, group=4, q_scale=True, k_scale=True, v_scale=True, lse=True, sink_dtype="fp16"),
    ),
    **_named(
        sparse_prefill_by_block_sm90.KERNEL,
        bf16=_BY_BLOCK,
        fp8_group8_scales=replace(_BY_BLOCK, qk_dtype="fp8_e4m3", v_dtype="fp16", group=8, lse=True, q_scale=True, k_scale=True, v_scale=True),
        fp16_group1=replace(_BY_BLOCK, qk_dtype="fp16", v_dtype="fp16", out_dtype="fp16", group=1, negative_scale=True, aligned=False),
    ),
    **_named(block_lists_sm90.KERNEL, all=block_lists_sm90.Variant(sparse_prefill_by_block_sm90.ITEM_PICKS)),
    **_named(
        sparse_decode_sm90.KERNEL,
        bf16=_DECODE,
        fp8=_DECODE_FP8,
        widen=replace(_DECODE, kv_dtype="fp8_e4m3", step_keys=128),
        verify=_VERIFY,
        bf16_unsplit=replace(_DECODE, split=False),
        fp8_unsplit=replace(_DECODE_FP8, split=False, q_scale=True, k_scale=True, v_scale=True),
        fp16_unsplit_sink=replace(_DECODE, q_dtype="fp16", kv_dtype="fp16", split=False, lse=True, sink="bf16", aligned=False),
        e5m2_ids64=replace(_DECODE, kv_dtype="fp8_e5m2", step_keys=128, max_topk=64),
        verify_fp8=replace(_VERIFY, q_dtype="fp8_e4m3", kv_dtype="fp8_e4m3", stages=12),
        verify_widen=replace(_VERIFY, kv_dtype="fp8_e4m3", stages=12),
        verify_group8=replace(_VERIFY, token_rows=8, key_warps=2, max_topk=32),
        verify_fp8_2_tokens=replace(_DECODE_FP8, tokens=2, key_warps=2),
    ),
    **_named(
        merge_splits_sm90.KERNEL,
        bf16=_MERGE,
        fp8=replace(_MERGE, q_dtype="fp8_e4m3"),
        fp16_sink=replace(_MERGE, q_dtype="fp16", lse=True, sink="fp32", q_scale=True, v_scale=True, aligned=False),
    ),
    **_named(
        index_score_sm90.KERNEL,
        bf16=_SCORE,
        fp8=replace(_SCORE, dtype="fp8_e4m3"),
        bf16_heads1=replace(_SCORE, num_heads=1),
        fp8_heads1_scales=replace(_SCORE, dtype="fp8_e4m3", num_heads=1, fill=True, q_scale=True, k_scale=True),
        fp16_heads3_page16=replace(_SCORE, dtype="fp16", rows=128, num_heads=3, page_size=16, fill=True),
        bf16_decode=replace(_SCORE, rows=64),
        fp8_decode=replace(_SCORE, dtype="fp8_e4m3", rows=64),
    ),
    **_named(
        select_blocks_sm90.KERNEL,
        prefill=_SELECT,
        decode=replace(_SELECT, lanes=32),
        short_width32=replace(_SELECT, width=32, lanes=4),
        width64=replace(_SELECT, width=64, lanes=32, vector=False),
    ),
}
"""For Hopper; a name says what differs from M3's case of its kernel: 16 heads a group, 16 blocks, 4 index heads, host scales, no LSE."""

VARIANTS = {"sm_90": SM90}


@dataclass(frozen=True)
class Done:
    """What became of one variant."""

    name: str
    seconds: float
    was_there: bool
    error: str | None

    def __str__(self) -> str:
        if self.error is not None:
            return f"{self.name}: {self.error}"
        return f"{self.name}: {'was there' if self.was_there else f'compiled in {self.seconds:.1f} s'}"


def names_for(arch: str) -> list[str]:
    """The variants for `sm_90`, …; none for an architecture without kernels."""
    return list(VARIANTS.get(arch, {}))


def compile_variant(name: str, arch: str) -> Done:
    """Have one variant in the cache's folder."""
    kernel, variant = VARIANTS[arch][name]
    was_there, start, error = kernel.path(variant, arch).exists(), time.perf_counter(), None
    try:
        kernel.for_arch(variant, arch)
    except BrokenImplementation as failure:
        error = str(failure)
    return Done(name, time.perf_counter() - start, was_there, error)


def compile_variants(names: Sequence[str], arch: str, processes: int) -> Iterator[Done]:
    """Have variants in the cache's folder, each reported when it is there."""
    if processes == 1:
        yield from (compile_variant(name, arch) for name in names)
        return
    # A process forked from one that has used CUDA or a compiler's threads is not to be trusted.
    with ProcessPoolExecutor(min(processes, len(names)), multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(compile_variant, name, arch) for name in names]):
            yield future.result()
