"""merge_attention_states: join two partial results over disjoint keys."""

from __future__ import annotations

from typing import Any

import torch

from m3attn.calls import MergeAttentionStatesCall
from m3attn.checks import check_outputs, check_tensor
from m3attn.dtypes import FLOAT_DTYPES, dtype_name
from m3attn.operators import define, nothing
from m3attn.problem import Problem, arch_of
from m3attn.stages.execute import execute


def merge_attention_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor, *, impl: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over both key sets from the attention over each.

    lse = log(exp(lse_a) + exp(lse_b)); out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse). A part without keys (LSE -inf) changes
    nothing, whatever its `out` holds; two such parts give 0 and -inf.

    Args:
        out_a, out_b: [T, H, D] bf16, fp16 or fp32.
        lse_a, lse_b: [T, H] fp32, natural log, without a sink.
        impl: a registry key; None: the choice in force.

    Returns:
        (out [T, H, D] in out_a's dtype, lse [T, H] fp32).

    Raises:
        TypeError, ValueError: an argument that does not fit, by name.
    """
    if torch.compiler.is_compiling():
        return _functional(out_a, lse_a, out_b, lse_b, impl)
    return _eager(out_a, lse_a, out_b, lse_b, impl, None, None)


def _eager(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    impl: str | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, dim = check_tensor("out_a", out_a, ["T", "H", "D"], (*FLOAT_DTYPES, torch.float64)).shape
    device = out_a.device
    lse_dtype = torch.float64 if out_a.dtype == torch.float64 else torch.float32
    check_tensor("out_b", out_b, [tokens, heads, dim], [out_a.dtype], device)
    check_tensor("lse_a", lse_a, [tokens, heads], [lse_dtype], device, unit_last_stride=False)
    check_tensor("lse_b", lse_b, [tokens, heads], [lse_dtype], device, unit_last_stride=False)
    if out is None or lse is None:
        out = torch.empty(tokens, heads, dim, dtype=out_a.dtype, device=device)
        lse = torch.empty(tokens, heads, dtype=lse_dtype, device=device)
    else:
        check_tensor("out", out, [tokens, heads, dim], [out_a.dtype], device)
        check_tensor("lse", lse, [tokens, heads], [lse_dtype], device, unit_last_stride=False)
        check_outputs({"out": out, "lse": lse}, {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b})
    problem = Problem(arch=arch_of(device), num_q_heads=heads, head_dim=dim, q_dtype=dtype_name(out_a.dtype))
    call = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b, "out": out, "lse": lse}
    execute("merge_attention_states", MergeAttentionStatesCall, call, problem, impl, (out_a, lse_a, out_b, lse_b), device=device)
    return out, lse


_SCHEMA = "Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, str? impl"


def _run_functional(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor, impl: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return _eager(out_a, lse_a, out_b, lse_b, impl, None, None)


def _run_out(*flat: Any) -> None:
    _eager(*flat)


def _fake(out_a: torch.Tensor, lse_a: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


_functional = define("merge_attention_states", f"({_SCHEMA}) -> (Tensor, Tensor)", _run_functional, _fake)
define("merge_attention_states_out", f"({_SCHEMA}, Tensor(a!) out, Tensor(b!) lse) -> ()", _run_out, nothing)
