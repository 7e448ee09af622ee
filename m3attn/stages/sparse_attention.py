"""sparse_attention: exact softmax attention over the selected blocks of each query."""

from __future__ import annotations

from typing import Any

import torch

from m3attn import device_checks
from m3attn.batch import LayerCache, PagedBatch
from m3attn.calls import SparseAttentionCall
from m3attn.operators import define, nothing
from m3attn.scales import ScaleLike
from m3attn.stages.attention import COMMON, NUM_COMMON, check_attention, fake_outputs, flatten, lse_dtype, output_buffers, unflatten


def sparse_attention(
    q: torch.Tensor,
    cache: LayerCache,
    ids: torch.Tensor,
    batch: PagedBatch,
    *,
    sm_scale: float | None = None,
    q_scale: ScaleLike = None,
    sink_key: torch.Tensor | None = None,
    fp8_pv: bool = False,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    lse_out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """o[t, h] = softmax over the visible tokens of the blocks ids[h // G, t] of (q . k) * sm_scale, times v.

    A token j is visible to a query at position p if j <= p. Ids that are -1, out of range or beyond the query's own block are ignored
    wherever they stand; a repeated id is a caller's error (finite but unspecified). Softmax and accumulation are fp32. An empty row
    gives exactly 0 and LSE -inf. Prefill, decode and verify are the same function; the implementation picks its schedule from max_seqlen_q.

    Args:
        q: [T, Hq, D] bf16, fp16, fp32, or e4m3 over an e4m3 cache.
        cache: K and V, [pages, Hkv, page_size, D]; in q's dtype, or fp8 (16-bit q then reads it widened).
        ids: [Hkv, T, K] int32, any strides; ascending with -1 at the tail, as `select_blocks` writes them.
        batch: the step; `block_size % page_size == 0`.
        sm_scale: softmax scale; None: D ** -0.5.
        q_scale: scale of e4m3 q; logits are times q_scale * cache.k_scale, the output times cache.v_scale.
        sink_key: [Hq, D], 16 bit or fp32; one more logit q . sink_key * sm_scale * q_scale with value 0.
        fp8_pv: P and V too on fp8 tensor cores (about ten times the error).
        return_lse: also return the natural-log LSE, which never includes the sink.
        out, lse_out: [T, Hq, D] in q's dtype (bf16 for fp8 q) and [T, Hq] fp32 to write to.
        workspace: scratch of at least `m3attn.workspace_bytes("sparse_attention", ...)` bytes.
        impl: a registry key; None: the choice in force.

    Returns:
        out, or (out, lse) with return_lse or lse_out.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name.
        UnsupportedProblem: the named implementation cannot run this.
        NotImplementedError: an input requires grad and the implementation is forward only.
    """
    with_lse = return_lse or lse_out is not None
    if torch.compiler.is_compiling():
        flat = flatten(q, cache, batch, sm_scale, q_scale, sink_key, fp8_pv, impl)
        if out is None and lse_out is None and workspace is None:
            result, lse = _functional(*flat, ids, return_lse)
        else:
            result, lse = output_buffers(flat, out, lse_out, return_lse)
            _out(*flat, ids, result, lse, workspace)
        return (result, lse) if with_lse else result
    return _eager(
        q, cache, ids, batch, sm_scale, q_scale, sink_key, fp8_pv, impl, return_lse=return_lse, out=out, lse_out=lse_out, workspace=workspace
    )


def _eager(
    q: torch.Tensor,
    cache: LayerCache,
    ids: torch.Tensor,
    batch: PagedBatch,
    sm_scale: float | None,
    q_scale: ScaleLike,
    sink_key: torch.Tensor | None,
    fp8_pv: bool,
    impl: str | None,
    *,
    return_lse: bool,
    out: torch.Tensor | None,
    lse_out: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    checked = check_attention(
        q,
        cache,
        batch,
        sm_scale=sm_scale,
        q_scale=q_scale,
        sink_key=sink_key,
        fp8_pv=fp8_pv,
        return_lse=return_lse,
        out=out,
        lse_out=lse_out,
        has_workspace=workspace is not None,
        sparse=True,
        ids=ids,
    )
    device_checks.check_step(batch, q.shape[0], num_pages=checked.call["k"].shape[0])
    device_checks.check_ids(ids, batch.num_blocks)
    checked.call["ids"] = ids
    return checked.execute("sparse_attention", SparseAttentionCall, impl, workspace)


def _run_functional(*flat: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ids, return_lse = flat[NUM_COMMON:]
    result = _eager(ids=ids, return_lse=return_lse, out=None, lse_out=None, workspace=None, **unflatten(flat[:NUM_COMMON]))
    return result if isinstance(result, tuple) else (result, result.new_empty((0,), dtype=lse_dtype(result.dtype)))


def _run_out(*flat: Any) -> None:
    ids, out, lse_out, workspace = flat[NUM_COMMON:]
    _eager(ids=ids, return_lse=False, out=out, lse_out=lse_out, workspace=workspace, **unflatten(flat[:NUM_COMMON]))


def _fake(*flat: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return fake_outputs(flat, flat[NUM_COMMON + 1])


_functional = define("sparse_attention", f"({COMMON}, Tensor ids, bool return_lse) -> (Tensor, Tensor)", _run_functional, _fake)
_out = define(
    "sparse_attention_out",
    f"({COMMON}, Tensor ids, Tensor(a!) out, Tensor(b!)? lse_out, Tensor(c!)? workspace) -> ()",
    _run_out,
    nothing,
)
