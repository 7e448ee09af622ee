"""What the compiler makes of every named variant of the CuTe DSL kernels: matrix instructions, TMA, registers, local and shared memory.

A third of the variants in every run, the others in `make check-kernels`.
"""

import inspect
import math
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Self

import pytest
import torch
from needed import need

need("nvidia-cutlass-dsl", "apache-tvm-ffi")

import scale_kernel
from recorded import recorded
from simulator import Artifacts, artifacts
from triton import knobs

import m3attn
from m3attn.dsl_kernels.common.kernels import CuteKernel
from m3attn.dsl_kernels.variants import VARIANTS
from m3attn.testing.cases import MODES

SHARED_MEMORY = 227 * 1024
REGISTERS = 65_536
TENSOR_COLUMNS = 512
MAX_VARIANTS = {"attention": 40, "every stage": 50}
ATTENTION = ("sparse_prefill", "sparse_decode", "block_lists", "widen_pages")


@dataclass(frozen=True)
class Expected:
    """Of a kernel: its matrix products by the instruction they use, and whether its operands come by TMA; `why` where it is neither."""

    products: int
    instruction: str = "wgmma"
    tma: bool = True
    why: str = ""


EXPECTED: dict[str, Expected] = {
    "sparse_prefill_sm90": Expected(2),
    "sparse_prefill_by_block_sm90": Expected(2),
    "block_lists_sm90": Expected(0, tma=False, why="counts and sorts the selection's ids"),
    "sparse_decode_sm90": Expected(
        1, "mma.sync", why="16 rows are all there is, and the bytes of K and V bound it; both products are one instruction"
    ),
    "sparse_mla_sm90": Expected(2, tma=False, why="Hopper's TMA gathers no rows; asynchronous copies of 16 bytes do"),
    "widen_pages": Expected(0, tma=False, why="copies pages, each thread 16 bytes at a time"),
    "index_score_sm90": Expected(1),
    "index_score_sm100": Expected(1, "tcgen05.mma"),
    "sparse_prefill_sm100": Expected(2, "tcgen05.mma"),
    "select_blocks": Expected(0, tma=False, why="a selection multiplies nothing, and reads rows of any stride"),
}


def products(ptx: str) -> dict[str, int]:
    """Instruction -> how many kinds of product use it, told apart by shape, types, where operand A lies and how operands are transposed."""
    kinds: dict[str, set[tuple[str, ...]]] = {"wgmma": set(), "tcgen05.mma": set(), "mma.sync": set()}
    for name, operands in re.findall(r"\bwgmma\.mma_async\.(\S+)\s+\{[^}]*\},\s*([^;]+);", ptx):
        immediates = re.sub(r"^.*\bp\s*,", "", operands)
        kinds["wgmma"].add((name, "registers" if operands.startswith("{") else "shared", re.sub(r"\s", "", immediates)))
    for name, a in re.findall(r"\btcgen05\.mma\.(\S+)\s+\[[^\]]*\],\s*(.)", ptx):
        kinds["tcgen05.mma"].add((name, "tensor memory" if a == "[" else "shared"))
    for name in re.findall(r"\bmma\.sync\.(\S+)", ptx):
        kinds["mma.sync"].add((name,))
    return {instruction: len(found) for instruction, found in kinds.items() if found}


@dataclass(frozen=True)
class Usage:
    """Of one `@cute.kernel` among those that a variant launches, by name."""

    registers: int
    local: int
    threads: int

    @classmethod
    def of(cls, found: Artifacts) -> dict[str, Self]:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(found.cubin)
            file.flush()
            tool = knobs.nvidia.cuobjdump.path
            shown = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
        threads = dict(re.findall(r"\.entry (\w+)\(.*?\.reqntid ([\d, ]+)", found.ptx, re.DOTALL))
        usage = {}
        for name, line in re.findall(r"Function (\w+):\s*\n(.*)", shown):
            local = sum(map(int, re.findall(r"\b(?:STACK|LOCAL):(\d+)", line)))
            usage[name] = cls(int(re.search(r"\bREG:(\d+)", line)[1]), local, math.prod(map(int, threads[name].split(","))))
        return usage


