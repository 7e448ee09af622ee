"""What does not fit is refused before anything runs: the message names argument, expected and got, and no tensor has changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from stage_calls import (
    BLOCK,
    BUILDERS,
    HEAD_DIM,
    KV_HEADS,
    NORM_DIM,
    PAGE,
    PAGES,
    Q_HEADS,
    TOKENS,
    TOPK,
    StageCall,
    make_batch,
    make_cache,
    normal,
    raw_bytes,
    tensors_of,
)

import m3attn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
META = torch.device("meta")

Change = Callable[[dict[str, Any]], dict[str, Any]]
Row = tuple[str, Change, type[Exception], str]


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.float().to(dtype)


def fp8_cache(arguments: dict[str, Any], **fields: Any) -> m3attn.LayerCache:
    cache = arguments["cache"]
    return replace(cache, k=cast(cache.k, E4M3), v=cast(cache.v, E4M3), index_k=cast(cache.index_k, E4M3), **fields)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape with a last stride of 2."""
    wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
    return wide[..., ::2]


def expanded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:1].expand(tensor.shape)


def in_batch(**fields: Any) -> Change:
    return lambda a: {"batch": replace(a["batch"], **fields)}


def of_batch(name: str, change: Callable[[torch.Tensor], Any]) -> Change:
    return lambda a: {"batch": replace(a["batch"], **{name: change(getattr(a["batch"], name))})}


def in_cache(**fields: Callable[[torch.Tensor], Any]) -> Change:
    return lambda a: {"cache": replace(a["cache"], **{n: f(getattr(a["cache"], n)) for n, f in fields.items()})}


def give(**values: Any) -> Change:
    return lambda a: values


