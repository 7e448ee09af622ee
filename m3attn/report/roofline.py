"""The roofline as SVG: what memory and arithmetic allow, and where each measurement lies under it. Both axes are logarithmic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from m3attn.demo.record import si
from m3attn.report.runs import Point, Roof

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 76, 20, 16, 48
MAX_LABELS = 8
LETTER, LINE = 6.7, 13
"""Pixels of a label: a letter's width, about, and from one line to the next."""
NUM_COLOURS = 6


class Axis:
    """A logarithmic axis: `place(value)` in pixels, `ticks` at powers of ten."""

    def __init__(self, low: float, high: float, first: float, last: float) -> None:
        self.low, self.high = math.floor(math.log10(low)), math.ceil(math.log10(high))
        if self.low == self.high:
            self.high += 1
        self.first, self.last = first, last

    def place(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return self.first + share * (self.last - self.first)

    @property
    def ticks(self) -> list[float]:
        step = max(1, (self.high - self.low) // 6)
        return [10.0**power for power in range(self.low, self.high + 1, step)]


def number(value: float) -> str:
    """`0.01`, `30`, `1,000`."""
    return f"{value:,.0f}" if value >= 1 else f"{value:.10f}".rstrip("0").rstrip(".")


def rate(tflops: float) -> str:
    """Operations a second: `1.54 P`, `700 T`, `26.3 G`."""
    return f"{tflops / 1000:.3g} P" if tflops >= 1000 else si(1e12 * tflops).strip()


class Labels:
    """Names beside circles, each on the first free line at its circle's height or below; circles come from the top down."""

    def __init__(self) -> None:
        self.taken: list[tuple[float, float, float]] = []

    def place(self, name: str, cx: float, cy: float) -> str:
        """A `text` element to the right of a circle, or to its left in the right half of the picture."""
        ends = cx > WIDTH / 2
        edge, width = cx - 9 if ends else cx + 9, LETTER * len(name)
        left, right = (edge - width, edge) if ends else (edge, edge + width)
        y = cy + 4
        while lines := [line for begin, end, line in self.taken if left < end and begin < right and abs(y - line) < LINE]:
            y = max(lines) + LINE
        self.taken.append((left, right, y))
        return f'<text class="label" x="{edge:.1f}" y="{y:.1f}" text-anchor="{"end" if ends else "start"}">{escape(name)}</text>'


def draw(roof: Roof, points: Sequence[Point]) -> str:
    """An `svg` element. Points are circles with their figures as a title, and labelled where there are few."""
    highest = max(peak for _, peak in roof.peaks)
    ridge = highest / roof.copy_tbps
    intensities = [p.intensity for p in points]
    x = Axis(min([*intensities, ridge / 100]), max([*intensities, ridge * 10]), LEFT, WIDTH - RIGHT)
    lowest_roof = roof.copy_tbps * 10.0**x.low
    y = Axis(min([p.tflops for p in points] + [lowest_roof]), highest * 1.5, HEIGHT - BOTTOM, TOP)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Roofline: {len(points)} measurements under the ceilings">']
    for tick in x.ticks:
        parts.append(f'<line class="grid" x1="{x.place(tick):.1f}" x2="{x.place(tick):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{x.place(tick):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{number(tick)}</text>')
    for tick in y.ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y.place(tick):.1f}" y2="{y.place(tick):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y.place(tick) + 4:.1f}" text-anchor="end">{rate(tick)}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">operations a byte</text>')
    parts.append(f'<text transform="translate(16 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">operations a second</text>')
    for name, peak in roof.peaks:
        corner = peak / roof.copy_tbps
        corners = [(10.0**x.low, lowest_roof), (corner, peak), (10.0**x.high, peak)]
        path = " ".join(f"{x.place(a):.1f},{y.place(b):.1f}" for a, b in corners)
        parts.append(f'<polyline class="roof" points="{path}"/>')
        label = f"{name} {rate(peak)}FLOP/s"
        parts.append(f'<text class="label" x="{WIDTH - RIGHT - 4}" y="{y.place(peak) - 6:.1f}" text-anchor="end">{escape(label)}</text>')
    slope = 10.0 ** (x.low + 0.1 * (x.high - x.low))
    label = f"copy {1000 * roof.copy_tbps:.3g} GB/s" if roof.copy_tbps < 1 else f"copy {roof.copy_tbps:.3g} TB/s"
    parts.append(f'<text class="label" x="{x.place(slope) + 8:.1f}" y="{y.place(roof.copy_tbps * slope) + 14:.1f}">{label}</text>')
    series = list(dict.fromkeys(point.series for point in points))
    labels = Labels()
    for point in sorted(points, key=lambda p: -p.tflops):
        colour = series.index(point.series) % NUM_COLOURS
        figures = f"{point.name}, {point.series}: {rate(point.tflops)}FLOP/s at {point.intensity:.3g} operations a byte"
        cx, cy = x.place(point.intensity), y.place(point.tflops)
        parts.append(f'<circle class="c{colour}" cx="{cx:.1f}" cy="{cy:.1f}" r="5"><title>{escape(figures)}</title></circle>')
        if len(points) <= MAX_LABELS:
            parts.append(labels.place(point.name, cx, cy))
    parts.append("</svg>")
    keys = "".join(f'<li><span class="key b{i % NUM_COLOURS}"></span>{escape(name)}</li>' for i, name in enumerate(series))
    return "\n".join(parts) + f'\n<ul class="legend">{keys}</ul>'
