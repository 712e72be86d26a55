"""The Python tool: cells in, observations out, state by replay."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence

from .call import ZygoteLost, supervise
from .confine import missing
from .limits import CellResult, Limits, SandboxError
from .outcome import cell_result, killed_by_another
from .processors import processor_share
from .zygote_process import ZygoteProcess

MAX_SOURCE_CHARS = 1_000_000  # of the history and the new cell together


class PythonTool:
    """Runs hostile Python cells; thread-safe, shared by all rollouts of a process.

    Nothing lives between calls: the state of a rollout is its history, and every call runs the history again
    before the new cell, with the same seeds, so equal histories give equal states in any process and branches
    of a rollout cannot see each other. The process behind it starts with the first call and is started again
    when it died; see docs/sandbox.md for what confines the code.

    Args:
        limits: of each call.
        calls: run at a time at most, >= 1; others wait, and no limit counts that. None for one on each
            processor of this process, see :func:`processor_share`.

    Raises ValueError for ``calls`` below 1.
    """

    def __init__(self, limits: Limits | None = None, calls: int | None = None) -> None:
        calls = processor_share() if calls is None else calls
        if calls < 1:
            raise ValueError(f"need calls >= 1, got {calls}")
        self._limits = limits or Limits()
        self._slot = _Slot(self._limits, calls)
        # Also runs at exit; holds the slot, not the tool, so that a forgotten tool is closed.
        self._finalizer = weakref.finalize(self, _Slot.close, self._slot)

    def run(self, history: Sequence[str], code: str) -> CellResult:
        """Runs ``code`` in the state that the cells of ``history`` left.

        ``history`` is the earlier cells whose result said ``keep``, in order. On ``"replay_failed"`` that
        state is lost: go on with an empty history. Raises SandboxError if the sandbox itself cannot work.
        """
        size = sum(map(len, history)) + len(code)
        if size > MAX_SOURCE_CHARS:
            notice = f"Stopped: all code so far has {size} characters, more than {MAX_SOURCE_CHARS}."
            return CellResult(notice, "exception", keep=False)
        lost: ZygoteLost | None = None
        for last in (False, True):
            zygote = self._slot.current()
            try:
                with zygote.places:
                    ending = supervise(zygote.send, zygote.directory, [*history, code], self._limits)
            except ZygoteLost as error:
                lost = error
                self._slot.discard(zygote)
            else:
                if last or not killed_by_another(ending, self._limits):
                    return cell_result(ending, self._limits)
        raise SandboxError(f"the Python tool's process died twice during one call: {lost}")

    def probe(self) -> None:
        """Runs one trivial call: raises SandboxError with the reason if the sandbox cannot work here."""
        result = self.run([], "1 + 1")
        if result.output != "2\n":
            raise SandboxError(f"the Python tool's sandbox answered 1 + 1 with {result}")

    def close(self) -> None:
        """Ends all processes and removes all files; calls in progress fail with SandboxError."""
        self._finalizer()

    def __enter__(self) -> PythonTool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Slot:
    """The zygote in use, if any."""

    def __init__(self, limits: Limits, calls: int) -> None:
        self._limits = limits
        self._calls = calls
        self._lock = threading.Lock()
        self._zygote: ZygoteProcess | None = None
        self._closed = False

    def current(self) -> ZygoteProcess:
        with self._lock:
            if self._closed:
                raise SandboxError("the Python tool is closed")
            zygote = self._zygote
            if zygote is not None and (zygote.owner != os.getpid() or not zygote.alive()):
                zygote.kill()
                zygote = None
            if zygote is None:
                lacking = missing()
                if lacking:
                    raise SandboxError(lacking)
                zygote = ZygoteProcess(self._limits, self._calls)
            self._zygote = zygote
            return zygote

    def discard(self, zygote: ZygoteProcess) -> None:
        with self._lock:
            if self._zygote is zygote:
                self._zygote = None
                zygote.kill()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._zygote is not None:
                self._zygote.kill()
                self._zygote = None
