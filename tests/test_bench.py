"""The bench on a CPU: shapes, selections, floors, the parity gate, rows and result files, with a timer that only calls."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import m3attn
from m3attn.batch import LayerCache
from m3attn.bench import parity, results, selections
from m3attn.bench.ceilings import Ceilings, Cost
from m3attn.bench.inputs import MODES, Pool, Reads, StepInputs, page_tables, plan
from m3attn.bench.peers import FLASHMLA, VLLM, Peers
from m3attn.bench.report import table, us
from m3attn.bench.run import Request, Session, jobs, run
from m3attn.bench.shapes import NAMED, PRODUCTION, Heads, Step, sizes, step_shapes
from m3attn.bench.stages import SIZE_STAGES, STEP_STAGES
from m3attn.bench.workloads import sparse_cost, visible_blocks, visible_pairs
from m3attn.reference import index as reference_index

CEILINGS = Ceilings(copy_tbps=4.0, bf16_tflops=700.0, fp8_tflops=1260.0)


class CountingTimer:
    """Calls what it is given once and says so; a call takes as long as its place in line."""

    def __init__(self) -> None:
        self.cold_calls = self.replay_calls = self.captured_calls = 0

    def cold(self, call):
        call()
        self.cold_calls += 1
        return 100.0

    def captured(self, calls):
        self.captured_calls += len(calls)
        return lambda: [call() for call in calls]

    def replay(self, calls):
        for call in calls:
            call()
        self.replay_calls += len(calls)
        return 10.0


def session(rows: list, remarks: list, **changes) -> Session:
    made = Session(
        device=torch.device("cpu"),
        timer=CountingTimer(),
        ceilings=CEILINGS,
        l2_bytes=1 << 16,
        context={"commit": "abc", "gpu": "Test GPU", "versions": {"torch": "2"}},
        on_row=rows.append,
        on_remark=remarks.append,
    )
    return replace(made, **changes)


def request(*stages: str, **changes) -> Request:
    made = Request(stages=stages, heads=(Heads(4, 2),), implementations=("reference",), sample_rows=6, grid_sample_rows=3)
    return replace(made, **changes)


def bench(asked: Request, **changes) -> tuple[list, list, int]:
    rows, remarks = [], []
    failures = run(asked, session(rows, remarks, **changes))
    return rows, remarks, failures


def test_named_shapes_are_the_published_ones():
    assert [shape.steps[0] for name in ("P1", "P2", "P3") for shape in step_shapes(name)] == [
        Step(1, 8192, 8192),
        Step(1, 32768, 32768),
        Step(1, 8192, 131072),
    ]
    (prod,) = step_shapes("prod")
    assert len(prod.steps) == 16 and sum(s.weight for s in prod.steps) == sum(w for _, _, w in PRODUCTION) == 10434
    assert all(s.batch == 1 and s.prefix == s.seq_len - s.q_len >= 0 for s in prod.steps) and not prod.replay
    (verify,) = step_shapes("verify")
    assert len(verify.steps) == 28 and verify.replay and {s.q_len for s in verify.steps} == {8}
    assert {(s.batch, s.seq_len): s.weight for s in verify.steps}[64, 100000] == 420
    assert [s.name for s in step_shapes("decode")] == ["B1xL131072", "B16xL32768", "B64xL32768", "B64xL131072", "B128xL8192"]
    assert all(shape.replay for shape in step_shapes("decode"))
    assert step_shapes("8192x131072")[0].steps == step_shapes("P3")[0].steps


@pytest.mark.parametrize("name", ["P4", "B0xL10", "64x32", "B4", ""])
def test_a_bad_shape_is_named(name):
    with pytest.raises(ValueError, match="shape"):
        step_shapes(name)


@pytest.mark.parametrize("text", ["64", "64/0", "10/4", "a/b"])
def test_bad_heads_are_named(text):
    with pytest.raises(ValueError, match="heads"):
        Heads.parse(text)


def test_sizes():
    assert sizes("131072x128") == (131072, 128) and sizes("64") == (64,)
    for bad in ("8192x", "0x4", "P1"):
        with pytest.raises(ValueError, match="sizes above 0"):
            sizes(bad)


@pytest.mark.parametrize("kind", selections.KINDS)
@pytest.mark.parametrize("step", [Step(1, 300, 300), Step(3, 8, 5000), Step(2, 1, 100)], ids=str)
def test_selections_keep_the_rules(kind, step):
    ids = selections.select(step, kind, num_kv_heads=2, generator=torch.Generator().manual_seed(1))
    assert ids.shape == (2, step.tokens, 16) and ids.dtype == torch.int32
    position = (step.prefix + torch.arange(step.q_len)).repeat(step.batch)
    for t, p in enumerate(position.tolist()):
        for row in ids[:, t].tolist():
            valid = [i for i in row if i >= 0]
            assert valid == sorted(set(valid)) and row[len(valid) :] == [-1] * (16 - len(valid))
            assert valid[-1] == p // 128 and len(valid) == min(16, p // 128 + 1)


def distinct_in_four(kind: str, num_blocks: int) -> float:
    step = Step(1, 512, num_blocks * 128)
    ids = selections.select(step, kind, num_kv_heads=1, generator=torch.Generator().manual_seed(2))
    return sum(len(set(four.flatten().tolist())) for four in ids[0].split(4)) / 128


@pytest.mark.parametrize("num_blocks", [64, 256, 1024])
def test_selection_n_overlaps_as_reported(num_blocks):
    assert 20 < distinct_in_four("N", num_blocks) < 25
    assert distinct_in_four("R", num_blocks) > 40


def test_eight_draft_tokens_pick_about_27_blocks():
    step = Step(32, 8, 100000)
    ids = selections.select(step, "N", num_kv_heads=1, generator=torch.Generator().manual_seed(3))
    distinct = [len(set(eight.flatten().tolist())) for eight in ids[0].split(8)]
    assert 24 < sum(distinct) / len(distinct) < 30


def test_correlated_is_a_stationary_ar1():
    x = selections.correlated(4096, 64, 0.95, torch.Generator().manual_seed(4)).double()
    assert abs(x.var().item() - 1) < 0.05
    assert abs((x[1:] * x[:-1]).mean().item() - 0.95) < 0.03


@pytest.mark.parametrize("step", [Step(2, 5, 5), Step(1, 300, 700), Step(3, 1, 129)], ids=str)
def test_counts_of_visible_work(step):
    positions = [step.prefix + i for i in range(step.q_len)]
    assert visible_pairs(step) == step.batch * sum(p + 1 for p in positions)
    assert visible_pairs(step, 256) == step.batch * sum(p + 1 for p in positions if p >= 256)
    assert visible_blocks(step) == step.batch * sum(p // 128 + 1 for p in positions)


def test_floor_is_the_larger_of_bytes_and_operations():
    assert CEILINGS.floor_us(Cost(4e6)) == pytest.approx(1.0)
    assert CEILINGS.floor_us(Cost(4e6, flops_16=1.4e9)) == pytest.approx(2.0)
    assert CEILINGS.floor_us(Cost(0, flops_16=0.7e9, flops_8=1.26e9)) == pytest.approx(2.0)
    assert replace(CEILINGS, fp8_tflops=None).floor_us(Cost(0, flops_8=0.7e9)) == pytest.approx(1.0)


def step_inputs(step: Step, mode: str = "bf16", num_sets: int = 1) -> StepInputs:
    generator = torch.Generator().manual_seed(5)
    pool = Pool.random(step.batch * -(-step.seq_len // 128), Heads(4, 2), MODES[mode], kv=True, index=True, generator=generator)
    return StepInputs.random(step, Heads(4, 2), MODES[mode], pool, num_sets, generator)


def test_sparse_cost_counts_what_is_selected():
    inputs = step_inputs(Step(1, 2, 258))
    ids = torch.full((2, 2, 16), -1, dtype=torch.int32)
    ids[:, :, 0], ids[0, 1, 1] = 2, 0
    ids = torch.where(ids >= 0, ids, -1)
    cost = sparse_cost(inputs, ids)
    keys = 2 * (1 + 2) + 128
    assert cost.flops_16 == 4 * 2 * 128 * keys
    assert cost.bytes == (2 * 128 + 128) * 2 * 128 * 2 + 2 * 4 * 128 * 4


def test_modes_decide_where_operations_count():
    ids = selections.select(Step(1, 1, 300), "N", num_kv_heads=2, generator=torch.Generator())
    by_mode = {mode: sparse_cost(step_inputs(Step(1, 1, 300), mode), ids) for mode in MODES}
    total = by_mode["bf16"].flops_16
    assert by_mode["widen"].flops_8 == 0 and by_mode["widen"].bytes < by_mode["bf16"].bytes
    assert by_mode["fp8"].flops_16 == by_mode["fp8"].flops_8 == total / 2
    assert by_mode["fp8_pv"].flops_8 == total and by_mode["fp8_pv"].flops_16 == 0


def test_sets_outgrow_l2():
    step = Step(1, 1, 131072)
    index = plan(step, Reads(index=256), replay=True, l2_bytes=50 << 20)
    assert index.num_sets * 256 * 131072 > 2 * (50 << 20) and index.num_pages == index.num_sets * 1024
    attention = plan(step, Reads(kv=2048, kv_tokens=2048), replay=True, l2_bytes=50 << 20)
    assert attention.num_sets * 2048 * 2048 > 2 * (50 << 20) and attention.num_pages == 1024
    assert plan(Step(64, 1, 131072), Reads(index=256), replay=True, l2_bytes=50 << 20).num_sets == 1
    assert plan(step, Reads(index=256), replay=False, l2_bytes=50 << 20).num_sets == 1


def test_page_tables_share_no_page_while_the_pool_lasts():
    tables = page_tables(Step(2, 1, 300), 18, 5, torch.Generator().manual_seed(0))
    assert len(tables) == 5 and tables[0].shape == (2, 3)
    assert torch.cat([t.flatten() for t in tables[:3]]).sort().values.tolist() == list(range(18))


STEP_SHAPES = ("20x700", "B2xL2500")


@pytest.mark.parametrize("stage", STEP_STAGES)
@pytest.mark.parametrize("mode", ["bf16", "fp16", "widen", "fp8", "fp8_pv"])
def test_every_stage_passes_its_own_gate(stage, mode):
    rows, remarks, failures = bench(request(stage, shapes=STEP_SHAPES, modes=(mode,)))
    if mode not in STEP_STAGES[stage].modes and len(STEP_STAGES[stage].modes) > 1:
        assert not rows
        return
    assert not remarks and failures == 0
    assert [row["shape"] for row in rows] == list(STEP_SHAPES)
    for row in rows:
        assert row["parity_passed"] and row["rows_checked"] > 0
        assert row["median_us"] > 0 and row["floor_us"] > 0 and row["heads"] == "4/2"


@pytest.mark.parametrize("stage", [stage for stage in SIZE_STAGES if stage in m3attn.registry.STAGES])
def test_every_size_stage_passes_its_own_gate(stage):
    shape = {1: ("40",), 2: ("24x64",), 3: ("3x40x8",)}[SIZE_STAGES[stage].rank]
    rows, remarks, failures = bench(request(stage, shapes=shape, modes=("bf16", "fp16", "fp8", "fp8_pv")))
    assert not remarks and failures == 0
    assert {row["mode"] for row in rows} == set(SIZE_STAGES[stage].modes)
    assert all(row["parity_passed"] for row in rows)


ROW_FIELDS = {"stage", "implementation", "heads", "shape", "mode", "selection", "median_us", "floor_us", "commit", "gpu", "versions"}


def test_rows_have_the_contracted_fields():
    rows, _, _ = bench(request("sparse_attention", "index_topk", shapes=("20x200",), selections=("N", "R")))
    rows += bench(request("quantize_fp8", shapes=("8x16",)))[0]
    assert all(row.keys() >= ROW_FIELDS for row in rows)
    assert [row["selection"] for row in rows] == ["N", "R", None, None]
    assert rows[-1]["heads"] == "-" and rows[-1]["mode"] == "fp8"
    json.dumps(rows)


def test_caches_declare_that_their_bytes_are_finite():
    """So that implementations which ask for that are timed beside the others, and say why where they decline."""
    reference = next(i for i in m3attn.implementations("dense_attention") if i.key == "reference").load()
    limits = m3attn.Capabilities(cpu="yes", needs_zero_on_alloc=True, kv_dtypes=("bf16",))
    m3attn.register("dense_attention", "finite", reference, capabilities=limits)
    try:
        asked = request("dense_attention", shapes=("20x300", "B2xL300"), modes=("bf16", "fp8"), implementations=("reference", "finite"))
        rows, remarks, failures = bench(asked)
    finally:
        m3attn.unregister("dense_attention", "finite")
    assert [row["implementation"] for row in rows if row["mode"] == "bf16"] == ["reference", "finite"] * 2
    assert [row["implementation"] for row in rows if row["mode"] == "fp8"] == ["reference"] * 2
    assert failures == 0 and len(remarks) == 2 and all("KV dtype fp8_e4m3: takes bf16" in remark for remark in remarks)


def test_nothing_to_time_is_said_before_inputs_are_made():
    rows, remarks, failures = bench(request("index_topk", shapes=("verify",), implementations=("triton_union",)))
    assert not rows and failures == 1 and "no implementation to time: there are reference, triton" in remarks[0]


def test_default_selections_and_jobs():
    found = [(job.shape_name, job.selection) for job in jobs(request("sparse_attention", shapes=("P1", "prod", "decode")))]
    assert found[:3] == [("P1", "N"), ("P1", "R"), ("prod", "N")] and len(found) == 8
    with pytest.raises(ValueError, match="stage"):
        list(jobs(request("nothing")))
    with pytest.raises(ValueError, match="mode"):
        list(jobs(request("step", modes=("int4",))))
    with pytest.raises(ValueError, match="2 sizes"):
        list(jobs(request("quantize_fp8", shapes=("64",))))
    mixed = [(job.stage, job.shape_name) for job in jobs(request("quantize_fp8", "index_topk", shapes=("P1", "128x64")))]
    assert mixed == [("quantize_fp8", "128x64"), ("index_topk", "P1")]
    assert set(NAMED) == {"P1", "P2", "P3", "prod", "verify", "decode"}


@pytest.fixture
def wrong():
    """An implementation of two stages that is slightly and plausibly wrong."""
    reference = {i.stage: i for i in m3attn.implementations() if i.key == "reference"}

    def attention(call):
        fewer = call.ids.clone()
        fewer[:, :, 3] = -1
        reference["sparse_attention"].load()(replace(call, ids=fewer))

    def select(call):
        reference["select_blocks"].load()(call)
        call.out[:, -1] = call.out[:, -1].flip(-1)

    m3attn.register("sparse_attention", "wrong", attention)
    m3attn.register("select_blocks", "wrong", select)
    yield
    m3attn.unregister("sparse_attention", "wrong")
    m3attn.unregister("select_blocks", "wrong")


@pytest.mark.parametrize("stage", ["sparse_attention", "select_blocks"])
def test_a_wrong_implementation_is_not_timed(stage, wrong):
    timer = CountingTimer()
    rows, remarks, failures = bench(request(stage, shapes=("20x3000",), implementations=("wrong", "reference")), timer=timer)
    assert [row["implementation"] for row in rows] == ["reference"]
    assert failures == 1 and len(remarks) == 1 and "wrong: not timed: ParityFailure" in remarks[0]
    assert timer.cold_calls == 1


def test_an_implementation_that_writes_nothing_is_not_timed():
    m3attn.register("sparse_attention", "lazy", lambda call: None)
    try:
        rows, remarks, _ = bench(request("sparse_attention", shapes=("B2xL200",), implementations=("lazy",)))
    finally:
        m3attn.unregister("sparse_attention", "lazy")
    assert not rows and "ParityFailure" in remarks[0]


def test_one_failing_job_does_not_stop_the_run():
    def fails(call):
        if call.batch.max_seqlen_k == 256:
            raise RuntimeError("no such tile")
        next(i for i in m3attn.implementations("sparse_attention") if i.key == "reference").load()(call)

    m3attn.register("sparse_attention", "fails", fails)
    try:
        rows, remarks, failures = bench(request("sparse_attention", shapes=("B1xL256", "B1xL300"), implementations=("fails",)))
    finally:
        m3attn.unregister("sparse_attention", "fails")
    assert [row["shape"] for row in rows] == ["B1xL300"] and failures == 1
    assert "B1xL256 bf16 N fails: not timed: RuntimeError: no such tile" in remarks[0]


def test_what_an_implementation_does_not_support_is_a_remark_and_no_failure():
    rows, remarks, failures = bench(request("sparse_attention", shapes=("B1xL256",), implementations=("triton",)))
    if m3attn.registry.interpreter_enabled():
        pytest.skip("the interpreter runs it")
    assert not rows and failures == 0 and "unsupported" in remarks[0]


class StandInPeers(Peers):
    """Peers with the folder's conventions, computed by the reference: ids best first, scores unwritten past the own block."""

    def index_score(self, inputs, batch):
        scores = reference_index.index_score(inputs.index_q, inputs.cache.index_k, batch)
        return scores.masked_fill(scores == float("-inf"), 123.0)

    index_decode_score = index_score

    def select_blocks(self, scores, inputs, batch):
        return self._best_first(scores, batch)

    def index_decode(self, inputs, batch):
        return self._best_first(reference_index.index_score(inputs.index_q, inputs.cache.index_k, batch), batch)

    def _best_first(self, scores, batch):
        ids = reference_index.select_blocks(scores, batch)
        count = (ids >= 0).sum(-1, keepdim=True)
        order = (count - 1 - torch.arange(ids.shape[-1])).clamp(min=0)
        return torch.where(torch.arange(ids.shape[-1]) < count, ids.gather(-1, order), -1)

    def sparse_prefill(self, inputs, batch, ids, out):
        return m3attn.sparse_attention(inputs.q, LayerCache(kv=inputs.cache.kv), ids, batch, out=out)

    sparse_decode = sparse_prefill


