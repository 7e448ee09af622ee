"""The demo from start to end: choose sizes and implementations, run the stack, show what happened."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import m3attn
from m3attn.bench import results
from m3attn.bench.shapes import Heads
from m3attn.choice import parse_choice
from m3attn.demo import export, plot, queries, text
from m3attn.demo import geometry as sizes
from m3attn.demo.geometry import Geometry
from m3attn.demo.model import FORMATS, Formats, Model
from m3attn.demo.record import Recorder
from m3attn.problem import Problem, arch_of
from m3attn.registry import BrokenImplementation, find
from m3attn.rules import find_rule

INTERPRETED_SAMPLE_ROWS = 32
SAMPLE_ROWS = 64


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for; None: the demo's own choice."""

    text: Path | None = None
    heads: Heads | None = None
    layers: int | None = None
    tokens: int | None = None
    impl: str | None = None
    rule: str = "topk"
    kv_cache_dtype: str = "auto"
    mode: str | None = None
    plot: Path | None = None
    json: Path | None = None
    real_geometry: bool = False
    seed: int = 0


def run(options: Options) -> int:
    """Run the demo and print it. Returns 0, or 1 if a result differs from the reference by more than its bound.

    Raises:
        ValueError: bad input, by name.
        m3attn.UnsupportedProblem: a named implementation cannot run this.
    """
    content = text.load(options.text)
    find_rule(options.rule)
    if options.impl is not None:
        parse_choice(options.impl)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    impl, chosen_because = choose_implementation(options.impl, device)
    geometry = choose_geometry(options, device).fit(len(content))
    formats = choose_formats(options, geometry, device)
    if options.plot is not None:
        check_plot(options.plot)
    check_json(options.json)
    print(f"m3attn demo on {device_name(device)}: {chosen_because}")
    size = f"{text.counted(len(content), 'byte')}; {text.counted(geometry.tokens, 'token')}, one a byte"
    print(f"{text_name(options.text)}: {size}; mode {formats.mode}, random weights")
    print(geometry)
    if device.type == "cpu":
        estimate = sizes.estimate_seconds(geometry, interpreted=impl is not None and "triton" in impl)
        print(f"estimated time on this CPU: about {sizes.duration(estimate * (1 if formats.mode == 'bf16' else 2))}")

    begin = time.perf_counter()
    with torch.no_grad(), nullcontext() if impl is None else m3attn.use(impl):
        baseline = None
        if formats.mode != "bf16":
            print("first in bf16, to compare with")
            baseline, _ = run_model(options, geometry, FORMATS["bf16", "bf16"], content, device, baseline=None, keep=True)
        recorder, model = run_model(options, geometry, formats, content, device, baseline=baseline, keep=False)
        print()
        print(recorder.table())
        print()
        print("error: root mean square against the fp64 reference, relative, worst call; ids: rows equal to the reference's, up to near ties")
        print()
        if model.last_ids:
            show_queries(model, content)
            if options.plot is not None:
                plot.draw(torch.cat(model.last_ids, dim=1), geometry.num_pages, geometry.block_size, options.plot)
                print(f"picture: {options.plot}")
    if options.json is not None:
        results.write(options.json, export.export(recorder, model, content, name=device_name(device), text=text_name(options.text)))
        print(f"run: {options.json}, for m3attn report")
    print(f"done in {sizes.duration(time.perf_counter() - begin)}")
    return verdict(recorder)


def choose_implementation(asked: str | None, device: torch.device) -> tuple[str | None, str]:
    """(choice for `m3attn.use` or None for auto, the reason). On a CPU Triton's interpreter is switched on where the choice needs it."""
    if device.type == "cuda":
        return asked, "implementations by auto" if asked is None else f"--impl {asked}"
    has_triton = importlib.util.find_spec("triton") is not None
    if asked is None and not has_triton:
        return None, "no GPU and no triton here, so the reference runs"
    if asked is None or ("triton" in asked and has_triton):
        m3attn.interpret()
        if (fault := interpreter_fault()) is not None:
            if asked is not None:
                raise ValueError(f"--impl {asked}: {fault}")
            return None, f"no GPU, so the reference runs: {fault}"
    return asked or "triton", f"--impl {asked}" if asked else "no GPU, so the Triton kernels run in Triton's interpreter, on small sizes"


def interpreter_fault() -> str | None:
    """Why the Triton kernels do not run in the interpreter here, if they do not."""
    implementation = find("index_score", "triton")
    assert implementation is not None
    try:
        implementation.load()
    except BrokenImplementation as error:
        return str(error)
    return None


def choose_geometry(options: Options, device: torch.device) -> Geometry:
    """The sizes for this machine, with what the options say replaced.

    Raises:
        ValueError: a count out of range, by name.
    """
    chosen = sizes.REAL if options.real_geometry and device.type == "cpu" else sizes.ON_GPU if device.type == "cuda" else sizes.ON_CPU
    if options.real_geometry:
        chosen = replace(chosen, hidden=sizes.REAL.hidden)
    if options.heads is not None:
        chosen = replace(chosen, heads=options.heads)
    if options.tokens is not None:
        if not 1 <= options.tokens <= 1 << 20:
            raise ValueError(f"--tokens: expected 1 to {1 << 20}, got {options.tokens}")
        chosen = replace(chosen, tokens=options.tokens)
    if options.layers is not None:
        if options.layers < 1:
            raise ValueError(f"--layers: expected at least 1, got {options.layers}")
        dense = min(chosen.dense_layers, options.layers - 1)
        chosen = replace(chosen, dense_layers=dense, sparse_layers=options.layers - dense)
    return chosen


