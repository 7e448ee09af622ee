"""The variants of the CuTe DSL kernels by name: `m3attn warmup` compiles them beforehand, and the tests look at what comes out.

They cover every value of every option of every kernel, and MiniMax-M3's own combinations. What is called with another combination is compiled at its
first use. At most 40 an architecture for M3's attention and 50 with the indexer and sparse MLA, so that all of them compile in minutes.
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
    index_score_sm100,
    index_score_work,
    select_blocks,
    sparse_decode_sm90,
    sparse_mla_sm90,
    sparse_prefill_by_block_sm90,
    sparse_prefill_sm90,
    sparse_prefill_sm100,
    widen_pages,
)
from m3attn.dsl_kernels.common.kernels import CuteKernel
from m3attn.dsl_kernels.decode_schedule import Schedule, power_of_2, schedule_for
from m3attn.registry import BrokenImplementation
from m3attn.workspace import DEFAULT_LIMIT

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
_PREFILL_SM100 = replace(_PREFILL, defers=False)
_BY_BLOCK = sparse_prefill_by_block_sm90.Variant(
    qk_dtype="bf16",
    v_dtype="bf16",
    out_dtype="bf16",
    head_dim=128,
    group=16,
    topk=16,
    lse=False,
    q_scale=False,
    k_scale=False,
    v_scale=False,
    negative_scale=False,
)
_WIDEN: dict[str, Any] = dict(v_dtype="fp16")
_FP8: dict[str, Any] = dict(qk_dtype="fp8_e4m3", v_dtype="fp16")
_FP16: dict[str, Any] = dict(qk_dtype="fp16", v_dtype="fp16", out_dtype="fp16")
_DEVICE_SCALES: dict[str, Any] = dict(q_scale=True, k_scale=True, v_scale=True)
_SCORE = index_score_work.Variant("bf16", "bf16", rows=256, num_heads=4, page_size=128, fill=False, q_scale=False, k_scale=False)
_HALF: dict[str, Any] = dict(q_dtype="fp16", k_dtype="fp16", num_heads=3, page_size=16, fill=True, q_scale=True, k_scale=True)
_E4M3: dict[str, Any] = dict(q_dtype="fp8_e4m3", k_dtype="fp8_e4m3")
_SELECT = select_blocks.Variant(width=16, lanes=4, vector=True, after_scores=True, held=True)
_MLA = sparse_mla_sm90.Variant("bf16", head_dim=576, length=False, sink=False, q_scale=False, kv_scale=False)


def _schedule(kv_dtype: str, requests: int, queries: int = 1, group: int = 16) -> Schedule:
    """Of a step over long contexts at M3's 4 groups of 16 heads, or one group of fewer."""
    num_kv_heads = 4 if group == 16 else 1
    return schedule_for(
        max_seqlen_q=queries,
        num_requests=requests,
        num_q_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        topk=16,
        num_blocks=1024,
        kv_dtype=kv_dtype,
        tokens=requests * queries,
        limit=DEFAULT_LIMIT,
    )


def _decode(q_dtype: str, kv_dtype: str, requests: int, queries: int = 1, group: int = 16) -> sparse_decode_sm90.Variant:
    schedule = _schedule(kv_dtype, requests, queries, group)
    return sparse_decode_sm90.Variant(
        q_dtype,
        kv_dtype,
        tokens=schedule.tokens,
        token_rows=schedule.token_rows,
        max_topk=16,
        key_warps=schedule.key_warps,
        step_keys=schedule.step_keys,
        stages=schedule.stages,
        splits=power_of_2(schedule.splits),
    )


def _named(kernel: CuteKernel, **variants: Any) -> dict[str, tuple[CuteKernel, Any]]:
    return {f"{kernel.name.removesuffix('_sm90').removesuffix('_sm100')}-{name}": (kernel, variant) for name, variant in variants.items()}


_DECODE = _named(
    sparse_decode_sm90.KERNEL,
    bf16=_decode("bf16", "bf16", requests=1),
    bf16_many=_decode("bf16", "bf16", requests=128),
    bf16_verify=_decode("bf16", "bf16", requests=1, queries=4),
    fp8=_decode("fp8_e4m3", "fp8_e4m3", requests=1),
    fp8_some=_decode("fp8_e4m3", "fp8_e4m3", requests=16),
    fp8_many=_decode("fp8_e4m3", "fp8_e4m3", requests=128),
    fp8_verify=_decode("fp8_e4m3", "fp8_e4m3", requests=1, queries=4),
    widen=_decode("bf16", "fp8_e4m3", requests=1),
    widen_some=_decode("bf16", "fp8_e4m3", requests=16),
    widen_many=_decode("bf16", "fp8_e4m3", requests=128),
    widen_verify=_decode("bf16", "fp8_e4m3", requests=1, queries=4),
    fp8_verify_group8=_decode("fp8_e4m3", "fp8_e4m3", requests=1, queries=4, group=8),
    bf16_some=_decode("bf16", "bf16", requests=16),
    bf16_verify_many=_decode("bf16", "bf16", requests=32, queries=8),
    fp16_sink=replace(_decode("fp16", "fp16", requests=1), **_DEVICE_SCALES, lse=True, sink="fp32", aligned=False),
    e5m2_many_ids64_sink=replace(_decode("bf16", "fp8_e5m2", requests=128), **_DEVICE_SCALES, max_topk=64, lse=True, sink="bf16", aligned=False),
)

