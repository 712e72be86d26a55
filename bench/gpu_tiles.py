"""Tile candidates of the Triton programs, timed on this device: what `kernels/tiles.py` should hold.

Each program is timed alone, by its own launches, with what dK and dV need to add up their parts. Head sizes 80 and
96 are padded to 128 and share its tiles.
"""

from __future__ import annotations

import functools
import time
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton.testing
from torch import Tensor

from trace_kernels.backends import triton as backend
from trace_kernels.device import tiles as tables
from trace_kernels.device.tiles import Tile, Tiles
from trace_kernels.launch import launch, target
from trace_kernels.layout import TreeLayout
from trace_kernels.tree_attention import tree_attention

from .attention_methods import Heads
from .workloads import Workload, turns

# Name in the tables -> the programs that are timed.
PROGRAMS = {
    "forward": ("tree_attention_forward",),
    "dq": ("tree_attention_dq",),
    "dkdv": ("tree_attention_dkdv", "tree_attention_sum_parts"),
}
Candidates = dict[tuple[int, int], dict[str, list[Tile]]]
# (element bits, head size) -> candidates of each program, beside the table's own tile. Most spill nothing (Triton
# 3.9); the design's starting tiles are among them all the same.
CANDIDATES: Candidates = {
    (16, 128): {
        "forward": [Tile(128, 128, 8, 2), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2), Tile(64, 64, 4, 3)],
        "dq": [Tile(128, 64, 8, 2), Tile(64, 64, 4, 3), Tile(128, 32, 8, 3), Tile(64, 128, 8, 2)],
        "dkdv": [Tile(64, 128, 8, 3), Tile(64, 128, 8, 2), Tile(32, 128, 8, 2), Tile(32, 64, 4, 3)],
    },
    (16, 64): {
        "forward": [Tile(128, 128, 4, 3), Tile(128, 64, 4, 3), Tile(64, 64, 4, 4)],
        "dq": [Tile(128, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 128, 8, 2)],
        "dkdv": [Tile(64, 128, 8, 3), Tile(32, 128, 8, 3), Tile(64, 64, 4, 3)],
    },
    (16, 256): {
        "forward": [Tile(64, 64, 8, 2), Tile(128, 32, 8, 2)],
        "dq": [Tile(64, 32, 4, 2), Tile(64, 32, 8, 3)],
        "dkdv": [Tile(32, 64, 8, 2), Tile(16, 64, 8, 3)],
    },
    (32, 64): {"forward": [Tile(64, 64, 8, 2)], "dq": [Tile(64, 32, 8, 2)], "dkdv": [Tile(32, 64, 8, 2)]},
}
SMALL: Candidates = {(32, 32): {"forward": [Tile(32, 32, 4, 1)], "dq": [], "dkdv": []}}
WARM_MS, TIMED_MS = 10, 50


class Trial(NamedTuple):
    """One candidate, or the table's own tile. `ms` is None where nothing was timed; `reason` says why it failed."""

    bits: int
    head_dim: int
    program: str
    tile: Tile
    own: bool
    ms: float | None = None
    registers: int | None = None
    local_words: int | None = None  # a thread's spilled registers, 4 bytes each
    reason: str | None = None


def trials(device: torch.device, quick: bool) -> list[Trial]:
    """The tables' own tiles first, then the candidates, head size by head size."""
    found = []
    for (bits, head_dim), programs in (SMALL if quick else CANDIDATES).items():
        own = _table_tiles(device, bits, head_dim)
        for name, candidates in programs.items():
            first = getattr(own, name)
            found += [
                Trial(bits, head_dim, name, tile, tile == first)
                for tile in dict.fromkeys([first, *candidates])
            ]
    return found


def workload(quick: bool) -> Workload:
    """Long prefix, short branches: full, masked and barely filled tiles."""
    if quick:
        return turns("small", 20, groups=1, count=2, observed=5, dropped=9, kept=7)
    return turns("tau2-like", 4800, groups=1, count=12, observed=300, dropped=500, kept=200)


