"""A demo run as JSON, for `m3attn report`."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from typing import Any

import torch

from m3attn.bench import ceilings, results
from m3attn.bench.timing import CudaTimer
from m3attn.demo import queries
from m3attn.demo.model import Model
from m3attn.demo.plot import chosen_blocks
from m3attn.demo.record import Recorder, ids_text
from m3attn.demo.text import ByteText
from m3attn.report.runs import DEMO

MAX_ROWS = 256
CPU_COPY_BYTES = 1 << 26
CPU_MATMUL_SIZE = 1024


def export(recorder: Recorder, model: Model, content: bytes, *, name: str, text: str) -> dict[str, Any]:
    """Everything that a page shows of a run.

    Args:
        recorder, model: after the run.
        content: the text.
        name, text: of the device and of the text, for people.
    """
    stages = [
        {
            "stage": stage,
            "phase": phase,
            "implementation": tally.implementation,
            "calls": tally.calls,
            "us": tally.seconds / tally.calls * 1e6,
            "flops": tally.flops,
            "bytes": tally.bytes,
            "error": tally.error,
            "ids": ids_text(tally),
        }
        for (stage, phase), tally in recorder.tallies.items()
    ]
    interpreted = recorder.device.type == "cpu" and any("triton" in str(stage["implementation"]) for stage in stages)
    note = "On a CPU the Triton kernels run in Triton's interpreter, whose time says nothing about a GPU."
    passages = ByteText(content, model.geometry.block_size)
    return {
        "kind": DEMO,
        "device": name,
        "facts": {
            "model": f"{model.geometry}; random weights",
            "mode": recorder.formats.mode,
            "text": f"{text}, {model.geometry.tokens} bytes as tokens",
            **about_library(),
        },
        "notes": [note] if interpreted else [],
        "stages": stages,
        "roof": measure_roof(recorder.device),
        "selection": selection(torch.cat(model.last_ids, dim=1), model.geometry.num_pages, model.geometry.block_size) if model.last_ids else None,
        "passages": [queries.describe(found, passages) for found in queries.look(model, content)] if model.last_ids else [],
    }


def export_selection(ids: torch.Tensor, num_blocks: int, block_size: int, *, name: str, facts: dict[str, str], passages: list[str]) -> dict[str, Any]:
    """What a page shows of a selection alone, ids [Hkv, T, K], without times."""
    facts = facts | about_library()
    shown = selection(ids, num_blocks, block_size)
    return {"kind": DEMO, "device": name, "facts": facts, "notes": [], "stages": [], "roof": None, "selection": shown, "passages": passages}


def about_library() -> dict[str, str]:
    """Commit and versions, for a page's facts."""
    versions = ", ".join(f"{package} {version}" for package, version in results.versions().items())
    return {"commit": results.commit()[:12], "versions": versions}


def selection(ids: torch.Tensor, num_blocks: int, block_size: int) -> dict[str, Any]:
    """Choices as bytes a block and run of queries."""
    shares = (255 * chosen_blocks(ids.cpu(), num_blocks, MAX_ROWS)).round().to(torch.uint8)
    return {
        "panels": [base64.b64encode(bytes(panel.flatten().tolist())).decode() for panel in shares],
        "rows": shares.shape[1],
        "blocks": shares.shape[2],
        "tokens": ids.shape[1],
        "block_size": block_size,
    }


def measure_roof(device: torch.device) -> dict[str, Any]:
    """What the device does at most: a copy's bytes and the operations of large products, measured now."""
    if device.type == "cuda":
        found = ceilings.measure(device, CudaTimer(device, rep_ms=20.0))
        peaks = [("bf16 product", found.bf16_tflops)] + ([("fp8 product", found.fp8_tflops)] if found.fp8_tflops else [])
        return {"copy_tbps": found.copy_tbps, "peaks": peaks}
    source = torch.zeros(CPU_COPY_BYTES // 4)
    target = torch.empty_like(source)
    factor = torch.randn(CPU_MATMUL_SIZE, CPU_MATMUL_SIZE)
    copied, multiplied = _seconds(lambda: target.copy_(source)), _seconds(lambda: factor @ factor)
    return {"copy_tbps": 2 * CPU_COPY_BYTES / copied / 1e12, "peaks": [("fp32 product", 2 * CPU_MATMUL_SIZE**3 / multiplied / 1e12)]}


def _seconds(call: Callable[[], object]) -> float:
    """The fastest of three calls after one to warm up."""
    call()
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)