@pytest.mark.parametrize("stage", ["index_score", "select_blocks", "index_topk", "sparse_attention", "step"])
@pytest.mark.parametrize("shape", STEP_SHAPES)
def test_peers_are_checked_and_kept_beside_ours(stage, shape):
    peers = StandInPeers(index_topk=object(), sparse_attn=object())
    rows, remarks, _ = bench(request(stage, shapes=(shape,)), peers=peers)
    assert not remarks
    if stage == "select_blocks" and shape.startswith("B"):  # where vLLM has none apart from its scores
        assert [row["implementation"] for row in rows] == ["reference"]
        return
    assert [row["implementation"] for row in rows] == ["reference", VLLM]
    assert all(row["parity_passed"] for row in rows)
    assert [row["peer"] for row in rows] == [False, True]
    assert "1.00x" in table(rows) or "10.00x" in table(rows)


@pytest.mark.parametrize("rule", ["shared_heads", "window"])
@pytest.mark.parametrize("shape", STEP_SHAPES)
def test_another_rule_is_timed_as_scores_and_rule(rule, shape):
    rows, remarks, _ = bench(request("index_topk", shapes=(shape,), rule=rule), peers=StandInPeers(index_topk=object()))
    assert not remarks and [row["implementation"] for row in rows] == ["reference"] and rows[0]["parity_passed"]
    with pytest.raises(ValueError, match="rule: expected topk for step"):
        list(jobs(request("step", rule=rule)))
    with pytest.raises(ValueError, match="rule: expected one of"):
        list(jobs(request("index_topk", rule="best")))


