"""One result: what was measured, how long it took, against whom, and how wrong it was."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .machine import Machine


@dataclass(frozen=True)
class Row:
    """One workload, method and phase.

    Attributes:
        median_ms: median over `runs`; None where nothing was measured, and `skipped` says why.
        peer: the method that `ratio` compares with; None where there is none.
        ratio: the peer's time over this one's, the median over rounds that measured both: above 1 is faster.
        peak_bytes: most memory in use at a time beyond what was in use before; None where not measurable.
        error: largest deviation from the reference result; what it is, the subject says.
        figures: what else the subject reports, by name.
    """

    subject: str
    workload: str
    method: str
    phase: str
    median_ms: float | None
    runs: int
    peer: str | None = None
    ratio: float | None = None
    peak_bytes: int | None = None
    error: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    skipped: str | None = None


def write_json(rows: Sequence[Row], machine: Machine, path: Path) -> None:
    """A JSON array with one row a line, each with its machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(row) | {"machine": asdict(machine)}) for row in rows]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def write_csv(rows: Sequence[Row], machine: Machine, path: Path) -> None:
    """One line a row: its fields, its figures and its machine; empty where a row has none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        asdict(row)
        | {f"figure {name}": value for name, value in row.figures.items()}
        | {f"machine {name}": value for name, value in asdict(machine).items()}
        for row in rows
    ]
    columns = [name for name in dict.fromkeys(name for line in lines for name in line) if name != "figures"]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def table(rows: Sequence[Row], machine: Machine) -> str:
    """The rows for a reader: a Markdown table, under it each row's further figures and the machine."""
    cells = [["subject", "workload", "method", "phase", "median ms", "ratio", "peer", "peak MB", "error"]]
    cells += [
        [
            *(row.subject, row.workload, row.method, row.phase),
            _number(row.median_ms, ",.2f"),
            _number(row.ratio, ".2f"),
            row.peer or "-",
            _number(row.peak_bytes and row.peak_bytes / 1e6, ",.0f"),
            _number(row.error, ".1e"),
        ]
        for row in rows
        if row.skipped is None
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    for row in rows:
        if row.figures:
            said = ", ".join(f"{name} {value:.4g}" for name, value in row.figures.items())
            lines.append(f"{row.subject}, {row.workload}, {row.method}, {row.phase}: {said}")
    for row in rows:
        if row.skipped is not None:
            lines.append(f"{row.subject}, {row.workload}, {row.method}: skipped, {row.skipped}")
    lines.append(", ".join(f"{name} {value}" for name, value in asdict(machine).items()))
    return "\n".join(lines)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
