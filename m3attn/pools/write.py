"""Heads that are ready into the slots of a layer's cache: checks, the operator that torch.compile sees, and the two paths."""

from __future__ import annotations

from typing import Any

import torch

from m3attn import device_checks
from m3attn.batch import LayerCache
from m3attn.checks import check_outputs, check_tensor
from m3attn.dtypes import FLOAT_DTYPES, is_fp8
from m3attn.operators import define, nothing, pack, pack_index_cache, pack_kv_cache, scale_schema, unpack_optional, unpack_scale
from m3attn.pools.insert import SlotValues, insert_plain
from m3attn.scales import UNIT, Scale
from m3attn.stages.execute import log_launch

INT_DTYPES = (torch.int32, torch.int64)
MAIN, INDEX = (None, None, None, 1.0, None, 1.0, None), (None, None, 1.0, None)
"""A cache's two halves as the operator takes them, where there is nothing to write."""


def write_slots(
    cache: LayerCache,
    backend: str,
    slots: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    index_slots: torch.Tensor | None = None,
    index_k: torch.Tensor | None = None,
) -> None:
    """Write k and v [T, Hkv, D] at slots [T], index_k [T, Di] or [T, 1, Di] at index_slots [T]; a half that is None is not written.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name.
        NotImplementedError: rows that require grad while gradients are enabled.
    """
    if not torch.compiler.is_compiling():
        _eager(cache, backend, slots, k, v, index_slots, index_k)
        return
    main = MAIN if k is None else pack_kv_cache(cache, mutated=True)
    index = INDEX if index_k is None else pack_index_cache(cache, mutated=True)
    rows = [packed for x in (k, v, index_k) for packed in ((None, None) if x is None else pack(x))]
    _out(*main, *index, slots, index_slots, *rows, backend)


def _eager(
    cache: LayerCache,
    backend: str,
    slots: torch.Tensor | None,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    index_slots: torch.Tensor | None,
    index_k: torch.Tensor | None,
) -> None:
    groups: dict[str, SlotValues] = {}
    if k is not None or v is not None:
        k_cache, v_cache = cache.key_value()
        k_scale, v_scale, _ = cache.scales(k_cache.device)
        groups["k"] = _group("k", k, "slots", slots, k_cache, k_scale)
        groups["v"] = _group("v", v, "slots", slots, v_cache, v_scale)
    if index_k is not None:
        index_cache = cache.index_key()[:, None]
        if isinstance(index_k, torch.Tensor) and index_k.dim() == 2:
            index_k = index_k[:, None]
        _, _, index_scale = cache.scales(index_cache.device)
        groups["index_k"] = _group("index_k", index_k, "index_slots", index_slots, index_cache, index_scale)
    if len({group.values.shape[0] for group in groups.values()}) > 1:
        raise ValueError(f"index_k: expected {groups['k'].values.shape[0]} rows, as k, got {groups['index_k'].values.shape[0]}")
    caches: dict[str, torch.Tensor | None] = {f"cache.{name}": group.cache for name, group in groups.items()}
    inputs: dict[str, torch.Tensor | None] = {name: group.values for name, group in groups.items()}
    check_outputs(caches, inputs | {"slots": slots, "index_slots": index_slots})
    log_launch("pool_set", backend, **inputs, slots=slots, index_slots=index_slots, **caches, **{f"{n}_scale": g.scale for n, g in groups.items()})
    if backend == "plain":
        for group in groups.values():
            insert_plain(group)
        return
    from m3attn.triton_kernels.insert_slots import insert_slots

    insert_slots(groups.get("k"), groups.get("v"), groups.get("index_k"))


def _group(name: str, values: torch.Tensor | None, slots_name: str, slots: torch.Tensor | None, cache: torch.Tensor, scale: Scale) -> SlotValues:
    pages, heads, page_size, dim = cache.shape
    slots = check_tensor(slots_name, slots, ["T"], INT_DTYPES, cache.device, unit_last_stride=False)
    device_checks.check_slots(slots_name, slots, pages * page_size)
    accepted = (*FLOAT_DTYPES, cache.dtype) if is_fp8(cache.dtype) else FLOAT_DTYPES
    values = check_tensor(name, values, [slots.shape[0], heads, dim], accepted, cache.device)
    if torch.is_grad_enabled() and values.requires_grad:
        raise NotImplementedError(f"{name}: expected no gradients, which a cache does not pass on: call under torch.no_grad()")
    return SlotValues(values, cache, slots, UNIT if is_fp8(values.dtype) else scale)


_SCHEMA = (
    f"Tensor(a!)? kv, Tensor(b!)? v_cache, str? kv_dtype, {scale_schema('k_scale')}, {scale_schema('v_scale')}, "
    f"Tensor(c!)? index_cache, str? index_dtype, {scale_schema('index_k_scale')}, Tensor? slots, Tensor? index_slots, "
    "Tensor? k, str? k_dtype, Tensor? v, str? v_dtype, Tensor? index_k, str? index_k_dtype, str backend"
)


def _run_out(*flat: Any) -> None:
    kv, v_cache, kv_dtype, k_scale, k_scale_tensor, v_scale, v_scale_tensor = flat[:7]
    index_cache, index_dtype, index_scale, index_scale_tensor, slots, index_slots = flat[7:13]
    k, k_dtype, v, v_dtype, index_k, index_k_dtype, backend = flat[13:]
    cache = LayerCache(
        kv=kv if v_cache is None else None,
        k=None if v_cache is None else kv,
        v=v_cache,
        index_k=index_cache,
        kv_dtype=kv_dtype,
        index_dtype=index_dtype,
        k_scale=unpack_scale(k_scale, k_scale_tensor),
        v_scale=unpack_scale(v_scale, v_scale_tensor),
        index_k_scale=unpack_scale(index_scale, index_scale_tensor),
    )
    rows = unpack_optional(k, k_dtype, "k"), unpack_optional(v, v_dtype, "v"), unpack_optional(index_k, index_k_dtype, "index_k")
    _eager(cache, backend, slots, rows[0], rows[1], index_slots, rows[2])


_out = define("pool_set_out", f"({_SCHEMA}) -> ()", _run_out, nothing)
