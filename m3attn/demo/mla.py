"""The demo's other attention: one layer of multi-head latent attention over the same text, with DeepSeek-V3's dims, in bf16 and in fp8.

Weights are random. Each step of the prefill runs densely, its own tokens causally and the prefix in chunks that are merged, and then sparsely:
every query takes the tokens with the best index scores, and attends to their latent rows in the cache. In fp8 the latent cache, q, k, v and both
products are e4m3; what that costs is measured against the bf16 run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

import m3attn
from m3attn.bench import parity
from m3attn.bench.report import aligned, us
from m3attn.demo import text
from m3attn.demo.geometry import duration
from m3attn.demo.model import DTYPE, SUFFIXES, TABLE, suffix_hash
from m3attn.demo.run import choose_implementation, device_name, progress, text_name
from m3attn.dtypes import E4M3
from m3attn.layers.rope import rotary_table
from m3attn.reference import mla_prefill, mla_sparse
from m3attn.reference.mla_quantize import join_heads, rope

NOPE, ROPE, VALUE, LATENT, INDEX = 128, 64, 128, 512, 128
ROPE_THETA = 1e4
SAMPLE_ROWS = 16
SHOWN_QUERIES = 3
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Geometry:
    """Query heads, width of the residual stream, tokens in all and a step, and tokens that a sparse query keeps."""

    heads: int
    hidden: int
    tokens: int
    chunk: int
    topk: int
    page_size: int = 64

    def __str__(self) -> str:
        dims = f"{self.heads} heads, keys of {NOPE} + {ROPE}, values of {VALUE}, latent {LATENT}"
        return f"{dims}, hidden {self.hidden}; {text.counted(self.tokens, 'token')} prefilled by {self.chunk}, sparse queries keep {self.topk}"


ON_CPU = Geometry(heads=2, hidden=128, tokens=128, chunk=64, topk=32, page_size=16)
ON_GPU = Geometry(heads=128, hidden=2048, tokens=8192, chunk=2048, topk=2048)
REAL = Geometry(heads=128, hidden=7168, tokens=512, chunk=256, topk=256)


@dataclass(slots=True)
class Tally:
    calls: int = 0
    seconds: float = 0.0
    error: float | None = None
    baseline_error: float | None = None
    implementation: str = ""
    what: str = ""


@dataclass(slots=True)
class Log:
    """What each stage took, how far it is from fp64 on its own inputs, and how far from the bf16 run."""

    device: torch.device
    fp8: bool
    baseline: Log | None = None
    tallies: dict[str, Tally] = field(default_factory=dict)
    kept: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)

    def run(self, stage: str, call: Callable[[], R], what: str = "") -> R:
        if stage not in self.tallies:
            self.tallies[stage] = Tally(implementation=self._implementation(stage), what=what)
        tally = self.tallies[stage]
        self._synchronize()
        begin = time.perf_counter()
        result = call()
        self._synchronize()
        tally.seconds += time.perf_counter() - begin
        tally.calls += 1
        return result

    def compare(self, stage: str, result: torch.Tensor, got: torch.Tensor, exact: torch.Tensor) -> None:
        """Note the error of `got` against `exact`, and of the whole `result` against the bf16 run's."""
        tally = self.tallies[stage]
        tally.error = max(parity.relative_error(got, exact), tally.error or 0.0)
        where = (stage, tally.calls)
        self.kept[where] = result.cpu()
        if self.baseline is not None:
            tally.baseline_error = max(parity.relative_error(self.kept[where], self.baseline.kept[where].double()), tally.baseline_error or 0.0)

    def _implementation(self, stage: str) -> str:
        """The key that runs a stage, of mla_prefill for what prepares it; and who named it, unless auto chose."""
        fields: dict[str, Any] = {"arch": "cpu"} if self.device.type == "cpu" else {}
        if self.fp8 and stage in ("mla_prefill", "sparse_mla_prefill", "prepare_prefill_qkv"):
            fields |= {"q_dtype": "fp8_e4m3", "kv_dtype": "fp8_e4m3"}
        found = m3attn.explain("mla_prefill" if stage == "prepare_prefill_qkv" else stage, **fields)
        return f"{found.chosen}, by {found.chosen_by}"

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def table(self) -> str:
        header = ["stage", "calls", "implementation", "what ran", "time a call", "error", "error to bf16 run"]
        body = []
        for stage, tally in self.tallies.items():
            errors = ["" if e is None else f"{e:.1e}" for e in (tally.error, tally.baseline_error)]
            body.append([stage, str(tally.calls), tally.implementation, tally.what, us(tally.seconds / tally.calls * 1e6), *errors])
        return aligned(header, body)


