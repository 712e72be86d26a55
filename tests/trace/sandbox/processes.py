"""Processes as /proc shows them."""

from __future__ import annotations

import os
import time
from pathlib import Path


def children(parent: int) -> list[int]:
    """Process ids of all children, zombies included."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[1]) == parent:
                found.append(int(folder.name))
    return sorted(found)


def zygotes(parent: int | None = None) -> list[int]:
    """Zygotes that ``parent`` (this process) started."""
    own = children(os.getpid() if parent is None else parent)
    return [pid for pid in own if "trace_rl.sandbox.zygote" in Path(f"/proc/{pid}/cmdline").read_text()]


def directory_of(zygote: int) -> Path:
    """The zygote's own directory, from its command line: ..., socket, parent, directory, limits."""
    return Path(Path(f"/proc/{zygote}/cmdline").read_text().split("\0")[:-1][-2])


def running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: list[int], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while any(map(running, pids)):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if running(pid)]}"
        time.sleep(0.02)
