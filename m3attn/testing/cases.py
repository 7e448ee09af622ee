"""The cases of the test matrix: frozen dataclasses with a readable id, in an `xs` list (small enough for Triton's interpreter) and a full one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from m3attn.dtypes import E4M3, E5M2, dtype_name
from m3attn.problem import Problem

SCALES = (1.5, 0.5, 2.0, 0.037, 12.5)
"""q, k, v, index q, index k."""

MODES: dict[str, tuple[torch.dtype, torch.dtype]] = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp32": (torch.float32, torch.float32),
    "widen_e4m3": (torch.bfloat16, E4M3),
    "widen_e5m2": (torch.bfloat16, E5M2),
    "widen_fp16": (torch.float16, E4M3),
    "fp8": (E4M3, E4M3),
    "fp8_pv": (E4M3, E4M3),
}
"""Mode of an attention case -> dtypes of q and of the cache."""

LAYOUTS = ("hnd", "nhd", "packed", "packed_nhd", "layers")
INDEX_LAYOUTS = ("plain", "layers", "interleaved")


@dataclass(frozen=True, slots=True)
class Step:
    """A step's lengths. `padded_rows` query rows stand behind the last request; `slack_q` and `slack` are added to the host bounds."""

    name: str
    q_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    page_size: int = 128
    block_size: int = 128
    padded_rows: int = 0
    slack_q: int = 0
    slack: int = 0

    @property
    def tokens(self) -> int:
        return sum(self.q_lens) + self.padded_rows

    @property
    def max_seqlen_q(self) -> int:
        return max(self.q_lens, default=0) + self.slack_q

    @property
    def max_seqlen_k(self) -> int:
        return max(self.seq_lens, default=0) + self.slack

    @property
    def phase(self) -> str:
        return "decode" if self.max_seqlen_q <= 1 else "verify" if self.max_seqlen_q <= 16 else "prefill"

    @property
    def id(self) -> str:
        return f"{self.name}-p{self.page_size}b{self.block_size}"

    def problem(self, arch: str) -> Problem:
        return Problem(arch=arch, page_size=self.page_size, block_size=self.block_size, phase=self.phase)


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """A case of sparse attention (topk > 0) or dense attention (topk == 0).

    `ids`: `ascending` as the selection writes them, or `scattered`: shuffled, with -1 and ids out of range between them. `zero_on_alloc`: zeros
    stand behind each sequence in its last page; NaN in pages that nobody has.
    """

    step: Step
    num_q_heads: int
    num_kv_heads: int
    head_dim: int = 128
    topk: int = 16
    mode: str = "bf16"
    layout: str = "hnd"
    scaled: bool = False
    sink: torch.dtype | None = None
    ids: str = "ascending"
    packed_q: bool = False
    zero_on_alloc: bool = False

    @property
    def id(self) -> str:
        parts = [self.step.id, f"h{self.num_q_heads}x{self.num_kv_heads}d{self.head_dim}", self.mode, self.layout]
        parts += [f"k{self.topk}"] if self.topk else []
        parts += [name for name, on in (("scaled", self.scaled), ("packedq", self.packed_q), ("zeroed", self.zero_on_alloc)) if on]
        parts += [f"sink_{dtype_name(self.sink)}"] if self.sink else []
        parts += [self.ids] if self.ids != "ascending" else []
        return "-".join(parts)

    def problem(self, arch: str) -> Problem:
        q_dtype, kv_dtype = MODES[self.mode]
        return replace(
            self.step.problem(arch),
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.head_dim,
            topk=self.topk or 16,
            q_dtype=dtype_name(q_dtype),
            kv_dtype=dtype_name(kv_dtype),
            sink=self.sink is not None,
            lse=True,
            fp8_pv=self.mode == "fp8_pv",
            zero_on_alloc=self.zero_on_alloc,
        )


