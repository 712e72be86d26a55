"""Time: processor time for code that computes, the clock for code that waits, and load decides nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trace_rl.sandbox import CellResult, Limits, PythonTool, SandboxError, call
from trace_rl.sandbox.processors import processor_share

from .attacks import COMPUTING, WAITING
from .processes import children, zygotes


def stopped(words: str) -> CellResult:
    return CellResult(f"begun\nStopped: the code {words}.", "timeout", keep=False)


def lost(words: str) -> CellResult:
    notice = f"Stopped: the state of the earlier code is lost, because running it again {words}. "
    return CellResult(notice + "This code did not run.", "replay_failed", keep=False)


def test_endless_code_is_stopped_and_in_a_replay_says_that_the_state_is_lost(strict: PythonTool) -> None:
    cases = [
        ([], f"print('begun')\n{code}", stopped("used more than 1 s of processor time"))
        for code in COMPUTING.values()
    ]
    cases += [
        ([], f"print('begun')\n{code}", stopped("waited longer than 0.5 s")) for code in WAITING.values()
    ]
    cases += [
        (["while True: pass"], "1", lost("used more than 0.4 s of processor time")),
        (["import time", "time.sleep(50)"], "1", lost("waited longer than 0.4 s")),
    ]
    with ThreadPoolExecutor(len(cases)) as pool:
        results = list(pool.map(lambda case: strict.run(case[0], case[1]), cases))
    for (history, code, expected), result in zip(cases, results, strict=True):
        assert result == expected, (history, code)


def test_code_that_computes_is_not_stopped_by_load(strict: PythonTool) -> None:
    code = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass\n'done'"
    calls = 5 * processor_share()  # each gets a fifth of a processor: over 1 s, while idle_seconds is 0.5
    with ThreadPoolExecutor(calls) as pool:
        results = set(pool.map(lambda _: strict.run([], code), range(calls)))
    assert results == {CellResult("'done'\n", "ok", keep=True)}


def test_so_many_calls_run_at_a_time_and_waiting_for_a_place_does_not_count() -> None:
    code = "import time\nbegin = time.monotonic()\ntime.sleep(0.2)\n(begin, time.monotonic())"
    with PythonTool(Limits(idle_seconds=0.6), calls=2) as tool, ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: tool.run([], code), range(8)))
    assert {result.ended for result in results} == {"ok"}
    spans = [tuple(map(float, result.output.strip("()\n").split(","))) for result in results]
    most = max(sum(begin <= moment < end for begin, end in spans) for moment, _ in spans)
    assert most == 2


def test_a_place_is_free_again_after_each_end() -> None:
    with PythonTool(Limits(idle_seconds=0.1), calls=1) as tool:
        for code in ("import time\ntime.sleep(9)", "import os\nos.abort()", "1 / 0", "2"):
            last = tool.run([], code)
    assert last.output == "2\n"


def test_calls_at_a_time_are_this_processs_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    for ranks, share in ((None, 16), ("1", 16), ("3", 5), ("16", 1), ("64", 1)):
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if ranks:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert processor_share() == share
    for wrong in ("0", "-1", "two", ""):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", wrong)
        with pytest.raises(ValueError, match=f"LOCAL_WORLD_SIZE .*got '{wrong}'"):
            PythonTool()
    with pytest.raises(ValueError, match="calls >= 1, got 0"):
        PythonTool(calls=0)


def test_a_call_that_something_else_killed_is_made_again(tool: PythonTool, calm: None) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(tool.run, ["a = 3"], "import time\ntime.sleep(0.5)\na")
        while not (found := [child for zygote in zygotes() for child in children(zygote)]):
            time.sleep(0.01)
        os.kill(found[0], signal.SIGKILL)
        assert running.result() == CellResult("3\n", "ok", keep=True)


def test_a_machine_that_does_not_run_the_code_is_to_blame(
    tool: PythonTool, calm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "STARVED", 0.02)
    with pytest.raises(SandboxError, match="overloaded"):
        tool.run([], "while True: pass")


def test_who_waits() -> None:
    assert not call.is_waiting(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        deadline = time.monotonic() + 20
        while "S" not in Path(f"/proc/{process.pid}/stat").read_text().split()[2]:
            assert time.monotonic() < deadline
        assert call.is_waiting(process.pid)
        process.kill()
    assert call.is_waiting(process.pid)  # gone: so far as one can tell
