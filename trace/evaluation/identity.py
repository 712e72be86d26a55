"""What an evaluation's records depend on: started again, it must be the same."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trace_rl.config.differences import differences, in_words
from trace_rl.config.evaluate import EvaluateConfig
from trace_rl.config.load import ConfigError
from trace_rl.tasks.task import Task

from .records import Key, Record, RecordsError, record_files

FILE = "identity.json"
RECORDS = "records"

# How many questions are asked, and how often, adds records and changes none.
_MAY_GROW = {"samples"}
_MODEL = ("dtype", "chat_template", "observations")


def identity(config: EvaluateConfig, weights: str) -> dict[str, Any]:
    """Plain data that says whose answers to what the records are; `weights` is the model's fingerprint."""
    plain = config.model_dump(mode="json")
    template = config.model.chat_template
    model = {key: plain["model"][key] for key in _MODEL} | {
        "weights": weights,
        "chat_template": template.read_text() if template else None,
    }
    return {
        "seed": config.seed,
        "model": model,
        "engine": {"kind": config.engine.kind},
        "sampling": {key: value for key, value in plain["sampling"].items() if key not in _MAY_GROW},
        "sets": {
            name: {"task": one["task"], "environment": one["environment"]}
            for name, one in plain["sets"].items()
        },
    }


def claim(out: Path, now: dict[str, Any]) -> None:
    """Make `out` the directory of this evaluation.

    Sets may come and go, search servers may move, and what has no records yet may change. Raises ConfigError,
    naming every differing key, if anything else is not as it was.
    """
    file = out / FILE
    before = json.loads(file.read_text()) if file.is_file() else {"sets": {}}
    recorded = {name: one for name, one in before["sets"].items() if _has_records(out / RECORDS, name)}
    both = {name: one for name, one in recorded.items() if name in now["sets"]}
    asked_again = {name: now["sets"][name] for name in both}
    changed = list(differences(before | {"sets": both}, now | {"sets": asked_again})) if recorded else []
    if changed:
        raise ConfigError(
            f"out: {out} holds an evaluation with another {in_words(changed)}; choose another out, or go on with "
            "the values it has"
        )
    out.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    part.write_text(json.dumps(now | {"sets": recorded | now["sets"]}, indent=2) + "\n")
    os.replace(part, file)


def check_questions(name: str, tasks: Sequence[Task], records: Mapping[Key, Record]) -> None:
    """Raise RecordsError if a recorded question of set `name` now reads otherwise: its file has changed."""
    by_id = {task.id: task for task in tasks}
    for record in records.values():
        task = by_id.get(record.task)
        if task and (task.question, task.answers) != (record.question, record.answers):
            raise RecordsError(
                f"set {name}: question {task.id} is {task.question!r} with the answers {task.answers}, but was "
                f"recorded as {record.question!r} with {record.answers}; the set's file has changed, choose "
                "another out"
            )


def _has_records(directory: Path, name: str) -> bool:
    return any(file.stat().st_size for file in record_files(directory, name))
