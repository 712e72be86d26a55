"""Records on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from trace_rl.evaluation.records import (
    Record,
    RecordsError,
    done,
    drop_torn_line,
    read_records,
    record_file,
    record_files,
)


def record(task: str = "t", sample: int = 0, error: str = "", answer: str = "Zoë\n|\u2028") -> Record:
    turns = ({"action": "a", "observation": "o"},)
    return Record(task, sample, "s", "Who?", ("x", "y"), answer, 0.0, "answer", error=error, rollout=turns)


def write(file: Path, *records: Record) -> None:
    with file.open("a", encoding="utf-8") as lines:
        lines.writelines(one.to_line() for one in records)


def test_read_back_what_ranks_of_several_runs_wrote(tmp_path: Path) -> None:
    everything = [record("t", k) for k in range(4)]
    for one, (rank, world) in zip(everything, ((0, 1), (0, 2), (1, 2), (11, 16)), strict=True):
        write(record_file(tmp_path, "set", rank, world), one)
    write(record_file(tmp_path, "set-2", 0, 1), record("other"))
    write(record_file(tmp_path, "set_2", 1, 2), record("other"))
    assert len(record_files(tmp_path, "set")) == 4
    assert sorted(read_records(tmp_path, "set").values(), key=lambda r: r.sample) == everything


def test_nothing_recorded(tmp_path: Path) -> None:
    assert read_records(tmp_path / "none", "set") == {}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_later_try_replaces_an_error_and_nothing_else(tmp_path: Path, order: tuple[int, int]) -> None:
    both = record(error="down"), record(answer="fine")
    write(tmp_path / "set.jsonl", *(both[i] for i in order), record("u", 1, error="down"))
    found = read_records(tmp_path, "set")
    assert found["t", 0].answer == "fine"
    assert done(found.values()) == {("t", 0)}


@pytest.mark.parametrize("cut", [1, 5, 60])
def test_a_torn_line_is_dropped(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "set.jsonl"
    write(file, record("a"), record("b"))
    file.write_bytes(file.read_bytes()[:-cut])
    assert set(read_records(tmp_path, "set")) == {("a", 0)}
    drop_torn_line(file)
    write(file, record("c"))
    assert set(read_records(tmp_path, "set")) == {("a", 0), ("c", 0)}


def test_dropping_where_nothing_is_torn_changes_nothing(tmp_path: Path) -> None:
    for content in (b"", record().to_line().encode()):
        (tmp_path / "set.jsonl").write_bytes(content)
        drop_torn_line(tmp_path / "set.jsonl")
        assert (tmp_path / "set.jsonl").read_bytes() == content


@pytest.mark.parametrize("line", ["{}", "[1]", "not JSON", '{"task": 1}', "\x00"])
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    write(tmp_path / "set.jsonl", record())
    with (tmp_path / "set.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(RecordsError, match=r"set\.jsonl, line 2: not a record"):
        read_records(tmp_path, "set")
