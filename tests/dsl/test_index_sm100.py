"""Blackwell's index scores beyond the matrix: how work is cut, heads, pages, poison, the selection behind them, kernels broken on purpose."""

import dataclasses
import re
from collections.abc import Callable

import pytest
import torch
from needed import need

need("nvidia-cutlass-dsl", "apache-tvm-ffi")

import ptxsim
from simulator import ORDERS, artifacts, simulated

from m3attn.calls import IndexScoreCall
from m3attn.dsl_kernels import index_score_sm100
from m3attn.dsl_kernels.index_score_sm100 import index_score, rows_of_tile
from m3attn.dsl_kernels.index_score_work import tokens_of_tile
from m3attn.dsl_kernels.variants import SM100
from m3attn.reference.index import index_score as reference
from m3attn.scales import UNIT
from m3attn.testing.bounds import assert_within, score_bound
from m3attn.testing.cases import IndexCase, Step
from m3attn.testing.inputs import IndexInputs, index_inputs

ARCH = "sm_100a"
RAGGED = Step("ragged", (70, 40, 0, 17), (1100, 300, 5, 9), padded_rows=2, slack=200)
VERIFY = Step("verify", (16, 3, 0, 8), (900, 1300, 5, 9), padded_rows=1)


def call_for(inputs: IndexInputs, out: torch.Tensor | None = None) -> IndexScoreCall:
    tokens, heads, _ = inputs.index_q.shape
    if out is None:
        out = torch.full((heads, tokens, inputs.batch.num_blocks), float("nan"))
    return IndexScoreCall(inputs.index_q, inputs.cache.index_key(), inputs.batch, UNIT, UNIT, out)


def run(inputs: IndexInputs, order: str = "eager", **device: object) -> torch.Tensor:
    call = call_for(inputs)
    with simulated(order, arch=ARCH, **device):
        index_score(call)
    return call.out


def check(inputs: IndexInputs, scores: torch.Tensor) -> None:
    exact, tolerance = score_bound(inputs.index_q, inputs.cache, inputs.batch)
    assert_within(scores, exact, tolerance)


@pytest.mark.parametrize("q_len", [1, 16, 17, 300])
@pytest.mark.parametrize("heads", range(1, 17))
def test_rows_of_a_tile_fill_swizzle_patterns(heads: int, q_len: int) -> None:
    batch = dataclasses.replace(index_inputs(IndexCase(RAGGED), "cpu").batch, max_seqlen_q=q_len)
    rows = rows_of_tile(heads, batch)
    tokens = tokens_of_tile(rows, heads)
    assert tokens % 8 == 0 and 0 < tokens * heads <= rows
    assert tokens >= q_len or rows == 256


