"""The run: every asked row in turn, each implementation checked and then timed beside the peers on the same inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import m3attn
from m3attn import registry
from m3attn.bench.ceilings import Ceilings, Cost
from m3attn.bench.inputs import MODES, Pool, StepInputs, plan
from m3attn.bench.parity import Parity, worst
from m3attn.bench.peers import Peers
from m3attn.bench.recorded import M3_GROUP, RecordedShape
from m3attn.bench.selections import KINDS
from m3attn.bench.shapes import Heads, Shape, sizes, step_shapes
from m3attn.bench.stages import SIZE_STAGES, STEP_STAGES, TP1
from m3attn.bench.timing import Call, Timer
from m3attn.bench.tune import CURRENT, precompile, variants
from m3attn.bench.workloads import Options, Workload, ruled_topk
from m3attn.choice import UnsupportedProblem
from m3attn.rules import find_rule

SEED = 20260729


@dataclass(frozen=True, slots=True)
class Request:
    """What to time. None: the stage's own default. `modes` that a stage does not have are left out for it.

    With another rule than `topk`, the one stage to time is index_topk: as index_score and then the rule. With `recorded` shapes it is
    sparse_attention, on their ids.
    """

    stages: tuple[str, ...]
    shapes: tuple[str, ...] | None = None
    heads: tuple[Heads, ...] | None = None
    modes: tuple[str, ...] = ("bf16",)
    selections: tuple[str, ...] | None = None
    implementations: tuple[str, ...] | None = None
    sample_rows: int = 64
    grid_sample_rows: int = 8
    rule: str = "topk"
    recorded: tuple[RecordedShape, ...] = ()


@dataclass(frozen=True, slots=True)
class Session:
    """Where and how: the device, its timer and ceilings, what every row carries, and where rows and remarks go.

    `tuning`: instead of implementations, time every launch setting they list as a candidate; rows then have `settings`.
    """

    device: torch.device
    timer: Timer
    ceilings: Ceilings
    l2_bytes: int
    context: dict[str, Any]
    on_row: Callable[[dict[str, Any]], None]
    on_remark: Callable[[str], None]
    peers: Peers | None = None
    stream: Callable[[int], float] | None = None
    tuning: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """One row for each implementation."""

    stage: str
    shape: Shape | tuple[int, ...]
    shape_name: str
    heads: Heads | None
    mode: str
    selection: str | None
    ids: torch.Tensor | None = None

    @property
    def heads_label(self) -> str:
        if self.heads is None:
            return "-"
        spec = SIZE_STAGES.get(self.stage)
        return str(self.heads.num_q) if spec is not None and spec.one_number else str(self.heads)

    def __str__(self) -> str:
        parts = (self.stage, self.heads_label, self.shape_name, self.mode, self.selection)
        return " ".join(p for p in parts if p is not None)


class ParityFailure(Exception):
    """An implementation whose result is wrong on this shape; it is not timed."""


class ContextLost(Exception):
    """The GPU no longer answers; nothing after it can be measured."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is timed: an implementation, one of its launch settings, or a peer."""

    name: str
    settings: str | None = None
    is_peer: bool = False

    def __str__(self) -> str:
        return self.name if self.settings is None else f"{self.name} ({self.settings})"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One subject on one step."""

    us: float
    cost: Cost
    parity: Parity
    timing: str
    stream_us: float | None = None


@dataclass(slots=True)
class Collected:
    """Measurements of one job by subject, and why others have none."""

    measured: dict[Subject, list[Measurement]] = field(default_factory=dict)
    refused: dict[Subject, str] = field(default_factory=dict)


def jobs(request: Request) -> Iterator[Job]:
    """Every job of a request, in order.

    Raises:
        ValueError: an unknown stage, shape, mode or rule, a rule for a stage that selects nothing, or recorded ids for one that takes none.
    """
    find_rule(request.rule)
    if request.recorded:
        yield from _recorded_jobs(request)
        return
    if request.rule != "topk" and set(request.stages) != {"index_topk"}:
        raise ValueError(f"rule: expected topk for {', '.join(request.stages)}, got {request.rule!r}; other rules are timed as stage index_topk")
    for stage in request.stages:
        if stage not in STEP_STAGES and stage not in SIZE_STAGES:
            raise ValueError(f"stage: expected one of {', '.join((*STEP_STAGES, *SIZE_STAGES))}, got {stage!r}")
    for name in request.shapes or ():
        if not any(_fits(stage, name) for stage in request.stages):
            _parse(request.stages[0], name)
    for stage in request.stages:
        yield from _step_jobs(stage, request) if stage in STEP_STAGES else _size_jobs(stage, request)


def _parse(stage: str, name: str) -> list[Shape] | tuple[int, ...]:
    """A shape's name as `stage` reads it. Raises ValueError if it is none of its shapes."""
    if stage in STEP_STAGES:
        return step_shapes(name)
    size, rank = sizes(name), SIZE_STAGES[stage].rank
    if len(size) != rank:
        raise ValueError(f"shape: expected {rank} sizes for {stage}, got {name!r}")
    return size


