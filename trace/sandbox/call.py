"""One call seen from the trainer: hands the cells to the zygote, watches, and has the child killed in time.

The kernel stops a child for its processor time. What is counted here is the time in which it only waits, so that
a loaded machine, on which everything takes longer, stops no code that would have come to its end on a free one.
"""

from __future__ import annotations

import codecs
import json
import os
import select
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from .cells import CONFINED, REPLAYED
from .limits import Limits, SandboxError

MAX_FILES = 256
_START_SECONDS = 60.0
_KILL_SECONDS = 30.0
_LOOK_SECONDS = 0.05  # between two looks at the child and into its directory
STARVED = 20  # times as long as its limits together: then it is the machine that does not run the child
_MIB = 1 << 20

Phase = Literal["start", "replay", "cell"]
Stop = Literal["", "idle", "starved", "output", "files"]
Send = Callable[[bytes, list[int]], None]  # a request and its descriptors; OSError if nobody is there


class ZygoteLost(RuntimeError):
    """The zygote ended or does not answer; the call may be repeated with another one."""


@dataclass(frozen=True)
class Ending:
    """How a child ended.

    Attributes:
        phase: how far it came.
        stop: why it was killed from here, or ``""``.
        status: its wait status.
        cpu_seconds: processor time it took in all.
        output: text of the new cell, at most the allowed characters.
        setup_error: what went wrong before model code ran, or ``""``.
    """

    phase: Phase
    stop: Stop
    status: int
    cpu_seconds: float
    output: str
    setup_error: str


