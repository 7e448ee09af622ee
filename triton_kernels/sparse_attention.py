"""Sparse attention over selected blocks: which schedule and launch settings a call takes, and the scratch it needs.

Prefill (more than 16 queries a request): one program a token and group. An fp8 cache that is read often enough is first widened into a
scratch copy. Decode and verify: the keys of a token are split among programs while tokens and groups are too few to fill a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from m3attn.batch import DECODE_MAX_SEQLEN_Q, PagedBatch
from m3attn.calls import SparseAttentionCall
from m3attn.dtypes import is_fp8
from m3attn.problem import arch_number
from m3attn.triton_kernels.launch import current_arch, launch, next_power_of_2
from m3attn.triton_kernels.merge_splits import merge_splits
from m3attn.triton_kernels.rows import block_b
from m3attn.triton_kernels.sparse_decode import sparse_decode_kernel
from m3attn.triton_kernels.sparse_prefill import sparse_prefill_kernel
from m3attn.triton_kernels.widen_pages import widen_pages
from m3attn.workspace import WorkShape, carve, workspace_limit


@dataclass(frozen=True, slots=True)
class Settings:
    """How a kernel is launched.

    Attributes:
        block_n: keys a step, at most; `fit` fits it to the block size and to shared memory.
        programs: decode splits keys until about so many programs run.
    """

    block_n: int
    num_warps: int
    num_stages: int
    programs: int = 512


@dataclass(frozen=True, slots=True)
class Tier:
    """Settings for calls of up to `most_rows` rows, a row being one token's group of heads."""

    most_rows: int
    settings: Settings


ANY = 1 << 62
SETTINGS: dict[tuple[str, str], tuple[Tier, ...]] = {
    ("prefill", "half"): (Tier(ANY, Settings(32, 1, 3)),),
    ("prefill", "widen"): (Tier(ANY, Settings(32, 1, 3)),),
    ("prefill", "fp8"): (Tier(ANY, Settings(32, 1, 3)),),
    ("prefill", "fp32"): (Tier(ANY, Settings(16, 8, 2)),),
    ("decode", "half"): (
        Tier(32, Settings(128, 4, 3)),
        Tier(128, Settings(64, 2, 3, 256)),
        Tier(256, Settings(64, 4, 3, 256)),
        Tier(ANY, Settings(128, 4, 2, 256)),
    ),
    ("decode", "widen"): (
        Tier(32, Settings(128, 4, 2)),
        Tier(128, Settings(32, 2, 5)),
        Tier(256, Settings(128, 4, 3, 256)),
        Tier(ANY, Settings(64, 4, 3, 256)),
    ),
    ("decode", "fp8"): (
        Tier(32, Settings(128, 4, 2)),
        Tier(128, Settings(32, 2, 5)),
        Tier(256, Settings(128, 4, 3, 256)),
        Tier(ANY, Settings(64, 4, 3, 256)),
    ),
    ("decode", "fp32"): (Tier(ANY, Settings(16, 8, 2)),),
}
"""(phase, mode) -> settings by size, measured on an H200; verify takes decode's, fp8_pv takes fp8's."""

CANDIDATES: dict[str, list[Settings]] = {
    "prefill": [
        Settings(block_n, num_warps, num_stages)
        for block_n, num_warps, num_stages in (
            *((128, warps, stages) for warps in (4, 8) for stages in (2, 3)),
            *((64, warps, stages) for warps in (2, 4) for stages in (2, 3, 4)),
            *((32, warps, stages) for warps in (1, 2) for stages in (3, 4, 5)),
        )
    ],
    "decode": [
        Settings(block_n, num_warps, num_stages, programs)
        for block_n, num_warps, num_stages in (
            *((128, 4, 2), (128, 4, 3), (128, 8, 3), (64, 4, 3), (64, 4, 4), (64, 2, 3), (64, 2, 4)),
            *((32, 2, 3), (32, 2, 4), (32, 2, 5), (32, 1, 3), (32, 1, 4), (32, 1, 6)),
        )
        for programs in (256, 512, 1024)
    ],
}
"""What a GPU sweep tries, by phase."""

settings_override: Settings | None = None
"""Set by a tuner: the settings of every launch, whatever phase and mode."""

MIN_READS_TO_WIDEN = 4
"""A prefill widens its cache beforehand if its queries select, together, at least so many times the tokens in it."""