def _fits(stage: str, name: str) -> bool:
    try:
        _parse(stage, name)
    except ValueError:
        return False
    return True


def _shape_names(stage: str, default: tuple[str, ...], asked: tuple[str, ...] | None) -> list[str]:
    """The default, or those asked-for shapes that the stage has: a run of several stages names the shapes of all of them."""
    return [name for name in asked if _fits(stage, name)] if asked else list(default)


def _step_jobs(stage: str, request: Request) -> Iterator[Job]:
    spec = STEP_STAGES[stage]
    for name in _shape_names(stage, spec.shapes, request.shapes):
        for shape in step_shapes(name):
            for heads in request.heads or TP1:
                for mode in _modes(spec.modes, request.modes):
                    for selection in _selections(spec.selects, request.selections, name):
                        yield Job(stage, shape, shape.name, heads, mode, selection)


def _recorded_jobs(request: Request) -> Iterator[Job]:
    if set(request.stages) != {"sparse_attention"} or request.shapes or request.selections:
        raise ValueError(f"--ids: expected stage sparse_attention without shapes or selections, got {', '.join(request.stages)}")
    for recorded in request.recorded:
        groups = recorded.num_kv_heads
        for heads in request.heads or (Heads(M3_GROUP * groups, groups),):
            if heads.num_kv != groups:
                raise ValueError(f"--heads: expected {groups} KV heads, those of the recorded ids, got {heads}")
            for mode in _modes(STEP_STAGES["sparse_attention"].modes, request.modes):
                yield Job("sparse_attention", recorded.shape, recorded.shape.name, heads, mode, recorded.selection, recorded.ids)


def _selections(selects: bool, asked: tuple[str, ...] | None, shape_name: str) -> tuple[str | None, ...]:
    if not selects:
        return (None,)
    return asked or (KINDS if shape_name.startswith("P") else ("N",))


def _size_jobs(stage: str, request: Request) -> Iterator[Job]:
    spec = SIZE_STAGES[stage]
    for name in _shape_names(stage, spec.shapes, request.shapes):
        size = sizes(name)
        for heads in (request.heads or spec.heads) if spec.heads else (None,):
            for mode in _modes(spec.modes, request.modes):
                yield Job(stage, size, name, heads, mode, None)


def _modes(known: tuple[str, ...], asked: tuple[str, ...]) -> tuple[str, ...]:
    """Asked modes that the stage has; a stage with a single mode is always timed in it."""
    for mode in asked:
        if mode not in MODES:
            raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
    return known if len(known) == 1 else tuple(m for m in known if m in asked)


def run(request: Request, session: Session) -> int:
    """Time everything; a job that fails says why and the next one goes on. Returns how many implementations or jobs failed.

    Each finished row goes to `session.on_row` at once.
    """
    failures = 0
    for job in jobs(request):
        try:
            collected = _run_job(job, request, session)
        except ContextLost as error:
            session.on_remark(f"{job}: {error}; the rows so far are kept, the rest is not run")
            return failures + 1
        except Exception as error:  # one job must not take the others down
            session.on_remark(f"{job}: not run: {type(error).__name__}: {error}")
            failures += 1
            continue
        for subject, reason in collected.refused.items():
            session.on_remark(f"{job} {subject}: not timed: {reason}")
            failures += not reason.startswith("unsupported")
        for subject, measured in collected.measured.items():
            session.on_row(row(job, subject, measured, session))
    return failures


