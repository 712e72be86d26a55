"""The short table of what the GPU check's parts found, read from the files that they left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .rows import Row

SHOWN = 3  # complaints of a part


def lines(folder: Path) -> list[str]:
    """Every part's status, then its key figures; what is missing is named."""
    status = folder / "status.txt"
    found = status.read_text().splitlines() if status.is_file() else []
    found += _tests(read(folder / "tests.json"))
    for name in ("parity", "ops"):
        parts = read(folder / f"{name}.json")
        found += [f"{name}: no result"] if parts is None else [x for part in parts for x in _finding(part)]
    found += _tiles(read(folder / "tiles.json"))
    found += [_row(row) for row in rows(folder) if row.phase in SUMMED and _own(row)]
    kernels = read(folder / "kernels.json") or {"ms": {}, "programs": []}
    for work, times in kernels["ms"].items():
        found.append(
            f"kernels {work}: " + ", ".join(f"{n[:32]} {ms:.2f}" for n, ms in list(times.items())[:5])
        )
    for program in [*kernels["programs"], *(read(folder / "ops_programs.json") or [])]:
        found.append("program " + ", ".join(f"{name} {value}" for name, value in program.items()))
    return found


# The phase that says most of each benchmark.
SUMMED = ("pass", "root", "prefix", "loss", "V_hat and std")


def rows(folder: Path) -> list[Row]:
    """The rows of all benchmarks."""
    found = []
    for file in sorted(folder.glob("rows_*.json")):
        for line in read(file) or []:
            line.pop("machine", None)
            found.append(Row(**line))
    return found


def read(path: Path) -> Any:
    """The JSON, or None where a part left none, or was stopped while it wrote."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _own(row: Row) -> bool:
    return row.method in (
        "triton",
        "triton, no entropy",
        "flex",
        "score_anchors",
        "anchor_loss",
        "tree_reductions",
    )


def _row(row: Row) -> str:
    if row.median_ms is None:
        return f"{row.subject} {row.workload}, {row.method}: {row.skipped}"
    said = [f"{row.median_ms:.2f} ms"]
    if "useful_tflops" in row.figures:
        said.append(f"{row.figures['useful_tflops']:.0f} TFLOP/s")
    if row.ratio is not None:
        said.append(f"{row.ratio:.2f} x {row.peer}")
    if row.error is not None:
        said.append(f"error {row.error:.1e}")
    return f"{row.subject} {row.workload}, {row.method}, {row.phase}: {', '.join(said)}"


def _tests(found: Any) -> list[str]:
    if found is None:
        return ["tests: no result"]
    verdict = f"tests: {found['passed']} passed, {len(found['failed'])} failed, {found['skipped']} skipped"
    if found["unfinished"]:
        verdict += f", {found['unfinished']} processes stopped"
    return [verdict, *(f"  {name}" for name in found["failed"][:SHOWN])]


def _finding(part: dict[str, Any]) -> list[str]:
    if "errors" not in part:
        return [f"parity {part['name']}: no result"]
    verdict = f"{len(part['wrong'])} wrong" + (f" of {part['layouts']} layouts" if "layouts" in part else "")
    errors = " ".join(f"{name} {error:.1e}" for name, error in part["errors"].items())
    ratios = " ".join(f"{name} {ratio:.2f}" for name, ratio in part.get("ratios", {}).items())
    line = f"parity {part['name']}: {verdict}; worst {errors}" + (f"; x SDPA's: {ratios}" if ratios else "")
    return [line, *(f"  {problem}" for problem in part["wrong"][:SHOWN])]


def _tiles(found: Any) -> list[str]:
    if found is None:
        return ["tiles: no result"]
    shown = []
    for key, programs in found["best"].items():
        for program, best in programs.items():
            gain = "table's not timed" if best["gain"] is None else f"{best['gain']:.2f} x the table's"
            spilled = f", spills {best['local_words']} words" if best["local_words"] else ""
            shown.append(f"tiles {key} {program}: {best['tile']} {best['ms']:.2f} ms, {gain}{spilled}")
    untimed = sum(trial["ms"] is None for trial in found["trials"])
    return [*shown, f"tiles: {len(found['trials'])} trials, {untimed} without a time"]
