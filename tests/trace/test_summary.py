"""What a run says about itself at its end, and about a step that went otherwise than planned."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trace_rl.ledger import Ledger
from trace_rl.runner import step_warnings, summary


def summary_of(directory: Path, **evaluations: Any) -> dict[str, Any]:
    (directory / "evaluations.json").write_text(json.dumps(evaluations))
    run: Any = SimpleNamespace(config=SimpleNamespace(run_dir=directory), totals=Ledger())
    return summary(run, {"start": 2.0}, 3.0, resumed_from_step=0)


def test_evaluations_come_with_all_their_figures(tmp_path: Path) -> None:
    figures = {"reward": 0.25, "accuracy": 0.25, "answer_rate": 0.5, "questions": 8.0}
    after = figures | {"step": 9, "accuracy": 0.75, "tool_errors": 1.0}
    found = summary_of(tmp_path, before={"step": 0, **figures}, after=after)
    assert {name: found[f"{name}_before"] for name in figures} == figures
    assert (found["accuracy_after"], found["tool_errors_after"]) == (0.75, 1.0)
    assert not any(
        name.startswith(("step_", "exact_match")) or name == "tool_errors_before" for name in found
    )


def test_figures_of_search_keep_their_names(tmp_path: Path) -> None:
    both = {when: {"step": 0, "exact_match": value} for when, value in (("before", 0.1), ("after", 0.9))}
    found = summary_of(tmp_path, **both)
    assert (found["exact_match_before"], found["exact_match_after"]) == (0.1, 0.9)


def test_without_evaluations(tmp_path: Path) -> None:
    assert summary_of(tmp_path)["wall_s"] == 3.0


FINE = {
    "ledger/engine_minus_ledger/generated_tokens": 0.0,
    "allocation/unspent": 0.0,
    "tools/error_rate": 0.0,
}


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({}, []),
        ({"ledger/engine_minus_ledger/generated_tokens": -3.0}, ["minus ledger: {'generated_tokens': -3.0}"]),
        ({"allocation/unspent": 4.0}, ["4 leaves not sampled: no rollout had a second turn to branch from"]),
        (
            {"allocation/unspent": 4.0, "tools/error_rate": 0.1},
            ["4 leaves not sampled: no rollout other than those that their tool ended had a second turn"],
        ),
        ({"tools/error_rate": 0.1}, []),
    ],
)
def test_a_step_that_cost_otherwise_is_explained(metrics: dict[str, float], said: list[str]) -> None:
    warnings = list(step_warnings(FINE | metrics))
    assert len(warnings) == len(said)
    for warning, part in zip(warnings, said, strict=True):
        assert part in warning
