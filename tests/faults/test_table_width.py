"""Time must follow the live pages, not the width of the page table they stand in. Alone on its GPU: `pytest -m "gpu and slow"`, one process."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

import m3attn
from m3attn.batch import PagedBatch
from m3attn.testing.cases import AttentionCase, IndexCase, Step
from m3attn.testing.inputs import attention_inputs, index_inputs
from m3attn.testing.matrix import DEVICE, arch, gpu_only, skip_if_declined, stage_keys

pytestmark = [*gpu_only, pytest.mark.slow]

WIDTHS = (256, 257, 801, 4_097, 8_192)
STEPS = (Step("decode", (1,) * 16, (32_768,) * 16), Step("prefill", (2_048,), (32_768,)))
STAGES = stage_keys("sparse_attention", "dense_attention", "index_score", "index_topk", size="large", kernels_only=True)


def widened(batch: PagedBatch, width: int) -> PagedBatch:
    """The same pages in a wider table; what stands behind them is no page."""
    table = torch.full((batch.num_requests, width), 2**31 - 1, dtype=torch.int32, device=DEVICE)
    table[:, : batch.page_table.shape[1]] = batch.page_table
    return replace(batch, page_table=table)


def replay_ms(call: Callable[[], object]) -> Callable[[], float]:
    """Capture `call`; what comes back replays it and returns the time."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    return replay


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
@pytest.mark.parametrize(("stage", "key"), STAGES)
def test_time_does_not_depend_on_the_width(stage: str, key: str, step: Step) -> None:
    """B86: within 10% (and 2 us, for the launches) at 256 to 8,192 columns for 256 live pages."""
    function = partial(getattr(m3attn, stage), impl=key)
    if stage.endswith("attention"):
        case = AttentionCase(step, 64, 4, topk=16 if stage == "sparse_attention" else 0)
        skip_if_declined(stage, key, case.problem(arch()))
        inputs = attention_inputs(case, DEVICE)
        batches = {width: widened(inputs.batch, width) for width in WIDTHS}
        calls = {width: partial(function, *replace(inputs, batch=batch).arguments(), **inputs.options) for width, batch in batches.items()}
    else:
        case = IndexCase(step)
        skip_if_declined(stage, key, case.problem(arch()))
        given = index_inputs(case, DEVICE)
        options = given.selection if stage == "index_topk" else {}
        calls = {width: partial(function, given.index_q, given.cache, widened(given.batch, width), **options) for width in WIDTHS}
    replays = {width: replay_ms(call) for width, call in calls.items()}
    times = {width: min(replay() for _ in range(30)) for width, replay in replays.items()}
    fastest = min(times.values())
    assert max(times.values()) < 1.1 * fastest + 0.002, {width: f"{1e3 * time:.1f} us" for width, time in times.items()}
