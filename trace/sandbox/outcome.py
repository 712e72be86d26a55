"""From how a child ended to what the model is told."""

from __future__ import annotations

import os
import signal

from .call import MAX_FILES, Ending
from .cells import BROKEN, EXCEPTION, MEMORY, OK, REJECTED, REPLAY_FAILED
from .limits import CellResult, Ended, Limits, SandboxError


def cell_result(ending: Ending, limits: Limits) -> CellResult:
    """The observation of one call. Raises SandboxError if the child did not come as far as model code."""
    if ending.phase == "start":
        reason = ending.setup_error or f"its process ended early (wait status {ending.status})"
        if ending.stop:
            reason = "its process took too long to start"
        raise SandboxError(f"the Python tool's sandbox could not be set up for a call: {reason}")
    ended, reason = _reason(ending, limits)
    if ending.phase == "replay":
        notice = f"Stopped: the state of the earlier code is lost, because running it again {reason}. "
        return CellResult(notice + "This code did not run.", "replay_failed", keep=False)
    if ended in ("ok", "exception"):
        kept = os.waitstatus_to_exitcode(ending.status) != REJECTED
        return CellResult(ending.output, ended, keep=kept)
    separator = "\n" if ending.output and not ending.output.endswith("\n") else ""
    return CellResult(f"{ending.output}{separator}Stopped: the code {reason}.", ended, keep=False)


def _reason(ending: Ending, limits: Limits) -> tuple[Ended, str]:
    """The kind of end, and what the code did, to follow "the code"."""
    replay = ending.phase == "replay"
    if ending.stop == "time":
        return "timeout", f"ran longer than {limits.replay_seconds if replay else limits.wall_seconds:g} s"
    if ending.stop == "output":
        return "output", f"printed more than {limits.output_chars} characters"
    if ending.stop == "files":
        return "files", f"wrote more than {limits.file_mib} MiB or {MAX_FILES} files"
    code = os.waitstatus_to_exitcode(ending.status)
    if code == -signal.SIGKILL and ending.cpu_seconds >= limits.cpu_seconds:
        return "timeout", f"used more than {limits.cpu_seconds} s of processor time"
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
