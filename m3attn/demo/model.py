"""A stack of M3 attention layers with random weights, written on the public stage functions.

There is no MLP and no training: a token is its byte and the few bytes before it, hashed into random vectors, so that equal passages of the
text have similar vectors. The index queries use the index key's projection, slightly disturbed for each head, so that a query scores blocks
that resemble what it has just read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

import m3attn
from m3attn.batch import LayerCache, PagedBatch
from m3attn.config import M3Config
from m3attn.demo.geometry import HEAD_DIM, Geometry
from m3attn.dtypes import E4M3, E5M2
from m3attn.layers.rope import rotary_table
from m3attn.rules import find_rule

DTYPE = torch.bfloat16
SUFFIXES = (1, 2, 4, 8)  # bytes that a token's vector looks back over
TABLE = 4096
DISTURBANCE = 0.3  # of an index head's projection against the shared one


@dataclass(frozen=True, slots=True)
class Formats:
    """Element types of what attention reads: the bf16 model's own, or fp8."""

    mode: str
    q: torch.dtype = DTYPE
    kv: torch.dtype = DTYPE
    index: torch.dtype = DTYPE
    fp8_pv: bool = False


FORMATS = {
    ("bf16", "bf16"): Formats("bf16"),
    ("widen", "fp8_e4m3"): Formats("widen", kv=E4M3),
    ("widen", "fp8_e5m2"): Formats("widen", kv=E5M2),
    ("fp8", "fp8_e4m3"): Formats("fp8", E4M3, E4M3, E4M3),
    ("fp8_pv", "fp8_e4m3"): Formats("fp8_pv", E4M3, E4M3, E4M3, fp8_pv=True),
}
"""(mode, KV cache) -> formats."""


class Observer(Protocol):
    """Runs a stage's call and takes note of it."""

    def stage(self, name: str, layer: int, inputs: dict[str, Any], call: Callable[[], torch.Tensor]) -> torch.Tensor: ...


@dataclass(frozen=True, eq=False)
class Layer:
    """Weights and cache of one layer; a dense layer has no index branch."""

    number: int
    sparse: bool
    projection: torch.Tensor  # [hidden, row width]
    output: torch.Tensor  # [Hq * D, hidden]
    norms: tuple[torch.Tensor, ...]
    cache: LayerCache


