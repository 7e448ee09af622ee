"""`m3attn bench --ids`: recorded ids as shapes, timed with a timer that only calls."""

from __future__ import annotations

import pytest
import torch

import m3attn
from m3attn.analysis import RecordedStep, load_ids, save_ids
from m3attn.bench import recorded
from m3attn.bench.ceilings import Ceilings
from m3attn.bench.run import Request, Session, jobs, run
from m3attn.bench.shapes import Heads, Step
from m3attn.cli.main import main


class Once:
    """Calls each call once."""

    def cold(self, call):
        call()
        return 50.0

    def replay(self, calls):
        for call in calls:
            call()
        return 5.0


def step(q_lens, seq_lens, *, layer="layers.3.self_attn", topk=4, block_size=128, heads=2) -> RecordedStep:
    table = torch.zeros(len(q_lens), -(-max(seq_lens) // 128), dtype=torch.int32)
    batch = m3attn.PagedBatch.from_lengths(q_lens, seq_lens, table)
    scores = torch.randn(heads, sum(q_lens), batch.num_blocks, generator=torch.Generator().manual_seed(sum(seq_lens)))
    return RecordedStep(layer, m3attn.select_blocks(scores, batch, topk=topk), tuple(q_lens), tuple(seq_lens), block_size)


def test_recorded_steps_are_shapes():
    prefill, decode = recorded.shapes([step([40], [900]), step([1, 1, 1], [700] * 3)])
    assert (prefill.shape.name, prefill.shape.steps, prefill.shape.replay) == ("40x900", (Step(1, 40, 900),), False)
    assert (decode.shape.name, decode.shape.steps, decode.shape.replay) == ("B3x1xL700", (Step(3, 1, 700),), True)
    assert (prefill.selection, decode.selection) == ("layers.3.self_attn step 0", "layers.3.self_attn step 1")


def test_recorded_ids_are_timed_on_their_own_shape():
    rows, remarks = [], []
    session = Session(
        device=torch.device("cpu"),
        timer=Once(),
        ceilings=Ceilings(4.0, 700.0, 1260.0),
        l2_bytes=1 << 16,
        context={"commit": "abc", "gpu": "Test GPU", "versions": {}},
        on_row=rows.append,
        on_remark=remarks.append,
    )
    shapes = tuple(recorded.shapes([step([40], [900]), step([1, 1], [700] * 2, topk=6)]))
    asked = Request(stages=("sparse_attention",), implementations=("reference",), sample_rows=5, recorded=shapes)
    assert run(asked, session) == 0 and not remarks
    prefill, decode = rows
    assert (prefill["heads"], prefill["shape"], prefill["timing"], prefill["parity_passed"]) == ("32/2", "40x900", "cold", True)
    assert (decode["shape"], decode["selection"], decode["rows_checked"]) == ("B2x1xL700", "layers.3.self_attn step 1", 2)
    ids = shapes[1].ids
    keys = sum(min(128, 700 - 128 * i) for i in ids.flatten().tolist() if i >= 0)
    assert decode["tflops"] * decode["median_us"] * 1e6 == pytest.approx(4 * 16 * 128 * keys, rel=0.05)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "expected at least one recorded step"),
        ([step([20], [90], block_size=16)], "expected blocks of 128 positions, got 16"),
        ([step([1, 2], [90, 91])], r"expected requests of one length .* got \(new tokens, tokens\) \[\(1, 90\), \(2, 91\)\]"),
        ([RecordedStep("a", torch.zeros(1, 1, 129, dtype=torch.int32), (1,), (90,), 128)], "expected at most 128 ids a row, got 129 in a step 0"),
    ],
)
def test_what_cannot_be_timed_is_named(steps, message):
    with pytest.raises(ValueError, match=message):
        list(recorded.shapes(steps))


def test_other_stages_and_heads_are_refused():
    shapes = tuple(recorded.shapes([step([40], [900])]))
    with pytest.raises(ValueError, match="--ids: expected stage sparse_attention"):
        list(jobs(Request(stages=("index_topk",), recorded=shapes)))
    with pytest.raises(ValueError, match="--heads: expected 2 KV heads, those of the recorded ids, got 64/4"):
        list(jobs(Request(stages=("sparse_attention",), heads=(Heads(64, 4),), recorded=shapes)))


def test_the_command_reads_the_file_before_it_looks_for_a_gpu(tmp_path, capsys):
    path = tmp_path / "ids.pt"
    assert main(["bench", "--ids", str(path)]) == 2 and f"there is no file {path}" in capsys.readouterr().err
    save_ids(path, [step([40], [900])])
    assert load_ids(path)[0].seq_lens == (900,)
    assert main(["bench", "index_topk", "--ids", str(path)]) == 2 and "expected stage sparse_attention" in capsys.readouterr().err
    assert main(["bench", "--ids", str(path), "--update-results"]) == 2 and "no --ids" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["bench", "--ids", str(path)]) == 2 and "needs an NVIDIA GPU" in capsys.readouterr().err
