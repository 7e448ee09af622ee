"""Dense attention by FlashAttention-4's CuTe kernels: an optional package (`flash-attn-4`) behind the key `flash_attn_4`."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch

from m3attn.calls import DenseAttentionCall
from m3attn.dsl_kernels.common.cache import VariantNotReady
from m3attn.problem import Problem, arch_number, arch_of
from m3attn.registry import BrokenImplementation
from m3attn.workspace import WorkShape, carve

PACKAGE, RELEASE = "flash-attn-4", "4.0.0b36"
"""The release whose forward function is called below; it takes output buffers only under a private name, which another release may change."""
PAGE_SIZE = 128
ALIGNMENT = 16


@cache
def installed() -> str | None:
    """The release that is installed."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def reasons(problem: Problem) -> Sequence[str]:
    """What capabilities cannot say: which release, and groups of query heads that its tiles of queries hold whole."""
    found = []
    if installed() != RELEASE:
        found.append(f"needs the package {PACKAGE} {RELEASE}, {'which is not installed' if installed() is None else f'{installed()} is installed'}")
    if problem.group_size & (problem.group_size - 1):
        found.append(f"group size {problem.group_size}: takes powers of two")
    return found


def workspace_bytes(shape: WorkShape) -> int:
    """Lengths and which are 0, offsets and pages, and the LSE with heads first: at most 4 bytes each.

    Raises:
        UnsupportedProblem: more than the limit.
    """
    pages = 1 + shape.num_requests * (-(-shape.max_seqlen_k // PAGE_SIZE) + 1)
    counts = (shape.num_requests, shape.num_requests, shape.num_requests + 1, pages, shape.num_q_heads * shape.tokens)
    needed = sum(-(-4 * count // 256) * 256 for count in counts)
    if needed > shape.limit:
        raise _unsupported(
            f"workspace: flash_attn_4 needs {needed} bytes for {shape.tokens} tokens, {shape.num_requests} requests and {shape.max_seqlen_k} keys, "
            f"more than the limit of {shape.limit}; m3attn.set_workspace_limit raises it, and triton takes less"
        )
    return needed


def _unsupported(message: str) -> Exception:
    from m3attn.choice import UnsupportedProblem  # which imports the table of implementations, and that this module

    return UnsupportedProblem(message)


def dense_attention(call: DenseAttentionCall) -> None:
    """Fill `call.out` and `call.lse`.

    Raises:
        UnsupportedProblem: q, out, K or V whose rows do not start at multiples of 16 bytes; nothing has been launched or copied then.
        VariantNotReady: under capture, for a kernel that has not run before.
        BrokenImplementation: the package cannot be imported.
    """
    for name, tensor in (("q", call.q), ("cache.k", call.k), ("cache.v", call.v), ("out", call.out)):
        _check_alignment(name, tensor)
    tokens, heads, _ = call.q.shape
    if tokens == 0:
        return
    assert call.workspace is not None
    batch, device, num_pages = call.batch, call.q.device, call.k.shape[0]
    columns = min(batch.page_table.shape[1], -(-batch.max_seqlen_k // PAGE_SIZE))
    lengths, at = carve(call.workspace, 0, (batch.num_requests,), torch.int32)
    is_empty, at = carve(call.workspace, at, (batch.num_requests,), torch.bool)
    offsets, at = carve(call.workspace, at, (batch.num_requests + 1,), torch.int32)
    # Where queries see nothing the kernel loads the pages before and at the start of the request's row all the same, and NaN in them would reach
    # the output: so these name a page that is not there, of which the hardware loads zeros.
    words, at = carve(call.workspace, at, (1 + batch.num_requests * (columns + 1),), torch.int32)
    table = words[1:].view(batch.num_requests, columns + 1)[:, :columns]
    lse = None
    if call.lse is not None:
        lse = carve(call.workspace, at, (heads, tokens), torch.float32)[0].fill_(float("-inf"))
    # The kernel writes no rows behind the last request, of which T may have any number.
    call.out.zero_()
    if batch.num_requests and columns and num_pages:
        longest = min(batch.max_seqlen_k, columns * PAGE_SIZE)
        torch.clamp(batch.seq_lens, min=0, max=longest, out=lengths)
        torch.clamp(batch.cu_seqlens_q, min=0, max=tokens, out=offsets)
        words.fill_(num_pages)
        torch.clamp(batch.page_table[:, :columns], min=0, max=num_pages - 1, out=table)
        torch.eq(lengths, 0, out=is_empty)
        table[:, 0].masked_fill_(is_empty, num_pages)
        forward = _forward()
        on_device = torch.cuda.device(device) if device.type == "cuda" and device.index != torch.cuda.current_device() else nullcontext()
        with on_device, _compiled_kernels_only(forward) if _is_capturing(device) else nullcontext():
            forward(
                call.q,
                call.k.transpose(1, 2),
                call.v.transpose(1, 2),
                cu_seqlens_q=offsets,
                seqused_k=lengths,
                max_seqlen_q=batch.max_seqlen_q,
                max_seqlen_k=longest,
                page_table=table,
                softmax_scale=call.sm_scale,
                causal=True,
                out=call.out,
                lse=lse,
                _arch=arch_number(arch_of(device)),
            )
    if call.lse is not None and lse is not None:
        call.lse.copy_(lse.t())


def _check_alignment(name: str, tensor: torch.Tensor) -> None:
    """The package would copy what it cannot read in place, a whole pool among it."""
    step = ALIGNMENT // tensor.element_size()
    if tensor.data_ptr() % ALIGNMENT or any(stride % step for stride in tensor.stride()[:-1]):
        raise _unsupported(
            f"{name}: expected rows that start at multiples of {ALIGNMENT} bytes for flash_attn_4, got strides {tensor.stride()} "
            f"from {tensor.data_ptr() % ALIGNMENT} bytes past one; triton takes any"
        )


def _forward() -> Callable[..., Any]:
    try:
        from flash_attn.cute.interface import _flash_attn_fwd
    except Exception as error:  # it imports cutlass, quack and more, each of which may be absent or fail
        raise BrokenImplementation(f"flash_attn_4: {PACKAGE} cannot be imported: {type(error).__name__}: {error}") from error
    return _flash_attn_fwd


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class _CompiledKernels:
    """The package's compiled kernels under capture, when asking for another one is an error."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def __contains__(self, key: object) -> bool:
        if key not in self._kernels:
            raise VariantNotReady(
                f"flash_attn_4: the kernel for {key} is not in memory, and nothing compiles or reads files under CUDA-graph capture: "
                "run the same call once before capturing, or m3attn.warmup(...)"
            )
        return True

    def __getitem__(self, key: Any) -> Any:
        return self._kernels[key]


@contextmanager
def _compiled_kernels_only(forward: Any) -> Iterator[None]:
    kernels = forward.compile_cache
    forward.compile_cache = _CompiledKernels(kernels)
    try:
        yield
    finally:
        forward.compile_cache = kernels
