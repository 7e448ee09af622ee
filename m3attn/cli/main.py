"""Parses the command line and hands over to a subcommand; a subcommand imports what it needs when it runs."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence

from m3attn.cli import bench, demo, explain, implementations, info, report, warmup
from m3attn.cli.errors import UserError
from m3attn.version import __version__

COMMANDS = (demo, bench, report, implementations, explain, info, warmup)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="m3attn", description="MiniMax-M3's sparse attention: demo, benchmark, and what would run where.")
    top.add_argument("--version", action="version", version=f"m3attn {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        sub = commands.add_parser(command.NAME, help=command.HELP, description=command.HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run, refuse=sub.error)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0 done, 1 something measured or checked is wrong, 2 bad input."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a user's text may hold what the terminal's encoding lacks
    options, unknown = parser().parse_known_args(arguments)
    if unknown:
        options.refuse(f"unrecognized arguments: {' '.join(unknown)}")  # with the command's own usage
    try:
        return options.run(options)
    except UserError as error:
        print(f"m3attn {options.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()
        return 0
