"""What sums of e4m3 products lose on the tensor cores at hand: `python -m m3attn.bench.e4m3` prints JSON rows.

Each row is the largest error of a [rows, dim] x [dim, 128] product against fp64 as a fraction of sum |a||b|, in log2, and the mean signed error.
"""

from __future__ import annotations

import json

import torch
import triton
import triton.language as tl

from m3attn.dtypes import E4M3
from m3attn.triton_kernels.launch import launch
from m3attn.triton_kernels.primitives import dot

NUM_PRODUCTS = 256
COLUMNS = 128


@triton.jit
def product_kernel(a_ptr, b_ptr, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr):
    i = tl.program_id(0)
    rows, columns, dims = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, DIM)
    a = tl.load(a_ptr + (i * ROWS + rows[:, None]) * DIM + dims[None, :])  # [ROWS, DIM]
    b = tl.load(b_ptr + (i * COLUMNS + columns[:, None]) * DIM + dims[None, :])  # [COLUMNS, DIM]
    tl.store(out_ptr + (i * ROWS + rows[:, None]) * COLUMNS + columns[None, :], dot(a, tl.trans(b)))


def operands(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """e4m3 operands: `normal`, `positive`, or with sizes spread over 12 (`lognormal`) or 18 (`wide`) powers of two."""
    device = generator.device
    if kind == "positive":
        return (torch.rand(shape, device=device, generator=generator) + 0.5).to(E4M3)
    x = torch.randn(shape, device=device, generator=generator)
    if kind != "normal":
        low, high = (-6, 7) if kind == "lognormal" else (-9, 9)
        x = x * torch.exp2(torch.randint(low, high, shape, device=device, generator=generator).float())
    return x.clamp(-448, 448).to(E4M3)


def measure(device: torch.device) -> list[dict[str, object]]:
    generator = torch.Generator(device).manual_seed(0)
    found: list[dict[str, object]] = []
    for rows in (16, 64, 128):
        for dim in (64, 128):
            for kind in ("normal", "lognormal", "positive", "wide"):
                a = operands(kind, (NUM_PRODUCTS, rows, dim), generator)
                b = operands(kind, (NUM_PRODUCTS, COLUMNS, dim), generator)
                out = torch.empty(NUM_PRODUCTS, rows, COLUMNS, device=device)
                launch(product_kernel, (NUM_PRODUCTS,), a, b, out, device=device, num_warps=4, num_stages=1, ROWS=rows, COLUMNS=COLUMNS, DIM=dim)
                x, y = a.double(), b.double().transpose(1, 2)
                error, size = out.double() - x @ y, x.abs() @ y.abs()
                largest = float((error.abs() / size).max())
                log2 = float(torch.tensor(largest).log2()) if largest else None
                found.append({"rows": rows, "dim": dim, "operands": kind, "log2_error": log2, "bias": float((error / size).mean())})
    return found


if __name__ == "__main__":
    print(json.dumps(measure(torch.device("cuda" if torch.cuda.is_available() else "cpu")), indent=1))
