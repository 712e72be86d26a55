r"""Whether a mathematical answer equals the gold one, decided by math-verify in processes of its own.

The answer is written by a model and may be anything (``9^{9^{9^9}}``, braces ten thousand deep): parsing and
comparing it can take for ever, fill the memory or crash, and the library's own time limits need the main
thread. So it runs in a few worker processes with limits on processor time and memory.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trace_rl.sandbox.processors import processor_share
from trace_rl.tasks.boxed import last_boxed

MAX_CHARACTERS = 2000  # of an answer; the longest gold answers of the known sets have about 150
MAX_DEPTH = 100  # of its brackets: the parser takes long over deeper ones, and no answer has them
MEMORY_BYTES = 1 << 30  # address space of one worker
MAX_WORKERS = 4  # by default: a check takes milliseconds
START_SECONDS = 120.0  # for a worker to start and import math-verify
_ENDING_SECONDS = 30.0  # for a process to end that has closed its pipe
_STARVED = 20  # a check never waits: if it takes so many times its seconds, the machine does not run it
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
CACHED_VERDICTS = 20_000
_TRIES = 2  # checks of one answer that run out of time, before that is its verdict
_WORKER = Path(__file__).with_name("math_check_worker.py")
_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
_Key = tuple[str, tuple[str, ...]]  # an answer and its golds


class MathCheckError(RuntimeError):
    """Answers cannot be checked at all; the message says why. Never the answer's fault."""


@dataclass(frozen=True)
class Verdict:
    """``correct``, and in ``reason`` a few words for logs: to what it is equal, or why it is not correct."""

    correct: bool
    reason: str


