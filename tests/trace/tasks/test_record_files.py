"""Parquet and CSV give the same records and messages as JSON; the JSON forms are in test_hotpotqa.py."""

from __future__ import annotations

import builtins
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_rl.tasks.readers import READERS
from trace_rl.tasks.records import Record, RecordError, read_records

DATA = Path(__file__).parents[2] / "data"
HOTPOT, MUSIQUE = DATA / "hotpotqa_hub.json", DATA / "musique_ans.jsonl"


def write_parquet(path: Path, rows: list[dict]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def records(path: Path) -> list[Record]:
    found = list(read_records(path))
    assert all(isinstance(record, Record) for record in found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(("kind", "path"), [("hotpotqa", HOTPOT), ("musique", MUSIQUE)])
def test_parquet_equals_json(kind, path, tmp_path):
    rows = [record.data for record in records(path)]
    assert READERS[kind](write_parquet(tmp_path / "records.parquet", rows)) == READERS[kind](path)


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
rows_of_text = st.lists(st.fixed_dictionaries({"q": texts, "golds": st.lists(texts, max_size=3)}), min_size=1)


@given(rows=rows_of_text)
def test_parquet_round_trip(rows, tmp_path_factory):
    path = write_parquet(tmp_path_factory.mktemp("parquet") / "rows.parquet", rows)
    assert [(r.index, r.data) for r in records(path)] == list(enumerate(rows))


def test_more_rows_than_one_batch_or_group(tmp_path):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"n": range(2500)}), path, row_group_size=1700)
    assert [r.index for r in records(path)] == [r.data["n"] for r in records(path)] == list(range(2500))


def test_malformed_parquet_row_is_named(tmp_path):
    rows = [{"id": f"q{i}", "question": q, "golden_answers": ["x"]} for i, q in enumerate(["a", None, "c"])]
    path = write_parquet(tmp_path / "rows.parquet", rows)
    with pytest.raises(RecordError, match=r"rows\.parquet: record 1 \(id q1\): field 'question': missing"):
        READERS["search_r1"](path)
    assert len(READERS["search_r1"](path, on_malformed="skip").tasks) == 2


def test_what_is_no_parquet(tmp_path):
    path = tmp_path / "rows.parquet"
    path.write_text('{"question": "q"}')
    with pytest.raises(RecordError, match=r"rows\.parquet: not readable as Parquet"):
        list(read_records(path))


def test_parquet_without_rows(tmp_path):
    table = pyarrow.table({"q": pyarrow.array([], pyarrow.string())})
    pyarrow.parquet.write_table(table, tmp_path / "none.parquet")
    with pytest.raises(RecordError, match="no records"):
        list(read_records(tmp_path / "none.parquet"))


def test_without_pyarrow_the_message_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.partition(".")[0] == "pyarrow":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(RecordError, match="pip install pyarrow"):
        list(read_records(DATA / "arpo_train.parquet"))
    assert len(list(read_records(HOTPOT))) == 5


def test_csv(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('\ufeffQuestion,Answer\r\n"Who, and\nwhere?","Ann ""A"" B"\r\nWhen?,1999\r\n', newline="")
    assert [r.data for r in records(path)] == [
        {"Question": "Who, and\nwhere?", "Answer": 'Ann "A" B'},
        {"Question": "When?", "Answer": "1999"},
    ]


@pytest.mark.parametrize("line", ["only one", "one,two,three"])
def test_csv_row_of_another_length(line, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(f"Question,Answer\na,b\n{line}\nc,d\n")
    with pytest.raises(RecordError, match=r"record 1: not as many cells as the header has \(2\)"):
        READERS["bamboogle"](path)
    assert [t.question for t in READERS["bamboogle"](path, on_malformed="skip").tasks] == ["a", "c"]


def test_csv_with_a_header_only(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("Question,Answer\n")
    with pytest.raises(RecordError, match="no records"):
        list(read_records(path))


def test_every_reader_reports_what_its_file_is_not(tmp_path):
    path = tmp_path / "records.json"
    path.write_text(json.dumps([{"title": "t", "text": "a passage, not a task"}]))
    for read in READERS.values():
        with pytest.raises(RecordError, match="record 0: field 'question': missing"):
            read(path)
