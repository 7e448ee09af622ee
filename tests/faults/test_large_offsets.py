"""Offsets beyond 2^31 elements: page times page stride, and row times row stride. Live data lies at the far end.

Without a GPU the same code runs with small strides, which checks the test and not the offsets.
"""

import pytest
import torch

import m3attn
from m3attn.batch import LayerCache, PagedBatch
from m3attn.dtypes import E4M3
from m3attn.reference.numerics import indexable
from m3attn.testing.bounds import assert_within, attention_bound, product_error, score_bound
from m3attn.testing.cases import MODES, AttentionCase, IndexCase, NormRopeCase, Step
from m3attn.testing.inputs import AttentionInputs, attention_inputs, index_inputs, norm_rope_inputs
from m3attn.testing.matrix import DEVICE, arch, keys, needs_zeroed, pick, skip_if_declined, stage_keys

pytestmark = pytest.mark.usefixtures("large_memory")

BLOCK = pick(16, 128)
BEYOND = pick(1 << 14, 1 << 31)
"""Elements that a 32-bit offset cannot pass."""
STEP = Step("step", (1, 2, 4), (2 * BLOCK, 3 * BLOCK + 5, BLOCK), page_size=BLOCK, block_size=BLOCK)
PREFILL = Step("prefill", (2, pick(3, 150)), (BLOCK, 3 * BLOCK), page_size=BLOCK, block_size=BLOCK, slack_q=17)
STEPS = pytest.mark.parametrize("step", [STEP, PREFILL], ids=lambda step: step.name)


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def far_copies(*pools: torch.Tensor) -> list[torch.Tensor]:
    """The same pools as views of one allocation per pool set whose page stride puts the last pages beyond BEYOND elements."""
    pages = pools[0].shape[0]
    inner = [pool[0].numel() for pool in pools]
    page_stride = max(sum(inner), -(-BEYOND // max(1, pages - 2)))
    page_stride = -(-page_stride // 16) * 16  # whole 16 bytes, which tensor maps need
    storage = torch.empty(page_stride * pages, dtype=pools[0].dtype, device=pools[0].device)
    views, start = [], 0
    for pool, size in zip(pools, inner, strict=True):
        strides = torch.empty(pool.shape[1:], device="meta").stride()
        view = storage.as_strided(pool.shape, (page_stride, *strides), start)
        indexable(view).copy_(indexable(pool))
        views.append(view)
        start += size
    return views


def used_pages_last(batch: PagedBatch, step: Step, num_pages: int, *pools: torch.Tensor) -> None:
    """Rename pages so that the last ones are in use."""
    used = [int(p) for row, n in zip(batch.page_table.tolist(), step.seq_lens, strict=True) for p in row[: -(-n // step.page_size)]]
    spare = [p for p in range(num_pages) if p not in used]
    order = spare + used
    rename = {page: number for number, page in enumerate(order)}
    for row, n in enumerate(step.seq_lens):
        for column in range(-(-n // step.page_size)):
            batch.page_table[row, column] = rename[int(batch.page_table[row, column])]
    for pool in pools:
        indexable(pool).copy_(indexable(pool)[torch.tensor(order, device=pool.device)].clone())


@STEPS
@pytest.mark.parametrize("mode", pick(["fp32"], ["bf16", "widen_e4m3", "fp8", "fp8_pv"]))
@pytest.mark.parametrize(("stage", "key"), stage_keys("sparse_attention", "dense_attention", size="large"))
def test_attention_over_a_view_with_a_large_page_stride(stage: str, key: str, mode: str, step: Step) -> None:
    topk = 2 if stage == "sparse_attention" else 0
    zeroed = needs_zeroed(stage, key)
    case = AttentionCase(step, pick(2, 64), pick(1, 4), pick(64, 128), topk=topk, mode=mode, zero_on_alloc=zeroed)
    skip_if_declined(stage, key, case.problem(arch()))
    inputs = attention_inputs(case, DEVICE)
    k, v = inputs.cache.key_value()
    used_pages_last(inputs.batch, step, k.shape[0], k, v)
    far_k, far_v = far_copies(k, v)
    far = AttentionInputs(inputs.q, LayerCache(k=far_k, v=far_v, zero_on_alloc=zeroed), inputs.batch, inputs.ids, inputs.options)
    near, moved = (getattr(m3attn, stage)(*i.arguments(), **i.options, return_lse=True, impl=key) for i in (inputs, far))
    assert all(torch.equal(a, b) for a, b in zip(near, moved, strict=True))


@STEPS
@pytest.mark.parametrize("dtype", pick([torch.float32], [torch.bfloat16, E4M3]), ids=str)
@pytest.mark.parametrize(("stage", "key"), stage_keys("index_score", "index_topk", size="large"))
def test_indexer_over_a_view_with_a_large_page_stride(stage: str, key: str, dtype: torch.dtype, step: Step) -> None:
    case = IndexCase(step, pick(2, 4), pick(64, 128), q_dtype=dtype, k_dtype=dtype, topk=2)
    skip_if_declined(stage, key, case.problem(arch()))
    inputs = index_inputs(case, DEVICE)
    pool = inputs.cache.index_key()
    used_pages_last(inputs.batch, step, pool.shape[0], pool)
    (far,) = far_copies(pool)
    options = inputs.selection if stage == "index_topk" else {}
    near, moved = (getattr(m3attn, stage)(inputs.index_q, LayerCache(index_k=p), inputs.batch, **options, impl=key) for p in (pool, far))
    assert torch.equal(near, moved)


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
@pytest.mark.parametrize("key", keys("qk_norm_rope_insert", size="large"))
def test_insertion_at_far_slots(key: str, dtype: torch.dtype) -> None:
    """The last pages of caches with a large page stride get the same bytes as those of small caches."""
    case = NormRopeCase(pick(6, 64), 2, 1, 1, cache_dtype=dtype, index_dtype=dtype, q_out_dtype=torch.bfloat16)
    near, far = norm_rope_inputs(case, DEVICE), norm_rope_inputs(case, DEVICE)
    pools = [*near.cache.key_value(), near.cache.index_key()]
    copies = far_copies(*pools)
    far_cache = LayerCache(k=copies[0], v=copies[1], index_k=copies[2])
    m3attn.qk_norm_rope_insert(*near.arguments(), **near.options, impl=key)
    m3attn.qk_norm_rope_insert(far.qkv, far.weights, far.positions, far.cos_sin, far_cache, far.slots, far.index_slots, **far.options, impl=key)
    assert all(torch.equal(raw(a), raw(b)) for a, b in zip(pools, copies, strict=True))


FAR_ROWS = pick(40, 262_272)


@pytest.mark.parametrize("mode", pick(["fp32"], ["bf16", "fp8"]))
@pytest.mark.parametrize("key", keys("sparse_attention", size="large", kernels_only=True))
def test_attention_rows_beyond_32_bits(key: str, mode: str) -> None:
    """q and out of more than 2^31 elements; all rows but the last request's are empty."""
    small = Step("last", (3,), (3 * BLOCK,), page_size=BLOCK, block_size=BLOCK)
    case = AttentionCase(small, pick(2, 64), pick(1, 4), pick(64, 128), topk=2, mode=mode)
    skip_if_declined("sparse_attention", key, case.problem(arch()))
    inputs = attention_inputs(case, DEVICE)
    q = torch.empty(FAR_ROWS, *inputs.q.shape[1:], dtype=inputs.q.dtype, device=DEVICE)
    indexable(q)[-3:] = indexable(inputs.q)
    ids = torch.full((inputs.ids.shape[0], FAR_ROWS, 2), -1, dtype=torch.int32, device=DEVICE)
    ids[:, -3:] = inputs.ids
    small_batch = inputs.batch
    batch = PagedBatch(
        page_table=small_batch.page_table.expand(2, -1).contiguous(),
        seq_lens=torch.tensor([0, small.seq_lens[0]], dtype=torch.int32, device=DEVICE),
        cu_seqlens_q=torch.tensor([0, FAR_ROWS - 3, FAR_ROWS], dtype=torch.int32, device=DEVICE),
        max_seqlen_q=FAR_ROWS - 3,
        max_seqlen_k=small_batch.max_seqlen_k,
        page_size=BLOCK,
        block_size=BLOCK,
    )
    out, lse = m3attn.sparse_attention(q, inputs.cache, ids, batch, return_lse=True, impl=key)
    error = product_error(key, arch(), MODES[mode][0], MODES[mode][1])
    bound = attention_bound(inputs.q, inputs.cache, small_batch, inputs.ids, error_of_products=error)
    bound.check(out[-3:], lse[-3:])
    assert bool((out[:-3] == 0).all()) and bool((lse[:-3] == float("-inf")).all())


@pytest.mark.parametrize("key", keys("index_score", size="large", kernels_only=True))
def test_scores_beyond_32_bits(key: str) -> None:
    """A score tensor of more than 2^31 elements, and the selection from it."""
    blocks = pick(5, 2_100)
    small = Step("last", (3,), (3 * BLOCK,), page_size=BLOCK, block_size=BLOCK, slack=(blocks - 3) * BLOCK)
    case = IndexCase(small, pick(2, 4), pick(64, 128), q_dtype=pick(torch.float32, torch.bfloat16), k_dtype=pick(torch.float32, torch.bfloat16))
    skip_if_declined("index_score", key, case.problem(arch()))
    inputs = index_inputs(case, DEVICE)
    index_q = torch.zeros(FAR_ROWS, *inputs.index_q.shape[1:], dtype=inputs.index_q.dtype, device=DEVICE)
    index_q[-3:] = inputs.index_q
    batch = PagedBatch(
        page_table=inputs.batch.page_table.expand(2, -1).contiguous(),
        seq_lens=torch.tensor([0, small.seq_lens[0]], dtype=torch.int32, device=DEVICE),
        cu_seqlens_q=torch.tensor([0, FAR_ROWS - 3, FAR_ROWS], dtype=torch.int32, device=DEVICE),
        max_seqlen_q=FAR_ROWS - 3,
        max_seqlen_k=small.max_seqlen_k,
        page_size=BLOCK,
        block_size=BLOCK,
    )
    scores = m3attn.index_score(index_q, inputs.cache, batch, impl=key)
    exact, tolerance = score_bound(inputs.index_q, inputs.cache, inputs.batch)
    assert_within(scores[:, -3:], exact, tolerance)
    assert bool((scores[:, : FAR_ROWS - 3, 0] == float("-inf")).all())
    ids = m3attn.select_blocks(scores, batch, topk=2, impl=key)
    assert torch.equal(ids[:, -3:], m3attn.select_blocks(scores[:, -3:].contiguous(), inputs.batch, topk=2, impl="reference"))
    assert bool((ids[:, :-3] == -1).all())


@pytest.mark.parametrize("key", keys("merge_attention_states", size="large", kernels_only=True))
def test_merging_beyond_32_bits(key: str) -> None:
    shape = (FAR_ROWS, 64, pick(16, 128))
    out_a, out_b = (torch.full(shape, value, dtype=torch.bfloat16, device=DEVICE) for value in (1.0, 3.0))
    lse = torch.zeros(shape[:2], device=DEVICE)
    out_a[-1] = 5.0
    out, _ = m3attn.merge_attention_states(out_a, lse, out_b, lse, impl=key)
    assert bool((out[:-1] == 2.0).all()) and bool((out[-1] == 4.0).all())


@pytest.mark.parametrize("scale", [None, "row"])
@pytest.mark.parametrize("key", keys("quantize_fp8", size="large", kernels_only=True))
def test_quantising_beyond_32_bits(key: str, scale: str | None) -> None:
    x = torch.zeros(pick(100, (1 << 31) // 128 + 100), 128, dtype=torch.bfloat16, device=DEVICE)
    x[-3:] = torch.arange(3 * 128, device=DEVICE).view(3, 128) / 8
    expected = m3attn.quantize_fp8(x[-3:], scale=scale, impl="reference")
    result = m3attn.quantize_fp8(x, scale=scale, impl=key)
    if scale is not None:
        (result, scales), (expected, expected_scales) = result, expected
        assert torch.equal(scales[-3:], expected_scales)
    assert torch.equal(raw(result[-3:]), raw(expected)) and bool((indexable(result)[:-3] == 0).all())


@pytest.mark.parametrize("key", keys("qk_norm_rope_insert", size="large", kernels_only=True))
def test_packed_rows_beyond_32_bits(key: str) -> None:
    """A packed tensor of more than 2^31 elements; only the last rows have positions inside the table."""
    case = NormRopeCase(3, pick(2, 64), pick(1, 4), pick(1, 4), q_out_dtype=torch.bfloat16)
    small = norm_rope_inputs(case, DEVICE)
    small.positions.clamp_(0, 100)
    qkv = torch.zeros(FAR_ROWS, small.qkv.shape[1], dtype=small.qkv.dtype, device=DEVICE)
    qkv[-3:] = small.qkv
    positions = torch.full((FAR_ROWS,), -1, dtype=torch.int32, device=DEVICE)
    positions[-3:] = small.positions
    q_out, index_q_out = (torch.empty(FAR_ROWS, n, 128, dtype=torch.bfloat16, device=DEVICE) for n in (case.num_q_heads, case.num_index_heads))
    options = {**small.options, "q_out": q_out, "index_q_out": index_q_out}
    m3attn.qk_norm_rope_insert(qkv, small.weights, positions, small.cos_sin, **options, impl=key)
    q, index_q = m3attn.qk_norm_rope_insert(*small.arguments(), **small.options, impl=key)
    assert torch.equal(qkv[-3:], small.qkv) and torch.equal(q_out[-3:], q) and torch.equal(index_q_out[-3:], index_q)
    assert bool((q_out[:-3] == 0).all()) and bool((qkv[:-3] == 0).all())
