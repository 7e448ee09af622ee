"""Which implementation runs: impl=, then use(), then M3ATTN_IMPL, then auto; a named one runs or raises."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path

import pytest
import torch
from stage_calls import BUILDERS, python, registered

import m3attn
from m3attn import choice, registry
from m3attn.builtin import PRIORITIES, Rank
from m3attn.problem import PHASES
from m3attn.registry import INTERPRETER_HINT, STAGES, BrokenImplementation, Capabilities

STAGE = "select_blocks"
DTYPE_FIELDS = {
    "sparse_attention": ("q_dtype", "kv_dtype"),
    "dense_attention": ("q_dtype", "kv_dtype"),
    "index_score": ("index_q_dtype", "index_dtype"),
    "index_topk": ("index_q_dtype", "index_dtype"),
}


def writes(value: int):
    def run(call) -> None:
        call.out.fill_(value)

    return run


def first_id(**options) -> int:
    """The key that ran, told by what it wrote."""
    return int(BUILDERS[STAGE]()(out=None, **options)[0, 0, 0])


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch):
    """Keys one to four; `four` is auto's."""
    monkeypatch.delenv("M3ATTN_IMPL", raising=False)
    names = ("one", "two", "three", "four")
    for number, name in enumerate(names, 1):
        m3attn.register(STAGE, name, writes(number * 11), auto=name == "four")
    yield
    for name in names:
        m3attn.unregister(STAGE, name)


