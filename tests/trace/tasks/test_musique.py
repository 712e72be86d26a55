from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from trace_rl.tasks.readers import READERS
from trace_rl.tasks.records import RecordError

FILE = Path(__file__).parents[2] / "data" / "musique_ans.jsonl"
read = READERS["musique"]


def records() -> list[dict[str, Any]]:
    return [json.loads(line) for line in FILE.read_text().split("\n") if line]


@pytest.fixture
def write(tmp_path: Path):
    def write_list(values: Any) -> Path:
        path = tmp_path / "records.json"
        path.write_text(json.dumps(values))
        return path

    return write_list


def test_real_records_load():
    loaded = read(FILE)
    raw = records()
    first, second = loaded.tasks
    assert [first.id, second.id] == [r["id"] for r in raw]
    assert first.question == "What team was Anna Benson's husband on?"
    assert first.answers == (
        "Pittsburgh Pirates",
        *("Orioles", "Pirates", "Baltimore Orioles", "New York Mets", "Mets"),
    )
    assert second.answers == ("35",)
    assert second.titles == ("Hello Love (song)", "Hank Snow", "Tennessee", "Publix")
    texts = {(p["title"], p["paragraph_text"]) for r in raw for p in r["paragraphs"]}
    assert {(p.title, p.text) for p in loaded.passages} == texts
    assert {t.source for t in loaded.tasks} == {"musique"}


def test_titles_follow_the_hops_not_the_file(write):
    raw = records()
    raw[1]["question_decomposition"].reverse()
    assert read(write(raw)).tasks[1].titles == ("Publix", "Tennessee", "Hank Snow", "Hello Love (song)")


def test_without_decomposition_the_marked_paragraphs_count(write):
    raw = records()
    expected = tuple(p["title"] for p in raw[1]["paragraphs"] if p["is_supporting"])
    for r in raw:
        del r["question_decomposition"]
    found = read(write(raw)).tasks[1].titles
    assert found == tuple(dict.fromkeys(expected))
    assert set(found) == set(read(FILE).tasks[1].titles)


def test_unanswerable_records_of_the_full_version_are_left_out(write):
    raw = records()
    contrast = copy.deepcopy(raw[0])
    contrast["answerable"] = False
    contrast["question_decomposition"][0]["paragraph_support_idx"] = None
    path = write([contrast, *raw])
    for policy in ("fail", "skip"):
        loaded = read(path, on_malformed=policy)
        assert loaded.tasks == read(FILE).tasks
        (message,) = loaded.skipped
        assert f"record 0 (id {raw[0]['id']}): field 'answerable': false" in message


def test_nothing_but_unanswerable_records(write):
    with pytest.raises(RecordError, match="none of the 2 records is usable"):
        read(write([{**r, "answerable": False} for r in records()]))


def test_optional_fields_may_be_missing(write):
    raw = records()
    for r in raw:
        del r["answer_aliases"], r["answerable"]
    assert [t.answers for t in read(write(raw)).tasks] == [("Pittsburgh Pirates",), ("35",)]


def change(path: str, value: Any):
    """A function that sets the field at ``path`` of a record."""

    def apply(record: dict[str, Any]) -> None:
        *parents, last = [int(key) if key.isdigit() else key for key in path.split("/")]
        place: Any = record
        for key in parents:
            place = place[key]
        place[last] = value

    return apply


@pytest.mark.parametrize(
    ("path", "value", "blamed"),
    [
        ("question", "", "question"),
        ("answer", None, "answer"),
        ("answer_aliases", "x", "answer_aliases"),
        ("answer_aliases", ["x", 3], "answer_aliases[1]"),
        ("answerable", "no", "answerable"),
        ("id", 5, "id"),
        ("paragraphs", {}, "paragraphs"),
        ("paragraphs/2", "x", "paragraphs[2]"),
        ("paragraphs/2/title", None, "paragraphs[2].title"),
        ("paragraphs/2/paragraph_text", 1, "paragraphs[2].paragraph_text"),
        ("paragraphs/2/idx", "2", "paragraphs[2].idx"),
        ("question_decomposition", {}, "question_decomposition"),
        ("question_decomposition/1", 4, "question_decomposition[1]"),
        (
            "question_decomposition/1/paragraph_support_idx",
            None,
            "question_decomposition[1].paragraph_support_idx",
        ),
        (
            "question_decomposition/1/paragraph_support_idx",
            99,
            "question_decomposition[1].paragraph_support_idx",
        ),
    ],
)
def test_malformed_field_is_named(path, value, blamed, write):
    raw = records()
    change(path, value)(raw[1])
    written = write(raw)
    with pytest.raises(RecordError) as caught:
        read(written)
    assert (caught.value.index, caught.value.field) == (1, blamed)
    assert read(written, on_malformed="skip").skipped == [str(caught.value)]
