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
# # 4. fp8
#
# Decode of a long context reads the cache and does little else, so half the bytes can be nearly half the time; and a cache of half the size holds
# twice the tokens. The price is precision. This notebook says what is quantised and how, and measures the error on the package's text.

# %%
import inspect

import matplotlib.pyplot as plt
import torch

import m3attn
from m3attn.bench.shapes import Heads
from m3attn.demo import text
from m3attn.demo.geometry import Geometry
from m3attn.demo.model import FORMATS, Model
from m3attn.reference import index as reference_index
from m3attn.reference import quantize
from m3attn.reference import sparse as reference

HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
DEVICE = torch.device("cuda" if HAS_FP8 else "cpu")
if DEVICE.type == "cpu":
    m3attn.interpret()  # Triton's interpreter: the same kernel source, run by numpy
E4M3 = torch.float8_e4m3fn

# %% [markdown]
# ## The numbers there are
#
# e4m3 has a sign, 4 bits of exponent and 3 of mantissa: 8 values from one power of two to the next, up to 448, and no infinity. Every byte that is a
# positive number:

# %%
positive = torch.arange(1, 127, dtype=torch.uint8).view(E4M3).float()
figure, panel = plt.subplots(figsize=(9, 2.8), layout="constrained")
panel.loglog(positive[:-1], positive.diff() / positive[:-1], ".", base=2)
panel.set(
    xlabel="value",
    ylabel="gap to the next, relative",
    title=f"{len(positive)} positive values, {float(positive[0]):.4f} to {float(positive[-1]):.0f}",
)
plt.show()

# %% [markdown]
# Between 2^-6 and 448 a rounding is off by at most 1/16 of the value; below, gaps no longer shrink with the value. A **scale** moves data into the
# good range:
#
# stored = value / scale, rounded;  value = stored * scale
#
# The cast saturates: what is too large becomes the largest number and not a NaN.

# %%
print(inspect.getsource(quantize.saturating_cast).partition("Args:")[0])

# %% [markdown]
# ## Activations of a text
#
# The package's story through one layer of the demo's model. Its weights are **random**: the errors below belong to these activations, and a trained
# model's may be less even.


# %%
class Tape:
    """Keeps the inputs of the stages that the demo's model runs."""

    def __init__(self) -> None:
        self.inputs: dict = {}

    def stage(self, name, layer, inputs, call):
        self.inputs[name] = inputs
        return call()


T, BLOCK, K, NEW = 768, 32, 6, 8
geometry = Geometry(Heads(4, 2), hidden=128, tokens=T, decode_steps=0, chunk=T, block_size=BLOCK, topk=K, dense_layers=0)
tape = Tape()
Model(geometry, FORMATS["bf16", "bf16"], DEVICE, tape).forward(text.load(None)[:T], 0, T)
step, index_q = tape.inputs["sparse_attention"], tape.inputs["index_topk"]["index_q"]
q, ids, cache = step["q"][-NEW:], step["ids"][:, -NEW:], step["cache"]  # the last 8 tokens, as if they were verified in one step
(k, v), index_k = cache.key_value(), cache.index_key()
batch = m3attn.PagedBatch.from_lengths([NEW], [T], step["batch"].page_table, page_size=BLOCK, block_size=BLOCK)
for name, x in (("q", q), ("k", k), ("v", v), ("index_k", index_k)):
    print(f"{name:8s}{list(x.shape)!s:20s} largest {float(x.abs().max()):6.2f}, root of mean square {float(x.float().square().mean().sqrt()):.2f}")

# %% [markdown]
# q, k and the index vectors come out of an RMSNorm, so their size is known beforehand and a scale of 1 (None) will do. v is not normalised and may
# have any size; here it is about 1 too.
#
# How much does the scale matter? The error of k, and of v made 64 times smaller to set it apart, for scales from far too small (saturation) to far
# too large (gaps that do not shrink):


# %%
def error_of(x: torch.Tensor, scale: float) -> float:
    """Relative error of x stored in e4m3."""
    stored = m3attn.quantize_fp8(x, scale=scale).float() * scale
    return float((stored - x.float()).norm() / x.float().norm())


scales = [2.0**e for e in range(-18, 13)]
figure, panel = plt.subplots(figsize=(9, 3), layout="constrained")
for name, x in (("k", k), ("v / 64", v / 64)):
    (line,) = panel.loglog(scales, [error_of(x, scale) for scale in scales], "o-", base=2, label=name)
    panel.axvline(float(x.abs().max()) / 448, color=line.get_color(), linestyle="--", label=f"largest {name} / 448")
panel.set(xlabel="scale", ylabel="relative error")
panel.legend()
plt.show()

# %% [markdown]
# The floor is wide: e4m3 is a floating-point format, so any scale does that keeps the largest value below 448 and the usual ones above 2^-6. That is
# unlike int8, where a scale must be right. `quantize_fp8` can also find one, per tensor or per row:

# %%
stored, scale = m3attn.quantize_fp8(v, scale="tensor")
print(f"dynamic scale {float(scale):.2e}, the largest stored value is then {float(stored.float().abs().max()):.0f}")
rows, row_scales = m3attn.quantize_fp8(v.flatten(0, 2), scale="row")
print(f"one scale per row: {list(row_scales.shape)} of them")