class Model:
    """Embedding, layers, caches and one page table of one request.

    Args:
        geometry, formats, device: what to build and where.
        rule: the selection rule.
        observer: runs every stage call.
        seed: of weights and page order; equal seeds give equal models.
    """

    def __init__(self, geometry: Geometry, formats: Formats, device: torch.device, observer: Observer, *, rule: str = "topk", seed: int = 0) -> None:
        self.geometry, self.formats, self.device, self.observer, self.rule = geometry, formats, device, observer, rule
        config = M3Config()
        generator = torch.Generator().manual_seed(seed)
        hidden = geometry.hidden
        self.tables = [self._random(generator, TABLE, hidden) for _ in SUFFIXES]
        self.pages = torch.randperm(geometry.num_pages, generator=generator).int().to(device)
        self.cos_sin = rotary_table(geometry.tokens, config.rotary_dim, config.rope_theta).to(device)
        count = geometry.dense_layers + geometry.sparse_layers
        self.layers = [self._layer(i, i >= geometry.dense_layers, generator) for i in range(count)]
        self.last_ids: list[torch.Tensor] = []  # of the last layer, [Hkv, T of a step, K]
        self.last_index_q: list[torch.Tensor] = []

    def _random(self, generator: torch.Generator, rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(self.device, DTYPE)

    def _layer(self, number: int, sparse: bool, generator: torch.Generator) -> Layer:
        geometry, heads = self.geometry, self.geometry.heads
        hidden, num_index = geometry.hidden, heads.num_kv if sparse else 0
        parts = [torch.randn(hidden, (heads.num_q + 2 * heads.num_kv) * HEAD_DIM, generator=generator)]
        if sparse:
            shared = torch.randn(hidden, HEAD_DIM, generator=generator)
            parts += [shared + DISTURBANCE * torch.randn(hidden, HEAD_DIM, generator=generator) for _ in range(num_index)] + [shared]
        return Layer(
            number=number,
            sparse=sparse,
            projection=(torch.cat(parts, dim=1) * hidden**-0.5).to(self.device, DTYPE),
            output=self._random(generator, heads.num_q * HEAD_DIM, hidden),
            norms=tuple(torch.zeros(HEAD_DIM, device=self.device) for _ in range(4 if sparse else 2)),
            cache=LayerCache(
                kv=self._pool((heads.num_kv, geometry.block_size, 2 * HEAD_DIM), self.formats.kv),
                index_k=self._pool((geometry.block_size, HEAD_DIM), self.formats.index) if sparse else None,
            ),
        )

    def _pool(self, page: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(self.geometry.num_pages, *page, dtype=dtype, device=self.device)

    def batch(self, begin: int, end: int) -> PagedBatch:
        """The step whose new tokens are [begin, end)."""
        size = self.geometry.block_size
        return PagedBatch.from_lengths([end - begin], [end], self.pages[None], page_size=size, block_size=size)

    def embed(self, content: bytes, begin: int, end: int) -> torch.Tensor:
        """[end - begin, hidden]: the sum of a random vector for each suffix of up to 8 bytes that ends at the token."""
        rows = [
            torch.tensor([suffix_hash(content[max(0, t + 1 - n) : t + 1]) % TABLE for t in range(begin, end)], device=self.device) for n in SUFFIXES
        ]
        return torch.stack([table[row] for table, row in zip(self.tables, rows, strict=True)]).sum(dim=0)

    def forward(self, content: bytes, begin: int, end: int, on_layer: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Run tokens [begin, end) of `content` through the stack; the tokens before them must have been run. Returns [end - begin, hidden]."""
        x = self.embed(content, begin, end)
        batch = self.batch(begin, end)
        for layer in self.layers:
            x = x + self._attention(layer, x, batch, begin, end)
            on_layer()
        return x

    def _attention(self, layer: Layer, x: torch.Tensor, batch: PagedBatch, begin: int, end: int) -> torch.Tensor:
        heads, tokens = self.geometry.heads, end - begin
        row = torch.nn.functional.rms_norm(x, x.shape[-1:]) @ layer.projection
        q, index_q = self._queries(layer, row, batch, begin, end)
        out = torch.empty(tokens, heads.num_q, HEAD_DIM, dtype=DTYPE, device=self.device)
        if layer.sparse:
            ids = self._select(layer, index_q, batch)
            inputs = {"q": q, "cache": layer.cache, "ids": ids, "batch": batch}

            def attend() -> torch.Tensor:
                m3attn.sparse_attention(q, layer.cache, ids, batch, fp8_pv=self.formats.fp8_pv, out=out)
                return out

            self.observer.stage("sparse_attention", layer.number, inputs, attend)
            if layer is self.layers[-1]:
                self.last_ids.append(ids)
                self.last_index_q.append(index_q)
        else:
            inputs = {"q": q, "cache": layer.cache, "batch": batch}

            def attend_all() -> torch.Tensor:
                m3attn.dense_attention(q, layer.cache, batch, fp8_pv=self.formats.fp8_pv, out=out)
                return out

            self.observer.stage("dense_attention", layer.number, inputs, attend_all)
        return out.reshape(tokens, -1) @ layer.output

    def _queries(self, layer: Layer, row: torch.Tensor, batch: PagedBatch, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalised, rotated q and index q; k, v and index k go to the cache."""
        heads, tokens, size = self.geometry.heads, end - begin, self.geometry.block_size
        positions = torch.arange(begin, end, device=self.device)
        slots = self.pages[positions // size].long() * size + positions % size
        num_index = heads.num_kv if layer.sparse else 0
        q_out = torch.empty(tokens, heads.num_q, HEAD_DIM, dtype=self.formats.q, device=self.device)
        index_q_out = torch.empty(tokens, num_index, HEAD_DIM, dtype=self.formats.index, device=self.device) if layer.sparse else None
        inputs = {"row": row, "weight": layer.norms[0], "positions": positions, "cos_sin": self.cos_sin, "num_q": heads.num_q, "batch": batch}

        def run() -> torch.Tensor:
            m3attn.qk_norm_rope_insert(
                row,
                layer.norms,
                positions,
                self.cos_sin,
                layer.cache,
                slots,
                slots if layer.sparse else None,
                heads=(heads.num_q, heads.num_kv, num_index),
                q_out=q_out,
                index_q_out=index_q_out,
            )
            return q_out

        self.observer.stage("qk_norm_rope_insert", layer.number, inputs, run)
        return q_out, q_out if index_q_out is None else index_q_out

    def _select(self, layer: Layer, index_q: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """ids [Hkv, T, K]: the fused stage for M3's own rule, else scores and then the rule."""
        topk = self.geometry.topk
        inputs = {"index_q": index_q, "cache": layer.cache, "batch": batch, "topk": topk, "rule": self.rule}
        if self.rule == "topk":
            return self.observer.stage("index_topk", layer.number, inputs, lambda: m3attn.index_topk(index_q, layer.cache, batch, topk=topk))
        scores = self.observer.stage("index_score", layer.number, inputs, lambda: m3attn.index_score(index_q, layer.cache, batch))
        inputs = inputs | {"scores": scores}
        return self.observer.stage("select_blocks", layer.number, inputs, lambda: find_rule(self.rule)(scores, batch, topk=topk))


def suffix_hash(content: bytes) -> int:
    """FNV-1a over the bytes: equal on every machine, unlike hash()."""
    value = 0x811C9DC5
    for byte in content:
        value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return value
