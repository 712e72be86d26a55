"""Tasks from record files: training and held-out ones, without a question in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trace_rl.config.tasks import FileTask
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
    """Read all files of `task`. A question counts once, and one of the training set is never tested."""
    splits: list[list[Task]] = []
    passages: dict[tuple[str, str], Passage] = {}
    skipped: list[str] = []
    seen: set[str] = set()
    for files in (task.train, task.test):
        tasks: list[Task] = []
        for file in files:
            loaded = reader(file, on_malformed=task.on_malformed)
            wanted = [t for t in loaded.tasks if task.ability in (None, t.extra.get("ability"))]
            tasks += [t for t in wanted if t.id not in seen]
            seen |= {t.id for t in wanted}
            skipped += loaded.skipped
            passages |= {(p.title, p.text): p for p in loaded.passages}
        splits.append(tasks[: task.limit])
    return Read(splits[0], splits[1], list(passages.values()), skipped)
