"""Blackwell's index scores beyond the matrix and what test_index_score.py asks of both architectures: heads, products, kernels broken on purpose."""

import re
from collections.abc import Callable

import pytest
import torch
from needed import need

need("nvidia-cutlass-dsl", "apache-tvm-ffi")

import ptxsim
from scorers import RAGGED, SM100, VERIFY, check
from simulator import ORDERS, artifacts

from m3attn.dsl_kernels.variants import VARIANTS
from m3attn.testing.cases import IndexCase
from m3attn.testing.inputs import index_inputs


@pytest.mark.parametrize("heads", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_decode_and_verify(dtype: torch.dtype, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = index_inputs(IndexCase(VERIFY, num_heads=heads, q_dtype=dtype, k_dtype=dtype), "cpu")
    expected = SM100.run(inputs, "lazy")
    check(inputs, expected)
    monkeypatch.setattr(SM100.module, "num_ctas", lambda device: 8)
    assert torch.equal(SM100.run(inputs, "random"), expected)


@pytest.mark.parametrize(("name", "kind"), [("bf16", "f16"), ("fp8", "f8f6f4"), ("fp16_heads3_page16", "f16")])
def test_the_kind_of_its_product(name: str, kind: str) -> None:
    found = artifacts(*VARIANTS["sm_100"][f"index_score-{name}"], "sm_100")
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
    monkeypatch.setattr(SM100.module, "num_ctas", lambda device: 1)
    inputs = index_inputs(IndexCase(RAGGED, num_heads=16), "cpu")
    expected = SM100.run(inputs)

    def is_seen(order: str) -> bool:
        try:
            scores = SM100.run(inputs, order, edit=BROKEN[name])
        except ptxsim.SimError:
            return True
        return not torch.equal(scores, expected) or "tensor memory not freed" in "".join(capfd.readouterr())

    assert "tensor memory" not in "".join(capfd.readouterr())
    assert any(is_seen(order) for order in ORDERS)
