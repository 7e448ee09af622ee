"""Faults that block-sparse and paged attention kernels have had, each as a check of every implementation."""

from dataclasses import replace

import pytest
import torch

import m3attn
from m3attn.batch import LayerCache
from m3attn.dtypes import E4M3, E5M2
from m3attn.reference.numerics import indexable
from m3attn.reference.paging import query_rows
from m3attn.testing.bounds import attention_bound, product_error
from m3attn.testing.cases import LAYOUTS, MODES, SCALES, AttentionCase, Step
from m3attn.testing.inputs import (
    AttentionInputs,
    attention_inputs,
    generator,
    live_slots,
    normal,
    poisoned,
    random_ids,
    scatter_ids,
    token_major,
)
from m3attn.testing.matrix import DEVICE, arch, keys, pick, skip_if_declined, stage_keys

BOTH = pytest.mark.parametrize(("stage", "key"), stage_keys("sparse_attention", "dense_attention"))
SPARSE = pytest.mark.parametrize("key", keys("sparse_attention"))
ANY_ORDER = pytest.mark.parametrize("key", [p for p in keys("sparse_attention") if p.values[0].startswith(("reference", "triton"))])

DECODE = pick(
    Step("decode", (1, 1, 1), (37, 0, 64), page_size=16, block_size=16, padded_rows=1),
    Step("decode", (1,) * 5, (1_025, 0, 300, 128, 2_500), padded_rows=2),
)
PREFILL = pick(
    Step("prefill", (3, 2), (40, 1), page_size=16, block_size=16, padded_rows=1, slack_q=16),
    Step("prefill", (130, 1, 40), (1_500, 700, 33), padded_rows=2),
)


def base(stage: str, step: Step = DECODE, mode: str = pick("fp32", "bf16"), **changes: object) -> AttentionCase:
    topk = pick(3, 16) if stage == "sparse_attention" else 0
    case = AttentionCase(step, pick(4, 64), pick(2, 4), head_dim=pick(64, 128), topk=topk, mode=mode)
    return replace(case, **changes)


def prepare(stage: str, key: str, case: AttentionCase, **options: object) -> AttentionInputs:
    skip_if_declined(stage, key, case.problem(arch()))
    return attention_inputs(case, DEVICE, **options)


def run(stage: str, key: str, inputs: AttentionInputs, **changes: object) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = {**inputs.options, "return_lse": True, "impl": key, **changes}
    return getattr(m3attn, stage)(*inputs.arguments(), **arguments)


def assert_equal(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...], what: str) -> None:
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y), f"{what}: {int((x != y).sum())} of {x.numel()} elements differ"


def assert_bound(stage: str, key: str, inputs: AttentionInputs, result: tuple[torch.Tensor, torch.Tensor]) -> None:
    error = product_error(key, arch(), inputs.q.dtype, inputs.cache.key_value()[0].dtype)
    attention_bound(inputs.q, inputs.cache, inputs.batch, inputs.ids, **inputs.options, error_of_products=error).check(*result)


@BOTH
@pytest.mark.parametrize("mode", pick(["fp32"], ["bf16", "widen_e4m3", "fp8"]))
def test_every_layout_of_the_cache_gives_the_same_bits(stage: str, key: str, mode: str) -> None:
    case = base(stage, mode=mode)
    expected = run(stage, key, prepare(stage, key, case))
    for layout in LAYOUTS[1:]:
        assert_equal(run(stage, key, prepare(stage, key, replace(case, layout=layout))), expected, layout)


@BOTH
@pytest.mark.parametrize("step", pick([DECODE], [DECODE, PREFILL]), ids=lambda step: step.name)
def test_page_order_does_not_matter(stage: str, key: str, step: Step) -> None:
    case = base(stage, step)
    expected = run(stage, key, prepare(stage, key, case))
    for pages_seed in range(1, pick(2, 5)):
        assert_equal(run(stage, key, prepare(stage, key, case, pages_seed=pages_seed)), expected, f"page order {pages_seed}")


