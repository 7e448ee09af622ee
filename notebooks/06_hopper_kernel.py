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
# # 6. The Hopper kernel, tile by tile
#
# `cute_sm90` is sparse prefill for Hopper, written in the CuTe DSL: a warp that plans, one that loads, two warpgroups that multiply, and
# barriers between them.
# Such a kernel is hard to read because much of it happens at once. Here it runs on a CPU: `tests/ptxsim` interprets the PTX that the DSL makes of
# it, one warp after another, and we write down who loads, who multiplies and who waits. Then we give these steps durations and see what the
# schedule buys.
#
# docs/cute_sparse_prefill.md is the kernel's own page. This notebook needs Linux and the extra `cute`, and no GPU: it uses none.

# %%
import ast
import os
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import matplotlib.pyplot as plt

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the interpreter takes the place of a GPU
ROOT = next(folder for folder in (Path.cwd(), *Path.cwd().parents) if (folder / "tests" / "ptxsim").is_dir())
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "dsl")]
from simulator import ORDERS, simulated  # before cutlass: it puts the interpreter in the place of the DSL's runtime

print("the interpreter's orders:", ", ".join(ORDERS))

# %%
import torch
from ptxsim import SimError
from ptxsim.machine.warp import Warp

import m3attn
from m3attn.calls import SparseAttentionCall
from m3attn.dsl_kernels import sparse_attention_sm90, sparse_prefill_sm90
from m3attn.reference import sparse as reference
from m3attn.scales import Scale

# %% [markdown]
# ## The idea: a tile of tokens shares its loads
#
# One program a token, as in notebook 3, loads every block that the token chose. Its 16 heads do 16 operations a byte, far below what a
# multiprocessor needs to be busy. But neighbouring tokens choose mostly the same blocks. So a **tile** of 8 tokens walks the *union* of their
# blocks and loads each once, for 8 x 16 = 128 rows.
#
# A step for it: 24 tokens behind a prefix, 12 blocks in sight, K = 6, with scores that change slowly from token to token. What the request does not
# own is NaN.

