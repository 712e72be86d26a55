"""Times the phases of a step and tells whoever watches how far each one is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol


class Watcher(Protocol):
    """Follows phases, for instance to draw progress."""

    def start(self, name: str, total: int | None) -> None: ...

    def advance(self) -> None: ...

    def stop(self) -> None: ...


class Silent:
    """Watches nothing."""

    def start(self, name: str, total: int | None) -> None:
        pass

    def advance(self) -> None:
        pass

    def stop(self) -> None:
        pass


@dataclass
class Phases:
    """Wall seconds by phase name since the last `take`."""

    watcher: Watcher = field(default_factory=Silent)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str, total: int | None = None) -> Iterator[Callable[[], None]]:
        """Time a phase of `total` units (None: unknown); yields what to call after each unit."""
        begun = time.perf_counter()
        self.watcher.start(name, total)
        try:
            yield self.watcher.advance
        finally:
            self.watcher.stop()
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun

    def take(self) -> dict[str, float]:
        """The times so far, and start over."""
        taken, self.seconds = self.seconds, {}
        return taken
