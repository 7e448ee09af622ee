"""`m3attn implementations`: every registered implementation and what it declares."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, fields
from typing import Any

NAME = "implementations"
HELP = "List every implementation of every stage with the architectures and capabilities it declares."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stage", nargs="?", metavar="STAGE", help="one stage only")
    parser.add_argument("--json", action="store_true", help="a list of objects with stage, implementation, archs and capabilities")


def run(options: argparse.Namespace) -> int:
    import m3attn
    from m3attn.bench.report import aligned
    from m3attn.cli.errors import UserError

    try:
        found = m3attn.implementations(options.stage)
    except ValueError as error:
        raise UserError(str(error)) from error
    if options.json:
        listed = [
            {"stage": i.stage, "implementation": i.key, "archs": i.archs, "built_in": i.built_in, "capabilities": asdict(i.capabilities)}
            for i in found
        ]
        print(json.dumps(listed, indent=1))
        return 0
    body = [(i.stage, i.key, ", ".join(i.archs), limits(i.capabilities)) for i in found]
    print(aligned(("stage", "implementation", "runs on", "takes"), body))
    return 0


def limits(capabilities: Any) -> str:
    """What a capability set restricts, in words; architectures are listed apart."""
    parts = []
    for field in fields(capabilities):
        value = getattr(capabilities, field.name)
        if field.name in ("min_arch", "archs", "cpu", "equal_head_dims") or value == field.default:
            continue
        name = field.name.replace("_", " ")
        if field.name == "e4m3_min_arch":
            parts.append(f"e4m3 from sm_{value}")
        elif field.name == "needs":
            parts.append(f"needs {', '.join(value)}")
        elif field.name in ("group_sizes", "index_heads", "topk"):
            parts.append(f"{name} {value[0]} to {value[1]}")
        elif isinstance(value, tuple):
            parts.append(f"{name} {', '.join(map(str, value))}")
        else:
            parts.append(f"{'' if value else 'no '}{name}")
    return "; ".join(parts) or "anything"
