"""The forward of a prepared attention layer: the model's projections and norms, m3attn's cache, indexer and attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import apply_rotary_pos_emb

from m3attn.batch import LayerCache
from m3attn.config import M3Config
from m3attn.dtypes import is_fp8, torch_dtype
from m3attn.integrations.transformers.cache import PagedLayer, paged_layer
from m3attn.integrations.transformers.rows import Step
from m3attn.modes import AttentionMode
from m3attn.stages.attention import output_dtype
from m3attn.stages.dense_attention import dense_attention
from m3attn.stages.index_topk import index_topk
from m3attn.stages.quantize_fp8 import quantize_fp8
from m3attn.stages.sparse_attention import sparse_attention


@dataclass(frozen=True, slots=True)
class Settings:
    """What `prepare` decided for a layer.

    Attributes:
        device: the kind of device that `mode` was resolved for.
        previous: the attention implementation that the model had before.
    """

    config: M3Config
    mode: AttentionMode
    fp8_pv: bool
    device: str
    previous: str

    def implementation(self, stage: str, step: Step) -> str:
        return self.mode.implementations[f"{stage}/{step.batch.phase}"]


class Heads(NamedTuple):
    """A layer's rows after norms and rope: q [T, Hq, D], k and v [T, Hkv, D], index_q [T, Hi, Di], index_k [T, Di]; T = B * S."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    index_q: torch.Tensor | None = None
    index_k: torch.Tensor | None = None


def attend_paged(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`MiniMaxM3VLAttention.forward` in its own arguments (newer transformers say `cache`); returns no attention weights.

    Raises:
        ValueError: attention weights asked for, attention dropout in training, a model that has moved, or a mask, cache or batch that does not fit.
    """
    settings: Settings = self.m3attn
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions: expected False, a prepared model computes no attention weights; got True")
    if self.training and self.attention_dropout:
        raise ValueError(f"attention_dropout: expected 0 or model.eval(), got {self.attention_dropout} in training")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(f"attention_mask: expected [B, columns], one entry a token, got {list(attention_mask.shape)}")
    if hidden_states.device.type != settings.device:
        raise ValueError(
            f"hidden_states: expected tensors on {settings.device}, where prepare found the model, got {hidden_states.device}; prepare again"
        )
    batch_size, columns = hidden_states.shape[:2]
    heads = _project(self, hidden_states, position_embeddings)
    past = cache if past_key_values is None else past_key_values
    if past is None:
        layer = PagedLayer(self.layer_idx, settings.config, settings.mode, None, [])
    else:
        layer = paged_layer(past, self.layer_idx, settings.config, settings.mode)
    rows = layer.rows_for(batch_size, heads.q.device)
    begins = past is None or layer.is_first
    step = rows.begin(columns, attention_mask) if begins else rows.step(heads.q.device)
    pages = layer.write(step.slots, heads.k, heads.v, heads.index_k)
    out = _attend(self, settings, step, pages, heads)
    if past is not None and layer.is_last:
        rows.end(columns)
    out = step.unpack(out).view(batch_size, columns, -1).to(hidden_states.dtype)
    return self.o_proj(out), None


def _project(module: Any, x: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]) -> Heads:
    shape, (cos, sin) = (*x.shape[:2], -1, module.head_dim), position_embeddings
    q, k = module.q_norm(module.q_proj(x).view(shape)), module.k_norm(module.k_proj(x).view(shape))
    q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), module.v_proj(x).view(shape).flatten(0, 1)
    indexer = module.indexer
    if indexer is None:
        return Heads(q, k, v)
    dim = indexer.head_dim
    index_q = indexer.q_norm(indexer.q_proj(x).view(*x.shape[:2], -1, dim))
    index_k = indexer.k_norm(indexer.k_proj(x).view(*x.shape[:2], 1, dim))
    index_q, index_k = apply_rotary_pos_emb(index_q, index_k, cos[..., :dim], sin[..., :dim], unsqueeze_dim=2)
    return Heads(q, k, v, index_q.flatten(0, 1), index_k.flatten(0, 2))


def _attend(module: Any, settings: Settings, step: Step, pages: LayerCache, heads: Heads) -> torch.Tensor:
    """[T, Hq, D] in the order of the step's query rows."""
    config, mode = settings.config, settings.mode
    q = _formatted(step.pack(heads.q), mode.q_dtype)
    out = torch.empty(q.shape, dtype=output_dtype(q), device=q.device)
    options: dict[str, Any] = {"sm_scale": module.scaling, "fp8_pv": settings.fp8_pv, "out": out}
    if heads.index_q is None:
        dense_attention(q, pages, step.batch, **options, impl=settings.implementation("dense_attention", step))
        return out
    ids = index_topk(
        _formatted(step.pack(heads.index_q), mode.index_q_dtype),
        pages,
        step.batch,
        topk=config.topk,
        init_blocks=config.init_blocks,
        local_blocks=config.local_blocks,
        impl=settings.implementation("index_topk", step),
    )
    sparse_attention(q, pages, ids, step.batch, **options, impl=settings.implementation("sparse_attention", step))
    return out


def _formatted(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """x, or x in the mode's fp8 format, with a scale of 1: queries are normalised."""
    wanted = torch_dtype(dtype)
    if not is_fp8(wanted):
        return x
    out = torch.empty(x.shape, dtype=wanted, device=x.device)
    quantize_fp8(x.contiguous(), dtype=wanted, out=out)
    return out
