"""`M3SparseAttention`: the index branch chooses blocks, attention reads only those."""

from __future__ import annotations

from typing import Any

import torch

from m3attn.batch import LayerCache
from m3attn.config import M3Config
from m3attn.layers.dense import M3Attention
from m3attn.modes import INDEX_STAGES
from m3attn.plans.plan import PlanPart, StepPlan
from m3attn.rules import find_rule
from m3attn.stages.index_score import index_score
from m3attn.stages.index_topk import index_topk
from m3attn.stages.qk_norm_rope_insert import NormWeights
from m3attn.stages.sparse_attention import sparse_attention


class M3SparseAttention(M3Attention):
    """M3's sparse layer: insert, index, select, attend.

    Args:
        config: the model's geometry.
        rule: a selection rule's name. Under tensor parallelism another rule than `topk` keeps every index head on every rank, because a rule may
            look across heads.
        reuse_ids: take the ids that an earlier sparse layer of the same step left in the plan. The layer then runs no index branch and writes no
            index keys; its own index weights are not used. Off by default: it changes the model.
        options: as in `M3Attention`.

    Raises:
        ValueError, UnsupportedProblem: what does not fit, by name, with reasons.
    """

    sparse = True
    stages = ("sparse_attention", *INDEX_STAGES)

    def __init__(self, config: M3Config, *, rule: str = "topk", reuse_ids: bool = False, **options: Any) -> None:
        super().__init__(config, all_index_heads=rule != "topk", **options)
        find_rule(rule)
        self.rule, self.reuse_ids = rule, reuse_ids

    @property
    def runs_index(self) -> bool:
        return not self.reuse_ids

    def check_plan(self, plan: StepPlan) -> None:
        if plan.ids is None:
            raise ValueError("plan.heads: expected index heads for a sparse layer, got a plan for dense layers")
        for name, want in (("topk", self.config.topk), ("block_size", self.config.block_size)):
            if getattr(plan, name) != want:
                raise ValueError(f"plan.{name}: expected the layer's {want}, got {getattr(plan, name)}")
        if plan.heads.index < self.heads.index:
            raise ValueError(f"plan.heads: expected at least {self.heads.index} index heads, got {plan.heads.index}")
        for name in ("index_q_dtype", "index_dtype"):
            if getattr(plan.mode, name) != getattr(self.mode, name):
                raise ValueError(f"plan.mode.{name}: expected the layer's {getattr(self.mode, name)}, got {getattr(plan.mode, name)}")
        super().check_plan(plan)

    def check_step(self, x: torch.Tensor, plan: StepPlan) -> None:
        super().check_step(x, plan)
        if self.reuse_ids and plan.ids_of != self._ids_form(x):
            heads, topk, rows = self._ids_form(x)
            raise ValueError(
                f"plan.ids: expected ids of this step for {heads} KV heads, K {topk} and {rows} rows to reuse, got "
                + ("none: no earlier layer has written any" if plan.ids_of is None else "{} heads, K {} and {} rows".format(*plan.ids_of))
            )

    def forward(self, x: torch.Tensor, plan: StepPlan, cache: LayerCache) -> torch.Tensor:
        out = super().forward(x, plan, cache)
        plan.ids_of = self._ids_form(x)
        return out

    def _ids_form(self, x: torch.Tensor) -> tuple[int, int, int]:
        return (self.heads.kv, self.config.topk, x.shape[0])

    def _norms(self) -> NormWeights:
        return NormWeights(self.q_norm, self.k_norm, self.index_q_norm, self.index_k_norm)

    def _attend(
        self,
        q: torch.Tensor,
        index_q: torch.Tensor | None,
        cache: LayerCache,
        plan: StepPlan,
        part: PlanPart,
        rows: slice,
        out: torch.Tensor,
    ) -> None:
        assert plan.ids is not None
        ids = plan.ids[:, rows]
        if index_q is not None:
            self._select(index_q, cache, plan, part, ids)
        sparse_attention(
            q,
            cache,
            ids,
            part.batch,
            q_scale=self.q_scale,
            fp8_pv=self.fp8_pv,
            out=out,
            workspace=plan.scratch(q.shape[0], part),
            impl=self._impl("sparse_attention", part),
        )

    def _select(self, index_q: torch.Tensor, cache: LayerCache, plan: StepPlan, part: PlanPart, ids: torch.Tensor) -> None:
        """Fill `ids` [Hkv, rows, K]: the fused stage for M3's own rule, else scores and then the rule."""
        config = self.config
        options = {"topk": config.topk, "init_blocks": config.init_blocks, "local_blocks": config.local_blocks}
        if self.rule == "topk":
            index_topk(
                index_q,
                cache,
                part.index_batch,
                **options,
                index_q_scale=self.index_q_scale,
                out=ids,
                workspace=plan.scratch(index_q.shape[0], part),
                impl=self._impl("index_topk", part),
            )
            return
        scores = index_score(index_q, cache, part.index_batch, index_q_scale=self.index_q_scale, impl=self._impl("index_score", part))
        chosen = find_rule(self.rule)(scores, part.index_batch, **options, impl=self._impl("select_blocks", part))
        own = self.ranges.own_index
        ids.copy_(chosen[own.start : own.stop])
