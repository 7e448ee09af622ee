"""Which implementation runs: `impl=`, then `with use(...)`, then `M3ATTN_IMPL`, then auto. Only auto chooses; a named choice runs or raises."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from m3attn import registry, switches
from m3attn.builtin import PRIORITIES
from m3attn.problem import Problem
from m3attn.registry import STAGES, BrokenImplementation, Implementation

logger = logging.getLogger("m3attn")

DISABLE_CUTE = "M3ATTN_DISABLE_CUTE"
_in_use: ContextVar[str | None] = ContextVar("m3attn_use", default=None)


class UnsupportedProblem(NotImplementedError):
    """A named implementation cannot run the problem, or no implementation can. The message lists every reason.

    An implementation raises it too, before it writes anything, for what a `Problem` does not say, such as strides: auto then takes the next one.
    """


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a stage runs as it does.

    Attributes:
        stage, problem: what was asked.
        chosen: the key that runs, or None.
        chosen_by: `impl=`, `use(...)`, `M3ATTN_IMPL` or `auto`.
        reasons: for each candidate in auto's order, every reason it cannot run (empty: it can); where one was named, for that one.
        others: the same for the stage's other implementations, which run only when they are named.
        notes: what else decided, such as a switch or a selection rule.
    """

    stage: str
    problem: Problem
    chosen: str | None
    chosen_by: str
    reasons: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    others: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        what = f"{self.stage} on {self.problem.arch} ({self.problem.phase}, {self.problem.mode})"
        lines = [f"{what}: {self.chosen or 'nothing can run'}, by {self.chosen_by}"]
        for key, reasons in self.reasons.items():
            state = "takes it" if key == self.chosen else "could run" if not reasons else "; ".join(reasons)
            lines.append(f"  {key}: {state}")
        lines += [f"  {key}, when named: {'; '.join(reasons) or 'could run'}" for key, reasons in self.others.items()]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def parse_choice(text: str) -> tuple[tuple[str, str], ...]:
    """`"triton"` or `"sparse_attention=triton,index_topk=reference"` -> pairs; the stage is "" for a bare key.

    Raises:
        TypeError: no text.
        ValueError: an unknown stage, a malformed pair, or a key that no stage has.
    """
    if not isinstance(text, str):
        raise TypeError(f"implementation choice: expected a key or stage=key pairs as text, got {type(text).__name__} {text!r}")
    pairs = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        stage, separator, key = (s.strip() for s in item.partition("="))
        if not separator:
            stage, key = "", stage
        elif stage not in STAGES:
            raise ValueError(f"implementation choice {text!r}: expected a stage among {', '.join(STAGES)}, got {stage!r}")
        known = sorted({i.key for i in registry.implementations(stage or None)})
        if key not in known:
            where = f"stage {stage}" if stage else "any stage"
            raise ValueError(f"implementation choice {text!r}: {key!r} is not a key of {where}; there are {', '.join(known)}")
        pairs.append((stage, key))
    if not pairs:
        raise ValueError(f"implementation choice {text!r}: expected a key or stage=key pairs")
    return tuple(pairs)


def _named(text: str, stage: str) -> str | None:
    """The key that a choice names for `stage`; a pair wins over a bare key, and a bare key counts only for stages that have it."""
    pairs = parse_choice(text)
    for pair_stage, key in pairs:
        if pair_stage == stage:
            return key
    for pair_stage, key in pairs:
        if pair_stage == "" and registry.find(stage, key) is not None:
            return key
    return None


def for_stage(choice: str | None, stage: str) -> str | None:
    """What `impl=` of one stage is, of a choice made for several: the key it names for the stage, or None where it names none.

    Raises:
        ValueError: an unknown stage or key.
    """
    return None if choice is None else _named(choice, stage)


def named_in_force(stage: str, environment: str | None) -> tuple[str | None, str]:
    """The key that `use(...)` or else `M3ATTN_IMPL` (`environment`) names for a stage and which of them does; (None, `auto`) if neither."""
    for text, source in ((_in_use.get(), "use(...)"), (environment, "M3ATTN_IMPL")):
        if text and (key := _named(text, stage)) is not None:
            return key, source
    return None, "auto"


@contextmanager
def use(choice: str) -> Iterator[None]:
    """Choose implementations inside the block, for this thread and task: a key, or `stage=key` pairs joined by commas.

    Raises:
        ValueError: an unknown stage or key.
    """
    parse_choice(choice)
    token = _in_use.set(choice)
    try:
        yield
    finally:
        _in_use.reset(token)


