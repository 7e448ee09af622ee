"""A small random MiniMax-M3 of transformers' own classes, and how far two runs of it are apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn import functional as F

configuration = pytest.importorskip("transformers.models.minimax_m3_vl.configuration_minimax_m3_vl")
modeling = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")

SMALL = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=64, index_n_heads=2, index_head_dim=64)
SMALL_BLOCKS = dict(index_block_size=16, index_topk_blocks=3, index_local_blocks=1)


def small_m3(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", layers: int = 3, **fields: Any) -> Any:
    """A causal model with one dense and `layers - 1` sparse layers; the same weights in every dtype, up to its rounding."""
    config = configuration.MiniMaxM3VLTextConfig(
        **(
            dict(
                vocab_size=64,
                num_hidden_layers=layers,
                max_position_embeddings=4096,
                dense_intermediate_size=96,
                rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
                layer_types=["full_attention", *["minimax_m3_sparse"] * (layers - 1)],
                mlp_layer_types=["dense"] * layers,
                attn_implementation="eager",
                bos_token_id=1,
                eos_token_id=None,
                pad_token_id=0,
            )
            | SMALL
            | SMALL_BLOCKS
            | fields
        )
    )
    torch.manual_seed(0)
    model = modeling.MiniMaxM3VLForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        weight.data.normal_(std=0.3 if "norm" in name else weight.shape[-1] ** -0.5)
    return model.to(device=device, dtype=dtype)


def tokens(batch: int, length: int, device: torch.device | str = "cpu", seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 64, (batch, length), generator=torch.Generator().manual_seed(seed)).to(device)


def kl(exact: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL divergence of next-token distributions, one number a position."""
    exact, other = F.log_softmax(exact.float(), -1), F.log_softmax(other.float(), -1)
    return F.kl_div(other, exact, log_target=True, reduction="none").sum(-1)


def overlap(a: torch.Tensor, b: torch.Tensor) -> float:
    """The share of a's ids [.., K] that b holds too; -1 is no id."""
    shared = (a[..., :, None] == b[..., None, :]).any(-1) & (a >= 0)
    return (shared.sum() / (a >= 0).sum()).item()


@contextmanager
def theirs(model: Any) -> Iterator[list[torch.Tensor]]:
    """Collects the ids that transformers' own indexers choose: [B, Hi, S, K] a layer, in score order."""
    found: list[torch.Tensor] = []
    hooks = [m.register_forward_hook(lambda _, __, ids: found.append(ids)) for m in model.modules() if isinstance(m, modeling.MiniMaxM3VLIndexer)]
    yield found
    for hook in hooks:
        hook.remove()


@contextmanager
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """Collects the ids that prepared layers choose: [Hkv, T, K] a layer, ascending."""
    from m3attn.integrations.transformers import attention

    found: list[torch.Tensor] = []
    index_topk = attention.index_topk

    def spy(*args: Any, **options: Any) -> torch.Tensor:
        found.append(index_topk(*args, **options))
        return found[-1]

    with monkeypatch.context() as patch:
        patch.setattr(attention, "index_topk", spy)
        yield found
