"""What the host does in eager calls, on CPU tensors that count as a GPU's: kernels are compiled for sm_90, and the last step launches nothing.

`calls` prints, for each stage, how many functions one call enters, Python's and C's. `launches` compares what a launch of known arguments passes to
the compiled kernel with what Triton passes. A process of its own, without the interpreter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver

import m3attn
from m3attn import problem
from m3attn.testing.cases import AttentionCase, IndexCase, Step
from m3attn.testing.inputs import attention_inputs, index_inputs
from m3attn.triton_kernels import launch as launching

Launcher = Callable[..., None]


@contextmanager
def counted_as_gpu(launcher: Launcher) -> Iterator[None]:
    """CPU tensors are an sm_90's, and `launcher` stands where a compiled kernel is launched."""
    previous = driver._active
    driver.set_active(launching._CompileOnlyDriver(GPUTarget("cuda", 90, 32)))
    with (
        mock.patch.object(problem, "compile_target", "sm_90"),
        mock.patch.object(CompiledKernel, "run", property(lambda self: lambda *arguments: launcher(self, *arguments))),
        mock.patch.object(CompiledKernel, "_init_handles", lambda self: None),
        mock.patch.object(torch.cuda, "current_device", lambda: None),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        mock.patch.object(launching, "_ready", {}),
    ):
        yield
    driver._active = previous


def stage_calls(skip: set[str]) -> dict[str, Callable[[], Any]]:
    """Decode steps with a workspace and outputs of the caller, as a plan has them."""
    step = Step("decode", (1,) * 16, (3000,) * 16, page_size=128, block_size=128)
    attention = attention_inputs(AttentionCase(step, 64, 4, 128, topk=16, mode="bf16"), "cpu")
    index = index_inputs(IndexCase(step, 4, 128, topk=16), "cpu")
    workspace, out = torch.empty(1 << 24, dtype=torch.uint8), torch.empty_like(attention.q)
    ids = torch.empty_like(attention.ids)
    qkv, slots = torch.zeros(16, 77 * 128, dtype=torch.bfloat16), torch.arange(16)
    weights, table = [torch.zeros(128)] * 4, torch.zeros(4096, 64)
    packed = m3attn.LayerCache(kv=torch.zeros(8, 4, 128, 256, dtype=torch.bfloat16), index_k=torch.zeros(8, 128, 128, dtype=torch.bfloat16))
    q_out, index_q_out = torch.empty(16, 64, 128, dtype=torch.bfloat16), torch.empty(16, 4, 128, dtype=torch.bfloat16)
    latent = [torch.zeros(n, h, 576).to(torch.float8_e4m3fn) for n, h in ((4, 128), (64, 1))]
    picks = torch.zeros(4, 1, 512, dtype=torch.int32)  # in parts that a second kernel joins
    x, stored = torch.zeros(64, 4096, dtype=torch.bfloat16), torch.empty(64, 4096, dtype=torch.float8_e4m3fn)

    def attend(impl: str) -> Callable[[], Any]:
        return lambda: m3attn.sparse_attention(*attention.arguments(), **attention.options, out=out, workspace=workspace, impl=impl)

    calls = {
        "index_topk, triton": lambda: m3attn.index_topk(
            index.index_q, index.cache, index.batch, **index.selection, out=ids, workspace=workspace, impl="triton"
        ),
        "sparse_attention, triton": attend("triton"),
        "sparse_attention, cute_sm90": attend("cute_sm90"),
        "sparse_mla_prefill, cute_sm90": lambda: m3attn.sparse_mla_prefill(*latent, picks, sm_scale=0.04, impl="cute_sm90"),
        "quantize_fp8, triton": lambda: m3attn.quantize_fp8(x, scale=0.5, out=stored, impl="triton"),
        "qk_norm_rope_insert, triton": lambda: m3attn.qk_norm_rope_insert(
            qkv, weights, slots, table, packed, slots, slots, heads=(64, 4, 4), q_out=q_out, index_q_out=index_q_out, impl="triton"
        ),
    }
    return {name: call for name, call in calls.items() if name.split(", ")[1] not in skip}


def functions_entered(call: Callable[[], Any]) -> int:
    """Functions that one call enters once everything is remembered."""
    for _ in range(3):
        call()
    entered = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal entered
        entered += event in ("call", "c_call")

    sys.setprofile(count)
    call()
    sys.setprofile(None)
    return entered


