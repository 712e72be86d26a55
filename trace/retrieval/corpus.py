"""The corpus file: JSON lines of `{"id", "contents"}`, read as a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from trace_rl.tasks.records import Record, RecordError, describe, read_records
from trace_rl.tasks.task import Passage

from .contents import split_contents

MAX_LINE_BYTES = 16 * 2**20
_BOM = b"\xef\xbb\xbf"


class CorpusLine(NamedTuple):
    """A passage, the record it was read from, and the byte at which the next line starts."""

    passage: Passage
    record: Record
    end: int


def load_corpus_jsonl(path: str | Path) -> list[Passage]:
    """All passages of a corpus file (see :func:`read_corpus`) or of a JSON list of ``{"title", "text"}``.

    Raises FileNotFoundError, or RecordError naming line and field for a malformed or repeated record:
    a corpus with holes would silently change what searches find.
    """
    path = Path(path)
    if is_json_list(path):
        records = (_checked(record) for record in read_records(path))
        read = ((_passage(record), record) for record in records)
    else:
        read = ((line.passage, line.record) for line in read_corpus(path))
    passages: list[Passage] = []
    seen: set[str] = set()
    for passage, record in read:
        if passage.id in seen:
            raise repeated_id(record, passage.id)
        seen.add(passage.id)
        passages.append(passage)
    return passages


def read_corpus(path: Path, *, offset: int = 0, line: int = 0) -> Iterator[CorpusLine]:
    """Streams the passages from byte ``offset`` on, which starts line number ``line`` (from 0).

    A record is ``{"id", "contents"}``, where contents is the title, quoted or not, a newline, the text; or
    ``{"title", "text"}``, named by its line number unless it has an ``id``. Ids may be whole numbers. Halves
    of surrogate pairs, which no encoding can write, become U+FFFD.

    Raises FileNotFoundError, or RecordError naming line and field; repeated ids are the caller's to find.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no record file at {path.resolve()}")
    empty = offset == 0
    with path.open("rb") as file:
        file.seek(offset)
        # Not text mode: it also breaks lines at characters that JSON strings may hold, and hides the offset.
        while raw := file.readline(MAX_LINE_BYTES + 1):
            if len(raw) > MAX_LINE_BYTES:
                raise RecordError(path, line, None, "", f"line longer than {MAX_LINE_BYTES} bytes")
            offset += len(raw)
            if line == 0:
                raw = raw.removeprefix(_BOM)
            if raw.strip():
                empty = False
                record = _parse(path, line, raw)
                yield CorpusLine(_passage(record), record, offset)
            line += 1
    if empty:
        raise RecordError(path, None, None, "", "no records")


def is_json_list(path: Path) -> bool:
    """Whether the file starts like a JSON list, which cannot be read as a stream of lines."""
    if not path.is_file():
        raise FileNotFoundError(f"no record file at {path.resolve()}")
    with path.open("rb") as file:
        return file.read(4096).removeprefix(_BOM).lstrip().startswith(b"[")


def repeated_id(record: Record, passage_id: str) -> RecordError:
    """The error for an id that an earlier record has already."""
    return record.error("id", f"{json.dumps(passage_id)} occurs twice")


def _checked(record: Record | RecordError) -> Record:
    if isinstance(record, RecordError):
        raise record
    return record


def _parse(path: Path, line: int, raw: bytes) -> Record:
    try:
        value = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 ({error.reason} at byte {error.start} of the line)"
        raise RecordError(path, line, None, "", problem) from error
    except json.JSONDecodeError as error:
        raise RecordError(path, line, None, "", f"not valid JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets in brackets
        raise RecordError(path, line, None, "", f"not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise RecordError(path, line, None, "", f"expected a JSON object, got {describe(value)}")
    return Record(path, line, value)


def _passage(record: Record) -> Passage:
    data = record.data
    title_and_text = "contents" not in data and "title" in data and "text" in data
    if title_and_text and "id" not in data:
        passage_id = str(record.index)
    else:  # some published corpora number their passages
        passage_id = str(data["id"]) if type(data.get("id")) is int else record.text("id")
    if title_and_text:
        title = record.text("title").strip()
        text = record.check_text("text", data["text"], empty_ok=True).strip()
    else:
        contents = record.text("contents")
        if "\n" not in contents:
            raise record.error("contents", "no newline between title and text")
        title, text = split_contents(contents)
    return Passage(_writable(passage_id), _writable(title), _writable(text))


def _writable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
