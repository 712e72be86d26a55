"""What environments need of a search engine."""

from __future__ import annotations

from typing import Protocol

from trace_rl.tasks.task import Passage


class RetrievalError(RuntimeError):
    """A search that could not be carried out (for remote indexes); the environment reports it and goes on."""


class SearchIndex(Protocol):
    """Anything that finds passages; shared by all rollouts, so it must be thread-safe."""

    def search(self, query: str, k: int) -> list[Passage]:
        """At most ``k`` passages, best first. Raises RetrievalError if the search failed."""
        ...
