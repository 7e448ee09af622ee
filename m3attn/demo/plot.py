"""The picture: which blocks each query chose, a panel for each KV group."""

from __future__ import annotations

from pathlib import Path

import torch

MAX_ROWS = 1024


def chosen_blocks(ids: torch.Tensor, num_blocks: int, max_rows: int = MAX_ROWS) -> torch.Tensor:
    """[Hkv, rows, blocks] in 0 … 1 from ids [Hkv, T, K]: the share of a row's queries that chose the block; rows are runs of queries."""
    heads, tokens, _ = ids.shape
    picked = torch.zeros(heads, tokens, num_blocks + 1)
    picked.scatter_(2, torch.where(ids >= 0, ids, num_blocks).long(), 1.0)
    picked = picked[..., :num_blocks]
    run = -(-tokens // max_rows)
    sums = torch.nn.functional.pad(picked, (0, 0, 0, -tokens % run)).unflatten(1, (-1, run)).sum(dim=2)
    counts = torch.full((sums.shape[1], 1), float(run))
    counts[-1] = run - (-tokens % run)
    return sums / counts


def draw(ids: torch.Tensor, num_blocks: int, block_size: int, path: Path, *, title: str = "Blocks chosen by each query, last layer") -> None:
    """Write the picture of ids [Hkv, T, K] to `path`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: a file name matplotlib has no format for.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shares = chosen_blocks(ids.cpu(), num_blocks)
    heads, tokens = ids.shape[:2]
    figure = Figure(figsize=(4.2 * heads + 0.8, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, heads, squeeze=False, sharey=True)[0]
    for group, panel in enumerate(panels):
        panel.imshow(shares[group].numpy(), aspect="auto", interpolation="nearest", cmap="Blues", vmin=0, vmax=1, extent=(0, num_blocks, tokens, 0))
        panel.set_title(f"KV group {group}")
        panel.set_xlabel(f"block of {block_size} positions")
    panels[0].set_ylabel("query position")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