@dataclass(frozen=True, slots=True)
class IndexCase:
    """A case of index_score and index_topk."""

    step: Step
    num_heads: int = 4
    dim: int = 128
    q_dtype: torch.dtype = torch.bfloat16
    k_dtype: torch.dtype = torch.bfloat16
    layout: str = "plain"
    scaled: bool = False
    topk: int = 16
    init_blocks: int = 0
    local_blocks: int = 1

    @property
    def id(self) -> str:
        parts = [self.step.id, f"h{self.num_heads}d{self.dim}", f"{dtype_name(self.q_dtype)}x{dtype_name(self.k_dtype)}", self.layout]
        parts += [f"k{self.topk}i{self.init_blocks}l{self.local_blocks}"]
        return "-".join(parts + (["scaled"] if self.scaled else []))

    def problem(self, arch: str) -> Problem:
        return replace(
            self.step.problem(arch),
            num_index_heads=self.num_heads,
            index_dim=self.dim,
            topk=self.topk,
            index_q_dtype=dtype_name(self.q_dtype),
            index_dtype=dtype_name(self.k_dtype),
        )


@dataclass(frozen=True, slots=True)
class SelectCase:
    """A case of select_blocks. `scores` names a filling of `inputs.SCORE_FILLS`; `token_major` the layout of `out`."""

    step: Step
    num_heads: int = 4
    topk: int = 16
    init_blocks: int = 0
    local_blocks: int = 1
    scores: str = "permutation"
    token_major: bool = False

    @property
    def id(self) -> str:
        forced = f"k{self.topk}i{self.init_blocks}l{self.local_blocks}"
        return "-".join([self.step.id, f"h{self.num_heads}", forced, self.scores] + (["token_major"] if self.token_major else []))

    def problem(self, arch: str) -> Problem:
        return replace(self.step.problem(arch), num_index_heads=self.num_heads, topk=self.topk)


@dataclass(frozen=True, slots=True)
class NormRopeCase:
    """A case of qk_norm_rope_insert. Dtypes that are None: no cache, or q back in place."""

    tokens: int
    num_q_heads: int = 8
    num_kv_heads: int = 2
    num_index_heads: int = 2
    rotary_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    weight_dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    index_dtype: torch.dtype | None = None
    q_out_dtype: torch.dtype | None = None
    layout: str = "hnd"
    page_size: int = 16
    scaled: bool = False
    integer: torch.dtype = torch.int32
    row_padding: int = 0
    skip_index: bool = False

    @property
    def id(self) -> str:
        name = {d: dtype_name(d) for d in (self.dtype, self.weight_dtype, self.cache_dtype, self.index_dtype, self.q_out_dtype) if d is not None}
        parts = [f"t{self.tokens}h{self.num_q_heads}x{self.num_kv_heads}i{self.num_index_heads}r{self.rotary_dim}", name[self.dtype]]
        parts += [f"w_{name[self.weight_dtype]}"]
        parts += [f"cache_{name[self.cache_dtype]}-{self.layout}-p{self.page_size}"] if self.cache_dtype else ["inplace"]
        parts += [f"index_{name[self.index_dtype]}"] if self.index_dtype else []
        parts += [f"qout_{name[self.q_out_dtype]}"] if self.q_out_dtype else []
        parts += ["int64"] if self.integer == torch.int64 else []
        parts += [n for n, on in (("scaled", self.scaled), ("padded", self.row_padding), ("skip_index", self.skip_index)) if on]
        return "-".join(parts)


@dataclass(frozen=True, slots=True)
class MergeCase:
    """A case of merge_attention_states."""

    tokens: int
    heads: int
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def id(self) -> str:
        return f"t{self.tokens}h{self.heads}d{self.dim}-{dtype_name(self.dtype)}"

    def problem(self, arch: str) -> Problem:
        return Problem(arch=arch, num_q_heads=self.heads, head_dim=self.dim, q_dtype=dtype_name(self.dtype))


