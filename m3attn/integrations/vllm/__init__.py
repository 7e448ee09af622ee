"""vLLM's MiniMax-M3 on m3attn's stages.

`install()` puts m3attn's functions in the place of vLLM's Triton kernels, which its models call off Blackwell: it is an entry point of vLLM's
general plugins, so that a vLLM of the right version finds it by itself (`VLLM_PLUGINS` limits what vLLM loads). `uninstall()` undoes it.
The functions may also be called by name; they take vLLM's own arguments, and write and return what its kernels do.
"""

from m3attn.integrations.vllm.engine import ENGINE, UnknownEngine, install, uninstall
from m3attn.integrations.vllm.kernels import (
    minimax_m3_index_decode,
    minimax_m3_index_score,
    minimax_m3_index_topk,
    minimax_m3_sparse_attn,
    minimax_m3_sparse_attn_decode,
)

__all__ = [
    "ENGINE",
    "UnknownEngine",
    "install",
    "minimax_m3_index_decode",
    "minimax_m3_index_score",
    "minimax_m3_index_topk",
    "minimax_m3_sparse_attn",
    "minimax_m3_sparse_attn_decode",
    "uninstall",
]
