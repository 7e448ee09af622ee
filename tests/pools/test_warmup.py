"""`warmup` of pools compiles what their calls need and writes nothing; `M3ATTN_LOG_CALLS=1` writes a line a launch."""

from __future__ import annotations

import pytest
import torch
from pool_cases import CONFIG, DEVICE, contents, make_pool, randomise, same

import m3attn
from m3attn import HostKVPool, LatentKVPool, PagedKVPool
from m3attn.testing.matrix import gpu_only

FORMATS = [{}, {"packed": False}, {"kv_cache_dtype": "fp8", "layout": "NHD"}]


def rows(tokens: int) -> tuple[torch.Tensor, ...]:
    slots = torch.arange(tokens, device=DEVICE)
    k, v = (torch.randn(tokens, CONFIG.num_kv_heads, CONFIG.head_dim, device=DEVICE).to(torch.bfloat16) for _ in range(2))
    return slots, k, v, torch.randn(tokens, CONFIG.index_dim, device=DEVICE).to(torch.bfloat16)


def use(pool: PagedKVPool, host: HostKVPool) -> None:
    """Every call of the two that runs a kernel."""
    for tokens in (1, 3, 32):
        slots, k, v, index_k = rows(tokens)
        for layer in pool.layers:
            pool.set_kv(layer, slots, k, v)
        for layer in pool.sparse_layers:
            pool.set_index_k(layer, slots, index_k)
            pool.set(layer, slots, k, v, index_k)
    pool.copy_pages([0, 1], [4, 5])
    host.backup([0, 1, 2], [3, 0, 1], per_layer=True).wait()
    host.load([2, 1], [0, 2]).synchronize()


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_warmup_writes_nothing(formats: dict, layout: str) -> None:
    pool = make_pool(backend="triton", **formats)
    host = HostKVPool(pool, num_pages=3, layout=layout, backend="triton")
    randomise(pool)
    host.backup([0, 1, 2], [3, 4, 5]).synchronize()
    before, pages = contents(pool), [host.view("index_k", page).clone() for page in range(3)]
    m3attn.warmup((4, 2, 2), phases=(), device=DEVICE, pools=[pool, host])
    host.synchronize()
    assert same(contents(pool), before)
    assert all(torch.equal(host.view("index_k", page).view(torch.uint8), kept.view(torch.uint8)) for page, kept in enumerate(pages))


@pytest.mark.parametrize("layout", [pytest.param(name, marks=gpu_only) for name in ("layer_first", "page_first")])
@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_warmup_compiles_all_that_is_used(formats: dict, layout: str) -> None:
    from triton import knobs

    pool = make_pool(**formats)
    pool.set_scales(1, k_scale=torch.ones(1, device=DEVICE), v_scale=0.5)
    host = HostKVPool(pool, num_pages=3, layout=layout)
    m3attn.warmup((4, 2, 2), phases=(), pools=[pool, host])
    compiled: list[str] = []
    previous = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda **arguments: compiled.append(str(arguments.get("repr")))
    try:
        use(pool, host)
    finally:
        knobs.runtime.jit_post_compile_hook = previous
    assert not compiled, compiled


def test_a_latent_pool_warms_up_and_writes_nothing() -> None:
    pool = LatentKVPool(2, num_pages=2, page_size=8, dtype="fp8", device=DEVICE, backend="triton", zero_on_alloc=True)
    pool.warmup()
    assert not pool.parts[0].storage.view(torch.uint8).any()


@pytest.mark.parametrize("backend", ["plain", "triton"])
def test_calls_are_logged(backend: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    pool = make_pool(backend=backend, kv_cache_dtype="fp8", packed=False)
    pool.set_scales(1, k_scale=2.0)
    host = HostKVPool(pool, num_pages=2, backend=backend)
    slots, k, v, index_k = rows(3)
    calls = (
        (lambda: pool.set(1, slots, k, v, index_k), ["pool_set"]),
        (lambda: pool.set_kv(0, slots, k, v), ["pool_set"]),
        (lambda: pool.copy_pages([0], [1]), ["pool_copy_pages"] * 3),
        (lambda: host.backup([0, 1], [2, 3]).synchronize(), ["host_backup"] * 3),
        (lambda: host.load([1], [0], layers=[0], per_layer=True).synchronize(), ["host_load"] * 2),
    )
    for call, _ in calls:
        call()
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("M3ATTN_LOG_CALLS", "1")
    for call, names in calls:
        call()
        lines = capfd.readouterr().err.splitlines()
        assert [line.split()[:3] for line in lines] == [["m3attn:", name, backend] for name in names]
    pool.set(1, slots, k, v, index_k)
    line = capfd.readouterr().err
    for part in (
        "k=bfloat16[3, 2, 16]/[32, 16, 1]",
        "slots=int64[3]/[1]",
        "cache.k=float8_e4m3fn[6, 2, 8, 16]",
        "k_scale=2.0",
        "index_k=bfloat16[3, 1, 16]",
    ):
        assert part in line
    assert "v_scale" not in line