def test_flashmla_is_timed_on_sparse_mla():
    class Dense(Peers):
        def sparse_mla_prefill(self, q, kv, indices, sm_scale):
            visible = torch.zeros(q.shape[0], kv.shape[0], dtype=torch.bool).scatter_(1, indices[:, 0].long(), True)
            logits = torch.einsum("qhd,kd->qhk", q.float(), kv[:, 0].float()) * sm_scale
            weights = logits.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
            return torch.einsum("qhk,kd->qhd", weights, kv[:, 0, :512].float()).bfloat16()

    rows, remarks, _ = bench(request("sparse_mla_prefill", shapes=("3x40x16",), heads=(Heads(16, 1),)), peers=Dense(flashmla=object()))
    assert not remarks
    assert [(row["implementation"], row["heads"], row["parity_passed"]) for row in rows] == [("reference", "16", True), (FLASHMLA, "16", True)]


def test_peers_have_no_fp8_attention():
    peers = StandInPeers(index_topk=object(), sparse_attn=object())
    rows, _, _ = bench(request("sparse_attention", shapes=("B1xL300",), modes=("fp8", "widen")), peers=peers)
    assert [(row["mode"], row["implementation"]) for row in rows] == [("widen", "reference"), ("widen", VLLM), ("fp8", "reference")]


