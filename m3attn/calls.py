"""What an implementation receives: one frozen dataclass a stage, already checked, with every output buffer in it.

An implementation is a function `fn(call) -> None` that fills the call's outputs. Tensors are views in their true element type (never
uint8), scales are normalised, optional outputs are None when not asked for. `docs/contract.md` says what must be computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from m3attn.batch import PagedBatch
from m3attn.scales import Scale


@dataclass(frozen=True, eq=False, slots=True)
class QkNormRopeInsertCall:
    qkv: torch.Tensor  # [T, (Hq + 2 Hkv + Hi + 1) * 128] or [T, (Hq + 2 Hkv) * 128], unit last stride; q, k, index regions may be overwritten
    q_weight: torch.Tensor  # [128] fp32 or qkv's dtype
    k_weight: torch.Tensor  # [128]
    index_q_weight: torch.Tensor | None  # [128]; None without an index branch
    index_k_weight: torch.Tensor | None
    positions: torch.Tensor  # [T] int32 or int64
    cos_sin: torch.Tensor  # [max_position, rotary_dim], cosines first
    k_cache: torch.Tensor | None  # [pages, Hkv, page_size, 128]; None: k, index_k go back in place
    v_cache: torch.Tensor | None
    index_k_cache: torch.Tensor | None  # [pages, page_size, 128]
    slots: torch.Tensor | None  # [T] int32 or int64, page * page_size + offset
    index_slots: torch.Tensor | None
    num_q_heads: int
    num_kv_heads: int
    num_index_heads: int  # 0: a dense layer's row, or skip_index
    eps: float
    q_out: torch.Tensor | None  # [T, Hq, 128]; None: in place
    index_q_out: torch.Tensor | None  # [T, Hi, 128]
    q_scale: Scale
    index_q_scale: Scale
    k_scale: Scale
    v_scale: Scale
    index_k_scale: Scale


@dataclass(frozen=True, eq=False, slots=True)
class IndexScoreCall:
    index_q: torch.Tensor  # [T, Hi, Di], unit last stride
    index_k: torch.Tensor  # [pages, page_size, Di]
    batch: PagedBatch
    index_q_scale: Scale
    index_k_scale: Scale
    out: torch.Tensor  # [Hi, T, num_blocks] fp32, any strides


@dataclass(frozen=True, eq=False, slots=True)
class SelectBlocksCall:
    scores: torch.Tensor  # [Hkv, T, num_blocks] fp32, any strides; columns at or past a row's own block may hold anything
    batch: PagedBatch
    topk: int
    init_blocks: int
    local_blocks: int
    out: torch.Tensor  # [Hkv, T, K] int32, any strides


@dataclass(frozen=True, eq=False, slots=True)
class IndexTopkCall:
    index_q: torch.Tensor  # [T, Hi, Di]
    index_k: torch.Tensor  # [pages, page_size, Di]
    batch: PagedBatch
    topk: int
    init_blocks: int
    local_blocks: int
    index_q_scale: Scale
    index_k_scale: Scale
    out: torch.Tensor  # [Hkv, T, K] int32
    workspace: torch.Tensor | None  # flat uint8 of the size the implementation asked for; None: it asked for none


@dataclass(frozen=True, eq=False, slots=True)
class SparseAttentionCall:
    q: torch.Tensor  # [T, Hq, D], unit last stride
    k: torch.Tensor  # [pages, Hkv, page_size, D]
    v: torch.Tensor
    ids: torch.Tensor  # [Hkv, T, K] int32, any strides
    batch: PagedBatch
    sm_scale: float
    q_scale: Scale
    k_scale: Scale
    v_scale: Scale
    sink_key: torch.Tensor | None  # [Hq, D]
    fp8_pv: bool
    out: torch.Tensor  # [T, Hq, D], unit last stride
    lse: torch.Tensor | None  # [T, Hq] fp32
    workspace: torch.Tensor | None


@dataclass(frozen=True, eq=False, slots=True)
class DenseAttentionCall:
    q: torch.Tensor  # [T, Hq, D]
    k: torch.Tensor  # [pages, Hkv, page_size, D]
    v: torch.Tensor
    batch: PagedBatch
    sm_scale: float
    q_scale: Scale
    k_scale: Scale
    v_scale: Scale
    sink_key: torch.Tensor | None
    fp8_pv: bool
    out: torch.Tensor
    lse: torch.Tensor | None
    workspace: torch.Tensor | None


@dataclass(frozen=True, eq=False, slots=True)
class MergeAttentionStatesCall:
    out_a: torch.Tensor  # [T, H, D]
    lse_a: torch.Tensor  # [T, H] fp32, natural log
    out_b: torch.Tensor
    lse_b: torch.Tensor
    out: torch.Tensor  # [T, H, D]
    lse: torch.Tensor  # [T, H] fp32


@dataclass(frozen=True, eq=False, slots=True)
class QuantizeFp8Call:
    x: torch.Tensor  # [..., N], unit last stride
    mode: str  # "static" (scale given), "tensor" or "row" (dynamic, written to scale_out)
    scale: Scale
    out: torch.Tensor  # like x, e4m3 or e5m2
    scale_out: torch.Tensor | None  # [1] for "tensor", [rows] for "row", fp32
    pdl: bool


@dataclass(frozen=True, eq=False, slots=True)
class MlaRopeQuantizeCall:
    q_nope: torch.Tensor  # [T, H, nope], any strides but a unit last one
    q_pe: torch.Tensor  # [T, H, rope]
    k_nope: torch.Tensor  # [T, H, nope]
    k_pe: torch.Tensor  # [T, rope], shared by all heads
    positions: torch.Tensor  # [T] int32 or int64
    cos_sin: torch.Tensor  # [max_position, rope], cosines first
    interleaved: bool
    q_scale: Scale
    k_scale: Scale
    q_out: torch.Tensor  # [T, H, nope + rope], contiguous; e4m3, or the inputs' dtype with scales of 1
    k_out: torch.Tensor


@dataclass(frozen=True, eq=False, slots=True)
class MlaKvPackQuantizeCall:
    k_nope: torch.Tensor  # [T, H, nope], any strides but a unit last one
    k_pe: torch.Tensor  # [T, rope], roped, shared by all heads
    v: torch.Tensor  # [T, H, d_v]
    k_scale: Scale
    v_scale: Scale
    k_out: torch.Tensor  # [T, H, nope + rope] e4m3, contiguous
    v_out: torch.Tensor  # [T, H, d_v] e4m3, contiguous


@dataclass(frozen=True, eq=False, slots=True)
class SparseMlaPrefillCall:
    q: torch.Tensor  # [s_q, h_q, d_qk], unit last stride
    kv: torch.Tensor  # [s_kv, d_qk], unit last stride
    indices: torch.Tensor  # [s_q, topk] int32, any strides; outside [0, s_kv): ignored
    sm_scale: float
    q_scale: Scale
    kv_scale: Scale
    topk_length: torch.Tensor | None  # [s_q] int32
    attn_sink: torch.Tensor | None  # [h_q] fp32, natural-log logit
    fp8_pv: bool  # only with e4m3 q and kv
    out: torch.Tensor  # [s_q, h_q, 512] bf16, contiguous
    max_logits: torch.Tensor  # [s_q, h_q] fp32, contiguous
    lse: torch.Tensor  # [s_q, h_q] fp32, contiguous; +inf without a valid index
    workspace: torch.Tensor | None


@dataclass(frozen=True, eq=False, slots=True)
class MlaPrefillCall:
    q: torch.Tensor  # [T, H, d_qk], unit last stride
    k: torch.Tensor  # [Tk, H, d_qk]
    v: torch.Tensor  # [Tk, H, d_v]
    cu_seqlens_q: torch.Tensor  # [B + 1] int32
    cu_seqlens_k: torch.Tensor
    causal: bool  # the last query of a request sees its last key
    sm_scale: float
    q_scale: Scale
    k_scale: Scale
    v_scale: Scale
    fp8_pv: bool
    out: torch.Tensor  # [T, H, d_v], unit last stride
    lse: torch.Tensor | None  # [T, H] fp32


@dataclass(frozen=True, eq=False, slots=True)
class PreparePrefillQkvCall:
    """The one call whose implementation returns something: (q, k, v) of `dtype` for `mla_prefill`, [T, H, dim] with unit last stride each."""

    q_nope: torch.Tensor  # [T, H, nope], any strides but a unit last one
    q_pe: torch.Tensor  # [T, H, rope]
    k_nope: torch.Tensor  # [T, H, nope]
    v: torch.Tensor  # [T, H, d_v]
    latent: torch.Tensor  # [T, latent]
    k_pe: torch.Tensor  # [T, rope]
    positions: torch.Tensor  # [T] int32 or int64
    cos_sin: torch.Tensor  # [max_position, rope], cosines first
    cache: torch.Tensor  # [pages, page_size, latent + rope], unit last stride
    slots: torch.Tensor  # [T] int32 or int64, page * page_size + offset
    interleaved: bool
    dtype: torch.dtype  # e4m3, or the inputs' own, to which no scale belongs
    q_scale: Scale
    k_scale: Scale
    v_scale: Scale
    cache_scale: Scale
