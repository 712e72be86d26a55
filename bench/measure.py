"""Clocks and memory meters."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch


class Phases:
    """Milliseconds of each named phase of one run, summed over its micro-batches.

    `cpu_ms` is processor time over all threads: it says less than the clock, but others' work on a shared
    machine disturbs it less. Waiting threads spin, so it is exact with one thread only.
    """

    def __init__(self, device: torch.device) -> None:
        self.ms: dict[str, float] = {}
        self.cpu_ms: float = 0.0
        self._device = device

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._wait()
        start, start_cpu = time.perf_counter(), time.process_time()
        yield
        self._wait()
        self.cpu_ms += 1e3 * (time.process_time() - start_cpu)
        self.ms[name] = self.ms.get(name, 0.0) + 1e3 * (time.perf_counter() - start)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def median_ms(run: Callable[[], object], runs: int) -> float:
    """Median time of `run` on the host, after one run that is not counted."""
    run()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def median_ratio(peer: Sequence[float], own: Sequence[float]) -> float:
    """Median over rounds of peer / own: a slow spell of the machine hits both sides of its round."""
    return statistics.median(p / o for p, o in zip(peer, own, strict=True))


class PeakMemory:
    """Most memory in use during a run beyond what was in use at its start.

    On an accelerator what the allocator handed out; on the CPU resident memory (Linux only).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: int | None = None

    def start(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
            return
        _return_free_memory()
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from the present size
        except OSError:
            self._before = None
        else:
            self._before = _kilobytes("/proc/self/status", "VmRSS")

    def stop(self) -> int | None:
        """Bytes, or None where they cannot be measured."""
        if self._device.type == "cuda":
            peak: int | None = torch.cuda.max_memory_allocated(self._device)
        else:
            peak = _kilobytes("/proc/self/status", "VmHWM")
        return None if peak is None or self._before is None else peak - self._before


def available_bytes(device: torch.device) -> int | None:
    """Memory that a run may still take; None where the machine does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return _kilobytes("/proc/meminfo", "MemAvailable")


def _return_free_memory() -> None:
    # glibc keeps freed blocks; a run that reused them would seem to need less.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _kilobytes(file: str, name: str) -> int | None:
    """A line `name: ... kB` of a file of the kernel's, in bytes."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)
