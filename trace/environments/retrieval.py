"""Passage search: the protocol environments need, a BM25 index over passages in memory, the corpus file."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import bm25s
import numpy as np

from trace_rl.tasks.records import RecordError, read_records
from trace_rl.tasks.task import Passage

_WORD = re.compile(r"\w+")
_MAX_QUERY_WORDS = 256


class RetrievalError(RuntimeError):
    """A search that could not be carried out (for remote indexes); the environment reports it and goes on."""


class SearchIndex(Protocol):
    """Anything that finds passages; shared by all rollouts, so it must be thread-safe."""

    def search(self, query: str, k: int) -> list[Passage]:
        """At most ``k`` passages, best first. Raises RetrievalError if the search failed."""
        ...


def _words(text: str) -> list[str]:
    """Lower-cased words without accents; no stop words are dropped, titles like "The Who" need them."""
    if not text.isascii():
        text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return _WORD.findall(text.lower())


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
        documents = [_words(p.title) * title_weight + _words(p.text) for p in self.passages]
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
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        known = [self._ids[w] for w in _words(query)[:_MAX_QUERY_WORDS] if w in self._ids]
        if not known:
            return []
        scores = self._bm25.get_scores(known)
        if k < len(scores):
            # Keep everything that ties with the k-th score: a bare partition would pick among ties at random.
            kth = np.partition(scores, len(scores) - k)[len(scores) - k]
            candidates = np.flatnonzero((scores >= kth) & (scores > 0))
        else:
            candidates = np.flatnonzero(scores > 0)
        order = np.argsort(-scores[candidates], kind="stable")[:k]
        return [self.passages[i] for i in candidates[order]]


def load_corpus_jsonl(path: str | Path) -> list[Passage]:
    """Reads ``{"id", "contents"}`` lines, where contents is the title, quoted or not, a newline, the text.

    Raises FileNotFoundError, or RecordError naming line and field for a malformed or repeated record:
    a corpus with holes would silently change what searches find.
    """
    passages: list[Passage] = []
    seen: set[str] = set()
    for record in read_records(path):
        if isinstance(record, RecordError):
            raise record
        raw_id = record.data.get("id")
        # Some published corpora number their passages.
        passage_id = str(raw_id) if type(raw_id) is int else record.text("id")
        if passage_id in seen:
            raise record.error("id", f"{json.dumps(passage_id)} occurs twice")
        seen.add(passage_id)
        title, newline, text = record.text("contents").partition("\n")
        if not newline:
            raise record.error("contents", "no newline between title and text")
        if len(title) >= 2 and title[0] == title[-1] == '"':
            title = title[1:-1]
        passages.append(Passage(passage_id, title.strip(), text.strip()))
    return passages
