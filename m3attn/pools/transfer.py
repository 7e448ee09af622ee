"""Copies of pages: page ids as callers give them, the plain path and the kernel path, and a handle on a copy under way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from m3attn.checks import check_int
from m3attn.problem import arch_of
from m3attn.registry import interpreter_enabled

PageIds = Sequence[int] | torch.Tensor
BACKENDS = ("auto", "triton", "plain")
WARMUP_TOKENS = (1, 2, 16)
"""Triton compiles one variant for a number that is 1, one for multiples of 16, and one for all others."""


def resolve_backend(backend: str, device: torch.device) -> str:
    """`triton` or `plain`; auto takes Triton for a CUDA device.

    Raises:
        ValueError: another name.
        RuntimeError: triton on a CPU without the interpreter.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "auto":
        return "triton" if device.type == "cuda" else "plain"
    if backend == "triton" and arch_of(device) == "cpu" and not interpreter_enabled():
        raise RuntimeError("backend: triton on CPU tensors needs the interpreter: set TRITON_INTERPRET=1, or call m3attn.interpret() first")
    return backend


def check_page_ids(argument: str, ids: PageIds, num_pages: int) -> PageIds:
    """`ids` if it is a sequence of ints or a 1-d int32 or int64 tensor. Values are looked at where that needs no sync: on the host.

    Raises:
        TypeError, ValueError: another type or shape, or an id outside [0, num_pages), with its index.
    """
    if isinstance(ids, torch.Tensor):
        if ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{argument}: expected int32 or int64 page ids, got {ids.dtype}")
        if ids.dim() != 1:
            raise ValueError(f"{argument}: expected page ids of shape [N], got {list(ids.shape)}")
        if ids.device.type != "cpu":
            return ids
    elif not isinstance(ids, Sequence):
        raise TypeError(f"{argument}: expected a sequence of page ids or a tensor, got {type(ids).__name__}")
    for index, page in enumerate(host_list(ids)):
        check_int(f"{argument}[{index}]", page, 0, num_pages - 1)
    return ids


def check_page_pairs(first: str, first_ids: PageIds, second: str, second_ids: PageIds) -> None:
    """Raises ValueError for lists of different lengths."""
    if len(first_ids) != len(second_ids):
        raise ValueError(f"{second}: expected {len(first_ids)} page ids, one for each of {first}, got {len(second_ids)}")


def host_list(ids: PageIds) -> list[int]:
    """The ids as a list; a device tensor is read back, with a sync."""
    return ids.tolist() if isinstance(ids, torch.Tensor) else list(ids)


def as_tensor(ids: PageIds, device: torch.device) -> torch.Tensor:
    """The ids as a tensor on `device`, copied on the current stream without waiting for it; a tensor there already stays."""
    if not isinstance(ids, torch.Tensor):
        ids = torch.tensor(list(ids), dtype=torch.int64)
    if ids.device.type == "cpu" and device.type == "cuda":
        ids = ids.pin_memory()
    return ids.to(device, non_blocking=True)


def as_host_tensor(ids: PageIds) -> torch.Tensor:
    """A copy of the ids on the CPU, pinned if there is a GPU to read it; from a device, in order on the current stream, without a sync."""
    if not isinstance(ids, torch.Tensor):
        ids = torch.tensor(list(ids), dtype=torch.int64)
    copy = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=torch.cuda.is_available())
    return copy.copy_(ids, non_blocking=True)


def copy_plain(source: torch.Tensor, target: torch.Tensor, source_ids: PageIds, target_ids: PageIds) -> None:
    """target[:, target_ids[i]] = source[:, source_ids[i]] with copies of torch, [layers, pages, words] each; ids on a device are read back.

    On one device all pages of a layer are read before any is written, so pages may be both.

    Raises:
        ValueError: an id outside its pool.
    """
    sources, targets = host_list(source_ids), host_list(target_ids)
    check_page_ids("source_ids", sources, source.shape[1])
    check_page_ids("target_ids", targets, target.shape[1])
    if source.device == target.device:
        read, written = as_tensor(sources, source.device), as_tensor(targets, target.device)
        for source_layer, target_layer in zip(source, target, strict=True):
            target_layer[written] = source_layer[read]
        return
    dense = all(pool.stride(1) == pool.shape[2] for pool in (source, target))
    runs = list(_runs(sources, targets, longest=len(sources) if dense else 1))
    for source_layer, target_layer in zip(source, target, strict=True):
        for first, second, length in runs:
            target_layer[second : second + length].copy_(source_layer[first : first + length], non_blocking=True)


def _runs(sources: list[int], targets: list[int], *, longest: int) -> Iterator[tuple[int, int, int]]:
    """(first source, first target, length) of pairs that follow each other in both pools: each is one copy."""
    start = 0
    for end in range(1, len(sources) + 1):
        follows = end < len(sources) and sources[end] == sources[end - 1] + 1 and targets[end] == targets[end - 1] + 1
        if not follows or end - start == longest:
            yield sources[start], targets[start], end - start
            start = end


class Transfer:
    """A handle on copies between host and device. On a CPU they are done when it is returned.

    Compute that reads loaded pages, or writes over pages that were backed up, comes after `wait`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._layers: dict[int, torch.cuda.Event] = {}
        self._end: torch.cuda.Event | None = None
        self._kept: list[torch.Tensor] = []

    def wait(self, layer: int | None = None, stream: torch.cuda.Stream | None = None) -> None:
        """Make `stream` (None: the current one of the device) wait for `layer`, or for everything; the host does not wait.

        A layer has an event of its own if the transfer was made with `per_layer`; else this waits for everything.
        """
        event = self._layers.get(layer, self._end) if layer is not None else self._end
        if event is not None:
            event.wait(stream or torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        """Make the host wait until everything is copied."""
        if self._end is not None:
            self._end.synchronize()

    def is_done(self) -> bool:
        """Whether everything is copied; asks the device, does not wait."""
        return self._end is None or self._end.query()

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Hold a tensor that the copies read for as long as the transfer is under way; returns it."""
        self._kept.append(tensor)
        return tensor

    def record(self, stream: torch.cuda.Stream | None, layer: int | None = None) -> None:
        """Mark what has been put on `stream` so far as layer `layer`, or as everything."""
        if stream is None:
            return
        event = torch.cuda.Event()
        event.record(stream)
        if layer is None:
            self._end = event
        else:
            self._layers[layer] = event