@dataclass(frozen=True, slots=True)
class QuantizeCase:
    """A case of quantize_fp8. `scale`: None, a number, `tensor` or `row`; `padding`: elements between the rows of x."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype = E4M3
    scale: float | str | None = None
    padding: int = 0

    @property
    def id(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"{shape}-{dtype_name(self.dtype)}-{dtype_name(self.out_dtype)}-{self.scale}" + (f"-pad{self.padding}" if self.padding else "")


XS_DECODE = Step("tiny_decode", (1, 1, 1, 1), (1, 0, 37, 64), page_size=16, block_size=16, padded_rows=1)
XS_VERIFY = Step("tiny_verify", (2, 0, 4, 1), (40, 17, 3, 33), page_size=16, block_size=32, slack=40)
XS_PREFILL = Step("tiny_prefill", (18, 1, 0, 3), (18, 50, 30, 2), page_size=16, block_size=16, padded_rows=2)
XS_CHUNK = Step("tiny_chunk", (17, 2), (49, 35), page_size=32, block_size=32)
XS_EMPTY = Step("no_tokens", (0, 0), (5, 0), page_size=16, block_size=16)
XS_NO_REQUESTS = Step("no_requests", (), (), page_size=16, block_size=16, padded_rows=2)
XS_STEPS = (XS_DECODE, XS_VERIFY, XS_PREFILL, XS_CHUNK, XS_EMPTY, XS_NO_REQUESTS)

TILE_DECODE = Step("tile_decode", (1,) * 7, (0, 1, 37, 127, 129, 256, 700), padded_rows=2, slack=300)
TILE_VERIFY = Step("tile_verify", (3, 1, 0, 16, 2), (300, 129, 12, 140, 1), padded_rows=1)
TILE_PREFILL = Step("tile_prefill", (37, 1, 0, 21), (37, 200, 12, 405), padded_rows=3)
TILE_CHUNK = Step("tile_chunk", (19, 5), (400, 3))
TILE_NEGATIVE = Step("tile_negative", (70, 3, 40), (2, 0, 5), padded_rows=2)
TILE_STEPS = (TILE_DECODE, TILE_VERIFY, TILE_PREFILL, TILE_CHUNK)
"""Small steps of pages and blocks of 128 tokens, for kernels that take no others."""

EDGE_LENGTHS = (1, 7, 127, 128, 129, 255, 256, 257, 512, 513, 1023, 1025, 2047, 2048, 2049, 4097)
DECODE = Step("decode_edges", (1,) * 18, (0, *EDGE_LENGTHS, 0), padded_rows=3)
DECODE_LONG = Step("decode_long", (1, 1), (65_537, 3_000))
VERIFY = Step("verify4", (4,) * 6, (4, 5, 131, 0, 256, 2_051), padded_rows=2, slack=1_000)
VERIFY_RAGGED = Step("verify_ragged", (1, 16, 0, 3, 8, 2), (300, 2_060, 12, 2, 1_025, 129))
PREFILL = Step("prefill", (129, 1, 300, 0, 65, 17), (129, 700, 2_500, 12, 65, 9), padded_rows=5)
PREFILL_PREFIX = Step("prefill_prefix", (200, 33), (8_392, 2_081))
PREFILL_ONE = Step("prefill_one", (128,), (128,))
STEPS = (DECODE, DECODE_LONG, VERIFY, VERIFY_RAGGED, PREFILL, PREFILL_PREFIX, PREFILL_ONE)
PAGED_STEPS = tuple(
    replace(step, page_size=page, block_size=block)
    for step in (DECODE, VERIFY_RAGGED, PREFILL)
    for page, block in ((16, 128), (64, 128), (16, 16), (32, 64), (256, 256), (32, 32))
)

GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32)


def xs_attention(*, sparse: bool) -> list[AttentionCase]:
    topk = 3 if sparse else 0
    base = AttentionCase(XS_DECODE, 4, 2, head_dim=64, topk=topk, mode="fp32")
    cases = [replace(base, step=step) for step in XS_STEPS]
    cases += [
        replace(base, step=step, mode=mode, num_q_heads=2, num_kv_heads=1) for step in (XS_DECODE, XS_CHUNK) for mode in MODES if mode != "fp32"
    ]
    cases += [replace(base, mode=mode, scaled=True, sink=torch.float32) for mode in ("bf16", "widen_e5m2", "fp8", "fp8_pv")]
    cases += [replace(base, step=XS_PREFILL, scaled=True)]
    cases += [replace(base, step=step, sink=torch.float32, packed_q=True) for step in (XS_VERIFY, XS_PREFILL)]
    cases += [replace(base, num_q_heads=g, num_kv_heads=1) for g in (1, 3, 5, 32)]
    cases += [replace(base, layout=layout) for layout in LAYOUTS[1:]]
    cases += [replace(base, head_dim=d, num_q_heads=2, num_kv_heads=1) for d in (128, 192, 256)]
    if sparse:
        cases += [replace(base, step=step, ids="scattered", topk=5) for step in (XS_DECODE, XS_PREFILL)]
        cases += [replace(base, topk=1), replace(base, topk=17, num_q_heads=2, num_kv_heads=1)]
    return list(dict.fromkeys(cases))


def tile_attention() -> list[AttentionCase]:
    """Sparse attention at M3's head dim, page and block size, small enough for the interpreter of tests/ptxsim."""
    base = AttentionCase(TILE_DECODE, 16, 1, topk=4)
    modes = [mode for mode in MODES if mode != "fp32"]
    cases = [replace(base, step=step, mode=mode) for step in (TILE_DECODE, TILE_PREFILL) for mode in modes]
    cases += [replace(base, step=step) for step in (TILE_VERIFY, TILE_CHUNK)]
    cases += [
        replace(base, step=step, mode=mode, scaled=True, sink=sink, layout="packed")
        for step in (TILE_VERIFY, TILE_CHUNK)
        for mode, sink in (("bf16", None), ("fp8", torch.bfloat16), ("widen_e4m3", torch.float32))
    ]
    cases += [replace(base, step=step, num_q_heads=2 * g, num_kv_heads=2) for step in (TILE_DECODE, TILE_CHUNK) for g in (1, 2, 3, 4, 8, 32)]
    cases += [
        replace(base, step=step, layout=layout, packed_q=True) for step in (TILE_VERIFY, TILE_CHUNK) for layout in ("nhd", "packed_nhd", "layers")
    ]
    cases += [replace(base, step=step, topk=k) for step in (TILE_DECODE, TILE_CHUNK) for k in (1, 16, 64)]
    return list(dict.fromkeys(cases))


