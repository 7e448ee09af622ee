"""Block selections for timing sparse attention.

R (random): each token takes its own block and uniformly random older ones. N (neighbour-correlated): a block's preference, one for
every KV head, follows an AR(1) process along the tokens, so that neighbouring tokens pick mostly the same blocks: four tokens pick about
22 distinct blocks out of 64 picks, the overlap publicly reported for MiniMax-M3. Real traffic lies nearer N; a kernel must be good at both.
"""

from __future__ import annotations

import math

import torch

from m3attn.bench.shapes import Step

KINDS = ("N", "R")

# (visible blocks, AR(1) coefficient) at which four neighbours pick 22 distinct blocks with K = 16.
OVERLAP_COEFFICIENT = ((64, 0.9018), (256, 0.9731), (1024, 0.98642))


def coefficient(num_blocks: int) -> float:
    """The AR(1) coefficient of N, linear in log2 of the visible blocks between the table's points and constant outside."""
    x = math.log2(num_blocks)
    (x0, r0), *rest = ((math.log2(n), r) for n, r in OVERLAP_COEFFICIENT)
    for x1, r1 in rest:
        if x <= x1:
            return r0 + (r1 - r0) * max(x - x0, 0.0) / (x1 - x0)
        x0, r0 = x1, r1
    return r0


def correlated(tokens: int, lanes: int, rho: float, generator: torch.Generator) -> torch.Tensor:
    """[tokens, lanes] fp32 on the generator's device: unit-variance AR(1) along tokens, x[t] = rho * x[t-1] + sqrt(1 - rho^2) * noise[t].

    The recurrence is summed by doubling: after the pass with stride s each row holds the 2 * s newest terms of its sum.
    """
    x = torch.randn(tokens, lanes, device=generator.device, generator=generator)
    x[1:] *= math.sqrt(1.0 - rho * rho)
    stride = 1
    while stride < tokens and rho**stride > 1e-7:
        x[stride:] += rho**stride * x[:-stride].clone()
        stride *= 2
    return x


def select(step: Step, kind: str, *, num_kv_heads: int, generator: torch.Generator, topk: int = 16, block_size: int = 128) -> torch.Tensor:
    """ids [Hkv, T, K] int32, ascending, -1 at the tail; every token's own block is among them.

    Args:
        step: the requests; every request and KV head draws on its own.
        kind: `N` or `R`.
        generator: decides the device and the draw.
    """
    device = generator.device
    num_blocks = -(-step.seq_len // block_size)
    lanes = step.batch * num_kv_heads
    if kind == "N":
        preference = correlated(step.q_len, lanes * num_blocks, coefficient(num_blocks), generator)
    elif kind == "R":
        preference = torch.rand(step.q_len, lanes * num_blocks, device=device, generator=generator)
    else:
        raise ValueError(f"selection: expected one of {', '.join(KINDS)}, got {kind!r}")
    preference = preference.view(step.q_len, lanes, num_blocks)
    own = (step.prefix + torch.arange(step.q_len, device=device)) // block_size  # [q_len]
    blocks = torch.arange(num_blocks, device=device)
    preference.masked_fill_(blocks > own[:, None, None], float("-inf"))
    preference.masked_fill_(blocks == own[:, None, None], float("inf"))
    value, ids = preference.topk(min(topk, num_blocks), dim=-1)
    ids = ids.masked_fill(value == float("-inf"), num_blocks).sort(dim=-1).values
    ids = torch.nn.functional.pad(ids.masked_fill(ids == num_blocks, -1), (0, topk - ids.shape[-1]), value=-1)  # [q_len, B * Hkv, K]
    by_request = ids.view(step.q_len, step.batch, num_kv_heads, topk).permute(2, 1, 0, 3)  # [Hkv, B, q_len, K]
    return by_request.reshape(num_kv_heads, step.tokens, topk).to(torch.int32).contiguous()
