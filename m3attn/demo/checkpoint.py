"""The first layers of a MiniMax-M3 checkpoint: only their tensors are read, of the embedding only the rows a text needs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from m3attn import M3Config, M3DenseAttention, M3SparseAttention, StepPlan
from m3attn.batch import LayerCache

PREFIXES = ("language_model.model.", "model.language_model.", "model.", "")
EMBEDDING = "embed_tokens.weight"
INDEX_FILE = "model.safetensors.index.json"
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Checkpoint:
    """Tensors of a folder of safetensors files by name, read one at a time.

    Attributes:
        config: the model's geometry.
        first_sparse: number of the first sparse layer; the layers before it are dense.
        bytes_read: of tensors, so far.

    Raises:
        ValueError: no checkpoint of M3 in the folder, or safetensors is not installed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.bytes_read = folder, 0
        if not (folder / "config.json").is_file():
            raise ValueError(f"--weights: expected a folder with config.json, got {folder}")
        self.text_config = _text_config(json.loads((folder / "config.json").read_text()))
        self.config = M3Config.from_hf(self.text_config)
        if True not in self.config.sparse_layers:
            raise ValueError(f"--weights: expected a model with sparse layers, {folder} has none")
        self.first_sparse = self.config.sparse_layers.index(True)
        self._files = self._index()
        found = [prefix for prefix in PREFIXES if prefix + EMBEDDING in self._files]
        if not found:
            raise ValueError(f"--weights: expected {PREFIXES[0]}{EMBEDDING} or {PREFIXES[1]}{EMBEDDING} in {folder}, got neither")
        self.prefix = found[0]

    def _index(self) -> dict[str, Path]:
        path = self.folder / INDEX_FILE
        if path.is_file():
            return {name: self.folder / file for name, file in json.loads(path.read_text())["weight_map"].items()}
        return {name: file for file in sorted(self.folder.glob("*.safetensors")) for name in self._open(file).keys()}  # noqa: SIM118

    @staticmethod
    def _open(file: Path) -> Any:
        try:
            from safetensors import safe_open
        except ModuleNotFoundError:
            raise ValueError("--weights: needs safetensors, which is not installed: pip install 'm3attn[hf]'") from None
        if not file.is_file():
            raise ValueError(f"--weights: the checkpoint names {file.name}, which is not in {file.parent}")
        return safe_open(file, framework="pt")

    def names(self, prefix: str) -> list[str]:
        """Names under a prefix of the text model."""
        return [name for name in self._files if name.startswith(self.prefix + prefix)]

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of the text model by the rest of its name, on the CPU.

        Raises:
            ValueError: it is not there, or is quantised.
        """
        full = self.prefix + name
        if full not in self._files:
            raise ValueError(f"--weights: expected {full} in {self.folder}, it is missing")
        with self._open(self._files[full]) as file:
            found: torch.Tensor = file.get_tensor(full)
        return self._checked(full, found)

    def embeddings(self, tokens: torch.Tensor) -> torch.Tensor:
        """[T, hidden]: the rows of these tokens."""
        full = self.prefix + EMBEDDING
        distinct, place = tokens.unique(return_inverse=True)
        with self._open(self._files[full]) as file:
            table = file.get_slice(full)
            count = table.get_shape()[0]
            if len(distinct) and int(distinct[-1]) >= count:
                raise ValueError(f"--weights: the tokenizer gave token {int(distinct[-1])}, {full} has {count} rows")
            rows = torch.cat([table[row : row + 1] for row in distinct.tolist()])
        return self._checked(full, rows)[place]

    def attention(self, layer: int) -> dict[str, torch.Tensor]:
        """The attention weights of a layer, by the names that `load_hf` takes."""
        start = f"layers.{layer}.self_attn."
        return {name.removeprefix(self.prefix): self.tensor(name.removeprefix(self.prefix)) for name in self.names(start)}

    def _checked(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype not in FLOATS:
            raise ValueError(f"{name}: expected bf16, fp16 or fp32 weights, got {tensor.dtype}; quantised checkpoints are not read")
        self.bytes_read += tensor.nbytes
        return tensor


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config.get("text_config", config)
    return found


def gemma_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of the last axis in fp32 with weight 1 + w, in x's dtype."""
    wide = x.float()
    return (wide * (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * (1 + weight.float())).to(x.dtype)


class DenseLayer:
    """A dense layer whole: attention, MLP and their norms."""

    def __init__(self, checkpoint: Checkpoint, number: int, attention: M3DenseAttention) -> None:
        device, dtype, start = attention.device, attention.qkv_proj.dtype, f"layers.{number}."
        self.attention, self.eps = attention, checkpoint.config.norm_eps
        attention.load_hf(checkpoint.attention(number), start + "self_attn.")

        def weight(name: str) -> torch.Tensor:
            return checkpoint.tensor(f"{start}{name}.weight").to(device, dtype)

        self.input_norm, self.mlp_norm = weight("input_layernorm"), weight("post_attention_layernorm")
        if checkpoint.names(f"{start}mlp.gate_up_proj."):
            self.gate, self.up = weight("mlp.gate_up_proj").chunk(2)
        else:
            self.gate, self.up = weight("mlp.gate_proj"), weight("mlp.up_proj")
        self.down = weight("mlp.down_proj")
        self.alpha, self.limit = (
            float(checkpoint.text_config.get(name, default)) for name, default in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0))
        )

    def __call__(self, x: torch.Tensor, plan: StepPlan, cache: LayerCache) -> torch.Tensor:
        x = x + self.attention(gemma_norm(x, self.input_norm, self.eps), plan, cache)
        return x + self._mlp(gemma_norm(x, self.mlp_norm, self.eps))

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        """M3's SwiGLU: both branches are clamped, the gate is gate * sigmoid(alpha * gate), and 1 is added to the other branch."""
        linear = torch.nn.functional.linear
        gate = linear(x, self.gate).clamp(max=self.limit)
        up = linear(x, self.up).clamp(-self.limit, self.limit)
        return linear(gate * torch.sigmoid(self.alpha * gate) * (up + 1), self.down)