# %% [markdown]
# ## What is quantised in each mode
#
# | mode | q | K, V | q·K product | P·V product |
# |---|---|---|---|---|
# | bf16 | bf16 | bf16 | bf16 | bf16 |
# | widen | bf16 | e4m3 | bf16, K widened | fp16, V widened |
# | fp8 | e4m3 | e4m3 | e4m3 | fp16, V widened |
# | fp8_pv | e4m3 | e4m3 | e4m3 | e4m3, P too |
#
# A mode is not a flag: it follows from the dtypes of what a call is given. Two errors add up. The **data's**: attention in fp64, but on the quantised
# tensors, against fp64 on the original ones. And the **arithmetic's**: what the kernel is off from fp64 on its own inputs.

# %%
k_scale, v_scale, q_scale = (float(x.abs().max()) / 448 for x in (k, v, q))
fp8_cache = m3attn.LayerCache(
    k=m3attn.quantize_fp8(k, scale=k_scale), v=m3attn.quantize_fp8(v, scale=v_scale), index_k=index_k, k_scale=k_scale, v_scale=v_scale
)
fp8_q = m3attn.quantize_fp8(q, scale=q_scale)
modes = {"bf16": (q, cache, {}), "widen": (q, fp8_cache, {}), "fp8": (fp8_q, fp8_cache, {"q_scale": q_scale})}
modes["fp8_pv"] = (fp8_q, fp8_cache, {"q_scale": q_scale, "fp8_pv": True})
original, _ = reference.sparse_attention(q, k, v, ids, batch, dtype=torch.float64)


