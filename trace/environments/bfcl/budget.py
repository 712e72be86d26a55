"""What one episode may ask of the simulators: none can hold their lock for long, or fill the memory."""

from __future__ import annotations

from typing import Any

from ..calls import Call, render_call

MAX_CALLS = 1024
MAX_WRITTEN = 65_536
MAX_READ = 4_194_304
MAX_WALK = 131_072
_MAX_DEPTH = 100  # the wheel walks by recursion

_WALKS = ("du", "find")


class Budget:
    """Counts the calls of an episode, the characters of calls (written) and of results (read).

    The largest ground truth has 35 calls, 7,040 characters written and 70,454 read. Equal sequences of calls
    are refused at the same call, in an episode as in its verdict.
    """

    def __init__(self) -> None:
        self._calls = self._written = self._read = 0

    def write(self, call: Call) -> None:
        """Counts a call that is about to be made."""
        self._calls += 1
        self._written += len(render_call(call))

    def read(self, characters: int) -> None:
        """Counts what a call returned, or had to look at."""
        self._read += characters

    @property
    def spent(self) -> bool:
        """Whether nothing more may be called in this episode."""
        return self._calls > MAX_CALLS or self._written > MAX_WRITTEN or self._read > MAX_READ


def walk_size(call: Call, file_system: Any) -> int:
    """Characters of the paths and files that this call walks through; 0 for calls that walk through none.

    The simulated `cp` and `mv` share what is inside a directory, so that 24 copies can hold 2**24 paths, and
    a directory can hold itself. Counting stops beyond ``MAX_WALK``, where such trees, and trees deeper than
    100, end up; ground truths walk through less than 13,000.
    """
    if call.name not in _WALKS:
        return 0
    path = call.arguments.get("path", call.positional[0] if call.positional else ".")
    from_root = call.name == "find" and isinstance(path, str) and path.startswith("/")
    size, todo = 0, [(file_system.root if from_root else file_system._current_dir, 0, 0)]
    while todo and size <= MAX_WALK:
        directory, prefix, depth = todo.pop()
        if depth > _MAX_DEPTH:
            return MAX_WALK + 1
        for name, item in directory.contents.items():
            length = prefix + 1 + len(str(name))
            size += length
            if hasattr(item, "contents"):
                todo.append((item, length, depth + 1))
            else:
                size += len(str(item.content))
            if size > MAX_WALK:
                break
    return size
