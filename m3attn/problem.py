"""`Problem`: what is asked of an implementation, as plain host values. Every `supports` takes one."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from m3attn import switches

PHASES = ("prefill", "decode", "verify")


@dataclass(frozen=True, slots=True)
class Problem:
    """One stage call, or one layer, without its tensors. A field that a stage has no use for keeps its default and is not judged.

    Attributes:
        arch: `sm_80`, `sm_90`, … (a trailing `a` or `f` is dropped), or `cpu`.
        num_q_heads, num_kv_heads, num_index_heads: head counts of this rank; 0 where the stage has none.
        head_dim, v_head_dim, index_dim: dims of queries and keys, of values (None = head_dim), of index heads.
        page_size, block_size, topk: tokens, positions, blocks.
        q_dtype, kv_dtype, index_q_dtype, index_dtype: names from `m3attn.dtypes`; `none` where the stage has none.
        sink, lse, fp8_pv, dynamic_scale: whether the call uses them.
        zero_on_alloc: what the cache declares (`LayerCache.zero_on_alloc`).
        phase: `prefill`, `decode` or `verify`.
    """

    arch: str
    num_q_heads: int = 0
    num_kv_heads: int = 0
    num_index_heads: int = 0
    head_dim: int = 128
    v_head_dim: int | None = None
    index_dim: int = 128
    page_size: int = 128
    block_size: int = 128
    topk: int = 16
    q_dtype: str = "none"
    kv_dtype: str = "none"
    index_q_dtype: str = "none"
    index_dtype: str = "none"
    sink: bool = False
    lse: bool = False
    fp8_pv: bool = False
    dynamic_scale: bool = False
    zero_on_alloc: bool = False
    phase: str = "prefill"

    @property
    def group_size(self) -> int:
        return self.num_q_heads // self.num_kv_heads if self.num_kv_heads else 0

    @property
    def mode(self) -> str:
        """The fp8 mode of the main branch: `bf16`, `fp16`, `fp32`, `widen`, `fp8` or `fp8_pv`; `none` for stages without one."""
        if self.kv_dtype == "none" or self.q_dtype == "none":
            return "none"
        if self.q_dtype == "fp8_e4m3":
            return "fp8_pv" if self.fp8_pv else "fp8"
        return "widen" if self.kv_dtype.startswith("fp8") else self.q_dtype


def normalise_arch(arch: str) -> str:
    """`sm_90a`, `sm90`, `9.0` -> `sm_90`; `cpu` stays. Raises ValueError naming the accepted forms."""
    text = arch.strip().lower()
    if text == "cpu":
        return text
    if match := re.fullmatch(r"(\d+)\.(\d)", text):
        return f"sm_{match[1]}{match[2]}"
    if match := re.fullmatch(r"sm_?(\d{2,3})[af]?", text):
        return f"sm_{match[1]}"
    raise ValueError(f"arch: expected cpu, or a form of sm_90 such as sm_90a or 9.0, got {arch!r}")


def arch_number(arch: str) -> int:
    """90 for `sm_90`; 0 for `cpu`.

    Raises:
        ValueError: the name of another kind of device, such as `meta` or `mps`.
    """
    number = arch.removeprefix("sm_")
    if arch != "cpu" and not number.isdigit():
        raise ValueError(f"device: expected tensors on an NVIDIA GPU or the CPU, got {arch}")
    return 0 if arch == "cpu" else int(number)


_DEVICE_ARCH: dict[torch.device, str] = {}
compile_target: str | None = None
"""Set while every device counts as this architecture: launches compile for it and run nothing (`triton_kernels.launch.compile_only`), or run on CPU
tensors in the interpreter of the tests."""


def arch_settings() -> tuple[str | None, str | None]:
    """What `arch_of` looks at beside the device."""
    return compile_target, switches.arch()


def arch_of(device: torch.device | None = None) -> str:
    """The architecture that selection works for: `M3ATTN_ARCH` if set, else that of `device` (default: the current GPU, or `cpu`).

    A CPU device stays `cpu`: the override lets a machine without a GPU ask and compile for one, not run kernels on CPU tensors.
    """
    if compile_target is not None:
        return compile_target
    if device is not None and device.type == "cpu":
        return "cpu"
    override = switches.arch()
    if override:
        return normalise_arch(override)
    if device is None:
        if not torch.cuda.is_available():
            return "cpu"
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type != "cuda":
        return device.type
    arch = _DEVICE_ARCH.get(device)
    if arch is None:
        major, minor = torch.cuda.get_device_capability(device)
        arch = _DEVICE_ARCH[device] = f"sm_{major}{minor}"
    return arch
