"""The Hopper decode kernel where its own machinery shows: unions of drafts, warps that skip blocks, cut blocks, splits and their merge, padding.

In the interpreter, in eager, lazy and random order; the matrix's cases are in test_simulated.py.
"""

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from needed import need

need("nvidia-cutlass-dsl", "apache-tvm-ffi")

import ptxsim
from attention_calls import call_of
from simulator import ORDERS, simulated

from m3attn.batch import LayerCache, PagedBatch
from m3attn.calls import SparseAttentionCall
from m3attn.choice import UnsupportedProblem
from m3attn.dsl_kernels.decode_schedule import MAX_SPLITS, decode_workspace_bytes, schedule_for, settings_override
from m3attn.dsl_kernels.sparse_decode_sm90 import sparse_decode
from m3attn.testing.bounds import attention_bound, product_error
from m3attn.testing.cases import AttentionCase, Step
from m3attn.testing.inputs import AttentionInputs, attention_inputs
from m3attn.testing.poison import poisoned_empty
from m3attn.workspace import DEFAULT_LIMIT, WorkShape

RAGGED = Step("ragged", (8, 3, 0, 5, 1), (400, 650, 0, 3, 1), padded_rows=3, slack=130)
ONE = Step("one", (1, 1, 0, 1), (600, 129, 0, 1), padded_rows=1)
SIXTEEN = Step("sixteen", (16, 2), (300, 500), slack=1)
VERIFY = AttentionCase(RAGGED, 16, 1)
DECODE = AttentionCase(ONE, 16, 1, topk=4)


def shape_of(call: SparseAttentionCall) -> WorkShape:
    batch = call.batch
    tokens, heads, dim = call.q.shape
    sizes = (tokens, batch.num_requests, heads, call.k.shape[1], 0, dim, call.ids.shape[2], batch.max_seqlen_q, batch.max_seqlen_k, 128)
    return WorkShape(*sizes, limit=1 << 30)


def attend(
    call: SparseAttentionCall, order: str, edit: Callable[[str], str] | None = None, *, reads_unwritten: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    workspace = torch.full((decode_workspace_bytes(shape_of(call)),), 0xFF, dtype=torch.uint8)
    call = replace(call, out=call.out.clone(), lse=None if call.lse is None else call.lse.clone(), workspace=workspace)
    with simulated(order, seed=3, edit=edit) as device, poisoned_empty():
        if not reads_unwritten:
            device.watch(workspace)
        sparse_decode(call)
    assert call.lse is not None
    return call.out, call.lse


def check(
    inputs: AttentionInputs, *, orders: Sequence[str] = ("random",), sm_scale: float | None = None, call: SparseAttentionCall | None = None
) -> None:
    """Within the bound, and the same bits in every order."""
    call = call_of(inputs, sm_scale=sm_scale) if call is None else call
    results = [attend(call, order) for order in orders]
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])
    error = product_error("cute_sm90", "sm_90", inputs.q.dtype, call.k.dtype)
    bound = attention_bound(inputs.q, inputs.cache, inputs.batch, inputs.ids, sm_scale=sm_scale, **inputs.options, error_of_products=error)
    bound.check(*results[0])


@pytest.fixture
def splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setitem(settings_override, "splits", request.param)
    return request.param


@pytest.mark.parametrize("splits", [1, 3], indirect=True)
@pytest.mark.parametrize("case", [VERIFY, replace(DECODE, mode="widen_e4m3", layout="packed", scaled=True)], ids=lambda case: case.id)
def test_orders_agree(case: AttentionCase, splits: int) -> None:
    check(attention_inputs(case, "cpu"), orders=ORDERS)


@pytest.mark.parametrize(
    ("splits", "order", "case"),
    [
        (1, "lazy", DECODE),
        (1, "random", replace(VERIFY, topk=5, ids="scattered", mode="fp16", layout="packed_nhd", sink=torch.float32)),
        (2, "lazy", replace(VERIFY, mode="widen_e5m2", layout="nhd", scaled=True)),
        (2, "random", replace(VERIFY, mode="fp8", num_q_heads=8, scaled=True, sink=torch.bfloat16)),
        (3, "lazy", replace(VERIFY, num_q_heads=10, num_kv_heads=2, topk=3)),  # 3 of 8 rows of a token stay empty
        (3, "random", replace(DECODE, mode="widen_fp16")),
        (2, "lazy", replace(DECODE, mode="widen_e5m2", scaled=True)),
    ],
    indirect=["splits"],
)
def test_within_the_bound(case: AttentionCase, splits: int, order: str) -> None:
    check(attention_inputs(case, "cpu"), orders=[order])


