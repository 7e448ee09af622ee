"""Faults that indexers and block selection have had, each as a check of every implementation."""

from dataclasses import replace

import pytest
import torch

import m3attn
from m3attn.batch import LayerCache, PagedBatch
from m3attn.dtypes import E4M3, E5M2, dtype_name
from m3attn.reference.index import select_blocks
from m3attn.testing.bounds import assert_within, product_error, score_bound
from m3attn.testing.cases import INDEX_LAYOUTS, SCALES, IndexCase, Step
from m3attn.testing.ids import check_id_form, compare_ids
from m3attn.testing.inputs import IndexInputs, build_batch, generator, index_inputs, live_slots, normal, token_major
from m3attn.testing.matrix import DEVICE, arch, keys, pick, skip_if_declined, stage_keys

SCORE = pytest.mark.parametrize("key", keys("index_score"))
TOPK = pytest.mark.parametrize("key", keys("index_topk"))
BOTH = pytest.mark.parametrize(("stage", "key"), stage_keys("index_score", "index_topk"))

BLOCK = pick(16, 128)
DECODE = Step("decode", (1, 1, 1), (2 * BLOCK + 5, 0, 4 * BLOCK), page_size=BLOCK, block_size=BLOCK, padded_rows=1)
PREFILL = Step("prefill", (pick(3, 150), 2), (3 * BLOCK, 2), page_size=BLOCK, block_size=BLOCK, padded_rows=1, slack_q=16)


def base(step: Step = DECODE, **changes: object) -> IndexCase:
    dtype = pick(torch.float32, torch.bfloat16)
    return replace(IndexCase(step, num_heads=pick(2, 4), dim=pick(64, 128), q_dtype=dtype, k_dtype=dtype, topk=pick(2, 16)), **changes)


def prepare(stage: str, key: str, case: IndexCase, **options: object) -> IndexInputs:
    skip_if_declined(stage, key, case.problem(arch()))
    return index_inputs(case, DEVICE, **options)


def run(stage: str, key: str, inputs: IndexInputs, **changes: object) -> torch.Tensor:
    options = {"index_q_scale": inputs.index_q_scale, "impl": key} | (inputs.selection if stage == "index_topk" else {}) | changes
    return getattr(m3attn, stage)(inputs.index_q, inputs.cache, inputs.batch, **options)


def bound(key: str, inputs: IndexInputs) -> tuple[torch.Tensor, torch.Tensor]:
    error = product_error(key, arch(), inputs.index_q.dtype, inputs.cache.index_key().dtype)
    return score_bound(inputs.index_q, inputs.cache, inputs.batch, index_q_scale=inputs.index_q_scale, error_of_products=error)


def assert_scores(key: str, inputs: IndexInputs, scores: torch.Tensor) -> None:
    assert_within(scores, *bound(key, inputs), name="scores")


def assert_ids(key: str, inputs: IndexInputs, ids: torch.Tensor) -> None:
    exact, tolerance = bound(key, inputs)
    check_id_form(ids, inputs.batch, topk=inputs.selection["topk"], columns=exact.shape[2])
    compare_ids(ids, select_blocks(exact, inputs.batch, **inputs.selection), exact, tolerance)


@BOTH
@pytest.mark.parametrize("dtype", pick([torch.float32], [torch.bfloat16, E4M3]), ids=str)
def test_every_layout_and_page_order_gives_the_same_bits(stage: str, key: str, dtype: torch.dtype) -> None:
    case = base(q_dtype=dtype, k_dtype=dtype)
    expected = run(stage, key, prepare(stage, key, case))
    for layout in INDEX_LAYOUTS[1:]:
        assert torch.equal(run(stage, key, prepare(stage, key, replace(case, layout=layout))), expected), layout
    assert torch.equal(run(stage, key, prepare(stage, key, case, pages_seed=1)), expected), "page order"


