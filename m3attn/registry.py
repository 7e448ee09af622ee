"""The registry: which implementation of which stage exists, what it declares it can do, and the priorities of `auto`.

An implementation is data: a stage, a key, capabilities, and where its function lies. `supports(problem)` turns the capabilities into every
reason it cannot run; an empty tuple means it can. Nothing here imports triton, cutlass or any optional package.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from m3attn.problem import Problem, arch_number

STAGES = (
    "qk_norm_rope_insert",
    "index_score",
    "select_blocks",
    "index_topk",
    "sparse_attention",
    "dense_attention",
    "merge_attention_states",
    "quantize_fp8",
    "mla_rope_quantize",
    "mla_kv_pack_quantize",
    "mla_prefill",
    "sparse_mla_prefill",
)
"""Every stage, in the order a layer runs them."""

ENTRY_POINT_GROUP = "m3attn.implementations"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an implementation takes, as data. None means no limit; ranges are inclusive.

    Attributes:
        min_arch: lowest compute capability (80 for SM80); 0 runs anywhere.
        archs: the exact architectures (`sm_90`), for kernels built for one; None: every one from `min_arch` up.
        cpu: how CPU tensors are taken: `yes`, `interpreter` (Triton's), or `no`.
        modes: main-branch modes (`Problem.mode`); e4m3_min_arch: lowest capability for e4m3 data.
        exact_ids: whether selected ids are those of the contract; False: blocks of nearly equal scores may be exchanged.
        needs_zero_on_alloc: NaN behind a sequence in its last page would reach the output.
        needs: importable packages.
    """

    min_arch: int = 0
    archs: tuple[str, ...] | None = None
    cpu: str = "no"
    modes: tuple[str, ...] | None = None
    q_dtypes: tuple[str, ...] | None = None
    kv_dtypes: tuple[str, ...] | None = None
    index_q_dtypes: tuple[str, ...] | None = None
    index_dtypes: tuple[str, ...] | None = None
    e4m3_min_arch: int = 0
    head_dims: tuple[int, ...] | None = None
    equal_head_dims: bool = True
    v_head_dims: tuple[int, ...] | None = None
    index_dims: tuple[int, ...] | None = None
    group_sizes: tuple[int, int] | None = None
    index_heads: tuple[int, int] | None = None
    topk: tuple[int, int] | None = None
    page_sizes: tuple[int, ...] | None = None
    block_sizes: tuple[int, ...] | None = None
    phases: tuple[str, ...] = ("prefill", "decode", "verify")
    sink: bool = True
    lse: bool = True
    exact_ids: bool = True
    needs_zero_on_alloc: bool = False
    needs: tuple[str, ...] = ()

    def reasons(self, problem: Problem) -> tuple[str, ...]:
        """Every reason these capabilities do not cover `problem`."""
        found: list[str] = []
        found += self._arch_reasons(problem)
        found += [f"needs the package {package}, which is not installed" for package in self.missing_packages()]
        for what, accepted, got in (
            ("mode", self.modes, problem.mode),
            ("q dtype", self.q_dtypes, problem.q_dtype),
            ("KV dtype", self.kv_dtypes, problem.kv_dtype),
            ("index q dtype", self.index_q_dtypes, problem.index_q_dtype),
            ("index dtype", self.index_dtypes, problem.index_dtype),
        ):
            if accepted is not None and got != "none" and got not in accepted:
                found.append(f"{what} {got}: takes {', '.join(accepted)}")
        if problem.v_head_dim not in (None, problem.head_dim) and self.equal_head_dims:
            found.append(f"head dims {problem.head_dim} and {problem.v_head_dim} differ: takes equal ones")
        for what, accepted_ints, got_int in (
            ("head dim", self.head_dims, problem.head_dim),
            ("value head dim", self.v_head_dims, problem.head_dim if problem.v_head_dim is None else problem.v_head_dim),
            ("index dim", self.index_dims, problem.index_dim),
            ("page size", self.page_sizes, problem.page_size),
            ("block size", self.block_sizes, problem.block_size),
        ):
            if accepted_ints is not None and got_int not in accepted_ints:
                found.append(f"{what} {got_int}: takes {', '.join(map(str, accepted_ints))}")
        for what, limits, got_int in (
            ("group size", self.group_sizes, problem.group_size),
            ("index heads", self.index_heads, problem.num_index_heads),
            ("topk", self.topk, problem.topk),
        ):
            if limits is not None and got_int and not limits[0] <= got_int <= limits[1]:
                found.append(f"{what} {got_int}: takes {limits[0]} to {limits[1]}")
        if problem.phase not in self.phases:
            found.append(f"phase {problem.phase}: takes {', '.join(self.phases)}")
        if problem.sink and not self.sink:
            found.append("has no sink key")
        if problem.lse and not self.lse:
            found.append("returns no LSE")
        if self.needs_zero_on_alloc and not problem.zero_on_alloc:
            found.append("needs finite bytes behind each sequence in its last page: declare such a cache with zero_on_alloc=True")
        return tuple(found)

    def missing_packages(self) -> list[str]:
        return [package for package in self.needs if not _is_importable(package)]

    def _arch_reasons(self, problem: Problem) -> list[str]:
        if problem.arch == "cpu":
            if self.cpu == "no":
                return ["CPU tensors: runs on NVIDIA GPUs only"]
            if self.cpu == "interpreter" and not interpreter_enabled():
                return [INTERPRETER_HINT]
            return []
        number, found = arch_number(problem.arch), []
        if self.archs is not None and problem.arch not in self.archs:
            found.append(f"architecture {problem.arch}: built for {', '.join(self.archs)}")
        elif number < self.min_arch:
            found.append(f"architecture {problem.arch}: needs sm_{self.min_arch} or newer")
        dtypes = (problem.q_dtype, problem.kv_dtype, problem.index_q_dtype, problem.index_dtype)
        if "fp8_e4m3" in dtypes and number < self.e4m3_min_arch:
            found.append(f"e4m3 on {problem.arch}: needs sm_{self.e4m3_min_arch} or newer (e5m2 works from sm_80)")
        return found

    def arch_names(self) -> list[str]:
        """For listings: `sm_90`, or `sm_80+`, and `cpu` where CPU tensors are taken."""
        names = list(self.archs) if self.archs is not None else [f"sm_{self.min_arch}+" if self.min_arch else "any"]
        return names + ({"yes": ["cpu"], "interpreter": ["cpu (interpreter)"]}.get(self.cpu, []))


