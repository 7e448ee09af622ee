"""mla_prefill: attention of ragged queries over ragged keys of as many heads."""

from __future__ import annotations

from typing import Any

import torch

from m3attn import device_checks
from m3attn.calls import MlaPrefillCall
from m3attn.checks import check_number, check_outputs, check_tensor
from m3attn.dtypes import E4M3, FLOAT_DTYPES, dtype_name
from m3attn.operators import define, nothing, pack, pack_scale, scale_schema, unpack, unpack_scale
from m3attn.problem import Problem, arch_of
from m3attn.scales import Scale, ScaleLike
from m3attn.stages.attention import lse_dtype, output_dtype
from m3attn.stages.execute import execute
from m3attn.stages.mla import Inputs

DTYPES = (*FLOAT_DTYPES, torch.float64, E4M3)


def mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    causal: bool = True,
    sm_scale: float | None = None,
    q_scale: ScaleLike = None,
    k_scale: ScaleLike = None,
    v_scale: ScaleLike = None,
    fp8_pv: bool = False,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    lse_out: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """out = softmax(q . k * sm_scale * q_scale * k_scale) v * v_scale, per request and head.

    Request b owns query rows [cu_seqlens_q[b], cu_seqlens_q[b + 1]) and key rows [cu_seqlens_k[b], cu_seqlens_k[b + 1]). Causal means that
    the last query sees every key and the one before it all but the last; a query before the first key, a row that no request owns and a
    request without keys give 0 and LSE -inf. A prefix taken in chunks is one call a chunk with causal=False, and `merge_attention_states`.

    Args:
        q: [T, H, d_qk] bf16, fp16, fp32 or e4m3, unit last stride like k and v.
        k: [Tk, H, d_qk] and v: [Tk, H, d_v] in q's dtype.
        cu_seqlens_q, cu_seqlens_k: [B + 1] int32, ascending from 0.
        causal: see above.
        sm_scale: softmax scale; None: d_qk ** -0.5.
        q_scale, k_scale, v_scale: of e4m3 data; None, a float or a one-element fp32 tensor.
        fp8_pv: with e4m3 data, P in e4m3 too (about ten times the error); else v is widened.
        return_lse: also return the natural-log LSE.
        out, lse_out: [T, H, d_v] in q's dtype (bf16 for e4m3) and [T, H] fp32 to write to.
        impl: a registry key; None: the choice in force.

    Returns:
        out, or (out, lse) with return_lse or lse_out.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name.
        UnsupportedProblem: the named implementation cannot run this.
    """
    if torch.compiler.is_compiling():
        scales = (*pack_scale(q_scale, "q_scale"), *pack_scale(k_scale, "k_scale"), *pack_scale(v_scale, "v_scale"))
        (q_data, name), (k_data, _), (v_data, _) = pack(q), pack(k), pack(v)
        flat = (q_data, k_data, v_data, name, cu_seqlens_q, cu_seqlens_k, causal, sm_scale, *scales, fp8_pv, impl)
        with_lse = return_lse or lse_out is not None
        if out is None and lse_out is None:
            out, lse = _functional(*flat, return_lse)
        else:
            fresh_out, fresh_lse = _fake(*flat, return_lse)
            out = fresh_out if out is None else out
            lse = lse_out if lse_out is not None else fresh_lse if return_lse else None
            _out(*flat, out, lse)
        return (out, lse) if with_lse else out
    return _eager(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, sm_scale, q_scale, k_scale, v_scale, fp8_pv, impl, return_lse, out, lse_out)


