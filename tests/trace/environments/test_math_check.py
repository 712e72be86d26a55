"""The processes behind the checker: hostile answers, crashes, threads, and what they must not inherit."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trace_rl.environments import math_check
from trace_rl.environments.math_check import MAX_CHARACTERS, MathChecker, MathCheckError, Verdict

ENDLESS = "9^{9^{9^9}}"
DEADLINE = 60.0  # only so that a failing test ends


def children(parent: int | None = None) -> list[int]:
    """The worker processes of ``parent``, by default of this process."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(folder.name)
            ours = int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == (parent or os.getpid())
            if ours and b"math_check_worker" in (folder / "cmdline").read_bytes():
                found.append(pid)
    return found


def state(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for(condition) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def make():
    checkers = []

    def make_checker(**options) -> MathChecker:
        checkers.append(MathChecker(**{"seconds": 30.0, "workers": 1, **options}))
        return checkers[-1]

    yield make_checker
    for checker in checkers:
        checker.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seconds": 0}, "seconds > 0"),
        ({"seconds": float("inf")}, "seconds > 0"),
        ({"workers": 0}, "workers"),
    ],
)
def test_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        MathChecker(**options)


def test_processes_start_when_needed_and_end_with_the_checker(make):
    checker = make()
    assert checker.check("", ["5"]) == Verdict(False, "empty")
    for answer in ("5" * 1_000_000, r"\boxed{" + "1" * (MAX_CHARACTERS + 1) + "}"):
        verdict = checker.check(answer, ["5"])
        assert (verdict.correct, "at most 2000" in verdict.reason) == (False, True)
    assert children() == []
    thread = threading.Thread(target=checker.check, args=("4", ["5"]))
    thread.start()
    thread.join()
    (worker,) = children()
    assert checker.check("5", ["5"]) == Verdict(True, "equal to 5")
    assert checker.check("word " * 100_000 + r"\boxed{5}", ["5"]).correct
    assert children() == [worker]  # it outlives the thread that started it
    checker.close()
    assert children() == []
    with pytest.raises(MathCheckError, match="closed"):
        checker.check("7", ["7"])


HOSTILE = [
    r"\boxed{" + "{" * 900 + "5" + "}" * 900 + "}",
    r"\sum_{n=1}^{\infty} \frac{\sin(n^n)}{n!^n}",
    r"\sqrt[" * 100 + "2",
    "$" * 999,
    "\x00\ud800\n5\r",
    r"{\"correct\": true}",
]


def test_hostile_answers(make):
    checker = make(seconds=0.5)
    assert checker.check(ENDLESS, ["5"]) == Verdict(False, "no verdict within 0.5 s of processor time")
    for answer in HOSTILE:
        assert not checker.check(answer, ["5"]).correct, answer
        assert checker.check("10 / 2", ["5", answer]).correct, answer


def test_time_in_which_it_does_not_run_is_not_the_answers(make):
    checker = make(seconds=0.5)
    checker.probe()
    (worker,) = children()
    os.kill(worker, signal.SIGSTOP)  # like a processor that is busy with others
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(checker.check, "10 / 2", ["5"])
        with pytest.raises(TimeoutError):
            under_way.result(timeout=1.0)
        os.kill(worker, signal.SIGCONT)
        assert under_way.result(DEADLINE).correct


@pytest.fixture
def signalled(monkeypatch):
    """Has the workers of the next checks get these signals while at work, one signal for each worker."""
    signals = []
    ask = math_check._Worker.ask

    def ask_and_signal(worker, request, seconds):
        if signals:
            threading.Timer(0.1, worker._process.send_signal, [signals.pop(0)]).start()
        return ask(worker, request, seconds)

    monkeypatch.setattr(math_check._Worker, "ask", ask_and_signal)
    return signals


def test_a_worker_that_dies_is_replaced_and_its_check_made_again(make, signalled):
    checker = make(seconds=0.5)
    checker.check("4", ["5"])
    (worker,) = children()
    os.kill(worker, signal.SIGKILL)  # between two checks
    wait_for(lambda: state(worker) == "Z")
    assert checker.check("5", ["5"]).correct
    (second,) = children()
    signalled.append(signal.SIGKILL)
    assert checker.check(ENDLESS, ["5"]) == Verdict(False, "no verdict within 0.5 s of processor time")
    assert signalled == []
    assert second not in children()


@pytest.mark.parametrize(
    ("number", "starved", "reason"),
    [(signal.SIGKILL, 20, "ended with -9"), (signal.SIGSTOP, 0.02, "the machine is overloaded")],
)
def test_what_the_machine_does_to_two_workers_is_no_verdict(
    make, signalled, monkeypatch, number, starved, reason
):
    monkeypatch.setattr(math_check, "_STARVED", starved)
    signalled += [number, number]
    with pytest.raises(MathCheckError, match=f"could not be checked: .*{reason}"):
        make().check(ENDLESS, ["5"])
    assert (signalled, children()) == ([], [])


