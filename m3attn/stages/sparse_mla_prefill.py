"""sparse_mla_prefill: every head of a query attends to the latent tokens that its indices name."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from m3attn.calls import SparseMlaPrefillCall
from m3attn.checks import check_int, check_number, check_outputs, check_tensor, once_per_look
from m3attn.dtypes import E4M3, FLOAT_DTYPES, dtype_name
from m3attn.operators import define, nothing, pack, pack_scale, scale_schema, unpack, unpack_scale
from m3attn.problem import Problem, arch_of, arch_settings
from m3attn.scales import Scale, ScaleLike
from m3attn.stages.execute import execute
from m3attn.stages.mla import contiguous_buffer
from m3attn.workspace import WorkShape, workspace_limit

VALUE_DIM = 512
QUERY_DIMS = (512, 576)
MAX_INDICES = 1 << 20


def sparse_mla_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    *,
    sm_scale: float,
    d_v: int = VALUE_DIM,
    q_scale: ScaleLike = None,
    kv_scale: ScaleLike = None,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    fp8_pv: bool = True,
    out: torch.Tensor | None = None,
    max_logits: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of q to kv[indices]; a token's first 512 dims are its value.

    logit = q . kv * sm_scale * q_scale * kv_scale; out = softmax(logits) kv[:, :512] * kv_scale. Indices outside [0, s_kv) are ignored wherever
    they stand, and so is everything from `topk_length` on; an index that stands twice counts twice. A query without a token gets out 0,
    max_logits -inf and lse +inf, as the consumers of these three expect. Up to 16 queries split their indices among programs.

    Args:
        q: [s_q, h_q, d_qk] bf16, fp16, fp32 or e4m3, d_qk 512 or 576.
        kv: [s_kv, 1, d_qk] in q's dtype, or e4m3, which a 16-bit q reads widened.
        indices: [s_q, 1, topk] int32, rows of kv.
        sm_scale: softmax scale.
        d_v: 512, the only value dim there is.
        q_scale, kv_scale: of e4m3 data; None, a float or a one-element fp32 tensor.
        topk_length: [s_q] int32, how many leading indices count; clamped to [0, topk].
        attn_sink: [h_q] fp32, a natural-log logit that joins the denominator only; -inf leaves all as it is, +inf gives 0.
        fp8_pv: with e4m3 q and kv, P times 2^8 in e4m3 too (row sums from fp32 P); False: the value widened, a quarter of the error.
        out: [s_q, h_q, 512] bf16, contiguous, to write to; max_logits, lse: [s_q, h_q] fp32, contiguous.
        impl: a registry key; None: the choice in force.

    Returns:
        (out, max_logits, lse): the largest logit and the natural-log LSE, without the sink.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name.
        UnsupportedProblem: the named implementation cannot run this.
    """
    if torch.compiler.is_compiling():
        scales = (*pack_scale(q_scale, "q_scale"), *pack_scale(kv_scale, "kv_scale"))
        flat = (*pack(q), *pack(kv), indices, sm_scale, d_v, *scales, topk_length, attn_sink, fp8_pv, impl)
        if out is None and max_logits is None and lse is None:
            return _functional(*flat)
        fresh_out, fresh_max, fresh_lse = _fake(*flat)
        out = fresh_out if out is None else out
        max_logits = fresh_max if max_logits is None else max_logits
        lse = fresh_lse if lse is None else lse
        _out(*flat, out, max_logits, lse)
        return out, max_logits, lse
    return _eager(q, kv, indices, sm_scale, d_v, q_scale, kv_scale, topk_length, attn_sink, fp8_pv, impl, out, max_logits, lse)


def _check_dtypes(q: torch.Tensor, kv: torch.Tensor) -> None:
    if q.dtype not in (*FLOAT_DTYPES, E4M3):
        raise TypeError(f"q: expected bf16, fp16, fp32 or fp8_e4m3, got {q.dtype}")
    accepted = (q.dtype,) if q.dtype in (torch.float32, E4M3) else (q.dtype, E4M3)
    if kv.dtype not in accepted:
        raise TypeError(f"kv: expected {' or '.join(map(str, accepted))} for q of {q.dtype}, got {kv.dtype}")


