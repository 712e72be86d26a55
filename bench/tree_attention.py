"""Tree attention, forward and backward, side by side with its peers: A B C A B C ...

`error` is the RMS error ratio against exact fp32 attention over the rollouts' paths, on the first key head and the
query heads that read it: of the output for `forward`, the largest of dQ, dK and dV for `backward`. Peers that work
on flat rollouts get every shared token once per rollout; the upstream gradient is given to one copy, so that
their summed gradients are the packed ones. FLOPs: forward 4 pairs H D, backward 2.5 times that. `tflops` counts
the pairs a method computes, `useful_tflops` the packed forest's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .attention_methods import Heads, Method, Skipped, Unit, methods
from .attention_reference import path_attention, rms_ratio
from .measure import PeakMemory, Phases, available_bytes, median_ratio
from .plot import write_plot
from .rows import Row
from .workloads import Workload, asked

SUBJECT = "tree_attention"
FORWARD, BACKWARD, PASS = "forward", "backward", "pass"
BACKWARD_FACTOR = 2.5

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # q, k, v, grad_out of the packed tokens


def add_arguments(group: Any) -> None:
    group.add_argument(
        "--plot", type=Path, metavar="FILE", help="also draw the passes' useful TFLOP/s there (SVG)"
    )


def shapes(device: str) -> list[tuple[Heads, torch.dtype]]:
    """Head counts and types to measure: small ones on the CPU."""
    if device == "cpu":
        return [(Heads(8, 2, 64), torch.float32)]
    return [(Heads(64, 8, 128), torch.bfloat16), (Heads(32, 8, 128), torch.bfloat16)]


def run(options: argparse.Namespace) -> list[Row]:
    device = torch.device(options.device)
    rows: list[Row] = []
    for work in asked(options):
        for heads, dtype in shapes(options.device):
            rows += measure(work, heads, dtype, device, options.runs)
    if options.plot:
        write_plot(rows, options.plot)
    return rows


def measure(
    work: Workload,
    heads: Heads,
    dtype: torch.dtype,
    device: torch.device,
    runs: int,
    only: Sequence[str] | None = None,
) -> list[Row]:
    """All methods on one workload, or the named ones."""
    name = f"{work.name}, {heads.query}:{heads.key} D{heads.size} {str(dtype).removeprefix('torch.')}"
    inputs = _inputs(work, heads, dtype, device)
    group = heads.query // heads.key
    exact = path_attention(work, inputs[0][:, :group], *(x[:, :1] for x in inputs[1:3]), inputs[3][:, :group])
    results: dict[str, _Result] = {}
    skipped: dict[str, str] = {}
    for method_name, method in methods(work, heads, dtype, device).items():
        if only is not None and method_name not in only:
            continue
        found = method if isinstance(method, Skipped) else _first(method, inputs, exact, device)
        if isinstance(found, Skipped):
            skipped[method_name] = found.reason
        else:
            results[method_name] = found
    for number in range(runs):
        for result in results.values():
            phases, memory = Phases(device), PeakMemory(device)
            memory.start()
            for unit, fresh in zip(result.units, result.fresh, strict=True):
                _call(unit, fresh, inputs, phases)
            peak = memory.stop()
            result.peak = None if peak is None else max(result.peak or 0, peak)
            result.add(phases)
        print(f"{SUBJECT}: {name}, round {number + 1} of {runs}", file=sys.stderr)
    rows = _rows(name, work, heads, results)
    return rows + [
        Row(SUBJECT, name, method_name, PASS, None, 0, skipped=reason)
        for method_name, reason in skipped.items()
    ]


class _Result:
    """A method's units, what was measured of them, and how wrong they were."""

    def __init__(self, method: Method, units: list[Unit], prepare_ms: float, tokens: int) -> None:
        self.method, self.units, self.prepare_ms = method, units, prepare_ms
        self.fresh = _first_copies(units, tokens)
        self.ms: dict[str, list[float]] = {FORWARD: [], BACKWARD: [], PASS: []}
        self.errors: dict[str, float] = {}
        self.peak: int | None = None

    def add(self, phases: Phases) -> None:
        for name, value in (phases.ms | {PASS: sum(phases.ms.values())}).items():
            self.ms[name].append(value)


def _inputs(work: Workload, heads: Heads, dtype: torch.dtype, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)
    counts = (heads.query, heads.key, heads.key, heads.query)
    q, k, v, grad = (
        torch.randn(work.tokens, count, heads.size, generator=generator, device=device, dtype=dtype)
        for count in counts
    )
    return q, k, v, grad


