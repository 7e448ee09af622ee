"""The Hopper prefill kernel where its machinery shows: merged lists, halves that pass over blocks, last pages, padded groups, odd strides.

In the interpreter, in eager, lazy and random order, which must agree bit for bit; the matrix's cases are in test_simulated.py.
"""

import contextlib
import itertools
import re
import subprocess
import tempfile
from dataclasses import replace
from unittest import mock

import pytest
import torch
from needed import need

need("nvidia-cutlass-dsl", "apache-tvm-ffi")

import ptxsim
from attention_calls import call_of
from prefills import BASE, LONG, SM90, SM100, Prefill
from simulator import ORDERS, Replaced, artifacts, simulated
from triton import knobs

from m3attn.batch import LayerCache
from m3attn.choice import UnsupportedProblem
from m3attn.dsl_kernels import sparse_prefill_sm90
from m3attn.dsl_kernels.sparse_attention_sm90 import sparse_attention, workspace_bytes
from m3attn.dsl_kernels.sparse_prefill_sm90 import ENTRIES, Entry, tile_tokens
from m3attn.dsl_kernels.variants import VARIANTS
from m3attn.testing.cases import AttentionCase, Step
from m3attn.testing.inputs import AttentionInputs, attention_inputs
from m3attn.workspace import WorkShape


@pytest.fixture(params=[SM90, SM100], ids=["sm90", "sm100"])
def prefill(request: pytest.FixtureRequest) -> Prefill:
    return request.param


@pytest.mark.parametrize(
    "case",
    [
        BASE,
        replace(BASE, step=LONG, topk=5, ids="scattered"),
        replace(BASE, num_q_heads=10, num_kv_heads=2, step=LONG, topk=4),  # 12 tokens of 5 heads and 4 rows of nothing in a half
        replace(BASE, topk=50, ids="scattered"),  # half the rows of a matrix instruction stay empty
        replace(BASE, sink=torch.float32, mode="fp16", head_dim=64, layout="packed_nhd"),
    ],
    ids=lambda case: case.id,
)
def test_within_the_bound(case: AttentionCase) -> None:
    SM90.check(attention_inputs(case, "cpu"))


