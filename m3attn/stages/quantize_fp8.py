"""quantize_fp8: 16 or 32 bit values to e4m3 or e5m2, with a given or a measured scale."""

from __future__ import annotations

from typing import Any

import torch

from m3attn.calls import QuantizeFp8Call
from m3attn.checks import check_outputs, check_tensor, once_per_look
from m3attn.dtypes import E4M3, FLOAT_DTYPES, dtype_name, torch_dtype
from m3attn.operators import define, nothing, unpack
from m3attn.problem import Problem, arch_of, arch_settings
from m3attn.scales import UNIT, Scale, ScaleLike
from m3attn.stages.execute import execute

DYNAMIC = ("tensor", "row")


def quantize_fp8(
    x: torch.Tensor,
    *,
    scale: ScaleLike | str = None,
    dtype: torch.dtype | str = E4M3,
    out: torch.Tensor | None = None,
    pdl: bool = False,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """stored = x / scale in IEEE fp32 division, rounded to nearest even and saturated; +-inf becomes the largest finite value, NaN stays.

    Args:
        x: [..., N] bf16, fp16 or fp32, unit last stride; up to four dimensions of any strides.
        scale: None (no division), a float, a one-element fp32 tensor, or a dynamic one: `"tensor"` or `"row"`. A dynamic scale is
            max(amax, 2**-100) / finfo(dtype).max, so that an all-zero row gives zeros and a finite scale.
        dtype: e4m3 or e5m2, as a torch dtype or a name.
        out: a buffer of x's shape and the fp8 dtype.
        pdl: programmatic dependent launch where the hardware has it; the same bytes either way.
        impl: a registry key; None: the choice in force.

    Returns:
        out, of x's shape; with a dynamic scale (out, scale), scale fp32 of shape [1] or x.shape[:-1].

    Raises:
        TypeError, ValueError: an argument that does not fit, by name.
    """
    if torch.compiler.is_compiling():
        return _compiled(x, scale, dtype, out, pdl, impl)
    return _eager(x, scale, dtype, out, pdl, impl)


def _mode(scale: ScaleLike | str) -> str:
    if isinstance(scale, str):
        if scale not in DYNAMIC:
            raise ValueError(f"scale: expected None, a float, a one-element float32 tensor, 'tensor' or 'row', got {scale!r}")
        return scale
    return "static"


def _fp8_dtype(dtype: torch.dtype | str) -> torch.dtype:
    return torch_dtype(dtype_name(dtype, accepted=("fp8_e4m3", "fp8_e5m2")))


def _scale_shape(x: torch.Tensor, mode: str) -> tuple[int, ...]:
    return (1,) if mode == "tensor" else tuple(x.shape[:-1])


def _eager(
    x: torch.Tensor,
    scale: ScaleLike | str,
    dtype: torch.dtype | str,
    out: torch.Tensor | None,
    pdl: bool,
    impl: str | None,
    scale_out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    mode = _mode(scale)
    problem, fp8 = _accept(*arch_settings(), x, mode, dtype, out)
    static = UNIT if mode != "static" else Scale.of(scale, argument="scale", device=x.device)  # type: ignore[arg-type]
    if out is None:
        out = torch.empty(x.shape, dtype=fp8, device=x.device)
    else:
        check_outputs({"out": out}, {"x": x, "scale": static.tensor})
    if mode != "static" and scale_out is None:
        scale_out = torch.empty(_scale_shape(x, mode), dtype=torch.float32, device=x.device)
    flat_scale = None if scale_out is None else scale_out.view(-1)
    call = {"x": x, "mode": mode, "scale": static, "out": out, "scale_out": flat_scale, "pdl": pdl}
    execute("quantize_fp8", QuantizeFp8Call, call, problem, impl, (x,), device=x.device)
    return out if scale_out is None else (out, scale_out)


@once_per_look
def _accept(
    _compile_target: str | None, _arch_override: str | None, x: Any, mode: str, dtype: torch.dtype | str, out: torch.Tensor | None
) -> tuple[Problem, torch.dtype]:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x: expected a tensor, got {type(x).__name__}")
    if not 1 <= x.dim() <= 4:
        raise ValueError(f"x: expected 1 to 4 dimensions, got shape {list(x.shape)}")
    check_tensor("x", x, x.shape, FLOAT_DTYPES)
    fp8 = _fp8_dtype(dtype)
    if out is not None:
        check_tensor("out", out, x.shape, [fp8], x.device)
    return Problem(arch=arch_of(x.device), q_dtype=dtype_name(x.dtype), kv_dtype=dtype_name(fp8), dynamic_scale=mode != "static"), fp8


def _compiled(
    x: torch.Tensor, scale: ScaleLike | str, dtype: torch.dtype | str, out: torch.Tensor | None, pdl: bool, impl: str | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    mode, fp8 = _mode(scale), _fp8_dtype(dtype)
    static = UNIT if isinstance(scale, str) else Scale.of(scale, argument="scale")
    flat = (x, mode, static.value, static.tensor, dtype_name(fp8), pdl, impl)
    if out is None:
        data, scale_out = _functional(*flat)
        out = data.view(fp8)
    else:
        scale_out = x.new_empty(_scale_shape(x, mode) if mode != "static" else (0,), dtype=torch.float32)
        _out(*flat, out, None if mode == "static" else scale_out)
    return out if mode == "static" else (out, scale_out)


# Not `mode`: torch.compile passes an argument of that name of its own to operators that mutate.
_SCHEMA = "Tensor x, str scale_mode, float scale, Tensor? scale_tensor, str dtype, bool pdl, str? impl"


def _scale_argument(mode: str, value: float, tensor: torch.Tensor | None) -> ScaleLike | str:
    return mode if mode != "static" else value if tensor is None else tensor


def _run_functional(
    x: torch.Tensor, mode: str, scale: float, scale_tensor: torch.Tensor | None, dtype: str, pdl: bool, impl: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    result = _eager(x, _scale_argument(mode, scale, scale_tensor), dtype, None, pdl, impl)
    out, scale_out = result if isinstance(result, tuple) else (result, x.new_empty((0,), dtype=torch.float32))
    return out.view(torch.uint8), scale_out


def _run_out(
    x: torch.Tensor,
    mode: str,
    scale: float,
    scale_tensor: torch.Tensor | None,
    dtype: str,
    pdl: bool,
    impl: str | None,
    out: torch.Tensor,
    scale_out: torch.Tensor | None,
) -> None:
    _eager(x, _scale_argument(mode, scale, scale_tensor), dtype, unpack(out, dtype, "out"), pdl, impl, scale_out)


def _fake(x: torch.Tensor, mode: str, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    shape = _scale_shape(x, mode) if mode != "static" else (0,)
    return torch.empty(x.shape, dtype=torch.uint8, device=x.device), x.new_empty(shape, dtype=torch.float32)


_functional = define("quantize_fp8", f"({_SCHEMA}) -> (Tensor, Tensor)", _run_functional, _fake)
_out = define("quantize_fp8_out", f"({_SCHEMA}, Tensor(a!) out, Tensor(b!)? scale_out) -> ()", _run_out, nothing)