def tile_dense() -> list[AttentionCase]:
    """Dense attention at pages of 128 that were zeroed when they were allocated, small enough for the interpreter of tests/ptxsim."""
    base = AttentionCase(TILE_DECODE, 8, 2, topk=0, zero_on_alloc=True)
    cases = [replace(base, step=step) for step in (*TILE_STEPS, TILE_NEGATIVE)]
    cases += [replace(base, step=TILE_PREFILL, num_q_heads=2 * g, layout=layout) for g, layout in ((1, "packed_nhd"), (16, "layers"))]
    cases += [
        replace(base, step=TILE_VERIFY, mode="fp16", head_dim=64, packed_q=True),
        replace(base, step=TILE_CHUNK, num_q_heads=32, num_kv_heads=1),
    ]
    return cases


def full_attention(*, sparse: bool) -> list[AttentionCase]:
    topk = 16 if sparse else 0
    base = AttentionCase(DECODE, 64, 4, topk=topk)
    cases = [replace(base, step=step, mode=mode) for step in STEPS for mode in MODES]
    cases += [
        replace(base, step=step, mode=mode, scaled=True)
        for step in (VERIFY, PREFILL)
        for mode in ("bf16", "fp16", "fp32", "widen_e4m3", "widen_e5m2", "fp8", "fp8_pv")
    ]
    cases += [
        replace(base, step=step, mode=mode, sink=sink, scaled=mode == "fp8")
        for step in (DECODE, PREFILL)
        for mode in ("bf16", "fp8")
        for sink in (torch.bfloat16, torch.float32)
    ]
    cases += [
        replace(base, step=step, num_q_heads=g * 2, num_kv_heads=2, mode=mode)
        for step in (DECODE, VERIFY, PREFILL)
        for g in GROUPS
        for mode in ("bf16", "fp8")
    ]
    cases += [replace(base, step=step, num_q_heads=h, num_kv_heads=1) for step in (DECODE, VERIFY, PREFILL) for h in (8, 16)]
    cases += [
        replace(base, step=step, head_dim=d, num_q_heads=8, num_kv_heads=2, mode=mode)
        for step in (DECODE, PREFILL)
        for d in (64, 192, 256)
        for mode in ("bf16", "fp16", "fp32", "widen_e4m3", "fp8")
    ]
    cases += [replace(base, step=step, layout=layout, mode=mode) for step in (DECODE, PREFILL) for layout in LAYOUTS[1:] for mode in ("bf16", "fp8")]
    cases += [replace(base, step=step, num_q_heads=8, num_kv_heads=2, mode=mode) for step in PAGED_STEPS for mode in ("bf16", "fp8")]
    cases += [replace(base, step=step, packed_q=True) for step in (DECODE, PREFILL)]
    cases += [replace(base, step=step, num_q_heads=4, num_kv_heads=2) for step in XS_STEPS]
    if sparse:
        cases += [replace(base, step=step, ids="scattered") for step in (DECODE, VERIFY_RAGGED, PREFILL)]
        cases += [replace(base, step=step, topk=k) for step in (DECODE, PREFILL) for k in (1, 4, 8, 17, 32, 128)]
    else:
        zeroed = replace(base, zero_on_alloc=True)
        cases += [replace(zeroed, step=step, mode=mode) for step in STEPS for mode in ("bf16", "fp16")]
        cases += [replace(zeroed, step=step, num_q_heads=g * 2, num_kv_heads=2) for step in (DECODE, VERIFY, PREFILL) for g in GROUPS]
        cases += [replace(zeroed, step=step, layout=layout, packed_q=True) for step in (DECODE, PREFILL) for layout in LAYOUTS]
        cases += [replace(zeroed, step=step, head_dim=64, num_q_heads=8, num_kv_heads=2) for step in (DECODE, PREFILL)]
        cases += tile_dense()
    return list(dict.fromkeys(cases))