@BOTH
def test_paged_equals_flat(stage: str, key: str) -> None:
    length, page = pick(32, 1_024), pick(16, 128)
    step = Step("flat", (length,), (length,), page_size=page, block_size=page)
    inputs = prepare(stage, key, base(stage, step, num_q_heads=pick(2, 64), num_kv_heads=pick(1, 4)))
    k, v = inputs.cache.key_value()
    tokens = live_slots(inputs.batch, step)
    flat_k, flat_v = (pool.transpose(1, 2).flatten(0, 1)[tokens][None].contiguous() for pool in (k, v))
    cache, batch = m3attn.paged(flat_k, flat_v, None, block_size=page)
    assert cache.key_value()[0].untyped_storage().data_ptr() == flat_k.untyped_storage().data_ptr(), "paged copied what it can view"
    batch = replace(batch, max_seqlen_q=inputs.batch.max_seqlen_q, max_seqlen_k=inputs.batch.max_seqlen_k)
    if batch.page_size != page:
        pytest.skip(f"paged chose pages of {batch.page_size}")
    flat = AttentionInputs(inputs.q, cache, batch, inputs.ids, inputs.options)
    assert_equal(run(stage, key, flat), run(stage, key, inputs), "flat")


@BOTH
def test_two_requests_may_share_their_prefix_pages(stage: str, key: str) -> None:
    page = pick(16, 128)
    step = Step("shared", (1, 1), (3 * page, 3 * page), page_size=page, block_size=page)
    inputs = prepare(stage, key, base(stage, step))
    table = inputs.batch.page_table.clone()
    table[1] = table[0]
    q = inputs.q.clone()
    q[1] = q[0]
    ids = None if inputs.ids is None else inputs.ids[:, :1].expand(-1, 2, -1)
    shared = AttentionInputs(q, inputs.cache, replace(inputs.batch, page_table=table), ids, inputs.options)
    out, lse = run(stage, key, shared)
    assert torch.equal(out[0], out[1]) and torch.equal(lse[0], lse[1])