_SELECTION = _named(
    select_blocks.KERNEL,
    prefill=_SELECT,
    decode=replace(_SELECT, lanes=32),
    prefill_few=replace(_SELECT, lanes=8),
    width64=replace(_SELECT, width=64, lanes=32, vector=False, after_scores=False, held=False),
    longer=replace(_SELECT, lanes=16),
    longest=replace(_SELECT, lanes=32, held=False),
)

_WIDENED = widen_pages.Variant("fp8_e4m3", k_dtype="bf16", v_dtype="fp16", head_dim=128, block_size=128, aligned=True)
_COPIES = _named(
    widen_pages.KERNEL,
    e4m3=_WIDENED,
    e4m3_keys_stay=replace(_WIDENED, k_dtype="fp8_e4m3"),
    e5m2_fp16_unaligned=replace(_WIDENED, dtype="fp8_e5m2", k_dtype="fp16", aligned=False),
)

SM90: dict[str, tuple[CuteKernel, Any]] = {
    **_named(
        sparse_prefill_sm90.KERNEL,
        bf16=_PREFILL,
        fp8=replace(_PREFILL, **_FP8),
        widen=replace(_PREFILL, **_WIDEN),
        fp16_group1_ids64=replace(_PREFILL, **_FP16, group=1, ids=64, sink_dtype="bf16", defers=False),
        fp8_group8_scales_sink=replace(_PREFILL, **_FP8, **_DEVICE_SCALES, group=8, lse=True, sink_dtype="fp16", defers=False),
        group32_ids32_sink=replace(_PREFILL, group=32, ids=32, aligned=False, negative_scale=True, sink_dtype="fp32", defers=False),
    ),
    **_named(
        sparse_prefill_by_block_sm90.KERNEL,
        bf16=_BY_BLOCK,
        fp8=replace(_BY_BLOCK, **_FP8),
        widen=replace(_BY_BLOCK, **_WIDEN),
        fp16_group32_scales=replace(_BY_BLOCK, **_FP16, **_DEVICE_SCALES, group=32, topk=20, lse=True, negative_scale=True),
        fp8_group8=replace(_BY_BLOCK, **_FP8, group=8),
    ),
    **_COPIES,
    **_named(block_lists_sm90.KERNEL, all=block_lists_sm90.Variant(sparse_prefill_by_block_sm90.ITEM_PICKS)),
    **_DECODE,
    **_named(
        index_score_sm90.KERNEL,
        bf16=_SCORE,
        bf16_decode=replace(_SCORE, rows=64),
        fp8=replace(_SCORE, **_E4M3),
        fp8_decode=replace(_SCORE, **_E4M3, rows=64),
        fp8_heads1_decode=replace(_SCORE, **_E4M3, rows=64, num_heads=1),
        mixed=replace(_SCORE, k_dtype="fp8_e4m3"),
        mixed_decode=replace(_SCORE, k_dtype="fp8_e4m3", rows=64),
        fp16_heads3_page16=replace(_SCORE, **_HALF, rows=128),
    ),
    **_SELECTION,
    **_named(
        sparse_mla_sm90.KERNEL,
        bf16=_MLA,
        fp16_dim512_length=replace(_MLA, dtype="fp16", head_dim=512, length=True),
        fp8=replace(_MLA, dtype="fp8_e4m3"),
        bf16_split=replace(_MLA, split=True),
        fp8_split_length_scales_sink=replace(_MLA, dtype="fp8_e4m3", length=True, sink=True, q_scale=True, kv_scale=True, split=True),
    ),
}
"""For Hopper; a name says what differs from M3's case of its kernel: 16 heads a group, 16 blocks, 4 index heads, host scales, no LSE."""

SM100: dict[str, tuple[CuteKernel, Any]] = {
    **_named(
        sparse_prefill_sm100.KERNEL,
        bf16=_PREFILL_SM100,
        fp8=replace(_PREFILL_SM100, **_FP8),
        widen=replace(_PREFILL_SM100, **_WIDEN),
        fp16_group1_ids64=replace(_PREFILL_SM100, **_FP16, group=1, ids=64, sink_dtype="bf16"),
        fp8_group8=replace(_PREFILL_SM100, **_FP8, group=8),
        fp8_group4_scales_sink=replace(_PREFILL_SM100, **_FP8, **_DEVICE_SCALES, group=4, lse=True, sink_dtype="fp16"),
        group32_ids32_sink=replace(_PREFILL_SM100, group=32, ids=32, aligned=False, negative_scale=True, sink_dtype="fp32"),
    ),
    **_COPIES,
    **_DECODE,
    **_named(
        index_score_sm100.KERNEL,
        bf16=_SCORE,
        bf16_decode=replace(_SCORE, rows=128),
        fp8=replace(_SCORE, **_E4M3),
        fp8_decode=replace(_SCORE, **_E4M3, rows=128),
        fp8_heads1_decode=replace(_SCORE, **_E4M3, rows=128, num_heads=1),
        mixed=replace(_SCORE, k_dtype="fp8_e4m3"),
        mixed_decode=replace(_SCORE, k_dtype="fp8_e4m3", rows=128),
        fp16_heads3_page16=replace(_SCORE, **_HALF),
    ),
    **_SELECTION,
}
"""For Blackwell, named likewise."""

VARIANTS = {"sm_90": SM90, "sm_100": SM100, "sm_103": SM100}


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