def relative(x: torch.Tensor, exact: torch.Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


# %%
errors = {}
for mode, (queries, pages, options) in modes.items():
    out = m3attn.sparse_attention(queries, pages, ids, batch, **options, impl="triton")
    scales_of = {"q_scale": options.get("q_scale"), "k_scale": pages.k_scale, "v_scale": pages.v_scale}
    on_stored, _ = reference.sparse_attention(queries, *pages.key_value(), ids, batch, **scales_of, dtype=torch.float64)
    errors[mode] = (relative(on_stored, original), relative(out, on_stored), relative(out, original))
    print(f"{mode:7s} data {errors[mode][0]:.1e}, arithmetic {errors[mode][1]:.1e}, together {errors[mode][2]:.1e}")

# %%
figure, panel = plt.subplots(figsize=(7, 3), layout="constrained")
for number, what in enumerate(("data", "arithmetic", "together")):
    panel.bar([i + (number - 1) * 0.27 for i in range(4)], [max(errors[mode][number], 1e-16) for mode in modes], width=0.27, label=what)
panel.set(yscale="log", ylim=(1e-4, 1), ylabel="relative error of the output", xticks=range(4), xticklabels=modes)
panel.legend(ncols=3)
plt.show()

# %% [markdown]
# Storing K and V in e4m3 costs far more than multiplying in it: mode fp8 adds the rounding of q to widen's error, and next to nothing by its
# arithmetic. `fp8_pv` is the exception there: the softmax weights P themselves are rounded to 3 bits of mantissa. They are scaled by 2^8 first, as
# many weights lie far below 2^-6, and the row sum is taken from the unrounded P.

# %%
assert errors["bf16"][0] < 1e-12
assert errors["fp8"][1] < errors["fp8_pv"][1] < errors["fp8"][0]
print("P.V in e4m3 multiplies the arithmetic error by", round(errors["fp8_pv"][1] / errors["fp8"][1], 1))

# %% [markdown]
# ## Index keys
#
# The index branch only ranks blocks, so an error matters where it swaps two blocks around the K-th place. The scales multiply every score alike and
# cannot change the order; rounding the keys can.

# %%
index_scale = float(index_k.abs().max()) / 448
whole = step["batch"]
exact_scores = reference_index.index_score(index_q, index_k, whole, dtype=torch.float64)
fp8_index = m3attn.LayerCache(k=k, v=v, index_k=m3attn.quantize_fp8(index_k, scale=index_scale), index_k_scale=index_scale)
scores = m3attn.index_score(m3attn.quantize_fp8(index_q), fp8_index, whole, impl="reference")
before, after = (m3attn.select_blocks(s.float(), whole, topk=K) for s in (exact_scores, scores))
is_kept = ((after[..., None] == before[..., None, :]) & (after >= 0)[..., None]).any(-1)
visible = exact_scores.isfinite()
print(f"scores: relative error {relative(scores[visible], exact_scores[visible]):.1e}")
print(f"blocks kept: {float(is_kept.sum() / (after >= 0).sum()):.1%} of {int((after >= 0).sum())}")

# %%
lost = (before >= 0) & ~((before[..., None] == after[..., None, :]).any(-1))
columns = before.clamp(min=0).long()
margin = exact_scores.gather(2, columns) - exact_scores.gather(2, columns).masked_fill(before < 0, torch.inf).amin(dim=2, keepdim=True)
late = slice(K * BLOCK, T)  # queries that leave blocks out
figure, panel = plt.subplots(figsize=(7, 3), layout="constrained")
kept_margin, lost_margin = margin[:, late][~lost[:, late]].cpu().numpy(), margin[:, late][lost[:, late]].cpu().numpy()
panel.hist([kept_margin, lost_margin], bins=40, range=(0, 40), stacked=True, label=["kept", "lost to fp8"])
panel.set(xlabel="score above the K-th of the row", ylabel="chosen blocks", yscale="log")
panel.legend()
plt.show()

# %% [markdown]
# The blocks that are lost sit next to the K-th score: near-ties, where the exact choice was nearly arbitrary too.
#
# ## The sink takes q_scale and not k_scale
#
# An attention sink is one more logit per head whose value is 0: q · sink_key · sm_scale. It lets a head attend to nothing. In fp8 the query that
# the kernel holds is the *stored* one, q / q_scale, so
#
# - a key's logit is (q / q_scale) · (k / k_scale) · sm_scale, and needs `q_scale * k_scale` to be right;
# - the sink key is 16 bit and was never divided by anything: its logit needs `q_scale` alone.
#
# Multiply it by k_scale as well, as if the sink were one more row of K, and it shrinks towards 0: nothing crashes, for a logit of 0 is a possible
# sink, and outputs are wrong by however much the sink matters. In numbers:

# %%
sink_key = 6 * torch.randn(4, 128, generator=torch.Generator().manual_seed(1)).to(DEVICE)  # large enough to take a part of the softmax
with_sink, _ = reference.sparse_attention(q, k, v, ids, batch, sink_key=sink_key, dtype=torch.float64)
right, lse = m3attn.sparse_attention(fp8_q, fp8_cache, ids, batch, q_scale=q_scale, sink_key=sink_key, return_lse=True, impl="triton")
without = m3attn.sparse_attention(fp8_q, fp8_cache, ids, batch, q_scale=q_scale, impl="triton").double()
stored_logit = torch.einsum("thd,hd->th", fp8_q.double(), sink_key.double()) * 128**-0.5
cases = {"library": right.double()}
for name, factor in (("q_scale", q_scale), ("q_scale * k_scale", q_scale * k_scale), ("no scale", 1.0)):
    cases[name] = without * torch.sigmoid(lse - stored_logit * factor)[..., None]
for name, out in cases.items():
    print(f"{name:18s} error {relative(out, with_sink):.1e}")
assert relative(cases["q_scale"], right.double()) < 0.01 < relative(cases["q_scale * k_scale"], right.double())

# %%
figure, panel = plt.subplots(figsize=(8, 2.8), layout="constrained")
panel.barh(list(cases), [relative(out, with_sink) for out in cases.values()])
panel.axvline(errors["fp8"][2], color="black", linestyle="--", label="fp8 without a sink")
panel.set(xlabel="relative error of the output", xlim=(0, None))
panel.legend()
plt.show()

# %% [markdown]
# ## Exercises
#
# Replace `return None` and run the check below it.
#
# **1.** How many bytes does one token take in one sparse layer of M3 (4 KV heads, head dim 128, one index key of 128): in bf16, and with K, V and
# index keys in e4m3? Scales are per tensor and count nothing.


# %%
def exercise_1() -> tuple[int, int] | None:
    return None


# %%
def verdict(answer: object, is_right: bool) -> bool:
    print("not answered yet" if answer is None else "right" if is_right else f"not yet, got {answer}")
    return is_right


def check_1(exercise) -> bool:
    sizes = []
    for dtype in (torch.bfloat16, E4M3):
        tensors = (torch.empty(4, 2 * 128, dtype=dtype), torch.empty(128, dtype=dtype))
        sizes.append(sum(x.nbytes for x in tensors))
    return verdict(exercise(), exercise() == tuple(sizes))


solved_1 = check_1(exercise_1)

# %% [markdown]
# **2.** What is the smallest power of two that a weight p can be without becoming 0 in e4m3, (a) as it is, (b) scaled by 2^8 first?


# %%
def exercise_2() -> tuple[float, float] | None:
    return None


# %%
def check_2(exercise) -> bool:
    p = 2.0 ** torch.arange(-30, 0)
    smallest = tuple(float(p[(p * factor).to(E4M3).float() > 0][0]) for factor in (1, 256))
    return verdict(exercise(), exercise() == smallest)


solved_2 = check_2(exercise_2)

# %% [markdown]
# **3.** Write the dynamic scale per row: the largest magnitude of a row, at least 2^-100, over 448, in fp32.


# %%
def exercise_3(x: torch.Tensor) -> torch.Tensor | None:
    """x [rows, N]. Returns [rows]."""
    return None


# %%
def check_3(exercise) -> bool:
    x = torch.cat([v.flatten(0, 2)[:5], torch.zeros_like(v.flatten(0, 2)[:1])])
    given = exercise(x)
    return verdict(given, given is not None and torch.allclose(given, m3attn.quantize_fp8(x, scale="row")[1], rtol=1e-6, atol=0))


solved_3 = check_3(exercise_3)
