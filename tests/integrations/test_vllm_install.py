"""`install` puts m3attn's functions where vLLM's are, if and only if it is the vLLM whose argument lists they have."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from m3attn.integrations import vllm as ours
from m3attn.integrations.vllm.engine import OPS, REPLACED, argument_list

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = {
    "minimax_m3_index_score": ("idx_q index_kv_cache block_table cu_seqlens_q seq_lens prefix_lens max_query_len max_seq_len num_kv_heads"),
    "minimax_m3_index_topk": "score cu_seqlens_q prefix_lens max_query_len topk init_blocks local_blocks out=None",
    "minimax_m3_index_decode": (
        "idx_q index_kv_cache block_table seq_lens max_seq_len topk init_blocks local_blocks num_kv_heads decode_query_len max_decode_query_len "
        "out=None score_out=None"
    ),
    "minimax_m3_sparse_attn": (
        "q kv_cache topk_idx block_table cu_seqlens_q seq_lens prefix_lens max_query_len num_kv_heads sm_scale output k_scale=None v_scale=None"
    ),
    "minimax_m3_sparse_attn_decode": (
        "q kv_cache topk_idx block_table seq_lens num_kv_heads sm_scale output decode_query_len k_scale=None v_scale=None"
    ),
}
"""The argument lists of vLLM 0.33.0, in order."""

FUNCTIONS = [function for functions in REPLACED.values() for function in functions]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_argument_lists_are_the_published_ones(function: Any) -> None:
    assert argument_list(function) == PUBLISHED[function.__name__].split()


def test_argument_lists_are_those_of_the_source() -> None:
    folder = Path(os.environ.get("M3ATTN_TEST_PEERS", ROOT / ".peers")) / OPS.replace(".", "/")
    if not folder.is_dir():
        pytest.skip("no folder with vLLM's kernels: M3ATTN_TEST_PEERS names one")
    import ast

    for module, functions in REPLACED.items():
        defined = {node.name: node.args for node in ast.parse((folder / f"{module}.py").read_text()).body if isinstance(node, ast.FunctionDef)}
        for function in functions:
            arguments = defined[function.__name__]
            names = [a.arg for a in arguments.args]
            first = len(names) - len(arguments.defaults)
            assert all(isinstance(d, ast.Constant) and d.value is None for d in arguments.defaults)
            assert [n if i < first else f"{n}=None" for i, n in enumerate(names)] == PUBLISHED[function.__name__].split()


def published(name: str) -> Any:
    scope: dict[str, Any] = {}
    exec(f"def {name}({', '.join(PUBLISHED[name].split())}): return 'theirs'", scope)
    return scope[name]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A vLLM with its functions' argument lists, and a module of it that has imported one of them; yields that module."""
    for name in ("vllm", "vllm.models", "vllm.models.minimax_m3", "vllm.models.minimax_m3.common", OPS):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module, functions in REPLACED.items():
        made = ModuleType(f"{OPS}.{module}")
        for function in functions:
            setattr(made, function.__name__, published(function.__name__))
        monkeypatch.setitem(sys.modules, made.__name__, made)
    user = ModuleType("vllm.models.minimax_m3.common.indexer")
    user.minimax_m3_index_decode = sys.modules[f"{OPS}.index_topk"].minimax_m3_index_decode  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, user.__name__, user)
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.33.0" if name == "vllm" else real(name))
    yield user
    ours.uninstall()


def test_installs_and_uninstalls(engine: ModuleType) -> None:
    attention = sys.modules[f"{OPS}.sparse_attn"]
    for _ in range(2):
        ours.install()
        assert engine.minimax_m3_index_decode is ours.minimax_m3_index_decode
        assert attention.minimax_m3_sparse_attn is ours.minimax_m3_sparse_attn
    ours.uninstall()
    assert [f() for f in (lambda: engine.minimax_m3_index_decode(*range(11)), lambda: attention.minimax_m3_sparse_attn(*range(11)))] == ["theirs"] * 2


def test_another_release_is_refused(engine: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.34.1")
    with pytest.raises(ours.UnknownEngine, match=r"expected release 0\.33.*got 0\.34\.1"):
        ours.install()
    assert engine.minimax_m3_index_decode is not ours.minimax_m3_index_decode


def test_other_arguments_are_refused_before_anything_changes(engine: ModuleType) -> None:
    attention = sys.modules[f"{OPS}.sparse_attn"]
    attention.minimax_m3_sparse_attn_decode = lambda q, kv_cache, window=None: None  # type: ignore[attr-defined]
    with pytest.raises(ours.UnknownEngine, match=r"minimax_m3_sparse_attn_decode: expected the arguments \(q, .*got \(q, kv_cache, window=None\)"):
        ours.install()
    del attention.minimax_m3_sparse_attn_decode
    with pytest.raises(ours.UnknownEngine, match="expected a function minimax_m3_sparse_attn_decode, got none"):
        ours.install()
    assert engine.minimax_m3_index_decode is not ours.minimax_m3_index_decode


def test_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(ours.UnknownEngine, match="got none installed"):
        ours.install()


def test_is_an_entry_point_of_the_general_plugins() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    target = project["entry-points"]["vllm.general_plugins"]["m3attn"]
    assert importlib.metadata.EntryPoint("m3attn", target, "vllm.general_plugins").load() is ours.install


def test_wrong_arguments_are_named() -> None:
    q, table, lens = torch.zeros(2, 4, 128), torch.zeros(2, 3, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    kv, ids = torch.zeros(3, 2, 128, 256), torch.zeros(2, 2, 4, dtype=torch.int32)
    out = torch.empty_like(q)
    with pytest.raises(ValueError, match="decode_query_len: expected 2 requests of 2 queries, got 2 query rows"):
        ours.minimax_m3_sparse_attn_decode(q, kv, ids, table, lens, 2, 1.0, out, 2)
    with pytest.raises(ValueError, match=r"kv_cache: expected \[pages, 4, 128, 2 \* D\]"):
        ours.minimax_m3_sparse_attn_decode(q, kv, ids, table, lens, 4, 1.0, out, 1)
    fp8, scale = kv.to(torch.float8_e4m3fn), torch.ones(1)
    with pytest.raises(ValueError, match="k_scale, v_scale: expected both or neither, got k_scale alone"):
        ours.minimax_m3_sparse_attn_decode(q, fp8, ids, table, lens, 2, 1.0, out, 1, k_scale=scale)
    with pytest.raises(NotImplementedError, match=r"k_scale: expected one element, got \[2, 384\]"):
        ours.minimax_m3_sparse_attn_decode(q, fp8, ids, table, lens, 2, 1.0, out, 1, torch.ones(2, 384), torch.ones(2, 384))
    index = torch.zeros(2, 4, 128), torch.zeros(3, 128, 128), table, lens
    with pytest.raises(ValueError, match="idx_q: expected num_kv_heads 2 index heads, got 4"):
        ours.minimax_m3_index_decode(*index, 384, 4, 0, 1, 2, 1, 1)
    with pytest.raises(ValueError, match="decode_query_len: expected at most max_decode_query_len 1, got 2"):
        ours.minimax_m3_index_decode(*index, 384, 4, 0, 1, 4, 2, 1)
