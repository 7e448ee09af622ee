"""Recorded block ids in a file: what `m3attn bench --ids` times."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

FORMAT = "m3attn ids 1"


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """The ids that one layer chose in one step.

    Attributes:
        layer: its name.
        ids: [Hkv, T, K] int32 on the CPU, rows ordered by request and position.
        q_lens, seq_lens: of each request; seq_len includes the step's own tokens.
        block_size: positions of a block.
    """

    layer: str
    ids: torch.Tensor
    q_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_size: int

    @classmethod
    def of(cls, layer: str, ids: torch.Tensor, positions: torch.Tensor, requests: torch.Tensor, block_size: int) -> RecordedStep:
        """From rows in any order; `positions` and `requests` are [T]. The last position of a request is its last token.

        Raises:
            ValueError: the rows of a request are not consecutive positions.
        """
        pairs = list(zip(requests.tolist(), positions.tolist(), strict=True))
        order = sorted(range(len(pairs)), key=lambda row: pairs[row])
        spans: dict[int, list[int]] = {}
        for row in order:
            spans.setdefault(pairs[row][0], []).append(pairs[row][1])
        for request, span in spans.items():
            if span != list(range(span[0], span[0] + len(span))):
                raise ValueError(f"positions: expected consecutive ones for request {request}, got {span[:8]}")
        rows = torch.tensor(order, dtype=torch.int64, device=ids.device)
        return cls(layer, ids[:, rows].cpu(), tuple(map(len, spans.values())), tuple(span[-1] + 1 for span in spans.values()), block_size)


def save_ids(path: Path | str, steps: Sequence[RecordedStep]) -> None:
    """Write steps to a file that `load_ids` reads."""
    content = [
        {"layer": s.layer, "ids": s.ids, "q_lens": list(s.q_lens), "seq_lens": list(s.seq_lens), "block_size": s.block_size}
        for s in steps
        if s.q_lens
    ]
    torch.save({"format": FORMAT, "steps": content}, path)


def load_ids(path: Path | str) -> list[RecordedStep]:
    """The steps of a file that `save_ids` wrote. Loads tensors and plain values only.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: another kind of file, or rows and lengths that do not fit together.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path}: expected a file of recorded ids, it cannot be read: {type(error).__name__}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path}: expected a file of recorded ids ({FORMAT}), got another kind of file")
    steps = [RecordedStep(s["layer"], s["ids"], tuple(s["q_lens"]), tuple(s["seq_lens"]), s["block_size"]) for s in content["steps"]]
    for number, step in enumerate(steps):
        if step.ids.dim() != 3 or step.ids.dtype != torch.int32 or step.ids.shape[1] != sum(step.q_lens) or len(step.q_lens) != len(step.seq_lens):
            raise ValueError(
                f"{path}: expected int32 ids [Hkv, {sum(step.q_lens)}, K] in step {number}, got {list(step.ids.shape)} {step.ids.dtype} for "
                f"{len(step.q_lens)} and {len(step.seq_lens)} lengths"
            )
    return steps
