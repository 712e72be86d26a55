"""One finished rollout, one JSON line: what an evaluation keeps, and goes on from when it was interrupted."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

Key = tuple[str, int]
"""A rollout of a set: its task's id and the number of the sample, from 0."""


class RecordsError(ValueError):
    """Recorded rollouts cannot be read or belong to other questions; the message says which."""


@dataclass(frozen=True)
class Record:
    """A finished rollout of one question.

    `scores` are the environment's figures and `official` the question set's own metrics, all in [0, 1].
    `rollout` is the text of its turns, `{"action", "observation"}` each. `outcome` is the last turn's, or
    "too_long" for a prompt that leaves no room for a turn. `error` says why a tool ended it: such a record is
    kept for its figures, but the rollout is not done.
    """

    task: str
    sample: int
    source: str
    question: str
    answers: tuple[str, ...]
    answer: str
    reward: float
    outcome: str
    truncation: str | None = None
    error: str = ""
    scores: dict[str, float] = field(default_factory=dict)
    official: dict[str, float] = field(default_factory=dict)
    turns: int = 0
    invalid_turns: int = 0
    tool_calls: int = 0
    tool_failures: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    rollout: tuple[dict[str, str], ...] = ()

    @property
    def key(self) -> Key:
        return self.task, self.sample

    def to_line(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False) + "\n"


def record_file(directory: Path, name: str, rank: int, world: int) -> Path:
    """Where this rank appends the rollouts of set `name`."""
    return directory / (f"{name}.jsonl" if world == 1 else f"{name}.rank{rank}.jsonl")


def record_files(directory: Path, name: str) -> list[Path]:
    """The files of set `name` that runs on any number of ranks have written."""
    return [p for p in (directory / f"{name}.jsonl",) if p.is_file()] + sorted(
        directory.glob(f"{name}.rank*.jsonl")
    )


def drop_torn_line(file: Path) -> None:
    """Cut off the half a line that a killed process may have left at the end."""
    with file.open("r+b") as records:
        content = records.read()
        records.truncate(content.rfind(b"\n") + 1)


def read_records(directory: Path, name: str) -> dict[Key, Record]:
    """All whole records of set `name`; of a rollout that was tried again, the one without an error.

    Raises RecordsError, with file and line, for a line that is none.
    """
    found: dict[Key, Record] = {}
    for file in record_files(directory, name):
        lines = file.read_bytes().splitlines(keepends=True)
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                continue  # torn: the rollout is simply not done
            try:
                record = _record(json.loads(line))
            except (ValueError, TypeError) as error:
                raise RecordsError(
                    f"{file}, line {number}: not a record of an evaluation: {error}"
                ) from error
            if record.key not in found or found[record.key].error:
                found[record.key] = record
    return found


def done(records: Iterable[Record]) -> set[Key]:
    """Rollouts that need not be sampled again."""
    return {record.key for record in records if not record.error}


_FIELDS = {f.name for f in fields(Record)}


def _record(data: Any) -> Record:
    if not isinstance(data, dict) or set(data) != _FIELDS:
        raise ValueError(f"expected an object with {', '.join(sorted(_FIELDS))}")
    lists = {name: tuple(data[name]) for name in ("answers", "rollout")}
    return Record(**data | lists)
