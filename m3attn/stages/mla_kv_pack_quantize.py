"""mla_kv_pack_quantize: the keys and values of a chunk of prefix, from strided parts to contiguous e4m3, in one pass."""

from __future__ import annotations

from typing import Any

import torch

from m3attn.calls import MlaKvPackQuantizeCall
from m3attn.checks import check_outputs
from m3attn.dtypes import E4M3, dtype_name
from m3attn.operators import define, nothing, pack_mutated, pack_scale, scale_schema, unpack, unpack_scale
from m3attn.problem import Problem, arch_of
from m3attn.scales import Scale, ScaleLike
from m3attn.stages.execute import execute
from m3attn.stages.mla import Inputs, check_heads, e4m3_buffer, shared_head


def mla_kv_pack_quantize(
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    v: torch.Tensor,
    *,
    k_scale: ScaleLike = None,
    v_scale: ScaleLike = None,
    k_out: torch.Tensor | None = None,
    v_out: torch.Tensor | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """k = [k_nope | k_pe] and v in e4m3, with one rounding: stored = value / scale, saturated. The one head of k_pe goes to every head of k.

    Args:
        k_nope: [T, H, nope] bf16, fp16 or fp32; like the other inputs in any strides but a unit last one, views of one projection say.
        k_pe: [T, rope] or [T, 1, rope], already rotated, in k_nope's dtype.
        v: [T, H, d_v] in k_nope's dtype.
        k_scale, v_scale: None, a float or a one-element fp32 tensor.
        k_out: [T, H, nope + rope] e4m3, contiguous.
        v_out: [T, H, d_v] e4m3, contiguous.
        impl: a registry key; None: the choice in force.

    Returns:
        (k [T, H, nope + rope], v [T, H, d_v]), e4m3.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name.
    """
    if torch.compiler.is_compiling():
        flat = (k_nope, k_pe, v, *pack_scale(k_scale, "k_scale"), *pack_scale(v_scale, "v_scale"), impl)
        if k_out is None and v_out is None:
            k_bytes, v_bytes = _functional(*flat)
            return k_bytes.view(E4M3), v_bytes.view(E4M3)
        k_out = torch.empty(_key_shape(k_nope, k_pe), dtype=E4M3, device=v.device) if k_out is None else k_out
        v_out = torch.empty(v.shape, dtype=E4M3, device=v.device) if v_out is None else v_out
        _out(*flat, pack_mutated(k_out)[0], pack_mutated(v_out)[0])
        return k_out, v_out
    return _eager(k_nope, k_pe, v, k_scale, v_scale, impl, k_out, v_out)


def _key_shape(k_nope: torch.Tensor, k_pe: torch.Tensor) -> list[int]:
    return [k_nope.shape[0], k_nope.shape[1], k_nope.shape[2] + k_pe.shape[-1]]


def _eager(
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    v: torch.Tensor,
    k_scale: ScaleLike,
    v_scale: ScaleLike,
    impl: str | None,
    k_out: torch.Tensor | None,
    v_out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, _ = check_heads("k_nope", k_nope, ["T", "H", "nope"]).shape
    k_pe = shared_head("k_pe", k_pe, tokens, k_nope)
    check_heads("v", v, [tokens, heads, "d_v"], k_nope)
    inputs: Inputs = {"k_nope": k_nope, "k_pe": k_pe, "v": v}
    k_out = e4m3_buffer("k_out", k_out, _key_shape(k_nope, k_pe), inputs, k_nope)
    v_out = e4m3_buffer("v_out", v_out, list(v.shape), inputs, k_nope)
    check_outputs({"k_out": k_out, "v_out": v_out}, {})
    k_factor, v_factor = (Scale.of(s, argument=name, device=v.device) for s, name in ((k_scale, "k_scale"), (v_scale, "v_scale")))
    problem = Problem(
        arch=arch_of(v.device),
        num_q_heads=heads,
        num_kv_heads=heads,
        head_dim=k_out.shape[2],
        v_head_dim=v.shape[2],
        q_dtype=dtype_name(v.dtype),
        kv_dtype="fp8_e4m3",
    )
    call = {"k_nope": k_nope, "k_pe": k_pe, "v": v, "k_scale": k_factor, "v_scale": v_factor, "k_out": k_out, "v_out": v_out}
    execute("mla_kv_pack_quantize", MlaKvPackQuantizeCall, call, problem, impl, (k_nope, k_pe, v), device=v.device)
    return k_out, v_out


_SCHEMA = f"Tensor k_nope, Tensor k_pe, Tensor v, {scale_schema('k_scale')}, {scale_schema('v_scale')}, str? impl"


def _run(flat: tuple[Any, ...], *outputs: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    k_scale, k_scale_tensor, v_scale, v_scale_tensor, impl = flat[3:]
    scales = (unpack_scale(k_scale, k_scale_tensor), unpack_scale(v_scale, v_scale_tensor))
    arguments: tuple[Any, ...] = (*flat[:3], *scales, impl, *outputs)
    return _eager(*arguments)


def _run_functional(*flat: Any) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = _run(flat, None, None)
    return k.view(torch.uint8), v.view(torch.uint8)


def _run_out(*flat: Any) -> None:
    k_out, v_out = (unpack(out, "fp8_e4m3", name) for out, name in zip(flat[-2:], ("k_out", "v_out"), strict=True))
    _run(flat[:-2], k_out, v_out)


def _fake(k_nope: torch.Tensor, k_pe: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    k = torch.empty(_key_shape(k_nope, k_pe), dtype=torch.uint8, device=v.device)
    return k, torch.empty(v.shape, dtype=torch.uint8, device=v.device)


_functional = define("mla_kv_pack_quantize", f"({_SCHEMA}) -> (Tensor, Tensor)", _run_functional, _fake)
_out = define("mla_kv_pack_quantize_out", f"({_SCHEMA}, Tensor(a!) k_out, Tensor(b!) v_out) -> ()", _run_out, nothing)
