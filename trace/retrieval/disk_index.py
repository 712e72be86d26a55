"""BM25 over passages on disk, memory-mapped: for corpora of any size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trace_rl.tasks.task import Passage

from .index_folder import STORED, DiskIndexError, import_tantivy, read_manifest, tantivy_folder
from .protocol import RetrievalError, check_k
from .words import MAX_QUERY_WORDS, words

TIE = 1e-5
"""Scores this close to each other, relatively, tie: the order in which single-precision terms are summed
differs between the index's segments, so equal passages may differ by a few units in the last place."""

MAX_TIES = 65_536


class DiskIndex:
    """An index built by :func:`~trace_rl.retrieval.index_build.build_index`; threads may share it.

    BM25 of Lucene with k1 = 1.2 and b = 0.75 over the same words, titles weighted, as
    :class:`~trace_rl.retrieval.bm25.Bm25Index`. Lengths above 40 words are kept in one byte, rounded down by
    at most a ninth, so ranks may differ from an exact BM25 where scores are close.

    Raises DiskIndexError (a ValueError) for a folder that holds no index, a half-built or a damaged one, and
    ImportError without tantivy.
    """

    def __init__(self, path: str | Path) -> None:
        folder = Path(path)
        manifest = read_manifest(folder)
        if manifest is None:
            raise DiskIndexError(f"no index in {folder}: build one with `trace-rl index --out {folder}`")
        if manifest.passages is None:
            raise DiskIndexError(
                f"the index in {folder} is half built: run `trace-rl index --corpus FILE --out {folder}` again, "
                "it goes on where it stopped"
            )
        self._tantivy = import_tantivy()
        try:
            index = self._tantivy.Index.open(str(tantivy_folder(folder)))
            self._schema = index.schema
            self._searcher = index.searcher()
        except (OSError, ValueError) as error:
            raise DiskIndexError(f"the index in {folder} is damaged, build it anew: {error}") from error
        self._passages = self._searcher.num_docs
        if self._passages != manifest.passages:
            raise DiskIndexError(
                f"the index in {folder} is damaged, build it anew: it holds {self._passages} passages and "
                f"should hold {manifest.passages}"
            )

    def __len__(self) -> int:
        return self._passages

    def search(self, query: str, k: int) -> list[Passage]:
        """At most ``k`` passages that share a word with the query, best first, ties by corpus position.

        Of very long queries the first 256 words count. A query without known words gives ``[]``; queries are
        plain words, they have no syntax. Of more than 65,536 passages that tie, the index chooses which it
        returns, the same ones every time.
        """
        return [passage for passage, _ in self.scored_search(query, k)]

    def scored_search(self, query: str, k: int) -> list[tuple[Passage, float]]:
        """What :meth:`search` returns, each passage with its score. Raises RetrievalError if a read fails."""
        check_k(k)
        counts = Counter(words(query)[:MAX_QUERY_WORDS])
        if not counts:
            return []
        try:
            hits = self._best(self._query(counts), min(k, self._passages))
            return [(self._passage(address), score) for address, score in hits]
        except (OSError, ValueError) as error:
            raise RetrievalError(f"search in the index on disk failed: {error}") from error

    def _query(self, counts: Counter[str]) -> Any:
        query, occur = self._tantivy.Query, self._tantivy.Occur
        terms = []
        for word, count in counts.items():
            term = query.term_query(self._schema, "words", word, index_option="freq")
            terms.append((occur.Should, query.boost_query(term, float(count)) if count > 1 else term))
        return query.boolean_query(terms)

    def _best(self, query: Any, k: int) -> list[tuple[Any, float]]:
        """The first k (address, score), ties by position: enough hits are asked for to see the last tie's end."""
        limit = k + 16
        while True:
            hits = self._searcher.search(query, limit, count=False).hits
            scores = [score for score, _ in hits]
            ended = any(not ties(scores[i - 1], scores[i]) for i in range(k, len(scores)))
            if ended or len(hits) < limit or limit >= k + MAX_TIES:
                break
            limit = min(4 * limit, k + MAX_TIES)
        positions = self._searcher.fast_field_values("position", [address for _, address in hits])
        order = in_order(scores, positions)
        return [(hits[i][1], score) for i, score in order[:k]]

    def _passage(self, address: Any) -> Passage:
        stored = self._searcher.doc(address)
        return Passage(*(bytes(stored.get_first(name)).decode() for name in STORED))


def ties(higher: float, lower: float) -> bool:
    """Whether two neighbours in the order of scores count as equal."""
    return lower >= higher * (1 - TIE)


def in_order(scores: Sequence[float], positions: Sequence[Any]) -> list[tuple[int, float]]:
    """(place in ``scores``, score) of falling scores, ties by position; all of a tie get its highest score.

    A tie goes on as long as each score is within :data:`TIE` of the one before it.
    """
    tied_with: list[float] = []
    for i, score in enumerate(scores):
        tied_with.append(tied_with[-1] if i > 0 and ties(scores[i - 1], score) else score)
    order = sorted(range(len(scores)), key=lambda i: (-tied_with[i], positions[i]))
    return [(i, tied_with[i]) for i in order]
