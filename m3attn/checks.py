"""Checks of what the host can see, before anything is launched. Every message names the argument, what was expected and what came."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from m3attn.batch import LayerCache, PagedBatch

MAX_BLOCKS = 32_768
MAX_TOPK = 128
BLOCK_SIZES = (16, 32, 64, 128, 256)


def check_tensor(
    argument: str,
    tensor: object,
    shape: Sequence[int | str],
    dtypes: Iterable[torch.dtype] | None = None,
    device: torch.device | None = None,
    *,
    unit_last_stride: bool = True,
) -> torch.Tensor:
    """`tensor` itself if it has this shape (a string stands for any size), a dtype among `dtypes`, and lies on `device`.

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: another shape, device or last stride.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{argument}: expected a tensor, got {type(tensor).__name__}")
    got = tensor.shape
    if len(got) != len(shape) or any(want != n for want, n in zip(shape, got, strict=True) if not isinstance(want, str)):
        raise ValueError(f"{argument}: expected shape [{', '.join(map(str, shape))}], got {list(got)}")
    if dtypes is not None and tensor.dtype not in dtypes:
        raise TypeError(f"{argument}: expected {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{argument}: expected a tensor on {device}, got one on {tensor.device}")
    if unit_last_stride and got and got[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{argument}: expected unit stride in the last dimension, got strides {tensor.stride()}")
    return tensor


def check_int(argument: str, value: object, low: int, high: int | None = None) -> int:
    """`value` if it is an int within [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{argument}: expected an int, got {type(value).__name__}")
    if value < low or (high is not None and value > high):
        limit = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise ValueError(f"{argument}: expected an int {limit}, got {value}")
    return value


def check_batch(batch: object, device: torch.device, *, sparse: bool) -> PagedBatch:
    """A batch whose tensors and host bounds fit together and lie on `device`; device values are not looked at."""
    if not isinstance(batch, PagedBatch):
        raise TypeError(f"batch: expected a PagedBatch, got {type(batch).__name__}")
    requests = check_tensor("batch.seq_lens", batch.seq_lens, ["B"], [torch.int32], device).shape[0]
    check_tensor("batch.page_table", batch.page_table, [requests, "max_pages"], [torch.int32], device)
    check_tensor("batch.cu_seqlens_q", batch.cu_seqlens_q, [requests + 1], [torch.int32], device)
    check_int("batch.max_seqlen_q", batch.max_seqlen_q, 0)
    check_int("batch.max_seqlen_k", batch.max_seqlen_k, 0)
    check_int("batch.page_size", batch.page_size, 1)
    check_int("batch.block_size", batch.block_size, 1)
    if sparse:
        if batch.block_size not in BLOCK_SIZES:
            raise ValueError(f"batch.block_size: expected one of {', '.join(map(str, BLOCK_SIZES))}, got {batch.block_size}")
        if batch.block_size % batch.page_size:
            raise ValueError(
                f"batch.page_size: expected a divisor of block_size {batch.block_size} (a block is a whole number of pages), got {batch.page_size}"
            )
        if batch.num_blocks > MAX_BLOCKS:
            raise ValueError(f"batch.max_seqlen_k: expected at most {MAX_BLOCKS} blocks of {batch.block_size}, got {batch.num_blocks} blocks")
    return batch


def check_key_value(cache: object, batch: PagedBatch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a cache, [pages, Hkv, page_size, D], checked against the batch's page size."""
    if not isinstance(cache, LayerCache):
        raise TypeError(f"cache: expected a LayerCache, got {type(cache).__name__}")
    key, value = cache.key_value()
    for name, tensor in (("cache.k", key), ("cache.v", value)):
        check_tensor(name, tensor, ["pages", "Hkv", batch.page_size, "D"], None, device)
    return key, value


def check_index_key(cache: object, batch: PagedBatch, device: torch.device) -> torch.Tensor:
    """The index keys of a cache, [pages, page_size, Di]."""
    if not isinstance(cache, LayerCache):
        raise TypeError(f"cache: expected a LayerCache, got {type(cache).__name__}")
    return check_tensor("cache.index_k", cache.index_key(), ["pages", batch.page_size, "Di"], None, device)


def check_no_grad(implementation_key: str, tensors: Iterable[torch.Tensor | None]) -> None:
    """Kernels are forward only: refuse inputs that want gradients, except for the reference."""
    if implementation_key == "reference" or not torch.is_grad_enabled():
        return
    if any(t is not None and t.requires_grad for t in tensors):
        raise NotImplementedError(
            f"{implementation_key} is forward only and an input requires grad: call under torch.no_grad(), or pass impl='reference'"
        )


def _byte_rows(tensor: torch.Tensor) -> tuple[int, int, int]:
    """(first byte, bytes from one row's start to the end of its elements, bytes from the first byte to the last row's end)."""
    size = tensor.element_size()
    inner = sum((n - 1) * abs(s) for n, s in zip(tensor.shape[1:], tensor.stride()[1:], strict=True)) + 1
    rows = (tensor.shape[0] - 1) * abs(tensor.stride(0)) if tensor.dim() else 0
    return tensor.data_ptr(), inner * size, (rows + inner) * size


def overlaps(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share a byte. Exact for views with one row stride in common (slices of a packed row), else by their extents."""
    if a.numel() == 0 or b.numel() == 0 or a.device != b.device:
        return False
    start_a, row_a, extent_a = _byte_rows(a)
    start_b, row_b, extent_b = _byte_rows(b)
    if start_a + extent_a <= start_b or start_b + extent_b <= start_a:
        return False
    if a.dim() and b.dim():
        stride = abs(a.stride(0)) * a.element_size()
        if stride and stride == abs(b.stride(0)) * b.element_size() and row_a <= stride and row_b <= stride:
            gap = (start_b - start_a) % stride
            return gap < row_a or gap + row_b > stride
    return True


def check_outputs(outputs: dict[str, torch.Tensor | None], inputs: dict[str, torch.Tensor | None]) -> None:
    """Outputs overlap neither the inputs nor one another. Raises ValueError naming both."""
    present = [(name, t) for name, t in outputs.items() if t is not None]
    for i, (name, tensor) in enumerate(present):
        for other_name, other in [*inputs.items(), *present[i + 1 :]]:
            if other is not None and overlaps(tensor, other):
                raise ValueError(f"{name}: expected a buffer of its own, got one that overlaps {other_name}")
