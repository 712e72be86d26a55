"""Tile candidates of the Triton programs, timed on this device: what `kernels/tiles.py` should hold."""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import torch

from trace_kernels.device import tiles as tables
from trace_kernels.device.tiles import Tile, Tiles
from trace_kernels.launch import target
from trace_kernels.layout import TreeLayout
from trace_kernels.tree_attention import tree_attention

from .attention_methods import Heads
from .workloads import Workload, turns

PROGRAMS = ("forward", "dq", "dkdv")
# (head size) -> candidates of each program, beside the table's own tile. bf16; 64:8 heads.
CANDIDATES: dict[int, dict[str, list[Tile]]] = {
    128: {
        "forward": [Tile(128, 128, 8, 2), Tile(128, 64, 8, 2), Tile(128, 64, 4, 3), Tile(64, 64, 4, 3)],
        "dq": [Tile(128, 64, 8, 2), Tile(64, 64, 4, 3), Tile(128, 32, 8, 3), Tile(64, 128, 8, 2)],
        "dkdv": [Tile(64, 128, 8, 2), Tile(64, 64, 4, 3), Tile(32, 128, 8, 3), Tile(128, 128, 8, 2)],
    },
    64: {
        "forward": [Tile(128, 64, 4, 3), Tile(128, 128, 8, 3), Tile(64, 64, 4, 4)],
        "dq": [Tile(128, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 128, 8, 2)],
        "dkdv": [Tile(64, 128, 4, 3), Tile(64, 64, 4, 3), Tile(128, 128, 8, 2)],
    },
    256: {
        "forward": [Tile(64, 64, 8, 2), Tile(64, 64, 4, 2)],
        "dq": [Tile(64, 32, 4, 2), Tile(64, 64, 4, 2)],
        "dkdv": [Tile(32, 64, 8, 2), Tile(64, 64, 4, 1)],
    },
}
SMALL_TILES: dict[int, dict[str, list[Tile]]] = {32: {"forward": [Tile(32, 32, 4, 1)], "dq": [], "dkdv": []}}
RUNS = 7


class Trial(NamedTuple):
    """One candidate. `ms` is the forward's or the whole backward's median; None where it failed, for `reason`."""

    head_dim: int
    program: str
    tile: Tile
    ms: float | None = None
    reason: str | None = None


def trials(device: torch.device, quick: bool) -> list[Trial]:
    """The tables' own tiles first, then the candidates, head size by head size."""
    found = []
    for head_dim, programs in (SMALL_TILES if quick else CANDIDATES).items():
        own = _table_tiles(device, head_dim)
        for name in PROGRAMS:
            tiles = [getattr(own, name), *programs[name]]
            found += [Trial(head_dim, name, tile) for tile in dict.fromkeys(tiles)]
    return found


def workload(quick: bool) -> Workload:
    """Long prefix, short branches: full, masked and barely filled tiles."""
    if quick:
        return turns("small", 20, groups=1, count=2, observed=5, dropped=9, kept=7)
    return turns("tau2-like", 4800, groups=2, count=12, observed=300, dropped=500, kept=200)


def measure(trial: Trial, device: torch.device, quick: bool, runs: int = RUNS) -> Trial:
    """The trial with its time; one that cannot be compiled or launched says why."""
    heads = Heads(2, 1, trial.head_dim) if quick else Heads(64, 8, trial.head_dim)
    work = workload(quick)
    layout = TreeLayout.from_segments(work.parents, work.lengths, device=device)
    q, k, v = (
        torch.randn(work.tokens, n, heads.size, dtype=torch.bfloat16, device=device, requires_grad=True)
        for n in heads[:2] + heads[1:2]
    )
    grad = torch.randn_like(q)
    times = []
    try:
        with _Using(device, trial):
            for _ in range(runs + 1):
                start = _now(device)
                out = tree_attention(q, k, v, layout, backend="triton")
                middle = _now(device)
                if trial.program != "forward":
                    torch.autograd.grad(out, (q, k, v), grad)
                    times.append(_now(device) - middle)
                else:
                    times.append(middle - start)
    except Exception as problem:  # too much shared memory, a compiler's bug: the next candidate may be fine
        return trial._replace(reason=f"{type(problem).__name__}: {str(problem).splitlines()[0][:120]}")
    return trial._replace(ms=1e3 * statistics.median(times[1:]))


def best(measured: list[Trial]) -> dict[str, Any]:
    """The fastest tile of each program by head size, beside the table's and what it gains."""
    found: dict[str, Any] = {}
    for head_dim in dict.fromkeys(trial.head_dim for trial in measured):
        for program in PROGRAMS:
            timed = [t for t in measured if (t.head_dim, t.program) == (head_dim, program) and t.ms]
            if not timed:
                continue
            first, fastest = timed[0], min(timed, key=lambda trial: trial.ms or 0.0)
            found.setdefault(str(head_dim), {})[program] = {
                "tile": list(fastest.tile),
                "ms": fastest.ms,
                "first": list(first.tile),
                "gain": (first.ms or 0.0) / (fastest.ms or 1.0),
            }
    return found


def _table_tiles(device: torch.device, head_dim: int) -> Tiles:
    where = target(device)
    return tables.tiles(where.architecture, where.triton_version, 16, head_dim)


class _Using:
    """Inside, the tables give a trial's tile for its program."""

    def __init__(self, device: torch.device, trial: Trial) -> None:
        where = target(device)
        version = ".".join(where.triton_version.split(".")[:2])
        self.table = tables.TUNED.setdefault((where.architecture, version), {})
        self.key = (16, tables.padded(trial.head_dim))
        self.before = self.table.get(self.key)
        self.tiles = _table_tiles(device, trial.head_dim)._replace(**{trial.program: trial.tile})

    def __enter__(self) -> None:
        self.table[self.key] = self.tiles

    def __exit__(self, *_: object) -> None:
        del self.table[self.key]
        if self.before is not None:
            self.table[self.key] = self.before


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
