"""Layers in two processes: heads are split or replicated, and the outputs are summed by gloo."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from oracle import CONFIG, hf_weights, make_cache, oracle

from m3attn import M3DenseAttention, M3SparseAttention, PlanCapacity, Shard, StepPlan

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
KINDS = {"sparse": M3SparseAttention, "dense": M3DenseAttention}


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    shard, results = Shard.of(), {}
    for kv_heads in (2, 1):
        config = dataclasses.replace(CONFIG, num_kv_heads=kv_heads, num_index_heads=kv_heads)
        for kind, make in KINDS.items():
            layer = make(config, page_size=16, dtype=torch.float32, shard=shard)
            layer.load_hf(hf_weights(config, sparse=kind == "sparse"))
            cache = make_cache(layer, 8)
            plan = StepPlan.for_layers([layer], [cache], 96, prefill=PlanCapacity(1, 80, 80))
            x = torch.randn(90, config.hidden_size, generator=torch.Generator().manual_seed(1))
            plan.update([80], [80], [[3, 1, 4, 7, 5]])
            run = torch.compile(layer, backend="aot_eager", fullgraph=True) if (kv_heads, kind) == (2, "sparse") else layer
            first = run(x[:80], plan, cache)
            plan.update([10], [90], [[3, 1, 4, 7, 5, 0]])
            results[kv_heads, kind] = layer.heads.kv, torch.cat([first, layer(x[80:], plan, cache)]), x
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_give_what_one_gives(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(run_rank, args=(str(tmp_path),), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for (kv_heads, kind), (held, out, x) in ranks[0].items():
        config = dataclasses.replace(CONFIG, num_kv_heads=kv_heads, num_index_heads=kv_heads)
        assert held == 1 and torch.equal(out, ranks[1][kv_heads, kind][1])
        expected = oracle(x, hf_weights(config, sparse=kind == "sparse"), config, sparse=kind == "sparse")
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
