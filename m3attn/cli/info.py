"""`m3attn info`: versions, GPUs, switches."""

from __future__ import annotations

import argparse
import json
from typing import Any

NAME = "info"
HELP = "Show versions, GPUs, optional packages and the environment variables in force."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one object")


def run(options: argparse.Namespace) -> int:
    import m3attn

    found = m3attn.info()
    if options.json:
        print(json.dumps(found, indent=1, default=str))
    else:
        plugins = {name: error or "ok" for name, error in found["plugins"].items()}
        print("\n".join(lines(found | {"plugins": plugins})))
    return 0


def lines(found: dict[str, Any], indent: str = "") -> list[str]:
    """`name: value` lines, nested mappings indented."""
    shown = []
    for name, value in found.items():
        if isinstance(value, dict):
            shown += [f"{indent}{name}:", *(lines(value, indent + "  ") or [f"{indent}  none"])]
        elif isinstance(value, (list, tuple)):
            shown.append(f"{indent}{name}: {', '.join(map(str, value)) or 'none'}")
        else:
            shown.append(f"{indent}{name}: {value}")
    return shown
