"""Device values that no caller should pass: a row may be wrong, but nothing outside the given tensors is touched. Each access is checked."""

from collections.abc import Callable

import pytest
import torch
from needed import need

need("nvidia-cutlass-dsl", "apache-tvm-ffi")

from simulator import simulated

import m3attn
from m3attn.batch import PagedBatch
from m3attn.testing.cases import TILE_CHUNK, TILE_DECODE, TILE_VERIFY, AttentionCase, IndexCase, Step
from m3attn.testing.inputs import attention_inputs, index_inputs
from m3attn.testing.poison import poisoned_empty

KEY = "cute_sm90"
FAR = (2**31 - 1, -(2**31), -1, 2**30, 1 << 20)
STEPS = pytest.mark.parametrize("step", [TILE_DECODE, TILE_VERIFY, TILE_CHUNK], ids=lambda step: step.name)


def garbage(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers far outside, and small ones that look valid between them."""
    values = torch.tensor((*FAR, 0, 1, 2), dtype=torch.int32)
    return values[torch.randint(len(values), tensor.shape, generator=torch.Generator().manual_seed(5))]


def far_pages(batch: PagedBatch) -> None:
    batch.page_table.copy_(garbage(batch.page_table))


def far_lengths(batch: PagedBatch) -> None:
    batch.seq_lens.copy_(garbage(batch.seq_lens))
    batch.seq_lens[-1] = batch.max_seqlen_k + 1


def falling_offsets(batch: PagedBatch) -> None:
    batch.cu_seqlens_q.copy_(batch.cu_seqlens_q.flip(0))


def far_offsets(batch: PagedBatch) -> None:
    batch.cu_seqlens_q.copy_(garbage(batch.cu_seqlens_q))


HOSTILE = pytest.mark.parametrize("spoil", [far_pages, far_lengths, falling_offsets, far_offsets], ids=lambda spoil: spoil.__name__)


@HOSTILE
@STEPS
def test_sparse_attention(step: Step, spoil: Callable[[PagedBatch], None]) -> None:
    inputs = attention_inputs(AttentionCase(step, 16, 1, topk=4), "cpu")
    spoil(inputs.batch)
    with simulated("random", seed=2), poisoned_empty():
        m3attn.sparse_attention(*inputs.arguments(), **inputs.options, return_lse=True, impl=KEY)


@STEPS
def test_ids_of_sparse_attention(step: Step) -> None:
    inputs = attention_inputs(AttentionCase(step, 16, 1, topk=4), "cpu")
    inputs.ids.copy_(garbage(inputs.ids))
    with simulated("random", seed=2), poisoned_empty():
        m3attn.sparse_attention(*inputs.arguments(), **inputs.options, return_lse=True, impl=KEY)


@HOSTILE
@STEPS
def test_index_topk(step: Step, spoil: Callable[[PagedBatch], None]) -> None:
    """Ids stay among the blocks that there are, whatever the lengths say."""
    inputs = index_inputs(IndexCase(step, topk=2), "cpu")
    spoil(inputs.batch)
    with simulated("random", seed=2), poisoned_empty():
        ids = m3attn.index_topk(inputs.index_q, inputs.cache, inputs.batch, topk=2, impl=KEY)
    assert bool(((ids >= -1) & (ids < inputs.batch.num_blocks)).all())
