"""The selection of rows that registers hold: every kind of score, lengths about what lanes and code end at, and which way decides what."""

import random
from collections.abc import Callable

import pytest
import torch
from needed import need

need("nvidia-cutlass-dsl", "apache-tvm-ffi")

import ptxsim
from recorded import recorded
from simulator import Replaced, simulated

from m3attn.batch import PagedBatch
from m3attn.calls import SelectBlocksCall
from m3attn.dsl_kernels import select_blocks as kernel
from m3attn.dsl_kernels.select_blocks import lanes_of_row, select_blocks
from m3attn.reference.index import select_blocks as reference

NAN, INFINITY = float("nan"), float("inf")
SHARED = [(16, 4), (16, 8), (16, 16), (16, 32), (32, 4), (32, 16), (64, 8), (64, 32)]
"""K and the lanes of a row."""

Score = Callable[[torch.Generator, int, int, int], torch.Tensor]
"""(generator, blocks, K, lanes of a row) -> a row."""


def normal(g: torch.Generator, n: int, *_: int) -> torch.Tensor:
    return torch.randn(n, generator=g)


def of_bits(low: int, high: int, sign: float = 1.0) -> Score:
    """Neighbouring numbers, some of them equal."""
    return lambda g, n, *_: sign * torch.randint(low - n, high + n, (n,), generator=g).to(torch.int32).view(torch.float32)


def some(value: float, share: float) -> Score:
    return lambda g, n, *_: torch.where(torch.rand(n, generator=g) < share, value, normal(g, n))


def few_numbers(g: torch.Generator, n: int, topk: int, *_: int) -> torch.Tensor:
    """One fewer than are wanted, and NaN."""
    row = torch.full((n,), NAN)
    row[torch.randperm(n, generator=g)[: topk - 1]] = normal(g, min(topk - 1, n))
    return row