@pytest.mark.parametrize("mode", ["bf16", "widen_e4m3"])
def test_a_tile_of_eight_tokens(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As large batches take it."""
    monkeypatch.setitem(settings_override, "tile_rows", 128)
    check(attention_inputs(replace(VERIFY, mode=mode), "cpu"), orders=["lazy", "random"])


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_tiles_of_one_token_that_share_a_multiprocessor(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As more than 132 of them do."""
    for name, value in {"key_warps": 4, "step_keys": 64, "splits": 1}.items():
        monkeypatch.setitem(settings_override, name, value)
    check(attention_inputs(replace(DECODE, mode=mode), "cpu"), orders=["lazy", "random"])


@pytest.mark.parametrize(("group", "topk"), [(1, 16), (4, 33), (16, 16), (32, 2)])
def test_tiles_of_every_shape(group: int, topk: int) -> None:
    """Groups of 1 to 32 heads, one tile a request or several, K of every size class."""
    check(attention_inputs(AttentionCase(SIXTEEN, group, 1, topk=topk), "cpu"))


def test_a_negative_scale() -> None:
    check(attention_inputs(DECODE, "cpu"), sm_scale=-0.2)


def test_a_repeated_id_counts_once() -> None:
    inputs = attention_inputs(replace(DECODE, step=Step("two", (2,), (600,))), "cpu")
    assert inputs.ids is not None
    once = torch.where(torch.arange(4) < 2, torch.tensor([1, 4, 0, 0]), -1).int().expand_as(inputs.ids)
    inputs.ids[:] = torch.tensor([4, 1, 4, 1])
    out, lse = attend(call_of(inputs), "eager")
    attention_bound(inputs.q, inputs.cache, inputs.batch, once, **inputs.options).check(out, lse)


@pytest.mark.parametrize("power", [-110.0, -20.0, 20.0, 110.0])
def test_bf16_queries_that_fp16_does_not_hold(power: float) -> None:
    """Over an fp8 cache they are multiplied in fp16, each row over its own power of two."""
    inputs = attention_inputs(replace(DECODE, mode="widen_e4m3"), "cpu")
    q = inputs.q * 2.0**power
    q[0, 0] = 0
    check(replace(inputs, q=q), sm_scale=128**-0.5 / 2.0**power)


def test_rows_at_any_address() -> None:
    inputs = attention_inputs(VERIFY, "cpu")
    call = call_of(inputs)
    q, out = (torch.full((*call.q.shape[:2], 131), float("nan"), dtype=call.q.dtype)[..., 1:129] for _ in range(2))
    q.copy_(call.q)
    check(inputs, call=replace(call, q=q, out=out))


def test_scales_on_the_device() -> None:
    inputs = attention_inputs(replace(VERIFY, sink=torch.bfloat16), "cpu")
    scales = [torch.tensor(value) for value in (0.5, 3.0, 0.25)]
    inputs = replace(inputs, cache=replace(inputs.cache, k_scale=scales[1], v_scale=scales[2]), options=inputs.options | {"q_scale": scales[0]})
    check(inputs)


@pytest.mark.parametrize("group", [8, 16])
def test_lengths_around_blocks_and_steps(group: int) -> None:
    """One request a length, so that blocks end cut at every place that the pipeline treats apart; all lengths to 2177 are the GPU's matrix."""
    lengths = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 193, 2177)
    check(attention_inputs(AttentionCase(Step("lengths", (1,) * len(lengths), lengths), group, 1, topk=3), "cpu"))


def test_offsets_that_make_no_sense_stay_within_the_tensors() -> None:
    inputs = attention_inputs(VERIFY, "cpu")
    batch = inputs.batch
    for offsets, lengths in (([0, 9, 4, 90, -3, 17], [700, -5, 2**31 - 1, 3, 1]), ([-40, 2**31 - 1, 0, 5, 5, 2**30], [9] * 5)):
        wild = replace(batch, cu_seqlens_q=torch.tensor(offsets, dtype=torch.int32), seq_lens=torch.tensor(lengths, dtype=torch.int32))
        call = call_of(replace(inputs, batch=wild))
        attend(call, "eager", reads_unwritten=True)  # rows that no tile finds; the interpreter checks every address


def test_pools_that_tma_cannot_address_are_declined() -> None:
    inputs = attention_inputs(VERIFY, "cpu")
    k, v = inputs.cache.key_value()
    wider = [torch.zeros(*pool.shape[:3], 131, dtype=pool.dtype)[..., :128] for pool in (k, v)]
    for name, pools in (("cache.k", (wider[0], v)), ("cache.v", (k, wider[1]))):
        call = call_of(replace(inputs, cache=LayerCache(k=pools[0], v=pools[1])))
        with pytest.raises(UnsupportedProblem, match=rf"{name}: .*16 bytes"), simulated():
            sparse_decode(call)
        assert call.out.isnan().all()


