"""Both published layouts, and every way a field can be wrong."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from trace_rl.tasks.readers import READERS
from trace_rl.tasks.records import RecordError
from trace_rl.tasks.task import Task

DATA = Path(__file__).parents[2] / "data"
OFFICIAL, HUB = DATA / "hotpotqa_official.json", DATA / "hotpotqa_hub.json"
read = READERS["hotpotqa"]


def records(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())


@pytest.fixture
def write(tmp_path: Path):
    def write_list(values: Any) -> Path:
        path = tmp_path / "records.json"
        path.write_text(json.dumps(values))
        return path

    return write_list


@pytest.mark.parametrize("path", [OFFICIAL, HUB])
def test_real_records_load(path):
    loaded = read(path)
    raw = records(path)
    assert len(loaded.tasks) == 5
    assert not loaded.skipped
    assert [t.question for t in loaded.tasks] == [r["question"].strip() for r in raw]
    assert [t.answers for t in loaded.tasks] == [(r["answer"],) for r in raw]
    assert len(loaded.passages) == len({(p.title, p.text) for p in loaded.passages}) > 40
    titles = {p.title for p in loaded.passages}
    assert all(set(t.titles) <= titles and len(t.titles) == 2 for t in loaded.tasks)
    assert len({p.id for p in loaded.passages}) == len(loaded.passages)


def test_ids_are_the_files_own_or_stable():
    assert [t.id for t in read(OFFICIAL).tasks] == [r["_id"] for r in records(OFFICIAL)]
    assert [t.id for t in read(HUB).tasks] == [t.id for t in read(HUB).tasks]
    assert len({t.id for t in read(HUB).tasks}) == 5
    assert read(HUB).tasks[0].id == "hotpotqa-000000-a42e0471"


def test_layouts_agree(write):
    """The official records rewritten by columns give the same tasks and passages."""
    hub = []
    for r in records(OFFICIAL):
        titles, sentences = zip(*r["context"], strict=True)
        facts, numbers = zip(*r["supporting_facts"], strict=True)
        r["context"] = {"title": list(titles), "sentences": list(sentences)}
        r["supporting_facts"] = {"title": list(facts), "sent_id": list(numbers)}
        r["id"] = r.pop("_id")
        hub.append(r)
    assert read(write(hub)) == read(OFFICIAL)


def test_json_lines_equal_json_list(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in records(OFFICIAL)) + "\n\n")
    assert read(path) == read(OFFICIAL)


def test_sentences_are_joined_by_one_space(write):
    record = records(OFFICIAL)[0]
    record["context"] = [["T", ["One.", " Two.", "", "Three. "]], ["Empty", []], ["T", ["One. Two. Three."]]]
    (passage,) = read(write([record])).passages
    assert (passage.title, passage.text) == ("T", "One. Two. Three.")


MALFORMED_BOTH = [
    ("question", None, "question"),
    ("question", "  ", "question"),
    ("question", 7, "question"),
    ("answer", None, "answer"),
    ("answer", "", "answer"),
    ("answer", ["x"], "answer"),
    ("answer", True, "answer"),
    ("_id", 5, "_id"),
    ("_id", "", "_id"),
    ("context", None, "context"),
    ("context", "text", "context"),
    ("supporting_facts", None, "supporting_facts"),
    ("supporting_facts", 3, "supporting_facts"),
]
MALFORMED_OFFICIAL = [
    ("context", ["x"], "context[0]"),
    ("context", [["t"]], "context[0]"),
    ("context", [["t", ["s"], 1]], "context[0]"),
    ("context", [["t", ["s"]], [3, ["s"]]], "context[1][0]"),
    ("context", [["", ["s"]]], "context[0][0]"),
    ("context", [["t", "s"]], "context[0][1]"),
    ("context", [["t", ["s", None]]], "context[0][1][1]"),
    ("supporting_facts", [["t", 0], "u"], "supporting_facts[1]"),
    ("supporting_facts", [["t"]], "supporting_facts[0]"),
    ("supporting_facts", [[None, 0]], "supporting_facts[0][0]"),
    ("supporting_facts", [["t", "0"]], "supporting_facts[0][1]"),
    ("supporting_facts", [["t", True]], "supporting_facts[0][1]"),
    ("supporting_facts", [["t", -1]], "supporting_facts[0][1]"),
]
MALFORMED_HUB = [
    ("context", {}, "context.title"),
    ("context", {"title": ["t"]}, "context.sentences"),
    ("context", {"title": "t", "sentences": []}, "context.title"),
    ("context", {"title": ["t"], "sentences": {}}, "context.sentences"),
    ("context", {"title": ["t", "u"], "sentences": [["s"]]}, "context"),
    ("context", {"title": [1], "sentences": [["s"]]}, "context.title[0]"),
    ("context", {"title": ["t"], "sentences": ["s"]}, "context.sentences[0]"),
    ("context", {"title": ["t"], "sentences": [["s", 4]]}, "context.sentences[0][1]"),
    ("supporting_facts", {"title": ["t"]}, "supporting_facts.sent_id"),
    ("supporting_facts", {"title": ["t"], "sent_id": [0, 1]}, "supporting_facts"),
    ("supporting_facts", {"title": [None], "sent_id": [0]}, "supporting_facts.title[0]"),
    ("supporting_facts", {"title": ["t"], "sent_id": [0.5]}, "supporting_facts.sent_id[0]"),
]
CASES = [(OFFICIAL, *c) for c in MALFORMED_BOTH + MALFORMED_OFFICIAL]
CASES += [(HUB, *c) for c in MALFORMED_BOTH + MALFORMED_HUB]


@pytest.mark.parametrize(("path", "name", "value", "blamed"), CASES)
def test_malformed_field_is_named(path, name, value, blamed, write):
    raw = records(path)
    raw[3][name] = value
    written = write(raw)
    with pytest.raises(RecordError) as caught:
        read(written, on_malformed="fail")
    error = caught.value
    assert (error.index, error.field) == (3, blamed)
    assert str(written) in str(error)
    assert "record 3" in str(error)
    assert repr(blamed) in str(error)
    loaded = read(written, on_malformed="skip")
    assert len(loaded.tasks) == 4
    assert loaded.skipped == [str(error)]


@pytest.mark.parametrize("name", ["question", "answer", "context", "supporting_facts"])
@pytest.mark.parametrize("path", [OFFICIAL, HUB])
def test_missing_field_is_named(path, name, write):
    raw = records(path)
    del raw[1][name]
    with pytest.raises(RecordError, match=f"record 1.*field '{name}': missing"):
        read(write(raw))


def test_message_shows_the_records_id(write):
    raw = records(OFFICIAL)
    raw[2]["answer"] = None
    with pytest.raises(RecordError, match=rf"record 2 \(id {raw[2]['_id']}\): field 'answer': .*null"):
        read(write(raw))


@pytest.mark.parametrize("value", [None, 3, "text", [], ["x"], True])
def test_record_that_is_no_object(value, write):
    raw: list[Any] = records(OFFICIAL)
    raw[0] = value
    with pytest.raises(RecordError, match="record 0: expected a JSON object"):
        read(write(raw))
    assert len(read(write(raw), on_malformed="skip").tasks) == 4


def test_repeated_id(write):
    raw = records(OFFICIAL)
    raw[4] = copy.deepcopy(raw[0])
    with pytest.raises(RecordError, match=r"record 4.*occurs twice"):
        read(write(raw))
    assert len(read(write(raw), on_malformed="skip").skipped) == 1


def test_all_malformed_is_fatal_even_when_skipping(write):
    with pytest.raises(RecordError, match="none of the 2 records is usable"):
        read(write([{}, {"question": "q"}]), on_malformed="skip")


@pytest.mark.parametrize("text", ["", " \n\n", "[]"])
def test_empty_file_is_fatal(text, tmp_path):
    path = tmp_path / "empty.json"
    path.write_text(text)
    with pytest.raises(RecordError, match="no records"):
        read(path, on_malformed="skip")


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no record file at"):
        read(tmp_path / "nowhere.json")


def test_broken_files(tmp_path):
    path = tmp_path / "broken.json"
    path.write_text('[{"a": 1},')
    with pytest.raises(RecordError, match="not valid JSON"):
        read(path, on_malformed="skip")
    path.write_bytes(b'[{"a": "\xff"}]')
    with pytest.raises(RecordError, match="not UTF-8"):
        read(path, on_malformed="skip")


def test_broken_line_costs_one_record(tmp_path):
    path = tmp_path / "records.jsonl"
    lines = [json.dumps(r) for r in records(HUB)]
    path.write_text("\n".join([*lines[:2], lines[2][:-5], *lines[3:]]))
    loaded = read(path, on_malformed="skip")
    assert len(loaded.tasks) == 4
    assert "record 2: not valid JSON" in loaded.skipped[0]


def test_json_lines_whose_first_record_is_a_list(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text("[1]\n" + json.dumps(records(HUB)[0]))
    assert len(read(path, on_malformed="skip").tasks) == 1


def test_unknown_policy():
    with pytest.raises(ValueError, match="on_malformed"):
        read(OFFICIAL, on_malformed="ignore")


def test_task_json_round_trip():
    for task in read(HUB).tasks:
        assert Task.from_json(json.loads(json.dumps(task.to_json()))) == task
    for broken in ({}, {**task.to_json(), "answers": "x"}, {**task.to_json(), "id": 3}):
        with pytest.raises(ValueError, match="task: field"):
            Task.from_json(broken)