INTERPRETER_HINT = (
    "CPU tensors need Triton's interpreter, switched on before the kernels are imported: set TRITON_INTERPRET=1 or call "
    "m3attn.interpret() first (or pass impl='reference')"
)


def interpreter_enabled() -> bool:
    """Whether Triton kernels imported now (or already) run in the interpreter."""
    kernels = sys.modules.get("m3attn.triton_kernels.primitives")
    if kernels is not None:
        return bool(kernels.INTERPRETED.value)
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


_importable: dict[str, bool] = {}


def _is_importable(package: str) -> bool:
    if package not in _importable:
        try:
            _importable[package] = importlib.util.find_spec(package) is not None
        except ModuleNotFoundError:  # a part of a package that is absent
            _importable[package] = False
    return _importable[package]


@dataclass(frozen=True, eq=False)
class Implementation:
    """One way to run one stage.

    Attributes:
        stage, key: its name, unique together.
        target: `module:function` of `fn(call) -> None`, imported at first use; or the function itself.
        capabilities: what it takes.
        workspace: `module:function` of `workspace_bytes(shape: WorkShape) -> int`, or the function; None: uses no scratch.
        sources: modules whose text `m3attn.source` shows.
        extra_reasons: a further check, `fn(problem) -> sequence of reasons`, for what data cannot say. If it raises, that is a bug and is raised.
        fp8_archs: architectures on which it runs e4m3 q over an e4m3 cache, for mode resolution.
        prepare_qkv: for `mla_prefill`: `module:function` of `fn(call: PreparePrefillQkvCall) -> (q, k, v)`, or the function, if the implementation
            rotates, quantises and writes the latent cache itself; None: the plain 16-bit path does.
        built_in: shipped with m3attn; cannot be replaced.
    """

    stage: str
    key: str
    target: str | Callable[[Any], None]
    capabilities: Capabilities = field(default_factory=Capabilities)
    workspace: str | Callable[[Any], int] | None = None
    sources: tuple[str, ...] = ()
    extra_reasons: Callable[[Problem], Sequence[str]] | None = None
    fp8_archs: tuple[str, ...] = ()
    prepare_qkv: str | Callable[[Any], Any] | None = None
    built_in: bool = False

    def supports(self, problem: Problem) -> tuple[str, ...]:
        """Every reason this implementation cannot run `problem`; empty when it can."""
        reasons = self.capabilities.reasons(problem)
        if self.extra_reasons is not None:
            reasons += tuple(self.extra_reasons(problem))
        return reasons

    @property
    def archs(self) -> list[str]:
        return self.capabilities.arch_names()

    def load(self) -> Callable[[Any], None]:
        """The function, importing its module on first use."""
        return _load(self.target)

    def load_prepare_qkv(self) -> Callable[[Any], Any] | None:
        """The function that prepares q, k and v for this implementation, if it declares one."""
        return None if self.prepare_qkv is None else _load(self.prepare_qkv)

    def workspace_bytes(self, shape: Any) -> int:
        """The most scratch a call of this shape uses."""
        return 0 if self.workspace is None else _load(self.workspace)(shape)


