"""The values in a file of records, whatever its form: JSON list, JSON lines, CSV or Parquet."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class UnreadableFile(ValueError):
    """The file as a whole cannot be read; the message says why."""


@dataclass(frozen=True)
class Broken:
    """Stands in the place of one record that cannot be read."""

    problem: str


def file_values(path: Path) -> Iterator[tuple[int, Any]]:
    """Each record's place and value, lazily where the form allows it.

    The name's ending decides for ``.parquet`` and ``.csv``; anything else is JSON in UTF-8: a list, or one
    value a line. Places count records from 0, in JSON lines the lines. A line that is no JSON gives a
    :class:`Broken`. Values of a Parquet file are plain dictionaries, lists and numbers, a null is None;
    those of a CSV file (with a header line) are strings.

    Raises UnreadableFile.
    """
    if path.suffix.lower() == ".parquet":
        return enumerate(_parquet(path))
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"not UTF-8 ({error.reason} at byte {error.start})") from error
    if path.suffix.lower() == ".csv":
        return enumerate(_csv(text))
    return _json_list(text) if text.lstrip().startswith("[") else _json_lines(text)


def _parquet(path: Path) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UnreadableFile("a Parquet file needs pyarrow: pip install pyarrow") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1000):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UnreadableFile(f"not readable as Parquet: {error}") from error


def _csv(text: str) -> Iterator[Any]:
    rows = csv.DictReader(io.StringIO(text, newline=""), restkey="")
    try:
        for row in rows:
            if None in row.values() or "" in row:
                yield Broken(f"not as many cells as the header has ({len(rows.fieldnames or ())})")
            else:
                yield row
    except csv.Error as error:
        raise UnreadableFile(f"not valid CSV: {error} at line {rows.line_num}") from error


def _json_list(text: str) -> Iterator[tuple[int, Any]]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # JSON lines whose first record happens to be a list
            yield from _json_lines(text)
            return
        where = f"line {error.lineno} column {error.colno}"
        raise UnreadableFile(f"not valid JSON: {error.msg} at {where}") from error
    yield from enumerate(values)


def _json_lines(text: str) -> Iterator[tuple[int, Any]]:
    # Not splitlines(): it also breaks at U+2028 and other characters that JSON strings may hold.
    for index, line in enumerate(text.split("\n")):
        if not line.strip():
            continue
        try:
            yield index, json.loads(line)
        except json.JSONDecodeError as error:
            yield index, Broken(f"not valid JSON: {error.msg}")
