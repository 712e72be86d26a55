"""Rows of Search-R1 and ARPO, as they were published."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from trace_rl.tasks.readers import READERS
from trace_rl.tasks.records import RecordError, read_records

DATA = Path(__file__).parents[2] / "data"
NQ, ARPO = DATA / "search_r1_nq.parquet", DATA / "arpo_train.parquet"
read = READERS["search_r1"]


def raw(path):
    return [record.data for record in read_records(path)]


def test_search_r1_rows():
    tasks = read(NQ).tasks
    assert [t.id for t in tasks] == ["nq-test_0", "nq-test_12", "nq-test_17"]
    assert tasks[0].question == "who got the first nobel prize in physics?"
    assert tasks[0].answers == ("Wilhelm Conrad Röntgen",)
    assert tasks[1].answers == ("291 episodes", "291")
    assert {t.source for t in tasks} == {"nq"}
    assert tasks[0].extra == {"ability": "fact-reasoning", "data_source": "nq"}
    assert not read(NQ).passages


def test_the_prompt_alone_gives_the_same_question(tmp_path):
    rows = [{**row, "question": None} for row in raw(NQ)]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    assert read(path) == read(NQ)


def test_arpo_rows_of_both_abilities():
    tasks = read(ARPO).tasks
    assert Counter(t.extra["ability"] for t in tasks) == {"math": 1, "qa": 3}
    assert [t.answers for t in tasks[:2]] == [("3\\sqrt{3} - 6",), ("Chattahoochee National Forest",)]
    assert tasks[0].question.startswith("Triangle  $ABC$  is equilateral")
    assert tasks[0].id == "DR_grpo_mix-train-0-042a4bdd"
    assert len({t.id for t in tasks}) == 4
    assert {t.source for t in tasks} == {"DR_grpo_mix"}
    assert [t.question for t in tasks] == [row["prompt"][-1]["content"].strip() for row in raw(ARPO)]


def test_json_lines_equal_parquet(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in raw(ARPO)))
    assert read(path) == read(ARPO)


def test_sets_put_together_keep_their_rows(tmp_path):
    rows = [{**row, "data_source": source} for source in ("nq", "popqa") for row in raw(NQ)]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    assert Counter(t.source for t in read(path).tasks) == {"nq": 3, "popqa": 3}


def test_row_that_names_no_source(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"question": "who?", "golden_answers": ["x"]}]))
    (task,) = read(path).tasks
    assert (task.source, task.extra) == ("search_r1", {"ability": "", "data_source": ""})


def test_repeated_row(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(raw(NQ) + raw(NQ)[:1]))
    with pytest.raises(RecordError, match=r"record 3.*'nq-test_0' occurs twice"):
        read(path)


def test_ability_that_is_no_text(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{**raw(ARPO)[0], "ability": ["math"]}]))
    with pytest.raises(RecordError, match="field 'ability': expected a string, got a list"):
        read(path)
