"""Tensors for the cases: values from a seed alone, placed into pages and layouts, with NaN in every byte that must not be read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from m3attn.batch import LayerCache, PagedBatch
from m3attn.reference.numerics import indexable
from m3attn.reference.paging import query_rows
from m3attn.reference.quantize import saturating_cast
from m3attn.scales import ScaleLike
from m3attn.testing.cases import MODES, SCALES, AttentionCase, IndexCase, MergeCase, NormRopeCase, QuantizeCase, SelectCase, Step

NAN_BYTE = 0xFF
"""A byte that, repeated, is NaN in bf16, fp16, fp32, e4m3 and e5m2."""
GARBAGE_IDS = (-1, 2**30, -(2**31), 2**31 - 1, -7)
SPARE_PAGES = 3


def generator(seed: int) -> torch.Generator:
    """On the CPU, so that every device gets the same numbers."""
    return torch.Generator().manual_seed(seed)


def normal(shape: tuple[int, ...], gen: torch.Generator, device: torch.device | str) -> torch.Tensor:
    return torch.randn(shape, generator=gen).to(device)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """A buffer of NaN bytes."""
    size = dtype.itemsize
    for n in shape:
        size *= n
    return torch.full((size,), NAN_BYTE, dtype=torch.uint8, device=device).view(dtype).view(shape)


def build_batch(step: Step, device: torch.device | str, *, pages_seed: int = 0) -> tuple[PagedBatch, int]:
    """(batch, number of pages of the pool): pages in a random order, garbage in the table past each request's last page."""
    gen = generator(1_000_003 + pages_seed)
    pages_of = [-(-n // step.page_size) for n in step.seq_lens]
    num_pages = sum(pages_of) + SPARE_PAGES
    order = torch.randperm(num_pages, generator=gen).tolist()
    width = max(pages_of, default=0) + 2
    table = torch.tensor(GARBAGE_IDS, dtype=torch.int32)[torch.randint(len(GARBAGE_IDS), (len(pages_of), width), generator=gen)]
    for row, n in enumerate(pages_of):
        table[row, :n] = torch.tensor([order.pop() for _ in range(n)], dtype=torch.int32)
    batch = PagedBatch.from_lengths(
        step.q_lens,
        step.seq_lens,
        table.to(device),
        page_size=step.page_size,
        block_size=step.block_size,
        max_seqlen_q=step.max_seqlen_q,
        max_seqlen_k=step.max_seqlen_k,
    )
    return batch, num_pages


def live_slots(batch: PagedBatch, step: Step) -> torch.Tensor:
    """Pool slot (page * page_size + offset) of every live token, request by request, int64."""
    slots = [torch.empty(0, dtype=torch.long, device=batch.seq_lens.device)]
    for row, n in enumerate(step.seq_lens):
        token = torch.arange(n, device=batch.seq_lens.device)
        slots.append(batch.page_table[row].long()[token // step.page_size] * step.page_size + token % step.page_size)
    return torch.cat(slots)


def write_slots(pool: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """values [tokens, H, D] into pool [pages, H, page_size, D]."""
    page_size = pool.shape[2]
    indexable(pool)[slots // page_size, :, slots % page_size] = indexable(values)


def key_value_pools(
    layout: str, num_pages: int, heads: int, page_size: int, dim: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor, LayerCache]:
    """(k, v, cache): poisoned pools as [pages, H, page_size, D] views, and the cache over them, in a layout of `cases.LAYOUTS`."""
    if layout == "hnd":
        k, v = (poisoned((num_pages, heads, page_size, dim), dtype, device) for _ in range(2))
    elif layout == "nhd":
        k, v = (poisoned((num_pages, page_size, heads, dim), dtype, device).transpose(1, 2) for _ in range(2))
    elif layout == "layers":
        storage = poisoned((num_pages, 3, 2, heads, page_size, dim), dtype, device)
        k, v = storage[:, 1, 0], storage[:, 1, 1]
    else:
        packed = poisoned((num_pages, heads, page_size, 2 * dim), dtype, device)
        if layout == "packed_nhd":
            packed = poisoned((num_pages, page_size, heads, 2 * dim), dtype, device).transpose(1, 2)
        return packed[..., :dim], packed[..., dim:], LayerCache(kv=packed)
    return k, v, LayerCache(k=k, v=v)


def index_pool(layout: str, num_pages: int, page_size: int, dim: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """A poisoned index pool [pages, page_size, dim] in a layout of `cases.INDEX_LAYOUTS`."""
    if layout == "layers":
        return poisoned((num_pages, 3, page_size, dim), dtype, device)[:, 1]
    if layout == "interleaved":
        return poisoned((num_pages, page_size, 3 * dim), dtype, device)[..., dim : 2 * dim]
    return poisoned((num_pages, page_size, dim), dtype, device)


def random_ids(batch: PagedBatch, num_rows: int, heads: int, topk: int, seed: int) -> torch.Tensor:
    """[heads, T, topk] int32: each row's own block and random others before it, ascending, -1 at the tail."""
    gen = generator(seed)
    _, position = query_rows(batch, num_rows)
    num_blocks = torch.where(position < 0, 0, position // batch.block_size + 1).cpu()
    columns = max(batch.num_blocks, topk)
    block = torch.arange(columns)
    priority = torch.rand(heads, num_rows, columns, generator=gen)
    priority = torch.where(block == num_blocks[:, None] - 1, 2.0, priority).masked_fill(block >= num_blocks[:, None], -1.0)
    best = priority.topk(topk, dim=-1)
    ids = torch.where(best.values >= 0, best.indices, columns).sort(dim=-1).values
    return ids.masked_fill(ids == columns, -1).int().to(batch.seq_lens.device)


def scatter_ids(ids: torch.Tensor, batch: PagedBatch, seed: int) -> torch.Tensor:
    """The same valid ids in random order, with ids that must be ignored instead of -1 at random: far out of range, or past the own block."""
    gen = generator(seed)
    order = torch.rand(ids.shape, generator=gen).argsort(dim=-1).to(ids.device)
    ids = ids.gather(-1, order)
    _, position = query_rows(batch, ids.shape[1])
    beyond = (torch.where(position < 0, 0, position // batch.block_size + 1))[None, :, None].expand_as(ids)
    ignored = torch.tensor(GARBAGE_IDS, device=ids.device)[torch.randint(len(GARBAGE_IDS), ids.shape, generator=gen).to(ids.device)]
    ignored = torch.where((torch.rand(ids.shape, generator=gen) < 0.3).to(ids.device), beyond, ignored)
    return torch.where(ids == -1, ignored, ids.long()).int()


def token_major(ids: torch.Tensor, spare_rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """(buffer, view): `ids` [H, T, K] as the view of a larger [T_max, H, K] buffer whose other rows hold 2^30."""
    heads, rows, topk = ids.shape
    buffer = torch.full((rows + spare_rows, heads, topk), 2**30, dtype=torch.int32, device=ids.device)
    view = buffer.transpose(0, 1)[:, :rows]
    view.copy_(ids)
    return buffer, view


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """The arguments of a sparse or dense attention call; `ids` is None for dense attention."""

    q: torch.Tensor
    cache: LayerCache
    batch: PagedBatch
    ids: torch.Tensor | None
    options: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> tuple[Any, ...]:
        return (self.q, self.cache, self.batch) if self.ids is None else (self.q, self.cache, self.ids, self.batch)


def attention_inputs(
    case: AttentionCase, device: torch.device | str, *, seed: int = 0, pages_seed: int = 0, q_factor: float = 1.0
) -> AttentionInputs:
    """Inputs of a case. Values depend on `seed` alone, so layouts and page orders (`pages_seed`) of one seed hold the same tokens."""
    step, gen = case.step, generator(seed)
    q_dtype, kv_dtype = MODES[case.mode]
    q_scale, k_scale, v_scale = _scales_of_fp8(case, q_dtype, kv_dtype)
    batch, num_pages = build_batch(step, device, pages_seed=pages_seed)
    live = sum(step.seq_lens)
    q = saturating_cast(normal((step.tokens, case.num_q_heads, case.head_dim), gen, device) * q_factor, q_dtype, q_scale)
    keys, values = (normal((live, case.num_kv_heads, case.head_dim), gen, device) for _ in range(2))
    sink = normal((case.num_q_heads, case.head_dim), gen, device)
    if case.packed_q:
        row = poisoned((step.tokens, case.num_q_heads + 3, case.head_dim), q_dtype, device)
        indexable(row)[:, : case.num_q_heads] = indexable(q)
        q = row[:, : case.num_q_heads]

    k, v, cache = key_value_pools(case.layout, num_pages, case.num_kv_heads, step.page_size, case.head_dim, kv_dtype, device)
    slots = live_slots(batch, step)
    if case.zero_on_alloc:
        for pool in (k, v):
            indexable(pool)[slots // step.page_size] = 0
    write_slots(k, slots, saturating_cast(keys, kv_dtype, k_scale))
    write_slots(v, slots, saturating_cast(values, kv_dtype, v_scale))
    cache = LayerCache(k=cache.k, v=cache.v, kv=cache.kv, k_scale=k_scale, v_scale=v_scale, zero_on_alloc=case.zero_on_alloc)
    ids = None
    if case.topk:
        ids = random_ids(batch, step.tokens, case.num_kv_heads, case.topk, seed)
        ids = scatter_ids(ids, batch, seed) if case.ids == "scattered" else ids
    options = {"q_scale": q_scale, "sink_key": None if case.sink is None else sink.to(case.sink), "fp8_pv": case.mode == "fp8_pv"}
    return AttentionInputs(q, cache, batch, ids, options)


def _scales_of_fp8(case: AttentionCase, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> tuple[ScaleLike, ScaleLike, ScaleLike]:
    """A scale belongs to fp8 data only."""
    q_scale, k_scale, v_scale = SCALES[:3]
    quantised_q, quantised_kv = q_dtype.itemsize == 1, kv_dtype.itemsize == 1
    return (
        q_scale if case.scaled and quantised_q else None,
        k_scale if case.scaled and quantised_kv else None,
        v_scale if case.scaled and quantised_kv else None,
    )


@dataclass(frozen=True, eq=False)
class IndexInputs:
    """The arguments of index_score and index_topk."""

    index_q: torch.Tensor
    cache: LayerCache
    batch: PagedBatch
    index_q_scale: ScaleLike
    selection: dict[str, int]


def index_inputs(case: IndexCase, device: torch.device | str, *, seed: int = 0, pages_seed: int = 0) -> IndexInputs:
    """Inputs of a case; values depend on `seed` alone."""
    step, gen = case.step, generator(seed)
    batch, num_pages = build_batch(step, device, pages_seed=pages_seed)
    q_scale = SCALES[3] if case.scaled and case.q_dtype.itemsize == 1 else None
    k_scale = SCALES[4] if case.scaled and case.k_dtype.itemsize == 1 else None
    index_q = saturating_cast(normal((step.tokens, case.num_heads, case.dim), gen, device), case.q_dtype, q_scale)
    keys = normal((sum(step.seq_lens), 1, case.dim), gen, device)
    pool = index_pool(case.layout, num_pages, step.page_size, case.dim, case.k_dtype, device)
    write_slots(pool[:, None], live_slots(batch, step), saturating_cast(keys, case.k_dtype, k_scale))
    selection = {"topk": case.topk, "init_blocks": case.init_blocks, "local_blocks": case.local_blocks}
    return IndexInputs(index_q, LayerCache(index_k=pool, index_k_scale=k_scale), batch, q_scale, selection)


def score_fill(kind: str, heads: int, rows: int, columns: int, gen: torch.Generator) -> torch.Tensor:
    """[heads, rows, columns] fp32 scores of a kind of `cases.SCORE_KINDS`; ids are an exact function of each."""
    shape = (heads, rows, columns)
    permutation = torch.rand(shape, generator=gen).argsort(dim=-1).float() - columns // 2
    if kind in ("permutation", "garbage_tail"):
        return permutation
    if kind == "equal":
        return torch.zeros(shape)
    if kind == "few_values":
        return torch.randint(-1, 2, shape, generator=gen) * 0.5
    if kind == "all_nan":
        return torch.full(shape, float("nan"))
    if kind == "negative":
        return permutation - columns
    bits = {"one_ulp": 0x3F800000, "one_bin": 0x41000000 + columns // 2, "denormals": columns}  # around 1.0; from 8.0 on; above 0
    if kind in bits:
        return (torch.tensor(bits[kind], dtype=torch.int32) + permutation.int()).view(torch.float32)
    values = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-45, -1e-45, 1e-40, 1e30, -1e30, 3.4e38, -3.4e38, 1.0, -1.0)
    return torch.tensor(values)[torch.randint(len(values), shape, generator=gen)]


def select_inputs(case: SelectCase, device: torch.device | str, *, seed: int = 0) -> tuple[torch.Tensor, PagedBatch, dict[str, int]]:
    """(scores, batch, selection options). With `garbage_tail`, columns past each row's own block hold NaN, inf and 1e30."""
    gen = generator(seed)
    batch, _ = build_batch(case.step, device)
    scores = score_fill(case.scores, case.num_heads, case.step.tokens, batch.num_blocks, gen).to(device)
    if case.scores == "garbage_tail":
        _, position = query_rows(batch, case.step.tokens)
        outside = torch.arange(batch.num_blocks, device=device) > (position // batch.block_size)[:, None]
        garbage = torch.tensor([float("nan"), float("inf"), 1e30], device=device)[torch.arange(batch.num_blocks, device=device) % 3]
        scores = torch.where(outside, garbage, scores)
    return scores, batch, {"topk": case.topk, "init_blocks": case.init_blocks, "local_blocks": case.local_blocks}


@dataclass(frozen=True, eq=False)
class NormRopeInputs:
    """The arguments of qk_norm_rope_insert; buffers that it writes hold NaN bytes."""

    qkv: torch.Tensor
    weights: tuple[torch.Tensor | None, ...]
    positions: torch.Tensor
    cos_sin: torch.Tensor
    cache: LayerCache | None
    slots: torch.Tensor | None
    index_slots: torch.Tensor | None
    options: dict[str, Any]

    def arguments(self) -> tuple[Any, ...]:
        return (self.qkv, self.weights, self.positions, self.cos_sin, self.cache, self.slots, self.index_slots)


def norm_rope_inputs(case: NormRopeCase, device: torch.device | str, *, seed: int = 0, max_position: int = 512) -> NormRopeInputs:
    """Inputs of a case. Every seventh row's position lies outside the table, every fifth row's slot outside the cache."""
    gen, dim = generator(seed), 128
    heads = (case.num_q_heads, case.num_kv_heads, case.num_index_heads)
    width = (heads[0] + 2 * heads[1] + (heads[2] + 1 if heads[2] else 0)) * dim
    row = poisoned((case.tokens, width + case.row_padding), case.dtype, device)
    qkv = row[:, :width]
    qkv.copy_(normal((case.tokens, width), gen, device))
    weights = tuple(normal((dim,), gen, device).mul(0.2).to(case.weight_dtype) for _ in range(4 if heads[2] else 2))
    angle = torch.arange(max_position)[:, None] * 10_000.0 ** (-torch.arange(case.rotary_dim // 2) / (case.rotary_dim // 2))
    cos_sin = torch.cat([angle.cos(), angle.sin()], dim=1).to(device=device, dtype=case.weight_dtype)
    positions = torch.randint(max_position, (case.tokens,), generator=gen)
    # Past 32 bits a truncated number looks valid.
    far = 2**32 + 3 if case.integer == torch.int64 else 2**31 - 1
    positions[3::7] = torch.tensor((far, -1, max_position))[torch.arange(len(positions[3::7])) % 3]

    options: dict[str, Any] = {"heads": heads, "skip_index": case.skip_index}
    with_index = heads[2] > 0 and not case.skip_index
    if case.q_out_dtype is not None:
        options["q_out"] = poisoned((case.tokens, heads[0], dim), case.q_out_dtype, device)
        if with_index:
            options["index_q_out"] = poisoned((case.tokens, heads[2], dim), case.q_out_dtype, device)
        if case.scaled and case.q_out_dtype.itemsize == 1:
            options |= {"q_scale": SCALES[0]} | ({"index_q_scale": SCALES[3]} if with_index else {})
    cache = slots = index_slots = None
    if case.cache_dtype is not None:
        num_pages = -(-2 * max(1, case.tokens) // case.page_size) + 1
        capacity = num_pages * case.page_size
        slots, index_slots = (torch.randperm(capacity, generator=gen)[: case.tokens] for _ in range(2))
        for mapping in (slots, index_slots):
            mapping[2::5] = torch.tensor((far, -1, capacity, -(2**31)))[torch.arange(len(mapping[2::5])) % 4]
        _, _, cache = key_value_pools(case.layout, num_pages, heads[1], case.page_size, dim, case.cache_dtype, device)
        index_k = None
        if with_index and case.index_dtype is not None:
            layout = "layers" if case.layout == "layers" else "plain"
            index_k = index_pool(layout, num_pages, case.page_size, dim, case.index_dtype, device)
        scaled_kv, scaled_index = (case.scaled and d is not None and d.itemsize == 1 for d in (case.cache_dtype, case.index_dtype))
        cache = LayerCache(
            k=cache.k,
            v=cache.v,
            kv=cache.kv,
            index_k=index_k,
            k_scale=SCALES[1] if scaled_kv else None,
            v_scale=SCALES[2] if scaled_kv else None,
            index_k_scale=SCALES[4] if scaled_index else None,
        )
        slots = slots.to(device=device, dtype=case.integer)
        index_slots = index_slots.to(device=device, dtype=case.integer) if with_index else None
    return NormRopeInputs(qkv, weights, positions.to(device=device, dtype=case.integer), cos_sin, cache, slots, index_slots, options)


def merge_inputs(case: MergeCase, device: torch.device | str, *, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """(out_a, lse_a, out_b, lse_b). Every third row of a and every fourth of b has no keys: LSE -inf, and NaN in out."""
    gen = generator(seed)
    parts: list[torch.Tensor] = []
    for every in (3, 4):
        out = normal((case.tokens, case.heads, case.dim), gen, device).to(case.dtype)
        lse = normal((case.tokens, case.heads), gen, device) * 10
        out[::every], lse[::every] = float("nan"), float("-inf")
        parts += [out, lse]
    return tuple(parts)


def quantize_input(case: QuantizeCase, device: torch.device | str, *, seed: int = 0) -> torch.Tensor:
    """x of a case: normal numbers, among them zeros, extremes, denormals and infinities; the second row is all zero."""
    gen = generator(seed)
    rows = case.shape[:-1]
    storage = poisoned((*rows, case.shape[-1] + case.padding), case.dtype, device)
    x = storage[..., : case.shape[-1]]
    values = torch.randn(case.shape, generator=gen) * 30
    largest, smallest = torch.finfo(case.dtype).max, torch.finfo(case.dtype).smallest_normal
    extremes = torch.tensor((largest, -largest, smallest / 4, -smallest, float("inf"), float("-inf"), 0.0, -0.0, 448.0, 464.0, 1e-30, 2.0**-10))
    odd = torch.rand(case.shape, generator=gen) < 0.05
    values = torch.where(odd, extremes[torch.randint(len(extremes), case.shape, generator=gen)], values)
    if len(rows) and rows[0] > 1:
        values[1] = 0
    x.copy_(values)
    return x