class FirstLayers:
    """The dense layers and the attention of the first sparse one.

    Args:
        checkpoint: where the weights are.
        options: of every attention layer: dtype, device, cos_sin, kv_cache_dtype, implementation, page_size.
        rule: of the sparse layer.
        on_layer: called after each layer was read.
    """

    def __init__(self, checkpoint: Checkpoint, *, rule: str = "topk", on_layer: Callable[[], None] = lambda: None, **options: Any) -> None:
        config, last = checkpoint.config, checkpoint.first_sparse
        self.dense = []
        for number in range(last):
            self.dense.append(DenseLayer(checkpoint, number, M3DenseAttention(config, **options)))
            on_layer()
        self.sparse = M3SparseAttention(config, rule=rule, **options)
        self.sparse.load_hf(checkpoint.attention(last), f"layers.{last}.self_attn.")
        self.input_norm = checkpoint.tensor(f"layers.{last}.input_layernorm.weight").to(self.sparse.device, self.sparse.qkv_proj.dtype)
        on_layer()

    @property
    def layers(self) -> list[M3DenseAttention | M3SparseAttention]:
        return [*(layer.attention for layer in self.dense), self.sparse]

    def __call__(self, x: torch.Tensor, plan: StepPlan, caches: list[LayerCache]) -> None:
        """Run embedded rows [T, hidden] up to and through the sparse layer's attention; what it selects is left to `record`."""
        for layer, cache in zip(self.dense, caches[:-1], strict=True):
            x = layer(x, plan, cache)
        self.sparse(gemma_norm(x, self.input_norm, self.sparse.config.norm_eps), plan, caches[-1])
