"""The implementations that ship with m3attn and the order in which auto tries them: data only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from m3attn import flash_attn_4
from m3attn.integrations.flashinfer import limits as flashinfer
from m3attn.problem import Problem
from m3attn.registry import Capabilities, Implementation, add

POWERS_16_TO_256 = (16, 32, 64, 128, 256)
FP8_GEMM_ARCHS = ("sm_90", "sm_100", "sm_103")
ALL_FLOATS = ("bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e5m2")
CACHE_FLOATS = ("bf16", "fp16", "fp32", "fp64", "fp8_e4m3", "fp8_e5m2")
INDEX_FLOATS = ("bf16", "fp16", "fp32", "fp8_e4m3")
ATTENTION_MODES = ("bf16", "fp16", "fp32", "widen", "fp8", "fp8_pv")


@dataclass(frozen=True, slots=True)
class Rank:
    """One place in auto's order: a key, and the problems it holds that place for.

    Attributes:
        mixed_index: only where index queries and index keys differ in type.
        archs: None: any that it runs on.
    """

    key: str
    phases: tuple[str, ...] = ("prefill", "decode", "verify")
    mixed_index: bool = False
    archs: tuple[str, ...] | None = None

    def covers(self, problem: Problem) -> bool:
        is_index = not self.mixed_index or problem.index_q_dtype != problem.index_dtype
        return is_index and problem.phase in self.phases and (self.archs is None or problem.arch in self.archs)


_INDEX_RANKS = (Rank("cute_sm90", ("prefill",)), Rank("cute_sm90", ("decode", "verify"), mixed_index=True), Rank("triton"), Rank("reference"))


PRIORITIES: dict[str, tuple[Rank, ...]] = {
    "qk_norm_rope_insert": (Rank("triton"), Rank("reference")),
    "index_score": _INDEX_RANKS,
    "select_blocks": (Rank("cute_sm90", ("prefill",)), Rank("triton"), Rank("reference")),
    "index_topk": _INDEX_RANKS,
    "sparse_attention": (Rank("cute_sm90"), Rank("triton_union", ("prefill",)), Rank("triton"), Rank("reference")),
    "dense_attention": (Rank("flash_attn_4", ("prefill",), archs=("sm_90",)), Rank("triton"), Rank("reference")),
    "merge_attention_states": (Rank("triton"), Rank("reference")),
    "quantize_fp8": (Rank("triton"), Rank("reference")),
    "mla_rope_quantize": (Rank("triton"), Rank("reference")),
    "mla_kv_pack_quantize": (Rank("triton"), Rank("reference")),
    "mla_prefill": (Rank("triton"), Rank("reference")),
    "sparse_mla_prefill": (Rank("cute_sm90"), Rank("triton"), Rank("reference")),
}
"""Fastest first, per stage, from the measurements in results/. CPU tensors take `reference` whatever stands here."""


def _cache_suits_q(problem: Problem) -> list[str]:
    """A cache holds q's own format, or fp8 that 16-bit q widens; e4m3 q reads e4m3 only."""
    q, kv = problem.q_dtype, problem.kv_dtype
    if "none" in (q, kv) or kv == q or (kv.startswith("fp8") and not q.startswith("fp8")):
        return []
    return [f"KV dtype {kv} with q dtype {q}: takes {'fp8_e4m3' if q.startswith('fp8') else f'{q}, fp8_e4m3, fp8_e5m2'}"]


def _reference(stage: str, module: str, *, extra_reasons: Any = None, **limits: Any) -> Implementation:
    return Implementation(
        stage,
        "reference",
        f"m3attn.reference.{module}:{stage}_call",
        Capabilities(cpu="yes", equal_head_dims=False, **limits),
        sources=(f"m3attn.reference.{module}",),
        extra_reasons=extra_reasons,
        built_in=True,
    )


def _triton(
    stage: str,
    *modules: str,
    key: str = "triton",
    function: str | None = None,
    scratch: bool = False,
    fp8_archs: tuple[str, ...] = (),
    prepare_qkv: str | None = None,
    extra_reasons: Any = None,
    **limits: Any,
) -> Implementation:
    return Implementation(
        stage,
        key,
        f"m3attn.triton_kernels.{modules[0]}:{function or stage}",
        Capabilities(min_arch=80, cpu="interpreter", e4m3_min_arch=89, needs=("triton",), **limits),
        workspace=f"m3attn.triton_kernels.{modules[0]}:workspace_bytes" if scratch else None,
        sources=tuple(f"m3attn.triton_kernels.{m}" for m in modules),
        extra_reasons=extra_reasons,
        fp8_archs=fp8_archs,
        prepare_qkv=prepare_qkv,
        built_in=True,
    )


