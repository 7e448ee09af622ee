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
# # 8. M3 from transformers on m3attn
#
# transformers builds MiniMax-M3 from its config and has an attention of its own for it, written for clarity: the indexer forms every product of a
# query and a key in fp32, and a dense mask hides what was not chosen. `prepare(model)` puts indexer, cache and attention on this library's stages and
# leaves everything else as it is. This notebook does that to a small M3 and compares: logits, chosen blocks, cache, fp8, generated tokens.

# %%
import matplotlib.pyplot as plt
import torch
from transformers import DynamicCache
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

import m3attn
from m3attn.demo import text
from m3attn.integrations.transformers import prepare, unprepare

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.set_grad_enabled(False)  # the kernels are forward only

# %% [markdown]
# ## A small M3
#
# One dense layer and three sparse ones, blocks of 16, K = 3, and **random weights**: what follows is about two ways to compute one model, not about
# what M3 says. The real one is `AutoModelForCausalLM.from_pretrained("MiniMaxAI/MiniMax-M3")` in place of the next cell; nothing after it would
# change.

# %%
BLOCK, K, LAYERS = 16, 3, 4
config = MiniMaxM3VLTextConfig(
    vocab_size=256,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    index_n_heads=2,
    index_head_dim=64,
    index_block_size=BLOCK,
    index_topk_blocks=K,
    num_hidden_layers=LAYERS,
    layer_types=["full_attention", *["minimax_m3_sparse"] * (LAYERS - 1)],
    mlp_layer_types=["dense"] * LAYERS,
    dense_intermediate_size=96,
    rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    attn_implementation="eager",
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
)

# %%
torch.manual_seed(0)
model = MiniMaxM3VLForCausalLM(config).eval()
for name, weight in model.named_parameters():
    weight.data.normal_(std=0.3 if "norm" in name else weight.shape[-1] ** -0.5)
model = model.to(DEVICE)
T = 160
ids = torch.tensor(list(text.load(None)[:T]), device=DEVICE)[None]  # the package's text, a byte a token
print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {T} tokens")

# %% [markdown]
# ## Before
#
# First transformers alone. A hook keeps what each layer's indexer returns: `block_indices` [B, Hi, S, K], in the order of the scores, -1 behind.

# %%
chosen_by_layer = []
indexers = [layer.self_attn.indexer for layer in model.model.layers if layer.self_attn.indexer is not None]
hooks = [indexer.register_forward_hook(lambda module, given, blocks: chosen_by_layer.append(blocks)) for indexer in indexers]
before = model(ids).logits
for hook in hooks:
    hook.remove()
