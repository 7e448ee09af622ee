"""Which heads a rank of tensor parallelism holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from m3attn.config import M3Config
from m3attn.stages.qk_norm_rope_insert import HeadCounts


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of `size`. With a process group the layer sums its output over it; without one it returns this rank's part of the sum."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(f"shard: expected a rank from 0 to size - 1, got rank {self.rank} of {self.size}")
        if self.group is not None and (dist.get_rank(self.group), dist.get_world_size(self.group)) != (self.rank, self.size):
            where = f"{dist.get_rank(self.group)} of {dist.get_world_size(self.group)}"
            raise ValueError(f"shard: expected the group's rank {where}, got {self.rank} of {self.size}")

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> Shard:
        """This process's place in a group; None: the default group."""
        group = dist.group.WORLD if group is None else group
        return cls(dist.get_rank(group), dist.get_world_size(group), group)


@dataclass(frozen=True, slots=True)
class HeadRanges:
    """A rank's heads among the model's; `index` is empty in a dense layer. `own_index` are its KV groups' places among its index heads."""

    q: range
    kv: range
    index: range
    own_index: range

    @property
    def counts(self) -> HeadCounts:
        return HeadCounts(len(self.q), len(self.kv), len(self.index))


def head_ranges(config: M3Config, shard: Shard, *, sparse: bool, all_index_heads: bool = False) -> HeadRanges:
    """Query heads are split; KV heads and their index heads too, or replicated where there are more ranks than KV heads.

    Args:
        all_index_heads: keep every index head, for selection rules that look across heads.

    Raises:
        ValueError: heads that the ranks do not divide.
    """
    rank, size = shard.rank, shard.size
    if config.num_q_heads % size:
        raise ValueError(f"shard: expected a size that divides the {config.num_q_heads} query heads, got {size}")
    if config.num_kv_heads % size and size % config.num_kv_heads:
        raise ValueError(f"shard: expected a size that divides the {config.num_kv_heads} KV heads or is a multiple of them, got {size}")
    queries, keys = config.num_q_heads // size, max(1, config.num_kv_heads // size)
    first = rank * config.num_kv_heads // size
    kv = range(first, first + keys)
    index = range(config.num_index_heads) if all_index_heads else kv
    own = range(kv.start - index.start, kv.stop - index.start)
    none = range(0)
    return HeadRanges(range(rank * queries, (rank + 1) * queries), kv, index if sparse else none, own if sparse else none)