def xs_index() -> list[IndexCase]:
    base = IndexCase(XS_DECODE, num_heads=2, dim=64, q_dtype=torch.float32, k_dtype=torch.float32, topk=2)
    cases = [replace(base, step=step) for step in XS_STEPS]
    pairs = ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.bfloat16, E4M3), (torch.float16, E4M3), (E4M3, E4M3))
    cases += [replace(base, step=step, q_dtype=q, k_dtype=k) for step in (XS_DECODE, XS_CHUNK) for q, k in (*pairs, (torch.bfloat16, torch.float16))]
    cases += [replace(base, step=XS_VERIFY, q_dtype=d, k_dtype=d, scaled=True) for d in (torch.float32, torch.bfloat16, E4M3)]
    cases += [replace(base, num_heads=h) for h in (1, 3, 4)]
    cases += [replace(base, dim=128), *(replace(base, layout=layout) for layout in INDEX_LAYOUTS[1:])]
    cases += [replace(base, step=XS_PREFILL, topk=2, init_blocks=1, local_blocks=1), replace(base, topk=9, init_blocks=1, local_blocks=2)]
    return list(dict.fromkeys(cases))


def tile_index() -> list[IndexCase]:
    """The indexer at M3's index dim, page and block size, small enough for the interpreter of tests/ptxsim."""
    base = IndexCase(TILE_DECODE, topk=2)
    floats = (torch.bfloat16, torch.float16, E4M3)
    cases = [replace(base, step=step) for step in TILE_STEPS]
    cases += [replace(base, step=step, q_dtype=q, k_dtype=k) for step in (TILE_VERIFY, TILE_CHUNK) for q in floats for k in floats]
    cases += [replace(base, step=step, q_dtype=d, k_dtype=d, scaled=True) for step in (TILE_DECODE, TILE_PREFILL) for d in (torch.bfloat16, E4M3)]
    cases += [replace(base, step=step, num_heads=h) for step in (TILE_VERIFY, TILE_CHUNK) for h in (1, 2, 3, 8)]
    cases += [replace(base, step=step, layout=layout) for step in (TILE_DECODE, TILE_CHUNK) for layout in INDEX_LAYOUTS[1:]]
    cases += [replace(base, step=step, topk=k, init_blocks=1, local_blocks=2) for step in (TILE_DECODE, TILE_PREFILL) for k in (1, 16, 64)]
    return list(dict.fromkeys(cases))


def full_index() -> list[IndexCase]:
    base = IndexCase(DECODE)
    floats = (torch.bfloat16, torch.float16, E4M3)
    cases = [replace(base, step=step, q_dtype=d, k_dtype=d) for step in STEPS for d in (*floats, torch.float32)]
    cases += [replace(base, step=step, q_dtype=q, k_dtype=k) for step in (DECODE, PREFILL) for q in floats for k in floats]
    cases += [replace(base, step=step, q_dtype=d, k_dtype=d, scaled=True) for step in (VERIFY, PREFILL) for d in (*floats, torch.float32)]
    cases += [replace(base, step=step, num_heads=h) for step in (DECODE, VERIFY, VERIFY_RAGGED, PREFILL) for h in (1, 2, 3, 5, 6, 7, 8, 12)]
    cases += [replace(base, step=step, dim=64, q_dtype=d, k_dtype=d) for step in (DECODE, PREFILL) for d in (torch.bfloat16, E4M3)]
    cases += [replace(base, step=step, layout=layout) for step in (DECODE, PREFILL) for layout in INDEX_LAYOUTS[1:]]
    cases += [replace(base, step=step) for step in (*PAGED_STEPS, *XS_STEPS) if step.block_size % step.page_size == 0]
    cases += [
        replace(base, step=step, topk=k, init_blocks=i, local_blocks=n)
        for step in (DECODE, PREFILL)
        for k, i, n in ((1, 1, 2), (4, 2, 3), (32, 0, 0), (128, 1, 1))
    ]
    return list(dict.fromkeys(cases))


