"""The sparse attention kernels in Triton's interpreter, against the formula in fp64 on the stored values."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from dataclasses import dataclass, replace

import pytest
import torch
from triton import knobs

from m3attn import workspace
from m3attn.batch import PagedBatch
from m3attn.calls import SparseAttentionCall
from m3attn.scales import Scale
from m3attn.triton_kernels import sparse_attention as sparse
from m3attn.workspace import WorkShape

if not knobs.runtime.interpret:
    pytest.skip("kernels were imported without TRITON_INTERPRET=1", allow_module_level=True)

torch.set_num_threads(1)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Case:
    q_lens: tuple[int, ...] = (2, 17)
    seq_lens: tuple[int, ...] = (70, 20)
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 64
    topk: int = 4
    block_size: int = 32
    page_size: int = 16
    q_dtype: torch.dtype = BF16
    kv_dtype: torch.dtype = BF16
    layout: str = "HND"
    sink: bool = False
    fp8_pv: bool = False
    scales: tuple[float, float, float] = (1.0, 1.0, 1.0)
    ids: str = "valid"
    padded_rows: int = 0
    max_seqlen_q: int | None = None


def pool(case: Case, num_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [pages, Hkv, page_size, D] in the case's layout, NaN everywhere."""
    heads, size, dim = case.kv_heads, case.page_size, case.head_dim

    def nan(*shape: int) -> torch.Tensor:
        return torch.full(shape, float("nan")).to(case.kv_dtype)

    if case.layout == "packed":
        both = nan(num_pages, heads, size, 2 * dim)
        return both[..., :dim], both[..., dim:]
    if case.layout == "NHD":
        return nan(num_pages, size, heads, dim).transpose(1, 2), nan(num_pages, size, heads, dim).transpose(1, 2)
    if case.layout == "layers":
        return nan(num_pages, 3, 2, heads, size, dim)[:, 1].unbind(1)
    if case.layout == "odd":
        return nan(num_pages, heads, size, dim + 1)[..., 1:], nan(num_pages, heads, size, dim + 1)[..., 1:]
    return nan(num_pages, heads, size, dim), nan(num_pages, heads, size, dim)


