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
# # 2. Reading `index_score` and `select_blocks`
#
# The index branch reads every index key before a query and keeps one number per block; the selection turns these numbers into K block ids, exactly.
# This notebook shows the source of both kernels as the package has it, steps through one program of each in plain torch, and then runs and checks
# the kernels.

# %%
import inspect

import matplotlib.pyplot as plt
import torch

import m3attn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    m3attn.interpret()  # Triton's interpreter: the same kernel source, run by numpy

from m3attn.reference import index as reference
from m3attn.testing.bounds import assert_within, score_bound
from m3attn.testing.inputs import generator, score_fill
from m3attn.triton_kernels import index_score, select_blocks


def show(kernel, begin: str = "", end: str = "") -> None:
    """Print the package's own source of a Triton function, from the line that holds `begin` up to the one that holds `end`."""
    lines = inspect.getsource(kernel.fn).splitlines()
    first = next(i for i, line in enumerate(lines) if begin in line)
    last = next((i for i, line in enumerate(lines) if end and i > first and end in line), len(lines))
    print("\n".join(lines[first:last]))


# %% [markdown]
# ## `index_score`: the specification

# %%
print(inspect.getdoc(reference.index_score).partition("Args:")[0])

# %% [markdown]
# ## A small step
#
# One request with 152 tokens, of which the last 24 are new; two index heads of 64 dims; blocks and pages of 32 tokens. The pages lie in random order,
# and what the request does not own is NaN.