def edit(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda a: {name: change(a[name])}


def on_meta(name: str) -> Row:
    return f"{name} on another device", edit(name, lambda t: t.to(META)), ValueError, rf"{name}: expected a tensor on cpu, got one on meta"


BATCH: list[Row] = [
    ("batch type", give(batch=None), TypeError, r"batch: expected a PagedBatch, got NoneType"),
    ("seq_lens dtype", of_batch("seq_lens", torch.Tensor.long), TypeError, r"batch.seq_lens: expected torch.int32, got torch.int64"),
    ("seq_lens list", in_batch(seq_lens=[1, 2, 3]), TypeError, r"batch.seq_lens: expected a tensor, got list"),
    ("seq_lens device", of_batch("seq_lens", lambda t: t.to(META)), ValueError, r"batch.seq_lens: expected a tensor on cpu, got one on meta"),
    ("seq_lens rank", of_batch("seq_lens", lambda t: t[:, None]), ValueError, r"batch.seq_lens: expected shape \[B\], got \[3, 1\]"),
    ("page_table rows", of_batch("page_table", lambda t: t[:2]), ValueError, r"batch.page_table: expected shape \[3, max_pages\], got \[2, 4\]"),
    ("page_table dtype", of_batch("page_table", torch.Tensor.long), TypeError, r"batch.page_table: expected torch.int32, got torch.int64"),
    ("page_table device", of_batch("page_table", lambda t: t.to(META)), ValueError, r"batch.page_table: expected a tensor on cpu, got one on meta"),
    ("page_table stride", of_batch("page_table", lambda t: strided(t)), ValueError, r"batch.page_table: expected unit stride.*got strides \(8, 2\)"),
    ("cu_seqlens_q length", of_batch("cu_seqlens_q", lambda t: t[:-1]), ValueError, r"batch.cu_seqlens_q: expected shape \[4\], got \[3\]"),
    ("cu_seqlens_q dtype", of_batch("cu_seqlens_q", torch.Tensor.long), TypeError, r"batch.cu_seqlens_q: expected torch.int32, got torch.int64"),
    ("cu_seqlens_q device", of_batch("cu_seqlens_q", lambda t: t.to(META)), ValueError, r"batch.cu_seqlens_q: expected a tensor on cpu"),
    ("max_seqlen_q type", in_batch(max_seqlen_q=1.0), TypeError, r"batch.max_seqlen_q: expected an int, got float"),
    ("max_seqlen_q negative", in_batch(max_seqlen_q=-1), ValueError, r"batch.max_seqlen_q: expected an int of at least 0, got -1"),
    ("max_seqlen_k tensor", in_batch(max_seqlen_k=torch.tensor(40)), TypeError, r"batch.max_seqlen_k: expected an int, got Tensor"),
    ("page_size 0", in_batch(page_size=0), ValueError, r"batch.page_size: expected an int of at least 1, got 0"),
    ("block_size 0", in_batch(block_size=0), ValueError, r"batch.block_size: expected an int of at least 1, got 0"),
]
SPARSE_BATCH: list[Row] = [
    ("block_size odd", in_batch(block_size=48), ValueError, r"batch.block_size: expected one of 16, 32, 64, 128, 256, got 48"),
    ("block_size below 16", in_batch(block_size=8), ValueError, r"batch.block_size: expected one of 16, .*got 8"),
    ("page above block", in_batch(page_size=32), ValueError, r"batch.page_size: expected a divisor of block_size 16 .*got 32"),
    ("too many blocks", in_batch(max_seqlen_k=16 * 32_768 + 1), ValueError, r"batch.max_seqlen_k: expected at most 32768 blocks of 16, got 32769"),
]
CACHE: list[Row] = [("cache type", give(cache=5), TypeError, r"cache: expected a LayerCache.*, got int")]
INDEX: list[Row] = [
    ("index_q type", give(index_q=[1.0]), TypeError, r"index_q: expected a tensor, got list"),
    ("index_q dtype", edit("index_q", torch.Tensor.int), TypeError, r"index_q: expected torch.bfloat16 or .*got torch.int32"),
    ("index_q e5m2", edit("index_q", lambda t: cast(t, E5M2)), TypeError, r"index_q: expected torch.bfloat16 or .*got torch.float8_e5m2"),
    ("index_q rank", edit("index_q", lambda t: t[0]), ValueError, r"index_q: expected shape \[T, Hi, Di\], got \[2, 64\]"),
    ("index_q no heads", edit("index_q", lambda t: t[:, :0]), ValueError, r"index_q: expected at least one index head, got 0"),
    ("index_q stride", edit("index_q", strided), ValueError, r"index_q: expected unit stride in the last dimension, got strides"),
    ("index_k none", in_cache(index_k=lambda t: None), ValueError, r"cache.index_k: expected \[pages, page_size, Di\], got None"),
    ("index_k rank", in_cache(index_k=lambda t: t[None]), ValueError, r"cache.index_k: expected \[pages, page_size, Di\], got \(1, 8, 16, 64\)"),
    ("index_k dim", in_cache(index_k=lambda t: t[..., :32]), ValueError, r"cache.index_k: expected index dim 64 as index_q, got 32"),
    ("index_k page", in_cache(index_k=lambda t: t[:, :8]), ValueError, r"cache.index_k: expected shape \[pages, 16, Di\], got \[8, 8, 64\]"),
    (
        "index_k e5m2",
        in_cache(index_k=lambda t: cast(t, E5M2)),
        TypeError,
        r"cache.index_k: expected bf16, fp16, fp32 or fp8_e4m3, got torch.float8_e5m2",
    ),
    (
        "index_k uint8",
        in_cache(index_k=lambda t: cast(t, E4M3).view(torch.uint8)),
        TypeError,
        r"cache.index_k: expected .* got uint8 declared as None",
    ),
    ("index_k int8", in_cache(index_k=lambda t: t.to(torch.int8)), TypeError, r"cache.index_k: expected bf16, .*got torch.int8"),
    ("index_k fnuz", in_cache(index_k=lambda t: cast(t, torch.float8_e4m3fnuz)), TypeError, r"cache.index_k: expected .*got torch.float8_e4m3fnuz"),
    ("index_k device", in_cache(index_k=lambda t: t.to(META)), ValueError, r"cache.index_k: expected a tensor on cpu, got one on meta"),
    ("index_k stride", in_cache(index_k=strided), ValueError, r"cache.index_k: expected unit stride in the last dimension"),
    ("index_q_scale nan", give(index_q_scale=float("nan")), ValueError, r"index_q_scale: expected a finite number above 0, got nan"),
    ("index_q_scale 0", give(index_q_scale=0.0), ValueError, r"index_q_scale: expected a finite number above 0, got 0.0"),
    (
        "index_q_scale int tensor",
        give(index_q_scale=torch.ones(1).int()),
        TypeError,
        r"index_q_scale: expected a one-element float32 tensor, got torch.int32",
    ),
    ("index_q_scale two", give(index_q_scale=torch.ones(2)), ValueError, r"index_q_scale: expected a one-element float32 tensor, got shape \(2,\)"),
    ("index_q_scale device", give(index_q_scale=torch.ones(1, device=META)), ValueError, r"index_q_scale: expected a tensor on cpu, got one on meta"),
    ("index_q_scale text", give(index_q_scale="1"), TypeError, r"index_q_scale: expected None, a float or a one-element float32 tensor, got str"),
    (
        "index_k_scale negative",
        lambda a: {"cache": replace(a["cache"], index_k_scale=-1.0)},
        ValueError,
        r"cache.index_k_scale: expected a finite .*got -1.0",
    ),
    (
        "index_k_scale device",
        lambda a: {"cache": replace(a["cache"], index_k_scale=torch.ones(1, device=META))},
        ValueError,
        r"cache.index_k_scale: expected a tensor on cpu, got one on meta",
    ),
]
SELECT: list[Row] = [
    ("topk 0", give(topk=0), ValueError, r"topk: expected an int from 1 to 128, got 0"),
    ("topk 129", give(topk=129), ValueError, r"topk: expected an int from 1 to 128, got 129"),
    ("topk bool", give(topk=True), TypeError, r"topk: expected an int, got bool"),
    ("topk float", give(topk=2.0), TypeError, r"topk: expected an int, got float"),
    ("init_blocks negative", give(init_blocks=-1), ValueError, r"init_blocks: expected an int of at least 0, got -1"),
    ("local_blocks negative", give(local_blocks=-1), ValueError, r"local_blocks: expected an int of at least 0, got -1"),
    ("out dtype", edit("out", torch.Tensor.long), TypeError, r"out: expected torch.int32, got torch.int64"),
    ("out shape", edit("out", lambda t: t[:, :, :1]), ValueError, rf"out: expected shape \[2, {TOKENS}, 2\], got \[2, {TOKENS}, 1\]"),
    ("out head-major", edit("out", lambda t: t.transpose(0, 1)), ValueError, rf"out: expected shape \[2, {TOKENS}, 2\], got \[{TOKENS}, 2, 2\]"),
    ("out expanded", edit("out", expanded), ValueError, r"out: expected a buffer with a place for each element, got an expanded one"),
    on_meta("out"),
]
ATTENTION: list[Row] = [
    ("q type", give(q=None), TypeError, r"q: expected a tensor, got NoneType"),
    ("q dtype", edit("q", torch.Tensor.int), TypeError, r"q: expected bf16, fp16, fp32 or fp8_e4m3, got torch.int32"),
    (
        "q e5m2",
        edit("q", lambda t: cast(t, E5M2)),
        TypeError,
        r"q: expected bf16, fp16, fp32 or fp8_e4m3, got torch.float8_e5m2 \(e5m2 holds too few",
    ),
    ("q rank", edit("q", lambda t: t[None]), ValueError, rf"q: expected shape \[T, Hq, D\], got \[1, {TOKENS}, 4, 64\]"),
    ("q stride", edit("q", strided), ValueError, r"q: expected unit stride in the last dimension"),
    ("q heads", lambda a: {"q": normal(TOKENS, 3, HEAD_DIM)}, ValueError, r"q: expected a multiple of the cache's 2 KV heads, got 3 heads"),
    ("q head dim", lambda a: {"q": normal(TOKENS, Q_HEADS, 32)}, ValueError, r"cache.k: expected head dim 32 as q, got 64"),
    ("16-bit kinds", edit("q", torch.Tensor.half), TypeError, r"cache: expected torch.float16 as q, or an fp8 cache, got torch.bfloat16"),
    (
        "fp8 q, 16-bit cache",
        edit("q", lambda t: cast(t, E4M3)),
        TypeError,
        r"cache: expected an e4m3 cache for e4m3 q, got torch.bfloat16; pass 16-bit q",
    ),
    (
        "fp8 q, e5m2 cache",
        lambda a: {"q": cast(a["q"], E4M3), "cache": replace(a["cache"], k=cast(a["cache"].k, E5M2), v=cast(a["cache"].v, E5M2))},
        TypeError,
        r"cache: expected an e4m3 cache for e4m3 q, got torch.float8_e5m2",
    ),
    ("K and V differ", in_cache(v=torch.Tensor.half), TypeError, r"cache.v: expected torch.bfloat16 as cache.k, got torch.float16"),
    (
        "K e4m3, V e5m2",
        in_cache(k=lambda t: cast(t, E4M3), v=lambda t: cast(t, E5M2)),
        TypeError,
        r"cache.v: expected torch.float8_e4m3fn as cache.k",
    ),
    ("V missing", in_cache(v=lambda t: None), ValueError, r"cache: expected kv, or both k and v, got no v"),
    ("K missing", in_cache(k=lambda t: None), ValueError, r"cache: expected kv, or both k and v, got no k"),
    (
        "kv and k",
        lambda a: {"cache": replace(a["cache"], kv=normal(PAGES, KV_HEADS, PAGE, 128))},
        ValueError,
        r"cache: expected either kv or k and v, got both",
    ),
    (
        "kv odd",
        give(cache=m3attn.LayerCache(kv=normal(PAGES, KV_HEADS, PAGE, 129))),
        ValueError,
        r"cache.kv: expected \[pages, Hkv, page_size, 2 \* D\]",
    ),
    ("K rank", in_cache(k=lambda t: t[0]), ValueError, r"cache.k: expected \[pages, Hkv, page_size, D\], got \(2, 16, 64\)"),
    ("V pages", in_cache(v=lambda t: t[:4]), ValueError, r"cache.v: expected \(8, 2, 16\) \+ \(D,\) as cache.k, got \(4, 2, 16, 64\)"),
    (
        "K page",
        in_cache(k=lambda t: t[:, :, :8], v=lambda t: t[:, :, :8]),
        ValueError,
        "batch.page_size: expected 8, the tokens of a page of cache.k, got 16",
    ),
    ("K stride", in_cache(k=strided), ValueError, r"cache.k: expected unit stride in the last dimension"),
    ("K device", in_cache(k=lambda t: t.to(META)), ValueError, r"cache.k: expected a tensor on cpu, got one on meta"),
    ("V device", in_cache(v=lambda t: t.to(META)), ValueError, r"cache.v: expected a tensor on cpu, got one on meta"),
    ("int8 cache", in_cache(k=lambda t: t.to(torch.int8), v=lambda t: t.to(torch.int8)), TypeError, r"cache.k: expected bf16, .*got torch.int8"),
    (
        "uint8 undeclared",
        in_cache(k=lambda t: cast(t, E4M3).view(torch.uint8), v=lambda t: cast(t, E4M3).view(torch.uint8)),
        TypeError,
        r"cache.k: expected bf16, fp16, fp32, fp8_e4m3, fp8_e5m2, or uint8 with a declared fp8 dtype, got uint8 declared as None",
    ),
    (
        "fnuz cache",
        in_cache(k=lambda t: cast(t, torch.float8_e4m3fnuz), v=lambda t: cast(t, torch.float8_e4m3fnuz)),
        TypeError,
        r"cache.k: expected bf16, .*got torch.float8_e4m3fnuz",
    ),
    (
        "declared otherwise",
        lambda a: {"cache": replace(a["cache"], kv_dtype="fp8")},
        TypeError,
        r"cache.k: declared 'fp8' but the tensor is torch.bfloat16",
    ),
    ("declared fnuz", lambda a: {"cache": replace(a["cache"], kv_dtype="float8_e4m3fnuz")}, ValueError, r"cache.k dtype: expected one of .*fnuz"),
    ("fp8_pv on bf16", give(fp8_pv=True), ValueError, r"fp8_pv: expected e4m3 q, K and V, got q torch.bfloat16"),
    ("q_scale 0", give(q_scale=0), ValueError, r"q_scale: expected a finite number above 0, got 0"),
    ("q_scale inf", give(q_scale=float("inf")), ValueError, r"q_scale: expected a finite number above 0, got inf"),
    ("q_scale bool", give(q_scale=True), TypeError, r"q_scale: expected None, a float or a one-element float32 tensor, got bool"),
    ("q_scale fp64 tensor", give(q_scale=torch.ones(1).double()), TypeError, r"q_scale: expected a one-element float32 tensor, got torch.float64"),
    ("q_scale device", give(q_scale=torch.ones(1, device=META)), ValueError, r"q_scale: expected a tensor on cpu, got one on meta"),
    ("k_scale nan", lambda a: {"cache": fp8_cache(a, k_scale=float("nan"))}, ValueError, r"cache.k_scale: expected a finite number above 0, got nan"),
    ("v_scale negative", lambda a: {"cache": fp8_cache(a, v_scale=-2.0)}, ValueError, r"cache.v_scale: expected a finite number above 0, got -2.0"),
    (
        "v_scale int tensor",
        lambda a: {"cache": fp8_cache(a, v_scale=torch.ones(1).int())},
        TypeError,
        r"cache.v_scale: expected a one-element float32",
    ),
    ("k_scale device", lambda a: {"cache": fp8_cache(a, k_scale=torch.ones(1, device=META))}, ValueError, r"cache.k_scale: expected a tensor on cpu"),
    ("sm_scale text", give(sm_scale="1"), TypeError, r"sm_scale: expected a float, got str"),
    ("sm_scale tensor", give(sm_scale=torch.ones(())), TypeError, r"sm_scale: expected a float, got Tensor"),
    ("sm_scale nan", give(sm_scale=float("nan")), ValueError, r"sm_scale: expected a finite number, got nan"),
    ("sink_key heads", edit("sink_key", lambda t: t[:2]), ValueError, r"sink_key: expected shape \[4, 64\], got \[2, 64\]"),
    ("sink_key fp8", edit("sink_key", lambda t: cast(t, E4M3)), TypeError, r"sink_key: expected torch.bfloat16 or .*got torch.float8_e4m3fn"),
    on_meta("sink_key"),
    ("out dtype", edit("out", torch.Tensor.float), TypeError, r"out: expected torch.bfloat16, got torch.float32"),
    ("out shape", edit("out", lambda t: t[:-1]), ValueError, rf"out: expected shape \[{TOKENS}, 4, 64\], got \[{TOKENS - 1}, 4, 64\]"),
    ("out stride", edit("out", strided), ValueError, r"out: expected unit stride in the last dimension"),
    ("out expanded", edit("out", expanded), ValueError, r"out: expected a buffer with a place for each element"),
    ("out is q", lambda a: {"out": a["q"]}, ValueError, r"out: expected a buffer of its own, got one that overlaps q"),
    ("out type", give(out=3), TypeError, r"out: expected a tensor, got int"),
    on_meta("out"),
    (
        "out in K",
        lambda a: {"out": a["cache"].k.view(-1)[: TOKENS * Q_HEADS * HEAD_DIM].view(TOKENS, Q_HEADS, HEAD_DIM)},
        ValueError,
        r"overlaps cache.k",
    ),
    (
        "out for fp8",
        lambda a: {"q": cast(a["q"], E4M3), "cache": fp8_cache(a), "out": cast(a["out"], E4M3)},
        TypeError,
        r"out: expected torch.bfloat16",
    ),
    ("lse_out dtype", edit("lse_out", torch.Tensor.double), TypeError, r"lse_out: expected torch.float32, got torch.float64"),
    ("lse_out shape", edit("lse_out", lambda t: t.T), ValueError, rf"lse_out: expected shape \[{TOKENS}, 4\], got \[4, {TOKENS}\]"),
    ("lse_out strides", edit("lse_out", lambda t: t.T.contiguous().T), ValueError, r"lse_out: expected"),
    on_meta("lse_out"),
    ("lse_out in out", lambda a: _lse_within_out(a), ValueError, r"out: expected a buffer of its own, got one that overlaps lse_out"),
    ("impl", give(impl="tritom"), ValueError, r"impl: expected one of reference, triton.*got 'tritom'"),
]


def _lse_within_out(arguments: dict[str, Any]) -> dict[str, Any]:
    storage = torch.zeros(TOKENS * Q_HEADS * HEAD_DIM, dtype=torch.bfloat16)
    return {"out": storage.view(TOKENS, Q_HEADS, HEAD_DIM), "lse_out": storage[: 2 * TOKENS * Q_HEADS].view(torch.float32).view(TOKENS, Q_HEADS)}


IDS: list[Row] = [
    ("ids type", give(ids=[[0]]), TypeError, r"ids: expected a tensor, got list"),
    ("ids dtype", edit("ids", torch.Tensor.long), TypeError, r"ids: expected torch.int32, got torch.int64"),
    ("ids rank", edit("ids", lambda t: t[0]), ValueError, rf"ids: expected shape \[Hkv, T, K\], got \[{TOKENS}, 2\]"),
    ("ids token-major", edit("ids", lambda t: t.transpose(0, 1)), ValueError, rf"ids: expected shape \[2, {TOKENS}, 2\], got \[{TOKENS}, 2, 2\]"),
    ("ids heads", edit("ids", lambda t: t[:1]), ValueError, rf"ids: expected shape \[2, {TOKENS}, 2\], got \[1, {TOKENS}, 2\]"),
    ("ids no blocks", edit("ids", lambda t: t[..., :0]), ValueError, r"ids.shape\[2\]: expected an int from 1 to 128, got 0"),
    ("ids too many", edit("ids", lambda t: t.repeat(1, 1, 65)), ValueError, r"ids.shape\[2\]: expected an int from 1 to 128, got 130"),
    on_meta("ids"),
]
NORM: list[Row] = [
    ("qkv type", give(qkv=None), TypeError, r"qkv: expected a tensor, got NoneType"),
    ("qkv dtype", edit("qkv", torch.Tensor.int), TypeError, r"qkv: expected torch.bfloat16 or .*got torch.int32"),
    ("qkv fp8", edit("qkv", lambda t: cast(t, E4M3)), TypeError, r"qkv: expected torch.bfloat16 or .*got torch.float8_e4m3fn"),
    ("qkv width", edit("qkv", lambda t: t[:, :-128]), ValueError, rf"qkv: expected shape \[T, 1408\], got \[{TOKENS}, 1280\]"),
    ("qkv rank", edit("qkv", lambda t: t[0]), ValueError, r"qkv: expected shape \[T, 1408\], got \[1408\]"),
    ("qkv stride", edit("qkv", strided), ValueError, r"qkv: expected unit stride in the last dimension"),
    ("heads count", give(heads=(4,)), ValueError, r"heads: expected \(Hq, Hkv, Hi\) or \(Hq, Hkv\), got \(4,\)"),
    ("heads zero", give(heads=(0, 2, 2)), ValueError, r"heads\[0\] \(q\): expected an int of at least 1, got 0"),
    ("heads float", give(heads=(4, 2.0, 2)), TypeError, r"heads\[1\] \(kv\): expected an int, got float"),
    ("heads not a multiple", lambda a: _row_of(a, (3, 2, 2)), ValueError, r"heads: expected q heads to be a multiple of the 2 KV heads, got 3"),
    ("weights type", give(weights=None), TypeError, r"weights: expected the norm weights of q, k, index_q, index_k, got NoneType"),
    ("weights count", edit("weights", lambda w: w[:1]), ValueError, r"weights: expected the norm weights of q, k and.*got 1"),
    ("weights index", edit("weights", lambda w: w[:2]), TypeError, r"weights.index_q: expected a tensor, got NoneType"),
    ("weights shape", edit("weights", lambda w: (w[0][:64], *w[1:])), ValueError, r"weights.q: expected shape \[128\], got \[64\]"),
    (
        "weights dtype",
        edit("weights", lambda w: (w[0], w[1].half(), *w[2:])),
        TypeError,
        r"weights.k: expected torch.float32 or torch.bfloat16, got torch.float16",
    ),
    ("weights device", edit("weights", lambda w: (*w[:3], w[3].to(META))), ValueError, r"weights.index_k: expected a tensor on cpu, got one on meta"),
    ("positions dtype", edit("positions", torch.Tensor.float), TypeError, r"positions: expected torch.int32 or torch.int64, got torch.float32"),
    ("positions length", edit("positions", lambda t: t[:-1]), ValueError, rf"positions: expected shape \[{TOKENS}\], got \[{TOKENS - 1}\]"),
    on_meta("positions"),
    ("cos_sin odd", edit("cos_sin", lambda t: t[:, :63]), ValueError, r"cos_sin: expected an even rotary_dim from 2 to 128, got 63"),
    ("cos_sin wide", give(cos_sin=torch.zeros(4, 256)), ValueError, r"cos_sin: expected an even rotary_dim from 2 to 128, got 256"),
    ("cos_sin dtype", edit("cos_sin", torch.Tensor.half), TypeError, r"cos_sin: expected torch.float32 or torch.bfloat16, got torch.float16"),
    on_meta("cos_sin"),
    ("slots missing", give(slots=None), TypeError, r"slots: expected a tensor, got NoneType"),
    ("slots dtype", edit("slots", torch.Tensor.short), TypeError, r"slots: expected torch.int32 or torch.int64, got torch.int16"),
    ("slots length", edit("slots", lambda t: t[1:]), ValueError, rf"slots: expected shape \[{TOKENS}\], got \[{TOKENS - 1}\]"),
    on_meta("slots"),
    ("index_slots missing", give(index_slots=None), TypeError, r"index_slots: expected a tensor, got NoneType"),
    ("slots without cache", give(cache=None), ValueError, r"slots: expected None without a cache, got slots to write to nowhere"),
    (
        "cache heads",
        give(cache=make_cache(dim=NORM_DIM).__class__(kv=normal(2, 3, PAGE, 256))),
        ValueError,
        r"cache.k: expected shape \[pages, 2, page_size, 128\]",
    ),
    ("cache fp16", give(cache=make_cache(torch.float16, dim=NORM_DIM)), TypeError, r"cache.k: expected torch.bfloat16 or .*got torch.float16"),
    (
        "index e5m2",
        in_cache(index_k=lambda t: cast(t, E5M2)),
        TypeError,
        r"cache.index_k: expected torch.bfloat16 or torch.float8_e4m3fn, got torch.float8_e5m2",
    ),
    ("index missing", in_cache(index_k=lambda t: None), ValueError, r"cache.index_k: expected \[pages, page_size, Di\], got None"),
    ("q_out shape", edit("q_out", lambda t: t[:, :2]), ValueError, rf"q_out: expected shape \[{TOKENS}, 4, 128\], got \[{TOKENS}, 2, 128\]"),
    ("q_out e5m2", edit("q_out", lambda t: cast(t, E5M2)), TypeError, r"q_out: expected torch.bfloat16 or .*got torch.float8_e5m2"),
    on_meta("q_out"),
    ("q_out in qkv", lambda a: {"q_out": a["qkv"][:, : Q_HEADS * NORM_DIM].unflatten(1, (Q_HEADS, NORM_DIM))}, ValueError, r"q_out: .*overlaps qkv"),
    ("q_out in cache", lambda a: {"q_out": a["cache"].kv.view(-1)[: TOKENS * 512].view(TOKENS, 4, 128)}, ValueError, r"q_out: .*overlaps cache"),
    ("index_q_out dense", lambda a: {"heads": (4, 2), "qkv": a["qkv"][:, :1024]}, ValueError, r"index_q_out: expected None without an index branch"),
    ("index_q_out skipped", give(skip_index=True), ValueError, r"index_q_out: expected None without an index branch"),
    (
        "K is V",
        lambda a: {"cache": m3attn.LayerCache(k=a["cache"].kv[..., :128], v=a["cache"].kv[..., :128], index_k=a["cache"].index_k)},
        ValueError,
        "overlaps cache.v",
    ),
    ("q_scale on bf16", give(q_scale=2.0), ValueError, r"q_scale: expected None where the data is torch.bfloat16"),
    ("q_scale device tensor on bf16", give(q_scale=torch.ones(1)), ValueError, r"q_scale: expected None where the data is torch.bfloat16"),
    (
        "k_scale on bf16",
        lambda a: {"cache": replace(a["cache"], k_scale=0.5)},
        ValueError,
        r"cache.k_scale: expected None where the data is torch.bfloat16",
    ),
    ("eps text", give(eps="small"), TypeError, r"eps: expected a float, got str"),
    ("eps nan", give(eps=float("nan")), ValueError, r"eps: expected a finite number, got nan"),
]


def _row_of(arguments: dict[str, Any], heads: tuple[int, int, int]) -> dict[str, Any]:
    width = (heads[0] + 2 * heads[1] + heads[2] + 1) * NORM_DIM
    outs = {"q_out": normal(TOKENS, heads[0], NORM_DIM), "index_q_out": normal(TOKENS, heads[2], NORM_DIM)}
    return {"qkv": normal(TOKENS, width), "heads": heads} | outs


MERGE: list[Row] = [
    ("out_a type", give(out_a=1), TypeError, r"out_a: expected a tensor, got int"),
    ("out_a dtype", edit("out_a", torch.Tensor.int), TypeError, r"out_a: expected torch.bfloat16 or .*got torch.int32"),
    ("out_a stride", edit("out_a", strided), ValueError, r"out_a: expected unit stride in the last dimension"),
    ("out_b dtype", edit("out_b", torch.Tensor.half), TypeError, r"out_b: expected torch.bfloat16, got torch.float16"),
    ("out_b shape", edit("out_b", lambda t: t[:, :1]), ValueError, rf"out_b: expected shape \[{TOKENS}, 4, 64\], got \[{TOKENS}, 1, 64\]"),
    ("lse_a dtype", edit("lse_a", torch.Tensor.half), TypeError, r"lse_a: expected torch.float32, got torch.float16"),
    ("lse_b shape", edit("lse_b", lambda t: t.T), ValueError, rf"lse_b: expected shape \[{TOKENS}, 4\], got \[4, {TOKENS}\]"),
    *(on_meta(name) for name in ("lse_a", "out_b", "lse_b")),
]
QUANTIZE: list[Row] = [
    ("x type", give(x=[1.0]), TypeError, r"x: expected a tensor, got list"),
    ("x dtype", edit("x", torch.Tensor.int), TypeError, r"x: expected torch.bfloat16 or .*got torch.int32"),
    ("x fp8", edit("x", lambda t: cast(t, E4M3)), TypeError, r"x: expected torch.bfloat16 or .*got torch.float8_e4m3fn"),
    ("x rank 0", give(x=torch.tensor(1.0)), ValueError, r"x: expected 1 to 4 dimensions, got shape \[\]"),
    ("x rank 5", give(x=torch.zeros(1, 1, 1, 1, 2)), ValueError, r"x: expected 1 to 4 dimensions, got shape \[1, 1, 1, 1, 2\]"),
    ("x stride", edit("x", strided), ValueError, r"x: expected unit stride in the last dimension"),
    ("dtype name", give(dtype="fp7"), ValueError, r"dtype: expected one of fp8_e4m3, fp8_e5m2 .*got 'fp7'"),
    ("dtype 16 bit", give(dtype=torch.bfloat16), ValueError, r"dtype: expected one of fp8_e4m3, fp8_e5m2 .*got torch.bfloat16"),
    ("dtype fnuz", give(dtype=torch.float8_e4m3fnuz), ValueError, r"dtype: expected one of fp8_e4m3, fp8_e5m2 .*fnuz"),
    ("scale 0", give(scale=0.0), ValueError, r"scale: expected a finite number above 0, got 0.0"),
    ("scale name", give(scale="column"), ValueError, r"scale: expected None, a float, .*'tensor' or 'row', got 'column'"),
    ("scale two", give(scale=torch.ones(2)), ValueError, r"scale: expected a one-element float32 tensor, got shape \(2,\)"),
    ("scale device", give(scale=torch.ones(1, device=META)), ValueError, r"scale: expected a tensor on cpu, got one on meta"),
    ("out dtype", edit("out", lambda t: cast(t, E5M2)), TypeError, r"out: expected torch.float8_e4m3fn, got torch.float8_e5m2"),
    ("out shape", edit("out", lambda t: t[:, :4]), ValueError, r"out: expected shape \[3, 5, 32\], got \[3, 4, 32\]"),
    ("out stride", edit("out", strided), ValueError, r"out: expected unit stride in the last dimension"),
    ("out in x", lambda a: {"out": a["x"].view(E4M3)[..., :32]}, ValueError, r"out: expected a buffer of its own, got one that overlaps x"),
    on_meta("out"),
]
SCORES: list[Row] = [
    ("scores type", give(scores=None), TypeError, r"scores: expected a tensor, got NoneType"),
    ("scores dtype", edit("scores", torch.Tensor.half), TypeError, r"scores: expected torch.float32, got torch.float16"),
    ("scores rank", edit("scores", lambda t: t[0]), ValueError, rf"scores: expected shape \[Hkv, T, blocks\], got \[{TOKENS}, 3\]"),
    ("scores columns", edit("scores", lambda t: t[..., :2]), ValueError, r"scores: expected 3 columns, ceil\(max_seqlen_k / block_size\), got 2"),
    (
        "out in scores",
        lambda a: {"out": a["scores"].view(torch.int32)[..., :2]},
        ValueError,
        r"out: expected a buffer of its own, got one that overlaps scores",
    ),
]
SCORE_OUT: list[Row] = [
    ("out dtype", edit("out", torch.Tensor.half), TypeError, r"out: expected torch.float32, got torch.float16"),
    ("out columns", edit("out", lambda t: t[..., :2]), ValueError, rf"out: expected shape \[2, {TOKENS}, 3\], got \[2, {TOKENS}, 2\]"),
    ("out expanded", edit("out", expanded), ValueError, r"out: expected a buffer with a place for each element"),
    on_meta("out"),
]
WORKSPACE: list[Row] = [("impl", give(impl=""), ValueError, r"impl: expected one of reference, triton.*got ''")]

TABLE: dict[str, list[Row]] = {
    "qk_norm_rope_insert": NORM + CACHE,
    "index_score": INDEX + BATCH + SPARSE_BATCH + CACHE + SCORE_OUT,
    "select_blocks": SCORES + SELECT + BATCH + SPARSE_BATCH,
    "index_topk": INDEX + SELECT + BATCH + SPARSE_BATCH + CACHE + WORKSPACE,
    "sparse_attention": ATTENTION + IDS + BATCH + SPARSE_BATCH + CACHE,
    "dense_attention": ATTENTION + BATCH + CACHE,
    "merge_attention_states": MERGE,
    "quantize_fp8": QUANTIZE,
}
ROWS = [(stage, *row) for stage, rows in TABLE.items() for row in rows]


@pytest.fixture(scope="module")
def calls() -> dict[str, StageCall]:
    return {stage: build() for stage, build in BUILDERS.items()}


@pytest.mark.parametrize("stage, name, change, error, message", ROWS, ids=[f"{stage}-{name.replace(' ', '_')}" for stage, name, *_ in ROWS])
def test_bad_input(calls: dict[str, StageCall], stage: str, name: str, change: Change, error: type[Exception], message: str) -> None:
    call = calls[stage]
    arguments = call.arguments | change(call.arguments)
    before = [(where, tensor, raw_bytes(tensor)) for where, tensor in tensors_of(arguments) if tensor.device.type == "cpu"]
    with pytest.raises(error, match=message):
        call.function(**arguments)
    for where, tensor, content in before:
        assert torch.equal(raw_bytes(tensor), content), f"{where} was written to"


@pytest.mark.parametrize("stage", BUILDERS)
def test_the_unchanged_call_works(stage: str) -> None:
    BUILDERS[stage]()()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", ["hnd", "nhd", "layers"])
def test_caches_whose_bytes_interleave_are_not_taken_for_overlapping(packed: bool, layout: str) -> None:
    width = 2 * NORM_DIM if packed else NORM_DIM
    if layout == "layers":
        storage = normal(PAGES, 3, 2, KV_HEADS, PAGE, width)
        first, second = storage[:, 1, 0], storage[:, 1, 1]
    elif layout == "nhd":
        storage = normal(PAGES, PAGE, 2 * KV_HEADS, width).transpose(1, 2)
        first, second = storage[:, :KV_HEADS], storage[:, KV_HEADS:]
    else:
        storage = normal(PAGES, 2 * KV_HEADS, PAGE, width)
        first, second = storage[:, ::2], storage[:, 1::2]
    call = BUILDERS["qk_norm_rope_insert"]()
    cache = m3attn.LayerCache(kv=first) if packed else m3attn.LayerCache(k=first, v=second)
    call(cache=replace(cache, index_k=call.arguments["cache"].index_k))


def test_outputs_may_lie_beside_their_inputs_in_one_allocation() -> None:
    call = BUILDERS["dense_attention"]()
    storage = normal(TOKENS, 2 * Q_HEADS, HEAD_DIM)
    got = call(q=storage[:, :Q_HEADS], out=storage[:, Q_HEADS:])
    assert got[0].data_ptr() == storage[:, Q_HEADS:].data_ptr()


def test_block_and_page_constants_are_those_of_the_contract() -> None:
    for block in (16, 32, 64, 128, 256):
        batch = make_batch(block_size=block)
        scores = normal(KV_HEADS, TOKENS, batch.num_blocks, dtype=torch.float32)
        assert m3attn.select_blocks(scores, batch, topk=TOPK).shape == (KV_HEADS, TOKENS, TOPK)
    assert BLOCK == 16
    wide = normal(KV_HEADS, 1, 32_768, dtype=torch.float32)
    step = m3attn.PagedBatch.from_lengths([1], [5], torch.zeros(1, 1, dtype=torch.int32), page_size=16, block_size=16, max_seqlen_k=16 * 32_768)
    assert m3attn.select_blocks(wide, step, topk=128).shape == (KV_HEADS, 1, 128)
