"""How a decode or verify call is cut into tiles, pipeline steps and splits: from static shapes, by a model of the time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache

from m3attn.workspace import WorkShape

HEAD_DIM = 128
BLOCK = 128  # positions of a sparse block, and token slots of a page
MMA_ROWS = 16
TILE_ROWS = (128, 64, 32)  # of several tokens; the first at most
MAX_SPLITS = 16
MULTIPROCESSORS = 132
MEMORY_BYTES_PER_US = 4e6  # what the whole GPU reads of its memory
LOAD_BYTES_PER_US = 1.1e5  # what one multiprocessor gets of L2 and memory
ROW_KEY_US = 2e-4  # of a multiprocessor, for the products of one row with one key and their exponential
WIDENED_ROW_KEY_US = 2.4e-4  # with an fp8 key, which each warp widens for itself
WAVE_US = 0.7  # from one wave of CTAs to the next
MERGE_US = 1.0  # a second launch, beside its traffic
PARTIAL_BYTES_PER_US = 0.8e6  # written, read, and joined


def power_of_2(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Tile:
    """`tokens` query tokens of a request, for one KV head.

    Attributes:
        token_rows: rows of a token, its group padded to a power of two.
        key_warps: warps that share the keys of a step.
        step_keys: keys of a pipeline step.
        stages: steps in flight.
    """

    tokens: int
    token_rows: int
    key_warps: int
    step_keys: int
    stages: int

    @property
    def row_warps(self) -> int:
        return self.tokens * self.token_rows // MMA_ROWS

    @property
    def ctas(self) -> int:
        """That share a multiprocessor."""
        return 2 if self.row_warps * self.key_warps == 4 else 1


@dataclass(frozen=True, slots=True)
class Schedule(Tile):
    """`tiles` of all requests, for one KV head, each cut into `splits` runs of pipeline steps."""

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
    group, queries, forced = power_of_2(num_q_heads // num_kv_heads), power_of_2(max(max_seqlen_q, 1)), dict(override)
    tile_rows, forced_splits = forced.pop("tile_rows", None), forced.pop("splits", None)
    in_memory = num_requests * num_kv_heads * _union(queries, topk, num_blocks) * BLOCK * _key_bytes(kv_dtype)

    def time_us(tile: Tile, tiles: int, splits: int) -> float:
        """From the first load to the last output: bound by the memory, or by the multiprocessors that have work."""
        union = _union(tile.tokens, topk, num_blocks)
        keys = -(-union * (BLOCK // tile.step_keys) // splits) * tile.step_keys  # of one CTA; a row multiplies with those that its token selected
        row_keys = tile.tokens * tile.token_rows * keys * min(topk, num_blocks) / union
        cta = keys * _key_bytes(kv_dtype) / LOAD_BYTES_PER_US + row_keys * (WIDENED_ROW_KEY_US if kv_dtype.startswith("fp8") else ROW_KEY_US)
        waves, rest = divmod(tiles * num_kv_heads * splits, MULTIPROCESSORS * tile.ctas)
        load = max(in_memory / MEMORY_BYTES_PER_US, cta * (waves * tile.ctas + -(-rest // MULTIPROCESSORS)))
        merge = MERGE_US + partial_bytes(splits, tokens, num_q_heads) / PARTIAL_BYTES_PER_US if splits > 1 else 0.0
        return load + WAVE_US * (waves + (rest > 0)) + merge

    cuts: list[tuple[Tile, int, int]] = []
    for tile_tokens in dict.fromkeys(min(queries, max(rows // group, 1)) for rows in ((tile_rows,) if tile_rows else TILE_ROWS)):
        tiles = -(-max_seqlen_q // tile_tokens) * num_requests
        tile = _tile(tile_tokens, group, kv_dtype, False, forced)
        steps = _union(tile_tokens, topk, num_blocks) * (BLOCK // tile.step_keys)
        fitting = [s for s in range(1, min(MAX_SPLITS, steps) + 1) if partial_bytes(s, tokens, num_q_heads) <= limit]
        for splits in [forced_splits] if forced_splits else fitting:
            is_alone = splits == 1 and tiles * num_kv_heads <= MULTIPROCESSORS
            cuts.append((_tile(tile_tokens, group, kv_dtype, is_alone, forced), tiles, splits))
    tile, tiles, splits = min(cuts, key=lambda cut: time_us(*cut))
    return Schedule(**asdict(tile), tiles=tiles, splits=splits)


def _tile(tokens: int, group: int, kv_dtype: str, is_alone: bool, forced: dict[str, int]) -> Tile:
    """Four consumer warps and half a multiprocessor's memory for 16 rows, else eight and all of it.

    Eight for 16 rows too where a tile is alone on its multiprocessor and reads all of its blocks, in 16 bit; and for e5m2: two CTAs of four warps
    leave a thread 168 registers, which it exceeds.
    """
    token_rows = max(group, MMA_ROWS // tokens)
    row_warps = tokens * token_rows // MMA_ROWS
    is_fp8 = kv_dtype.startswith("fp8")
    small = row_warps == 1 and kv_dtype != "fp8_e5m2" and (is_fp8 or not is_alone)
    key_warps = (4 if small else 8) // row_warps
    settings = {"key_warps": key_warps, "step_keys": 128 if key_warps == 8 or (is_fp8 and row_warps <= 2) else 64}
    settings["stages"] = (96 if small else 192) * 1024 // (settings["step_keys"] * _key_bytes(kv_dtype))
    return Tile(tokens, token_rows, **(settings | forced))


def _union(tokens: int, topk: int, num_blocks: int) -> int:
    """Distinct blocks of neighbouring tokens, which share most: each brings about two that those before it did not select."""
    return min(tokens * topk, topk + 2 * (tokens - 1), max(num_blocks, 1))


def _key_bytes(kv_dtype: str) -> int:
    """Of a key and its value."""
    return 2 * HEAD_DIM * (1 if kv_dtype.startswith("fp8") else 2)


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
