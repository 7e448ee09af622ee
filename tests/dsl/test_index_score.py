"""Index scores beyond the matrix, on both architectures: how work is cut, device values that mean nothing, strides; a Hopper kernel broken."""

import dataclasses

import pytest
import torch
from needed import need

need("nvidia-cutlass-dsl", "apache-tvm-ffi")

from scorers import RAGGED, SM90, SM100, VERIFY, Scorer, call_for, check
from simulator import ORDERS

from m3attn.choice import UnsupportedProblem
from m3attn.dsl_kernels.index_score_work import tokens_of_tile
from m3attn.dtypes import E4M3
from m3attn.reference.index import index_score as reference
from m3attn.testing.cases import IndexCase, Step
from m3attn.testing.inputs import IndexInputs, index_inputs


@pytest.fixture(params=[SM90, SM100], ids=["sm90", "sm100"])
def scorer(request: pytest.FixtureRequest) -> Scorer:
    return request.param


@pytest.mark.parametrize("q_len", [1, 16, 17, 300])
@pytest.mark.parametrize("heads", range(1, 17))
def test_rows_of_a_tile_fill_swizzle_patterns(scorer: Scorer, heads: int, q_len: int) -> None:
    batch = dataclasses.replace(index_inputs(IndexCase(RAGGED), "cpu").batch, max_seqlen_q=q_len)
    rows = scorer.module.rows_of_tile(heads, batch)
    tokens = tokens_of_tile(rows, heads)
    assert tokens % 8 == 0 and 0 < tokens * heads <= rows
    assert tokens >= q_len or (rows >= 128 if scorer is SM90 else rows == 256)


