"""The page of `m3attn report`: what it says, that it is whole in itself, and that it is legible in a real browser in light and dark."""

from __future__ import annotations

import io
import itertools
import json
import re
import shutil
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from PIL import Image

from m3attn.cli.main import main
from m3attn.demo.plot import chosen_blocks
from m3attn.report import page, png, roofline, runs
from m3attn.report.runs import Point, Roof, Run

ROOT = Path(__file__).resolve().parents[2]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VOID = {"meta", "link", "img", "br", "line", "polyline"}


class Tree(HTMLParser):
    """Tags that open and close in order, every attribute that could load something, and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.loads: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        self.loads += [value for name, value in attributes if name in ("src", "href", "data", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def tree(path: Path) -> Tree:
    parsed = Tree()
    parsed.feed(path.read_text())
    assert not parsed.open
    return parsed


@pytest.fixture(scope="module")
def demo_page(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    run = folder / "run.json"
    assert main(["demo", "--impl", "reference", "--heads", "4/2", "--tokens", "400", "--json", str(run)]) == 0
    out = folder / "demo.html"
    assert main(["report", str(out), str(run)]) == 0
    return out


@pytest.fixture(scope="module")
def bench_page(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("report") / "bench.html"
    files = sorted((ROOT / "results").glob("*-index_topk.json")) + sorted((ROOT / "results").glob("*-quantize_fp8.json"))
    assert main(["report", str(out), *map(str, files)]) == 0
    return out


def test_a_demos_page_has_every_part(demo_page):
    found = tree(demo_page)
    words = " ".join(found.words)
    for part in (
        "Demo on",
        "dense_attention",
        "index_topk",
        "sparse_attention",
        "Under the roofline",
        "random weights",
        "KV group 1",
        "query at byte",
    ):
        assert part in words, part
    assert found.seen.count("svg") == 1 and found.seen.count("img") == 2 and found.seen.count("circle") in (6, 9)


def test_a_bench_page_shows_every_row(bench_page):
    rows = [row for name in ("index_topk", "quantize_fp8") for row in json.loads((ROOT / "results" / f"nvidia-h200-{name}.json").read_text())]
    found = tree(bench_page)
    assert found.seen.count("tr") == len(rows) + 2 and found.seen.count("circle") == sum(bool(row["tflops"] and row["tbps"]) for row in rows)
    assert "index_topk on NVIDIA H200" in found.words and rows[0]["commit"][:12] in found.words


@pytest.mark.parametrize("which", ["demo_page", "bench_page"])
def test_a_page_loads_nothing(which, request):
    path = request.getfixturevalue(which)
    assert all(value.startswith("data:") for value in tree(path).loads)
    assert not re.findall(r"https?:|@import|url\(|<script", path.read_text())


def test_text_is_escaped():
    run = runs.Run("<b>&", (("a<", "b>"),), ("time a call",), ((("<i>",), 0.5),), ("1 < 2",), None, (), passages=("</pre>",))
    text = page.render([run])
    assert "<b>&" not in text and "<i>" not in text and "&lt;/pre&gt;" in text and "1 &lt; 2" in text


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("colours", [page.LIGHT, page.DARK], ids=["light", "dark"])
def test_contrast(colours):
    """At least 4.5 for text on what it stands on, 3 for marks: the limits of WCAG AA."""

    def contrast(a: str, b: str) -> float:
        high, low = sorted((luminance(a), luminance(b)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    for text, ground in (("text", "page"), ("soft", "page"), ("text", "panel"), ("text", "bar")):
        assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for number in range(roofline.NUM_COLOURS):
        assert contrast(colours[f"c{number}"], colours["page"]) >= 3
    assert contrast("#{:02x}{:02x}{:02x}".format(*png.COLOUR), colours["panel"]) >= 3
    assert set(page.LIGHT) == set(page.DARK)


def test_the_picture_is_the_selection():
    ids = torch.tensor([[[0, -1], [0, 1], [0, 2], [1, 3]]], dtype=torch.int32)
    shares = (255 * chosen_blocks(ids, 4, 2)[0]).round().to(torch.uint8)
    data = png.encode(bytes(shares.flatten().tolist()), 2, 4)
    picture = Image.open(io.BytesIO(data)).convert("RGBA")
    assert picture.size == (4, 2) and [picture.getpixel((x, y))[3] for y in range(2) for x in range(4)] == [255, 128, 0, 0, 128, 128, 128, 128]
    assert picture.getpixel((0, 0))[:3] == png.COLOUR and zlib.crc32(b"IEND") == int.from_bytes(data[-4:], "big")
    with pytest.raises(ValueError, match="shares: expected 8 bytes, got 3"):
        png.encode(b"abc", 2, 4)


def test_points_lie_under_the_roof():
    """A point at the ridge with the peak's rate lies on the corner of the roof; half the rate lies below it."""
    roof = Roof(4.0, (("bf16 product", 800.0),))
    drawn = roofline.draw(roof, [Point("a", "x", 200.0, 800.0), Point("b", "y", 200.0, 400.0)])
    corner = re.search(r'<polyline class="roof" points="\S+ (\S+),(\S+) \S+"', drawn)
    circles = re.findall(r'<circle class="(c\d)" cx="(\S+)" cy="(\S+)"', drawn)
    assert circles[0] == ("c0", corner[1], corner[2]) and circles[1][:2] == ("c1", corner[1]) and float(circles[1][2]) > float(corner[2])
    assert "800 TFLOP/s" in drawn and "copy 4 TB/s" in drawn


