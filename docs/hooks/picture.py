"""Draws docs/pictures/selection.svg, the picture of README.md: `python docs/hooks/picture.py`. Scores and choices are those of the demo's text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import m3attn
from m3attn.bench.shapes import Heads
from m3attn.demo import text
from m3attn.demo.geometry import Geometry
from m3attn.demo.model import FORMATS, Model
from m3attn.demo.plot import chosen_blocks
from m3attn.report.png import data_uri

TOKENS, BLOCK, TOPK, ROWS = 1024, 32, 8, 512
SIDE, GAP, LEFT, TOP = 340, 56, 46, 34
STYLE = """text { font: 13px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #57606a; } .title { fill: #1b1f24; }
.frame { fill: none; stroke: #d0d7de; }
@media (prefers-color-scheme: dark) { text { fill: #9ea7b3; } .title { fill: #e6edf3; } .frame { stroke: #30363d; } }"""


class Kept:
    """Keeps what the demo's model hands to a stage."""

    def __init__(self) -> None:
        self.inputs: dict[str, dict[str, Any]] = {}

    def stage(self, name: str, layer: int, inputs: dict[str, Any], call: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.inputs[name] = inputs
        return call()


def panels() -> tuple[torch.Tensor, torch.Tensor]:
    """Score and choice of each run of queries and block, [rows, blocks], 0 to 1."""
    kept = Kept()
    geometry = Geometry(Heads(4, 1), hidden=128, tokens=TOKENS, decode_steps=0, chunk=TOKENS, block_size=BLOCK, topk=TOPK, dense_layers=0)
    Model(geometry, FORMATS["bf16", "bf16"], torch.device("cpu"), kept).forward(text.load(None)[:TOKENS], 0, TOKENS)
    step, index_q = kept.inputs["sparse_attention"], kept.inputs["index_topk"]["index_q"]
    scores = m3attn.index_score(index_q, step["cache"], step["batch"])[0].unflatten(0, (ROWS, -1)).amax(dim=1)
    seen = scores.isfinite()
    low, high = scores[seen].quantile(torch.tensor([0.02, 0.97]))
    return torch.where(seen, ((scores - low) / (high - low)).clamp(0.04, 1), 0.0), chosen_blocks(step["ids"], TOKENS // BLOCK, ROWS)[0]


def main() -> None:
    """Write the picture."""
    score, chosen = panels()
    titles = ("1. score every block for every query", f"2. keep the {TOPK} best, and attend to those only")
    width, height = LEFT + 2 * SIDE + GAP + 8, TOP + SIDE + 34
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">', f"<style>{STYLE}</style>"]
    for number, (title, panel) in enumerate(zip(titles, (score, chosen), strict=True)):
        x = LEFT + number * (SIDE + GAP)
        data = data_uri(bytes((255 * panel).round().to(torch.uint8).flatten().tolist()), *panel.shape)
        parts.append(f'<text class="title" x="{x}" y="{TOP - 12}">{title}</text>')
        parts.append(
            f'<image x="{x}" y="{TOP}" width="{SIDE}" height="{SIDE}" preserveAspectRatio="none" style="image-rendering: pixelated" href="{data}"/>'
        )
        parts.append(f'<rect class="frame" x="{x}" y="{TOP}" width="{SIDE}" height="{SIDE}"/>')
        parts.append(f'<text x="{x + SIDE / 2}" y="{TOP + SIDE + 22}" text-anchor="middle">block of {BLOCK} keys</text>')
    parts.append(
        f'<text transform="translate({LEFT - 14} {TOP + SIDE / 2}) rotate(-90)" text-anchor="middle">query position, 0 to {TOKENS - 1}</text>'
    )
    parts.append("</svg>")
    path = Path(__file__).resolve().parents[1] / "pictures" / "selection.svg"
    path.write_text("\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
