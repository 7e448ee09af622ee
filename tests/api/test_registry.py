"""The registry: what exists, who may add or take away, and capabilities as data."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

import pytest
import torch
from stage_calls import python, registered

import m3attn
from m3attn.dtypes import NAME_TO_DTYPE
from m3attn.registry import STAGES, Capabilities, find

ATTENTION = dict(num_q_heads=64, num_kv_heads=4, q_dtype="bf16", kv_dtype="bf16")


def nothing(call: object) -> None:
    raise AssertionError("not to be run")


def test_reference_and_triton_stand_for_every_stage() -> None:
    listed = {(i.stage, i.key) for i in m3attn.implementations()}
    assert {(stage, key) for stage in STAGES for key in ("reference", "triton")} <= listed
    for stage in STAGES:
        assert [i.key for i in m3attn.implementations(stage)][:2] == ["reference", "triton"]


def test_an_unknown_stage_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"stage: expected one of .*index_topk.*got 'index_top'"):
        m3attn.implementations("index_top")
    with pytest.raises(ValueError, match=r"stage: expected one of .*got 'nope'"):
        m3attn.register("nope", "mine", nothing)
    with pytest.raises(ValueError, match=r"stage: expected one of .*got 'nope'"):
        m3attn.explain("nope")


@pytest.mark.parametrize("key", ["", "a b", "a,b", "a=b"])
def test_a_key_that_no_choice_could_name_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=r"key: expected letters"):
        m3attn.register("select_blocks", key, nothing)


def test_a_target_that_cannot_run_is_refused() -> None:
    with pytest.raises(TypeError, match=r"target: expected a function fn\(call\) or 'module:function', got int"):
        m3attn.register("select_blocks", "mine", 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("choice", ["named", "in use"])
def test_an_implementation_that_returns_its_results_is_refused(choice: str) -> None:
    a, lse = torch.zeros(2, 3, 64), torch.zeros(2, 3)
    with registered("merge_attention_states", "returns", lambda call: (call.out_a, call.lse_a)):
        message = r"'returns' of merge_attention_states: expected to fill the call's outputs and return None, got tuple"
        with pytest.raises(TypeError, match=message), contextlib.nullcontext() if choice == "named" else m3attn.use("returns"):
            m3attn.merge_attention_states(a, lse, a.clone(), lse.clone(), impl="returns" if choice == "named" else None)


def test_a_duplicate_key_raises_and_replace_replaces() -> None:
    first, second = (lambda call: None), (lambda call: None)
    with registered("select_blocks", "mine", first):
        with pytest.raises(ValueError, match=r"key: 'mine' is already registered for select_blocks; pass replace=True"):
            m3attn.register("select_blocks", "mine", second)
        assert find("select_blocks", "mine").load() is first
        m3attn.register("select_blocks", "mine", second, replace=True)
        assert find("select_blocks", "mine").load() is second
    assert find("select_blocks", "mine") is None


@pytest.mark.parametrize("key", ["reference", "triton"])
def test_built_in_keys_can_be_neither_replaced_nor_taken_out(key: str) -> None:
    for replace in (False, True):
        with pytest.raises(ValueError, match=f"key: '{key}' is m3attn's own"):
            m3attn.register("sparse_attention", key, nothing, replace=replace)
    with pytest.raises(ValueError, match=f"key: '{key}' is m3attn's own"):
        m3attn.unregister("sparse_attention", key)
    assert find("sparse_attention", key).built_in


def test_an_unknown_key_cannot_be_taken_out() -> None:
    with pytest.raises(ValueError, match=r"key: expected one registered for sparse_attention, got 'mine'"):
        m3attn.unregister("sparse_attention", "mine")


def test_auto_takes_a_user_key_only_when_asked_to() -> None:
    with registered("select_blocks", "mine", nothing, auto=True):
        assert m3attn.explain("select_blocks", arch="sm_80").chosen == "mine"
        m3attn.register("select_blocks", "mine", nothing, replace=True)
        assert m3attn.explain("select_blocks", arch="sm_80").chosen == "triton"
    with registered("select_blocks", "mine", nothing, auto=True, capabilities=Capabilities(archs=("sm_100",))):
        explained = m3attn.explain("select_blocks", arch="sm_80")
        assert explained.chosen == "triton"
        assert explained.reasons["mine"] == ("architecture sm_80: built for sm_100",)
    assert "mine" not in m3attn.explain("select_blocks", arch="sm_80").reasons


LIMITS = [
    (Capabilities(min_arch=90), {"arch": "sm_89"}, "architecture sm_89: needs sm_90 or newer"),
    (Capabilities(archs=("sm_90", "sm_103")), {"arch": "sm_100"}, "architecture sm_100: built for sm_90, sm_103"),
    (Capabilities(), {"arch": "cpu"}, "CPU tensors: runs on NVIDIA GPUs only"),
    (Capabilities(e4m3_min_arch=89), {"kv_dtype": "fp8_e4m3", "arch": "sm_86"}, "e4m3 on sm_86: needs sm_89 or newer"),
    (Capabilities(modes=("bf16",)), {"kv_dtype": "fp8_e5m2"}, "mode widen: takes bf16"),
    (Capabilities(modes=("bf16", "fp8")), {"q_dtype": "fp8_e4m3", "kv_dtype": "fp8_e4m3", "fp8_pv": True}, "mode fp8_pv: takes bf16, fp8"),
    (Capabilities(q_dtypes=("bf16",)), {"q_dtype": "fp32", "kv_dtype": "fp32"}, "q dtype fp32: takes bf16"),
    (Capabilities(kv_dtypes=("bf16",)), {"kv_dtype": "fp16"}, "KV dtype fp16: takes bf16"),
    (Capabilities(index_q_dtypes=("bf16",)), {"index_q_dtype": "fp8_e4m3"}, "index q dtype fp8_e4m3: takes bf16"),
    (Capabilities(index_dtypes=("bf16",)), {"index_dtype": "fp8_e4m3"}, "index dtype fp8_e4m3: takes bf16"),
    (Capabilities(head_dims=(128,)), {"head_dim": 64}, "head dim 64: takes 128"),
    (Capabilities(), {"head_dim": 192, "v_head_dim": 128}, "head dims 192 and 128 differ: takes equal ones"),
    (Capabilities(index_dims=(128,)), {"index_dim": 64}, "index dim 64: takes 128"),
    (Capabilities(group_sizes=(2, 16)), {"num_q_heads": 4}, "group size 1: takes 2 to 16"),
    (Capabilities(index_heads=(1, 4)), {"num_index_heads": 5}, "index heads 5: takes 1 to 4"),
    (Capabilities(topk=(4, 16)), {"topk": 17}, "topk 17: takes 4 to 16"),
    (Capabilities(page_sizes=(128,)), {"page_size": 16}, "page size 16: takes 128"),
    (Capabilities(block_sizes=(128,)), {"block_size": 64}, "block size 64: takes 128"),
    (Capabilities(phases=("decode",)), {"phase": "prefill"}, "phase prefill: takes decode"),
    (Capabilities(sink=False), {"sink": True}, "has no sink key"),
    (Capabilities(lse=False), {"lse": True}, "returns no LSE"),
    (Capabilities(needs=("no_such_package",)), {}, "needs the package no_such_package, which is not installed"),
    (Capabilities(needs=("no_such_package.part",)), {}, "needs the package no_such_package.part, which is not installed"),
]


@pytest.mark.parametrize("capabilities, fields, reason", LIMITS, ids=[reason for *_, reason in LIMITS])
def test_every_limit_gives_its_reason(capabilities: Capabilities, fields: dict, reason: str) -> None:
    base = {"arch": "sm_90", **ATTENTION}
    found = capabilities.reasons(m3attn.Problem(**(base | fields)))
    assert len(found) == 1 and found[0].startswith(reason)
    assert not Capabilities(cpu="yes", equal_head_dims=False).reasons(m3attn.Problem(**(base | fields)))


def test_all_reasons_are_given_at_once() -> None:
    capabilities = Capabilities(min_arch=90, head_dims=(128,), page_sizes=(128,), topk=(1, 16))
    reasons = capabilities.reasons(m3attn.Problem("sm_80", head_dim=64, page_size=16, topk=32))
    assert [r.split(":")[0] for r in reasons] == ["architecture sm_80", "head dim 64", "page size 16", "topk 32"]


ARCHS = [
    # arch, KV dtype, q dtype, why triton does not take it (None: it does)
    ("7.5", "bf16", "bf16", "architecture sm_75: needs sm_80 or newer"),
    ("8.0", "bf16", "bf16", None),
    ("8.6", "bf16", "bf16", None),
    ("8.6", "fp8_e5m2", "bf16", None),
    ("8.6", "fp8_e4m3", "bf16", "e4m3 on sm_86: needs sm_89 or newer (e5m2 works from sm_80)"),
    ("8.9", "fp8_e4m3", "bf16", None),
    ("9.0", "fp8_e4m3", "fp8_e4m3", None),
    ("sm_90a", "bf16", "bf16", None),
    ("10.0", "fp8_e4m3", "fp8_e4m3", None),
    ("10.3", "fp8_e4m3", "fp8_e4m3", None),
    ("12.0", "fp8_e4m3", "fp8_e4m3", None),
    ("sm_120f", "bf16", "bf16", None),
]


@pytest.mark.parametrize("stage", ["sparse_attention", "dense_attention"])
@pytest.mark.parametrize("arch, kv, q, reason", ARCHS, ids=[f"{a}-{q}-{kv}" for a, kv, q, _ in ARCHS])
def test_every_architecture_is_supported_or_refused_with_a_reason(stage: str, arch: str, kv: str, q: str, reason: str | None) -> None:
    explained = m3attn.explain(stage, arch=arch, kv_dtype=kv, q_dtype=q)
    if reason is None:
        assert explained.chosen is not None and explained.chosen.startswith(("triton", "cute_sm90"))
        assert explained.reasons["triton"] == ()
    else:
        assert explained.chosen == "reference"
        assert reason in explained.reasons["triton"]
        assert reason in str(explained)


@pytest.mark.parametrize("stage", ("sparse_attention", "dense_attention", "index_score"))
def test_explain_refuses_the_formats_that_calls_refuse(stage: str) -> None:
    """Every pair of formats: explain has something to run it exactly where the call does not raise TypeError."""
    batch = m3attn.PagedBatch.from_lengths([1], [3], torch.zeros(1, 1, dtype=torch.int32), page_size=16, block_size=16)
    q, pages, ids = torch.ones(1, 2, 64), torch.ones(1, 2, 16, 64), torch.zeros(2, 1, 1, dtype=torch.int32)
    for (q_name, q_dtype), (name, dtype) in itertools.product(NAME_TO_DTYPE.items(), repeat=2):
        k = pages.to(dtype)
        cache = m3attn.LayerCache(k=k, v=k, index_k=k[:, 0])
        arguments = {"sparse_attention": (cache, ids, batch), "dense_attention": (cache, batch), "index_score": (cache, batch)}[stage]
        fields = {"index_q_dtype": q_name, "index_dtype": name} if stage == "index_score" else {"q_dtype": q_name, "kv_dtype": name}
        explained = m3attn.explain(stage, arch="cpu", page_size=16, block_size=16, **fields)
        try:
            getattr(m3attn, stage)(q.to(q_dtype), *arguments)
        except TypeError:
            assert explained.chosen is None, (q_name, name)
        else:
            assert explained.chosen == "reference", (q_name, name, str(explained))


def test_an_architecture_that_is_none_raises() -> None:
    with pytest.raises(ValueError, match=r"arch: expected cpu, or a form of sm_90 such as sm_90a or 9.0, got 'hopper'"):
        m3attn.explain("sparse_attention", arch="hopper")


def throwing(problem: m3attn.Problem) -> list[str]:
    raise ZeroDivisionError("a bug in a capability check")


def test_a_capability_check_that_throws_is_raised_never_a_silent_no() -> None:
    problem = m3attn.Problem("sm_90", **ATTENTION)
    with registered("sparse_attention", "mine", nothing, auto=True, extra_reasons=throwing):
        for ask in (
            lambda: m3attn.explain("sparse_attention", problem),
            lambda: m3attn.explain("sparse_attention", problem, impl="mine"),
            lambda: m3attn.resolve_attention_mode(problem),
            lambda: find("sparse_attention", "mine").supports(problem),
        ):
            with pytest.raises(ZeroDivisionError, match=r"a bug in a capability check"):
                ask()


def test_extra_reasons_join_the_declared_ones() -> None:
    with registered("sparse_attention", "mine", nothing, extra_reasons=lambda p: ["needs an even number of tokens"]):
        assert m3attn.explain("sparse_attention", arch="sm_90", impl="mine").reasons["mine"] == ("needs an even number of tokens",)


def test_a_target_is_imported_at_first_use() -> None:
    python("""
