"""What the stage would hand over for the inputs of a case of sparse attention, for tests that call a kernel's own host function."""

from __future__ import annotations

import torch

from m3attn.calls import SparseAttentionCall
from m3attn.scales import Scale
from m3attn.testing.inputs import AttentionInputs


def call_of(inputs: AttentionInputs, *, sm_scale: float | None = None) -> SparseAttentionCall:
    k, v = inputs.cache.key_value()
    scales = inputs.cache.scales()
    assert inputs.ids is not None
    fp8_q = inputs.q.element_size() == 1
    return SparseAttentionCall(
        q=inputs.q,
        k=k,
        v=v,
        ids=inputs.ids,
        batch=inputs.batch,
        sm_scale=inputs.q.shape[2] ** -0.5 if sm_scale is None else sm_scale,
        q_scale=Scale.of(inputs.options["q_scale"], argument="q_scale"),
        k_scale=scales[0],
        v_scale=scales[1],
        sink_key=inputs.options["sink_key"],
        fp8_pv=inputs.options["fp8_pv"],
        out=torch.full_like(inputs.q, float("nan"), dtype=torch.bfloat16 if fp8_q else inputs.q.dtype),
        lse=torch.full(inputs.q.shape[:2], float("nan")),
        workspace=torch.full((256,), 0xFF, dtype=torch.uint8),
    )
