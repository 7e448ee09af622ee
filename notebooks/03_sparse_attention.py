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
# # 3. Reading `sparse_attention`
#
# Given the blocks that each query chose, this stage runs exact softmax attention over their tokens. Three kernels do it: one for **prefill**, where
# there are many queries, and two for **decode**, where there are few: one that shares a query's keys out among programs, and one that **merges**
# their partial results.
#
# Specification, kernel, check; first for the loop that they have in common, then for each.

# %%
import inspect

import matplotlib.pyplot as plt
import torch

import m3attn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    m3attn.interpret()  # Triton's interpreter: the same kernel source, run by numpy

from m3attn.reference import sparse as reference
from m3attn.testing.bounds import attention_bound
from m3attn.triton_kernels import merge_splits, primitives, sparse_attention, sparse_decode, sparse_prefill, sparse_tiles


def show(kernel) -> None:
    """Print the package's own source of a Triton function."""
    print(inspect.getsource(kernel.fn))


# %% [markdown]
# ## The specification
#
# The reference is eager torch; its docstring is the definition that every implementation is held to.

# %%
print(inspect.getdoc(reference.sparse_attention))

# %% [markdown]
# ## A small step
#
# One request: 24 new tokens behind a prefix of 176, so 200 tokens, in pages of 16 that lie in random order. Blocks have 16 tokens, a query keeps 4.
# Everything the request does not own is NaN: the free pages, and the tail of its last page. A kernel that touches it shows.