def test_labels_of_points_that_lie_together_do_not_overlap():
    points = [Point(f"point {i}", "x", 200.0 + i % 2, 400.0 + i % 3) for i in range(roofline.MAX_LABELS)]
    drawn = roofline.draw(Roof(4.0, (("bf16 product", 800.0),)), points)
    lines = sorted(float(y) for y in re.findall(r'<text class="label" x="\S+" y="(\S+)" text-anchor="\w+">point', drawn))
    assert len(lines) == len(points) and min(b - a for a, b in itertools.pairwise(lines)) >= 12


def test_a_column_that_no_line_fills_is_left_out():
    run = Run("a run", (), ("stage", "selection", "time a call"), ((("x", "", "1 us"), 0.5), (("y", "", "2 us"), 1.0)), (), None, ())
    shown = page.render([run])
    assert "selection" not in shown[shown.index("<thead>") :] and shown.count("<td>") == 2 and shown.count('<td class="bar"') == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["page.txt"], "expected an .html file, got page.txt"),
        (["/no/such/folder/page.html"], "there is no folder /no/such/folder"),
        (["page.html", "missing.json"], "there is no file missing.json"),
        (["page.html", "pyproject.toml"], "pyproject.toml: expected JSON"),
        (["page.html", "results/ceilings.json"], "expected what `m3attn demo --json` or `m3attn bench --json` writes"),
    ],
)
def test_bad_files_are_named(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[project]")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "ceilings.json").write_text('{"gpu": "x"}')
    assert main(["report", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert main(["demo", "--json", "/no/such/folder/run.json"]) == 2 and "--json: there is no folder" in capsys.readouterr().err


def screenshot(path: Path, out: Path, scheme: str, width: int) -> Image.Image:
    """What Chromium shows of the page to a reader of light or dark pages."""
    command = [
        BROWSER,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}",
        f"--window-size={width},1600",
        f"--user-data-dir={out.parent / 'profile'}",
        f"--screenshot={out}",
        path.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert out.is_file(), done.stderr
    return Image.open(out).convert("RGB")


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium (on Debian: apt-get install chromium)")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_page(demo_page, tmp_path, scheme):
    colours = page.DARK if scheme == "dark" else page.LIGHT
    picture = screenshot(demo_page, tmp_path / "page.png", scheme, 1100)
    counts = {colour: count for count, colour in picture.getcolors(picture.width * picture.height)}

    def seen(name: str) -> int:
        return counts.get(tuple(int(colours[name][i : i + 2], 16) for i in (1, 3, 5)), 0)

    pixels = picture.width * picture.height
    assert seen("page") > pixels / 2, "the page's ground"
    assert seen("text") > 500 and seen("soft") > 500, "letters"
    assert seen("bar") > 1000 and seen("panel") > 1000 and seen("c0") > 100, "bars, the map's ground, points"
    assert counts.get(png.COLOUR, 0) > 5000, "chosen blocks"
