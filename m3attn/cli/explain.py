"""`m3attn explain STAGE`: which implementation would run, and why the others would not; `m3attn explain mode`: which fp8 mode a layer gets."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

NAME = "explain"
HELP = "Say which implementation of a stage would run a problem and every reason against the others; or, for `mode`, what a layer resolves to."
MODE = "mode"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from m3attn.problem import PHASES

    parser.add_argument("stage", metavar="STAGE", help="a stage, or `mode` for the resolution of a layer's attention mode")
    parser.add_argument("--arch", nargs="+", metavar="ARCH", help="architectures to ask for, such as sm_80 sm_90a cpu; default: this machine's")
    parser.add_argument("--impl", metavar="KEY", help="as impl= in a call")
    parser.add_argument("--rule", default="topk", help="the selection rule (default topk)")
    parser.add_argument("--phase", choices=PHASES)
    parser.add_argument("--heads", metavar="Hq/Hkv", help="such as 64/4")
    for name in ("head-dim", "index-dim", "page-size", "block-size", "topk"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("q-dtype", "kv-dtype", "index-q-dtype", "index-dtype"):
        parser.add_argument(f"--{name}", metavar="DTYPE", help="bf16, fp16, fp32, fp8_e4m3 or fp8_e5m2")
    for name, what in (("kv-cache-dtype", "auto, bf16, fp8, fp8_e4m3, fp8_e5m2"), ("index-cache-dtype", "auto, bf16, fp8, fp8_e4m3")):
        parser.add_argument(f"--{name}", metavar="DTYPE", help=f"for `mode`: {what}")
    for name in ("sink", "lse", "fp8-pv"):
        parser.add_argument(f"--{name}", action="store_true", default=None)


def run(options: argparse.Namespace) -> int:
    import m3attn
    from m3attn.cli.errors import UserError

    try:
        asked = problem_fields(options)
        problems = [asked if arch is None else {**asked, "arch": arch} for arch in options.arch or [None]]
        if options.stage == MODE:
            texts = [explain_mode(options, problem) for problem in problems]
        else:
            texts = [str(m3attn.explain(options.stage, impl=options.impl, rule=options.rule, **problem)) for problem in problems]
    except (ValueError, m3attn.UnsupportedProblem) as error:
        raise UserError(str(error)) from error
    print("\n".join(texts))
    return 0


def explain_mode(options: argparse.Namespace, asked: dict[str, Any]) -> str:
    """What an M3 layer of this geometry resolves to, with the reason of each decision."""
    import m3attn
    from m3attn.choice import m3_problem

    problem = m3_problem("sparse_attention", **{"num_index_heads": asked.get("num_kv_heads", 4), **asked})
    resolved = m3attn.resolve_attention_mode(
        problem,
        kv_cache_dtype=options.kv_cache_dtype or "auto",
        index_cache_dtype=options.index_cache_dtype,
        page_size=options.page_size,
        implementation=options.impl,
    )
    return f"{problem.arch}: {resolved}"


def problem_fields(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of `Problem` that were given, dtype names normalised."""
    from m3attn.bench.shapes import Heads
    from m3attn.dtypes import dtype_name
    from m3attn.problem import Problem

    found: dict[str, Any] = {}
    for field in fields(Problem):
        value = getattr(options, field.name, None)
        if field.name != "arch" and value is not None:
            found[field.name] = dtype_name(value, argument=f"--{field.name.replace('_', '-')}") if field.name.endswith("dtype") else value
    if options.heads is not None:
        heads = Heads.parse(options.heads)
        found |= {"num_q_heads": heads.num_q, "num_kv_heads": heads.num_kv}
        if options.stage in ("index_score", "index_topk", "qk_norm_rope_insert"):
            found["num_index_heads"] = heads.num_kv
    return found