@pytest.mark.parametrize(("ctas", "chunk", "order"), [(1, 512, "lazy"), (4, 512, "random"), (7, 3, "eager"), (40, 1, "random")])
def test_work_is_cut_anywhere_with_the_same_bits(scorer: Scorer, ctas: int, chunk: int, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = index_inputs(IndexCase(RAGGED), "cpu")
    expected = scorer.run(inputs)
    check(inputs, expected)
    monkeypatch.setattr(scorer.module, "num_ctas", lambda device: ctas)
    monkeypatch.setattr(scorer.module, "CHUNK_BLOCKS", chunk)
    assert torch.equal(scorer.run(inputs, order), expected)


@pytest.mark.parametrize(("heads", "rows"), [(4, 64), (8, 128), (3, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_verify_is_cut_anywhere_with_the_same_bits(dtype: torch.dtype, heads: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = index_inputs(IndexCase(VERIFY, num_heads=heads, q_dtype=dtype, k_dtype=dtype), "cpu")
    assert SM90.module.rows_of_tile(heads, inputs.batch) == rows
    expected = SM90.run(inputs)
    check(inputs, expected)
    monkeypatch.setattr(SM90.module, "num_ctas", lambda device: 8)
    assert torch.equal(SM90.run(inputs, "random"), expected)


def test_more_requests_than_a_warp_has_lanes() -> None:
    step = Step("many", (1,) * 70, tuple(1 + 37 * i % 300 for i in range(70)), padded_rows=1)
    inputs = index_inputs(IndexCase(step), "cpu")
    check(inputs, SM90.run(inputs, "random"))


@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_pages_smaller_than_a_block(scorer: Scorer, page_size: int) -> None:
    inputs = index_inputs(IndexCase(dataclasses.replace(RAGGED, page_size=page_size), num_heads=2), "cpu")
    check(inputs, scorer.run(inputs, "random"))


@pytest.mark.parametrize(
    ("name", "values"),
    [("cu_seqlens_q", [0, 110, 70, -5, 2**30]), ("seq_lens", [1100, -7, 2**31 - 1, 2**20]), ("page_table", [2**31 - 1, -(2**31)])],
)
@pytest.mark.parametrize("step", [RAGGED, VERIFY], ids=lambda step: step.name)
def test_values_out_of_range_reach_no_memory_and_no_other_request(scorer: Scorer, step: Step, name: str, values: list[int]) -> None:
    """The interpreter refuses every access outside a tensor; the first request's values are right and so are its scores."""
    inputs = index_inputs(IndexCase(step), "cpu")
    expected = scorer.run(inputs)
    tensor = getattr(inputs.batch, name).clone()
    if name == "page_table":
        tensor[1:] = torch.tensor(values, dtype=torch.int32).repeat(tensor[1:].numel())[: tensor[1:].numel()].view_as(tensor[1:])
    else:
        tensor[-len(values) :] = torch.tensor(values, dtype=torch.int32)
        own = 2 if name == "cu_seqlens_q" else 1
        tensor[:own] = getattr(inputs.batch, name)[:own]
    out = scorer.run(dataclasses.replace(inputs, batch=dataclasses.replace(inputs.batch, **{name: tensor})))
    first = step.q_lens[0]
    assert torch.equal(out[:, :first], expected[:, :first])


def test_strides_of_queries_and_scores(scorer: Scorer) -> None:
    inputs = index_inputs(IndexCase(RAGGED, num_heads=2), "cpu")
    expected = scorer.run(inputs)
    row = torch.full((inputs.index_q.shape[0], 7 * 128), float("nan"), dtype=inputs.index_q.dtype)
    queries = row[:, 3 * 128 : 5 * 128].unflatten(1, (2, 128)).copy_(inputs.index_q)
    block_major = torch.full((inputs.batch.num_blocks, 2, inputs.index_q.shape[0]), float("nan")).permute(1, 2, 0)
    call = call_for(dataclasses.replace(inputs, index_q=queries), block_major)
    assert torch.equal(scorer.score(call, "random"), expected)


@pytest.mark.parametrize("argument", ["index_q", "cache.index_k"])
def test_what_tma_cannot_read_is_declined(scorer: Scorer, argument: str) -> None:
    inputs = index_inputs(IndexCase(RAGGED), "cpu")
    call = call_for(inputs)
    name = argument.removeprefix("cache.")
    tensor = getattr(call, name)
    wider = torch.zeros(*tensor.shape[:-1], 132, dtype=tensor.dtype)[..., :128]
    with pytest.raises(UnsupportedProblem, match=rf"{argument}: expected .* multiples of 16 bytes"):
        scorer.score(dataclasses.replace(call, **{name: wider}))
    assert bool(call.out.isnan().all())


@pytest.mark.parametrize(("requests", "pages"), [(0, 3), (2, 0)])
def test_no_requests_and_no_pages(scorer: Scorer, requests: int, pages: int) -> None:
    inputs = index_inputs(IndexCase(RAGGED), "cpu")
    batch = dataclasses.replace(
        inputs.batch,
        page_table=inputs.batch.page_table[:requests],
        seq_lens=inputs.batch.seq_lens[:requests],
        cu_seqlens_q=inputs.batch.cu_seqlens_q[: requests + 1],
    )
    call = dataclasses.replace(call_for(inputs), index_k=inputs.cache.index_key()[:pages], batch=batch)
    assert bool(scorer.score(call).isneginf().all())


def test_nan_products_are_ignored_unless_all_are(scorer: Scorer) -> None:
    inputs = index_inputs(IndexCase(RAGGED, num_heads=1), "cpu")
    page = inputs.batch.page_table[0].long()
    inputs.cache.index_k[page[2], 5] = float("nan")
    inputs.cache.index_k[page[3]] = float("nan")
    scores, expected = scorer.run(inputs), reference(inputs.index_q, inputs.cache.index_key(), inputs.batch)
    assert torch.equal(scores.isneginf(), expected.isneginf()) and bool(scores[0, 0, 3].isneginf())
    assert torch.allclose(scores[0, :70, :3], expected[0, :70, :3], rtol=1e-5, atol=1e-5)


def test_blocks_of_negative_products_only(scorer: Scorer) -> None:
    """On Hopper a maximum over integers, which orders negative floats the wrong way round, is found out and taken again."""
    inputs = index_inputs(IndexCase(RAGGED, num_heads=1), "cpu")
    inputs.index_q.abs_().add_(0.1)
    pages = inputs.batch.page_table[0, :6].long()
    keys = inputs.cache.index_k[pages]
    keys[1:] = -keys[1:].abs() - 0.1
    keys[3, 77] *= -1  # one positive product
    keys[4] = 0
    inputs.cache.index_k[pages] = keys
    scores = scorer.run(inputs)
    check(inputs, scores)
    assert bool((scores[0, :70, [1, 2, 5]] < 0).all()) and bool((scores[0, :70, 3] > 0).all()) and not bool(scores[0, :70, 4].any())


LONG = Step("long", (150, 40), (3_300, 1_700))
"""Whole blocks of the first request's rows: 24, three turns in which Hopper takes maxima by bits; 12 of the second's."""
NEGATIVE = {
    "first": [0],
    "in the middle": [11],
    "the last of a turn": [7, 23],
    "all but a turn": [*range(8), *range(16, 25)],
    "all": list(range(26)),
}


def long_inputs(num_heads: int = 1) -> IndexInputs:
    return index_inputs(IndexCase(LONG, num_heads=num_heads, q_dtype=E4M3, k_dtype=E4M3), "cpu")


@pytest.mark.parametrize(("heads", "ctas", "order"), [(1, 1, "lazy"), (1, 3, "random"), (4, 5, "eager"), (1, 40, "random")])
def test_maxima_by_bits_are_cut_anywhere(heads: int, ctas: int, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = long_inputs(heads)
    expected = SM90.run(inputs)
    check(inputs, expected)
    monkeypatch.setattr(SM90.module, "num_ctas", lambda device: ctas)
    assert torch.equal(SM90.run(inputs, order), expected)


@pytest.mark.parametrize("blocks", NEGATIVE.values(), ids=NEGATIVE)
def test_negative_products_among_maxima_by_bits(blocks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both warpgroups' turns, and those of one only; what is scored twice is what was to be scored."""
    inputs = long_inputs()
    monkeypatch.setattr(SM90.module, "num_ctas", lambda device: 1)
    pages = inputs.batch.page_table[0, :26].long()
    for order, row in zip(("random", "lazy", "eager"), (149, 3, 70), strict=True):  # rows of both warpgroups
        queries, keys = inputs.index_q.float().abs().clamp(0.1, 2), inputs.cache.index_k[pages].float()
        queries[:150] *= -1
        queries[row] *= -1
        keys[blocks] = -keys[blocks].abs() - 0.1
        inputs.index_q.copy_(queries.to(E4M3))
        inputs.cache.index_k[pages] = keys.to(E4M3)
        scores = SM90.run(inputs, order)
        check(inputs, scores)
        visible = [block for block in blocks if block <= (3_150 + row) // 128]
        assert bool((scores[0, row, visible] < 0).all())


@pytest.mark.parametrize("block", [2, 7])
def test_nan_among_maxima_by_bits(block: int) -> None:
    inputs = long_inputs()
    page = inputs.batch.page_table[0].long()
    expected = SM90.run(inputs)
    inputs.cache.index_k[page[block], 5] = float("nan")
    inputs.cache.index_k[page[block + 1]] = float("nan")
    scores = SM90.run(inputs, "random")
    others = [i for i in range(expected.shape[2]) if i not in (block, block + 1)]
    assert torch.equal(scores[0, :150, others], expected[0, :150, others])
    assert bool(scores[0, :150, block].isfinite().all()) and bool(scores[0, :150, block + 1].isneginf().all())


@pytest.mark.parametrize("order", ORDERS)
def test_a_wait_that_is_too_short_is_seen(order: str) -> None:
    inputs = index_inputs(IndexCase(RAGGED), "cpu")

    def edit(ptx: str) -> str:
        assert "wgmma.wait_group.sync.aligned \t1;" in ptx
        return ptx.replace("wgmma.wait_group.sync.aligned \t1;", "wgmma.wait_group.sync.aligned \t2;")

    assert torch.equal(SM90.run(inputs, order, edit=edit), SM90.run(inputs)) == (order == "eager")
