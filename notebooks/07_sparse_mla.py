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
# # 7. Sparse MLA
#
# M3 chooses *blocks*, and each group of query heads has keys of its own. Multi-head latent attention (MLA), as DeepSeek-V3 has it, keeps one short
# **latent** row a token that serves all heads, and its sparse form chooses single *tokens*. Other shapes, the same questions: what is read, what is
# multiplied, what is rounded. This notebook goes from the projections to the kernel `sparse_mla_prefill`, and checks each step.

# %%
import inspect

import matplotlib.pyplot as plt
import torch

import m3attn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    m3attn.interpret()  # Triton's interpreter: the same kernel source, run by numpy

from m3attn.demo import text
from m3attn.demo.mla import INDEX, LATENT, NOPE, ROPE, VALUE, Geometry, Layer
from m3attn.layers.rope import rotary_table
from m3attn.reference import mla_sparse as reference
from m3attn.reference.mla_quantize import join_heads, rope
from m3attn.triton_kernels import mla_sparse


def show(kernel) -> None:
    """Print the package's own source of a Triton function."""
    print(inspect.getsource(kernel.fn))


# %% [markdown]
# ## What a token leaves behind
#
# The demo's layer with random weights on the package's text; DeepSeek-V3's dims, but two heads in place of 128. A token's vector is projected
# *down* to 512 latent numbers, normalised, and to 64 more that carry its position. That is all that the cache keeps.

# %%
T, H, K = 192, 2, 32
geometry = Geometry(heads=H, hidden=128, tokens=T, chunk=T, topk=K, page_size=16)
content = text.load(None)[:T]
layer = Layer(geometry, content, DEVICE, fp8=False, seed=0)
x = layer.embed(0, T)
down = x @ layer.kv_down
latent = torch.nn.functional.rms_norm(down[:, :LATENT], (LATENT,))  # [T, 512]
positions = torch.arange(T, device=DEVICE)
cos_sin = rotary_table(T, ROPE, 1e4).to(DEVICE)
k_pe = rope(down[:, LATENT:], positions, cos_sin).to(latent.dtype)  # [T, 64], one for all heads
kv = torch.cat([latent, k_pe], dim=1)[:, None]  # [T, 1, 576], the cache's rows
print("cache row of a token:", kv.shape[2], "numbers; per-head keys and values of 128 heads would be", 128 * (NOPE + ROPE + VALUE))

# %% [markdown]
# ## Two ways to the same logit
#
# Written as in a textbook, each head projects the latent *up* to a key of 128 dims and a value of 128:
#
# logit = q_nope · (W_k latent) + q_pe · k_pe
#
# For a prompt that is fine. For a query that reads 2,048 tokens from the cache it means 2,048 up-projections a head. But a matrix can change sides:
#
# q_nope · (W_k latent) = (W_kᵀ q_nope) · latent
#
# The query is projected instead, once; this is called *absorbing*. Then query and cache row are both 576 numbers, and the value is the latent itself;
# W_v is applied to the *output*.

# %%
q = (x @ layer.q_proj).view(T, H, NOPE + ROPE)
q_nope, q_pe = q[..., :NOPE], rope(q[..., NOPE:], positions, cos_sin).to(q.dtype)
up_k, up_v = layer.kv_up.view(LATENT, H, NOPE + VALUE).split((NOPE, VALUE), dim=2)  # [512, H, 128] each
absorbed = join_heads(torch.einsum("thd,lhd->thl", q_nope, up_k), q_pe)  # [T, H, 576]

keys = torch.einsum("jl,lhd->jhd", latent.double(), up_k.double())
textbook = torch.einsum("thd,jhd->htj", q_nope.double(), keys) + torch.einsum("thd,jd->htj", q_pe.double(), k_pe.double())
through_latent = torch.einsum("thl,jl->htj", absorbed.double(), kv[:, 0].double())
difference = float((textbook - through_latent).norm() / textbook.norm())
print(f"absorbed q [T, H, 576] = {list(absorbed.shape)}; logits agree within {difference:.1e}, the rounding of the absorbed q to bf16")
assert difference < 0.01

