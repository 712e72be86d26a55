"""2WikiMultiHopQA: its layouts, and the aliases its scorer takes. Malformed fields: test_hotpotqa.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from trace_rl.tasks.readers import READERS
from trace_rl.tasks.records import RecordError

OFFICIAL = Path(__file__).parents[2] / "data" / "wiki_multihop_official.json"
ALIASES = [
    {"Q_id": "Q340", "aliases": ["Montreal", "Montréal", ""], "demonyms": ["Montrealer"]},
    {"Q_id": "Q38685497", "aliases": ["Free Guy"], "demonyms": []},
    {"Q_id": "Q30", "aliases": ["USA"], "demonyms": ["American"]},
]
read = READERS["2wikimultihopqa"]


def records() -> list[dict[str, Any]]:
    return json.loads(OFFICIAL.read_text())


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copy(OFFICIAL, tmp_path / "dev.json"))


def write_lines(path: Path, values: list[Any]) -> None:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def test_real_records_load():
    loaded = read(OFFICIAL)
    raw = records()
    assert [t.id for t in loaded.tasks] == [r["_id"] for r in raw]
    assert [t.answers for t in loaded.tasks] == [("Free Guy",), ("Montreal, Quebec",), ("yes",)]
    assert loaded.tasks[0].titles == ("Forbidden Ground", "Free Guy", "Pál Gábor", "Shawn Levy")
    assert {p.title for p in loaded.passages} == {title for r in raw for title, _ in r["context"]}
    assert {t.source for t in loaded.tasks} == {"2wikimultihopqa"}


def columns(record: dict[str, Any]) -> dict[str, Any]:
    titles, sentences = zip(*record["context"], strict=True)
    facts, numbers = zip(*record["supporting_facts"], strict=True)
    record["context"] = {"title": list(titles), "sentences": list(sentences)}
    record["supporting_facts"] = {"title": list(facts), "sent_id": list(numbers)}
    record["id"] = record.pop("_id")
    return record


def strings(record: dict[str, Any]) -> dict[str, Any]:
    return record | {name: json.dumps(record[name]) for name in ("context", "supporting_facts", "evidences")}


@pytest.mark.parametrize("layout", [columns, strings])
def test_the_hubs_layouts_equal_the_official_one(layout, tmp_path):
    path = tmp_path / "hub.jsonl"
    write_lines(path, [layout(record) for record in records()])
    assert read(path) == read(OFFICIAL)


def test_string_that_is_no_json(tmp_path):
    path = tmp_path / "hub.jsonl"
    write_lines(path, [records()[0] | {"context": "[["}])
    with pytest.raises(RecordError, match="field 'context': a string that is not JSON: Expecting value"):
        read(path)


def test_aliases_beside_the_records(copied):
    write_lines(copied.parent / "id_aliases.json", ALIASES)
    golds = [t.answers for t in read(copied).tasks]
    assert golds == [("Free Guy",), ("Montreal, Quebec", "Montreal", "Montréal", "Montrealer"), ("yes",)]


def test_answers_without_an_id_keep_their_one_gold(copied):
    write_lines(copied.parent / "id_aliases.json", ALIASES)
    raw = records()
    del raw[0]["answer_id"]
    raw[1]["answer_id"] = "Q404"
    copied.write_text(json.dumps(raw))
    assert [t.answers for t in read(copied).tasks] == [("Free Guy",), ("Montreal, Quebec",), ("yes",)]


@pytest.mark.parametrize(
    ("line", "blamed"),
    [
        ({"aliases": [], "demonyms": []}, "Q_id"),
        ({"Q_id": "Q1", "demonyms": []}, "aliases"),
        ({"Q_id": "Q1", "aliases": [], "demonyms": "x"}, "demonyms"),
        ({"Q_id": "Q1", "aliases": [3], "demonyms": []}, r"aliases\[0\]"),
    ],
)
def test_malformed_alias_is_never_skipped(line, blamed, copied):
    write_lines(copied.parent / "id_aliases.json", [*ALIASES, line])
    with pytest.raises(RecordError, match=f"id_aliases.json: record 3: field '{blamed}'"):
        read(copied, on_malformed="skip")
    (copied.parent / "id_aliases.json").write_text(json.dumps(ALIASES[0]) + "\n{")
    with pytest.raises(RecordError, match=r"id_aliases.json: record 1: not valid JSON"):
        read(copied, on_malformed="skip")


def test_answer_id_that_is_no_text(copied):
    copied.write_text(json.dumps([records()[0] | {"answer_id": 340}]))
    with pytest.raises(RecordError, match=r"record 0 .*: field 'answer_id': expected a string"):
        read(copied)
