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
# # 1. The algorithm
#
# A query of dense attention reads every key before it. MiniMax-M3 reads a few blocks of keys, and lets a small second attention, the **index
# branch**, say which. Three steps, each a stage of this library:
#
# 1. `index_score`: for every query and block of keys, the best product of the query's *index* vector with an *index* key of the block;
# 2. `select_blocks`: the K blocks with the best scores, the query's own block always among them;
# 3. `sparse_attention`: ordinary softmax attention over the tokens of these blocks.
#
# This notebook does each step in a few lines of torch, on a real text, and checks it against the library. It runs on a CPU, and unchanged on a GPU.

# %%
import matplotlib.pyplot as plt
import torch

import m3attn
from m3attn.bench.shapes import Heads
from m3attn.demo import text
from m3attn.demo.geometry import Geometry
from m3attn.demo.model import FORMATS, Model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# %% [markdown]
# ## A text, and vectors for it
#
# The package brings a story. Its bytes are the tokens. The demo's model has **random weights**: a token's vector is a sum of random vectors, one for
# each of the 1, 2, 4 and 8 bytes that end at it, so equal passages have similar vectors. That is enough for scores that mean something; it is not
# M3, whose weights were trained for this.
#
# The model runs every stage through an observer. Ours keeps what the stages were given.


# %%
class Tape:
    """Keeps the inputs of the stages that the model runs."""

    def __init__(self) -> None:
        self.inputs: dict = {}

    def stage(self, name, layer, inputs, call):
        self.inputs[name] = inputs
        return call()


T, BLOCK, K = 1024, 32, 8
content = text.load(None)[:T]
geometry = Geometry(Heads(4, 2), hidden=128, tokens=T, decode_steps=0, chunk=T, block_size=BLOCK, topk=K, dense_layers=0)
tape = Tape()
Model(geometry, FORMATS["bf16", "bf16"], DEVICE, tape).forward(content, 0, T)

step = tape.inputs["sparse_attention"]
q, cache, batch, index_q = step["q"], step["cache"], step["batch"], tape.inputs["index_topk"]["index_q"]
print("q       [T, Hq, D]  ", tuple(q.shape))
print("index_q [T, Hkv, Di]", tuple(index_q.shape))
print(text.readable(content[:200]))

# %% [markdown]
# Four query heads share two KV heads, so a *group* is two query heads; M3 has 64 and 4. There is one index head for each group, and all index heads
# share one index key per token.
#
# Keys and values lie in a **paged cache**: page `p` of a request is at `page_table[0, p]` of the pool. The kernels read it there. Here we put the
# pages in order once, so that the rest is plain indexing.

# %%
order = batch.page_table[0].long()
k, v = (x[order].transpose(1, 2).flatten(0, 1).double() for x in cache.key_value())  # [T, Hkv, D]
index_k = cache.index_key()[order].flatten(0, 1).double()  # [T, Di]
print("first pages of the text lie at", batch.page_table[0, :8].tolist())

# %% [markdown]
# ## Step 1: block scores
#
# score[h, t, b] = max over the tokens j of block b with j <= t of  index_q[t, h] . index_k[j]
#
# A maximum, not a mean: one token that matters is enough to make its block worth reading. There is no softmax here and no scale, for only the order
# of the scores counts.

# %%
products = torch.einsum("thd,jd->htj", index_q.double(), index_k)  # [Hkv, T, T]; fine for a small text, never formed by the kernels
causal = torch.ones(T, T, dtype=torch.bool, device=DEVICE).tril()
scores = products.masked_fill(~causal, float("-inf")).unflatten(2, (-1, BLOCK)).amax(dim=3)  # [Hkv, T, blocks]

from_library = m3attn.index_score(index_q, cache, batch).double()
visible = scores.isfinite()
torch.testing.assert_close(from_library[visible], scores[visible], rtol=1e-5, atol=1e-3)
assert torch.equal(from_library.isfinite(), visible)
print("scores", tuple(scores.shape), "agree with m3attn.index_score")

