"""M3's attention layer written out once more, for one request at a time, in fp64 and from Hugging Face weights: no cache, no pages, no parts."""

from __future__ import annotations

import torch

from m3attn import LayerCache, M3Config

CONFIG = M3Config(
    hidden_size=48,
    num_q_heads=4,
    num_kv_heads=2,
    num_index_heads=2,
    block_size=16,
    topk=3,
    max_position=256,
    rope_theta=10_000.0,
    sparse_layers=(False, True),
)


def hf_weights(config: M3Config, *, sparse: bool, seed: int = 0, prefix: str = "", indexer: bool = False) -> dict[str, torch.Tensor]:
    """Random weights by Hugging Face's names; `indexer` takes the spelling of transformers."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    hidden, dim = config.hidden_size, config.head_dim
    state = {
        "q_proj": normal(config.num_q_heads * dim, hidden),
        "k_proj": normal(config.num_kv_heads * dim, hidden),
        "v_proj": normal(config.num_kv_heads * dim, hidden),
        "o_proj": normal(hidden, config.num_q_heads * dim),
        "q_norm": normal(dim) * 3,
        "k_norm": normal(dim) * 3,
    }
    if sparse:
        index = {
            "q_proj": normal(config.num_index_heads * dim, hidden),
            "k_proj": normal(dim, hidden),
            "q_norm": normal(dim) * 3,
            "k_norm": normal(dim) * 3,
        }
        state |= {("indexer." if indexer else "index_") + name: tensor for name, tensor in index.items()}
    return {f"{prefix}{name}.weight": tensor for name, tensor in state.items()}


def _normed(x: torch.Tensor, weight: torch.Tensor, config: M3Config) -> torch.Tensor:
    """[S, heads, 128]: Gemma norm, then rope at positions 0, 1, …"""
    x = x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * (1 + weight)
    half = config.rotary_dim // 2
    position, pair = torch.arange(x.shape[0], device=x.device), torch.arange(half, dtype=torch.float64, device=x.device)
    angle = position[:, None] * config.rope_theta ** (-pair / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def oracle(x: torch.Tensor, state: dict[str, torch.Tensor], config: M3Config, *, sparse: bool) -> torch.Tensor:
    """[S, hidden] of a request from its first token on -> [S, hidden]."""
    w = {name.removesuffix(".weight"): tensor.double().to(x.device) for name, tensor in state.items()}
    x, length, dim = x.double(), x.shape[0], config.head_dim

    def heads(name: str) -> torch.Tensor:
        return (x @ w[name].T).unflatten(-1, (-1, dim))

    q, k = _normed(heads("q_proj"), w["q_norm"], config), _normed(heads("k_proj"), w["k_norm"], config)
    v = heads("v_proj")
    group = config.group_size
    seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril().expand(config.num_q_heads, -1, -1)
    if sparse:
        index_q = _normed(heads("index_q_proj"), w["index_q_norm"], config)
        index_k = _normed(heads("index_k_proj"), w["index_k_norm"], config)[:, 0]
        score = torch.einsum("thd,sd->hts", index_q, index_k).masked_fill(~seen[:1], float("-inf"))
        block = torch.arange(length, device=x.device) // config.block_size
        best = torch.stack([score[..., block == b].amax(-1) for b in range(int(block[-1]) + 1)], dim=-1)
        best.scatter_(-1, block.expand(best.shape[0], -1)[..., None], float("inf"))
        kept = best.topk(min(config.topk, best.shape[-1]), dim=-1).indices
        chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, kept, True)
        seen = seen & chosen[..., block].repeat_interleave(group, dim=0)
    logits = torch.einsum("thd,shd->hts", q, k.repeat_interleave(group, dim=1)) * dim**-0.5
    weights = logits.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v.repeat_interleave(group, dim=1)).flatten(1) @ w["o_proj"].T


def make_cache(
    layer: torch.nn.Module, pages: int, *, packed: bool = True, poison: bool = True, index: bool | None = None, **scales: float | torch.Tensor
) -> LayerCache:
    """A cache of a layer's own formats, on its device, full of NaN where `poison`."""
    from m3attn.dtypes import torch_dtype

    kv, size, dim = layer.heads.kv, layer.mode.page_size, 128

    def pool(*shape: int, dtype: str) -> torch.Tensor:
        return torch.full((pages, *shape), float("nan") if poison else 0.0, device=layer.device).to(torch_dtype(dtype))

    index_k = pool(size, dim, dtype=layer.mode.index_dtype) if (layer.sparse if index is None else index) else None
    if packed:
        return LayerCache(kv=pool(kv, size, 2 * dim, dtype=layer.mode.kv_dtype), index_k=index_k, **scales)
    k, v = (pool(kv, size, dim, dtype=layer.mode.kv_dtype) for _ in range(2))
    return LayerCache(k=k, v=v, index_k=index_k, **scales)
