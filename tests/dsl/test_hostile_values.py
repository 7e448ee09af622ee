"""Device values that no caller should pass: a row may be wrong, but nothing outside the given tensors is touched. Each access is checked."""

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
from needed import need

need("nvidia-cutlass-dsl", "apache-tvm-ffi")

from attention_calls import call_of
from simulator import simulated

import m3attn
from m3attn.batch import PagedBatch
from m3attn.dsl_kernels import sparse_attention_sm90, sparse_prefill_by_block_sm90, sparse_prefill_sm90
from m3attn.dsl_kernels.decode_schedule import settings_override
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


@pytest.mark.parametrize("also", [3, 5])
@pytest.mark.parametrize("splits", [1, 3])
def test_decode_of_repeated_ids(splits: int, also: int) -> None:
    """A block selected again leaves a step that nobody attends to; its stage is freed when its loads have landed and not before."""
    inputs = attention_inputs(AttentionCase(Step("one", (1,), (2_000,)), 16, 1, topk=16), "cpu")
    inputs.ids.fill_(3)
    inputs.ids[..., ::2] = also
    with mock.patch.dict(settings_override, splits=splits):
        for seed in range(2):
            with simulated("random", seed=seed), poisoned_empty():
                out, lse = m3attn.sparse_attention(*inputs.arguments(), **inputs.options, return_lse=True, impl=KEY)
            assert bool(out.isfinite().all()) and bool(lse.isfinite().all())


@pytest.mark.parametrize("offsets", [(30, 10, 40), (5, 10, 40)], ids=str)
@pytest.mark.parametrize("byte", [0, 1, 0xFF])
def test_rows_of_no_tile_are_not_deferred(offsets: tuple[int, ...], byte: int) -> None:
    """Block by block, whatever stood in the workspace: rows before the first offset belong to no tile, which would have said where they go."""
    inputs = attention_inputs(AttentionCase(Step("two", (10, 30), (200, 300)), 16, 1, topk=2), "cpu")
    call = call_of(inputs)
    call = replace(call, batch=replace(call.batch, cu_seqlens_q=torch.tensor(offsets, dtype=torch.int32)))
    with (
        mock.patch.object(sparse_prefill_by_block_sm90, "MIN_ROWS", 1),
        mock.patch.object(sparse_prefill_sm90, "DEFERRED_SHARE", 0.0),
        simulated("random", seed=1),
    ):
        size = sparse_attention_sm90.workspace_bytes(sparse_attention_sm90.work_shape(call))
        sparse_attention_sm90.sparse_attention(replace(call, workspace=torch.full((size,), byte, dtype=torch.uint8)))


@HOSTILE
@STEPS
def test_index_topk(step: Step, spoil: Callable[[PagedBatch], None]) -> None:
    """Ids stay among the blocks that there are, whatever the lengths say."""
    inputs = index_inputs(IndexCase(step, topk=2), "cpu")
    spoil(inputs.batch)
    with simulated("random", seed=2), poisoned_empty():
        ids = m3attn.index_topk(inputs.index_q, inputs.cache, inputs.batch, topk=2, impl=KEY)
    assert bool(((ids >= -1) & (ids < inputs.batch.num_blocks)).all())


@HOSTILE
@pytest.mark.parametrize("step", [Step("one", (5,), (300,)), TILE_CHUNK], ids=lambda step: step.name)
def test_index_score(step: Step, spoil: Callable[[PagedBatch], None]) -> None:
    """Whatever the offsets say, the -inf of what rows do not see stay among the scores."""
    inputs = index_inputs(IndexCase(step), "cpu")
    spoil(inputs.batch)
    with simulated("random", seed=2), poisoned_empty():
        m3attn.index_score(inputs.index_q, inputs.cache, inputs.batch, impl=KEY)
