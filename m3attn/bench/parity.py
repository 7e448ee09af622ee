"""The gate before the stopwatch: sampled query rows against the fp64 reference, and exact ids.

A sampled row becomes a request of its own with one query, so that the reference does the work of a few rows, whatever the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from m3attn.batch import LayerCache, PagedBatch
from m3attn.reference import dense, index, sparse
from m3attn.reference.paging import query_rows
from m3attn.scales import ScaleLike
from m3attn.testing.bounds import FP32_ERROR, HOPPER_E4M3_PRODUCT_ERROR

# Half the spacing of the format at 1: the most one rounding moves a value, as a fraction of it. About 0.4 of it in the root mean square.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20, torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}

# Largest error of an index score as a fraction of |q| |k|, by whether both are e4m3: twice what is allowed of sum |q||k|.
SCORE_BOUND = {False: 2 * FP32_ERROR, True: 2 * HOPPER_E4M3_PRODUCT_ERROR}
MAX_NORM_PAGES = 1024


@dataclass(frozen=True, slots=True)
class Parity:
    """Outcome of a check: `error` and its `bound` (relative root mean square for values, the count of wrong rows for ids).

    near_ties: exchanged blocks whose fp64 scores differ by less than twice the score bound, which are allowed and counted.
    """

    error: float
    bound: float
    near_ties: int = 0
    rows: int = 0

    @property
    def passed(self) -> bool:
        return self.error <= self.bound

    def __str__(self) -> str:
        return f"error {self.error:.3g}, bound {self.bound:.3g}, {self.rows} rows sampled, {self.near_ties} near ties"


def sample_rows(num_rows: int, count: int, *, seed: int = 0) -> torch.Tensor:
    """At most `count` distinct rows of [0, num_rows) as int64, ascending, the first and the last among them."""
    if num_rows <= count:
        return torch.arange(num_rows)
    inner = torch.randperm(num_rows - 2, generator=torch.Generator().manual_seed(seed))[: max(0, count - 2)] + 1
    return torch.cat([torch.tensor([0, num_rows - 1]), inner]).sort().values


@dataclass(frozen=True, eq=False)
class SampledRows:
    """Query rows `rows` of a step, and the batch in which each is a request with one query."""

    rows: torch.Tensor  # [N] int64
    batch: PagedBatch

    @classmethod
    def of(cls, batch: PagedBatch, rows: torch.Tensor) -> SampledRows:
        """Sample a batch; reads positions back to the host."""
        rows = rows.to(batch.seq_lens.device)
        request, position = query_rows(batch, int(rows.max()) + 1)
        request, position = request[rows], position[rows].clamp(min=-1)
        alone = replace(
            batch,
            page_table=batch.page_table[request],
            seq_lens=(position + 1).int(),
            cu_seqlens_q=torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device),
            max_seqlen_q=1,
        )
        return cls(rows, alone)

    def index_scores(self, index_q: torch.Tensor, cache: LayerCache, index_q_scale: ScaleLike = None) -> torch.Tensor:
        """fp64 scores [Hi, N, blocks]."""
        return index.index_score(
            index_q[self.rows],
            cache.index_key(),
            self.batch,
            index_q_scale=index_q_scale,
            index_k_scale=cache.index_k_scale,
            dtype=torch.float64,
        )

    def score_bound(self, index_q: torch.Tensor, cache: LayerCache, index_q_scale: ScaleLike = None) -> torch.Tensor:
        """The largest error of each score, [Hi, N, 1] fp64: a fraction of |q| times the largest |k| among the sampled requests' keys."""
        eight_bit = index_q.dtype.itemsize == 1 and cache.index_key().dtype.itemsize == 1
        q_norm = index_q[self.rows].double().norm(dim=-1).t()[..., None]
        keys = cache.index_key()
        pages = self.batch.page_table[:, : -(-self.batch.max_seqlen_k // self.batch.page_size)].unique().long()[:MAX_NORM_PAGES]
        sampled = keys.view(torch.uint8)[pages.clamp(0, keys.shape[0] - 1)].view(keys.dtype)
        k_norm = sampled.float().norm(dim=-1).nan_to_num(0.0).amax().item()
        scale_q = index_q_scale if isinstance(index_q_scale, float) else 1.0
        scale_k = cache.index_k_scale if isinstance(cache.index_k_scale, float) else 1.0
        return q_norm * k_norm * scale_q * scale_k * SCORE_BOUND[eight_bit]

    def sparse_attention(
        self, q: torch.Tensor, cache: LayerCache, ids: torch.Tensor, *, sm_scale: float | None = None, q_scale: ScaleLike = None
    ) -> torch.Tensor:
        """fp64 outputs [N, Hq, D]."""
        k, v = cache.key_value()
        out, _ = sparse.sparse_attention(
            q[self.rows],
            k,
            v,
            ids[:, self.rows],
            self.batch,
            sm_scale=sm_scale,
            q_scale=q_scale,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            dtype=torch.float64,
        )
        return out

    def dense_attention(self, q: torch.Tensor, cache: LayerCache, *, sm_scale: float | None = None, q_scale: ScaleLike = None) -> torch.Tensor:
        """fp64 outputs [N, Hq, D]."""
        k, v = cache.key_value()
        out, _ = dense.dense_attention(
            q[self.rows],
            k,
            v,
            self.batch,
            sm_scale=sm_scale,
            q_scale=q_scale,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            dtype=torch.float64,
        )
        return out


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of got - expected over that of expected; inf where a value is not finite or shapes differ."""
    if got.shape != expected.shape or not bool(got.isfinite().all()):
        return float("inf")
    difference = (got.double() - expected).square().mean().sqrt().item()
    return difference / max(expected.square().mean().sqrt().item(), 1e-300)


def attention_bound(mode: str) -> float:
    """Relative error (root mean square) that attention may have in a mode: one rounding of P and one of the output, each at its worst."""
    if mode == "fp8_pv":
        return ROUNDING[torch.float8_e4m3fn]
    # fp8 products of Q and K move a logit by up to 2^-12 of sum |q||k|, below what rounding P to 16 bits does.
    roundings = 3 if mode == "fp8" else 2
    return roundings * ROUNDING[torch.float16 if mode == "fp16" else torch.bfloat16]


def check_attention(got: torch.Tensor, expected: torch.Tensor, mode: str) -> Parity:
    """`got` [N, Hq, D] of an implementation against the reference's."""
    return Parity(relative_error(got, expected), attention_bound(mode), rows=got.shape[0])


def check_scores(got: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> Parity:
    """Scores [Hi, N, blocks]: -inf in the same places, and every other score within its bound. `error` is the worst share of the bound."""
    hidden = expected == float("-inf")
    if got.shape != expected.shape or not torch.equal(got == float("-inf"), hidden) or bool(got.isnan().any()):
        return Parity(float("inf"), 1.0, rows=expected.shape[1])
    share = ((got.double() - expected).abs() / bound.clamp(min=1e-300)).masked_fill(hidden, 0.0)
    return Parity(share.amax().item(), 1.0, rows=expected.shape[1])


def check_ids(got: torch.Tensor, expected: torch.Tensor, scores: torch.Tensor | None = None, bound: torch.Tensor | None = None) -> Parity:
    """ids [H, N, K] against the reference's: equal, but for exchanges of blocks whose fp64 scores differ by less than twice their bound.

    The last valid id of a row is its own block, which is always kept and never exchanged.

    Args:
        scores, bound: fp64 [H, N, blocks] and [H, N, 1]; None: no exchange is allowed, since ids are an exact function of scores.

    Returns:
        error: rows that differ otherwise; near_ties: allowed exchanges.
    """
    rows = expected.shape[1]
    if got.shape != expected.shape:
        return Parity(float(expected.shape[0] * rows), 0.0, rows=rows)
    differs = (got != expected).any(dim=-1).nonzero().tolist()
    wrong, near_ties = 0, 0
    for head, row in differs:
        mine, theirs = set(got[head, row].tolist()), set(expected[head, row].tolist())
        extra, missing = sorted(mine - theirs), sorted(theirs - mine)
        ordered = [i for i in got[head, row].tolist() if i >= 0]
        well_formed = ordered == sorted(set(ordered)) and len(extra) == len(missing) > 0 and -1 not in extra + missing and max(theirs) in mine
        if scores is None or bound is None or not well_formed or max(extra) >= scores.shape[-1]:
            wrong += 1
            continue
        gap = (scores[head, row, missing].amax() - scores[head, row, extra].amin()).item()
        if gap < 2 * bound[head, row, 0].item():
            near_ties += len(extra)
        else:
            wrong += 1
    return Parity(float(wrong), 0.0, near_ties, rows)


def worst(parities: Sequence[Parity]) -> Parity:
    """The check nearest to failing, or furthest beyond, with all near ties and rows counted."""
    if not parities:
        return Parity(0.0, 0.0)
    worst_one = max(parities, key=lambda p: (not p.passed, p.error / p.bound if p.bound else p.error))
    return replace(worst_one, near_ties=sum(p.near_ties for p in parities), rows=sum(p.rows for p in parities))
