"""Takes note of every stage call: which implementation ran and why, how long, how much work, how far from the fp64 reference."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import m3attn
from m3attn.bench import parity
from m3attn.bench.parity import SampledRows
from m3attn.bench.report import aligned, us
from m3attn.demo.geometry import HEAD_DIM, Geometry
from m3attn.demo.model import DTYPE, Formats
from m3attn.dtypes import dtype_name
from m3attn.reference import index as reference_index
from m3attn.reference.norm_rope import norm_rope
from m3attn.rules import find_rule


@dataclass(slots=True)
class Tally:
    """All calls of one stage in one phase."""

    calls: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    error: float | None = None
    rows: int = 0
    wrong_rows: int = 0
    near_ties: int = 0
    baseline_error: float | None = None
    baseline_rows: int = 0
    baseline_equal: int = 0
    implementation: str = ""
    why: str = ""


@dataclass(slots=True)
class Recorder:
    """An observer of `m3attn.demo.model`.

    Attributes:
        sample_rows: query rows of a call that are held against the reference; 0: none.
        named_because: why implementations are named rather than left to auto, if they are.
        keep: remember results, so that a later run can be compared with this one.
        baseline: the recorder of the bf16 run that this one is compared with.
        kept: results by stage, layer and number of the call.
    """

    geometry: Geometry
    formats: Formats
    device: torch.device
    sample_rows: int
    named_because: str = "named"
    keep: bool = False
    baseline: Recorder | None = None
    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)
    kept: dict[tuple[str, int, int], torch.Tensor] = field(default_factory=dict)

    def stage(self, name: str, layer: int, inputs: dict[str, Any], call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run `call`, which is stage `name`, and add it to the tally of its phase."""
        phase = inputs["batch"].phase
        tally = self.tallies.setdefault((name, phase), Tally())
        self._synchronize()
        begin = time.perf_counter()
        result = call()
        self._synchronize()
        tally.seconds += time.perf_counter() - begin
        tally.calls += 1
        if not tally.implementation:
            tally.implementation, tally.why = self._explain(name, phase, inputs)
        if self.sample_rows:
            self._compare_with_reference(name, tally, inputs, result)
        self._count_work(name, tally, inputs)
        self._compare_with_baseline(name, layer, tally, result)
        return result

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _explain(self, name: str, phase: str, inputs: dict[str, Any]) -> tuple[str, str]:
        if name == "select_blocks" and inputs["rule"] != "topk":
            return f"rule {inputs['rule']}", "asked for by --rule"
        geometry = self.geometry
        fields: dict[str, Any] = {"phase": phase, "page_size": geometry.block_size, "block_size": geometry.block_size, "topk": geometry.topk}
        if name in ("qk_norm_rope_insert", "sparse_attention", "dense_attention"):
            q = torch.bfloat16 if name == "qk_norm_rope_insert" else self.formats.q
            fields |= {"num_q_heads": geometry.heads.num_q, "num_kv_heads": geometry.heads.num_kv}
            fields |= {"q_dtype": dtype_name(q), "kv_dtype": dtype_name(self.formats.kv), "fp8_pv": self.formats.fp8_pv}
        if name in ("index_score", "index_topk"):
            index = dtype_name(self.formats.index)
            fields |= {"num_index_heads": geometry.heads.num_kv, "index_q_dtype": index, "index_dtype": index}
        if self.device.type == "cpu":
            fields["arch"] = "cpu"
        found = m3attn.explain(name, **fields)
        refused = [f"{key} refused: {'; '.join(reasons)}" for key, reasons in found.reasons.items() if reasons]
        by = self.named_because if found.chosen_by == "use(...)" else f"by {found.chosen_by}"
        return found.chosen or "none", ". ".join([by, *refused])

    def _compare_with_reference(self, name: str, tally: Tally, inputs: dict[str, Any], result: torch.Tensor) -> None:
        rows = parity.sample_rows(result.shape[1] if name in ("index_topk", "index_score", "select_blocks") else result.shape[0], self.sample_rows)
        if name == "qk_norm_rope_insert":
            rows = rows.to(self.device)
            q = inputs["row"][rows, : inputs["num_q"] * HEAD_DIM].unflatten(1, (inputs["num_q"], HEAD_DIM))
            exact = norm_rope(q, inputs["weight"], inputs["positions"][rows], inputs["cos_sin"], dtype=torch.float64)
            self._add_error(tally, parity.relative_error(result[rows].float(), exact), len(rows))
            return
        sample = SampledRows.of(inputs["batch"], rows)
        if name == "sparse_attention":
            exact = sample.sparse_attention(inputs["q"], inputs["cache"], inputs["ids"])
            self._add_error(tally, parity.relative_error(result[sample.rows], exact), len(rows))
        elif name == "dense_attention":
            exact = sample.dense_attention(inputs["q"], inputs["cache"])
            self._add_error(tally, parity.relative_error(result[sample.rows], exact), len(rows))
        else:
            self._compare_selection(name, tally, inputs, result, sample)

    def _compare_selection(self, name: str, tally: Tally, inputs: dict[str, Any], result: torch.Tensor, sample: SampledRows) -> None:
        scores = sample.index_scores(inputs["index_q"], inputs["cache"])
        bound = sample.score_bound(inputs["index_q"], inputs["cache"])
        got = result[:, sample.rows]
        if name == "index_score":
            visible = scores.isfinite()
            self._add_error(tally, parity.relative_error(got[visible], scores[visible]), len(sample.rows))
            return
        if inputs["rule"] == "topk":
            expected = reference_index.select_blocks(scores, sample.batch, topk=inputs["topk"])
            checked = parity.check_ids(got, expected, scores, bound)
        else:
            expected = find_rule(inputs["rule"])(inputs["scores"][:, sample.rows], sample.batch, topk=inputs["topk"], impl="reference")
            checked = parity.check_ids(got, expected)
        tally.rows += checked.rows * got.shape[0]
        tally.wrong_rows += int(checked.error)
        tally.near_ties += checked.near_ties

    def _add_error(self, tally: Tally, error: float, rows: int) -> None:
        tally.error = max(error, tally.error or 0.0)
        tally.rows += rows

    def _count_work(self, name: str, tally: Tally, inputs: dict[str, Any]) -> None:
        heads, size = self.geometry.heads, self.geometry.block_size
        if name == "qk_norm_rope_insert":
            row = inputs["row"]
            tally.bytes += row.numel() * (row.element_size() + self.formats.kv.itemsize)
            return
        batch, formats = inputs["batch"], self.formats
        tokens, last = int(batch.max_seqlen_q), int(batch.max_seqlen_k)
        pairs = (last - tokens + 1 + last) * tokens / 2
        key_value = 2 * HEAD_DIM * formats.kv.itemsize  # bytes of a token and KV head
        in_and_out = tokens * heads.num_q * HEAD_DIM * (formats.q.itemsize + DTYPE.itemsize)
        if name == "dense_attention":
            tally.flops += 4 * heads.num_q * HEAD_DIM * pairs
            tally.bytes += heads.num_kv * last * key_value + in_and_out
        elif name in ("index_topk", "index_score"):
            tally.flops += 2 * heads.num_kv * HEAD_DIM * pairs
            tally.bytes += (last + tokens * heads.num_kv) * HEAD_DIM * formats.index.itemsize
        elif name == "sparse_attention":
            position = torch.arange(last - tokens, last, device=self.device)
            ids = inputs["ids"]
            keys = torch.where(ids >= 0, (position[:, None] - ids * size + 1).clamp(0, size), 0).sum().item()
            tally.flops += 4 * (heads.num_q // heads.num_kv) * HEAD_DIM * keys
            blocks = sum(len(group[group >= 0].unique()) for group in ids)
            tally.bytes += min(blocks * size, heads.num_kv * last) * key_value + in_and_out
        else:
            tally.bytes += inputs["scores"].numel() * 4

    def _compare_with_baseline(self, name: str, layer: int, tally: Tally, result: torch.Tensor) -> None:
        """Remember this result, or hold it against what the bf16 run remembered."""
        if name in ("qk_norm_rope_insert", "index_score"):
            return
        where = (name, layer, sum(t.calls for (stage, _), t in self.tallies.items() if stage == name))
        if self.keep:
            self.kept[where] = result.cpu()
        if self.baseline is None:
            return
        known = self.baseline.kept[where]
        if result.dtype == torch.int32:
            tally.baseline_rows += result.shape[0] * result.shape[1]
            tally.baseline_equal += int((result.cpu() == known).all(dim=-1).sum())
        else:
            tally.baseline_error = max(parity.relative_error(result.cpu(), known.double()), tally.baseline_error or 0.0)

    @property
    def wrong_rows(self) -> int:
        """Sampled rows whose ids differ from the reference's beyond near ties."""
        return sum(tally.wrong_rows for tally in self.tallies.values())

    def beyond_bound(self) -> list[str]:
        """Stages whose error exceeds what their rounding explains."""
        found = []
        for (name, phase), tally in self.tallies.items():
            if tally.error is not None and name.endswith("attention") and tally.error > parity.attention_bound(self.formats.mode):
                found.append(f"{name} ({phase})")
            if tally.error is not None and name == "qk_norm_rope_insert" and tally.error > parity.ROUNDING[self.formats.q]:
                found.append(f"{name} ({phase})")
        return found

    def table(self) -> str:
        """One line for each stage and phase."""
        header = ["stage", "phase", "calls", "implementation", "why", "time a call", "work", "error", "ids equal"]
        if self.baseline is not None:
            header += ["error to bf16 run", "ids as in bf16 run"]
        body = []
        for (name, phase), tally in self.tallies.items():
            line = [name, phase, str(tally.calls), tally.implementation, tally.why, us(tally.seconds / tally.calls * 1e6)]
            line += [work(tally), "" if tally.error is None else f"{tally.error:.1e}", ids_text(tally)]
            if self.baseline is not None:
                share = f"{100 * tally.baseline_equal / tally.baseline_rows:.1f}%" if tally.baseline_rows else ""
                line += ["" if tally.baseline_error is None else f"{tally.baseline_error:.1e}", share]
            body.append(line)
        return aligned(header, body)


def work(tally: Tally) -> str:
    """Operations, or bytes of the stages that have none worth counting."""
    if tally.flops:
        return f"{si(tally.flops)}FLOP"
    return f"{si(tally.bytes)}B"


def si(value: float) -> str:
    """`12.3 G`."""
    for prefix in ("", "k", "M", "G", "T"):
        if value < 1000 or prefix == "T":
            return f"{value:.3g} {prefix}"
        value /= 1000
    raise AssertionError("unreachable")


def ids_text(tally: Tally) -> str:
    if tally.error is not None or not tally.rows:
        return ""
    ties = f", {tally.near_ties} near ties" if tally.near_ties else ""
    return f"{tally.rows - tally.wrong_rows} of {tally.rows} rows{ties}"
