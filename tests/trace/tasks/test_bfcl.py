"""The BFCL reader against the wheel's raw data, and the split."""

import importlib.util
import json
from collections import Counter
from pathlib import Path

import pytest

from trace_rl.tasks import bfcl
from trace_rl.tasks.bfcl import SUBSETS, bfcl_entry, bfcl_version, load_bfcl
from trace_rl.tasks.task import Task

DATA = Path(importlib.util.find_spec("bfcl_eval").origin).parent / "data"


def rows(name):
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


def number(task):
    return int(task.id.rsplit("_", 1)[1])


@pytest.mark.parametrize("subset", SUBSETS)
def test_tasks_are_the_entries(subset):
    train, test = load_bfcl([subset])
    by_id = {task.id: task for task in train + test}
    raw = rows(f"BFCL_v4_multi_turn_{subset}.json")
    answers = rows(f"possible_answer/BFCL_v4_multi_turn_{subset}.json")
    assert len(by_id) == 200
    for row, answer in zip(raw, answers, strict=True):
        task, entry = by_id[row["id"]], bfcl_entry(row["id"])
        assert task.question == row["question"][0][0]["content"]
        assert task.source == f"bfcl_{subset}"
        assert json.loads(task.answers[0]) == answer["ground_truth"]
        assert [[m["content"] for m in turn] for turn in row["question"]] == [
            [question] if question else [] for question in entry.questions
        ]
        assert set(entry.revealed) == {int(turn) for turn in row.get("missed_function", {})}
        assert entry.long_context == (subset == "long_context")
        assert Task.from_json(json.loads(json.dumps(task.to_json()))) == task


def test_held_back_functions_are_not_known_from_the_start():
    for row in rows("BFCL_v4_multi_turn_miss_func.json"):
        entry = bfcl_entry(row["id"])
        held_back = {name for names in row["missed_function"].values() for name in names}
        assert {f["name"] for fs in entry.revealed.values() for f in fs} == held_back
        assert {f["name"] for f in entry.functions} == entry.function_names - held_back


def test_documentation_carries_the_syntax_hint_unless_held_back():
    (described,) = [r for r in rows("multi_turn_func_doc/gorilla_file_system.json") if r["name"] == "sort"]
    hint = " Note that the provided function is in Python 3 syntax."
    known = next(f for f in bfcl_entry("multi_turn_base_0").functions if f["name"] == "sort")
    assert known == {**described, "description": described["description"] + hint}
    assert bfcl_entry("multi_turn_miss_func_0").revealed == {3: (described,)}


def test_all_variants_of_a_scenario_are_on_one_side():
    train, test = load_bfcl()
    assert Counter(task.source for task in train) == {f"bfcl_{s}": 160 for s in SUBSETS}
    assert Counter(task.source for task in test) == {f"bfcl_{s}": 40 for s in SUBSETS}
    assert {number(t) for t in train}.isdisjoint({number(t) for t in test})
    assert {t.id for t in load_bfcl(["miss_func"])[1]} == {t.id for t in test if t.source == "bfcl_miss_func"}


def test_the_first_so_many_are_of_all_subsets():
    for tasks in load_bfcl():
        assert [t.source for t in tasks[:8]] == [f"bfcl_{s}" for s in SUBSETS] * 2


def test_the_split_depends_on_seed_and_share():
    test = {seed: [t.id for t in load_bfcl(["base"], seed=seed)[1]] for seed in (0, 0, 1)}
    assert test[0] != test[1]
    assert [t.id for t in load_bfcl(["base"])[1]] == test[0]
    assert len(load_bfcl(["base"], train_share=0.5)[0]) == 100


def test_the_split_file_is_written_and_read_back(tmp_path):
    path = tmp_path / "new" / "split.json"
    first = load_bfcl(split_file=path)
    written = json.loads(path.read_text())
    assert (written["bfcl_eval"], written["seed"], written["train_share"]) == (bfcl_version(), 0, 0.8)
    assert sorted(written["train"]) == sorted(t.id for t in first[0])
    assert sorted(written["test"]) == sorted(t.id for t in first[1])
    before = path.stat().st_mtime_ns
    assert load_bfcl(split_file=path) == first
    assert load_bfcl(["base"], split_file=path)[1] == [t for t in first[1] if t.source == "bfcl_base"]
    assert path.stat().st_mtime_ns == before
    assert [p.name for p in path.parent.iterdir()] == ["split.json"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"seed": 5}, r"seed = 5, but this run has 0"),
        ({"train_share": 0.5}, r"train_share = 0.5, but this run has 0.8"),
        ({"bfcl_eval": "2025.1.1"}, r"bfcl_eval = '2025.1.1', but this run has '20"),
        ({"test": ["multi_turn_base_0"]}, r"1 test ids, expected 160; they differ in multi_turn_base_"),
        ({"train": None}, r"train = None"),
    ],
)
def test_another_split_is_refused_and_said_how(tmp_path, change, complaint):
    path = tmp_path / "split.json"
    load_bfcl(split_file=path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=complaint) as refused:
        load_bfcl(split_file=path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_file_that_is_no_split_is_refused(tmp_path, text):
    path = tmp_path / "split.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="not a BFCL split file"):
        load_bfcl(split_file=path)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"\['hard'\]: choose from base, miss_func"):
        load_bfcl(["base", "hard"])
    with pytest.raises(ValueError, match="unknown BFCL subsets"):
        load_bfcl([])
    for share in (0.0, 1.0, 80):
        with pytest.raises(ValueError, match=r"train_share must be in \(0, 1\)"):
            load_bfcl(train_share=share)
    for entry_id in ("multi_turn_base_200", "base_1", "multi_turn_hard_1", "", "simple_python_0"):
        with pytest.raises(ValueError, match="no BFCL multi-turn entry"):
            bfcl_entry(entry_id)


def test_a_missing_wheel_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install --no-deps bfcl-eval==2026\.3\.23"):
        bfcl._wheel.__wrapped__()
