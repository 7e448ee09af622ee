"""M3Config from MiniMax-M3's config.json, from transformers' flat form, and what is refused by field name."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from m3attn import M3Config

MASK = [0, 0, 0] + [1] * 57
M3 = {
    "hidden_size": 6144,
    "num_hidden_layers": 60,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rotary_dim": 64,
    "partial_rotary_factor": 0.5,
    "rope_theta": 5_000_000,
    "max_position_embeddings": 1_048_576,
    "rms_norm_eps": 1e-6,
    "use_gemma_norm": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "attention_output_gate": False,
    "num_mtp_modules": 7,
    "vocab_size": 200_064,
    "dtype": "bfloat16",
    "sparse_attention_config": {
        "use_sparse_attention": True,
        "sparse_attention_freq": MASK,
        "sparse_num_index_heads": 4,
        "sparse_index_dim": 128,
        "sparse_block_size": 128,
        "sparse_topk_blocks": 16,
        "sparse_score_type": "max",
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_disable_index_value": MASK,
    },
}
FLAT = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rotary_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "index_n_heads": 2,
    "index_head_dim": 64,
    "index_block_size": 32,
    "index_topk_blocks": 8,
    "index_local_blocks": 2,
}


def changed(config: dict, **changes: object) -> dict:
    """A copy with fields set (a field of the sparse part by its own name); `...` takes a field out."""
    config = copy.deepcopy(config)
    for name, value in changes.items():
        part = config["sparse_attention_config"] if name.startswith(("sparse_", "use_sparse")) else config
        if value is ...:
            del part[name]
        else:
            part[name] = value
    return config


def test_the_published_config_gives_the_defaults() -> None:
    assert M3Config.from_hf(M3) == M3Config()
    config = M3Config()
    assert (config.num_layers, config.group_size, sum(config.sparse_layers)) == (60, 16, 57)
    assert config.sparse_layers[:4] == (False, False, False, True)


def test_from_a_file_a_folder_a_string_and_within_a_vision_config(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "minimax_m3_vl", "text_config": M3, "vision_config": {"hidden_size": 7}}))
    assert M3Config.from_hf(path) == M3Config.from_hf(str(path)) == M3Config.from_hf(tmp_path) == M3Config()
    with pytest.raises(FileNotFoundError):
        M3Config.from_hf(tmp_path / "absent.json")
    with pytest.raises(TypeError, match=r"config: expected a path or the content of a config.json, got int"):
        M3Config.from_hf(3)  # type: ignore[arg-type]


def test_the_flat_form_of_transformers() -> None:
    assert M3Config.from_hf(FLAT) == M3Config(
        hidden_size=64,
        num_q_heads=8,
        num_kv_heads=2,
        num_index_heads=2,
        head_dim=32,
        index_dim=64,
        rotary_dim=16,
        rope_theta=1e4,
        norm_eps=1e-5,
        block_size=32,
        topk=8,
        init_blocks=0,
        local_blocks=2,
        max_position=4096,
        sparse_layers=(False, True, True),
    )


def test_transformers_own_text_config_is_read() -> None:
    configuration = pytest.importorskip("transformers.models.minimax_m3_vl.configuration_minimax_m3_vl")
    text = configuration.MiniMaxM3VLTextConfig()
    config = M3Config.from_hf(text.to_dict())
    assert (config.num_q_heads, config.num_kv_heads, config.block_size, config.topk) == (64, 4, 128, 16)
    assert (config.rotary_dim, config.rope_theta, config.index_dim) == (64, 5e6, 128)


@pytest.mark.parametrize(
    "config, changes, message",
    [
        (M3, {"attention_output_gate": True}, r"attention_output_gate: expected False .*got True"),
        (M3, {"use_qk_norm": False}, r"use_qk_norm: expected True .*got False"),
        (M3, {"qk_norm_type": "per_layer"}, r"qk_norm_type: expected 'per_head' .*got 'per_layer'"),
        (M3, {"use_gemma_norm": False}, r"use_gemma_norm: expected True"),
        (M3, {"attention_bias": True}, r"attention_bias: expected False"),
        (M3, {"rope_scaling": {"type": "yarn", "factor": 4}}, r"rope_scaling: expected None .*yarn"),
        (FLAT, {"rope_parameters": {"rope_type": "yarn"}}, r"rope_parameters.rope_type: expected 'default' .*got 'yarn'"),
        (M3, {"sparse_score_type": "lse"}, r"sparse_score_type: expected 'max' .*got 'lse'"),
        (M3, {"sparse_disable_index_value": [0] * 3 + [1] * 56 + [0]}, r"sparse_disable_index_value: .*no index value branch.*got 0 on layer 59"),
        (M3, {"sparse_disable_index_value": [1] * 59}, r"sparse_disable_index_value: expected 60 entries, one a layer, got 59"),
        (M3, {"sparse_attention_freq": MASK[1:]}, r"sparse_attention_freq: expected 60 entries, one a layer, got 59"),
        (M3, {"sparse_num_index_heads": 8}, r"sparse_num_index_heads: expected num_key_value_heads 4 .*got 8"),
        (FLAT, {"index_n_heads": 4}, r"index_n_heads: expected num_key_value_heads 2 .*got 4"),
        (FLAT, {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, r"layer_types: expected full_attention or .*'sliding_attention'"),
        (FLAT, {"layer_types": ["full_attention"]}, r"layer_types: expected 3 entries, one a layer, got 1"),
        (M3, {"sparse_block_size": 100}, r"block_size: expected 16, 32, 64, 128 or 256, got 100"),
        (M3, {"sparse_topk_blocks": 129}, r"topk: expected at most 128, got 129"),
        (M3, {"num_attention_heads": 63}, r"num_q_heads: expected a multiple of num_kv_heads 4, got 63"),
        (M3, {"rotary_dim": 256}, r"rotary_dim: expected an even number up to head_dim 128, got 256"),
        (M3, {"hidden_size": ...}, r"hidden_size: expected it in the config, it is missing"),
        (M3, {"num_key_value_heads": ...}, r"num_key_value_heads: expected it in the config, it is missing"),
        (M3, {"sparse_block_size": ...}, r"sparse_block_size: expected it in the config, it is missing"),
        (M3, {"sparse_topk_blocks": ...}, r"sparse_topk_blocks: expected it in the config, it is missing"),
        (FLAT, {"index_block_size": ...}, r"index_block_size: expected it in the config, it is missing"),
        (FLAT, {"layer_types": ...}, r"layer_types: expected it in the config, it is missing"),
    ],
)
def test_what_is_not_built_is_refused_by_field_name(config: dict, changes: dict, message: str) -> None:
    M3Config.from_hf(config)
    with pytest.raises(ValueError, match=message):
        M3Config.from_hf(changed(config, **changes))


@pytest.mark.parametrize(
    "changes, init, local",
    [
        ({"sparse_init_tokens": 0, "sparse_local_tokens": 0}, 0, 1),
        ({"sparse_init_tokens": 1, "sparse_local_tokens": 128}, 1, 2),
        ({"sparse_init_tokens": 129, "sparse_local_tokens": 129}, 2, 3),
        ({"sparse_init_tokens": 64}, 1, 1),
        ({}, 0, 1),
    ],
)
def test_older_configs_count_tokens(changes: dict, init: int, local: int) -> None:
    config = M3Config.from_hf(changed(M3, sparse_init_block=..., sparse_local_block=..., **changes))
    assert (config.init_blocks, config.local_blocks) == (init, local)


def test_blocks_win_over_tokens_where_both_stand() -> None:
    config = M3Config.from_hf(changed(M3, sparse_init_block=2, sparse_local_block=3, sparse_init_tokens=999, sparse_local_tokens=999))
    assert (config.init_blocks, config.local_blocks) == (2, 3)


def test_sparse_attention_switched_off_makes_every_layer_dense() -> None:
    assert M3Config.from_hf(changed(M3, use_sparse_attention=False)).sparse_layers == (False,) * 60


def test_rotary_dim_from_the_partial_factor() -> None:
    assert M3Config.from_hf(changed(M3, rotary_dim=...)).rotary_dim == 64
    assert M3Config.from_hf(changed(M3, rotary_dim=..., partial_rotary_factor=...)).rotary_dim == 128


def test_head_dim_from_the_width() -> None:
    assert M3Config.from_hf(changed(M3, head_dim=...)).head_dim == 96


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("topk", 0, "topk: expected an int of at least 1, got 0"),
        ("local_blocks", -1, "local_blocks: expected an int of at least 0, got -1"),
        ("block_size", 96, "block_size: expected 16, 32, 64, 128 or 256, got 96"),
        ("num_index_heads", 2, "num_index_heads: expected num_kv_heads 4 .*got 2"),
        ("rotary_dim", 63, "rotary_dim: expected an even number"),
        ("head_dim", 128.0, "head_dim: expected an int of at least 1, got 128.0"),
    ],
)
def test_the_dataclass_checks_itself(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        M3Config(**{field: value})  # type: ignore[arg-type]
