"""Random inputs of a step: pools of pages, shuffled page tables, queries."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from m3attn.batch import LayerCache, PagedBatch
from m3attn.bench.shapes import Heads, Step
from m3attn.dtypes import E4M3, is_fp8

HEAD_DIM = INDEX_DIM = PAGE_SIZE = BLOCK_SIZE = 128
TOPK = 16
FILL_BYTES = 1 << 28
MAX_SETS = 128


@dataclass(frozen=True, slots=True)
class Mode:
    """The element types behind a mode's name."""

    name: str
    q: torch.dtype
    kv: torch.dtype
    index: torch.dtype
    fp8_pv: bool = False


MODES = {
    "bf16": Mode("bf16", torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "fp16": Mode("fp16", torch.float16, torch.float16, torch.float16),
    "widen": Mode("widen", torch.bfloat16, E4M3, torch.bfloat16),
    "fp8": Mode("fp8", E4M3, E4M3, E4M3),
    "fp8_pv": Mode("fp8_pv", E4M3, E4M3, E4M3, fp8_pv=True),
}


def random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Unit normal values on the generator's device, filled in pieces so that a pool of many GB needs no second one."""
    x = torch.empty(shape, dtype=dtype, device=generator.device)
    row = max(1, math.prod(shape[1:]) * 4)
    for part in x.split(max(1, FILL_BYTES // row)) if x.numel() else ():
        if is_fp8(dtype):
            part.copy_(torch.randn(part.shape, dtype=torch.bfloat16, device=x.device, generator=generator))
        else:
            part.normal_(generator=generator)
    return x


@dataclass(frozen=True, slots=True)
class Reads:
    """What a stage reads of a step's cache, for sizing pools: bytes a token of the index keys, of K and V, and how many tokens of the latter."""

    index: int = 0
    kv: int = 0
    kv_tokens: int = 0

    def per_call(self, step: Step) -> int:
        return step.batch * (step.seq_len * self.index + self.kv_tokens * self.kv)

    def per_set(self, step: Step) -> int:
        return step.batch * step.seq_len * (self.index + self.kv)


@dataclass(frozen=True, slots=True)
class Plan:
    """How many page tables the calls of a graph rotate through, and how many pages they draw from, so that no call finds its data in L2."""

    num_sets: int
    num_pages: int


def pages_of(step: Step) -> int:
    return step.batch * -(-step.seq_len // PAGE_SIZE)


def plan(step: Step, reads: Reads, *, replay: bool, l2_bytes: int) -> Plan:
    """Enough sets to outgrow L2 twice; the pool grows only where one set's pages are not already many times what a call reads."""
    if not replay:
        return Plan(1, pages_of(step))
    per_call = max(1, reads.per_call(step))
    num_sets = min(MAX_SETS, -(-2 * l2_bytes // per_call) + 1)
    if per_call > 2 * l2_bytes:
        num_sets = 1
    copies = -(-num_sets * per_call // max(1, reads.per_set(step)))
    return Plan(num_sets, max(1, copies) * pages_of(step))


@dataclass(frozen=True, eq=False)
class Pool:
    """Pages shared by all steps of a shape; parts that a stage does not read are None."""

    kv: torch.Tensor | None  # [pages, Hkv, page_size, 2 * D]
    index_k: torch.Tensor | None  # [pages, page_size, Di]

    @classmethod
    def random(cls, num_pages: int, heads: Heads, mode: Mode, *, kv: bool, index: bool, generator: torch.Generator) -> Pool:
        return cls(
            random((num_pages, heads.num_kv, PAGE_SIZE, 2 * HEAD_DIM), mode.kv, generator) if kv else None,
            random((num_pages, PAGE_SIZE, INDEX_DIM), mode.index, generator) if index else None,
        )

    @property
    def num_pages(self) -> int:
        tensor = self.kv if self.kv is not None else self.index_k
        assert tensor is not None
        return tensor.shape[0]


@dataclass(frozen=True, eq=False)
class StepInputs:
    """Everything a stage reads of one step. `batches` differ in their page tables only."""

    step: Step
    heads: Heads
    mode: Mode
    cache: LayerCache
    batches: tuple[PagedBatch, ...]
    q: torch.Tensor  # [T, Hq, D]
    index_q: torch.Tensor  # [T, Hi, Di]
    prefix_lens: torch.Tensor  # [B] int32, tokens before the new ones
    generator: torch.Generator

    @classmethod
    def random(cls, step: Step, heads: Heads, mode: Mode, pool: Pool, num_sets: int, generator: torch.Generator) -> StepInputs:
        tables = page_tables(step, pool.num_pages, num_sets, generator)
        q_lens, seq_lens = [step.q_len] * step.batch, [step.seq_len] * step.batch
        return cls(
            step=step,
            heads=heads,
            mode=mode,
            cache=LayerCache(kv=pool.kv, index_k=pool.index_k, zero_on_alloc=True),  # every byte of the pool is a finite number
            batches=tuple(PagedBatch.from_lengths(q_lens, seq_lens, table, page_size=PAGE_SIZE, block_size=BLOCK_SIZE) for table in tables),
            q=random((step.tokens, heads.num_q, HEAD_DIM), mode.q, generator),
            index_q=random((step.tokens, heads.num_kv, INDEX_DIM), mode.index, generator),
            prefix_lens=torch.full((step.batch,), step.prefix, dtype=torch.int32, device=generator.device),
            generator=generator,
        )


def page_tables(step: Step, num_pages: int, num_sets: int, generator: torch.Generator) -> list[torch.Tensor]:
    """`num_sets` shuffled tables [B, pages a request] int32. Sets share no page while the pool lasts; then they start over in a new order."""
    needed = pages_of(step)
    tables: list[torch.Tensor] = []
    while len(tables) < num_sets:
        order = torch.randperm(num_pages, device=generator.device, generator=generator).int()
        for start in range(0, num_pages - needed + 1, needed):
            tables.append(order[start : start + needed].view(step.batch, -1))
    return tables[:num_sets]