_loaded: dict[str, Callable[..., Any]] = {}


class BrokenImplementation(RuntimeError):
    """An implementation's module cannot be imported, or its kernel does not compile. auto takes the next one; a named choice raises this."""


def _load(target: str | Callable[..., Any]) -> Callable[..., Any]:
    if not isinstance(target, str):
        return target
    function = _loaded.get(target)
    if function is None:
        module, _, name = target.partition(":")
        try:
            imported = importlib.import_module(module)
        except Exception as error:  # a package that is installed and broken raises anything
            raise BrokenImplementation(f"{module} cannot be imported: {type(error).__name__}: {error}") from error
        function = _loaded[target] = getattr(imported, name)
    return function


_table: dict[tuple[str, str], Implementation] = {}
_user_order: dict[str, list[str]] = {}
_plugins: dict[str, str | None] | None = None
_loading_plugins = False
version = 0
"""Counts changes of the registry, so that remembered choices can tell that they are stale."""


def add(implementation: Implementation, *, replace: bool = False) -> None:
    """Put an implementation into the table (see `m3attn.register`)."""
    global version
    if implementation.stage not in STAGES:
        raise ValueError(f"stage: expected one of {', '.join(STAGES)}, got {implementation.stage!r}")
    name = (implementation.stage, implementation.key)
    known = _table.get(name)
    if known is not None and known.built_in:
        raise ValueError(f"key: {implementation.key!r} is m3attn's own for {implementation.stage} and cannot be replaced; choose another key")
    if known is not None and not replace:
        raise ValueError(f"key: {implementation.key!r} is already registered for {implementation.stage}; pass replace=True to replace it")
    _table[name] = implementation
    version += 1