class Layer:
    """Weights, latent cache and index keys of one layer, and the text that it reads."""

    def __init__(self, geometry: Geometry, content: bytes, device: torch.device, *, fp8: bool, seed: int) -> None:
        self.geometry, self.content, self.device, self.fp8 = geometry, content, device, fp8
        generator = torch.Generator().manual_seed(seed)
        heads, hidden = geometry.heads, geometry.hidden

        def weight(rows: int, columns: int) -> torch.Tensor:
            return (torch.randn(rows, columns, generator=generator) * rows**-0.5).to(device, DTYPE)

        self.tables = [weight(TABLE, hidden) * (TABLE / hidden) ** 0.5 for _ in SUFFIXES]
        self.q_proj, self.kv_down, self.kv_up = (
            weight(hidden, heads * (NOPE + ROPE)),
            weight(hidden, LATENT + ROPE),
            weight(LATENT, heads * (NOPE + VALUE)),
        )
        self.index_proj = weight(hidden, INDEX)
        self.cos_sin = rotary_table(geometry.tokens, ROPE, ROPE_THETA).to(device)
        pages = -(-geometry.tokens // geometry.page_size)
        dtype = E4M3 if fp8 else DTYPE
        self.pool = m3attn.LatentKVPool(1, num_pages=pages, page_size=geometry.page_size, dtype=dtype, device=device, zero_on_alloc=True)
        self.pages = torch.tensor(self.pool.alloc(pages), device=device)[torch.randperm(pages, generator=generator).to(device)]
        self.latents = torch.empty(geometry.tokens, LATENT, dtype=DTYPE, device=device)
        self.rotated = torch.empty(geometry.tokens, ROPE, dtype=DTYPE, device=device)
        self.index_k = torch.empty(geometry.tokens, INDEX, dtype=DTYPE, device=device)
        self.last_indices: torch.Tensor | None = None

    def slots(self, positions: torch.Tensor) -> torch.Tensor:
        size = self.geometry.page_size
        return self.pages[positions // size] * size + positions % size

    def embed(self, begin: int, end: int) -> torch.Tensor:
        """[end - begin, hidden], normalised: the sum of a random vector for each suffix of up to 8 bytes that ends at the token."""
        rows = [
            torch.tensor([suffix_hash(self.content[max(0, t + 1 - n) : t + 1]) % TABLE for t in range(begin, end)], device=self.device)
            for n in SUFFIXES
        ]
        x = torch.stack([table[row] for table, row in zip(self.tables, rows, strict=True)]).sum(dim=0)
        return torch.nn.functional.rms_norm(x, x.shape[-1:])

    def keys_values(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """k_nope and v, views of one projection."""
        kv = (latent @ self.kv_up).view(latent.shape[0], self.geometry.heads, NOPE + VALUE)
        return kv[..., :NOPE], kv[..., NOPE:]

    def step(self, begin: int, end: int, log: Log) -> None:
        """Tokens [begin, end), whose prefix has been run."""
        x = self.embed(begin, end)
        q = (x @ self.q_proj).view(end - begin, self.geometry.heads, NOPE + ROPE)
        down = x @ self.kv_down
        latent, k_pe = torch.nn.functional.rms_norm(down[:, :LATENT], (LATENT,)), down[:, LATENT:]
        positions = torch.arange(begin, end, device=self.device)
        self.latents[begin:end] = latent
        self.rotated[begin:end] = rope(k_pe, positions, self.cos_sin).to(DTYPE)
        self.index_k[begin:end] = torch.nn.functional.normalize(x @ self.index_proj, dim=-1)
        self.dense(q, latent, k_pe, positions, begin, log)
        self.sparse(q, positions, log)

    def dense(self, q: torch.Tensor, latent: torch.Tensor, k_pe: torch.Tensor, positions: torch.Tensor, begin: int, log: Log) -> None:
        k_nope, v = self.keys_values(latent)
        cache, slots = self.pool.layer(0), self.slots(positions)
        parts = (q[..., :NOPE], q[..., NOPE:], k_nope, v, latent, k_pe, positions, self.cos_sin, cache, slots)
        queries, keys, values = log.run("prepare_prefill_qkv", lambda: m3attn.prepare_prefill_qkv(*parts))
        log.tallies["prepare_prefill_qkv"].what = f"{'e4m3' if queries.dtype == E4M3 else '16-bit'} q, k, v"
        own = self._offsets(len(positions))
        out, lse = log.run("mla_prefill", lambda: m3attn.mla_prefill(queries, keys, values, own, own, return_lse=True), "causal, then prefix chunks")
        read = [(keys, values)]
        for first in range(0, begin, self.geometry.chunk):
            chunk = slice(first, min(first + self.geometry.chunk, begin))
            nope, prefix_v = self.keys_values(self.latents[chunk])
            if queries.dtype == E4M3:
                pack = partial(m3attn.mla_kv_pack_quantize, nope, self.rotated[chunk], prefix_v)
                prefix_k, prefix_v = log.run("mla_kv_pack_quantize", pack)
            else:
                prefix_k = join_heads(nope, self.rotated[chunk])
            offsets = (own, self._offsets(prefix_k.shape[0]))
            attend = partial(m3attn.mla_prefill, queries, prefix_k, prefix_v, *offsets, causal=False, return_lse=True)
            merge = partial(m3attn.merge_attention_states, out, lse, *log.run("mla_prefill", attend))
            out, lse = log.run("merge_attention_states", merge)
            read.insert(-1, (prefix_k, prefix_v))
        all_k, all_v = (torch.cat([x[:, :2].float() for x in parts]) for parts in zip(*read, strict=True))
        last = slice(-min(SAMPLE_ROWS, len(positions)), None)
        exact, _ = mla_prefill.mla_prefill(
            queries[last, :2].float(), all_k, all_v, self._offsets(len(out[last])), self._offsets(len(all_k)), dtype=torch.float64
        )
        log.compare("mla_prefill", out, out[last, :2], exact)

    def sparse(self, q: torch.Tensor, positions: torch.Tensor, log: Log) -> None:
        """q against the latent rows themselves: the up-projection of keys moves to the query, that of values to the output."""
        heads, topk = self.geometry.heads, self.geometry.topk
        up = self.kv_up.view(LATENT, heads, NOPE + VALUE)
        latent_q = torch.einsum("thd,lhd->thl", q[..., :NOPE], up[..., :NOPE])
        absorbed = join_heads(latent_q, rope(q[..., NOPE:], positions, self.cos_sin).to(DTYPE))
        chosen = self.choose(positions, topk)
        indices = torch.where(chosen >= 0, self.slots(chosen.clamp(min=0)), -1).int()[:, None]
        self.last_indices = chosen
        options: dict[str, Any] = {"sm_scale": (NOPE + ROPE) ** -0.5}
        if self.fp8:
            absorbed, options["q_scale"] = log.run("quantize_fp8", lambda: m3attn.quantize_fp8(absorbed, scale="tensor"), "absorbed q")
        rows = self.pool.rows(0)
        what = f"{'e4m3, both products' if self.fp8 else 'bf16'}; top {topk} by a token index in torch"
        out, _, _ = log.run("sparse_mla_prefill", lambda: m3attn.sparse_mla_prefill(absorbed, rows, indices, **options), what)
        last = slice(-min(SAMPLE_ROWS, len(positions)), None)
        exact, _, _ = mla_sparse.sparse_mla_prefill(absorbed[last], rows[:, 0], indices[last, 0], dtype=torch.float64, **options)
        log.compare("sparse_mla_prefill", out, out[last], exact)

    def choose(self, positions: torch.Tensor, topk: int) -> torch.Tensor:
        """[T, topk] positions of the tokens at or before each query whose index keys are most like its own; -1 where there are fewer."""
        end = int(positions[-1]) + 1
        scores = self.index_k[positions].float() @ self.index_k[:end].float().T
        scores = scores.masked_fill(torch.arange(end, device=self.device) > positions[:, None], float("-inf"))
        best = scores.topk(min(topk, end), dim=-1)
        chosen = torch.where(best.values > float("-inf"), best.indices, -1)
        return torch.nn.functional.pad(chosen, (0, topk - chosen.shape[1]), value=-1)

    def _offsets(self, length: int) -> torch.Tensor:
        return torch.tensor([0, length], dtype=torch.int32, device=self.device)


def run(*, path: Path | None = None, tokens: int | None = None, impl: str | None = None, real_geometry: bool = False, seed: int = 0) -> int:
    """Run the layer in bf16 and in fp8 and print what ran. Returns 0, or 1 if a result differs from the reference by more than its bound.

    Raises:
        ValueError: bad input, by name.
        m3attn.UnsupportedProblem: a named implementation cannot run this.
    """
    content = text.load(path)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    impl, because = choose_implementation(impl, device)
    geometry = REAL if real_geometry and device.type == "cpu" else ON_GPU if device.type == "cuda" else ON_CPU
    if real_geometry:
        geometry = replace(geometry, hidden=REAL.hidden)
    if tokens is not None:
        if not 1 <= tokens <= 1 << 20:
            raise ValueError(f"--tokens: expected 1 to {1 << 20}, got {tokens}")
        geometry = replace(geometry, tokens=tokens)
    geometry = replace(geometry, tokens=min(geometry.tokens, len(content)))
    print(f"m3attn demo --mla on {device_name(device)}: {because}")
    print(f"{text_name(path)}: {text.counted(len(content), 'byte')}; {text.counted(geometry.tokens, 'token')}, one a byte; random weights")
    print(geometry)
    begin = time.perf_counter()
    logs: dict[bool, Log] = {}
    with torch.no_grad(), nullcontext() if impl is None else m3attn.use(impl):
        steps = range(0, geometry.tokens, geometry.chunk)
        with progress(2 * len(steps)) as advance:
            for fp8 in (False, True):
                if device.type == "cuda":
                    run_layer(geometry, content, device, Log(device, fp8), fp8=fp8, seed=seed)  # compiles, so that times are the kernels'
                logs[fp8] = Log(device, fp8, baseline=logs.get(False))
                layer = run_layer(geometry, content, device, logs[fp8], fp8=fp8, seed=seed, on_step=advance)
    for fp8, log in logs.items():
        print(f"\n{'fp8' if fp8 else 'bf16'}\n{log.table()}")
    print("\nerror: root mean square against fp64 on the same inputs, relative, worst call")
    show_queries(layer)
    print(f"done in {duration(time.perf_counter() - begin)}")
    return verdict(logs)


def run_layer(
    geometry: Geometry, content: bytes, device: torch.device, log: Log, *, fp8: bool, seed: int, on_step: Callable[[], Any] = lambda: None
) -> Layer:
    layer = Layer(geometry, content, device, fp8=fp8, seed=seed)
    for begin in range(0, geometry.tokens, geometry.chunk):
        layer.step(begin, min(begin + geometry.chunk, geometry.tokens), log)
        on_step()
    return layer


def show_queries(layer: Layer) -> None:
    """The last queries with the text before the tokens that they like best."""
    assert layer.last_indices is not None
    print("\nindex queries and keys share one projection and the weights are random: a query takes tokens that end like the text it has just read")
    for row in range(-min(SHOWN_QUERIES, len(layer.last_indices)), 0):
        position = layer.geometry.tokens + row
        best = [p for p in layer.last_indices[row].tolist() if 0 <= p < position][:3]
        shown = [f"{p} …{text.readable(layer.content[max(0, p - 15) : p + 1])}" for p in best]
        print(f"query {position} …{text.readable(layer.content[max(0, position - 15) : position + 1])}: {' | '.join(shown) or 'nothing before it'}")


def verdict(logs: dict[bool, Log]) -> int:
    """Print whether errors are what rounding explains; the exit code."""
    beyond = []
    for fp8, log in logs.items():
        for stage, tally in log.tallies.items():
            # Quantised q and k round the inputs, not the result: only e4m3 weights of the sum do.
            mode = "fp8_pv" if fp8 and stage == "sparse_mla_prefill" else "bf16"
            if tally.error is not None and tally.error > parity.attention_bound(mode):
                beyond.append(f"{stage} ({'fp8' if fp8 else 'bf16'}: {tally.error:.1e})")
    if beyond:
        print(f"NOT as the reference: errors beyond their bound in {', '.join(beyond)}")
        return 1
    print("errors against the reference are inside their bounds")
    return 0