def test_an_answer_that_crashes_two_workers_is_not_correct(make, signalled):
    signalled += [signal.SIGSEGV, signal.SIGSEGV]
    checker = make()
    assert checker.check(ENDLESS, ["5"]) == Verdict(False, "the process that compares ended with -11")
    assert signalled == []
    checker.probe()


def test_the_probe_says_what_is_wrong(make, monkeypatch):
    wrong = {"correct": False, "reason": "not comparable", "retire": False}
    monkeypatch.setattr(math_check._Worker, "ask", lambda *_: wrong)
    with pytest.raises(MathCheckError, match=r"1/2 equal to 0\.5: not comparable"):
        make().probe()


def test_many_threads_share_few_processes(make):
    checker = make(workers=2)
    most = 0

    def check(number: int) -> Verdict:
        nonlocal most
        verdict = checker.check(f"{number} + 1", [str(number + 1 if number % 2 else number)])
        if number % 8 == 0:
            most = max(most, len(children()))
        return verdict

    with ThreadPoolExecutor(32) as pool:
        verdicts = list(pool.map(check, range(64)))
    assert [verdict.correct for verdict in verdicts] == [bool(number % 2) for number in range(64)]
    assert most == 2


def test_verdicts_are_remembered_and_failures_after_two_tries(make, monkeypatch):
    asked = []

    class Worker:
        def __init__(self, seconds):
            self.wait_until_ready = self.kill = self.stop = lambda: None

        def alive(self):
            return True

        def ask(self, request, seconds):
            asked.append((request["answer"], request["golds"]))
            if request["answer"] == ENDLESS:
                raise math_check._OutOfTime("no verdict", by_the_answer=True)
            return {"correct": True, "reason": ""}

    monkeypatch.setattr(math_check, "_Worker", Worker)
    checker = make()
    for answer in ("5", r"so \boxed{5}", " 5 ", ENDLESS, ENDLESS, ENDLESS, "{" * 101 + "5" + "}" * 101):
        assert checker.check(answer, ["5"]).correct == ("5" in answer and len(answer) < 20)
    checker.check("5", ["5", "6"])
    assert asked == [("5", ["5"]), (ENDLESS, ["5"]), (ENDLESS, ["5"]), ("5", ["5", "6"])]


def test_brackets_too_deep_are_not_parsed(make):
    checker = make()
    for left, right in ("{}", "()", "[]"):
        verdict = checker.check(left * 101 + "5" + right * 101, ["5"])
        assert verdict == Verdict(False, "brackets more than 100 deep")
    assert children() == []
    assert checker.check("+".join(["(1)"] * 200), ["200"]).correct


def test_closing_ends_checks_under_way_and_waiting():
    checker = MathChecker(seconds=30.0, workers=1)
    checker.check("4", ["5"])
    with ThreadPoolExecutor(3) as pool:
        checks = [pool.submit(checker.check, f"{i} + {ENDLESS}", ["5"]) for i in range(3)]
        wait_for(lambda: checker._slots.empty())
        checker.close()
        for check in checks:
            with pytest.raises(MathCheckError, match="closed"):
                check.result(DEADLINE)
    assert children() == []


def test_workers_inherit_nothing_of_the_trainer(make, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("SOME_TOKEN", "secret")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.set_inheritable(True)
        make().check("5", ["5"])
    (worker,) = children()
    files = [os.readlink(file) for file in Path(f"/proc/{worker}/fd").iterdir()]
    assert not any(file.startswith("socket:") for file in files)
    environment = Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
    assert b"CUDA_VISIBLE_DEVICES=" in environment
    assert not any(b"SOME_TOKEN" in variable for variable in environment)
    limits = Path(f"/proc/{worker}/limits").read_text()
    assert str(math_check.MEMORY_BYTES) in next(
        line for line in limits.splitlines() if "address space" in line
    )
    assert os.getsid(worker) != os.getsid(0)


PARENT = f"""
import threading, time
from trace_rl.environments.math_check import MathChecker
idle, busy = (MathChecker(seconds=0.5, workers=1) for _ in range(2))
for checker in idle, busy:
    checker.check("4", ["5"])
threading.Thread(target=busy.check, args=("{ENDLESS}", ["5"]), daemon=True).start()
print("ready", flush=True)
time.sleep(600)
"""


def test_workers_die_with_their_parent():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    try:
        assert parent.stdout.readline() == b"ready\n"
        workers = children(parent.pid)
        assert len(workers) == 2
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    wait_for(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))


def test_a_missing_library_is_an_error_not_a_verdict(make, monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('half installed')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(MathCheckError, match=r"no worker can be started: .*pip install math-verify.*half"):
        make().check("5", ["5"])
    monkeypatch.setattr(math_check, "find_spec", lambda name: None)
    with pytest.raises(MathCheckError, match="pip install math-verify"):
        MathChecker()
