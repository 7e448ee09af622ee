"""Sparse MLA prefill on random indices: the shapes of DeepSeek's sparse attention, beside FlashMLA."""

from __future__ import annotations

import torch
from einops import einsum

import m3attn
from m3attn.bench import parity
from m3attn.bench.ceilings import Cost
from m3attn.bench.inputs import MODES, random
from m3attn.bench.parity import Parity
from m3attn.bench.peers import FLASHMLA, Peers
from m3attn.bench.shapes import Heads
from m3attn.bench.workloads import SetCall, Workload

QK_DIM = 576
VALUE_DIM = 512


def sparse_mla_prefill(
    size: tuple[int, ...], heads: Heads, mode_name: str, sample_rows: int, l2_bytes: int, generator: torch.Generator, peers: Peers | None
) -> Workload:
    """`size` is (queries, latent tokens, indices a query); every query picks its tokens at random."""
    num_q, num_kv, topk = size
    mode = MODES[mode_name]
    q = random((num_q, heads.num_q, QK_DIM), mode.q, generator)
    kv = random((num_kv, 1, QK_DIM), mode.kv, generator)
    picks = torch.rand(num_q, num_kv, device=generator.device, generator=generator).topk(min(topk, num_kv), dim=1).indices
    indices = torch.nn.functional.pad(picks, (0, topk - picks.shape[1]), value=-1)[:, None].int()
    sm_scale = QK_DIM**-0.5
    sample = parity.sample_rows(num_q, sample_rows).to(generator.device)
    expected = exact_rows(q[sample], kv[:, 0], picks[sample], sm_scale)
    products = 2.0 * num_q * heads.num_q * topk
    moved = q.numel() * q.element_size() + num_kv * QK_DIM * kv.element_size() + num_q * (heads.num_q * VALUE_DIM * 2 + topk * 4)
    both = products * (QK_DIM + VALUE_DIM)
    cost = Cost(moved, flops_8=both) if mode.q.itemsize == 1 else Cost(moved, flops_16=both)

    def run(_: int, key: str) -> torch.Tensor:
        return vars(m3attn)["sparse_mla_prefill"](q, kv, indices, sm_scale=sm_scale, impl=key)[0]

    def check(out: torch.Tensor) -> Parity:
        return parity.check_attention(out[sample], expected, "fp8_pv" if mode.q.itemsize == 1 else mode_name)

    found: dict[str, SetCall] = {}
    if peers is not None and peers.flashmla is not None and mode_name == "bf16":
        found[FLASHMLA] = lambda _: peers.sparse_mla_prefill(q, kv, indices, sm_scale)
    return Workload(cost, run, check, peers=found)


def exact_rows(q: torch.Tensor, latent: torch.Tensor, picks: torch.Tensor, sm_scale: float) -> torch.Tensor:
    """fp64 outputs [N, H, 512] of q [N, H, 576] over the picked rows [N, K] of latent [tokens, 576], whose first 512 dims are the values."""
    keys = latent.double()[picks]
    weights = torch.softmax(einsum(q.double(), keys, "n h d, n k d -> n h k") * sm_scale, dim=-1)
    return einsum(weights, keys[..., :VALUE_DIM], "n h k, n k d -> n h d")
