"""The optional package flash-attn-4 behind `dense_attention`, in the interpreter, on caches that were zeroed when their pages were allocated."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from needed import need

need("nvidia-cutlass-dsl", "apache-tvm-ffi", "flash-attn-4", "quack-kernels")

from simulator import simulated

import m3attn
from m3attn import LayerCache, PagedBatch, UnsupportedProblem
from m3attn.dsl_kernels.common.cache import VariantNotReady
from m3attn.flash_attn_4 import _compiled_kernels_only, _forward
from m3attn.testing.bounds import attention_bound
from m3attn.testing.cases import TILE_DECODE, TILE_VERIFY, AttentionCase, Step, tile_dense
from m3attn.testing.inputs import attention_inputs
from m3attn.testing.matrix import skip_if_declined
from m3attn.testing.poison import poisoned_empty

KEY = "flash_attn_4"


@pytest.fixture(autouse=True)
def fresh_package() -> Iterator[None]:
    """The package remembers what it learnt of a device."""
    yield
    for name, module in list(sys.modules.items()):
        if name.startswith(("flash_attn.cute", "quack")):
            for function in list(vars(module).values()):
                if hasattr(function, "cache_clear"):
                    function.cache_clear()


def name_a_page_of_nan(batch: PagedBatch, cache: LayerCache) -> None:
    """Table entries past each request's last page name a page that nobody has."""
    pages = cache.key_value()[0].shape[0]
    is_live = torch.arange(batch.page_table.shape[1]) * 128 < batch.seq_lens[:, None]
    batch.page_table[~is_live] = min(set(range(pages)) - set(batch.page_table[is_live].tolist()))


def run(case: AttentionCase, arch: str, order: str) -> None:
    inputs = attention_inputs(case, "cpu")
    name_a_page_of_nan(inputs.batch, inputs.cache)
    skip_if_declined("dense_attention", KEY, case.problem(arch.rstrip("a")))
    with simulated(order, arch=arch, seed=1) as device, poisoned_empty():
        out, lse = m3attn.dense_attention(*inputs.arguments(), return_lse=True, impl=KEY)
        if inputs.q.shape[0]:
            assert "flash" in device.stats[0]["kernel"], "another kernel ran"
    attention_bound(inputs.q, inputs.cache, inputs.batch, None, **inputs.options).check(out, lse)


@pytest.mark.parametrize("case", tile_dense(), ids=lambda case: case.id)
def test_within_the_bound(case: AttentionCase) -> None:
    run(case, "sm_90a", "random")


@pytest.mark.parametrize("step", [TILE_DECODE, TILE_VERIFY], ids=lambda step: step.name)
def test_within_the_bound_on_blackwell(step: Step) -> None:
    run(AttentionCase(step, 32, 2, topk=0, zero_on_alloc=True), "sm_100a", "eager")


def test_sparse_decode_over_selected_pages() -> None:
    """Every row and KV group is a request of its own, over the pages of the blocks that it selected."""
    inputs = attention_inputs(AttentionCase(TILE_VERIFY, 32, 2, topk=2, zero_on_alloc=True, layout="packed"), "cpu")
    name_a_page_of_nan(inputs.batch, inputs.cache)
    assert inputs.cache.kv[0].isnan().all(), "the page that lengths of 0 name"
    tokens, groups = inputs.q.shape[0], inputs.ids.shape[0]
    table, lengths = m3attn.selected_page_table(inputs.ids, inputs.batch, heads_as_pages=True)
    offsets = torch.arange(tokens * groups + 1, dtype=torch.int32)
    batch = PagedBatch(table.flatten(0, 1), lengths.flatten(), offsets, max_seqlen_q=1, max_seqlen_k=2 * 128)
    q = inputs.q.reshape(tokens * groups, 16, 128)
    with simulated():
        out, lse = m3attn.dense_attention(q, m3attn.heads_as_pages(inputs.cache), batch, return_lse=True, impl=KEY)
    bound = attention_bound(inputs.q, inputs.cache, inputs.batch, inputs.ids)
    bound.check(out.view(inputs.q.shape), lse.view(inputs.q.shape[:2]))


def test_device_values_that_are_wrong_stay_within_the_tensors() -> None:
    """Lengths, offsets and pages out of range: any result, but no access outside, which the interpreter refuses."""
    inputs = attention_inputs(AttentionCase(TILE_VERIFY, 8, 2, topk=0, zero_on_alloc=True), "cpu")
    inputs.batch.seq_lens.copy_(torch.tensor([2**31 - 1, -5, 10_000, 140, 3]))
    inputs.batch.page_table[0] = 2**31 - 1
    inputs.batch.page_table[2] = -(2**31)
    inputs.batch.cu_seqlens_q.copy_(torch.tensor([-7, 3, 2, 5, 2**31 - 1, 9]))
    with simulated():
        m3attn.dense_attention(*inputs.arguments(), impl=KEY)


def test_what_cannot_be_read_in_place_is_refused() -> None:
    inputs = attention_inputs(AttentionCase(TILE_VERIFY, 8, 2, topk=0, zero_on_alloc=True), "cpu")
    k, v = inputs.cache.key_value()
    odd = torch.zeros(k.numel() + 1, dtype=k.dtype)[1:].view(k.shape)
    shifted = torch.zeros(*v.shape[:3], v.shape[3] + 1, dtype=v.dtype)[..., :-1]
    for cache, name in ((LayerCache(k=odd, v=v, zero_on_alloc=True), "cache.k"), (LayerCache(k=k, v=shifted, zero_on_alloc=True), "cache.v")):
        with simulated() as device:
            with pytest.raises(UnsupportedProblem, match=rf"{name}: expected rows that start at multiples of 16 bytes for flash_attn_4"):
                m3attn.dense_attention(inputs.q, cache, inputs.batch, impl=KEY)
            assert not device.stats


def test_nothing_compiles_under_capture() -> None:
    inputs = attention_inputs(AttentionCase(TILE_DECODE, 4, 2, 64, topk=0, zero_on_alloc=True), "cpu")
    forward = _forward()
    kernels = forward.compile_cache
    with simulated():
        with _compiled_kernels_only(forward), pytest.raises(VariantNotReady, match=r"warmup"):
            m3attn.dense_attention(*inputs.arguments(), impl=KEY)
        expected = m3attn.dense_attention(*inputs.arguments(), impl=KEY)
        with _compiled_kernels_only(forward):
            assert torch.equal(m3attn.dense_attention(*inputs.arguments(), impl=KEY), expected)
    assert forward.compile_cache is kernels
