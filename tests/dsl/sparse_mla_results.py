"""What results of sparse MLA from the interpreter have to be, for tests that run a case in several orders."""

from __future__ import annotations

from typing import Any

import torch

from m3attn.testing.bounds import product_error
from m3attn.testing.mla import COSINE_DISTANCE, MODES, OTHER_COSINE_DISTANCE, SparseMlaInputs, check_sparse_mla

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def check_orders(inputs: SparseMlaInputs, mode: str, results: list[Results], **options: Any) -> None:
    """The same bits in all, and within the bound of `cute_sm90`."""
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))
    q_dtype, kv_dtype, _ = MODES[mode]
    check_sparse_mla(
        inputs.q,
        inputs.kv,
        inputs.indices,
        results[0],
        error_of_products=product_error("cute_sm90", "sm_90", q_dtype, kv_dtype),
        cosine_distance=COSINE_DISTANCE.get(mode, OTHER_COSINE_DISTANCE),
        **options,
    )