_remembered: dict[tuple[object, ...], Implementation] = {}
_failed: dict[tuple[Implementation, Problem], str] = {}
"""What auto no longer tries, and the error."""


def resolve(stage: str, problem: Problem, impl: str | None = None, declined: tuple[str, ...] = ()) -> Implementation:
    """The implementation that runs `problem`; `declined`: keys that auto is to pass over for this call.

    Raises:
        ValueError: `impl`, or a choice in force, names an unknown key.
        UnsupportedProblem: the named one cannot run it, or none can; lists the reasons.
    """
    registry.load_plugins()
    environment = switches.impl()
    key = (stage, problem, impl, declined, _in_use.get(), environment, switches.disable_cute(), registry.version, registry.interpreter_enabled())
    known = _remembered.get(key)
    if known is None:
        if len(_remembered) > 4096:
            _remembered.clear()
        known = _remembered[key] = _resolve(stage, problem, impl, environment, declined)
    return known


def is_autos(stage: str, problem: Problem, impl: str | None) -> bool:
    """Whether auto chooses, and neither `impl` nor a choice in force."""
    return _explain(stage, problem, impl, switches.impl()).chosen_by == "auto"


def leave_out(implementation: Implementation, problem: Problem, error: BrokenImplementation) -> None:
    """auto takes `implementation` for `problem` no longer; one warning an implementation."""
    if all(failed is not implementation for failed, _ in _failed):
        what = f"{implementation.stage}: auto leaves {implementation.key} out and takes the next implementation"
        warnings.warn(f"{what}: {error}", RuntimeWarning, stacklevel=3)
    _failed[implementation, problem] = str(error)
    _remembered.clear()


def _resolve(stage: str, problem: Problem, impl: str | None, environment: str | None, declined: tuple[str, ...]) -> Implementation:
    explanation = _explain(stage, problem, impl, environment, declined)
    if explanation.chosen is None:
        raise UnsupportedProblem(_failure(explanation))
    implementation = registry.find(stage, explanation.chosen)
    assert implementation is not None
    if explanation.chosen_by == "auto":
        faster = []
        for key, reasons in explanation.reasons.items():
            if key == explanation.chosen:
                break
            faster.append(f"{key} refused: {'; '.join(reasons)}")
        logger.info("%s: auto took %s%s", stage, explanation.chosen, f" ({'. '.join(faster)})" if faster else "")
    return implementation


def _failure(explanation: Explanation) -> str:
    if explanation.chosen_by == "auto":
        listed = "; ".join(f"{key}: {', '.join(reasons)}" for key, reasons in explanation.reasons.items())
        return f"{explanation.stage}: no implementation can run {explanation.problem}: {listed}"
    (key, reasons), *_ = explanation.reasons.items()
    others = [i.key for i in registry.implementations(explanation.stage) if i.key != key and not reasons_against(i, explanation.problem)]
    remedy = f"; {', '.join(others)} can run it" if others else ""
    return f"{explanation.stage}: {key!r} ({explanation.chosen_by}) cannot run this: {'; '.join(reasons)}{remedy}"


def disabled_by_switch(key: str) -> str | None:
    """The switch that disables an implementation, if one does."""
    if key.startswith("cute_") and switches.disable_cute() == "1":
        return f"{DISABLE_CUTE}=1"
    return None


def reasons_against(implementation: Implementation, problem: Problem) -> tuple[str, ...]:
    """Capabilities and switches together: every reason the implementation does not run `problem` now."""
    switch = disabled_by_switch(implementation.key)
    return (*((f"switched off by {switch}",) if switch else ()), *implementation.supports(problem))


def auto_order(stage: str, problem: Problem) -> list[str]:
    """The keys auto tries, first choice first."""
    ranked = ["reference"] if problem.arch == "cpu" else [rank.key for rank in PRIORITIES[stage] if rank.covers(problem)]
    return registry.user_order(stage) + [key for key in ranked if registry.find(stage, key) is not None]