# %%
T, LENGTH, BLOCK, K, HQ, HKV, D = 24, 200, 16, 4, 4, 2, 64
NUM_PAGES, G = 20, HQ // HKV
torch.manual_seed(0)
pages = torch.randperm(NUM_PAGES)[: -(-LENGTH // BLOCK)]
tokens = torch.randn(LENGTH, HKV, 2 * D)
kv = torch.full((NUM_PAGES, HKV, BLOCK, 2 * D), float("nan"))
for j in range(LENGTH):
    kv[pages[j // BLOCK], :, j % BLOCK] = tokens[j]
cache = m3attn.LayerCache(kv=kv.to(DEVICE, torch.bfloat16))
k, v = tokens.bfloat16().double().split(D, dim=2)  # [LENGTH, Hkv, D], in the order of the text

batch = m3attn.PagedBatch.from_lengths([T], [LENGTH], pages[None].int().to(DEVICE), page_size=BLOCK, block_size=BLOCK)
q = torch.randn(T, HQ, D).to(DEVICE, torch.bfloat16)
ids = m3attn.select_blocks(torch.randn(HKV, T, batch.num_blocks, device=DEVICE), batch, topk=K)
print("page table:", pages.tolist())
print("blocks of the last query, per KV group:", ids[:, -1].tolist())

# %% [markdown]
# ## The loop: online softmax
#
# A program holds the G query heads of one token and one group. It walks the chosen blocks once, a tile of keys at a time, and never knows the
# largest logit beforehand. So it keeps a `running_max`, a `running_sum` of exponentials relative to it, and an `accumulator` of weighted values;
# when a tile brings a larger maximum, what was collected is scaled down by `rescale`.
#
# Exponentials are base 2, which is what the hardware has: the logits are multiplied by log2 e once, with the softmax scale.

# %%
show(primitives.online_softmax)
show(primitives.finish_softmax)

# %% [markdown]
# The same in torch, for the last query and KV group 0, with the state printed at every step. The last block is the query's own; here the request
# ends in its middle, so half of its keys are masked.

# %%
group, row, position = 0, T - 1, LENGTH - 1
query = q[row, group * G : (group + 1) * G].cpu().double()  # [G, D]
scale = D**-0.5 * 1.4426950408889634
running_max, running_sum, accumulator = torch.full((G,), -torch.inf).double(), torch.zeros(G).double(), torch.zeros(G, D).double()
history = []
for step, block in enumerate(ids[group, row].tolist()):
    span = torch.arange(block * BLOCK, (block + 1) * BLOCK)
    is_visible = span <= position
    span = span.clamp(max=LENGTH - 1)
    logits = torch.where(is_visible, query @ k[span, group].T * scale, -torch.inf)  # [G, BLOCK]
    new_max = torch.maximum(running_max, logits.amax(dim=1))
    rescale, p = torch.exp2(running_max - new_max), torch.exp2(logits - new_max[:, None])
    running_sum = running_sum * rescale + p.sum(dim=1)
    accumulator = accumulator * rescale[:, None] + p @ v[span, group]
    running_max = new_max
    history.append((p, (accumulator / running_sum[:, None]).clone()))
    print(
        f"step {step}, block {block:2d}: max {running_max.numpy().round(2)}, rescale {rescale.numpy().round(2)}, sum {running_sum.numpy().round(2)}"
    )

# %%
final = history[-1][1]
figure, panels = plt.subplots(1, 2, figsize=(10, 3), layout="constrained")
panels[0].imshow(torch.cat([p for p, _ in history], dim=1), aspect="auto", cmap="Blues")
for edge in range(1, K):
    panels[0].axvline(edge * BLOCK - 0.5, color="black", linewidth=0.8)
panels[0].set(title="p of each tile, relative to the maximum so far", xlabel="key, in the order walked", ylabel="head", yticks=range(G))
panels[1].plot([float((out - final).norm() / final.norm()) for _, out in history], "o-")
panels[1].set(title="distance from the final output", xlabel="step", ylabel="relative", xticks=range(K))
plt.show()

# %% [markdown]
# Each step's `accumulator / running_sum` is the exact attention over the tiles so far; the last is the answer. Against the reference in fp64:

# %%
exact, exact_lse = reference.sparse_attention(q, *cache.key_value(), ids, batch, dtype=torch.float64)
heads = slice(group * G, (group + 1) * G)
torch.testing.assert_close(final, exact[row, heads].cpu())
torch.testing.assert_close((running_max + running_sum.log2()) * 0.6931471805599453, exact_lse[row, heads].cpu())
print("the loop by hand agrees with the reference, output and LSE")

# %% [markdown]
# Now the loop as the kernels have it. Beside the names above there is the address of a tile: the id gives a block, the block a page, the page table
# the place of the page; all of it one tile ahead, because three dependent loads in front of every tile would be three memory latencies.

# %%
show(sparse_tiles.selected_tile)
show(sparse_tiles.attend_selected)

# %% [markdown]
# (`PAIRS` is for fp8 values, notebook 4.) Note what makes it robust: an id that is -1 or too large gives a tile that starts at `visible`, where no
# key is visible; masked keys are never loaded, so a NaN in them cannot become `0 * NaN` in the product with V.
#
# ## Prefill
#
# One program is one token and one KV group; the grid is (T, Hkv). Between "who am I" and "write it down" stands the loop.

# %%
show(sparse_prefill.sparse_prefill_kernel)

# %% [markdown]
# Run it. `impl="triton"` is strict: this implementation runs, or the call raises with every reason why not. The bound is twice what plain torch at
# the same precision is off from fp64, plus a band from rounding theory.

# %%
out, lse = m3attn.sparse_attention(q, cache, ids, batch, return_lse=True, impl="triton")
bound = attention_bound(q, cache, batch, ids)
bound.check(out, lse)
used = float(((out.double() - bound.out).abs() / bound.out_tolerance).max())
print(f"{T * HKV} programs; largest error {float((out.double() - bound.out).abs().max()):.1e}, {used:.0%} of what the bound allows there")

# %% [markdown]
# No NaN, though most of the pool is NaN. And an id that must be ignored is ignored, wherever it stands:

# %%
with_junk = torch.cat([torch.full_like(ids[..., :1], 10**6), ids, torch.full_like(ids[..., :1], -7)], dim=2)
junk_out = m3attn.sparse_attention(q, cache, with_junk, batch, impl="triton")
assert torch.equal(out, junk_out)
print("ids of a million and of -7 change no bit")

# %% [markdown]
# ## Decode: too few programs
#
# A decode step has one token a request. With M3's 4 KV groups and one request the grid above is 4 programs, on a GPU with more than a hundred
# multiprocessors. So the keys of a row are cut into splits, a third grid axis, and each program writes a *partial* output with its LSE.
#
# Two partial results over disjoint keys are joined exactly by their LSEs:
#
# lse = log(exp(lse_a) + exp(lse_b)),  out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

# %%
token = m3attn.PagedBatch.from_lengths([1], [LENGTH], batch.page_table, page_size=BLOCK, block_size=BLOCK)
one_q, one_ids = q[-1:], ids[:, -1:]
parts = [reference.sparse_attention(one_q, *cache.key_value(), one_ids[..., s : s + 1], token, dtype=torch.float64) for s in range(K)]
partial_out, partial_lse = torch.stack([o for o, _ in parts]), torch.stack([e for _, e in parts])  # [splits, 1, Hq, D], [splits, 1, Hq]

weights = (partial_lse - partial_lse.logsumexp(dim=0)).exp()
merged = (weights[..., None] * partial_out).sum(dim=0)
torch.testing.assert_close(merged[0], exact[-1])
print("four partial results, one block each, merge to the whole")

# %%
figure, panel = plt.subplots(figsize=(6, 2.6), layout="constrained")
bottom = torch.zeros(HQ)
for s in range(K):
    share = weights[s, 0].cpu()
    panel.bar(range(HQ), share, bottom=bottom, label=f"split {s}")
    bottom += share
panel.set(title="what each split weighs in the merge", xlabel="query head", ylabel="exp(lse of split - lse)", xticks=range(HQ))
panel.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# The decode kernel differs from prefill in where it starts and stops, and in what it writes:

# %%
source = inspect.getsource(sparse_decode.sparse_decode_kernel.fn)
print(source[source.index("    steps = ") :])

# %% [markdown]
# The merge takes all splits of a row at once, adds the sink if there is one, and rounds once:

# %%
show(merge_splits.merge_splits_kernel)

# %% [markdown]
# How many splits? A power of two, so many that up to `programs` programs run, and each has a tile at least. `programs` stands in a table of measured
# settings; here we force it, to see every number of splits give the same attention.

# %%
bound = attention_bound(one_q, cache, token, one_ids)
try:
    for programs in (2, 4, 8):
        settings = sparse_attention.settings_override = sparse_attention.Settings(block_n=16, num_warps=2, num_stages=2, programs=programs)
        splits = sparse_attention.num_splits(settings, 1, HQ, HKV, D, K * BLOCK, m3attn.workspace_limit())
        one_out, one_lse = m3attn.sparse_attention(one_q, cache, one_ids, token, return_lse=True, impl="triton")
        bound.check(one_out, one_lse)
        print(f"splits {splits}, programs {splits * HKV}: largest error {float((one_out.double() - bound.out).abs().max()):.1e}")
finally:
    sparse_attention.settings_override = None

# %% [markdown]
# `merge_attention_states` is the same formula as a stage of its own, for parts that come from different calls: here one call over the first half of
# the ids and one over the second.

# %%
first, second = (m3attn.sparse_attention(q, cache, part, batch, return_lse=True, impl="triton") for part in (ids[..., :2], ids[..., 2:]))
joined, joined_lse = m3attn.merge_attention_states(*first, *second, impl="triton")
torch.testing.assert_close(joined_lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
difference = float((joined.double() - exact).abs().max())
assert difference < 4 * torch.finfo(torch.bfloat16).eps * float(exact.abs().max())
print(f"joined from two bf16 halves: within {difference:.1e} of fp64")

# %% [markdown]
# ## Exercises
#
# Replace `return None` and run the check below it.
#
# **1.** Merge two partial results in fp64, also where one part has no keys: its LSE is -inf and its output may hold NaN.


# %%
def exercise_1(out_a, lse_a, out_b, lse_b) -> tuple[torch.Tensor, torch.Tensor] | None:
    return None


# %%
def verdict(answer: object, is_right: bool) -> bool:
    print("not answered yet" if answer is None else "right" if is_right else f"not yet, got {answer}")
    return is_right


def check_1(exercise) -> bool:
    out_a, out_b, lse_a, lse_b = *torch.randn(2, 3, 2, 4).double(), *torch.randn(2, 3, 2).double()
    lse_a[0], out_a[0] = -torch.inf, torch.nan
    lse_b[:2], out_b[:2] = -torch.inf, torch.nan
    from m3attn.reference.merge import merge_attention_states

    right = merge_attention_states(out_a, lse_a, out_b, lse_b)
    given = exercise(out_a, lse_a, out_b, lse_b)
    return verdict(given, given is not None and all(torch.allclose(g, r) for g, r in zip(given, right, strict=True)))


solved_1 = check_1(exercise_1)

# %% [markdown]
# **2.** How many programs does decode of one token on M3 (4 KV groups, K = 16 blocks of 128) run if `programs` is 512 and `block_n` is 128?


# %%
def exercise_2() -> int | None:
    return None


# %%
def check_2(exercise) -> bool:
    settings = sparse_attention.Settings(block_n=128, num_warps=4, num_stages=3, programs=512)
    splits = sparse_attention.num_splits(settings, 1, 64, 4, 128, 16 * 128, m3attn.workspace_limit())
    return verdict(exercise(), exercise() == 4 * splits)


solved_2 = check_2(exercise_2)

# %% [markdown]
# **3.** The attention sink is one more logit per row whose value is 0. Apply it afterwards, from `out`, `lse` and the sink's logit alone.


# %%
def exercise_3(out: torch.Tensor, lse: torch.Tensor, sink_logit: torch.Tensor) -> torch.Tensor | None:
    return None


# %%
def check_3(exercise) -> bool:
    sink_key = torch.randn(HQ, D, device=DEVICE)
    right, _ = reference.sparse_attention(q, *cache.key_value(), ids, batch, sink_key=sink_key, dtype=torch.float64)
    given = exercise(exact, exact_lse, torch.einsum("thd,hd->th", q.double(), sink_key.double()) * D**-0.5)
    return verdict(given, given is not None and torch.allclose(given, right))


solved_3 = check_3(exercise_3)