# %% [markdown]
# ## The specification
#
# Given which tokens a query reads, the stage is short:

# %%
print(inspect.getdoc(reference.sparse_mla_prefill).partition("Args:")[0])

# %% [markdown]
# Which tokens, decides an index branch again: here the demo's, one index vector a token, the best K of them. Unlike in M3 there are no blocks and
# no block that is always kept. In the picture a row's chosen tokens are single columns.

# %%
index = torch.nn.functional.normalize(x @ layer.index_proj, dim=-1)  # [T, INDEX]
scores = (index.float() @ index.float().T).masked_fill(~torch.ones(T, T, dtype=torch.bool, device=DEVICE).tril(), float("-inf"))
best = scores.topk(K, dim=1)
indices = torch.where(best.values > float("-inf"), best.indices, -1).int()[:, None]  # [T, 1, K]
chosen = torch.zeros(T, T + 1, device=DEVICE).scatter_(1, torch.where(indices[:, 0] >= 0, indices[:, 0], T).long(), 1.0)[:, :T]
figure, panel = plt.subplots(figsize=(4.6, 4.2), layout="constrained")
panel.imshow(chosen.cpu(), cmap="Blues", interpolation="nearest")
panel.set(title=f"the {K} tokens that each query reads", xlabel="token", ylabel="query")
plt.show()
assert index.shape == (T, INDEX)

# %% [markdown]
# By hand for every query, as attention under a mask, and by the stage. Scale: 1 / sqrt(192), the width of a textbook query, not that of an absorbed
# one.

# %%
SCALE = (NOPE + ROPE) ** -0.5
weights = (through_latent * SCALE).masked_fill(chosen[None] == 0, float("-inf")).softmax(dim=2)  # [H, T, T]
expected = torch.einsum("htj,jl->thl", weights, latent.double())  # [T, H, 512]
exact, exact_max, exact_lse = reference.sparse_mla_prefill(absorbed, kv[:, 0], indices[:, 0], sm_scale=SCALE, dtype=torch.float64)
torch.testing.assert_close(exact, expected)
out, max_logits, lse = m3attn.sparse_mla_prefill(absorbed, kv, indices, sm_scale=SCALE, impl="reference")
print("the mask and the reference agree; output", list(out.shape), out.dtype, "- still latent")
final = torch.einsum("thl,lhd->thd", out.double(), up_v.double())  # what the layer goes on with
print("after W_v:", list(final.shape))

# %% [markdown]
# ## What the kernel is up against
#
# Every head reads the same rows, and a row is key and value at once. So one load of 576 numbers serves all heads' two products: 2 · (576 + 512)
# operations a head. How many operations a byte is that, and what do M3's groups of 16 heads do with their own K and V?

# %%
heads = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128])
mla = heads * 2 * (576 + 512) / (576 * 2)  # bf16: two bytes a number
gqa = heads * 2 * (128 + 128) / (2 * 128 * 2)
figure, panel = plt.subplots(figsize=(7, 3), layout="constrained")
panel.loglog(heads, mla, "o-", base=2, label="MLA, heads that share a latent row")
panel.loglog(heads, gqa, "o-", base=2, label="GQA, heads that share K and V")
panel.axvline(16, color="gray", linestyle=":")
panel.set(xlabel="heads", ylabel="operations a byte (bf16)", xticks=heads.tolist(), xticklabels=heads.tolist())
panel.legend()
plt.show()
print(f"M3's 16 heads: {float(gqa[4]):.0f} operations a byte; 128 heads of MLA: {float(mla[-1]):.0f}")

# %% [markdown]
# Where waiting for memory ends and waiting for the tensor cores begins, two ceilings of a GPU say: on the H200 of results/ it is at 193 operations a
# byte (bf16). M3's 16 heads lie far below, 128 heads of MLA above: there the width of a product counts, and both run in fp8.
#
# The other limit is room. A tile of 64 heads has an output of 64 x 512 fp32, 128 KB: half of a multiprocessor's registers. The kernel therefore
# holds the 512 dims as several tiles, and how wide they are is a setting: one wide tile where accumulators live in tensor memory, four narrow ones
# where they live in registers.