SCORE_KINDS = ("permutation", "equal", "few_values", "negative", "specials", "denormals", "all_nan", "one_ulp", "one_bin", "garbage_tail")


def xs_select() -> list[SelectCase]:
    base = SelectCase(XS_PREFILL, num_heads=2, topk=2)
    wide = replace(base, step=Step("wide", (3, 2), (16 * 70, 16 * 33 + 5), page_size=16, block_size=16), topk=4)
    cases = [replace(base, step=step, topk=k) for step in XS_STEPS for k in (1, 3)]
    cases += [replace(wide, scores=kind) for kind in SCORE_KINDS]
    cases += [replace(wide, init_blocks=i, local_blocks=n, topk=k) for i, n, k in ((0, 0, 4), (1, 2, 2), (2, 3, 1), (2, 3, 8), (70, 70, 16))]
    cases += [replace(wide, token_major=True), replace(wide, topk=128)]
    return list(dict.fromkeys(cases))


def tile_select() -> list[SelectCase]:
    """Selection among blocks of 128 positions, small enough for the interpreter of tests/ptxsim."""
    base = SelectCase(Step("tile_wide", (3, 2), (128 * 70, 128 * 33 + 5), padded_rows=1), num_heads=2)
    cases = [SelectCase(step, num_heads=2, topk=3) for step in TILE_STEPS]
    cases += [replace(base, scores=kind) for kind in SCORE_KINDS]
    cases += [
        replace(base, init_blocks=i, local_blocks=n, topk=k) for i, n, k in ((0, 0, 4), (1, 2, 2), (2, 3, 1), (2, 3, 64), (70, 70, 16), (0, 1, 1))
    ]
    cases += [replace(base, token_major=True)]
    return list(dict.fromkeys(cases))


def full_select() -> list[SelectCase]:
    base = SelectCase(PREFILL)
    cases = [replace(base, step=step, scores=kind) for step in (*STEPS, *PAGED_STEPS) for kind in SCORE_KINDS]
    cases += [
        replace(base, step=step, init_blocks=i, local_blocks=n, topk=k)
        for step in (DECODE, PREFILL)
        for i, n in ((0, 0), (0, 1), (1, 1), (1, 2), (2, 3), (40, 40))
        for k in (1, 2, 4, 6, 16, 17, 32, 64, 128)
    ]
    cases += [replace(base, step=step, token_major=True) for step in (DECODE, PREFILL)]
    columns = (1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 128, 129, 256, 257, 511, 512, 513, 1_024, 2_049, 5_000, 8_193, 16_384, 32_768)
    for n in columns:
        step = Step(f"columns{n}", (1, 2), (n * 16, max(1, n * 16 - 5)), page_size=16, block_size=16)
        cases += [replace(base, step=step, scores=kind) for kind in (SCORE_KINDS if n > 8_192 else ("permutation", "few_values", "specials"))]
    cases += [replace(base, num_heads=h) for h in (1, 3, 8)]
    return list(dict.fromkeys(cases))


def xs_norm_rope() -> list[NormRopeCase]:
    base = NormRopeCase(5, num_q_heads=3, num_kv_heads=1, num_index_heads=1, dtype=torch.float32)
    bf16, fp16 = torch.bfloat16, torch.float16
    cached = replace(base, dtype=bf16, cache_dtype=bf16, index_dtype=bf16, q_out_dtype=bf16)
    return [
        base,
        replace(base, tokens=0),
        replace(base, dtype=bf16, weight_dtype=bf16, num_index_heads=0),
        replace(base, dtype=fp16, integer=torch.int64, row_padding=64, rotary_dim=128),
        replace(base, cache_dtype=torch.float32, index_dtype=torch.float32),
        cached,
        replace(cached, skip_index=True, index_dtype=None),
        *(replace(cached, layout=layout) for layout in LAYOUTS[1:]),
        replace(cached, cache_dtype=E4M3, index_dtype=E4M3, q_out_dtype=E4M3),
        replace(cached, cache_dtype=E4M3, index_dtype=E4M3, q_out_dtype=E4M3, scaled=True, layout="packed"),
        replace(cached, cache_dtype=E5M2, dtype=fp16, q_out_dtype=fp16, index_dtype=E4M3),
        replace(cached, index_dtype=E4M3),
        replace(cached, integer=torch.int64, tokens=9),
        replace(cached, num_index_heads=0, index_dtype=None, rotary_dim=32),
    ]


