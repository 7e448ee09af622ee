"""Public kernels timed beside ours in the same run, from a folder that holds them unmodified.

The folder is the one that this project's peer script fills: `vllm/models/minimax_m3/common/ops` (vLLM's Triton kernels for MiniMax-M3 with
the modules they import) and `_flashmla_C.abi3.so` (the FlashMLA extension of vLLM's wheel). Nothing of it is part of m3attn.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from m3attn.batch import PagedBatch
from m3attn.bench.inputs import HEAD_DIM, TOPK, StepInputs

VLLM = "vllm_triton"
VLLM_RELEASE = "0.33.0"
"""Whose kernels the peer script puts there."""
FLASHMLA = "flashmla"


@dataclass(frozen=True, slots=True)
class Peers:
    """What the folder offers; None for what is not there or does not load, with the reason in `missing`."""

    index_topk: Any = None
    sparse_attn: Any = None
    flashmla: Any = None
    missing: tuple[str, ...] = ()

    @classmethod
    def load(cls, folder: Path) -> Peers:
        """Import the kernels of `folder`.

        Raises:
            FileNotFoundError: no such folder.
        """
        if not folder.is_dir():
            raise FileNotFoundError(f"--peers: expected a folder with vLLM's kernels and FlashMLA, got {folder}")
        sys.path.insert(0, str(folder.resolve()))
        found: dict[str, Any] = {}
        missing: list[str] = []
        for name in ("index_topk", "sparse_attn"):
            try:
                found[name] = importlib.import_module(f"vllm.models.minimax_m3.common.ops.{name}")
            except Exception as error:  # a peer that does not load here leaves ours to be timed alone
                missing.append(f"{VLLM} {name}: {type(error).__name__}: {error}")
        try:
            torch.ops.load_library(str(folder.resolve() / "_flashmla_C.abi3.so"))
            found["flashmla"] = torch.ops._flashmla_C
        except Exception as error:
            missing.append(f"{FLASHMLA}: {type(error).__name__}: {error}")
        return cls(**found, missing=tuple(missing))

    def index_score(self, inputs: StepInputs, batch: PagedBatch) -> torch.Tensor:
        """[Hi, T, blocks]; columns past a row's own block hold anything."""
        step = inputs.step
        scores = self.index_topk.minimax_m3_index_score(
            inputs.index_q,
            inputs.cache.index_k,
            batch.page_table,
            batch.cu_seqlens_q,
            batch.seq_lens,
            inputs.prefix_lens,
            step.q_len,
            step.seq_len,
            inputs.heads.num_kv,
        )
        return scores[..., : batch.num_blocks]

    def index_decode_score(self, inputs: StepInputs, batch: PagedBatch) -> torch.Tensor:
        """As `index_score`, by the kernel of decode; every request has the same number of queries, and no block is forced."""
        step = inputs.step
        scores = self.index_topk.minimax_m3_index_decode_score(
            inputs.index_q,
            inputs.cache.index_k,
            batch.page_table,
            batch.seq_lens,
            step.seq_len,
            0,
            0,
            inputs.heads.num_kv,
            step.q_len,
            step.q_len,
        )
        return scores[..., : batch.num_blocks]

    def select_blocks(self, scores: torch.Tensor, inputs: StepInputs, batch: PagedBatch) -> torch.Tensor:
        """[Hkv, T, K], best first."""
        return self.index_topk.minimax_m3_index_topk(scores, batch.cu_seqlens_q, inputs.prefix_lens, inputs.step.q_len, TOPK, 0, 1)

    def index_decode(self, inputs: StepInputs, batch: PagedBatch) -> torch.Tensor:
        """[Hkv, T, K], best first; every request has the same number of queries."""
        step = inputs.step
        return self.index_topk.minimax_m3_index_decode(
            inputs.index_q,
            inputs.cache.index_k,
            batch.page_table,
            batch.seq_lens,
            step.seq_len,
            TOPK,
            0,
            1,
            inputs.heads.num_kv,
            step.q_len,
            step.q_len,
        )

    def sparse_prefill(self, inputs: StepInputs, batch: PagedBatch, ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        self.sparse_attn.minimax_m3_sparse_attn(
            inputs.q,
            inputs.cache.kv,
            ids,
            batch.page_table,
            batch.cu_seqlens_q,
            batch.seq_lens,
            inputs.prefix_lens,
            inputs.step.q_len,
            inputs.heads.num_kv,
            HEAD_DIM**-0.5,
            out,
        )
        return out

    def sparse_decode(self, inputs: StepInputs, batch: PagedBatch, ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        self.sparse_attn.minimax_m3_sparse_attn_decode(
            inputs.q, inputs.cache.kv, ids, batch.page_table, batch.seq_lens, inputs.heads.num_kv, HEAD_DIM**-0.5, out, inputs.step.q_len
        )
        return out

    def sparse_mla_prefill(self, q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float) -> torch.Tensor:
        """[s_q, h_q, 512] bf16."""
        return self.flashmla.sparse_prefill_fwd(q, kv, indices, sm_scale, 512, None, None, None)[0]
