"""What a few queries selected, as text."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from m3attn.batch import PagedBatch
from m3attn.demo.model import Model
from m3attn.demo.text import Passages
from m3attn.reference import index

NUM_QUERIES = 3
NUM_BLOCKS = 3
SHOWN_CHARACTERS = 160


@dataclass(frozen=True, slots=True)
class Selected:
    """One query of the last layer: its blocks per KV group, and those of group 0 best first, with scores."""

    position: int
    ids: tuple[tuple[int, ...], ...]
    best: tuple[tuple[int, float], ...]


def shares(tokens: int) -> list[int]:
    """At most three positions, from past the half of `tokens` on."""
    return list(dict.fromkeys(max(0, int(tokens * share) - 1) for share in (0.55, 0.75, 1.0)))


def positions(content: bytes, tokens: int) -> list[int]:
    """At most three positions past the half of the text, each moved back to the end of a word."""
    found: list[int] = []
    for position in shares(tokens):
        end = position
        while end > 0 and not (chr(content[end]).isalnum() and (end + 1 == tokens or not chr(content[end + 1]).isalnum())):
            end -= 1
        position = end if end > 0 else position
        if position not in found:
            found.append(position)
    return found[:NUM_QUERIES]


def look(model: Model, content: bytes) -> list[Selected]:
    """The selections of the last layer's queries at `positions`."""
    ids = torch.cat(model.last_ids, dim=1)
    index_q = torch.cat([q if q.dtype.itemsize > 1 else q.float() for q in model.last_index_q])
    cache, size = model.layers[-1].cache, model.geometry.block_size
    found = []
    for position in positions(content, ids.shape[1]):
        batch = PagedBatch.from_lengths([1], [position + 1], model.pages[None], page_size=size, block_size=size)
        scores = index.index_score(index_q[position : position + 1], cache.index_key(), batch, dtype=torch.float64)[0, 0]
        found.append(selected(position, ids, scores))
    return found


def selected(position: int, ids: torch.Tensor, scores: torch.Tensor) -> Selected:
    """The selection of the query in row `position` of ids [Hkv, T, K], with group 0's scores [blocks]."""
    chosen = [[i for i in row if i >= 0] for row in ids[:, position].tolist()]
    best = sorted(chosen[0], key=lambda block: -scores[block].item())
    return Selected(position, tuple(map(tuple, chosen)), tuple((block, scores[block].item()) for block in best))


def describe(selected: Selected, passages: Passages) -> str:
    """A query's line, the text of its best blocks, and the blocks of every KV group."""
    lines = [f"query at {passages.unit} {selected.position}, after: {passages.line(selected.position)[-SHOWN_CHARACTERS:]}"]
    own = selected.position // passages.block_size
    shown = [pair for pair in selected.best if pair[0] != own][:NUM_BLOCKS]
    for block, score in shown:
        lines.append(f"  block {block:4d}, score {score:6.1f}: {passages.block(block)[:SHOWN_CHARACTERS]}")
    if not shown:
        lines.append("  it sees its own block only")
    for group, ids in enumerate(selected.ids):
        lines.append(f"  KV group {group} chose {', '.join(map(str, ids))}")
    return "\n".join(lines)