def supervise(send: Send, parent: str, cells: Sequence[str], limits: Limits) -> Ending:
    """Runs ``cells`` in a child of the zygote that ``send`` reaches; the child has ended when this returns.

    ``parent``: where the call's directory is made, and removed afterwards. Raises ZygoteLost.
    """
    try:
        directory = tempfile.mkdtemp(prefix="call-", dir=parent)
    except FileNotFoundError as error:
        raise ZygoteLost("its directory is gone") from error
    try:
        with _Call(send, directory, cells, limits) as call:
            return call.watch()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class _Call(ExitStack):
    def __init__(self, send: Send, directory: str, cells: Sequence[str], limits: Limits) -> None:
        super().__init__()
        self._directory = directory
        self._limits = limits
        self._text = _Text(limits.output_chars)
        self._progress = b""
        self._pid = 0
        with ExitStack() as theirs:
            try:
                self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self.enter_context(self._control)
                theirs.enter_context(control)
                self._output, output = self._pipe(theirs)
                self._status, status = self._pipe(theirs)
                source = os.memfd_create("cells")
                theirs.callback(os.close, source)
                with open(source, "wb", closefd=False) as file:
                    file.write(json.dumps(list(cells)).encode())
                os.lseek(source, 0, os.SEEK_SET)
                descriptors = [control.fileno(), output, status, source]
            except OSError as error:  # too many open files, no memory
                self.close()
                raise SandboxError(f"the Python tool cannot make a call: {error}") from error
            try:
                send(directory.encode(), descriptors)
            except OSError as error:
                self.close()
                raise ZygoteLost(str(error)) from error

    def _pipe(self, theirs: ExitStack) -> tuple[int, int]:
        reading, writing = os.pipe()
        self.callback(os.close, reading)
        theirs.callback(os.close, writing)
        os.set_blocking(reading, False)
        return reading, writing

    def watch(self) -> Ending:
        watched = {self._control.fileno(), self._output, self._status}
        stop: Stop = ""
        phase: Phase = "start"
        begun = looked = time.monotonic()
        idle = 0.0
        while True:
            now = time.monotonic()
            if phase != self._phase():
                phase, begun, idle = self._phase(), now, 0.0
            elif self._pid and is_waiting(self._pid):
                idle += now - looked
            looked = now
            if not stop:
                stop = self._violation(phase, now - begun, idle)
                if stop:
                    self._control.shutdown(socket.SHUT_WR)
                    begun = now
                    watched.discard(self._output)
            elif now - begun >= _KILL_SECONDS:
                raise ZygoteLost(f"it did not end a call within {_KILL_SECONDS:g} s")
            for descriptor in _readable(watched, _LOOK_SECONDS):
                if descriptor == self._control.fileno():
                    end = self._receive()
                    if end:
                        return self._ending(stop, *end)
                elif not self._read(descriptor):
                    watched.discard(descriptor)

    def _violation(self, phase: Phase, elapsed: float, idle: float) -> Stop:
        if self._text.too_long:
            return "output"
        if _too_full(self._directory, self._limits.file_mib * _MIB):
            return "files"
        if phase == "start":
            return "starved" if elapsed >= _START_SECONDS else ""
        replay = self._limits.replay_seconds
        may_wait, may_compute = (
            (replay, replay) if phase == "replay" else (self._limits.idle_seconds, self._limits.cpu_seconds)
        )
        if idle >= may_wait:
            return "idle"
        return "starved" if elapsed >= STARVED * (may_wait + may_compute) else ""

    def _phase(self) -> Phase:
        if self._progress.startswith(CONFINED + REPLAYED):
            return "cell"
        return "replay" if self._progress.startswith(CONFINED) else "start"

    def _read(self, descriptor: int) -> bool:
        """Reads once; whether there may be more later."""
        try:
            data = os.read(descriptor, 65536)
        except BlockingIOError:
            return True
        if descriptor == self._output:
            self._text.add(data)
            return bool(data)
        self._progress += data
        return bool(data) and len(self._progress) < 8192

    def _receive(self) -> tuple[int, float] | None:
        """Takes one message of the zygote: the child's process id, or at its end what is returned."""
        try:
            data = self._control.recv(256)
        except OSError as error:
            raise ZygoteLost(str(error)) from error
        if not data:
            raise ZygoteLost("it ended")
        message = json.loads(data)
        if isinstance(message, int):
            self._pid = message
            return None
        status, cpu_seconds = message
        return int(status), float(cpu_seconds)

    def _ending(self, stop: Stop, status: int, cpu_seconds: float) -> Ending:
        self._read(self._status)
        if not stop:  # what lies in the pipe still counts, so that the end does not depend on who was faster
            size = -1
            while size != self._text.size and not self._text.too_long:
                size = self._text.size
                self._read(self._output)
            if self._text.too_long:
                stop = "output"
            elif _too_full(self._directory, self._limits.file_mib * _MIB):
                stop = "files"
        phase = self._phase()
        error = self._progress.decode(errors="replace") if phase == "start" else ""
        return Ending(phase, stop, status, cpu_seconds, self._text.end(), error.removeprefix("!"))


def is_waiting(pid: int) -> bool:
    """Whether a process sleeps or was stopped, rather than runs or would run if there were a processor.

    Also true where /proc does not say, so that such a process is stopped by elapsed time at least.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in b"STt"
    except (OSError, IndexError):
        return True


def _readable(descriptors: set[int], seconds: float) -> list[int]:
    poll = select.poll()  # select() fails beyond descriptor 1023
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(seconds * 1000)]


class _Text:
    """Decodes output as it comes and holds at most ``limit`` characters of it."""

    def __init__(self, limit: int) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._parts: list[str] = []
        self._room = limit
        self.size = 0
        self.too_long = False

    def add(self, data: bytes) -> None:
        self.size += len(data)
        self._append(self._decoder.decode(data))

    def _append(self, text: str) -> None:
        self._parts.append(text[: self._room])
        self.too_long |= len(text) > self._room
        self._room -= len(self._parts[-1])

    def end(self) -> str:
        self._append(self._decoder.decode(b"", final=True))
        return "".join(self._parts)


def _too_full(directory: str, limit: int) -> bool:
    """Whether the files of a flat directory are too many or too large; never follows a link."""
    try:
        with os.scandir(directory) as entries:
            sizes = [entry.stat(follow_symlinks=False).st_size for entry in islice(entries, MAX_FILES + 1)]
    except FileNotFoundError:
        return False  # the tool was closed meanwhile: the code itself cannot remove anything
    return len(sizes) > MAX_FILES or sum(sizes) > limit
