"""Bars of the attention rows, as an SVG file that needs no drawing library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from .rows import Row

FIGURE, PHASE = "useful_tflops", "pass"
COLOURS = ("#1b6ca8", "#e07b39", "#4f9d69", "#b2456e", "#8a6fb3", "#c9a227", "#5f6b73", "#3aa6a6", "#9c4f2f")
BAR, GAP, LABEL, WIDTH = 14, 18, 60, 620


def write_plot(rows: Sequence[Row], path: Path) -> None:
    """Useful TFLOP/s of forward and backward together, one group of bars per workload; longer is better.

    Raises:
        ValueError: no row holds that figure, or the file's name does not end in .svg.
    """
    if path.suffix != ".svg":
        raise ValueError(f"--plot {path}: expected a name that ends in .svg")
    shown = [row for row in rows if row.phase == PHASE and FIGURE in row.figures]
    if not shown:
        raise ValueError(f"--plot {path}: nothing was measured that could be drawn")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_svg(shown))


def _svg(rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(row.method for row in rows))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    unit = WIDTH / max(row.figures[FIGURE] for row in rows)
    parts: list[str] = []
    y = 30
    workload = None
    for row in rows:
        if row.workload != workload:
            workload = row.workload
            y += GAP + 6
            parts.append(f'<text x="10" y="{y - 6}" font-weight="bold">{escape(workload)}</text>')
        value = row.figures[FIGURE]
        width = value * unit
        parts.append(
            f'<rect x="10" y="{y}" width="{width:.1f}" height="{BAR - 3}" fill="{colours[row.method]}"/>'
            f'<text x="{width + 16:.1f}" y="{y + BAR - 5}">{escape(row.method)} {value:.3g}</text>'
        )
        y += BAR
    height = y + GAP
    title = "Useful TFLOP/s, forward + backward (pairs of the packed forest)"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + 4 * LABEL}" height="{height}" '
        f'font-family="sans-serif" font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n'
        f'<text x="10" y="20" font-size="14">{title}</text>\n' + "\n".join(parts) + "\n</svg>\n"
    )
