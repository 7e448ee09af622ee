"""`m3attn demo --weights` on a small checkpoint with M3's names, against transformers' own model of the same weights."""

from __future__ import annotations

import json

import pytest
import torch

from m3attn.analysis import load_ids
from m3attn.cli.main import main
from m3attn.demo.run import Options
from m3attn.demo.weights import run

pytest.importorskip("safetensors")
tokenizers = pytest.importorskip("tokenizers")

HIDDEN, HEADS, GROUPS, DIM, MLP, BLOCK, TOPK, DENSE = 64, 4, 2, 128, 96, 16, 3, 3
PREFIX = "language_model.model."
CONFIG = {
    "text_config": {
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": DIM,
        "num_hidden_layers": 5,
        "rotary_dim": 64,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "use_gemma_norm": True,
        "use_qk_norm": True,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 1.5,
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_attention_freq": [0, 0, 0, 1, 1],
            "sparse_num_index_heads": GROUPS,
            "sparse_index_dim": DIM,
            "sparse_block_size": BLOCK,
            "sparse_topk_blocks": TOPK,
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_disable_index_value": [0, 0, 0, 1, 1],
        },
    }
}
WORDS = ["the", "brass", "key", "opens", "green", "yellow", "card", "box", "what", "does", "lid", "under", "stone", "river"]


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, std: float = 0.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * (std or shape[-1] ** -0.5)).bfloat16()

    found = {f"{PREFIX}embed_tokens.weight": normal(len(WORDS) + 1, HIDDEN, std=1.0), "language_model.lm_head.weight": normal(4, HIDDEN)}
    for number in range(5):
        start = f"{PREFIX}layers.{number}."
        shapes = {"q_proj": HEADS, "k_proj": GROUPS, "v_proj": GROUPS}
        if number >= DENSE:
            shapes |= {"index_q_proj": GROUPS, "index_k_proj": 1}
            found |= {f"{start}self_attn.{name}.weight": normal(DIM, std=0.3) for name in ("index_q_norm", "index_k_norm")}
            found[f"{start}block_sparse_moe.gate.weight"] = normal(4, HIDDEN)
        else:
            found |= {f"{start}mlp.{name}.weight": 2 * normal(MLP, HIDDEN) for name in ("gate_proj", "up_proj")}
            found[f"{start}mlp.down_proj.weight"] = normal(HIDDEN, MLP)
        found |= {f"{start}self_attn.{name}.weight": normal(heads * DIM, HIDDEN) for name, heads in shapes.items()}
        found |= {f"{start}self_attn.{name}.weight": normal(DIM, std=0.3) for name in ("q_norm", "k_norm")}
        found[f"{start}self_attn.o_proj.weight"] = normal(HIDDEN, HEADS * DIM)
        found |= {f"{start}{name}.weight": normal(HIDDEN, std=0.2) for name in ("input_layernorm", "post_attention_layernorm")}
    return found