import sys, m3attn
from m3attn.registry import find
assert "m3attn.triton_kernels.primitives" not in sys.modules and "triton" not in sys.modules
m3attn.implementations(); m3attn.explain("sparse_attention", arch="sm_90"); m3attn.source("sparse_attention", "triton")
assert "triton" not in sys.modules and "m3attn.triton_kernels.primitives" not in sys.modules
""")


@pytest.mark.parametrize("stage", STAGES)
def test_source_shows_the_kernels_and_the_reference_without_triton(stage: str) -> None:
    text = m3attn.source(stage, "triton")
    reference = find(stage, "reference").sources
    for module in (*find(stage, "triton").sources, *reference):
        assert f"# {module}\n" in text
    assert "@triton.jit" in text and "no source file" not in text
    assert f"def {stage}_call(" in m3attn.source(stage, "reference")


def test_source_works_where_triton_cannot_be_imported() -> None:
    printed = python("""
import sys
sys.modules["triton"] = None
import m3attn
print(m3attn.source("select_blocks", "triton"))
print(m3attn.explain("select_blocks", arch="sm_80"))
""")
    assert "@triton.jit" in printed
    assert "select_blocks on sm_80" in printed and "reference: takes it" in printed
    assert "triton: needs the package triton, which is not installed" in printed


def test_source_of_an_unknown_key_lists_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"impl: expected one of reference, triton.* for select_blocks, got 'tritom'"):
        m3attn.source("select_blocks", "tritom")


def test_source_of_a_users_function_is_its_file() -> None:
    with registered("select_blocks", "mine", nothing):
        assert "test_source_of_a_users_function_is_its_file" in m3attn.source("select_blocks", "mine")


PLUGIN = """
import m3attn
def add():
    m3attn.register("select_blocks", "from_plugin", "plugin_kernels:select_blocks")
