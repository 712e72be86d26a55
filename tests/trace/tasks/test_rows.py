"""Question, golds and id of verl rows, from every place they are found in."""

from __future__ import annotations

from pathlib import Path

import pytest

from trace_rl.tasks.records import Record, RecordError
from trace_rl.tasks.rows import row_golds, row_id, row_question

TEMPLATE = "Answer the given question. For example, <answer> Beijing </answer>. Question: {}\n"


def record(**data) -> Record:
    return Record(Path("rows.jsonl"), 7, data)


def prompt(*contents: str, role: str = "user") -> list[dict[str, str]]:
    return [{"role": "system", "content": "Be brief."}, *({"role": role, "content": c} for c in contents)]


@pytest.mark.parametrize(
    ("data", "question"),
    [
        ({"question": " who? "}, "who?"),
        ({"question": "who?", "extra_info": {"question": "when?"}}, "who?"),
        ({"question": None, "extra_info": {"question": "when?", "task": {"question": "x"}}}, "when?"),
        ({"extra_info": {"task": {"question": "bare"}}, "prompt": prompt("bare, in a box")}, "bare"),
        ({"problem": "1 + 1", "prompt": prompt("other")}, "1 + 1"),
        ({"prompt": prompt(TEMPLATE.format("who?"))}, "who?"),
        ({"prompt": TEMPLATE.format("who?")}, "who?"),
        ({"prompt": prompt(TEMPLATE.format('what is "Question: mark"?'))}, 'what is "Question: mark"?'),
        ({"prompt": prompt("Question: when? <answer> 1 </answer> Question: who?")}, "who?"),
        ({"prompt": prompt("Question: who?")}, "who?"),
        ({"prompt": prompt("first?", "second?")}, "second?"),
        ({"prompt": [*prompt("first?"), {"role": "assistant", "content": "yes"}]}, "first?"),
        ({"prompt": prompt("Read. Question: 3 is prime?")}, "Read. Question: 3 is prime?"),
    ],
)
def test_question(data, question):
    assert row_question(record(**data)) == question


@pytest.mark.parametrize(
    ("data", "blamed", "problem"),
    [
        ({}, "question", "missing, and the row has no 'prompt' either"),
        ({"question": 3}, "question", "expected a string, got a number"),
        ({"question": " "}, "question", "empty string"),
        ({"extra_info": {"question": []}}, "extra_info.question", "expected a string, got a list"),
        ({"prompt": []}, "prompt", "no message of the user"),
        ({"prompt": {}}, "prompt", "expected a list"),
        ({"prompt": ["who?"]}, r"prompt\[0\]", "expected a message, got a string"),
        ({"prompt": prompt("who?", role="human")}, "prompt", "no message of the user"),
        ({"prompt": [{"role": "user"}]}, r"prompt\[0\].content", "expected a string, got null"),
        ({"prompt": prompt(TEMPLATE.format(""))}, r"prompt\[1\].content", "empty string"),
    ],
)
def test_no_question(data, blamed, problem):
    with pytest.raises(RecordError, match=f"rows.jsonl: record 7: field '{blamed}': {problem}"):
        row_question(record(**data))


def rewarded(truth) -> dict:
    return {"reward_model": {"style": "rule", "ground_truth": truth}}


@pytest.mark.parametrize(
    ("data", "golds"),
    [
        (rewarded({"target": ["a", " b ", "a"]}), ("a", "b")),
        (rewarded({"target": "a"}), ("a",)),
        (rewarded(["a", "b"]), ("a", "b")),
        (rewarded(" a "), ("a",)),
        (rewarded(142.0), ("142",)),
        (rewarded(-0.5), ("-0.5",)),
        (rewarded(7), ("7",)),
        (rewarded("025"), ("025",)),
        ({**rewarded("a"), "golden_answers": ["b"]}, ("a",)),
        ({**rewarded(None), "golden_answers": ["b", "c"]}, ("b", "c")),
        ({"golden_answers": "b", "answer": "c"}, ("b",)),
        ({"answer": ["c"]}, ("c",)),
    ],
)
def test_golds(data, golds):
    assert row_golds(record(**data)) == golds


@pytest.mark.parametrize(
    ("data", "blamed", "problem"),
    [
        ({}, "reward_model.ground_truth", "missing, and 'golden_answers' and 'answer' as well"),
        (rewarded({"goal": "a"}), "reward_model.ground_truth.target", "missing"),
        (rewarded({"target": []}), "reward_model.ground_truth.target", "empty list"),
        (rewarded({"target": ["a", None]}), r"reward_model.ground_truth.target\[1\]", "expected a string"),
        (rewarded(True), "reward_model.ground_truth", "expected a string, got a boolean"),
        (rewarded(float("nan")), "reward_model.ground_truth", "expected a string, got a number"),
        (rewarded(""), "reward_model.ground_truth", "empty string"),
        ({"golden_answers": [[]]}, r"golden_answers\[0\]", "expected a string, got a list"),
    ],
)
def test_no_golds(data, blamed, problem):
    with pytest.raises(RecordError, match=f"rows.jsonl: record 7: field '{blamed}': {problem}"):
        row_golds(record(**data))


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ({"id": "test_0", "data_source": "nq"}, "nq-test_0"),
        ({"id": 0, "data_source": "nq"}, "nq-0"),
        ({"_id": "x", "data_source": ""}, "row-x"),
        ({"data_source": "mix", "extra_info": {"split": "train", "index": 3}}, "mix-train-3-b6589fc6"),
        ({"data_source": "mix", "extra_info": {"index": "3b"}}, "mix-3b-b6589fc6"),
        ({"uid": 5}, "row-7-b6589fc6"),
    ],
)
def test_id(data, name):
    assert row_id(record(**data), "0") == name


def test_id_depends_on_the_question():
    assert row_id(record(), "0") != row_id(record(), "1")


@pytest.mark.parametrize(("data", "blamed"), [({"data_source": 3}, "data_source"), ({"id": []}, "id")])
def test_no_id(data, blamed):
    with pytest.raises(RecordError, match=f"field '{blamed}': expected a string"):
        row_id(record(**data), "0")
