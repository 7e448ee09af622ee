"""Result files: a list of rows in JSON, one file a GPU and stage, all rows of a file from one commit."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from m3attn.bench.ceilings import Ceilings
from m3attn.version import __version__

Row = dict[str, Any]

KEY = ("stage", "implementation", "heads", "shape", "mode", "selection")


def key(row: Row) -> tuple[Any, ...]:
    """What makes a row the same measurement as another."""
    return tuple(row[name] for name in KEY)


def gpu_slug(gpu: str) -> str:
    """`NVIDIA H200` -> `nvidia-h200`, for file names."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def checkout() -> Path | None:
    """The root of the source checkout this package runs from, or None for an installed copy."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "pyproject.toml").is_file() else None


def default_folder() -> Path:
    """`results/` of the checkout, else of the current folder."""
    return (checkout() or Path.cwd()) / "results"


def commit() -> str:
    """The checkout's commit, with `+` when tracked files differ from it; M3ATTN_COMMIT where there is no repository; else `unknown`."""
    if override := os.environ.get("M3ATTN_COMMIT"):
        return override
    root = checkout()
    if root is None:
        return "unknown"
    try:
        head = _git(root, "rev-parse", "HEAD")
        return head + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True).stdout.strip()


def versions() -> dict[str, str]:
    """Versions that decide a kernel's speed; a package that is not installed is left out."""
    found = {"m3attn": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "nvidia-cutlass-dsl", "flash-attn-4"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def write(path: Path, content: Any) -> None:
    """Write JSON whole or not at all, so that a run that is cut short leaves a readable file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, suffix=".tmp") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)


def read(path: Path) -> list[Row]:
    """The rows of a result file.

    Raises:
        ValueError: not a list of rows with the fields of `KEY`.
    """
    rows = json.loads(path.read_text())
    if not isinstance(rows, list) or any(not isinstance(row, dict) or any(name not in row for name in KEY) for row in rows):
        raise ValueError(f"{path}: expected a list of rows with {', '.join(KEY)}")
    return rows


def merge(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """`new` over `old`: a row measured again replaces its older self, and rows of another commit than the newest go."""
    new = list(new)
    if not new:
        return list(old)
    newest = new[-1]["commit"]
    merged = {key(row): row for row in [*old, *new] if row["commit"] == newest}
    return sorted(merged.values(), key=lambda row: tuple("" if part is None else str(part) for part in key(row)))


def update(folder: Path, rows: Sequence[Row], ceilings: Ceilings | None = None) -> list[Path]:
    """Merge rows into `<gpu>-<stage>.json` of `folder`, and the ceilings into `ceilings-<gpu>.json`; returns the files written."""
    written = []
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["gpu"], row["stage"]), []).append(row)
    for (gpu, stage), group in groups.items():
        path = folder / f"{gpu_slug(gpu)}-{stage}.json"
        write(path, merge(read(path) if path.exists() else [], group))
        written.append(path)
    if ceilings is not None and rows:
        first = rows[0]
        path = folder / f"ceilings-{gpu_slug(first['gpu'])}.json"
        write(path, {"gpu": first["gpu"], "commit": first["commit"], "versions": first["versions"], **ceilings.as_dict()})
        written.append(path)
    return written
