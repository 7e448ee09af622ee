"""`selected_page_table`: dense attention over the page tables of the selected blocks is sparse attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import m3attn
from m3attn import Capabilities, LayerCache, PagedBatch, UnsupportedProblem, heads_as_pages, selected_page_table
from m3attn.testing.bounds import attention_bound
from m3attn.testing.cases import LAYOUTS, AttentionCase, Step
from m3attn.testing.inputs import AttentionInputs, attention_inputs
from m3attn.testing.matrix import DEVICE, arch, keys, needs_zeroed, pick, skip_if_declined

BLOCK, PAGE = pick((32, 16), (128, 128))
DECODE = Step("decode", (1, 1, 1, 1), (5 * BLOCK, 2 * BLOCK + 9, 0, 1), page_size=PAGE, block_size=BLOCK, padded_rows=2, slack=BLOCK)
VERIFY = Step("verify", (4, 1, 3), (5 * BLOCK + 2, 3 * BLOCK, 2), page_size=PAGE, block_size=BLOCK, padded_rows=1)
PREFILL = Step("prefill", (pick(17, 300), 2), (pick(4, 40) * BLOCK + 3, 70), page_size=PAGE, block_size=BLOCK)
STEPS = [DECODE, VERIFY, PREFILL]


def case_of(step: Step, **options: object) -> AttentionCase:
    heads, topk = pick((4, 2), (64, 4)), pick(3, 16)
    return AttentionCase(step, *heads, pick(64, 128), topk=topk, **{"mode": pick("fp32", "bf16")} | options)


def as_requests(inputs: AttentionInputs, table: torch.Tensor, lengths: torch.Tensor) -> PagedBatch:
    """A batch in which every row of a flat table is a request of one query."""
    offsets = torch.arange(lengths.numel() + 1, dtype=torch.int32, device=lengths.device)
    return PagedBatch(table, lengths, offsets, 1, table.shape[1] * PAGE, PAGE, BLOCK)


def dense_over_blocks(inputs: AttentionInputs, impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    """One call for all groups."""
    tokens, heads, dim = inputs.q.shape
    groups = inputs.ids.shape[0]
    table, lengths = selected_page_table(inputs.ids, inputs.batch, heads_as_pages=True)
    q, sink = inputs.q.reshape(tokens * groups, heads // groups, dim), inputs.options["sink_key"]
    assert sink is None
    batch = as_requests(inputs, table.flatten(0, 1), lengths.flatten())
    options = {name: value for name, value in inputs.options.items() if name != "sink_key"}
    out, lse = m3attn.dense_attention(q, heads_as_pages(inputs.cache), batch, **options, return_lse=True, impl=impl)
    return out.view(tokens, heads, -1), lse.view(tokens, heads)


def dense_group_by_group(inputs: AttentionInputs, impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A call a group, over one head's view of the cache, in any layout."""
    table, lengths = selected_page_table(inputs.ids, inputs.batch)
    k, v = inputs.cache.key_value()
    parts = []
    for group, (q, sink) in enumerate(zip(inputs.q.chunk(k.shape[1], dim=1), split_sink(inputs, k.shape[1]), strict=True)):
        cache = replace(inputs.cache, k=k[:, group : group + 1], v=v[:, group : group + 1], kv=None)
        batch = as_requests(inputs, table[:, group].contiguous(), lengths[:, group].contiguous())
        parts.append(m3attn.dense_attention(q, cache, batch, **inputs.options | {"sink_key": sink}, return_lse=True, impl=impl))
    return torch.cat([out for out, _ in parts], dim=1), torch.cat([lse for _, lse in parts], dim=1)


def split_sink(inputs: AttentionInputs, groups: int) -> list[torch.Tensor | None]:
    sink = inputs.options["sink_key"]
    return [None] * groups if sink is None else list(sink.chunk(groups))


