"""LatentKVPool: sizes, views, slots, pages, and what reads and writes it."""

from __future__ import annotations

import pytest
import torch

import m3attn
from m3attn.dtypes import E4M3
from m3attn.reference.numerics import indexable
from m3attn.reference.quantize import saturating_cast
from m3attn.testing.inputs import generator, normal
from m3attn.testing.matrix import DEVICE, MARKS

BACKENDS = [pytest.param(backend, marks=MARKS) for backend in ("plain", "triton")]


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, E4M3), ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_set_writes_rows_of_one_layer(backend: str, dtype: torch.dtype) -> None:
    pool = m3attn.LatentKVPool(3, num_tokens=30, page_size=8, dtype=dtype, device=DEVICE, zero_on_alloc=True, backend=backend)
    assert (pool.num_pages, pool.num_tokens, pool.bytes_per_token()) == (4, 32, {"latent": 3 * 576 * dtype.itemsize})
    pool.set_scale(1, 0.5)
    gen = generator(0)
    latent, k_pe = (normal((6, dim), gen, DEVICE).to(torch.bfloat16) for dim in (512, 64))
    slots = torch.tensor([31, 0, -1, 9, 32, 17], device=DEVICE)
    pool.set(1, slots, latent[:, None], k_pe)
    kept = torch.tensor([0, 1, 3, 5], device=DEVICE)
    expected = saturating_cast(torch.cat([latent, k_pe], dim=1)[kept], dtype, 0.5)
    rows = pool.rows(1)
    assert rows.shape == (32, 1, 576) and rows.data_ptr() == pool.layer(1).kv.data_ptr()
    assert torch.equal(as_bytes(indexable(rows)[slots[kept], 0]), as_bytes(expected))
    indexable(rows)[slots[kept]] = 0
    assert not as_bytes(pool.parts[0].storage).any(), "other slots or layers were written"


@pytest.mark.parametrize("backend", BACKENDS)
def test_quantised_values_are_stored_as_they_are(backend: str) -> None:
    pool = m3attn.LatentKVPool(1, num_pages=2, page_size=4, dtype="fp8", device=DEVICE, backend=backend)
    pool.set_scale(0, 3.0)
    values = saturating_cast(normal((2, 576), generator(1), DEVICE), E4M3)
    pool.set(0, torch.tensor([1, 6], device=DEVICE), values[:, :512], values[:, 512:])
    assert torch.equal(as_bytes(indexable(pool.rows(0))[[1, 6], 0]), as_bytes(values))


def test_pages_come_zeroed_and_go_back() -> None:
    pool = m3attn.LatentKVPool(2, num_bytes=2 * 576 * 2 * 16 * 5 + 7, page_size=16, device=DEVICE, zero_on_alloc=True)
    assert pool.num_pages == 5 and pool.pages_for(17) == 2
    pages = pool.alloc(3)
    pool.layer(0).kv[pages[0]] = 1
    pool.free(pages)
    again = pool.alloc(5)
    assert sorted(again) == list(range(5)) and not pool.parts[0].storage.any()
    with pytest.raises(m3attn.OutOfPages):
        pool.alloc(1)


def test_the_host_pool_takes_it() -> None:
    pool = m3attn.LatentKVPool(2, num_pages=4, page_size=4, dtype="fp8", device=DEVICE, zero_on_alloc=True)
    assert pool.main.parts[0].words().shape == (2, 4, 4 * 576 // 8) and pool.main.num_pages == 4


def test_sparse_mla_reads_its_rows() -> None:
    pool = m3attn.LatentKVPool(1, num_tokens=32, page_size=8, device=DEVICE)
    gen = generator(3)
    latent, k_pe, q = (normal(shape, gen, DEVICE).to(torch.bfloat16) for shape in ((20, 512), (20, 64), (2, 3, 576)))
    slots = torch.randperm(32, generator=gen)[:20].to(DEVICE)
    pool.set(0, slots, latent, k_pe)
    chosen = torch.randperm(20, generator=gen)[:12].to(DEVICE)
    indices = slots[chosen].int().expand(2, 1, -1)
    paged = m3attn.sparse_mla_prefill(q, pool.rows(0), indices, sm_scale=0.05)
    plain = m3attn.sparse_mla_prefill(q, torch.cat([latent, k_pe], 1)[:, None], chosen.int().expand(2, 1, -1), sm_scale=0.05)
    assert all(torch.equal(a, b) for a, b in zip(paged, plain, strict=True))


def test_bad_arguments_are_named() -> None:
    pool = m3attn.LatentKVPool(1, num_pages=1, device=DEVICE)
    slots, latent, k_pe = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.zeros(1, 512, device=DEVICE), torch.zeros(1, 64, device=DEVICE)
    for error, message, call in (
        (ValueError, "num_pages, num_tokens, num_bytes: expected one of them, got none", lambda: m3attn.LatentKVPool(1)),
        (ValueError, "dtype: expected one of bf16", lambda: m3attn.LatentKVPool(1, num_pages=1, dtype="fp8_e5m2")),
        (ValueError, "num_bytes: expected an int of at least", lambda: m3attn.LatentKVPool(1, num_bytes=100)),
        (ValueError, "layer: expected an int from 0 to 0, got 1", lambda: pool.layer(1)),
        (ValueError, "k_pe: expected shape", lambda: pool.set(0, slots, latent, k_pe[:, :32])),
        (ValueError, "latent: expected shape", lambda: pool.set(0, slots[:0], latent, k_pe)),
        (TypeError, "latent: expected", lambda: pool.set(0, slots, latent.double(), k_pe)),
        (ValueError, "scale: expected a finite number above 0", lambda: pool.set_scale(0, 0.0)),
    ):
        with pytest.raises(error, match=message):
            call()
