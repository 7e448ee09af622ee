"""What FlashInfer's kernels take, as reasons against a problem. Imports nothing of the package."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from functools import cache

from m3attn.problem import Problem

PACKAGE, RELEASE = "flashinfer-python", "0.7.4"
GROUP_SIZES, INDEX_HEADS = (4, 8, 16), (1, 2, 4)
FAULTY_GROUP_SIZES = (1, 2, 3, 5, 6, 10, 12)
"""Accepted there and measured wrong, without an error."""


@cache
def installed() -> str | None:
    """The release that is installed."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release_reasons() -> list[str]:
    found = installed()
    return [] if found == RELEASE else [f"needs the package {PACKAGE} {RELEASE}, {'which is not installed' if found is None else f'got {found}'}"]


def index_score_reasons(problem: Problem) -> Sequence[str]:
    """What capabilities cannot say of `index_score`."""
    found = _release_reasons()
    if problem.num_index_heads and problem.num_index_heads not in INDEX_HEADS:
        found.append(f"index heads {problem.num_index_heads}: takes 1, 2, 4")
    if problem.index_q_dtype != problem.index_dtype:
        found.append(f"index q {problem.index_q_dtype} over index K {problem.index_dtype}: takes equal formats")
    if problem.phase == "prefill" and problem.index_dtype == "bf16":
        found.append("index dtype bf16 in a prefill: takes fp8_e4m3")
    return found


def select_blocks_reasons(problem: Problem) -> Sequence[str]:
    """What capabilities cannot say of `select_blocks`."""
    return _release_reasons()


def sparse_attention_reasons(problem: Problem) -> Sequence[str]:
    """What capabilities cannot say of `sparse_attention`."""
    found, group = _release_reasons(), problem.group_size
    if group in FAULTY_GROUP_SIZES:
        found.append(f"group size {group}: wrong results without an error were measured; takes 4, 8, 16")
    elif group and group not in GROUP_SIZES:
        found.append(f"group size {group}: takes 4, 8, 16")
    return found
