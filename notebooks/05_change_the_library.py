# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 5. Two ways to change the library
#
# An **implementation** computes what the contract says, another way: faster, on other hardware, easier to read. It may not change a result beyond
# rounding. A **selection rule** changes what is computed: other blocks are attended to. The library keeps the two apart, so that a faster kernel is
# never a different model by accident.
#
# Here we write one of each, from outside, without touching the package.

# %%
import statistics
import time

import matplotlib.pyplot as plt
import torch

import m3attn
from m3attn.analysis import attention_mass, output_error, overlap
from m3attn.bench.shapes import Heads
from m3attn.calls import MergeAttentionStatesCall, SelectBlocksCall
from m3attn.demo import text
from m3attn.demo.geometry import Geometry
from m3attn.demo.model import FORMATS, Model
from m3attn.reference import index as reference
from m3attn.reference.paging import query_rows
from m3attn.testing import check_rule
from m3attn.testing.cases import xs_select
from m3attn.testing.ids import check_id_form
from m3attn.testing.inputs import select_inputs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# %% [markdown]
# ## Another implementation of `select_blocks`
#
# An implementation is a function that takes the stage's call, a dataclass of checked tensors, and fills its outputs:

# %%
print({name: str(kind) for name, kind in SelectBlocksCall.__annotations__.items()})

# %% [markdown]
# The obvious one: own and init blocks get +inf, `torch.topk` takes the rest.


