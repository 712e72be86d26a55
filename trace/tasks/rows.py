"""The row layout that verl's trainers share (Search-R1, ARPO, DeepScaleR): question, golds and id of a row."""

from __future__ import annotations

import hashlib
import math
from typing import Any

from .records import Record, describe


def row_question(record: Record) -> str:
    """The bare question, stripped.

    Taken from the first of these that the row has: ``question``, ``extra_info.question``,
    ``extra_info.task.question``, ``problem``, the last user message of ``prompt``. A prompt made with
    Search-R1's template holds the question after "Question:"; any other prompt is the question as a whole.

    Raises RecordError if there is none, or it is not a string, or blank.
    """
    for name in ("question", "extra_info.question", "extra_info.task.question", "problem"):
        value = _at(record, name)
        if value is not None:
            return record.check_text(name, value).strip()
    if _at(record, "prompt") is None:
        raise record.error("question", "missing, and the row has no 'prompt' either")
    name, message = _last_user_message(record)
    question = _without_template(message)
    return record.check_text(name, question).strip()


def row_golds(record: Record) -> tuple[str, ...]:
    """The accepted answers, stripped, without repetition; at least one.

    ``reward_model.ground_truth`` comes first, as ``{"target": ...}`` or bare, then ``golden_answers``, then
    ``answer``; each may be one answer or a list of them. Numbers become text: 142.0 is "142".

    Raises RecordError if there is none, or one is neither text nor a finite number, or blank.
    """
    for name in ("reward_model.ground_truth", "golden_answers", "answer"):
        value = _at(record, name)
        if isinstance(value, dict):
            name = f"{name}.target"
            value = _at(record, name)
            if value is None:
                raise record.error(name, "missing")
        if value is None:
            continue
        if not isinstance(value, list):
            return (_gold(record, name, value),)
        if not value:
            raise record.error(name, "empty list")
        return tuple(dict.fromkeys(_gold(record, f"{name}[{i}]", gold) for i, gold in enumerate(value)))
    raise record.error("reward_model.ground_truth", "missing, and 'golden_answers' and 'answer' as well")


def row_id(record: Record, question: str) -> str:
    """The row's ``id`` behind its data source, "nq-test_0": sets put together in one file number alike.

    A row without one is named after its data source ("row" if that is blank), split, number in
    ``extra_info.index`` (else in the file) and question.
    """
    source = _at(record, "data_source") or "row"
    source = record.check_text("data_source", source).strip() or "row"
    for name in ("id", "_id"):
        value = _at(record, name)
        if value is not None:
            return f"{source}-{value if type(value) is int else record.check_text(name, value)}"
    split, index = _at(record, "extra_info.split"), _at(record, "extra_info.index")
    parts = [source, *([split] if isinstance(split, str) and split else [])]
    # Some rows number themselves in text; a number that is none falls back to the place in the file.
    number = index if type(index) is int or (isinstance(index, str) and index) else record.index
    return "-".join([*parts, str(number), hashlib.sha1(question.encode()).hexdigest()[:8]])


def _at(record: Record, name: str) -> Any:
    """The value at a dotted path; None where it or something on the way is missing or null."""
    value: Any = record.data
    for key in name.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def _last_user_message(record: Record) -> tuple[str, str]:
    prompt = _at(record, "prompt")
    if isinstance(prompt, str):
        return "prompt", record.check_text("prompt", prompt)
    messages = record.check_list("prompt", prompt)
    for i in reversed(range(len(messages))):
        if not isinstance(messages[i], dict):
            raise record.error(f"prompt[{i}]", f"expected a message, got {describe(messages[i])}")
        if messages[i].get("role") == "user":
            name = f"prompt[{i}].content"
            return name, record.check_text(name, messages[i].get("content"))
    raise record.error("prompt", "no message of the user")


def _without_template(message: str) -> str:
    # Only behind the template's own example answer: a problem's text may say "Question:" too.
    _, tag, rest = message.rpartition("</answer>")
    _, marker, question = rest.partition("Question:")
    if tag and marker:
        return question
    return message.strip().removeprefix("Question:")


def _gold(record: Record, name: str, value: Any) -> str:
    if type(value) is float and math.isfinite(value):
        return str(int(value)) if value.is_integer() else repr(value)
    if type(value) is int:
        return str(value)
    return record.check_text(name, value).strip()