def _run_job(job: Job, request: Request, session: Session) -> Collected:
    try:
        return _run_steps(job, request, session) if isinstance(job.shape, Shape) else _run_sizes(job, request, session)
    except ContextLost:
        raise
    except Exception as error:
        _raise_if_lost(session.device, error)
        raise
    finally:
        _release(session.device)


def _release(device: torch.device) -> None:
    """Give back what a job took, so that the next one's pools find one piece of memory."""
    if device.type == "cuda":
        with suppress(RuntimeError):  # a lost GPU cannot free anything; its error is on its way already
            torch.cuda.empty_cache()


def _keys(stages: tuple[str, ...], asked: tuple[str, ...] | None, peers: Peers | None) -> list[str]:
    """Implementations that all of `stages` have; `reference` only when asked for. Raises ValueError when there is nothing to time."""
    sets = [[i.key for i in m3attn.implementations(stage)] if stage in registry.STAGES else [] for stage in stages]
    common = [key for key in sets[0] if all(key in keys for keys in sets)]
    chosen = [key for key in common if (key != "reference" if asked is None else key in asked)]
    if not chosen and peers is None:
        raise ValueError(f"no implementation to time: there are {', '.join(common) or 'none'}")
    return chosen


def _run_steps(job: Job, request: Request, session: Session) -> Collected:
    spec, mode, shape = STEP_STAGES[job.stage], MODES[job.mode], job.shape
    assert isinstance(shape, Shape) and job.heads is not None
    build, stages, peers = spec.build, spec.implementations_of, session.peers
    if request.rule != "topk":
        build, stages, peers = ruled_topk, ("index_score", "select_blocks"), None
    keys = _keys(stages, request.implementations, peers)
    generator = torch.Generator(device=session.device).manual_seed(SEED)
    plans = [plan(step, spec.reads(step, job.heads, mode), replay=shape.replay, l2_bytes=session.l2_bytes) for step in shape.steps]
    pool = Pool.random(max(p.num_pages for p in plans), job.heads, mode, kv=spec.reads_kv, index=spec.reads_index, generator=generator)
    options = Options(
        selection=job.selection,
        sample_rows=request.sample_rows if len(shape.steps) == 1 else request.grid_sample_rows,
        replay=shape.replay,
        peers=peers,
        rule=request.rule,
        ids=job.ids,
    )
    collected = Collected()
    for step, step_plan in zip(shape.steps, plans, strict=True):
        inputs = StepInputs.random(step, job.heads, mode, pool, step_plan.num_sets, generator)
        phase = inputs.batches[0].phase
        _measure_all(build(inputs, options), stages, keys, phase, shape.replay, collected, session)
    return collected


def _run_sizes(job: Job, request: Request, session: Session) -> Collected:
    spec = SIZE_STAGES[job.stage]
    keys = _keys((job.stage,), request.implementations, session.peers if spec.has_peers else None)
    generator = torch.Generator(device=session.device).manual_seed(SEED)
    where = (request.sample_rows, session.l2_bytes, generator)
    what = (job.shape, job.heads, job.mode) if spec.heads else (job.shape,)
    workload = spec.build(*what, *where, *((session.peers,) if spec.has_peers else ()))
    collected = Collected()
    _measure_all(workload, (job.stage,), keys, "prefill", spec.replay, collected, session)
    return collected


def _subjects(workload: Workload, stages: tuple[str, ...], keys: list[str], phase: str, session: Session) -> Iterator[tuple[Subject, list[Call]]]:
    """What to time on a workload, and its calls, one a set of inputs."""
    sets = range(workload.num_sets)
    for key in keys:
        if not session.tuning:
            yield Subject(key), [partial(workload.run, i, key) for i in sets]
            continue
        for variant in variants(stages, key, phase):
            run = variant.apply(workload.run)
            yield Subject(key, variant.label), [partial(run, i, key) for i in sets]
    for name, call in workload.peers.items():
        yield Subject(name, CURRENT if session.tuning else None, is_peer=True), [partial(call, i) for i in sets]


