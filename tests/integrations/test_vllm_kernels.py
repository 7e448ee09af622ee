"""The functions in vLLM's arguments: against exact results on any device, and against vLLM's own kernels on a GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_steps import PAGE, EngineStep, engine_step

import m3attn
from m3attn.integrations import vllm as ours

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOPK, SM_SCALE = 3, 128**-0.5
DECODE = [(1, [600, 0, 1, 129]), (2, [513, 1, 0, 300]), (3, [128, 640, 0]), (4, [0, 517, 2, 385])]
"""(queries of each request, lengths): padded requests, and queries before a request's start."""
PREFILL = [([70, 17, 1], [70, 530, 129]), ([200], [640])]
"""Whole prompts, and chunks behind a prefix."""
FORMATS = [(None, "HND"), (None, "NHD"), (E4M3, "HND"), (E4M3, "NHD"), (E5M2, "NHD")]


def scores_of(functions: Any, step: EngineStep) -> torch.Tensor:
    options = (step.table, step.offsets, step.lengths, step.prefixes, max(step.q_lens), step.max_seq_len, step.heads)
    return functions.minimax_m3_index_score(step.index_q, step.index_k, *options)


def prefill_ids(functions: Any, step: EngineStep, scores: torch.Tensor, *forced: int, topk: int = TOPK, **out: Any) -> torch.Tensor:
    return functions.minimax_m3_index_topk(scores, step.offsets, step.prefixes, max(step.q_lens), topk, *forced, **out)


def decode_ids(functions: Any, step: EngineStep, *forced: int, topk: int = TOPK, **out: Any) -> torch.Tensor:
    queries = step.q_lens[0]
    options = (step.table, step.lengths, step.max_seq_len, topk, *forced, step.heads, queries, max(queries, 4))
    return functions.minimax_m3_index_decode(step.index_q, step.index_k, *options, **out)


def attend(functions: Any, step: EngineStep, ids: torch.Tensor, *, decode: bool) -> torch.Tensor:
    out = torch.full_like(step.q, float("nan"))
    scales = {"k_scale": step.k_scale, "v_scale": step.v_scale}
    if decode:
        where = (step.table, step.lengths, step.heads, SM_SCALE, out, step.q_lens[0])
        functions.minimax_m3_sparse_attn_decode(step.q, step.kv, ids, *where, **scales)
    else:
        where = (step.table, step.offsets, step.lengths, step.prefixes, max(step.q_lens), step.heads, SM_SCALE, out)
        functions.minimax_m3_sparse_attn(step.q, step.kv, ids, *where, **scales)
    return out


def chosen(scores: torch.Tensor, step: EngineStep, init: int, local: int, topk: int = TOPK) -> torch.Tensor:
    """The blocks that exact scores choose, ascending, -1 behind them."""
    ids = torch.full((*scores.shape[:2], topk), -1)
    for row, (_, position) in enumerate(step.rows):
        blocks = position // PAGE + 1 if position >= 0 else 0
        for head in range(scores.shape[0]):
            own = scores[head, row, :blocks].clone()
            own[:init] = 1e30
            own[max(0, blocks - local) :] = 1e31
            best = own.topk(min(topk, blocks)).indices.sort().values
            ids[head, row, : best.shape[0]] = best
    return ids


def decode_step(queries: int, lengths: list[int], **options: Any) -> EngineStep:
    return engine_step([queries] * len(lengths), lengths, **options)


