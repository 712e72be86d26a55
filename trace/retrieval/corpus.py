"""The corpus file: JSON lines of `{"id", "contents"}`."""

from __future__ import annotations

import json
from pathlib import Path

from trace_rl.tasks.records import RecordError, read_records
from trace_rl.tasks.task import Passage


def load_corpus_jsonl(path: str | Path) -> list[Passage]:
    """Reads ``{"id", "contents"}`` lines, where contents is the title, quoted or not, a newline, the text.

    Raises FileNotFoundError, or RecordError naming line and field for a malformed or repeated record:
    a corpus with holes would silently change what searches find.
    """
    passages: list[Passage] = []
    seen: set[str] = set()
    for record in read_records(path):
        if isinstance(record, RecordError):
            raise record
        raw_id = record.data.get("id")
        # Some published corpora number their passages.
        passage_id = str(raw_id) if type(raw_id) is int else record.text("id")
        if passage_id in seen:
            raise record.error("id", f"{json.dumps(passage_id)} occurs twice")
        seen.add(passage_id)
        title, newline, text = record.text("contents").partition("\n")
        if not newline:
            raise record.error("contents", "no newline between title and text")
        if len(title) >= 2 and title[0] == title[-1] == '"':
            title = title[1:-1]
        passages.append(Passage(passage_id, title.strip(), text.strip()))
    return passages
