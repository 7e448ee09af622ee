"""qk_norm_rope_insert: per-head Gemma RMSNorm, partial RoPE and the cache writes of one packed row, with one rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from m3attn import device_checks
from m3attn.batch import LayerCache
from m3attn.calls import QkNormRopeInsertCall
from m3attn.checks import check_int, check_number, check_outputs, check_tensor, once_per_look
from m3attn.dtypes import E4M3, E5M2, FLOAT_DTYPES, dtype_name, is_fp8
from m3attn.operators import (
    define,
    nothing,
    pack_index_cache,
    pack_kv_cache,
    pack_mutated,
    pack_scale,
    scale_schema,
    unpack_optional,
    unpack_scale,
)
from m3attn.problem import Problem, arch_of, arch_settings
from m3attn.scales import UNIT, Scale, ScaleLike
from m3attn.stages.execute import execute

HEAD_DIM = 128
ROW_DTYPES = (*FLOAT_DTYPES, torch.float64)
INT_DTYPES = (torch.int32, torch.int64)


class NormWeights(NamedTuple):
    """The w of (1 + w), [128] each, in fp32 or the row's dtype; the index ones None without an index branch."""

    q: torch.Tensor
    k: torch.Tensor
    index_q: torch.Tensor | None = None
    index_k: torch.Tensor | None = None


class HeadCounts(NamedTuple):
    """Heads of a packed row: [q | k | v | index_q | index_k (1)], the last two only with index heads."""

    q: int
    kv: int
    index: int = 0  # type: ignore[assignment]  # hides tuple.index

    @property
    def row_width(self) -> int:
        return (self.q + 2 * self.kv + (self.index + 1 if self.index else 0)) * HEAD_DIM


