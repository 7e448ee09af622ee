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
    parser.add_argument("--list", action="store_true", help="show the variants, without a GPU or --arch those of every one, and compile nothing")


def run(options: argparse.Namespace) -> int:
    from m3attn.cli.errors import UserError
    from m3attn.problem import arch_of, normalise_arch

    try:
        arch = normalise_arch(options.arch) if options.arch else arch_of()
    except ValueError as error:
        raise UserError(str(error)) from error
    lists_all = options.list and arch == "cpu"
    if arch == "cpu" and not lists_all:
        raise UserError("no GPU here: name an architecture, such as --arch sm_90a")
    if not lists_all and arch not in kernel_archs():
        raise UserError(f"there are no CuTe DSL kernels for {arch}, only for {', '.join(kernel_archs())}; the Triton kernels compile on first use")
    try:
        from m3attn.dsl_kernels.common.cache import cache_folder
        from m3attn.dsl_kernels.variants import compile_variants, names_for
    except ImportError as error:
        raise UserError(f"{error}; the CuTe DSL is needed: pip install 'm3attn[cute]', in a checkout pip install '.[cute]' (Linux)") from error
    if lists_all:
        print("\n".join(f"{arch}: {name}" for arch in kernel_archs() for name in names_for(arch)))
        return 0
    known = names_for(arch)
    if not known:
        raise UserError(f"no variants are named for {arch}; its CuTe DSL kernels compile on first use")
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


def kernel_archs() -> list[str]:
    """The architectures that CuTe DSL kernels of this package were written for; asks without importing any."""
    import m3attn
    from m3attn.problem import arch_number

    found = {a for i in m3attn.implementations() if i.built_in and "cutlass" in i.capabilities.needs for a in i.capabilities.archs or ()}
    return sorted(found, key=arch_number)
