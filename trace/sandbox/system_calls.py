"""The system calls that model-written Python may make, for x86_64 and aarch64.

Everything not listed is refused: sockets, processes, threads, exec, ptrace, mounts, io_uring, keys, shared
memory, locks, changes of owners or rights of files (which Landlock does not cover), removing and renaming files.
"""

from __future__ import annotations

from .bpf import Instruction, allow, allow_values, allow_without_bits, program

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_FIRST_UNKNOWN = 435  # clone3: without it the C library uses clone

# name: (x86_64, aarch64)
_ALLOWED: dict[str, tuple[int, int]] = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62), "mmap": (9, 222),
    "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "pread64": (17, 67), "pwrite64": (18, 68),
    "readv": (19, 65), "writev": (20, 66), "sched_yield": (24, 124), "mremap": (25, 216), "msync": (26, 227),
    "madvise": (28, 233), "dup": (32, 23), "nanosleep": (35, 101), "getitimer": (36, 102),
    "setitimer": (38, 103), "getpid": (39, 172), "sendfile": (40, 71), "exit": (60, 93), "wait4": (61, 260),
    "uname": (63, 160), "fsync": (74, 82), "fdatasync": (75, 83), "ftruncate": (77, 46),
    "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "umask": (95, 166), "gettimeofday": (96, 169),
    "getrlimit": (97, 163), "getrusage": (98, 165), "sysinfo": (99, 179), "times": (100, 153),
    "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177),
    "getppid": (110, 173), "getgroups": (115, 158), "getpgid": (121, 155), "getsid": (124, 156),
    "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132), "setrlimit": (160, 164), "gettid": (186, 178), "futex": (202, 98),
    "sched_getaffinity": (204, 123), "getdents64": (217, 61), "set_tid_address": (218, 96),
    "restart_syscall": (219, 128), "fadvise64": (221, 223), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "exit_group": (231, 94), "epoll_ctl": (233, 21),
    "waitid": (247, 95), "newfstatat": (262, 79), "readlinkat": (267, 78), "faccessat": (269, 48),
    "pselect6": (270, 72), "ppoll": (271, 73), "set_robust_list": (273, 99), "epoll_pwait": (281, 22),
    "eventfd2": (290, 19), "epoll_create1": (291, 20), "dup3": (292, 24), "pipe2": (293, 59),
    "getcpu": (309, 168), "getrandom": (318, 278), "copy_file_range": (326, 285), "statx": (332, 291),
    "rseq": (334, 293), "close_range": (436, 436), "faccessat2": (439, 439),
}  # fmt: skip

_ALLOWED_ON_X86 = {
    "stat": 4, "lstat": 6, "poll": 7, "access": 21, "pipe": 22, "select": 23, "dup2": 33, "pause": 34,
    "alarm": 37, "readlink": 89, "getpgrp": 111, "time": 201, "epoll_create": 213, "epoll_wait": 232,
}  # fmt: skip

_FCNTL_COMMANDS = (
    0,
    1,
    2,
    3,
    4,
    1030,
    1032,
)  # no F_SETOWN: it signals others; no locks: others would see them
_IOCTL_COMMANDS = (0x5401, 0x5413, 0x541B, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIO(N)CLEX
_PR_SET_NAME = 15
_UNNAMED_FILE = 0o20000000  # __O_TMPFILE: a file that no look into the directory would show


def filter_program(machine: str, pid: int) -> list[Instruction]:
    """The filter for process ``pid`` on ``machine`` (``platform.machine()``); KeyError for other machines."""
    x86 = machine == "x86_64"
    rules = [allow(numbers[0 if x86 else 1]) for numbers in _ALLOWED.values()]
    if x86:
        rules += [allow(number) for number in _ALLOWED_ON_X86.values()]
        rules.append(allow_without_bits(2, 1, _UNNAMED_FILE))  # open

    def pick(of_x86: int, of_arm: int) -> int:
        return of_x86 if x86 else of_arm

    rules += [
        allow_without_bits(pick(257, 56), 2, _UNNAMED_FILE),  # openat
        allow_values(pick(72, 25), 1, _FCNTL_COMMANDS),
        allow_values(pick(16, 29), 1, _IOCTL_COMMANDS),
        allow_values(pick(157, 167), 0, [_PR_SET_NAME]),  # prctl
        allow_values(pick(302, 261), 0, [0, pid]),  # prlimit64
        allow_values(pick(62, 129), 0, [pid]),  # kill
        allow_values(pick(200, 130), 0, [pid]),  # tkill
        allow_values(pick(234, 131), 0, [pid]),  # tgkill
    ]
    return program(ARCHITECTURES[machine], rules, _FIRST_UNKNOWN)
