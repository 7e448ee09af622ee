"""The Blackwell prefill kernel where its machinery shows: halves in turns, rescaling, padded groups, odd strides, and kernels broken on purpose.

In the interpreter, in eager, lazy and random order, which must agree bit for bit; the matrix's cases are in test_simulated.py.
"""

import contextlib
import re
from dataclasses import replace

import pytest
import torch
from needed import need

need("nvidia-cutlass-dsl", "apache-tvm-ffi")

import ptxsim
from attention_calls import call_of
from prefills import BASE, LONG, SM100
from simulator import Replaced, artifacts

from m3attn.dsl_kernels.sparse_attention_sm100 import workspace_bytes
from m3attn.dsl_kernels.sparse_prefill_sm100 import KERNEL, SHARED_BYTES, half_tokens
from m3attn.dsl_kernels.variants import VARIANTS
from m3attn.testing.cases import AttentionCase, Step
from m3attn.testing.inputs import AttentionInputs, attention_inputs
from m3attn.workspace import WorkShape


@pytest.mark.parametrize(
    "case",
    [
        BASE,
        replace(BASE, num_q_heads=10, num_kv_heads=2, step=LONG, topk=4),  # 16 tokens of 5 heads and 48 rows of nothing in a half
        replace(BASE, mode="fp16", sink=torch.float32, layout="packed_nhd"),
    ],
    ids=lambda case: case.id,
)
def test_within_the_bound(case: AttentionCase) -> None:
    SM100.check(attention_inputs(case, "cpu"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        replace(BASE, step=LONG, topk=5, ids="scattered"),
        replace(BASE, topk=50, ids="scattered"),  # half the rows of a matrix instruction stay empty
        replace(BASE, num_q_heads=32),
        replace(BASE, num_q_heads=1),
        replace(BASE, num_q_heads=8),
    ],
    ids=lambda case: case.id,
)
def test_more_cases_within_the_bound(case: AttentionCase) -> None:
    SM100.check(attention_inputs(case, "cpu"))


def halves_apart() -> AttentionInputs:
    """The first eight tokens of a tile select what the others do not, alternating and in runs longer than the pipeline."""
    inputs = attention_inputs(replace(BASE, step=LONG, topk=8), "cpu")
    assert inputs.ids is not None
    own = (1500 - 24 + torch.arange(24)) // 128  # 11
    first, second = torch.tensor([0, 5, 6, 7, 9, -1]), torch.tensor([1, 2, 3, 4, 8, 10])
    is_first = (torch.arange(24) // 8 % 2 == 0)[:, None]
    inputs.ids[0, :, :6] = torch.where(is_first, first, second).int()
    inputs.ids[0, :, 6] = -1
    inputs.ids[0, :, 7] = own.int()
    return inputs


def test_halves_pass_over_each_others_blocks() -> None:
    SM100.check(halves_apart())


def test_a_half_without_any_block() -> None:
    """The second half's tokens select nothing: no product of theirs ever runs, and their rows are empty."""
    inputs = halves_apart()
    inputs.ids[0, 8:16] = -1
    SM100.check(inputs)


@pytest.mark.parametrize("group", [*range(1, 33)])
def test_halves_fill_what_they_may(group: int) -> None:
    for ids in (16, 32, 64):
        tokens = half_tokens(group, ids)
        assert 1 <= tokens <= 16 and tokens * group <= 128 and 2 * tokens * ids <= 512
        assert ids > 16 or tokens == min(128 // group, 16)


def test_scratch_is_a_counter_and_copies() -> None:
    shape = WorkShape(64, 2, 16, 1, 0, 128, 16, 32, 65536, 128, limit=1 << 30, kv_dtype="bf16")
    assert workspace_bytes(shape) == 256
    assert workspace_bytes(replace(shape, kv_dtype="fp8_e4m3")) > 2 * 65536 * 512
    assert SHARED_BYTES < 227 * 1024


def unordered(ptx: str) -> list[str]:
    """Uses of tensor memory, in the order of the text, that are not ordered as the instruction set asks; the interpreter does not look for them."""
    events = re.findall(r"\b(?:tcgen05\.(ld|st|wait::ld|wait::st|mma|fence::\w+)|(mbarrier\.(?:arrive|try_wait)))\b", ptx)
    loading = storing = fenced = False
    found = []
    for tensor, barrier in events:
        event = tensor or barrier
        if loading and event not in ("ld", "wait::ld"):
            found.append(f"{event} before wait::ld")
        if storing and event in ("fence::before_thread_sync", "mbarrier.arrive"):
            found.append(f"{event} before wait::st")
        if not fenced and event in ("ld", "st", "mma"):
            found.append(f"{event} after a barrier without a fence")
        loading = event == "ld" or (loading and event != "wait::ld")
        storing = event == "st" or (storing and event != "wait::st")
        fenced = event == "fence::after_thread_sync" or (fenced and event != "mbarrier.try_wait")
    return found


def test_tensor_memory_is_waited_for_and_fenced() -> None:
    ptx = artifacts(KERNEL, VARIANTS["sm_100"]["sparse_prefill-bf16"][1], "sm_100").ptx
    assert unordered(ptx) == []
    for instruction in (r"tcgen05\.wait::ld", r"tcgen05\.wait::st", r"tcgen05\.fence::after"):
        assert unordered(re.sub(instruction, "nothing", ptx)) != []


BROKEN = {
    "the rows past the end of a sequence are not cleared": ("lazy", r"st\.shared\.v4\.b32\s+\[[^\]]+\], \{0, 0, 0, 0\};", ";"),
    "queries are not fenced": ("eager", r"fence\.proxy\.async[^;]*;", ";"),
    "what has been read is not freed": ("eager", r"mbarrier\.arrive\.shared\.b64[^;]*;", ";"),
    "products are said to be done before they are": ("lazy", r"tcgen05\.commit\.\S+\s+(\[[^\]]+\]);", r"mbarrier.arrive.shared.b64 _, \1;"),
    "the output so far is not rescaled": ("eager", r"tcgen05\.st\.sync\.aligned\.32x32b\.x32\.b32[^;]*;", ";"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_kernel_shows(fault: str) -> None:
    order, pattern, by = BROKEN[fault]
    edit = Replaced(pattern, by)
    sm_scale = 4.0
    inputs = attention_inputs(replace(BASE, step=Step("chunk", (20, 5), (900, 37))), "cpu")
    call = call_of(inputs, sm_scale=sm_scale)
    bound = SM100.bound(inputs, sm_scale)
    with contextlib.suppress(ptxsim.SimError), pytest.raises(AssertionError):
        bound.check(*SM100.attend(call, order, edit))
    assert edit.found_all, "the edit found nothing to break"
