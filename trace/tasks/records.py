"""Records of a file and the tasks made of them, every complaint naming file, record and field."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .record_files import Broken, UnreadableFile, file_values
from .task import Passage, Task

OnMalformed = Literal["skip", "fail"]


class RecordError(ValueError):
    """A record that is not what its format says; the message names file, record, id and field."""

    def __init__(self, path: str | Path, index: int | None, record_id: str | None, name: str, problem: str):
        self.path, self.index, self.record_id, self.field, self.problem = (
            path,
            index,
            record_id,
            name,
            problem,
        )
        where = "" if index is None else f": record {index}" + (f" (id {record_id})" if record_id else "")
        what = f": field {name!r}" if name else ""
        super().__init__(f"{path}{where}{what}: {problem}")


class LeftOut(RecordError):
    """A well-formed record that makes no task, and is passed over even where a malformed one fails."""

    def __init__(self, reason: RecordError):
        super().__init__(reason.path, reason.index, reason.record_id, reason.field, reason.problem)


@dataclass(frozen=True)
class Record:
    """One JSON object with its place: ``index`` counts records, in a JSONL file lines, from 0."""

    path: Path
    index: int
    data: dict[str, Any]

    def error(self, name: str, problem: str) -> RecordError:
        """The error to raise about field ``name`` of this record."""
        record_id = self.data.get("_id", self.data.get("id"))
        shown = str(record_id) if isinstance(record_id, str | int) else None
        return RecordError(self.path, self.index, shown, name, problem)

    def get(self, name: str) -> Any:
        """The field's value; RecordError if it is missing."""
        if name not in self.data:
            raise self.error(name, "missing")
        return self.data[name]

    def text(self, name: str) -> str:
        """A field that must be a string with something in it."""
        return self.check_text(name, self.get(name))

    def check_text(self, name: str, value: Any, *, empty_ok: bool = False) -> str:
        """``value`` if it is a non-blank string, else RecordError about ``name``."""
        if not isinstance(value, str):
            raise self.error(name, f"expected a string, got {describe(value)}")
        if not empty_ok and not value.strip():
            raise self.error(name, "empty string")
        return value

    def check_list(self, name: str, value: Any, length: int | None = None) -> list[Any]:
        """``value`` if it is a list (of ``length`` items), else RecordError about ``name``."""
        if not isinstance(value, list):
            raise self.error(name, f"expected a list, got {describe(value)}")
        if length is not None and len(value) != length:
            raise self.error(name, f"expected {length} items, got {len(value)}")
        return value

    def check_int(self, name: str, value: Any) -> int:
        """``value`` if it is an integer >= 0 (not a boolean), else RecordError about ``name``."""
        if type(value) is not int or value < 0:
            raise self.error(name, f"expected an integer >= 0, got {describe(value)}")
        return value


def describe(value: Any) -> str:
    """How a wrong value is shown in messages: its JSON type, with the value where that is short."""
    if value is None:
        return "null"
    if isinstance(value, bool | int | float):
        return f"a {'boolean' if isinstance(value, bool) else 'number'} ({json.dumps(value)})"
    if isinstance(value, str):
        return f"a string ({value[:30]!r})"
    return "a list" if isinstance(value, list) else "an object"


@dataclass(frozen=True)
class Loaded:
    """What a reader returns: tasks in file order, passages once each, a message per skipped record."""

    tasks: list[Task]
    passages: list[Passage]
    skipped: list[str] = field(default_factory=list)


Parse = Callable[[Record], tuple[Task, list[Passage]]]


def read_records(path: str | Path) -> Iterator[Record | RecordError]:
    """The records of a JSON list, JSONL, CSV or Parquet file; an error in place of each that is no object.

    See :func:`~trace_rl.tasks.record_files.file_values` for how the form is told.

    Raises FileNotFoundError, or RecordError if the file as a whole is unreadable (encoding, JSON, Parquet,
    a missing library) or empty.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no record file at {path.resolve()}")
    empty = True
    try:
        for index, value in file_values(path):
            empty = False
            if isinstance(value, dict):
                yield Record(path, index, value)
                continue
            broken = isinstance(value, Broken)
            problem = value.problem if broken else f"expected a JSON object, got {describe(value)}"
            yield RecordError(path, index, None, "", problem)
    except UnreadableFile as error:
        raise RecordError(path, None, None, "", str(error)) from error
    if empty:
        raise RecordError(path, None, None, "", "no records")


def load_tasks(path: str | Path, parse: Parse, on_malformed: OnMalformed = "fail") -> Loaded:
    """Runs ``parse`` over a file's records and collects tasks and passages.

    A task id that occurs twice makes the later record malformed: rollouts are grouped by task.

    Args:
        on_malformed: ``"fail"`` raises at the first malformed record; ``"skip"`` leaves it out and keeps
            its message in ``Loaded.skipped``, where messages of a :class:`LeftOut` go in both cases.

    Raises FileNotFoundError, RecordError, also under ``"skip"`` if no record at all is usable, and
    ValueError for another ``on_malformed``.
    """
    if on_malformed not in ("skip", "fail"):
        raise ValueError(f"on_malformed must be 'skip' or 'fail', got {on_malformed!r}")
    tasks: dict[str, Task] = {}
    passages: dict[tuple[str, str], Passage] = {}
    skipped: list[str] = []
    for record in read_records(path):
        try:
            if isinstance(record, RecordError):
                raise record
            task, found = parse(record)
            if task.id in tasks:
                raise record.error("_id", f"id {task.id!r} occurs twice")
        except RecordError as error:
            if on_malformed == "fail" and not isinstance(error, LeftOut):
                raise
            skipped.append(str(error))
            continue
        tasks[task.id] = task
        for passage in found:
            passages.setdefault((passage.title, passage.text), passage)
    if not tasks:
        problem = f"none of the {len(skipped)} records is usable; the first: {skipped[0]}"
        raise RecordError(path, None, None, "", problem)
    return Loaded(list(tasks.values()), list(passages.values()), skipped)
