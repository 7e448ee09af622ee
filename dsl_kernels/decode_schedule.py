"""How a decode or verify call is cut into tiles, pipeline steps and splits: from static shapes, by a model of the time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from m3attn.workspace import WorkShape

HEAD_DIM = 128
BLOCK = 128  # positions of a sparse block, and token slots of a page
MMA_ROWS = 16
MAX_TILE_ROWS = 128
MAX_SPLITS = 16
MULTIPROCESSORS = 132
MEMORY_BYTES_PER_US = 4.2e6  # what the whole GPU reads of its memory
MULTIPROCESSOR_BYTES_PER_US = 5e4  # and one multiprocessor at most,
TENSOR_BYTES_PER_US = 3e4  # whose tensor cores bound it where a tile has many rows
MERGE_US = 1.0  # a second launch, beside its traffic
PARTIAL_BYTES_PER_US = 3e6  # partials stay in L2


def power_of_2(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Schedule:
    """Tiles of `tokens` query tokens, each cut into `splits` runs of pipeline steps.

    Attributes:
        token_rows: rows of a token, its group padded to a power of two.
        key_warps: warps that share the keys of a step.
        step_keys: keys of a pipeline step.
        stages: steps in flight.
        tiles: tiles of all requests, for one KV head.
    """

    tokens: int
    token_rows: int
    key_warps: int
    step_keys: int
    stages: int
    tiles: int
    splits: int


settings_override: dict[str, int] = {}
"""Set by a tuner: tile_rows (at least 32), key_warps, step_keys, stages or splits of every launch."""


def schedule_for(
    *,
    max_seqlen_q: int,
    num_requests: int,
    num_q_heads: int,
    num_kv_heads: int,
    topk: int,
    num_blocks: int,
    kv_dtype: str,
    tokens: int,
    limit: int,
) -> Schedule:
    """The schedule of a call.

    Args:
        num_blocks: blocks of the longest request.
        kv_dtype: a name of `m3attn.dtypes`.
        tokens: query rows.
        limit: bytes that the splits' partials may take.
    """
    sizes = (max_seqlen_q, num_requests, num_q_heads, num_kv_heads, topk, num_blocks, kv_dtype, tokens, limit)
    return schedule_of(*sizes, tuple(settings_override.items()))


@lru_cache(maxsize=4096)
def schedule_of(
    max_seqlen_q: int,
    num_requests: int,
    num_q_heads: int,
    num_kv_heads: int,
    topk: int,
    num_blocks: int,
    kv_dtype: str,
    tokens: int,
    limit: int,
    override: tuple[tuple[str, int], ...],
) -> Schedule:
    """`schedule_for`, remembered; `override`: the items of `settings_override`."""
    group = power_of_2(num_q_heads // num_kv_heads)
    queries, forced = power_of_2(max(max_seqlen_q, 1)), dict(override)
    tile_tokens = min(queries, MAX_TILE_ROWS // group)
    # Where three quarters of the GPU would be left over: smaller tiles take each other's blocks from L2, and every step of theirs is shorter.
    few = 4 * num_requests * num_kv_heads * (queries // tile_tokens) < MULTIPROCESSORS
    tile_tokens = min(queries, forced.pop("tile_rows", MAX_TILE_ROWS // 2 if few else MAX_TILE_ROWS) // group)
    token_rows = max(group, MMA_ROWS // tile_tokens)
    row_warps = tile_tokens * token_rows // MMA_ROWS
    element_size = 1 if kv_dtype.startswith("fp8") else 2
    # Four consumer warps and half a multiprocessor's memory for a single token, else eight and all of it. Two CTAs of four leave a thread 168
    # registers, which e5m2 exceeds.
    small = row_warps == 1 and kv_dtype != "fp8_e5m2"
    key_warps = (4 if small else 8) // row_warps
    step_keys = 128 if element_size == 1 and row_warps <= 2 else 64
    stages = (96 if small else 192) * 1024 // (2 * step_keys * HEAD_DIM * element_size)
    forced_splits = forced.pop("splits", None)
    settings = {"key_warps": key_warps, "step_keys": step_keys, "stages": stages} | forced

    tiles = -(-max_seqlen_q // tile_tokens) * num_requests
    # Neighbouring drafts share most blocks: a token more brings about one and a half.
    blocks = min(tile_tokens * topk, topk + 3 * (tile_tokens - 1) // 2, max(num_blocks, 1))
    steps = blocks * (BLOCK // settings["step_keys"])
    step_bytes = 2 * settings["step_keys"] * HEAD_DIM * element_size
    slots = MULTIPROCESSORS * (2 if small else 1)
    rate = MULTIPROCESSOR_BYTES_PER_US if row_warps <= 4 else TENSOR_BYTES_PER_US

    def cost(splits: int) -> float:
        """Microseconds, roughly: bound by the memory, or by the multiprocessors that have work."""
        ctas, longest = tiles * num_kv_heads * splits, -(-steps // splits) * step_bytes
        waves, rest = divmod(ctas, slots)
        on_one = waves * slots // MULTIPROCESSORS + -(-rest // MULTIPROCESSORS)
        load = max(ctas * longest / MEMORY_BYTES_PER_US, on_one * longest / rate)
        return load if splits == 1 else load + MERGE_US + 2 * partial_bytes(splits, tokens, num_q_heads) / PARTIAL_BYTES_PER_US

    fitting = [s for s in range(1, min(MAX_SPLITS, steps) + 1) if partial_bytes(s, tokens, num_q_heads) <= limit]
    return Schedule(tile_tokens, token_rows, **settings, tiles=tiles, splits=forced_splits or min(fitting, key=cost))


def partial_bytes(splits: int, tokens: int, num_q_heads: int) -> int:
    """Scratch of the splits' partials: fp32 outputs and LSEs; none for one split."""
    return 0 if splits == 1 else splits * tokens * num_q_heads * (HEAD_DIM + 1) * 4


def decode_workspace_bytes(shape: WorkShape) -> int:
    """Scratch of a decode or verify call: the splits' partials, splits * T * Hq * (4 D + 4)."""
    if shape.tokens == 0 or shape.num_requests == 0:
        return 0
    return _most_partial_bytes(shape, tuple(settings_override.items()))


@lru_cache(maxsize=4096)
def _most_partial_bytes(shape: WorkShape, override: tuple[tuple[str, int], ...]) -> int:
    """Of any cache's dtype; remembered, because a call asks for it each time."""
    sizes = (shape.max_seqlen_q, shape.num_requests, shape.num_q_heads, shape.num_kv_heads, shape.topk, shape.num_blocks)
    schedules = (schedule_of(*sizes, kv_dtype, shape.tokens, shape.limit, override) for kv_dtype in ("bf16", "fp8_e4m3", "fp8_e5m2"))
    return max(partial_bytes(schedule.splits, shape.tokens, shape.num_q_heads) for schedule in schedules)
