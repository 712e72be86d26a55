"""Work side by side in processes of their own, until a deadline; none of them lives on after it."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as Late
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

WORKERS = max(2, (os.cpu_count() or 2) - 2)  # compiling takes a core each


def side_by_side(
    work: Callable[[Item], Result], items: Sequence[Item], ends: float, workers: int = WORKERS
) -> list[Result | None]:
    """`work` on every item until `ends` on the monotonic clock; None for one that failed or was late."""
    results: list[Result | None] = []
    pool = ProcessPoolExecutor(min(workers, len(items)), multiprocessing.get_context("spawn"))
    futures = [pool.submit(work, item) for item in items]
    for item, future in zip(items, futures, strict=True):
        try:
            results.append(future.result(max(0.0, ends - time.monotonic())))
        except Late:
            results.append(None)
        except Exception as problem:  # one failure must not hide the others' results
            print(f"{item}: {type(problem).__name__}: {str(problem)[:300]}", file=sys.stderr)
            results.append(None)
    # Before the shutdown, which forgets them; killed and waited for, so that nothing disturbs what is timed next.
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()
    for process in processes:
        process.join(5)
    return results
