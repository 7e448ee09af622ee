"""Every notebook runs from top to bottom, and the checks of its exercises take a right answer and refuse a wrong one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))
LONGEST_CELL = 25
NEEDS = {"06_hopper_kernel": "cutlass", "08_transformers": "transformers"}

# In each notebook's own namespace: right answers, then wrong ones.
RUN = """
import runpy, sys
names = runpy.run_path(sys.argv[1], run_name="notebook")
for answers, expected in ((sys.argv[2], True), (sys.argv[3], False)):
    exec(answers, names)
    for number in range(1, 4):
        if f"check_{number}" in names:
            assert names[f"check_{number}"](names[f"exercise_{number}"]) is expected, f"exercise {number}: expected {expected}"
"""

RIGHT = {
    "01_algorithm": """
def exercise_1(topk, block_size):
    return topk * block_size
def exercise_2(row, position, init_blocks):
    own = position // BLOCK
    forced = [own, *[b for b in range(init_blocks) if b < own]][:K]
    rest = sorted((b for b in range(own) if b not in forced), key=lambda b: (-float(row[b]), b))
    chosen = sorted((forced + rest)[:K])
    return chosen + [-1] * (K - len(chosen))
def exercise_3():
    return 32768
""",
    "02_index_and_select": """
def exercise_1(rank):
    bits = torch.where(rank >= 2**31, rank - 2**31, ~rank & 0xFFFFFFFF)
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)
def exercise_2():
    return 32