def _first_copies(units: list[Unit], tokens: int) -> list[Tensor]:
    """bool [n] per unit: whether a row is the first one of its packed token."""
    seen = torch.zeros(tokens, dtype=torch.bool, device=units[0].rows.device)
    found = []
    for unit in units:
        row = torch.arange(len(unit.rows), device=seen.device)
        if unit.padding is not None:
            row = row.masked_fill(unit.padding, len(unit.rows))
        first = torch.full((tokens,), len(unit.rows), device=seen.device)
        first.scatter_reduce_(0, unit.rows, row, "amin")
        fresh = (first[unit.rows] == row) & ~seen[unit.rows]
        seen[unit.rows[fresh]] = True
        found.append(fresh)
    return found


def _call(unit: Unit, fresh: Tensor, inputs: Inputs, phases: Phases) -> tuple[Tensor, tuple[Tensor, ...]]:
    q, k, v = (x[unit.rows].requires_grad_() for x in inputs[:3])
    grad_out = inputs[3][unit.rows] * fresh[:, None, None]
    with phases(FORWARD):
        out = unit.run(q, k, v)
    with phases(BACKWARD):
        gradients = torch.autograd.grad(out, (q, k, v), grad_out)
    return out.detach(), gradients


def _first(
    method: Method, inputs: Inputs, exact: tuple[Tensor, ...], device: torch.device
) -> _Result | Skipped:
    """One run that is not counted, for its errors; or why there is none."""
    try:
        clock = Phases(device)
        with clock("prepare"):
            units = method.units()
        row_bytes = 4 * sum(x[0].nbytes for x in inputs)  # inputs, output, their gradients, a kernel's copies
        needed = max(row_bytes * len(unit.rows) + unit.extra_bytes for unit in units)
        free = available_bytes(device)
        if free is not None and needed > 0.8 * free:
            return Skipped(f"needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
        result = _Result(method, units, clock.ms["prepare"], len(inputs[0]))
        group, error = exact[0].shape[1], 0.0
        sums = [torch.zeros_like(x) for x in exact[1:4]]
        for unit, fresh in zip(units, result.fresh, strict=True):
            out, gradients = _call(unit, fresh, inputs, Phases(device))
            real = slice(None) if unit.padding is None else ~unit.padding
            rows = unit.rows[real]
            error = max(error, rms_ratio(out[real, :group], exact[0][rows]))
            for total, gradient in zip(sums, gradients, strict=True):
                total.index_add_(0, rows, gradient[real, : total.shape[1]].float())
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return Skipped("out of memory")
    except (RuntimeError, ImportError, ValueError) as problem:  # a peer may fail, and must be listed
        return Skipped(f"failed: {type(problem).__name__}: {str(problem).splitlines()[0][:160]}")
    gradient_error = max(rms_ratio(total, expected) for total, expected in zip(sums, exact[1:4], strict=True))
    result.errors = {FORWARD: error, BACKWARD: gradient_error, PASS: max(error, gradient_error)}
    return result


def _rows(name: str, work: Workload, heads: Heads, results: dict[str, _Result]) -> list[Row]:
    sizes = work.figures()
    flops = 4.0 * heads.query * heads.size
    factors = {FORWARD: 1.0, BACKWARD: BACKWARD_FACTOR, PASS: 1.0 + BACKWARD_FACTOR}
    rows = []
    for phase, factor in factors.items():
        medians = {method: statistics.median(result.ms[phase]) for method, result in results.items()}
        peers = [method for method, result in results.items() if not result.method.own]
        best = min(peers, key=medians.__getitem__, default=None)
        for method, result in results.items():
            rate = factor * flops / (1e9 * medians[method])
            figures = {
                "tflops": rate * result.method.pairs,
                "useful_tflops": rate * work.pairs,
                "prepare_ms": result.prepare_ms,
            }
            compared = best if best is not None and best != method else None
            rows.append(
                Row(
                    SUBJECT,
                    name,
                    method,
                    phase,
                    medians[method],
                    len(result.ms[phase]),
                    peer=compared,
                    ratio=median_ratio(results[compared].ms[phase], result.ms[phase]) if compared else None,
                    peak_bytes=result.peak if phase == PASS else None,
                    error=result.errors[phase],
                    figures=figures | sizes,
                )
            )
    return rows