@pytest.mark.parametrize(("ctas", "chunk", "order"), [(1, 512, "lazy"), (4, 512, "random"), (7, 3, "eager"), (40, 1, "random")])
def test_work_is_cut_anywhere_with_the_same_bits(ctas: int, chunk: int, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = index_inputs(IndexCase(RAGGED), "cpu")
    expected = run(inputs)
    check(inputs, expected)
    monkeypatch.setattr(index_score_sm100, "num_ctas", lambda device: ctas)
    monkeypatch.setattr(index_score_sm100, "CHUNK_BLOCKS", chunk)
    assert torch.equal(run(inputs, order), expected)


@pytest.mark.parametrize("heads", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_decode_and_verify(dtype: torch.dtype, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = index_inputs(IndexCase(VERIFY, num_heads=heads, q_dtype=dtype, k_dtype=dtype), "cpu")
    expected = run(inputs, "lazy")
    check(inputs, expected)
    monkeypatch.setattr(index_score_sm100, "num_ctas", lambda device: 8)
    assert torch.equal(run(inputs, "random"), expected)


@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_pages_smaller_than_a_block(page_size: int) -> None:
    inputs = index_inputs(IndexCase(dataclasses.replace(RAGGED, page_size=page_size), num_heads=2), "cpu")
    check(inputs, run(inputs, "random"))


@pytest.mark.parametrize(
    ("name", "values"),
    [("cu_seqlens_q", [0, 110, 70, -5, 2**30]), ("seq_lens", [1100, -7, 2**31 - 1, 2**20]), ("page_table", [2**31 - 1, -(2**31)])],
)
def test_values_out_of_range_reach_no_memory_and_no_other_request(name: str, values: list[int]) -> None:
    """The interpreter refuses every access outside a tensor; the first request's values are right and so are its scores."""
    inputs = index_inputs(IndexCase(RAGGED), "cpu")
    expected = run(inputs)
    tensor = getattr(inputs.batch, name).clone()
    if name == "page_table":
        tensor[1:] = torch.tensor(values, dtype=torch.int32).repeat(tensor[1:].numel())[: tensor[1:].numel()].view_as(tensor[1:])
    else:
        tensor[-len(values) :] = torch.tensor(values, dtype=torch.int32)
        if name == "cu_seqlens_q":
            tensor[:2] = inputs.batch.cu_seqlens_q[:2]
    out = run(dataclasses.replace(inputs, batch=dataclasses.replace(inputs.batch, **{name: tensor})))
    assert torch.equal(out[:, :70], expected[:, :70])


def test_strides_of_queries_and_scores() -> None:
    inputs = index_inputs(IndexCase(RAGGED, num_heads=2), "cpu")
    expected = run(inputs)
    row = torch.full((inputs.index_q.shape[0], 7 * 128), float("nan"), dtype=inputs.index_q.dtype)
    queries = row[:, 3 * 128 : 5 * 128].unflatten(1, (2, 128)).copy_(inputs.index_q)
    block_major = torch.full((inputs.batch.num_blocks, 2, inputs.index_q.shape[0]), float("nan")).permute(1, 2, 0)
    call = call_for(dataclasses.replace(inputs, index_q=queries), block_major)
    with simulated("random", arch=ARCH):
        index_score(call)
    assert torch.equal(call.out, expected)


def test_nan_products_are_ignored_unless_all_are() -> None:
    inputs = index_inputs(IndexCase(RAGGED, num_heads=1), "cpu")
    page = inputs.batch.page_table[0].long()
    inputs.cache.index_k[page[2], 5] = float("nan")
    inputs.cache.index_k[page[3]] = float("nan")
    scores, expected = run(inputs), reference(inputs.index_q, inputs.cache.index_key(), inputs.batch)
    assert torch.equal(scores.isneginf(), expected.isneginf()) and bool(scores[0, 0, 3].isneginf())
    assert torch.allclose(scores[0, :70, :3], expected[0, :70, :3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "kind"), [("bf16", "f16"), ("fp8", "f8f6f4"), ("fp16_heads3_page16", "f16")])
def test_the_kind_of_its_product(name: str, kind: str) -> None:
    found = artifacts(*SM100[f"index_score-{name}"], "sm_100")
    assert set(re.findall(r"tcgen05\.mma\.\S*kind::(\w+)", found.ptx)) == {kind}


def place(ptx: str, pattern: str, number: int = 0) -> re.Match[str]:
    return list(re.finditer(pattern, ptx))[number]


def without(pattern: str, number: int = 0) -> Callable[[str], str]:
    return replaced(pattern, "", number)


def replaced(pattern: str, new: str, number: int = 0) -> Callable[[str], str]:
    def edit(ptx: str) -> str:
        found = place(ptx, pattern, number)
        return ptx[: found.start()] + found.expand(new) + ptx[found.end() :]

    return edit


def without_wait(instruction: str, back: int) -> Callable[[str], str]:
    """The `back`-th wait on an mbarrier before the first `instruction` is left out."""

    def edit(ptx: str) -> str:
        before = place(ptx, instruction).start()
        return without(WAIT, -back)(ptx[:before]) + ptx[before:]

    return edit


WAIT = r"mbarrier\.try_wait[^}]*?bra\.uni\s+LAB_WAIT;"
ARRIVAL_BEFORE_MASK = r"mbarrier\.arrive\.shared[^;]*;(?=\s*\$\w+:\s*mov\.b64[^;]*;\s*setp\.gt\.s32\s+%p\d+, %r\d+, 63;)"
IS_SEEN_BY_ALL = r"setp\.le\.s32(\s+%p\d+, %r\d+, )%r\d+;(?=\s*@%p\d+ bra[^;]*;[\s\S]{0,200}?tcgen05\.ld)"
COMMIT = r"tcgen05\.commit\.[^;]*;"
BROKEN = {
    "queries replace some that are in use": without_wait(r"tcgen05\.mma", 5),
    "keys replace some that are in use": without_wait(r"tcgen05\.mma", 4),
    "queries are multiplied before they are there": without_wait(r"tcgen05\.mma", 3),
    "keys are multiplied before they are there": without_wait(r"tcgen05\.mma", 2),
    "a product replaces one that is not read": without_wait(r"tcgen05\.mma", 1),
    "a product is read before it is done": without_wait(r"tcgen05\.ld", 1),
    "an item is read before it is there": without_wait(r"tcgen05\.ld", 2),
    "a product is never said to be done": without(COMMIT, 0),
    "keys are never said to be used": without(COMMIT, 2),
    "queries are never said to be used": without(COMMIT, 3),
    "a product is never said to be read": without(ARRIVAL_BEFORE_MASK),
    "a query sees one key less of its own block": replaced(r"(setp\.gt\.s32\s+%p\d+, %r\d+), 2;", r"\1, 3;"),
    "no block is masked": replaced(IS_SEEN_BY_ALL, r"setp.le.s32\g<1>2147483647;"),
    "the first step of a product adds to the last product": replaced(r"mov\.pred(\s+%p\d+), 0;(?=\s*tcgen05\.mma)", r"mov.pred\1, -1;"),
    "a step of a product is left out": without(r"tcgen05\.mma[^;]*;", 5),
    "a column is left out": replaced(r"max\.f32(\s+%\w+, %\w+, %\w+), %\w+;", r"max.f32\1;", 9),
    "tensor memory is kept": without(r"tcgen05\.dealloc[^;]*;"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_on_purpose_is_seen(name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    """In one order at least: an error, another result, or tensor memory that is left."""
    monkeypatch.setattr(index_score_sm100, "num_ctas", lambda device: 1)
    inputs = index_inputs(IndexCase(RAGGED, num_heads=16), "cpu")
    expected = run(inputs)

    def is_seen(order: str) -> bool:
        try:
            scores = run(inputs, order, edit=BROKEN[name])
        except ptxsim.SimError:
            return True
        return not torch.equal(scores, expected) or "tensor memory not freed" in "".join(capfd.readouterr())

    assert "tensor memory" not in "".join(capfd.readouterr())
    assert any(is_seen(order) for order in ORDERS)
