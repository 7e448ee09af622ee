"""The model of B200 times: its arithmetic against figures worked out by hand, and the page against the arithmetic."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from m3attn.bench import b200
from m3attn.bench.inputs import MODES
from m3attn.bench.shapes import Heads, Step, step_shapes
from m3attn.bench.workloads import score_cost

PAGE = Path(__file__).parents[2] / "docs" / "b200_model.md"


def step(name: str) -> Step:
    return step_shapes(name)[0].steps[0]


def test_the_page_shows_the_model(tmp_path: Path) -> None:
    assert b200.main([str(PAGE), "--check"]) == 0
    stale = tmp_path / "page.md"
    stale.write_text(PAGE.read_text().replace("TB/s |\n", "GB/s |\n"))
    assert b200.main([str(stale), "--check"]) == 1
    assert b200.main([str(stale)]) == 0 and stale.read_text() == PAGE.read_text()


def test_rates() -> None:
    assert pytest.approx(1.856e9, rel=1e-3) == b200.CLOCK
    assert b200.B200.exponentials == pytest.approx(4.395e12, rel=1e-3)


def test_scoring_a_prefill() -> None:
    """P1: 128 tiles of 64 tokens; the i-th pair of tiles sees i blocks, from 17 on they are scored: 2 (17 + ... + 64) = 3,888 products."""
    bf16, fp8 = (b200.index_score(step("P1"), mode) for mode in ("bf16", "fp8"))
    assert bf16.flops_16 == fp8.flops_8 == 3888 * 2 * 256 * 128 * 128
    assert bf16.l2_bytes == 2 * fp8.l2_bytes == 3888 * 32_768
    assert bf16.times_us()["tensor cores"] == pytest.approx(14.5, abs=0.05)
    assert bf16.bytes - fp8.bytes == 8192 * 128 + 8192 * 4 * 128


def test_scoring_a_decode_step() -> None:
    """64 requests of 131,072 keys of 256 bytes are 2 GiB, 268 us; 1,024 blocks each cost 128 rows of products."""
    work = b200.index_score(step("B64xL131072"), "bf16")
    assert work.bytes == 2**31 + 64 * 4 * 256 + 64 * 1024 * 4 * 4
    assert work.flops_16 == 64 * 1024 * 2 * 128**3
    assert b200.bounds(work.times_us()) == "memory" and max(work.times_us().values()) == pytest.approx(269, abs=0.5)


@pytest.mark.parametrize("shape", ["P1", "P3", "B64xL131072"])
@pytest.mark.parametrize("mode", ["bf16", "fp8"])
def test_a_kernel_does_no_less_than_is_useful(shape: str, mode: str) -> None:
    inputs = SimpleNamespace(step=step(shape), heads=Heads(64, 4), mode=MODES[mode])
    useful, done = score_cost(inputs, written=False), b200.index_score(step(shape), mode)
    assert useful.flops <= done.flops_16 + done.flops_8 and useful.bytes <= done.bytes


def test_selection() -> None:
    """One token behind 131,071: 1,024 scores of 4 heads are read, 16 ids of each are written."""
    work = b200.select_blocks(step("B1xL131072"), "bf16")
    assert (work.bytes, work.l2_bytes) == (1024 * 4 * 4 + 4 * 16 * 4, 2 * 1024 * 4 * 4)


def test_sparse_prefill() -> None:
    """P1: 1,024 halves of 8 tokens for each of 4 KV heads, 26 blocks each: 106,496 pairs of products of 128 x 128 x 128."""
    bf16, fp8 = (b200.sparse_prefill(step("P1"), mode) for mode in ("bf16", "fp8"))
    assert bf16.flops_16 == 2 * fp8.flops_16 == 2 * fp8.flops_8 == 106_496 * 2 * 2 * 128**3
    assert bf16.exponentials == fp8.exponentials == 106_496 * 128 * 128
    assert b200.bounds(bf16.times_us()) == "tensor cores, exponentials" and b200.bounds(fp8.times_us()) == "exponentials"
    assert bf16.bytes == 8192 * 4 * 256 * 2 + 8192 * 64 * 128 * 4
    assert max(bf16.times_us().values()) == pytest.approx(397, abs=0.5)


def test_sparse_decode() -> None:
    """64 tokens, 4 KV heads, 16 blocks of 64 KiB: 256 MiB, and q and the output."""
    bf16, fp8 = (b200.sparse_decode(step("B64xL131072"), mode) for mode in ("bf16", "fp8"))
    assert bf16.bytes == 2**28 + 64 * 64 * 128 * 4 and fp8.bytes == 2**27 + 64 * 64 * 128 * 3
    assert b200.bounds(bf16.times_us()) == b200.bounds(fp8.times_us()) == "memory"
