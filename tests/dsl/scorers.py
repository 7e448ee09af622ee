"""Index scores of either architecture in the interpreter, for the tests of both."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from simulator import simulated

from m3attn.calls import IndexScoreCall
from m3attn.dsl_kernels import index_score_sm90, index_score_sm100
from m3attn.scales import UNIT
from m3attn.testing.bounds import assert_within, score_bound
from m3attn.testing.cases import Step
from m3attn.testing.inputs import IndexInputs

RAGGED = Step("ragged", (70, 40, 0, 17), (1100, 300, 5, 9), padded_rows=2, slack=200)
VERIFY = Step("verify", (16, 3, 0, 8), (900, 1300, 5, 9), padded_rows=1)


@dataclass(frozen=True)
class Scorer:
    """The scoring kernel of an architecture."""

    module: ModuleType
    arch: str

    def score(self, call: IndexScoreCall, order: str = "eager", **device: object) -> torch.Tensor:
        with simulated(order, arch=self.arch, **device):
            self.module.index_score(call)
        return call.out

    def run(self, inputs: IndexInputs, order: str = "eager", **device: object) -> torch.Tensor:
        return self.score(call_for(inputs), order, **device)


SM90 = Scorer(index_score_sm90, "sm_90a")
SM100 = Scorer(index_score_sm100, "sm_100a")


def call_for(inputs: IndexInputs, out: torch.Tensor | None = None) -> IndexScoreCall:
    tokens, heads, _ = inputs.index_q.shape
    if out is None:
        out = torch.full((heads, tokens, inputs.batch.num_blocks), float("nan"))
    return IndexScoreCall(inputs.index_q, inputs.cache.index_key(), inputs.batch, UNIT, UNIT, out)


def check(inputs: IndexInputs, scores: torch.Tensor) -> None:
    exact, tolerance = score_bound(inputs.index_q, inputs.cache, inputs.batch)
    assert_within(scores, exact, tolerance)
