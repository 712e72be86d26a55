"""Building an index on disk from a corpus file, in constant memory and in steps that survive a crash."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from .corpus import is_json_list, read_corpus, repeated_id
from .index_folder import (
    STORED,
    DiskIndexError,
    build_folder,
    describe_corpus,
    holds_nothing,
    import_tantivy,
    read_manifest,
    tantivy_folder,
    write_manifest,
)
from .seen_ids import SeenHashes, hash_id
from .words import document_words

Progress = Callable[[int, int, int], None]
"""``progress(passages, bytes_read, bytes_in_all)``, called every thousand passages and at commits."""

_HEAP_BYTES = 256_000_000


class _Mark(NamedTuple):
    """Where in the corpus a commit stood: passages before it, the next line's number and first byte."""

    passages: int = 0
    line: int = 0
    offset: int = 0


def build_index(
    corpus: str | Path,
    out: str | Path,
    *,
    title_weight: int = 2,
    commit_every: int = 100_000,
    progress: Progress = lambda passages, done, total: None,
) -> int:
    """Indexes a JSONL corpus (see :func:`~trace_rl.retrieval.corpus.read_corpus`) into the folder ``out``.

    The file is read as a stream. Every ``commit_every`` passages what is done is made durable: a build that
    was killed goes on from there when it is called again, and ends with the same content as one that was not.
    If the index is complete already, nothing is done.

    Args:
        corpus: the file; a JSON list cannot be streamed and is refused.
        out: a new or empty folder, or one with an index of the same file.
        title_weight: how many times a title's words count, as in Bm25Index.
        commit_every: passages, at least 1.
        progress: told how far it is.

    Returns the number of passages.

    Raises FileNotFoundError without the corpus; RecordError for a malformed or repeated record, naming line
    and field; DiskIndexError if ``out`` holds something else, is being built by another process, or belongs
    to another corpus or an earlier state of this one (size, time of change, first and last MiB); ValueError
    for numbers below 1; ImportError without tantivy.
    """
    corpus, out = Path(corpus), Path(out)
    if title_weight < 1 or commit_every < 1:
        raise ValueError(f"title_weight and commit_every must be >= 1, got {title_weight}, {commit_every}")
    if is_json_list(corpus):
        raise DiskIndexError(f"{corpus} is a JSON list, which cannot be streamed: write one record a line")
    tantivy = import_tantivy()
    described = describe_corpus(corpus, title_weight)
    manifest = read_manifest(out)
    if manifest is None:
        if not holds_nothing(out):
            raise DiskIndexError(f"{out} holds other files: give a new or empty folder")
        out.mkdir(parents=True, exist_ok=True)
        write_manifest(out, described)
    elif replace(manifest, passages=None) != described:
        raise DiskIndexError(
            f"the index in {out} was begun from another corpus, an earlier state of {corpus} or with another "
            "title weight: delete the folder or give another one"
        )
    elif manifest.passages is not None:
        return manifest.passages
    writing = _Writing(tantivy, corpus, out, title_weight)
    try:
        total = writing.run(
            commit_every, lambda mark: progress(mark.passages, mark.offset, described.corpus_bytes)
        )
    finally:
        writing.close()
    if describe_corpus(corpus, title_weight) != described:
        raise DiskIndexError(f"{corpus} changed while it was read: delete {out} and build the index again")
    write_manifest(out, replace(described, passages=total))
    shutil.rmtree(build_folder(out))
    return total