def shared_bytes(ir: str) -> int:
    """The most that one of the variant's kernels allocates, one tensor after another, each at its alignment: a launch asks for no more."""
    types = dict(re.findall(r"^(!memref_smem\w+) = (.*)$", ir, re.MULTILINE))
    totals = []
    for kernel in ir.split("cuda.kernel @"):
        totals.append(0)
        for name in re.findall(r"cute\.memref\.alloca\(\).*: (!memref_smem\w+)$", kernel, re.MULTILINE):
            alignment, size = map(int, re.fullmatch(r'!cute\.memref<i8, smem, align<(\d+)>, "\(?(\d+)\)?:\(?1\)?">', types[name]).groups())
            totals[-1] = -(-totals[-1] // alignment) * alignment + size
    return max(totals)


def tensor_memory(ptx: str) -> tuple[int, int]:
    """(columns of tensor memory that are allocated, columns that are freed)."""
    numbers = dict(re.findall(r"\bmov\.b32\s+(%r\d+), (\d+);", ptx))
    taken, freed = (re.findall(rf"\btcgen05\.{name}\.\S+\s+[^,]+,\s*(%?\w+);", ptx) for name in ("alloc", "dealloc"))
    return sum(int(numbers.get(n, n)) for n in taken), sum(int(numbers.get(n, n)) for n in freed)


def faults(kernel: str, found: Artifacts) -> list[str]:
    expected, shared = EXPECTED[kernel], shared_bytes(found.ir)
    wanted = {expected.instruction: expected.products} if expected.products else {}
    tma = "cp.async.bulk.tensor" in found.ptx
    seen = [f"products: expected {wanted}, found {got}"] if (got := products(found.ptx)) != wanted else []
    seen += [f"TMA: expected {expected.tma}, found {tma}"] if tma != expected.tma else []
    seen += [f"{shared} bytes of shared memory"] if shared > SHARED_MEMORY else []
    taken, freed = tensor_memory(found.ptx)
    seen += [f"{taken} columns of tensor memory, {freed} freed"] if taken > TENSOR_COLUMNS or taken != freed else []
    for usage in Usage.of(found).values():
        seen += [f"{usage.local} bytes of local memory a thread"] if usage.local else []
        seen += [f"{usage.registers} registers of {usage.threads} threads"] if -(-usage.registers // 8) * 8 * usage.threads > REGISTERS else []
    return seen


def parameters() -> list:
    """Every third variant of each kernel, its first among them, in every run; the others, and all for sm_103, which are sm_100's, are slow."""
    counts: dict[str, int] = {}
    listed = []
    for arch, variants in VARIANTS.items():
        for name, (kernel, _) in variants.items():
            number = counts[kernel.name] = counts.get(kernel.name, -1) + 1
            listed.append(pytest.param(arch, name, marks=[pytest.mark.slow] if number % 3 or arch == "sm_103" else []))
    return listed


@pytest.mark.parametrize(("arch", "name"), parameters())
def test_what_is_compiled(arch: str, name: str) -> None:
    kernel, variant = VARIANTS[arch][name]
    assert faults(kernel.name, artifacts(kernel, variant, arch)) == []


@pytest.mark.parametrize("arch", VARIANTS)
def test_the_list_is_short(arch: str) -> None:
    variants = VARIANTS[arch].values()
    assert sum(kernel.name.startswith(ATTENTION) for kernel, _ in variants) <= MAX_VARIANTS["attention"]
    assert len(variants) <= MAX_VARIANTS["every stage"]
    assert len({(kernel.name, variant) for kernel, variant in variants}) == len(variants)


def test_exceptions_have_their_reasons() -> None:
    usual = ("wgmma", "tcgen05.mma")
    assert all(expected.why for expected in EXPECTED.values() if expected.instruction not in usual or not expected.products or not expected.tma)


def test_tensor_memory_is_counted() -> None:
    ptx = "mov.b32 %r7, 512;\ntcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], %r7;\n"
    assert tensor_memory(ptx) == (512, 0)
    assert tensor_memory(ptx + "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r9, 256;") == (512, 256)


def test_the_checks_see_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXPECTED, scale_kernel.KERNEL.name, Expected(2))
    found = artifacts(scale_kernel.KERNEL, scale_kernel.Variant(64), "sm_90")
    (usage,) = Usage.of(found).values()
    assert (usage.local, usage.threads, shared_bytes(found.ir)) == (0, 64, 64 * 4) and 0 < usage.registers < 32
    assert faults("scale", found) == ["products: expected {'wgmma': 2}, found {}", "TMA: expected True, found False"]
    monkeypatch.setattr(f"{__name__}.SHARED_MEMORY", 64 * 4 - 1)
    monkeypatch.setattr(f"{__name__}.REGISTERS", 64 * 8 - 1)
    assert [text.split(" ", 1)[1] for text in faults("scale", found)[2:]] == ["bytes of shared memory", "registers of 64 threads"]


KERNELS = {kernel.name: kernel for variants in VARIANTS.values() for kernel, _ in variants.values()}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_sources_are_all_that_the_kernel_is_written_in(kernel: CuteKernel) -> None:
    """Its file and, of the modules of dsl_kernels that it imports, those in the DSL without a kernel of their own."""

    def written_in(module: ModuleType) -> set[Path]:
        imported = re.findall(r"^from (m3attn\.dsl_kernels(?:\.\w+)*) import \(?([^()]+?)\)?$", inspect.getsource(module), re.MULTILINE)
        names = {origin for origin, _ in imported} | {f"{origin}.{name.strip()}" for origin, listed in imported for name in listed.split(",")}
        modules = [sys.modules[name] for name in names if name in sys.modules and ".common." not in f"{name}." and name != "m3attn.dsl_kernels"]
        others = [m for m in modules if m is not module and hasattr(m, "cutlass") and not hasattr(m, "KERNEL")]
        return {Path(module.__file__).resolve()}.union(*(written_in(m) for m in others))

    module = sys.modules[kernel.build.__module__]
    assert written_in(module) <= {Path(path).resolve() for path in kernel.sources}


def m3_batch(requests: int, queries: int, context: int = 32_768) -> m3attn.PagedBatch:
    return m3attn.PagedBatch(
        page_table=torch.zeros(requests, context // 128, dtype=torch.int32),
        seq_lens=torch.full((requests,), context, dtype=torch.int32),
        cu_seqlens_q=torch.arange(requests + 1, dtype=torch.int32) * queries,
        max_seqlen_q=queries,
        max_seqlen_k=context,
        page_size=128,
        block_size=128,
    )


@pytest.mark.parametrize(("requests", "queries"), [(1, 4_096), (2, 2_048), (1, 1), (16, 1), (128, 1), (1, 4)])
@pytest.mark.parametrize("mode", ["bf16", "widen_e4m3", "fp8"])
@pytest.mark.parametrize(("key", "arch"), [("cute_sm90", "sm_90"), ("cute_sm100", "sm_100")])
def test_what_m3_calls_is_named(key: str, arch: str, mode: str, requests: int, queries: int) -> None:
    """Attention and selection at M3's 64 heads over 4 groups: whatever a call takes is in the list."""
    q_dtype, kv_dtype = MODES[mode]
    batch, tokens = m3_batch(requests, queries), requests * queries
    ids = torch.zeros(4, tokens, 16, dtype=torch.int32)
    with recorded(f"{arch}a") as asked:
        cache = m3attn.LayerCache(kv=torch.zeros(1, 4, 128, 256, dtype=kv_dtype), index_k=torch.zeros(1, 128, 128, dtype=q_dtype))
        m3attn.sparse_attention(torch.zeros(tokens, 64, 128, dtype=q_dtype), cache, ids, batch, impl=key)
        m3attn.index_topk(torch.zeros(tokens, 4, 128, dtype=q_dtype), cache, batch, impl=key)
    assert len(asked) >= 3
    assert [(kernel.name, variant) for kernel, variant in asked if (kernel, variant) not in VARIANTS[arch].values()] == []


@pytest.mark.parametrize("context", [4_096, 8_192, 16_384, 32_768, 65_536, 131_072, 262_144, 1 << 20])
@pytest.mark.parametrize(("requests", "queries"), [(1, 4_096), (1, 2_048), (1, 171), (16, 1)])
@pytest.mark.parametrize(("key", "arch"), [("cute_sm90", "sm_90"), ("cute_sm100", "sm_100")])
def test_selections_of_every_length_are_named(key: str, arch: str, requests: int, queries: int, context: int) -> None:
    batch, q = m3_batch(requests, queries, context), torch.zeros(requests * queries, 4, 128, dtype=torch.bfloat16)
    with recorded(f"{arch}a") as asked:
        m3attn.index_topk(q, m3attn.LayerCache(kv=torch.zeros(1, 4, 128, 256, dtype=q.dtype), index_k=q.new_zeros(1, 128, 128)), batch, impl=key)
    assert {kernel.name for kernel, _ in asked} == {f"index_score_{key.removeprefix('cute_')}", "select_blocks"}
    assert [(kernel.name, variant) for kernel, variant in asked if (kernel, variant) not in VARIANTS[arch].values()] == []