def test_order_of_choice(keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert first_id() == 44
    monkeypatch.setenv("M3ATTN_IMPL", "three")
    assert first_id() == 33
    with m3attn.use("two"):
        assert first_id() == 22
        assert first_id(impl="one") == 11
        with m3attn.use("one"):
            assert first_id() == 11
        assert first_id() == 22
    assert first_id() == 33
    monkeypatch.setenv("M3ATTN_IMPL", "")
    assert first_id() == 44


def test_explain_names_who_chose(keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert m3attn.explain(STAGE).chosen_by == "auto"
    monkeypatch.setenv("M3ATTN_IMPL", "three")
    assert (m3attn.explain(STAGE).chosen, m3attn.explain(STAGE).chosen_by) == ("three", "M3ATTN_IMPL")
    with m3attn.use("two"):
        assert (m3attn.explain(STAGE).chosen, m3attn.explain(STAGE).chosen_by) == ("two", "use(...)")
    assert (m3attn.explain(STAGE, impl="one").chosen, m3attn.explain(STAGE, impl="one").chosen_by) == ("one", "impl=")


def test_a_bare_key_applies_to_the_stages_that_have_it(keys: None) -> None:
    with m3attn.use("one"):
        assert first_id() == 11
        assert m3attn.explain("index_score", arch="cpu").chosen_by == "auto"


def test_pairs_apply_to_their_stage_and_win_over_a_bare_key(keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with m3attn.use(f"reference, {STAGE}=two"):
        assert first_id() == 22
        assert (m3attn.explain("index_score").chosen, m3attn.explain("index_score").chosen_by) == ("reference", "use(...)")
    with m3attn.use("index_score=reference"):
        assert first_id() == 44
    monkeypatch.setenv("M3ATTN_IMPL", f"{STAGE}=three,index_score=triton")
    assert first_id() == 33
    with m3attn.use("index_score=reference"):  # says nothing of this stage, so the environment still does
        assert first_id() == 33


@pytest.mark.parametrize(
    "choice, message",
    [
        ("tritom", r"implementation choice 'tritom': 'tritom' is not a key of any stage; there are .*reference, .*triton"),
        ("index_score=one", r"'one' is not a key of stage index_score; there are .*reference, triton"),
        ("index_scores=triton", r"expected a stage among qk_norm_rope_insert, .*, got 'index_scores'"),
        ("", "expected a key or stage=key pairs"),
        (" , ", "expected a key or stage=key pairs"),
        ("index_score=", r"'' is not a key of stage index_score"),
    ],
)
def test_a_choice_that_names_nothing_raises_with_the_list(keys: None, choice: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=message), m3attn.use(choice):
        pass
    if choice:
        monkeypatch.setenv("M3ATTN_IMPL", choice)
        with pytest.raises(ValueError, match=message):
            first_id()


def test_impl_must_be_a_key_of_the_stage(keys: None) -> None:
    with pytest.raises(ValueError, match=r"impl: expected one of reference, triton.* for index_score, got 'one'"):
        BUILDERS["index_score"]()(impl="one")


@pytest.mark.parametrize("how", ["impl", "use", "environment"])
def test_a_named_choice_is_never_replaced(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with registered(STAGE, "refuses", writes(5), extra_reasons=lambda p: ["is on holiday", "has no page"]):
        by = {"impl": "impl=", "use": r"use\(\.\.\.\)", "environment": "M3ATTN_IMPL"}[how]
        message = rf"select_blocks: 'refuses' \({by}\) cannot run this: is on holiday; has no page; reference.* can run it"
        if how == "environment":
            monkeypatch.setenv("M3ATTN_IMPL", "refuses")
        with pytest.raises(m3attn.UnsupportedProblem, match=message):
            if how == "use":
                with m3attn.use("refuses"):
                    first_id()
            else:
                first_id(**({"impl": "refuses"} if how == "impl" else {}))


@pytest.mark.parametrize("how", ["use", "environment"])
def test_a_named_key_that_is_taken_out_raises(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    m3attn.register(STAGE, "leaves", writes(9))
    if how == "environment":
        monkeypatch.setenv("M3ATTN_IMPL", "leaves")
        assert first_id() == 9
        m3attn.unregister(STAGE, "leaves")
        with pytest.raises(ValueError, match=r"'leaves' is not a key of any stage"):
            first_id()
    else:
        with m3attn.use("leaves"):
            assert first_id() == 9
            m3attn.unregister(STAGE, "leaves")
            with pytest.raises(ValueError, match=r"'leaves' is not a key of any stage"):
                first_id()


def test_a_replaced_key_runs_at_once() -> None:
    with registered(STAGE, "mine", writes(1)):
        assert first_id(impl="mine") == 1
        m3attn.register(STAGE, "mine", writes(2), replace=True)
        assert first_id(impl="mine") == 2


def test_use_holds_for_its_thread_alone(keys: None) -> None:
    seen: dict[str, int] = {}
    started, done = threading.Event(), threading.Event()

    def other() -> None:
        seen["before"] = first_id()
        with m3attn.use("two"):
            started.set()
            done.wait(10)
            seen["inside"] = first_id()

    with m3attn.use("one"):
        thread = threading.Thread(target=other)
        thread.start()
        started.wait(10)
        seen["main"] = first_id()
        done.set()
        thread.join()
    assert seen == {"before": 44, "inside": 22, "main": 11}


def test_use_holds_for_its_task_alone(keys: None) -> None:
    async def task(key: str, mine: asyncio.Event, other: asyncio.Event) -> int:
        with m3attn.use(key):
            mine.set()
            await other.wait()
            return first_id()

    async def main() -> tuple[list[int], int]:
        a, b = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(task("one", a, b), task("two", b, a)), first_id()

    assert asyncio.run(main()) == ([11, 22], 44)


def test_use_ends_with_an_exception(keys: None) -> None:
    with pytest.raises(KeyError), m3attn.use("one"):
        raise KeyError
    assert first_id() == 44


def test_auto_logs_once_what_it_took_and_why(caplog: pytest.LogCaptureFixture) -> None:
    with (
        registered(STAGE, "fast", writes(1), auto=True, extra_reasons=lambda p: ["needs a colder day"]),
        caplog.at_level(logging.INFO, logger="m3attn"),
    ):
        for _ in range(3):
            first_id()
        assert [r.getMessage() for r in caplog.records] == ["select_blocks: auto took reference (fast refused: needs a colder day)"]
        first_id(impl="reference")
        assert len(caplog.records) == 1


def test_no_implementation_at_all_raises_with_every_reason() -> None:
    batch = m3attn.PagedBatch.from_lengths([1], [1], torch.zeros(1, 1, dtype=torch.int32), page_size=16, block_size=16)
    problem = m3attn.Problem("sm_80", page_size=batch.page_size)
    explained = m3attn.explain(STAGE, problem)
    assert explained.chosen == "triton"
    assert explained.reasons == {"cute_sm90": ("architecture sm_80: built for sm_90",), "triton": (), "reference": ()}
    meta = BUILDERS[STAGE]().arguments["scores"].to("meta")
    with pytest.raises((ValueError, m3attn.UnsupportedProblem), match=r"batch.seq_lens: expected a tensor on meta, got one on cpu"):
        BUILDERS[STAGE]()(scores=meta, out=None)


def test_explain_prints_every_candidate_and_reason() -> None:
    text = str(m3attn.explain("sparse_attention", arch="sm_90", head_dim=48, phase="decode"))
    lines = text.splitlines()
    assert lines[0] == "sparse_attention on sm_90 (decode, bf16): reference, by auto"
    assert lines[1].startswith("  cute_sm90: ") and "head dim 48: takes 128" in lines[1]
    assert lines[2:4] == ["  triton: head dim 48: takes 64, 128, 192, 256", "  reference: takes it"]
    assert "  triton_union, when named: head dim 48: takes 64, 128; phase decode: takes prefill" in lines[4:]
    text = str(m3attn.explain("sparse_attention", arch="sm_90", impl="triton", head_dim=48))
    assert "nothing can run, by impl=" in text and "head dim 48: takes 64, 128, 192, 256" in text


def test_explain_says_that_a_rule_skips_the_fused_stage() -> None:
    assert "rule 'window': the fused stage is not used" in str(m3attn.explain("index_topk", arch="sm_90", rule="window"))
    assert m3attn.explain("index_topk", arch="sm_90").notes == ()
    with pytest.raises(ValueError, match=r"rule: expected one of topk, shared_heads, window.*got 'widow'"):
        m3attn.explain("index_topk", arch="sm_90", rule="widow")


def test_explain_takes_a_problem_or_fields() -> None:
    with pytest.raises(TypeError, match=r"expected a problem or its fields, got both"):
        m3attn.explain("sparse_attention", m3attn.Problem("sm_90"), arch="sm_80")
    with pytest.raises(ValueError, match=r"fields: expected fields of Problem .*got headdim"):
        m3attn.explain("sparse_attention", headdim=64)


def test_the_architecture_can_be_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M3ATTN_ARCH", "sm_100a")
    assert m3attn.info()["arch"] == "sm_100"
    explained = m3attn.explain("sparse_attention")
    assert (explained.problem.arch, explained.chosen) == ("sm_100", "triton_union")
    monkeypatch.setenv("M3ATTN_ARCH", "sm_75")
    assert m3attn.explain("sparse_attention").chosen == "reference"
    monkeypatch.setenv("M3ATTN_ARCH", "sm_100")
    assert torch.equal(BUILDERS[STAGE]()(out=None), BUILDERS[STAGE]()(out=None, impl="reference"))  # CPU tensors stay with the reference
    monkeypatch.setenv("M3ATTN_ARCH", "blackwell")
    with pytest.raises(ValueError, match=r"arch: expected cpu, or a form of sm_90"):
        m3attn.info()


def test_a_failing_compile_makes_auto_fall_back_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[torch.Size] = []

    def fails(call) -> None:
        tried.append(call.scores.shape)
        raise BrokenImplementation("a_kernel: Variant(topk=2) does not compile for sm_90a: no such instruction")

    expected = BUILDERS[STAGE]()(out=None, impl="reference")
    with registered(STAGE, "broken", fails, auto=True):
        with pytest.raises(BrokenImplementation, match="no such instruction"):
            first_id(impl="broken")
        with pytest.raises(BrokenImplementation), m3attn.use("broken"):
            first_id()
        with pytest.warns(RuntimeWarning, match=r"select_blocks: auto leaves broken out .*no such instruction") as seen:
            for _ in range(3):
                assert torch.equal(BUILDERS[STAGE]()(out=None), expected)
            BUILDERS[STAGE]()(out=None, topk=1)
        assert len(seen) == 1
        assert len(tried) == 4, "auto tries each problem once"
        with pytest.raises(BrokenImplementation):
            first_id(impl="broken")
        m3attn.register(STAGE, "broken", writes(7), auto=True, replace=True)
        assert first_id() == 7


def test_a_module_that_cannot_be_imported_counts_as_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad_kernels.py").write_text("raise AttributeError('this driver is too old')")
    monkeypatch.syspath_prepend(tmp_path)
    with registered(STAGE, "broken", "bad_kernels:run", workspace="bad_kernels:workspace_bytes", auto=True):
        with pytest.raises(BrokenImplementation, match="bad_kernels cannot be imported: AttributeError: this driver is too old"):
            first_id(impl="broken")
        with pytest.warns(RuntimeWarning, match="auto leaves broken out .*this driver is too old"):
            assert torch.equal(BUILDERS[STAGE]()(out=None), BUILDERS[STAGE]()(out=None, impl="reference"))


def test_a_call_that_an_implementation_declines_goes_to_the_next() -> None:
    def declines_strides(call) -> None:
        if call.scores.stride(2) != 1:
            raise m3attn.UnsupportedProblem("scores: expected a unit last stride")
        call.out.fill_(7)

    strided = BUILDERS[STAGE]().arguments["scores"].repeat_interleave(2, dim=2)[..., ::2]
    with registered(STAGE, "choosy", declines_strides, auto=True):
        for _ in range(2):
            assert first_id() == 7
            assert torch.equal(BUILDERS[STAGE]()(scores=strided, out=None), BUILDERS[STAGE]()(out=None, impl="reference"))
        with pytest.raises(m3attn.UnsupportedProblem, match="expected a unit last stride"):
            BUILDERS[STAGE]()(scores=strided, out=None, impl="choosy")
        with pytest.raises(m3attn.UnsupportedProblem), m3attn.use("choosy"):
            BUILDERS[STAGE]()(scores=strided, out=None)


def test_other_errors_of_an_implementation_are_raised() -> None:
    def fails(call) -> None:
        raise RuntimeError("a bug")

    with registered(STAGE, "broken", fails, auto=True), pytest.raises(RuntimeError, match="a bug"):
        first_id()


def everything_that_auto_chooses() -> dict[tuple[str, str, str], str | None]:
    return {
        (stage, phase, dtype): m3attn.explain(stage, arch="sm_90", phase=phase, **{name: dtype for name in DTYPE_FIELDS.get(stage, ())}).chosen
        for stage in STAGES
        for phase in PHASES
        for dtype in ("bf16", "fp8_e4m3")
    }


def test_disabling_cute_is_as_if_cutlass_were_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    first = {stage: (Rank("cute_sm90"), *ranks) for stage, ranks in PRIORITIES.items()}
    monkeypatch.setattr(choice, "PRIORITIES", first)
    monkeypatch.setattr(registry, "_importable", {"cutlass": True, "tvm_ffi": True})
    installed = everything_that_auto_chooses()
    monkeypatch.setenv("M3ATTN_DISABLE_CUTE", "1")
    switched_off = everything_that_auto_chooses()
    monkeypatch.delenv("M3ATTN_DISABLE_CUTE")
    monkeypatch.setattr(registry, "_importable", {"cutlass": False, "tvm_ffi": True})
    assert everything_that_auto_chooses() == switched_off
    with_cute = {i.stage for i in m3attn.implementations() if i.key == "cute_sm90"}
    assert {stage for (stage, *_), key in installed.items() if key == "cute_sm90"} == with_cute
    assert "cute_sm90" not in switched_off.values()


def test_disabled_cute_is_named_and_changes_auto_to_what_it_is_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_importable", {"cutlass": False})
    without = m3attn.explain(STAGE, arch="sm_90")
    with registered(STAGE, "cute_mine", writes(1), auto=True, capabilities=Capabilities(archs=("sm_90",), cpu="yes")):
        assert m3attn.explain(STAGE, arch="sm_90").chosen == "cute_mine"
        assert first_id() == 1
        monkeypatch.setenv("M3ATTN_DISABLE_CUTE", "1")
        off = m3attn.explain(STAGE, arch="sm_90")
        assert off.chosen == without.chosen == "triton"
        assert off.reasons["cute_mine"] == ("switched off by M3ATTN_DISABLE_CUTE=1",)
        assert first_id() != 1
        with pytest.raises(m3attn.UnsupportedProblem, match=r"'cute_mine' .* cannot run this: switched off by M3ATTN_DISABLE_CUTE=1"):
            first_id(impl="cute_mine")
        with pytest.raises(m3attn.UnsupportedProblem, match=r"switched off by M3ATTN_DISABLE_CUTE=1"), m3attn.use("cute_mine"):
            first_id()
        with (
            registered(STAGE, "refuses", writes(5), extra_reasons=lambda p: ["is on holiday"]),
            pytest.raises(m3attn.UnsupportedProblem) as refusal,
        ):
            first_id(impl="refuses")
        assert "cute_mine" not in str(refusal.value)
        monkeypatch.setenv("M3ATTN_DISABLE_CUTE", "0")
        assert first_id(impl="cute_mine") == 1


@pytest.mark.parametrize("stage", STAGES)
def test_auto_takes_the_reference_for_cpu_tensors(stage: str) -> None:
    explained = m3attn.explain(stage, arch="cpu")
    assert (explained.chosen, explained.chosen_by) == ("reference", "auto")
    assert list(explained.reasons) == ["reference"]


def test_triton_on_cpu_tensors_needs_the_interpreter_and_says_so() -> None:
    assert INTERPRETER_HINT == (
        "CPU tensors need Triton's interpreter, switched on before the kernels are imported: set TRITON_INTERPRET=1 or call "
        "m3attn.interpret() first (or pass impl='reference')"
    )
    printed = python(
        f"""
import torch, m3attn
batch = m3attn.PagedBatch.from_lengths([1], [1], torch.zeros(1, 1, dtype=torch.int32), page_size=16, block_size=16)
scores = torch.zeros(1, 1, 1)
try:
    m3attn.select_blocks(scores, batch, impl="triton")
except m3attn.UnsupportedProblem as error:
    assert {INTERPRETER_HINT!r} in str(error), error
    assert "reference can run it" in str(error)
else:
    raise SystemExit("triton ran without the interpreter")
assert m3attn.select_blocks(scores, batch).tolist() == [[[0] + [-1] * 15]]
m3attn.interpret()
assert m3attn.select_blocks(scores, batch, impl="triton").tolist() == [[[0] + [-1] * 15]]
print("done")
"""
    )
    assert "done" in printed


def test_interpret_after_the_kernels_are_imported_raises() -> None:
    python("""
import m3attn, m3attn.triton_kernels.primitives
try:
    m3attn.interpret()
except RuntimeError as error:
    assert "before the Triton kernels are imported; set TRITON_INTERPRET=1" in str(error), error
else:
    raise SystemExit("interpret() came too late and said nothing")
""")


def test_explain_lists_what_runs_only_when_named() -> None:
    explanation = m3attn.explain("sparse_attention", arch="sm_80")
    assert {"cute_sm100", "flashinfer"} <= set(explanation.others) and not set(explanation.others) & set(explanation.reasons)
    assert "architecture sm_80: built for sm_90" in str(explanation) and "cute_sm100, when named: " in str(explanation)
    named = m3attn.explain("sparse_attention", arch="sm_90", impl="triton")
    assert list(named.reasons) == ["triton"] and named.others["reference"] == () and "reference, when named: could run" in str(named)


def test_explain_takes_names_as_the_stages_do() -> None:
    assert m3attn.explain("sparse_attention", arch="sm_90", q_dtype="bfloat16").problem.q_dtype == "bf16"
    with pytest.raises(ValueError, match=r"phase: expected one of .*, got 'x'"):
        m3attn.explain("sparse_attention", phase="x")
    with pytest.raises(ValueError, match="page_size: expected a divisor of the block size 128, got 100"):
        m3attn.explain("sparse_attention", page_size=100)


def test_a_choice_is_text() -> None:
    for choose in (lambda: m3attn.explain("sparse_attention", impl=3), lambda: m3attn.use(3).__enter__(), lambda: m3attn.use(None).__enter__()):
        with pytest.raises(TypeError, match=r"expected a key or stage=key pairs as text, got (int|NoneType)"):
            choose()
