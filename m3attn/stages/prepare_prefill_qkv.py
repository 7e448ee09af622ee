"""prepare_prefill_qkv: what stands between the projections of multi-head latent attention and `mla_prefill`.

Rotation, quantisation and the write of the latent cache belong to the implementation of `mla_prefill`, if it declares so (`prepare_qkv` of its
registration); for the others a plain 16-bit path does it.
"""

from __future__ import annotations

from typing import Any

import torch

from m3attn import device_checks, switches
from m3attn.batch import LatentCache
from m3attn.calls import PreparePrefillQkvCall
from m3attn.checks import check_no_grad, check_outputs, check_tensor
from m3attn.choice import UnsupportedProblem, resolve
from m3attn.dtypes import E4M3, is_fp8
from m3attn.operators import define, pack_mutated, pack_scale, scale_schema, unpack_scale
from m3attn.pools.insert import SlotValues, insert_plain
from m3attn.problem import arch_number, arch_of
from m3attn.reference.mla_quantize import join_heads, rope
from m3attn.registry import Implementation
from m3attn.scales import UNIT, Scale, ScaleLike
from m3attn.stages.execute import log_call
from m3attn.stages.mla import INT_DTYPES, check_heads, check_rotation, shared_head
from m3attn.stages.mla_prefill import prefill_problem

Qkv = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def prepare_prefill_qkv(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    k_nope: torch.Tensor,
    v: torch.Tensor,
    latent: torch.Tensor,
    k_pe: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: LatentCache,
    slots: torch.Tensor,
    *,
    interleaved: bool = False,
    q_scale: ScaleLike = None,
    k_scale: ScaleLike = None,
    v_scale: ScaleLike = None,
    impl: str | None = None,
) -> Qkv:
    """Rotate q_pe and k_pe, write [latent | rotated k_pe] to the cache, and return q, k and v for `mla_prefill`.

    They come in e4m3, divided by their scales, if the cache is e4m3, the implementation of `mla_prefill` declares `prepare_qkv` and fp8
    attention for this architecture, and `M3ATTN_DISABLE_FP8_ATTN_GEMM` is unset. Else they come in the inputs' dtype, and the scales, which
    belong to e4m3 data, are not applied: pass them on to `mla_prefill` only with e4m3 q. A slot outside [0, capacity) writes nothing; a
    position outside the table makes the row a padded one, which writes nothing either and has q and k of zeros.

    Args:
        q_nope: [T, H, nope] bf16, fp16 or fp32; like the other inputs in any strides but a unit last one.
        q_pe: [T, H, rope], not yet rotated, and k_pe: [T, rope] or [T, 1, rope], likewise.
        k_nope: [T, H, nope].
        v: [T, H, d_v].
        latent: [T, latent] or [T, 1, latent].
        positions: [T] int32 or int64.
        cos_sin: [max_position, rope], cosines first, fp32 or q_nope's dtype.
        cache: [pages, page_size, latent + rope] in q_nope's dtype or e4m3, stored = value / cache.scale.
        slots: [T] int32 or int64, page * page_size + offset.
        interleaved: pairs (2i, 2i + 1), else NeoX pairs (i, i + rope / 2).
        q_scale, k_scale, v_scale: of e4m3 q, k and v.
        impl: a registry key of `mla_prefill`; None: the choice in force.

    Returns:
        (q [T, H, nope + rope], k [T, H, nope + rope], v [T, H, d_v]).

    Raises:
        TypeError, ValueError: an argument that does not fit, by name, or what an implementation returned, by the implementation's name.
        UnsupportedProblem: the named implementation of `mla_prefill` cannot run these heads, or an e4m3 cache before SM89.
    """
    if torch.compiler.is_compiling():
        scales = tuple(part for s, name in ((q_scale, "q_scale"), (k_scale, "k_scale"), (v_scale, "v_scale")) for part in pack_scale(s, name))
        flat = (q_nope, q_pe, k_nope, v, latent, k_pe, positions, cos_sin, *pack_mutated(cache.kv, cache.kv_dtype))
        results = _operator(*flat, *pack_scale(cache.scale, "cache.scale"), slots, interleaved, *scales, impl)
        q, k, values = (x.view(E4M3) if x.dtype == torch.uint8 else x for x in results)
        return q, k, values
    inputs = (q_nope, q_pe, k_nope, v, latent, k_pe, positions, cos_sin)
    return _eager(*inputs, cache, slots, interleaved, q_scale, k_scale, v_scale, impl)


