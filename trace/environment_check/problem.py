"""What a check found, in a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        method: of the environment, for instance ``"step"``.
        done: what the check did.
        expected: what the protocol asks for.
        got: what happened instead.
        serious: False for a remark that a run can live with.
        error: type of the exception, if one was raised.
    """

    method: str
    done: str
    expected: str
    got: str
    serious: bool = True
    error: str = ""

    def like(self, other: Problem) -> bool:
        """Whether both are probably one mistake: the same is expected of a method, and fails in the same way."""
        return self._kind() == other._kind()

    def _kind(self) -> tuple[bool, str, str, str]:
        return self.serious, self.method, self.expected.partition(",")[0], self.error  # values follow a comma

    def __str__(self) -> str:
        return f"{self.method}: {self.done}: expected {self.expected}, got {self.got}"


class ProblemFoundError(Exception):
    """Ends a check that cannot go on; `hopeless` if no other check could either."""

    def __init__(self, problem: Problem, *, hopeless: bool = False) -> None:
        super().__init__(str(problem))
        self.problem = problem
        self.hopeless = hopeless


def shown(value: Any, length: int = 160) -> str:
    """`repr`, cut in the middle, and printable whatever it holds."""
    text = repr(value).encode("utf-8", "backslashreplace").decode()
    if len(text) <= length:
        return text
    return f"{text[: length // 2]} ... {text[-length // 4 :]} ({len(text)} characters)"
