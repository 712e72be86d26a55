"""Assembles a seccomp filter (classic BPF): a list of allowed system calls, the rest refused."""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable

ALLOW = 0x7FFF0000
KILL = 0x80000000  # the whole process
REFUSE = 0x00050000 | errno.EPERM
UNKNOWN = 0x00050000 | errno.ENOSYS

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


def low_word(argument: int) -> int:
    """Offset of the lower 32 bits of a system call's argument, on a little-endian machine."""
    return _ARGUMENTS + 8 * argument


def allow(number: int) -> list[Instruction]:
    """Allows a system call whatever its arguments."""
    return [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, ALLOW)]


def allow_values(number: int, argument: int, values: Iterable[int]) -> list[Instruction]:
    """Allows a system call if an argument, of which the kernel reads 32 bits, is one of ``values``."""
    tests = [
        step for value in values for step in ((_EQUAL, 0, 1, value & 0xFFFFFFFF), (_RETURN, 0, 0, ALLOW))
    ]
    return _only_for(number, [(_LOAD, 0, 0, low_word(argument)), *tests, (_RETURN, 0, 0, REFUSE)])


def allow_without_bits(number: int, argument: int, bits: int) -> list[Instruction]:
    """Allows a system call if none of ``bits`` is set in an argument of which the kernel reads 32 bits."""
    test = [(_ANY_BIT, 0, 1, bits), (_RETURN, 0, 0, REFUSE), (_RETURN, 0, 0, ALLOW)]
    return _only_for(number, [(_LOAD, 0, 0, low_word(argument)), *test])


def _only_for(number: int, block: list[Instruction]) -> list[Instruction]:
    return [(_EQUAL, 0, len(block), number), *block]


def program(architecture: int, rules: Iterable[list[Instruction]], first_unknown: int) -> list[Instruction]:
    """The filter: other architectures kill, unlisted calls are refused, newer ones are said not to exist.

    ``first_unknown``: from this number on the answer is ENOSYS, at which the C library falls back on older
    calls. It also covers the x32 calls of x86_64, whose numbers are huge.
    """
    head = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, KILL), (_LOAD, 0, 0, _NUMBER)]
    tail = [(_AT_LEAST, 0, 1, first_unknown), (_RETURN, 0, 0, UNKNOWN), (_RETURN, 0, 0, REFUSE)]
    return [*head, *(step for rule in rules for step in rule), *tail]


def assemble(instructions: list[Instruction]) -> bytes:
    """The bytes the kernel takes (struct sock_filter, eight bytes each)."""
    return b"".join(struct.pack("=HBBI", *step) for step in instructions)
