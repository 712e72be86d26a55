"""Starts and ends the zygote, on the trainer's side."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from .limits import Limits, SandboxError

_START_SECONDS = 120.0  # imports of numpy and sympy from a cold, remote disk
_READY = b"ready"
_PROGRAM = "trace_rl.sandbox.zygote"
# -I would ignore PYTHONHASHSEED too; without other variables, -s -P is the same but for that.
_OPTIONS = ["-s", "-P", "-B", "-X", "utf8"]
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
}
_INHERITED = "LD_LIBRARY_PATH"  # without it Python or numpy may not start; no code sees it


class ZygoteProcess:
    """A running zygote, with a directory of its own in the system's temporary directory.

    Attributes:
        directory: parent of the calls' directories.
        owner: the process that started it; a fork of that process must not use it.
        places: to be held during a call, so that not more than ``calls`` run at a time.

    Raises SandboxError if it does not start or cannot confine its children.
    """

    def __init__(self, limits: Limits, calls: int) -> None:
        self.owner = os.getpid()
        self.places = threading.BoundedSemaphore(calls)
        self.directory = tempfile.mkdtemp(prefix="python-tool-")
        self._sending = threading.Lock()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        log = Path(self.directory, "zygote.log")
        arguments = [str(theirs.fileno()), str(self.owner), self.directory, json.dumps(asdict(limits))]
        try:
            with theirs, log.open("wb") as stderr:
                self._process = subprocess.Popen(
                    [sys.executable, *_OPTIONS, "-m", _PROGRAM, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    env=_ENVIRONMENT | {k: v for k, v in os.environ.items() if k == _INHERITED},
                    cwd=self.directory,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        except OSError as error:
            self._forget()
            raise SandboxError(f"the Python tool could not start {sys.executable}: {error}") from error
        try:
            answer = self._first_answer()
        except BaseException:
            self.kill()
            raise
        if answer != _READY:
            reason = answer.decode(errors="replace") or log.read_text(errors="replace")[-2000:] or "no answer"
            self.kill()
            raise SandboxError(f"the Python tool's sandbox did not start: {reason}")

    def _first_answer(self) -> bytes:
        self._requests.settimeout(_START_SECONDS)
        try:
            return self._requests.recv(4096)
        except TimeoutError:
            return f"no answer within {_START_SECONDS:g} s".encode()
        finally:
            self._requests.settimeout(None)

    def send(self, request: bytes, descriptors: list[int]) -> None:
        """Hands over one call; OSError if the zygote has gone."""
        with self._sending:  # a socket closed meanwhile would be another file's number
            socket.send_fds(self._requests, [request], descriptors)

    def alive(self) -> bool:
        """Whether it runs; also reaps it if it has ended."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends it with its children, which die with it, and removes its directory."""
        if self.owner != os.getpid():
            self._requests.close()  # the files and the process are the other's
            return
        with suppress(ProcessLookupError):
            if self.alive():
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._forget()

    def _forget(self) -> None:
        with self._sending:
            self._requests.close()
        shutil.rmtree(self.directory, ignore_errors=True)