@BOTH
def test_paged_equals_flat(stage: str, key: str) -> None:
    length = pick(2, 8) * BLOCK
    step = Step("flat", (length,), (length,), page_size=BLOCK, block_size=BLOCK)
    inputs = prepare(stage, key, base(step))
    pool = inputs.cache.index_key()
    flat = pool.flatten(0, 1)[live_slots(inputs.batch, step)][None].contiguous()
    values = torch.zeros(1, length, 1, 16, device=DEVICE)
    cache, batch = m3attn.paged(values, values, flat, block_size=BLOCK, page_size=BLOCK)
    assert torch.equal(run(stage, key, replace(inputs, cache=cache, batch=batch)), run(stage, key, inputs))


@SCORE
@pytest.mark.parametrize("pair", [(torch.bfloat16, E4M3), (E4M3, torch.float16), (torch.float16, torch.bfloat16)], ids=str)
def test_mixed_dtypes_equal_dequantised_products(key: str, pair: tuple[torch.dtype, torch.dtype]) -> None:
    for length in pick((1, 17), (1, 127, 128, 129, 1_025, 8_193)):
        step = Step("mixed", (1,), (length,), page_size=BLOCK, block_size=BLOCK)
        inputs = prepare("index_score", key, base(step, q_dtype=pair[0], k_dtype=pair[1]))
        assert_scores(key, inputs, run("index_score", key, inputs))


@SCORE
@pytest.mark.parametrize(("heads", "q_len"), [(1, 3), (3, 2), (5, 1), (6, 4), (7, 1), (12, 3), (4, 8), (4, 9), (8, 4), (8, 5), (1, 32), (1, 33)])
def test_any_number_of_heads_and_queries(key: str, heads: int, q_len: int) -> None:
    if DEVICE == "cpu" and heads * q_len > 24:
        pytest.skip("takes the interpreter too long")
    step = Step(f"q{q_len}", (q_len, 1), (2 * BLOCK + q_len, BLOCK), page_size=BLOCK, block_size=BLOCK)
    inputs = prepare("index_score", key, base(step, num_heads=heads))
    assert_scores(key, inputs, run("index_score", key, inputs))


@SCORE
def test_verify_rows_equal_decode_at_their_positions(key: str) -> None:
    step = Step("verify", (4, 4, 4), (4, BLOCK + 3, 3), page_size=BLOCK, block_size=BLOCK)
    inputs = prepare("index_score", key, base(step))
    scores = run("index_score", key, inputs)
    for request, seq_len in enumerate(step.seq_lens):
        for i in range(4):
            length = seq_len - 4 + i + 1
            single = replace(
                inputs.batch,
                page_table=inputs.batch.page_table[request : request + 1],
                seq_lens=torch.tensor([max(0, length)], dtype=torch.int32, device=DEVICE),
                cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
                max_seqlen_q=1,
            )
            row = request * 4 + i
            assert_scores(key, replace(inputs, index_q=inputs.index_q[row : row + 1], batch=single), scores[:, row : row + 1])
    assert bool((scores[:, 8] == float("-inf")).all()), "a query at a negative position"


@BOTH
def test_chunks_equal_the_whole(stage: str, key: str) -> None:
    length, first = pick(6, 300), pick(2, 133)
    step = Step("whole", (length,), (length + 3 * BLOCK,), page_size=BLOCK, block_size=BLOCK, slack_q=pick(20, 0))
    inputs = prepare(stage, key, base(step))
    parts = []
    for begin, end in ((0, first), (first, length)):
        batch = replace(
            inputs.batch,
            seq_lens=inputs.batch.seq_lens - (length - end),
            cu_seqlens_q=torch.tensor([0, end - begin], dtype=torch.int32, device=DEVICE),
            max_seqlen_q=end - begin,
        )
        parts.append(run(stage, key, replace(inputs, index_q=inputs.index_q[begin:end], batch=batch)))
    whole = torch.cat(parts, dim=1)
    assert_scores(key, inputs, whole) if stage == "index_score" else assert_ids(key, inputs, whole)


