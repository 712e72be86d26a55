"""The process that model code is forked from: imports the math packages once, runs no model code itself.

``python -m trace_rl.sandbox.zygote SOCKET PARENT DIRECTORY LIMITS``, started by :mod:`zygote_process`. One
datagram on the socket asks for one call: the call's directory, and four descriptors (control, output, status,
source). On control, the child's process id goes back, and when it has ended ``[wait status, seconds of processor
time]``; the other side asks for its end by closing control or its sending half.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from . import confine
from .cells import OUTPUT, STATUS
from .child import Setting, prepare_interpreter, run_child
from .limits import Limits
from .readable import reading_rules

PACKAGES = ["numpy", "sympy", "mpmath"]
_PRELOADED = """
    math cmath fractions decimal itertools collections collections.abc random statistics functools operator string
    re json datetime time calendar heapq bisect typing dataclasses enum copy io contextlib textwrap hashlib numbers
    array struct abc types secrets inspect ctypes zlib bz2 lzma csv pprint queue threading traceback
    numpy.linalg numpy.random numpy.fft numpy.polynomial sympy.stats sympy.ntheory
"""
_POLL_SECONDS = 1.0
READY = b"ready"


@dataclass
class _Call:
    pid: int
    exited: int  # pidfd
    control: socket.socket


def main(arguments: list[str]) -> None:
    """Serves calls until the socket closes or the parent is gone."""
    descriptor, parent, directory = int(arguments[0]), int(arguments[1]), arguments[2]
    requests = socket.socket(fileno=fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10))
    os.close(descriptor)
    null = os.open(os.devnull, os.O_RDWR)
    for place in (STATUS, OUTPUT):  # so that no later descriptor lies where the child puts its own
        os.dup2(null, place)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in [*PACKAGES, *_PRELOADED.split()]:
        importlib.import_module(name)
    limits = Limits(**json.loads(arguments[3]))
    readable = reading_rules(PACKAGES)
    weak = _weakness(readable)
    prepare_interpreter()
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    gc.collect()
    gc.freeze()  # a child's collector leaves the pages alone that all share
    requests.send(f"!{weak}".encode() if weak else READY)
    if not weak:
        _Zygote(requests, parent, Setting(limits, os.getpid(), readable, mapped)).serve()
    shutil.rmtree(directory, ignore_errors=True)


class _Zygote:
    def __init__(self, requests: socket.socket, parent: int, setting: Setting) -> None:
        self._requests = requests
        self._parent = parent
        self._setting = setting
        self._poll = select.poll()
        self._poll.register(requests, select.POLLIN)
        self._by_control: dict[int, _Call] = {}
        self._by_exit: dict[int, _Call] = {}

    def serve(self) -> None:
        # PR_SET_PDEATHSIG would fire when the thread ends that started this process, so the parent is polled.
        while os.getppid() == self._parent:
            events = {descriptor for descriptor, _ in self._poll.poll(_POLL_SECONDS * 1000)}
            for descriptor in events & self._by_exit.keys():
                self._ended(self._by_exit.pop(descriptor))
            for descriptor in events & self._by_control.keys():
                call = self._by_control.pop(descriptor)
                self._poll.unregister(descriptor)
                os.kill(call.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
            # Last, for it opens descriptors, whose numbers may be those of older events.
            if self._requests.fileno() in events and not self._receive():
                break
        self._kill_all()

    def _receive(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._requests, 4096, 4)
        if not data:
            return False
        control, output, status, source = descriptors
        pid = os.fork()
        if pid == 0:
            run_child(self._setting, data.decode(), output, status, source)
        for descriptor in (output, status, source):
            os.close(descriptor)
        call = _Call(pid, os.pidfd_open(pid), socket.socket(fileno=control))
        _tell(call, pid)
        self._by_control[control] = self._by_exit[call.exited] = call
        self._poll.register(control, select.POLLIN)
        self._poll.register(call.exited, select.POLLIN)
        return True

    def _ended(self, call: _Call) -> None:
        self._poll.unregister(call.exited)
        os.close(call.exited)
        _, status, usage = os.wait4(call.pid, 0)
        if self._by_control.pop(call.control.fileno(), None):
            self._poll.unregister(call.control)
        _tell(call, [status, usage.ru_utime + usage.ru_stime])
        call.control.close()

    def _kill_all(self) -> None:
        for call in self._by_exit.values():
            os.kill(call.pid, signal.SIGKILL)
            os.waitpid(call.pid, 0)


def _tell(call: _Call, value: object) -> None:
    with suppress(OSError):  # the caller may have gone
        call.control.send(json.dumps(value).encode())


def _weakness(readable: list[tuple[int, int]]) -> str:
    """What is not confined in a child although it should be; forks one to see."""
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory(dir=".") as own, tempfile.NamedTemporaryFile(dir=".") as other:
        pid = os.fork()
        if pid == 0:
            try:
                here = os.open(own, os.O_PATH)
                confine.confine(readable, here)
                os.write(writing, confine.probe(os.path.abspath(other.name)).encode() or b"nothing")
            except BaseException as error:
                os.write(writing, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
    os.close(writing)
    with open(reading) as pipe:
        said = pipe.read() or "no answer"
    return "" if said == "nothing" else said


if __name__ == "__main__":
    main(sys.argv[1:])
