"""What HotpotQA and 2WikiMultiHopQA share: paragraphs, supporting facts, ids, in their published layouts.

Each of ``context`` and ``supporting_facts`` may be the official list of pairs, the Hub's object of columns,
or, as one Hub copy of 2WikiMultiHopQA has it, the official list once more as JSON in a string.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from .records import Record
from .task import Passage

Pair = tuple[str, Any, str, Any]
"""(name of the first part for messages, the first part, name of the second part, the second part)."""


def supporting_titles(record: Record) -> tuple[str, ...]:
    """Titles of the field ``supporting_facts``, in order, without repetition; RecordError if malformed."""
    found: dict[str, None] = {}
    for title_at, title, sentence_at, sentence in _pairs(record, "supporting_facts", "sent_id"):
        found[record.check_text(title_at, title).strip()] = None
        record.check_int(sentence_at, sentence)
    return tuple(found)


def paragraphs(record: Record) -> list[Passage]:
    """The field ``context``, one passage a paragraph, sentences joined by a space, empty paragraphs left out.

    Raises RecordError if malformed.
    """
    passages = []
    for title_at, title, sentences_at, sentences in _pairs(record, "context", "sentences"):
        title = record.check_text(title_at, title).strip()
        parts = [
            record.check_text(f"{sentences_at}[{j}]", sentence, empty_ok=True).strip()
            for j, sentence in enumerate(record.check_list(sentences_at, sentences))
        ]
        text = " ".join(part for part in parts if part)
        if text:
            passages.append(make_passage(title, text))
    return passages


def make_passage(title: str, text: str) -> Passage:
    """Its id is made of the content, so that passages of several files can be put in one index."""
    return Passage(hashlib.sha1(f"{title}\n{text}".encode()).hexdigest()[:16], title, text)


def record_id(record: Record, source: str, question: str) -> str:
    """The record's ``_id`` or ``id``; without one, a name made of its place in the file and its question."""
    for name in ("_id", "id"):
        if name in record.data:
            return record.text(name)
    return f"{source}-{record.index:06d}-{hashlib.sha1(question.encode()).hexdigest()[:8]}"


def _pairs(record: Record, name: str, second: str) -> Iterator[Pair]:
    value = record.get(name)
    if isinstance(value, str):
        value = _decoded(record, name, value)
    if isinstance(value, dict):
        titles, others = _columns(record, name, value, "title", second)
        for i, (title, other) in enumerate(zip(titles, others, strict=True)):
            yield f"{name}.title[{i}]", title, f"{name}.{second}[{i}]", other
        return
    for i, pair in enumerate(record.check_list(name, value)):
        record.check_list(f"{name}[{i}]", pair, length=2)
        yield f"{name}[{i}][0]", pair[0], f"{name}[{i}][1]", pair[1]


def _decoded(record: Record, name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise record.error(name, f"a string that is not JSON: {error.msg}") from error


def _columns(record: Record, name: str, value: dict[str, Any], *keys: str) -> tuple[list[Any], list[Any]]:
    columns = []
    for key in keys:
        if key not in value:
            raise record.error(f"{name}.{key}", "missing")
        columns.append(record.check_list(f"{name}.{key}", value[key]))
    first, second = columns
    if len(first) != len(second):
        raise record.error(name, f"{len(first)} x {keys[0]} but {len(second)} x {keys[1]}")
    return first, second
