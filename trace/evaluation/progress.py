"""How far an evaluation is: a bar on a terminal, a line now and then without one."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

QUIET_S = 15.0  # without a terminal: how often to say how far it is


class Watch:
    """Follows the rollouts of one rank, set after set. With `show=False` it says nothing."""

    def __init__(self, show: bool = True) -> None:
        self.console = Console(soft_wrap=True, quiet=not show)
        self._bars = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[pace]}"),
            console=self.console,
            disable=not show or not self.console.is_terminal,
        )
        self._bar: TaskID | None = None
        self._set, self._total, self._before, self._now = "", 0, 0, 0
        self._begun = self._said = 0.0

    def __enter__(self) -> Watch:
        self._bars.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """One line for the reader."""
        self.console.print(text, highlight=False, markup=False)

    def start(self, name: str, total: int, done: int) -> None:
        """Set `name` has `total` rollouts, of which `done` were recorded earlier."""
        self._set, self._total, self._before, self._now = name, total, done, 0
        self._begun = self._said = time.perf_counter()
        self._bar = self._bars.add_task(name, total=total, completed=done, pace="")
        self._line(f"{done} recorded earlier" if done else "")

    def advance(self) -> None:
        """One more rollout is finished."""
        self._now += 1
        seconds = time.perf_counter() - self._begun
        pace = self._now / max(seconds, 1e-9)
        done = self._before + self._now
        text = f"{pace:.2f} rollouts/s, {_clock((self._total - done) / pace)} left"
        if self._bar is not None:
            self._bars.update(self._bar, completed=done, pace=text)
        if done == self._total:
            self._line(f"{seconds:.1f} s, {pace:.2f} rollouts/s")
        elif time.perf_counter() - self._said > QUIET_S:
            self._line(text)

    def _line(self, text: str) -> None:
        self._said = time.perf_counter()
        if not self.console.is_terminal:
            self.say(f"{self._set}: {self._before + self._now}/{self._total}{'  ' + text if text else ''}")


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
