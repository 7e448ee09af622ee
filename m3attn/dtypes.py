"""Names of element types: one function maps every accepted spelling to one name, and one table maps names to torch dtypes."""

from __future__ import annotations

import torch

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
FP8_DTYPES = (E4M3, E5M2)
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

NAME_TO_DTYPE: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8_e4m3": E4M3,
    "fp8_e5m2": E5M2,
}
_STORED = "bf16, fp16, fp32, fp8_e4m3, fp8_e5m2, or uint8 with a declared fp8 dtype"
_DTYPE_TO_NAME = {dtype: name for name, dtype in NAME_TO_DTYPE.items()}
_NAMES = ("auto", *NAME_TO_DTYPE)
_SPELLINGS = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "float64": "fp64",
    "fp8": "fp8_e4m3",
    "e4m3": "fp8_e4m3",
    "e5m2": "fp8_e5m2",
    "float8_e4m3fn": "fp8_e4m3",
    "fp8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}


def dtype_name(value: str | torch.dtype, *, argument: str = "dtype", accepted: tuple[str, ...] | None = None) -> str:
    """The one name of an element type: `bf16`, `fp16`, `fp32`, `fp64`, `fp8_e4m3`, `fp8_e5m2`, or `auto`.

    Args:
        value: a torch dtype, or a string: one of the names above, torch's own spelling (with or without `torch.`), or
            `fp8`, which means e4m3.
        argument: the caller's argument, for the message.
        accepted: the names the caller takes; None means all of them and `auto`.

    Raises:
        ValueError: an unknown or unaccepted spelling (fnuz flavours among them: they are another hardware's format).
    """
    allowed = _NAMES if accepted is None else accepted
    if isinstance(value, torch.dtype):
        name = _DTYPE_TO_NAME.get(value, str(value))
    elif isinstance(value, str):
        name = value.lower().removeprefix("torch.")
        name = _SPELLINGS.get(name, name)
    else:
        raise TypeError(f"{argument}: expected a dtype name or torch.dtype, got {type(value).__name__}")
    if name not in allowed:
        raise ValueError(f"{argument}: expected one of {', '.join(allowed)} (or a spelling of it), got {value!r}")
    return name


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name from `dtype_name`."""
    return NAME_TO_DTYPE[name]


def is_fp8(dtype: torch.dtype) -> bool:
    return dtype in FP8_DTYPES


def typed_storage(tensor: torch.Tensor, declared: str | torch.dtype | None, *, argument: str) -> torch.Tensor:
    """`tensor` as the element type it holds: uint8 storage is viewed (no copy) as its declared fp8 type.

    Raises:
        TypeError: uint8 storage with no declared fp8 type, an integer cache, a foreign fp8 flavour, or a declaration
            that contradicts the tensor's own dtype.
    """
    if tensor.dtype == torch.uint8:
        name = None if declared is None else dtype_name(declared, argument=f"{argument} dtype")
        if name not in ("fp8_e4m3", "fp8_e5m2"):
            raise TypeError(f"{argument}: expected {_STORED}, got uint8 declared as {declared!r}")
        return tensor.view(NAME_TO_DTYPE[name])
    if tensor.dtype not in _DTYPE_TO_NAME:
        raise TypeError(f"{argument}: expected {_STORED}, got {tensor.dtype}")
    if declared is not None:
        name = dtype_name(declared, argument=f"{argument} dtype")
        if name != "auto" and NAME_TO_DTYPE[name] != tensor.dtype:
            raise TypeError(f"{argument}: declared {declared!r} but the tensor is {tensor.dtype}")
    return tensor
