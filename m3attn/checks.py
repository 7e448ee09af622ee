"""Checks of what the host can see, before anything is launched. Every message names the argument, what was expected and what came."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar, TypeVarTuple

import torch

from m3attn.batch import LayerCache, PagedBatch

MAX_BLOCKS = 32_768
MAX_TOPK = 128
BLOCK_SIZES = (16, 32, 64, 128, 256)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


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
    fits = len(got) == len(shape)
    for want, n in zip(shape, got, strict=fits):
        fits = fits and (want == n or isinstance(want, str))
    if not fits:
        raise ValueError(f"{argument}: expected shape [{', '.join(map(str, shape))}], got {list(got)}")
    if dtypes is not None and tensor.dtype not in dtypes:
        raise TypeError(f"{argument}: expected {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{argument}: expected a tensor on {device}, got one on {tensor.device}")
    if unit_last_stride and got and got[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{argument}: expected unit stride in the last dimension, got strides {tensor.stride()}")
    return tensor


_NUMBERS_AND_NAMES = frozenset((int, float, bool, str, torch.dtype))


def _looks(values: Iterable[Any]) -> list[Any]:
    """All that a check may look at: of a tensor its layout, dtype and device; of a batch or cache that of its tensors, and its numbers and names."""
    return [
        None
        if value is None
        else (value.shape, value.stride(), value.dtype, value.device)
        if (kind := value.__class__) is torch.Tensor
        else (kind, value)
        if kind in _NUMBERS_AND_NAMES
        else _other_look(value, kind)
        for value in values
    ]


def _other_look(value: Any, kind: type) -> tuple[Any, ...]:
    if kind is PagedBatch:
        tensors = (value.page_table, value.seq_lens, value.cu_seqlens_q)
        return (kind, *_looks((*tensors, value.max_seqlen_q, value.max_seqlen_k, value.page_size, value.block_size)))
    if kind is LayerCache:
        return (kind, value.kv_dtype, value.index_dtype, value.zero_on_alloc, *_looks((value.kv, value.k, value.v, value.index_k)))
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return (kind, *_looks(value)) if isinstance(value, tuple) else (kind, value)


def once_per_look(check: Callable[[*Ts], T]) -> Callable[[*Ts], T]:
    """`check`, which raises or gives what follows from its arguments, all by position, run once for all arguments that look the same.

    It must depend on its arguments alone: of tensors on shape, strides, dtype and device, of caches on no scale. An address, an element, or a setting
    that it reads elsewhere would count as it was at the first call.
    """
    accepted: dict[tuple[Any, ...], T] = {}

    def checked(*args: *Ts) -> T:
        try:
            look = tuple(_looks(args))
            found = accepted.get(look)
        except TypeError:  # an argument that cannot be a key, which the check will refuse
            return check(*args)
        if found is None:
            found = check(*args)
            if len(accepted) >= 4096:
                accepted.clear()
            accepted[look] = found
        return found

    return checked


def check_int(argument: str, value: object, low: int, high: int | None = None) -> int:
    """`value` if it is an int within [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{argument}: expected an int, got {type(value).__name__}")
    if value < low or (high is not None and value > high):
        limit = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise ValueError(f"{argument}: expected an int {limit}, got {value}")
    return value


def check_number(argument: str, value: object) -> float:
    """`value` as a float if it is a finite host number; a tensor would have to be read back from the device."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{argument}: expected a float, got {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{argument}: expected a finite number, got {value}")
    return float(value)


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
        if tensor.dim() == 4 and tensor.shape[2] != batch.page_size:
            raise ValueError(f"batch.page_size: expected {tensor.shape[2]}, the tokens of a page of {name}, got {batch.page_size}")
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
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            raise NotImplementedError(
                f"{implementation_key} is forward only and an input requires grad: call under torch.no_grad(), or pass impl='reference'"
            )


def _byte_dims(size: int, shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """(byte stride, length) of each dimension of elements of `size` bytes, down to the single byte, largest stride first."""
    dims = [(stride * size, n) for stride, n in zip(strides, shape, strict=True) if n > 1 and stride]
    return sorted([*dims, (1, size)], reverse=True)


def _share_a_byte(gap: int, a: list[tuple[int, int]], b: list[tuple[int, int]]) -> bool:
    """Whether some byte of `a` is a byte of `b`, which starts `gap` bytes later: by the largest stride, then within."""
    extent_a, extent_b = (sum(stride * (n - 1) for stride, n in dims) for dims in (a, b))
    if gap > extent_a or -gap > extent_b:
        return False
    if not a and not b:
        return True
    largest = max(dims[0][0] for dims in (a, b) if dims)
    inner_a, steps_a = (a[1:], a[0][1] - 1) if a and a[0][0] == largest else (a, 0)
    inner_b, steps_b = (b[1:], b[0][1] - 1) if b and b[0][0] == largest else (b, 0)
    extent_a, extent_b = extent_a - largest * steps_a, extent_b - largest * steps_b
    first = max(-steps_a, -((gap + extent_b) // largest))  # step of b minus step of a
    last = min(steps_b, (extent_a - gap) // largest)
    return any(_share_a_byte(gap + largest * step, inner_a, inner_b) for step in range(first, last + 1))


Layout = tuple[int, torch.Size, tuple[int, ...]]
"""Bytes of an element, shape, strides."""


@lru_cache(maxsize=4096)
def _layouts_overlap(gap: int, a: Layout, b: Layout) -> bool:
    """Whether tensors of these layouts share a byte, if `b` starts `gap` bytes after `a`; remembered, because a step's buffers come again."""
    return _share_a_byte(gap, _byte_dims(*a), _byte_dims(*b))


def overlaps(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share a byte, exactly: K and V of one packed cache do not, however their bytes interleave."""
    if a.numel() == 0 or b.numel() == 0 or a.device != b.device:
        return False
    gap = b.data_ptr() - a.data_ptr()
    return _layouts_overlap(gap, (a.element_size(), a.shape, a.stride()), (b.element_size(), b.shape, b.stride()))


Memory = list[tuple[str, torch.Tensor, int, int]]
"""An argument's name, its tensor, and the first address and the bytes of the tensor's storage."""


def memory_of(tensors: Mapping[str, torch.Tensor | None]) -> Memory:
    """Where those of the tensors lie that there are."""
    return [
        (name, tensor, storage.data_ptr(), storage.nbytes())
        for name, tensor in tensors.items()
        if tensor is not None
        for storage in (tensor.untyped_storage(),)
    ]


def check_memory(outputs: Memory, inputs: Memory) -> None:
    """Outputs overlap neither the inputs nor one another nor themselves. Raises ValueError naming both."""
    for i, (name, tensor, start, nbytes) in enumerate(outputs, 1):
        if 0 in tensor.stride() and any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(f"{name}: expected a buffer with a place for each element, got an expanded one (strides {tensor.stride()})")
        for other_name, other, other_start, other_nbytes in (*inputs, *outputs[i:]):
            # Storages that lie apart, as most do, need no closer look.
            if start < other_start + other_nbytes and other_start < start + nbytes and overlaps(tensor, other):
                raise ValueError(f"{name}: expected a buffer of its own, got one that overlaps {other_name}")


def check_outputs(outputs: Mapping[str, torch.Tensor | None], inputs: Mapping[str, torch.Tensor | None]) -> None:
    """`check_memory` of tensors by name."""
    if present := memory_of(outputs):
        check_memory(present, memory_of(inputs))
