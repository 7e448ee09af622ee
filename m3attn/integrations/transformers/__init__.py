"""transformers' MiniMax-M3 on m3attn's stages.

prepare(model)                      # indexer, cache and attention of every layer are m3attn's from here on
model.generate(**inputs)            # dynamic or static cache, beams, padded batches
unprepare(model)

Indexer, cache and attention are replaced together, because transformers' indexer keeps fp32 scores of every query against every key. The
projections and norms stay the model's and are called as modules, so that quantised, adapted or dispatched ones keep working.
"""

from __future__ import annotations

from types import ModuleType
from typing import TypeVar

import torch
from torch import nn

__all__ = ["prepare", "unprepare"]

Model = TypeVar("Model", bound=nn.Module)


def prepare(
    model: Model,
    *,
    kv_cache_dtype: str | torch.dtype = "auto",
    index_cache_dtype: str | torch.dtype | None = None,
    page_size: int | None = None,
    implementation: str | None = None,
    fp8_pv: bool = False,
    dtype: torch.dtype | None = None,
) -> Model:
    """Let every attention layer of a MiniMax-M3 model run on m3attn, in place; forward only.

    The model is used as before. A cache that is empty when the model first sees it becomes a paged one, dynamic or static as it was, with index
    keys. Tokens that `attention_mask` [B, columns] marks as padding, on either side, are neither cached nor attended to, so a padded row gives
    what its sequence alone gives: blocks are anchored at a token's number in its own sequence.

    Args:
        model: `MiniMaxM3VLForCausalLM`, `MiniMaxM3SparseForConditionalGeneration`, or a module that holds one.
        kv_cache_dtype, index_cache_dtype: as in `resolve_attention_mode`.
        page_size: token slots of a page; None: 128, or the block size where that is smaller.
        implementation: a registry key that must run the attention; other stages take it where they have it.
        fp8_pv: P and V on fp8 tensor cores where the mode is fp8; else it has no effect.
        dtype: of the activations; None: that of the query norm's weight.

    Returns:
        model.

    Raises:
        ValueError: no M3 model in `model`, or a config that asks for what is not built, by the field's name.
        UnsupportedProblem: no implementation can run it, or the named one cannot, with the reasons.
        ImportError: no transformers, or one without MiniMax-M3.
    """
    options = {"kv_cache_dtype": kv_cache_dtype, "index_cache_dtype": index_cache_dtype, "implementation": implementation}
    _patches().prepare_texts(model, options, page_size, fp8_pv, dtype)
    return model


def unprepare(model: Model) -> Model:
    """Restore transformers' own indexer, cache and attention; a model that is not prepared stays as it is.

    Caches that a prepared model filled stay paged, and only a prepared model reads them.

    Raises:
        ValueError: no M3 model in `model`.
    """
    _patches().unprepare_texts(model)
    return model


def _patches() -> ModuleType:
    try:
        from m3attn.integrations.transformers import patches
    except ImportError as error:
        raise ImportError(f"transformers: expected 5.17 or newer (pip install 'm3attn[hf]'), got {error}") from error
    return patches
