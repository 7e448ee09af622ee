"""Hugging Face's names of M3's attention weights, and the packed tensors the layers hold."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from m3attn.config import M3Config
from m3attn.layers.shard import HeadRanges

DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
INDEX = ("index_q_proj", "index_k_proj", "index_q_norm", "index_k_norm")


def hf_names(state: Mapping[str, torch.Tensor], prefix: str = "") -> dict[str, torch.Tensor]:
    """The weights under a prefix by M3's published names, without `.weight`: `indexer.q_proj` becomes `index_q_proj`, and so on.

    Args:
        state: a state dict, of a layer or of a whole model.
        prefix: for example `model.layers.3.self_attn.`.
    """
    found = {}
    for name, tensor in state.items():
        if name.startswith(prefix):
            short = name[len(prefix) :].removesuffix(".weight")
            found["index_" + short.removeprefix("indexer.") if short.startswith("indexer.") else short] = tensor
    return found


def pack_hf_weights(state: Mapping[str, torch.Tensor], config: M3Config, heads: HeadRanges, *, prefix: str = "") -> dict[str, torch.Tensor]:
    """A rank's state dict of a layer from Hugging Face's: rows of q, k, v and, in a sparse layer, index q and the index key in one matrix.

    Args:
        state: tensors by the names q_proj, k_proj, v_proj, o_proj, q_norm, k_norm, index_q_proj, index_k_proj, index_q_norm, index_k_norm, each
            with `.weight`; the index ones may be spelled indexer.q_proj, indexer.k_proj, indexer.q_norm, indexer.k_norm.
        heads: the rank's, from the layer (`layer.ranges`).
        prefix: as in `hf_names`.

    Raises:
        ValueError: a weight that is missing, unknown or of another shape, by name.
    """
    found, expected = hf_names(state, prefix), DENSE + (INDEX if heads.index else ())
    missing, unknown = [n for n in expected if n not in found], sorted(set(found) - set(expected))
    if missing or unknown:
        what = f"missing {', '.join(missing)}" if missing else f"unknown {', '.join(unknown)}"
        raise ValueError(f"state: expected {', '.join(expected)} under prefix {prefix!r}, got {what}")
    hidden, dim, index_dim = config.hidden_size, config.head_dim, config.index_dim
    shapes = {
        "q_proj": (config.num_q_heads * dim, hidden),
        "k_proj": (config.num_kv_heads * dim, hidden),
        "v_proj": (config.num_kv_heads * dim, hidden),
        "o_proj": (hidden, config.num_q_heads * dim),
        "index_q_proj": (config.num_index_heads * index_dim, hidden),
        "index_k_proj": (index_dim, hidden),
    }
    for name in expected:
        shape = shapes.get(name, (index_dim if name.startswith("index") else dim,))
        if tuple(found[name].shape) != shape:
            raise ValueError(f"{prefix}{name}: expected shape {list(shape)}, got {list(found[name].shape)}")

    def rows(name: str, kept: range, width: int) -> torch.Tensor:
        return found[name][kept.start * width : kept.stop * width]

    packed = [rows("q_proj", heads.q, dim), rows("k_proj", heads.kv, dim), rows("v_proj", heads.kv, dim)]
    if heads.index:
        packed += [rows("index_q_proj", heads.index, index_dim), found["index_k_proj"]]
    norms = {name: found[name] for name in expected if name.endswith("norm")}
    output = found["o_proj"][:, heads.q.start * dim : heads.q.stop * dim]
    return {"qkv_proj": torch.cat(packed), "o_proj": output, **norms}
