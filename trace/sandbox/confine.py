"""Takes from the calling process, for good, all that model-written code must not have."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Callable

from . import landlock
from .bpf import assemble
from .limits import Limits
from .system_calls import ARCHITECTURES, filter_program

OPEN_FILES = 64
_MIB = 1 << 20
_ALL_DESCRIPTORS = 2**31 - 1
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_GET_SECCOMP, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 4, 21, 22, 24
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


def missing() -> str:
    """What this machine lacks for the sandbox, or ``""``."""
    if sys.platform != "linux":
        return f"the Python tool's sandbox needs Linux, this is {sys.platform}"
    if platform.machine() not in ARCHITECTURES:
        return f"the Python tool's sandbox knows {' and '.join(ARCHITECTURES)}, this is {platform.machine()}"
    if not landlock.version():
        return (
            "the Python tool's sandbox needs Landlock, which this kernel lacks or has switched off: Linux 5.13 "
            "or newer with CONFIG_SECURITY_LANDLOCK, and `landlock` in the boot option lsm="
        )
    if _prctl(_PR_GET_SECCOMP) < 0:
        return (
            "the Python tool's sandbox needs seccomp filters, which this kernel lacks: Linux 3.5 or newer "
            "with CONFIG_SECCOMP_FILTER"
        )
    return ""


def _prctl(option: int, *arguments: int) -> int:
    padded = [*arguments, 0, 0, 0, 0][:4]
    return int(_libc.prctl(option, *(ctypes.c_ulong(value) for value in padded)))


def _must(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process when ``parent``, a process of one thread, ends; exits if it already has."""
    _must(_prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "PR_SET_PDEATHSIG")
    if os.getppid() != parent:
        os._exit(1)


def limit_resources(limits: Limits, mapped: int) -> None:
    """Sets the rlimits; ``mapped`` is the bytes of address space in use before any model code."""
    total_cpu = math.ceil(limits.replay_seconds) + limits.cpu_seconds + 1
    memory = mapped + limits.memory_mib * _MIB
    for which, value in (
        (resource.RLIMIT_CPU, total_cpu),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, limits.file_mib * _MIB),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def _drop_capabilities() -> None:
    for capability in range(64):
        _prctl(_PR_CAPBSET_DROP, capability)  # refused without CAP_SETPCAP, and then there is nothing to drop
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _must(_libc.capset(header, bytes(24)), "capset")


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def confine(readable: list[tuple[int, int]], writable: int, close_from: int | None = None) -> None:
    """No capabilities, no new ones; no files but those below; only the system calls listed.

    Args:
        readable: O_PATH descriptors and their rights, see :func:`landlock.restrict`.
        writable: O_PATH descriptor of the one folder for files.
        close_from: all descriptors from this one on are closed.

    Raises OSError if any of it failed; then no model code may run.
    """
    _must(
        _prctl(_PR_SET_DUMPABLE, 0), "PR_SET_DUMPABLE"
    )  # RLIMIT_CORE does not stop a core_pattern of "|program"
    _drop_capabilities()
    _must(_prctl(_PR_SET_NO_NEW_PRIVS, 1), "PR_SET_NO_NEW_PRIVS")
    landlock.restrict([*readable, (writable, landlock.READ | landlock.WRITE)])
    if close_from is not None:
        os.closerange(close_from, _ALL_DESCRIPTORS)
    steps = filter_program(platform.machine(), os.getpid())
    code = assemble(steps)
    program = _FilterProgram(len(steps), code)
    pointer = ctypes.addressof(program)
    _must(_prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, pointer), "seccomp filter")


def probe(forbidden: str) -> str:
    """What a confined process can do although it must not, or ``""``; ``forbidden`` is an existing file."""
    import socket

    def can(action: Callable[[], None]) -> bool:
        try:
            action()
        except OSError:
            return False
        return True

    tries = {
        "open a file outside its directory": lambda: open(forbidden).close(),
        "make a socket": lambda: socket.socket().close(),
        "signal another process": lambda: os.kill(os.getppid(), 0),
        "change a file's rights": lambda: os.chmod(forbidden, 0o600),
    }
    return "; ".join(what for what, action in tries.items() if can(action))
