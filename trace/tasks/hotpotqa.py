"""HotpotQA in its two published layouts: the official JSON and the Hub's column-wise one."""

from __future__ import annotations

from pathlib import Path

from .paragraphs import paragraphs, record_id, supporting_titles
from .records import Loaded, OnMalformed, Record, load_tasks
from .task import Passage, Task

SOURCE = "hotpotqa"


def read_hotpotqa(path: str | Path, on_malformed: OnMalformed = "fail") -> Loaded:
    """Reads a file of HotpotQA records; the two layouts may even be mixed.

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
    titles = supporting_titles(record)
    passages = paragraphs(record)
    return Task(record_id(record, SOURCE, question), question, (answer,), SOURCE, titles), passages