def test_without_requests_or_pages() -> None:
    inputs = attention_inputs(VERIFY, "cpu")
    nobody = PagedBatch.from_lengths([], [], torch.zeros(0, 1, dtype=torch.int32))
    for changed in (replace(inputs, batch=nobody), replace(inputs, batch=replace(inputs.batch, page_table=inputs.batch.page_table[:, :0]))):
        call = call_of(changed)
        sparse_decode(call)
        assert call.lse is not None and (call.out == 0).all() and (call.lse == float("-inf")).all()


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("group", range(1, 33))
def test_schedules_fit_the_machine(group: int, kv_dtype: str) -> None:
    for q_len in (1, 2, 3, 8, 16):
        for requests in (1, 16, 200):
            s = schedule_for(
                max_seqlen_q=q_len,
                num_requests=requests,
                num_q_heads=4 * group,
                num_kv_heads=4,
                topk=64,
                num_blocks=1000,
                kv_dtype=kv_dtype,
                tokens=requests * q_len,
                limit=1 << 24,
            )
            rows = s.tokens * s.token_rows
            assert s.token_rows >= group and rows % 16 == 0 and rows <= 128 and s.tiles * s.tokens >= requests * q_len
            warps = rows // 16 * s.key_warps
            assert warps in (4, 8) and rows % warps == 0 and s.step_keys // s.key_warps % 16 == 0 and s.stages >= 3
            assert 1 <= s.splits <= MAX_SPLITS
            assert s.splits == 1 or s.splits * requests * q_len * 4 * group * 129 * 4 <= 1 << 24


@pytest.mark.parametrize(
    ("requests", "queries", "num_kv_heads", "num_blocks", "kv_dtype", "rows", "key_warps", "splits"),
    [
        (1, 1, 4, 1024, "bf16", 16, 4, 16),
        (16, 1, 4, 256, "bf16", 16, 8, 1),  # the memory is what bounds 64 tiles of bf16, each alone on its multiprocessor,
        (16, 1, 4, 256, "fp8_e4m3", 16, 4, 2),  # and 64 multiprocessors what bounds tiles of half the bytes, each of them widened
        (64, 1, 1, 256, "bf16", 16, 8, 1),
        (128, 1, 4, 64, "bf16", 16, 4, 1),
        (8, 8, 1, 391, "bf16", 32, 4, 4),
        (32, 8, 1, 391, "bf16", 32, 4, 1),
        (64, 8, 1, 391, "bf16", 64, 2, 1),  # one tile a multiprocessor
        (128, 8, 1, 391, "bf16", 128, 1, 1),
        (128, 8, 1, 391, "fp8_e4m3", 128, 1, 1),
    ],
)
def test_schedules_are_the_fastest_measured(
    requests: int, queries: int, num_kv_heads: int, num_blocks: int, kv_dtype: str, rows: int, key_warps: int, splits: int
) -> None:
    """To 1%, of what a sweep on an H200 tried; it tried no 64 requests of one split, and 3 splits of 8 requests' tiles of 32 rows."""
    s = schedule_for(
        max_seqlen_q=queries,
        num_requests=requests,
        num_q_heads=16 * num_kv_heads,
        num_kv_heads=num_kv_heads,
        topk=16,
        num_blocks=num_blocks,
        kv_dtype=kv_dtype,
        tokens=requests * queries,
        limit=DEFAULT_LIMIT,
    )
    assert (s.tokens * s.token_rows, s.key_warps, s.splits) == (rows, key_warps, splits)


def test_workspace_is_that_of_the_call() -> None:
    call = call_of(attention_inputs(VERIFY, "cpu"))
    shape = shape_of(call)
    assert decode_workspace_bytes(replace(shape, tokens=0)) == 0
    assert 0 < decode_workspace_bytes(shape) <= MAX_SPLITS * shape.tokens * 16 * 129 * 4 + 512
    assert decode_workspace_bytes(replace(shape, limit=1000)) == 0


BROKEN = {
    "values are read before they have come": ("lazy", 2),
    "keys are read before they have come": ("lazy", 1),
    "the producer does not wait for an empty stage": ("random", 0),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_kernel_shows(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(settings_override, "splits", 1)
    monkeypatch.setitem(settings_override, "tile_rows", 128)
    order, which = BROKEN[fault]
    waits = []

    def edit(ptx: str) -> str:
        """Without the loop of one mbarrier wait: what follows does not ask whether the wait was over."""
        found = list(re.finditer(r"mbarrier\.try_wait\.parity[^;]*;", ptx))
        waits.append(len(found))
        start, end = found[which].span()
        predicate = re.search(r"(%p\d+)", ptx[start:end])
        assert predicate is not None
        return f"{ptx[:start]}setp.eq.u32 {predicate[1]}, 0, 0;{ptx[end:]}"

    inputs = attention_inputs(replace(VERIFY, step=Step("long", (8,), (2000,))), "cpu")
    call = call_of(inputs)
    bound = attention_bound(inputs.q, inputs.cache, inputs.batch, inputs.ids, **inputs.options)
    with contextlib.suppress(ptxsim.SimError), pytest.raises(AssertionError):
        bound.check(*attend(call, order, edit))
    assert waits == [3], "producer, keys, values"