def register(
    stage: str,
    key: str,
    target: str | Callable[[Any], None],
    *,
    capabilities: Capabilities | None = None,
    workspace: str | Callable[[Any], int] | None = None,
    extra_reasons: Callable[[Problem], Sequence[str]] | None = None,
    fp8_archs: tuple[str, ...] = (),
    prepare_qkv: str | Callable[[Any], Any] | None = None,
    auto: bool = False,
    replace: bool = False,
) -> None:
    """Register your own implementation of a stage.

    Args:
        stage: one of `m3attn.registry.STAGES`.
        key: its name, as in `impl=key`; letters, digits, `_` and `-`.
        target: `fn(call) -> None` over the stage's dataclass in `m3attn.calls`, or `module:function`.
        capabilities: what it takes; None: anything, on any device.
        workspace: `fn(shape: WorkShape) -> bytes` if it wants `call.workspace`.
        extra_reasons: further refusals, `fn(problem) -> reasons`.
        fp8_archs: architectures on which it runs e4m3 q over an e4m3 cache.
        prepare_qkv: for `mla_prefill`: `fn(call) -> (q, k, v)` over `m3attn.calls.PreparePrefillQkvCall`, if it owns `prepare_prefill_qkv`.
        auto: let auto take it, before the built-in ones, where it supports the problem.
        replace: replace a key registered before; never a built-in one.

    Raises:
        ValueError: unknown stage, bad key, a key that exists, or prepare_qkv for another stage.
    """
    if prepare_qkv is not None and stage != "mla_prefill":
        raise ValueError(f"prepare_qkv: expected None for {stage}; it is a capability of mla_prefill")
    if not key or not key.replace("_", "").replace("-", "").isalnum():
        raise ValueError(f"key: expected letters, digits, _ and -, got {key!r}")
    if not isinstance(target, str) and not callable(target):
        raise TypeError(f"target: expected a function fn(call) or 'module:function', got {type(target).__name__}")
    caps = capabilities if capabilities is not None else Capabilities(cpu="yes", equal_head_dims=False)
    sources = (target.partition(":")[0],) if isinstance(target, str) else (getattr(target, "__module__", ""),)
    add(
        Implementation(
            stage, key, target, caps, workspace, sources=sources, extra_reasons=extra_reasons, fp8_archs=fp8_archs, prepare_qkv=prepare_qkv
        ),
        replace=replace,
    )
    order = _user_order.setdefault(stage, [])
    if key in order:
        order.remove(key)
    if auto:
        order.insert(0, key)


def unregister(stage: str, key: str) -> None:
    """Take a key of yours out again. Raises ValueError for an unknown or a built-in one."""
    global version
    load_plugins()
    known = _table.get((stage, key))
    if known is None:
        raise ValueError(f"key: expected one registered for {stage}, got {key!r}")
    if known.built_in:
        raise ValueError(f"key: {key!r} is m3attn's own and cannot be unregistered")
    del _table[(stage, key)]
    if key in _user_order.get(stage, []):
        _user_order[stage].remove(key)
    version += 1


def implementations(stage: str | None = None) -> list[Implementation]:
    """Every implementation, of one stage or of all, built-in ones first.

    Raises:
        ValueError: an unknown stage.
    """
    if stage is not None and stage not in STAGES:
        raise ValueError(f"stage: expected one of {', '.join(STAGES)}, got {stage!r}")
    load_plugins()
    return sorted(
        (i for i in _table.values() if stage in (None, i.stage)),
        key=lambda i: (STAGES.index(i.stage), not i.built_in),
    )


def find(stage: str, key: str) -> Implementation | None:
    load_plugins()
    return _table.get((stage, key))


def user_order(stage: str) -> list[str]:
    """The user's keys that auto may take, first choice first."""
    return _user_order.get(stage, [])


def load_plugins() -> dict[str, str | None]:
    """Load the packages of the entry-point group once; returns name -> None, or the error of a broken one.

    An entry point names a function without arguments that calls `m3attn.register`.
    """
    global _plugins, _loading_plugins
    if _plugins is not None or _loading_plugins:
        return _plugins or {}
    _loading_plugins = True
    found: dict[str, str | None] = {}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            entry.load()()
            found[entry.name] = None
        except Exception as error:  # a package that is broken must not take m3attn down; its error is listed
            found[entry.name] = f"{type(error).__name__}: {error}"
    _plugins, _loading_plugins = found, False
    return found
