"""2WikiMultiHopQA in its official layout and the two found on the Hub, with the aliases of its answers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from .paragraphs import paragraphs, record_id, supporting_titles
from .records import Loaded, OnMalformed, Record, RecordError, load_tasks, read_records
from .task import Passage, Task

SOURCE = "2wikimultihopqa"
ALIASES = "id_aliases.json"
"""The data set's own file of names: a line ``{"Q_id", "aliases", "demonyms"}`` per Wikidata entity."""


def read_wiki_multihop(path: str | Path, on_malformed: OnMalformed = "fail") -> Loaded:
    """Reads a file of 2WikiMultiHopQA records: HotpotQA's layouts, plus ``answer_id`` and others.

    Where the data set's ``id_aliases.json`` lies beside the file, the aliases and demonyms of a record's
    ``answer_id`` become gold answers too, as in the official scorer's version 1.1; without it, or for an
    answer without an id (yes, no, dates, names in old versions of the set), ``answer`` is the only gold.
    Figures with and without aliases are not comparable.

    Passages, ids and errors as in :func:`~trace_rl.tasks.hotpotqa.read_hotpotqa`; a malformed line of the
    alias file always raises: golds that depend on it would change without a word.
    """
    beside = Path(path).parent / ALIASES
    aliases = _read_aliases(beside) if beside.is_file() else {}
    return load_tasks(path, partial(_parse, aliases=aliases), on_malformed)


def _parse(record: Record, aliases: dict[str, tuple[str, ...]]) -> tuple[Task, list[Passage]]:
    question = record.text("question").strip()
    golds = [record.text("answer").strip()]
    answer_id: Any = record.data.get("answer_id")
    if answer_id is not None:
        golds += aliases.get(record.check_text("answer_id", answer_id, empty_ok=True), ())
    titles = supporting_titles(record)
    passages = paragraphs(record)
    answers = tuple(dict.fromkeys(golds))
    return Task(record_id(record, SOURCE, question), question, answers, SOURCE, titles), passages


def _read_aliases(path: Path) -> dict[str, tuple[str, ...]]:
    aliases: dict[str, tuple[str, ...]] = {}
    for record in read_records(path):
        if isinstance(record, RecordError):
            raise record
        names: list[str] = []
        for field in ("aliases", "demonyms"):
            for i, name in enumerate(record.check_list(field, record.get(field))):
                name = record.check_text(f"{field}[{i}]", name, empty_ok=True).strip()
                names += [name] if name else []
        aliases[record.text("Q_id")] = tuple(names)
    return aliases
