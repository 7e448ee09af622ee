"""Compile the library's Triton kernels for one architecture, without a GPU, and judge what came out.

    python tests/compile/worker.py sm_90 [--fast] [--spills] [--stage STAGE …] [--verbose]

The Triton in use is the one on sys.path, so a process checks one release. Prints one line per kernel that falls short; exits 1 if there is any.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

SHARED_MEMORY = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_103": 227, "sm_120": 99, "sm_121": 99}
"""KiB that one block may have."""

SPILL_LIMIT = {"sm_90": 0}
OTHER_SPILL_LIMIT = 128
"""Bytes of local memory a thread. Settings were tuned on sm_90; on architectures that nobody has measured a few spilled registers are no evidence."""

WARPGROUP_PRODUCT = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma", "sm_103": "tcgen05.mma"}
"""The instruction of products of 64 rows and more; below, and elsewhere, it is mma.sync."""


@dataclass
class Report:
    """What was seen, and what is wrong with it."""

    compiled: int = 0
    kernels: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    excused: set[tuple[str, str, str]] = field(default_factory=set)


def kernel_modules() -> dict[str, ModuleType]:
    """Kernel name -> the module that defines it. A kernel is what the host launches: a jit function named `*_kernel`."""
    from triton.runtime import JITFunction

    import m3attn.triton_kernels as package

    found: dict[str, ModuleType] = {}
    for info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if isinstance(value, JITFunction) and value.fn.__module__ == module.__name__ and name.endswith("_kernel"):
                if name in found:
                    raise SystemExit(f"{name} is defined in {found[name].__name__} and in {module.__name__}: kernels need names of their own")
                found[name] = module
    return found


def product_rows(module: ModuleType, kernel: str, meta: dict[str, Any]) -> int | None:
    """Rows of the kernel's matrix products as its file declares them in MMA_ROWS; None: it has none."""
    declared = module.MMA_ROWS[kernel]
    return meta[declared] if isinstance(declared, str) else declared


def expected_product(arch: str, rows: int) -> str:
    return WARPGROUP_PRODUCT[arch] if rows >= 64 and arch in WARPGROUP_PRODUCT else "mma.sync"


def products(ptx: str) -> set[str]:
    return {name for name in ("mma.sync", "wgmma.mma_async", "tcgen05.mma") if re.search(rf"(?<![\w.]){re.escape(name)}\b", ptx)}


def stack_bytes(cubin: bytes) -> int:
    """Local memory that one thread of the kernel needs: spilled registers, or an array that the compiler could not keep in them."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run([knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return sum(int(n) for n in re.findall(r"\b(?:STACK|LOCAL):(\d+)", shown.stdout))


def judge(arch: str, kernel: str, module: ModuleType, meta: dict[str, Any], compiled: Any, is_fp32: bool, spills: bool) -> dict[str, str]:
    """Check -> what is wrong, for one compiled kernel."""
    wrong: dict[str, str] = {}
    if kernel not in module.MMA_ROWS:
        return {"declaration": f"{module.__name__}.MMA_ROWS does not name it"}
    found, rows = products(compiled.asm["ptx"]), product_rows(module, kernel, meta)
    # Products of fp32 are IEEE ones, on the ordinary units: a tensor core would round them to TF32.
    expected = set() if rows is None or is_fp32 else {expected_product(arch, rows)}
    if found != expected:
        wrong["product"] = f"expected {', '.join(expected) or 'no tensor core'} for {rows} rows, found {', '.join(sorted(found)) or 'none'}"
    if compiled.metadata.shared > SHARED_MEMORY[arch] * 1024:
        wrong["shared"] = f"{compiled.metadata.shared} bytes of shared memory, {SHARED_MEMORY[arch] * 1024} fit"
    if not compiled.metadata.enable_fp_fusion:
        wrong["fusion"] = "launched without FP fusion"
    # Products of fp32 have no speed target: those variants may spill.
    if spills and not (is_fp32 and rows is not None) and (stack := stack_bytes(compiled.asm["cubin"])) > SPILL_LIMIT.get(arch, OTHER_SPILL_LIMIT):
        wrong["spills"] = f"{stack} bytes of local memory a thread"
    return wrong


def check(arch: str, stages: list[str], *, fast: bool, spills: bool, verbose: bool) -> Report:
    import torch
    from cases import CASES

    from m3attn.choice import UnsupportedProblem
    from m3attn.triton_kernels.launch import compile_only

    modules, report, seen = kernel_modules(), Report(), set()
    for case in (case for stage in stages for case in CASES[stage]()):
        if fast and not case.fast:
            continue
        with compile_only(arch) as log:
            try:
                case.run()
            except UnsupportedProblem as refusal:
                report.refused[case.name] = str(refusal)
                continue
            except Exception as error:
                report.faults.append(f"{case.name}: {type(error).__name__}: {str(error).strip()[-500:]}")
        for kernel, meta, compiled in log.kernels:
            report.kernels.add(kernel)
            if compiled.hash in seen:
                continue
            seen.add(compiled.hash)
            report.compiled += 1
            module = modules[kernel]
            wrong = judge(arch, kernel, module, meta, compiled, case.dtype == torch.float32, spills)
            excuses = getattr(module, "COMPILE_EXCEPTIONS", {})
            for what, text in wrong.items():
                if (kernel, arch, what) in excuses:
                    report.excused.add((kernel, arch, what))
                else:
                    shown = ", ".join(f"{name}={value}" for name, value in meta.items())
                    report.faults.append(f"{kernel} [{case.name}] {what}: {text} ({shown}, {compiled.metadata.num_warps} warps)")
            if verbose:
                print(f"{kernel} [{case.name}] shared {compiled.metadata.shared} {'; '.join(wrong.values()) or 'ok'}", flush=True)
    if set(stages) == set(CASES):
        # Older architectures refuse e4m3, and with it whole kernels; sm_90 has every one.
        missing = set(modules) - report.kernels if arch == "sm_90" else set()
        report.faults += [f"{name}: defined in {modules[name].__name__} and compiled by no case" for name in sorted(missing)]
        stated = {key for module in modules.values() for key in getattr(module, "COMPILE_EXCEPTIONS", {}) if key[1] == arch}
        judged = {key for key in stated if (spills and arch in SPILL_LIMIT if key[2] == "spills" else not fast)}
        report.faults += [f"COMPILE_EXCEPTIONS{key}: nothing needs it any more" for key in sorted(judged - report.excused)]
    return report


def main() -> None:
    from cases import CASES

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arch", choices=SHARED_MEMORY)
    parser.add_argument("--fast", action="store_true", help="only the cases that every test run compiles")
    parser.add_argument("--spills", action="store_true", help="also refuse kernels that spill registers")
    parser.add_argument("--stage", nargs="+", choices=CASES, default=list(CASES), dest="stages")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    import triton

    from m3attn.registry import implementations

    report = check(options.arch, options.stages, fast=options.fast, spills=options.spills, verbose=options.verbose)
    uncovered = {i.stage for i in implementations() if i.key.startswith("triton") and i.built_in} - set(CASES)
    report.faults += [f"{stage}: has a Triton implementation and no cases" for stage in sorted(uncovered)]
    for fault in report.faults:
        print(fault)
    print(
        f"triton {triton.__version__}, {options.arch}: {report.compiled} compiled from {len(report.kernels)} kernels, "
        f"{len(report.refused)} calls refused by capability, {len(report.faults)} faults"
    )
    sys.exit(bool(report.faults))


if __name__ == "__main__":
    main()
