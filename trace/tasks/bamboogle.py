"""Bamboogle (Press et al. 2023): 125 questions with an answer each and nothing else."""

from __future__ import annotations

from pathlib import Path

from .paragraphs import record_id
from .records import Loaded, OnMalformed, Record, load_tasks
from .rows import row_golds, row_question
from .task import Passage, Task

SOURCE = "bamboogle"


def read_bamboogle(path: str | Path, on_malformed: OnMalformed = "fail") -> Loaded:
    """Reads a file of ``Question, Answer`` (the authors' table, also as CSV) or ``question, golden_answers``.

    In the second form ``answer`` will do as well, and each may be one answer or a list. Further fields, such
    as added sub-questions, are not read. The id may be missing, as in HotpotQA. There are no passages: the
    corpus to search must come from elsewhere. Errors as in :func:`~trace_rl.tasks.records.load_tasks`.
    """
    return load_tasks(path, _parse, on_malformed)


def _parse(record: Record) -> tuple[Task, list[Passage]]:
    authors_form = "Question" in record.data
    question = record.text("Question").strip() if authors_form else row_question(record)
    golds = (record.text("Answer").strip(),) if authors_form else row_golds(record)
    return Task(record_id(record, SOURCE, question), question, golds, SOURCE), []