def mode_of(q: torch.Tensor, k: torch.Tensor) -> str:
    """The mode part of a key of `SETTINGS`."""
    if is_fp8(q.dtype):
        return "fp8"
    if q.dtype == torch.float32:
        return "fp32"
    return "widen" if is_fp8(k.dtype) else "half"


def settings_of(phase: str, mode: str, rows: int) -> Settings:
    """The table's settings for `rows` tokens times KV groups, or the tuner's."""
    return settings_override or next(tier.settings for tier in SETTINGS[phase, mode] if rows <= tier.most_rows)


def fit(settings: Settings, arch: str, bytes_per_key: int, block_size: int) -> Settings:
    """`settings`, shrunk until the keys and values in flight fit the architecture's shared memory.

    Args:
        bytes_per_key: of one key and its value, each padded to a power of two, as they lie in shared memory.
    """
    # 163, 227 or 99 KB, less room for the softmax weights and reductions on their way between warps.
    number = arch_number(arch)
    capacity = (90 if number in (86, 89) or number >= 120 else 150 if number < 90 else 210) * 1024
    block_n, num_stages = min(settings.block_n, block_size), settings.num_stages
    while num_stages > 2 and block_n * bytes_per_key * (num_stages - 1) > capacity:
        num_stages -= 1
    while block_n > 16 and block_n * bytes_per_key > capacity:
        block_n //= 2
    return replace(settings, block_n=block_n, num_stages=num_stages)


