"""Compiles all device programs for the targets, prints what they need of a GPU and names what does not fit."""

from __future__ import annotations

import argparse
import os
import sys
import time

# Said here, as a launch does not: products are fused with sums. Triton is about to change its default.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton

from ..interpreter import is_on
from .cases import all_cases, jobs, quick_cases
from .checks import GPUS, faults
from .compilation import Result, compile_all
from .table import markdown


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trace_kernels.aot", description=__doc__)
    parser.add_argument("--target", action="append", choices=sorted(GPUS), help="may be given several times")
    parser.add_argument("--quick", action="store_true", help="bf16 with nothing else on, three head sizes")
    parser.add_argument("--processes", type=int, help="at a time; default: one for each CPU")
    chosen = parser.parse_args()
    if is_on():
        parser.error("TRITON_INTERPRET=1 interprets programs, nothing is compiled: unset it")
    cases = quick_cases() if chosen.quick else all_cases()
    wrong = 0
    for target in chosen.target or ["cuda:90"]:
        results = _compiled(target, jobs(target, cases), chosen.processes)
        print(f"\n## {target}, Triton {triton.__version__}\n\n{markdown(results)}\n")
        lines = [f"{_name(result)}: {fault}" for result in results for fault in faults(result)]
        print("\n".join(lines) or f"{len(results)} programs, all fit")
        wrong += len(lines)
    return 1 if wrong else 0


def _compiled(target: str, work: list, processes: int | None) -> list[Result]:
    start, results = time.perf_counter(), []
    for result in compile_all(work, processes):
        results.append(result)
        passed = time.perf_counter() - start
        done = f"{target}: {len(results)} of {len(work)}, {passed:.0f} s"
        end = "" if sys.stderr.isatty() else "\n"
        if end == "" or len(results) % 20 in (0, len(work) % 20):
            print(f"\r{done}, {_name(result)} in {result.seconds:.1f} s\033[K" if not end else done,
                  end=end, file=sys.stderr, flush=True)  # fmt: skip
    return results


def _name(result: Result) -> str:
    job = result.job
    tile = ", ".join(f"{name}={value}" for name, value in job.tile._asdict().items())
    return f"{job.target} {job.program} {job.case.dtype} size={job.case.size} {job.case.variant} ({tile})"


if __name__ == "__main__":
    sys.exit(main())