def check(inputs: AttentionInputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    attention_bound(inputs.q, inputs.cache, inputs.batch, inputs.ids, **inputs.options).check(out, lse)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
@pytest.mark.parametrize("ids", ["ascending", "scattered"])
@pytest.mark.parametrize("key", keys("dense_attention"))
def test_one_dense_call_is_sparse_attention(key: str, ids: str, step: Step) -> None:
    case = case_of(step, layout="hnd" if ids == "ascending" else "packed", ids=ids, zero_on_alloc=needs_zeroed("dense_attention", key))
    skip_if_declined("dense_attention", key, case.problem(arch()))
    inputs = attention_inputs(case, DEVICE)
    check(inputs, *dense_over_blocks(inputs, key))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_call_a_group_takes_any_layout_and_a_sink(layout: str) -> None:
    inputs = attention_inputs(case_of(VERIFY, layout=layout, sink=torch.float32), DEVICE)
    check(inputs, *dense_group_by_group(inputs, pick("reference", "triton")))


def test_rows_without_the_own_block_read_whole_blocks() -> None:
    inputs = attention_inputs(case_of(DECODE), DEVICE)
    inputs.ids.copy_(torch.where(inputs.ids > 0, inputs.ids - 1, inputs.ids))
    inputs.ids.copy_(torch.where(inputs.ids == inputs.ids.roll(1, -1), -1, inputs.ids))
    _, lengths = selected_page_table(inputs.ids, inputs.batch)
    assert lengths[0].eq((inputs.ids[:, 0] >= 0).sum(-1) * BLOCK).all()
    check(inputs, *dense_over_blocks(inputs, pick("reference", "triton")))


def test_tables_and_lengths() -> None:
    table = torch.tensor([[9, 8, 7, 6, -4, 2**30]], dtype=torch.int32, device=DEVICE)
    batch = PagedBatch.from_lengths([2], [3 * 32 - 20], table, page_size=16, block_size=32, max_seqlen_k=96)
    ids = torch.tensor([[[0, 2, -1], [1, 2, 0]], [[-1, -1, -1], [5, 2, 3]]], dtype=torch.int32, device=DEVICE)
    pages, lengths = selected_page_table(ids, batch)
    assert lengths.tolist() == [[32 + 11, 0], [64 + 12, 12]]
    assert pages.tolist() == [[[9, 8, -4, 0, 0, 0], [0] * 6], [[9, 8, 7, 6, -4, 0], [-4, 0, 0, 0, 0, 0]]]
    by_head, _ = selected_page_table(ids, batch, heads_as_pages=True)
    assert by_head[0, 0, :2].tolist() == [18, 16] and by_head[1, 0, :2].tolist() == [18, 16] and by_head[1, 1, 0].item() == -7
    out = {"page_table_out": torch.full((2, 2, 6), -9, dtype=torch.int32, device=DEVICE), "seq_lens_out": torch.full_like(lengths, -9)}
    filled = selected_page_table(ids, batch, **out)
    assert filled[0] is out["page_table_out"] and filled[1] is out["seq_lens_out"]
    assert torch.equal(filled[0], pages) and torch.equal(filled[1], lengths)
    empty = PagedBatch.from_lengths([], [], torch.zeros(0, 0, dtype=torch.int32, device=DEVICE), page_size=16, block_size=32)
    assert not any(t.any() for t in selected_page_table(ids, empty, **out))


def test_it_compiles_without_a_graph_break_and_can_be_captured() -> None:
    inputs = attention_inputs(case_of(VERIFY), DEVICE)
    expected = selected_page_table(inputs.ids, inputs.batch, heads_as_pages=True)
    run = torch.compile(lambda ids: selected_page_table(ids, inputs.batch, heads_as_pages=True), backend="aot_eager", fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(run(inputs.ids), expected, strict=True))
    if DEVICE == "cuda":
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = selected_page_table(inputs.ids, inputs.batch, heads_as_pages=True)
        inputs.ids.copy_(inputs.ids.flip(0))
        graph.replay()
        fresh = selected_page_table(inputs.ids, inputs.batch, heads_as_pages=True)
        assert all(torch.equal(a, b) for a, b in zip(captured, fresh, strict=True))


def test_a_mode_that_the_dense_kernel_lacks_is_refused() -> None:
    m3attn.register("dense_attention", "plain", lambda call: None, capabilities=Capabilities(cpu="yes", modes=("bf16", "fp16")))
    try:
        for mode in ("widen_e4m3", "fp8"):
            inputs = attention_inputs(case_of(DECODE, mode=mode), DEVICE)
            with pytest.raises(UnsupportedProblem, match=rf"mode {mode.partition('_')[0]}: takes bf16, fp16"):
                dense_over_blocks(inputs, "plain")
    finally:
        m3attn.unregister("dense_attention", "plain")


def test_heads_that_do_not_follow_each_other_are_refused() -> None:
    for layout, name in (("nhd", "k"), ("packed_nhd", "kv"), ("layers", "k")):
        cache = attention_inputs(case_of(DECODE, layout=layout), DEVICE).cache
        with pytest.raises(ValueError, match=rf"cache\.{name}: expected pages of {pick(2, 4)} heads one behind the other and nothing else"):
            heads_as_pages(cache)
    cache = heads_as_pages(LayerCache(kv=torch.zeros(3, 2, 16, 128), index_k=torch.zeros(3, 16, 64), k_scale=2.0, zero_on_alloc=True))
    assert cache.kv.shape == (6, 1, 16, 128) and cache.index_k is None and cache.k_scale == 2.0 and cache.zero_on_alloc


def test_wrong_arguments_are_named() -> None:
    inputs = attention_inputs(case_of(DECODE), DEVICE)
    for changed, message in (
        ({"ids": inputs.ids.long()}, "ids: expected torch.int32"),
        ({"ids": inputs.ids[0]}, r"ids: expected shape \[Hkv, T, K\]"),
        ({"page_table_out": torch.zeros(6, 2, 5, dtype=torch.int32, device=DEVICE)}, r"page_table_out: expected shape"),
        (
            {"seq_lens_out": torch.zeros(6, 9, dtype=torch.int32, device=DEVICE)[:, : inputs.ids.shape[0]]},
            "seq_lens_out: expected a contiguous tensor",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            selected_page_table(**{"ids": inputs.ids, "batch": inputs.batch} | changed)
