"""Plans: what `update` writes and refuses, and page tables from other engines' descriptions."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from oracle import CONFIG, make_cache

from m3attn import LayerCache, M3DenseAttention, M3SparseAttention, PlanCapacity, StepPlan
from m3attn.plans.builders import pages_from_block_table, pages_from_csr, pages_from_req_to_token

SIZE = 16
LAYER = M3SparseAttention(CONFIG, page_size=SIZE)
TABLE = torch.arange(32, dtype=torch.int32).flip(0).view(4, 8)


def make_plan(**capacities: PlanCapacity) -> StepPlan:
    return StepPlan(LAYER.heads, LAYER.mode, 8 * SIZE, topk=CONFIG.topk, block_size=CONFIG.block_size, num_pages=32, **capacities)


SPLIT = {"decode": PlanCapacity(3, 5, 2), "prefill": PlanCapacity(2, 12, 10)}
WHOLE = {"prefill": PlanCapacity(5, 17, 10)}


def tensors(plan: StepPlan) -> dict[str, torch.Tensor]:
    found = {name: t for name, t in vars(plan).items() if isinstance(t, torch.Tensor)}
    for part in plan.parts:
        found |= {f"{part.name}.{name}": t for name, t in vars(part.batch).items() if isinstance(t, torch.Tensor)}
        found[f"{part.name}.requests"] = part.requests
    return found


@pytest.mark.parametrize("capacities", [SPLIT, WHOLE], ids=["split", "whole"])
def test_update_locates_every_token_in_any_order_of_requests(capacities: dict[str, PlanCapacity]) -> None:
    plan = make_plan(**capacities)
    addresses = {name: t.data_ptr() for name, t in tensors(plan).items()}
    for q_lens, seq_lens in (((7, 1, 2, 4), (40, 33, 2, 4)), ((1, 0, 10, 1), (128, 5, 10, 1)), ((2, 2), (1, 17))):
        plan.update(q_lens, seq_lens, TABLE[: len(q_lens)])
        positions, slots, requests = [], [], []
        for b, (n, length) in enumerate(zip(q_lens, seq_lens, strict=True)):
            for position in range(length - n, length):
                requests.append(b)
                positions.append(max(position, -1))
                slots.append(int(TABLE[b, position // SIZE]) * SIZE + position % SIZE if position >= 0 else -1)
        padding = [-1] * (plan.tokens - len(slots))
        assert plan.positions.tolist() == positions + padding
        assert plan.slots.tolist() == slots + padding
        assert plan.token_to_request.tolist() == requests + padding
        assert {name: t.data_ptr() for name, t in tensors(plan).items()} == addresses


def test_a_split_plan_sends_rows_to_their_part_and_back() -> None:
    plan = make_plan(**SPLIT)
    plan.update((7, 1, 2, 4), (40, 33, 2, 4), TABLE)
    decode, prefill = plan.parts
    assert (decode.batch.phase, prefill.batch.phase) == ("verify", "verify")
    assert decode.requests.tolist() == [1, 2, -1] and prefill.requests.tolist() == [0, 3]
    assert decode.batch.seq_lens.tolist() == [33, 2, 0] and prefill.batch.cu_seqlens_q.tolist() == [0, 7, 11]
    x = torch.arange(plan.tokens)[:, None].float() + 1
    arranged = plan.arrange(x)
    assert arranged[:3, 0].tolist() == [8, 9, 10] and arranged[5:16, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 14]
    buffer = plan.output(plan.tokens, 1, dtype=torch.float32)
    buffer[: plan.tokens].copy_(arranged)
    assert plan.restore(buffer)[:, 0].tolist() == [*range(1, 15), 0, 0, 0]
    same = plan.arrange(x.to(torch.float8_e4m3fn))
    assert torch.equal(same.float(), arranged.to(torch.float8_e4m3fn).float())


def test_what_the_decode_part_has_no_room_for_is_prefill() -> None:
    plan = make_plan(**SPLIT)
    for q_lens, decode, prefill in (((1, 2, 3, 1, 1), [0, 1, 3], [2, 4]), ((2, 2, 2, 1), [0, 1, 3], [2, -1]), ((0, 1), [1, -1, -1], [-1, -1])):
        plan.update(q_lens, (9,) * len(q_lens), TABLE[[0] * len(q_lens)])
        assert [part.requests.tolist() for part in plan.parts] == [decode, prefill]


@pytest.mark.parametrize(
    "q_lens, seq_lens, table, message",
    [
        ((1, 1), (3,), TABLE[:2], "q_lens and seq_lens: expected equal"),
        ((1,), (129,), TABLE[:1], "seq_lens: expected at most the plan's max_seqlen_k 128, got 129"),
        ((-1,), (3,), TABLE[:1], "q_lens: expected lengths >= 0, got -1 at index 0"),
        ((1,) * 6, (3,) * 6, TABLE.repeat(2, 1)[:6], "q_lens: expected at most 2 requests in the prefill part, got 3"),
        ((11,), (30,), TABLE[:1], "q_lens: expected at most max_seqlen_q 10 in the prefill part, got 11"),
        ((10, 3), (30, 30), TABLE[:2], "q_lens: expected at most 12 tokens in the prefill part, got 13"),
        ((1,), (40,), TABLE[:1, :2], "page_table: expected at least 3 columns for the longest request, got 2"),
        ((1,), (40,), [[1, 2]], "page_table: expected 3 pages for request 0, got 2"),
        ((1,), (20,), [[1, 32]], "page_table: expected page ids from 0 to 31, got 32"),
        ((1,), (20,), TABLE, r"page_table: expected \[1, pages\] int32 or int64, got \[4, 8\]"),
    ],
)
def test_update_refuses_before_it_writes(q_lens: tuple[int, ...], seq_lens: tuple[int, ...], table: object, message: str) -> None:
    plan = make_plan(**SPLIT)
    plan.update((1, 5), (9, 9), TABLE[:2])
    before = {name: t.clone() for name, t in tensors(plan).items()}
    with pytest.raises(ValueError, match=message):
        plan.update(q_lens, seq_lens, table)
    assert all(torch.equal(t, before[name]) for name, t in tensors(plan).items())


def test_pages_past_a_request_are_not_judged_and_lists_may_differ_in_length() -> None:
    plan = make_plan(**WHOLE)
    table = torch.full((2, 8), -7, dtype=torch.int64)
    table[0, 0], table[1, :2] = 5, torch.tensor([9, 3])
    plan.update((1, 2), (4, 17), table)
    by_table = plan.slots.clone()
    plan.update((1, 2), (4, 17), [[5], [9, 3, 1]])
    assert by_table[:3].tolist() == plan.slots[:3].tolist() == [5 * SIZE + 3, 9 * SIZE + 15, 3 * SIZE]


def test_refresh_follows_what_the_device_wrote() -> None:
    plan = make_plan(decode=PlanCapacity(3, 3, 1))
    plan.update((1, 1), (16, 20), TABLE[:2])
    plan.parts[0].batch.seq_lens[:2] += 1
    plan.refresh()
    assert plan.positions.tolist() == [16, 20, -1]
    assert plan.slots.tolist() == [int(TABLE[0, 1]) * SIZE, int(TABLE[1, 1]) * SIZE + 4, -1]


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"kv": torch.zeros(32, 2, 32, 256, dtype=torch.bfloat16)}, ValueError, "layer 0: batch.page_size: expected 32"),
        ({"kv": torch.zeros(32, 1, SIZE, 256, dtype=torch.bfloat16)}, ValueError, "layer 0: cache.k: expected the plan's 2 KV heads, got 1"),
        ({"kv": torch.zeros(32, 2, SIZE, 256)}, TypeError, "layer 0: cache.k: expected bf16 .mode bf16., got fp32"),
        ({"kv": torch.zeros(32, 2, SIZE, 128, dtype=torch.bfloat16)}, ValueError, "layer 0: cache: expected head dim 128, got 64"),
        ({"index_k": None}, ValueError, "layer 0: cache.index_k: expected"),
        ({"index_k": torch.zeros(31, SIZE, 128, dtype=torch.bfloat16)}, ValueError, "layer 0: cache.index_k: expected the 32 pages"),
        ({"index_k": torch.zeros(32, SIZE, 128)}, TypeError, "layer 0: cache.index_k: expected bf16"),
        ({"k_scale": -1.0}, ValueError, "layer 0: cache.k_scale"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused_when_the_plan_is_built(change: dict, error: type[Exception], message: str) -> None:
    good = make_cache(LAYER, 32)
    fields = {"kv": good.kv, "index_k": good.index_k} | change
    with pytest.raises(error, match=message):
        StepPlan.for_layers([LAYER], [LayerCache(**fields)], 64, prefill=PlanCapacity(1, 4, 4))


def test_a_layer_that_does_not_fit_is_refused_when_the_plan_is_built() -> None:
    def sparse(**changes: object) -> M3SparseAttention:
        return M3SparseAttention(dataclasses.replace(CONFIG, **changes), page_size=SIZE)

    def build(*layers: torch.nn.Module, length: int = 64) -> StepPlan:
        return StepPlan.for_layers(layers, [make_cache(layer, 8) for layer in layers], length, prefill=PlanCapacity(1, 4, 4))

    dense = M3DenseAttention(CONFIG, page_size=SIZE)
    assert build(dense, LAYER).ids is not None and build(dense).ids is None
    for other, message in (
        (sparse(topk=2), "layer 1: plan.topk: expected the layer's 2, got 3"),
        (sparse(block_size=32), "layer 1: plan.block_size: expected the layer's 32, got 16"),
        (sparse(num_q_heads=2), "layer 1: plan.heads: expected .Hq, Hkv. .2, 2., got .4, 2."),
        (M3DenseAttention(CONFIG, page_size=32), "layer 1: plan.mode.page_size: expected the layer's 32, got 16"),
        (M3DenseAttention(CONFIG, page_size=SIZE, kv_cache_dtype="fp8"), "layer 1: plan.mode.kv_dtype: expected the layer's fp8_e4m3, got bf16"),
        (M3SparseAttention(CONFIG, page_size=SIZE, index_cache_dtype="fp8"), "layer 1: plan.mode.index_q_dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            build(LAYER, other)
    with pytest.raises(ValueError, match=r"layer 0: plan\.max_seqlen_k: expected at most the 256 positions of cos_sin, got 300"):
        build(LAYER, length=300)
    with pytest.raises(ValueError, match=r"plan\.heads: expected index heads for a sparse layer, got a plan for dense layers"):
        LAYER.check(build(dense), make_cache(LAYER, 8))


def test_capacities_are_checked() -> None:
    with pytest.raises(ValueError, match="expected at least one capacity"):
        make_plan()
    with pytest.raises(ValueError, match=r"decode\.max_seqlen_q: expected at most 16"):
        make_plan(decode=PlanCapacity(1, 17, 17), prefill=PlanCapacity(1, 1, 1))
    with pytest.raises(ValueError, match="tokens: expected an int of at least 1"):
        PlanCapacity(1, 0, 1)


def buffers(rows: int = 4, columns: int = 5) -> dict[str, torch.Tensor]:
    return {"page_table_out": torch.full((rows, columns), -9, dtype=torch.int32), "seq_lens_out": torch.full((rows,), -9, dtype=torch.int32)}


EXPECTED = ([[7, 3, 9], [4, 0, 0], [0, 0, 0]], [2 * SIZE + 5, SIZE, 0])


def check_built(built: tuple[torch.Tensor, torch.Tensor | None], into: dict[str, torch.Tensor]) -> None:
    table, lengths = built
    assert table is into["page_table_out"] and lengths is into["seq_lens_out"]
    assert table[:3, :3].tolist() == EXPECTED[0] and lengths.tolist() == [*EXPECTED[1], 0]
    assert not table[3:].any() and not table[:, 3:].any()


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_page_tables_from_other_descriptions(integer: torch.dtype) -> None:
    table, lengths = torch.tensor(EXPECTED[0], dtype=integer), torch.tensor(EXPECTED[1], dtype=integer)
    into = buffers()
    check_built(pages_from_block_table(table, lengths, **into), into)
    into = buffers()
    indptr, indices = torch.tensor([0, 3, 4, 4], dtype=integer), torch.tensor([7, 3, 9, 4], dtype=integer)
    check_built(pages_from_csr(indptr, indices, torch.tensor([5, SIZE, 0], dtype=integer), page_size=SIZE, **into), into)
    into = buffers()
    req_to_token = torch.full((6, 4 * SIZE), 10**6, dtype=integer)
    for row, pages, length in zip((4, 0, 2), EXPECTED[0], EXPECTED[1], strict=True):
        for t in range(length):
            req_to_token[row, t] = pages[t // SIZE] * SIZE + t % SIZE
    check_built(pages_from_req_to_token(req_to_token, torch.tensor([4, 0, 2], dtype=integer), lengths, page_size=SIZE, **into), into)


def test_builders_bound_what_they_read_and_write() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    into = buffers(2, 2)
    table, lengths = pages_from_csr(torch.zeros(3, dtype=torch.int32), none, torch.zeros(2, dtype=torch.int32), page_size=SIZE, **into)
    assert not table.any() and lengths is not None and not lengths.any()
    wild = torch.tensor([0, 900, 1800], dtype=torch.int32)
    pages_from_csr(wild, torch.arange(3, dtype=torch.int32), torch.ones(2, dtype=torch.int32), page_size=SIZE, **into)
    pages_from_req_to_token(torch.zeros(2, 8, dtype=torch.int32), torch.tensor([-3, 99]), torch.tensor([10**6, 1]), page_size=SIZE, **into)
    pages_from_block_table(torch.full((2, 9), 6, dtype=torch.int32), torch.tensor([900, 1]), **into)
    assert into["page_table_out"].eq(6).all()
    with pytest.raises(ValueError, match="page_table_out: expected at least 3 rows, got 2"):
        pages_from_block_table(torch.zeros(3, 1, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), **into)
    with pytest.raises(TypeError, match=r"page_table_out: expected torch\.int32"):
        pages_from_block_table(torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), page_table_out=torch.zeros(1, 1).long())


BUILDERS = {
    "block_table": (pages_from_block_table, (TABLE[:3], torch.tensor([37, 16, 0])), {}),
    "csr": (pages_from_csr, (torch.tensor([0, 3, 4, 4]), torch.tensor([7, 3, 9, 4]), torch.tensor([5, SIZE, 0])), {"page_size": SIZE}),
    "req_to_token": (
        pages_from_req_to_token,
        (torch.arange(6 * 64, dtype=torch.int32).view(6, 64), torch.tensor([4, 0, 2]), torch.tensor([37, 16, 0])),
        {"page_size": SIZE},
    ),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_builders_compile_without_a_graph_break(name: str) -> None:
    """No device value is read on the host: with one the trace would break."""
    (build, arguments, options), into, twin = BUILDERS[name], buffers(), buffers()
    torch._dynamo.reset()
    torch.compile(build, backend="eager", fullgraph=True)(*arguments, **options, **into)
    build(*arguments, **options, **twin)
    assert all(torch.equal(into[key], twin[key]) for key in into) and bool((into["seq_lens_out"][:2] > 0).all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", BUILDERS)
def test_a_graph_holds_a_builder(name: str) -> None:
    """Replayed on other lengths and pages, equal to an eager call."""
    build, arguments, options = BUILDERS[name]
    arguments = tuple(t.cuda() for t in arguments)
    into, twin = ({key: t.cuda() for key, t in buffers().items()} for _ in range(2))
    build(*arguments, **options, **into)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        build(*arguments, **options, **into)
    for tensor in arguments[-1:] if name == "csr" else arguments[:: len(arguments) - 1]:
        tensor.copy_(tensor.flip(0))
    graph.replay()
    build(*arguments, **options, **twin)
    assert all(torch.equal(into[key], twin[key]) for key in into)


@pytest.mark.parametrize("capacities", [SPLIT, WHOLE], ids=["split", "whole"])
def test_refresh_compiles_without_a_graph_break(capacities: dict[str, PlanCapacity]) -> None:
    plan = make_plan(**capacities)
    plan.update((7, 1, 2, 4), (40, 33, 2, 4), TABLE)
    slots = plan.slots.clone()
    plan.slots.fill_(-5)
    torch.compile(lambda: plan.refresh(), backend="aot_eager", fullgraph=True)()
    assert torch.equal(plan.slots, slots)


def test_an_index_cache_with_pages_of_its_own() -> None:
    """Slots and tables of both caches, in place, in split and whole plans; wrong use is refused before anything is written."""
    for capacities in (SPLIT, WHOLE):
        plan = make_plan(own_index_pages=True, num_index_pages=50, **capacities)
        index_table = TABLE + 18
        plan.update((7, 1, 2, 4), (40, 33, 2, 4), TABLE, index_table)
        assert torch.equal(plan.index_slots, torch.where(plan.slots < 0, -1, plan.slots + 18 * SIZE))
        for part in plan.parts:
            live = part.batch.seq_lens > 0
            assert torch.equal(part.index_batch.page_table[live], part.batch.page_table[live] + 18)
            assert part.index_batch.seq_lens is part.batch.seq_lens
        before = {name: t.clone() for name, t in tensors(plan).items()}
        for table, message in (
            (None, "index_page_table: expected one, as the plan was built"),
            (index_table + 1, "index_page_table: expected page ids from 0 to 49, got 50"),
            ([[1], [2]], r"index_page_table: expected 3 pages for request 0, got 1"),
        ):
            with pytest.raises(ValueError, match=message):
                plan.update((1, 1), (40, 20), TABLE[:2], table if table is None or isinstance(table, list) else table[:2])
            assert all(torch.equal(t, before[name]) for name, t in tensors(plan).items())
    shared = make_plan(**WHOLE)
    assert shared.index_slots is shared.slots and shared.parts[0].index_batch is shared.parts[0].batch
    with pytest.raises(ValueError, match="index_page_table: expected None, as the plan was built"):
        shared.update((1,), (1,), TABLE[:1], TABLE[:1])
    with pytest.raises(ValueError, match="own_index_pages: expected False in a plan for dense layers"):
        StepPlan((4, 2, 0), LAYER.mode, 64, prefill=PlanCapacity(1, 1, 1), own_index_pages=True)
    few = LayerCache(kv=torch.zeros(32, 2, SIZE, 256, dtype=torch.bfloat16), index_k=torch.zeros(49, SIZE, 128, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"cache\.index_k: expected at least the plan's 50 pages, got 49"):
        make_plan(own_index_pages=True, num_index_pages=50, **WHOLE).check_cache(few, sparse=True)
