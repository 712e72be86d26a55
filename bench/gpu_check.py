"""`python -m bench.gpu_check PART ... --out DIR`: the checks that need a GPU, each of which keeps to its seconds.

Parts: `tests` (those of the kernels), `parity` (is tree attention right), `ops` (are the others), `tiles` (which
are fastest), `attention` and `flex` (the benchmark, FlexAttention by itself as it compiles long), `kernels` (time
and registers), the benchmarks of the other ops by their names, `table` (what the others found, short).
`gpu_check.sh` runs all of them. With `--device cpu --quick` and TRITON_INTERPRET=1 they run anywhere.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import __main__ as benchmarks
from . import gpu_kernels, gpu_ops, gpu_parity, gpu_table, gpu_tests, gpu_tiles
from .arguments import positive
from .attention_methods import OWN, Heads
from .gpu_pool import side_by_side
from .machine import describe
from .plot import write_plot
from .rows import Row, write_csv, write_json
from .tree_attention import measure, shapes
from .workloads import QUICK_DIVISOR, Workload, made_up

ATTENTION_RUNS = 3
TEST_PROCESSES = 12
COMPILED = ("flex", "flex_attention")  # by torch.compile, for every workload
EVERYTHING_ELSE = (
    *(name for name in OWN if name not in COMPILED),
    *("sdpa one rollout at a time", "sdpa padded batches", "cudnn padded batches", "varlen rollouts"),
    *("gathered paths", "PrefixGrouper"),
)
FLEX_WORKLOADS = (3, 8, 1)  # of `made_up`
CHECKED = ("tests", "parity", "ops", "ops_programs", "kernels")
RUNS = {"edge_logprobs": "3", "score_anchors": "3", "tree_reductions": "2"}
# An odd vocabulary too.
ARGUMENTS = {"edge_logprobs": ["--vocab", "151936", "32003"]}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=(__doc__ or "").strip())
    parser.add_argument("parts", nargs="+", choices=sorted(PARTS), metavar="PART")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=positive, default=120, help="a part begins nothing new after these")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    codes = []
    for part in options.parts:
        options.ends = time.monotonic() + options.seconds
        codes.append(PARTS[part](options))
    return max(codes)


def tests(options: argparse.Namespace) -> int:
    few = ("-k", "test_empty_ranges") if options.quick else ()
    found = gpu_tests.run(options.out, options.ends, 1 if options.quick else TEST_PROCESSES, *few)
    _write(options.out / "tests.json", found._asdict())
    return int(bool(found.failed or found.unfinished or not found.passed))


def parity(options: argparse.Namespace) -> int:
    combinations = gpu_parity.SMALL if options.quick else gpu_parity.COMBINATIONS
    device = torch.device(options.device)
    # What begins before `ends` still has a few seconds to hand back what it found.
    check = partial(gpu_parity.check, device=device, quick=options.quick, ends=options.ends - 8)
    found = _all(check, combinations, options)
    lines = [{"name": str(c)} if f is None else f._asdict() for c, f in zip(combinations, found, strict=True)]
    _write(options.out / "parity.json", lines)
    for line in lines:
        print(json.dumps(line)[:400])
    return int(any(line.get("wrong") or not line.get("layouts") for line in lines))


def ops(options: argparse.Namespace) -> int:
    lines: list[dict[str, Any]] = []
    for finding in gpu_ops.check(torch.device(options.device), options.quick, options.ends):
        lines.append(finding._asdict())
        print(json.dumps(lines[-1]))
        _write(options.out / "ops.json", lines)
    _write(options.out / "ops_programs.json", gpu_kernels.resources())
    return int(any(line["wrong"] for line in lines))


def tiles(options: argparse.Namespace) -> int:
    """Compiled side by side in the first half of the time; what was compiled by then is timed, one at a time."""
    device = torch.device(options.device)
    trials = gpu_tiles.trials(device, options.quick)
    ready: list[gpu_tiles.Trial | None] = list(trials)
    if device.type == "cuda":
        half = options.ends - (options.ends - time.monotonic()) / 2
        ready = side_by_side(
            partial(gpu_tiles.measure, device=device, quick=False, timed=False), trials, half
        )
    measured = []
    for trial, compiled in zip(trials, ready, strict=True):
        if compiled is None:
            trial = trial._replace(reason="not compiled in time")
        elif compiled.reason is not None:
            trial = compiled
        elif time.monotonic() > options.ends:
            trial = compiled._replace(reason="not reached")
        else:
            trial = gpu_tiles.measure(trial, device, options.quick, timed=True)
        print(trial)
        measured.append(trial)
        best = gpu_tiles.best(measured)
        _write(options.out / "tiles.json", {"best": best, "trials": [trial._asdict() for trial in measured]})
    return int(not best)


def attention(options: argparse.Namespace) -> int:
    """The attention benchmark, cheap workloads first."""
    works = [w.shrunk(QUICK_DIVISOR) for w in made_up()[3:4]] if options.quick else made_up()
    works.sort(key=lambda work: work.flat_pairs)
    kinds = [(Heads(2, 1, 32), torch.float32)] if options.quick else shapes(options.device)
    return _measure("attention", works, kinds, EVERYTHING_ELSE, options)


def flex(options: argparse.Namespace) -> int:
    if options.quick:
        return 0  # it compiles for a minute on the CPU
    works = [made_up()[place] for place in FLEX_WORKLOADS]
    return _measure("flex", works, shapes(options.device)[:1], ("triton", *COMPILED), options)


def _measure(
    name: str,
    works: list[Workload],
    kinds: list[tuple[Heads, torch.dtype]],
    only: tuple[str, ...],
    options: argparse.Namespace,
) -> int:
    """Workload by workload; what was measured is on disk after each."""
    device, machine = torch.device(options.device), describe(options.device)
    rows: list[Row] = []
    for heads, dtype in kinds:
        for work in works:
            if time.monotonic() > options.ends:
                print(f"not reached: {work.name}, {heads}")
                continue
            try:
                rows += measure(work, heads, dtype, device, 1 if options.quick else ATTENTION_RUNS, only)
            except torch.OutOfMemoryError as problem:  # of the exact results: the next workload may fit
                print(f"{work.name}, {heads}: {problem}")
            torch.cuda.empty_cache()
            write_json(rows, machine, options.out / f"rows_{name}.json")
            if name == "attention" and any(row.skipped is None for row in rows):
                write_plot(rows, options.out / "tree_attention.svg")
    return int(not any(row.method == "triton" and row.skipped is None for row in rows))


def kernels(options: argparse.Namespace) -> int:
    device = torch.device(options.device)
    heads = Heads(2, 1, 32) if options.quick else Heads(64, 8, 128)
    works = [gpu_tiles.workload(True)] if options.quick else [made_up()[3], made_up()[8], made_up()[6]]
    found: dict[str, dict[str, float]] = {}
    for work in works:
        if time.monotonic() < options.ends:
            found[work.name] = gpu_kernels.times(work, heads, device)
            _write(options.out / "kernels.json", {"ms": found, "programs": gpu_kernels.resources()})
    return int(not found)


def benchmark(subject: str, options: argparse.Namespace) -> int:
    """`python -m bench SUBJECT`."""
    size = ["--quick"] if options.quick else ["--runs", RUNS[subject], *ARGUMENTS.get(subject, [])]
    rows = options.out / f"rows_{subject}.json"
    return benchmarks.main([subject, "--device", options.device, "--json", str(rows), *size])


def table(options: argparse.Namespace) -> int:
    """The table, one file for the rows of all benchmarks, one for all that was checked."""
    rows, text = gpu_table.rows(options.out), "\n".join(gpu_table.lines(options.out)) + "\n"
    machine = describe(options.device)
    write_json(rows, machine, options.out / "rows.json")
    write_csv(rows, machine, options.out / "rows.csv")
    _write(
        options.out / "results.json", {name: gpu_table.read(options.out / f"{name}.json") for name in CHECKED}
    )
    (options.out / "table.txt").write_text(text)
    print(text, end="")
    return 0


def _all(work: Callable[[Any], Any], items: list[Any], options: argparse.Namespace) -> list[Any]:
    if options.device == "cpu":
        return [work(item) for item in items]
    return side_by_side(work, items, options.ends)


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, default=str) + "\n")


PARTS: dict[str, Callable[[argparse.Namespace], int]] = {
    "tests": tests,
    "parity": parity,
    "ops": ops,
    "tiles": tiles,
    "attention": attention,
    "flex": flex,
    "kernels": kernels,
    "table": table,
    **{subject: partial(benchmark, subject) for subject in RUNS},
}

if __name__ == "__main__":
    sys.exit(main())