def qk_norm_rope_insert(
    qkv: torch.Tensor,
    weights: Sequence[torch.Tensor | None],
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: LayerCache | None = None,
    slots: torch.Tensor | None = None,
    index_slots: torch.Tensor | None = None,
    *,
    heads: Sequence[int],
    eps: float = 1e-6,
    q_out: torch.Tensor | None = None,
    index_q_out: torch.Tensor | None = None,
    q_scale: ScaleLike = None,
    index_q_scale: ScaleLike = None,
    skip_index: bool = False,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """y = x * rsqrt(mean(x^2) + eps) * (1 + w) per head of q, k, index_q, index_k in fp32, then NeoX RoPE on the first rotary_dim dims.

    Pairs are (i, i + rotary_dim / 2); v is untouched. There is one rounding, from fp32 straight to the output or cache dtype. With a cache, k
    and v go to their main slot and index_k to its index slot, and the packed row's k, v, index_k stay as they came; without one, the
    normalised k and index_k are written back in place. A slot outside [0, capacity) writes nothing; of two rows with one slot either
    value stays, whole. A position outside the table makes the row a padded one: it writes no cache, leaves what is in place and zeroes its
    row of `q_out` and `index_q_out`.

    Args:
        qkv: packed rows [T, (Hq + 2 Hkv + Hi + 1) * 128], or [T, (Hq + 2 Hkv) * 128] for a dense layer; bf16, fp16 or fp32, any row stride.
        weights: norm weights of q, k, index_q, index_k (`NormWeights`), [128] fp32 or qkv's dtype.
        positions: [T] int32 or int64.
        cos_sin: [max_position, rotary_dim], cosines first, fp32 or qkv's dtype.
        cache: where k, v, index_k go: `k`/`v` or packed `kv` in qkv's dtype, e4m3 or e5m2; `index_k` in qkv's dtype or e4m3.
        slots: [T] int32 or int64, page * page_size + offset in the main cache.
        index_slots: the same for the index cache.
        heads: (Hq, Hkv, Hi) of the row; Hi 0 or absent for a dense layer.
        eps: of the norm.
        q_out: [T, Hq, 128], 16 bit, fp32 or e4m3; None: q in place.
        index_q_out: [T, Hi, 128] likewise.
        q_scale, index_q_scale: of e4m3 outputs; stored = value / scale.
        skip_index: leave the row's index columns and the index cache alone.
        impl: a registry key; None: the choice in force.

    Returns:
        (q [T, Hq, 128], index_q [T, Hi, 128] or None): `q_out` and `index_q_out`, or views of qkv.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name.
    """
    counts, weights = _counts(heads), _norm_weights(weights)
    if torch.compiler.is_compiling():
        flat = _flatten(qkv, weights, positions, cos_sin, cache, slots, index_slots, counts, eps, q_out, index_q_out, skip_index)
        _out(*flat, *pack_scale(q_scale, "q_scale"), *pack_scale(index_q_scale, "index_q_scale"), impl)
        return _results(qkv, counts, q_out, index_q_out, skip_index)
    return _eager(
        qkv, weights, positions, cos_sin, cache, slots, index_slots, counts, eps, q_out, index_q_out, q_scale, index_q_scale, skip_index, impl
    )


def _counts(heads: Sequence[int]) -> HeadCounts:
    if len(heads) not in (2, 3):
        raise ValueError(f"heads: expected (Hq, Hkv, Hi) or (Hq, Hkv), got {tuple(heads)}")
    return HeadCounts(*heads)


def _norm_weights(weights: Sequence[torch.Tensor | None]) -> NormWeights:
    if not isinstance(weights, Sequence):
        raise TypeError(f"weights: expected the norm weights of q, k, index_q, index_k, got {type(weights).__name__}")
    if not 2 <= len(weights) <= 4:
        raise ValueError(f"weights: expected the norm weights of q, k and, with an index branch, index_q, index_k, got {len(weights)}")
    return NormWeights(*weights)  # type: ignore[arg-type]


def _results(
    qkv: torch.Tensor, heads: HeadCounts, q_out: torch.Tensor | None, index_q_out: torch.Tensor | None, skip_index: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    q = q_out if q_out is not None else qkv[:, : heads.q * HEAD_DIM].unflatten(1, (heads.q, HEAD_DIM))
    if skip_index or not heads.index:
        return q, None
    if index_q_out is not None:
        return q, index_q_out
    start = (heads.q + 2 * heads.kv) * HEAD_DIM
    return q, qkv[:, start : start + heads.index * HEAD_DIM].unflatten(1, (heads.index, HEAD_DIM))


def _fp8_scale(argument: str, scale: Scale, dtype: torch.dtype | None) -> Scale:
    """A scale belongs to fp8 data: with another format it would change values that nobody scales back."""
    if scale is not UNIT and (dtype is None or not is_fp8(dtype)) and (scale.tensor is not None or scale.value != 1.0):
        raise ValueError(f"{argument}: expected None where the data is {dtype}, which no scale belongs to, got {scale.tensor or scale.value}")
    return scale


def _eager(
    qkv: torch.Tensor,
    norm: NormWeights,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: LayerCache | None,
    slots: torch.Tensor | None,
    index_slots: torch.Tensor | None,
    heads: HeadCounts,
    eps: float,
    q_out: torch.Tensor | None,
    index_q_out: torch.Tensor | None,
    q_scale: ScaleLike,
    index_q_scale: ScaleLike,
    skip_index: bool,
    impl: str | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    problem = _accept(*arch_settings(), qkv, norm, positions, cos_sin, cache, slots, index_slots, heads, q_out, index_q_out, skip_index)
    device, with_index = qkv.device, heads.index > 0 and not skip_index
    k_cache = v_cache = index_cache = None
    k_scale = v_scale = index_k_scale = UNIT
    if cache is not None:
        k_cache, v_cache = cache.key_value()
        k_scale, v_scale, index_k_scale = cache.scales(device)
        device_checks.check_slots("slots", slots, k_cache.shape[0] * k_cache.shape[2])
        if with_index:
            index_cache = cache.index_key()
            device_checks.check_slots("index_slots", index_slots, index_cache.shape[0] * index_cache.shape[1])
    check_outputs(
        {"q_out": q_out, "index_q_out": index_q_out, "cache.k": k_cache, "cache.v": v_cache, "cache.index_k": index_cache},
        {
            "qkv": qkv,
            "cos_sin": cos_sin,
            "positions": positions,
            "slots": slots,
            "index_slots": index_slots,
            "weights.q": norm.q,
            "weights.k": norm.k,
            "weights.index_q": norm.index_q,
            "weights.index_k": norm.index_k,
        },
    )
    call = dict(
        qkv=qkv,
        q_weight=norm.q,
        k_weight=norm.k,
        index_q_weight=norm.index_q if with_index else None,
        index_k_weight=norm.index_k if with_index else None,
        positions=positions,
        cos_sin=cos_sin,
        k_cache=k_cache,
        v_cache=v_cache,
        index_k_cache=index_cache,
        slots=slots,
        index_slots=index_slots if with_index else None,
        num_q_heads=heads.q,
        num_kv_heads=heads.kv,
        num_index_heads=heads.index if with_index else 0,
        eps=check_number("eps", eps),
        q_out=q_out,
        index_q_out=index_q_out,
        q_scale=_fp8_scale("q_scale", Scale.of(q_scale, argument="q_scale", device=device), None if q_out is None else q_out.dtype),
        index_q_scale=_fp8_scale(
            "index_q_scale",
            Scale.of(index_q_scale, argument="index_q_scale", device=device),
            None if index_q_out is None else index_q_out.dtype,
        ),
        k_scale=_fp8_scale("cache.k_scale", k_scale, None if k_cache is None else k_cache.dtype),
        v_scale=_fp8_scale("cache.v_scale", v_scale, None if v_cache is None else v_cache.dtype),
        index_k_scale=_fp8_scale("cache.index_k_scale", index_k_scale if with_index else UNIT, None if index_cache is None else index_cache.dtype),
    )
    execute("qk_norm_rope_insert", QkNormRopeInsertCall, call, problem, impl, (qkv, norm.q, norm.k, norm.index_q, norm.index_k), device=device)
    return _results(qkv, heads, q_out, index_q_out, skip_index)


@once_per_look
def _accept(
    _compile_target: str | None,
    _arch_override: str | None,
    qkv: Any,
    norm: NormWeights,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: LayerCache | None,
    slots: torch.Tensor | None,
    index_slots: torch.Tensor | None,
    heads: HeadCounts,
    q_out: torch.Tensor | None,
    index_q_out: torch.Tensor | None,
    skip_index: bool,
) -> Problem:
    check_int("heads[0] (q)", heads.q, 1)
    check_int("heads[1] (kv)", heads.kv, 1)
    check_int("heads[2] (index)", heads.index, 0)
    if heads.q % heads.kv:
        raise ValueError(f"heads: expected q heads to be a multiple of the {heads.kv} KV heads, got {heads.q}")
    check_tensor("qkv", qkv, ["T", heads.row_width], ROW_DTYPES)
    device, tokens = qkv.device, qkv.shape[0]
    with_index = heads.index > 0 and not skip_index
    weight_dtypes = (torch.float32, qkv.dtype)
    check_tensor("weights.q", norm.q, [HEAD_DIM], weight_dtypes, device)
    check_tensor("weights.k", norm.k, [HEAD_DIM], weight_dtypes, device)
    if with_index:
        check_tensor("weights.index_q", norm.index_q, [HEAD_DIM], weight_dtypes, device)
        check_tensor("weights.index_k", norm.index_k, [HEAD_DIM], weight_dtypes, device)
    check_tensor("positions", positions, [tokens], INT_DTYPES, device)
    check_tensor("cos_sin", cos_sin, ["max_position", "rotary_dim"], weight_dtypes, device)
    if cos_sin.shape[1] % 2 or not 2 <= cos_sin.shape[1] <= HEAD_DIM:
        raise ValueError(f"cos_sin: expected an even rotary_dim from 2 to {HEAD_DIM}, got {cos_sin.shape[1]}")
    kv_dtype, index_dtype = qkv.dtype, qkv.dtype
    if cache is not None:
        if not isinstance(cache, LayerCache):
            raise TypeError(f"cache: expected a LayerCache or None, got {type(cache).__name__}")
        for name, tensor in zip(("cache.k", "cache.v"), cache.key_value(), strict=True):
            kv_dtype = check_tensor(name, tensor, ["pages", heads.kv, "page_size", HEAD_DIM], (qkv.dtype, E4M3, E5M2), device).dtype
        check_tensor("slots", slots, [tokens], INT_DTYPES, device)
        if with_index:
            index_dtype = check_tensor("cache.index_k", cache.index_key(), ["pages", "page_size", HEAD_DIM], (qkv.dtype, E4M3), device).dtype
            check_tensor("index_slots", index_slots, [tokens], INT_DTYPES, device)
    elif slots is not None or index_slots is not None:
        raise ValueError("slots: expected None without a cache, got slots to write to nowhere")
    out_dtypes = (torch.bfloat16, torch.float16, qkv.dtype, E4M3)
    if q_out is not None:
        check_tensor("q_out", q_out, [tokens, heads.q, HEAD_DIM], out_dtypes, device)
    if index_q_out is not None:
        if not with_index:
            raise ValueError("index_q_out: expected None without an index branch, got a tensor")
        check_tensor("index_q_out", index_q_out, [tokens, heads.index, HEAD_DIM], out_dtypes, device)
    return Problem(
        arch=arch_of(device),
        num_q_heads=heads.q,
        num_kv_heads=heads.kv,
        num_index_heads=heads.index,
        q_dtype=dtype_name(qkv.dtype),
        kv_dtype=dtype_name(kv_dtype),
        index_q_dtype="none" if not with_index else dtype_name(qkv.dtype if index_q_out is None else index_q_out.dtype),
        index_dtype="none" if not with_index else dtype_name(index_dtype),
    )


_OUT_SCHEMA = (
    "Tensor(a!) qkv, Tensor q_weight, Tensor k_weight, Tensor? index_q_weight, Tensor? index_k_weight, Tensor positions, Tensor cos_sin, "
    "Tensor(b!)? kv, Tensor(c!)? v, str? kv_dtype, "
    + f"{scale_schema('k_scale')}, {scale_schema('v_scale')}, "
    + "Tensor(d!)? index_k, str? index_dtype, "
    + f"{scale_schema('index_k_scale')}, "
    + "Tensor? slots, Tensor? index_slots, SymInt q_heads, SymInt kv_heads, SymInt index_heads, float eps, "
    + "Tensor(e!)? q_out, str? q_out_dtype, Tensor(f!)? index_q_out, str? index_q_out_dtype, bool skip_index, "
    + f"{scale_schema('q_scale')}, {scale_schema('index_q_scale')}, str? impl"
)


def _flatten(
    qkv: torch.Tensor,
    weights: Sequence[torch.Tensor | None],
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: LayerCache | None,
    slots: torch.Tensor | None,
    index_slots: torch.Tensor | None,
    heads: HeadCounts,
    eps: float,
    q_out: torch.Tensor | None,
    index_q_out: torch.Tensor | None,
    skip_index: bool,
) -> tuple[Any, ...]:
    main: tuple[Any, ...] = (None, None, None, 1.0, None, 1.0, None)
    index: tuple[Any, ...] = (None, None, 1.0, None)
    if cache is not None:
        main = pack_kv_cache(cache, mutated=True)
        if heads.index and not skip_index:
            index = pack_index_cache(cache, mutated=True)
    outputs = (*pack_mutated(q_out), *pack_mutated(index_q_out), skip_index)
    return (qkv, *_norm_weights(weights), positions, cos_sin, *main, *index, slots, index_slots, *heads, eps, *outputs)


def _run_out(*flat: Any) -> None:
    qkv, *weights = flat[:5]
    positions, cos_sin, kv, v, kv_dtype, k_scale, k_scale_tensor, v_scale, v_scale_tensor = flat[5:14]
    index_k, index_dtype, index_scale, index_scale_tensor, slots, index_slots = flat[14:20]
    q_heads, kv_heads, index_heads, eps, q_out, q_out_dtype, index_q_out, index_q_out_dtype, skip_index = flat[20:29]
    q_scale, q_scale_tensor, index_q_scale, index_q_scale_tensor, impl = flat[29:]
    cache = None
    if kv is not None:
        cache = LayerCache(
            kv=kv if v is None else None,
            k=None if v is None else kv,
            v=v,
            index_k=index_k,
            kv_dtype=kv_dtype,
            index_dtype=index_dtype,
            k_scale=unpack_scale(k_scale, k_scale_tensor),
            v_scale=unpack_scale(v_scale, v_scale_tensor),
            index_k_scale=unpack_scale(index_scale, index_scale_tensor),
        )
    _eager(
        qkv,
        NormWeights(*weights),
        positions,
        cos_sin,
        cache,
        slots,
        index_slots,
        HeadCounts(q_heads, kv_heads, index_heads),
        eps,
        unpack_optional(q_out, q_out_dtype, "q_out"),
        unpack_optional(index_q_out, index_q_out_dtype, "index_q_out"),
        unpack_scale(q_scale, q_scale_tensor),
        unpack_scale(index_q_scale, index_q_scale_tensor),
        skip_index,
        impl,
    )


_FUNCTIONAL_SCHEMA = (
    "Tensor qkv, Tensor q_weight, Tensor k_weight, Tensor? index_q_weight, Tensor? index_k_weight, Tensor positions, Tensor cos_sin, "
    "SymInt q_heads, SymInt kv_heads, SymInt index_heads, float eps, bool skip_index, str? impl"
)


def _run_functional(qkv: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Without a cache: a copy of the row with q, k, index_q and index_k normalised and rotated."""
    *weights, positions, cos_sin, q_heads, kv_heads, index_heads, eps, skip_index, impl = rest
    result, heads = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device).copy_(qkv), HeadCounts(q_heads, kv_heads, index_heads)
    _eager(result, NormWeights(*weights), positions, cos_sin, None, None, None, heads, eps, None, None, None, None, skip_index, impl)
    return result


def _fake(qkv: torch.Tensor, *_: Any) -> torch.Tensor:
    return qkv.new_empty(qkv.shape)


define("qk_norm_rope_insert", f"({_FUNCTIONAL_SCHEMA}) -> Tensor", _run_functional, _fake)
_out = define("qk_norm_rope_insert_out", f"({_OUT_SCHEMA}) -> ()", _run_out, nothing)
