"""Hopper's selection beyond the matrix: every way of sharing a row, long rows, ties, any strides, slices of a workspace, values out of range.

Ids are no neighbours in memory where the general way is meant, since `test_select_held.py` has the other.
"""

import dataclasses
from types import ModuleType

import pytest
import torch
from needed import need

need("nvidia-cutlass-dsl", "apache-tvm-ffi")

from simulator import simulated

from m3attn.batch import PagedBatch
from m3attn.calls import IndexTopkCall, SelectBlocksCall
from m3attn.dsl_kernels import index_topk_sm90, index_topk_sm100
from m3attn.dsl_kernels import select_blocks as kernel
from m3attn.dsl_kernels.select_blocks import select_blocks
from m3attn.reference.index import select_blocks as reference
from m3attn.scales import UNIT
from m3attn.testing.cases import SCORE_KINDS, IndexCase, SelectCase, Step
from m3attn.testing.inputs import index_inputs, select_inputs
from m3attn.workspace import DEFAULT_LIMIT, WorkShape

ONE = Step("one", (6,), (128 * 260,))
WIDE = Step("wide", (6, 3), (128 * 260, 128 * 33 + 5), padded_rows=2)


def run(
    scores: torch.Tensor, batch: PagedBatch, out: torch.Tensor, *, topk: int, init_blocks: int, local_blocks: int, **device: object
) -> torch.Tensor:
    with simulated(**device):
        select_blocks(SelectBlocksCall(scores, batch, topk, init_blocks, local_blocks, out))
    return out


def apart(heads: int, tokens: int, topk: int) -> torch.Tensor:
    return torch.full((heads, tokens, 2 * topk), 2**30, dtype=torch.int32)[..., ::2]


def buffer(case: SelectCase) -> torch.Tensor:
    return apart(case.num_heads, case.step.tokens, case.topk)


@pytest.mark.parametrize("lanes", [4, 8, 16, 32])
@pytest.mark.parametrize("kind", SCORE_KINDS)
def test_every_way_of_sharing_a_row(kind: str, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "lanes_override", lanes)
    case = SelectCase(WIDE, num_heads=1, scores=kind)
    scores, batch, selection = select_inputs(case, "cpu")
    assert torch.equal(run(scores, batch, buffer(case), **selection, order="random"), reference(scores, batch, **selection))


@pytest.mark.parametrize(("topk", "init_blocks", "local_blocks"), [(1, 0, 0), (16, 2, 3), (17, 0, 1), (33, 40, 1), (64, 0, 0), (64, 3, 2)])
@pytest.mark.parametrize("lanes", [4, 32])
def test_every_width(topk: int, init_blocks: int, local_blocks: int, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "lanes_override", lanes)
    case = SelectCase(WIDE, num_heads=1, topk=topk, init_blocks=init_blocks, local_blocks=local_blocks, scores="few_values")
    scores, batch, selection = select_inputs(case, "cpu")
    assert torch.equal(run(scores, batch, buffer(case), **selection), reference(scores, batch, **selection))


@pytest.mark.parametrize("lanes", [4, 32])
@pytest.mark.parametrize("columns", [1, 2, 15, 16, 17, 64, 65, 511, 513, 4_100, 8_193, 16_384])
def test_lengths(columns: int, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "lanes_override", lanes)
    step = Step(f"columns{columns}", (1, 2), (columns * 16, max(1, columns * 16 - 5)), page_size=16, block_size=16)
    for kind in ("one_bin", "few_values"):
        case = SelectCase(step, num_heads=2, scores=kind)
        scores, batch, selection = select_inputs(case, "cpu")
        assert torch.equal(run(scores, batch, buffer(case), **selection), reference(scores, batch, **selection))


def test_all_large_scores_in_one_lane() -> None:
    """What a lane keeps is all that is kept: 16 of 16 from one lane, none from the others."""
    scores = torch.zeros(1, 1, 512)
    scores[..., [4 * 32 * group + i for group in range(4) for i in range(4)]] = torch.arange(1.0, 17.0)
    batch = PagedBatch.from_lengths([1], [512 * 128], torch.zeros(1, 512, dtype=torch.int32))
    ids = run(scores, batch, apart(1, 1, 16), topk=16, init_blocks=0, local_blocks=0)
    assert ids.flatten().tolist() == [128 * group + i for group in range(4) for i in range(4)]