def _eager(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    k_nope: torch.Tensor,
    v: torch.Tensor,
    latent: torch.Tensor,
    k_pe: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: LatentCache,
    slots: torch.Tensor,
    interleaved: bool,
    q_scale: ScaleLike,
    k_scale: ScaleLike,
    v_scale: ScaleLike,
    impl: str | None,
) -> Qkv:
    tokens, heads, nope = check_heads("q_nope", q_nope, ["T", "H", "nope"]).shape
    device = q_nope.device
    rope_dim = check_heads("q_pe", q_pe, [tokens, heads, "rope"], q_nope).shape[2]
    check_heads("k_nope", k_nope, [tokens, heads, nope], q_nope)
    check_heads("v", v, [tokens, heads, "d_v"], q_nope)
    latent, k_pe = shared_head("latent", latent, tokens, q_nope), shared_head("k_pe", k_pe, tokens, q_nope)
    check_tensor("k_pe", k_pe, [tokens, rope_dim])
    check_rotation(positions, cos_sin, tokens, rope_dim, q_nope)
    if not isinstance(cache, LatentCache):
        raise TypeError(f"cache: expected a LatentCache, got {type(cache).__name__}")
    pages = cache.tokens()
    check_tensor("cache.kv", pages, ["pages", "page_size", latent.shape[1] + rope_dim], (q_nope.dtype, E4M3), device)
    check_tensor("slots", slots, [tokens], INT_DTYPES, device)
    device_checks.check_slots("slots", slots, pages.shape[0] * pages.shape[1])
    inputs = {"q_nope": q_nope, "q_pe": q_pe, "k_nope": k_nope, "v": v, "latent": latent, "k_pe": k_pe, "positions": positions, "slots": slots}
    check_outputs({"cache.kv": pages}, {**inputs, "cos_sin": cos_sin})
    implementation, dtype = _choose(q_nope, rope_dim, v.shape[2], pages.dtype, impl)
    check_no_grad("mla_prefill", inputs.values())
    scales = [Scale.of(s, argument=name, device=device) for s, name in ((q_scale, "q_scale"), (k_scale, "k_scale"), (v_scale, "v_scale"))]
    q_factor, k_factor, v_factor = scales if is_fp8(dtype) else (UNIT, UNIT, UNIT)
    call = PreparePrefillQkvCall(
        q_nope=q_nope,
        q_pe=q_pe,
        k_nope=k_nope,
        v=v,
        latent=latent,
        k_pe=k_pe,
        positions=positions,
        cos_sin=cos_sin,
        cache=pages,
        slots=slots,
        interleaved=bool(interleaved),
        dtype=dtype,
        q_scale=q_factor,
        k_scale=k_factor,
        v_scale=v_factor,
        cache_scale=Scale.of(cache.scale, argument="cache.scale", device=device),
    )
    log_call("prepare_prefill_qkv", implementation.key, call)
    prepare = implementation.load_prepare_qkv() or prepare_plain
    return _checked(implementation.key, prepare(call), call)


def _choose(q_nope: torch.Tensor, rope_dim: int, value_dim: int, cache_dtype: torch.dtype, impl: str | None) -> tuple[Implementation, torch.dtype]:
    """The implementation of mla_prefill that will run, and the dtype that it gets q, k and v in."""
    _, heads, nope = q_nope.shape
    # int: while tracing with symbolic shapes the geometry is a constant all the same, because the result's dtype hangs on it.
    geometry, arch = (q_nope.device, int(heads), int(nope + rope_dim), int(value_dim)), arch_of(q_nope.device)
    if cache_dtype == E4M3 and 0 < arch_number(arch) < 89:
        raise UnsupportedProblem(f"prepare_prefill_qkv: an e4m3 latent cache on {arch}: needs sm_89 or newer; a 16-bit one works")
    if cache_dtype == E4M3 and switches.disable_fp8_attn_gemm() != "1":
        try:
            implementation = resolve("mla_prefill", prefill_problem(*geometry, E4M3), impl)
        except UnsupportedProblem:
            implementation = None
        if implementation is not None and implementation.prepare_qkv is not None and (arch == "cpu" or arch in implementation.fp8_archs):
            return implementation, E4M3
    return resolve("mla_prefill", prefill_problem(*geometry, q_nope.dtype), impl), q_nope.dtype


