"""One small call of every public stage, by argument name, for tests that change one argument at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import m3attn

Q_HEADS, KV_HEADS, HEAD_DIM, TOPK, PAGE, BLOCK = 4, 2, 64, 2, 16, 16
Q_LENS, SEQ_LENS = (5, 1, 2), (40, 17, 2)
TOKENS = sum(Q_LENS)
PAGES = 8
NORM_DIM = 128
"""Head dim of qk_norm_rope_insert, the only one it takes."""


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed + sum(shape))
    x = torch.randn(shape, generator=gen)
    return x.to(dtype)


def make_batch(q_lens: tuple[int, ...] = Q_LENS, seq_lens: tuple[int, ...] = SEQ_LENS, **options: Any) -> m3attn.PagedBatch:
    width = max(-(-n // PAGE) for n in seq_lens) + 1
    table = (torch.arange(len(seq_lens) * width, dtype=torch.int32) * 3 % PAGES).view(len(seq_lens), width)
    return m3attn.PagedBatch.from_lengths(q_lens, seq_lens, table, **{"page_size": PAGE, "block_size": BLOCK, **options})


def make_cache(
    dtype: torch.dtype = torch.bfloat16, *, packed: bool = False, index: torch.dtype | None = None, dim: int = HEAD_DIM
) -> m3attn.LayerCache:
    index_k = normal(PAGES, PAGE, dim, dtype=index or dtype, seed=3)
    if packed:
        return m3attn.LayerCache(kv=normal(PAGES, KV_HEADS, PAGE, 2 * dim, dtype=dtype, seed=4), index_k=index_k)
    k, v = (normal(PAGES, KV_HEADS, PAGE, dim, dtype=dtype, seed=seed) for seed in (1, 2))
    return m3attn.LayerCache(k=k, v=v, index_k=index_k)


def make_ids() -> torch.Tensor:
    return m3attn.index_topk(normal(TOKENS, KV_HEADS, HEAD_DIM), make_cache(), make_batch(), topk=TOPK, impl="reference")


@dataclass
class StageCall:
    """A stage's function and the arguments of a call that works."""

    function: Callable[..., Any]
    arguments: dict[str, Any]

    def __call__(self, **changes: Any) -> Any:
        return self.function(**(self.arguments | changes))


def _qk_norm_rope_insert() -> StageCall:
    width = (Q_HEADS + 2 * KV_HEADS + KV_HEADS + 1) * NORM_DIM
    return StageCall(
        m3attn.qk_norm_rope_insert,
        {
            "qkv": normal(TOKENS, width),
            "weights": m3attn.NormWeights(*(normal(NORM_DIM, dtype=torch.float32, seed=s) for s in range(4))),
            "positions": torch.arange(TOKENS),
            "cos_sin": normal(64, 64, dtype=torch.float32),
            "cache": make_cache(dim=NORM_DIM, packed=True),
            "slots": torch.arange(TOKENS) * 2,
            "index_slots": torch.arange(TOKENS) * 3,
            "heads": (Q_HEADS, KV_HEADS, KV_HEADS),
            "q_out": normal(TOKENS, Q_HEADS, NORM_DIM),
            "index_q_out": normal(TOKENS, KV_HEADS, NORM_DIM),
        },
    )


def _index_score() -> StageCall:
    out = torch.full((KV_HEADS, TOKENS, 3), 7.0)
    return StageCall(m3attn.index_score, {"index_q": normal(TOKENS, KV_HEADS, HEAD_DIM), "cache": make_cache(), "batch": make_batch(), "out": out})


def _select_blocks() -> StageCall:
    out = torch.full((KV_HEADS, TOKENS, TOPK), 7, dtype=torch.int32)
    scores = normal(KV_HEADS, TOKENS, 3, dtype=torch.float32)
    return StageCall(m3attn.select_blocks, {"scores": scores, "batch": make_batch(), "topk": TOPK, "out": out})


def _index_topk() -> StageCall:
    arguments = _index_score().arguments | {"topk": TOPK, "out": torch.full((KV_HEADS, TOKENS, TOPK), 7, dtype=torch.int32)}
    return StageCall(m3attn.index_topk, arguments)


def _attention() -> dict[str, Any]:
    return {
        "q": normal(TOKENS, Q_HEADS, HEAD_DIM),
        "cache": make_cache(),
        "batch": make_batch(),
        "sink_key": normal(Q_HEADS, HEAD_DIM),
        "out": normal(TOKENS, Q_HEADS, HEAD_DIM, seed=9),
        "lse_out": torch.full((TOKENS, Q_HEADS), 7.0),
    }