@pytest.mark.parametrize("lanes", [4, 32])
def test_a_few_ties_of_the_last_chosen(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As scores of e4m3 have them: two to four at the bound, one to three of them chosen; the lower ids win, wherever they lie."""
    monkeypatch.setattr(kernel, "lanes_override", lanes)
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(1, 24, 300, generator=generator)
    for row in range(24):
        order = scores[0, row].argsort(descending=True)
        scores[0, row, order[15 - row % 3 : 17 + row // 3 % 2]] = scores[0, row, order[15]].clone()
    batch = PagedBatch.from_lengths([1] * 24, [300 * 128 - 128 * row for row in range(24)], torch.zeros(24, 300, dtype=torch.int32))
    selection = {"topk": 16, "init_blocks": 0, "local_blocks": 0}
    ids = run(scores, batch, apart(1, 24, 16), **selection)
    assert torch.equal(ids, reference(scores, batch, **selection))


@pytest.mark.parametrize("lanes", [8, 32])
def test_nan_is_chosen_before_a_later_infinity(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "lanes_override", lanes)
    scores = torch.full((1, 1, 40), float("-inf"))
    scores[..., 1::3] = float("nan")
    scores[..., [9, 30]] = torch.tensor([-1e-45, 2.0])
    batch = PagedBatch.from_lengths([1], [40 * 128], torch.zeros(1, 40, dtype=torch.int32))
    ids = run(scores, batch, apart(1, 1, 6), topk=6, init_blocks=0, local_blocks=1)
    assert ids.flatten().tolist() == [0, 1, 2, 9, 30, 39]


def test_any_strides() -> None:
    case = SelectCase(WIDE, num_heads=2, scores="garbage_tail")
    scores, batch, selection = select_inputs(case, "cpu")
    block_major = torch.empty(scores.shape[2], scores.shape[0], scores.shape[1]).permute(1, 2, 0).copy_(scores)
    rows = torch.full((case.step.tokens + 3, 2, case.topk), 2**30, dtype=torch.int32)
    run(block_major, batch, rows[: case.step.tokens].transpose(0, 1), **selection)
    assert torch.equal(rows[: case.step.tokens].transpose(0, 1), reference(scores, batch, **selection))
    assert bool((rows[case.step.tokens :] == 2**30).all())


@pytest.mark.parametrize(
    ("step", "name", "values"),
    [
        (WIDE, "cu_seqlens_q", [6, -3, 2**30]),
        (WIDE, "seq_lens", [-1, 2**31 - 1]),
        (ONE, "cu_seqlens_q", [-(2**31), 2**31 - 1]),
        (ONE, "cu_seqlens_q", [5, -7]),
        (ONE, "seq_lens", [-(2**31)]),
    ],
)
def test_values_out_of_range_reach_no_memory(step: Step, name: str, values: list[int]) -> None:
    case = SelectCase(step, num_heads=1)
    scores, batch, selection = select_inputs(case, "cpu")
    batch = dataclasses.replace(batch, **{name: torch.tensor(values, dtype=torch.int32)})
    for out in (buffer(case), buffer(case).contiguous()):
        ids = run(scores, batch, out, **selection)
        assert bool(((ids >= -1) & (ids < batch.num_blocks)).all())


def test_rows_of_no_request_choose_nothing() -> None:
    """Those before the first offset too, which should be 0."""
    case = SelectCase(WIDE, num_heads=1)
    scores, batch, selection = select_inputs(case, "cpu")
    batch = dataclasses.replace(batch, cu_seqlens_q=torch.tensor([2, 6, 9], dtype=torch.int32))
    for out in (buffer(case), buffer(case).contiguous()):
        ids = run(scores, batch, out, **selection)[0]
        assert (ids >= 0).any(1).tolist() == [False] * 2 + [True] * 7 + [False] * 2


TOPK = pytest.mark.parametrize(("module", "arch"), [(index_topk_sm90, "sm_90a"), (index_topk_sm100, "sm_100a")], ids=["sm90", "sm100"])


@TOPK
@pytest.mark.parametrize("rows", [13, 37, 200])
def test_slices_of_a_workspace_give_the_same_ids(module: ModuleType, arch: str, rows: int) -> None:
    step = Step("chunk", (70, 30, 1), (1100, 30, 700), padded_rows=1)
    inputs = index_inputs(IndexCase(step, num_heads=2), "cpu")
    shape = WorkShape(step.tokens, 3, 32, 2, 2, 128, 3, 70, inputs.batch.max_seqlen_k, 128, rows * 2 * 16 * 4)
    needed = module.workspace_bytes(shape)
    assert needed == min(rows, step.tokens) * 2 * 16 * 4
    results = []
    for nbytes in (needed, module.workspace_bytes(dataclasses.replace(shape, limit=DEFAULT_LIMIT))):
        out = torch.full((2, step.tokens, 3), 2**30, dtype=torch.int32)
        workspace = torch.full((nbytes,), 0xFF, dtype=torch.uint8)  # NaN
        with simulated(arch=arch):
            module.index_topk(IndexTopkCall(inputs.index_q, inputs.cache.index_key(), inputs.batch, 3, 0, 1, UNIT, UNIT, out, workspace))
        results.append(out)
    assert torch.equal(*results)


@TOPK
def test_a_long_prefill_stays_within_the_default_limit(module: ModuleType, arch: str) -> None:
    """16,384 tokens over 1,048,576 positions: 2 GiB of scores in two slices, whose ids `test_slices_of_a_workspace_give_the_same_ids` compares."""
    shape = WorkShape(16_384, 1, 64, 4, 4, 128, 16, 16_384, 1 << 20, 128, DEFAULT_LIMIT)
    assert module.workspace_bytes(shape) == DEFAULT_LIMIT == 8_192 * 4 * 8_192 * 4


@TOPK
@pytest.mark.parametrize("q_len", [1, 20], ids=["decode", "prefill"])
def test_needles(module: ModuleType, arch: str, q_len: int) -> None:
    """The small counterpart of tests/faults/test_index.py's over a million tokens."""
    blocks, heads = 10, 4
    needles = [0, 1, 4, 5, 8]
    inputs = index_inputs(IndexCase(Step("needles", (q_len,), (blocks * 128 + 3,)), num_heads=heads), "cpu")
    pool, index_q = inputs.cache.index_key(), inputs.index_q[-1:].expand_as(inputs.index_q).contiguous()
    pool.copy_(pool.nan_to_num() * 0.01)
    for needle in needles:
        pool[int(inputs.batch.page_table[0, needle]), :heads] = index_q[0]
    out = torch.full((heads, q_len, 5), 2**30, dtype=torch.int32)
    workspace = torch.full((1 << 14,), 0xFF, dtype=torch.uint8)
    with simulated("random", arch=arch):
        module.index_topk(IndexTopkCall(index_q, pool, inputs.batch, 5, 0, 0, UNIT, UNIT, out, workspace))
    assert torch.equal(out, torch.tensor(needles, dtype=torch.int32).expand_as(out))