def broken():
    raise RuntimeError("no licence found")
"""


def make_plugin(folder: Path, entries: str) -> None:
    (folder / "plugin.py").write_text(PLUGIN)
    (folder / "plugin_kernels.py").write_text("def select_blocks(call):\n    call.out.fill_(5)\n")
    info = folder / "plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[m3attn.implementations]\n{entries}")


def test_packages_register_through_entry_points_and_a_broken_one_is_listed(tmp_path: Path) -> None:
    make_plugin(tmp_path, "good = plugin:add\nbroken = plugin:broken\nabsent = plugin_that_is_not_there:add\n")
    printed = python(
        """
import torch, m3attn
assert "from_plugin" in [i.key for i in m3attn.implementations("select_blocks")]
plugins = m3attn.info()["plugins"]
assert plugins["good"] is None, plugins
assert plugins["broken"] == "RuntimeError: no licence found", plugins
assert plugins["absent"].startswith("ModuleNotFoundError"), plugins
batch = m3attn.PagedBatch.from_lengths([1], [1], torch.zeros(1, 1, dtype=torch.int32), page_size=16, block_size=16)
ids = m3attn.select_blocks(torch.zeros(1, 1, 1), batch, impl="from_plugin")
assert ids.eq(5).all()
m3attn.unregister("select_blocks", "from_plugin")
print("done")
""",
        PYTHONPATH=str(tmp_path),
    )
    assert "done" in printed


def test_a_plugins_key_can_be_the_first_thing_named(tmp_path: Path) -> None:
    make_plugin(tmp_path, "good = plugin:add\n")
    python('import m3attn; assert m3attn.explain("select_blocks").chosen == "from_plugin"', PYTHONPATH=str(tmp_path), M3ATTN_IMPL="from_plugin")
    python('import m3attn; m3attn.unregister("select_blocks", "from_plugin")', PYTHONPATH=str(tmp_path))


def test_info_names_versions_and_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M3ATTN_DISABLE_CUTE", "1")
    info = m3attn.info()
    assert info["m3attn"] == m3attn.__version__
    assert info["environment"]["M3ATTN_DISABLE_CUTE"] == "1"
    assert {"python", "torch", "triton", "gpu", "arch", "interpreter", "plugins"} <= set(info)