class _Writing:
    """One process's work on an index, from the last commit on.

    Before each commit the hashes of its ids and its mark are written; after a crash, the number of passages
    in the index says which mark counts, whether the crash came before or after the commit.
    """

    def __init__(self, tantivy: ModuleType, corpus: Path, out: Path, title_weight: int) -> None:
        self._document = tantivy.Document
        self._corpus = corpus
        self._title_weight = title_weight
        tantivy_folder(out).mkdir(exist_ok=True)
        build_folder(out).mkdir(exist_ok=True)
        try:
            index = tantivy.Index(_schema(tantivy), path=str(tantivy_folder(out)), reuse=True)
        except (OSError, ValueError) as error:
            raise DiskIndexError(f"the index in {out} is damaged, delete it: {error}") from error
        try:  # one thread, so that passages are written in the order of the file
            self._writer: Any = index.writer(_HEAP_BYTES, 1)
        except ValueError as error:
            if "LockBusy" not in str(error):
                raise DiskIndexError(f"cannot write the index in {out}: {error}") from error
            raise DiskIndexError(f"another process is building the index in {out}: wait for it") from None
        index.reload()  # another process may have committed between opening and locking
        self._marks = build_folder(out) / "marks.jsonl"
        self._start = _last_mark(self._marks, index.searcher().num_docs)
        hashes = build_folder(out) / "ids.u64"
        hashes.touch()
        known = np.fromfile(hashes, "<u8", self._start.passages)
        if known.size != self._start.passages:
            raise DiskIndexError(f"{hashes} is damaged: delete {out} and build the index again")
        self._seen = SeenHashes(known.astype(np.uint64))
        os.truncate(hashes, known.nbytes)
        self._hashes: BinaryIO = hashes.open("ab")

    def run(self, commit_every: int, report: Callable[[_Mark], None]) -> int:
        """Indexes the rest of the corpus; returns the number of passages in all."""
        mark = self._start
        report(mark)
        for passage, record, end in read_corpus(self._corpus, offset=mark.offset, line=mark.line):
            value = hash_id(passage.id)
            if self._seen.add(value) and _occurs_before(self._corpus, passage.id, record.index):
                raise repeated_id(record, passage.id)
            document = self._document()
            document.add_unsigned("position", mark.passages)
            for name in STORED:
                document.add_bytes(name, getattr(passage, name).encode())
            document.add_text(
                "words", " ".join(document_words(passage.title, passage.text, self._title_weight))
            )
            self._writer.add_document(document)
            self._hashes.write(value.to_bytes(8, "little"))
            mark = _Mark(mark.passages + 1, record.index + 1, end)
            if mark.passages % commit_every == 0:
                self._commit(mark)
            if mark.passages % 1000 == 0:
                report(mark)
        self._commit(mark)
        report(mark)
        return mark.passages

    def _commit(self, mark: _Mark) -> None:
        _flush(self._hashes)
        with self._marks.open("ab") as file:
            # A line that a crash cut short must not swallow this one.
            file.write(b"\n" + json.dumps(mark).encode() + b"\n")
            _flush(file)
        self._writer.commit()

    def close(self) -> None:
        """Waits for merges; drops what is not committed; lets others write."""
        self._hashes.close()
        self._writer.wait_merging_threads()


def _schema(tantivy: ModuleType) -> Any:
    schema = tantivy.SchemaBuilder()
    schema.add_unsigned_field("position", fast=True)
    for name in STORED:  # bytes, as text fields cannot be stored without being searchable
        schema.add_bytes_field(name, stored=True)
    # Words between blanks, as words.py makes them: the library's own rules for words play no part.
    schema.add_text_field("words", tokenizer_name="whitespace", index_option="freq")
    return schema.build()


def _last_mark(file: Path, passages: int) -> _Mark:
    if passages == 0:
        return _Mark()
    for line in file.read_bytes().splitlines() if file.exists() else ():
        try:
            mark = _Mark(*json.loads(line))
        except (ValueError, TypeError):
            continue
        if mark.passages == passages:
            return mark
    raise DiskIndexError(f"{file} does not know of {passages} passages: delete the index and build it again")


def _occurs_before(corpus: Path, passage_id: str, line: int) -> bool:
    """Reads the corpus again up to ``line``: two ids with the same hash need not be the same."""
    lines = (found for found in read_corpus(corpus) if found.record.index <= line)
    return next(found for found in lines if found.passage.id == passage_id).record.index < line


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
