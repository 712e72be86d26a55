"""BM25 over passages in memory."""

from __future__ import annotations

from collections.abc import Iterable

import bm25s
import numpy as np

from trace_rl.tasks.task import Passage

from .protocol import check_k
from .words import MAX_QUERY_WORDS, document_words, words


class Bm25Index:
    """BM25 (Lucene variant, k1 = 1.5, b = 0.75) over title and text of each passage.

    Searching only reads numpy arrays: any number of threads may share an index.

    Args:
        passages: the corpus; at least one passage with at least one word.
        title_weight: how many times the title's words count. Above 1, what a passage is *about* outweighs
            what it mentions.

    Raises ValueError for an empty corpus or a title_weight below 1.
    """

    def __init__(self, passages: Iterable[Passage], *, title_weight: int = 2) -> None:
        self.passages = tuple(passages)
        if title_weight < 1:
            raise ValueError(f"title_weight must be at least 1, got {title_weight}")
        documents = [document_words(p.title, p.text, title_weight) for p in self.passages]
        if not any(documents):
            raise ValueError(f"cannot index {len(documents)} passages: no word in any of them")
        # The vocabulary is ours: bm25s adds an empty token to its own, which an empty query would match.
        self._ids: dict[str, int] = {}
        token_ids = [[self._ids.setdefault(w, len(self._ids)) for w in d] for d in documents]
        self._bm25 = bm25s.BM25(method="lucene", backend="numpy")
        self._bm25.index((token_ids, self._ids), create_empty_token=False, show_progress=False)

    def __len__(self) -> int:
        return len(self.passages)

    def search(self, query: str, k: int) -> list[Passage]:
        """At most ``k`` passages that share a word with the query, best first, ties by corpus position.

        Of very long queries the first 256 words count. A query without known words gives ``[]``.
        """
        return [passage for passage, _ in self.scored_search(query, k)]

    def scored_search(self, query: str, k: int) -> list[tuple[Passage, float]]:
        """What :meth:`search` returns, each passage with its score."""
        check_k(k)
        known = [self._ids[w] for w in words(query)[:MAX_QUERY_WORDS] if w in self._ids]
        if not known:
            return []
        scores = self._bm25.get_scores(known)
        if k < len(scores):
            # Keep everything that ties with the k-th score: a bare partition would pick among ties at random.
            kth = np.partition(scores, len(scores) - k)[len(scores) - k]
            candidates = np.flatnonzero((scores >= kth) & (scores > 0))
        else:
            candidates = np.flatnonzero(scores > 0)
        best = candidates[np.argsort(-scores[candidates], kind="stable")[:k]]
        return [(self.passages[i], float(scores[i])) for i in best]
