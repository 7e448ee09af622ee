"""MiniMax-M3's sparse attention: one contract, readable Triton kernels, faster ones behind a capability registry.

Start with `attend` on plain tensors, or with the stages (`index_topk`, `sparse_attention`, …) over a paged cache (`paged`, `PagedBatch`,
`LayerCache`). `explain` says which implementation runs and why; `use` and `impl=` choose one.
"""

from m3attn.attend import attend, paged
from m3attn.batch import LatentCache, LayerCache, PagedBatch
from m3attn.builtin import add_builtin_implementations
from m3attn.choice import Explanation, UnsupportedProblem, explain, use
from m3attn.config import M3Config
from m3attn.introspect import info, interpret, source, workspace_bytes
from m3attn.layers.dense import M3DenseAttention
from m3attn.layers.shard import Shard
from m3attn.layers.sparse import M3SparseAttention
from m3attn.modes import AttentionMode, resolve_attention_mode
from m3attn.page_tables import heads_as_pages, selected_page_table
from m3attn.plans.builders import pages_from_block_table, pages_from_csr, pages_from_req_to_token
from m3attn.plans.plan import PlanCapacity, StepPlan
from m3attn.pools.host import HostKVPool, HostPoolGroup, PageTransfer
from m3attn.pools.latent import LatentKVPool
from m3attn.pools.paged import PagedKVPool
from m3attn.pools.pages import OutOfPages, PageAllocator
from m3attn.problem import Problem
from m3attn.registry import BrokenImplementation, Capabilities, Implementation, implementations, register, unregister
from m3attn.rules import register_rule, rules, unregister_rule
from m3attn.stages.dense_attention import dense_attention
from m3attn.stages.index_score import index_score
from m3attn.stages.index_topk import index_topk
from m3attn.stages.merge_attention_states import merge_attention_states
from m3attn.stages.mla_kv_pack_quantize import mla_kv_pack_quantize
from m3attn.stages.mla_prefill import mla_prefill
from m3attn.stages.mla_rope_quantize import mla_rope_quantize
from m3attn.stages.prepare_prefill_qkv import prepare_prefill_qkv
from m3attn.stages.qk_norm_rope_insert import HeadCounts, NormWeights, qk_norm_rope_insert
from m3attn.stages.quantize_fp8 import quantize_fp8
from m3attn.stages.select_blocks import select_blocks
from m3attn.stages.sparse_attention import sparse_attention
from m3attn.stages.sparse_mla_prefill import sparse_mla_prefill
from m3attn.version import __version__
from m3attn.warmup import warmup
from m3attn.workspace import set_workspace_limit, workspace_limit

add_builtin_implementations()

__all__ = [
    "AttentionMode",
    "BrokenImplementation",
    "Capabilities",
    "Explanation",
    "HeadCounts",
    "HostKVPool",
    "HostPoolGroup",
    "Implementation",
    "LatentCache",
    "LatentKVPool",
    "LayerCache",
    "M3Config",
    "M3DenseAttention",
    "M3SparseAttention",
    "NormWeights",
    "OutOfPages",
    "PageAllocator",
    "PageTransfer",
    "PagedBatch",
    "PagedKVPool",
    "PlanCapacity",
    "Problem",
    "Shard",
    "StepPlan",
    "UnsupportedProblem",
    "__version__",
    "attend",
    "dense_attention",
    "explain",
    "heads_as_pages",
    "implementations",
    "index_score",
    "index_topk",
    "info",
    "interpret",
    "merge_attention_states",
    "mla_kv_pack_quantize",
    "mla_prefill",
    "mla_rope_quantize",
    "paged",
    "pages_from_block_table",
    "pages_from_csr",
    "pages_from_req_to_token",
    "prepare_prefill_qkv",
    "qk_norm_rope_insert",
    "quantize_fp8",
    "register",
    "register_rule",
    "resolve_attention_mode",
    "rules",
    "select_blocks",
    "selected_page_table",
    "set_workspace_limit",
    "source",
    "sparse_attention",
    "sparse_mla_prefill",
    "unregister",
    "unregister_rule",
    "use",
    "warmup",
    "workspace_bytes",
    "workspace_limit",
]
