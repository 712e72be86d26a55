"""The filter for both architectures, run by an interpreter of its own."""

from __future__ import annotations

import errno
import struct

import pytest

from trace_rl.sandbox.bpf import ALLOW, KILL, assemble
from trace_rl.sandbox.system_calls import ARCHITECTURES, filter_program

PID = 4321
REFUSED, UNKNOWN = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS


def verdict(code: bytes, architecture: int, number: int, *arguments: int) -> int:
    """Interprets classic BPF over struct seccomp_data, as the manual page seccomp(2) describes both."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *[*arguments, *[0] * 6][:6])
    at, accumulator = 0, 0
    while True:
        operation, yes, no, constant = struct.unpack_from("<HBBI", code, 8 * at)
        at += 1
        if operation == 0x06:
            return int(constant)
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, constant)
            continue
        true = {0x15: accumulator == constant, 0x35: accumulator >= constant, 0x45: accumulator & constant}
        at += yes if true[operation] else no


# x86_64, aarch64: from the kernel's tables
REFUSED_CALLS = {
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "sendmsg": (46, 211), "clone": (56, 220),
    "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "mount": (165, 40), "unshare": (272, 97), "setns": (308, 268),
    "bpf": (321, 280), "perf_event_open": (298, 241), "io_uring_setup": (425, 425), "keyctl": (250, 219),
    "memfd_create": (319, 279), "userfaultfd": (323, 282), "fchmodat": (268, 53), "fchownat": (260, 54),
    "unlinkat": (263, 35), "symlinkat": (266, 36), "linkat": (265, 37), "mknodat": (259, 33),
    "mkdirat": (258, 34), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434), "seccomp": (317, 277),
    "rt_sigqueueinfo": (129, 138), "setuid": (105, 146), "init_module": (175, 105), "shmget": (29, 194),
}  # fmt: skip
ALLOWED_CALLS = {
    "read": (0, 63),
    "openat": (257, 56),
    "mmap": (9, 222),
    "exit_group": (231, 94),
    "close_range": (436, 436),
}
KILLING = {"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131)}


@pytest.mark.parametrize(("column", "machine"), [(0, "x86_64"), (1, "aarch64")])
def test_verdicts(column: int, machine: str) -> None:
    code, architecture = assemble(filter_program(machine, PID)), ARCHITECTURES[machine]

    def ask(numbers: tuple[int, int], *arguments: int) -> int:
        return verdict(code, architecture, numbers[column], *arguments)

    assert {name: ask(numbers) for name, numbers in REFUSED_CALLS.items()} == dict.fromkeys(
        REFUSED_CALLS, REFUSED
    )
    assert {name: ask(numbers) for name, numbers in ALLOWED_CALLS.items()} == dict.fromkeys(
        ALLOWED_CALLS, ALLOW
    )
    for numbers in KILLING.values():
        assert ask(numbers, PID, 9) == ALLOW
        for other in (1, 0, PID + 1, 2**32 - 1, 2**32 - PID):
            assert ask(numbers, other, 9) == REFUSED
    assert ask((435, 435)) == UNKNOWN  # clone3
    assert ask((462, 462)) == UNKNOWN
    assert ask((0x40000000, 0x40000000)) == UNKNOWN  # an x32 call
    assert ask((257, 56), 0, 0, 0o20200002) == REFUSED  # openat of an unnamed file
    assert ask((157, 167), 15) == ALLOW  # the name of a thread
    assert ask((157, 167), 1) == REFUSED  # the signal at the parent's death
    assert ask((72, 25), 3, 8) == REFUSED  # F_SETOWN
    assert ask((302, 261), 0) == ask((302, 261), PID) == ALLOW
    assert ask((302, 261), 1) == REFUSED
    assert ask((16, 29), 0, 0x5412) == REFUSED  # TIOCSTI
    assert verdict(code, 0x40000003, 0) == KILL  # i386