# %%
def first_attempt(call: SelectBlocksCall) -> None:
    columns = call.scores.shape[2]
    _, position = query_rows(call.batch, call.scores.shape[1])
    block = torch.arange(columns, device=call.scores.device)
    num_live = (position // call.batch.block_size + 1)[:, None]  # [T, 1]
    is_live = block < num_live
    is_forced = (block < call.init_blocks) | (block >= num_live - call.local_blocks)
    scores = call.scores.masked_fill(is_forced, float("inf")).masked_fill(~is_live, float("-inf"))
    best = scores.topk(min(call.topk, columns), dim=2).indices
    ids = torch.where(is_live.expand_as(scores).gather(2, best), best, columns).sort(dim=2).values
    call.out.fill_(-1)
    call.out[..., : ids.shape[2]] = torch.where(ids == columns, -1, ids)


m3attn.register("select_blocks", "first_attempt", first_attempt)
print([i.key for i in m3attn.implementations("select_blocks")])

# %% [markdown]
# From now on `impl="first_attempt"` runs it, in a call, in `m3attn.use` or in `M3ATTN_IMPL`. `auto` does not take it unless it is registered with
# `auto=True`. `explain` shows who would run:

# %%
print(m3attn.explain("select_blocks", impl="first_attempt", arch="cpu"))

# %% [markdown]
# ## Does it compute the contract?
#
# The test matrix runs every registered implementation over the same cases. Here are its small ones, which the interpreter or a slow
# implementation does in a moment, with the same comparison: ids have the right form, and are equal to the reference's.


# %%
def failures(key: str) -> list[str]:
    """The cases of the matrix that `key` does not pass."""
    failed = []
    for case in xs_select():
        scores, batch, options = select_inputs(case, DEVICE)
        expected = reference.select_blocks(scores, batch, **options)
        try:
            ids = m3attn.select_blocks(scores, batch, **options, impl=key)
            check_id_form(ids, batch, topk=case.topk, columns=scores.shape[2])
            assert torch.equal(ids, expected), f"{int((ids != expected).sum())} ids differ"
        except AssertionError as error:
            failed.append(f"{case.id}: {str(error).splitlines()[0]}")
    return failed


found = failures("first_attempt")
print(f"{len(found)} of {len(xs_select())} cases fail:", *found, sep="\n  ")

# %% [markdown]
# What is wrong: `topk` breaks ties as it likes, while the contract wants the lower id; a NaN counts as the largest, not as -inf; a score of +inf is
# as good as a forced block; and where K is too small for all forced blocks, local ones come first. Distinct ordinary scores show none of this.
#
# The second attempt sorts, which keeps the order of equals if it is told to, and gives forced blocks a class of their own.


# %%
def by_sorting(call: SelectBlocksCall) -> None:
    columns = call.scores.shape[2]
    _, position = query_rows(call.batch, call.scores.shape[1])
    block = torch.arange(columns, device=call.scores.device)
    num_live = torch.where(position < 0, 0, position // call.batch.block_size + 1).clamp(max=columns)[:, None]  # [T, 1]
    rank = torch.full((num_live.shape[0], columns), 3, device=block.device)  # lower is taken earlier
    rank[block.expand_as(rank) < call.init_blocks] = 2
    rank = torch.where(block >= num_live - call.local_blocks, 1, rank)
    rank = torch.where(block >= num_live, 4, rank)
    key = torch.where(rank == 1, block.float(), torch.where(rank == 2, -block.float(), call.scores))  # the later local, the earlier init block
    key = key.masked_fill(key.isnan(), float("-inf")) + 0.0
    order = key.sort(dim=2, descending=True, stable=True).indices
    order = order.gather(2, rank.expand_as(key).gather(2, order).sort(dim=2, stable=True).indices)[..., : call.topk]
    ids = order.masked_fill(order >= num_live, columns).sort(dim=2).values
    call.out.fill_(-1)
    call.out[..., : ids.shape[2]] = torch.where(ids == columns, -1, ids)


m3attn.register("select_blocks", "by_sorting", by_sorting)
print(f"{len(failures('by_sorting'))} of {len(xs_select())} cases fail")
assert not failures("by_sorting")

# %% [markdown]
# In your own package, `m3attn.testing.matrix` makes pytest parameters of the registry times these cases, and of the full list on a GPU:
# "Test your own key" in CONTRIBUTING.md has the entry point that announces your package, and the command that then runs m3attn's tests on its key.
#
# ## Is it worth having?
#
# Correct first, then timed, against what is there. What you see below was measured here, on this machine.


# %%
def microseconds(call, repetitions: int = 7) -> float:
    call()  # a kernel is compiled on its first call
    times = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        call()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


keys = ["reference", "by_sorting"] + (["triton"] if DEVICE.type == "cuda" else [])
widths, times = [64, 256, 1024], {key: [] for key in keys}
for blocks in widths:
    table = torch.zeros(1, blocks, dtype=torch.int32, device=DEVICE)
    step = m3attn.PagedBatch.from_lengths([32], [blocks * 128], table)
    scores = torch.randn(4, 32, blocks, device=DEVICE)
    for key in keys:
        times[key].append(microseconds(lambda key=key, scores=scores, step=step: m3attn.select_blocks(scores, step, topk=16, impl=key)))

# %%
figure, panel = plt.subplots(figsize=(6, 3), layout="constrained")
for key in keys:
    panel.loglog(widths, times[key], "o-", label=key)
panel.set(xlabel="blocks of a row", ylabel="us for 32 tokens, 4 groups", title=f"select_blocks on {DEVICE}", xticks=widths, xticklabels=widths)
panel.minorticks_off()
panel.legend()
plt.show()

# %% [markdown]
# (`m3attn bench select_blocks` times with cold caches and in CUDA graphs. On a CPU the Triton kernel would run in an interpreter, whose time means
# nothing, so it is left out there.)
#
# ## Another selection rule
#
# A rule is a function of the scores: `rule(scores, batch, **options) -> ids`. Ours, `bridged`, likes neighbours: a block between two good ones is
# worth at least the mean of the two. Blocks beyond a query's own may hold anything, so they are hidden first.


# %%
def bridged(scores: torch.Tensor, batch: m3attn.PagedBatch, **options) -> torch.Tensor:
    _, position = query_rows(batch, scores.shape[1])
    block = torch.arange(scores.shape[2], device=scores.device)
    is_hidden = block > (position // batch.block_size)[:, None]
    seen = scores.masked_fill(scores.isnan() | is_hidden, float("-inf"))
    before = torch.nn.functional.pad(seen[..., :-1], (1, 0), value=float("-inf"))
    after = torch.nn.functional.pad(seen[..., 1:], (0, 1), value=float("-inf"))
    bridge = (before + after) / 2
    return m3attn.select_blocks(torch.maximum(seen, bridge.masked_fill(bridge.isnan(), float("-inf"))), batch, **options)


check_rule(bridged, device=DEVICE)
m3attn.register_rule("bridged", bridged)
print("bridged keeps what every rule keeps; rules now:", m3attn.rules())

# %% [markdown]
# `check_rule` tests shape, order, -1 at the tail, no duplicates, nothing beyond the own block, empty rows, determinism, and that a text in two chunks
# gets the ids it gets in one. A rule that looks at blocks the query cannot see fails:


# %%
def looks_ahead(scores: torch.Tensor, batch: m3attn.PagedBatch, *, topk: int, **options) -> torch.Tensor:
    return scores.nan_to_num(nan=-1e30).topk(min(topk, scores.shape[2]), dim=2).indices.sort(dim=2).values.int()


try:
    check_rule(looks_ahead, device=DEVICE)
except AssertionError as error:
    print(str(error)[:150])

# %% [markdown]
# ## What does the rule change?
#
# Three numbers, on the package's text with the demo's random weights, so they say something about the rules and nothing about M3: the **overlap**
# of the chosen blocks with M3's rule; the **attention mass**, the share of the dense softmax in the chosen blocks; and the **output error** against
# dense attention. `m3attn.analysis` has all three, for each row, and none of them forms a T x T matrix.


# %%
class Tape:
    """Keeps the inputs of the stages that the demo's model runs."""

    def __init__(self) -> None:
        self.inputs: dict = {}

    def stage(self, name, layer, inputs, call):
        self.inputs[name] = inputs
        return call()


T, K = 768, 6
geometry = Geometry(Heads(4, 2), hidden=128, tokens=T, decode_steps=0, chunk=T, block_size=32, topk=K, dense_layers=0)
tape = Tape()
Model(geometry, FORMATS["bf16", "bf16"], DEVICE, tape).forward(text.load(None)[:T], 0, T)
step = tape.inputs["sparse_attention"]
q, cache, batch = step["q"], step["cache"], step["batch"]
scores = m3attn.index_score(tape.inputs["index_topk"]["index_q"], cache, batch)

# %% [markdown]
# The model's main and index branch have unrelated projections, so its index scores say little about its own attention. To give the rules something to
# find, a second set of scores comes from the main branch itself: per block the largest q . k of a group's heads. No model could afford that, but
# it shows what a trained index branch aims at.


# %%
def main_branch_scores() -> torch.Tensor:
    """[Hkv, T, blocks] from q and K, as index_score forms them from the index branch."""
    order = batch.page_table[0].long()
    k = cache.key_value()[0][order].transpose(1, 2).flatten(0, 1).float()  # [T, Hkv, D]
    products = torch.einsum("tghd,jgd->gthj", q.float().unflatten(1, (2, -1)), k).amax(dim=2)  # [Hkv, T, T]
    causal = torch.ones(T, T, dtype=torch.bool, device=DEVICE).tril()
    return products.masked_fill(~causal, float("-inf")).unflatten(2, (-1, 32)).amax(dim=3)


def compare(ids: torch.Tensor, baseline: torch.Tensor) -> tuple[float, float, float]:
    """(overlap with `baseline`, attention mass, relative output error), means over the queries that must leave blocks out."""
    late = slice(K * 32, T)
    rows = overlap(ids, baseline)[:, late], attention_mass(q, cache, batch, ids)[late], output_error(q, cache, batch, ids)[late]
    return tuple(float(x.mean()) for x in rows)


# %%
table = {}
for source, given in (("index branch", scores), ("main branch", main_branch_scores())):
    baseline = m3attn.select_blocks(given, batch, topk=K)
    rules = {
        "topk": m3attn.select_blocks,
        "bridged": bridged,
        "last K": lambda s, b, **o: m3attn.select_blocks(torch.zeros_like(s), b, local_blocks=K, **o),
    }
    for name, rule in rules.items():
        table[source, name] = compare(rule(given, batch, topk=K), baseline)
        print(
            f"{source}, {name:8s}: overlap {table[source, name][0]:.2f}, mass {table[source, name][1]:.3f}, output error {table[source, name][2]:.3f}"
        )

# %%
figure, panels = plt.subplots(1, 3, figsize=(10, 3), layout="constrained")
for number, (panel, what) in enumerate(zip(panels, ("overlap with topk", "attention mass", "output error"), strict=True)):
    for shift, source in ((-0.2, "index branch"), (0.2, "main branch")):
        panel.bar([i + shift for i in range(3)], [table[source, name][number] for name in rules], width=0.4, label=f"scores of the {source}")
    panel.set(title=what, xticks=range(3), xticklabels=rules)
figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
plt.show()

# %% [markdown]
# `last K` takes the K blocks nearest to the query and looks at no score: what a rule must beat. With random weights attention is nearly even over
# the text and no choice of K blocks stands out; run this with activations of a trained model before you believe in a rule.
#
# A registered rule is used by name wherever there is `rule=`: `attend`, layers, demo, bench. `auto` never picks one.

# %%
B, S = 1, 128
tensors = [torch.randn(B, S, h, 64, device=DEVICE) for h in (4, 2, 2, 2)] + [torch.randn(B, S, 64, device=DEVICE)]
plain = m3attn.attend(*tensors, topk=3, block_size=16)
changed, ids = m3attn.attend(*tensors, topk=3, block_size=16, rule="bridged", return_ids=True)
print("same output:", torch.equal(plain, changed), "  ids of the last query:", ids[0, 0, -1].tolist())

# %% [markdown]
# ## Exercises
#
# Replace the last line of a function and run the check below it.
#
# **1.** A rule that gives all KV groups one list: the blocks with the best *mean* score over index heads. (NaN counts as -inf. A rule must not write
# to its `scores`.)


# %%
def exercise_1(scores: torch.Tensor, batch: m3attn.PagedBatch, **options) -> torch.Tensor | None:
    return None


# %%
def verdict(answer: object, is_right: bool) -> bool:
    print("not answered yet" if answer is None else "right" if is_right else f"not yet, got {answer}")
    return is_right


def check_1(exercise) -> bool:
    given = exercise(scores, batch, topk=K)
    if given is None:
        return verdict(None, False)
    try:
        check_rule(exercise, device=DEVICE)
    except AssertionError as error:
        return verdict(str(error), False)
    best = m3attn.select_blocks(scores.mean(dim=0, keepdim=True), batch, topk=K)  # these scores have no NaN
    return verdict(given, torch.equal(given, best.expand_as(given)))


solved_1 = check_1(exercise_1)

# %% [markdown]
# **2.** An implementation of `merge_attention_states` that passes the check, which has parts without keys (LSE -inf, output NaN).


# %%
def exercise_2(call: MergeAttentionStatesCall) -> None:
    raise NotImplementedError


# %%
def check_2(exercise) -> bool:
    from m3attn.testing.bounds import merge_bound
    from m3attn.testing.cases import xs_merge
    from m3attn.testing.inputs import merge_inputs

    m3attn.register("merge_attention_states", "exercise", exercise, replace=True)
    try:
        for case in xs_merge():
            inputs = merge_inputs(case, DEVICE)
            buffers = m3attn.merge_attention_states(*inputs, impl="exercise")
            merge_bound(*inputs).check(*buffers)
    except NotImplementedError:
        return verdict(None, False)
    except AssertionError as error:
        return verdict(str(error).splitlines()[0], False)
    finally:
        m3attn.unregister("merge_attention_states", "exercise")
    return verdict(True, True)


solved_2 = check_2(exercise_2)

# %%
for key in ("first_attempt", "by_sorting"):
    m3attn.unregister("select_blocks", key)
m3attn.unregister_rule("bridged")