def test_a_missing_peer_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Peers.load(tmp_path / "nowhere")


def test_a_grid_is_a_weighted_mean(monkeypatch):
    from m3attn.bench import run as run_module

    class SlowForLong(CountingTimer):
        def cold(self, call):
            call()
            self.cold_calls += 1
            return 10.0 if self.cold_calls == 1 else 40.0

    grid = step_shapes("10x300")[0]
    grid = replace(grid, name="grid", steps=(replace(grid.steps[0], weight=2.0), Step(1, 5, 500, weight=1.0)))
    monkeypatch.setattr(run_module, "step_shapes", lambda name: [grid])
    rows, remarks, _ = bench(request("sparse_attention", shapes=("grid",)), timer=SlowForLong())
    assert not remarks and rows[0]["median_us"] == pytest.approx(20.0)
    assert [step["us"] for step in rows[0]["steps"]] == [10.0, 40.0] and rows[0]["rows_checked"] == 6


def test_replay_rotates_and_compares_with_a_plain_read():
    m3attn.register("sparse_attention", "copy", next(i for i in m3attn.implementations("sparse_attention") if i.key == "reference").load())
    timer = CountingTimer()
    try:
        rows, _, _ = bench(
            request("sparse_attention", shapes=("B1xL256",), implementations=("copy", "reference")),
            timer=timer,
            l2_bytes=1 << 20,
            stream=lambda num_bytes: num_bytes / 1e6,
        )
    finally:
        m3attn.unregister("sparse_attention", "copy")
    assert timer.replay_calls > 1 and timer.cold_calls == 1
    assert {row["implementation"]: row["timing"] for row in rows} == {"copy": "graph", "reference": "cold"}
    assert all(row["stream_us"] > 0 for row in rows)


