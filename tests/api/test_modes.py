"""The mode of a layer follows from the cache dtype, the architecture, what is named and the switches; and says why."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from stage_calls import registered

import m3attn
from m3attn import modes
from m3attn.registry import Capabilities

FP8_SPELLINGS = ("fp8", "fp8_e4m3", "e4m3", "float8_e4m3fn", "torch.float8_e4m3fn", "FP8", torch.float8_e4m3fn)
E5M2_SPELLINGS = ("fp8_e5m2", "e5m2", "float8_e5m2", torch.float8_e5m2)
OWN_SPELLINGS = ("auto", "bf16", "bfloat16", torch.bfloat16)
FP8_GEMM = ("sm_90", "sm_100", "sm_103")
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", *FP8_GEMM, "sm_120", "cpu")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("M3ATTN_DISABLE_FP8_ATTN_GEMM", raising=False)
    monkeypatch.delenv("M3ATTN_DISABLE_CUTE", raising=False)
    monkeypatch.setattr(modes, "_warned_e5m2", True)


def layer(arch: str, **fields) -> m3attn.Problem:
    return m3attn.Problem(arch, **{"num_q_heads": 64, "num_kv_heads": 4, "num_index_heads": 4, "q_dtype": "bf16"} | fields)


def expected(kv: str, arch: str, switched_off: bool, named: str | None) -> str:
    """The rule of the contract, in one line each."""
    if kv == "bf16":
        return "bf16"
    if kv == "fp8_e5m2":
        return "widen"
    able = arch in FP8_GEMM and named != "reference" and not switched_off
    return "fp8" if able else "widen"


SPELLINGS = [(s, "fp8_e4m3") for s in FP8_SPELLINGS] + [(s, "fp8_e5m2") for s in E5M2_SPELLINGS] + [(s, "bf16") for s in OWN_SPELLINGS]


@pytest.mark.parametrize("spelling, kv", SPELLINGS, ids=[str(s) for s, _ in SPELLINGS])
@pytest.mark.parametrize("arch", ARCHS)
def test_every_combination(spelling: str | torch.dtype, kv: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for off, named, index, (page, block), topk in itertools.product(
        (False, True), (None, "reference", "triton"), (None, "auto", "fp8"), ((None, 128), (64, 128), (16, 32)), (16, 4)
    ):
        monkeypatch.setenv("M3ATTN_DISABLE_FP8_ATTN_GEMM", "1" if off else "0")
        ask = {"kv_cache_dtype": spelling, "index_cache_dtype": index, "page_size": page, "implementation": named}
        want = expected(kv, arch, off, named)
        want_index = "fp8_e4m3" if index == "fp8" or (index is None and want == "fp8") else "bf16"
        number = 0 if arch == "cpu" else int(arch[3:])
        old_e4m3 = arch != "cpu" and number < 89 and "fp8_e4m3" in (kv, want_index)
        if named == "triton" and arch != "cpu" and (number < 80 or old_e4m3):
            with pytest.raises(m3attn.UnsupportedProblem, match=r"'triton' cannot run this: .*needs sm_8"):
                m3attn.resolve_attention_mode(layer(arch, topk=topk, block_size=block), **ask)
            continue
        got = m3attn.resolve_attention_mode(layer(arch, topk=topk, block_size=block), **ask)
        assert (got.mode, got.kv_dtype, got.page_size) == (want, kv, page or 128)
        assert (got.index_q_dtype, got.index_dtype) == (want_index, want_index)
        assert got.q_dtype == ("fp8_e4m3" if want == "fp8" else "bf16")
        stages = ("sparse_attention", "dense_attention", "index_topk", "index_score", "select_blocks")
        assert set(got.implementations) == {f"{s}/{p}" for s in stages for p in ("prefill", "decode", "verify")}
        if named is not None:
            assert set(got.implementations.values()) == {named}
        if want.startswith("fp8") or want == "widen":
            assert got.reasons and any(r.startswith(f"mode {want}: ") for r in got.reasons)
        if kv == "fp8_e4m3" and off:
            assert "mode widen: M3ATTN_DISABLE_FP8_ATTN_GEMM=1" in got.reasons


@pytest.mark.parametrize("arch", ARCHS)
def test_page_block_and_k_never_change_the_mode(arch: str) -> None:
    found = {
        m3attn.resolve_attention_mode(layer(arch, block_size=block, topk=topk), kv_cache_dtype="fp8", page_size=page).mode
        for block, page in ((16, 16), (32, 16), (64, 64), (128, 128), (256, 128), (128, 8))
        for topk in (1, 16, 128)
    }
    assert found == {"fp8" if arch in FP8_GEMM else "widen"}


@pytest.mark.parametrize(
    "page, error, message",
    [
        (256, ValueError, "page_size: expected a divisor of block_size 128 .*, got 256"),
        (24, ValueError, "page_size: expected a divisor of block_size 128 .*, got 24"),
        (0, ValueError, "page_size: expected an int of at least 1, got 0"),
        (128.0, TypeError, "page_size: expected an int, got float"),
        (8, m3attn.UnsupportedProblem, "'triton' cannot run this: page size 8: takes 16, 32, 64, 128, 256; reference can run it"),
    ],
)
def test_a_page_size_is_kept_or_refused_never_replaced(page: int, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        m3attn.resolve_attention_mode(layer("sm_90"), page_size=page, implementation="triton")


def test_a_page_that_only_the_reference_takes_is_kept_with_the_reason() -> None:
    got = m3attn.resolve_attention_mode(layer("sm_90"), page_size=8)
    assert got.page_size == 8
    assert got.implementations["sparse_attention/decode"] == "reference"
    assert "sparse_attention/decode: triton refused: page size 8: takes 16, 32, 64, 128, 256" in got.reasons


def test_a_page_size_that_only_some_named_kernels_take_names_an_alternative() -> None:
    with registered("sparse_attention", "page128", print, capabilities=Capabilities(min_arch=90, page_sizes=(128,))):
        with pytest.raises(m3attn.UnsupportedProblem, match=r"page size 16: takes 128; triton_union, triton, reference can run it"):
            m3attn.resolve_attention_mode(layer("sm_90"), page_size=16, implementation="page128")
        assert m3attn.resolve_attention_mode(layer("sm_90"), implementation="page128").implementations["sparse_attention/decode"] == "page128"


def test_the_default_page_is_128_and_said_to_be() -> None:
    got = m3attn.resolve_attention_mode(layer("sm_90"))
    assert got.page_size == 128 and "page size 128: the default" in got.reasons
    assert not [r for r in m3attn.resolve_attention_mode(layer("sm_90"), page_size=128).reasons if r.startswith("page size")]


def test_e5m2_warns_once_and_widens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "_warned_e5m2", False)
    with pytest.warns(UserWarning, match=r"fp8_e5m2: K and V are read widened to 16 bit"):
        assert m3attn.resolve_attention_mode(layer("sm_90"), kv_cache_dtype="fp8_e5m2").mode == "widen"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = m3attn.resolve_attention_mode(layer("sm_80"), kv_cache_dtype=torch.float8_e5m2)
        m3attn.resolve_attention_mode(layer("sm_90"), kv_cache_dtype="fp8_e4m3")
    assert got.mode == "widen" and got.implementations["sparse_attention/decode"] == "triton"


def test_naming_what_a_switch_disables_raises_and_names_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    with registered("sparse_attention", "cute_mine", print, capabilities=Capabilities(archs=("sm_90",)), fp8_archs=("sm_90",), auto=True):
        assert m3attn.resolve_attention_mode(layer("sm_90"), implementation="cute_mine").implementations["sparse_attention/decode"] == "cute_mine"
        monkeypatch.setenv("M3ATTN_DISABLE_CUTE", "1")
        with pytest.raises(m3attn.UnsupportedProblem, match=r"'cute_mine' is switched off by M3ATTN_DISABLE_CUTE=1"):
            m3attn.resolve_attention_mode(layer("sm_90"), kv_cache_dtype="fp8", implementation="cute_mine")
        got = m3attn.resolve_attention_mode(layer("sm_90"), kv_cache_dtype="fp8")
    without = m3attn.resolve_attention_mode(layer("sm_90"), kv_cache_dtype="fp8")
    assert (got.mode, got.implementations) == (without.mode, without.implementations)


def test_a_named_implementation_without_fp8_attention_widens_and_is_kept() -> None:
    with registered("sparse_attention", "widener", print, capabilities=Capabilities(min_arch=80)):
        got = m3attn.resolve_attention_mode(layer("sm_90"), kv_cache_dtype="fp8", implementation="widener")
    assert got.mode == "widen" and got.implementations["sparse_attention/prefill"] == "widener"
    assert "mode widen: 'widener' is named and declares no fp8 attention for sm_90" in got.reasons
    assert got.index_dtype == "bf16"
    with registered("dense_attention", "widener", print, capabilities=Capabilities(min_arch=80, modes=("bf16", "widen"))):
        got = m3attn.resolve_attention_mode(layer("sm_90"), kv_cache_dtype="fp8", implementation="widener")
    assert got.mode == "widen" and got.implementations["dense_attention/prefill"] == "widener"


def test_an_architecture_may_be_spelled_as_compilers_do() -> None:
    assert m3attn.resolve_attention_mode(layer("sm_90a"), kv_cache_dtype="fp8").mode == "fp8"


def test_fp8_archs_alone_decide() -> None:
    with registered("sparse_attention", "early", print, capabilities=Capabilities(min_arch=80), fp8_archs=("sm_120",), auto=True):
        assert m3attn.resolve_attention_mode(layer("sm_120"), kv_cache_dtype="fp8").mode == "fp8"
    assert m3attn.resolve_attention_mode(layer("sm_120"), kv_cache_dtype="fp8").mode == "widen"


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"kv_cache_dtype": "fp7"}, ValueError, "kv_cache_dtype: expected one of auto, bf16, .*fp8_e4m3, fp8_e5m2 .*got 'fp7'"),
        ({"kv_cache_dtype": "float8_e4m3fnuz"}, ValueError, "kv_cache_dtype: expected one of .*got 'float8_e4m3fnuz'"),
        ({"kv_cache_dtype": torch.float8_e5m2fnuz}, ValueError, "kv_cache_dtype: expected one of .*got torch.float8_e5m2fnuz"),
        ({"kv_cache_dtype": torch.int8}, ValueError, "kv_cache_dtype: expected one of .*got torch.int8"),
        ({"kv_cache_dtype": 8}, TypeError, "kv_cache_dtype: expected a dtype name or torch.dtype, got int"),
        ({"kv_cache_dtype": "fp16"}, ValueError, "kv_cache_dtype: expected auto, bf16, fp8_e4m3 or fp8_e5m2 for a bf16 layer, got 'fp16'"),
        ({"index_cache_dtype": "fp8_e5m2"}, ValueError, "index_cache_dtype: expected one of auto, bf16, fp16, fp32, fp8_e4m3 .*got 'fp8_e5m2'"),
        ({"index_cache_dtype": "int4"}, ValueError, "index_cache_dtype: expected one of .*got 'int4'"),
        ({"implementation": "tritom"}, ValueError, "implementation: expected one of .*reference, .*triton.*got 'tritom'"),
    ],
)
def test_what_is_not_known_raises_by_name(options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        m3attn.resolve_attention_mode(layer("sm_90"), **options)


def test_the_layer_must_be_described_in_its_own_dtype() -> None:
    with pytest.raises(ValueError, match=r"problem.q_dtype: expected the layer's own bf16, fp16 or fp32, got 'fp8_e4m3'"):
        m3attn.resolve_attention_mode(layer("sm_90", q_dtype="fp8_e4m3"))


def test_a_dense_layer_needs_no_index_stages_and_takes_any_page() -> None:
    got = m3attn.resolve_attention_mode(layer("sm_90", num_index_heads=0), page_size=256)
    assert got.page_size == 256
    assert not [where for where in got.implementations if where.startswith(("index", "select"))]


@pytest.mark.parametrize("own", ["fp16", "fp32"])
def test_other_layer_dtypes(own: str) -> None:
    got = m3attn.resolve_attention_mode(layer("sm_90", q_dtype=own))
    assert (got.mode, got.q_dtype, got.kv_dtype, got.index_dtype) == (own, own, own, own)
    assert m3attn.resolve_attention_mode(layer("sm_80", q_dtype=own), kv_cache_dtype="fp8_e5m2").mode == "widen"


def test_a_mode_prints_what_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    text = str(m3attn.resolve_attention_mode(layer("sm_90"), kv_cache_dtype="fp8"))
    assert text.startswith("mode fp8: q fp8_e4m3, KV fp8_e4m3, index q fp8_e4m3, index K fp8_e4m3, pages of 128\n")
    for line in ("  dense_attention/decode: triton", "  page size 128: the default", "  index cache fp8_e4m3: follows mode fp8"):
        assert line in text.splitlines()
    monkeypatch.setenv("M3ATTN_DISABLE_FP8_ATTN_GEMM", "1")
    assert "  mode widen: M3ATTN_DISABLE_FP8_ATTN_GEMM=1" in str(m3attn.resolve_attention_mode(layer("sm_90"), kv_cache_dtype="fp8")).splitlines()


def test_a_resolved_mode_is_frozen_and_reads_switches_once(monkeypatch: pytest.MonkeyPatch) -> None:
    got = m3attn.resolve_attention_mode(layer("sm_90"), kv_cache_dtype="fp8")
    monkeypatch.setenv("M3ATTN_DISABLE_FP8_ATTN_GEMM", "1")
    assert got.mode == "fp8"
    with pytest.raises(AttributeError):
        got.mode = "widen"  # type: ignore[misc]


def test_choices_in_force_decide_implementations_too() -> None:
    with m3attn.use("reference"):
        assert set(m3attn.resolve_attention_mode(layer("sm_90")).implementations.values()) == {"reference"}


def test_a_choice_in_force_that_lacks_fp8_attention_widens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M3ATTN_IMPL", "sparse_attention=reference")
    got = m3attn.resolve_attention_mode(layer("sm_90"), kv_cache_dtype="fp8")
    assert got.mode == "widen" and "mode widen: 'reference' is named and declares no fp8 attention for sm_90" in got.reasons
    assert got.implementations["sparse_attention/decode"] == "reference" and got.implementations["dense_attention/decode"] == "triton"
    assert m3attn.resolve_attention_mode(layer("sm_90"), kv_cache_dtype="fp8", implementation="triton").mode == "fp8"
    monkeypatch.setenv("M3ATTN_IMPL", "triton")
    with pytest.raises(m3attn.UnsupportedProblem, match=r"'triton' cannot run this: architecture sm_75: needs sm_80 or newer"):
        m3attn.resolve_attention_mode(layer("sm_75"))


def test_an_fp8_cache_says_nothing_about_the_indexer() -> None:
    """On SM80 an e4m3 cache takes the reference, and a 16-bit indexer its kernels all the same."""
    mode = m3attn.resolve_attention_mode(m3attn.Problem("sm_80", 64, 4, 4, q_dtype="bf16"), kv_cache_dtype="fp8_e4m3")
    assert mode.implementations["sparse_attention/prefill"] == "reference"
    assert mode.implementations["index_topk/prefill"] == mode.implementations["select_blocks/decode"] == "triton"