def exercise_3(tile, tokens, length, block_t, block_n):
    return -(-(length - tokens + min((tile + 1) * block_t, tokens)) // block_n)
""",
    "03_sparse_attention": """
def exercise_1(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    parts = [torch.where(part == -torch.inf, 0.0, (part - lse).exp())[..., None] * out.nan_to_num() for out, part in ((out_a, lse_a), (out_b, lse_b))]
    return parts[0] + parts[1], lse
def exercise_2():
    return 64
def exercise_3(out, lse, sink_logit):
    return out * torch.sigmoid(lse - sink_logit)[..., None]
""",
    "04_fp8": """
def exercise_1():
    return 2304, 1152
def exercise_2():
    return 2.0**-9, 2.0**-17
def exercise_3(x):
    return x.float().abs().amax(dim=1).clamp(min=2.0**-100) / torch.tensor(448.0, device=x.device)
""",
    "05_change_the_library": """
def exercise_1(scores, batch, **options):
    mean = scores.masked_fill(scores.isnan(), float("-inf")).mean(dim=0, keepdim=True)
    return m3attn.select_blocks(mean, batch, **options).expand(scores.shape[0], -1, -1)
def exercise_2(call):
    lse = torch.logaddexp(call.lse_a, call.lse_b)
    out = 0
    for part, part_lse in ((call.out_a, call.lse_a), (call.out_b, call.lse_b)):
        there = part_lse > -torch.inf
        out = out + torch.where(there, (part_lse - lse).exp(), 0.0)[..., None] * torch.where(there[..., None], part.float(), 0.0)
    call.out.copy_(out)
    call.lse.copy_(lse)
""",
    "06_hopper_kernel": """
def exercise_1():
    return (227 * 1024 - 2 * 64 * 128 * 2) // (2 * 128 * 128 * 2)
def exercise_2(tile):
    return sum((bits & 15) > 0 for _, bits in tile), sum((bits >> 4) > 0 for _, bits in tile)
def exercise_3(n):
    return PRODUCT + SOFTMAX + (n - 1) * max(2 * PRODUCT, PRODUCT + SOFTMAX) + PRODUCT
""",
    "07_sparse_mla": """
def exercise_1(up_v, w_o):
    return torch.einsum("lhd,hdx->hlx", up_v, w_o)
def exercise_2(out_a, lse_a, out_b, lse_b):
    a, b = (torch.where(lse == torch.inf, -torch.inf, lse) for lse in (lse_a, lse_b))
    lse = torch.logaddexp(a, b)
    out = sum(torch.where(part > -torch.inf, (part - lse).exp(), 0.0)[..., None] * out for out, part in ((out_a, a), (out_b, b)))
    return out, torch.where(lse == -torch.inf, torch.inf, lse)
def exercise_3():
    return 106
""",
    "08_transformers": """
def exercise_1(block_indices):
    last = torch.iinfo(torch.int32).max
    ids = torch.where(block_indices < 0, last, block_indices).sort(dim=-1).values
    return torch.where(ids == last, -1, ids).transpose(0, 1).flatten(1, 2).int()
def exercise_2():
    return 60 * 2 * 4 * 128 * 2 + 57 * 128 * 2
def exercise_3():
    return 72 * 1024
""",
}
WRONG = {
    "01_algorithm": """
def exercise_1(topk, block_size):
    return topk * block_size - 1
def exercise_2(row, position, init_blocks):
    return select(row, position)
def exercise_3():
    return 16384
""",
    "02_index_and_select": """
def exercise_1(rank):
    return rank.float()
def exercise_2():
    return 31
def exercise_3(tile, tokens, length, block_t, block_n):
    return -(-length // block_n)
""",
    "03_sparse_attention": """
def exercise_1(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    return (lse_a - lse).exp()[..., None] * out_a + (lse_b - lse).exp()[..., None] * out_b, lse
def exercise_2():
    return 512
def exercise_3(out, lse, sink_logit):
    return out
""",
    "04_fp8": """
def exercise_1():
    return 2048, 1024
def exercise_2():
    return 2.0**-6, 2.0**-14
def exercise_3(x):
    return x.float().abs().amax(dim=1) / 448
""",
    "05_change_the_library": """
def exercise_1(scores, batch, **options):
    return m3attn.select_blocks(scores[:1], batch, **options).expand(scores.shape[0], -1, -1)
def exercise_2(call):
    call.out.copy_((call.out_a + call.out_b) / 2)
    call.lse.copy_(torch.logaddexp(call.lse_a, call.lse_b))
""",
    "06_hopper_kernel": """
def exercise_1():
    return 4
def exercise_2(tile):
    return len(tile), len(tile)
def exercise_3(n):
    return n * (2 * PRODUCT + SOFTMAX)
""",
    "07_sparse_mla": """
def exercise_1(up_v, w_o):
    return torch.einsum("lhd,hdx->hlx", up_v, w_o) * 2
def exercise_2(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    return (lse_a - lse).exp()[..., None] * out_a + (lse_b - lse).exp()[..., None] * out_b, lse
def exercise_3():
    return 128
""",
    "08_transformers": """
def exercise_1(block_indices):
    return block_indices.sort(dim=-1).values.transpose(0, 1).flatten(1, 2).int()
def exercise_2():
    return 60 * 2 * 4 * 128 * 2 + 60 * 128 * 2
def exercise_3():
    return 71 * 1024
""",
}


def cells(path: Path) -> list[tuple[str, list[str]]]:
    """(kind, lines) of each cell of a notebook in the percent format."""
    found: list[tuple[str, list[str]]] = []
    for line in path.read_text().splitlines():
        if line.startswith("# %%"):
            found.append(("markdown" if "[markdown]" in line else "code", []))
        elif found:
            found[-1][1].append(line)
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path) -> None:
    if path.stem in NEEDS and importlib.util.find_spec(NEEDS[path.stem]) is None:
        pytest.skip(f"needs {NEEDS[path.stem]}")
    environment = os.environ | {"MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RUN, str(path), RIGHT[path.stem], WRONG[path.stem]]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    assert done.stdout.count("not answered yet") == sum(line.startswith("def exercise_") for line in path.read_text().splitlines())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_code_cells_are_short(path: Path) -> None:
    for kind, lines in cells(path):
        code = "\n".join(lines).strip().splitlines()
        assert kind == "markdown" or len(code) <= LONGEST_CELL, f"{path.name}: a cell of {len(code)} lines begins with {code[0]!r}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_converts(path: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("jupytext") is None:
        pytest.skip("needs jupytext, from the extra `notebooks`")
    import jupytext

    notebook = jupytext.read(path)
    assert [cell.cell_type for cell in notebook.cells] == [kind for kind, _ in cells(path)]
    jupytext.write(notebook, tmp_path / "notebook.ipynb")
    again = jupytext.read(tmp_path / "notebook.ipynb")
    assert [cell.source for cell in again.cells] == [cell.source for cell in notebook.cells]