@pytest.mark.parametrize("second", [[1, 2, 3, 4, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]], ids=["stages", "entries"])
def test_halves_pass_over_more_blocks_than_there_is_room_for(second: list[int]) -> None:
    """The first four tokens of a tile select what the others do not, in runs longer than the pipeline, of stages and of entries."""
    inputs = attention_inputs(replace(BASE, step=replace(LONG, seq_lens=(1820,)), topk=16), "cpu")
    assert inputs.ids is not None
    first = [0, 5, 6, 7] if len(second) == 6 else [0]
    lists = torch.full((2, 16), -1, dtype=torch.int32)
    for half, blocks in enumerate((first, second)):
        lists[half, : len(blocks) + 1] = torch.tensor([*blocks, 14])  # 14 is everybody's own
    inputs.ids[0] = lists[torch.arange(24) // 4 % 2]
    SM90.check(inputs)


@pytest.mark.parametrize("sm_scale", [0.5, 4.0])
def test_maxima_that_grow_are_met_by_rescaling(prefill: Prefill, sm_scale: float) -> None:
    """Logits from block to block about as far and much further apart than what a weight may exceed 1 by."""
    prefill.check(attention_inputs(replace(BASE, step=LONG, topk=8), "cpu"), sm_scale=sm_scale)


def test_more_tiles_without_keys_in_the_end_than_entries(prefill: Prefill) -> None:
    """Tiles go from the last to the first, and no request before the last has keys."""
    rows = (ENTRIES + 2) * prefill.tile_tokens(16)
    inputs = attention_inputs(replace(BASE, step=Step("last", (rows, 3), (0, 384)), topk=2), "cpu")
    with mock.patch.object(sparse_prefill_sm90, "num_sms", lambda device: 1):
        prefill.check(inputs)


def test_a_negative_scale(prefill: Prefill) -> None:
    prefill.check(attention_inputs(BASE, "cpu"), sm_scale=-0.2)


def without_a_product_above_zero() -> AttentionInputs:
    """In every second head."""
    inputs = attention_inputs(replace(BASE, step=LONG, topk=8), "cpu")
    k, _ = inputs.cache.key_value()
    k.copy_(-k.abs())
    inputs.q.abs_()
    inputs.q[:, ::2].neg_()
    return inputs


@pytest.mark.parametrize("sm_scale", [None, 40.0])
def test_rows_without_a_product_above_zero(sm_scale: float | None) -> None:
    """The order of their products is not that of the bits."""
    SM90.check(without_a_product_above_zero(), sm_scale=sm_scale)


def test_trust_in_the_bits_of_such_rows_shows() -> None:
    edit = Replaced(r"(and\.b32\s+(%r\d+), %r\d+, %r\d+;\s+setp\.lt\.s32\s+%p\d+, \2, )0;", r"\g<1>-2147483648;")
    inputs, sm_scale = without_a_product_above_zero(), 40.0
    results = SM90.attend(call_of(inputs, sm_scale=sm_scale), "eager", edit)
    assert edit.found_all
    with pytest.raises(AssertionError):
        SM90.bound(inputs, sm_scale).check(*results)


def test_a_query_of_nan_touches_no_other() -> None:
    inputs = attention_inputs(replace(BASE, step=LONG, topk=8), "cpu")
    expected = SM90.attend(call_of(inputs), "eager")
    inputs.q[5, 3, 7] = float("nan")
    out, lse = SM90.attend(call_of(inputs), "eager")
    assert out[5, 3].isnan().all()
    out[5, 3], lse[5, 3] = expected[0][5, 3], expected[1][5, 3]
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_a_scale_of_zero(prefill: Prefill) -> None:
    """The mean of the values: products of keys out of sight are infinite, and times 0 they would be NaN."""
    prefill.check(attention_inputs(BASE, "cpu"), sm_scale=0.0)


def test_rows_at_any_address(prefill: Prefill) -> None:
    inputs = attention_inputs(BASE, "cpu")
    call = call_of(inputs)
    shape = (*call.q.shape[:2], 131)
    q, out = (torch.full(shape, float("nan"), dtype=call.q.dtype)[..., 1:129] for _ in range(2))
    q.copy_(call.q)
    prefill.check(inputs, call=replace(call, q=q, out=out))


def test_scales_on_the_device(prefill: Prefill) -> None:
    inputs = attention_inputs(replace(BASE, scaled=True, mode="bf16"), "cpu")
    scales = [torch.tensor(value) for value in (0.5, 3.0, 0.25)]
    inputs = replace(inputs, cache=replace(inputs.cache, k_scale=scales[1], v_scale=scales[2]), options=inputs.options | {"q_scale": scales[0]})
    prefill.check(inputs)


def test_keys_in_e4m3(prefill: Prefill) -> None:
    """The kernel on what an fp8 call gives it: e4m3 queries and keys, fp16 values."""
    inputs = attention_inputs(replace(BASE, mode="fp8", sink=torch.bfloat16), "cpu")
    k, v = inputs.cache.key_value()
    call = call_of(inputs)
    assert call.lse is not None
    for order in ORDERS:
        with simulated(order, arch=f"{prefill.arch}a", seed=3):
            prefill.kernel.sparse_prefill(call, k, v.to(torch.float16), inputs.batch, slice(0, 1), torch.zeros(1, dtype=torch.int32))
        prefill.bound(inputs).check(call.out, call.lse)


def test_pools_that_tma_cannot_address_are_declined() -> None:
    inputs = attention_inputs(BASE, "cpu")
    k, v = inputs.cache.key_value()
    wider = [torch.zeros(*pool.shape[:3], 131, dtype=pool.dtype)[..., :128] for pool in (k, v)]
    for name, pools in (("cache.k", (wider[0], v)), ("cache.v", (k, wider[1]))):
        call = replace(call_of(replace(inputs, cache=LayerCache(k=pools[0], v=pools[1]))))
        with pytest.raises(UnsupportedProblem, match=rf"{name}: .*16 bytes"), simulated():
            sparse_attention(call)
        assert call.out.isnan().all()


def test_a_limit_too_small_for_one_group_is_declined() -> None:
    shape = WorkShape(64, 2, 16, 1, 0, 128, 16, 32, 65536, 128, limit=1 << 26, kv_dtype="fp8_e4m3")
    with pytest.raises(UnsupportedProblem, match=r"workspace: .*set_workspace_limit"):
        workspace_bytes(shape)
    assert workspace_bytes(replace(shape, limit=1 << 30)) > 2 * 65536 * 512
    assert workspace_bytes(replace(shape, kv_dtype="bf16")) == 256


@pytest.mark.parametrize("group", [*range(1, 33)])
def test_tiles_fill_what_they_may(group: int) -> None:
    for ids in (16, 32, 64):
        tokens = tile_tokens(group, ids)
        assert tokens % 2 == 0 and 2 <= tokens <= 32 and tokens // 2 * group <= 64 and tokens * ids <= 512
        assert ids > 16 or tokens // 2 == min(64 // group, 16)


BROKEN = {
    "the rows past the end of a sequence are not cleared": ("lazy", r"st\.shared\.v4\.b32\s+\[[^\]]+\], \{0, 0, 0, 0\};", ";"),
    "the last product is not awaited": ("lazy", r"wgmma\.wait_group\.sync\.aligned\s+0;", "wgmma.wait_group.sync.aligned 7;"),
    "queries are not fenced": ("eager", r"fence\.proxy\.async[^;]*;", ";"),
    "what has been read is not freed": ("eager", r"mbarrier\.arrive\.shared\.b64[^;]*;", ";"),
    "the output so far is not rescaled": ("eager", r"vote\.sync\.any\.pred\s+(%p\d+),[^;]*;", r"setp.ne.s32 \1, 0, 0;"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_kernel_shows(fault: str) -> None:
    order, pattern, by = BROKEN[fault]
    edit = Replaced(pattern, by)
    sm_scale = 4.0
    inputs = attention_inputs(replace(BASE, step=Step("chunk", (20, 5), (900, 37))), "cpu")
    call = call_of(inputs, sm_scale=sm_scale)
    bound = SM90.bound(inputs, sm_scale)
    with contextlib.suppress(ptxsim.SimError), pytest.raises(AssertionError):
        bound.check(*SM90.attend(call, order, edit))
    assert edit.found_all, "the edit found nothing to break"


def test_entries_have_a_word_each() -> None:
    words = [value for name, value in vars(Entry).items() if name.isupper()]
    assert sorted(words) == list(range(9))
    assert sparse_prefill_sm90.MAX_TILE_TOKENS <= 32


KERNELS = ["sparse_prefill-bf16", "sparse_prefill-fp8", "sparse_prefill_by_block-bf16", "sparse_prefill_by_block-fp8"]


@pytest.mark.parametrize("name", KERNELS)
def test_products_run_on_while_others_are_started(name: str) -> None:
    """ptxas waits after every matrix instruction where it does not follow what becomes of their accumulators, and says nothing. Nor does it where it
    takes maxima of two integers instead of three."""
    kernel, variant = VARIANTS["sm_90"][name]
    found = artifacts(kernel, variant, "sm_90")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.cubin)
        file.flush()
        shown = subprocess.run([knobs.nvidia.nvdisasm.path, "-c", file.name], capture_output=True, text=True, check=True).stdout
    waits, asked = len(re.findall(r"\bWARPGROUP\.DEPBAR\b", shown)), len(re.findall(r"\bwgmma\.wait_group\b", found.ptx))
    assert waits == asked > 0
    assert len(re.findall(r"\bVIMNMX3\b", shown)) >= 30  # 15 a row of 32 products


@pytest.mark.parametrize("name", KERNELS)
def test_all_lanes_have_read_before_one_says_so(name: str) -> None:
    """The interpreter's warps run in step and would not show it."""
    kernel, variant = VARIANTS["sm_90"][name]
    parts = re.split(r"elect\.sync[^;]*;", artifacts(kernel, variant, "sm_90").ptx)
    arrivals = [before for before, after in itertools.pairwise(parts) if re.search(r"mbarrier\.\w+|cp\.async", after)[0] == "mbarrier.arrive"]
    assert arrivals and all(before.rstrip().endswith("bar.warp.sync \t-1;") for before in arrivals)
