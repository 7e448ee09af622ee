"""`m3attn bench`: implementations and public peers side by side on named shapes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

NAME = "bench"
HELP = """Time registered implementations on named shapes.

Each implementation is first checked against the fp64 reference on sampled rows of that very shape; one that fails is not timed.
Prefill is timed with a cold L2, decode and verify as the replay of a CUDA graph over data that L2 cannot hold. Sparse MLA is timed with a cold L2
as the replay of a CUDA graph of one call: its figures, the peers' too, are the GPU's and not the host's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="stages, or `step` for index_topk and sparse_attention together; none: all")
    parser.add_argument(
        "--shapes",
        nargs="+",
        metavar="SHAPE",
        help="P1 P2 P3 prod verify decode, B64xL32768 (decode), 8192x131072 (new tokens x tokens), or sizes; default: the stage's own",
    )
    parser.add_argument("--heads", nargs="+", metavar="Hq/Hkv", help="default 64/4 (M3 at TP4 is 16/1, at TP8 8/1); 128/1 and 64/1 for sparse MLA")
    parser.add_argument("--mode", nargs="+", default=["bf16"], metavar="MODE", help="bf16 fp16 widen fp8 fp8_pv (default bf16)")
    parser.add_argument("--selection", nargs="+", choices=("N", "R"), help="block selections of sparse_attention: N correlated, R random")
    parser.add_argument("--ids", type=Path, metavar="FILE", help="time sparse_attention on the ids that m3attn.analysis.record kept there")
    parser.add_argument("--impl", nargs="+", metavar="KEY", help="implementations; default: every one but reference")
    parser.add_argument("--rule", default="topk", help="selection rule of stage index_topk (default topk, M3's own)")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="folder with vLLM's Triton kernels and FlashMLA, timed in the same run")
    parser.add_argument("--rep-ms", type=float, default=100.0, help="GPU milliseconds of repetitions a figure (default 100)")
    parser.add_argument(
        "--sample-rows", type=int, default=64, help="rows checked against the reference (default 64; an eighth of it in each step of a grid)"
    )
    parser.add_argument("--quick", action="store_true", help="a fifth of the repetitions and a quarter of the checked rows")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the rows there, after each one")
    parser.add_argument("--update-results", nargs="?", type=Path, const=Path(), metavar="DIR", help="merge the rows into DIR (default: results/)")
    parser.add_argument("--tune", metavar="STAGE", help="instead: time every launch setting the kernels list as candidates, on the same shapes")


def run(options: argparse.Namespace) -> int:
    import torch

    from m3attn.bench import results
    from m3attn.bench.report import table
    from m3attn.bench.run import run as run_bench
    from m3attn.bench.tune import table as tune_table
    from m3attn.cli.errors import UserError

    request = request_of(options)
    if not torch.cuda.is_available():
        raise UserError("needs an NVIDIA GPU, and torch sees none here (torch.cuda.is_available() is False)")
    rows: list[dict[str, Any]] = []
    folder = results.default_folder() if options.update_results == Path() else options.update_results

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        print(
            f"{row['stage']} {row['heads']} {row['shape']} {row['mode']} {row['implementation']}: {row['median_us']} us", file=sys.stderr, flush=True
        )
        if options.json is not None:
            results.write(options.json, rows)
        if folder is not None and not options.tune:
            results.update(folder, [row])  # at once: a run that a time limit ends has kept what it measured

    session = session_of(options, keep)
    with torch.no_grad():
        failures = run_bench(request, session)
    if options.json is not None:
        results.write(options.json, rows)
    if options.tune:
        print(tune_table(rows) if rows else "nothing was timed")
        return 0 if rows else 1
    if folder is not None and rows:
        for path in results.update(folder, rows, session.ceilings):
            print(f"wrote {path}", file=sys.stderr)
    print(table(rows) if rows else "nothing was timed")
    return 1 if failures or not rows else 0


def request_of(options: argparse.Namespace) -> Any:
    """The run that the options ask for, every name checked. Raises UserError."""
    from m3attn.analysis.ids_file import load_ids
    from m3attn.bench import recorded
    from m3attn.bench.run import Request, jobs
    from m3attn.bench.shapes import Heads
    from m3attn.bench.stages import TIMED_BY_DEFAULT
    from m3attn.choice import parse_choice
    from m3attn.cli.errors import UserError

    sample_rows = options.sample_rows // 4 if options.quick else options.sample_rows
    try:
        request = Request(
            stages=(options.tune,) if options.tune else tuple(options.stages or (("sparse_attention",) if options.ids else TIMED_BY_DEFAULT)),
            shapes=tuple(options.shapes) if options.shapes else None,
            heads=tuple(Heads.parse(h) for h in options.heads) if options.heads else None,
            modes=tuple(options.mode),
            selections=tuple(options.selection) if options.selection else None,
            implementations=tuple(options.impl) if options.impl else None,
            sample_rows=max(2, sample_rows),
            grid_sample_rows=max(2, sample_rows // 8),
            rule=options.rule,
            recorded=tuple(recorded.shapes(load_ids(options.ids))) if options.ids else (),
        )
        for key in request.implementations or ():
            parse_choice(key)
        if (request.rule != "topk" or request.recorded) and options.update_results is not None:
            raise ValueError("--update-results: expected rule topk and no --ids, since result files hold named shapes and M3's own selection only")
        if not list(jobs(request)):
            raise ValueError(f"nothing to time: {', '.join(request.stages)} has none of the modes {', '.join(request.modes)}")
    except FileNotFoundError as error:
        raise UserError(f"--ids: there is no file {options.ids}") from error
    except ValueError as error:
        raise UserError(str(error)) from error
    return request


def session_of(options: argparse.Namespace, keep: Any) -> Any:
    """The GPU at hand with its ceilings, the peers, and the facts every row carries."""
    import torch

    from m3attn.bench import ceilings, results
    from m3attn.bench.peers import Peers
    from m3attn.bench.run import Session
    from m3attn.bench.stream import StreamTimer
    from m3attn.bench.timing import CudaTimer
    from m3attn.cli.errors import UserError

    def remark(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    peers = None
    if options.peers is not None:
        try:
            peers = Peers.load(options.peers)
        except FileNotFoundError as error:
            raise UserError(str(error)) from error
        for missing in peers.missing:
            remark(f"--peers: left out {missing}")
    device = torch.device("cuda", torch.cuda.current_device())
    timer = CudaTimer(device, rep_ms=options.rep_ms / 5 if options.quick else options.rep_ms)
    properties = torch.cuda.get_device_properties(device)
    measured = ceilings.measure(device, timer)
    remark(f"{properties.name}: {measured}")
    return Session(
        device=device,
        timer=timer,
        ceilings=measured,
        l2_bytes=properties.L2_cache_size,
        context={"commit": results.commit(), "gpu": properties.name, "versions": results.versions()},
        on_row=keep,
        on_remark=remark,
        peers=peers,
        stream=StreamTimer(device, timer, properties.L2_cache_size),
        tuning=bool(options.tune),
    )
