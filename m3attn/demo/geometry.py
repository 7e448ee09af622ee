"""How large the demo's model is, and how long it will take in the interpreter."""

from __future__ import annotations

from dataclasses import dataclass, replace

from m3attn.bench.shapes import Heads
from m3attn.demo.text import counted

HEAD_DIM = 128


@dataclass(frozen=True, slots=True)
class Geometry:
    """The demo's numbers.

    Attributes:
        heads: query and KV heads; one index head a KV head.
        hidden: width of the residual stream.
        tokens: bytes of the text that are used, decoded ones included.
        decode_steps: how many of them come one at a time.
        chunk: new tokens of a prefill step.
        block_size: positions of a block, and tokens of a page.
        topk: blocks a query keeps.
        dense_layers, sparse_layers: dense ones come first.
    """

    heads: Heads
    hidden: int
    tokens: int
    decode_steps: int
    chunk: int
    block_size: int
    topk: int
    dense_layers: int = 1
    sparse_layers: int = 1

    @property
    def num_pages(self) -> int:
        return -(-self.tokens // self.block_size)

    @property
    def prefill_tokens(self) -> int:
        return self.tokens - self.decode_steps

    def fit(self, num_bytes: int) -> Geometry:
        """As many tokens as a text of `num_bytes` bytes has; at most a quarter of them are decoded, and the first never is."""
        tokens = min(self.tokens, num_bytes)
        return replace(self, tokens=tokens, decode_steps=min(self.decode_steps, tokens // 4))

    def __str__(self) -> str:
        layers = f"{self.dense_layers} dense + {self.sparse_layers} sparse layers"
        heads = f"{self.heads} heads of {HEAD_DIM}"
        selection = f"blocks of {self.block_size}, K = {self.topk} of up to {self.num_pages}"
        steps = f"{counted(self.prefill_tokens, 'token')} prefilled by {self.chunk}, {self.decode_steps} decoded"
        return f"{layers}, {heads}, hidden {self.hidden}; {selection}; {steps}"


ON_CPU = Geometry(Heads(4, 1), hidden=128, tokens=1024, decode_steps=8, chunk=128, block_size=32, topk=8)
ON_GPU = Geometry(Heads(64, 4), hidden=2048, tokens=32768, decode_steps=16, chunk=8192, block_size=128, topk=16, sparse_layers=2)
REAL = Geometry(Heads(64, 4), hidden=6144, tokens=4096, decode_steps=4, chunk=512, block_size=128, topk=16)

# On one core of 2026: one tile of keys of one program in Triton's interpreter, eight heads normalised there, one operation of the reference.
INTERPRETER_TILE_SECONDS = 1e-2
INTERPRETER_NORM_SECONDS = 7e-3
REFERENCE_FLOPS = 5e9
TILE_KEYS = 64
TILE_ROWS = 128


def estimate_seconds(geometry: Geometry, *, interpreted: bool) -> float:
    """Roughly how long the demo takes on a CPU: tiles in the interpreter, or operations of the reference."""
    tokens, heads = geometry.tokens, geometry.heads
    visible = min(tokens / 2, geometry.topk * geometry.block_size)
    if not interpreted:
        pairs = tokens * tokens / 2
        dense = 4 * heads.num_q * HEAD_DIM * pairs * geometry.dense_layers
        sparse = (4 * heads.num_q * visible * tokens + 2 * heads.num_kv * pairs) * HEAD_DIM * geometry.sparse_layers
        return (dense + sparse) / REFERENCE_FLOPS
    group = heads.num_q // heads.num_kv
    dense_tiles = heads.num_kv * (tokens * group / TILE_ROWS) * (tokens / 2 / TILE_KEYS)
    index_tiles = heads.num_kv * (tokens / TILE_ROWS) * (tokens / 2 / geometry.block_size)
    sparse_tiles = heads.num_kv * tokens * visible / min(TILE_KEYS, geometry.block_size)
    tiles = dense_tiles * geometry.dense_layers + (index_tiles + sparse_tiles) * geometry.sparse_layers
    norms = tokens * (heads.num_q + 3 * heads.num_kv + 1) / 8 * (geometry.dense_layers + geometry.sparse_layers)
    return tiles * INTERPRETER_TILE_SECONDS + norms * INTERPRETER_NORM_SECONDS


def duration(seconds: float) -> str:
    """`40 s`, `12 min`, `3 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.0f} h"