def choose_formats(options: Options, geometry: Geometry, device: torch.device) -> Formats:
    """The mode that is asked for, or the one that follows from the KV cache's dtype.

    Raises:
        ValueError: a mode that no KV cache dtype given can have.
    """
    kv = options.kv_cache_dtype
    if options.mode is None:
        problem = Problem(
            arch="cpu" if device.type == "cpu" else arch_of(device),
            num_q_heads=geometry.heads.num_q,
            num_kv_heads=geometry.heads.num_kv,
            num_index_heads=geometry.heads.num_kv,
            page_size=geometry.block_size,
            block_size=geometry.block_size,
            topk=geometry.topk,
            q_dtype="bf16",
        )
        resolved = m3attn.resolve_attention_mode(problem, kv_cache_dtype=kv, page_size=geometry.block_size)
        return FORMATS[resolved.mode, resolved.kv_dtype]
    if kv == "auto":
        kv = "bf16" if options.mode == "bf16" else "fp8_e4m3"
    formats = FORMATS.get((options.mode, kv))
    if formats is None:
        fitting = ", ".join(cache for mode, cache in FORMATS if mode == options.mode)
        raise ValueError(f"--kv-cache-dtype: mode {options.mode} takes {fitting}, got {kv}")
    return formats


def check_plot(path: Path) -> None:
    """Before anything long runs: matplotlib is there and the picture's folder too."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot: needs matplotlib, which is not installed: pip install 'm3attn[demo]'")
    if not path.parent.is_dir():
        raise ValueError(f"--plot: there is no folder {path.parent}")
    if path.suffix.lower() not in (".png", ".svg", ".pdf", ".jpg"):
        raise ValueError(f"--plot: expected a .png, .svg, .pdf or .jpg file, got {path.name}")


def check_json(path: Path | None) -> None:
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"--json: there is no folder {path.parent}")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"


def text_name(path: Path | None) -> str:
    return "the text that ships with m3attn" if path is None else str(path)


def run_model(
    options: Options, geometry: Geometry, formats: Formats, content: bytes, device: torch.device, *, baseline: Recorder | None, keep: bool
) -> tuple[Recorder, Model]:
    """Prefill in chunks, then one token at a time."""
    rows = INTERPRETED_SAMPLE_ROWS if device.type == "cpu" else SAMPLE_ROWS
    because = "Triton's interpreter" if options.impl is None else f"--impl {options.impl}"
    recorder = Recorder(geometry, formats, device, sample_rows=rows, named_because=because, keep=keep, baseline=baseline)
    if device.type == "cuda":
        warm_up(options, geometry, formats, content, device)
    model = Model(geometry, formats, device, recorder, rule=options.rule, seed=options.seed)
    with progress(len(list(steps(geometry))) * len(model.layers)) as advance:
        for begin, end in steps(geometry):
            model.forward(content, begin, end, advance)
    return recorder, model


def warm_up(options: Options, geometry: Geometry, formats: Formats, content: bytes, device: torch.device) -> None:
    """Compile what the run will use, so that its times are those of the kernels."""
    model = Model(geometry, formats, device, Recorder(geometry, formats, device, sample_rows=0), rule=options.rule, seed=options.seed)
    for begin, end in steps(geometry):
        model.forward(content, begin, end)
    torch.cuda.synchronize(device)


def steps(geometry: Geometry) -> Iterator[tuple[int, int]]:
    """[begin, end) of each step: chunks of the prefill, then single tokens."""
    for begin in range(0, geometry.prefill_tokens, geometry.chunk):
        yield begin, min(begin + geometry.chunk, geometry.prefill_tokens)
    for begin in range(geometry.prefill_tokens, geometry.tokens):
        yield begin, begin + 1


@contextmanager
def progress(total: int) -> Iterator[Callable[[], Any]]:
    """A bar of `total` layer steps on stderr: tqdm's where it is installed, else a line that counts."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        done = 0

        def count() -> None:
            nonlocal done
            done += 1
            end = "\n" if done == total else ""
            print(f"\r{done} of {total} layer steps", end=end, file=sys.stderr, flush=True)

        yield count
        return
    with tqdm(total=total, unit="layer step", file=sys.stderr) as bar:
        yield lambda: bar.update(1)


def show_queries(model: Model, content: bytes) -> None:
    """Queries of the last layer with the text of their best blocks."""
    print("index queries and keys share one projection and the weights are random: a query scores blocks that resemble what it has just read")
    for selected in queries.look(model, content):
        print()
        print(queries.describe(selected, text.ByteText(content, model.geometry.block_size)))
    print()


def verdict(recorder: Recorder) -> int:
    """Print whether everything agrees with the reference; the exit code."""
    beyond = recorder.beyond_bound()
    if recorder.wrong_rows or beyond:
        print(f"NOT as the reference: {recorder.wrong_rows} rows of ids; errors beyond their bound in {', '.join(beyond) or 'no stage'}")
        return 1
    print("ids equal the reference's up to near ties, and errors are inside their bounds")
    return 0
