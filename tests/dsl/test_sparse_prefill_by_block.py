"""The part of the Hopper prefill that goes block by block: lists turned round, partial outputs, slices; and which tiles are left to it."""

import contextlib
import math
import re
from dataclasses import replace

import pytest
import torch
from needed import need

need("nvidia-cutlass-dsl", "apache-tvm-ffi")

import ptxsim
from attention_calls import call_of
from prefills import BASE, LONG, RAGGED
from simulator import ORDERS, simulated

from m3attn.calls import SparseAttentionCall
from m3attn.dsl_kernels import block_lists_sm90, sparse_attention_sm90, sparse_prefill_by_block_sm90, sparse_prefill_sm90
from m3attn.dsl_kernels.sparse_attention_sm90 import sparse_attention, workspace_bytes
from m3attn.dsl_kernels.sparse_prefill_by_block_sm90 import Plan
from m3attn.dtypes import dtype_name
from m3attn.testing.bounds import attention_bound, product_error
from m3attn.testing.cases import AttentionCase
from m3attn.testing.inputs import AttentionInputs, attention_inputs
from m3attn.workspace import WorkShape

M3 = dict(num_q_heads=64, num_kv_heads=4, head_dim=128, topk=16, num_requests=1)


def with_workspace(call: SparseAttentionCall, limit: int) -> SparseAttentionCall:
    batch, (tokens, num_q_heads, head_dim) = call.batch, call.q.shape
    lengths = batch.max_seqlen_q, batch.max_seqlen_k, batch.block_size
    heads = num_q_heads, call.k.shape[1], 0
    shape = WorkShape(tokens, batch.num_requests, *heads, head_dim, call.ids.shape[2], *lengths, limit, dtype_name(call.k.dtype))
    return replace(call, workspace=torch.full((workspace_bytes(shape),), 0xFF, dtype=torch.uint8))


def defer_in_small_steps(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_prefill_by_block_sm90, "MIN_ROWS", 1)
    monkeypatch.setattr(sparse_prefill_by_block_sm90, "num_sms", lambda device: 3)
    monkeypatch.setattr(sparse_attention_sm90, "workspace_limit", lambda: limit)


def deferred_rows(inputs: AttentionInputs, limit: int, monkeypatch: pytest.MonkeyPatch, sm_scale: float | None = None) -> list[int]:
    """Checks every order; returns how many (row, KV head) pairs were deferred, by order."""
    counts = []

    def counted(*arguments: object) -> None:
        scratch = arguments[-1]
        counts.append(int((scratch.deferred[..., 0] >= 0).sum()))
        for tensor in (scratch.rows, scratch.items, scratch.picks, scratch.part_out, scratch.part_lse):
            device.watch(tensor)
        sparse_prefill_by_block_sm90.attend_by_block(*arguments)

    defer_in_small_steps(limit, monkeypatch)
    monkeypatch.setattr(sparse_attention_sm90, "attend_by_block", counted)
    error = product_error("cute_sm90", "sm_90", inputs.q.dtype, inputs.cache.key_value()[0].dtype)
    bound = attention_bound(inputs.q, inputs.cache, inputs.batch, inputs.ids, sm_scale=sm_scale, **inputs.options, error_of_products=error)
    results = []
    for order in ORDERS:
        call = with_workspace(call_of(inputs, sm_scale=sm_scale), limit)
        with simulated(order, seed=5) as device:
            sparse_attention(call)
        bound.check(call.out, call.lse)
        results.append((call.out, call.lse))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])
    return counts


@pytest.mark.parametrize(
    "case,limit,sm_scale",
    [
        pytest.param(replace(BASE, num_q_heads=32, num_kv_heads=2), 3_000_000, None, marks=pytest.mark.slow),  # four slices
        (replace(BASE, num_q_heads=8, topk=5, ids="scattered"), 1 << 30, -0.2),
        (replace(BASE, num_q_heads=32, topk=20), 1 << 30, None),
        (replace(BASE, mode="fp8", scaled=True), 1 << 30, None),
    ],
    ids=["slices", "two_tokens_a_warp", "two_warps_a_token", "fp8_scales_on_the_device"],
)
def test_every_tile_deferred(case: AttentionCase, limit: int, sm_scale: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_prefill_sm90, "DEFERRED_SHARE", 0.0)
    inputs = attention_inputs(case, "cpu")
    if case.scaled:
        cache = replace(inputs.cache, k_scale=torch.tensor([inputs.cache.k_scale]), v_scale=torch.tensor([inputs.cache.v_scale]))
        inputs = replace(inputs, cache=cache, options=inputs.options | {"q_scale": torch.tensor([inputs.options["q_scale"]])})
    empty = RAGGED.padded_rows * case.num_kv_heads
    assert deferred_rows(inputs, limit, monkeypatch, sm_scale) == [inputs.q.shape[0] * case.num_kv_heads - empty] * len(ORDERS)


