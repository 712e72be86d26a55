"""From how a child ended to what the model is told."""

from __future__ import annotations

import os
import signal

from .call import MAX_FILES, STARVED, Ending
from .cells import BROKEN, EXCEPTION, MEMORY, OK, REJECTED, REPLAY_FAILED
from .limits import CellResult, Ended, Limits, SandboxError


def cell_result(ending: Ending, limits: Limits) -> CellResult:
    """The observation of one call. Raises SandboxError if the child did not come as far as model code."""
    if ending.phase == "start":
        reason = ending.setup_error or f"its process ended early (wait status {ending.status})"
        if ending.stop:
            reason = "its process took too long to start"
        raise SandboxError(f"the Python tool's sandbox could not be set up for a call: {reason}")
    if ending.stop == "starved":
        raise SandboxError(
            f"the machine gave a call of the Python tool {ending.cpu_seconds:g} s of processor time in "
            f"{STARVED} times its limits: it is overloaded"
        )
    ended, reason = _reason(ending, limits)
    if ending.phase == "replay":
        notice = f"Stopped: the state of the earlier code is lost, because running it again {reason}. "
        return CellResult(notice + "This code did not run.", "replay_failed", keep=False)
    if ended in ("ok", "exception"):
        kept = os.waitstatus_to_exitcode(ending.status) != REJECTED
        return CellResult(ending.output, ended, keep=kept)
    separator = "\n" if ending.output and not ending.output.endswith("\n") else ""
    return CellResult(f"{ending.output}{separator}Stopped: the code {reason}.", ended, keep=False)


def killed_by_another(ending: Ending, limits: Limits) -> bool:
    """Whether something kept from the code may have killed it: the machine out of memory, an administrator."""
    killed = os.waitstatus_to_exitcode(ending.status) == -signal.SIGKILL and not ending.stop
    return killed and ending.cpu_seconds < _least_when_stopped(ending, limits)


def _least_when_stopped(ending: Ending, limits: Limits) -> float:
    """Processor time that a child has at least used when the kernel stops it for that."""
    return limits.cpu_seconds + (limits.replay_seconds if ending.phase == "replay" else 0)


def _reason(ending: Ending, limits: Limits) -> tuple[Ended, str]:
    """The kind of end, and what the code did, to follow "the code"."""
    replay = ending.phase == "replay"
    if ending.stop == "idle":
        return "timeout", f"waited longer than {limits.replay_seconds if replay else limits.idle_seconds:g} s"
    if ending.stop == "output":
        return "output", f"printed more than {limits.output_chars} characters"
    if ending.stop == "files":
        return "files", f"wrote more than {limits.file_mib} MiB or {MAX_FILES} files"
    code = os.waitstatus_to_exitcode(ending.status)
    if code == -signal.SIGKILL and ending.cpu_seconds >= _least_when_stopped(ending, limits):
        allowed = limits.replay_seconds if replay else limits.cpu_seconds
        return "timeout", f"used more than {allowed:g} s of processor time"
    if code < 0:
        return "killed", f"crashed or killed its interpreter ({_signal_name(-code)})"
    if code == MEMORY:
        return "memory", f"needed more than {limits.memory_mib} MiB of memory"
    if code == BROKEN:
        return "killed", "broke the interpreter it runs in or closed its standard files"
    if code == REPLAY_FAILED:
        return "replay_failed", "ended in another way than before"
    if not replay and code == OK:
        return "ok", ""
    if not replay and code in (EXCEPTION, REJECTED):
        return "exception", ""
    return "killed", f"ended its process (exit code {code})"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