# %%
figure, panels = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained", sharey=True)
brightest = float(scores[visible].quantile(0.96))  # own blocks are above it, and all alike
for group, panel in enumerate(panels):
    shown = scores[group].cpu().masked_fill(~visible[group].cpu(), float("nan"))
    image = panel.imshow(shown, vmax=brightest, aspect="auto", interpolation="nearest", extent=(0, T // BLOCK, T, 0))
    panel.set(title=f"score, KV group {group}", xlabel=f"block of {BLOCK} positions")
panels[0].set_ylabel("query position")
figure.colorbar(image, ax=panels, label="best index product in the block")
plt.show()

# %% [markdown]
# The bright edge is the query's own block: a token resembles itself. Bright spots far from the edge are passages that look like what is being read.
#
# ## Step 2: the best K blocks
#
# A query at position t may take the blocks 0 … t // block size. Its own block is taken first (`local_blocks=1`), the best scores fill the
# remaining places, and of equal scores the lower block wins. The ids are written in ascending order, -1 behind the last.


# %%
def select(row: torch.Tensor, position: int) -> list[int]:
    """`row` [blocks] are the scores of a query at `position`."""
    own = position // BLOCK
    best = sorted(range(own), key=lambda block: (-float(row[block]), block))
    chosen = sorted([own, *best[: K - 1]])
    return chosen + [-1] * (K - len(chosen))


ids = m3attn.select_blocks(scores.float(), batch, topk=K)  # [Hkv, T, K]
for position in (5, 300, 700, T - 1):
    assert ids[0, position].tolist() == select(scores.float()[0, position], position)
print("the first query sees one block:", ids[0, 0].tolist())
print("the last query keeps          :", ids[0, -1].tolist())

# %% [markdown]
# What did one query choose? Its line of the text, then its best blocks other than its own:

# %%
position = 938
print("query after:", text.line_at(content, position)[-80:])
for block in sorted((b for b in ids[0, position].tolist() if 0 <= b < position // BLOCK), key=lambda b: -scores[0, position, b])[:4]:
    print(f"  block {block:2d}, score {float(scores[0, position, block]):6.1f}: {text.block_text(content, block, BLOCK)}")

# %%
chosen = torch.zeros(2, T, T // BLOCK + 1, device=DEVICE)
chosen.scatter_(2, torch.where(ids >= 0, ids, T // BLOCK).long(), 1.0)
chosen = chosen[..., :-1].bool()  # [Hkv, T, blocks]
figure, panels = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained", sharey=True)
for group, panel in enumerate(panels):
    panel.imshow(chosen[group].cpu(), aspect="auto", interpolation="nearest", cmap="Blues", extent=(0, T // BLOCK, T, 0))
    panel.set(title=f"chosen, KV group {group}", xlabel=f"block of {BLOCK} positions")
panels[0].set_ylabel("query position")
plt.show()

# %% [markdown]
# The first K blocks of queries choose everything they see: there the step is dense attention. From then on the dark area per row is constant, and so
# is the main branch's work per token, however long the text.
#
# `index_topk` is both steps in one, without a [Hkv, T, blocks] tensor for a long text:

# %%
assert torch.equal(m3attn.index_topk(index_q, cache, batch, topk=K), m3attn.select_blocks(m3attn.index_score(index_q, cache, batch), batch, topk=K))
print("index_topk gives the ids of the two stages")

# %% [markdown]
# ## Step 3: attention over the chosen blocks
#
# o[t, h] = softmax over the visible tokens j of the blocks ids[h // G, t] of  q[t, h] . k[j] / sqrt(D),  times v[j]
#
# Both query heads of a group read the same blocks: G heads share one load of the keys, which is what makes a block's bytes worth loading.
# As a specification it is dense attention with a mask:

# %%
G = q.shape[1] // k.shape[1]
mask = chosen.repeat_interleave(BLOCK, dim=2) & causal  # [Hkv, T, T]
keys, values = (x.repeat_interleave(G, dim=1) for x in (k, v))  # [T, Hq, D]
logits = torch.einsum("thd,jhd->htj", q.double(), keys) * q.shape[2] ** -0.5
weights = logits.masked_fill(~mask.repeat_interleave(G, dim=0), float("-inf")).softmax(dim=2)
expected = torch.einsum("htj,jhd->thd", weights, values)

out, lse = m3attn.sparse_attention(q, cache, ids, batch, return_lse=True)
error = float((out.double() - expected).abs().max())
print(f"largest difference to m3attn.sparse_attention: {error:.1e} (one rounding to bf16 of values up to {float(expected.abs().max()):.1f})")
assert error <= 2 * torch.finfo(torch.bfloat16).eps * float(expected.abs().max())

# %% [markdown]
# ## What is left out
#
# The log-sum-exp (LSE) of a softmax is the log of its denominator. The share of the dense softmax that falls into the chosen blocks, the *attention
# mass*, is therefore exp(sparse LSE - dense LSE): two numbers per row in place of a T x T matrix.

# %%
dense, dense_lse = m3attn.dense_attention(q, cache, batch, return_lse=True)
mass = (lse - dense_lse).exp().mean(dim=1).cpu()
figure, panel = plt.subplots(figsize=(8, 3), layout="constrained")
panel.plot(mass, linewidth=0.8, label="mass in the chosen blocks")
share = chosen[0].sum(dim=1) / (torch.arange(T, device=DEVICE) // BLOCK + 1)
panel.plot(share.cpu(), label="share of the visible blocks that is read")
panel.set(xlabel="query position", ylabel="share", ylim=(0, 1.05))
panel.legend()
print(f"mean mass over the second half of the text: {float(mass[T // 2 :].mean()):.2f}")
plt.show()

# %% [markdown]
# These weights were never trained, so main and index branch agree on little and the mass stays near the share of blocks read. Training is what raises
# the first line above the second. The arithmetic is the same.
#
# ## What it costs
#
# From the formulas, for one layer and M3's numbers (64 query heads, 4 KV heads, head dim 128, blocks of 128, K = 16), for the last token of a
# context of n:
#
# | | multiply-adds | bytes read from a bf16 cache |
# |---|---|---|
# | dense | 2 · 64 · 128 · n | 2 · 2 · 4 · 128 · n |
# | index | 4 · 128 · n | 2 · 128 · n |
# | sparse | 2 · 64 · 128 · min(n, 16 · 128) | 2 · 2 · 4 · 128 · min(n, 16 · 128) |


# %%
def cost(n: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(multiply-adds, bytes) of each part for one token behind n others."""
    heads, groups, dim, kept = 64, 4, 128, n.clamp(max=16 * 128)
    return {
        "dense": (2 * heads * dim * n, 2 * 2 * groups * dim * n),
        "index": (groups * dim * n, 2 * dim * n),
        "sparse": (2 * heads * dim * kept, 2 * 2 * groups * dim * kept),
    }


n = 2 ** torch.arange(9, 21)
parts = cost(n)
figure, panels = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
for which, (panel, unit) in enumerate(zip(panels, ("multiply-adds", "bytes read"), strict=True)):
    panel.loglog(n, parts["dense"][which], "k--", label="dense")
    panel.loglog(n, parts["index"][which], label="index branch")
    panel.loglog(n, parts["sparse"][which], label="chosen blocks")
    panel.loglog(n, parts["index"][which] + parts["sparse"][which], label="index + chosen")
    panel.set(xlabel="context length", ylabel=f"{unit} per token and layer")
    panel.legend()
plt.show()

# %%
for length in (8192, 131072, 1048576):
    parts = cost(torch.tensor(length))
    ratios = [float(parts["dense"][i] / (parts["index"][i] + parts["sparse"][i])) for i in (0, 1)]
    print(f"context {length:8d}: dense needs {ratios[0]:4.1f} times the multiply-adds and {ratios[1]:4.1f} times the bytes")

# %% [markdown]
# The index branch is linear in the context too, with 1/32 of the multiply-adds and 1/8 of the bytes; at a million tokens it is nearly all that is
# left, which is why its kernel matters as much as the attention's. Whether kernels reach these ratios is a question of measurement:
# docs/performance.md has what was measured.
#
# ## Exercises
#
# Replace `return None` and run the check below it.
#
# **1.** From which position on does a query with K blocks of `block_size` tokens leave a visible block out?


# %%
def exercise_1(topk: int, block_size: int) -> int | None:
    return None


# %%
def verdict(answer: object, is_right: bool) -> bool:
    print("not answered yet" if answer is None else "right" if is_right else f"not yet, got {answer}")
    return is_right


def check_1(exercise) -> bool:
    left_out = (chosen.sum(dim=2) < torch.arange(T, device=DEVICE) // BLOCK + 1).any(dim=0)
    return verdict(exercise(K, BLOCK), exercise(K, BLOCK) == int(left_out.nonzero()[0]) and exercise(16, 128) == 2048)


solved_1 = check_1(exercise_1)

# %% [markdown]
# **2.** `init_blocks=2` reserves places for blocks 0 and 1 (after the own block, while K lasts). Write `select` with this option.


# %%
def exercise_2(row: torch.Tensor, position: int, init_blocks: int) -> list[int] | None:
    return None


# %%
def check_2(exercise) -> bool:
    forced = m3attn.select_blocks(scores.float(), batch, topk=K, init_blocks=2)
    pairs = [(exercise(scores.float()[1, p], p, 2), forced[1, p].tolist()) for p in (0, 40, 80, 500, T - 1)]
    return verdict(pairs[-1][0], all(given == right for given, right in pairs))


solved_2 = check_2(exercise_2)

# %% [markdown]
# **3.** From which context length on (a power of two) does the index branch of M3 read more bytes per token than the chosen blocks?


# %%
def exercise_3() -> int | None:
    return None


# %%
def check_3(exercise) -> bool:
    parts = cost(n)
    return verdict(exercise(), exercise() == int(n[parts["index"][1] > parts["sparse"][1]][0]))


solved_3 = check_3(exercise_3)