def test_sparse_mla_is_timed_as_a_graph_of_one_call():
    """A peer too; the reference reads lengths back, which no capture allows."""
    timer, reference = CountingTimer(), next(i for i in m3attn.implementations("sparse_mla_prefill") if i.key == "reference")

    class FlashMla:
        flashmla = object()

        def sparse_mla_prefill(self, q, kv, indices, sm_scale):
            return m3attn.sparse_mla_prefill(q, kv, indices, sm_scale=sm_scale, impl="reference")[0]

    m3attn.register("sparse_mla_prefill", "copy", reference.load())
    try:
        asked = request("sparse_mla_prefill", shapes=("2x40x8",), heads=(Heads(4, 1),), implementations=("copy", "reference"))
        rows, remarks, _ = bench(asked, timer=timer, peers=FlashMla())
    finally:
        m3attn.unregister("sparse_mla_prefill", "copy")
    assert not remarks and {row["implementation"]: row["timing"] for row in rows} == dict.fromkeys(("copy", "reference", FLASHMLA), "cold")
    assert (timer.captured_calls, timer.cold_calls, timer.replay_calls) == (2, 3, 0)


def test_sampled_rows_agree_with_the_whole_reference():
    inputs = step_inputs(Step(3, 4, 300), num_sets=1)
    batch = inputs.batches[0]
    rows = parity.sample_rows(12, 5)
    sample = parity.SampledRows.of(batch, rows)
    scores = sample.index_scores(inputs.index_q, inputs.cache)
    whole = reference_index.index_score(inputs.index_q, inputs.cache.index_key(), batch, dtype=torch.float64)
    torch.testing.assert_close(scores, whole[:, rows])
    ids = selections.select(inputs.step, "R", num_kv_heads=2, generator=torch.Generator().manual_seed(0))
    whole_out = m3attn.reference.sparse.sparse_attention(inputs.q, *inputs.cache.key_value(), ids, batch, dtype=torch.float64)[0]
    torch.testing.assert_close(sample.sparse_attention(inputs.q, inputs.cache, ids), whole_out[rows])