def _eager(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int,
    q_scale: ScaleLike,
    kv_scale: ScaleLike,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    fp8_pv: bool,
    impl: str | None,
    out: torch.Tensor | None,
    max_logits: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    accepted = _accept(*arch_settings(), workspace_limit(), q, kv, indices, d_v, topk_length, attn_sink, fp8_pv, out, max_logits, lse)
    if out is not None or max_logits is not None or lse is not None:
        inputs = {"q": q, "kv": kv, "indices": indices, "topk_length": topk_length, "attn_sink": attn_sink}
        check_outputs({"out": out, "max_logits": max_logits, "lse": lse}, inputs)
    problem, device = accepted.problem, q.device
    rows = (q.shape[0], problem.num_q_heads)
    if out is None:
        out = torch.empty((*rows, VALUE_DIM), dtype=torch.bfloat16, device=device)
    if max_logits is None:
        max_logits = torch.empty(rows, dtype=torch.float32, device=device)
    if lse is None:
        lse = torch.empty(rows, dtype=torch.float32, device=device)
    call = dict(
        q=q,
        kv=kv.select(1, 0),
        indices=indices.select(1, 0),
        sm_scale=check_number("sm_scale", sm_scale),
        q_scale=Scale.of(q_scale, argument="q_scale", device=device),
        kv_scale=Scale.of(kv_scale, argument="kv_scale", device=device),
        topk_length=topk_length,
        attn_sink=attn_sink,
        fp8_pv=problem.fp8_pv,
        out=out,
        max_logits=max_logits,
        lse=lse,
    )
    execute("sparse_mla_prefill", SparseMlaPrefillCall, call, problem, impl, (q, kv, attn_sink), shape=accepted.shape, device=device)
    return out, max_logits, lse


class _Accepted(NamedTuple):
    problem: Problem
    shape: WorkShape


@once_per_look
def _accept(
    _compile_target: str | None,
    _arch_override: str | None,
    limit: int,
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    d_v: int,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    fp8_pv: bool,
    out: torch.Tensor | None,
    max_logits: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> _Accepted:
    queries, heads, dim = check_tensor("q", q, ["s_q", "h_q", "d_qk"]).shape
    device = q.device
    if dim not in QUERY_DIMS:
        raise ValueError(f"q: expected d_qk {' or '.join(map(str, QUERY_DIMS))}, got {dim}")
    if check_int("d_v", d_v, 1) != VALUE_DIM:
        raise ValueError(f"d_v: expected {VALUE_DIM}, the dims of a token that are its value, got {d_v}")
    check_tensor("kv", kv, ["s_kv", 1, dim], None, device)
    _check_dtypes(q, kv)
    check_tensor("indices", indices, [queries, 1, "topk"], [torch.int32], device, unit_last_stride=False)
    topk = check_int("indices.shape[2]", indices.shape[2], 1, MAX_INDICES)
    if topk_length is not None:
        check_tensor("topk_length", topk_length, [queries], [torch.int32], device)
    if attn_sink is not None:
        check_tensor("attn_sink", attn_sink, [heads], [torch.float32], device)
    if out is not None:
        contiguous_buffer("out", out, [queries, heads, VALUE_DIM], torch.bfloat16, {}, q)
    for name, buffer in (("max_logits", max_logits), ("lse", lse)):
        if buffer is not None:
            contiguous_buffer(name, buffer, [queries, heads], torch.float32, {}, q)
    problem = Problem(
        arch=arch_of(device),
        num_q_heads=heads,
        num_kv_heads=1,
        head_dim=dim,
        v_head_dim=VALUE_DIM,
        topk=topk,
        q_dtype=dtype_name(q.dtype),
        kv_dtype=dtype_name(kv.dtype),
        sink=attn_sink is not None,
        lse=True,
        fp8_pv=bool(fp8_pv) and q.dtype == E4M3,
        phase="decode" if queries <= 1 else "verify" if queries <= 16 else "prefill",
    )
    shape = WorkShape(
        tokens=queries,
        num_requests=1,
        num_q_heads=heads,
        num_kv_heads=1,
        num_index_heads=0,
        head_dim=dim,
        topk=topk,
        max_seqlen_q=queries,
        max_seqlen_k=kv.shape[0],
        block_size=1,
        limit=limit,
    )
    return _Accepted(problem, shape)


_SCHEMA = (
    "Tensor q, str? q_dtype, Tensor kv, str? kv_dtype, Tensor indices, float sm_scale, SymInt d_v, "
    f"{scale_schema('q_scale')}, {scale_schema('kv_scale')}, Tensor? topk_length, Tensor? attn_sink, bool fp8_pv, str? impl"
)
_NUM_FLAT = 15


def _run_functional(*flat: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _run(flat, (None, None, None))


def _run(flat: tuple[Any, ...], outputs: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, q_dtype, kv, kv_dtype, indices, sm_scale, d_v, q_scale, q_scale_tensor, kv_scale, kv_scale_tensor, *rest = flat
    scales = (unpack_scale(q_scale, q_scale_tensor), unpack_scale(kv_scale, kv_scale_tensor))
    return _eager(unpack(q, q_dtype, "q"), unpack(kv, kv_dtype, "kv"), indices, sm_scale, d_v, *scales, *rest, *outputs)


def _run_out(*flat: Any) -> None:
    _run(flat[:_NUM_FLAT], flat[_NUM_FLAT:])


def _fake(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out = torch.empty((q.shape[0], q.shape[1], VALUE_DIM), dtype=torch.bfloat16, device=q.device)
    max_logits, lse = (torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) for _ in range(2))
    return out, max_logits, lse


_functional = define("sparse_mla_prefill", f"({_SCHEMA}) -> (Tensor, Tensor, Tensor)", _run_functional, _fake)
_out = define("sparse_mla_prefill_out", f"({_SCHEMA}, Tensor(a!) out, Tensor(b!) max_logits, Tensor(c!) lse) -> ()", _run_out, nothing)