@SCORE
@pytest.mark.parametrize("step", [DECODE, PREFILL], ids=lambda step: step.name)
@pytest.mark.parametrize("dtype", [pick(torch.float32, torch.bfloat16), E4M3], ids=dtype_name)
def test_nan_products_are_ignored(key: str, dtype: torch.dtype, step: Step) -> None:
    """One NaN key leaves its block's maximum to the others; a block of NaN keys counts as -inf."""
    inputs = prepare("index_score", key, base(step, q_dtype=dtype, k_dtype=dtype))
    expected = run("index_score", key, inputs)
    keys_pool = inputs.cache.index_key()
    first_page, second_page = (int(inputs.batch.page_table[0, n]) for n in (0, 1))
    keys_pool[first_page, 3] = float("nan")
    keys_pool[second_page] = float("nan")
    scores = run("index_score", key, inputs)
    assert_scores(key, inputs, scores)
    row = 0
    assert bool((scores[:, row, 1] == float("-inf")).all()) and bool(scores[:, row, 0].isfinite().all())
    assert torch.equal(scores[:, row, 2:], expected[:, row, 2:])
    assert not bool(scores.isnan().any())


@SCORE
@pytest.mark.parametrize("spared", [pick(4, 40), 2, 1], ids=["seldom", "often", "everywhere"])
@pytest.mark.parametrize("dtype", [pick(torch.float32, torch.bfloat16), E4M3], ids=dtype_name)
def test_blocks_of_negative_products(key: str, dtype: torch.dtype, spared: int) -> None:
    """Maxima below 0, in one of `spared` blocks of long rows: no maximum begins at 0, and a float's bits are not in its order there."""
    blocks = pick(6, 469)
    step = Step("negative", (pick(3, 600),), (blocks * BLOCK,), page_size=BLOCK, block_size=BLOCK)
    inputs = prepare("index_score", key, base(step, q_dtype=dtype, k_dtype=dtype))
    # Sums of such products are whole numbers up to 512, which Hopper's e4m3 sums hold exactly too.
    inputs.index_q.copy_(1.0 + (inputs.index_q.float() > 0).float())
    pool = inputs.cache.index_key()
    values = pool.float()
    pool.copy_(torch.where(values.isnan(), values, values.sign() * (1.0 + (values.abs() > 0.7).float())))
    negative = inputs.batch.page_table[0, 0:blocks:spared].long()
    pool[negative] = (-pool[negative].float().abs()).to(dtype)
    scores = run("index_score", key, inputs)
    assert torch.equal(scores, run("index_score", "reference", inputs))
    assert bool((scores[..., 0:blocks:spared] < 0).all())


@SCORE
def test_infinite_products(key: str) -> None:
    inputs = prepare("index_score", key, base(q_dtype=torch.float32, k_dtype=torch.float32))
    pool = inputs.cache.index_key()
    pool[int(inputs.batch.page_table[2, 1]), 2] = torch.where(inputs.index_q[2, 0] > 0, 3e38, -3e38) * 1.0
    inputs.index_q[2] *= 100
    scores = run("index_score", key, inputs)
    assert bool(scores[0, 2, 1] == float("inf")) and not bool(scores.isnan().any())


@TOPK
def test_a_needle_block_is_selected(key: str) -> None:
    """More blocks than places, so that selection matters; with the index keys zeroed the same block is not selected."""
    blocks, needle = pick(12, 40), 3
    step = Step("needle", (1,), (blocks * BLOCK,), page_size=BLOCK, block_size=BLOCK)
    inputs = prepare("index_topk", key, base(step, topk=pick(3, 16)))
    pool = inputs.cache.index_key()
    pool.copy_(pool.nan_to_num() * 0.01)
    page = int(inputs.batch.page_table[0, needle])
    for head in range(inputs.index_q.shape[1]):
        pool[page, head] = inputs.index_q[0, head]
    assert bool((run("index_topk", key, inputs) == needle).any(dim=-1).all())
    # Equal scores: ids 0, 1, … win, so the needle must stand behind them to be missed.
    pool.zero_()
    ids = run("index_topk", key, replace(inputs, selection={**inputs.selection, "topk": 2}))
    assert not bool((ids == needle).any())