def test_near_ties_are_allowed_and_counted():
    expected = torch.tensor([[[0, 2, 5]]], dtype=torch.int32)
    scores = torch.tensor([[[3.0, 1.0, 1.0 + 1e-6, 0.0, 0.5, 9.0]]], dtype=torch.float64)
    bound = torch.full((1, 1, 1), 1e-6, dtype=torch.float64)
    swapped = torch.tensor([[[0, 1, 5]]], dtype=torch.int32)
    assert parity.check_ids(swapped, expected, scores, bound) == parity.Parity(0.0, 0.0, near_ties=1, rows=1)
    assert not parity.check_ids(swapped, expected).passed
    for bad in ([0, 4, 5], [0, 1, 2], [1, 0, 5], [0, 5, 5], [0, 5, -1], [0, 2, 9]):
        assert not parity.check_ids(torch.tensor([[bad]], dtype=torch.int32), expected, scores, bound).passed, bad


def test_score_check_wants_hidden_blocks_hidden():
    expected = torch.tensor([[[1.0, float("-inf")]]], dtype=torch.float64)
    bound = torch.full((1, 1, 1), 1e-3, dtype=torch.float64)
    assert parity.check_scores(torch.tensor([[[1.0005, float("-inf")]]]), expected, bound).passed
    for bad in ([1.002, float("-inf")], [1.0, 0.0], [float("nan"), float("-inf")], [float("-inf"), float("-inf")]):
        assert not parity.check_scores(torch.tensor([[bad]]), expected, bound).passed


