"""From a fresh fork of the zygote to a confined process that runs cells."""

from __future__ import annotations

import importlib.machinery
import json
import os
import random
import signal
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy
import sympy

from . import cells, readable
from .confine import confine, die_with_parent, limit_resources
from .limits import Limits

_SEED = 0


@dataclass(frozen=True)
class Setting:
    """What all children of a zygote have in common.

    Attributes:
        parent: the zygote's process id.
        readable: what may be read, for :func:`confine.confine`.
        mapped: bytes of address space before any model code.
    """

    limits: Limits
    parent: int
    readable: list[tuple[int, int]]
    mapped: int


def run_child(setting: Setting, directory: str, output: int, status: int, source: int) -> None:
    """Confines this process to ``directory``, runs the cells of ``source``, and never returns.

    Args:
        output: pipe for standard output and error.
        status: pipe that says how far it came: :data:`cells.CONFINED`, :data:`cells.REPLAYED`, or before
            that ``!`` and what failed.
        source: file with the JSON list of cells.
    """
    try:
        request = _enter(setting, directory, output, status, source)
    except BaseException as error:
        os.write(cells.STATUS, f"!{type(error).__name__}: {error}".encode()[:4096])
        os._exit(cells.SETUP_FAILED)
    cells.run_cells(request, _hidden, setting.limits.cpu_seconds)


def arrange_descriptors(null: int, status: int, output: int) -> None:
    """Standard streams to ``null``, then the two pipes at their places; both are above those places."""
    for descriptor in range(3):
        os.dup2(null, descriptor)
    os.dup2(status, cells.STATUS, inheritable=False)
    os.dup2(output, cells.OUTPUT, inheritable=False)


def _enter(setting: Setting, directory: str, output: int, status: int, source: int) -> list[str]:
    null = os.open(os.devnull, os.O_RDWR)
    arrange_descriptors(null, status, output)
    die_with_parent(setting.parent)
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _prefer_for_oom_killer()
    with open(source, "rb") as file:
        request: list[str] = json.load(file)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(HOME=directory, TMPDIR=directory, TZ="UTC", LC_ALL="C.UTF-8")
    tempfile.tempdir = directory
    random.seed(_SEED)  # only here: the module seeds itself anew after a fork
    here = os.open(directory, os.O_PATH)
    confine(setting.readable, here, close_from=cells.OUTPUT + 1)
    limit_resources(setting.limits, setting.mapped)  # last: Landlock still needs descriptors
    return request


def _prefer_for_oom_killer() -> None:
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        return  # no /proc: the kernel then chooses by size


def prepare_interpreter() -> None:
    """In the zygote, once all is imported: seeds, paths and modules as model code shall find them.

    Afterwards there is no trace of the tool or the trainer in what code can import.
    """
    _warm_up()
    numpy.random.seed(_SEED)
    sympy.core.random.seed(_SEED)
    # Generators that nobody seeds ask here, numpy's `default_rng()` among them: a replay must agree.
    random._urandom = random.Random(_SEED).randbytes  # type: ignore[attr-defined]
    sys.set_int_max_str_digits(0)  # digits of huge numbers are common in mathematics; time is limited anyway
    warnings.formatwarning = _short_warning
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    sys.argv, sys.orig_argv, sys.executable = [""], [""], ""
    standard = (importlib.machinery.BuiltinImporter, importlib.machinery.FrozenImporter)
    sys.meta_path[:] = [*standard, _LibraryFinder(readable.library_folders())]
    # An editable installation leaves a module that knows where the repository is, and its hook.
    sys.path_hooks[:] = [hook for hook in sys.path_hooks if not _of_installation(hook.__module__)]
    sys.path_importer_cache.clear()
    package = __name__.split(".")[0]
    for name in [name for name in sys.modules if name.split(".")[0] == package or _of_installation(name)]:
        del sys.modules[name]


def _of_installation(module: str) -> bool:
    return module.startswith("__editable__")


class _LibraryFinder:
    """Finds modules in some folders only: those elsewhere do not exist, rather than being refused midway."""

    def __init__(self, folders: list[str]) -> None:
        self._folders = folders

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        within = self._folders if path is None else path
        return importlib.machinery.PathFinder.find_spec(name, within, target)

    def invalidate_caches(self) -> None:
        importlib.machinery.PathFinder.invalidate_caches()


def _warm_up() -> None:
    """Has sympy import what it imports late, and fill its caches: half a second that each call would pay."""
    x = sympy.Symbol("x")
    sympy.solve(x**2 - 2, x)
    sympy.simplify(sympy.sin(x) ** 2 + sympy.cos(x) ** 2)
    sympy.integrate(x * sympy.exp(x), x)
    sympy.factorint(2**32 + 1)
    str(sympy.factor(x**2 - 1)), sympy.N(sympy.pi, 30)


def _short_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"{category.__name__}: {message}\n"


_hidden = readable.installation_folders()
