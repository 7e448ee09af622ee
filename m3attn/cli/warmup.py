"""`m3attn warmup`: the CuTe DSL kernels, compiled into the cache's folder before anything needs them."""

from __future__ import annotations

import argparse
import os
import time

NAME = "warmup"
HELP = "Compile the CuTe DSL kernels for this machine's GPU, or with --arch for another machine's, into M3ATTN_CACHE_DIR."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", metavar="ARCH", help="sm_90a, …; by default that of the current GPU")
    parser.add_argument("--jobs", type=int, metavar="N", default=min(8, os.cpu_count() or 1), help="processes that compile (default: %(default)s)")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these variants; --list shows the names")
    parser.add_argument("--list", action="store_true", help="show the variants and compile nothing")


def run(options: argparse.Namespace) -> int:
    from m3attn.cli.errors import UserError
    from m3attn.problem import arch_of, normalise_arch

    try:
        arch = normalise_arch(options.arch) if options.arch else arch_of()
    except ValueError as error:
        raise UserError(str(error)) from error
    if arch == "cpu":
        raise UserError("no GPU here: name an architecture, such as --arch sm_90a")
    try:
        from m3attn.dsl_kernels.common.cache import cache_folder
        from m3attn.dsl_kernels.variants import compile_variants, names_for
    except ImportError as error:
        raise UserError(f"needs the packages of m3attn[cute]: {error}") from error
    known = names_for(arch)
    if not known:
        raise UserError(f"there are no CuTe DSL kernels for {arch}")
    if unknown := sorted(set(options.names) - set(known)):
        raise UserError(f"unknown variant {', '.join(unknown)}; --list shows the names")
    names = options.names or known
    if options.list:
        print("\n".join(names))
        return 0
    if options.jobs < 1:
        raise UserError(f"--jobs: expected at least 1, got {options.jobs}")
    start, failed, compiled = time.perf_counter(), 0, 0
    for done in compile_variants(names, arch, options.jobs):
        print(done, flush=True)
        failed += done.error is not None
        compiled += done.error is None and not done.was_there
    rest = f", {failed} failed" if failed else ""
    print(f"{len(names)} variants for {arch} in {cache_folder()}: {compiled} compiled{rest}, {time.perf_counter() - start:.1f} s")
    return 1 if failed else 0
