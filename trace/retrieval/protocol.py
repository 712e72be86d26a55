"""What environments need of a search engine, and what a server needs."""

from __future__ import annotations

from typing import Protocol

from trace_rl.tasks.task import Passage


class RetrievalError(RuntimeError):
    """A search that could not be carried out (for remote indexes); it ends the one rollout, with its reason."""


class SearchIndex(Protocol):
    """Anything that finds passages; shared by all rollouts, so it must be thread-safe."""

    def search(self, query: str, k: int) -> list[Passage]:
        """At most ``k`` passages, best first. Raises RetrievalError if the search failed."""
        ...


class ScoredIndex(SearchIndex, Protocol):
    """An index that also tells how well each passage fits: what a server needs."""

    def __len__(self) -> int:
        """Number of passages."""
        ...

    def scored_search(self, query: str, k: int) -> list[tuple[Passage, float]]:
        """What :meth:`search` returns, each passage with its score, highest first."""
        ...


def check_k(k: int) -> None:
    """Raises ValueError for a number of passages below 1."""
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
