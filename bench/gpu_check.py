"""`python -m bench.gpu_check PART ... --out DIR`: the checks that need a GPU, each of which keeps to its seconds.

Parts: `parity` (is the kernel right), `tiles` (which tiles are fastest), `attention` (the benchmark, with rows and
plot), `kernels` (time and registers of every program), `table` (what the others found, short). `gpu_check.sh` runs
all of them. With `--device cpu --quick` and TRITON_INTERPRET=1 they run anywhere, on a few tokens.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as Late
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import gpu_kernels, gpu_parity, gpu_tiles
from .arguments import positive
from .attention_methods import Heads
from .machine import describe
from .plot import write_plot
from .rows import Row, write_csv, write_json
from .tree_attention import PASS, measure, shapes
from .workloads import QUICK_DIVISOR, made_up

WORKERS = 8
ATTENTION_RUNS = 3


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


def parity(options: argparse.Namespace) -> int:
    combinations = gpu_parity.SMALL if options.quick else gpu_parity.COMBINATIONS
    check = partial(gpu_parity.check, device=torch.device(options.device), quick=options.quick)
    found = _side_by_side(check, combinations, options)
    lines = [{"combination": str(c), **f._asdict()} for c, f in zip(combinations, found, strict=True) if f]
    lines += [{"combination": str(c)} for c, f in zip(combinations, found, strict=True) if f is None]
    _write(options.out / "parity.json", lines)
    for line in lines:
        print(json.dumps(line)[:400])
    return int(any(line.get("wrong") or "errors" not in line for line in lines))


def tiles(options: argparse.Namespace) -> int:
    """Compiled side by side first, so that the timings one after the other find everything in the cache."""
    device = torch.device(options.device)
    trials = gpu_tiles.trials(device, options.quick)
    if device.type == "cuda":
        _side_by_side(partial(gpu_tiles.measure, device=device, quick=False, runs=1), trials, options)
    measured = []
    for trial in trials:
        if time.monotonic() > options.ends:
            break
        measured.append(gpu_tiles.measure(trial, device, options.quick, runs=1 if options.quick else 7))
        print(measured[-1])
    best = gpu_tiles.best(measured)
    _write(
        options.out / "tiles.json",
        {
            "best": best,
            "trials": [trial._asdict() for trial in measured],
            "not_reached": len(trials) - len(measured),
        },
    )
    return int(not best)


def attention(options: argparse.Namespace) -> int:
    """The attention benchmark workload by workload; what was measured is on disk after each."""
    device, machine = torch.device(options.device), describe(options.device)
    works = [w.shrunk(QUICK_DIVISOR) for w in made_up()[3:4]] if options.quick else made_up()
    rows: list[Row] = []
    for heads, dtype in [(Heads(2, 1, 32), torch.float32)] if options.quick else shapes(options.device):
        for work in works:
            if time.monotonic() > options.ends:
                print(f"not reached: {work.name}, {heads}")
                continue
            rows += measure(work, heads, dtype, device, 1 if options.quick else ATTENTION_RUNS)
            write_json(rows, machine, options.out / "tree_attention.json")
            write_csv(rows, machine, options.out / "tree_attention.csv")
            if any(row.skipped is None for row in rows):
                write_plot(rows, options.out / "tree_attention.svg")
    return int(not rows)


def kernels(options: argparse.Namespace) -> int:
    device = torch.device(options.device)
    heads = Heads(2, 1, 32) if options.quick else Heads(64, 8, 128)
    works = [gpu_tiles.workload(True)] if options.quick else [made_up()[0], made_up()[6], made_up()[8]]
    found = {work.name: gpu_kernels.times(work, heads, device) for work in works}
    _write(options.out / "kernels.json", {"ms": found, "programs": gpu_kernels.resources()})
    return 0


def table(options: argparse.Namespace) -> int:
    """One short table of what the other parts wrote; what is missing is named."""
    lines: list[str] = []
    for line in _read(options.out / "parity.json", lines):
        errors = " ".join(f"{name} {error:.1e}" for name, error in line.get("errors", {}).items())
        verdict = "no result" if not errors else f"{len(line['wrong'])} wrong of {line['layouts']} layouts"
        lines.append(f"parity {line.get('name', line['combination'])}: {verdict}; {errors}")
        lines += [f"  {problem}" for problem in line.get("wrong", [])[:3]]
    for head_dim, programs in (_read(options.out / "tiles.json", lines) or {"best": {}})["best"].items():
        for program, best in programs.items():
            lines.append(
                f"tiles D{head_dim} {program}: {best['tile']} {best['ms']:.2f} ms, {best['gain']:.2f} x the table's"
            )
    for row in _read(options.out / "tree_attention.json", lines):
        if row["phase"] != PASS or row["method"] != "triton":
            continue
        said = row["skipped"] or (
            f"{row['median_ms']:.2f} ms, {row['figures']['useful_tflops']:.0f} TFLOP/s, "
            f"{row['ratio'] or 0:.2f} x {row['peer']}, error {row['error']:.1e}"
        )
        lines.append(f"attention {row['workload']}: {said}")
    profiled = _read(options.out / "kernels.json", lines) or {"ms": {}, "programs": []}
    for work, kernel_ms in profiled["ms"].items():
        lines.append(
            f"kernels {work}: " + ", ".join(f"{n[:32]} {ms:.2f}" for n, ms in list(kernel_ms.items())[:5])
        )
    for program in profiled["programs"]:
        lines.append("program " + ", ".join(f"{name} {value}" for name, value in program.items()))
    text = "\n".join(lines) + "\n"
    (options.out / "table.txt").write_text(text)
    print(text, end="")
    return 0


def _side_by_side(work: Callable[[Any], Any], items: list[Any], options: argparse.Namespace) -> list[Any]:
    """`work` on every item, in processes of their own on a GPU; None for one that failed or was late."""
    if options.device == "cpu":
        return [work(item) for item in items]
    results: list[Any] = []
    pool = ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn"))
    for item, future in [(item, pool.submit(work, item)) for item in items]:
        try:
            results.append(future.result(max(0.0, options.ends - time.monotonic())))
        except Late:
            results.append(None)
        except Exception as problem:  # one failure must not hide the others' results
            print(f"{item}: {type(problem).__name__}: {str(problem)[:300]}", file=sys.stderr)
            results.append(None)
    pool.shutdown(wait=False, cancel_futures=True)
    for process in list((pool._processes or {}).values()):
        process.terminate()
    return results


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, default=str) + "\n")


def _read(path: Path, lines: list[str]) -> Any:
    if not path.is_file():
        lines.append(f"{path.name}: missing, see log.txt")
        return []
    return json.loads(path.read_text())


PARTS: dict[str, Callable[[argparse.Namespace], int]] = {
    "parity": parity,
    "tiles": tiles,
    "attention": attention,
    "kernels": kernels,
    "table": table,
}

if __name__ == "__main__":
    sys.exit(main())
