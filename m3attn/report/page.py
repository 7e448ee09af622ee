"""The page: HTML with its styles and pictures inside, nothing loaded from anywhere, in the reader's light or dark colours."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from m3attn.report import png, roofline
from m3attn.report.runs import Run, SelectionMap
from m3attn.version import __version__

LIGHT = {
    "page": "#ffffff",
    "text": "#1b1f24",
    "soft": "#57606a",
    "line": "#d0d7de",
    "panel": "#f6f8fa",
    "bar": "#bfd6f6",
    "c0": "#0550ae",
    "c1": "#b35900",
    "c2": "#116329",
    "c3": "#8250df",
    "c4": "#a40e26",
    "c5": "#57606a",
}
DARK = {
    "page": "#0d1117",
    "text": "#e6edf3",
    "soft": "#9ea7b3",
    "line": "#30363d",
    "panel": "#161b22",
    "bar": "#1f3f6b",
    "c0": "#79c0ff",
    "c1": "#ffa657",
    "c2": "#7ee787",
    "c3": "#d2a8ff",
    "c4": "#ff7b72",
    "c5": "#c9d1d9",
}

STYLE = """
body { margin: 0 auto; max-width: 70rem; padding: 1.5rem 1rem 4rem; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; } h3 { font-size: 1rem; margin: 1.6rem 0 .5rem; }
p, dl { margin: .4rem 0; } .soft, dt { color: var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; } dd { margin: 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
td.bar { background: linear-gradient(to right, var(--bar) var(--length), transparent var(--length)); min-width: 7rem; }
svg { display: block; width: 100%; max-width: 46rem; height: auto; }
svg text { fill: var(--soft); font-size: 12px; } svg text.label { fill: var(--text); }
.grid { stroke: var(--line); } .roof { fill: none; stroke: var(--text); stroke-width: 2; }
circle { stroke: var(--page); stroke-width: 1; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: 0; margin: .3rem 0; }
.key { display: inline-block; width: .8rem; height: .8rem; border-radius: 50%; margin-right: .4rem; vertical-align: -.05rem; }
.maps { display: flex; flex-wrap: wrap; gap: 1.2rem; }
figure { margin: 0; flex: 1 1 15rem; max-width: 26rem; } figcaption { color: var(--soft); }
figure img { display: block; width: 100%; aspect-ratio: 1; image-rendering: pixelated; background: var(--panel); border: 1px solid var(--line); }
pre { background: var(--panel); border: 1px solid var(--line); padding: .6rem .8rem; margin: .5rem 0; white-space: pre-wrap;
  overflow-wrap: anywhere; }
"""


def _colours(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


def styles() -> str:
    """The style sheet: light colours, dark ones where the reader prefers them."""
    series = "".join(f".c{i} {{ fill: var(--c{i}); }} .b{i} {{ background: var(--c{i}); }}\n" for i in range(roofline.NUM_COLOURS))
    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {_colours(DARK)} }} }}"
    return f":root {{ color-scheme: light dark; {_colours(LIGHT)} }}\n{dark}\n{STYLE}{series}"


def render(runs: Sequence[Run]) -> str:
    """The whole page."""
    body = "\n".join(_run(run) for run in runs)
    title = f"m3attn: {runs[0].title}" + (f" and {len(runs) - 1} more" if len(runs) > 1 else "")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>{styles()}</style>
</head>
<body>
<h1>m3attn report</h1>
<p class="soft">Written by m3attn {escape(__version__)}.</p>
{body}
</body>
</html>
"""


def _run(run: Run) -> str:
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in run.facts)
    parts = [f"<section>\n<h2>{escape(run.title)}</h2>\n<dl>{facts}</dl>"]
    if run.table:
        parts += ["<h3>Time and error of each stage</h3>", _table(run)]
        parts += [f'<p class="soft">{escape(note)}</p>' for note in run.notes]
    if run.roof is not None and run.points:
        parts += ["<h3>Under the roofline</h3>", roofline.draw(run.roof, run.points)]
        parts.append('<p class="soft">Operations and bytes are the least that the stage must do. Stages without products are left out.</p>')
    if run.selection is not None:
        parts += ["<h3>Blocks that each query chose</h3>", _maps(run.selection)]
    if run.passages:
        parts += ["<h3>What some queries chose</h3>", *(f"<pre>{escape(text)}</pre>" for text in run.passages)]
    return "\n".join([*parts, "</section>"])


def _table(run: Run) -> str:
    """Columns that no line fills are left out."""
    bar = next(i for i, name in enumerate(run.header) if name.startswith(("time a", "share")))
    filled = [i for i in range(len(run.header)) if any(cells[i] for cells, _ in run.table)]
    head = "".join(f'<th scope="col">{escape(run.header[i])}</th>' for i in filled)
    lines = []
    for cells, length in run.table:
        shown = [f"<td>{escape(cell)}</td>" for cell in cells]
        shown[bar] = f'<td class="bar" style="--length: {100 * length:.1f}%">{escape(cells[bar])}</td>'
        lines.append(f"<tr>{''.join(shown[i] for i in filled)}</tr>")
    return f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n' + "\n".join(lines) + "\n</tbody>\n</table></div>"


def _maps(found: SelectionMap) -> str:
    figures = []
    for group, panel in enumerate(found.panels):
        alt = f"KV group {group}: which of {found.blocks} blocks each of {found.tokens} queries chose"
        figures.append(
            f'<figure><img src="{png.data_uri(panel, found.rows, found.blocks)}" alt="{alt}">'
            f"<figcaption>KV group {group}. Across: {found.blocks} blocks of {found.block_size} positions. Down: queries 0 to {found.tokens - 1}."
            "</figcaption></figure>"
        )
    return f'<div class="maps">{"".join(figures)}</div>'