def test_worst_keeps_the_failure():
    good, bad = parity.Parity(0.1, 1.0, rows=2), parity.Parity(3.0, 0.0, rows=4)
    assert parity.worst([good, bad]) == parity.Parity(3.0, 0.0, 0, 6)
    assert parity.sample_rows(3, 10).tolist() == [0, 1, 2]
    assert {0, 999} <= set(parity.sample_rows(1000, 5).tolist()) and len(parity.sample_rows(1000, 5)) == 5


def result_row(**changes):
    made = dict(stage="index_topk", implementation="triton", heads="64/4", shape="P1", mode="bf16", selection=None, median_us=5.0)
    return made | dict(floor_us=1.0, commit="new", gpu="NVIDIA H200", versions={}) | changes


def test_a_result_file_holds_one_commit(tmp_path):
    results.update(tmp_path, [result_row(commit="old"), result_row(commit="old", shape="P2")])
    path = tmp_path / "nvidia-h200-index_topk.json"
    assert len(results.read(path)) == 2
    results.update(tmp_path, [result_row(median_us=4.0)], CEILINGS)
    assert [(r["shape"], r["median_us"]) for r in results.read(path)] == [("P1", 4.0)]
    results.update(tmp_path, [result_row(shape="P2"), result_row(median_us=3.0)])
    assert [(r["shape"], r["median_us"]) for r in results.read(path)] == [("P1", 3.0), ("P2", 5.0)]
    assert json.loads((tmp_path / "ceilings-nvidia-h200.json").read_text())["copy_tbps"] == 4.0


