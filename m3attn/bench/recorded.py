"""Steps whose block ids were recorded (`m3attn.analysis`), as shapes to time sparse attention on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from m3attn.analysis.ids_file import RecordedStep
from m3attn.batch import DECODE_MAX_SEQLEN_Q
from m3attn.bench.inputs import BLOCK_SIZE
from m3attn.bench.shapes import Shape, Step
from m3attn.checks import MAX_TOPK

M3_GROUP = 16


@dataclass(frozen=True, eq=False)
class RecordedShape:
    """A recorded step: its shape, its name as a selection, and its ids [Hkv, T, K]."""

    shape: Shape
    selection: str
    ids: torch.Tensor

    @property
    def num_kv_heads(self) -> int:
        return self.ids.shape[0]


def shapes(steps: Sequence[RecordedStep]) -> Iterator[RecordedShape]:
    """The shapes of recorded steps, in their order.

    Raises:
        ValueError: nothing was recorded, blocks of another size than the bench's, too many ids a row, or requests of different lengths in a step.
    """
    if not steps:
        raise ValueError("--ids: expected at least one recorded step, got none")
    counts: dict[str, int] = {}
    for recorded in steps:
        number = counts[recorded.layer] = counts.get(recorded.layer, -1) + 1
        name = f"{recorded.layer or 'layer'} step {number}"
        if recorded.block_size != BLOCK_SIZE:
            raise ValueError(f"--ids: expected blocks of {BLOCK_SIZE} positions, got {recorded.block_size} in {name}")
        if recorded.ids.shape[2] > MAX_TOPK:
            raise ValueError(f"--ids: expected at most {MAX_TOPK} ids a row, got {recorded.ids.shape[2]} in {name}")
        lengths = set(zip(recorded.q_lens, recorded.seq_lens, strict=True))
        if len(lengths) != 1:
            raise ValueError(f"--ids: expected requests of one length in {name}, got (new tokens, tokens) {sorted(lengths)}")
        ((q_len, seq_len),) = lengths
        batch = len(recorded.q_lens)
        size = f"B{batch}x{q_len}xL{seq_len}" if batch > 1 else f"{q_len}x{seq_len}"
        shape = Shape(size, (Step(batch, q_len, seq_len),), replay=q_len <= DECODE_MAX_SEQLEN_Q)
        yield RecordedShape(shape, name, recorded.ids)
