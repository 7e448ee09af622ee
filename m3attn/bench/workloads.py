"""What is run for one stage on one step: the calls, their cost, the check of their result, and the peers that do the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import m3attn
from m3attn.bench import parity, selections
from m3attn.bench.ceilings import Cost
from m3attn.bench.inputs import BLOCK_SIZE, HEAD_DIM, INDEX_DIM, TOPK, StepInputs
from m3attn.bench.parity import Parity, SampledRows
from m3attn.bench.peers import VLLM, Peers
from m3attn.bench.shapes import Step
from m3attn.reference import index as reference_index
from m3attn.rules import find_rule

SetCall = Callable[[int], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Workload:
    """One stage on one step.

    Attributes:
        run: `run(i, key)` calls implementation `key` on set i of the inputs and returns what `check` looks at.
        check: compares the result of set 0 with the reference on sampled rows.
        peers: name -> a call like `run` without a key.
        adapt_peer: turns a peer's result into what `check` takes, where their conventions differ.
        outputs: buffers that `run` writes; they are poisoned before a check.
        stream_bytes: what a decode step must at least read, for the streaming comparison.
        captured: where L2 is to be cold, what is timed is a CUDA graph of one call, whose host time does not count.
    """

    cost: Cost
    run: Callable[[int, str], torch.Tensor]
    check: Callable[[torch.Tensor], Parity]
    num_sets: int = 1
    outputs: tuple[torch.Tensor, ...] = ()
    peers: dict[str, SetCall] = field(default_factory=dict)
    adapt_peer: Callable[[torch.Tensor], torch.Tensor] = lambda result: result
    stream_bytes: int = 0
    captured: bool = False

    def poison(self) -> None:
        """Fill the outputs with values no implementation may leave behind."""
        for out in self.outputs:
            if out.dtype.itemsize == 1:
                out.view(torch.uint8).fill_(0x7F)
            else:
                out.fill_(float("nan") if out.dtype.is_floating_point else -7)


@dataclass(frozen=True, slots=True)
class Options:
    """What the builders of step stages share. `ids`: the blocks to attend to; None: those of `selection`."""

    selection: str | None
    sample_rows: int
    replay: bool
    peers: Peers | None = None
    rule: str = "topk"
    ids: torch.Tensor | None = None


def visible_pairs(step: Step, first_position: int = 0) -> int:
    """(query, key) pairs with key <= query over all requests, for queries at or past `first_position`."""
    low = max(step.prefix, first_position)
    return step.batch * sum_of_range(low + 1, step.seq_len) if low < step.seq_len else 0


def sum_of_range(first: int, last: int) -> int:
    return (first + last) * (last - first + 1) // 2


def visible_blocks(step: Step) -> int:
    """(query, block) pairs, the query's own block included."""
    whole, rest = divmod(step.seq_len, BLOCK_SIZE)
    before_whole, before_rest = divmod(step.prefix, BLOCK_SIZE)

    def up_to(blocks: int, extra: int) -> int:
        return BLOCK_SIZE * sum_of_range(1, blocks) + extra * (blocks + 1)

    return step.batch * (up_to(whole, rest) - up_to(before_whole, before_rest))


def score_cost(inputs: StepInputs, *, written: bool) -> Cost:
    """Products of every query with every visible key, each index key read once; scores written where the stage returns them.

    Without scores, queries that see at most K blocks need no product.
    """
    step, heads, item = inputs.step, inputs.heads.num_kv, inputs.mode.index.itemsize
    pairs = visible_pairs(step) if written else visible_pairs(step, TOPK * BLOCK_SIZE)
    flops = 2.0 * heads * INDEX_DIM * pairs
    moved = step.batch * step.seq_len * INDEX_DIM * item + step.tokens * heads * INDEX_DIM * item
    moved += heads * visible_blocks(step) * 4 if written else heads * step.tokens * TOPK * 4
    return Cost(moved, flops_8=flops) if item == 1 else Cost(moved, flops_16=flops)


