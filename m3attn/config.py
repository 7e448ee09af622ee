"""M3's attention geometry as a dataclass, from its defaults or from a Hugging Face config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class M3Config:
    """What an M3 attention layer needs to know. Defaults are MiniMax-M3's own.

    Attributes:
        hidden_size: width of the residual stream.
        num_q_heads, num_kv_heads, num_index_heads: heads; one index head per KV head.
        head_dim, index_dim: dims of main and index heads.
        rotary_dim, rope_theta: RoPE on the first rotary_dim dims.
        norm_eps: of the per-head Gemma RMSNorm.
        block_size, topk, init_blocks, local_blocks: the selection.
        max_position: positions the RoPE table covers.
        sparse_layers: for each layer, whether it is sparse.
    """

    hidden_size: int = 6144
    num_q_heads: int = 64
    num_kv_heads: int = 4
    num_index_heads: int = 4
    head_dim: int = 128
    index_dim: int = 128
    rotary_dim: int = 64
    rope_theta: float = 5_000_000.0
    norm_eps: float = 1e-6
    block_size: int = 128
    topk: int = 16
    init_blocks: int = 0
    local_blocks: int = 1
    max_position: int = 1_048_576
    sparse_layers: tuple[bool, ...] = (False,) * 3 + (True,) * 57

    @property
    def num_layers(self) -> int:
        return len(self.sparse_layers)

    @property
    def group_size(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_q_heads", "num_kv_heads", "num_index_heads", "head_dim", "index_dim", "rotary_dim", "block_size", "topk"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: expected an int of at least 1, got {value!r}")
        for name in ("init_blocks", "local_blocks"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{name}: expected an int of at least 0, got {value!r}")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(f"num_q_heads: expected a multiple of num_kv_heads {self.num_kv_heads}, got {self.num_q_heads}")
        if self.num_index_heads != self.num_kv_heads:
            raise ValueError(f"num_index_heads: expected num_kv_heads {self.num_kv_heads} (one index head a KV group), got {self.num_index_heads}")
        if self.block_size not in (16, 32, 64, 128, 256):
            raise ValueError(f"block_size: expected 16, 32, 64, 128 or 256, got {self.block_size}")
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(f"rotary_dim: expected an even number up to head_dim {self.head_dim}, got {self.rotary_dim}")
        if self.topk > 128:
            raise ValueError(f"topk: expected at most 128, got {self.topk}")

    @classmethod
    def from_hf(cls, config: str | Path | Mapping[str, Any]) -> M3Config:
        """From a Hugging Face config.json: its path, its folder, or its content.

        Reads both published spellings: `sparse_attention_config` (MiniMaxAI/MiniMax-M3) and transformers' flat `index_*` fields.

        Raises:
            ValueError: a field asks for what is not built (an index value branch, another score type, an output gate, a sink, Hi != Hkv, …),
                by the field's name; or a field is missing.
        """
        if isinstance(config, (str, Path)):
            path = Path(config)
            path = path / "config.json" if path.is_dir() else path
            config = json.loads(path.read_text())
        if not isinstance(config, Mapping):
            raise TypeError(f"config: expected a path or the content of a config.json, got {type(config).__name__}")
        text: Mapping[str, Any] = config.get("text_config", config)
        return cls(**_shared_fields(text), **_sparse_fields(text))


def _need(fields: Mapping[str, Any], name: str) -> Any:
    if name not in fields:
        raise ValueError(f"{name}: expected it in the config, it is missing")
    return fields[name]


def _refuse_unless(fields: Mapping[str, Any], name: str, accepted: tuple[Any, ...], why: str) -> None:
    if name in fields and fields[name] not in accepted:
        raise ValueError(f"{name}: expected {' or '.join(map(repr, accepted))} ({why}), got {fields[name]!r}")


def _shared_fields(text: Mapping[str, Any]) -> dict[str, Any]:
    head_dim = text.get("head_dim") or _need(text, "hidden_size") // _need(text, "num_attention_heads")
    rope = text.get("rope_parameters") or {}
    rotary = text.get("rotary_dim")
    if rotary is None:
        rotary = int(head_dim * text.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)))
    _refuse_unless(text, "attention_output_gate", (False, None), "no output gate is built")
    _refuse_unless(text, "use_qk_norm", (True, None), "q and k are always normalised")
    _refuse_unless(text, "qk_norm_type", ("per_head", None), "the norm is per head")
    _refuse_unless(text, "use_gemma_norm", (True, None), "weights are those of (1 + w)")
    _refuse_unless(text, "attention_bias", (False, None), "projections have no bias")
    _refuse_unless(text, "rope_scaling", (None, {}), "no RoPE scaling is built")
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rope_parameters.rope_type: expected 'default' (no RoPE scaling is built), got {rope['rope_type']!r}")
    return {
        "hidden_size": _need(text, "hidden_size"),
        "num_q_heads": _need(text, "num_attention_heads"),
        "num_kv_heads": _need(text, "num_key_value_heads"),
        "head_dim": head_dim,
        "rotary_dim": rotary,
        "rope_theta": float(text.get("rope_theta", rope.get("rope_theta", 5_000_000.0))),
        "norm_eps": float(text.get("rms_norm_eps", 1e-6)),
        "max_position": text.get("max_position_embeddings", 1_048_576),
    }


def _refuse_other_heads(text: Mapping[str, Any], name: str, index_heads: int) -> None:
    kv_heads = _need(text, "num_key_value_heads")
    if index_heads != kv_heads:
        raise ValueError(f"{name}: expected num_key_value_heads {kv_heads} (one index head a KV group), got {index_heads}")


def _blocks_of(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _sparse_fields(text: Mapping[str, Any]) -> dict[str, Any]:
    sparse = text.get("sparse_attention_config")
    if sparse is None:
        return _flat_sparse_fields(text)
    layers = _need(text, "num_hidden_layers")
    freq = sparse.get("sparse_attention_freq", [1] * layers)
    _refuse_unless(sparse, "sparse_score_type", ("max",), "block scores are maxima")
    disabled = sparse.get("sparse_disable_index_value")
    for name, entries in (("sparse_attention_freq", freq), ("sparse_disable_index_value", disabled)):
        if entries is not None and len(entries) != layers:
            raise ValueError(f"{name}: expected {layers} entries, one a layer, got {len(entries)}")
    _refuse_other_heads(text, "sparse_num_index_heads", _need(sparse, "sparse_num_index_heads"))
    if disabled is not None:
        with_value = [i for i, (on, off) in enumerate(zip(freq, disabled, strict=True)) if on and not off]
        if with_value:
            raise ValueError(
                f"sparse_disable_index_value: expected 1 on every sparse layer (no index value branch is built), got 0 on layer {with_value[0]}"
            )
    block = _need(sparse, "sparse_block_size")
    init = sparse.get("sparse_init_block")
    local = sparse.get("sparse_local_block")
    if init is None:
        init = _blocks_of(sparse.get("sparse_init_tokens", 0), block)
    if local is None:
        local = _blocks_of(sparse["sparse_local_tokens"], block) + 1 if "sparse_local_tokens" in sparse else 1
    on = sparse.get("use_sparse_attention", True)
    return {
        "num_index_heads": _need(sparse, "sparse_num_index_heads"),
        "index_dim": _need(sparse, "sparse_index_dim"),
        "block_size": block,
        "topk": _need(sparse, "sparse_topk_blocks"),
        "init_blocks": init,
        "local_blocks": local,
        "sparse_layers": tuple(bool(f and on) for f in freq),
    }


def _flat_sparse_fields(text: Mapping[str, Any]) -> dict[str, Any]:
    kinds = _need(text, "layer_types")
    if len(kinds) != text.get("num_hidden_layers", len(kinds)):
        raise ValueError(f"layer_types: expected {text['num_hidden_layers']} entries, one a layer, got {len(kinds)}")
    _refuse_other_heads(text, "index_n_heads", _need(text, "index_n_heads"))
    unknown = sorted(set(kinds) - {"full_attention", "minimax_m3_sparse"})
    if unknown:
        raise ValueError(f"layer_types: expected full_attention or minimax_m3_sparse, got {unknown[0]!r}")
    return {
        "num_index_heads": _need(text, "index_n_heads"),
        "index_dim": _need(text, "index_head_dim"),
        "block_size": _need(text, "index_block_size"),
        "topk": _need(text, "index_topk_blocks"),
        "init_blocks": text.get("index_init_blocks", 0),
        "local_blocks": text.get("index_local_blocks", 1),
        "sparse_layers": tuple(kind == "minimax_m3_sparse" for kind in kinds),
    }