def print_calls() -> None:
    try:
        from m3attn.dsl_kernels.common.kernels import CuteKernel
    except ImportError:
        skip, cute = {"cute_sm90"}, None
    else:
        from m3attn.dsl_kernels import sparse_mla_sm90

        skip, cute = set(), mock.patch.object(CuteKernel, "for_arch", lambda self, variant, arch: lambda *arguments: None)
        mock.patch.object(sparse_mla_sm90, "num_sms", lambda device: 132).start()
    with counted_as_gpu(lambda *_: None):
        if cute is not None:
            cute.start()
        for name, call in stage_calls(skip).items():
            print(f"{name}: {functions_entered(call)}")


class Pair(NamedTuple):
    tensor: Any
    number: Any


@triton.jit
def add_kernel(x_ptr, pair, strides, factor, n, SIZE: tl.constexpr, WIDE: tl.constexpr = False):
    offs = tl.arange(0, SIZE)
    x = tl.load(x_ptr + offs * strides[0], mask=offs < n, other=0.0).to(tl.float32) * factor + pair.number
    if WIDE:
        x += 1.0
    if pair.tensor is not None:
        tl.store(pair.tensor + offs * strides[1], x, mask=offs < n)


def as_passed(argument: Any) -> Any:
    """What a launcher makes of an argument: of a tensor its address."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    return tuple(map(as_passed, argument)) if isinstance(argument, tuple) else argument


def compare_launches() -> None:
    """Launches in pairs, the first by Triton, the second from memory: both must pass the same, and to the kernel that Triton finds for them alone."""
    seen: list[tuple[Any, ...]] = []

    def record(compiled: Any, *arguments: Any) -> None:
        grid, stream, function, metadata, _, _, _, *rest = (arguments[:3], *arguments[3:])
        seen.append((compiled, grid, stream, function, metadata, [as_passed(argument) for argument in rest]))

    x, y, half = torch.zeros(256), torch.zeros(256), torch.zeros(256, dtype=torch.bfloat16)
    base: dict[str, Any] = dict(x=x, pair=Pair(y, 2), strides=(1, 1), factor=2.0, n=64, SIZE=64, num_warps=1)
    pairs = [Pair(y[1:], 2), Pair(half, 2), Pair(None, 2), Pair(y, 1), Pair(y, 2.0)]
    changes: list[dict[str, Any]] = [
        {},
        *({"x": other} for other in (half, x[1:], torch.nn.Parameter(x))),
        *({"pair": pair} for pair in pairs),
        *({"strides": strides} for strides in ((2, 1), (16, 16))),
        *({"factor": factor} for factor in (2, 1, 1.0)),
        *({"n": n} for n in (63, 80, 1, True, (1 << 31) - 1, 1 << 31, 1 << 40, 1 << 63, -16, -7)),
        {"SIZE": 128},
        {"num_warps": 2},
        {"WIDE": True},
    ]

    def launch(x: Any, pair: Any, strides: Any, factor: Any, n: Any, num_warps: int, **meta: Any) -> None:
        launching.launch(add_kernel, (3, 2), x, pair, strides, factor, n, device=torch.device("cpu"), num_warps=num_warps, num_stages=1, **meta)

    with counted_as_gpu(record):
        for change in changes:  # in one memory, where one may be taken for another
            launch(**(base | change))
            launch(**(base | change))
        kernels = {id(launch[0]) for launch in seen}
        assert len(kernels) <= len(launching._ready) <= len(kernels) + 4, "a launch that was not kept, or numbers of one kind apart"
        together, seen[:] = list(seen), []
        for change in changes:
            launching._ready.clear()
            launch(**(base | change))
        for change, first, second, alone in zip(changes, together[::2], together[1::2], seen, strict=True):
            for got in (first, second):
                assert got[0] is alone[0], f"{change}: another kernel"
                assert got[1:5] == alone[1:5] and len(got[5]) == len(alone[5]), change
                assert all(a is b or (type(a) is type(b) and a == b) for a, b in zip(got[5], alone[5], strict=True)), change
        with_hook = mock.Mock()
        triton.knobs.runtime.launch_enter_hook.add(with_hook)
        seen.clear()
        with mock.patch.object(launching, "_dispatch") as dispatch:
            launch(**base)
        assert dispatch.called and not seen, "a profiler's hook was not told"
        triton.knobs.runtime.launch_enter_hook.remove(with_hook)
    print(f"{len(changes)} launches")


if __name__ == "__main__":
    {"calls": print_calls, "launches": compare_launches}[sys.argv[1]]()
