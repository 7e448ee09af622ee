"""Which fp8 mode a layer runs in: derived from the cache dtype and the hardware, never flagged."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from m3attn import registry, switches
from m3attn.checks import check_int
from m3attn.choice import UnsupportedProblem, auto_order, disabled_by_switch, named_in_force, reasons_against
from m3attn.dtypes import dtype_name
from m3attn.problem import PHASES, Problem, normalise_arch

DISABLE_FP8_ATTN_GEMM = "M3ATTN_DISABLE_FP8_ATTN_GEMM"
KV_CACHE_DTYPES = ("auto", "bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e5m2")
INDEX_CACHE_DTYPES = ("auto", "bf16", "fp16", "fp32", "fp8_e4m3")
ATTENTION_STAGES = ("sparse_attention", "dense_attention")
INDEX_STAGES = ("index_topk", "index_score", "select_blocks")
DEFAULT_PAGE_SIZE = 128


@dataclass(frozen=True, slots=True)
class AttentionMode:
    """What a layer runs, resolved once.

    Attributes:
        mode: `bf16`, `fp16`, `fp32`, `widen` or `fp8`.
        q_dtype, kv_dtype, index_q_dtype, index_dtype: names of the formats that queries are quantised to and caches hold.
        page_size: tokens of a page.
        implementations: `stage/phase` -> registry key.
        reasons: why, one sentence a decision.
    """

    mode: str
    q_dtype: str
    kv_dtype: str
    index_q_dtype: str
    index_dtype: str
    page_size: int
    implementations: dict[str, str] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        index = f"index q {self.index_q_dtype}, index K {self.index_dtype}"
        lines = [f"mode {self.mode}: q {self.q_dtype}, KV {self.kv_dtype}, {index}, pages of {self.page_size}"]
        lines += [f"  {where}: {key}" for where, key in self.implementations.items()]
        return "\n".join(lines + [f"  {reason}" for reason in self.reasons])


def resolve_attention_mode(
    problem: Problem,
    *,
    kv_cache_dtype: str | torch.dtype = "auto",
    index_cache_dtype: str | torch.dtype | None = None,
    page_size: int | None = None,
    implementation: str | None = None,
) -> AttentionMode:
    """Resolve the mode, the index dtype, the page size and an implementation per stage and phase.

    fp8 mode follows from an e4m3 cache, an implementation that declares fp8 attention for the architecture, no named implementation that lacks
    it, and `M3ATTN_DISABLE_FP8_ATTN_GEMM` unset; else an fp8 cache is widened. Page, block and K choose implementations, never the mode.

    Args:
        problem: the layer in its own 16-bit dtype (`q_dtype`).
        kv_cache_dtype: `auto` (the layer's dtype), `fp8` = `fp8_e4m3`, `fp8_e5m2`, or a 16-bit name.
        index_cache_dtype: `auto`, `fp8` = `fp8_e4m3`; None: e4m3 in fp8 mode, the layer's dtype otherwise.
        page_size: None: 128; a given one is kept or refused.
        implementation: a registry key that must run the attention.

    Raises:
        ValueError: an unknown or refused dtype name, key or page size.
        UnsupportedProblem: the named implementation cannot run this, or none can, with the reasons.
    """
    problem = replace(problem, arch=normalise_arch(problem.arch))
    own = problem.q_dtype
    if own not in ("bf16", "fp16", "fp32"):
        raise ValueError(f"problem.q_dtype: expected the layer's own bf16, fp16 or fp32, got {own!r}")
    reasons: list[str] = []
    kv = dtype_name(kv_cache_dtype, argument="kv_cache_dtype", accepted=KV_CACHE_DTYPES)
    kv = own if kv == "auto" else kv
    if not kv.startswith("fp8") and kv != own:
        raise ValueError(f"kv_cache_dtype: expected auto, {own}, fp8_e4m3 or fp8_e5m2 for a {own} layer, got {kv!r}")
    pages = DEFAULT_PAGE_SIZE if page_size is None else page_size
    check_int("page_size", pages, 1)
    if problem.num_index_heads and problem.block_size % pages:
        raise ValueError(f"page_size: expected a divisor of block_size {problem.block_size} (a block is a whole number of pages), got {pages}")
    if page_size is None:
        reasons.append(f"page size {pages}: the default")
    if implementation is not None and not any(i.key == implementation for i in registry.implementations()):
        keys = ", ".join(sorted({i.key for i in registry.implementations()}))
        raise ValueError(f"implementation: expected one of {keys}, got {implementation!r}")
    if implementation is not None and (switch := disabled_by_switch(implementation)):
        raise UnsupportedProblem(f"implementation: {implementation!r} is switched off by {switch}")

    fp8, why = _fp8_attention(problem, kv, {stage: _named(implementation, stage) for stage in ATTENTION_STAGES})
    reasons.append(why)
    mode = "fp8" if fp8 else "widen" if kv.startswith("fp8") else own
    if kv == "fp8_e5m2":
        _warn_once_e5m2()
    index = None if index_cache_dtype is None else dtype_name(index_cache_dtype, argument="index_cache_dtype", accepted=INDEX_CACHE_DTYPES)
    if index is None:
        index = "fp8_e4m3" if fp8 else own
        reasons.append(f"index cache {index}: follows mode {mode}")
    index = own if index == "auto" else index
    q = "fp8_e4m3" if fp8 else own
    resolved = replace(problem, q_dtype=q, kv_dtype=kv, index_q_dtype=index, index_dtype=index, page_size=pages)
    chosen: dict[str, str] = {}
    for stage in (*ATTENTION_STAGES, *(INDEX_STAGES if problem.num_index_heads else ())):
        for phase in PHASES:
            key, notes = _choose(stage, replace(resolved, phase=phase, **_unused_by(stage)), _named(implementation, stage))
            chosen[f"{stage}/{phase}"] = key
            reasons += notes
    return AttentionMode(mode, q, kv, index, index, pages, chosen, tuple(dict.fromkeys(reasons)))


def _named(implementation: str | None, stage: str) -> str | None:
    """The key that is named for a stage: by the argument if the stage has it, else by the choice in force."""
    if implementation is not None and registry.find(stage, implementation) is not None:
        return implementation
    return named_in_force(stage, switches.impl())[0]


def _unused_by(stage: str) -> dict[str, Any]:
    """The fields of a layer's problem that a stage has no use for, so that it is not judged by them."""
    if stage in INDEX_STAGES:
        return {"q_dtype": "none", "kv_dtype": "none", "sink": False, "lse": False}
    return {"index_q_dtype": "none", "index_dtype": "none"}


def _fp8_attention(problem: Problem, kv: str, named: dict[str, str | None]) -> tuple[bool, str]:
    """Whether attention runs in fp8, given the key that is named for each attention stage, and the sentence that says why."""
    if not kv.startswith("fp8"):
        return False, f"mode {problem.q_dtype}: the cache is {kv}"
    if kv == "fp8_e5m2":
        return False, "mode widen: an e5m2 cache is read widened (e5m2 holds too few bits of q)"
    if switches.disable_fp8_attn_gemm() == "1":
        return False, f"mode widen: {DISABLE_FP8_ATTN_GEMM}=1"
    able = [i.key for i in registry.implementations("sparse_attention") if problem.arch in i.fp8_archs and disabled_by_switch(i.key) is None]
    if not able:
        return False, f"mode widen: no implementation declares fp8 attention for {problem.arch}"
    for stage, key in named.items():
        if key is not None and (known := registry.find(stage, key)) is not None and problem.arch not in known.fp8_archs:
            return False, f"mode widen: {key!r} is named and declares no fp8 attention for {problem.arch}"
    return True, f"mode fp8: an e4m3 cache, and {', '.join(able)} run fp8 attention on {problem.arch}"


def _choose(stage: str, problem: Problem, named: str | None) -> tuple[str, list[str]]:
    """The key that runs a stage, and what it says of those it passed over."""
    if named is not None:
        implementation = registry.find(stage, named)
        assert implementation is not None
        if reasons := reasons_against(implementation, problem):
            others = [k for k in auto_order(stage, problem) if (i := registry.find(stage, k)) and not reasons_against(i, problem)]
            remedy = f"; {', '.join(others)} can run it" if others else ""
            raise UnsupportedProblem(f"{stage}: {named!r} cannot run this: {'; '.join(reasons)}{remedy}")
        return named, []
    notes: list[str] = []
    for key in auto_order(stage, problem):
        candidate = registry.find(stage, key)
        assert candidate is not None
        refused = reasons_against(candidate, problem)
        if not refused:
            return key, notes
        notes.append(f"{stage}/{problem.phase}: {key} refused: {'; '.join(refused)}")
    raise UnsupportedProblem(f"no implementation runs this: {'; '.join(notes) or stage}")


_warned_e5m2 = False


def _warn_once_e5m2() -> None:
    global _warned_e5m2
    if not _warned_e5m2:
        _warned_e5m2 = True
        warnings.warn("kv_cache_dtype fp8_e5m2: K and V are read widened to 16 bit; fp8_e4m3 allows fp8 attention", stacklevel=4)
