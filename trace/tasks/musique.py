"""MuSiQue, the answerable version; of the full version, its answerable records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .paragraphs import make_passage, record_id
from .records import LeftOut, Loaded, OnMalformed, Record, describe, load_tasks
from .task import Passage, Task

SOURCE = "musique"


def read_musique(path: str | Path, on_malformed: OnMalformed = "fail") -> Loaded:
    """Reads a file of MuSiQue records (JSON lines in the official form).

    ``answer`` and ``answer_aliases`` are the golds. The supporting titles follow ``question_decomposition``
    (its ``paragraph_support_idx``, in the order of the hops); without it, the paragraphs that are
    ``is_supporting``, in file order.

    A record with ``answerable: false`` (MuSiQue-Full) is left out and named in ``Loaded.skipped``, whatever
    ``on_malformed`` says, and with it its paragraphs: the environments score answers, not the judgement
    that there is none, and such a record bears the id of the answerable one it was made from.

    All paragraphs become passages, once each. Other errors as in :func:`~trace_rl.tasks.records.load_tasks`.
    """
    return load_tasks(path, _parse, on_malformed)


def _parse(record: Record) -> tuple[Task, list[Passage]]:
    answerable = record.data.get("answerable", True)
    if not isinstance(answerable, bool):
        raise record.error("answerable", f"expected a boolean, got {describe(answerable)}")
    if not answerable:
        raise LeftOut(record.error("answerable", "false: the question has no answer in its paragraphs"))
    question = record.text("question").strip()
    golds = [record.text("answer").strip()]
    aliases: Any = record.data.get("answer_aliases")
    for i, alias in enumerate(record.check_list("answer_aliases", [] if aliases is None else aliases)):
        golds.append(record.check_text(f"answer_aliases[{i}]", alias).strip())
    titles, supporting, passages = _paragraphs(record)
    hops = _hops(record)
    if hops is None:
        used = supporting
    else:
        for name, index in hops:
            if index not in titles:
                raise record.error(name, f"no paragraph has idx {index}")
        used = [titles[index] for _, index in hops]
    answers = tuple(dict.fromkeys(golds))
    found = tuple(dict.fromkeys(used))
    return Task(record_id(record, SOURCE, question), question, answers, SOURCE, found), passages


def _paragraphs(record: Record) -> tuple[dict[int, str], list[str], list[Passage]]:
    """(idx -> title, titles of those marked as supporting, passages)."""
    titles: dict[int, str] = {}
    supporting: list[str] = []
    passages: list[Passage] = []
    for i, paragraph in enumerate(record.check_list("paragraphs", record.get("paragraphs"))):
        at = f"paragraphs[{i}]"
        if not isinstance(paragraph, dict):
            raise record.error(at, f"expected an object, got {describe(paragraph)}")
        title = record.check_text(f"{at}.title", paragraph.get("title")).strip()
        text = record.check_text(f"{at}.paragraph_text", paragraph.get("paragraph_text"), empty_ok=True)
        titles[record.check_int(f"{at}.idx", paragraph.get("idx", i))] = title
        if paragraph.get("is_supporting") is True:
            supporting.append(title)
        if text.strip():
            passages.append(make_passage(title, text.strip()))
    return titles, supporting, passages


def _hops(record: Record) -> list[tuple[str, int]] | None:
    """(field name for messages, paragraph idx) per hop; None if the record has no decomposition."""
    value = record.data.get("question_decomposition")
    if value is None:
        return None
    hops = []
    for i, hop in enumerate(record.check_list("question_decomposition", value)):
        at = f"question_decomposition[{i}]"
        if not isinstance(hop, dict):
            raise record.error(at, f"expected an object, got {describe(hop)}")
        name = f"{at}.paragraph_support_idx"
        hops.append((name, record.check_int(name, hop.get("paragraph_support_idx"))))
    return hops
