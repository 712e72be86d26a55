"""The kernels' tests on a GPU: split over processes of pytest, which compile side by side.

The module is also the pytest plugin that keeps a process's share of the tests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path("tests/kernels")
# Its whole suite in the interpreter is no business of a GPU; and the one with the most to compile comes last.
LEFT_OUT, LAST = "test_interpreted.py", "test_parity.py"
SHARE = "GPU_CHECK_SHARE"  # "2/12": the third of twelve


class Outcome(NamedTuple):
    passed: int
    skipped: int
    failed: list[str]
    unfinished: int  # processes that were stopped


def run(folder: Path, ends: float, processes: int, *options: str) -> Outcome:
    """All tests of `TESTS`, stopped at `ends` on the monotonic clock; each process writes to `folder`."""
    files = sorted(TESTS.glob("test_*.py"), key=lambda file: (file.name == LAST, file.name))
    command = [sys.executable, "-m", "pytest", "-vv", "--tb=short", "-p", "no:cacheprovider", "-p", __name__]
    command += [*options, *(str(file) for file in files if file.name != LEFT_OUT)]
    logs = [folder / f"tests_{number}.log" for number in range(processes)]
    running = []
    for number, log in enumerate(logs):
        environment = os.environ | {SHARE: f"{number}/{processes}"}
        with log.open("w") as file:
            running.append(subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT))
    while any(process.poll() is None for process in running) and time.monotonic() < ends:
        time.sleep(0.2)
    unfinished = [process for process in running if process.poll() is None]
    for process in unfinished:
        process.kill()
        process.wait()
    texts = [log.read_text() for log in logs]
    print("\n".join(texts))
    return outcome("\n".join(texts), len(unfinished))


def outcome(text: str, unfinished: int) -> Outcome:
    """What pytest's verbose lines say."""
    verdicts = re.findall(r"^(\S+\.py::.*?) (PASSED|SKIPPED|FAILED|ERROR)\b", text, re.MULTILINE)
    kinds = [kind for _, kind in verdicts]
    failed = [name for name, kind in verdicts if kind in ("FAILED", "ERROR")]
    # A file that cannot be imported has no test to name.
    failed += re.findall(r"^_+ (ERROR collecting .*?) _+$", text, re.MULTILINE)
    return Outcome(kinds.count("PASSED"), kinds.count("SKIPPED"), sorted(set(failed)), unfinished)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    number, _, processes = os.environ[SHARE].partition("/")
    items[:] = items[int(number) :: int(processes)]
