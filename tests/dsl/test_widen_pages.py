"""The widening pass of an fp8 cache, in the interpreter: every byte, pools of any layout, and nothing where nothing is asked for."""

import pytest
import torch
from needed import need

need("nvidia-cutlass-dsl", "apache-tvm-ffi")

from simulator import ORDERS, simulated

from m3attn.batch import PagedBatch
from m3attn.dsl_kernels.widen_pages import widen_pages

BLOCK, HEADS, BLOCKS = 128, 2, 3
Q_LENS, SEQ_LENS = (20, 0, 4, 17), (340, 128, 0, 192)
MARK = 7


def every_byte(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """All bit patterns, NaN and infinity among them."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) * 37 % 256).to(torch.uint8).view(dtype).view(shape)


def pools(layout: str, dtype: torch.dtype, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    pages = 9
    if layout == "packed":
        kv = every_byte((pages, BLOCK, HEADS, 2 * head_dim), dtype).transpose(1, 2)
        return kv[..., :head_dim], kv[..., head_dim:]
    if layout == "odd":
        k, v = (every_byte((pages, HEADS, BLOCK, head_dim + 1), dtype) for _ in range(2))
        return k[..., 1:], v[..., :head_dim]
    return every_byte((pages, HEADS, BLOCK, head_dim), dtype), every_byte((pages, HEADS, BLOCK, head_dim), dtype).flip(0)


@pytest.mark.parametrize(
    ("dtype", "k_dtype", "layout", "head_dim"),
    [
        (torch.float8_e4m3fn, torch.bfloat16, "separate", 128),
        (torch.float8_e4m3fn, torch.float8_e4m3fn, "packed", 128),
        (torch.float8_e5m2, torch.float16, "packed", 128),
        (torch.float8_e5m2, torch.bfloat16, "separate", 64),
        (torch.float8_e4m3fn, torch.float16, "odd", 128),
    ],
    ids=str,
)
def test_every_byte(dtype: torch.dtype, k_dtype: torch.dtype, layout: str, head_dim: int) -> None:
    k, v = pools(layout, dtype, head_dim)
    table = torch.tensor([[5, 0, 1 << 20], [3, 4, 5], [1, 1, 1], [-9, 2, 2]], dtype=torch.int32)  # pages outside the pool are read within it
    offsets = torch.tensor([0, *torch.tensor(Q_LENS).cumsum(0)], dtype=torch.int32)
    batch = PagedBatch(
        page_table=table,
        seq_lens=torch.tensor(SEQ_LENS, dtype=torch.int32),
        cu_seqlens_q=offsets,
        max_seqlen_q=20,
        max_seqlen_k=BLOCKS * BLOCK,
        page_size=BLOCK,
        block_size=BLOCK,
    )
    shape = (len(Q_LENS) * BLOCKS, HEADS, BLOCK, head_dim)
    for order in ORDERS:
        wide_k, wide_v = (torch.zeros(shape, dtype=kind).view(torch.uint8).fill_(MARK).view(kind) for kind in (k_dtype, torch.float16))
        wide_table = torch.full((len(Q_LENS), BLOCKS), -1, dtype=torch.int32)
        with simulated(order, seed=3):
            widen_pages(k, v, wide_k, wide_v, wide_table, batch)
        for request, (q_len, seq_len) in enumerate(zip(Q_LENS, SEQ_LENS, strict=True)):
            for block in range(BLOCKS):
                keys = min(max(seq_len - block * BLOCK, 0), BLOCK) if q_len else 0
                target, page = request * BLOCKS + block, int(table[request, block].clamp(0, k.shape[0] - 1))
                assert wide_table[request, block] == (target if keys else -1)
                for pool, wide in ((k, wide_k), (v, wide_v)):
                    expected = pool[page, :, :keys].float()
                    torch.testing.assert_close(wide[target, :, :keys].float(), expected, rtol=0, atol=0, equal_nan=True)
                    assert (wide[target, :, keys:].contiguous().view(torch.uint8) == (0 if keys else MARK)).all()
