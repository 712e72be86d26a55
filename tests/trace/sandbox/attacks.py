"""Hostile code: how its call must end, and words the observation must have."""

# name: (code, ended, words). In the code SECRET is an existing file and PARENT the trainer's process id.
ATTACKS: dict[str, tuple[str, str, str]] = {
    # processes
    "fork bomb": ("import os\nwhile True: os.fork()", "exception", "PermissionError"),
    "vfork": ("import ctypes\nctypes.CDLL(None).fork()", "ok", "-1"),
    "multiprocessing": (
        "import multiprocessing\nmultiprocessing.Process(target=print).start()",
        "exception",
        "PermissionError",
    ),
    "pool": ("import multiprocessing\nmultiprocessing.Pool(2)", "exception", "Error"),
    "subprocess": ("import subprocess\nsubprocess.run(['/bin/ls'])", "exception", "PermissionError"),
    "system": ("import os\nos.system('echo started > here'), os.listdir('.')", "ok", "(32512, [])"),
    "exec": ("import os\nos.execv('/bin/true', ['true'])", "exception", "PermissionError"),
    "posix_spawn": ("import os\nos.posix_spawn('/bin/true', ['true'], {})", "exception", "PermissionError"),
    "thread": (
        "import threading\nthreading.Thread(target=print).start()",
        "exception",
        "can't start new thread",
    ),
    "ptrace": ("import ctypes\nlibc = ctypes.CDLL(None)\nlibc.ptrace(16, PARENT, 0, 0)", "ok", "-1"),
    "system calls": (
        "import ctypes\nc = ctypes.CDLL(None, use_errno=True)\n"
        "for f in 'unshare setns mount umount chroot personality shmget msgget memfd_create klogctl reboot "
        "process_vm_readv process_vm_writev adjtimex setuid sethostname inotify_init1 mlockall'.split():\n"
        "    assert (getattr(c, f)(0, 0, 0, 0, 0, 0), ctypes.get_errno()) == (-1, 1), f\n'refused'",
        "ok",
        "refused",
    ),
    # signals
    "kill the parent": ("import os\nos.kill(os.getppid(), 9)", "exception", "PermissionError"),
    "kill the trainer": ("import os\nos.kill(PARENT, 9)", "exception", "PermissionError"),
    "kill all": ("import os\nos.kill(-1, 9)", "exception", "PermissionError"),
    "kill the group": ("import os\nos.killpg(os.getpgid(os.getppid()), 9)", "exception", "PermissionError"),
    "kill by 0": ("import os\nos.kill(0, 9)", "exception", "PermissionError"),
    "kill by a file": (
        "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, PARENT)",
        "exception",
        "PermissionError",
    ),
    "kill itself": ("import os\nos.kill(os.getpid(), 9)", "killed", "SIGKILL"),
    "limits of others": (
        "import resource\nresource.prlimit(PARENT, resource.RLIMIT_CPU, (1, 1))",
        "exception",
        "PermissionError",
    ),
    "own limits": (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "exception",
        "Error",
    ),
    # memory
    "list": ("[0] * 10**10", "memory", "more than 300 MiB"),
    "bytearray": ("bytearray(10 * 2**30)", "memory", "more than 300 MiB"),
    "numpy": ("import numpy\nnumpy.ones(10**10)", "memory", "more than 300 MiB"),
    "growing list": ("a = []\nwhile True: a.append(bytes(10**6))", "memory", "more than 300 MiB"),
    "garbage": ("a = []\nwhile True: a = [a, a.copy(), [None] * 10**5]", "memory", "more than 300 MiB"),
    "mmap": ("import mmap\nmmap.mmap(-1, 10 * 2**30)", "exception", "Cannot allocate memory"),
    # files
    "read a secret": ("open('SECRET').read()", "exception", "PermissionError"),
    "write elsewhere": ("open('SECRET.new', 'w')", "exception", "PermissionError"),
    "truncate": ("import os\nos.truncate('SECRET', 0)", "exception", "PermissionError"),
    "remove": ("import os\nos.remove('SECRET')", "exception", "PermissionError"),
    "rename": ("import os\nos.rename('SECRET', 'mine')", "exception", "PermissionError"),
    "link": ("import os\nos.link('SECRET', 'mine')", "exception", "PermissionError"),
    "chmod": ("import os\nos.chmod('SECRET', 0)", "exception", "PermissionError"),
    "lock": ("import fcntl, os\nfcntl.flock(open(os.__file__), 1)", "exception", "PermissionError"),
    "lease": ("import fcntl, os\nfcntl.lockf(open(os.__file__), 1)", "exception", "PermissionError"),
    "utime": ("import os\nos.utime('SECRET', (0, 0))", "exception", "PermissionError"),
    "symlink": (
        "import os\nos.symlink('SECRET', 'mine')\nopen('mine').read()",
        "exception",
        "PermissionError",
    ),
    "list the folder": ("import os\nos.listdir(os.path.dirname('SECRET'))", "exception", "PermissionError"),
    "list other calls": ("import os\nos.listdir('..')", "exception", "PermissionError"),
    "passwd": ("open('/etc/passwd').read()", "exception", "PermissionError"),
    "environment of the trainer": ("open('/proc/PARENT/environ').read()", "exception", "PermissionError"),
    "proc": ("open('/proc/self/maps').read()", "exception", "PermissionError"),
    "home": ("import os\nos.listdir(os.path.expanduser('~root'))", "exception", "Error"),
    "shared memory": ("open('/dev/shm/mine', 'w')", "exception", "PermissionError"),
    "own directory": ("import os, shutil\nshutil.rmtree(os.getcwd())", "exception", "PermissionError"),
    "a large file": (
        "with open('a', 'wb') as f:\n    while True: f.write(bytes(10**6))",
        "exception",
        "File too large",
    ),
    "a sparse file": ("open('a', 'wb').truncate(10**10)", "exception", "File too large"),
    "large files": (
        "for i in range(10**4):\n    with open(f'{i}', 'wb') as f: f.write(bytes(10**6))\nwhile True: pass",
        "files",
        "more than 4 MiB",
    ),
    "many files": ("for i in range(10**6): open(f'{i}', 'w').close()", "files", "256 files"),
    "a hidden file": ("import os\nos.open('.', os.O_TMPFILE | os.O_RDWR)", "exception", "PermissionError"),
    "open files": ("a = [open('a', 'w') for _ in range(100)]", "exception", "Too many open files"),
    # network
    "socket": ("import socket\nsocket.socket()", "exception", "PermissionError"),
    "unix socket": ("import socket\nsocket.socket(socket.AF_UNIX)", "exception", "PermissionError"),
    "urllib": (
        "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:1', timeout=2)",
        "exception",
        "Error",
    ),
    "name lookup": ("import socket\nsocket.gethostbyname('localhost.test')", "exception", "gaierror"),
    # its own process
    "exit": ("import sys\nsys.exit(3)", "exception", "SystemExit: 3"),
    "_exit": ("import os\nos._exit(0)", "killed", "exit code 0"),
    "abort": ("import os\nos.abort()", "killed", "SIGABRT"),
    "segfault": ("import ctypes\nctypes.string_at(0)", "killed", "SIGSEGV"),
    "close all files": ("import os\nos.closerange(0, 100)", "killed", "closed its standard files"),
    "garbage into pipes": (
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'!cr\\xff[0, 1]' * 20)\n"
        "    except OSError: pass\n1",
        "ok",
        "1",
    ),
    "alarm": ("import signal, time\nsignal.alarm(1)\ntime.sleep(9)", "killed", "SIGALRM"),
    "atexit": ("import atexit\natexit.register(print, 'later')\n'now'", "ok", "now"),
    "settrace": ("import sys\nsys.settrace(lambda *a: 1 / 0)", "ok", ""),
    "builtins": (
        "import builtins, os\nnames = vars(builtins)\nfor n in [*names]: names[n] = None\n"
        "os._exit = os.write = None",
        "ok",
        "",
    ),
    "recursion": ("def f(): return f()\nf()", "exception", "RecursionError"),
    "stack overflow": (
        "import sys\nsys.setrecursionlimit(10**9)\nclass A:\n    def __repr__(self): return repr(self)\nA()",
        "killed",
        "SIGSEGV",
    ),
    "raising message": (
        "class E(Exception):\n    def __str__(self): 1 / 0\nraise E",
        "exception",
        "E: (its message",
    ),
    "raising repr": ("class A:\n    def __repr__(self): 1 / 0\nA()", "exception", "ZeroDivisionError"),
    # output
    "a print of 1 GB": ("for _ in range(10**3): print('x' * 10**6)", "output", "more than 3000 characters"),
    "endless print": ("while True: print('x')", "output", "more than 3000 characters"),
    "many lines": ("for i in range(10**6): print(i)", "output", "more than 3000 characters"),
    "a long value": ("'x' * 10**6", "output", "more than 3000 characters"),
    "a long message": ("raise ValueError('x' * 10**6)", "exception", "xxx ..."),
    "surrogates": ("print('\\ud800')", "ok", "\\ud800"),
    "binary": ("import os\nos.write(1, bytes(range(128, 256))), 1", "ok", "\ufffd"),
    "deep value": ("a = []\nfor _ in range(10**5): a = [a]\na", "exception", "RecursionError"),
    # source
    "NUL": ("print(1)\0", "exception", "null bytes"),
    "syntax": ("x = (", "exception", "SyntaxError: '(' was never closed"),
    "surrogate source": ("'\ud800'", "exception", "UnicodeEncodeError"),
    "10 MB of source": ("x = 1\n" * 1_700_000, "exception", "characters, more than 1000000"),
    "deep source": ("(" * 10**5, "exception", "too many nested parentheses"),
    "deep expression": ("-" * 10**5 + "1", "memory", ""),
}

# Each runs until it is stopped, for its processor time or for waiting.
COMPUTING = {
    "power": "10**10**10",
    "regular expression": "import re\nre.match('(a+)+$', 'a' * 60 + 'b')",
    "blocked signals, swallowed exceptions": (
        "from signal import *\npthread_sigmask(SIG_BLOCK, valid_signals())\n"
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass"
    ),
    "message": "class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E",
}
WAITING = {
    "sleep": "import time\ntime.sleep(1000)",
    "short sleeps": "import time\nwhile True: time.sleep(0.001)",
    "input": "import os\nr, w = os.pipe()\nos.read(r, 1)",
    "ignored signals": (
        "import signal\nfor n in signal.valid_signals() - {9, 19}: signal.signal(n, signal.SIG_IGN)\n"
        "while True:\n    try: signal.pause()\n    except BaseException: pass"
    ),
    "stopped": "import os\nos.kill(os.getpid(), 19)",
}
