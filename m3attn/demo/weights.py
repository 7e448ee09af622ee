"""`m3attn demo --weights`: what the first sparse layer of a real M3 selects on a text."""

from __future__ import annotations

import importlib.util
import time
from dataclasses import replace
from pathlib import Path

import torch

import m3attn
from m3attn.analysis import Recording, Selection, overlap, record
from m3attn.bench import results
from m3attn.demo import export, plot, queries, text
from m3attn.demo.checkpoint import Checkpoint, FirstLayers
from m3attn.demo.geometry import duration
from m3attn.demo.run import Options, check_json, check_plot, device_name, progress, text_name
from m3attn.layers.rope import rotary_table

DTYPE = torch.bfloat16
CHUNK = 2048
TOKENS_ON_CPU, TOKENS_ON_GPU = 4096, 32768


def run(folder: Path, options: Options, *, save_ids: Path | None = None) -> int:
    """Run the demo on the checkpoint in `folder` and print it. Returns 0.

    Raises:
        ValueError: bad input, by name.
        m3attn.UnsupportedProblem: a named implementation cannot run this.
    """
    content = text.load(options.text)
    if options.plot is not None:
        check_plot(options.plot)
    check_json(options.json)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if options.impl is not None and "triton" in options.impl and device.type == "cpu":
        m3attn.interpret()
    checkpoint = Checkpoint(folder)
    tokens, passages = tokenize(folder, content, checkpoint.config.block_size)
    limit = options.tokens or (TOKENS_ON_GPU if device.type == "cuda" else TOKENS_ON_CPU)
    tokens = tokens[:limit]
    layer = checkpoint.first_sparse
    print(f"m3attn demo on {device_name(device)}: layers 0 to {layer - 1} and the attention of layer {layer}, M3's first sparse one, of {folder}")
    print(f"{text_name(options.text)}: {text.counted(len(content), 'byte')}, of which {text.counted(len(tokens), 'token')} are read")

    begin = time.perf_counter()
    with torch.no_grad():
        recording, pages = run_layers(checkpoint, tokens, options, device)
    print(f"read {checkpoint.bytes_read / 1e9:.2f} GB and ran in {duration(time.perf_counter() - begin)}")
    print()
    numbers = summary(recording.layers[""], checkpoint.config.num_kv_heads)
    ids, scores = recording.ids(""), recording.scores("")
    shown = [queries.describe(queries.selected(position, ids, scores[0, position]), passages) for position in queries.shares(len(tokens))]
    print("\n\n".join(["\n".join(numbers), *shown]))
    if options.plot is not None:
        plot.draw(ids, pages, checkpoint.config.block_size, options.plot, title=f"Blocks chosen by each query, layer {layer}")
        print(f"picture: {options.plot}")
    if options.json is not None:
        facts = {"model": f"layer {layer} of {folder}", "text": f"{text_name(options.text)}, {len(tokens)} tokens", "selection": "; ".join(numbers)}
        name, size = device_name(device), checkpoint.config.block_size
        results.write(options.json, export.export_selection(ids, pages, size, name=name, facts=facts, passages=shown))
        print(f"run: {options.json}, for m3attn report")
    if save_ids is not None:
        replace(recording, layers={f"layers.{layer}": recording.layers[""]}).save(save_ids)
        print(f"ids: {save_ids}, for m3attn bench --ids")
    return 0


def tokenize(folder: Path, content: bytes, block_size: int) -> tuple[torch.Tensor, text.TokenText]:
    """The text's tokens by the checkpoint's own tokenizer, and where they stand in it.

    Raises:
        ValueError: no tokenizer, or a text without tokens.
    """
    if importlib.util.find_spec("tokenizers") is None:
        raise ValueError("--weights: needs tokenizers, which is not installed: pip install 'm3attn[hf]'")
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"--weights: expected {path.name} in {folder}, it is missing")
    decoded = content.decode("utf-8", errors="replace")
    encoded = Tokenizer.from_file(str(path)).encode(decoded, add_special_tokens=False)
    if not encoded.ids:
        raise ValueError("--text: expected a text with at least one token, got none")
    return torch.tensor(encoded.ids), text.TokenText(decoded, tuple(encoded.offsets), block_size)


def run_layers(checkpoint: Checkpoint, tokens: torch.Tensor, options: Options, device: torch.device) -> tuple[Recording, int]:
    """Prefill in chunks; what the sparse layer selected, and the pages of the text."""
    last = checkpoint.first_sparse
    config = replace(checkpoint.config, sparse_layers=checkpoint.config.sparse_layers[: last + 1])
    size, length = config.block_size, len(tokens)
    with progress(last + 1) as advance:
        model = FirstLayers(
            checkpoint,
            rule=options.rule,
            on_layer=advance,
            kv_cache_dtype=options.kv_cache_dtype,
            implementation=options.impl,
            page_size=size,
            cos_sin=rotary_table(length, config.rotary_dim, config.rope_theta, device=device),
            dtype=DTYPE,
            device=device,
        )
    mode, pages = model.sparse.mode, -(-length // size)
    pool = m3attn.PagedKVPool(
        config, num_pages=pages, page_size=size, kv_cache_dtype=mode.kv_dtype, index_cache_dtype=mode.index_dtype, device=device, zero_on_alloc=True
    )
    caches = [pool.layer(number) for number in range(last + 1)]
    chunk = min(CHUNK, length)
    plan = m3attn.StepPlan.for_layers(model.layers, caches, length, prefill=m3attn.PlanCapacity(1, chunk, chunk))
    table = [pool.alloc(pages)]
    embedded = checkpoint.embeddings(tokens).to(device, DTYPE)
    with record(model.sparse, mass=True, error=True) as recording, progress(-(-length // chunk)) as advance:
        for start in range(0, length, chunk):
            end = min(start + chunk, length)
            plan.update([end - start], [end], table)
            model(embedded[start:end], plan, caches)
            advance()
    return recording, pages


def summary(steps: list[Selection], groups: int) -> list[str]:
    """What was selected, in numbers, over the queries that must leave blocks out."""
    size, topk = steps[0].block_size, steps[0].ids.shape[2]
    position, ids = torch.cat([s.positions for s in steps]), torch.cat([s.ids for s in steps], dim=1)
    mass, error = (torch.cat([getattr(s, name) for s in steps]) for name in ("mass", "error"))
    rows = position >= topk * size
    if not bool(rows.any()):
        return [f"every query sees at most {topk} blocks of {size} and keeps all of them: a text of more than {topk * size} tokens shows a choice"]
    visible = (position[rows] // size + 1).float()
    shared = [overlap(ids[a : a + 1, rows], ids[b : b + 1, rows]).mean().item() for a in range(groups) for b in range(a)]
    lines = [f"{int(rows.sum())} queries see more than {topk} blocks of {size}; of what they see they read {100 * (topk / visible).mean():.0f}%"]
    by_group = mass[rows].unflatten(1, (groups, -1)).mean(dim=(0, 2)).tolist()
    lines.append(f"attention mass in the chosen blocks: {', '.join(f'{m:.3f}' for m in by_group)} (by KV group)")
    lines.append(f"output against dense attention: relative error {error[rows].mean():.3f} on average")
    if shared:
        lines.append(f"overlap of two KV groups' blocks: {sum(shared) / len(shared):.2f} on average")
    return lines