def in_one_lane(g: torch.Generator, n: int, _: int, lanes: int) -> torch.Tensor:
    """More of the best than a lane keeps."""
    lane = int(torch.randint(lanes, (), generator=g))
    return normal(g, n) + 10.0 * (torch.arange(n) // 4 % lanes == lane)


def in_one_column(g: torch.Generator, n: int, _: int, lanes: int) -> torch.Tensor:
    """The same of one place in a lane's groups of four, and its neighbours in other lanes."""
    place = int(torch.randint(4 * lanes, (), generator=g))
    return normal(g, n) + 10.0 * (torch.arange(n) % (4 * lanes) == place) + 5.0 * (torch.arange(n) % 4 == place % 4)


def cluster(g: torch.Generator, n: int, *_: int) -> torch.Tensor:
    begin, length = int(torch.randint(n, (), generator=g)), int(torch.randint(1, 40, (), generator=g))
    return normal(g, n) + 10.0 * ((torch.arange(n) >= begin) & (torch.arange(n) < begin + length))


def tiny_and_low(g: torch.Generator, n: int, topk: int, *_: int) -> torch.Tensor:
    """The best are so near to 0 that scaling by their size goes wrong, in a way that takes the K lowest for the best; none is forced."""
    row, columns = torch.full((n,), -1.0), 2 + torch.randperm(n - 5, generator=g)
    row[columns[: 2 * topk]] = 2.0**-110 * (1 + torch.rand(2 * topk, generator=g))
    row[columns[2 * topk : 3 * topk]] = -3e38
    return row


DECIDED: dict[str, Score] = {
    "normal": normal,
    "negative": lambda g, n, *_: -normal(g, n).abs() - 0.01,
    "few values": lambda g, n, *_: (normal(g, n) * 2).round() + 20,
    "ties now and then": lambda g, n, *_: (normal(g, n) * 12).round() / 12 + 20,
    "constant": lambda g, n, *_: torch.full((n,), 1.5),
    "constant and negative": lambda g, n, *_: torch.full((n,), -1.5),
    "one ulp about 1": of_bits(0x3F800000, 0x3F800000),
    "one ulp about -1": of_bits(0x3F800000, 0x3F800000, -1.0),
    "one ulp about 2^-100": of_bits(0x0D800000 + 1025, 0x0D800000 + 1025),
    "huge": lambda g, n, *_: (normal(g, n) * 1e38).clamp(-3.4028234e38, 3.4028234e38),
    "lowest": lambda g, n, *_: torch.where(torch.rand(n, generator=g) < 0.95, -3.4028234663852886e38, normal(g, n)),
    "powers of two": lambda g, n, *_: normal(g, n).sign() * 2.0 ** torch.randint(-20, 20, (n,), generator=g).float(),
    "rising": lambda g, n, *_: torch.arange(n) - 7.3,
    "falling": lambda g, n, *_: 1100.0 - torch.arange(n),
    "a few infinite": lambda g, n, *_: torch.cat([torch.full((3,), INFINITY), normal(g, n - 3)])[torch.randperm(n, generator=g)],
}
"""What the held way decides where no lane has more of the best than it keeps, as in the rows that are drawn here."""

LEFT: dict[str, Score] = {
    "zeros of both signs": lambda g, n, *_: torch.where(normal(g, n) > 0, 0.0, -0.0),
    "denormal": of_bits(4000, 8000),
    "tiny": lambda g, n, *_: normal(g, n) * 2.0**-110,
    "tiny and low": tiny_and_low,
    "NaN": lambda g, n, *_: torch.full((n,), NAN),
    "few numbers": few_numbers,
    "-inf": some(-INFINITY, 0.97),
    "+inf": some(INFINITY, 0.9),
}
"""What the general way decides."""

MIXED: dict[str, Score] = {
    "relu": lambda g, n, *_: normal(g, n).relu(),
    "some NaN": some(NAN, 0.2),
    "a little NaN": some(NAN, 0.02),
    "NaN of the other sign": some(torch.tensor(-1, dtype=torch.int32).view(torch.float32).item(), 0.3),
    "some infinite": some(INFINITY, 0.08),
    "-inf and NaN": lambda g, n, *_: torch.where(torch.rand(n, generator=g) < 0.5, NAN, some(-INFINITY, 0.8)(g, n, 0, 0)),
    "in one lane": in_one_lane,
    "in one column": in_one_column,
    "cluster": cluster,
}
"""What either does, by chance."""

KINDS = {**DECIDED, **LEFT, **MIXED}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def select(
    scores: torch.Tensor,
    lengths: list[int],
    topk: int = 16,
    init_blocks: int = 0,
    local_blocks: int = 1,
    *,
    out: torch.Tensor | None = None,
    edit: Callable[[str], str] | None = None,
) -> None:
    """A row a request, of `lengths` blocks: must be the reference's."""
    heads, rows, blocks = scores.shape
    batch = PagedBatch.from_lengths([1] * rows, [128 * length for length in lengths], torch.zeros(rows, blocks, dtype=torch.int32))
    out = torch.full((heads, rows, topk), 2**30, dtype=torch.int32) if out is None else out
    with simulated("random", edit=edit):
        select_blocks(SelectBlocksCall(scores, batch, topk, init_blocks, local_blocks, out))
    expected = reference(scores, batch, topk=topk, init_blocks=init_blocks, local_blocks=local_blocks)
    wrong = (out != expected).any(-1).any(0).nonzero().flatten().tolist()
    assert not wrong, f"rows {wrong}"


@pytest.fixture
def share(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda lanes: monkeypatch.setattr(kernel, "lanes_override", lanes)


@pytest.mark.parametrize(("topk", "lanes"), SHARED)
def test_every_kind_of_score(topk: int, lanes: int, share: Callable[[int], None]) -> None:
    """Rows of a kind share warps, then rows of all kinds: those that the held way leaves take the other rows of their warp along."""
    share(lanes)
    g, blocks = generator(lanes + topk), 32 * lanes
    kinds = [kind for kind in KINDS for _ in range(4)]
    lengths = [blocks if i % 4 < 2 else random.Random(i).randint(1, blocks) for i in range(len(kinds))]
    rows = torch.stack([KINDS[kind](g, blocks, topk, lanes) for kind in kinds])
    select(rows[None], lengths, topk)
    order = torch.randperm(len(kinds), generator=g)
    select(rows[order][None], [lengths[i] for i in order], topk, init_blocks=2, local_blocks=3)


def never_general() -> Replaced:
    """An end with an error for the walk of the general way that writes ids, by a constant of its packed counts, 0x05050505."""
    return Replaced(r"\band\.b32 \s*%r\d+, %r\d+, 84215045;", "trap;")


@pytest.mark.parametrize(("topk", "lanes"), SHARED)
def test_the_held_way_decides(topk: int, lanes: int, share: Callable[[int], None]) -> None:
    """Alone, also where forced blocks stand on both sides, where rows are as short as can be, and beside rows that no score decides."""
    share(lanes)
    g, blocks, trap = generator(), 32 * lanes, never_general()
    rows = torch.stack([DECIDED[kind](g, blocks, topk, lanes) for kind in DECIDED for _ in range(2)])
    lengths = [blocks - i % 3 if i % 2 else max(topk + 1, blocks // 2) for i in range(len(rows) - 1)] + [3]
    select(rows[None], lengths, topk, init_blocks=1, local_blocks=2, edit=trap)
    assert trap.found_all


@pytest.mark.parametrize("kind", LEFT)
def test_the_general_way_decides_the_rest(kind: str, share: Callable[[int], None]) -> None:
    share(8)
    row = LEFT[kind](generator(), 200, 16, 8)
    select(row[None, None], [200])
    with pytest.raises(ptxsim.SimError, match="trap"):
        select(row[None, None], [200], edit=never_general())


@pytest.mark.parametrize("lanes", [8, 16, 32])
def test_a_lane_with_more_of_the_best_than_it_keeps(lanes: int, share: Callable[[int], None]) -> None:
    """By one: the bound is too low then, more than K reach it, and too many of them are greater."""
    share(lanes)
    keeps = 4 if lanes == 32 else 8
    rows = torch.randn(2 * lanes, 32 * lanes, generator=generator())
    for i, row in enumerate(rows):
        own = [column for column in range(32 * lanes) if column // 4 % lanes == i // 2]
        row[own[: keeps + i % 2]] += 20
        others = [column for column in range(32 * lanes) if column not in own]
        row[random.Random(i).sample(others, 17)] += 10
    for row in range(4):
        trap = never_general()
        if row % 2:
            with pytest.raises(ptxsim.SimError, match="trap"):
                select(rows[None, row : row + 1], [32 * lanes], edit=trap)
        else:
            select(rows[None, row : row + 1], [32 * lanes], edit=trap)
    select(rows[None], [32 * lanes] * len(rows))


@pytest.mark.parametrize("lanes", [4, 8, 16, 32])
def test_lengths_about_groups_and_code(lanes: int, share: Callable[[int], None]) -> None:
    """NaN behind a row's end, in the same 16 bytes too."""
    share(lanes)
    borders = [0, 16, *range(4 * lanes, 32 * lanes + 1, 4 * lanes)]
    lengths = [border + step for border in borders for step in (-5, -4, -3, -1, 0, 1, 2, 3, 4) if 1 <= border + step <= 32 * lanes]
    rows = torch.stack([KINDS[("normal", "ties now and then")[i % 2]](generator(i), 32 * lanes, 16, lanes) for i in range(len(lengths))])
    for row, length in zip(rows, lengths, strict=True):
        row[length:] = NAN
    select(rows[None], lengths, local_blocks=0)
    order = torch.randperm(len(lengths), generator=generator()).tolist()  # long and short rows in a warp
    select(rows[None, order], [lengths[i] for i in order], init_blocks=1, local_blocks=2)


@pytest.mark.parametrize(("init_blocks", "local_blocks"), [(0, 0), (0, 15), (0, 16), (15, 0), (16, 1), (5, 2), (20, 1), (40, 40), (9, 6)])
def test_forced_blocks(init_blocks: int, local_blocks: int, share: Callable[[int], None]) -> None:
    share(8)
    kinds = ["normal", "constant", "a few infinite", "+inf", "a little NaN", "cluster"] * 4
    rows = torch.stack([KINDS[kind](generator(i), 256, 16, 8) for i, kind in enumerate(kinds)])
    rows[:, :init_blocks] = NAN
    select(rows[None], [256 - i * i % 250 for i in range(len(rows))], 16, init_blocks, local_blocks)


def test_any_strides_of_scores_and_heads_of_ids(share: Callable[[int], None]) -> None:
    share(8)
    scores = torch.stack([torch.stack([KINDS[kind](generator(h), 203, 16, 8) for kind in KINDS]) for h in range(2)])
    lengths = [203 - i * 7 % 190 for i in range(len(KINDS))]
    ids = torch.full((len(KINDS) + 1, 2, 20), 2**30, dtype=torch.int32)
    unaligned = torch.nn.functional.pad(scores, (1, 4))[..., 1:204]
    apart = scores.repeat_interleave(2, 2)[..., ::2]
    block_major = scores.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    for form in (scores, unaligned, apart, block_major):
        select(form, lengths, out=ids[:-1, :, :16].transpose(0, 1))
        assert bool((ids[:, :, 16:] == 2**30).all() and (ids[-1] == 2**30).all())
        ids.fill_(2**30)


@pytest.mark.parametrize(
    ("topk", "blocks", "lanes", "stride", "held"),
    [
        (16, 128, 4, 1, True),
        (16, 129, 4, 1, False),
        (16, 256, 8, 1, True),
        (16, 257, 8, 1, False),
        (64, 512, 16, 1, True),
        (32, 1024, 32, 1, True),
        (32, 1025, 32, 1, False),
        (17, 100, 8, 1, False),
        (8, 100, 8, 1, False),
        (16, 100, 8, 2, False),
    ],
)
def test_what_is_held(topk: int, blocks: int, lanes: int, stride: int, held: bool, share: Callable[[int], None]) -> None:
    share(lanes)
    batch = PagedBatch.from_lengths([1], [128 * blocks], torch.zeros(1, blocks, dtype=torch.int32))
    out = torch.zeros(1, 1, topk * stride, dtype=torch.int32)[..., ::stride]
    with recorded() as asked:
        select_blocks(SelectBlocksCall(torch.zeros(1, 1, blocks), batch, topk, 0, 1, out))
    ((_, variant),) = asked
    assert (variant.held, variant.lanes) == (held, lanes)


@pytest.mark.parametrize("rows", [1, 4_095, 4_096, 16_383, 16_384, 1 << 20])
def test_rows_of_up_to_1024_blocks_are_held(rows: int) -> None:
    assert all(32 * lanes_of_row(rows, blocks) >= blocks for blocks in range(1, 1025))
    assert lanes_of_row(rows, 1025) == 32
