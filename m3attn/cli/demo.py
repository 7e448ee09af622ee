"""`m3attn demo`: M3's attention on a real text."""

from __future__ import annotations

import argparse
from pathlib import Path

NAME = "demo"
DEFAULTS = {"rule": "topk", "kv_cache_dtype": "auto", "real_geometry": False, "seed": 0}  # of the other options: None
HELP = "Run a stack of M3 attention layers with random weights over the bytes of a text, and show what ran and what was selected."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", type=Path, metavar="FILE", help="its bytes are the tokens (default: a text that ships with m3attn)")
    parser.add_argument("--heads", metavar="Hq/Hkv", help="default 64/4 on a GPU, 4/1 on a CPU")
    parser.add_argument("--layers", type=int, metavar="N", help="layers in all, the first dense and the rest sparse (default 3 on a GPU, 2 on a CPU)")
    parser.add_argument("--tokens", type=int, metavar="N", help="bytes of the text to use (default 32768 on a GPU, 1024 on a CPU)")
    parser.add_argument("--impl", metavar="CHOICE", help="a key, or stage=key pairs joined by commas (default: auto; Triton's interpreter on a CPU)")
    parser.add_argument("--rule", default="topk", help="the selection rule (default topk, M3's own)")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "fp8_e4m3", "fp8_e5m2"), help="dtype of the K and V cache")
    parser.add_argument("--mode", choices=("bf16", "widen", "fp8", "fp8_pv"), help="default: what follows from the cache's dtype")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="write a picture of the blocks each query chose")
    parser.add_argument("--json", type=Path, metavar="RUN.json", help="write the run there, for m3attn report")
    parser.add_argument("--real-geometry", action="store_true", help="M3's own numbers on a CPU too; says first how long that will take")
    parser.add_argument(
        "--weights", type=Path, metavar="DIR", help="layers up to the first sparse one of this M3 checkpoint, in place of random weights"
    )
    parser.add_argument("--save-ids", type=Path, metavar="FILE", help="with --weights: keep the chosen ids for m3attn bench --ids")
    parser.add_argument("--mla", action="store_true", help="a layer of multi-head latent attention instead, in bf16 and in fp8")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")


def run(options: argparse.Namespace) -> int:
    import m3attn
    from m3attn.bench.shapes import Heads
    from m3attn.cli.errors import UserError
    from m3attn.demo.mla import run as run_mla
    from m3attn.demo.run import Options
    from m3attn.demo.run import run as run_demo
    from m3attn.demo.weights import run as run_weights

    try:
        if options.mla:
            refuse(options, "--mla", ("heads", "layers", "rule", "kv_cache_dtype", "mode", "plot", "json", "weights", "save_ids"))
            return run_mla(path=options.text, tokens=options.tokens, impl=options.impl, real_geometry=options.real_geometry, seed=options.seed)
        asked = Options(
            text=options.text,
            heads=Heads.parse(options.heads) if options.heads else None,
            layers=options.layers,
            tokens=options.tokens,
            impl=options.impl,
            rule=options.rule,
            kv_cache_dtype=options.kv_cache_dtype,
            mode=options.mode,
            plot=options.plot,
            json=options.json,
            real_geometry=options.real_geometry,
            seed=options.seed,
        )
        if options.weights is not None:
            refuse(options, "--weights", ("heads", "layers", "mode", "real_geometry", "seed"))
            return run_weights(options.weights, asked, save_ids=options.save_ids)
        if options.save_ids is not None:
            raise ValueError("--save-ids: expected --weights DIR beside it, got none")
        return run_demo(asked)
    except (ValueError, m3attn.UnsupportedProblem) as error:
        message = str(error)
        raise UserError(message if options.impl is None else message.replace("(use(...))", f"(--impl {options.impl})")) from error


def refuse(options: argparse.Namespace, beside: str, names: tuple[str, ...]) -> None:
    """Raise ValueError for an option of these that was given and has no meaning beside another one."""
    for name in names:
        value = getattr(options, name)
        if value != DEFAULTS.get(name):
            raise ValueError(f"--{name.replace('_', '-')}: expected nothing with {beside}, got {value}")