def _index_dtypes_that_meet(problem: Problem) -> list[str]:
    """A product of the tensor cores takes operands of one type; e4m3 widens to any, and neither 16-bit type holds the other's numbers."""
    pair = problem.index_q_dtype, problem.index_dtype
    if set(pair) != {"bf16", "fp16"}:
        return []
    return ["index q dtype {} over index dtype {}: takes equal ones, or e4m3 with either".format(*pair)]


CUTE_ARCHS = {"cute_sm90": ("sm_90",), "cute_sm100": ("sm_100", "sm_103")}


def _cute(
    key: str,
    stage: str,
    module: str,
    *neighbours: str,
    scratch: bool = False,
    fp8_archs: tuple[str, ...] = (),
    extra_reasons: Any = None,
    **limits: Any,
) -> Implementation:
    return Implementation(
        stage,
        key,
        f"m3attn.dsl_kernels.{module}:{stage}",
        Capabilities(archs=CUTE_ARCHS[key], needs=("cutlass", "tvm_ffi"), **limits),
        workspace=f"m3attn.dsl_kernels.{module}:workspace_bytes" if scratch else None,
        sources=tuple(f"m3attn.dsl_kernels.{m}" for m in (module, *neighbours)),
        fp8_archs=fp8_archs,
        extra_reasons=extra_reasons,
        built_in=True,
    )


_CUTE_ATTENTION: dict[str, Any] = dict(
    extra_reasons=_cache_suits_q,
    modes=("bf16", "fp16", "widen", "fp8", "fp8_pv"),
    q_dtypes=("bf16", "fp16", "fp8_e4m3"),
    kv_dtypes=("bf16", "fp16", "fp8_e4m3", "fp8_e5m2"),
    head_dims=(128,),
    group_sizes=(1, 32),
    topk=(1, 64),
    page_sizes=(128,),
    block_sizes=(128,),
)
_CUTE_DECODE = ("sparse_decode_sm90", "decode_schedule", "merge_splits_sm90", "finish_rows", "warp_mma")
_CUTE_SCORING = ("index_score_work", "index_widen", "index_rows")
_CUTE_INDEX: dict[str, Any] = dict(
    extra_reasons=_index_dtypes_that_meet,
    index_q_dtypes=("bf16", "fp16", "fp8_e4m3"),
    index_dtypes=("bf16", "fp16", "fp8_e4m3"),
    index_dims=(128,),
    index_heads=(1, 16),
    page_sizes=(16, 32, 64, 128),
    block_sizes=(128,),
)
_INDEX: dict[str, Any] = dict(
    index_q_dtypes=INDEX_FLOATS, index_dtypes=INDEX_FLOATS, index_dims=(64, 128), page_sizes=POWERS_16_TO_256, block_sizes=POWERS_16_TO_256
)
_ATTENTION: dict[str, Any] = dict(
    extra_reasons=_cache_suits_q,
    modes=ATTENTION_MODES,
    q_dtypes=("bf16", "fp16", "fp32", "fp8_e4m3"),
    kv_dtypes=ALL_FLOATS,
    head_dims=(64, 128, 192, 256),
    group_sizes=(1, 32),
    page_sizes=POWERS_16_TO_256,
)


_REFERENCE_INDEX: dict[str, Any] = dict(index_q_dtypes=(*INDEX_FLOATS, "fp64"), index_dtypes=(*INDEX_FLOATS, "fp64"))
_REFERENCE_ATTENTION: dict[str, Any] = dict(
    extra_reasons=_cache_suits_q, q_dtypes=("bf16", "fp16", "fp32", "fp64", "fp8_e4m3"), kv_dtypes=CACHE_FLOATS
)
"""What the stages' own checks let through: the reference computes all of it."""


