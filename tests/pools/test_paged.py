"""PagedKVPool: sizes, views without copies, sets, and pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool_cases import BACKENDS, CONFIG, DEVICE, DTYPES, PAGE_SIZE, contents, make_pool, randomise, same

import m3attn
from m3attn import M3Config, OutOfPages, PagedKVPool
from m3attn.reference.quantize import saturating_cast

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
HEADS, DIM, INDEX_DIM = CONFIG.num_kv_heads, CONFIG.head_dim, CONFIG.index_dim


def values(tokens: int, dtype: torch.dtype = torch.bfloat16, *, nan: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """k, v, index_k with what rounds badly: values beyond fp8, infinities, NaN, subnormals. They are strided slices of one row."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(tokens, 2 * HEADS * DIM + INDEX_DIM, generator=generator) * 40
    special = torch.tensor([1e30, -1e30, float("inf"), float("-inf"), float("nan") if nan else 7.0, 1e-8, -0.0, 448.0, 0.0137])
    rows.flatten()[: len(special)] = special
    rows[-1, : len(special)], rows[-1, -len(special) :] = special, special
    k, v, index_k = rows.to(dtype).to(DEVICE).split([HEADS * DIM, HEADS * DIM, INDEX_DIM], dim=1)
    return k.unflatten(1, (HEADS, DIM)), v.unflatten(1, (HEADS, DIM)), index_k


def scale_forms(number: float) -> dict[str, Any]:
    return {"none": None, "one": 1.0, "float": number, "tensor": torch.tensor([number], device=DEVICE)}


def test_sizes() -> None:
    pool = make_pool(num_pages=None, num_tokens=41, kv_cache_dtype="fp8", index_cache_dtype="auto")
    assert (pool.num_pages, pool.num_tokens) == (6, 48)
    assert pool.bytes_per_token() == {"kv": 4 * HEADS * 2 * DIM, "index_k": 2 * INDEX_DIM * 2}
    assert sum(part.storage.nbytes for part in pool.parts) == 48 * sum(pool.bytes_per_token().values())
    assert make_pool(packed=False).bytes_per_token() == {"k": 4 * HEADS * DIM * 2, "v": 4 * HEADS * DIM * 2, "index_k": 2 * INDEX_DIM * 2}


def test_byte_budget_is_used_and_kept() -> None:
    page_bytes = PAGE_SIZE * sum(make_pool().bytes_per_token().values())
    pool = make_pool(num_pages=None, num_bytes=4 * page_bytes - 1)
    assert pool.num_pages == 3
    with pytest.raises(ValueError, match=f"num_bytes: expected an int of at least {page_bytes}"):
        make_pool(num_pages=None, num_bytes=page_bytes - 1)


def test_layers_of_one_stage_of_a_pipeline_keep_their_global_ids() -> None:
    pool = make_pool(layers=[2, 3], num_kv_heads=1)
    assert (pool.layers, pool.sparse_layers) == ((2, 3), (3,))
    assert pool.layer(2).index_k is None
    assert pool.layer(3).index_k.shape == (6, PAGE_SIZE, INDEX_DIM)
    assert pool.layer(3).kv.shape == (6, 1, PAGE_SIZE, 2 * DIM)
    with pytest.raises(ValueError, match="layer: expected one of 2, 3, got 0"):
        pool.layer(0)
    assert "index_k" not in make_pool(layers=[0, 2]).bytes_per_token()


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("packed", [True, False])
def test_views_are_the_allocation(packed: bool, layout: str) -> None:
    pool = make_pool(packed=packed, layout=layout, kv_cache_dtype="fp8_e5m2", index_cache_dtype="fp8")
    for layer in pool.layers:
        cache = pool.layer(layer)
        key, value = cache.key_value()
        assert key.shape == value.shape == (6, HEADS, PAGE_SIZE, DIM)
        assert key.stride(-1) == 1 and key.dtype == torch.float8_e5m2
        part = next(p for p in pool.parts if p.name in ("kv", "k"))
        assert key.data_ptr() == part.storage[layer].data_ptr()
        if packed:
            assert value.data_ptr() == key.data_ptr() + DIM
        if layer in pool.sparse_layers:
            assert cache.index_key().data_ptr() == pool.parts[-1].storage[pool.sparse_layers.index(layer)].data_ptr()
            assert cache.index_key().dtype == torch.float8_e4m3fn
        assert (cache.k_scale, cache.v_scale, cache.index_k_scale) == (None, None, None)
        head_step, token_step = key.stride(1), key.stride(2)
        assert (head_step > token_step) == (layout == "HND")
    assert pool.layer(1) is pool.layer(1)