# %%
show(mla_sparse.load_chunks)
show(mla_sparse.add_values)

# %% [markdown]
# `rows` are *pointers*, one a token: chosen tokens lie anywhere. An index that names no token gives a mask, and a masked row is not read.
#
# Now the loop: logits from the rotated part and all chunks of the latent, online softmax as in notebook 3, and the **same chunks** again as values.

# %%
source = inspect.getsource(mla_sparse.sparse_mla_kernel.fn)
print(source[source.index("    running_max = ") : source.index("    _, lse = ")])

# %% [markdown]
# Two details. The next tile's indices are loaded at the end of a step: the row addresses depend on them, and two memory latencies in a row would be
# felt. And masked logits are -inf *before* the softmax, while masked rows are 0: 0 · 0 cannot become NaN.
#
# Run it on the last queries. Rows that no index names are NaN first, to see that they are not touched.

# %%
NEW = 4
last = slice(T - NEW, T)
poisoned = kv.clone()
poisoned[chosen[last].sum(dim=0) == 0] = float("nan")
out, max_logits, lse = m3attn.sparse_mla_prefill(absorbed[last], poisoned, indices[last], sm_scale=SCALE, impl="triton")


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """1 - cosine, the measure that this stage is held to: below 1e-4 with P · V in 16 bit, 4e-4 with it in e4m3."""
    a, b = a.double().flatten(), b.double().flatten()
    return 1 - float(a @ b / (a.norm() * b.norm()))


print(f"{int((poisoned[:, 0, 0].isnan()).sum())} of {T} rows are NaN; cosine distance to fp64 {distance(out, exact[last]):.1e}")
assert distance(out, exact[last]) < 1e-4
torch.testing.assert_close(lse.double(), exact_lse[last], rtol=1e-4, atol=1e-3)
torch.testing.assert_close(max_logits.double(), exact_max[last], rtol=1e-4, atol=1e-3)

# %% [markdown]
# ## Few queries
#
# One query and 64 heads a tile: two programs, on a GPU with more than a hundred multiprocessors. Up to 16 queries therefore split their indices among
# programs, each with its own maximum and sum, and a second kernel joins them by their LSEs, as in notebook 3.
#
# ## Conventions
#
# This stage keeps those of its consumers, and they are not M3's: a query *without any token* gets output 0 but **LSE +inf**, and the largest
# logit is returned too. `topk_length` says how many leading indices count. `attn_sink` is a *logit* for each head, not a key.

# %%
nothing = torch.full_like(indices[last], -1)
zero, no_max, no_lse = m3attn.sparse_mla_prefill(absorbed[last], kv, nothing, sm_scale=SCALE, impl="triton")
print("no token: output", float(zero.abs().max()), " max", float(no_max.max()), " LSE", float(no_lse.min()))
sink = torch.tensor([0.0, float("-inf")], device=DEVICE)
with_sink, _, same_lse = m3attn.sparse_mla_prefill(absorbed[last], kv, indices[last], sm_scale=SCALE, attn_sink=sink, impl="triton")
share = torch.sigmoid(exact_lse[last] - sink)[..., None]
assert distance(with_sink, exact[last] * share) < 1e-4 and torch.equal(lse, same_lse)
print("a sink takes", (1 - share[:, :, 0]).mean(dim=0).cpu().numpy().round(3), "of each head's softmax, and is not in the LSE")

# %% [markdown]
# ## fp8
#
# The cache row in e4m3 is 576 bytes, and with an e4m3 query both products can run on fp8 tensor cores. As in notebook 4 the error has two parts: what
# storing cost, and what computing cost. `fp8_pv=False` widens the values and leaves P alone.