def _measure_all(
    workload: Workload, stages: tuple[str, ...], keys: list[str], phase: str, replay: bool, collected: Collected, session: Session
) -> None:
    stream_us = session.stream(workload.stream_bytes) if session.stream is not None and workload.stream_bytes else None
    subjects = [pair for pair in _subjects(workload, stages, keys, phase, session) if pair[0] not in collected.refused]
    if session.tuning and session.device.type == "cuda":
        precompile([calls[0] for subject, calls in subjects if not subject.is_peer], session.device)
    for subject, calls in subjects:
        try:
            measured = _measure(workload, subject, calls, replay=replay, stream_us=stream_us, timer=session.timer)
        except Exception as error:
            _raise_if_lost(session.device, error)
            kind = "unsupported" if isinstance(error, UnsupportedProblem) else type(error).__name__
            collected.refused[subject] = f"{kind}: {error}"
            collected.measured.pop(subject, None)
        else:
            collected.measured.setdefault(subject, []).append(measured)


def _raise_if_lost(device: torch.device, error: Exception) -> None:
    """A fault inside a kernel leaves the process without a GPU; every later call would fail with the same words."""
    if device.type != "cuda" or isinstance(error, (ParityFailure, torch.OutOfMemoryError)):
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as lost:
        raise ContextLost(f"{type(error).__name__}: {error} ({lost})") from error


def _measure(workload: Workload, subject: Subject, calls: list[Call], *, replay: bool, stream_us: float | None, timer: Timer) -> Measurement:
    workload.poison()
    result: Any = calls[0]()
    checked = workload.check(workload.adapt_peer(result) if subject.is_peer else result)
    del result
    if not checked.passed and not subject.is_peer:
        raise ParityFailure(f"differs from the reference: {checked}")
    # The reference reads lengths back to the host, which no capture allows.
    can_capture = subject.name != "reference"
    if replay and can_capture:
        return Measurement(timer.replay(calls), workload.cost, checked, "graph", stream_us)
    us = timer.cold(timer.captured(calls[:1]) if workload.captured and can_capture else calls[0])
    return Measurement(us, workload.cost, checked, "cold", stream_us)


def row(job: Job, subject: Subject, measured: list[Measurement], session: Session) -> dict[str, Any]:
    """One row of a result file; a grid's figures are means by the weights of its steps."""
    steps = job.shape.steps if isinstance(job.shape, Shape) else None
    weights = [step.weight for step in steps] if steps is not None else [1.0]
    total = sum(weights)

    def mean(values: list[float]) -> float:
        return sum(w * v for w, v in zip(weights, values, strict=True)) / total

    median_us = mean([m.us for m in measured])
    floor_us = mean([session.ceilings.floor_us(m.cost) for m in measured])
    checked = worst([m.parity for m in measured])
    result: dict[str, Any] = {
        "stage": job.stage,
        "implementation": subject.name,
        "heads": job.heads_label,
        "shape": job.shape_name,
        "mode": job.mode,
        "selection": job.selection,
        "median_us": round(median_us, 3),
        "floor_us": round(floor_us, 6),
        "share": round(floor_us / median_us, 4) if median_us else None,
        "tflops": round(mean([m.cost.flops for m in measured]) / median_us / 1e6, 2) if median_us else None,
        "tbps": round(mean([float(m.cost.bytes) for m in measured]) / median_us / 1e6, 4) if median_us else None,
        "timing": measured[0].timing,
        "peer": subject.is_peer,
        "parity_error": checked.error if math.isfinite(checked.error) else None,
        "parity_bound": checked.bound,
        "parity_passed": checked.passed,
        "near_ties": checked.near_ties,
        "rows_checked": checked.rows,
    }
    if subject.settings is not None:
        result["settings"] = subject.settings
    streams = [m.stream_us for m in measured]
    if all(us is not None for us in streams):
        result["stream_us"] = round(mean([us for us in streams if us is not None]), 3)
    if steps is not None and len(steps) > 1:
        result["steps"] = [
            {"batch": s.batch, "q_len": s.q_len, "seq_len": s.seq_len, "weight": s.weight, "us": round(m.us, 3)}
            for s, m in zip(steps, measured, strict=True)
        ]
    return {**result, **session.context, "ceilings": session.ceilings.as_dict()}
