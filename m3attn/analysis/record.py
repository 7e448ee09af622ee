"""`record(model)`: what the sparse layers of a model select, and on what scores, kept while a `with` is open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from m3attn.analysis.ids_file import RecordedStep, save_ids
from m3attn.analysis.measures import attention_mass, output_error
from m3attn.layers.sparse import M3SparseAttention
from m3attn.reference.paging import query_rows
from m3attn.stages.index_score import index_score


@dataclass(frozen=True, eq=False)
class Selection:
    """What one layer selected for the rows of one step (of one part of a split plan), padding rows left out.

    Attributes:
        ids: [Hkv, T, K] int32.
        scores: [Hi, T, blocks] fp32, -inf where no key is visible; None where the layer took another's ids, or scores were not asked for.
        positions: [T] int64, of each row in its request.
        requests: [T] int64, the caller's request of each row.
        block_size: positions of a block.
        mass, error: [T, Hq] fp32 of `attention_mass` and `output_error`, where asked for.
    """

    ids: torch.Tensor
    scores: torch.Tensor | None
    positions: torch.Tensor
    requests: torch.Tensor
    block_size: int
    mass: torch.Tensor | None = None
    error: torch.Tensor | None = None


@dataclass(eq=False)
class Recording:
    """Selections by layer, in the order of the steps. A layer is named as `named_modules` of the model does; a lone layer's name is empty."""

    layers: dict[str, list[Selection]] = field(default_factory=dict)

    def ids(self, layer: str, request: int = 0) -> torch.Tensor:
        """All ids that a layer chose for one request, [Hkv, tokens, K], ordered by position; a position that ran twice counts as it ran last."""
        return self._gather(layer, request, [selection.ids for selection in self._of(layer)])

    def scores(self, layer: str, request: int = 0) -> torch.Tensor:
        """Likewise the scores, [Hi, tokens, blocks] fp32, -inf in blocks that a step did not reach.

        Raises:
            ValueError: the layer has none.
        """
        found = [selection.scores for selection in self._of(layer)]
        if any(scores is None for scores in found):
            raise ValueError(f"scores: expected layer {layer!r} to have recorded scores, it has none")
        kept = [scores for scores in found if scores is not None]
        widest = max(scores.shape[2] for scores in kept)
        return self._gather(layer, request, [nn.functional.pad(s, (0, widest - s.shape[2]), value=float("-inf")) for s in kept])

    def save(self, path: Path | str) -> None:
        """Write the ids for `m3attn bench --ids` and `load_ids`."""
        save_ids(path, [step for layer in self.layers for step in self.steps(layer)])

    def steps(self, layer: str) -> list[RecordedStep]:
        """The recorded steps of a layer; a step's rows are ordered by request."""
        return [RecordedStep.of(layer, s.ids, s.positions, s.requests, s.block_size) for s in self._of(layer)]

    def _of(self, layer: str) -> list[Selection]:
        if layer not in self.layers:
            raise ValueError(f"layer: expected one of {', '.join(map(repr, self.layers)) or 'none, nothing was recorded'}, got {layer!r}")
        return self.layers[layer]

    def _gather(self, layer: str, request: int, parts: list[torch.Tensor]) -> torch.Tensor:
        found = [(s.positions[s.requests == request], part[:, s.requests == request]) for s, part in zip(self._of(layer), parts, strict=True)]
        if not any(len(positions) for positions, _ in found):
            raise ValueError(f"request: expected one that layer {layer!r} has run, got {request}")
        position, rows = torch.cat([positions for positions, _ in found]), torch.cat([part for _, part in found], dim=1)
        position, order = position.sort(stable=True)
        is_last = torch.cat([position[1:] != position[:-1], torch.ones_like(position[:1], dtype=torch.bool)])
        return rows[:, order[is_last]]


@contextmanager
def record(
    model: nn.Module, *, scores: bool = True, mass: bool = False, error: bool = False, device: torch.device | str | None = None
) -> Iterator[Recording]:
    """Keep what the sparse layers of `model` select, as long as the `with` is open.

    Runs the layers eagerly and reads lengths back to the host after each: not for CUDA graphs, compiled models or timing.

    Args:
        model: an `M3SparseAttention`, or a module that holds some.
        scores: keep block scores; costs a call of `index_score` a layer and step.
        mass, error: measure each selection against dense attention over the same cache, which costs that attention.
        device: where to keep what is recorded; None: where it is.

    Raises:
        ValueError: the model holds no `M3SparseAttention`.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, M3SparseAttention)}
    if not layers:
        raise ValueError(f"model: expected an M3SparseAttention or a module that holds some, got {type(model).__name__} without any")
    recording = Recording({name: [] for name in layers})
    try:
        for name, layer in layers.items():
            watch = _watched(layer, recording.layers[name], scores=scores, mass=mass, error=error, device=device)
            object.__setattr__(layer, "_attend", watch)
        yield recording
    finally:
        for layer in layers.values():
            layer.__dict__.pop("_attend", None)


def _watched(
    layer: M3SparseAttention, found: list[Selection], *, scores: bool, mass: bool, error: bool, device: torch.device | str | None
) -> Callable[..., None]:
    attend = layer._attend

    def watch(q: torch.Tensor, index_q: torch.Tensor | None, cache: Any, plan: Any, part: Any, rows: slice, out: torch.Tensor) -> None:
        attend(q, index_q, cache, plan, part, rows, out)
        request, position = query_rows(part.batch, q.shape[0])
        live = (position >= 0).nonzero()[:, 0]
        ids, scale = plan.ids[: layer.heads.kv, rows], layer.q_scale

        def keep(x: torch.Tensor) -> torch.Tensor:
            return x.to(device) if device is not None else x

        found.append(
            Selection(
                ids=keep(ids[:, live]),
                scores=keep(index_score(index_q, cache, part.index_batch, index_q_scale=layer.index_q_scale)[:, live])
                if scores and index_q is not None
                else None,
                positions=keep(position[live]),
                requests=keep(part.requests.long()[request[live]]),
                block_size=part.batch.block_size,
                mass=keep(attention_mass(q, cache, part.batch, ids, q_scale=scale)[live]) if mass else None,
                error=keep(output_error(q, cache, part.batch, ids, q_scale=scale)[live]) if error else None,
            )
        )

    return watch