@TOPK
@pytest.mark.parametrize("q_len", [1, 20], ids=["decode", "prefill"])
def test_needles_of_a_long_cache(key: str, q_len: int) -> None:
    """A million tokens on a GPU. Every head has one in the first two blocks, in the two on both sides of the middle, and in the last."""
    blocks = pick(40, 8_192)
    needles = [0, 1, blocks // 2 - 1, blocks // 2, blocks - 1]
    step = Step("long", (q_len,), (blocks * BLOCK,), page_size=BLOCK, block_size=BLOCK)
    inputs = prepare("index_topk", key, base(step, topk=5, local_blocks=0))
    pool = inputs.cache.index_key()
    pool.copy_(pool.nan_to_num() * 0.01)
    index_q = inputs.index_q[-1:].expand_as(inputs.index_q).contiguous()
    for needle in needles:
        pool[int(inputs.batch.page_table[0, needle]), : index_q.shape[1]] = index_q[0]
    ids = run("index_topk", key, replace(inputs, index_q=index_q))
    first_position = blocks * BLOCK - q_len
    for row in range(q_len):
        seen = [n for n in needles if n * BLOCK + index_q.shape[1] - 1 <= first_position + row]
        assert all(set(seen) <= set(head) for head in ids[:, row].tolist()), row


@TOPK
def test_heads_keep_their_own_lists(key: str) -> None:
    heads, per_head = pick(2, 4), pick(2, 16)
    blocks = heads * per_head + 2
    step = Step("disjoint", (1,), (blocks * BLOCK,), page_size=BLOCK, block_size=BLOCK)
    inputs = prepare("index_topk", key, base(step, num_heads=heads, topk=per_head, local_blocks=0))
    pool = inputs.cache.index_key()
    pool.zero_()
    inputs.index_q.zero_()
    for head in range(heads):
        inputs.index_q[0, head, head] = 1
        for block in range(head * per_head, (head + 1) * per_head):
            pool[int(inputs.batch.page_table[0, block]), 1, head] = 1
    ids = run("index_topk", key, inputs)
    expected = torch.arange(heads * per_head, device=DEVICE).view(heads, 1, per_head)
    assert torch.equal(ids.long(), expected)


@TOPK
@pytest.mark.parametrize(("init", "local", "topk"), [(0, 0, 2), (1, 2, 2), (2, 3, 1), (1, 1, 4)])
def test_forced_blocks_of_the_fused_stage(key: str, init: int, local: int, topk: int) -> None:
    for step in (DECODE, PREFILL):
        inputs = prepare("index_topk", key, base(step, init_blocks=init, local_blocks=local, topk=topk))
        assert_ids(key, inputs, run("index_topk", key, inputs))


@TOPK
def test_ids_written_to_a_token_major_buffer(key: str) -> None:
    inputs = prepare("index_topk", key, base(PREFILL))
    expected = run("index_topk", key, inputs)
    buffer, view = token_major(torch.zeros_like(expected))
    assert run("index_topk", key, inputs, out=view) is view
    assert torch.equal(view, expected) and bool((buffer[expected.shape[1] :] == 2**30).all())


@SCORE
def test_scores_written_to_a_strided_buffer(key: str) -> None:
    inputs = prepare("index_score", key, base(PREFILL))
    expected = run("index_score", key, inputs)
    heads, rows, columns = expected.shape
    around = torch.full((rows + 2, heads, columns + 3), 7.0, device=DEVICE)
    out = around[1:-1, :, 1 : columns + 1].transpose(0, 1)
    assert run("index_score", key, inputs, out=out) is out
    assert torch.equal(out, expected)
    out.fill_(7.0)
    assert bool((around == 7.0).all()), "bytes outside the view were written"


@BOTH
def test_scales_mean_the_same_in_every_form(stage: str, key: str) -> None:
    inputs = prepare(stage, key, base(q_dtype=E4M3, k_dtype=E4M3))

    def scaled(q: object, k: object) -> torch.Tensor:
        changed = replace(inputs, cache=replace(inputs.cache, index_k_scale=k), index_q_scale=q)
        result = run(stage, key, changed)
        assert_scores(key, changed, result) if stage == "index_score" else assert_ids(key, changed, result)
        return result

    def tensor(value: float) -> torch.Tensor:
        return torch.tensor([value], device=DEVICE)

    unscaled = scaled(None, None)
    assert torch.equal(scaled(1.0, 1.0), unscaled) and torch.equal(scaled(tensor(1.0), tensor(1.0)), unscaled)
    assert torch.equal(scaled(tensor(SCALES[3]), tensor(SCALES[4])), scaled(SCALES[3], SCALES[4]))
    shifted = scaled(0.25, 16.0)
    assert torch.equal(shifted, unscaled * 4 if stage == "index_score" else unscaled), "powers of two are exact and keep the order"


@SCORE
def test_fp8_bytes_in_uint8_storage_and_refused_formats(key: str) -> None:
    inputs = prepare("index_score", key, base(q_dtype=E4M3, k_dtype=E4M3))
    expected = run("index_score", key, inputs)
    raw = inputs.cache.index_key().view(torch.uint8)
    for name in ("fp8", "fp8_e4m3", "float8_e4m3fn", E4M3):
        assert torch.equal(run("index_score", key, replace(inputs, cache=LayerCache(index_k=raw, index_dtype=name))), expected)
    for cache in (LayerCache(index_k=raw), LayerCache(index_k=raw.view(E5M2)), LayerCache(index_k=raw.view(torch.int8))):
        with pytest.raises((TypeError, ValueError), match="index"):
            run("index_score", key, replace(inputs, cache=cache))


@SCORE
def test_page_size_is_not_the_block_size(key: str) -> None:
    block = pick(64, 128)
    step = Step("pages", (1, 2), (2 * block + 7, block + 1), page_size=block, block_size=block)
    reference = index_inputs(base(step), DEVICE)
    for page in (16, 32, 64, 128):
        if block % page == 0:
            inputs = prepare("index_score", key, base(replace(step, page_size=page)))
            assert_scores(key, reference, run("index_score", key, inputs))


@BOTH
def test_queries_as_a_slice_of_a_packed_row(stage: str, key: str) -> None:
    inputs = prepare(stage, key, base(PREFILL))
    expected = run(stage, key, inputs)
    rows, heads, dim = inputs.index_q.shape
    row = torch.full((rows, heads + 3, dim), float("nan"), dtype=inputs.index_q.dtype, device=DEVICE)
    row[:, 1 : heads + 1] = inputs.index_q
    assert torch.equal(run(stage, key, replace(inputs, index_q=row[:, 1 : heads + 1])), expected)


@BOTH
def test_garbage_queries_of_empty_rows(stage: str, key: str) -> None:
    step = Step("empty", (4, 1), (2, 0), page_size=BLOCK, block_size=BLOCK, padded_rows=2)
    inputs = prepare(stage, key, base(step))
    expected = run(stage, key, inputs)
    empty = torch.tensor([0, 1, 4, 5, 6], device=DEVICE)
    inputs.index_q[empty] = float("nan")
    assert torch.equal(run(stage, key, inputs), expected)
    assert bool((expected[:, empty] == (float("-inf") if stage == "index_score" else -1)).all())


@BOTH
def test_wrong_device_values_stay_inside_the_tensors(stage: str, key: str) -> None:
    inputs = prepare(stage, key, base(PREFILL))
    batch = inputs.batch
    for changes in (
        {"seq_lens": torch.full_like(batch.seq_lens, 2**30)},
        {"seq_lens": torch.full_like(batch.seq_lens, -5)},
        {"cu_seqlens_q": batch.cu_seqlens_q.flip(0).contiguous()},
        {"cu_seqlens_q": batch.cu_seqlens_q * 1_000},
        {"page_table": torch.full_like(batch.page_table, 2**31 - 1)},
        {"page_table": torch.full_like(batch.page_table, -(2**31))},
    ):
        result = run(stage, key, replace(inputs, batch=replace(batch, **changes)))
        if stage == "index_topk" and "cu_seqlens_q" not in changes:  # offsets that do not ascend may leave rows unwritten
            assert bool(((result >= -1) & (result < batch.num_blocks)).all()), "ids outside the columns"
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@TOPK
def test_two_requests_sharing_pages_select_alike(key: str) -> None:
    step = Step("shared", (1, 1), (4 * BLOCK, 4 * BLOCK), page_size=BLOCK, block_size=BLOCK)
    inputs = prepare("index_topk", key, base(step))
    table = inputs.batch.page_table.clone()
    table[1] = table[0]
    inputs.index_q[1] = inputs.index_q[0]
    ids = run("index_topk", key, replace(inputs, batch=replace(inputs.batch, page_table=table)))
    assert torch.equal(ids[:, 0], ids[:, 1])


@BOTH
def test_two_runs_are_bit_equal_and_inputs_stay(stage: str, key: str) -> None:
    inputs = prepare(stage, key, base(PREFILL, q_dtype=torch.bfloat16, k_dtype=torch.bfloat16))
    before = (inputs.index_q.clone(), inputs.cache.index_key().clone())
    assert torch.equal(run(stage, key, inputs), run(stage, key, inputs))
    after = (inputs.index_q, inputs.cache.index_key())
    assert all(torch.equal(a.view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in zip(before, after, strict=True))


@SCORE
def test_scores_of_keys_and_queries_of_very_different_size(key: str) -> None:
    inputs = prepare("index_score", key, base(PREFILL))
    exponent = torch.arange(inputs.index_q.shape[0], device=DEVICE) % 17 - 8
    inputs.index_q.mul_((2.0**exponent)[:, None, None].to(inputs.index_q.dtype))
    assert_scores(key, inputs, run("index_score", key, inputs))


def test_score_rows_that_nobody_owns_are_minus_infinity() -> None:
    batch, _ = build_batch(Step("none", (), (), padded_rows=2, slack=300), DEVICE)
    index_q = normal((2, 4, 128), generator(0), DEVICE)
    cache = LayerCache(index_k=normal((1, 128, 128), generator(1), DEVICE))
    scores = m3attn.index_score(index_q, cache, batch, impl="reference")
    assert scores.shape == (4, 2, 3) and bool((scores == float("-inf")).all())


@pytest.mark.parametrize("key", keys("index_topk"))
def test_fp8_and_bf16_select_the_same_blocks_of_exact_scores(key: str) -> None:
    """Every number here is exact in e4m3, and so is their order: the two formats select the same blocks."""
    block = pick(16, 128)
    constants = torch.cat([torch.arange(1, 17), torch.arange(18, 33, 2), torch.arange(36, 65, 4), torch.arange(72, 129, 8)]).float()  # 40, ascending
    order = torch.randperm(len(constants), generator=torch.Generator().manual_seed(0))
    index_k = constants[order][:, None, None].expand(-1, block, 64).contiguous()
    tokens = pick(3, 40)
    batch = PagedBatch.from_lengths(
        [tokens], [len(constants) * block], torch.arange(len(constants), dtype=torch.int32, device=DEVICE)[None], page_size=block, block_size=block
    )
    ids = []
    for dtype in (torch.bfloat16, E4M3):
        skip_if_declined(
            "index_topk",
            key,
            m3attn.Problem(arch(), num_index_heads=2, index_dim=64, page_size=block, block_size=block, topk=8, index_q_dtype=dtype_name(dtype)),
        )
        index_q = torch.ones(tokens, 2, 64, device=DEVICE).to(dtype)
        cache = LayerCache(index_k=index_k.to(DEVICE).to(dtype))
        ids.append(m3attn.index_topk(index_q, cache, batch, topk=8, local_blocks=0, impl=key))
    expected = order.argsort()[-8:].sort().values.int().to(DEVICE)
    assert torch.equal(ids[0], ids[1]) and bool((ids[0] == expected).all())
