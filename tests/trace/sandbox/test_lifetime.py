"""The processes behind the tool: started when needed, gone when not, never more than they should be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trace_rl.sandbox import Limits, PythonTool, SandboxError

from .processes import children, directory_of, wait_until_gone, zygotes


def test_64_first_calls_start_one_process() -> None:
    before = zygotes()
    with PythonTool() as tool:
        assert zygotes() == before
        with ThreadPoolExecutor(64) as pool:
            results = list(pool.map(lambda i: tool.run([f"a = {i}"], "a * a").output, range(64)))
        assert results == [f"{i * i}\n" for i in range(64)]
        (zygote,) = set(zygotes()) - set(before)
        assert children(zygote) == []
        assert [file.name for file in directory_of(zygote).iterdir()] == ["zygote.log"]
    assert zygotes() == before


def test_it_outlives_the_thread_that_started_it_and_is_started_again_when_killed() -> None:
    before = zygotes()
    with PythonTool() as tool:
        first = threading.Thread(target=tool.run, args=([], "1"))
        first.start()
        first.join()
        (pid,) = set(zygotes()) - set(before)
        time.sleep(0.1)
        assert tool.run([], "2").output == "2\n"
        assert set(zygotes()) - set(before) == {pid}
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(tool.run, [], "import time\ntime.sleep(0.5)\n3")
            while not (sleeping := children(pid)):
                time.sleep(0.01)
            os.kill(pid, signal.SIGKILL)
            assert running.result().output == "3\n"  # run again with another process
        wait_until_gone(sleeping)
        assert set(zygotes()) - set(before) != {pid}
    assert zygotes() == before


def test_closing_ends_calls_in_progress_and_later_ones() -> None:
    tool = PythonTool(Limits(idle_seconds=60))
    tool.run([], "1")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(tool.run, [], "import time\ntime.sleep(50)")
        time.sleep(0.2)
        tool.close()
        with pytest.raises(SandboxError, match="closed"):
            running.result()
    with pytest.raises(SandboxError, match="closed"):
        tool.run([], "1")
    tool.close()


TRAINER = """
import sys, threading, time
from trace_rl.sandbox import Limits, PythonTool
tool = PythonTool(Limits(idle_seconds=1000))
tool.run([], "1")
if sys.argv[1] == "busy":
    threading.Thread(target=tool.run, args=([], "import time\\ntime.sleep(900)"), daemon=True).start()
    time.sleep(0.3)
print("ready", flush=True)
if sys.argv[1] == "busy":
    time.sleep(900)
"""


def test_all_is_gone_when_the_trainer_is_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-P", "-c", TRAINER, "busy"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"ready\n"
        (zygote,) = zygotes(trainer.pid)
        processes = [zygote, *children(zygote)]
        assert len(processes) == 2
        trainer.kill()
    wait_until_gone(processes)
    assert list(tmp_path.iterdir()) == []


def test_all_is_gone_when_the_trainer_ends_without_closing(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-P", "-c", TRAINER, "idle"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.stderr, result.returncode) == ("ready\n", "", 0)
    assert list(tmp_path.iterdir()) == []


def test_a_fork_of_the_trainer_gets_its_own(tool: PythonTool, calm: None) -> None:
    code = (
        "import os\nfrom trace_rl.sandbox import PythonTool\ntool = PythonTool()\ntool.run([], '1')\n"
        "pid = os.fork()\nprint(tool.run([], '2 + 3').output, end='', flush=True)\n"
        "if pid: os.waitpid(pid, 0); print(tool.run([], '4').output, end='')\n"
    )
    command = [sys.executable, "-P", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.stderr) == ("5\n5\n4\n", "")


MISSING = """
import ctypes, sys
from trace_rl.sandbox import PythonTool, SandboxError
from trace_rl.sandbox.bpf import ALLOW, REFUSE, UNKNOWN, assemble
from trace_rl.sandbox.confine import _FilterProgram
number, argument, answer = {"landlock": (444, None, UNKNOWN), "seccomp": (None, 21, REFUSE)}[sys.argv[1]]
prctl = {"x86_64": 157, "aarch64": 167}[__import__("platform").machine()]
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, 444), (6, 0, 0, UNKNOWN)]
if argument:
    steps = [(0x20, 0, 0, 0), (0x15, 0, 3, prctl), (0x20, 0, 0, 16), (0x15, 0, 1, argument), (6, 0, 0, REFUSE)]
steps.append((6, 0, 0, ALLOW))
libc = ctypes.CDLL(None)
libc.prctl(38, 1, 0, 0, 0)
assert libc.prctl(22, 2, ctypes.byref(_FilterProgram(len(steps), assemble(steps)))) == 0
try:
    PythonTool().probe()
except SandboxError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize(("what", "words"), [("landlock", "Linux 5.13"), ("seccomp", "seccomp filters")])
def test_it_refuses_to_run_where_the_kernel_cannot_confine(what: str, words: str) -> None:
    result = subprocess.run([sys.executable, "-P", "-c", MISSING, what], capture_output=True, text=True)
    assert result.stdout.startswith("refused: "), result
    assert words in result.stdout


def test_the_probe_sees_what_an_unconfined_process_can_do(tmp_path: Path) -> None:
    code = "import sys\nfrom trace_rl.sandbox.confine import probe\nprint(probe(sys.argv[1]))"
    file = tmp_path / "file"
    file.touch()
    result = subprocess.run([sys.executable, "-P", "-c", code, str(file)], capture_output=True, text=True)
    assert result.stdout.count(";") == 3, result
