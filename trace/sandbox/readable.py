"""Which files confined code may read: the standard library, the math packages, libraries already mapped."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from . import landlock

_NOT_STANDARD = {"site-packages", "dist-packages"}


def reading_rules(packages: list[str]) -> list[tuple[int, int]]:
    """O_PATH descriptors and rights, as :func:`landlock.restrict` takes them.

    They cover the standard library without what is installed into it (only the names there can be listed),
    ``packages``, which must have been imported, and shared libraries.
    """
    folders = {folder for folder in _standard_folders() if os.path.isdir(folder)}
    paths = [*_mapped_libraries()]
    for folder in folders:
        paths += [Path(entry.path) for entry in os.scandir(folder) if entry.name not in _NOT_STANDARD]
    for name in packages:
        paths += [Path(folder) for folder in sys.modules[name].__path__]
    rights = [(path, landlock.READ if path.is_dir() else landlock.READ_FILE) for path in paths]
    rights += [(Path(folder), landlock.LIST) for folder in folders]  # the import system lists it
    return [(os.open(path, os.O_PATH | os.O_CLOEXEC), right) for path, right in rights]


def _standard_folders() -> list[str]:
    return list(dict.fromkeys([sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]))


def _mapped_libraries() -> list[Path]:
    """Shared libraries in this process: code may ask the loader for them again by their path."""
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/") and ".so" in fields[5]:
            found.add(Path(fields[5]))
    return sorted(path for path in found if path.exists())


def library_folders() -> list[str]:
    """Where confined code may import from."""
    return [*_standard_folders(), *(entry for entry in sys.path if entry.endswith("lib-dynload"))]


def installation_folders() -> list[str]:
    """Folders that messages must not show, longest first."""
    libraries = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders = {*libraries, *sys.path}
    return sorted((folder for folder in folders if len(folder) > 1), key=len, reverse=True)