# %%
kv8, kv_scale = m3attn.quantize_fp8(kv, scale="tensor")
q8, q_scale = m3attn.quantize_fp8(absorbed[last], scale="tensor")
runs = {
    "bf16": (absorbed[last], kv, {}),
    "widen": (absorbed[last], kv8, {"kv_scale": kv_scale}),
    "fp8": (q8, kv8, {"q_scale": q_scale, "kv_scale": kv_scale, "fp8_pv": False}),
    "fp8_pv": (q8, kv8, {"q_scale": q_scale, "kv_scale": kv_scale}),
}
errors = {}
for name, (queries, rows, options) in runs.items():
    got, _, _ = m3attn.sparse_mla_prefill(queries, rows, indices[last], sm_scale=SCALE, **options, impl="triton")
    scales = {key: value for key, value in options.items() if key != "fp8_pv"}
    stored, _, _ = reference.sparse_mla_prefill(queries, rows[:, 0], indices[last, 0], sm_scale=SCALE, **scales, dtype=torch.float64)
    errors[name] = (distance(stored, exact[last]), distance(got, stored))
    print(f"{name:7s} cosine distance: of the data {errors[name][0]:.1e}, of the arithmetic {errors[name][1]:.1e}")
assert errors["fp8_pv"][1] < 4e-4 and max(errors[name][1] for name in ("bf16", "widen", "fp8")) < 1e-4

# %%
figure, panel = plt.subplots(figsize=(7, 2.8), layout="constrained")
for number, what in enumerate(("data", "arithmetic")):
    panel.bar([i + (number - 0.5) * 0.36 for i in range(4)], [max(errors[name][number], 1e-9) for name in runs], width=0.36, label=what)
panel.set(yscale="log", ylim=(1e-7, 1e-2), ylabel="cosine distance", xticks=range(4), xticklabels=runs)
panel.legend()
plt.show()

# %% [markdown]
# The weights are random and so are these errors' sizes; their order is what carries over: storing in e4m3 costs most, P in e4m3 comes next,
# everything else is far below.
#
# ## Exercises
#
# Replace `return None` and run the check below it.
#
# **1.** Absorb W_v too: from a latent output [T, H, 512] to the heads' outputs [T, H, 128], and their sum over heads through an output projection
# `w_o` [H, 128, hidden], with one matrix a head that is made *once*.


# %%
def exercise_1(up_v: torch.Tensor, w_o: torch.Tensor) -> torch.Tensor | None:
    """up_v [512, H, 128], w_o [H, 128, hidden] -> [H, 512, hidden]."""
    return None


# %%
def verdict(answer: object, is_right: bool) -> bool:
    print("not answered yet" if answer is None else "right" if is_right else f"not yet, got {answer}")
    return is_right


def check_1(exercise) -> bool:
    w_o = torch.randn(H, VALUE, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE).double()
    given = exercise(up_v.double(), w_o)
    right = torch.einsum("thl,lhd,hdx->tx", exact, up_v.double(), w_o)
    return verdict(given, given is not None and torch.allclose(torch.einsum("thl,hlx->tx", exact, given), right))


solved_1 = check_1(exercise_1)

# %% [markdown]
# **2.** Join two results over disjoint tokens, (out, lse) each, in this stage's convention: LSE +inf means no token.


# %%
def exercise_2(out_a, lse_a, out_b, lse_b) -> tuple[torch.Tensor, torch.Tensor] | None:
    return None


# %%
def check_2(exercise) -> bool:
    halves = [indices[:, 0, : K // 2], indices[:, 0, K // 2 :]]
    parts = [reference.sparse_mla_prefill(absorbed, kv[:, 0], half, sm_scale=SCALE, dtype=torch.float64)[::2] for half in halves]
    given = exercise(*parts[0], *parts[1])  # early queries have no token in the second half
    return verdict(given, given is not None and torch.allclose(given[0], exact) and torch.allclose(given[1], exact_lse))


solved_2 = check_2(exercise_2)

# %% [markdown]
# **3.** From how many heads on does sparse MLA in bf16 reach 200 operations a byte?


# %%
def exercise_3() -> int | None:
    return None


# %%
def check_3(exercise) -> bool:
    counts = torch.arange(1, 257)
    return verdict(exercise(), exercise() == int(counts[counts * 2 * (576 + 512) / (576 * 2) >= 200][0]))


solved_3 = check_3(exercise_3)
