"""Mathematics problems with one final answer: DeepScaleR, AIME, AMC, MATH-500 and verl's rows."""

from __future__ import annotations

import hashlib
from pathlib import Path

from .boxed import last_boxed
from .records import Loaded, OnMalformed, Record, load_tasks
from .rows import row_golds, row_id, row_question
from .task import Passage, Task

SOURCE = "math"


def read_math(path: str | Path, on_malformed: OnMalformed = "fail") -> Loaded:
    r"""Reads plain records (``problem`` or ``question``, ``answer``, ``solution``) and verl's rows.

    Answers may be text, LaTeX, numbers or a list of accepted ones; 27.0 is "27". A plain record without an
    answer takes it from the last ``\boxed{...}`` of its solution. Verl's rows (``prompt``,
    ``reward_model.ground_truth``) are read as in :mod:`~trace_rl.tasks.rows`; one whose ``ability`` is not
    "math" is malformed here, so a mixed file is read with ``on_malformed="skip"``.

    A plain record's task is named after its ``unique_id`` or ``id``, else its place in the file, and its
    problem: sets that number alike can be put together. A problem that stands in a file twice gives two
    tasks, unless both records carry the same id: then the later one is malformed.

    There are no passages. Errors as in :func:`~trace_rl.tasks.records.load_tasks`.
    """
    return load_tasks(path, _parse, on_malformed)


def _parse(record: Record) -> tuple[Task, list[Passage]]:
    ability = record.data.get("ability")
    if ability is not None and ability != "math":
        raise record.error("ability", f"expected 'math', got {ability!r}: leave such rows out with 'skip'")
    question = row_question(record)
    if record.data.get("reward_model") is not None:
        return Task(row_id(record, question), question, row_golds(record), SOURCE), []
    return Task(_task_id(record, question), question, _golds(record), SOURCE), []


def _golds(record: Record) -> tuple[str, ...]:
    if record.data.get("answer") not in (None, ""):
        return row_golds(record)
    solution = record.data.get("solution")
    answer = last_boxed(record.check_text("solution", solution)) if solution is not None else None
    if not answer:
        raise record.error("answer", r"missing, and there is no \boxed{...} in a 'solution' either")
    return (answer,)


def _task_id(record: Record, question: str) -> str:
    name = f"{record.index:06d}"
    for field in ("unique_id", "id"):
        value = record.data.get(field)
        if value is not None:
            name = str(value) if type(value) is int else record.check_text(field, value)
            break
    return f"{SOURCE}-{name}-{hashlib.sha1(question.encode()).hexdigest()[:8]}"
