"""Multi-head latent attention with DeepSeek-V3's geometry: sparse prefill on random indices beside FlashMLA, and what surrounds prefill."""

from __future__ import annotations

import torch
from einops import einsum

import m3attn
from m3attn.bench import parity
from m3attn.bench.ceilings import Cost
from m3attn.bench.elementwise import num_sets
from m3attn.bench.inputs import MODES, random
from m3attn.bench.parity import Parity
from m3attn.bench.peers import FLASHMLA, Peers
from m3attn.bench.shapes import Heads
from m3attn.bench.workloads import SetCall, Workload, sum_of_range
from m3attn.dtypes import E4M3
from m3attn.layers.rope import rotary_table
from m3attn.reference.mla_prefill import mla_prefill as exact_prefill
from m3attn.reference.mla_quantize import join_heads, rope
from m3attn.reference.quantize import saturating_cast

QK_DIM = 576
VALUE_DIM = 512
NOPE, ROPE, HEAD_VALUE_DIM = 128, 64, 128
ROPE_THETA = 1e4


def sparse_mla_prefill(
    size: tuple[int, ...], heads: Heads, mode_name: str, sample_rows: int, l2_bytes: int, generator: torch.Generator, peers: Peers | None
) -> Workload:
    """`size` is (queries, latent tokens, indices a query); every query picks its tokens at random.

    Captured, because a peer's host may take longer over few queries than a GPU does.
    """
    num_q, num_kv, topk = size
    mode = MODES[mode_name]
    q = random((num_q, heads.num_q, QK_DIM), mode.q, generator)
    kv = random((num_kv, 1, QK_DIM), mode.kv, generator)
    picks = torch.rand(num_q, num_kv, device=generator.device, generator=generator).topk(min(topk, num_kv), dim=1).indices
    indices = torch.nn.functional.pad(picks, (0, topk - picks.shape[1]), value=-1)[:, None].int()
    sm_scale = QK_DIM**-0.5
    sample = parity.sample_rows(num_q, sample_rows).to(generator.device)
    expected = exact_rows(q[sample], kv[:, 0], picks[sample], sm_scale)
    products = 2.0 * num_q * heads.num_q * topk
    moved = q.numel() * q.element_size() + num_kv * QK_DIM * kv.element_size() + num_q * (heads.num_q * VALUE_DIM * 2 + topk * 4)
    both = products * (QK_DIM + VALUE_DIM)
    cost = Cost(moved, flops_8=both) if mode.q.itemsize == 1 else Cost(moved, flops_16=both)

    def run(_: int, key: str) -> torch.Tensor:
        return m3attn.sparse_mla_prefill(q, kv, indices, sm_scale=sm_scale, impl=key)[0]

    def check(out: torch.Tensor) -> Parity:
        return parity.check_attention(out[sample], expected, "fp8_pv" if mode.q.itemsize == 1 else mode_name)

    found: dict[str, SetCall] = {}
    if peers is not None and peers.flashmla is not None and mode_name == "bf16":
        found[FLASHMLA] = lambda _: peers.sparse_mla_prefill(q, kv, indices, sm_scale)
    return Workload(cost, run, check, peers=found, captured=True)


def exact_rows(q: torch.Tensor, latent: torch.Tensor, picks: torch.Tensor, sm_scale: float) -> torch.Tensor:
    """fp64 outputs [N, H, 512] of q [N, H, 576] over the picked rows [N, K] of latent [tokens, 576], whose first 512 dims are the values."""
    keys = latent.double()[picks]
    weights = torch.softmax(einsum(q.double(), keys, "n h d, n k d -> n h k") * sm_scale, dim=-1)
    return einsum(weights, keys[..., :VALUE_DIM], "n h k, n k d -> n h d")


def mla_rope_quantize(size: tuple[int, ...], heads: Heads, mode_name: str, sample_rows: int, l2_bytes: int, generator: torch.Generator) -> Workload:
    """Queries, and keys from a view of their projection, to e4m3; `size` is (tokens,)."""
    (tokens,), num_heads, device = size, heads.num_q, generator.device
    moved = tokens * num_heads * ((2 * NOPE + ROPE) * 2 + 2 * (NOPE + ROPE)) + tokens * ROPE * 2
    widths = ((num_heads, NOPE + ROPE), (num_heads, NOPE + HEAD_VALUE_DIM), (1, ROPE))
    sets = [[random((tokens, *width), torch.bfloat16, generator) for width in widths] for _ in range(num_sets(moved, l2_bytes))]
    positions, table = torch.arange(tokens, device=device), rotary_table(tokens, ROPE, ROPE_THETA).to(device)
    q_out, k_out = (torch.empty(tokens, num_heads, NOPE + ROPE, dtype=E4M3, device=device) for _ in range(2))
    sample = parity.sample_rows(tokens, sample_rows).to(device)

    def run(i: int, key: str) -> torch.Tensor:
        q, kv, k_pe = sets[i]
        return m3attn.mla_rope_quantize(q, kv[..., :NOPE], k_pe, positions, table, q_out=q_out, k_out=k_out, impl=key)[0]

    def check(_: torch.Tensor) -> Parity:
        q, kv, k_pe = (x[sample].double() for x in sets[0])
        q_pe, k_pe = (rope(x, positions[sample], table, dtype=torch.float64) for x in (q[..., NOPE:], k_pe[:, 0]))
        expected = (join_heads(q[..., :NOPE], q_pe), join_heads(kv[..., :NOPE], k_pe))
        stored = (out.view(torch.uint8)[sample].view(E4M3).float() for out in (q_out, k_out))
        return Parity(max(parity.relative_error(*pair) for pair in zip(stored, expected, strict=True)), parity.ROUNDING[E4M3], rows=len(sample))

    return Workload(Cost(moved), run, check, len(sets), (q_out, k_out))


def mla_kv_pack_quantize(
    size: tuple[int, ...], heads: Heads, mode_name: str, sample_rows: int, l2_bytes: int, generator: torch.Generator
) -> Workload:
    """Keys and values of a chunk of prefix, from views of their projection; `size` is (tokens,)."""
    (tokens,), num_heads = size, heads.num_q
    width = NOPE + HEAD_VALUE_DIM
    moved = tokens * num_heads * (width * 2 + NOPE + ROPE + HEAD_VALUE_DIM) + tokens * ROPE * 2
    sets = [[random((tokens, n, d), torch.bfloat16, generator) for n, d in ((num_heads, width), (1, ROPE))] for _ in range(num_sets(moved, l2_bytes))]
    k_out, v_out = (torch.empty(tokens, num_heads, d, dtype=E4M3, device=generator.device) for d in (NOPE + ROPE, HEAD_VALUE_DIM))
    sample = parity.sample_rows(tokens, sample_rows).to(generator.device)

    def run(i: int, key: str) -> torch.Tensor:
        kv, k_pe = sets[i]
        return m3attn.mla_kv_pack_quantize(kv[..., :NOPE], k_pe, kv[..., NOPE:], k_out=k_out, v_out=v_out, impl=key)[0]

    def check(_: torch.Tensor) -> Parity:
        kv, k_pe = (x[sample] for x in sets[0])
        expected = (saturating_cast(join_heads(kv[..., :NOPE], k_pe[:, 0]), E4M3), saturating_cast(kv[..., NOPE:], E4M3))
        pairs = zip((k_out, v_out), expected, strict=True)
        wrong = sum(int((out.view(torch.uint8)[sample] != want.view(torch.uint8)).sum()) for out, want in pairs)
        return Parity(float(wrong), 0.0, rows=len(sample))

    return Workload(Cost(moved), run, check, len(sets), (k_out, v_out))


def mla_prefill(size: tuple[int, ...], heads: Heads, mode_name: str, sample_rows: int, l2_bytes: int, generator: torch.Generator) -> Workload:
    """One request's causal prefill; `size` is (queries, keys)."""
    (num_q, num_k), num_heads, mode = size, heads.num_q, MODES[mode_name]
    q = random((num_q, num_heads, NOPE + ROPE), mode.q, generator)
    k, v = (random((num_k, num_heads, dim), mode.q, generator) for dim in (NOPE + ROPE, HEAD_VALUE_DIM))
    offsets_q, offsets_k = (torch.tensor([0, n], dtype=torch.int32, device=generator.device) for n in size)
    out = torch.empty(num_q, num_heads, HEAD_VALUE_DIM, dtype=torch.bfloat16 if mode.q.itemsize == 1 else mode.q, device=generator.device)
    pairs = num_heads * sum_of_range(num_k - num_q + 1, num_k)
    keys, values = 2.0 * pairs * (NOPE + ROPE), 2.0 * pairs * HEAD_VALUE_DIM
    moved = sum(x.numel() * x.element_size() for x in (q, k, v, out))
    flops_8 = 0.0 if mode.q.itemsize > 1 else keys + (values if mode.fp8_pv else 0.0)
    # A few heads and the last rows say enough, and their exact attention fits memory.
    rows, few = min(num_q, max(1, sample_rows // 8)), slice(0, min(2, num_heads))
    last = torch.tensor([0, rows], dtype=torch.int32, device=generator.device)
    expected, _ = exact_prefill(q[-rows:, few], k[:, few], v[:, few], last, offsets_k, dtype=torch.float64)

    def run(_: int, key: str) -> torch.Tensor:
        m3attn.mla_prefill(q, k, v, offsets_q, offsets_k, fp8_pv=mode.fp8_pv, out=out, impl=key)
        return out

    def check(result: torch.Tensor) -> Parity:
        return parity.check_attention(result[-rows:, few], expected, mode_name)

    return Workload(Cost(moved, flops_16=keys + values - flops_8, flops_8=flops_8), run, check, outputs=(out,))
