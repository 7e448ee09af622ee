"""Union tiles of sparse prefill: the unions themselves, every tile shape against the fp64 bound, and what must not change a row's bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import m3attn
from m3attn import workspace
from m3attn.testing.bounds import attention_bound, product_error
from m3attn.testing.cases import AttentionCase, Step
from m3attn.testing.inputs import AttentionInputs, attention_inputs
from m3attn.testing.matrix import DEVICE, MARKS, arch, pick, skip_if_declined
from m3attn.triton_kernels import union_prefill as union
from m3attn.triton_kernels.rows import num_row_tiles
from m3attn.workspace import WorkShape, carve

pytestmark = MARKS
KEY = "triton_union"

# Rows before a request's first key, a request shorter than a tile, a block that starts inside a tile, padded rows.
STEP = pick(
    Step("tiles", (5, 1, 0, 3), (43, 20, 7, 2), page_size=16, block_size=16, padded_rows=2, slack_q=17),
    Step("tiles", (150, 1, 0, 40), (1_300, 700, 7, 33), padded_rows=5),
)
CASE = AttentionCase(STEP, pick(4, 32), 2, head_dim=pick(64, 128), topk=pick(2, 8), mode=pick("fp32", "bf16"))


def attend(inputs: AttentionInputs, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    return m3attn.sparse_attention(*inputs.arguments(), **(inputs.options | options), return_lse=True, impl=KEY)


def check(case: AttentionCase, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    skip_if_declined("sparse_attention", KEY, case.problem(arch()))
    inputs = attention_inputs(case, DEVICE)
    result = attend(inputs, **options)
    error = product_error(KEY, arch(), inputs.q.dtype, inputs.cache.key_value()[0].dtype)
    attention_bound(inputs.q, inputs.cache, inputs.batch, inputs.ids, **(inputs.options | options), error_of_products=error).check(*result)
    return result


def equal(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


def work_shape(case: AttentionCase, limit: int) -> WorkShape:
    step = case.step
    return WorkShape(
        tokens=step.tokens,
        num_requests=len(step.q_lens),
        num_q_heads=case.num_q_heads,
        num_kv_heads=case.num_kv_heads,
        num_index_heads=0,
        head_dim=case.head_dim,
        topk=case.topk,
        max_seqlen_q=step.max_seqlen_q,
        max_seqlen_k=step.max_seqlen_k,
        block_size=step.block_size,
        limit=limit,
    )


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch):
    return lambda nbytes: monkeypatch.setattr(workspace, "_limit", nbytes)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch):
    return lambda *values: monkeypatch.setattr(union, "settings_override", union.Settings(*values))


@pytest.mark.parametrize("group", [1, 3, 16])
def test_unions_are_the_ids_of_their_tokens(group: int) -> None:
    """Ascending, every block once, a bit for each token that selected it, and first those that end before the tile's first position."""
    case = replace(CASE, num_q_heads=2 * group, ids="scattered", topk=pick(3, 16))
    inputs, plan = attention_inputs(case, DEVICE), union.plan_unions(union.choose_settings("half", arch()), work_shape(case, 1 << 30))
    block_t, step = plan.tile_tokens, case.step
    space = torch.full((plan.nbytes,), 0xFF, dtype=torch.uint8, device=DEVICE)
    m3attn.sparse_attention(*inputs.arguments(), workspace=space, impl=KEY)
    unions, _ = carve(space, 0, (2, num_row_tiles(step.tokens, len(step.q_lens), block_t), plan.words), torch.int64)
    begin = 0
    for request, (q_len, seq_len) in enumerate(zip(step.q_lens, step.seq_lens, strict=True)):
        for first in range(0, q_len, block_t):
            rows = range(begin + first, begin + min(first + block_t, q_len))
            for head in range(2):
                expected: dict[int, int] = {}
                for bit, row in enumerate(rows):
                    position = seq_len - q_len + row - begin
                    for block in inputs.ids[head, row].tolist():
                        if 0 <= block * step.block_size <= position:
                            expected[block] = expected.get(block, 0) | 1 << bit
                written = unions[head, begin // block_t + request + first // block_t].tolist()
                count, whole = written[0] & 0xFFFFFFFF, written[0] >> 32
                assert [(w >> 32, w & 0xFFFFFFFF) for w in written[1 : 1 + count]] == sorted(expected.items())
                first_position = seq_len - q_len + first
                assert whole == sum((block + 1) * step.block_size <= first_position + 1 for block in expected)
        begin += q_len


@pytest.mark.parametrize("group", [1, 2, 3, 5, 16, 32])
def test_group_sizes(group: int) -> None:
    check(replace(CASE, num_q_heads=group, num_kv_heads=1))


@pytest.mark.parametrize("mode", ["bf16", "widen_fp16", "widen_e5m2", "fp8", "fp8_pv"])
def test_modes_with_sink_and_scales(mode: str) -> None:
    check(replace(CASE, mode=mode, scaled=True, sink=torch.float32, layout="packed"))


@pytest.mark.parametrize("settings_tried", pick(union.CANDIDATES["prefill"][:1], union.CANDIDATES["prefill"]), ids=str)
@pytest.mark.parametrize("mode", pick(["fp32"], ["bf16", "widen_e4m3", "fp8"]))
def test_every_pipeline_depth(mode: str, settings_tried: union.Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours that selected different blocks, at each setting that a sweep may choose."""
    monkeypatch.setattr(union, "settings_override", settings_tried)
    check(replace(CASE, mode=mode, topk=pick(2, 4)))


@pytest.mark.parametrize(("page_size", "block_size", "block_n"), [(16, 32, 16), (16, 32, 32), (32, 64, 16)])
def test_blocks_in_several_tiles_and_pages(page_size: int, block_size: int, block_n: int, settings) -> None:
    settings(64, block_n, 4, 2)
    step = replace(STEP, page_size=page_size, block_size=block_size, q_lens=(6,), seq_lens=(3 * block_size + 5,), padded_rows=0)
    check(replace(CASE, step=step, num_kv_heads=1, num_q_heads=2))


@pytest.mark.parametrize("options", [dict(ids="scattered", topk=5), dict(topk=64, num_q_heads=2, num_kv_heads=1), dict(head_dim=128, layout="nhd")])
def test_ids_and_dims(options: dict[str, object]) -> None:
    check(replace(CASE, **options))


@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_scales_that_turn_the_order_of_logits(scale: float) -> None:
    check(CASE, sm_scale=scale)


def test_tiles_and_slices_change_no_bit(settings, limit) -> None:
    """A row's own blocks decide its result: not who shares its tile, nor where a slice of rows ends."""
    case = replace(CASE, num_q_heads=pick(32, 64))
    settings(64, pick(16, 64), 4, 2)
    expected = check(case)
    words = union.plan_unions(union.settings_override, work_shape(case, 1 << 30)).words
    limit(4 * words * case.num_kv_heads * 8 * (len(STEP.q_lens) + 1))
    plan = union.plan_unions(union.settings_override, work_shape(case, workspace.workspace_limit()))
    assert 0 < plan.rows < plan.tile_tokens
    assert equal(check(case), expected)
    if DEVICE == "cuda":  # in the interpreter a product of more rows may round differently
        limit(1 << 30)
        settings(128, 64, 8, 2)
        assert equal(check(case), expected)


def test_copies_go_group_by_group_beside_the_unions(limit) -> None:
    step = pick(replace(STEP, q_lens=(8,), seq_lens=(20,)), replace(STEP, q_lens=(300,), seq_lens=(900,)))
    case = replace(CASE, step=step, mode="widen_e4m3", topk=pick(4, 16))
    expected = check(case)
    at_once = union.workspace_bytes(work_shape(case, 1 << 30))
    limit(at_once - 1)
    needed = union.workspace_bytes(work_shape(case, at_once - 1))
    assert 0 < needed < at_once
    assert equal(check(case), expected)


def test_a_limit_below_one_tile_a_request_runs_query_by_query(limit) -> None:
    limit(8)
    assert union.plan_unions(union.choose_settings("half", arch()), work_shape(CASE, 8)).rows == 0
    check(CASE)


def test_scratch_stays_within_the_limit() -> None:
    long = replace(CASE, step=Step("long", (200_000,), (1_000_000,)), num_q_heads=64, num_kv_heads=4, topk=64)
    for nbytes in (1 << 20, 16 << 20, 1 << 30):
        assert 0 < union.workspace_bytes(work_shape(long, nbytes)) <= nbytes