def _eager(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    causal: bool,
    sm_scale: float | None,
    q_scale: ScaleLike,
    k_scale: ScaleLike,
    v_scale: ScaleLike,
    fp8_pv: bool,
    impl: str | None,
    return_lse: bool,
    out: torch.Tensor | None,
    lse_out: torch.Tensor | None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, dim = check_tensor("q", q, ["T", "H", "d_qk"], DTYPES).shape
    device = q.device
    num_keys = check_tensor("k", k, ["Tk", heads, dim], [q.dtype], device).shape[0]
    value_dim = check_tensor("v", v, [num_keys, heads, "d_v"], [q.dtype], device).shape[2]
    requests = check_tensor("cu_seqlens_q", cu_seqlens_q, ["B + 1"], [torch.int32], device).shape[0] - 1
    if requests < 0:
        raise ValueError("cu_seqlens_q: expected at least one offset, got none")
    check_tensor("cu_seqlens_k", cu_seqlens_k, [requests + 1], [torch.int32], device)
    device_checks.check_offsets("cu_seqlens_q", cu_seqlens_q, tokens)
    device_checks.check_offsets("cu_seqlens_k", cu_seqlens_k, num_keys)
    if fp8_pv and q.dtype != E4M3:
        raise ValueError(f"fp8_pv: expected e4m3 q, k and v, got q {q.dtype}")
    inputs: Inputs = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    given = {"out": out, "lse_out": lse_out}
    if out is None:
        out = torch.empty(tokens, heads, value_dim, dtype=output_dtype(q), device=device)
    else:
        check_tensor("out", out, [tokens, heads, value_dim], [output_dtype(q)], device)
    lse: torch.Tensor | None = None
    if lse_out is not None:
        lse = check_tensor("lse_out", lse_out, [tokens, heads], [lse_dtype(q.dtype)], device, unit_last_stride=False)
    elif return_lse:
        lse = torch.empty(tokens, heads, dtype=lse_dtype(q.dtype), device=device)
    check_outputs(given, inputs)
    call = dict(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        causal=bool(causal),
        sm_scale=dim**-0.5 if sm_scale is None else check_number("sm_scale", sm_scale),
        q_scale=Scale.of(q_scale, argument="q_scale", device=device),
        k_scale=Scale.of(k_scale, argument="k_scale", device=device),
        v_scale=Scale.of(v_scale, argument="v_scale", device=device),
        fp8_pv=bool(fp8_pv),
        out=out,
        lse=lse,
    )
    problem = prefill_problem(device, heads, dim, value_dim, q.dtype, lse=lse is not None, fp8_pv=bool(fp8_pv))
    execute("mla_prefill", MlaPrefillCall, call, problem, impl, (q, k, v), device=device)
    return out if lse is None else (out, lse)


def prefill_problem(
    device: torch.device, heads: int, dim: int, value_dim: int, dtype: torch.dtype, *, lse: bool = False, fp8_pv: bool = False
) -> Problem:
    """What is asked of an implementation of mla_prefill whose q, k and v are `dtype`."""
    name = dtype_name(dtype)
    return Problem(
        arch=arch_of(device),
        num_q_heads=heads,
        num_kv_heads=heads,
        head_dim=dim,
        v_head_dim=value_dim,
        q_dtype=name,
        kv_dtype=name,
        lse=lse,
        fp8_pv=fp8_pv,
    )


_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, str? dtype, Tensor cu_seqlens_q, Tensor cu_seqlens_k, bool causal, float? sm_scale, "
    f"{scale_schema('q_scale')}, {scale_schema('k_scale')}, {scale_schema('v_scale')}, bool fp8_pv, str? impl"
)
_NUM_FLAT = 16


def _run(
    flat: tuple[Any, ...], return_lse: bool, out: torch.Tensor | None, lse_out: torch.Tensor | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    q, k, v, name, cu_q, cu_k, causal, sm_scale, *scales, fp8_pv, impl = flat
    q, k, v = (unpack(x, name, argument) for x, argument in ((q, "q"), (k, "k"), (v, "v")))
    q_scale, k_scale, v_scale = (unpack_scale(scales[i], scales[i + 1]) for i in (0, 2, 4))
    return _eager(q, k, v, cu_q, cu_k, causal, sm_scale, q_scale, k_scale, v_scale, fp8_pv, impl, return_lse, out, lse_out)


def _run_functional(*flat: Any) -> tuple[torch.Tensor, torch.Tensor]:
    result = _run(flat[:_NUM_FLAT], flat[_NUM_FLAT], None, None)
    return result if isinstance(result, tuple) else (result, result.new_empty((0,), dtype=lse_dtype(result.dtype)))


def _run_out(*flat: Any) -> None:
    _run(flat[:_NUM_FLAT], False, *flat[_NUM_FLAT:])


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, name: str | None, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (q.shape[0], q.shape[1], v.shape[2])
    out = torch.empty(shape, dtype=q.dtype if name is None else torch.bfloat16, device=q.device)
    return out, torch.empty(shape[:2] if rest[-1] else (0,), dtype=lse_dtype(out.dtype), device=q.device)


_functional = define("mla_prefill", f"({_SCHEMA}, bool return_lse) -> (Tensor, Tensor)", _run_functional, _fake)
_out = define("mla_prefill_out", f"({_SCHEMA}, Tensor(a!) out, Tensor(b!)? lse_out) -> ()", _run_out, nothing)
