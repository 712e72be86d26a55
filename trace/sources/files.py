"""Tasks from record files: training and held-out ones, without a question in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trace_rl.config.tasks import FileTask, QaTask
from trace_rl.tasks.readers import Reader
from trace_rl.tasks.task import Passage, Task


@dataclass(frozen=True)
class Read:
    """The tasks of both splits, all passages once each, and what was left out."""

    train: Sequence[Task]
    test: Sequence[Task]
    passages: Sequence[Passage]
    skipped: Sequence[str]


def read_splits(task: FileTask, reader: Reader) -> Read:
    """Read all files of `task`. An id counts once, and a question of the training set is never tested."""
    passages: dict[tuple[str, str], Passage] = {}
    skipped: list[str] = []

    def read(files: Sequence[Path]) -> list[Task]:
        tasks: dict[str, Task] = {}
        for file in files:
            loaded = reader(file, on_malformed=task.on_malformed)
            new = [t for t in loaded.tasks if ability in (None, t.extra.get("ability")) and t.id not in tasks]
            again = sum(t.id in tasks for t in loaded.tasks)
            tasks |= {t.id: t for t in new}
            skipped.extend(loaded.skipped)
            if again:
                skipped.append(f"{file}: {again} records have ids of earlier files")
            passages.update({(p.title, p.text): p for p in loaded.passages})
        return list(tasks.values())

    ability = task.ability if isinstance(task, QaTask) else None
    train, held_out = read(task.train), read(task.test)
    ids, questions = {t.id for t in train}, {_plain(t.question) for t in train}
    test = [t for t in held_out if t.id not in ids and _plain(t.question) not in questions]
    if len(test) < len(held_out):
        skipped.append(f"{len(held_out) - len(test)} held-out questions are among the training questions")
    return Read(train[: task.limit], test[: task.limit], list(passages.values()), skipped)


def _plain(question: str) -> str:
    """Files of different layouts give one question different ids: compare what it says."""
    return " ".join(question.lower().split())