@pytest.mark.parametrize("forced", [(0, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("queries, lengths", DECODE)
def test_decode_ids(queries: int, lengths: list[int], forced: tuple[int, int]) -> None:
    step = decode_step(queries, lengths)
    exact = step.scores()
    expected = chosen(exact, step, *forced)
    assert torch.equal(decode_ids(ours, step, *forced).long(), expected)
    # As the engine does it: into a token-major buffer that has room for more tokens.
    buffer = torch.full((step.q.shape[0] + 5, step.heads, TOPK), 77, dtype=torch.int32)
    score_out = torch.full((step.heads, step.q.shape[0] + 2, 9), 5.0)
    ids = decode_ids(ours, step, *forced, out=buffer.transpose(0, 1), score_out=score_out)
    assert torch.equal(ids.long(), expected) and ids.data_ptr() == buffer.data_ptr()
    assert (buffer[step.q.shape[0] :] == 77).all() and (score_out[:, step.q.shape[0] :] == 5).all()
    for row, (_, position) in enumerate(step.rows):
        blocks = position // PAGE + 1 if position >= 0 else 0
        last = max(0, blocks - forced[1])
        assert (score_out[:, row, last:blocks].double() == torch.tensor(1e29).double()).all()
        assert (score_out[:, row, : min(forced[0], last)].double() == torch.tensor(1e30).double()).all()
        between = slice(min(forced[0], last), last)
        torch.testing.assert_close(score_out[:, row, between].double(), exact[:, row, between], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("q_lens, seq_lens", PREFILL)
def test_prefill_scores_and_ids(q_lens: list[int], seq_lens: list[int]) -> None:
    step = engine_step(q_lens, seq_lens)
    exact, scores = step.scores(), scores_of(ours, step)
    torch.testing.assert_close(scores.double(), exact, rtol=1e-4, atol=1e-4)
    buffer = torch.full((step.q.shape[0] + 5, step.heads, TOPK), 77, dtype=torch.int32)
    ids = prefill_ids(ours, step, scores, 0, 1, out=buffer.transpose(0, 1)[:, 2:])
    assert torch.equal(ids.long(), chosen(exact, step, 0, 1)) and (buffer[:2] == 77).all() and (buffer[-3:] == 77).all()
    padded = torch.nn.functional.pad(scores, (0, 11), value=float("nan"))  # the engine's own scores have columns that nobody wrote
    assert torch.equal(prefill_ids(ours, step, padded, 0, 1), ids)


@pytest.mark.parametrize("cache_dtype, layout", FORMATS, ids=str)
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "prefill"])
def test_attention(decode: bool, cache_dtype: torch.dtype | None, layout: str) -> None:
    options = {"cache_dtype": cache_dtype, "layout": layout}
    steps = [decode_step(*case, **options) for case in DECODE] if decode else [engine_step(*case, **options) for case in PREFILL]
    for step in steps:
        ids = chosen(step.scores(), step, 0, 1)
        shuffled = ids[..., torch.randperm(TOPK)].int()  # the engine's own ids come in order of score
        out = attend(ours, step, shuffled, decode=decode)
        torch.testing.assert_close(out.double(), step.attention(ids, SM_SCALE), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for a machine without a GPU")
def test_triton_in_the_interpreter() -> None:
    step = decode_step(2, [257, 0], heads=(2, 1))
    with m3attn.use("triton"):
        ids = decode_ids(ours, step, 0, 1, topk=2)
        out = attend(ours, step, ids, decode=True)
    assert torch.equal(ids.long(), chosen(step.scores(), step, 0, 1, topk=2))
    torch.testing.assert_close(out.double(), step.attention(ids, SM_SCALE), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def engine() -> Any:
    """vLLM's own functions, from vLLM or from a folder that holds their files (M3ATTN_TEST_PEERS; default .peers)."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    folder = os.environ.get("M3ATTN_TEST_PEERS", str(Path(__file__).resolve().parents[2] / ".peers"))
    sys.path.append(folder)
    try:
        from vllm.models.minimax_m3.common.ops import index_topk, sparse_attn
    except ImportError as error:
        pytest.skip(f"vLLM's kernels are not there ({error}): M3ATTN_TEST_PEERS names a folder with them")
    finally:
        sys.path.remove(folder)
    return SimpleNamespace(**{n: f for m in (index_topk, sparse_attn) for n, f in vars(m).items() if n.startswith("minimax_m3_")})


GPU_DECODE = [(q, [5000, 0, 1 + q, 4097, 128 * 17, 0]) for q in (1, 2, 3, 4)]
GPU_PREFILL = [([700, 65, 1], [700, 4200, 129]), ([300, 17], [5000, 2049])]
HEADS = [(64, 4), (16, 1)]


def same_choice(a: torch.Tensor, b: torch.Tensor, exact: torch.Tensor) -> None:
    """Equal as sets, but for blocks whose exact scores are equal within rounding; the number of exchanges is printed."""
    differing = (a.sort(-1).values != b.sort(-1).values).any(-1).nonzero().tolist()
    for head, row in differing:
        only_a, only_b = (set(x[head, row].tolist()) - set(y[head, row].tolist()) for x, y in ((a, b), (b, a)))
        values = exact[head, row, sorted((only_a | only_b) - {-1})]
        assert -1 not in only_a | only_b and values.max() - values.min() < 1e-3 * values.abs().max(), (head, row, only_a, only_b)
    print(f"{len(differing)} of {a.shape[0] * a.shape[1]} rows exchange blocks of equal score")


@pytest.mark.gpu
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("queries, lengths", GPU_DECODE)
def test_decode_ids_are_the_engines(engine: Any, queries: int, lengths: list[int], heads: tuple[int, int]) -> None:
    step = decode_step(queries, lengths, heads=heads, dtype=torch.bfloat16, device="cuda")
    ids = [decode_ids(functions, step, 0, 1, topk=16) for functions in (ours, engine)]
    same_choice(*ids, step.scores())


@pytest.mark.gpu
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("q_lens, seq_lens", GPU_PREFILL)
def test_prefill_scores_and_ids_are_the_engines(engine: Any, q_lens: list[int], seq_lens: list[int], heads: tuple[int, int]) -> None:
    step = engine_step(q_lens, seq_lens, heads=heads, dtype=torch.bfloat16, device="cuda")
    exact, scores = step.scores(), [scores_of(functions, step) for functions in (ours, engine)]
    visible = exact > float("-inf")
    mine, their = (x[..., : exact.shape[2]][visible] for x in scores)
    torch.testing.assert_close(mine, their, rtol=1e-4, atol=1e-3)
    same_choice(*(prefill_ids(f, step, s, 0, 1, topk=16) for f, s in zip((ours, engine), scores, strict=True)), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("cache_dtype, layout", FORMATS, ids=str)
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "prefill"])
def test_attention_is_the_engines(engine: Any, decode: bool, cache_dtype: torch.dtype | None, layout: str, heads: tuple[int, int]) -> None:
    options: dict[str, Any] = {"cache_dtype": cache_dtype, "layout": layout, "heads": heads, "dtype": torch.bfloat16, "device": "cuda"}
    steps = [decode_step(*case, **options) for case in GPU_DECODE] if decode else [engine_step(*case, **options) for case in GPU_PREFILL]
    for step in steps:
        ids = decode_ids(ours, step, 0, 1, topk=16) if decode else prefill_ids(ours, step, scores_of(ours, step), 0, 1, topk=16)
        mine, their = (attend(functions, step, ids, decode=decode) for functions in (ours, engine))
        live = torch.tensor([position >= 0 for _, position in step.rows], device="cuda")
        assert (mine[~live] == 0).all()  # the engine's may be NaN there
        exact = step.attention(ids, SM_SCALE)[live]
        error, their_error = ((x[live].double() - exact).abs() for x in (mine, their))
        assert error.max() <= 2 * their_error.max() + 1e-3 and error.mean() <= 1.5 * their_error.mean() + 1e-5
        torch.testing.assert_close(mine[live], their[live], rtol=2e-2, atol=2e-2)