def choose_ids(case: Case, position: int, generator: torch.Generator) -> list[int]:
    """One row's ids: random visible blocks, ascending, then -1; or the same among entries that must be ignored."""
    visible = max(0, position // case.block_size + 1)
    picked = sorted(torch.randperm(visible, generator=generator)[: case.topk].tolist())
    if case.ids == "valid":
        return picked + [-1] * (case.topk - len(picked))
    junk = [INT32_MAX, -1, visible, -(2**31), visible + 1, 1 << 30]
    row = []
    for n, block in enumerate(reversed(picked[: case.topk // 2])):
        row += [junk[(position + n) % len(junk)], block]
    return row + [-1] * (case.topk - len(row))


def make(case: Case, seed: int = 0) -> SparseAttentionCall:
    generator = torch.Generator().manual_seed(seed)
    requests, tokens = len(case.q_lens), sum(case.q_lens) + case.padded_rows
    pages_each = [-(-n // case.page_size) for n in case.seq_lens]
    num_pages = sum(pages_each) + 2
    k, v = pool(case, num_pages)
    order = (torch.randperm(num_pages - 1, generator=generator) + 1).tolist()
    table = torch.full((requests, max(pages_each, default=0) + 2), INT32_MAX, dtype=torch.int32)
    for b, n in enumerate(case.seq_lens):
        for p in range(pages_each[b]):
            table[b, p] = page = order.pop()
            used = min(case.page_size, n - p * case.page_size)
            for cache in (k, v):
                cache[page, :, :used] = torch.randn(case.kv_heads, used, case.head_dim, generator=generator).to(case.kv_dtype)
    batch = PagedBatch.from_lengths(
        case.q_lens, case.seq_lens, table, page_size=case.page_size, block_size=case.block_size, max_seqlen_q=case.max_seqlen_q
    )
    num_heads = case.kv_heads * case.group
    q = torch.randn(tokens, num_heads + 1, case.head_dim, generator=generator).to(case.q_dtype)[:, 1:]
    ids = torch.full((tokens, case.kv_heads, case.topk), 1, dtype=torch.int32).transpose(0, 1)
    row = 0
    for q_len, seq_len in zip(case.q_lens, case.seq_lens, strict=True):
        for i in range(q_len):
            for h in range(case.kv_heads):
                ids[h, row] = torch.tensor(choose_ids(case, seq_len - q_len + i, generator), dtype=torch.int64).to(torch.int32)
            row += 1
    call = SparseAttentionCall(
        q=q,
        k=k,
        v=v,
        ids=ids,
        batch=batch,
        sm_scale=case.head_dim**-0.5,
        q_scale=Scale.of(case.scales[0], argument="q_scale"),
        k_scale=Scale.of(case.scales[1], argument="k_scale"),
        v_scale=Scale.of(case.scales[2], argument="v_scale"),
        sink_key=torch.randn(num_heads, case.head_dim, generator=generator) if case.sink else None,
        fp8_pv=case.fp8_pv,
        out=torch.full((tokens, num_heads, case.head_dim), float("nan"), dtype=BF16 if case.q_dtype == E4M3 else case.q_dtype),
        lse=torch.full((tokens, num_heads), float("nan")),
        workspace=None,
    )
    return replace(call, workspace=torch.full((sparse.workspace_bytes(work_shape(call)),), 0xFF, dtype=torch.uint8))


def work_shape(call: SparseAttentionCall) -> WorkShape:
    return WorkShape(
        tokens=call.q.shape[0],
        num_requests=call.batch.num_requests,
        num_q_heads=call.q.shape[1],
        num_kv_heads=call.k.shape[1],
        num_index_heads=call.k.shape[1],
        head_dim=call.q.shape[2],
        topk=call.ids.shape[2],
        max_seqlen_q=call.batch.max_seqlen_q,
        max_seqlen_k=call.batch.max_seqlen_k,
        block_size=call.batch.block_size,
        limit=workspace.workspace_limit(),
    )


def expected(call: SparseAttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    batch, page_size, block_size = call.batch, call.batch.page_size, call.batch.block_size
    q = call.q.double()
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], float("-inf"), dtype=torch.float64)
    group = q.shape[1] // call.k.shape[1]
    q_scale, k_scale, v_scale = (s.multiply(torch.ones((), dtype=torch.float64)) for s in (call.q_scale, call.k_scale, call.v_scale))
    for b, seq_len in enumerate(batch.seq_lens.tolist()):
        begin, end = batch.cu_seqlens_q[b : b + 2].tolist()
        for row in range(begin, end):
            position = seq_len - end + row
            for head in range(q.shape[1]):
                blocks = [n for n in call.ids[head // group, row].tolist() if 0 <= n <= position // block_size]
                keys = [j for n in blocks for j in range(n * block_size, min((n + 1) * block_size, position + 1))]
                if not keys:
                    continue
                where = [(int(batch.page_table[b, j // page_size]), j % page_size) for j in keys]
                k = torch.stack([call.k[p, head // group, s] for p, s in where]).double()
                v = torch.stack([call.v[p, head // group, s] for p, s in where]).double()
                logits = k @ q[row, head] * (call.sm_scale * q_scale * k_scale)
                lse[row, head] = torch.logsumexp(logits, 0)
                with_sink = logits
                if call.sink_key is not None:
                    sink = q[row, head] @ call.sink_key[head].double() * (call.sm_scale * q_scale)
                    with_sink = torch.cat([logits, sink[None]])
                out[row, head] = torch.softmax(with_sink, 0)[: len(keys)] @ v * v_scale
    return out, lse


def check(call: SparseAttentionCall) -> None:
    sparse.sparse_attention(call)
    out, lse = expected(call)
    # Roundings: of the weights (2^-9 in bf16, 2^-11 in fp16, 2^-4 in e4m3) and of the output, each at most a unit of the largest value.
    scale = out.abs().max().item() or 1.0
    unit = {FP32: 2.0**-18, FP16: 2.0**-9, BF16: 2.0**-7}[call.out.dtype]
    tolerance = scale * (unit if not call.fp8_pv else 2.0**-4)
    error = (call.out.double() - out).abs().max().item()
    assert error <= tolerance, f"output error {error} > {tolerance}"
    empty = lse == float("-inf")
    assert torch.equal(call.lse == float("-inf"), empty)
    assert call.out[empty].abs().max().item() == 0.0 if empty.any() else True
    assert (call.lse.double() - lse)[~empty].abs().max().item() < 1e-4 if (~empty).any() else True


PREFILL = Case()
DECODE = Case(q_lens=(1, 2, 1, 0), seq_lens=(70, 40, 5, 9))
CASES = {
    "prefill": PREFILL,
    "prefill_fp16": replace(PREFILL, q_dtype=FP16, kv_dtype=FP16, layout="packed"),
    "prefill_fp32": replace(PREFILL, q_dtype=FP32, kv_dtype=FP32, layout="NHD", sink=True),
    "prefill_widen": replace(PREFILL, kv_dtype=E4M3, layout="packed", scales=(1.0, 0.5, 2.0)),
    "prefill_widen_e5m2": replace(PREFILL, q_dtype=FP16, kv_dtype=E5M2, layout="layers"),
    "prefill_fp8": replace(PREFILL, q_dtype=E4M3, kv_dtype=E4M3, sink=True, scales=(1.5, 0.5, 2.0)),
    "prefill_fp8_pv": replace(PREFILL, q_dtype=E4M3, kv_dtype=E4M3, fp8_pv=True, scales=(1.5, 0.5, 2.0)),
    "prefill_widen_in_kernel": replace(PREFILL, q_lens=(2,), seq_lens=(70,), max_seqlen_q=17, topk=2, kv_dtype=E4M3),
    "prefill_fp8_pv_in_kernel": replace(PREFILL, q_lens=(2,), seq_lens=(70,), max_seqlen_q=17, topk=2, q_dtype=E4M3, kv_dtype=E4M3, fp8_pv=True),
    "prefill_junk_ids": replace(PREFILL, ids="junk", padded_rows=2, sink=True),
    "negative_positions": replace(PREFILL, q_lens=(19, 2), seq_lens=(7, 0), sink=True, padded_rows=1),
    "decode": DECODE,
    "decode_fp16_packed": replace(DECODE, q_dtype=FP16, kv_dtype=FP16, layout="packed", sink=True),
    "decode_fp32": replace(DECODE, q_dtype=FP32, kv_dtype=FP32, sink=True),
    "decode_widen": replace(DECODE, kv_dtype=E4M3, layout="NHD", sink=True, scales=(1.0, 0.5, 2.0)),
    "decode_widen_e5m2": replace(DECODE, kv_dtype=E5M2, layout="layers"),
    "decode_widen_odd_strides": replace(DECODE, q_dtype=FP16, kv_dtype=E4M3, layout="odd"),
    "decode_fp8": replace(DECODE, q_dtype=E4M3, kv_dtype=E4M3, sink=True, scales=(1.5, 0.5, 2.0)),
    "decode_fp8_pv": replace(DECODE, q_dtype=E4M3, kv_dtype=E4M3, fp8_pv=True, scales=(1.5, 0.5, 2.0)),
    "decode_fp8_pv_odd_strides": replace(DECODE, q_dtype=E4M3, kv_dtype=E4M3, fp8_pv=True, layout="odd"),
    "decode_junk_ids": replace(DECODE, ids="junk", padded_rows=2, sink=True),
    "verify_mixed": replace(DECODE, q_lens=(3, 1, 5, 0), seq_lens=(3, 131, 2, 0), padded_rows=1, max_seqlen_q=16),
    "all_padded": replace(DECODE, q_lens=(0, 0), seq_lens=(0, 0), padded_rows=3, sink=True),
    "group_1": replace(DECODE, group=1),
    "group_8_prefill": replace(PREFILL, q_lens=(4,), seq_lens=(40,), max_seqlen_q=17, group=8),
    "group_16": replace(DECODE, group=16, kv_heads=1),
    "group_32": replace(DECODE, group=32, kv_heads=1),
    "dim_128": replace(DECODE, head_dim=128, kv_heads=1),
    "dim_192": replace(DECODE, head_dim=192, kv_heads=1, sink=True),
    "dim_192_fp8": replace(DECODE, head_dim=192, kv_heads=1, q_dtype=E4M3, kv_dtype=E4M3),
    "dim_256_fp8": replace(DECODE, head_dim=256, kv_heads=1, q_dtype=E4M3, kv_dtype=E4M3, fp8_pv=True),
    "dim_192_prefill_widen": replace(PREFILL, q_lens=(5,), seq_lens=(40,), max_seqlen_q=17, head_dim=192, kv_heads=1, kv_dtype=E4M3),
    "block_16": replace(DECODE, block_size=16, page_size=16, topk=7),
    "block_256_pages_256": replace(DECODE, seq_lens=(300, 40, 5, 9), block_size=256, page_size=256, topk=2, kv_heads=1),
    "topk_1": replace(DECODE, topk=1),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_against_fp64(case: Case) -> None:
    check(make(case))


@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_scale_tensor_equals_float_and_none_equals_one(case: Case) -> None:
    small = replace(case, q_lens=(2,), seq_lens=(40,), q_dtype=E4M3, kv_dtype=E4M3, sink=True, max_seqlen_q=case.q_lens[1])
    results = []
    for scales in ((1.5, 0.5, 2.0), (1.0, 1.0, 1.0)):
        for as_tensor in (False, True):
            call = make(replace(small, scales=scales))
            if as_tensor:
                call = replace(call, **{f"{n}_scale": Scale(1.0, torch.tensor([s])) for n, s in zip("qkv", scales, strict=True)})
            sparse.sparse_attention(call)
            results.append((call.out, call.lse))
    for with_float, with_tensor in (results[:2], results[2:]):
        assert torch.equal(with_float[0], with_tensor[0]) and torch.equal(with_float[1], with_tensor[1])


def test_splits_change_only_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(DECODE, q_dtype=FP32, kv_dtype=FP32, sink=True)
    outputs = []
    for programs in (1, 16, 512):
        monkeypatch.setattr(sparse, "settings_override", sparse.Settings(16, 4, 2, programs))
        call = make(case)
        check(call)
        outputs.append(call.out)
    assert (outputs[0] - outputs[1]).abs().max() < 1e-5 and (outputs[0] - outputs[2]).abs().max() < 1e-5


def test_copies_go_group_by_group_under_a_small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(PREFILL, q_lens=(4, 3), seq_lens=(70, 20), max_seqlen_q=17, kv_dtype=E4M3, group=2)
    monkeypatch.setattr(sparse, "MIN_READS_TO_WIDEN", 1)
    at_once = make(case)
    sparse.sparse_attention(at_once)
    one_group = sparse._table_bytes(2, 3) + 2 * 3 * 32 * 64 * 4
    monkeypatch.setattr(workspace, "_limit", one_group + 100)
    one_by_one = make(case)
    assert one_by_one.workspace.numel() == one_group < at_once.workspace.numel()
    sparse.sparse_attention(one_by_one)
    assert torch.equal(at_once.out, one_by_one.out) and torch.equal(at_once.lse, one_by_one.lse)
    monkeypatch.setattr(workspace, "_limit", one_group - 1)
    in_kernel = make(case)
    assert in_kernel.workspace.numel() == 0
    check(in_kernel)


def test_no_tokens_and_no_requests() -> None:
    call = make(replace(DECODE, q_lens=(), seq_lens=(), padded_rows=2))
    sparse.sparse_attention(call)
    assert call.out.abs().max() == 0 and torch.all(call.lse == float("-inf"))
    call = make(replace(DECODE, q_lens=(0,), seq_lens=(9,)))
    sparse.sparse_attention(call)
    assert call.out.shape[0] == 0


def test_lse_is_optional() -> None:
    for case in (DECODE, PREFILL):
        small = replace(case, q_lens=case.q_lens[-2:], seq_lens=case.seq_lens[-2:])
        with_lse, without = make(small), replace(make(small), lse=None)
        sparse.sparse_attention(with_lse)
        sparse.sparse_attention(without)
        assert torch.equal(with_lse.out, without.out)
