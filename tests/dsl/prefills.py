"""Sparse prefill of either architecture in the interpreter, for the tests of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from attention_calls import call_of
from simulator import ORDERS, simulated

from m3attn.calls import SparseAttentionCall
from m3attn.dsl_kernels import sparse_attention_sm90, sparse_attention_sm100, sparse_prefill_sm90, sparse_prefill_sm100
from m3attn.testing.bounds import AttentionBound, attention_bound, product_error
from m3attn.testing.cases import AttentionCase, Step
from m3attn.testing.inputs import AttentionInputs
from m3attn.testing.poison import poisoned_empty

RAGGED = Step("ragged", (20, 0, 37, 18), (300, 0, 37, 530), padded_rows=9, slack=130, slack_q=3)
LONG = Step("long", (24,), (1500,))
BASE = AttentionCase(RAGGED, 16, 1)


@dataclass(frozen=True)
class Prefill:
    """The prefill kernel of an architecture, and the stage that takes it."""

    arch: str
    stage: ModuleType
    kernel: ModuleType

    def tile_tokens(self, group: int) -> int:
        return sparse_prefill_sm90.tile_tokens(group, 16) if self.arch == "sm_90" else 2 * sparse_prefill_sm100.half_tokens(group, 16)

    def attend(self, call: SparseAttentionCall, order: str, edit: Callable[[str], str] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        call = replace(call, out=call.out.clone(), lse=None if call.lse is None else call.lse.clone())
        with simulated(order, arch=f"{self.arch}a", seed=3, edit=edit), poisoned_empty():
            self.stage.sparse_attention(call)
        assert call.lse is not None
        return call.out, call.lse

    def bound(self, inputs: AttentionInputs, sm_scale: float | None = None) -> AttentionBound:
        error = product_error(f"cute_{self.arch.replace('_', '')}", self.arch, inputs.q.dtype, inputs.cache.key_value()[0].dtype)
        return attention_bound(inputs.q, inputs.cache, inputs.batch, inputs.ids, sm_scale=sm_scale, **inputs.options, error_of_products=error)

    def check(self, inputs: AttentionInputs, *, sm_scale: float | None = None, call: SparseAttentionCall | None = None) -> None:
        """Every order within the bound, and the same bits in all."""
        call = call_of(inputs, sm_scale=sm_scale) if call is None else call
        results = [self.attend(call, order) for order in ORDERS]
        for out, lse in results[1:]:
            assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])
        self.bound(inputs, sm_scale).check(*results[0])


SM90 = Prefill("sm_90", sparse_attention_sm90, sparse_prefill_sm90)
SM100 = Prefill("sm_100", sparse_attention_sm100, sparse_prefill_sm100)