def _explain(stage: str, problem: Problem, impl: str | None, environment: str | None, declined: tuple[str, ...] = ()) -> Explanation:
    if stage not in STAGES:
        raise ValueError(f"stage: expected one of {', '.join(STAGES)}, got {stage!r}")
    if impl is not None and not isinstance(impl, str):
        raise TypeError(f"impl: expected a key or stage=key pairs as text, got {type(impl).__name__} {impl!r}")
    if impl is not None and ("=" in impl or "," in impl):
        impl = _named(impl, stage)
    if impl is not None:
        known = registry.find(stage, impl)
        if known is None:
            keys = ", ".join(i.key for i in registry.implementations(stage))
            raise ValueError(f"impl: expected one of {keys} for {stage}, got {impl!r}")
    named, by = (impl, "impl=") if impl is not None else named_in_force(stage, environment)
    if named is not None:
        implementation = registry.find(stage, named)
        assert implementation is not None
        reasons = reasons_against(implementation, problem)
        return Explanation(stage, problem, None if reasons else named, by, {named: reasons})
    reasons_by_key: dict[str, tuple[str, ...]] = {}
    chosen = None
    for key in auto_order(stage, problem):
        implementation = registry.find(stage, key)
        assert implementation is not None
        more = [_failed[implementation, problem]] if (implementation, problem) in _failed else []
        more += ["declined the tensors of this call"] if key in declined else []
        reasons_by_key[key] = (*reasons_against(implementation, problem), *more)
        if chosen is None and not reasons_by_key[key]:
            chosen = key
    return Explanation(stage, problem, chosen, by, reasons_by_key)


def explain(stage: str, problem: Problem | None = None, *, impl: str | None = None, rule: str = "topk", **fields: object) -> Explanation:
    """Say which implementation of `stage` runs a problem and why the others do not.

    Args:
        stage: a stage's name.
        problem: what is asked; or give its fields (`arch="sm_90"`, `q_dtype="bf16"`, …), the rest M3's own at TP1.
        impl: as in the stage's own call.
        rule: the selection rule; with another than `topk` the fused `index_topk` is not used.
    """
    if problem is None:
        problem = m3_problem(stage, **fields)
    elif fields:
        raise TypeError(f"explain: expected a problem or its fields, got both ({', '.join(fields)})")
    from m3attn.rules import find_rule

    find_rule(rule)
    explanation = _explain(stage, problem, impl, switches.impl())
    others = {i.key: reasons_against(i, problem) for i in registry.implementations(stage) if i.key not in explanation.reasons}
    fused = stage == "index_topk" and rule != "topk"
    notes = (f"rule {rule!r}: the fused stage is not used; index_score runs, then the rule",) if fused else ()
    return replace(explanation, others=others, notes=notes)


def m3_problem(stage: str, **fields: object) -> Problem:
    """M3's geometry for a stage at TP1 in bf16 on the architecture at hand, with `fields` replaced."""
    from m3attn.dtypes import dtype_name
    from m3attn.problem import PHASES, arch_of, normalise_arch

    base: dict[str, object] = {"arch": arch_of()}
    if stage in ("qk_norm_rope_insert", "sparse_attention", "dense_attention"):
        base |= {"num_q_heads": 64, "num_kv_heads": 4, "q_dtype": "bf16", "kv_dtype": "bf16"}
    if stage in ("qk_norm_rope_insert", "index_score", "index_topk"):
        base |= {"num_index_heads": 4, "index_q_dtype": "bf16", "index_dtype": "bf16"}
    if stage in ("merge_attention_states", "quantize_fp8"):
        base |= {"q_dtype": "bf16"}
    if stage in ("mla_rope_quantize", "mla_kv_pack_quantize"):
        base |= {"num_q_heads": 128, "num_kv_heads": 128, "head_dim": 192, "v_head_dim": 128, "q_dtype": "bf16", "kv_dtype": "fp8_e4m3"}
    if stage == "mla_prefill":
        base |= {"num_q_heads": 128, "num_kv_heads": 128, "head_dim": 192, "v_head_dim": 128, "q_dtype": "bf16", "kv_dtype": "bf16"}
    if stage == "sparse_mla_prefill":
        base |= {"num_q_heads": 128, "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "topk": 2048, "q_dtype": "bf16", "kv_dtype": "bf16"}
    if "arch" in fields:
        fields["arch"] = normalise_arch(str(fields["arch"]))
    unknown = set(fields) - set(Problem.__dataclass_fields__)
    if unknown:
        raise ValueError(f"fields: expected fields of Problem ({', '.join(Problem.__dataclass_fields__)}), got {', '.join(sorted(unknown))}")
    for name in ("q_dtype", "kv_dtype", "index_q_dtype", "index_dtype"):
        if fields.get(name, "none") != "none":
            fields[name] = dtype_name(fields[name], argument=name)  # type: ignore[arg-type]
    problem = Problem(**(base | fields))  # type: ignore[arg-type]
    if problem.phase not in PHASES:
        raise ValueError(f"phase: expected one of {', '.join(PHASES)}, got {problem.phase!r}")
    if stage in ("index_score", "index_topk", "sparse_attention") and problem.block_size % problem.page_size:
        raise ValueError(f"page_size: expected a divisor of the block size {problem.block_size}, got {problem.page_size}")
    return problem