def num_splits(settings: Settings, tokens: int, num_q_heads: int, num_kv_heads: int, head_dim: int, keys: int, limit: int) -> int:
    """Into how many parts decode cuts a token's `keys` selected keys: a power of two, of at least one step each, whose partials fit `limit`."""
    splits = max(1, min(settings.programs // (tokens * num_kv_heads), keys // settings.block_n))
    splits = 1 << (splits.bit_length() - 1)
    while splits > 1 and _partial_bytes(splits, tokens, num_q_heads, head_dim) > limit:
        splits //= 2
    return splits


def groups_to_widen(tokens: int, num_requests: int, num_kv_heads: int, head_dim: int, keys: int, num_blocks: int, block_size: int, limit: int) -> int:
    """How many KV groups' widened copies prefill holds at a time within `limit`; 0: programs widen what they read."""
    cached = num_requests * num_blocks * block_size
    if cached == 0 or tokens * keys < MIN_READS_TO_WIDEN * cached:
        return 0
    return max(0, min(num_kv_heads, (limit - _table_bytes(num_requests, num_blocks)) // (cached * head_dim * 4)))


def workspace_bytes(shape: WorkShape) -> int:
    """Scratch of a call: decode's partials, splits * T * Hq * (4 D + 4), or prefill's widened copies, B * max_seqlen_k * Hkv * 4 D.

    Copies are made of fp8 caches only, and groups go one after another where all of them exceed the limit.
    """
    if shape.tokens == 0 or shape.num_requests == 0:
        return 0
    if shape.max_seqlen_q <= DECODE_MAX_SEQLEN_Q:
        return _most_partial_bytes(shape, settings_override)
    keys = shape.topk * shape.block_size
    if not shape.kv_dtype.startswith("fp8"):
        return 0
    groups = groups_to_widen(
        shape.tokens, shape.num_requests, shape.num_kv_heads, shape.head_dim, keys, shape.num_blocks, shape.block_size, shape.limit
    )
    if groups == 0:
        return 0
    copies = shape.num_requests * shape.num_blocks * shape.block_size * groups * shape.head_dim * 4
    return copies + _table_bytes(shape.num_requests, shape.num_blocks)


@lru_cache(maxsize=4096)
def _most_partial_bytes(shape: WorkShape, _override: Settings | None) -> int:
    """Of any mode, which a shape does not say; remembered, because a call asks for it each time."""
    heads = (shape.num_q_heads, shape.num_kv_heads, shape.head_dim)
    table = [settings_of(phase, mode, shape.tokens * shape.num_kv_heads) for phase, mode in SETTINGS if phase == "decode"]
    splits = max(num_splits(settings, shape.tokens, *heads, shape.topk * shape.block_size, shape.limit) for settings in table)
    return _partial_bytes(splits, shape.tokens, shape.num_q_heads, shape.head_dim)


def _partial_bytes(splits: int, tokens: int, num_q_heads: int, head_dim: int) -> int:
    return 0 if splits == 1 else splits * tokens * num_q_heads * (head_dim + 1) * 4 + 512


def _table_bytes(num_requests: int, num_blocks: int) -> int:
    """The page table of the copies, and what carving three tensors may lose to alignment."""
    return num_requests * num_blocks * 4 + 768


def sparse_attention(call: SparseAttentionCall) -> None:
    """Attention of every query over the visible keys of its selected blocks; fills call.out and call.lse."""
    if call.q.shape[0] == 0:
        return
    if call.batch.num_requests == 0:
        call.out.zero_()
        if call.lse is not None:
            call.lse.fill_(float("-inf"))
        return
    if call.batch.phase == "prefill":
        _prefill(call)
    else:
        _decode(call)


def _prefill(call: SparseAttentionCall) -> None:
    batch = call.batch
    tokens, _, head_dim = call.q.shape
    num_kv_heads, topk = call.k.shape[1], call.ids.shape[2]
    groups = 0
    if is_fp8(call.k.dtype) and call.q.dtype != torch.float32:
        keys = topk * batch.block_size
        groups = groups_to_widen(tokens, batch.num_requests, num_kv_heads, head_dim, keys, batch.num_blocks, batch.block_size, workspace_limit())
    if groups == 0:
        _attend(call, "prefill", call.k, call.v, batch, slice(0, num_kv_heads))
        return
    assert call.workspace is not None
    # e4m3 queries take e4m3 keys, so only the place of the keys changes there.
    k_dtype = call.k.dtype if is_fp8(call.q.dtype) else call.q.dtype
    num_pages = batch.num_requests * batch.num_blocks
    for first in range(0, num_kv_heads, groups):
        heads = slice(first, min(first + groups, num_kv_heads))
        copy_shape = (num_pages, heads.stop - first, batch.block_size, head_dim)
        wide_table, offset = carve(call.workspace, 0, (batch.num_requests, batch.num_blocks), torch.int32)
        wide_k, offset = carve(call.workspace, offset, copy_shape, k_dtype)
        wide_v, _ = carve(call.workspace, offset, copy_shape, torch.float16)
        widen_pages(call.k[:, heads], call.v[:, heads], wide_k, wide_v, wide_table, batch)
        _attend(call, "prefill", wide_k, wide_v, replace(batch, page_table=wide_table, page_size=batch.block_size), heads)


def _decode(call: SparseAttentionCall) -> None:
    tokens, num_q_heads, head_dim = call.q.shape
    num_kv_heads, topk = call.k.shape[1], call.ids.shape[2]
    settings = settings_of("decode", mode_of(call.q, call.k), tokens * num_kv_heads)
    splits = num_splits(settings, tokens, num_q_heads, num_kv_heads, head_dim, topk * call.batch.block_size, workspace_limit())
    if splits == 1:
        _attend(call, "decode", call.k, call.v, call.batch, slice(0, num_kv_heads))
        return
    assert call.workspace is not None
    partial_out, offset = carve(call.workspace, 0, (splits, tokens, num_q_heads, head_dim), torch.float32)
    partial_lse, _ = carve(call.workspace, offset, (splits, tokens, num_q_heads), torch.float32)
    v = _pairs(call.v)
    pdl = arch_number(current_arch(call.q.device)) >= 90
    settings, tiles = _tiles("decode", call.q, call.k, call.v, call.ids, call.batch)
    launch(
        sparse_decode_kernel,
        (tokens, num_kv_heads, splits),
        call.q,
        call.k,
        v,
        call.ids,
        partial_out,
        partial_lse,
        call.batch.page_table,
        call.batch.seq_lens,
        call.batch.cu_seqlens_q,
        call.q_scale.tensor,
        call.k_scale.tensor,
        call.sm_scale,
        call.q_scale.value,
        call.k_scale.value,
        call.q.stride(),
        call.k.stride(),
        v.stride(),
        call.ids.stride(),
        call.batch.page_table.stride(0),
        call.batch.num_requests,
        tokens,
        num_q_heads,
        call.batch.max_seqlen_k,
        call.batch.page_table.shape[1],
        call.k.shape[0],
        device=call.q.device,
        num_warps=settings.num_warps,
        num_stages=settings.num_stages,
        pdl=pdl,
        SPLITS=splits,
        FP8_PV=call.fp8_pv,
        PDL=pdl,
        **tiles,
    )
    merge_splits(
        partial_out,
        partial_lse,
        call.out,
        call.lse,
        v_scale=call.v_scale,
        sink_key=call.sink_key,
        q=call.q,
        sm_scale=call.sm_scale,
        q_scale=call.q_scale,
        pdl=pdl,
    )


def _attend(call: SparseAttentionCall, phase: str, k: torch.Tensor, v: torch.Tensor, batch: PagedBatch, kv_heads: slice) -> None:
    """Whole rows, for the KV groups `kv_heads`, which k and v hold."""
    group = call.q.shape[1] // call.k.shape[1]
    heads = slice(kv_heads.start * group, kv_heads.stop * group)
    q, out, ids = call.q[:, heads], call.out[:, heads], call.ids[kv_heads]
    sink_key = None if call.sink_key is None else call.sink_key[heads]
    lse = None if call.lse is None else call.lse[:, heads]
    settings, tiles = _tiles(phase, q, k, v, ids, batch)
    v = _pairs(v)
    launch(
        sparse_prefill_kernel,
        (q.shape[0], k.shape[1]),
        q,
        k,
        v,
        ids,
        sink_key,
        out,
        lse,
        batch.page_table,
        batch.seq_lens,
        batch.cu_seqlens_q,
        call.q_scale.tensor,
        call.k_scale.tensor,
        call.v_scale.tensor,
        call.sm_scale,
        call.q_scale.value,
        call.k_scale.value,
        call.v_scale.value,
        q.stride(),
        k.stride(),
        v.stride(),
        ids.stride(),
        (0, 0) if sink_key is None else sink_key.stride(),
        out.stride(),
        (0, 0) if lse is None else lse.stride(),
        batch.page_table.stride(0),
        batch.num_requests,
        batch.max_seqlen_k,
        batch.page_table.shape[1],
        k.shape[0],
        device=q.device,
        num_warps=settings.num_warps,
        num_stages=settings.num_stages,
        FP8_PV=call.fp8_pv,
        **tiles,
    )


def _tiles(phase: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor, batch: PagedBatch) -> tuple[Settings, dict[str, Any]]:
    """Launch settings, and the compile-time arguments that both kernels share."""
    kv_heads, element_bytes = k.shape[1], k.element_size() + v.element_size()
    sizes = (q.shape[1] // kv_heads, q.shape[2], ids.shape[2], batch.block_size, batch.page_size, block_b(batch))
    return _fitted_tiles(settings_of(phase, mode_of(q, k), q.shape[0] * kv_heads), current_arch(q.device), element_bytes, *sizes)


@lru_cache(maxsize=4096)
def _fitted_tiles(
    settings: Settings, arch: str, element_bytes: int, group: int, head_dim: int, topk: int, block_size: int, page_size: int, offsets: int
) -> tuple[Settings, dict[str, Any]]:
    """`_tiles`, remembered; element_bytes: of one element of a key and one of a value."""
    block_d = next_power_of_2(head_dim)
    block_m = max(16, next_power_of_2(group))
    settings = fit(settings, arch, block_d * element_bytes, block_size)
    # The output stays in registers: 64 a thread where the table's settings were measured, more warps for more of it.
    growth = 2 if block_m * block_d > 4096 else 1
    settings = replace(settings, num_warps=max(growth * settings.num_warps, block_m * block_d // 2048))
    tiles = dict(
        TOPK=topk,
        PADDED_TOPK=next_power_of_2(topk),
        BLOCK_SIZE=block_size,
        PAGE_SIZE=page_size,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_M=block_m,
        BLOCK_N=settings.block_n,
        BLOCK_D=block_d,
        BLOCK_B=offsets,
    )
    return settings, tiles


def _pairs(v: torch.Tensor) -> torch.Tensor:
    """fp8 values two at a time, without a copy; as they are where an odd stride or address forbids it."""
    even = v.data_ptr() % 2 == 0 and all(stride % 2 == 0 for stride in v.stride()[:3])
    return v.view(torch.uint16) if is_fp8(v.dtype) and even else v
