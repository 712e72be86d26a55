"""What a figure was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Machine:
    """Part of every row, so that a row can be read without the run it came from."""

    device: str  # "cpu" or the accelerator's name
    cpu: str
    cores: int  # that this process may use
    threads: int
    torch: str
    triton: str | None
    transformers: str | None
    python: str
    driver: str | None  # of the accelerator

    @property
    def best_device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"


def use_threads(count: int | None) -> None:
    """That many threads in torch; None: one for each core."""
    torch.set_num_threads(count or _cores())


def describe(device: str) -> Machine:
    """The machine, for figures of `device` ("cpu" or "cuda"); ValueError where there is no such device."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no accelerator here")
    return Machine(
        device="cpu" if device == "cpu" else torch.cuda.get_device_name(),
        cpu=_cpu(),
        cores=_cores(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        triton=_version("triton"),
        transformers=_version("transformers"),
        python=platform.python_version(),
        driver=_driver() if device == "cuda" else None,
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer[0] if answer else None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
