"""A few layers of a model, each added to the residual stream, and what implementations can run one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import hf_weights
from torch import nn

from m3attn import LayerCache, M3Config, M3DenseAttention, M3SparseAttention, StepPlan, UnsupportedProblem, implementations
from m3attn.layers.rope import rotary_table
from m3attn.testing.matrix import DEVICE, MARKS


class Stack(nn.Module):
    """Layers of a config with random weights; `options` go to every layer."""

    def __init__(self, config: M3Config, **options: Any) -> None:
        super().__init__()
        table = rotary_table(config.max_position, config.rotary_dim, config.rope_theta, device=DEVICE)
        options = {"cos_sin": table, "device": DEVICE} | options
        self.layers = nn.ModuleList((M3SparseAttention if sparse else M3DenseAttention)(config, **options) for sparse in config.sparse_layers)
        for number, layer in enumerate(self.layers):
            layer.load_hf(hf_weights(config, sparse=layer.sparse, seed=number))

    def forward(self, x: torch.Tensor, plan: StepPlan, caches: list[LayerCache]) -> torch.Tensor:
        for layer, cache in zip(self.layers, caches, strict=True):
            x = x + layer(x, plan, cache)
        return x


def layer_keys() -> list[Any]:
    """One parameter for each implementation that a layer can be built with, the reference left out."""
    keys = dict.fromkeys(i.key for stage in ("sparse_attention", "dense_attention", "index_topk") for i in implementations(stage))
    return [pytest.param(key, id=key, marks=MARKS) for key in keys if key != "reference"]


def stack_or_skip(config: M3Config, key: str, **options: Any) -> Stack:
    """A stack whose layers run `key` where they have it, or a skip with the reasons why it cannot run decode steps."""
    try:
        return Stack(config, implementation=key, **options)
    except UnsupportedProblem as refused:
        pytest.skip(str(refused))
