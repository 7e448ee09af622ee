"""torch.library operators: flat tensors in and out, so that torch.compile sees one opaque call a stage.

Each stage defines a functional operator and an `_out` variant that mutates and returns nothing. fp8 data travels as uint8 with a dtype name, or
in its own type, a packed cache as one tensor, a scale as a float and an optional tensor. The helpers below pack and unpack these; the schema
fragments name them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from m3attn.batch import LayerCache, PagedBatch
from m3attn.dtypes import dtype_name, is_fp8, typed_storage
from m3attn.scales import Scale, ScaleLike

LIBRARY = torch.library.Library("m3attn", "DEF")

BATCH = "Tensor page_table, Tensor seq_lens, Tensor cu_seqlens_q, SymInt max_seqlen_q, SymInt max_seqlen_k, SymInt page_size, SymInt block_size"


def scale_schema(name: str) -> str:
    return f"float {name}, Tensor? {name}_tensor"


KV_CACHE = f"Tensor kv, Tensor? v, str? kv_dtype, {scale_schema('k_scale')}, {scale_schema('v_scale')}"
INDEX_CACHE = f"Tensor index_k, str? index_dtype, {scale_schema('index_k_scale')}"


def define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define `m3attn::name`, give it `run` on every device and `fake` for tracing, and refuse gradients; returns the operator."""
    LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"m3attn::{name}", fake, lib=LIBRARY)
    operator = getattr(torch.ops.m3attn, name).default

    def refuse_gradients(*arguments: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in arguments):
            raise NotImplementedError(
                f"m3attn::{name} is forward only and an input requires grad: call under torch.no_grad(), "
                "or pass impl='reference' without torch.compile"
            )
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    LIBRARY.impl(name, refuse_gradients, "Autograd")
    return operator


def nothing(*_: Any) -> None:
    """The fake of an operator that returns nothing."""


def pack(tensor: torch.Tensor, declared: str | torch.dtype | None = None) -> tuple[torch.Tensor, str | None]:
    """(tensor, dtype name or None): fp8 data as uint8 with its name."""
    if is_fp8(tensor.dtype):
        return tensor.view(torch.uint8), dtype_name(tensor.dtype)
    return tensor, None if declared is None else dtype_name(declared)


def unpack(tensor: torch.Tensor, name: str | None, argument: str) -> torch.Tensor:
    """The inverse of `pack`."""
    return tensor if name is None else typed_storage(tensor, name, argument=argument)


def pack_mutated(tensor: torch.Tensor | None, declared: str | torch.dtype | None = None) -> tuple[torch.Tensor | None, str | None]:
    """As `pack`, for what an operator writes to: fp8 data stays in its own type, because a compiler writes a mutated view of another type back
    to its base, a copy of the whole buffer."""
    return tensor, None if tensor is None or declared is None else dtype_name(declared)


def unpack_optional(tensor: torch.Tensor | None, name: str | None, argument: str) -> torch.Tensor | None:
    return None if tensor is None else unpack(tensor, name, argument)


def pack_scale(scale: ScaleLike, argument: str) -> tuple[float, torch.Tensor | None]:
    normal = Scale.of(scale, argument=argument)
    return normal.value, normal.tensor


def unpack_scale(value: float, tensor: torch.Tensor | None) -> ScaleLike:
    return value if tensor is None else tensor


def pack_batch(batch: PagedBatch) -> tuple[Any, ...]:
    return (
        batch.page_table,
        batch.seq_lens,
        batch.cu_seqlens_q,
        batch.max_seqlen_q,
        batch.max_seqlen_k,
        batch.page_size,
        batch.block_size,
    )


def pack_kv_cache(cache: LayerCache, *, mutated: bool = False) -> tuple[Any, ...]:
    """The KV_CACHE fragment of a cache; a packed one stays one tensor."""
    packed = pack_mutated if mutated else pack
    scales = (*pack_scale(cache.k_scale, "cache.k_scale"), *pack_scale(cache.v_scale, "cache.v_scale"))
    if cache.kv is not None:
        kv, name = packed(cache.kv, cache.kv_dtype)
        return kv, None, name, *scales
    if cache.k is None or cache.v is None:
        raise ValueError("cache: expected kv, or both k and v")
    k, name = packed(cache.k, cache.kv_dtype)
    return k, packed(cache.v, cache.kv_dtype)[0], name, *scales


def unpack_kv_cache(
    kv: torch.Tensor,
    v: torch.Tensor | None,
    kv_dtype: str | None,
    k_scale: float,
    k_scale_tensor: torch.Tensor | None,
    v_scale: float,
    v_scale_tensor: torch.Tensor | None,
) -> LayerCache:
    packed = v is None
    return LayerCache(
        k=None if packed else kv,
        v=v,
        kv=kv if packed else None,
        kv_dtype=kv_dtype,
        k_scale=unpack_scale(k_scale, k_scale_tensor),
        v_scale=unpack_scale(v_scale, v_scale_tensor),
    )


def pack_index_cache(cache: LayerCache, *, mutated: bool = False) -> tuple[Any, ...]:
    """The INDEX_CACHE fragment of a cache."""
    packed = pack_mutated if mutated else pack
    if cache.index_k is None:
        raise ValueError("cache.index_k: expected [pages, page_size, Di], got None (a dense layer's cache)")
    return *packed(cache.index_k, cache.index_dtype), *pack_scale(cache.index_k_scale, "cache.index_k_scale")


def unpack_index_cache(index_k: torch.Tensor, index_dtype: str | None, scale: float, scale_tensor: torch.Tensor | None) -> LayerCache:
    return LayerCache(index_k=index_k, index_dtype=index_dtype, index_k_scale=unpack_scale(scale, scale_tensor))