def _merge() -> StageCall:
    out_a, out_b = normal(TOKENS, Q_HEADS, HEAD_DIM), normal(TOKENS, Q_HEADS, HEAD_DIM, seed=1)
    lse_a, lse_b = (normal(TOKENS, Q_HEADS, dtype=torch.float32, seed=s) for s in (2, 3))
    return StageCall(m3attn.merge_attention_states, {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b})


def _quantize() -> StageCall:
    out = torch.full((3, 5, 32), 7.0).to(torch.float8_e4m3fn)
    return StageCall(m3attn.quantize_fp8, {"x": normal(3, 5, 32), "out": out})


def _mla_rope_quantize() -> StageCall:
    arguments = {"q": normal(TOKENS, Q_HEADS, 48), "k_nope": normal(TOKENS, Q_HEADS, 32), "k_pe": normal(TOKENS, 1, 16)}
    arguments |= {"positions": torch.arange(TOKENS), "cos_sin": normal(64, 16, dtype=torch.float32)}
    return StageCall(m3attn.mla_rope_quantize, arguments)


def _mla_kv_pack_quantize() -> StageCall:
    arguments = {"k_nope": normal(TOKENS, Q_HEADS, 32), "k_pe": normal(TOKENS, 16), "v": normal(TOKENS, Q_HEADS, 32, seed=1)}
    return StageCall(m3attn.mla_kv_pack_quantize, arguments)


def _sparse_mla_prefill() -> StageCall:
    indices = (torch.arange(TOKENS * 6, dtype=torch.int32) % 9 - 1).view(TOKENS, 1, 6)
    outputs = {"out": normal(TOKENS, 2, 512), "max_logits": torch.zeros(TOKENS, 2), "lse": torch.zeros(TOKENS, 2)}
    inputs = {"q": normal(TOKENS, 2, 576), "kv": normal(8, 1, 576), "indices": indices, "attn_sink": torch.zeros(2)}
    return StageCall(m3attn.sparse_mla_prefill, {"sm_scale": 0.05, **inputs, **outputs})


def _mla_prefill() -> StageCall:
    offsets = torch.tensor([0, 3, TOKENS], dtype=torch.int32)
    inputs = {name: normal(TOKENS, Q_HEADS, HEAD_DIM, seed=seed) for seed, name in enumerate(("q", "k", "v"))}
    outputs = {"out": normal(TOKENS, Q_HEADS, HEAD_DIM, seed=9), "lse_out": torch.full((TOKENS, Q_HEADS), 7.0)}
    return StageCall(m3attn.mla_prefill, {**inputs, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets, **outputs})


BUILDERS: dict[str, Callable[[], StageCall]] = {
    "qk_norm_rope_insert": _qk_norm_rope_insert,
    "index_score": _index_score,
    "select_blocks": _select_blocks,
    "index_topk": _index_topk,
    "sparse_attention": lambda: StageCall(m3attn.sparse_attention, _attention() | {"ids": make_ids()}),
    "dense_attention": lambda: StageCall(m3attn.dense_attention, _attention()),
    "merge_attention_states": _merge,
    "quantize_fp8": _quantize,
    "mla_rope_quantize": _mla_rope_quantize,
    "mla_kv_pack_quantize": _mla_kv_pack_quantize,
    "mla_prefill": _mla_prefill,
    "sparse_mla_prefill": _sparse_mla_prefill,
}


def tensors_of(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor within an argument, a cache, a batch or a tuple, with its name."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (m3attn.LayerCache, m3attn.PagedBatch)):
        for field in value.__dataclass_fields__:
            yield from tensors_of(getattr(value, field), f"{name}.{field}")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_of(item, f"{name}.{key}")
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from tensors_of(item, f"{name}[{i}]")


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor's whole storage, so that what lies between and around its elements counts too."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),)).clone()


@contextmanager
def registered(stage: str, key: str, target: Callable[[Any], None], **options: Any) -> Iterator[None]:
    m3attn.register(stage, key, target, **options)
    try:
        yield
    finally:
        m3attn.unregister(stage, key)


def python(program: str, **env: str) -> str:
    """Run a program in a fresh interpreter and return what it printed, stderr after stdout."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("M3ATTN_") and k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**clean, "OMP_NUM_THREADS": "1", **env})
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr
