"""The launches that the compile checks cover: every Triton stage, called as a user calls it, on small CPU tensors with real host bounds.

Nothing runs, so the tensors' values do not matter; what specialises a kernel is their dtypes and strides, the geometry and the options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch

import m3attn
from m3attn.dtypes import E4M3, E5M2

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PHASES = ("decode", "verify", "prefill")
STEPS = {"decode": (4, 1), "verify": (4, 4), "prefill": (2, 256), "long_prefill": (1, 8192)}  # requests, queries of each
CONTEXT = 32_768
ATTENTION_MODES = {
    "bf16": (BF16, BF16, False),
    "fp16": (FP16, FP16, False),
    "fp32": (FP32, FP32, False),
    "widen_e4m3": (BF16, E4M3, False),
    "widen_e5m2": (FP16, E5M2, False),
    "fp8": (E4M3, E4M3, False),
    "fp8_pv": (E4M3, E4M3, True),
}
INDEX_MODES = {"bf16": (BF16, BF16), "fp16": (FP16, FP16), "fp32": (FP32, FP32), "bf16_e4m3": (BF16, E4M3), "e4m3": (E4M3, E4M3)}
FAST_MODES = {"decode": ("bf16", "widen_e5m2", "fp8", "e4m3"), "verify": ("bf16",), "long_prefill": ("bf16", "widen_e5m2", "fp8", "e4m3")}
"""What every test run compiles: the kernels of verify and short prefill are those of decode and long prefill in other tile sizes."""


@dataclass(frozen=True)
class Case:
    """A call to compile. `dtype` is what its matrix products read: products of fp32 use no tensor core."""

    name: str
    dtype: torch.dtype
    run: Callable[[], object]
    fast: bool = False


def step(phase: str, page_size: int, block_size: int) -> m3attn.PagedBatch:
    requests, queries = STEPS[phase]
    return m3attn.PagedBatch(
        page_table=torch.zeros(requests, CONTEXT // page_size, dtype=torch.int32),
        seq_lens=torch.full((requests,), CONTEXT, dtype=torch.int32),
        cu_seqlens_q=torch.arange(requests + 1, dtype=torch.int32) * queries,
        max_seqlen_q=queries,
        max_seqlen_k=CONTEXT,
        page_size=page_size,
        block_size=block_size,
    )


def tokens(phase: str) -> int:
    requests, queries = STEPS[phase]
    return requests * queries


def attention_cases(stage: str) -> Iterator[Case]:
    """Every mode at M3's geometry per phase; bf16 over the other head counts, head dims and page sizes."""
    for phase in PHASES:
        for mode in ATTENTION_MODES:
            yield attention(stage, phase, mode, fast=mode in FAST_MODES.get(phase, ()))
        for heads in ((16, 1), (8, 1), (24, 8), (32, 1)):
            yield attention(stage, phase, "bf16", heads=heads)
        for head_dim in (64, 192, 256):
            for mode in ("bf16", "widen_e4m3"):
                yield attention(stage, phase, mode, head_dim=head_dim)
        yield attention(stage, phase, "fp32", head_dim=256)
        for page_size in (16, 64):
            yield attention(stage, phase, "bf16", page_size=page_size)
        yield attention(stage, phase, "bf16", sink=True, lse=True)
        yield attention(stage, phase, "fp8", sink=True, lse=True, device_scales=True)
    for mode in ATTENTION_MODES:
        yield attention(stage, "long_prefill", mode, fast=mode in FAST_MODES["long_prefill"])
    if stage == "sparse_attention":
        for phase in PHASES:
            yield attention(stage, phase, "bf16", page_size=16, block_size=16)
            yield attention(stage, phase, "bf16", page_size=128, block_size=256)
        yield from union_cases(stage)


def union_cases(stage: str) -> Iterator[Case]:
    """Prefill in tiles of tokens: every mode, fp8 with copies widened beforehand and without, every tile shape of groups, both head dims."""
    for mode in ATTENTION_MODES:
        yield attention(stage, "prefill", mode, topk=2, impl="triton_union")  # too few reads for a copy
        yield attention(stage, "long_prefill", mode, impl="triton_union", fast=mode in FAST_MODES["long_prefill"])
        yield attention(stage, "prefill", mode, head_dim=64, impl="triton_union")
    for heads in ((16, 1), (8, 1), (4, 4), (24, 8), (32, 1)):
        yield attention(stage, "prefill", "bf16", heads=heads, impl="triton_union")
    for page_size, block_size in ((16, 128), (64, 128), (16, 16), (128, 256)):
        yield attention(stage, "prefill", "bf16", page_size=page_size, block_size=block_size, impl="triton_union")
    yield attention(stage, "prefill", "bf16", sink=True, lse=True, impl="triton_union")
    yield attention(stage, "prefill", "fp8", sink=True, lse=True, device_scales=True, impl="triton_union")


def attention(
    stage: str,
    phase: str,
    mode: str,
    *,
    heads: tuple[int, int] = (64, 4),
    head_dim: int = 128,
    page_size: int = 128,
    block_size: int = 128,
    sink: bool = False,
    lse: bool = False,
    device_scales: bool = False,
    topk: int = 16,
    impl: str = "triton",
    fast: bool = False,
) -> Case:
    q_dtype, kv_dtype, fp8_pv = ATTENTION_MODES[mode]
    rows, (num_q_heads, num_kv_heads) = tokens(phase), heads

    def run() -> None:
        scale = torch.ones(1) if device_scales else None
        kv = torch.empty(4, num_kv_heads, page_size, 2 * head_dim, dtype=kv_dtype)
        cache = m3attn.LayerCache(kv=kv, k_scale=scale, v_scale=scale)
        q = torch.empty(rows, num_q_heads, head_dim, dtype=q_dtype)
        options = dict(sink_key=torch.empty(num_q_heads, head_dim, dtype=BF16) if sink else None, fp8_pv=fp8_pv, return_lse=lse, q_scale=scale)
        if stage == "dense_attention":
            m3attn.dense_attention(q, cache, step(phase, page_size, block_size), impl=impl, **options)
        else:
            ids = torch.zeros(num_kv_heads, rows, topk, dtype=torch.int32)
            m3attn.sparse_attention(q, cache, ids, step(phase, page_size, block_size), impl=impl, **options)

    extras = "".join(f"-{name}" for name, on in (("sink", sink), ("lse", lse), ("scales", device_scales)) if on)
    name = f"{stage}-{impl}-{phase}-{mode}-{num_q_heads}/{num_kv_heads}-d{head_dim}-page{page_size}-block{block_size}-k{topk}{extras}"
    return Case(name, q_dtype, run, fast)


def index_cases(stage: str) -> Iterator[Case]:
    for phase in PHASES:
        for mode in INDEX_MODES:
            yield index(stage, phase, mode, fast=mode in FAST_MODES.get(phase, ()))
        for heads in (1, 6):
            yield index(stage, phase, "bf16", heads=heads)
        yield index(stage, phase, "bf16", index_dim=64)
        for page_size, block_size in ((16, 128), (16, 16), (256, 256)):
            yield index(stage, phase, "bf16", page_size=page_size, block_size=block_size)
    for mode in INDEX_MODES:
        yield index(stage, "long_prefill", mode, fast=mode in FAST_MODES["long_prefill"])


def index(
    stage: str, phase: str, mode: str, *, heads: int = 4, index_dim: int = 128, page_size: int = 128, block_size: int = 128, fast: bool = False
) -> Case:
    q_dtype, k_dtype = INDEX_MODES[mode]

    def run() -> None:
        cache = m3attn.LayerCache(index_k=torch.empty(4, page_size, index_dim, dtype=k_dtype))
        index_q = torch.empty(tokens(phase), heads, index_dim, dtype=q_dtype)
        function = m3attn.index_score if stage == "index_score" else m3attn.index_topk
        function(index_q, cache, step(phase, page_size, block_size), impl="triton")

    return Case(f"{stage}-{phase}-{mode}-heads{heads}-d{index_dim}-page{page_size}-block{block_size}", q_dtype, run, fast)


def select_cases() -> Iterator[Case]:
    for phase in STEPS:
        for topk in (1, 16, 128):

            def run(phase: str = phase, topk: int = topk) -> None:
                batch = step(phase, 128, 128)
                m3attn.select_blocks(torch.empty(4, tokens(phase), batch.num_blocks), batch, topk=topk, impl="triton")

            yield Case(f"select_blocks-{phase}-k{topk}", FP32, run, topk == 16)


def norm_rope_cases() -> Iterator[Case]:
    for dtype in (BF16, FP16, FP32):
        for cache_dtype in (None, dtype, E4M3, E5M2):
            for index_branch, rows in ((True, 8), (True, 512), (False, 8)):  # settings for small steps and for large ones
                yield norm_rope(dtype, cache_dtype, index_branch, rows, fast=dtype == BF16)


def norm_rope(dtype: torch.dtype, cache_dtype: torch.dtype | None, index_branch: bool, rows: int, *, fast: bool) -> Case:
    num_q_heads, num_kv_heads, num_index_heads = 64, 4, 4 if index_branch else 0

    def run() -> None:
        width = num_q_heads + 2 * num_kv_heads + (num_index_heads + 1 if index_branch else 0)
        weights = tuple(torch.empty(128) if index_branch or i < 2 else None for i in range(4))
        cache = slots = None
        if cache_dtype is not None:
            index_k = torch.empty(4, 128, 128, dtype=E4M3 if cache_dtype == E4M3 else dtype) if index_branch else None
            cache = m3attn.LayerCache(kv=torch.empty(4, num_kv_heads, 128, 256, dtype=cache_dtype), index_k=index_k)
            slots = torch.zeros(rows, dtype=torch.int64)
        m3attn.qk_norm_rope_insert(
            torch.empty(rows, width * 128, dtype=dtype),
            weights,
            torch.zeros(rows, dtype=torch.int64),
            torch.empty(1024, 64),
            cache,
            slots,
            slots if index_branch else None,
            heads=(num_q_heads, num_kv_heads, num_index_heads),
            q_out=torch.empty(rows, num_q_heads, 128, dtype=E4M3) if cache_dtype == E4M3 else None,
            index_q_out=torch.empty(rows, num_index_heads, 128, dtype=E4M3) if cache_dtype == E4M3 and index_branch else None,
            impl="triton",
        )

    return Case(f"qk_norm_rope_insert-{dtype}-cache-{cache_dtype}-{'index' if index_branch else 'dense'}-{rows}", dtype, run, fast)


def merge_cases() -> Iterator[Case]:
    for dtype in (BF16, FP16, FP32):
        for head_dim in (64, 128, 192, 256):

            def run(dtype: torch.dtype = dtype, head_dim: int = head_dim) -> None:
                out, lse = torch.empty(8, 64, head_dim, dtype=dtype), torch.empty(8, 64)
                m3attn.merge_attention_states(out, lse, torch.empty_like(out), torch.empty_like(lse), impl="triton")

            yield Case(f"merge_attention_states-{dtype}-d{head_dim}", dtype, run, dtype == BF16 and head_dim == 128)


def quantize_cases() -> Iterator[Case]:
    for dtype in (BF16, FP16, FP32):
        for out_dtype in (E4M3, E5M2):
            for scale in (None, 0.5, "tensor", "row"):
                for pdl, width in ((False, 7168), (True, 7168), (False, 7165)):  # tiles that cover the tensor, and that reach beyond it

                    def run(dtype=dtype, out_dtype=out_dtype, scale=scale, pdl=pdl, width=width) -> None:
                        m3attn.quantize_fp8(torch.empty(64, width, dtype=dtype), scale=scale, dtype=out_dtype, pdl=pdl, impl="triton")

                    yield Case(f"quantize_fp8-{dtype}-{out_dtype}-{scale}-{width}{'-pdl' if pdl else ''}", dtype, run, dtype == BF16)


def mla_quantize_cases(stage: str) -> Iterator[Case]:
    """DeepSeek-V3's geometry from views of the projections' outputs; few heads, and dims that are no powers of two."""
    for dtype in (BF16, FP16, FP32):
        for heads, nope, rope, tokens in ((128, 128, 64, 2048), (128, 128, 64, 8), (16, 128, 64, 8), (3, 48, 16, 8)):
            for scale in (None, 0.5, "device"):

                def run(dtype=dtype, heads=heads, nope=nope, rope=rope, tokens=tokens, scale=scale) -> None:
                    factor = torch.ones(1) if scale == "device" else scale
                    kv, k_pe = torch.empty(tokens, heads, 2 * nope, dtype=dtype), torch.empty(tokens, 1, rope, dtype=dtype)
                    if stage == "mla_kv_pack_quantize":
                        m3attn.mla_kv_pack_quantize(kv[..., :nope], k_pe, kv[..., nope:], k_scale=factor, v_scale=factor, impl="triton")
                        return
                    q, positions = torch.empty(tokens, heads, nope + rope, dtype=dtype), torch.zeros(tokens, dtype=torch.int64)
                    options = dict(q_scale=factor, k_scale=factor, impl="triton", interleaved=scale is not None)
                    m3attn.mla_rope_quantize(q, kv[..., :nope], k_pe, positions, torch.empty(1024, rope), **options)

                yield Case(f"{stage}-{dtype}-{heads}-{nope}+{rope}-{tokens}-{scale}", dtype, run, dtype == BF16)


def mla_prefill_cases() -> Iterator[Case]:
    """DeepSeek-V3's dims in every mode, causal and not; other dims in the modes that tile them differently."""
    dims = {(192, 128): ATTENTION_MODES, (96, 96): ("bf16", "fp8"), (128, 128): ("bf16", "fp8_pv"), (256, 256): ("bf16", "fp32", "fp8", "fp8_pv")}
    for (key_dim, value_dim), modes in dims.items():
        for mode in modes:
            q_dtype, kv_dtype, fp8_pv = ATTENTION_MODES[mode]
            if kv_dtype != q_dtype:
                continue
            for causal in (True, False):

                def run(key_dim=key_dim, value_dim=value_dim, dtype=q_dtype, fp8_pv=fp8_pv, causal=causal) -> None:
                    q, v = torch.empty(512, 16, key_dim, dtype=dtype), torch.empty(512, 16, value_dim, dtype=dtype)
                    offsets = torch.tensor([0, 512], dtype=torch.int32)
                    scale = 0.5 if causal else torch.ones(1)
                    options = dict(q_scale=scale, k_scale=scale, v_scale=scale, fp8_pv=fp8_pv, return_lse=causal, impl="triton")
                    m3attn.mla_prefill(q, torch.empty_like(q), v, offsets, offsets, causal=causal, **options)

                name = f"mla_prefill-{mode}-d{key_dim}/{value_dim}-{'causal' if causal else 'full'}"
                yield Case(name, q_dtype, run, key_dim == 192 and mode in ("bf16", "fp8_pv"))


def sparse_mla_cases() -> Iterator[Case]:
    """Both latent widths and every tile of heads per mode, one query (split) and many, with and without lengths and sinks."""
    for mode, (q_dtype, kv_dtype, fp8_pv) in ATTENTION_MODES.items():
        if kv_dtype == E5M2:
            continue
        for queries, heads, dim in ((1, 128, 576), (64, 128, 576), (64, 64, 512), (8, 16, 576), (64, 8, 512), (64, 24, 576)):

            def run(q_dtype=q_dtype, kv_dtype=kv_dtype, fp8_pv=fp8_pv, queries=queries, heads=heads, dim=dim) -> None:
                scale = torch.ones(1) if queries == 1 else 0.5
                optional = {} if heads == 64 else dict(topk_length=torch.zeros(queries, dtype=torch.int32), attn_sink=torch.zeros(heads))
                indices = torch.zeros(queries, 1, 2048, dtype=torch.int32)
                options = dict(sm_scale=0.1, q_scale=scale, kv_scale=scale, fp8_pv=fp8_pv, impl="triton")
                q, kv = torch.empty(queries, heads, dim, dtype=q_dtype), torch.empty(64, 1, dim, dtype=kv_dtype)
                m3attn.sparse_mla_prefill(q, kv, indices, **options, **optional)

            yield Case(f"sparse_mla_prefill-{mode}-s{queries}-h{heads}-d{dim}", q_dtype, run, mode in ("bf16", "fp8_pv") and dim == 576)


def pool_cases() -> Iterator[Case]:
    """Inserts of ready heads in every pair of dtypes, one head and several, with and without scales; copies of pages in both host layouts."""
    config = dict(sparse_layers=(True,))
    slots = torch.zeros(8, dtype=torch.int32)
    for row in (BF16, FP16, FP32):
        for kv, index in (("auto", "auto"), ("fp8_e4m3", "auto"), ("fp8_e5m2", "fp8_e4m3"), ("fp8_e4m3", "fp8_e4m3")):
            for heads in (4, 1):

                def run(row=row, kv=kv, index=index, heads=heads) -> None:
                    geometry = m3attn.M3Config(**config)
                    options = dict(num_kv_heads=heads, dtype=row, kv_cache_dtype=kv, index_cache_dtype=index, device="cpu", backend="triton")
                    pool = m3attn.PagedKVPool(geometry, num_pages=2, **options)
                    k, index_k = torch.empty(8, heads, 128, dtype=row), torch.empty(8, 128, dtype=row)
                    pool.set(0, slots, k, k.clone(), index_k)
                    pool.set_scales(0, k_scale=0.5, v_scale=torch.ones(1), index_k_scale=torch.ones(1))
                    pool.set_kv(0, slots, k, k.clone())
                    pool.set_index_k(0, slots, index_k)

                yield Case(f"pool_set-{row}-{kv}-{index}-h{heads}", row, run, row == BF16 and heads == 1)
    for layout in ("layer_first", "page_first"):

        def run(layout=layout) -> None:
            pool = m3attn.PagedKVPool(m3attn.M3Config(**config), num_pages=2, device="cpu", backend="triton")
            host = m3attn.HostKVPool(pool, num_pages=2, layout=layout, backend="triton")
            host.backup([0, 1], torch.tensor([1, 0], dtype=torch.int32))
            pool.copy_pages([0], [1])

        yield Case(f"pool_copy-{layout}", BF16, run, True)


def mla_prepare_cases() -> Iterator[Case]:
    """What mla_prefill owns before it: both kinds of latent cache."""
    for dtype, cache_dtype in ((BF16, BF16), (BF16, E4M3), (FP16, E4M3), (FP32, FP32)):

        def run(dtype=dtype, cache_dtype=cache_dtype) -> None:
            q, kv, latent = (torch.empty(8, heads, dim, dtype=dtype) for heads, dim in ((16, 192), (16, 256), (1, 576)))
            heads = (q[..., :128], q[..., 128:], kv[..., :128], kv[..., 128:], latent[..., :512], latent[..., 512:])
            slots, cache = torch.zeros(8, dtype=torch.int64), m3attn.LatentCache(torch.empty(4, 64, 576, dtype=cache_dtype), scale=0.5)
            m3attn.prepare_prefill_qkv(*heads, slots, torch.empty(1024, 64), cache, slots, q_scale=0.5, impl="triton")

        yield Case(f"prepare_prefill_qkv-{dtype}-cache-{cache_dtype}", dtype, run, cache_dtype == E4M3)


CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "qk_norm_rope_insert": norm_rope_cases,
    "index_score": lambda: index_cases("index_score"),
    "select_blocks": select_cases,
    "index_topk": lambda: index_cases("index_topk"),
    "sparse_attention": lambda: attention_cases("sparse_attention"),
    "dense_attention": lambda: attention_cases("dense_attention"),
    "merge_attention_states": merge_cases,
    "quantize_fp8": quantize_cases,
    "mla_rope_quantize": lambda: mla_quantize_cases("mla_rope_quantize"),
    "mla_kv_pack_quantize": lambda: mla_quantize_cases("mla_kv_pack_quantize"),
    "mla_prefill": lambda: chain(mla_prefill_cases(), mla_prepare_cases()),
    "sparse_mla_prefill": sparse_mla_cases,
    "pools": pool_cases,
}
"""Per stage. A stage with a Triton implementation and no entry here fails the check."""
