"""Dense attention and the merge of partial states, in Triton's interpreter, against a loop over rows in fp64."""

import os
import sys

os.environ.setdefault("TRITON_INTERPRET", "1")

from dataclasses import dataclass, field, replace

import pytest
import torch

from m3attn.batch import PagedBatch
from m3attn.calls import DenseAttentionCall, MergeAttentionStatesCall
from m3attn.scales import Scale
from m3attn.triton_kernels import dense_attention as dense
from m3attn.triton_kernels.merge_states import merge_attention_states
from m3attn.workspace import WorkShape, workspace_limit

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True)
class Case:
    """Lengths of a step, heads and formats; `rows` beyond the queries of all requests are padded rows."""

    q_lens: tuple[int, ...] = (5, 0, 9, 3)
    seq_lens: tuple[int, ...] = (37, 0, 9, 70)
    kv_heads: int = 2
    group: int = 2
    dim: int = 64
    page_size: int = 16
    q_dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    padded_rows: int = 2
    max_seqlen_q: int | None = None
    sink: bool = False
    lse: bool = True
    fp8_pv: bool = False
    packed: bool = False
    scales: tuple[float | None, float | None, float | None] = (None, None, None)
    device_scales: bool = False
    seed: int = field(default=0)


def make_call(case: Case) -> DenseAttentionCall:
    """A call whose unused pages, table entries and bytes past seq_len are NaN or garbage, and whose outputs start as NaN."""
    random = torch.Generator().manual_seed(case.seed)
    counts = [-(-n // case.page_size) for n in case.seq_lens]
    num_pages, columns = sum(counts) + 3, max(counts) + 2
    order = torch.randperm(num_pages, generator=random).int()
    table = torch.full((len(counts), columns + 3), 2**31 - 1, dtype=torch.int32)[:, :columns]
    width = 2 * case.dim
    kv = torch.full((num_pages, case.page_size, case.kv_heads, width), float("nan")).transpose(1, 2)
    used = 0
    for request, (count, length) in enumerate(zip(counts, case.seq_lens, strict=True)):
        table[request, :count] = order[used : used + count]
        used += count
        for position in range(length):
            page = table[request, position // case.page_size]
            kv[page, :, position % case.page_size] = torch.randn(case.kv_heads, width, generator=random)
    kv = kv.to(case.kv_dtype or case.q_dtype)
    k, v = kv[..., : case.dim], kv[..., case.dim :]
    if not case.packed:
        k, v = k.contiguous(), v.contiguous()
    rows, heads = sum(case.q_lens) + case.padded_rows, case.kv_heads * case.group
    q = torch.randn(rows, heads + 1, case.dim, generator=random).to(case.q_dtype)[:, :heads]
    out_dtype = torch.bfloat16 if case.q_dtype == E4M3 else case.q_dtype
    as_scale = [None if s is None else torch.tensor([s]) if case.device_scales else s for s in case.scales]
    q_scale, k_scale, v_scale = (Scale.of(s, argument="scale") for s in as_scale)
    batch = PagedBatch.from_lengths(case.q_lens, case.seq_lens, table, page_size=case.page_size, max_seqlen_q=case.max_seqlen_q)
    call = DenseAttentionCall(
        q=q,
        k=k,
        v=v,
        batch=replace(batch, page_table=table),
        sm_scale=case.dim**-0.5,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        sink_key=torch.randn(heads, case.dim, generator=random) * 2 if case.sink else None,
        fp8_pv=case.fp8_pv,
        out=torch.full((rows, heads, case.dim), float("nan"), dtype=out_dtype),
        lse=torch.full((rows, heads), float("nan")) if case.lse else None,
        workspace=None,
    )
    return with_workspace(call)


def work_shape(call: DenseAttentionCall) -> WorkShape:
    rows, heads, dim = call.q.shape
    batch = call.batch
    return WorkShape(
        rows, batch.num_requests, heads, call.k.shape[1], 0, dim, 0, batch.max_seqlen_q, batch.max_seqlen_k, batch.block_size, workspace_limit()
    )


def with_workspace(call: DenseAttentionCall) -> DenseAttentionCall:
    size = dense.workspace_bytes(work_shape(call))
    return replace(call, workspace=torch.full((size,), 255, dtype=torch.uint8) if size else None)


def expected(call: DenseAttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE in fp64, one request at a time, from keys and values gathered in order."""
    batch, group = call.batch, call.q.shape[1] // call.k.shape[1]
    out = torch.zeros(call.out.shape, dtype=torch.float64)
    lse = torch.full(call.out.shape[:2], float("-inf"), dtype=torch.float64)
    scale = [s.value * (1.0 if s.tensor is None else s.tensor.item()) for s in (call.q_scale, call.k_scale, call.v_scale)]
    offsets = batch.cu_seqlens_q.tolist()
    for request, length in enumerate(batch.seq_lens.tolist()):
        begin, end = offsets[request], offsets[request + 1]
        pages = batch.page_table[request, : -(-length // batch.page_size)].long()
        k, v = (t[pages].double().transpose(1, 2).flatten(0, 1)[:length].repeat_interleave(group, dim=1) for t in (call.k, call.v))  # [length, Hq, D]
        q = call.q[begin:end].double()
        logits = torch.einsum("thd,nhd->thn", q, k) * (call.sm_scale * scale[0] * scale[1])
        positions = length - (end - begin) + torch.arange(end - begin)
        visible = (torch.arange(length) <= positions[:, None])[:, None]
        logits = logits.masked_fill(~visible, float("-inf"))
        lse[begin:end] = torch.logsumexp(logits, -1) if length else float("-inf")
        total = lse[begin:end]
        if call.sink_key is not None:
            sink = torch.einsum("thd,hd->th", q, call.sink_key.double()) * (call.sm_scale * scale[0])
            total = torch.logaddexp(total, sink)
        weights = torch.where(visible, torch.exp(logits - total[..., None]), 0.0)
        out[begin:end] = torch.einsum("thn,nhd->thd", weights, v) * scale[2]
    return out, lse


def check(call: DenseAttentionCall, tolerance: float | None = None) -> None:
    dense.dense_attention(call)
    out, lse = expected(call)
    tolerance = TOLERANCE[call.out.dtype] if tolerance is None else tolerance
    empty = lse == float("-inf")
    assert (call.out[empty] == 0).all()
    torch.testing.assert_close(call.out.double(), out, atol=tolerance, rtol=tolerance)
    if call.lse is not None:
        assert (call.lse[empty] == float("-inf")).all()
        torch.testing.assert_close(call.lse.double(), lse, atol=1e-4, rtol=1e-4)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Small tiles, so that a short sequence takes several of them."""
    monkeypatch.setattr(dense, "settings_override", dense.Settings(32, 32, 4, 1))
    monkeypatch.setattr(dense, "MIN_SPLIT_KEYS", 16)
    monkeypatch.setattr(dense, "SPLIT_PROGRAMS", 32)


PREFILL = Case(max_seqlen_q=17)
DECODE = Case(q_lens=(1, 0, 3, 2), seq_lens=(37, 0, 2, 70))


@pytest.mark.parametrize("base", [PREFILL, DECODE], ids=["prefill", "decode"])
@pytest.mark.parametrize(
    "change",
    [
        dict(q_dtype=torch.float32),
        dict(q_dtype=torch.float16, packed=True),
        dict(q_dtype=torch.bfloat16, lse=False),
        dict(kv_dtype=E4M3, scales=(None, 0.5, 2.0)),
        dict(kv_dtype=E5M2, packed=True),
        dict(q_dtype=torch.float32, kv_dtype=E4M3),
        dict(q_dtype=E4M3, kv_dtype=E4M3, scales=(1.5, 0.5, 2.0), device_scales=True, sink=True),
        dict(sink=True, q_dtype=torch.float16),
    ],
    ids=["fp32", "fp16", "bf16", "widen_e4m3", "widen_e5m2", "widen_fp32", "fp8", "sink"],
)
def test_modes(base: Case, change: dict) -> None:
    case = replace(base, **change)
    check(make_call(case))


@pytest.mark.parametrize("base", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_fp8_pv(base: Case) -> None:
    check(make_call(replace(base, q_dtype=E4M3, kv_dtype=E4M3, fp8_pv=True)), 8e-2)


@pytest.mark.parametrize("base", [PREFILL, DECODE], ids=["prefill", "decode"])
@pytest.mark.parametrize("page_size", [16, 32, 128, 256])
def test_page_sizes(base: Case, page_size: int) -> None:
    check(make_call(replace(base, page_size=page_size, kv_heads=1)))


@pytest.mark.parametrize("base", [PREFILL, DECODE], ids=["prefill", "decode"])
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (3, 128), (8, 192), (16, 128), (32, 64), (5, 256)])
def test_groups_and_dims(base: Case, group: int, dim: int) -> None:
    check(make_call(replace(base, group=group, dim=dim, kv_heads=1, seed=group)))


@pytest.mark.parametrize("max_seqlen_q", [None, 17], ids=["decode", "prefill"])
def test_negative_positions_and_padding_are_empty(max_seqlen_q: int | None) -> None:
    case = Case(q_lens=(4, 2, 0, 1), seq_lens=(2, 0, 5, 33), padded_rows=9, sink=True, max_seqlen_q=max_seqlen_q)
    call = make_call(case)
    check(call)
    assert (call.out[:2] == 0).all() and (call.out[4:6] == 0).all() and (call.out[7:] == 0).all()


def test_decode_in_slices_of_tokens(monkeypatch) -> None:
    case = replace(DECODE, q_lens=(1, 2, 3, 2), seq_lens=(37, 20, 3, 70))
    whole = make_call(case)
    dense.dense_attention(whole)
    splits = dense.num_splits(work_shape(whole))
    assert splits > 1
    three_rows = 3 * dense._partial_bytes(work_shape(whole), splits, 1)
    for module in (sys.modules[__name__], dense):
        monkeypatch.setattr(module, "workspace_limit", lambda: three_rows)
    sliced = make_call(case)
    assert sliced.workspace.numel() < whole.workspace.numel()
    check(sliced)
    assert torch.equal(sliced.out, whole.out) and torch.equal(sliced.lse, whole.lse)


def test_splits_stay_within_a_small_limit() -> None:
    shape = WorkShape(1, 1, 64, 4, 0, 128, 0, 1, 1 << 20, 128, limit=1 << 20)
    assert dense.workspace_bytes(shape) <= shape.limit
    assert dense.workspace_bytes(replace(shape, max_seqlen_q=17)) == 0


@pytest.mark.parametrize("prefix", [0, 1, 31, 40])
def test_a_prefix_split_gives_the_same_rows(prefix: int) -> None:
    case = Case(q_lens=(45,), seq_lens=(45,), kv_heads=1, q_dtype=torch.float32, padded_rows=0)
    whole = make_call(case)
    dense.dense_attention(whole)
    rows = slice(prefix, None)
    batch = replace(whole.batch, cu_seqlens_q=torch.tensor([0, 45 - prefix], dtype=torch.int32), max_seqlen_q=45 - prefix)
    chunk = with_workspace(replace(whole, q=whole.q[rows], batch=batch, out=whole.out[rows].clone(), lse=whole.lse[rows].clone()))
    dense.dense_attention(chunk)
    torch.testing.assert_close(chunk.out, whole.out[rows], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(chunk.lse, whole.lse[rows], atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_page_ids_out_of_range_are_harmless() -> None:
    call = make_call(DECODE)
    call.batch.page_table.copy_(torch.randint(-(2**31), 2**31 - 1, call.batch.page_table.shape))
    dense.dense_attention(call)
    call = make_call(PREFILL)
    call.batch.page_table.fill_(2**30)
    dense.dense_attention(call)


def test_unit_scales_change_no_bit() -> None:
    plain = make_call(replace(DECODE, kv_dtype=E4M3, sink=True))
    scaled = make_call(replace(DECODE, kv_dtype=E4M3, sink=True, scales=(1.0, 1.0, 1.0), device_scales=True))
    dense.dense_attention(plain)
    dense.dense_attention(scaled)
    assert torch.equal(plain.out, scaled.out) and torch.equal(plain.lse, scaled.lse)


def test_no_requests_and_no_tokens() -> None:
    call = make_call(Case(q_lens=(1,), seq_lens=(3,), padded_rows=2))
    batch = replace(
        call.batch, page_table=call.batch.page_table[:0], seq_lens=call.batch.seq_lens[:0], cu_seqlens_q=torch.zeros(1, dtype=torch.int32)
    )
    dense.dense_attention(replace(call, batch=batch))
    assert (call.out == 0).all() and (call.lse == float("-inf")).all()
    dense.dense_attention(replace(call, q=call.q[:0], out=call.out[:0], lse=call.lse[:0]))


def partial_state(rows: int, heads: int, dim: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    out = torch.randn(rows, heads + 1, dim, generator=random).to(dtype)[:, :heads]
    return out, 3 * torch.randn(heads, rows, generator=random).t()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("dim", [64, 192, 512])
def test_merge_states(dtype: torch.dtype, dim: int) -> None:
    (out_a, lse_a), (out_b, lse_b) = partial_state(7, 3, dim, dtype, 1), partial_state(7, 3, dim, dtype, 2)
    empty_a, empty_b = (torch.zeros(7, 3, dtype=torch.bool) for _ in range(2))
    empty_a[:2], empty_b[1:4] = True, True
    for out, lse, empty in ((out_a, lse_a, empty_a), (out_b, lse_b, empty_b)):
        out[empty], lse[empty] = float("nan"), float("-inf")
    lse_b[3] = float("inf")
    out, lse = torch.full_like(out_a, float("nan")), torch.full((7, 3), float("nan"))
    merge_attention_states(MergeAttentionStatesCall(out_a, lse_a, out_b, lse_b, out, lse))

    assert (out[1] == 0).all() and (lse[1] == float("-inf")).all()
    assert torch.equal(out[0], out_b[0]) and torch.equal(lse[0], lse_b[0])
    assert torch.equal(out[2:4], out_a[2:4]) and torch.equal(lse[2:4], lse_a[2:4])
    a, b = lse_a[4:].double(), lse_b[4:].double()
    both = torch.logaddexp(a, b)
    merged = out_a[4:].double() * (a - both).exp()[..., None] + out_b[4:].double() * (b - both).exp()[..., None]
    torch.testing.assert_close(out[4:].double(), merged, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(lse[4:].double(), both, atol=1e-5, rtol=1e-5)


def test_merge_states_agrees_with_attention_over_all_keys() -> None:
    call = make_call(Case(q_lens=(3,), seq_lens=(40,), kv_heads=1, q_dtype=torch.float32, padded_rows=0))
    dense.dense_attention(call)
    k, v = (t[call.batch.page_table[0, :3].long()].transpose(1, 2).flatten(0, 1)[:, 0] for t in (call.k, call.v))  # [48, D]
    logits = torch.einsum("thd,nd->thn", call.q, k) * call.sm_scale
    parts = []
    for keys in (slice(0, 17), slice(17, 38)):
        lse = torch.logsumexp(logits[:1, :, keys], -1)
        parts += [torch.softmax(logits[:1, :, keys], -1) @ v[keys], lse]
    out, lse = torch.empty_like(parts[0]), torch.empty_like(parts[1])
    merge_attention_states(MergeAttentionStatesCall(*parts, out, lse))
    torch.testing.assert_close(out, call.out[:1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, call.lse[:1], atol=1e-5, rtol=1e-5)
