"""A model, not a measurement: the least time that `cute_sm100`'s kernels can take on a B200, from what they do and from published peak rates.

`python -m m3attn.bench.b200 FILE` fills the table of docs/b200_model.md; `--check` says whether it is up to date.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from m3attn.bench.shapes import Step, step_shapes
from m3attn.bench.workloads import visible_blocks

REGION = re.compile(r"(<!-- b200 model -->\n).*?(<!-- end model -->)", re.DOTALL)

BLOCK, DIM, TOPK = 128, 128, 16
KV_HEADS, Q_HEADS = 4, 64
SCORE_ROWS = 256
"""Rows (token, index head) of a scoring tile in prefill; 128 in decode."""
ATTENTION_ROWS = 128
"""Rows (token, query head) of half a tile of sparse prefill: 8 tokens of 16 heads."""
UNION_BLOCKS = 26
"""Blocks that 8 neighbouring tokens select together, of 16 each, at the overlap publicly reported for MiniMax-M3."""


@dataclass(frozen=True)
class Gpu:
    """Peak rates: operations, bytes and exponentials a second."""

    flops_16: float
    flops_8: float
    bytes: float
    exponentials: float


SMS = 148
CLOCK = 2.25e15 / (SMS * 8192)
"""Hz at which 148 multiprocessors of 8,192 dense bf16 operations a cycle make 2.25 PFLOP/s."""
B200 = Gpu(flops_16=2.25e15, flops_8=4.5e15, bytes=8e12, exponentials=SMS * 16 * CLOCK)


@dataclass(frozen=True)
class Work:
    """What a kernel does: operations of matrix instructions, padding included, exponentials, bytes to and from memory, bytes out of L2."""

    flops_16: float = 0.0
    flops_8: float = 0.0
    exponentials: float = 0.0
    bytes: float = 0.0
    l2_bytes: float = 0.0

    def times_us(self, gpu: Gpu = B200) -> dict[str, float]:
        """Microseconds by what they are spent on, if nothing else took any."""
        return {
            "tensor cores": 1e6 * (self.flops_16 / gpu.flops_16 + self.flops_8 / gpu.flops_8),
            "exponentials": 1e6 * self.exponentials / gpu.exponentials,
            "memory": 1e6 * self.bytes / gpu.bytes,
        }


def bounds(times: dict[str, float]) -> str:
    """What takes longest, and what takes as long within a hundredth."""
    return ", ".join(name for name, time in times.items() if time > 0.99 * max(times.values()))


def us(time: float) -> str:
    return f"{time:.3g} us" if time else ""


def item(mode: str) -> int:
    return 1 if mode == "fp8" else 2


def index_score(step: Step, mode: str) -> Work:
    """As `index_topk` calls it: rows that see at most K blocks are not scored, and only visible blocks are written."""
    rows = SCORE_ROWS if step.q_len > 1 else 128
    tokens = min(rows // KV_HEADS, step.q_len)
    products = 0
    for first in range(step.prefix, step.seq_len, tokens):
        live = -(-min(first + tokens, step.seq_len) // BLOCK)
        products += step.batch * live if live > TOPK else 0
    flops = 2.0 * rows * BLOCK * DIM * products
    keys = step.batch * step.seq_len * DIM * item(mode)
    queries = step.tokens * KV_HEADS * DIM * item(mode)
    moved = keys + queries + KV_HEADS * visible_blocks(step) * 4
    l2 = products * BLOCK * DIM * item(mode)
    return Work(flops_8=flops, bytes=moved, l2_bytes=l2) if mode == "fp8" else Work(flops_16=flops, bytes=moved, l2_bytes=l2)


def select_blocks(step: Step, mode: str) -> Work:
    """Scores are read once from memory (again from L2), ids written. Comparisons are not modelled."""
    scores = KV_HEADS * visible_blocks(step) * 4
    return Work(bytes=scores + step.tokens * KV_HEADS * TOPK * 4, l2_bytes=2 * scores)


def sparse_prefill(step: Step, mode: str) -> Work:
    """Halves of 8 tokens multiply with the blocks that any of them selected. Every page is read once from memory, each time from L2.

    With fp8 the cache is copied once: keys in e4m3, values in fp16.
    """
    halves = -(-step.q_len // (ATTENTION_ROWS * KV_HEADS // Q_HEADS)) * step.batch * KV_HEADS
    pairs = halves * UNION_BLOCKS
    product = 2.0 * ATTENTION_ROWS * BLOCK * DIM * pairs
    cache = step.batch * step.seq_len * KV_HEADS * DIM
    rows = step.tokens * Q_HEADS * DIM
    exponentials = float(pairs * ATTENTION_ROWS * BLOCK)
    if mode == "fp8":
        moved = cache * (2 + 3 + 3) + rows * (1 + 2)
        return Work(product, product, exponentials, moved, pairs / 2 * BLOCK * DIM * 3)
    return Work(2 * product, 0.0, exponentials, cache * 4 + rows * 4, pairs / 2 * BLOCK * DIM * 4)


def sparse_decode(step: Step, mode: str) -> Work:
    """K and V of the selected blocks, read once; products of 16 rows take a tenth of that."""
    picks = step.tokens * KV_HEADS * min(TOPK, -(-step.seq_len // BLOCK))
    product = 2.0 * 16 * BLOCK * DIM * picks
    moved = picks * BLOCK * DIM * 2 * item(mode) + step.tokens * Q_HEADS * DIM * (item(mode) + 2)
    exponentials = float(picks * 16 * BLOCK)
    if mode == "fp8":
        return Work(product, product, exponentials, moved, moved)
    return Work(2 * product, 0.0, exponentials, moved, moved)


PREFILL = ("P1", "P3")
DECODE = ("B1xL131072", "B64xL131072")
KERNELS = (
    ("index_score", index_score, (*PREFILL, *DECODE)),
    ("select_blocks", select_blocks, (*PREFILL, *DECODE)),
    ("sparse_attention", sparse_prefill, PREFILL),
    ("sparse_attention", sparse_decode, DECODE),
)


def lines() -> Iterator[str]:
    """The table in Markdown."""
    yield "| stage | step | mode | tensor cores | exponentials | memory | **at least** | bound by | of L2, while it lasts |"
    yield "| --- | --- | --- | ---: | ---: | ---: | ---: | --- | ---: |"
    for stage, work_of, shapes in KERNELS:
        for shape in shapes:
            (step,) = step_shapes(shape)[0].steps
            for mode in ("bf16", "fp8"):
                if stage == "select_blocks" and mode == "fp8":
                    continue
                work = work_of(step, mode)
                times = work.times_us()
                least = max(times.values())
                cells = [f"`{stage}`", shape, "any" if stage == "select_blocks" else mode, *map(us, times.values())]
                yield f"| {' | '.join([*cells, f'**{us(least)}**', bounds(times), f'{work.l2_bytes / least / 1e6:.1f} TB/s'])} |"


def filled(content: str) -> str:
    """The page with its table made anew."""
    return REGION.sub(lambda found: f"{found[1]}\n{chr(10).join(lines())}\n\n{found[2]}", content)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m m3attn.bench.b200", description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("file", type=Path)
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if the table is out of date")
    chosen = parser.parse_args(arguments)
    content = chosen.file.read_text()
    new = filled(content)
    if chosen.check:
        return 0 if new == content else 1
    chosen.file.write_text(new)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