class MathChecker:
    """Compares answers in ``workers`` processes, which start when first needed; safe to call from threads.

    Args:
        seconds: processor time of one check, > 0, so that no verdict depends on what else the machine does.
        workers: processes at most, >= 1; None for one on each processor of this process, at most 4.

    Raises ValueError for values out of range and MathCheckError if math-verify is not installed.
    """

    def __init__(self, seconds: float = 5.0, workers: int | None = None) -> None:
        workers = min(MAX_WORKERS, processor_share()) if workers is None else workers
        if not 0 < seconds < math.inf or workers < 1:
            raise ValueError(f"need seconds > 0 and workers >= 1, got {seconds} and {workers}")
        if find_spec("math_verify") is None:
            raise MathCheckError("comparing answers needs math-verify: pip install math-verify")
        self._seconds = seconds
        self._slots: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(workers):
            self._slots.put(None)
        self._lock = threading.Lock()
        self._running: set[_Worker] = set()
        self._verdicts: OrderedDict[_Key, Verdict] = OrderedDict()
        self._failures: OrderedDict[_Key, int] = OrderedDict()
        self._closed = False
        atexit.register(self.close)

    def check(self, answer: str, golds: Sequence[str]) -> Verdict:
        r"""Judges the last ``\boxed{...}`` of ``answer``, or the whole of it if there is none.

        A check that runs out of time or crashes two workers is not correct; it is remembered after the second
        try, other verdicts at once. Raises MathCheckError if no worker can be started, if something else (the
        machine out of memory) killed two workers at it, or if the checker is closed.
        """
        boxed = last_boxed(answer)
        expression = answer.strip() if boxed is None else boxed
        if not expression:
            return Verdict(False, "empty")
        if len(expression) > MAX_CHARACTERS:
            return Verdict(False, f"{len(expression)} characters, at most {MAX_CHARACTERS} are read")
        if _depth(expression) > MAX_DEPTH:
            return Verdict(False, f"brackets more than {MAX_DEPTH} deep")
        key = expression, tuple(golds)
        with self._lock:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
                return self._verdicts[key]
        try:
            reply = self._ask({"answer": expression, "golds": list(golds)})
        except _WorkerFailure as failure:
            if failure.by_the_answer:
                return self._remember_failure(key, Verdict(False, str(failure)))
            raise MathCheckError(f"an answer could not be checked: {failure}") from failure
        verdict = Verdict(reply["correct"] is True, str(reply["reason"]))
        with self._lock:
            _put(self._verdicts, key, verdict)
        return verdict

    def _remember_failure(self, key: _Key, verdict: Verdict) -> Verdict:
        with self._lock:
            tries = self._failures.pop(key, 0) + 1
            if tries < _TRIES:
                _put(self._failures, key, tries)
            else:
                _put(self._verdicts, key, verdict)
        return verdict

    def probe(self) -> None:
        """Makes one trivial check: raises MathCheckError with the reason if none can be made here."""
        verdict = self.check("1/2", ["0.5"])
        if not verdict.correct:
            raise MathCheckError(f"math-verify does not find 1/2 equal to 0.5: {verdict.reason}")

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply of a worker, or of a second one if the first died of anything but its time."""
        worker = self._slots.get()
        try:
            worker = self._still_usable(worker) or self._start()
            try:
                return worker.ask(request, self._seconds)
            except _OutOfTime:
                raise
            except _WorkerFailure:
                worker = self._start()
                return worker.ask(request, self._seconds)
        except _WorkerFailure as failure:
            if self._closed:
                raise MathCheckError("the checker is closed") from failure
            raise
        finally:
            self._slots.put(self._still_usable(worker))

    def close(self) -> None:
        """Kills the workers; checks under way or still to come raise MathCheckError."""
        with self._lock:
            self._closed = True
            for worker in self._running:
                worker.kill()
        slots = []
        with contextlib.suppress(queue.Empty):
            while True:
                slots.append(self._slots.get_nowait())
        for slot in slots:  # the others are in use: whoever has one finds it killed
            self._slots.put(self._still_usable(slot))
        atexit.unregister(self.close)

    def _start(self) -> _Worker:
        try:
            with self._lock:  # close() sees every worker, or none is started
                if self._closed:
                    raise MathCheckError("the checker is closed")
                worker = _Worker(self._seconds)
                self._running.add(worker)
            worker.wait_until_ready()
        except (_WorkerFailure, OSError) as failure:
            reason = "the checker is closed" if self._closed else f"no worker can be started: {failure}"
            raise MathCheckError(reason) from failure
        return worker

    def _still_usable(self, worker: _Worker | None) -> _Worker | None:
        if worker is None or (worker.alive() and not self._closed):
            return worker
        worker.stop()
        with self._lock:
            self._running.discard(worker)
        return None


def _put(remembered: OrderedDict[_Key, Any], key: _Key, value: Any) -> None:
    remembered[key] = value
    if len(remembered) > CACHED_VERDICTS:
        remembered.popitem(last=False)


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(0, depth - 1)
    return deepest


class _WorkerFailure(Exception):
    """The worker gave no reply and has been stopped; ``by_the_answer`` says whether the answer may be why."""

    def __init__(self, reason: str, by_the_answer: bool = False) -> None:
        super().__init__(reason)
        self.by_the_answer = by_the_answer


class _OutOfTime(_WorkerFailure):
    """The check took more processor time than it may."""


class _Worker:
    """One process and the pipes to it, used by one thread at a time."""

    def __init__(self, seconds: float) -> None:
        # By path and with -P: no package is imported but math_verify, and nothing from the current folder.
        # No death signal of the parent: it would follow the death of the thread that starts the worker.
        limits = [str(MEMORY_BYTES), str(seconds)]
        env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER), *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env,
            start_new_session=True,  # an interrupt at the terminal is the trainer's to handle
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout

    def wait_until_ready(self) -> None:
        reply = self._reply(START_SECONDS)
        if "error" in reply:
            self.stop()
            raise _WorkerFailure(reply["error"])

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        try:
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
        except OSError as error:  # it died between two checks
            raise self._failure() from error
        try:
            reply = self._reply(_STARVED * max(1.0, seconds))
        except _WorkerFailure as failure:
            if self._process.returncode == -signal.SIGPROF:
                reason = f"no verdict within {seconds:g} s of processor time"
                raise _OutOfTime(reason, by_the_answer=True) from failure
            raise
        if reply["retire"]:
            self.stop()
        return reply

    def _reply(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._replies, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self.stop()
                    raise _WorkerFailure(f"no reply within {seconds:g} s: the machine is overloaded")
                piece = os.read(self._replies.fileno(), 1 << 16)
                if not piece:
                    raise self._failure()
                line += piece
        value: dict[str, Any] = json.loads(line)
        return value

    def _failure(self) -> _WorkerFailure:
        # It closed its pipe: it has ended or is about to, and how it ends must not be for our signal.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_SECONDS)
        self.stop()
        status = self._process.returncode
        by_the_answer = status > 0 or -status in _CRASHES
        return _WorkerFailure(f"the process that compares ended with {status}", by_the_answer)

    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends the process, from any thread; whoever uses it notices and calls :meth:`stop`."""
        self._process.kill()

    def stop(self) -> None:
        """Ends the process and closes the pipes."""
        self._process.kill()
        self._process.wait()
        self._replies.close()
        with contextlib.suppress(BrokenPipeError):  # a request that the process did not read any more
            self._requests.close()
