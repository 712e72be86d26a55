"""Results as a Markdown table."""

from __future__ import annotations

from .checks import ctas
from .compilation import Result

COLUMNS = (
    "kernel",
    "dtype",
    "size",
    "variant",
    "tile",
    "registers",
    "stack",
    "spills",
    "shared KiB",
    "CTAs",
    "matrix",
    "code KiB",
)


def markdown(results: list[Result]) -> str:
    """One line for each result, by kernel; a tile is `rows x keys, warps, stages`, code is all instructions."""
    order = sorted(
        results, key=lambda r: (r.job.program, r.job.case.dtype, r.job.case.size, r.job.case.variant)
    )
    rows = [COLUMNS, ("---",) * len(COLUMNS), *map(_row, order)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def parse(text: str) -> list[dict[str, str]]:
    """The lines of the first table in a text, by column."""
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|"
    ]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def _row(result: Result) -> tuple[str, ...]:
    case, needs = result.job.case, result.needs
    name = (result.job.program, case.dtype, str(case.size), case.variant)
    if needs is None:
        return (*name, _tile(result), *("?",) * 7)
    matrix = ", ".join(f"{count} {unit}" for unit, count in needs.matrix.items()) or "-"
    counts = (needs.registers, needs.stack, needs.spills, f"{needs.shared / 1024:.1f}", ctas(result))
    return (*name, _tile(result), *map(str, counts), matrix, f"{needs.code / 1024:.0f}")


def _tile(result: Result) -> str:
    tile = result.job.tile
    return f"{tile.block_m}x{tile.block_n}, {tile.warps}, {tile.stages}"