# %%
T, LENGTH, K, G, D, BLOCK = 24, 1500, 6, 16, 128, 128
torch.manual_seed(0)
blocks = -(-LENGTH // BLOCK)
pages = torch.randperm(blocks + 2)[:blocks]
tokens = torch.randn(LENGTH, 2 * D).bfloat16()
kv = torch.full((blocks + 2, 1, BLOCK, 2 * D), float("nan"), dtype=torch.bfloat16)
for j in range(LENGTH):
    kv[pages[j // BLOCK], 0, j % BLOCK] = tokens[j]
cache = m3attn.LayerCache(kv=kv)
batch = m3attn.PagedBatch.from_lengths([T], [LENGTH], pages[None].int())
q = torch.randn(T, G, D).bfloat16()
ids = m3attn.select_blocks(torch.randn(1, 1, blocks) + 0.7 * torch.randn(1, T, blocks), batch, topk=K)

# %%
TILE = sparse_prefill_sm90.tile_tokens(G, 16)  # tokens, for lists of up to 16 ids
picked = torch.zeros(T, blocks).scatter_(1, ids[0].long(), 1.0)
figure, panel = plt.subplots(figsize=(7, 4), layout="constrained")
panel.imshow(picked, cmap="Blues", aspect="auto", interpolation="nearest")
for edge in range(TILE // 2, T, TILE // 2):
    panel.axhline(edge - 0.5, color="black", linewidth=1.5 if edge % TILE == 0 else 0.5)
panel.set(xlabel="block", ylabel="token", title=f"tiles of {TILE} tokens, each in two halves", xticks=range(blocks))
plt.show()
unions = [int(picked[first : first + TILE].amax(dim=0).sum()) for first in range(0, T, TILE)]
print(f"loads of a block: {T * K} with a program a token, {sum(unions)} with tiles ({unions})")

# %% [markdown]
# The price: every row of the tile would be multiplied with every block of the union, also where its token did not choose it. Halving the tile
# halves that. So the tile's two **halves** of 4 tokens (64 rows, one matrix instruction of a warpgroup) share the loads, and each *passes over*
# blocks that none of its own tokens chose. Traffic of a union of 8, work of a union of 4.
#
# ## Who finds the union
#
# The merging warp. It holds all ids of the tile in registers, spread over its lanes, and takes the last block out, again and again. `redux` is one
# instruction for a maximum, or an OR, over the warp: first the block, then a word with a bit for each token that chose it. The last block
# comes first because it is the tokens' own: they see it in part, it needs the causal mask, and the path with the mask has no overlap, which the
# first block of a tile cannot have anyway.

# %%
SOURCE = Path(sparse_prefill_sm90.__file__).read_text()


def show(name: str) -> None:
    """Print a function of the kernel's file as it stands there."""
    node = next(n for n in ast.walk(ast.parse(SOURCE)) if isinstance(n, ast.FunctionDef) and n.name == name)
    print("\n".join(SOURCE.splitlines()[node.lineno - 1 : node.end_lineno]))


show("pop")


# %% [markdown]
# In plain Python, for the first tile:


# %%
def entries(rows: torch.Tensor) -> list[tuple[int, int]]:
    """(block, bits) of a tile's ids [tokens, K], from the last block to the first; bit t: token t chose the block."""
    left = [set(row) - {-1} for row in rows.tolist()]
    found = []
    while any(left):
        block = max(max(row) for row in left if row)
        found.append((block, sum(1 << token for token, row in enumerate(left) if block in row)))
        for row in left:
            row.discard(block)
    return found


for block, bits in entries(ids[0, :TILE]):
    first, second = bits & 0xF, bits >> 4
    print(f"block {block:2d}: tokens {bits:08b}", "" if first and second else "- half 0 passes over" if second else "- half 1 passes over")

# %% [markdown]
# ## Run it
#
# A launch needs the call that a stage would hand over. The interpreter runs it in three orders: `eager`, where loads and matrix instructions happen
# when they are issued; `lazy`, where they happen as late as the waits allow; and `random`. A wait that is missing would show as another result, or
# as NaN from memory that was not there yet.

# %%
NONE = Scale.of(None, argument="scale")
k, v = cache.key_value()


def make_call() -> SparseAttentionCall:
    options = dict(batch=batch, sm_scale=D**-0.5, q_scale=NONE, k_scale=NONE, v_scale=NONE, sink_key=None, fp8_pv=False)
    out, lse = torch.full_like(q, float("nan")), torch.full((T, G), float("nan"))
    return SparseAttentionCall(q=q, k=k, v=v, ids=ids, **options, out=out, lse=lse, workspace=torch.full((4096,), 0xFF, dtype=torch.uint8))


exact, _ = reference.sparse_attention(q, k, v, ids, batch, dtype=torch.float64)
results = {}
for order in ORDERS:
    call = make_call()
    with simulated(order) as device:
        sparse_attention_sm90.sparse_attention(call)
    results[order] = call.out
    print(f"{order:6s}: grid {device.stats[-1]['grid']}, largest difference to fp64 {float((call.out.double() - exact).abs().max()):.1e}")
assert all(torch.equal(out, results["eager"]) for out in results.values()) and (results["eager"].double() - exact).abs().max() < 0.01

# %% [markdown]
# The same bits in every order. Is that a test of anything? Break the kernel and see: without the zeros that the loading warp writes behind the last
# token, the NaN there meets a weight of 0; and without its waits for the matrix unit a warpgroup reads accumulators that are not finished.


# %%
def broken(pattern: str, by: str) -> str:
    """What the interpreter says to a kernel with one PTX instruction replaced."""
    call = make_call()
    try:
        with simulated("lazy", edit=lambda ptx: re.sub(pattern, by, ptx)):
            sparse_attention_sm90.sparse_attention(call)
    except SimError as error:
        return f"refused: {str(error)[:90]}"
    return f"largest difference {float((call.out.double() - exact).abs().nan_to_num(nan=torch.inf).max()):.1e}"


faults = {
    "no zeros behind the last token": broken(r"st\.shared\.v4\.b32\s+\[[^\]]+\], \{0, 0, 0, 0\};", ";"),
    "products not awaited": broken(r"wgmma\.wait_group\.sync\.aligned\s+0;", "wgmma.wait_group.sync.aligned 7;"),
}
for fault, says in faults.items():
    print(f"{fault}: {says}")
assert not any(float(says.split()[-1]) < 0.01 for says in faults.values() if says.startswith("largest"))

# %% [markdown]
# ## What each warp does
#
# Every load, barrier and matrix instruction is a method of the interpreter's warp. We put a note before each.

# %%
NOTED = {"tma_load", "wgmma", "wgmma_commit", "wgmma_wait", "mbar_init", "mbar_wait", "mbar_arrive"}


def _noting(name: str, original, notes: list):
    def method(warp, *arguments):
        address = int(arguments[0][0]) & 0xFFFFFF if name.startswith("mbar") else None
        phase = warp.cta.mbars[address].phase if name == "mbar_arrive" else None  # how often everybody had arrived before
        result = original(warp, *arguments)
        what = None
        if address is not None:
            what = address, warp.cta.mbars[address].phase if phase is None else phase
        elif name == "wgmma":
            what = "values" if arguments[1][-1] else "keys"  # P comes from registers, queries from shared memory
        elif name == "wgmma_wait":
            what = arguments[0]
        elif name == "tma_load":
            what = int(arguments[2][-1][warp._lanes(arguments[-1])[0]])  # the last coordinate: the page
        if "SparsePrefillSm90" in warp.comp.kernel.name:
            notes.append((warp.cta.ctaid[0], warp.index, name, what, name == "mbar_wait" and (result is None or not result.any())))
        return result

    return method


# %%
@contextmanager
def traced(notes: list):
    """While it is open, warps write (thread block, warp, what, argument, whether it had to wait) into `notes`.

    A barrier's argument: its address, and its phase, which counts how often all had arrived."""
    with mock.patch.multiple(Warp, **{name: _noting(name, getattr(Warp, name), notes) for name in NOTED}):
        yield


# %% [markdown]
# A thread block has 12 warps: 0 loads, 1 merges, 2 and 3 rest, 4 to 7 are one half, 8 to 11 the other. We keep warps 0, 1, 4 and 8 of the thread
# block with the most to do.

# %%
notes: list = []
with traced(notes), simulated("random", seed=1):
    sparse_attention_sm90.sparse_attention(make_call())
busiest = max({n[0] for n in notes}, key=lambda cta: sum(n[0] == cta for n in notes))
notes = [n for n in notes if n[0] == busiest and n[1] in (0, 1, 4, 8)]
addresses = sorted({n[3][0] for n in notes if n[2] == "mbar_init"})
ENTRIES = sparse_prefill_sm90.ENTRIES
STAGES = (len(addresses) - 1 - 3 * ENTRIES) // 4
loaded = [n[3] for n in notes if n[2] == "tma_load"]
walked = [int((pages == page).nonzero()) for page in dict.fromkeys(loaded)]  # values are loaded one block behind keys
tiles = [entries(ids[0, first : first + TILE]) for first in range(0, T, TILE)]
(TILE_ENTRIES,) = (tile for tile in tiles if [block for block, _ in tile] == walked)
print("blocks as they were loaded:", walked)
print(f"{len(notes)} notes; {len(addresses)} barriers: full and empty for {STAGES} stages of keys and of values,")
print(f"written, full and empty for {ENTRIES} entries of the merging warp, and one for the last page")

# %%
KINDS = {"tma_load": ("load", "tab:blue"), "wgmma": ("multiply", "tab:orange"), "mbar_arrive": ("say that it is there, or free", "tab:green")}
figure, panel = plt.subplots(figsize=(11, 3), layout="constrained")
LANES = {"merges": 1, "loads": 0, "half 0": 4, "half 1": 8}
for lane, warp in enumerate(LANES.values()):
    own = [(time, n) for time, n in enumerate(notes) if n[1] == warp]
    panel.vlines([time for time, n in own if n[4]], lane - 0.4, lane + 0.4, color="lightgray", label="wait" if lane == 0 else None)
    for name, (label, colour) in KINDS.items():
        times = [time for time, n in own if n[2] == name]
        panel.vlines(times, lane - 0.3, lane + 0.3, color=colour, linewidth=1, label=label if lane == (2 if name == "wgmma" else 1) else None)
panel.set(yticks=range(4), yticklabels=LANES, xlabel="the interpreter's order of events", ylim=(3.6, -0.6))
panel.legend(loc="upper center", bbox_to_anchor=(0.5, 1.25), ncols=4, fontsize=8)
plt.show()

# %% [markdown]
# The axis is the order in which the interpreter got to it, not time. What can be read off: the merging warp runs up to eight entries ahead; the
# loading warp runs three blocks ahead and then waits for a stage to be freed; the halves take turns at nothing, they only wait for blocks.
#
# ## The same as a list of operations
#
# A barrier of a *ring* is used once for every third block, so phase n of stage s is about block 3n + s. That turns addresses into block numbers. A
# block that a half passes over is freed by the loading warp in its name. (Entries are left out: they come long before the loads.)


# %%
HALVES = ("half 0", "half 1")


def absent(number: int) -> list[str]:
    """The halves none of whose tokens chose the tile's n-th block."""
    return [half for half, bits in zip(HALVES, (0x0F, 0xF0), strict=True) if not TILE_ENTRIES[number][1] & bits]


# %%
def operations(actor: str, warp: int) -> list[tuple]:
    """What a warp does in order: (wait full | wait free | load, ring, block), (free, ring, block, half), (multiply, ring), (await, products open)."""
    found, ring = [], ""
    for _, _, name, what, had_to_wait in (n for n in notes if n[1] == warp):
        if name in ("mbar_wait", "mbar_arrive") and not had_to_wait:
            place, phase = addresses.index(what[0]), what[1]
            if place < 4 * STAGES:
                whose, state = ("keys", "values")[place // (2 * STAGES)], ("full", "free")[place // STAGES % 2]
                number = phase * STAGES + place % STAGES
                if name == "mbar_wait":  # a full stage has had its arrivals
                    found.append((f"wait {state}", whose, number - STAGES if state == "full" else number))
                elif state == "full":
                    found.append(("load", whose, number))
                else:
                    found += [("free", whose, number, half) for half in (absent(number) if actor == "loads" else [actor])]
        elif name == "wgmma_commit":
            found.append(("multiply", ring))
        elif name == "wgmma":
            ring = what
        elif name == "wgmma_wait":
            found.append(("await", what))
    return found


# %%
ACTORS = {name: operations(name, warp) for name, warp in LANES.items() if name != "merges"}
for line in ACTORS["half 0"][:15]:
    print(*line)

# %% [markdown]
# There is the pipeline: the product with the *next* keys is started, then the one with the *last* block's values, and only the first is awaited
# (`await 1`: one may stay open). The softmax of this block runs while the other product does.

# %%
show("attend_half")

# %% [markdown]
# ## Durations
#
# Now a model, and nothing more: these operations in this order, with durations. A product of 64 x 128 x 128 is 512 cycles of a Hopper
# multiprocessor's tensor cores at 4,096 operations a cycle; 64 x 128 exponentials are 512 cycles of its 16 special function units. The load's two
# numbers are **guesses**: change them.

# %%
PRODUCT, SOFTMAX, LOAD_INTERVAL, LOAD_LATENCY = 512, 512, 400, 1000  # cycles; a load is 32 KB


# %%


@dataclass
class Replay:
    """Gives operations their times: each actor in its own order, one product and one load at a time."""

    stages: int = STAGES
    overlap: bool = True
    halves: tuple[str, ...] = HALVES
    softmax: int = SOFTMAX
    latency: int = LOAD_LATENCY
    full: dict = field(default_factory=dict)
    freed: dict = field(default_factory=dict)
    spans: list = field(default_factory=list)  # (lane, label, begin, end)
    tensor: int = 0
    memory: int = 0

    def ready(self, operation: tuple) -> float | None:
        """When the others let it start; None: not known yet."""
        verb, *where = operation
        if verb == "wait full":
            return self.full.get(tuple(where))
        if verb == "wait free" and where[1] >= self.stages:
            times = self.freed.get((where[0], where[1] - self.stages), {})
            return max(times[half] for half in self.halves) if set(self.halves) <= set(times) else None
        return 0


# %%
def perform(self: Replay, actor: str, operation: tuple, now: float, products: list) -> float:
    """Do it at `now`; returns when the actor goes on."""
    verb, *where = operation
    if verb == "load":
        begin = max(now, self.memory)
        self.memory, self.full[tuple(where)] = begin + LOAD_INTERVAL, begin + self.latency
        self.spans.append(("memory", where[0], begin, self.memory))
    elif verb == "multiply":
        begin = max(now, self.tensor)
        self.tensor = begin + PRODUCT
        products.append((where[0], self.tensor))
        self.spans.append(("tensor cores", actor, begin, self.tensor))
        return now if self.overlap else self.tensor
    elif verb == "free":
        self.freed.setdefault(tuple(where[:2]), {})[where[2]] = now
    elif verb == "await":
        done = products[: len(products) - where[0]]
        del products[: len(done)]
        now = max([now, *(end for _, end in done)])
        if any(ring == "keys" for ring, _ in done):
            self.spans.append((actor, "softmax", now, now + self.softmax))
            return now + self.softmax
    return now


# %%
def replay(actors: dict[str, list], **options) -> Replay:
    """The whole of it: whoever can go on earliest does."""
    model, place, time, products = Replay(**options), dict.fromkeys(actors, 0), dict.fromkeys(actors, 0.0), {name: [] for name in actors}
    while any(place[name] < len(steps) for name, steps in actors.items()):
        able = []
        for name, steps in actors.items():
            if place[name] < len(steps) and (ready := model.ready(steps[place[name]])) is not None:
                able.append((max(ready, time[name]), name))
        if not able:
            raise RuntimeError("everybody waits for somebody")
        now, name = min(able)
        if now > time[name]:
            model.spans.append((name, "wait", time[name], now))
        time[name] = perform(model, name, actors[name][place[name]], now, products[name])
        place[name] += 1
    return model


def length(model: Replay) -> float:
    return max(end for _, _, _, end in model.spans)


# %%
COLOURS = {"keys": "tab:blue", "values": "tab:cyan", "half 0": "tab:orange", "half 1": "tab:red", "softmax": "tab:green", "wait": "lightgray"}


def draw(model: Replay, title: str, panel) -> None:
    lanes = ["memory", "tensor cores", "half 0", "half 1"]
    for lane, label, begin, end in model.spans:
        if lane in lanes:
            panel.barh(lanes.index(lane), end - begin, left=begin, color=COLOURS[label], edgecolor="white", linewidth=0.5)
    panel.set(yticks=range(4), yticklabels=lanes, title=f"{title}: {length(model):,.0f} cycles")
    panel.invert_yaxis()


alone = {name: ACTORS[name] for name in ("loads", "half 0")}
figure, panels = plt.subplots(2, 1, figsize=(11, 5), layout="constrained", sharex=True)
draw(replay(ACTORS), "as the kernel has it", panels[0])
draw(replay(alone, halves=("half 0",), overlap=False), "half 0 alone, each product awaited at once", panels[1])
panels[1].set_xlabel("cycles of the model")
handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
figure.legend(
    handles, ["load of keys", "load of values", "product, half 0", "product, half 1", "softmax", "wait"], loc="outside lower center", ncols=6
)
plt.show()

# %% [markdown]
# Above, the tensor cores hardly rest: one half multiplies while the other computes its softmax. Below they rest through every softmax.
#
# Two things hide a softmax, then: the other half's products, and the half's own product with the last block's values. Which of them is needed? Ask
# for the time of the whole tile, with one warpgroup doing one half after the other or with two at once, with and without the overlap inside, and
# for softmaxes from cheap to dear:

# %%
costs = list(range(128, 2049, 128))
variants = {}
for overlap in (False, True):
    inside = "overlap inside" if overlap else "awaited at once"
    variants[f"two halves, {inside}"] = [length(replay(ACTORS, overlap=overlap, softmax=cost)) for cost in costs]
    variants[f"one after the other, {inside}"] = [
        sum(length(replay({"loads": ACTORS["loads"], half: ACTORS[half]}, halves=(half,), overlap=overlap, softmax=cost)) for half in HALVES)
        for cost in costs
    ]
figure, panel = plt.subplots(figsize=(8, 3.4), layout="constrained")
for (name, cycles), style in zip(variants.items(), ("C0--", "C1--", "C0-", "C1-"), strict=True):
    panel.plot(costs, cycles, style, label=name)
panel.axvline(SOFTMAX, color="gray", linestyle=":", label="exponentials alone")
panel.set(xlabel="cycles of a softmax", ylabel="cycles of the tile", ylim=(0, None))
panel.legend(fontsize=8)
plt.show()
assert all(variants["two halves, overlap inside"][i] <= min(other[i] for other in variants.values()) for i in range(len(costs)))

# %% [markdown]
# As long as a softmax costs no more than the other half's two products, two halves alone hide it. The overlap inside a half takes over where it
# costs more: rescaling, masks, maxima and conversions come on top of the exponentials, so a real softmax lies to the right of the dotted line. How
# far, only a GPU says.
#
# And the ring: how far ahead may the loading warp run? More stages cost shared memory, which there is not, but the model can ask.

# %%
latencies = list(range(500, 6001, 500))
figure, panel = plt.subplots(figsize=(7, 3), layout="constrained")
for stages in (STAGES, STAGES + 1, STAGES + 3):
    panel.plot(latencies, [length(replay(ACTORS, stages=stages, latency=latency)) for latency in latencies], "o-", label=f"{stages} stages")
panel.axvline(LOAD_LATENCY, color="gray", linestyle=":", label="the guess above")
panel.set(xlabel="cycles until a load is there", ylabel="cycles of the tile", ylim=(0, None))
panel.legend(fontsize=8)
plt.show()

# %% [markdown]
# One tile is mostly the wait for its first block and the last product's end. That is why thread blocks *stay*, take tile after tile from a counter,
# and load the next tile's first keys while this one's output leaves. What the kernel reaches on a GPU stands in docs/performance.md once it is
# measured; a model is there to be wrong in interesting ways.
#
# ## Exercises
#
# Replace `return None` and run the check below it.
#
# **1.** How many stages of keys and values (128 x 128 in 16 bit, each) fit into 227 KB of shared memory beside the queries of both halves (64 x 128
# in 16 bit, each)?


# %%
def exercise_1() -> int | None:
    return None


# %%
def verdict(answer: object, is_right: bool) -> bool:
    print("not answered yet" if answer is None else "right" if is_right else f"not yet, got {answer}")
    return is_right


def check_1(exercise) -> bool:
    return verdict(exercise(), exercise() == STAGES)


solved_1 = check_1(exercise_1)

# %% [markdown]
# **2.** From a tile's entries (block, bits): how many blocks does each half multiply? A tile of 8 tokens; half 0 has the low four bits.


# %%
def exercise_2(tile: list[tuple[int, int]]) -> tuple[int, int] | None:
    return None


# %%
def check_2(exercise) -> bool:
    right = [tuple(int(picked[first + h : first + h + 4].amax(dim=0).sum()) for h in (0, 4)) for first in range(0, T, TILE)]
    given = [exercise(entries(ids[0, first : first + TILE])) for first in range(0, T, TILE)]
    return verdict(given[0], given == right)


solved_2 = check_2(exercise_2)

# %% [markdown]
# **3.** With the overlap, and loads that cost nothing: the fewest cycles that n blocks of one half can take in the model, its products and softmaxes
# alone? (The first block's softmax has nothing to run under, nor has the last product with values.)


# %%
def exercise_3(n: int) -> int | None:
    return None


# %%
def check_3(exercise) -> bool:
    def alone(n: int) -> float:
        steps = [("multiply", "keys"), ("await", 0)]
        steps += [("multiply", "keys"), ("multiply", "values"), ("await", 1), ("await", 0)] * (n - 1)
        return length(replay({"half 0": [*steps, ("multiply", "values"), ("await", 0)]}))

    return verdict(exercise(4), all(exercise(n) == alone(n) for n in (1, 2, 5)))


solved_3 = check_3(exercise_3)
