"""Named shapes: the steps a stage is timed on, with the weights that make one figure of a grid."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Heads:
    """Query and KV heads of one rank; M3 has one index head a KV head."""

    num_q: int
    num_kv: int

    @classmethod
    def parse(cls, text: str) -> Heads:
        """`64/4` -> Heads(64, 4). Raises ValueError for another form or query heads that are not a multiple of the KV heads."""
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if not match or int(match[2]) < 1 or int(match[1]) < 1 or int(match[1]) % int(match[2]):
            raise ValueError(f"heads: expected Hq/Hkv with Hq a multiple of Hkv, such as 64/4, got {text!r}")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.num_q}/{self.num_kv}"


@dataclass(frozen=True, slots=True)
class Step:
    """`batch` requests, each with `q_len` new tokens and `seq_len` tokens in the cache, the new ones included."""

    batch: int
    q_len: int
    seq_len: int
    weight: float = 1.0

    @property
    def tokens(self) -> int:
        return self.batch * self.q_len

    @property
    def prefix(self) -> int:
        return self.seq_len - self.q_len


@dataclass(frozen=True, slots=True)
class Shape:
    """One row of a result table. `replay`: timed in a CUDA graph, as decode runs in practice; otherwise eagerly."""

    name: str
    steps: tuple[Step, ...]
    replay: bool = False


PREFILL = {
    "P1": Step(1, 8192, 8192),
    "P2": Step(1, 32768, 32768),
    "P3": Step(1, 8192, 8192 + 122880),
}

# MiniMax's published production prefill strata (MSA repository), batch 1: new tokens, tokens in the cache, weight.
PRODUCTION = (
    (171, 55339, 1325),
    (338, 74578, 1418),
    (347, 131547, 312),
    (182, 17718, 611),
    (9844, 48884, 110),
    (10295, 85815, 103),
    (8476, 153884, 14),
    (8897, 25537, 47),
    (1404, 46844, 492),
    (1626, 93146, 565),
    (1649, 135537, 180),
    (1623, 18007, 388),
    (16384, 47744, 2477),
    (16384, 84480, 1347),
    (16384, 173824, 35),
    (16384, 27136, 1010),
)

# MSA's speculative-decoding grid: weights by length (tokens in the cache) for each of VERIFY_BATCHES.
VERIFY_Q_LEN = 8
VERIFY_BATCHES = (8, 32, 64, 128)
VERIFY_WEIGHTS = {
    1000: (30, 90, 180, 300),
    4000: (40, 120, 240, 400),
    5000: (50, 150, 300, 500),
    10000: (140, 350, 490, 420),
    50000: (500, 800, 500, 200),
    100000: (1260, 980, 420, 140),
    200000: (910, 350, 112, 28),
}

DECODE = ((1, 131072), (16, 32768), (64, 32768), (64, 131072), (128, 8192))

NAMED = (*PREFILL, "prod", "verify", "decode")


def step_shapes(name: str) -> list[Shape]:
    """The shapes behind a name: `decode` is five rows, every other name one.

    Besides the names: `B64xL32768` (decode of 64 requests) and `8192x131072` (8,192 new tokens of 131,072, one request).

    Raises:
        ValueError: an unknown name, or more new tokens than tokens.
    """
    if name in PREFILL:
        return [Shape(name, (PREFILL[name],))]
    if name == "prod":
        return [Shape(name, tuple(Step(1, new, total, weight) for new, total, weight in PRODUCTION))]
    if name == "verify":
        steps = (
            Step(batch, VERIFY_Q_LEN, length, weight)
            for length, weights in VERIFY_WEIGHTS.items()
            for batch, weight in zip(VERIFY_BATCHES, weights, strict=True)
        )
        return [Shape(name, tuple(steps), replay=True)]
    if name == "decode":
        return [shape for batch, length in DECODE for shape in step_shapes(f"B{batch}xL{length}")]
    if match := re.fullmatch(r"B(\d+)xL(\d+)", name):
        step = Step(int(match[1]), 1, int(match[2]))
    elif match := re.fullmatch(r"(\d+)x(\d+)", name):
        step = Step(1, int(match[1]), int(match[2]))
    else:
        raise ValueError(f"shape: expected one of {', '.join(NAMED)}, B64xL32768 or 8192x131072, got {name!r}")
    if step.batch < 1 or not 1 <= step.q_len <= step.seq_len:
        raise ValueError(f"shape: expected at least one request and 1 <= new tokens <= tokens, got {name!r}")
    return [Shape(name, (step,), replay=name.startswith("B"))]


def sizes(name: str) -> tuple[int, ...]:
    """`8192x128` -> (8192, 128). Raises ValueError for another form."""
    if not re.fullmatch(r"\d+(x\d+)*", name) or 0 in (values := tuple(int(n) for n in name.split("x"))):
        raise ValueError(f"shape: expected sizes above 0 joined by x, such as 8192x128, got {name!r}")
    return values
