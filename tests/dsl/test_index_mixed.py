"""Index scores of e4m3 next to 16 bit, on both architectures: the bits of operands that were widened beforehand."""

import dataclasses
import re
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from needed import need

need("nvidia-cutlass-dsl", "apache-tvm-ffi")

import ptxsim
from simulator import ORDERS, simulated

import m3attn
from m3attn.batch import LayerCache
from m3attn.calls import IndexScoreCall
from m3attn.dsl_kernels import index_score_sm90, index_score_sm100
from m3attn.scales import UNIT
from m3attn.testing.cases import IndexCase, Step
from m3attn.testing.inputs import IndexInputs, index_inputs

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
CHUNK = Step("chunk", (40, 3), (420, 5), padded_rows=2, slack=200)
VERIFY = Step("verify", (16, 3), (300, 140), padded_rows=1)
ARCHS = pytest.mark.parametrize(("module", "arch"), [(index_score_sm90, "sm_90a"), (index_score_sm100, "sm_100a")], ids=["sm90", "sm100"])
PAIRS = pytest.mark.parametrize(("q_dtype", "k_dtype"), [(BF16, E4M3), (FP16, E4M3), (E4M3, BF16), (E4M3, FP16)], ids=str)


def prepared(step: Step, q_dtype: torch.dtype, k_dtype: torch.dtype, heads: int = 4) -> IndexInputs:
    """In e4m3 every one of its numbers, NaN among them, is somewhere in the first request's second block, or in its first queries."""
    inputs = index_inputs(IndexCase(step, num_heads=heads, q_dtype=q_dtype, k_dtype=k_dtype), "cpu")
    rows = inputs.index_q[:16].view(-1, 128) if q_dtype == E4M3 else inputs.cache.index_key()[int(inputs.batch.page_table[0, 1])]
    codes = torch.arange(rows.numel(), dtype=torch.int32).mul(37).remainder(256).to(torch.uint8).view(rows.shape)
    codes[1:, :] = torch.where(codes[1:, :] & 0x7F == 0x7F, 0x7E, codes[1:, :])  # one row alone has NaN
    rows.view(torch.uint8).copy_(codes)
    return inputs


def widened(inputs: IndexInputs) -> IndexInputs:
    q, k = inputs.index_q, inputs.cache.index_key()
    dtype = k.dtype if q.dtype == E4M3 else q.dtype
    return dataclasses.replace(inputs, index_q=q.to(dtype), cache=LayerCache(index_k=k.to(dtype)))


def run(module: ModuleType, arch: str, inputs: IndexInputs, order: str = "eager", **device: object) -> torch.Tensor:
    out = torch.full((inputs.index_q.shape[1], inputs.index_q.shape[0], inputs.batch.num_blocks), float("nan"))
    with simulated(order, arch=arch, **device):
        module.index_score(IndexScoreCall(inputs.index_q, inputs.cache.index_key(), inputs.batch, UNIT, UNIT, out))
    return out


@ARCHS
@PAIRS
@pytest.mark.parametrize("step", [CHUNK, VERIFY], ids=lambda step: step.name)
def test_bits_of_widened_operands(module: ModuleType, arch: str, q_dtype: torch.dtype, k_dtype: torch.dtype, step: Step) -> None:
    inputs = prepared(step, q_dtype, k_dtype)
    expected = run(module, arch, widened(inputs))
    for order in ORDERS:
        assert torch.equal(run(module, arch, inputs, order), expected), order


@pytest.mark.slow
@ARCHS
@pytest.mark.parametrize(("q_dtype", "k_dtype"), [(BF16, E4M3), (E4M3, BF16)], ids=str)
@pytest.mark.parametrize(("heads", "page_size"), [(1, 128), (3, 16), (8, 32), (16, 64)])
def test_heads_and_pages(module: ModuleType, arch: str, q_dtype: torch.dtype, k_dtype: torch.dtype, heads: int, page_size: int) -> None:
    for step in (CHUNK, VERIFY):
        inputs = index_inputs(IndexCase(dataclasses.replace(step, page_size=page_size), num_heads=heads, q_dtype=q_dtype, k_dtype=k_dtype), "cpu")
        assert torch.equal(run(module, arch, inputs, "random"), run(module, arch, widened(inputs)))


@pytest.mark.slow
@ARCHS
@pytest.mark.parametrize("ctas", [1, 40])
@PAIRS
def test_work_is_cut_anywhere(
    module: ModuleType, arch: str, q_dtype: torch.dtype, k_dtype: torch.dtype, ctas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = prepared(CHUNK, q_dtype, k_dtype)
    expected = run(module, arch, inputs)
    monkeypatch.setattr(module, "num_ctas", lambda device: ctas)
    monkeypatch.setattr(module, "CHUNK_BLOCKS", 2)
    assert torch.equal(run(module, arch, inputs, "random"), expected)


@pytest.mark.parametrize(("key", "arch"), [("cute_sm90", "sm_90a"), ("cute_sm100", "sm_100a")])
def test_what_does_not_meet_is_declined(key: str, arch: str) -> None:
    inputs = index_inputs(IndexCase(VERIFY, q_dtype=BF16, k_dtype=FP16), "cpu")
    with simulated(arch=arch), pytest.raises(m3attn.UnsupportedProblem, match="index q dtype bf16 over index dtype fp16: takes equal ones, or e4m3"):
        m3attn.index_topk(inputs.index_q, inputs.cache, inputs.batch, impl=key)


WAIT = r"mbarrier\.try_wait[^}]*?bra\.uni\s+LAB_WAIT;"
CONVERSION = r"cvt\.rn\.f16x2\.e4m3x2"
FENCE = r"fence\.proxy\.async\.shared::cta;"


def place(ptx: str, pattern: str, number: int = 0) -> re.Match[str]:
    return list(re.finditer(pattern, ptx))[number]


def without(pattern: str, number: int) -> Callable[[str], str]:
    """`number`: of the places after the first conversion, or before it if it is negative."""

    def edit(ptx: str) -> str:
        middle = place(ptx, CONVERSION).start()
        found = place(ptx[:middle], pattern, number) if number < 0 else re.compile(pattern).search(ptx, middle)
        assert found is not None
        return ptx[: found.start()] + ptx[found.end() :]

    return edit


BROKEN = {
    "keys are widened before they are there": (E4M3, without(WAIT, -2)),
    "widened keys replace some that are in use": (E4M3, without(WAIT, -1)),
    "widened keys are not fenced": (E4M3, without(FENCE, 0)),
    "widened queries replace some that are in use": (BF16, without(WAIT, -1)),
    "queries are widened before they are there": (BF16, without(WAIT, -2)),
    "widened queries are not fenced": (BF16, without(FENCE, 0)),
}


@pytest.mark.slow
@ARCHS
@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_on_purpose_is_seen(module: ModuleType, arch: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if module is index_score_sm90 and name == "widened queries are not fenced":
        pytest.skip("Hopper's products take queries from registers")
    monkeypatch.setattr(module, "num_ctas", lambda device: 1)
    k_dtype, edit = BROKEN[name]
    inputs = index_inputs(IndexCase(CHUNK, num_heads=16, q_dtype=BF16 if k_dtype == E4M3 else E4M3, k_dtype=k_dtype), "cpu")
    expected = run(module, arch, inputs)

    def is_seen(order: str) -> bool:
        try:
            return not torch.equal(run(module, arch, inputs, order, edit=edit), expected)
        except ptxsim.SimError:
            return True

    assert any(is_seen(order) for order in ORDERS)