def write_tokenizer(folder) -> None:
    vocabulary = {word: number for number, word in enumerate(["?", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))


@pytest.fixture
def folder(tmp_path):
    """Two files and an index, as a sharded checkpoint has."""
    from safetensors.torch import save_file

    made = tmp_path / "m3"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(CONFIG))
    names = list(tensors := state())
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, kept in halves.items():
        save_file({name: tensors[name] for name in kept}, made / file)
    weight_map = {name: file for file, kept in halves.items() for name in kept}
    (made / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    write_tokenizer(made)
    return made


@pytest.fixture
def page(tmp_path):
    generator = torch.Generator().manual_seed(1)
    path = tmp_path / "page.txt"
    path.write_text(" ".join(WORDS[i] for i in torch.randint(len(WORDS), (150,), generator=generator)))
    return path


def token_ids(page) -> torch.Tensor:
    return torch.tensor([1 + WORDS.index(word) for word in page.read_text().split()])


def test_first_sparse_selection_is_transformers(folder, page, tmp_path, monkeypatch, capsys):
    configuration = pytest.importorskip("transformers.models.minimax_m3_vl.configuration_minimax_m3_vl")
    modeling = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
    text = dict(CONFIG["text_config"])
    rope = {"rope_type": "default", "rope_theta": text.pop("rope_theta"), "partial_rotary_factor": 0.5}
    kinds = ["dense"] * DENSE + ["sparse"]
    text |= {"num_hidden_layers": 4, "rope_parameters": rope, "mlp_layer_types": kinds, "dense_intermediate_size": MLP, "num_local_experts": 4}
    sparse = text["sparse_attention_config"] | {"sparse_attention_freq": [0, 0, 0, 1]}
    config = configuration.MiniMaxM3VLTextConfig(**text | {"sparse_attention_config": sparse}, intermediate_size=8, shared_intermediate_size=8)
    config.vocab_size, config._attn_implementation = len(WORDS) + 1, "eager"
    theirs = modeling.MiniMaxM3VLTextModel(config).float().eval()
    tensors = {name.removeprefix(PREFIX): x.float() for name, x in state().items() if name.startswith(PREFIX) and ".layers.4." not in name}
    for number in range(DENSE):
        gate, up = (tensors.pop(f"layers.{number}.mlp.{name}_proj.weight") for name in ("gate", "up"))
        tensors[f"layers.{number}.mlp.gate_up_proj.weight"] = torch.cat([gate, up])
    tensors = {name.replace(".index_", ".indexer."): x for name, x in tensors.items()}
    result = theirs.load_state_dict(tensors, strict=False)
    assert all("block_sparse_moe" in name for name in result.unexpected_keys) and not any("attn" in name for name in result.missing_keys)
    chosen = []
    theirs.layers[DENSE].self_attn.indexer.register_forward_hook(lambda module, given, got: chosen.append(got))
    with torch.no_grad():
        theirs(input_ids=token_ids(page)[None])

    monkeypatch.setattr("m3attn.demo.weights.DTYPE", torch.float32)
    monkeypatch.setattr("m3attn.demo.weights.CHUNK", 64)
    kept = tmp_path / "ids.pt"
    assert run(folder, Options(text=page), save_ids=kept) == 0
    steps = load_ids(kept)
    assert [(s.layer, s.q_lens, s.seq_lens) for s in steps] == [("layers.3", (n,), (end,)) for n, end in ((64, 64), (64, 128), (22, 150))]
    ours = torch.cat([s.ids for s in steps], dim=1)
    expected = torch.where(chosen[0][0] < 0, 10**6, chosen[0][0]).sort(dim=-1).values
    assert torch.equal(torch.where(ours < 0, 10**6, ours).long(), expected)
    out = capsys.readouterr().out
    assert "layers 0 to 2 and the attention of layer 3" in out and "150 tokens are read" in out


def test_the_command_shows_the_selection(folder, page, tmp_path, capsys):
    picture = tmp_path / "chosen.png"
    kept, made = tmp_path / "run.json", tmp_path / "run.html"
    assert main(["demo", "--weights", str(folder), "--text", str(page), "--tokens", "140", "--plot", str(picture), "--json", str(kept)]) == 0
    out = capsys.readouterr().out
    assert "140 tokens are read" in out and "92 queries see more than 3 blocks of 16" in out
    assert "attention mass in the chosen blocks: 0." in out and "relative error 0." in out and "overlap of two KV groups' blocks: 0." in out
    assert out.count("query at token") == 3 and out.count("KV group 1 chose") == 3
    last = page.read_text().split()[:140]
    assert " ".join(last[-5:]) in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["report", str(made), str(kept)]) == 0
    shown = made.read_text()
    assert shown.count("<img") == GROUPS and "92 queries see more than 3 blocks" in shown and "<table" not in shown and "query at token 139" in shown


def test_only_the_first_layers_are_read(folder, page, capsys):
    """Layer 4, the head and the MoE of layer 3 are not: an error in their file entries is not noticed."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for name in index["weight_map"]:
        if ".layers.4." in name or "moe" in name or "lm_head" in name:
            index["weight_map"][name] = "missing.safetensors"
    path.write_text(json.dumps(index))
    assert main(["demo", "--weights", str(folder), "--text", str(page), "--tokens", "20"]) == 0
    assert "every query sees at most 3 blocks of 16" in capsys.readouterr().out


def drop(name):
    def change(folder):
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        del index["weight_map"][PREFIX + name]
        path.write_text(json.dumps(index))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "expected a folder with config.json"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "expected tokenizer.json in"),
        (lambda folder: (folder / "a.safetensors").unlink(), "the checkpoint names a.safetensors, which is not in"),
        (drop("embed_tokens.weight"), f"expected {PREFIX}embed_tokens.weight or"),
        (drop("layers.1.mlp.down_proj.weight"), f"expected {PREFIX}layers.1.mlp.down_proj.weight"),
        (drop("layers.3.self_attn.index_k_proj.weight"), "missing index_k_proj"),
    ],
)
def test_an_incomplete_checkpoint_is_named(folder, page, capsys, change, message):
    change(folder)
    assert main(["demo", "--weights", str(folder), "--text", str(page)]) == 2
    assert message in capsys.readouterr().err


def test_quantised_weights_are_refused(folder, page, capsys):
    from safetensors.torch import load_file, save_file

    for file in ("a.safetensors", "b.safetensors"):
        tensors = load_file(folder / file)
        save_file({name: x.to(torch.float8_e4m3fn) if "k_proj" in name else x for name, x in tensors.items()}, folder / file)
    assert main(["demo", "--weights", str(folder), "--text", str(page)]) == 2
    assert "quantised checkpoints are not read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "8/2"], "--heads: expected nothing with --weights, got 8/2"),
        (["--real-geometry"], "--real-geometry: expected nothing with --weights"),
        (["--mla"], "--weights: expected nothing with --mla"),
    ],
)
def test_options_without_meaning_are_refused(folder, capsys, arguments, message):
    assert main(["demo", "--weights", str(folder), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert main(["demo", "--save-ids", "ids.pt"]) == 2 and "--save-ids: expected --weights DIR" in capsys.readouterr().err