def measure(trial: Trial, device: torch.device, quick: bool, timed: bool) -> Trial:
    """The trial with what its program needs, and its time if `timed`; one that cannot run says why."""
    layout, q, k, v, grad = _inputs(trial.bits, trial.head_dim, device, quick)
    names = PROGRAMS[trial.program]
    programs = [getattr(backend, name) for name in names]
    launches: list[tuple[Any, tuple[int, ...], Tile, dict[str, Any]]] = []

    def listed(program: Any, grid: tuple[int, ...], tile: Tile, **arguments: Any) -> None:
        launches.append((program, grid, tile, arguments))
        launch(program, grid, tile, **arguments)

    try:
        with _Using(device, trial), mock.patch.object(backend, "launch", listed):
            out = tree_attention(q, k, v, layout, backend="triton")
            if trial.program != "forward":
                torch.autograd.grad(out, (q, k, v), grad)
        mine = [given for given in launches if any(given[0] is program for program in programs)]
        program, grid, tile, arguments = mine[0]
        kernel = program[grid](**arguments, num_warps=tile.warps, num_stages=tile.stages)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        trial = trial._replace(
            registers=getattr(kernel, "n_regs", None), local_words=getattr(kernel, "n_spills", None)
        )

        def again() -> None:
            for program, grid, tile, arguments in mine:
                launch(program, grid, tile, **arguments)

        return trial._replace(ms=_milliseconds(again, device)) if timed else trial
    except Exception as problem:  # too much shared memory, a compiler's bug: the next candidate may be fine
        return trial._replace(
            reason=f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0][:120]}"
        )


def best(measured: list[Trial]) -> dict[str, Any]:
    """Per element bits and head size, as "16 D128", the fastest tile of each program that spills nothing.

    Where all spill, the fastest of all. Beside it the table's own tile, and how many times faster the best is.
    """
    found: dict[str, Any] = {}
    for bits, head_dim, program in dict.fromkeys((t.bits, t.head_dim, t.program) for t in measured):
        timed = [t for t in measured if t[:3] == (bits, head_dim, program) and t.ms]
        if not timed:
            continue
        fastest = min(timed, key=lambda trial: (bool(trial.local_words), trial.ms or 0.0))
        own = next((trial for trial in timed if trial.own), None)
        found.setdefault(f"{bits} D{head_dim}", {})[program] = {
            "tile": list(fastest.tile),
            "ms": fastest.ms,
            "local_words": fastest.local_words,
            "table": None if own is None else list(own.tile),
            "gain": None if own is None else (own.ms or 0.0) / (fastest.ms or 1.0),
        }
    return found


@functools.lru_cache(maxsize=1)
def _inputs(
    bits: int, head_dim: int, device: torch.device, quick: bool
) -> tuple[TreeLayout, Tensor, Tensor, Tensor, Tensor]:
    # Full fp32 has no matrix unit: an eighth of the heads keeps its trials short.
    heads = (
        Heads(2, 1, head_dim) if quick else Heads(64, 8, head_dim) if bits == 16 else Heads(8, 1, head_dim)
    )
    work = workload(quick)
    layout = TreeLayout.from_segments(work.parents, work.lengths, device=device)
    dtype = torch.bfloat16 if bits == 16 else torch.float32
    q, k, v = (
        torch.randn(work.tokens, n, heads.size, dtype=dtype, device=device, requires_grad=True)
        for n in (heads.query, heads.key, heads.key)
    )
    return layout, q, k, v, torch.randn_like(q)


def _milliseconds(run: Any, device: torch.device) -> float:
    if device.type == "cuda":
        return float(triton.testing.do_bench(run, warmup=WARM_MS, rep=TIMED_MS, return_mode="median"))
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def _table_tiles(device: torch.device, bits: int, head_dim: int) -> Tiles:
    where = target(device)
    return tables.tiles(where.architecture, where.triton_version, bits, head_dim)


class _Using:
    """Inside, the tables give a trial's tile for its program."""

    def __init__(self, device: torch.device, trial: Trial) -> None:
        where = target(device)
        version = ".".join(where.triton_version.split(".")[:2])
        self.table = tables.TUNED.setdefault((where.architecture, version), {})
        self.key = (trial.bits, tables.padded(trial.head_dim))
        self.before = self.table.get(self.key)
        own = _table_tiles(device, trial.bits, trial.head_dim)
        self.tiles = own._replace(**{trial.program: trial.tile})

    def __enter__(self) -> None:
        self.table[self.key] = self.tiles

    def __exit__(self, *_: object) -> None:
        del self.table[self.key]
        if self.before is not None:
            self.table[self.key] = self.before
