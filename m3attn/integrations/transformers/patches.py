"""Which modules of a model are changed, and how: the forward of each attention layer, and the name of its attention implementation."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLAttention, MiniMaxM3VLTextModel

from m3attn.config import M3Config
from m3attn.dtypes import dtype_name
from m3attn.integrations.transformers.attention import Settings, attend_paged
from m3attn.integrations.transformers.mask import padding_mask
from m3attn.modes import resolve_attention_mode
from m3attn.problem import Problem, arch_of

NAME = "m3attn"


def prepare_texts(model: nn.Module, options: dict[str, Any], page_size: int | None, fp8_pv: bool, dtype: torch.dtype | None) -> None:
    """`prepare`, with the options of `resolve_attention_mode` in `options`."""
    texts = _text_models(model)
    unprepare_texts(model)
    ALL_ATTENTION_FUNCTIONS.register(NAME, _needs_prepare)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, padding_mask)
    for text in texts:
        config = M3Config.from_hf(text.config.to_dict())
        pages = min(128, config.block_size) if page_size is None else page_size
        previous = text.config._attn_implementation
        settings = [(module, _settings(module, config, previous, pages, fp8_pv, dtype, options)) for module in _attention_modules(text)]
        text.set_attn_implementation(NAME)
        for module, own in settings:
            module.m3attn = own
            _set_forward(module, MethodType(attend_paged, module))


def unprepare_texts(model: nn.Module) -> None:
    """`unprepare`."""
    for text in _text_models(model):
        for module in _attention_modules(text):
            if hasattr(module, "m3attn"):
                text.set_attn_implementation(module.m3attn.previous)
                del module.m3attn
                _set_forward(module, None)


def _text_models(model: nn.Module) -> list[Any]:
    texts = [module for module in model.modules() if isinstance(module, MiniMaxM3VLTextModel)]
    if not texts:
        raise ValueError(f"model: expected one with a MiniMaxM3VLTextModel in it, got {type(model).__name__}")
    return texts


def _attention_modules(text: nn.Module) -> list[Any]:
    return [module for module in text.modules() if isinstance(module, MiniMaxM3VLAttention)]


def _settings(
    module: Any, config: M3Config, previous: str, page_size: int, fp8_pv: bool, dtype: torch.dtype | None, options: dict[str, Any]
) -> Settings:
    weight = module.q_norm.weight
    # Weights that accelerate loads for each call are on no device until then: on the GPU, if there is one.
    arch = arch_of(None if weight.is_meta else weight.device)
    problem = Problem(
        arch=arch,
        num_q_heads=config.num_q_heads,
        num_kv_heads=config.num_kv_heads,
        num_index_heads=0 if module.indexer is None else config.num_index_heads,
        head_dim=config.head_dim,
        index_dim=config.index_dim,
        block_size=config.block_size,
        topk=config.topk,
        q_dtype=dtype_name(weight.dtype if dtype is None else dtype),
        zero_on_alloc=True,
    )
    mode = resolve_attention_mode(problem, page_size=page_size, **options)
    return Settings(config, mode, fp8_pv and mode.mode == "fp8", "cpu" if arch == "cpu" else "cuda", previous)


def _set_forward(module: Any, forward: MethodType | None) -> None:
    """Give a module another forward, or its class's own; under accelerate's hooks, which stand before it, the one that they call."""
    if hasattr(module, "_old_forward"):
        module._old_forward = MethodType(type(module).forward, module) if forward is None else forward
    elif forward is None:
        del module.forward
    else:
        module.forward = forward


def _needs_prepare(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        f"attn_implementation {NAME!r}: expected a prepared model, got one without; call m3attn.integrations.transformers.prepare(model)"
    )
