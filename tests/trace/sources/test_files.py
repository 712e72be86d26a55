"""Splits read from files: nothing that is trained on is tested, whichever id a file gives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trace_rl.config.tasks import QaTask
from trace_rl.sources.files import read_splits
from trace_rl.tasks.records import Loaded
from trace_rl.tasks.task import Task


def reader(path: Path, on_malformed: str = "fail") -> Loaded:
    """A file's name is its tasks: `a1=Who-b2=What` holds the tasks a1 and b2."""
    rows = [part.split("=") for part in path.name.split("-")]
    ability = path.parent.name or "qa"
    return Loaded([Task(i, q, ("x",), "test", extra={"ability": ability}) for i, q in rows], [], [])


def splits(**files: Any) -> tuple[list[str], list[str]]:
    read = read_splits(QaTask(kind="search_r1", **files), reader)
    return [t.id for t in read.train], [t.id for t in read.test]


def test_a_question_that_was_trained_on_is_not_tested() -> None:
    assert splits(train=["a=Who-b=What"], test=["a=Why-c=who-d=When"]) == (["a", "b"], ["d"])


def test_what_is_left_out_is_said() -> None:
    read = read_splits(QaTask(kind="search_r1", train=["a=Who", "a=Who"], test=["c=who", "d=When"]), reader)
    assert read.skipped == [
        "a=Who: 1 records have ids of earlier files",
        "1 held-out questions are among the training questions",
    ]


def test_an_id_counts_once_but_a_set_keeps_its_own_repetitions() -> None:
    assert splits(train=["a=Who", "a=Who-b=What"], test=["c=When-d=When"]) == (["a", "b"], ["c", "d"])


def test_ability_and_limit() -> None:
    assert splits(train=["math/a=1-b=2", "qa/c=3"], test=["math/d=4"], ability="math") == (["a", "b"], ["d"])
    assert splits(train=["math/a=1-b=2"], test=["math/d=4-e=5"], limit=1) == (["a"], ["d"])
