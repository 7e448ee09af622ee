"""`m3attn explain STAGE`: which implementation would run, and why the others would not."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

NAME = "explain"
HELP = "Say which implementation of a stage would run a problem, and every reason against the others."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from m3attn.problem import PHASES

    parser.add_argument("stage", metavar="STAGE")
    parser.add_argument("--arch", nargs="+", metavar="ARCH", help="architectures to ask for, such as sm_80 sm_90a cpu; default: this machine's")
    parser.add_argument("--impl", metavar="KEY", help="as impl= in a call")
    parser.add_argument("--rule", default="topk", help="the selection rule (default topk)")
    parser.add_argument("--phase", choices=PHASES)
    parser.add_argument("--heads", metavar="Hq/Hkv", help="such as 64/4")
    for name in ("head-dim", "index-dim", "page-size", "block-size", "topk"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("q-dtype", "kv-dtype", "index-q-dtype", "index-dtype"):
        parser.add_argument(f"--{name}", metavar="DTYPE", help="bf16, fp16, fp32, fp8_e4m3 or fp8_e5m2")
    for name in ("sink", "lse", "fp8-pv"):
        parser.add_argument(f"--{name}", action="store_true", default=None)


def run(options: argparse.Namespace) -> int:
    import m3attn
    from m3attn.cli.errors import UserError

    try:
        asked = problem_fields(options)
        texts = [
            str(m3attn.explain(options.stage, impl=options.impl, rule=options.rule, **asked, **({} if arch is None else {"arch": arch})))
            for arch in options.arch or [None]
        ]
    except ValueError as error:
        raise UserError(str(error)) from error
    print("\n".join(texts))
    return 0


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
