"""Rows as a table for people: implementations side by side on each shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def us(value: float) -> str:
    """Microseconds with three figures, as milliseconds from 1,000 up and seconds from 1,000,000: `12.3 us`, `1.32 ms`, `286 ms`, `28.6 s`."""
    if value < 1000:
        return f"{value:.1f} us" if value < 100 else f"{value:.0f} us"
    value, unit = (value / 1e3, "ms") if value < 1e6 else (value / 1e6, "s")
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def aligned(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell, two spaces between them."""
    widths = [max(len(line[i]) for line in [header, *body]) for i in range(len(header))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in [header, *body])


HEADER = ("stage", "heads", "shape", "mode", "sel", "implementation", "time", "floor", "share", "TFLOP/s", "TB/s", "parity", "vs peer")


def table(rows: Sequence[Row]) -> str:
    """Every row, with its time over the fastest peer's of the same shape."""
    body = []
    for row in rows:
        peers = [r["median_us"] for r in rows if r.get("peer") and _place(r) == _place(row)]
        body.append(
            (
                row["stage"],
                row["heads"],
                row["shape"],
                row["mode"],
                row["selection"] or "",
                row["implementation"],
                us(row["median_us"]),
                us(row["floor_us"]),
                "" if row["share"] is None else f"{100 * row['share']:.0f}%",
                f"{row['tflops']:.0f}" if row["tflops"] else "",
                f"{row['tbps']:.2f}" if row["tbps"] else "",
                parity_text(row),
                f"{row['median_us'] / min(peers):.2f}x" if peers and not row.get("peer") else "",
            )
        )
    return aligned(HEADER, body)


def parity_text(row: Row) -> str:
    if not row["parity_passed"]:
        return "differs"
    ties = f", {row['near_ties']} near ties" if row["near_ties"] else ""
    return ("exact" if row["parity_error"] == 0 else f"{row['parity_error']:.1e}") + ties


def _place(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("stage", "heads", "shape", "mode", "selection"))