# %%
T, LENGTH, BLOCK, HEADS, DIM, NUM_PAGES = 24, 152, 32, 2, 64, 8
torch.manual_seed(0)
pages = torch.randperm(NUM_PAGES)[: -(-LENGTH // BLOCK)]
text_keys = torch.randn(LENGTH, DIM).bfloat16()  # in the order of the text
pool = torch.full((NUM_PAGES, BLOCK, DIM), float("nan")).bfloat16()
for j in range(LENGTH):
    pool[pages[j // BLOCK], j % BLOCK] = text_keys[j]
unused = torch.zeros(NUM_PAGES, 1, BLOCK, DIM, device=DEVICE)  # K and V: the index branch does not read them
cache = m3attn.LayerCache(k=unused, v=unused, index_k=pool.to(DEVICE))
batch = m3attn.PagedBatch.from_lengths([T], [LENGTH], pages[None].int().to(DEVICE), page_size=BLOCK, block_size=BLOCK)
index_q = torch.randn(T, HEADS, DIM).bfloat16().to(DEVICE)
print("page table:", pages.tolist(), "  blocks:", batch.num_blocks)

# %% [markdown]
# ## The kernel
#
# All index heads share one key per token, so a tile of queries stacks (token, head) pairs as its rows: one load of a key tile serves every head of
# every token in the tile. The loop, from the package:

# %%
show(index_score.index_score_prefill_kernel, "BLOCK_T: tl.constexpr =")

# %% [markdown]
# ## One program, step by step
#
# Here is the program of the first row tile, in torch, with the kernel's names. The tiles are small for the eye: `BLOCK_M` 32 rows, which are 16
# tokens of two heads; `BLOCK_N` 16 keys, so that a block of 32 takes two steps and `best` carries over from the first to the second.

# %%
BLOCK_M, BLOCK_N = 32, 16
BLOCK_T = BLOCK_M // HEADS
first_row, first_position = 0, LENGTH - T  # of this tile
num_visible = first_position + min(BLOCK_T, T - first_row)  # keys that the tile's last row sees
num_live = -(-num_visible // BLOCK)
offs_m = torch.arange(BLOCK_M)
token, head = offs_m // HEADS, offs_m % HEADS
row, position = first_row + token, first_position + token
queries = index_q.cpu().float()[row, head]  # [BLOCK_M, DIM]
print(f"rows are (token, head): {list(zip(token.tolist(), head.tolist(), strict=True))[:5]} …")
print(f"positions {first_position} to {first_position + BLOCK_T - 1}: the tile walks keys 0 to {num_visible - 1}, which lie in {num_live} blocks")

# %%
result, steps = torch.full((BLOCK_M, num_live), float("-inf")), []
best = torch.full((BLOCK_M,), float("-inf"))
for start in range(0, num_visible, BLOCK_N):
    page = int(pages[start // BLOCK])
    keys = pool[page, start % BLOCK : start % BLOCK + BLOCK_N].float()  # [BLOCK_N, DIM]
    logits = queries @ keys.T  # [BLOCK_M, BLOCK_N]
    offs_n = start + torch.arange(BLOCK_N)
    if start + BLOCK_N - 1 > first_position:  # else every row sees every key of the tile
        logits = torch.where(offs_n[None, :] <= position[:, None], logits, float("-inf"))
    best = torch.maximum(best, logits.amax(dim=1))  # [BLOCK_M]
    is_block_end = (start + BLOCK_N) % BLOCK == 0 or start + BLOCK_N >= num_visible
    steps.append((start, page, logits, best.clone(), is_block_end))
    if is_block_end:
        result[:, start // BLOCK] = best
        best = torch.full_like(best, float("-inf"))
for start, page, logits, best, is_block_end in steps:
    stored = f"stored as block {start // BLOCK}" if is_block_end else "carried on"
    masked = int(logits.isinf().sum())
    print(f"start {start:3d}, page {page}: logits {list(logits.shape)}, {masked:3d} masked; best of row 0 {float(best[0]):6.2f}, {stored}")

# %% [markdown]
# The tiles, one column per step. Above the logits; below `best` after the step, which starts anew after every second one. The last tile is the only
# one with a diagonal mask, and the branch around the mask spares all others the comparison.

# %%
figure, panels = plt.subplots(2, len(steps), figsize=(11, 4.4), layout="constrained", sharey=True)
for column, (start, _, logits, best, _) in enumerate(steps):
    style = {"aspect": "auto", "vmin": -25, "vmax": 25, "cmap": "RdBu_r"}
    panels[0, column].imshow(logits.masked_fill(logits.isinf(), float("nan")), **style)
    panels[0, column].set(xticks=[])
    panels[0, column].set_title(f"keys {start} …", fontsize="medium")
    image = panels[1, column].imshow(best[:, None], **style)
    panels[1, column].set(xticks=[])
panels[0, 0].set_ylabel("logits: (token, head)")
panels[1, 0].set_ylabel("best: (token, head)")
figure.colorbar(image, ax=panels, label="index product")
plt.show()

# %% [markdown]
# ## Run and check
#
# With the same tile sizes forced, the kernel's scores for these rows are the ones above:

# %%
try:
    index_score.settings_override = index_score.PrefillSettings(BLOCK_M, BLOCK_N, num_warps=4, num_stages=2, programs_per_sm=16)
    small_tiles = m3attn.index_score(index_q, cache, batch, impl="triton")
finally:
    index_score.settings_override = None
of_program = small_tiles.cpu()[head, row, :num_live]  # [BLOCK_M, num_live]
torch.testing.assert_close(of_program, result, rtol=1e-5, atol=1e-4)
print("the program stepped by hand and the kernel agree on", list(of_program.shape), "scores")

# %% [markdown]
# And all rows, with the library's own settings, stay within their bound around fp64. The bound is 0 where no key is visible: there the score must be
# exactly -inf.

# %%
exact, tolerance = score_bound(index_q, cache, batch)
assert_within(m3attn.index_score(index_q, cache, batch, impl="triton"), exact, tolerance, name="prefill")
assert_within(small_tiles, exact, tolerance, name="prefill, small tiles")

two_rows = m3attn.PagedBatch.from_lengths([2], [LENGTH], batch.page_table, page_size=BLOCK, block_size=BLOCK)
decoded = m3attn.index_score(index_q[-2:], cache, two_rows, impl="triton")
assert_within(decoded, exact[:, -2:], tolerance[:, -2:], name="decode")
print("prefill and decode are within their bounds; no NaN of the pool came through:", bool(~decoded.isnan().any()))

# %% [markdown]
# With few query tokens the decode kernel runs: the same loop with keys as the rows of the product, so that each key byte is read once for all
# (token, head) columns, and the live blocks of the request shared out among programs.

# %%
show(index_score.index_score_decode_kernel, "for start in range(first_key", "if FILL")

# %% [markdown]
# ## `select_blocks`: the specification

# %%
print(inspect.getdoc(reference.select_blocks).partition("Args:")[0])

# %% [markdown]
# ## Scores as integers
#
# Floats have corner cases: NaN, two zeros, infinities. The kernel turns each score into an unsigned integer in the same order and has none of them
# left. A forced block gets the largest integer, what is no block gets 0, so "forced first, then the best" is one ranking.

# %%
show(select_blocks.rank_of_score)

# %%
FORCED = 0xFFFFFFFF


def rank_of_score(score: torch.Tensor) -> torch.Tensor:
    """The same in torch; int64 stands in for uint32."""
    score = torch.where(score == score, score, float("-inf")) + 0.0
    bits = score.view(torch.int32)
    return (bits ^ ((bits >> 31) | -0x80000000)).long() & 0xFFFFFFFF


for value in (float("nan"), float("-inf"), -2.5, -1.0, -0.0, 0.0, 1e-45, 1.0, 2.5, float("inf")):
    print(f"{value:10.4g} -> {int(rank_of_score(torch.tensor([value]))):#010x}")

# %% [markdown]
# ## One row, step by step
#
# First the row's scores become ranks. A row that keeps all its blocks reads no scores:

# %%
show(select_blocks.select_rows, "offs_c = ", "threshold = ")

# %% [markdown]
# Which K of 24 blocks? The kernel finds the K-th largest integer by **bisection over values**: count how many reach the middle, halve the interval,
# stop when exactly K do. It only counts, which is one comparison and one sum over the row a step; nothing is sorted or moved.

# %%
show(select_blocks.kth_largest)

# %%
K, BLOCKS = 8, 24
score = torch.randn(BLOCKS, generator=torch.Generator().manual_seed(3)).mul(4).round().div(2)  # coarse, so that there are ties
rank = rank_of_score(score)
rank[-1] = FORCED  # the own block
lowest, highest = int(rank[rank != 0].min()), int(rank[rank != FORCED].max())
low, width, intervals = lowest, highest - lowest + 1, []
while width > 1:
    half = width // 2
    middle = low + half
    count = int((rank >= middle).sum())
    intervals.append((low, low + width, middle, count))
    low = middle if count >= K else low
    width = 1 if count == K else width - half if count > K else half
threshold = low
print(f"{len(intervals)} steps; {int((rank > threshold).sum())} blocks lie above the threshold, {int((rank == threshold).sum())} on it, wanted {K}")

# %%
figure, panel = plt.subplots(figsize=(9, 3), layout="constrained")
panel.semilogy([top - bottom for bottom, top, _, _ in intervals], "o-", base=2)
for step, (bottom, top, _, count) in enumerate(intervals):
    panel.annotate(count, (step, top - bottom), xytext=(3, 5), textcoords="offset points", fontsize=9)
panel.set(xlabel="step", ylabel="width of the interval", title="the interval that holds the threshold, and how many blocks reach its middle")
plt.show()

# %% [markdown]
# This row is a bad case: several blocks share the K-th score, the count never is exactly K, and the interval must shrink to a single integer. Without
# such a tie it stops as soon as its middle falls between the K-th and the next score:

# %%
spread = rank_of_score(torch.randn(BLOCKS, generator=torch.Generator().manual_seed(4)))
low, width, taken = int(spread.min()), int(spread.max() - spread.min()) + 1, 0
while width > 1:
    half, taken = width // 2, taken + 1
    count = int((spread >= low + half).sum())
    low, width = (low + half if count >= K else low), 1 if count == K else width - half if count > K else half
print(f"scores without ties: {taken} steps, {int((spread >= low).sum())} blocks reach the threshold")

# %% [markdown]
# What is above the threshold is chosen; of the ties on it, only as many as still fit, and lower ids win. One running count over the row holds both
# numbers: of what is greater in its upper 16 bits, of ties in its lower ones. At a block it says how many chosen ones come before, which is the
# block's place in the output, and whether it is a tie too many. Nothing is searched for, and the ids come out ascending by themselves.

# %%
show(select_blocks.select_rows, "threshold = ")

# %%
is_greater, is_tie = rank > threshold, rank == threshold
ties_taken = K - int(is_greater.sum())
count = ((is_greater.long() << 16) + is_tie.long()).cumsum(0)
ties = count & 0xFFFF
is_chosen = is_greater | (is_tie & (ties <= ties_taken))
place = (count >> 16) + ties.clamp(max=ties_taken) - 1
by_hand = torch.empty(K, dtype=torch.int64)
by_hand[place[is_chosen]] = torch.arange(BLOCKS)[is_chosen]
print("block  score  greater, ties up to it")
for block in range(BLOCKS):
    goes = f"-> {int(place[block])}" if is_chosen[block] else "a tie too many" if is_tie[block] else ""
    print(f"{block:5d} {float(score[block]):6.1f} {int(count[block]) >> 16:8d} {int(ties[block]):5d}  {goes}")
print("chosen:", by_hand.tolist(), f"  with the first {ties_taken} of {int(is_tie.sum())} ties")

# %% [markdown]
# ## Run and check
#
# A decode step of one request whose last token is in block 23, and the row above as its scores:

# %%
page_table = torch.zeros(1, BLOCKS, dtype=torch.int32, device=DEVICE)
one = m3attn.PagedBatch.from_lengths([1], [BLOCKS * 16], page_table, page_size=16, block_size=16)
ids = m3attn.select_blocks(score[None, None].to(DEVICE), one, topk=K, impl="triton")
assert ids[0, 0].tolist() == by_hand.tolist()
print("the kernel chose", ids[0, 0].tolist())

# %% [markdown]
# Selection is not a matter of tolerances: ids equal the reference's, bit for bit, for any scores. These are the fills of the test matrix.

# %%
many = m3attn.PagedBatch.from_lengths([4], [BLOCKS * 16], page_table, page_size=16, block_size=16)
for kind in ("permutation", "equal", "few_values", "one_ulp", "specials", "all_nan"):
    fill = score_fill(kind, 2, 4, BLOCKS, generator(0)).to(DEVICE)
    for options in ({"topk": 1}, {"topk": K}, {"topk": 5, "init_blocks": 2, "local_blocks": 2}, {"topk": 32}):
        chosen = m3attn.select_blocks(fill, many, **options, impl="triton")
        assert torch.equal(chosen, reference.select_blocks(fill, many, **options)), (kind, options)
    print(f"{kind:12s} equal to the reference, with all options")

# %% [markdown]
# ## Exercises
#
# Replace `return None` and run the check below it.
#
# **1.** Undo `rank_of_score` for a rank that came from a finite score.


# %%
def exercise_1(rank: torch.Tensor) -> torch.Tensor | None:
    """rank: int64 in [0, 2^32). Returns fp32."""
    return None


# %%
def verdict(answer: object, is_right: bool) -> bool:
    print("not answered yet" if answer is None else "right" if is_right else f"not yet, got {answer}")
    return is_right


def check_1(exercise) -> bool:
    scores = torch.tensor([-3.5, -1.0, 0.0, 1e-40, 1.0, 3.4e38])
    given = exercise(rank_of_score(scores))
    return verdict(given, given is not None and torch.equal(given, scores))


solved_1 = check_1(exercise_1)

# %% [markdown]
# **2.** How many steps can the bisection of `kth_largest` take at most, for any scores?


# %%
def exercise_2() -> int | None:
    return None


# %%
def check_2(exercise) -> bool:
    width, most = int(rank_of_score(torch.tensor([float("inf")])) - rank_of_score(torch.tensor([float("-inf")]))) + 1, 0
    while width > 1:
        width, most = width - width // 2, most + 1
    return verdict(exercise(), exercise() == most)


solved_2 = check_2(exercise_2)

# %% [markdown]
# **3.** How many tiles of keys does the program of row tile `tile` walk in `index_score_prefill_kernel`, if one program scores all blocks?


# %%
def exercise_3(tile: int, tokens: int, length: int, block_t: int, block_n: int) -> int | None:
    """tokens: new ones, the last of `length`; block_t tokens are a row tile."""
    return None


# %%
def check_3(exercise) -> bool:
    given = exercise(0, T, LENGTH, BLOCK_T, BLOCK_N)
    return verdict(given, given == len(steps) and exercise(1, T, LENGTH, BLOCK_T, BLOCK_N) == 10 and exercise(2, 100, 1000, 32, 64) == 16)


solved_3 = check_3(exercise_3)