@SPARSE
def test_unselected_keys_change_nothing(key: str) -> None:
    block = pick(16, 128)
    step = Step("decode", (1, 1), (6 * block - 3, 4 * block), page_size=block, block_size=block)
    case = base("sparse_attention", step, topk=2)
    inputs = prepare("sparse_attention", key, case)
    expected = run("sparse_attention", key, inputs)
    k, v = inputs.cache.key_value()
    for row in range(2):
        for head in range(case.num_kv_heads):
            chosen = set(inputs.ids[head, row].tolist())
            for block_id in set(range(-(-step.seq_lens[row] // block))) - chosen:
                page = int(inputs.batch.page_table[row, block_id])
                k[page, head] += 1e4
                v[page, head] += 1e4
    assert_equal(run("sparse_attention", key, inputs), expected, "unselected keys")


@BOTH
def test_later_keys_change_nothing(stage: str, key: str) -> None:
    block = pick(16, 128)
    step = Step("verify", (4,), (2 * block + 2,), page_size=block, block_size=block)
    inputs = prepare(stage, key, base(stage, step))
    expected = run(stage, key, inputs)
    for pool in inputs.cache.key_value():
        page = int(inputs.batch.page_table[0, 2])
        pool[page, :, 1:2] += 1e4
    out, lse = run(stage, key, inputs)
    assert_equal((out[:3], lse[:3]), (expected[0][:3], expected[1][:3]), "keys after a row's position")
    assert not torch.equal(out[3], expected[0][3]), "the changed key is the last row's own"


@BOTH
def test_verify_rows_equal_decode_at_their_positions(stage: str, key: str) -> None:
    """Row i of a verify step sees what a one-token step at its position sees; rows at negative positions give zeros."""
    block = pick(16, 128)
    step = Step("verify", (4, 4, 4, 4), (4, 3, block + 3, 0), page_size=block, block_size=block)
    inputs = prepare(stage, key, base(stage, step))
    out, lse = run(stage, key, inputs)
    assert_bound(stage, key, inputs, (out, lse))
    request, position = query_rows(inputs.batch, step.tokens)
    batch = replace(
        inputs.batch,
        page_table=inputs.batch.page_table[request],
        seq_lens=(position + 1).clamp(min=0).int(),
        cu_seqlens_q=torch.arange(step.tokens + 1, dtype=torch.int32, device=DEVICE),
        max_seqlen_q=1,
    )
    single = AttentionInputs(inputs.q, inputs.cache, batch, inputs.ids, inputs.options)
    assert_bound(stage, key, single, (out, lse))
    assert bool((out[position < 0] == 0).all()) and bool((lse[position < 0] == float("-inf")).all())


@BOTH
def test_chunks_equal_the_whole(stage: str, key: str) -> None:
    length, first = pick(6, 300), pick(2, 133)
    step = Step("whole", (length,), (length + 33,), page_size=pick(16, 128), block_size=pick(16, 128), slack_q=pick(20, 0))
    case = base(stage, step)
    inputs = prepare(stage, key, case)
    parts = []
    for begin, end in ((0, first), (first, length)):
        batch = replace(
            inputs.batch,
            seq_lens=inputs.batch.seq_lens - (length - end),
            cu_seqlens_q=torch.tensor([0, end - begin], dtype=torch.int32, device=DEVICE),
            max_seqlen_q=end - begin,
        )
        skip_if_declined(stage, key, replace(case.problem(arch()), phase=batch.phase))
        ids = None if inputs.ids is None else inputs.ids[:, begin:end]
        parts.append(run(stage, key, AttentionInputs(inputs.q[begin:end], inputs.cache, batch, ids, inputs.options)))
    out, lse = (torch.cat(pair) for pair in zip(*parts, strict=True))
    assert_bound(stage, key, inputs, (out, lse))


@BOTH
@pytest.mark.parametrize("q_len", [0, 1, 2, 15, 16, 17])
def test_any_query_length(stage: str, key: str, q_len: int) -> None:
    block = pick(16, 128)
    step = Step(f"q{q_len}", (0, q_len), (7, 2 * block + q_len), page_size=block, block_size=block)
    inputs = prepare(stage, key, base(stage, step, num_q_heads=pick(2, 64), num_kv_heads=pick(1, 4)))
    assert_bound(stage, key, inputs, run(stage, key, inputs))


@ANY_ORDER
def test_ids_in_any_order_with_ids_to_ignore_between_them(key: str) -> None:
    step = Step("kv1000", (1, 3), (pick(90, 1_000), pick(40, 999)), page_size=pick(16, 128), block_size=pick(16, 128))
    case = base("sparse_attention", step, topk=pick(6, 16))
    inputs = prepare("sparse_attention", key, case)
    for seed in range(pick(3, 20)):
        ids = scatter_ids(inputs.ids, inputs.batch, seed)
        scattered = AttentionInputs(inputs.q, inputs.cache, inputs.batch, ids, inputs.options)
        assert_bound("sparse_attention", key, inputs, run("sparse_attention", key, scattered))


@ANY_ORDER
@pytest.mark.parametrize("ignored", [-1, 2**31 - 1, -(2**31), "first beyond"])
def test_ignored_ids_before_the_first_valid_one(key: str, ignored: int | str) -> None:
    """A tile whose keys are all masked leaves the running softmax as it was."""
    block = pick(16, 128)
    step = Step("two_blocks", (1,), (block + 5,), page_size=block, block_size=block)
    value = 2 if ignored == "first beyond" else ignored
    for leading in pick((1, 16), (1, 15, 16, 17, 64)):
        case = base("sparse_attention", step, topk=leading + 2, num_q_heads=2, num_kv_heads=1)
        inputs = prepare("sparse_attention", key, case)
        ids = torch.tensor([value] * leading + [0, 1], dtype=torch.int32, device=DEVICE).expand(1, 1, -1)
        inputs = AttentionInputs(inputs.q, inputs.cache, inputs.batch, ids, inputs.options)
        assert_bound("sparse_attention", key, inputs, run("sparse_attention", key, inputs))


@SPARSE
@pytest.mark.parametrize("sink", [None, torch.float32])
def test_rows_without_a_valid_id_are_zero(key: str, sink: torch.dtype | None) -> None:
    inputs = prepare("sparse_attention", key, base("sparse_attention", sink=sink))
    empty = AttentionInputs(inputs.q, inputs.cache, inputs.batch, torch.full_like(inputs.ids, -1), inputs.options)
    out, lse = run("sparse_attention", key, empty)
    assert bool((out == 0).all()) and bool((lse == float("-inf")).all())


@ANY_ORDER
def test_repeated_ids_stay_finite(key: str) -> None:
    inputs = prepare("sparse_attention", key, base("sparse_attention"))
    repeated = AttentionInputs(inputs.q, inputs.cache, inputs.batch, torch.zeros_like(inputs.ids), inputs.options)
    out, _ = run("sparse_attention", key, repeated)
    assert bool(out.isfinite().all())


@SPARSE
def test_ids_in_a_token_major_buffer(key: str) -> None:
    inputs = prepare("sparse_attention", key, base("sparse_attention"))
    expected = run("sparse_attention", key, inputs)
    _, view = token_major(inputs.ids)
    assert_equal(run("sparse_attention", key, AttentionInputs(inputs.q, inputs.cache, inputs.batch, view, inputs.options)), expected, "token-major")
    heads, rows, topk = inputs.ids.shape
    wide = torch.full((heads, rows + 9, topk), 2**30, dtype=torch.int32, device=DEVICE)
    wide[:, :rows] = inputs.ids
    sliced = AttentionInputs(inputs.q, inputs.cache, inputs.batch, wide[:, :rows], inputs.options)
    assert_equal(run("sparse_attention", key, sliced), expected, "slice of a longer buffer")


@BOTH
def test_page_table_inside_a_larger_allocation(stage: str, key: str) -> None:
    """-1 and ids past the end must not read the integers around the table's row."""
    inputs = prepare(stage, key, base(stage))
    expected = run(stage, key, inputs)
    rows, width = inputs.batch.page_table.shape
    around = torch.full((rows + 2, width + 7), 2**30, dtype=torch.int32, device=DEVICE)
    table = around[1 : rows + 1, 3 : width + 3]
    table.copy_(inputs.batch.page_table)
    moved = AttentionInputs(inputs.q, inputs.cache, replace(inputs.batch, page_table=table), inputs.ids, inputs.options)
    assert_equal(run(stage, key, moved), expected, "strided page table")


@BOTH
@pytest.mark.parametrize("sink", [None, torch.float32])
def test_garbage_queries_of_empty_rows(stage: str, key: str, sink: torch.dtype | None) -> None:
    inputs = prepare(stage, key, base(stage, PREFILL, sink=sink, packed_q=True))
    expected = run(stage, key, inputs)
    _, position = query_rows(inputs.batch, inputs.q.shape[0])
    inputs.q[position < 0] = float("nan")
    assert_equal(run(stage, key, inputs), expected, "NaN queries of empty rows")
    out, lse = expected
    assert bool((out[position < 0] == 0).all()) and bool((lse[position < 0] == float("-inf")).all())


@BOTH
def test_queries_of_very_different_size(stage: str, key: str) -> None:
    """Precision is relative to each row's logits: rows scaled by 2^-8 to 2^8 in one tile."""
    inputs = prepare(stage, key, base(stage, PREFILL))
    exponent = torch.arange(inputs.q.shape[0], device=DEVICE) % 17 - 8
    inputs.q.mul_((2.0**exponent)[:, None, None].to(inputs.q.dtype))
    assert_bound(stage, key, inputs, run(stage, key, inputs))
    for power in pick((8,), (-8, -4, 2, 4, 6, 8)):
        inputs = prepare(stage, key, base(stage), q_factor=2.0**power)
        assert_bound(stage, key, inputs, run(stage, key, inputs))


@BOTH
@pytest.mark.parametrize("mode", ["widen_e4m3", "fp8", "fp8_pv"])
def test_scales_mean_the_same_in_every_form(stage: str, key: str, mode: str) -> None:
    inputs = prepare(stage, key, base(stage, mode=mode, sink=torch.float32))
    fp8_q = MODES[mode][0] == E4M3

    def scaled(q: object, k: object, v: object) -> tuple[torch.Tensor, torch.Tensor]:
        cache = replace(inputs.cache, k_scale=k, v_scale=v)
        changed = AttentionInputs(inputs.q, cache, inputs.batch, inputs.ids, {**inputs.options, "q_scale": q if fp8_q else None})
        result = run(stage, key, changed)
        assert_bound(stage, key, changed, result)
        return result

    def tensor(value: float) -> torch.Tensor:
        return torch.tensor([value], device=DEVICE)

    unscaled = scaled(None, None, None)
    assert_equal(scaled(1.0, 1.0, 1.0), unscaled, "scales of 1.0")
    assert_equal(scaled(tensor(1.0), tensor(1.0), tensor(1.0)), unscaled, "scale tensors of 1.0")
    numbers = scaled(*SCALES[:3])
    assert_equal(scaled(*(tensor(s) for s in SCALES[:3])), numbers, "scale tensors")
    # 2^n in q_scale and 2^-n in k_scale cancel exactly, except in the sink, which takes q_scale alone.
    without_sink = {**inputs.options, "sink_key": None}
    plain = run(stage, key, AttentionInputs(inputs.q, inputs.cache, inputs.batch, inputs.ids, without_sink))
    cache = replace(inputs.cache, k_scale=0.25 if fp8_q else None, v_scale=8.0)
    shifted = AttentionInputs(inputs.q, cache, inputs.batch, inputs.ids, {**without_sink, "q_scale": 4.0 if fp8_q else None})
    out, lse = run(stage, key, shifted)
    assert_equal((out, lse), (plain[0] * 8, plain[1]), "power-of-two scales")


@BOTH
@pytest.mark.parametrize("mode", ["widen_e4m3", "widen_e5m2", "fp8"])
def test_fp8_bytes_in_uint8_storage(stage: str, key: str, mode: str) -> None:
    inputs = prepare(stage, key, base(stage, mode=mode))
    expected = run(stage, key, inputs)
    names = ("fp8", "fp8_e4m3", "float8_e4m3fn", E4M3) if MODES[mode][1] == E4M3 else ("fp8_e5m2", E5M2)
    for name in names:
        cache = replace(inputs.cache, k=inputs.cache.k.view(torch.uint8), v=inputs.cache.v.view(torch.uint8), kv_dtype=name)
        assert_equal(run(stage, key, AttentionInputs(inputs.q, cache, inputs.batch, inputs.ids, inputs.options)), expected, str(name))


@BOTH
def test_caches_that_nobody_reads_are_refused(stage: str, key: str) -> None:
    inputs = prepare(stage, key, base(stage, mode="widen_e4m3"))
    k, v = (t.view(torch.uint8) for t in (inputs.cache.k, inputs.cache.v))

    def attempt(**changes: object) -> None:
        run(stage, key, AttentionInputs(inputs.q, replace(inputs.cache, **changes), inputs.batch, inputs.ids, inputs.options))

    with pytest.raises(TypeError, match="uint8"):
        attempt(k=k, v=v)
    with pytest.raises(TypeError, match="int8"):
        attempt(k=k.view(torch.int8), v=v.view(torch.int8))
    with pytest.raises(TypeError, match=r"fp8_e4m3.*fnuz|fnuz.*fp8_e4m3|expected.*fnuz"):
        attempt(k=k.view(torch.float8_e4m3fnuz), v=v.view(torch.float8_e4m3fnuz))
    with pytest.raises((TypeError, ValueError), match="fp7"):
        attempt(k=k, v=v, kv_dtype="fp7")
    with pytest.raises(TypeError, match=r"cache\.v"):
        attempt(v=v.view(E5M2))


@BOTH
def test_caller_owned_outputs(stage: str, key: str) -> None:
    inputs = prepare(stage, key, base(stage))
    expected = run(stage, key, inputs)
    rows, heads, dim = expected[0].shape
    around = poisoned((rows + 2, heads + 1, dim), expected[0].dtype, DEVICE)
    lse_around = poisoned((rows + 2, heads), torch.float32, DEVICE)
    out, lse = around[1:-1, :heads], lse_around[1:-1]
    result = run(stage, key, inputs, out=out, lse_out=lse)
    assert result[0] is out and result[1] is lse
    assert_equal((out, lse), expected, "caller-owned buffers")
    assert bool(around[0].isnan().all() and around[-1].isnan().all() and around[:, heads].isnan().all())
    assert bool(lse_around[0].isnan().all() and lse_around[-1].isnan().all())
    alone = getattr(m3attn, stage)(*inputs.arguments(), **inputs.options, impl=key)
    assert torch.equal(alone, expected[0]), "without an LSE"


@BOTH
def test_wrong_device_values_stay_inside_the_tensors(stage: str, key: str) -> None:
    """Lengths beyond the bounds, decreasing offsets, pages out of range: wrong rows, but no access outside (compute-sanitizer watches this)."""
    inputs = prepare(stage, key, base(stage, PREFILL))
    batch = inputs.batch
    for changes in (
        {"seq_lens": torch.full_like(batch.seq_lens, 2**30)},
        {"seq_lens": torch.full_like(batch.seq_lens, -5)},
        {"cu_seqlens_q": batch.cu_seqlens_q.flip(0).contiguous()},
        {"cu_seqlens_q": batch.cu_seqlens_q * 1_000},
        {"page_table": torch.full_like(batch.page_table, 2**31 - 1)},
        {"page_table": torch.full_like(batch.page_table, -(2**31))},
    ):
        out, _ = run(stage, key, AttentionInputs(inputs.q, inputs.cache, replace(batch, **changes), inputs.ids, inputs.options))
        assert out.shape == inputs.q.shape
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@BOTH
def test_a_workspace_too_small_is_refused_with_both_sizes(stage: str, key: str) -> None:
    inputs = prepare(stage, key, base(stage))
    batch, (rows, heads, dim) = inputs.batch, inputs.q.shape
    needed = m3attn.workspace_bytes(
        stage,
        tokens=rows,
        num_requests=batch.num_requests,
        max_seqlen_q=batch.max_seqlen_q,
        max_seqlen_k=batch.max_seqlen_k,
        num_q_heads=heads,
        num_kv_heads=inputs.cache.key_value()[0].shape[1],
        head_dim=dim,
        topk=16 if inputs.ids is None else inputs.ids.shape[2],
        block_size=batch.block_size,
        impl=key,
    )
    if needed == 0:
        pytest.skip(f"{key} uses no workspace here")
    expected = run(stage, key, inputs)
    own = torch.full((needed,), 0xFF, dtype=torch.uint8, device=DEVICE)
    assert_equal(run(stage, key, inputs, workspace=own), expected, "a caller's workspace full of NaN")
    with pytest.raises(ValueError, match=rf"workspace.*{needed}.*{needed - 1}"):
        run(stage, key, inputs, workspace=own[:-1])


@SPARSE
def test_sparse_over_all_blocks_equals_dense(key: str) -> None:
    block = pick(16, 128)
    step = Step("all_blocks", (3, 1), (2 * block + 5, block), page_size=block, block_size=block)
    inputs = prepare("sparse_attention", key, base("sparse_attention", step, topk=3))
    out, lse = run("sparse_attention", key, inputs)
    dense = AttentionInputs(inputs.q, inputs.cache, inputs.batch, None, inputs.options)
    assert_bound("dense_attention", key, dense, (out, lse))


@SPARSE
def test_parts_over_disjoint_blocks_merge_to_the_whole(key: str) -> None:
    block = pick(16, 128)
    step = Step("parts", (1, 2), (4 * block, 3 * block + 2), page_size=block, block_size=block)
    inputs = prepare("sparse_attention", key, base("sparse_attention", step, topk=4))
    parts = []
    for keep in (0, 1):
        ids = torch.where(inputs.ids % 2 == keep, inputs.ids, -1)
        ids = torch.where(ids < 0, 2**30, ids).sort(dim=-1).values
        ids = torch.where(ids == 2**30, -1, ids).int()
        parts += run("sparse_attention", key, AttentionInputs(inputs.q, inputs.cache, inputs.batch, ids, inputs.options))
    out, lse = m3attn.merge_attention_states(*parts, impl="reference")
    assert_bound("sparse_attention", key, inputs, (out, lse))


@SPARSE
def test_groups_take_their_own_ids(key: str) -> None:
    """Each KV group reads its own list: values tell the blocks apart."""
    block = pick(16, 128)
    step = Step("groups", (1,), (8 * block,), page_size=block, block_size=block)
    inputs = prepare("sparse_attention", key, base("sparse_attention", step, topk=2, num_q_heads=8, num_kv_heads=4))
    _, v = inputs.cache.key_value()
    for number in range(8):
        v[int(inputs.batch.page_table[0, number])] = number
    ids = torch.tensor([[[0, 7]], [[1, 2]], [[3, 4]], [[5, 6]]], dtype=torch.int32, device=DEVICE)
    inputs.q.zero_()
    out, _ = run("sparse_attention", key, AttentionInputs(inputs.q, inputs.cache, inputs.batch, ids, inputs.options))
    expected = torch.tensor([3.5, 3.5, 1.5, 1.5, 3.5, 3.5, 5.5, 5.5], device=DEVICE)[:, None]
    torch.testing.assert_close(out[0].float(), expected.expand_as(out[0]), rtol=1e-2, atol=0)


@SPARSE
def test_page_size_is_not_the_block_size(key: str) -> None:
    """Pages of every size that divides the block give the same attention."""
    block = pick(64, 128)
    step = Step("pages", (1, 2), (3 * block + 7, block + 1), page_size=block, block_size=block)
    reference = attention_inputs(base("sparse_attention", step, topk=2), DEVICE)
    for page in (16, 32, 64, 128):
        if block % page == 0:
            case = base("sparse_attention", replace(step, page_size=page), topk=2)
            assert_bound("sparse_attention", key, reference, run("sparse_attention", key, prepare("sparse_attention", key, case)))
    inputs = attention_inputs(base("sparse_attention", replace(step, page_size=block, block_size=block)), DEVICE)
    with pytest.raises(ValueError, match="page_size"):
        larger = replace(inputs.batch, page_size=2 * block)
        run("sparse_attention", key, AttentionInputs(inputs.q, inputs.cache, larger, inputs.ids, inputs.options))


@SPARSE
@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 9, 12, 16, 31, 32])
def test_any_group_size(key: str, group: int) -> None:
    step = Step("groups", (1, 2), (20, 3), page_size=16, block_size=16)
    case = AttentionCase(step, group, 1, head_dim=64, topk=2, mode=pick("fp32", "bf16"))
    inputs = prepare("sparse_attention", key, case)
    assert_bound("sparse_attention", key, inputs, run("sparse_attention", key, inputs))


@SPARSE
@pytest.mark.parametrize("mode", pick(["bf16", "fp8"], ["bf16", "fp16", "widen_e4m3", "fp8", "fp8_pv"]))
def test_two_runs_are_bit_equal(key: str, mode: str) -> None:
    for step in pick((DECODE,), (DECODE, PREFILL)):
        inputs = prepare("sparse_attention", key, base("sparse_attention", step, mode=mode))
        assert_equal(run("sparse_attention", key, inputs), run("sparse_attention", key, inputs), "a second run")


@SPARSE
def test_batch_composition_changes_only_rounding(key: str) -> None:
    """A request alone, and among others: both within the bound of the same rows."""
    step = Step("many", (2, 1, 3), (50, 33, 9), page_size=16, block_size=16)
    inputs = prepare("sparse_attention", key, base("sparse_attention", step))
    alone = replace(
        inputs.batch,
        page_table=inputs.batch.page_table[1:2],
        seq_lens=inputs.batch.seq_lens[1:2],
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
        max_seqlen_q=1,
    )
    single = AttentionInputs(inputs.q[2:3], inputs.cache, alone, inputs.ids[:, 2:3], inputs.options)
    assert_bound("sparse_attention", key, single, run("sparse_attention", key, single))
    out, lse = run("sparse_attention", key, inputs)
    assert_bound("sparse_attention", key, single, (out[2:3], lse[2:3]))


@BOTH
def test_inputs_are_not_changed(stage: str, key: str) -> None:
    inputs = prepare(stage, key, base(stage, mode=pick("fp8", "fp8"), scaled=True, sink=torch.float32))
    tensors = [t for t in (inputs.q, *inputs.cache.key_value(), inputs.ids, inputs.options["sink_key"]) if t is not None]
    tensors += [inputs.batch.page_table, inputs.batch.seq_lens, inputs.batch.cu_seqlens_q]
    before = [indexable(t).clone() for t in tensors]
    run(stage, key, inputs)
    assert all(torch.equal(a.view(torch.uint8), indexable(b).contiguous().view(torch.uint8)) for a, b in zip(before, tensors, strict=True))


@BOTH
def test_gradients_through_kernels_are_refused(stage: str, key: str) -> None:
    inputs = prepare(stage, key, base(stage))
    tensors = [t.clone().requires_grad_() for t in (inputs.q, inputs.cache.k, inputs.cache.v)]
    wanting = AttentionInputs(tensors[0], replace(inputs.cache, k=tensors[1], v=tensors[2]), inputs.batch, inputs.ids, inputs.options)
    if key == "reference":
        out, _ = run(stage, key, wanting)
        out.square().sum().backward()
        assert all(bool(t.grad.isfinite().all()) and bool((t.grad != 0).any()) for t in tensors)
        return
    with pytest.raises(NotImplementedError, match=r"no_grad.*reference"):
        run(stage, key, wanting)
    with torch.no_grad():
        run(stage, key, wanting)


@SPARSE
@pytest.mark.parametrize("topk", pick([1, 4, 40], [1, 4, 17, 32, 100, 128]))
def test_more_places_than_blocks(key: str, topk: int) -> None:
    step = Step("short", (1, 2), (40, 17), page_size=16, block_size=16)
    inputs = prepare("sparse_attention", key, base("sparse_attention", step, topk=topk, num_q_heads=2, num_kv_heads=1))
    ids = random_ids(inputs.batch, 3, 1, topk, seed=3)
    inputs = AttentionInputs(inputs.q, inputs.cache, inputs.batch, ids, inputs.options)
    assert_bound("sparse_attention", key, inputs, run("sparse_attention", key, inputs))


@SPARSE
def test_a_planted_key_is_found_through_its_page(key: str) -> None:
    """Position, not slot, decides the block: a key that dominates sits in block 3, on whatever page that is."""
    block = pick(16, 128)
    step = Step("needle", (1,), (6 * block,), page_size=block, block_size=block)
    inputs = prepare("sparse_attention", key, base("sparse_attention", step, topk=2, num_kv_heads=1, num_q_heads=2))
    k, v = inputs.cache.key_value()
    page, offset = int(inputs.batch.page_table[0, 3]), 5
    direction = normal((k.shape[-1],), generator(5), DEVICE)
    k[page, 0, offset] = direction * 4
    v[page, 0, offset] = 77.0
    inputs.q.copy_((direction * 4).expand_as(inputs.q))
    for ids, found in (([3, 5], True), ([2, 5], False)):
        chosen = torch.tensor([[ids]], dtype=torch.int32, device=DEVICE)
        out, _ = run("sparse_attention", key, AttentionInputs(inputs.q, inputs.cache, inputs.batch, chosen, inputs.options))
        assert bool((out > 70).all()) == found


@pytest.mark.parametrize("q_len", [1, 17], ids=["decode", "prefill"])
@pytest.mark.parametrize("fp8_pv", [False, True], ids=["fp8", "fp8_pv"])
@pytest.mark.parametrize(("stage", "key"), stage_keys("sparse_attention", "dense_attention"))
def test_fp8_sums_lose_no_more_with_more_keys(stage: str, key: str, fp8_pv: bool, q_len: int) -> None:
    """Values of one: the output is one whatever P is, but for sums that drop bits, which would drop more the more keys there are."""
    block = pick(32, 128)
    errors = []
    for num_keys in pick((64, 256), (512, 4_096, 16_384)):
        topk = num_keys // block if stage == "sparse_attention" else 0
        step = Step("keys", (q_len,), (num_keys,), page_size=block, block_size=block)
        case = AttentionCase(step, 16, 1, topk=topk, mode="fp8_pv" if fp8_pv else "fp8")
        skip_if_declined(stage, key, case.problem(arch()))
        inputs = attention_inputs(case, DEVICE)
        k, _ = inputs.cache.key_value()
        ones = replace(inputs, cache=LayerCache(k=k, v=torch.ones(k.shape, device=DEVICE).to(E4M3)))
        arguments = list(ones.arguments())
        if stage == "sparse_attention":
            arguments[2] = torch.arange(topk, dtype=torch.int32, device=DEVICE).expand(1, q_len, topk)
        out = getattr(m3attn, stage)(*arguments, **inputs.options, impl=key)
        errors.append(float((out.float() - 1).abs().max()))
    allowed = 2.0**-4 if fp8_pv else 2.0**-8
    assert errors[0] <= allowed and all(later <= max(errors[0], 2.0**-8) for later in errors[1:]), errors


@pytest.mark.parametrize("q_len", [1, 17], ids=["decode", "prefill"])
@pytest.mark.parametrize(("stage", "key"), stage_keys("sparse_attention", "dense_attention"))
def test_the_sink_never_takes_k_scale(stage: str, key: str, q_len: int) -> None:
    """Keys of zero: every logit but the sink's is zero whatever k_scale is, so k_scale may change nothing; q_scale does."""
    block = pick(32, 128)
    step = Step("keys", (q_len,), (3 * block,), page_size=block, block_size=block)
    case = AttentionCase(step, 16, 1, topk=3 if stage == "sparse_attention" else 0, mode="fp8", sink=torch.float32)
    skip_if_declined(stage, key, case.problem(arch()))
    inputs = attention_inputs(case, DEVICE)
    k, v = (torch.zeros_like(t, dtype=torch.float32).to(E4M3) for t in inputs.cache.key_value())
    v = (v.float() + 1).to(E4M3)

    def run(k_scale: float | None, q_scale: float | None = None) -> torch.Tensor:
        scaled = replace(inputs, cache=LayerCache(k=k, v=v, k_scale=k_scale))
        return getattr(m3attn, stage)(*scaled.arguments(), **{**inputs.options, "q_scale": q_scale}, impl=key)

    plain = run(None)
    assert torch.equal(run(2.0), plain) and torch.equal(run(0.037), plain)
    assert not torch.equal(run(None, 2.0), plain), "the sink takes q_scale"
    assert bool((plain < 1).any()), "the sink takes a share"
