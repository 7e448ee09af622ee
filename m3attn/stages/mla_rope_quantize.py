"""mla_rope_quantize: rotate the positional part of multi-head latent attention's queries and keys, and write both as contiguous e4m3."""

from __future__ import annotations

from typing import Any

import torch

from m3attn.calls import MlaRopeQuantizeCall
from m3attn.checks import check_outputs
from m3attn.dtypes import E4M3, dtype_name
from m3attn.operators import define, nothing, pack_mutated, pack_scale, scale_schema, unpack, unpack_scale
from m3attn.problem import Problem, arch_of
from m3attn.scales import Scale, ScaleLike
from m3attn.stages.execute import execute
from m3attn.stages.mla import Inputs, check_heads, check_rotation, e4m3_buffer, shared_head


def mla_rope_quantize(
    q: torch.Tensor,
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    interleaved: bool = False,
    q_scale: ScaleLike = None,
    k_scale: ScaleLike = None,
    q_out: torch.Tensor | None = None,
    k_out: torch.Tensor | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q = [q_nope | rope(q_pe)] and k = [k_nope | rope(k_pe)] in e4m3, with one rounding: stored = value / scale, saturated.

    The last `rope` dims of q are rotated, and k_pe, whose one head becomes the last dims of every head of k. A position outside the table
    makes the row a padded one: zeros in both outputs.

    Args:
        q: [T, H, nope + rope] bf16, fp16 or fp32; like the other inputs in any strides but a unit last one.
        k_nope: [T, H, nope].
        k_pe: [T, rope] or [T, 1, rope], not yet rotated.
        positions: [T] int32 or int64.
        cos_sin: [max_position, rope], cosines first, fp32 or q's dtype.
        interleaved: pairs (2i, 2i + 1), as DeepSeek's checkpoints have them; else NeoX pairs (i, i + rope / 2).
        q_scale, k_scale: None, a float or a one-element fp32 tensor.
        q_out, k_out: [T, H, nope + rope] e4m3, contiguous.
        impl: a registry key; None: the choice in force.

    Returns:
        (q, k), [T, H, nope + rope] e4m3 each.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name.
    """
    if torch.compiler.is_compiling():
        flat = (q, k_nope, k_pe, positions, cos_sin, interleaved, *pack_scale(q_scale, "q_scale"), *pack_scale(k_scale, "k_scale"), impl)
        if q_out is None and k_out is None:
            q_bytes, k_bytes = _functional(*flat)
            return q_bytes.view(E4M3), k_bytes.view(E4M3)
        q_out = torch.empty(q.shape, dtype=E4M3, device=q.device) if q_out is None else q_out
        k_out = torch.empty(q.shape, dtype=E4M3, device=q.device) if k_out is None else k_out
        _out(*flat, pack_mutated(q_out)[0], pack_mutated(k_out)[0])
        return q_out, k_out
    return _eager(q, k_nope, k_pe, positions, cos_sin, interleaved, q_scale, k_scale, impl, q_out, k_out)


def _eager(
    q: torch.Tensor,
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool,
    q_scale: ScaleLike,
    k_scale: ScaleLike,
    impl: str | None,
    q_out: torch.Tensor | None,
    k_out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, dim = check_heads("q", q, ["T", "H", "nope + rope"]).shape
    nope = check_heads("k_nope", k_nope, [tokens, heads, "nope"], q).shape[2]
    k_pe = shared_head("k_pe", k_pe, tokens, q)
    if nope + k_pe.shape[1] != dim:
        raise ValueError(f"q: expected {nope + k_pe.shape[1]} dims, as k_nope and k_pe have together, got {dim}")
    check_rotation(positions, cos_sin, tokens, k_pe.shape[1], q)
    inputs: Inputs = {"q": q, "k_nope": k_nope, "k_pe": k_pe, "positions": positions, "cos_sin": cos_sin}
    q_out = e4m3_buffer("q_out", q_out, [tokens, heads, dim], inputs, q)
    k_out = e4m3_buffer("k_out", k_out, [tokens, heads, dim], inputs, q)
    check_outputs({"q_out": q_out, "k_out": k_out}, {})
    call = dict(
        q_nope=q[..., :nope],
        q_pe=q[..., nope:],
        k_nope=k_nope,
        k_pe=k_pe,
        positions=positions,
        cos_sin=cos_sin,
        interleaved=bool(interleaved),
        q_scale=Scale.of(q_scale, argument="q_scale", device=q.device),
        k_scale=Scale.of(k_scale, argument="k_scale", device=q.device),
        q_out=q_out,
        k_out=k_out,
    )
    problem = Problem(arch=arch_of(q.device), num_q_heads=heads, num_kv_heads=heads, head_dim=dim, q_dtype=dtype_name(q.dtype), kv_dtype="fp8_e4m3")
    execute("mla_rope_quantize", MlaRopeQuantizeCall, call, problem, impl, (q, k_nope, k_pe, cos_sin), device=q.device)
    return q_out, k_out


_SCHEMA = (
    "Tensor q, Tensor k_nope, Tensor k_pe, Tensor positions, Tensor cos_sin, bool interleaved, "
    f"{scale_schema('q_scale')}, {scale_schema('k_scale')}, str? impl"
)


def _run(flat: tuple[Any, ...], *outputs: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    q_scale, q_scale_tensor, k_scale, k_scale_tensor, impl = flat[6:]
    scales = (unpack_scale(q_scale, q_scale_tensor), unpack_scale(k_scale, k_scale_tensor))
    arguments: tuple[Any, ...] = (*flat[:6], *scales, impl, *outputs)
    return _eager(*arguments)


def _run_functional(*flat: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = _run(flat, None, None)
    return q.view(torch.uint8), k.view(torch.uint8)


def _run_out(*flat: Any) -> None:
    q_out, k_out = (unpack(out, "fp8_e4m3", name) for out, name in zip(flat[-2:], ("q_out", "k_out"), strict=True))
    _run(flat[:-2], q_out, k_out)


def _fake(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(q.shape, dtype=torch.uint8, device=q.device), torch.empty(q.shape, dtype=torch.uint8, device=q.device)


_functional = define("mla_rope_quantize", f"({_SCHEMA}) -> (Tensor, Tensor)", _run_functional, _fake)
_out = define("mla_rope_quantize_out", f"({_SCHEMA}, Tensor(a!) q_out, Tensor(b!) k_out) -> ()", _run_out, nothing)