BROKEN = {
    "the rows past the end of a sequence are not cleared": ("lazy", r"st\.shared\.v4\.b32\s+\[[^\]]+\], \{0, 0, 0, 0\};", ";"),
    "the last product is not awaited": ("lazy", r"wgmma\.wait_group\.sync\.aligned\s+0;", "wgmma.wait_group.sync.aligned 7;"),
    "slots are not freed": ("eager", r"mbarrier\.arrive\.shared\.b64[^;]*;", ";"),
    "parts are joined before they are there": ("lazy", r"mbarrier\.try_wait\.parity\.shared\.b64\s+(P\d), [^;]*;", r"setp.eq.u32 \1, 0, 0;"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_kernel_shows(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order, pattern, by = BROKEN[fault]
    broken = "join_parts" if "joined" in fault else "cutlass_attend_"
    counts = []

    def edit(ptx: str) -> str:
        parts = re.split(r"(?=^\.visible \.entry)", ptx, flags=re.MULTILINE)
        for i, part in enumerate(parts):
            if re.match(rf"\.visible \.entry \w*{broken}", part):
                parts[i], count = re.subn(pattern, by, part)
                counts.append(count)
        return "".join(parts)

    monkeypatch.setattr(sparse_prefill_sm90, "DEFERRED_SHARE", 0.0)
    defer_in_small_steps(1 << 30, monkeypatch)
    inputs = attention_inputs(BASE, "cpu")
    call = with_workspace(call_of(inputs), 1 << 30)
    bound = attention_bound(inputs.q, inputs.cache, inputs.batch, inputs.ids, **inputs.options)
    with contextlib.suppress(ptxsim.SimError), pytest.raises(AssertionError):
        with simulated(order, seed=5, edit=edit):
            sparse_attention(call)
        bound.check(call.out, call.lse)
    assert counts and all(counts), "the edit found nothing to break"


def test_tiles_whose_tokens_share_few_blocks_are_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tile of eight tokens selects one list, the second eight that have only the own block in common, the third one list again."""
    inputs = attention_inputs(replace(BASE, step=LONG, topk=2, ids="ascending"), "cpu")
    assert inputs.ids is not None
    inputs.ids[0, :, 0], inputs.ids[0, :, 1] = 3, 11
    inputs.ids[0, 8:16, 0] = torch.arange(8)
    monkeypatch.setattr(sparse_prefill_sm90, "DEFERRED_SHARE", 0.4)
    assert deferred_rows(inputs, 1 << 30, monkeypatch) == [8] * len(ORDERS)


def test_a_plan_fits_its_limit() -> None:
    for tokens, blocks in ((8192, 64), (32768, 256), (8192, 1024)):
        plan = Plan.of(tokens, **M3, num_blocks=blocks, limit=1 << 30)
        assert plan is not None and plan.nbytes <= 1 << 30
        assert plan.slices * plan.slice_rows >= 4 * tokens > (plan.slices - 1) * plan.slice_rows
        assert plan.slices == math.ceil(tokens * 4 * 16 * 16 * 260 / (1 << 30))
    assert Plan.of(2047, **M3, num_blocks=64, limit=1 << 30) is None  # not worth it
    assert Plan.of(8192, **M3, num_blocks=64, limit=1 << 20) is None
    assert Plan.of(8192, **(M3 | {"num_q_heads": 24}), num_blocks=64, limit=1 << 30) is None  # six heads fill no units of 8 rows
    assert Plan.of(8192, **(M3 | {"num_requests": 64}), num_blocks=1024, limit=1 << 30) is None


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("share", [0.6, 0.0], ids=["some", "none"])
def test_lists_turned_round(order: str, share: float) -> None:
    heads, rows, topk, requests, blocks, slice_rows, item_picks = 2, 300, 7, 2, 9, 150, 8
    slices = 4
    gen = torch.Generator().manual_seed(1)
    ids = torch.rand(heads, rows, 14, generator=gen).argsort(dim=-1)[..., :topk].int() - 2  # some out of range
    request = (torch.arange(rows) >= 130).expand(heads, rows).int()
    request = torch.where(torch.rand(heads, rows, generator=gen) < share, request, -1)
    deferred = torch.stack([request, torch.randint(0, blocks * 128 + 1, (heads, rows), generator=gen)], dim=-1).int()
    keys = slices * heads * requests * blocks
    num_rows, slice_items, lists = (torch.zeros(n, dtype=torch.int32) for n in (1, slices + 1, keys))
    numbered = torch.full((heads * rows, 4), -1, dtype=torch.int32)
    items = torch.full((keys + heads * rows * topk // item_picks, 3), -1, dtype=torch.int32)
    picks = torch.full((heads * rows * topk,), -1, dtype=torch.int32)
    with simulated(order):
        block_lists_sm90.KERNEL.get(block_lists_sm90.Variant(item_picks), ids.device)(
            ids, deferred, num_rows, numbered, lists, items, slice_items, picks, slice_rows, requests, blocks, 2
        )

    owned = numbered[: int(num_rows)].tolist()
    places = [(kv_head, row) for kv_head, row in (request >= 0).nonzero().tolist()]
    assert sorted((kv_head, row) for row, kv_head, _, _ in owned) == places
    expected: dict[int, list[int]] = {}
    for number, (row, kv_head, owner, visible) in enumerate(owned):
        assert [owner, visible] == deferred[kv_head, row].tolist()
        for entry, block in enumerate(ids[kv_head, row].tolist()):
            if 0 <= block < math.ceil(visible / 128):
                key = ((number // slice_rows * heads + kv_head) * requests + owner) * blocks + block
                expected.setdefault(key, []).append(number << block_lists_sm90.ENTRY_BITS | entry)
    found: dict[int, list[int]] = {}
    for key, begin, count in items[: int(slice_items[-1])].tolist():
        assert 0 < count <= item_picks
        found.setdefault(key, []).extend(picks[begin : begin + count].tolist())
    assert {key: sorted(listed) for key, listed in found.items()} == {key: sorted(listed) for key, listed in expected.items()}
    for which in range(slices):
        of_slice = items[int(slice_items[which]) : int(slice_items[which + 1]), 0]
        assert (of_slice // (keys // slices) == which).all() and bool((of_slice.diff() >= 0).all())
