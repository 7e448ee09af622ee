"""`warmup`: compile the kernels of a geometry before anything is captured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from m3attn.batch import DECODE_MAX_SEQLEN_Q, LayerCache, PagedBatch
from m3attn.dtypes import is_fp8, torch_dtype
from m3attn.modes import AttentionMode
from m3attn.problem import PHASES
from m3attn.stages.dense_attention import dense_attention
from m3attn.stages.index_topk import index_topk
from m3attn.stages.merge_attention_states import merge_attention_states
from m3attn.stages.qk_norm_rope_insert import HeadCounts, NormWeights, qk_norm_rope_insert
from m3attn.stages.sparse_attention import sparse_attention

QUERIES = {"decode": 1, "verify": DECODE_MAX_SEQLEN_Q, "prefill": 4 * DECODE_MAX_SEQLEN_Q}


class Pool(Protocol):
    def warmup(self) -> None: ...


def warmup(
    heads: Sequence[int] = (64, 4, 4),
    *,
    mode: AttentionMode | None = None,
    num_requests: Sequence[int] = (1,),
    max_seqlen_k: int = 4096,
    topk: int = 16,
    block_size: int = 128,
    page_size: int = 128,
    rotary_dim: int = 64,
    phases: Sequence[str] = PHASES,
    device: torch.device | str | None = None,
    impl: str | None = None,
    pools: Sequence[Pool] = (),
) -> None:
    """Run every stage of an M3 layer once a phase and batch size on tiny random inputs, so that their kernels are compiled and loaded.

    A Triton variant also depends on the layout of the tensors (which strides are multiples of 16); a captured step whose tensors are laid out
    unlike the contiguous ones used here is warmed up by running that step once. A CuTe DSL variant of decode depends on the number of requests and
    on `max_seqlen_k`; the command `m3attn warmup` compiles the usual ones on any machine, for this function to load.

    Args:
        heads: (Hq, Hkv, Hi) of this rank; Hi 0 for dense layers only.
        mode: a resolved mode, whose implementations run; None: bf16 throughout, by the choice in force.
        num_requests: batch sizes to warm up.
        max_seqlen_k: the host bound that steps will be captured with.
        topk, block_size, page_size, rotary_dim: as in the layers.
        phases: among `prefill`, `decode`, `verify`.
        device: None: the current GPU.
        impl: a registry key; None: the mode's, else the choice in force.
        pools: pools (`PagedKVPool`, `HostKVPool`, `LatentKVPool`) whose own kernels (sets, copies of pages) are to be compiled too.

    Raises:
        RuntimeError: no GPU.
    """
    counts = HeadCounts(*heads)
    where = torch.device(device if device is not None else "cuda")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("warmup: expected a GPU, there is none; `m3attn warmup --arch sm_90a` compiles the CuTe DSL kernels for another machine's")
    q_dtype, kv_dtype = ("bf16", "bf16") if mode is None else (mode.q_dtype, mode.kv_dtype)
    index_q_dtype, index_dtype = ("bf16", "bf16") if mode is None else (mode.index_q_dtype, mode.index_dtype)
    own = torch.bfloat16 if q_dtype.startswith("fp8") else torch_dtype(q_dtype)
    for pool in pools:
        pool.warmup()

    def impl_of(stage: str, phase: str) -> str | None:
        return impl if impl is not None or mode is None else mode.implementations.get(f"{stage}/{phase}")

    def buffer(*shape: int, dtype: str) -> torch.Tensor:
        return torch.zeros(shape, device=where).to(torch_dtype(dtype))

    for requests in num_requests:
        pages = requests * (-(-QUERIES["prefill"] // page_size))
        table = torch.arange(pages, dtype=torch.int32, device=where).view(requests, -1)
        cache = LayerCache(
            k=buffer(pages, counts.kv, page_size, 128, dtype=kv_dtype),
            v=buffer(pages, counts.kv, page_size, 128, dtype=kv_dtype),
            index_k=buffer(pages, page_size, 128, dtype=index_dtype) if counts.index else None,
            zero_on_alloc=mode is not None,  # the mode's implementations were chosen with what its layers' caches declare
        )
        for phase in phases:
            tokens = requests * QUERIES[phase]
            batch = PagedBatch(
                page_table=table,
                seq_lens=torch.full((requests,), QUERIES[phase], dtype=torch.int32, device=where),
                cu_seqlens_q=torch.arange(requests + 1, dtype=torch.int32, device=where) * QUERIES[phase],
                max_seqlen_q=QUERIES[phase],
                max_seqlen_k=max_seqlen_k,
                page_size=page_size,
                block_size=block_size,
            )
            qkv = torch.zeros(tokens, counts.row_width, dtype=own, device=where)
            weight = torch.zeros(128, dtype=own, device=where)
            q_out = buffer(tokens, counts.q, 128, dtype=q_dtype) if is_fp8(torch_dtype(q_dtype)) else None
            index_q_out = buffer(tokens, counts.index, 128, dtype=index_q_dtype) if is_fp8(torch_dtype(index_q_dtype)) and counts.index else None
            slots = torch.arange(tokens, device=where)
            q, index_q = qk_norm_rope_insert(
                qkv,
                NormWeights(weight, weight, weight, weight),
                slots,
                torch.zeros(tokens, rotary_dim, device=where),
                cache,
                slots,
                slots if counts.index else None,
                heads=counts,
                q_out=q_out,
                index_q_out=index_q_out,
                impl=impl,
            )
            if index_q is not None:
                ids = index_topk(index_q, cache, batch, topk=topk, impl=impl_of("index_topk", phase))
                sparse_attention(q, cache, ids, batch, impl=impl_of("sparse_attention", phase))
            out, lse = dense_attention(q, cache, batch, return_lse=True, impl=impl_of("dense_attention", phase))
            merge_attention_states(out, lse, out, lse, impl=impl)
