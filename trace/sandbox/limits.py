"""What a call may use, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

Ended = Literal["ok", "exception", "timeout", "memory", "killed", "output", "files", "replay_failed"]


class SandboxError(RuntimeError):
    """The sandbox itself cannot work here; nothing was run unprotected."""


@dataclass(frozen=True)
class Limits:
    """Limits of one call; ValueError if one is not positive.

    What other processes do decides nothing: a cell that computes is stopped by its processor time, and only
    one that waits (sleeps, reads) by the clock. Both are exact to about a second and a tenth of one.

    Attributes:
        cpu_seconds: processor time of the new cell, whole seconds.
        idle_seconds: elapsed time that the new cell spends waiting instead of computing.
        replay_seconds: each of the two, of all earlier cells together.
        memory_mib: address space in MiB beyond what the interpreter with its libraries maps anyway.
        file_mib: bytes in the call's directory in MiB, one file or all together.
        output_chars: characters of standard output and standard error together.
    """

    cpu_seconds: int = 10
    idle_seconds: float = 10.0
    replay_seconds: float = 30.0
    memory_mib: int = 1024
    file_mib: int = 16
    output_chars: int = 20_000

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"{field.name} must be positive, got {value!r}")


@dataclass(frozen=True)
class CellResult:
    """What the model sees of a call.

    Attributes:
        output: what the code printed, the value of its last line, a short traceback if it raised, and one
            sentence if a limit ended it.
        ended: ``"killed"`` is every end that is no limit of ours: exit, crash, signal.
        keep: whether the cell belongs to the state: append it to the history of the next call.
    """

    output: str
    ended: Ended
    keep: bool
