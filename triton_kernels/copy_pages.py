"""Copy whole pages of every layer from one pool to another, on the device or between it and pinned host memory, in one launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from m3attn.triton_kernels.launch import cdiv, current_arch, launch, next_power_of_2

MMA_ROWS: dict[str, str | int | None] = {"copy_pages_kernel": None}


@dataclass(frozen=True, slots=True)
class Setting:
    """Bytes of a page that a program copies, and its warps."""

    tile_bytes: int
    num_warps: int


SETTINGS: dict[str, Setting] = {"any": Setting(2048, 1)}
"""By architecture; `any` where no measurement says otherwise."""
CANDIDATES = [Setting(nbytes, warps) for nbytes in (2048, 4096, 8192, 16384, 32768) for warps in (1, 2, 4, 8) if nbytes >= 1024 * warps]
settings_override: Setting | None = None
"""Set by a tuner to force one setting."""


@triton.jit
def copy_pages_kernel(
    source_ptr,  # [layers, source_pages, words]
    target_ptr,  # [layers, target_pages, words]
    source_ids_ptr,  # [pages to copy]
    target_ids_ptr,  # [pages to copy]
    source_strides,  # (layer, page)
    target_strides,  # (layer, page)
    source_ids_stride,
    target_ids_stride,
    source_pages,
    target_pages,
    num_words,
    BLOCK: tl.constexpr,
):
    """A page id outside its pool copies nothing."""
    pair = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    source_page = tl.load(source_ids_ptr + pair * source_ids_stride).to(tl.int64)
    target_page = tl.load(target_ids_ptr + pair * target_ids_stride).to(tl.int64)
    if (source_page >= 0) & (source_page < source_pages) & (target_page >= 0) & (target_page < target_pages):
        offs = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
        source = source_ptr + layer * source_strides[0] + source_page * source_strides[1]
        target = target_ptr + layer * target_strides[0] + target_page * target_strides[1]
        # Nothing reads a page again soon enough to keep it in L2.
        words = tl.load(source + offs, mask=offs < num_words, eviction_policy="evict_first")  # [BLOCK]
        tl.store(target + offs, words, mask=offs < num_words, eviction_policy="evict_first")


def copy_pages(source: torch.Tensor, target: torch.Tensor, source_ids: torch.Tensor, target_ids: torch.Tensor, *, device: torch.device) -> None:
    """target[:, target_ids[i]] = source[:, source_ids[i]] for every i, on the current stream of `device`; nothing is read back.

    Args:
        source: [layers, source_pages, words] of an integer type, words contiguous; on `device` or pinned.
        target: [layers, target_pages, words] likewise. No page is both read and written.
        source_ids, target_ids: [N] int32 or int64, any stride, on `device` or pinned; a pair with an id outside its pool copies nothing.
        device: where the copy runs.
    """
    layers, source_pages, num_words = source.shape
    setting = settings_override or SETTINGS.get(current_arch(device)) or SETTINGS["any"]
    block = min(next_power_of_2(num_words), setting.tile_bytes // source.element_size())
    launch(
        copy_pages_kernel,
        (source_ids.shape[0], cdiv(num_words, block), layers),
        source,
        target,
        source_ids,
        target_ids,
        source.stride()[:2],
        target.stride()[:2],
        source_ids.stride(0),
        target_ids.stride(0),
        source_pages,
        target.shape[1],
        num_words,
        device=device,
        num_warps=setting.num_warps,
        num_stages=1,
        BLOCK=block,
    )