def _checked(key: str, results: Any, call: PreparePrefillQkvCall) -> Qkv:
    """What an implementation returned, if it is what `mla_prefill` takes."""
    where = f"prepare_qkv of {key!r}"
    if not isinstance(results, tuple) or len(results) != 3:
        got = f"{len(results)} values" if isinstance(results, tuple) else type(results).__name__
        raise TypeError(f"{where}: expected (q, k, v), got {got}")
    tokens, heads, nope = call.q_nope.shape
    dims = (nope + call.q_pe.shape[2], nope + call.q_pe.shape[2], call.v.shape[2])
    for name, tensor, dim in zip(("q", "k", "v"), results, dims, strict=True):
        check_tensor(f"{where}: {name}", tensor, [tokens, heads, dim], [call.dtype], call.q_nope.device)
        check_outputs({f"{where}: {name}": tensor if tokens else None}, {"cache.kv": call.cache})
    return results


def prepare_plain(call: PreparePrefillQkvCall) -> Qkv:
    """The 16-bit path: rotate, concatenate, and write the latent cache. Reads nothing back to the host where Triton inserts."""
    in_table = (call.positions >= 0) & (call.positions < call.cos_sin.shape[0])
    if call.q_nope.shape[0] == 0 or call.cos_sin.shape[0] == 0:
        return join_heads(call.q_nope, call.q_pe) * 0, join_heads(call.k_nope, call.k_pe) * 0, call.v
    positions = torch.where(in_table, call.positions, 0)
    q_pe, k_pe = (rope(x, positions, call.cos_sin, interleaved=call.interleaved) for x in (call.q_pe, call.k_pe))
    live = in_table[:, None, None]
    q, k = (torch.where(live, join_heads(n, pe).to(call.dtype), 0) for n, pe in ((call.q_nope, q_pe), (call.k_nope, k_pe)))
    slots = torch.where(in_table, call.slots, -1)
    heads, latent_dim = call.cache[:, None], call.latent.shape[1]
    latent = SlotValues(call.latent[:, None], heads[..., :latent_dim], slots, call.cache_scale)
    rotated = SlotValues(k_pe[:, None], heads[..., latent_dim:], slots, call.cache_scale)
    if call.cache.is_cuda:
        from m3attn.triton_kernels.insert_slots import insert_slots

        insert_slots(None, None, latent)
        insert_slots(None, None, rotated)
    else:
        insert_plain(latent)
        insert_plain(rotated)
    return q, k, call.v


_SCHEMA = (
    "Tensor q_nope, Tensor q_pe, Tensor k_nope, Tensor v, Tensor latent, Tensor k_pe, Tensor positions, Tensor cos_sin, "
    f"Tensor(a!) kv, str? kv_dtype, {scale_schema('cache_scale')}, Tensor slots, bool interleaved, "
    f"{scale_schema('q_scale')}, {scale_schema('k_scale')}, {scale_schema('v_scale')}, str? impl"
)


def _run(*flat: Any) -> Qkv:
    kv, kv_dtype, cache_scale, cache_scale_tensor, slots, interleaved, *scales, impl = flat[8:]
    cache = LatentCache(kv, kv_dtype, unpack_scale(cache_scale, cache_scale_tensor))
    arguments = (*flat[:8], cache, slots, interleaved, *(unpack_scale(scales[i], scales[i + 1]) for i in (0, 2, 4)), impl)
    q, k, v = _eager(*arguments)
    # An operator returns no view of an input.
    v = v.clone() if v is flat[3] else v
    q, k, v = (x.view(torch.uint8) if is_fp8(x.dtype) else x for x in (q, k, v))
    return q, k, v


def _fake(q_nope: torch.Tensor, q_pe: torch.Tensor, k_nope: torch.Tensor, v: torch.Tensor, *rest: Any) -> Qkv:
    kv, kv_dtype, impl = rest[4], rest[5], rest[-1]
    _, dtype = _choose(q_nope, q_pe.shape[2], v.shape[2], LatentCache(kv, kv_dtype).tokens().dtype, impl)
    stored = torch.uint8 if is_fp8(dtype) else dtype
    keys = (q_nope.shape[0], q_nope.shape[1], q_nope.shape[2] + q_pe.shape[2])
    q, k, values = (torch.empty(shape, dtype=stored, device=q_nope.device) for shape in (keys, keys, v.shape))
    return q, k, values


_operator = define("prepare_prefill_qkv", f"({_SCHEMA}) -> (Tensor, Tensor, Tensor)", _run, _fake)
