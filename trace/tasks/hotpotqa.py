"""HotpotQA in its two published layouts: the official JSON and the Hub's column-wise one."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from .records import Loaded, OnMalformed, Record, load_tasks
from .task import Passage, Task

SOURCE = "hotpotqa"


def read_hotpotqa(path: str | Path, on_malformed: OnMalformed = "fail") -> Loaded:
    """Reads a JSON list or JSONL file; the two layouts may even be mixed.

    Official: ``_id, question, answer``, ``supporting_facts: [[title, number]]`` and
    ``context: [[title, [sentence]]]``. Hub: ``id, question, answer``, ``supporting_facts: {title, sent_id}``
    and ``context: {title, sentences}``. The id may be missing in both: the task is then named after its
    place in the file and its question.

    The paragraphs of all records become passages, once each; empty paragraphs are left out.
    Errors as in :func:`~trace_rl.tasks.records.load_tasks`.
    """
    return load_tasks(path, _parse, on_malformed)


def _parse(record: Record) -> tuple[Task, list[Passage]]:
    question = record.text("question").strip()
    answer = record.text("answer").strip()
    titles = _supporting_titles(record, record.get("supporting_facts"))
    passages = _paragraphs(record, record.get("context"))
    return Task(_task_id(record, question), question, (answer,), SOURCE, titles), passages


def _task_id(record: Record, question: str) -> str:
    for name in ("_id", "id"):
        if name in record.data:
            return record.text(name)
    return f"{SOURCE}-{record.index:06d}-{hashlib.sha1(question.encode()).hexdigest()[:8]}"


def _supporting_titles(record: Record, value: Any) -> tuple[str, ...]:
    rows: list[tuple[str, Any, str, Any]] = []
    if isinstance(value, dict):
        titles, sentences = _columns(record, "supporting_facts", value, "title", "sent_id")
        for i, (title, sentence) in enumerate(zip(titles, sentences, strict=True)):
            rows.append((f"supporting_facts.title[{i}]", title, f"supporting_facts.sent_id[{i}]", sentence))
    else:
        for i, pair in enumerate(record.check_list("supporting_facts", value)):
            at = f"supporting_facts[{i}]"
            record.check_list(at, pair, length=2)
            rows.append((f"{at}[0]", pair[0], f"{at}[1]", pair[1]))
    found: dict[str, None] = {}
    for title_at, title, sentence_at, sentence in rows:
        found[record.check_text(title_at, title).strip()] = None
        record.check_int(sentence_at, sentence)
    return tuple(found)


def _paragraphs(record: Record, value: Any) -> list[Passage]:
    rows: list[tuple[str, Any, str, Any]] = []
    if isinstance(value, dict):
        titles, paragraphs = _columns(record, "context", value, "title", "sentences")
        for i, (title, sentences) in enumerate(zip(titles, paragraphs, strict=True)):
            rows.append((f"context.title[{i}]", title, f"context.sentences[{i}]", sentences))
    else:
        for i, pair in enumerate(record.check_list("context", value)):
            record.check_list(f"context[{i}]", pair, length=2)
            rows.append((f"context[{i}][0]", pair[0], f"context[{i}][1]", pair[1]))
    passages = []
    for title_at, title, sentences_at, sentences in rows:
        title = record.check_text(title_at, title).strip()
        parts = [
            record.check_text(f"{sentences_at}[{j}]", sentence, empty_ok=True).strip()
            for j, sentence in enumerate(record.check_list(sentences_at, sentences))
        ]
        text = " ".join(part for part in parts if part)
        if text:
            passages.append(Passage(_passage_id(title, text), title, text))
    return passages


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


def _passage_id(title: str, text: str) -> str:
    """From the content, so that passages of several files can be put in one index."""
    return hashlib.sha1(f"{title}\n{text}".encode()).hexdigest()[:16]