figure, panels = plt.subplots(1, len(indexers), figsize=(10, 3.6), layout="constrained", sharey=True)
for number, (panel, blocks) in enumerate(zip(panels, chosen_by_layer, strict=True), start=1):
    picked = torch.zeros(T, T // BLOCK + 1, device=DEVICE).scatter_(1, torch.where(blocks[0, 0] >= 0, blocks[0, 0], T // BLOCK), 1.0)
    panel.imshow(picked[:, :-1].cpu(), aspect="auto", interpolation="nearest", cmap="Blues", extent=(0, T // BLOCK, T, 0))
    panel.set(title=f"layer {number}, KV group 0", xlabel=f"block of {BLOCK}")
panels[0].set_ylabel("query position")
plt.show()

# %% [markdown]
# ## After
#
# One line. It checks the config, resolves a mode and an implementation for each layer, and says by name what it cannot do. Dense layers go along, for
# they share the cache.

# %%
prepare(model)
after = model(ids).logits
print(f"largest difference of a logit: {float((after - before).abs().max()):.1e}, of logits up to {float(before.abs().max()):.1f}")
torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-3)
settings = model.model.layers[1].self_attn.m3attn
print("a sparse layer's mode:", settings.mode.mode, {stage: key for stage, key in settings.mode.implementations.items() if "prefill" in stage})

# %% [markdown]
# Equal logits after four layers mean equal blocks: one other block in one row would show. What changed is how they are found. For a prompt of S
# tokens transformers' indexer holds Hi x S x S scores in fp32 and its attention a mask of Hq x S x S; the stages hold ids, and scores for a slice of
# queries at most. For M3 itself (4 index heads, 64 heads, a byte a mask entry at best):

# %%
lengths = [2048 * 2**i for i in range(7)]
scores = [4 * n * n * 4 / 2**30 for n in lengths]
masks = [64 * n * n / 2**30 for n in lengths]
kept = [4 * n * 16 * 4 / 2**30 for n in lengths]
limit = m3attn.workspace_limit() / 2**30
figure, panel = plt.subplots(figsize=(7, 3), layout="constrained")
panel.loglog(lengths, scores, "o-", base=2, label="indexer's scores, fp32")
panel.loglog(lengths, masks, "o-", base=2, label="mask of 64 heads")
panel.loglog(lengths, kept, "o-", base=2, label="ids [Hkv, T, K]")
panel.axhline(limit, color="black", linestyle="--", label="m3attn.workspace_limit()")
panel.set(xlabel="tokens of the prompt", ylabel="GiB a layer", xticks=lengths, xticklabels=lengths)
panel.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## The cache
#
# A cache that is empty when the prepared model first sees it becomes a paged one: K and V of each layer, and the index keys of the sparse ones.

# %%
cache = DynamicCache(config=config)
model(ids, past_key_values=cache)
for number in (0, 1):
    print(f"layer {number}: bytes a token {cache.layers[number].pool.bytes_per_token()}")
step = model(ids[:, -1:], past_key_values=cache).logits
print("one more token, from the cache:", list(step.shape), " tokens in it:", cache.get_seq_length())

# %% [markdown]
# ## Generation
#
# `generate` is transformers' own and knows nothing of this: greedy or sampled, beams, padded batches, static caches. Two prompts of different length,
# padded on the left, must give what each gives alone.

# %%
short, long = ids[:, :70], ids[:, :120]
padded = torch.cat([torch.nn.functional.pad(short, (50, 0)), long])
mask = (torch.arange(120, device=DEVICE) >= torch.tensor([[50], [0]], device=DEVICE)).long()
together = model.generate(padded, attention_mask=mask, max_new_tokens=12, do_sample=False)[:, 120:]
alone = [model.generate(p, attention_mask=torch.ones_like(p), max_new_tokens=12, do_sample=False)[0, p.shape[1] :] for p in (short, long)]
assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
print("padded together as alone:", together[0].tolist())

# %%
unprepare(model)
theirs = model.generate(long, attention_mask=torch.ones_like(long), max_new_tokens=12, do_sample=False)[0, 120:]
assert torch.equal(theirs, alone[1])
print("transformers alone generates the same tokens; its attention is", model.config._attn_implementation, "again")

# %% [markdown]
# ## An fp8 cache
#
# `kv_cache_dtype="fp8_e4m3"` halves the bytes of a bf16 cache. What does it do to the model's next-token distribution? The divergence from the 16-bit
# run, token by token:

# %%
half = model.to(torch.bfloat16)
plain = prepare(half)(ids).logits.float().log_softmax(-1)
small = prepare(half, kv_cache_dtype="fp8_e4m3")(ids).logits.float().log_softmax(-1)
divergence = torch.nn.functional.kl_div(small, plain, log_target=True, reduction="none").sum(-1)[0].cpu()
figure, panel = plt.subplots(figsize=(8, 2.8), layout="constrained")
panel.semilogy(divergence.clamp(min=1e-8), linewidth=0.8)
panel.axvline(K * BLOCK, color="gray", linestyle=":", label="blocks are left out from here on")
panel.set(xlabel="position", ylabel="KL divergence", title="fp8 cache against bf16, random weights")
panel.legend()
plt.show()
agree = float((plain.argmax(-1) == small.argmax(-1)).float().mean())
print(f"mode {half.model.layers[1].self_attn.m3attn.mode.mode}; mean divergence {float(divergence.mean()):.1e}, the same best token in {agree:.0%}")

# %% [markdown]
# Peaks are rows in which a near-tie fell the other way and another block was read. A trained model's numbers are its own: measure them there.
#
# ## Exercises
#
# Replace `return None` and run the check below it.
#
# **1.** Turn transformers' `block_indices` [B, Hi, S, K] (score order, -1 behind) into this library's ids [Hkv, T, K] (ascending, -1 behind,
# int32), where T = B · S and rows of a sequence stand together.


# %%
def exercise_1(block_indices: torch.Tensor) -> torch.Tensor | None:
    return None


# %%
def verdict(answer: object, is_right: bool) -> bool:
    print("not answered yet" if answer is None else "right" if is_right else f"not yet, got {answer}")
    return is_right


def check_1(exercise) -> bool:
    blocks = torch.tensor([[[[2, 0, 1], [3, 1, -1]], [[0, -1, -1], [3, 2, 0]]]], device=DEVICE)
    given = exercise(torch.cat([blocks, blocks.flip(2)]))
    right = [[[0, 1, 2], [1, 3, -1], [1, 3, -1], [0, 1, 2]], [[0, -1, -1], [0, 2, 3], [0, 2, 3], [0, -1, -1]]]
    return verdict(given, given is not None and given.dtype == torch.int32 and given.tolist() == right)


solved_1 = check_1(exercise_1)

# %% [markdown]
# **2.** How many bytes a token takes in the cache of all 60 layers of M3 (3 of them dense) in bf16: K and V of 4 heads of 128, one index key of 128.


# %%
def exercise_2() -> int | None:
    return None


# %%
def check_2(exercise) -> bool:
    pool = m3attn.PagedKVPool(m3attn.M3Config(), num_pages=1, device="cpu")
    return verdict(exercise(), exercise() == sum(pool.bytes_per_token().values()))


solved_2 = check_2(exercise_2)

# %% [markdown]
# **3.** From how many tokens of a prompt on (a multiple of 1,024) are the fp32 scores of M3's four index heads larger than 80 GiB, in one layer?


# %%
def exercise_3() -> int | None:
    return None


# %%
def check_3(exercise) -> bool:
    counts = torch.arange(1024, 200 * 1024, 1024)
    return verdict(exercise(), exercise() == int(counts[4 * counts**2 * 4 > 80 * 2**30][0]))


solved_3 = check_3(exercise_3)