@pytest.mark.parametrize("kv_form", ["none", "one", "float", "tensor"])
@pytest.mark.parametrize(("kv_dtype", "index_dtype"), DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_sets_write_the_bytes_of_the_cast_and_nothing_else(backend: str, kv_dtype: str, index_dtype: str, kv_form: str) -> None:
    """The fused set, the separate ones and the specification agree, byte by byte, over the whole pool."""
    # A cast to 16 bits keeps NaN, but each kind of hardware writes another one.
    k, v, index_k = values(5, nan=kv_dtype.startswith("fp8") and index_dtype.startswith("fp8"))
    slots = torch.tensor([3, -1, 1 << 30, 17, 47], device=DEVICE, dtype=torch.int32)
    index_slots = torch.tensor([48, 20, 0, 46, -(1 << 30)], device=DEVICE)
    scales = {"k_scale": scale_forms(2.5)[kv_form], "v_scale": scale_forms(0.3)[kv_form], "index_k_scale": scale_forms(1.7)[kv_form]}
    pools = [
        make_pool(backend=backend, kv_cache_dtype=kv_dtype, index_cache_dtype=index_dtype, packed=packed, layout=layout)
        for packed, layout in ((True, "HND"), (True, "HND"), (False, "NHD"))
    ]
    for pool in pools:
        randomise(pool)
        pool.set_scales(1, **scales)
    expected = make_pool(backend="plain", kv_cache_dtype=kv_dtype, index_cache_dtype=index_dtype)
    randomise(expected)
    cache = expected.layer(1)
    for name, cached, rows, at in (
        ("k_scale", cache.key_value()[0], k, slots),
        ("v_scale", cache.key_value()[1], v, slots),
        ("index_k_scale", cache.index_key()[:, None], index_k[:, None], index_slots),
    ):
        for row, slot in enumerate(at.tolist()):
            if 0 <= slot < 48:
                cached[slot // PAGE_SIZE, :, slot % PAGE_SIZE] = saturating_cast(rows[row], cached.dtype, scales[name])

    pools[0].set(1, slots, k, v, index_k, index_slots)
    for pool in pools[1:]:
        pool.set_kv(1, slots, k, v)
        pool.set_index_k(1, index_slots, index_k[:, None])
    assert same(contents(pools[0]), contents(pools[1]))
    assert same(contents(pools[0]), contents(expected))
    separate = pools[2].layer(1)
    written = [3, 17, 47]
    pages, offsets = torch.tensor(written, device=DEVICE) // PAGE_SIZE, torch.tensor(written, device=DEVICE) % PAGE_SIZE
    for mine, theirs in zip(separate.key_value(), pools[0].layer(1).key_value(), strict=True):
        mine, theirs = mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)
        assert torch.equal(mine[pages, :, offsets], theirs[pages, :, offsets])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sets_take_every_row_dtype(dtype: torch.dtype, backend: str) -> None:
    pool = make_pool(kv_cache_dtype="fp8_e5m2", backend=backend)
    k, v, index_k = values(4, dtype)
    slots = torch.tensor([0, 9, 18, 27], device=DEVICE)
    pool.set(3, slots, k, v, index_k)
    stored = pool.layer(3).key_value()[0].view(torch.uint8)[slots // PAGE_SIZE, :, slots % PAGE_SIZE]
    assert torch.equal(stored, saturating_cast(k, torch.float8_e5m2).view(torch.uint8))


@pytest.mark.parametrize("backend", BACKENDS)
def test_quantised_rows_are_stored_as_they_are(backend: str) -> None:
    pool = make_pool(kv_cache_dtype="fp8_e4m3", index_cache_dtype="fp8_e4m3", backend=backend)
    pool.set_scales(1, k_scale=3.0, v_scale=3.0, index_k_scale=3.0)
    k, v, index_k = (saturating_cast(x, torch.float8_e4m3fn) for x in values(3))
    pool.set(1, torch.tensor([5, 6, 7], device=DEVICE), k, v, index_k)
    key, value = pool.layer(1).key_value()
    assert torch.equal(key.view(torch.uint8)[0, :, 5:8].transpose(0, 1), k.view(torch.uint8))
    assert torch.equal(value.view(torch.uint8)[0, :, 5:8].transpose(0, 1), v.view(torch.uint8))
    assert torch.equal(pool.layer(1).index_key().view(torch.uint8)[0, 5:8], index_k.view(torch.uint8))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows_and_rows_that_share_a_slot(backend: str) -> None:
    pool = make_pool(backend=backend, zero_on_alloc=True)
    k, v, _ = values(3)
    pool.set_kv(0, torch.empty(0, dtype=torch.int64, device=DEVICE), k[:0], v[:0])
    k = torch.tensor([1.0, 2.0, 3.0], device=DEVICE, dtype=torch.bfloat16)[:, None, None].expand(3, HEADS, DIM).contiguous()
    pool.set_kv(0, torch.tensor([4, 4, 4], device=DEVICE), k, k.clone())
    assert pool.layer(0).key_value()[0][0, 0, 4, 0].item() in (1.0, 2.0, 3.0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("backend", BACKENDS)
def test_copy_pages_copies_every_part_of_every_layer(backend: str, seed: int) -> None:
    pool = make_pool(backend=backend, kv_cache_dtype="fp8", packed=seed == 0)
    randomise(pool, seed)
    before = contents(pool)
    pool.copy_pages([1, 4], torch.tensor([0, 5], dtype=torch.int32))
    after = contents(pool)
    for name, old in before.items():
        assert torch.equal(after[name], old[:, [1, 1, 2, 3, 4, 4]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_move_pages_permutes(backend: str) -> None:
    """Pages that are source and target at once: all are read before any is written."""
    pool = make_pool(backend=backend)
    randomise(pool)
    before = contents(pool)
    pool.alloc(5)
    pool.free([4])
    pool.move_pages([0, 1, 2], [1, 2, 4])
    for name, new in contents(pool).items():
        assert torch.equal(new[:, [1, 2, 4, 3]], before[name][:, [0, 1, 2, 3]])
    assert [pool.allocator.references(page) for page in range(6)] == [0, 1, 1, 1, 1, 0]
    with pytest.raises(ValueError, match="which is in use"):
        pool.move_pages([1], [2])


def test_fork_shares_full_pages_and_copies_the_partial_one() -> None:
    pool = make_pool()
    randomise(pool)
    pages = pool.alloc(3)
    forked = pool.fork(pages, 2 * PAGE_SIZE + 3)
    assert forked[:2] == pages[:2] and forked[2] != pages[2]
    assert [pool.allocator.references(page) for page in forked] == [2, 2, 1]
    for data in contents(pool).values():
        assert torch.equal(data[:, forked[2]], data[:, pages[2]])
    assert pool.fork(pages, 2 * PAGE_SIZE) == pages[:2]
    assert pool.fork(pages) == pages
    pool.alloc(2)
    with pytest.raises(OutOfPages, match="needed 1 pages, 0 of 6"):
        pool.fork(pages, 1)
    assert [pool.allocator.references(page) for page in pages] == [4, 4, 2]
    with pytest.raises(ValueError, match="pages: expected 4 pages for 25 tokens, got 3"):
        pool.fork(pages, 25)


def test_zero_on_alloc() -> None:
    pool = make_pool(zero_on_alloc=True, kv_cache_dtype="fp8")
    assert all(not data.any() for data in contents(pool).values())
    pages = pool.alloc(2)
    randomise(pool)
    pool.free(pages)
    before = contents(pool)
    again = pool.alloc(6)[-2:]
    assert sorted(again) == sorted(pages)
    assert all(not data.any() for data in contents(pool).values())
    assert all(data.any() for data in before.values())


def test_quant_method_is_forwarded() -> None:
    method = object()
    pool = make_pool(quant_method=method)
    assert pool.quant_method is method and pool.main.quant_method is method and pool.index.quant_method is None


def test_scales() -> None:
    pool = make_pool(kv_cache_dtype="fp8")
    tensor = torch.tensor([0.5], device=DEVICE)
    pool.set_scales(1, k_scale=2.0, index_k_scale=tensor)
    cache = pool.layer(1)
    assert (cache.k_scale, cache.v_scale) == (2.0, None) and cache.index_k_scale is tensor
    assert pool.layer(0).k_scale is None
    with pytest.raises(ValueError, match=r"cache\.v_scale: expected a finite number above 0"):
        pool.set_scales(1, v_scale=0.0)
    with pytest.raises(ValueError, match="index_k_scale: expected None for dense layer 0"):
        pool.set_scales(0, index_k_scale=1.0)
    assert pool.layer(1) is cache


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_tokens": 8}, ValueError, "expected one of them, got num_pages and num_tokens"),
        ({"num_pages": None}, ValueError, "expected one of them, got none"),
        ({"num_pages": 0}, ValueError, "num_pages: expected an int of at least 1"),
        ({"page_size": 24}, ValueError, "page_size: expected a divisor of config.block_size 16, got 24"),
        ({"index_cache_dtype": "fp8_e5m2"}, ValueError, "index_cache_dtype: expected one of auto, bf16, fp16, fp32, fp8_e4m3"),
        ({"kv_cache_dtype": "int8"}, ValueError, "kv_cache_dtype: expected one of"),
        ({"dtype": "fp8"}, ValueError, "dtype: expected one of bf16, fp16, fp32"),
        ({"layout": "HDN"}, ValueError, "layout: expected HND or NHD"),
        ({"layers": [1, 0]}, ValueError, "layers: expected ascending layer ids"),
        ({"layers": [4]}, ValueError, r"layers\[0\]: expected an int from 0 to 3, got 4"),
        ({"backend": "cuda"}, ValueError, "backend: expected one of auto, triton, plain"),
    ],
)
def test_refused_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_pool(**options)


def test_refused_rows() -> None:
    pool = make_pool(kv_cache_dtype="fp8_e5m2")
    k, v, index_k = values(2)
    slots = torch.tensor([0, 1], device=DEVICE)
    with pytest.raises(ValueError, match="layer: expected a sparse layer, one of 1, 3, got dense layer 0"):
        pool.set_index_k(0, slots, index_k)
    with pytest.raises(ValueError, match="v: expected shape"):
        pool.set_kv(0, slots, k, v[:1])
    with pytest.raises(TypeError, match=r"k: expected .* got torch.float8_e4m3fn"):
        pool.set_kv(0, slots, saturating_cast(k, torch.float8_e4m3fn), v)
    with pytest.raises(TypeError, match=r"slots: expected torch\.int32 or torch\.int64"):
        pool.set_kv(0, slots.float(), k, v)
    with pytest.raises(ValueError, match="index_k: expected 2 rows, as k, got 1"):
        pool.set(1, slots, k, v, index_k[:1], slots[:1])
    with pytest.raises(ValueError, match=r"target\[0\]: expected an int from 0 to 5, got 6"):
        pool.copy_pages([0], [6])
    with pytest.raises(ValueError, match="target: expected 1 page ids"):
        pool.copy_pages([0], [1, 2])
    with pytest.raises(NotImplementedError, match=r"k: expected no gradients.* torch\.no_grad"):
        pool.set_kv(0, slots, k.clone().requires_grad_(), v)
    with pytest.raises(ValueError, match="expected a buffer of its own, got one that overlaps k"):
        own = make_pool(dtype="bf16")
        own.set_kv(0, slots, own.layer(0).key_value()[0][0].transpose(0, 1)[:2], v)


def test_a_repeated_slot_is_named_when_values_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool()
    k, v, index_k = values(3)
    slots, index_slots = (torch.tensor(ids, device=DEVICE) for ids in ([-1, -1, 5], [4, 7, 4]))
    monkeypatch.setenv("M3ATTN_CHECK", "1")
    with pytest.raises(ValueError, match="index_slots: expected each slot once, got 4 at index 2"):
        pool.set(1, slots, k, v, index_k, index_slots)


@pytest.mark.parametrize(("packed", "layout"), [(True, "HND"), (True, "NHD"), (False, "HND")])
def test_stages_read_what_a_pool_holds(packed: bool, layout: str) -> None:
    """The sparse path over shuffled pages of a pool gives what it gives over plain tensors."""
    tokens, generator = 170, torch.Generator().manual_seed(0)
    config = M3Config(num_q_heads=4, num_kv_heads=2, num_index_heads=2, head_dim=64, index_dim=64, block_size=32, sparse_layers=(True, True))
    pool = PagedKVPool(config, num_pages=12, page_size=16, device=DEVICE, packed=packed, layout=layout)
    randomise(pool)
    k, v, q = (torch.randn(tokens, heads, 64, generator=generator).to(DEVICE, torch.bfloat16) for heads in (2, 2, 4))
    index_k, index_q = (torch.randn(tokens, *heads, 64, generator=generator).to(DEVICE, torch.bfloat16) for heads in ((), (2,)))
    pages = torch.tensor(pool.alloc(12)[::-1][: pool.pages_for(tokens)], dtype=torch.int32, device=DEVICE)
    positions = torch.arange(tokens, device=DEVICE)
    pool.set(1, pages[positions // 16].long() * 16 + positions % 16, k, v, index_k)

    plain, batch = m3attn.paged(k[None], v[None], index_k[None], block_size=32)
    pooled = m3attn.PagedBatch(pages[None], batch.seq_lens, batch.cu_seqlens_q, tokens, tokens, page_size=16, block_size=32)
    results = []
    for cache, step in ((plain, batch), (pool.layer(1), pooled)):
        ids = m3attn.index_topk(index_q, cache, step, topk=2)
        results.append((ids, m3attn.sparse_attention(q, cache, ids, step)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.gpu
@needs_gpu
def test_set_under_a_graph_follows_the_slots() -> None:
    """Captured once without a sync, replayed with other slots and values, equal to an eager call."""
    pool, eager = make_pool(kv_cache_dtype="fp8"), make_pool(kv_cache_dtype="fp8")
    for p in (pool, eager):
        randomise(p)
        p.set_scales(1, k_scale=torch.tensor([0.5], device=DEVICE))
    k, v, index_k = (x.contiguous() for x in values(4))
    slots = torch.tensor([0, 1, 2, -1], device=DEVICE)
    make_pool(kv_cache_dtype="fp8").set(1, slots, k, v, index_k)
    pool.set(1, slots, k, v, index_k)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pool.set(1, slots, k, v, index_k)
    randomise(pool)
    slots.copy_(torch.tensor([40, 99, -5, 8], device=DEVICE))
    graph.replay()
    eager.set(1, slots, k, v, index_k)
    assert same(contents(pool), contents(eager))


@pytest.mark.gpu
@needs_gpu
def test_device_page_ids_out_of_range_copy_nothing() -> None:
    pool = make_pool()
    randomise(pool)
    before = contents(pool)
    pool.copy_pages(torch.tensor([0, 6, -1, 2], device=DEVICE), torch.tensor([9, 1, 1, -4], device=DEVICE))
    assert same(before, contents(pool))


@pytest.mark.gpu
@needs_gpu
def test_a_pool_of_four_gib_is_written_at_its_end() -> None:
    pages = (1 << 32) // (2 * HEADS * PAGE_SIZE * DIM * 2) + 8
    pool = PagedKVPool(CONFIG, num_pages=pages, page_size=PAGE_SIZE, layers=[0], device=DEVICE)
    k, v, _ = values(2)
    slots = torch.tensor([0, pool.num_tokens - 1], device=DEVICE)
    pool.set_kv(0, slots, k, v)
    key, value = pool.layer(0).key_value()
    assert torch.equal(key[-1, :, -1].nan_to_num(), k[1].nan_to_num()) and torch.equal(value[-1, :, -1].nan_to_num(), v[1].nan_to_num())
    pool.copy_pages([pages - 1], [pages - 2])
    assert torch.equal(key[-2, :, -1].nan_to_num(), k[1].nan_to_num())
