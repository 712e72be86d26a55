r"""Mathematics records in the layouts of the known sets, and ``\boxed{...}`` in their solutions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_rl.tasks.boxed import last_boxed
from trace_rl.tasks.math_sets import read_math
from trace_rl.tasks.records import RecordError

DATA = Path(__file__).parents[2] / "data"
SUM, POWER = "What is $2 + 3$?", "What is $2^3$?"

# The layouts of sets whose problems are not free, with problems of our own.
AIME24 = {
    "id": 60,
    "problem": SUM,
    "solution": r"So $\boxed{005}$.",
    "answer": "005",
    "url": "",
    "question": SUM,
}
AMC23 = {"id": 0, "problem": SUM, "answer": 5.0, "url": "https://example.org/1", "question": SUM}
DEEPSCALER = {
    "problem": SUM,
    "solution": "$5$",
    "answer": "5",
    "year": 1983,
    "aime_number": 1,
    "difficulty": 4.0,
}
VERL = {
    "data_source": "",
    "prompt": [{"role": "user", "content": f"{SUM} Let's think step by step."}],
    "ability": "math",
    "reward_model": {"ground_truth": 5.0, "style": "rule"},
    "extra_info": {"index": 7, "split": "test", "task": {"ground_truth": 5.0, "question": SUM}},
}


@pytest.fixture
def write(tmp_path: Path):
    def write_file(*values: Any, suffix: str = ".json") -> Path:
        path = tmp_path / f"records{suffix}"
        if suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(list(values)), path)
        elif suffix == ".jsonl":
            path.write_text("".join(json.dumps(value) + "\n" for value in values))
        else:
            path.write_text(json.dumps(values))
        return path

    return write_file


def test_math500_records():
    raw = [json.loads(line) for line in (DATA / "math500.jsonl").read_text().splitlines()]
    loaded = read_math(DATA / "math500.jsonl")
    assert (len(loaded.tasks), loaded.passages, loaded.skipped) == (5, [], [])
    assert [(t.question, t.answers) for t in loaded.tasks] == [(r["problem"], (r["answer"],)) for r in raw]
    assert {t.source for t in loaded.tasks} == {"math"}
    assert loaded.tasks[0].id == "math-test/precalculus/807.json-2bb63d7b"
    # An independent source of the golds: the boxes in the solutions say the same.
    assert [last_boxed(r["solution"]) for r in raw] == [r["answer"] for r in raw]


def test_deepscaler_records():
    raw = json.loads((DATA / "deepscaler_math.json").read_text())
    tasks = read_math(DATA / "deepscaler_math.json").tasks
    assert [(t.question, t.answers) for t in tasks] == [(r["problem"], (r["answer"],)) for r in raw]
    assert [t.id[:12] for t in tasks] == [f"math-{i:06d}-" for i in range(6)]
    assert len({t.id for t in tasks}) == 6


def test_the_mathematics_among_arpo_rows():
    with pytest.raises(RecordError, match=r"record 1: field 'ability': expected 'math', got 'qa'"):
        read_math(DATA / "arpo_train.parquet")
    loaded = read_math(DATA / "arpo_train.parquet", "skip")
    (task,) = loaded.tasks
    assert task.question.startswith("Triangle  $ABC$  is equilateral")
    assert task.answers == ("3\\sqrt{3} - 6",)
    assert len(loaded.skipped) == 3


@pytest.mark.parametrize(
    ("record", "suffix", "answer", "task_id"),
    [
        (AIME24, ".jsonl", "005", "math-60-"),
        (AMC23, ".jsonl", "5", "math-0-"),
        (DEEPSCALER, ".json", "5", "math-000000-"),
        (VERL, ".parquet", "5", "row-test-7-"),
    ],
)
def test_layouts(write, record, suffix, answer, task_id):
    path = write(record, suffix=suffix)
    (task,) = read_math(path).tasks
    assert (task.question, task.answers, task.titles) == (SUM, (answer,), ())
    assert task.id.startswith(task_id)
    assert read_math(path).tasks == [task]


@pytest.mark.parametrize(
    ("fields", "answers"),
    [
        ({"answer": 27}, ("27",)),
        ({"answer": 27.0}, ("27",)),
        ({"answer": 0.5}, ("0.5",)),
        ({"answer": -3}, ("-3",)),
        ({"answer": " \\frac{1}{2} "}, ("\\frac{1}{2}",)),
        ({"answer": ["2", 3.0, "2"]}, ("2", "3")),
        ({"answer": "5", "solution": r"\boxed{6}"}, ("5",)),
        ({"answer": None, "solution": r"\boxed{5}, no, \boxed{\frac{1}{2}}"}, (r"\frac{1}{2}",)),
        ({"answer": "", "solution": r"$\boxed{ 6 }$"}, ("6",)),
        ({"solution": r"$\boxed{\{1,2\}}$"}, (r"\{1,2\}",)),
    ],
)
def test_answers(write, fields, answers):
    assert read_math(write({"problem": SUM, **fields})).tasks[0].answers == answers


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ({"answer": "5"}, "question"),
        ({"problem": "  ", "answer": "5"}, "problem"),
        ({"problem": SUM}, "answer"),
        ({"problem": SUM, "solution": "It is 5."}, "answer"),
        ({"problem": SUM, "solution": r"\boxed{}"}, "answer"),
        ({"problem": SUM, "solution": 5}, "solution"),
        ({"problem": SUM, "answer": "  "}, "answer"),
        ({"problem": SUM, "answer": True}, "answer"),
        ({"problem": SUM, "answer": []}, "answer"),
        ({"problem": SUM, "answer": ["1", None]}, r"answer\[1\]"),
        ({"problem": SUM, "answer": "5", "id": []}, "id"),
        ({"problem": SUM, "answer": "5", "ability": "qa"}, "ability"),
        ({**VERL, "reward_model": {"style": "rule"}}, "reward_model.ground_truth"),
    ],
)
def test_malformed_records(write, record, field):
    path = write({"problem": POWER, "answer": "8"}, record)
    with pytest.raises(RecordError, match=f"record 1.*field '{field}'"):
        read_math(path)
    loaded = read_math(path, "skip")
    assert [t.question for t in loaded.tasks] == [POWER]
    assert len(loaded.skipped) == 1


def test_the_same_problem_twice(write):
    plain = {"problem": SUM, "answer": "5"}
    first, second = read_math(write(plain, plain)).tasks
    assert first.id != second.id
    assert first.question == second.question
    with pytest.raises(RecordError, match="occurs twice"):
        read_math(write({**plain, "id": 1}, {**plain, "id": 1}))


def test_sets_that_number_alike_can_be_put_together(write):
    one = read_math(write({"id": 0, "problem": SUM, "answer": "5"})).tasks
    other = read_math(write({"id": 0, "problem": POWER, "answer": "8"})).tasks
    assert one[0].id != other[0].id


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{5}", "5"),
        (r"so $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\boxed {5}", "5"),
        (r"\boxed{1} or \boxed{2}", "2"),
        (r"\boxed{x = \boxed{5}}", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ \frac{1}{2} \right.}", r"\left\{ \frac{1}{2} \right."),
        (r"\boxed{}", ""),
        (r"\boxed{5} then \boxed{6", "5"),
        (r"\boxed{5 then \boxed{6}", "6"),
        (r"} \boxed{5}}", "5"),
        ("\\boxed{a\nb}", "a\nb"),
        (r"\boxed{5", None),
        (r"\\boxed{5}", None),
        (r"\boxed 5", None),
        ("boxed{5}", None),
        ("", None),
    ],
)
def test_last_boxed(text, content):
    assert last_boxed(text) == content


@given(st.lists(st.sampled_from([r"\boxed{", "{", "}", r"\{", r"\}", "x", "\\"]), max_size=12).map("".join))
def test_what_is_boxed_is_balanced(text):
    content = last_boxed(text)
    if content is not None:
        bare = content.replace("\\\\", "").replace(r"\{", "").replace(r"\}", "")
        assert bare.count("{") == bare.count("}")
        assert r"\boxed{" in text


def test_hostile_text_is_read_in_linear_time():
    for text in (
        r"\boxed{" * 200_000,
        "{" * 1_000_000,
        r"\boxed{" * 100_000 + "}" * 100_000,
        "\\" * 1_000_000,
    ):
        assert last_boxed(text) in (None, "")