def full_norm_rope() -> list[NormRopeCase]:
    bf16, fp16 = torch.bfloat16, torch.float16
    base = NormRopeCase(300, 64, 4, 4, cache_dtype=bf16, index_dtype=bf16, page_size=128)
    caches = ((bf16, bf16), (E4M3, E4M3), (E5M2, E4M3), (bf16, E4M3), (E4M3, bf16), (E5M2, bf16))
    cases = [replace(base, tokens=t) for t in (0, 1, 2, 63, 64, 1_000)]
    cases += [
        replace(base, cache_dtype=c, index_dtype=i, q_out_dtype=q, scaled=s) for c, i in caches for q in (None, bf16, E4M3) for s in (False, True)
    ]
    cases += [replace(base, num_q_heads=q, num_kv_heads=k, num_index_heads=k) for q, k in ((16, 1), (8, 1), (6, 2), (3, 3), (24, 12))]
    cases += [replace(base, rotary_dim=r) for r in (16, 32, 128)]
    cases += [replace(base, weight_dtype=bf16), replace(base, dtype=fp16, cache_dtype=fp16, index_dtype=fp16, weight_dtype=fp16)]
    cases += [replace(base, integer=torch.int64), replace(base, row_padding=256), replace(base, skip_index=True, index_dtype=None)]
    cases += [replace(base, layout=layout, cache_dtype=c) for layout in LAYOUTS for c in (bf16, E4M3)]
    cases += [replace(base, page_size=p) for p in (16, 64, 256)]
    cases += [replace(base, num_index_heads=0, index_dtype=None), replace(base, num_index_heads=0, index_dtype=None, cache_dtype=None)]
    cases += [replace(base, cache_dtype=None, index_dtype=None, dtype=d) for d in (bf16, fp16, torch.float32)]
    return list(dict.fromkeys(cases + xs_norm_rope()))


def xs_merge() -> list[MergeCase]:
    return [MergeCase(0, 2, 64), *(MergeCase(5, 3, 64, d) for d in (torch.bfloat16, torch.float16, torch.float32)), MergeCase(3, 1, 192)]


def full_merge() -> list[MergeCase]:
    floats = (torch.bfloat16, torch.float16, torch.float32)
    return xs_merge() + [MergeCase(t, h, d, dtype) for t, h in ((1, 64), (1_000, 16), (70_000, 1)) for d in (64, 128, 192, 256) for dtype in floats]


def xs_quantize() -> list[QuantizeCase]:
    cases = [QuantizeCase((3, 40), dtype=d, out_dtype=o) for d in (torch.bfloat16, torch.float16, torch.float32) for o in (E4M3, E5M2)]
    cases += [QuantizeCase((2, 3, 33), scale=s, dtype=torch.float32) for s in (1.0, 0.037, 12.5, "tensor", "row")]
    cases += [QuantizeCase((4, 16), scale=s, padding=8) for s in (None, "row", "tensor")]
    return cases + [QuantizeCase((0, 16), scale=s) for s in (None, "row", "tensor")] + [QuantizeCase((7,), scale="row"), QuantizeCase((1, 1))]


def full_quantize() -> list[QuantizeCase]:
    scales = (None, 1.0, 0.037, 12.5, "tensor", "row")
    shapes = ((1, 1), (1_000, 128), (3, 5, 7_168), (300, 1_031), (17, 70_000), (131_072, 16))
    cases = [QuantizeCase(shape, dtype=d, scale=s) for shape in shapes for d in (torch.bfloat16, torch.float16, torch.float32) for s in scales]
    cases += [QuantizeCase((50, 512), out_dtype=E5M2, scale=s) for s in scales] + [QuantizeCase((300, 512), scale=s, padding=64) for s in scales]
    return list(dict.fromkeys(xs_quantize() + cases))