def _flashinfer(stage: str, reasons: Callable[[Problem], Sequence[str]], **limits: Any) -> Implementation:
    return Implementation(
        stage,
        "flashinfer",
        f"m3attn.integrations.flashinfer.kernels:{stage}",
        Capabilities(archs=("sm_90",), needs=("flashinfer",), page_sizes=(128,), block_sizes=(128,), sink=False, lse=False, **limits),
        sources=("m3attn.integrations.flashinfer.kernels",),
        extra_reasons=reasons,
        built_in=True,
    )


def add_builtin_implementations() -> None:
    for implementation in (
        _reference("qk_norm_rope_insert", "norm_rope", q_dtypes=CACHE_FLOATS, kv_dtypes=CACHE_FLOATS),
        _reference("index_score", "index", block_sizes=POWERS_16_TO_256, **_REFERENCE_INDEX),
        _reference("select_blocks", "index", block_sizes=POWERS_16_TO_256, topk=(1, 128)),
        _reference("index_topk", "index", block_sizes=POWERS_16_TO_256, topk=(1, 128), **_REFERENCE_INDEX),
        _reference("sparse_attention", "sparse", block_sizes=POWERS_16_TO_256, topk=(1, 128), **_REFERENCE_ATTENTION),
        _reference("dense_attention", "dense", **_REFERENCE_ATTENTION),
        _reference("merge_attention_states", "merge"),
        _reference("quantize_fp8", "quantize"),
        _reference("mla_rope_quantize", "mla_quantize"),
        _reference("mla_kv_pack_quantize", "mla_quantize"),
        _reference("mla_prefill", "mla_prefill"),
        _reference("sparse_mla_prefill", "mla_sparse"),
        _triton("qk_norm_rope_insert", "qk_norm_rope_insert", "saturate", "primitives", q_dtypes=("bf16", "fp16", "fp32"), kv_dtypes=ALL_FLOATS),
        _triton("index_score", "index_score", "primitives", **_INDEX),
        _triton("select_blocks", "select_blocks", "primitives", topk=(1, 128)),
        _triton("index_topk", "index_topk", "index_score", "select_blocks", "primitives", scratch=True, topk=(1, 128), **_INDEX),
        _triton(
            "sparse_attention",
            "sparse_attention",
            "sparse_prefill",
            "sparse_decode",
            "sparse_tiles",
            "dense_tiles",
            "merge_splits",
            "widen_pages",
            "fp8",
            "primitives",
            scratch=True,
            fp8_archs=FP8_GEMM_ARCHS,
            topk=(1, 128),
            block_sizes=POWERS_16_TO_256,
            **_ATTENTION,
        ),
        _triton(
            "sparse_attention",
            "union_prefill",
            "dense_tiles",
            "widen_pages",
            "fp8",
            "primitives",
            key="triton_union",
            function="sparse_attention_union",
            scratch=True,
            fp8_archs=FP8_GEMM_ARCHS,
            topk=(1, 128),
            block_sizes=POWERS_16_TO_256,
            phases=("prefill",),
            **(_ATTENTION | dict(head_dims=(64, 128))),
        ),
        _triton(
            "dense_attention",
            "dense_attention",
            "dense_prefill",
            "dense_decode",
            "dense_tiles",
            "merge_splits",
            "fp8",
            "primitives",
            scratch=True,
            fp8_archs=FP8_GEMM_ARCHS,
            **_ATTENTION,
        ),
        Implementation(
            "dense_attention",
            "flash_attn_4",
            "m3attn.flash_attn_4:dense_attention",
            Capabilities(
                archs=("sm_90", "sm_100"),
                modes=("bf16", "fp16"),
                q_dtypes=("bf16", "fp16"),
                kv_dtypes=("bf16", "fp16"),
                head_dims=(64, 128),
                group_sizes=(1, 32),
                page_sizes=(128,),
                sink=False,
                needs_zero_on_alloc=True,
            ),
            workspace="m3attn.flash_attn_4:workspace_bytes",
            sources=("m3attn.flash_attn_4",),
            extra_reasons=flash_attn_4.reasons,
            built_in=True,
        ),
        _flashinfer(
            "index_score",
            flashinfer.index_score_reasons,
            index_q_dtypes=("bf16", "fp8_e4m3"),
            index_dtypes=("bf16", "fp8_e4m3"),
            index_dims=(128,),
            index_heads=(1, 4),
        ),
        _flashinfer("select_blocks", flashinfer.select_blocks_reasons, topk=(16, 16), exact_ids=False),
        _flashinfer(
            "sparse_attention",
            flashinfer.sparse_attention_reasons,
            modes=("widen",),
            q_dtypes=("bf16",),
            kv_dtypes=("fp8_e4m3",),
            head_dims=(128,),
            topk=(16, 16),
            needs_zero_on_alloc=True,
        ),
        _cute(
            "cute_sm90",
            "sparse_attention",
            "sparse_attention_sm90",
            "sparse_prefill_sm90",
            "sparse_prefill_by_block_sm90",
            "block_lists_sm90",
            "join_parts_sm90",
            "widen_pages",
            *_CUTE_DECODE,
            scratch=True,
            fp8_archs=("sm_90",),
            **_CUTE_ATTENTION,
        ),
        _cute(
            "cute_sm100",
            "sparse_attention",
            "sparse_attention_sm100",
            "sparse_attention_sm90",
            "sparse_prefill_sm100",
            "sparse_prefill_sm90",
            "widen_pages",
            *_CUTE_DECODE,
            scratch=True,
            fp8_archs=CUTE_ARCHS["cute_sm100"],
            **_CUTE_ATTENTION,
        ),
        _cute("cute_sm90", "index_score", "index_score_sm90", *_CUTE_SCORING, **_CUTE_INDEX),
        _cute("cute_sm90", "select_blocks", "select_blocks", "index_rows", topk=(1, 64), block_sizes=POWERS_16_TO_256),
        _cute(
            "cute_sm90",
            "index_topk",
            "index_topk_sm90",
            "index_score_sm90",
            *_CUTE_SCORING,
            "select_blocks",
            scratch=True,
            topk=(1, 64),
            **_CUTE_INDEX,
        ),
        _cute("cute_sm100", "index_score", "index_score_sm100", *_CUTE_SCORING, **_CUTE_INDEX),
        _cute("cute_sm100", "select_blocks", "select_blocks", "index_rows", topk=(1, 64), block_sizes=POWERS_16_TO_256),
        _cute(
            "cute_sm100",
            "index_topk",
            "index_topk_sm100",
            "index_score_sm100",
            *_CUTE_SCORING,
            "select_blocks",
            scratch=True,
            topk=(1, 64),
            **_CUTE_INDEX,
        ),
        _triton("merge_attention_states", "merge_states", q_dtypes=("bf16", "fp16", "fp32")),
        _triton("quantize_fp8", "quantize", "saturate", "primitives", q_dtypes=("bf16", "fp16", "fp32")),
        _triton("mla_rope_quantize", "mla_quantize", "saturate", "primitives", equal_head_dims=False, q_dtypes=("bf16", "fp16", "fp32")),
        _triton("mla_kv_pack_quantize", "mla_quantize", "saturate", "primitives", equal_head_dims=False, q_dtypes=("bf16", "fp16", "fp32")),
        _triton(
            "mla_prefill",
            "mla_prefill",
            "mla_prepare",
            "mla_quantize",
            "dense_tiles",
            "fp8",
            "primitives",
            fp8_archs=FP8_GEMM_ARCHS,
            modes=ATTENTION_MODES,
            equal_head_dims=False,
            head_dims=(64, 96, 128, 192, 256),
            v_head_dims=(64, 96, 128, 192, 256),
            prepare_qkv="m3attn.triton_kernels.mla_prepare:prepare_prefill_qkv",
        ),
        _triton(
            "sparse_mla_prefill",
            "sparse_mla_prefill",
            "mla_sparse",
            "fp8",
            "primitives",
            scratch=True,
            fp8_archs=FP8_GEMM_ARCHS,
            modes=ATTENTION_MODES,
            equal_head_dims=False,
            head_dims=(512, 576),
            topk=(1, 4096),
        ),
        _cute(
            "cute_sm90",
            "sparse_mla_prefill",
            "sparse_mla_sm90",
            "sparse_prefill_sm90",
            scratch=True,
            fp8_archs=("sm_90",),
            modes=("bf16", "fp16", "fp8_pv"),
            equal_head_dims=False,
            head_dims=(512, 576),
        ),
    ):
        add(implementation)
