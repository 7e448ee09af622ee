"""A small model's pools, and random bytes in them."""

from __future__ import annotations

from typing import Any

import torch

from m3attn import M3Config, PagedKVPool

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONFIG = M3Config(
    num_q_heads=4,
    num_kv_heads=2,
    num_index_heads=2,
    head_dim=16,
    index_dim=16,
    rotary_dim=8,
    block_size=16,
    sparse_layers=(False, True, False, True),
)
PAGE_SIZE = 8
BACKENDS = ("plain", "triton")
DTYPES = [("auto", "auto"), ("fp16", "fp8_e4m3"), ("fp8_e4m3", "auto"), ("fp8_e5m2", "fp8_e4m3"), ("fp8_e4m3", "fp8_e4m3")]


def make_pool(**options: Any) -> PagedKVPool:
    return PagedKVPool(CONFIG, **({"num_pages": 6, "page_size": PAGE_SIZE, "device": DEVICE} | options))


def randomise(pool: PagedKVPool, seed: int = 0) -> None:
    """Any bytes at all: copies of pages must keep NaN payloads too."""
    generator = torch.Generator().manual_seed(seed)
    for part in pool.parts:
        data = part.storage.view(torch.uint8)
        data.copy_(torch.randint(0, 256, data.shape, dtype=torch.uint8, generator=generator))


def contents(pool: PagedKVPool) -> dict[str, torch.Tensor]:
    """Every part as bytes [layers, pages, bytes], copied."""
    return {part.name: part.storage.view(torch.uint8).flatten(2).clone() for part in pool.parts}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
