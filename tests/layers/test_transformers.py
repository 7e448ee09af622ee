"""Our layers against transformers' own M3 attention, with its weights, its config and its names. Skipped where it is not installed."""

from __future__ import annotations

import pytest
import torch
from oracle import make_cache

from m3attn import M3Config, M3DenseAttention, M3SparseAttention, PlanCapacity, StepPlan

configuration = pytest.importorskip("transformers.models.minimax_m3_vl.configuration_minimax_m3_vl")
modeling = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")


@pytest.mark.parametrize("number, make", [(0, M3DenseAttention), (1, M3SparseAttention)])
@torch.no_grad()
def test_equal_to_transformers(number: int, make: type) -> None:
    hf_config = configuration.MiniMaxM3VLTextConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        num_hidden_layers=2,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        layer_types=["full_attention", "minimax_m3_sparse"],
        index_n_heads=2,
        index_head_dim=128,
        index_block_size=16,
        index_topk_blocks=3,
        index_local_blocks=1,
        attn_implementation="eager",
    )
    torch.manual_seed(number)
    theirs = modeling.MiniMaxM3VLAttention(hf_config, number).eval()
    for name, weight in theirs.named_parameters():
        weight.normal_(std=0.3 if "norm" in name else weight.shape[-1] ** -0.5)
    x = torch.randn(1, 110, 64)
    positions = torch.arange(110)[None]
    rotary = modeling.MiniMaxM3VLRotaryEmbedding(hf_config)
    mask = torch.full((110, 110), float("-inf")).triu(1)[None, None]
    expected = theirs(x, rotary(x, positions), mask, position_ids=positions)[0][0]

    config = M3Config.from_hf(hf_config.to_dict())
    layer = make(config, page_size=16, dtype=torch.float32)
    layer.load_hf({f"self_attn.{name}": tensor for name, tensor in theirs.state_dict().items()}, "self_attn.")
    cache = make_cache(layer, 8)
    plan = StepPlan.for_layers([layer], [cache], 128, decode=PlanCapacity(1, 1, 1), prefill=PlanCapacity(1, 100, 100))
    got = []
    for begin, end in ((0, 90), (90, 109), (109, 110)):
        plan.update([end - begin], [end], [[6, 2, 0, 5, 1, 7, 3, 4]])
        got.append(layer(torch.nn.functional.pad(x[0, begin:end], (0, 0, 0, plan.tokens - end + begin)), plan, cache)[: end - begin])
    torch.testing.assert_close(torch.cat(got), expected, rtol=1e-4, atol=1e-4)
