"""Which stages can be timed, on which shapes, in which modes, and how their workloads are built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from m3attn import registry
from m3attn.bench import elementwise, mla, workloads
from m3attn.bench.inputs import BLOCK_SIZE, HEAD_DIM, INDEX_DIM, TOPK, Mode, Reads, StepInputs
from m3attn.bench.shapes import Heads, Step
from m3attn.bench.workloads import Options, Workload

TP1 = (Heads(64, 4),)
ALL_MODES = ("bf16", "fp16", "widen", "fp8", "fp8_pv")
INDEX_MODES = ("bf16", "fp16", "fp8")

# Distinct blocks that eight neighbouring draft tokens pick in selection N.
VERIFY_BLOCKS = 27


@dataclass(frozen=True, slots=True)
class StepStage:
    """A stage that runs on steps. `reads_kv`, `reads_index`: which pools it needs; `selects`: it takes block selections."""

    build: Callable[[StepInputs, Options], Workload]
    shapes: tuple[str, ...]
    modes: tuple[str, ...]
    implementations_of: tuple[str, ...]
    reads_kv: bool = False
    reads_index: bool = False
    selects: bool = False
    whole_context: bool = False

    def reads(self, step: Step, heads: Heads, mode: Mode) -> Reads:
        """Bytes of the cache that one call reads, for keeping L2 cold."""
        blocks = TOPK if step.q_len == 1 else VERIFY_BLOCKS
        return Reads(
            index=INDEX_DIM * mode.index.itemsize if self.reads_index else 0,
            kv=2 * HEAD_DIM * heads.num_kv * mode.kv.itemsize if self.reads_kv else 0,
            kv_tokens=step.seq_len if self.whole_context else min(step.seq_len, blocks * BLOCK_SIZE),
        )


PREFILL = ("P1", "P2", "P3")

STEP_STAGES: dict[str, StepStage] = {
    "index_score": StepStage(workloads.index_score, PREFILL, INDEX_MODES, ("index_score",), reads_index=True),
    "select_blocks": StepStage(workloads.select_blocks, PREFILL, ("bf16",), ("select_blocks",), reads_index=True),
    "index_topk": StepStage(workloads.index_topk, (*PREFILL, "prod", "decode", "verify"), INDEX_MODES, ("index_topk",), reads_index=True),
    "sparse_attention": StepStage(
        workloads.sparse_attention, (*PREFILL, "prod", "decode", "verify"), ALL_MODES, ("sparse_attention",), reads_kv=True, selects=True
    ),
    "dense_attention": StepStage(workloads.dense_attention, ("P1", "decode"), ALL_MODES, ("dense_attention",), reads_kv=True, whole_context=True),
    "step": StepStage(workloads.layer_step, ("decode",), ALL_MODES, ("index_topk", "sparse_attention"), reads_kv=True, reads_index=True),
}
"""`step` is index_topk and sparse_attention together, with the implementations that have both."""


@dataclass(frozen=True, slots=True)
class SizeStage:
    """A stage that runs on plain sizes of rank `rank`.

    `heads`: those of a run that names none; empty for a stage without heads. `one_number`: rows name the query heads only. `replay`: timed in
    a CUDA graph. `has_peers`: the builder takes the peers.
    """

    build: Callable[..., Workload]
    shapes: tuple[str, ...]
    modes: tuple[str, ...]
    rank: int
    heads: tuple[Heads, ...] = TP1
    one_number: bool = False
    replay: bool = False
    has_peers: bool = False


SIZE_STAGES: dict[str, SizeStage] = {
    "qk_norm_rope_insert": SizeStage(elementwise.qk_norm_rope_insert, ("1", "64", "8192", "32768"), ("bf16", "fp16", "fp8"), rank=1, replay=True),
    "merge_attention_states": SizeStage(elementwise.merge_attention_states, ("64", "8192"), ("bf16", "fp16"), rank=1),
    "quantize_fp8": SizeStage(elementwise.quantize_fp8, ("8192x8192", "131072x128"), ("fp8",), rank=2, heads=()),
    "mla_rope_quantize": SizeStage(mla.mla_rope_quantize, ("8192", "32768"), ("fp8",), rank=1, heads=(Heads(128, 1),), one_number=True),
    "mla_kv_pack_quantize": SizeStage(mla.mla_kv_pack_quantize, ("8192", "32768"), ("fp8",), rank=1, heads=(Heads(128, 1),), one_number=True),
    "mla_prefill": SizeStage(
        mla.mla_prefill, ("8192x8192", "2048x16384"), ("bf16", "fp8", "fp8_pv"), rank=2, heads=(Heads(128, 1),), one_number=True
    ),
    "sparse_mla_prefill": SizeStage(
        mla.sparse_mla_prefill,
        tuple(f"{queries}x{rest}" for rest in ("8192x2048", "65536x2048", "8192x1024", "8192x512") for queries in (1, 64, 1024, 4096)),
        ("bf16", "fp8"),
        rank=3,
        heads=(Heads(128, 1), Heads(64, 1)),
        one_number=True,
        has_peers=True,
    ),
}

STAGES = (*STEP_STAGES, *SIZE_STAGES)

TIMED_BY_DEFAULT = tuple(stage for stage in STAGES if stage in STEP_STAGES or stage in registry.STAGES)
"""Without a stage that only a peer has."""