def attention_cost(inputs: StepInputs, query_key_pairs: float, kv_tokens: float) -> Cost:
    """`query_key_pairs` counts (query head, key) pairs; `kv_tokens` counts (KV head, token) pairs that are read."""
    mode, step, heads = inputs.mode, inputs.step, inputs.heads
    out_item = 2 if mode.q.itemsize == 1 else mode.q.itemsize
    moved = kv_tokens * 2 * HEAD_DIM * mode.kv.itemsize + step.tokens * heads.num_q * HEAD_DIM * (mode.q.itemsize + out_item)
    half = 2.0 * HEAD_DIM * query_key_pairs
    if mode.fp8_pv:
        return Cost(moved, flops_8=2 * half)
    return Cost(moved, flops_16=half, flops_8=half) if mode.q.itemsize == 1 else Cost(moved, flops_16=2 * half)


def sparse_cost(inputs: StepInputs, ids: torch.Tensor) -> Cost:
    """Useful work of a selection: visible keys of the selected blocks, each distinct block of a request read once a KV head."""
    step, heads = inputs.step, inputs.heads
    position = (step.prefix + torch.arange(step.q_len, device=ids.device)).repeat(step.batch)  # [T]
    seen = (position[None, :, None] - ids * BLOCK_SIZE + 1).clamp(0, BLOCK_SIZE)
    keys = torch.where(ids >= 0, seen, 0).sum().item()
    blocks = -(-step.seq_len // BLOCK_SIZE)
    touched = torch.zeros(heads.num_kv, step.batch, blocks + 1, dtype=torch.bool, device=ids.device)
    by_request = ids.view(heads.num_kv, step.batch, step.q_len * ids.shape[2]).long()
    touched.scatter_(2, torch.where(by_request >= 0, by_request, blocks), True)
    distinct = touched[..., :blocks].sum().item()
    return attention_cost(inputs, keys * (heads.num_q // heads.num_kv), distinct * min(BLOCK_SIZE, step.seq_len))


def sampled(inputs: StepInputs, options: Options) -> SampledRows:
    return SampledRows.of(inputs.batches[0], parity.sample_rows(inputs.step.tokens, options.sample_rows))


def index_score(inputs: StepInputs, options: Options) -> Workload:
    sample = sampled(inputs, options)
    expected = sample.index_scores(inputs.index_q, inputs.cache)
    bound = sample.score_bound(inputs.index_q, inputs.cache)
    heads, blocks = inputs.heads.num_kv, inputs.batches[0].num_blocks
    out = torch.empty(heads, inputs.step.tokens, blocks, dtype=torch.float32, device=inputs.index_q.device)
    columns = expected.shape[-1]

    def run(i: int, key: str) -> torch.Tensor:
        return m3attn.index_score(inputs.index_q, inputs.cache, inputs.batches[i], out=out, impl=key)

    def check(scores: torch.Tensor) -> Parity:
        return parity.check_scores(scores[:, sample.rows, :columns], expected, bound)

    def hide_unwritten(scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, sample.rows, :columns] = scores[:, sample.rows, :columns].masked_fill(expected == float("-inf"), float("-inf"))
        return scores

    peers: dict[str, SetCall] = {}
    if (theirs := options.peers) is not None and theirs.index_topk is not None:
        score = theirs.index_decode_score if options.replay else theirs.index_score
        peers[VLLM] = lambda i: score(inputs, inputs.batches[i])
    return Workload(score_cost(inputs, written=True), run, check, len(inputs.batches), (out,), peers, hide_unwritten)


def ids_buffer(inputs: StepInputs) -> torch.Tensor:
    return torch.empty(inputs.heads.num_kv, inputs.step.tokens, TOPK, dtype=torch.int32, device=inputs.index_q.device)


def ascending(ids: torch.Tensor) -> torch.Tensor:
    """Ids in any order -> ascending with -1 at the tail."""
    last = torch.iinfo(ids.dtype).max
    ids = ids.masked_fill(ids < 0, last).sort(dim=-1).values
    return ids.masked_fill(ids == last, -1)


def select_blocks(inputs: StepInputs, options: Options) -> Workload:
    sample = sampled(inputs, options)
    scores = m3attn.index_score(inputs.index_q, inputs.cache, inputs.batches[0])
    expected = reference_index.select_blocks(scores[:, sample.rows], sample.batch, topk=TOPK)
    out = ids_buffer(inputs)
    step, heads = inputs.step, inputs.heads.num_kv
    cost = Cost(heads * visible_blocks(step) * 4 + heads * step.tokens * TOPK * 4)

    def run(i: int, key: str) -> torch.Tensor:
        return m3attn.select_blocks(scores, inputs.batches[i], topk=TOPK, out=out, impl=key)

    def check(ids: torch.Tensor) -> Parity:
        return parity.check_ids(ids[:, sample.rows], expected)

    peers: dict[str, SetCall] = {}
    # For decode they have no selection apart from the scores: `index_topk` is where the two are compared.
    if (theirs := options.peers) is not None and theirs.index_topk is not None and not options.replay:
        peers[VLLM] = lambda i: theirs.select_blocks(scores, inputs, inputs.batches[i])
    return Workload(cost, run, check, len(inputs.batches), (out,), peers, ascending)


def ids_check(inputs: StepInputs, sample: SampledRows) -> Callable[[torch.Tensor], Parity]:
    """A check of [Hkv, N, K] ids of the sampled rows, near ties allowed."""
    scores = sample.index_scores(inputs.index_q, inputs.cache)
    bound = sample.score_bound(inputs.index_q, inputs.cache)
    expected = reference_index.select_blocks(scores, sample.batch, topk=TOPK)
    return lambda ids: parity.check_ids(ids, expected, scores, bound)


def peer_index_topk(peers: Peers, inputs: StepInputs, options: Options) -> SetCall:
    if options.replay:
        return lambda i: peers.index_decode(inputs, inputs.batches[i])
    return lambda i: peers.select_blocks(peers.index_score(inputs, inputs.batches[i]), inputs, inputs.batches[i])


def index_topk(inputs: StepInputs, options: Options) -> Workload:
    sample = sampled(inputs, options)
    check_rows = ids_check(inputs, sample)
    out = ids_buffer(inputs)
    step = inputs.step

    def run(i: int, key: str) -> torch.Tensor:
        return m3attn.index_topk(inputs.index_q, inputs.cache, inputs.batches[i], topk=TOPK, out=out, impl=key)

    peers: dict[str, SetCall] = {}
    if options.peers is not None and options.peers.index_topk is not None:
        peers[VLLM] = peer_index_topk(options.peers, inputs, options)
    cost = score_cost(inputs, written=False)
    stream = step.batch * step.seq_len * INDEX_DIM * inputs.mode.index.itemsize
    return Workload(
        cost, run, lambda ids: check_rows(ids[:, sample.rows]), len(inputs.batches), (out,), peers, ascending, stream if options.replay else 0
    )


def ruled_topk(inputs: StepInputs, options: Options) -> Workload:
    """index_score, then another selection rule than M3's own, which has no fused stage. Its ids must be those of the reference's selection."""
    sample = sampled(inputs, options)
    rule = find_rule(options.rule)
    scores = torch.empty(inputs.heads.num_kv, inputs.step.tokens, inputs.batches[0].num_blocks, device=inputs.index_q.device)

    def run(i: int, key: str) -> torch.Tensor:
        m3attn.index_score(inputs.index_q, inputs.cache, inputs.batches[i], out=scores, impl=key)
        return rule(scores, inputs.batches[i], topk=TOPK, init_blocks=0, local_blocks=1, impl=key)

    def check(ids: torch.Tensor) -> Parity:
        expected = rule(scores[:, sample.rows], sample.batch, topk=TOPK, init_blocks=0, local_blocks=1, impl="reference")
        return parity.check_ids(ids[:, sample.rows], expected)

    return Workload(score_cost(inputs, written=True), run, check, len(inputs.batches), (scores,))


def attention_buffer(inputs: StepInputs) -> torch.Tensor:
    dtype = torch.bfloat16 if inputs.mode.q.itemsize == 1 else inputs.mode.q
    return torch.empty(inputs.step.tokens, inputs.heads.num_q, HEAD_DIM, dtype=dtype, device=inputs.q.device)


def peer_attention(peers: Peers, inputs: StepInputs, options: Options) -> Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """The peer's attention on (set, ids, out); None where it has no such mode."""
    if peers.sparse_attn is None or inputs.mode.q.itemsize == 1:
        return None
    attend = peers.sparse_decode if options.replay else peers.sparse_prefill
    return lambda i, ids, out: attend(inputs, inputs.batches[i], ids, out)


def selected(inputs: StepInputs, options: Options) -> torch.Tensor:
    """ids [Hkv, T, K]: the recorded ones, or a new draw of the asked-for selection."""
    if options.ids is not None:
        return options.ids.to(inputs.q.device)
    return selections.select(inputs.step, options.selection or "N", num_kv_heads=inputs.heads.num_kv, generator=inputs.generator)


def sparse_attention(inputs: StepInputs, options: Options) -> Workload:
    sample = sampled(inputs, options)
    all_ids = [selected(inputs, options) for _ in inputs.batches]
    expected = sample.sparse_attention(inputs.q, inputs.cache, all_ids[0])
    out = attention_buffer(inputs)

    def run(i: int, key: str) -> torch.Tensor:
        m3attn.sparse_attention(inputs.q, inputs.cache, all_ids[i], inputs.batches[i], fp8_pv=inputs.mode.fp8_pv, out=out, impl=key)
        return out

    def check(result: torch.Tensor) -> Parity:
        return parity.check_attention(result[sample.rows], expected, inputs.mode.name)

    peers: dict[str, SetCall] = {}
    if options.peers is not None and (attend := peer_attention(options.peers, inputs, options)) is not None:
        peers[VLLM] = lambda i: attend(i, all_ids[i], out)
    cost = sparse_cost(inputs, all_ids[0])
    return Workload(cost, run, check, len(all_ids), (out,), peers, stream_bytes=int(cost.bytes) if options.replay else 0)


def dense_attention(inputs: StepInputs, options: Options) -> Workload:
    sample = sampled(inputs, options)
    expected = sample.dense_attention(inputs.q, inputs.cache)
    out = attention_buffer(inputs)
    step, heads = inputs.step, inputs.heads

    def run(i: int, key: str) -> torch.Tensor:
        m3attn.dense_attention(inputs.q, inputs.cache, inputs.batches[i], fp8_pv=inputs.mode.fp8_pv, out=out, impl=key)
        return out

    def check(result: torch.Tensor) -> Parity:
        return parity.check_attention(result[sample.rows], expected, inputs.mode.name)

    cost = attention_cost(inputs, heads.num_q * visible_pairs(step), heads.num_kv * step.batch * step.seq_len)
    return Workload(cost, run, check, len(inputs.batches), (out,), stream_bytes=int(cost.bytes) if options.replay else 0)


def layer_step(inputs: StepInputs, options: Options) -> Workload:
    """index_topk, then sparse_attention over its ids: what a sparse layer runs between its projections."""
    sample = sampled(inputs, options)
    check_rows = ids_check(inputs, sample)
    ids, out = ids_buffer(inputs), attention_buffer(inputs)

    def run(i: int, key: str) -> torch.Tensor:
        m3attn.index_topk(inputs.index_q, inputs.cache, inputs.batches[i], topk=TOPK, out=ids, impl=key)
        m3attn.sparse_attention(inputs.q, inputs.cache, ids, inputs.batches[i], fp8_pv=inputs.mode.fp8_pv, out=out, impl=key)
        return out

    def check(result: torch.Tensor) -> Parity:
        selection = check_rows(ids[:, sample.rows])
        expected = sample.sparse_attention(inputs.q, inputs.cache, ids)
        attention = parity.check_attention(result[sample.rows], expected, inputs.mode.name)
        return attention if selection.passed else selection

    def sort_ids(result: torch.Tensor) -> torch.Tensor:
        ids.copy_(ascending(ids))
        return result

    peers: dict[str, SetCall] = {}
    if options.peers is not None and options.peers.index_topk is not None:
        attend, choose = peer_attention(options.peers, inputs, options), peer_index_topk(options.peers, inputs, options)
        if attend is not None:
            peers[VLLM] = lambda i: attend(i, ids.copy_(choose(i)), out)
    typical = m3attn.index_topk(inputs.index_q, inputs.cache, inputs.batches[0], topk=TOPK)
    scoring, attending = score_cost(inputs, written=False), sparse_cost(inputs, typical)
    cost = Cost(scoring.bytes + attending.bytes, scoring.flops_16 + attending.flops_16, scoring.flops_8 + attending.flops_8)
    stream = int(cost.bytes) if options.replay else 0
    return Workload(cost, run, check, len(inputs.batches), (ids, out), peers, sort_ids, stream)