def test_a_broken_result_file_is_named(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('[{"stage": "index_topk"}]')
    with pytest.raises(ValueError, match=r"x\.json"):
        results.read(path)


def test_times_read_well():
    assert [us(v) for v in (3.21, 123.4, 1234.0, 52_000.0, 285_700.0, 3.58e6, 28.64e6)] == [
        "3.2 us",
        "123 us",
        "1.23 ms",
        "52.0 ms",
        "286 ms",
        "3.58 s",
        "28.6 s",
    ]


def test_tuning_times_every_candidate_of_the_kernel_files(monkeypatch):
    """The kernels of a stage that lists candidates, run by the reference: what is forced is seen by the call and taken back after it."""
    from types import ModuleType

    from m3attn.bench import run as run_module
    from m3attn.bench.tune import CURRENT, Variant, table

    module = ModuleType("kernels.file")
    module.settings_override, seen = None, []

    def kernel(call):
        seen.append(module.settings_override)
        if module.settings_override == "too large":
            raise RuntimeError("out of shared memory")
        next(i for i in m3attn.implementations("sparse_attention") if i.key == "reference").load()(call)

    listed = [Variant(None), Variant(module, "small"), Variant(module, "too large")]
    monkeypatch.setattr(run_module, "variants", lambda stages, key, phase: listed)
    m3attn.register("sparse_attention", "tuned", kernel)
    try:
        rows, remarks, failures = bench(request("sparse_attention", shapes=("B1xL200",), implementations=("tuned",)), tuning=True)
    finally:
        m3attn.unregister("sparse_attention", "tuned")
    assert [row["settings"] for row in rows] == [CURRENT, "file small"] and failures == 1
    assert "tuned (file too large): not timed: RuntimeError: out of shared memory" in remarks[0]
    assert seen[:2] == [None, None] and "small" in seen and module.settings_override is None
    assert "file small" in table(rows)


@pytest.mark.parametrize("stage", [s for s in (*STEP_STAGES, *SIZE_STAGES) if s in m3attn.registry.STAGES])
@pytest.mark.parametrize("phase", ["prefill", "decode", "verify"])
def test_kernel_files_list_candidates(stage, phase):
    pytest.importorskip("triton")
    from m3attn.bench.tune import variants

    found = variants((stage,), "triton", phase)
    assert found[0].module is None
    assert len({v.label for v in found}) == len(found)
    if stage != "merge_attention_states":
        assert len(found) > 3


def test_tables_are_generated_between_markers(tmp_path):
    from m3attn.bench import tables

    versions = {"torch": "2.11.0", "python": "3.12"}
    rows = [
        result_row(median_us=2000.0, floor_us=500.0, share=0.25, commit="c" * 40, versions=versions, peer=False),
        result_row(implementation=VLLM, median_us=2500.0, floor_us=500.0, share=0.2, commit="c" * 40, versions=versions, peer=True),
        result_row(heads="8/1", shape="prod", median_us=50.0, floor_us=25.0, share=0.5, commit="c" * 40, versions=versions, peer=False),
    ]
    results.update(tmp_path, rows)
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- bench: index_topk -->\nold\n<!-- end bench -->\nbetween\n<!-- bench: step -->\n<!-- end bench -->\nafter\n")
    command = ["--results", str(tmp_path), str(page)]
    assert tables.main(["--check", *command]) == 1 and "old" in page.read_text()
    assert tables.main(command) == 0
    content = page.read_text()
    assert "| 64/4 | P1 | bf16 | 500 us | 2.00 ms (25%) | 2.50 ms (20%) |" in content
    assert "| 8/1 | prod | bf16 | 25.0 us | 50.0 us (50%) |  |" in content
    assert "NVIDIA H200, commit cccccccccccc, torch 2.11.0;" in content and "| triton | vllm_triton |" in content
    assert "No measurement of step" in content and "old" not in content and content.startswith("before\n") and content.endswith("after\n")
    assert tables.main(["--check", *command]) == 0
    page.write_text("<!-- bench: nothing -->\n<!-- end bench -->\n")
    with pytest.raises(ValueError, match="bench marker"):
        tables.main(command)
