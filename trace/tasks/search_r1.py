"""Rows of the sets that Search-R1 (Jin et al. 2025) and ARPO (Dong et al. 2025) train and evaluate on."""

from __future__ import annotations

from pathlib import Path

from .records import Loaded, OnMalformed, Record, load_tasks
from .rows import row_golds, row_id, row_question
from .task import Passage, Task

SOURCE = "search_r1"
"""The source of rows that name no data source."""


def read_search_r1(path: str | Path, on_malformed: OnMalformed = "fail") -> Loaded:
    """Reads a file of verl rows (Parquet, JSON lines or a JSON list), questions and mathematics alike.

    Question, golds and id as :mod:`~trace_rl.tasks.rows` says. A task's source is the row's ``data_source``
    ("nq", "DR_grpo_mix"), and its ``extra`` is ``{"ability": str, "data_source": str}``, "" where the row
    has none, so that a mixed file can be filtered. There are no passages: the corpus to search must come
    from elsewhere. Errors as in :func:`~trace_rl.tasks.records.load_tasks`.
    """
    return load_tasks(path, _parse, on_malformed)


def _parse(record: Record) -> tuple[Task, list[Passage]]:
    question = row_question(record)
    extra = {name: _label(record, name) for name in ("ability", "data_source")}
    source = extra["data_source"] or SOURCE
    return Task(row_id(record, question), question, row_golds(record), source, extra=extra), []


def _label(record: Record, name: str) -> str:
    value = record.data.get(name)
    return "" if value is None else record.check_text(name, value, empty_ok=True).strip()
