"""Landlock by its three system calls: a process gives up all files but those it names."""

from __future__ import annotations

import ctypes
import os
import struct

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same numbers on every architecture
_VERSION = 1
_QUIET = 1  # no line in the kernel's audit log for each refusal

_WRITE_FILE, _READ_FILE, _READ_DIR, _MAKE_REGULAR, _TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 8, 1 << 14
READ, READ_FILE, LIST = _READ_FILE | _READ_DIR, _READ_FILE, _READ_DIR
WRITE = _WRITE_FILE | _TRUNCATE | _MAKE_REGULAR  # not: remove, rename, link, folders, pipes, devices

_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """The kernel's Landlock ABI; 0 when it has none, or has it switched off."""
    return max(0, int(_libc.syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION))))


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"Landlock: {what}: {os.strerror(number)}")
    return result


def _handled(abi: int) -> tuple[int, int, int]:
    """All rights over files, the network and other processes that this ABI can take away."""
    files = (1 << 13) - 1
    if abi >= 2:
        files |= 1 << 13  # link or rename between folders
    if abi >= 3:
        files |= _TRUNCATE
    if abi >= 5:
        files |= 1 << 15  # ioctl on devices
    return files, (3 if abi >= 4 else 0), (3 if abi >= 6 else 0)


def restrict(allowed: list[tuple[int, int]]) -> None:
    """Confines the calling thread for good; PR_SET_NO_NEW_PRIVS must be set. OSError if that failed.

    Args:
        allowed: pairs of an O_PATH file descriptor and rights: ``READ``, ``LIST``, ``WRITE`` of a folder, which
            hold for everything below it, ``READ_FILE`` of a file.
    """
    abi = version()
    files, network, others = _handled(abi)
    attributes = struct.pack("=QQQ", files, network, others)
    ruleset = _check(
        _libc.syscall(_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0)),
        "create ruleset",
    )
    for descriptor, rights in allowed:
        rule = struct.pack("=Qi", rights & files, descriptor)
        _check(_libc.syscall(_ADD, ruleset, 1, rule, 0), "add rule")
    _check(_libc.syscall(_RESTRICT, ruleset, ctypes.c_uint(_QUIET if abi >= 7 else 0)), "restrict")
    os.close(ruleset)
