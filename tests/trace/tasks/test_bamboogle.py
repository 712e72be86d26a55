from __future__ import annotations

import json
from pathlib import Path

import pytest

from trace_rl.tasks.readers import READERS
from trace_rl.tasks.records import RecordError
from trace_rl.tasks.task import Task

FILE = Path(__file__).parents[2] / "data" / "bamboogle.jsonl"
read = READERS["bamboogle"]


def test_records_with_ids():
    loaded = read(FILE)
    assert [t.id for t in loaded.tasks] == ["test_0", "test_1", "test_2"]
    question = "Who was president of the United States in the year that Citibank was founded?"
    assert loaded.tasks[0] == Task("test_0", question, ("james madison",), "bamboogle")
    assert not loaded.passages


@pytest.mark.parametrize("ending", [".json", ".csv"])
def test_the_authors_form(ending, tmp_path):
    path = tmp_path / f"bamboogle{ending}"
    tasks = read(FILE).tasks
    if ending == ".json":
        rows = [{"Question": t.question, "Answer": t.answers[0], "Q1": "?", "A1": ["x"]} for t in tasks]
        path.write_text(json.dumps(rows))
    else:
        path.write_text("Question,Answer\n" + "".join(f"{t.question},{t.answers[0]}\n" for t in tasks))
    found = read(path).tasks
    assert [(t.question, t.answers) for t in found] == [(t.question, t.answers) for t in tasks]
    assert found == read(path).tasks
    assert found[1].id == "bamboogle-000001-ee962b39"


@pytest.mark.parametrize(
    ("record", "blamed"),
    [
        ({"Question": "q"}, "Answer"),
        ({"Question": "q", "Answer": ["x"]}, "Answer"),
        ({"Question": "", "Answer": "x"}, "Question"),
        ({"question": "q", "golden_answers": []}, "golden_answers"),
        ({"question": "q", "golden_answers": ["x"], "id": 3}, "id"),
    ],
)
def test_malformed_field_is_named(record, blamed, tmp_path):
    path = tmp_path / "records.json"
    path.write_text(json.dumps([record]))
    with pytest.raises(RecordError, match=f"record 0.*: field '{blamed}': "):
        read(path)
