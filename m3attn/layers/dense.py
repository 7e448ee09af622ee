"""`M3DenseAttention`, and what it shares with the sparse layer: projections, norms, rope, cache insert and output projection."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from m3attn.batch import LayerCache
from m3attn.choice import for_stage
from m3attn.config import M3Config
from m3attn.dtypes import dtype_name, is_fp8, torch_dtype
from m3attn.layers.rope import rotary_table
from m3attn.layers.shard import Shard, head_ranges
from m3attn.layers.weights import pack_hf_weights
from m3attn.modes import resolve_attention_mode
from m3attn.plans.plan import PlanPart, StepPlan
from m3attn.problem import Problem, arch_of
from m3attn.scales import Scale, ScaleLike
from m3attn.stages.attention import output_dtype
from m3attn.stages.dense_attention import dense_attention
from m3attn.stages.qk_norm_rope_insert import HEAD_DIM, NormWeights, qk_norm_rope_insert

INIT_STD = 0.02
"""`initializer_range` of transformers' M3."""


class M3Attention(nn.Module):
    """Base of both layers: everything but which keys a query attends to. Forward only; parameters do not require grad.

    Weights are random (`reset_parameters`) until `load_hf` or `load_state_dict` brings a model's.

    The mode (fp8 or not, index formats, an implementation per stage and phase) is resolved here, once, and holds for the layer's life.

    Args:
        config: the model's geometry; head_dim and index_dim must be 128.
        kv_cache_dtype, index_cache_dtype, page_size: as in `resolve_attention_mode`.
        implementation: a registry key that must run the attention; other stages take it where they have it.
        shard: this rank's place in tensor parallelism. KV heads (and their index heads) are replicated where there are more ranks.
        fp8_pv: P and V on fp8 tensor cores where the mode is fp8; else it has no effect.
        q_scale, index_q_scale: of queries that the mode quantises; else they have no effect.
        zero_on_alloc: the caches that this layer will get declare it (`LayerCache.zero_on_alloc`); implementations that need it may be chosen.
        cos_sin: [max_position, rotary_dim], cosines first, fp32 or the layer's dtype, one for all layers of a model; None: a table of its own.
        dtype, device: of the weights and activations; bf16, fp16 or fp32.

    Attributes:
        mode: the `AttentionMode`.
        heads: (Hq, Hkv, Hi) of this rank; ranges: which of the model's heads these are.
        qkv_proj: [row width, hidden], rows q | k | v | index_q | index_k; o_proj: [hidden, Hq * 128].

    Raises:
        ValueError, UnsupportedProblem: what does not fit, by name, with reasons.
    """

    sparse = False
    stages: tuple[str, ...] = ("dense_attention",)
    cos_sin: torch.Tensor

    def __init__(
        self,
        config: M3Config,
        *,
        kv_cache_dtype: str | torch.dtype = "auto",
        index_cache_dtype: str | torch.dtype | None = None,
        page_size: int | None = None,
        implementation: str | None = None,
        shard: Shard | None = None,
        fp8_pv: bool = False,
        q_scale: ScaleLike = None,
        index_q_scale: ScaleLike = None,
        zero_on_alloc: bool = False,
        cos_sin: torch.Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        all_index_heads: bool = False,
    ) -> None:
        super().__init__()
        if config.head_dim != HEAD_DIM or (self.sparse and config.index_dim != HEAD_DIM):
            raise ValueError(f"config: expected head_dim and index_dim {HEAD_DIM}, got {config.head_dim} and {config.index_dim}")
        device = torch.empty(0, device=device).device
        self.config, self.shard = config, Shard() if shard is None else shard
        self.ranges = head_ranges(config, self.shard, sparse=self.sparse, all_index_heads=all_index_heads)
        self.heads = self.ranges.counts
        problem = Problem(
            arch=arch_of(device),
            num_q_heads=self.heads.q,
            num_kv_heads=self.heads.kv,
            num_index_heads=self.heads.index,
            block_size=config.block_size,
            topk=config.topk,
            q_dtype=dtype_name(dtype),
            zero_on_alloc=zero_on_alloc,
        )
        self.zero_on_alloc = zero_on_alloc
        self.mode = resolve_attention_mode(
            problem, kv_cache_dtype=kv_cache_dtype, index_cache_dtype=index_cache_dtype, page_size=page_size, implementation=implementation
        )
        self.insert_impl = for_stage(implementation, "qk_norm_rope_insert")
        self.q_dtype, self.index_q_dtype = torch_dtype(self.mode.q_dtype), torch_dtype(self.mode.index_q_dtype)
        for name, scale in (("q_scale", q_scale), ("index_q_scale", index_q_scale)):
            Scale.of(scale, argument=name, device=device)
        self.q_scale = q_scale if is_fp8(self.q_dtype) else None
        self.index_q_scale = index_q_scale if is_fp8(self.index_q_dtype) else None
        self.fp8_pv = fp8_pv and self.mode.mode == "fp8"

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.qkv_proj = weight(self.heads.row_width, config.hidden_size)
        self.o_proj = weight(config.hidden_size, self.heads.q * HEAD_DIM)
        self.q_norm, self.k_norm = weight(HEAD_DIM), weight(HEAD_DIM)
        if self.sparse:
            self.index_q_norm, self.index_k_norm = weight(HEAD_DIM), weight(HEAD_DIM)
        if cos_sin is None:
            cos_sin = rotary_table(config.max_position, config.rotary_dim, config.rope_theta, device=device)
        if cos_sin.dim() != 2 or cos_sin.shape[1] != config.rotary_dim or cos_sin.device != device:
            raise ValueError(f"cos_sin: expected [max_position, {config.rotary_dim}] on {device}, got {list(cos_sin.shape)} on {cos_sin.device}")
        self.register_buffer("cos_sin", cos_sin, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Random projections, normal with standard deviation 0.02 from torch's global generator; norms that only normalise."""
        for name, weight in self.named_parameters(recurse=False):
            if name.endswith("norm"):
                nn.init.zeros_(weight)  # the norm's factor is 1 + w
            else:
                nn.init.normal_(weight, std=INIT_STD)

    @property
    def device(self) -> torch.device:
        return self.qkv_proj.device

    @property
    def runs_index(self) -> bool:
        """Whether this layer projects, caches and searches index heads."""
        return self.heads.index > 0

    def load_hf(self, state: Mapping[str, torch.Tensor], prefix: str = "") -> None:
        """Load this rank's part of Hugging Face weights, in place.

        Args:
            state, prefix: as in `pack_hf_weights`.

        Raises:
            ValueError: a weight that is missing, unknown or of another shape.
        """
        self.load_state_dict(pack_hf_weights(state, self.config, self.ranges, prefix=prefix))

    def check(self, plan: StepPlan, cache: LayerCache) -> None:
        """That plan and cache fit this layer, so that no launch will refuse them; `StepPlan.for_layers` calls it.

        Raises:
            TypeError, ValueError: what does not fit, by name.
        """
        self.check_plan(plan)
        plan.check_cache(cache, sparse=self.runs_index)
        if self.zero_on_alloc and not cache.zero_on_alloc:
            raise ValueError("cache.zero_on_alloc: expected True, as the layer was built for, got False")

    def check_plan(self, plan: StepPlan) -> None:
        """The part of `check` that is about the plan.

        Raises:
            TypeError, ValueError: what does not fit, by name.
        """
        if plan.device != self.device:
            raise ValueError(f"plan: expected one on {self.device}, got one on {plan.device}")
        if plan.heads[:2] != self.heads[:2]:
            raise ValueError(f"plan.heads: expected (Hq, Hkv) {tuple(self.heads[:2])}, got {tuple(plan.heads[:2])}")
        for name in ("q_dtype", "kv_dtype", "page_size"):
            if getattr(plan.mode, name) != getattr(self.mode, name):
                raise ValueError(f"plan.mode.{name}: expected the layer's {getattr(self.mode, name)}, got {getattr(plan.mode, name)}")
        for where, key in self.mode.implementations.items():
            if where.partition("/")[0] in self.stages and plan.mode.implementations.get(where) != key:
                raise ValueError(f"plan.mode: expected {key} for {where} as the layer, got {plan.mode.implementations.get(where)}")
        if plan.max_seqlen_k > self.cos_sin.shape[0]:
            raise ValueError(f"plan.max_seqlen_k: expected at most the {self.cos_sin.shape[0]} positions of cos_sin, got {plan.max_seqlen_k}")

    def check_step(self, x: torch.Tensor, plan: StepPlan) -> None:
        """That plan and x fit this layer and one another; forward begins with it, before anything is written.

        Raises:
            TypeError, ValueError: what does not fit, by name.
        """
        if not isinstance(plan, StepPlan):
            raise TypeError(f"plan: expected a StepPlan, got {type(plan).__name__}")
        self.check_plan(plan)
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x: expected a tensor, got {type(x).__name__}")
        if x.dim() != 2 or x.shape[1] != self.config.hidden_size:
            raise ValueError(f"x: expected [T, {self.config.hidden_size}], got {list(x.shape)}")
        if x.dtype != self.qkv_proj.dtype:
            raise TypeError(f"x: expected the layer's {self.qkv_proj.dtype}, got {x.dtype}")
        if x.device != self.device:
            raise ValueError(f"x: expected a tensor on {self.device}, got one on {x.device}")
        plan.check_rows(x.shape[0])

    def forward(self, x: torch.Tensor, plan: StepPlan, cache: LayerCache) -> torch.Tensor:
        """One layer of a step: writes the step's keys and values to the cache, then attends.

        Args:
            x: [T, hidden] in the layer's dtype, rows in the order of the plan's `update`, padding at the end.
            plan: the step, built for this layer.
            cache: this layer's.

        Returns:
            [T, hidden]; padding rows are 0. Without a process group, a shard's part of the sum.

        Raises:
            TypeError, ValueError: x or the plan does not fit, by name; nothing has been written then.
        """
        self.check_step(x, plan)
        tokens = x.shape[0]
        row = nn.functional.linear(x, self.qkv_proj)
        q, index_q = self._insert(row, plan, cache)
        q = plan.arrange(q)
        index_q = None if index_q is None else plan.arrange(index_q)
        out = plan.output(tokens, self.heads.q, HEAD_DIM, dtype=output_dtype(q))
        for part in plan.parts:
            rows = plan.rows_of(part, tokens)
            self._attend(q[rows], None if index_q is None else index_q[rows], cache, plan, part, rows, out[rows])
        summed = nn.functional.linear(plan.restore(out).flatten(1).to(x.dtype), self.o_proj)
        if self.shard.group is not None:
            dist.all_reduce(summed, group=self.shard.group)
        return summed

    def _norms(self) -> NormWeights:
        return NormWeights(self.q_norm, self.k_norm)

    def _insert(self, row: torch.Tensor, plan: StepPlan, cache: LayerCache, *, skip_index: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        """q and index q, normalised, rotated and in the mode's formats; k, v and the index key go to the cache."""
        tokens = row.shape[0]
        with_index = self.runs_index
        q_out = index_q_out = None
        if is_fp8(self.q_dtype):
            q_out = torch.empty(tokens, self.heads.q, HEAD_DIM, dtype=self.q_dtype, device=row.device)
        if with_index and is_fp8(self.index_q_dtype):
            index_q_out = torch.empty(tokens, self.heads.index, HEAD_DIM, dtype=self.index_q_dtype, device=row.device)
        slots = plan.slots[:tokens]
        return qk_norm_rope_insert(
            row,
            self._norms(),
            plan.positions[:tokens],
            self.cos_sin,
            cache,
            slots,
            plan.index_slots[:tokens] if with_index else None,
            heads=self.heads,
            eps=self.config.norm_eps,
            q_out=q_out,
            index_q_out=index_q_out,
            q_scale=self.q_scale,
            index_q_scale=self.index_q_scale if index_q_out is not None else None,
            skip_index=not with_index,
            impl=self.insert_impl,
        )

    def _impl(self, stage: str, part: PlanPart) -> str:
        return self.mode.implementations[f"{stage}/{part.batch.phase}"]

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
        raise NotImplementedError


class M3DenseAttention(M3Attention):
    __doc__ = "Causal attention over the whole cache, with M3's projections, norms and rope.\n\n" + (M3Attention.__doc__ or "")

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
        dense_attention(
            q,
            cache,
            part.batch,
            q_scale=self.q_scale,
            fp8_pv=self.fp8_pv,
            out=out,
            workspace=plan.scratch(q.shape[0], part),
            impl=self._impl("dense_attention", part),
        )
