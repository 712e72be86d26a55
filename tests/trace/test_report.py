"""What a run leaves on disk, also after a kill and a resume."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trace_rl.phases import Phases
from trace_rl.report import Reporter, read_metrics
from trace_rl.rollout.tree import RolloutTree, read_trees

from .policy.oracle import random_tree

NAMES = (
    "reward",
    "effective_ratio",
    "ledger/leaves",
    "ledger/generated_tokens",
    "ledger/cached_tokens",
    "ledger/prompt_tokens",
    "predictor/brier",
    "entropy",
    "sampling/sampling_logp_difference/max",
    "phase/policy update",
)


def metrics_of(step: int, shift: float = 0.0) -> dict[str, float]:
    return {name: step + i / 16 + shift for i, name in enumerate(NAMES)}


def trees_of(step: int, shift: float = 0.0) -> list[RolloutTree]:
    rng = random.Random(f"{step} {shift}")
    return [random_tree(rng) for _ in range(2)]


def run(directory: Path, steps: range, resumed_at: int = 0, shift: float = 0.0) -> None:
    with Reporter(directory, 9, resumed_at) as reporter:
        for step in steps:
            reporter.step(step, trees_of(step, shift), metrics_of(step, shift))


def kept_trees(directory: Path, name: str = "trees.jsonl") -> list[str]:
    return [tree.to_json() for tree in read_trees(directory / name)]


def json_of(*steps: int, shift: float = 0.0) -> list[str]:
    return [tree.to_json() for step in steps for tree in trees_of(step, shift)]


def scalars(directory: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_every_step_is_there_to_read(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "run"
    run(directory, range(1, 4))
    rows = read_metrics(directory)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert {name: row[name] for name in NAMES} == metrics_of(int(row["step"]))
    assert kept_trees(directory) == json_of(1, 2, 3)
    whole = (directory / "trees.jsonl").read_bytes()
    for row in rows:  # a step's trees end where its row says
        assert whole[: int(row["trees_end"])].decode().splitlines() == json_of(
            *range(1, int(row["step"]) + 1)
        )
    for name in NAMES:
        assert scalars(directory, name) == [
            (step, pytest.approx(metrics_of(step)[name])) for step in (1, 2, 3)
        ]


def test_a_step_is_on_disk_before_the_next_begins(tmp_path: Path) -> None:
    with Reporter(tmp_path, 9) as reporter:
        reporter.step(1, trees_of(1), metrics_of(1))
        assert [row["step"] for row in read_metrics(tmp_path)] == [1]
        assert kept_trees(tmp_path) == json_of(1)


def test_a_resume_sets_later_steps_aside(tmp_path: Path) -> None:
    run(tmp_path, range(1, 5))
    run(tmp_path, range(3, 6), resumed_at=2, shift=100.0)
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["reward"] for row in rows] == [1, 2, 103, 104, 105]
    assert kept_trees(tmp_path) == json_of(1, 2) + json_of(3, 4, 5, shift=100.0)
    aside = [json.loads(line) for line in (tmp_path / "metrics.discarded.jsonl").read_text().splitlines()]
    assert [(row["step"], row["reward"]) for row in aside] == [(3, 3), (4, 4)]
    assert kept_trees(tmp_path, "trees.discarded.jsonl") == json_of(3, 4)
    assert scalars(tmp_path, "reward") == [(1, 1), (2, 2), (3, 103), (4, 104), (5, 105)]


def test_what_was_set_aside_twice_is_all_there(tmp_path: Path) -> None:
    run(tmp_path, range(1, 4))
    run(tmp_path, range(2, 4), resumed_at=1, shift=100.0)
    run(tmp_path, range(3, 4), resumed_at=2, shift=200.0)
    aside = [json.loads(line) for line in (tmp_path / "metrics.discarded.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in aside] == [2, 3, 103]
    assert kept_trees(tmp_path, "trees.discarded.jsonl") == json_of(2, 3) + json_of(3, shift=100.0)
    assert [row["reward"] for row in read_metrics(tmp_path)] == [1, 102, 203]
    for row, step in zip(read_metrics(tmp_path), (1, 2, 3), strict=True):
        assert row["trees_end"] == len("\n".join([*kept_trees(tmp_path)[: 2 * step], ""]))


def test_a_resume_without_a_checkpoint_begins_anew(tmp_path: Path) -> None:
    run(tmp_path, range(1, 3))
    run(tmp_path, range(1, 2), resumed_at=0, shift=100.0)
    assert [row["reward"] for row in read_metrics(tmp_path)] == [101]
    assert kept_trees(tmp_path) == json_of(1, shift=100.0)
    assert scalars(tmp_path, "reward") == [(1, 101)]


def test_a_resume_at_the_last_step_sets_nothing_aside(tmp_path: Path) -> None:
    run(tmp_path, range(1, 3))
    before = (tmp_path / "metrics.jsonl").read_bytes(), (tmp_path / "trees.jsonl").read_bytes()
    run(tmp_path, range(0), resumed_at=2)
    assert ((tmp_path / "metrics.jsonl").read_bytes(), (tmp_path / "trees.jsonl").read_bytes()) == before
    assert not list(tmp_path.glob("*.discarded.jsonl"))


@pytest.mark.parametrize("half", ['{"step": 3, "rew', '{"step": 3}'])
def test_half_a_line_of_a_killed_run(tmp_path: Path, half: str) -> None:
    run(tmp_path, range(1, 3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(half)
    with (tmp_path / "trees.jsonl").open("a") as file:
        first, second = json_of(3)
        file.write(first + "\n" + second[: len(second) // 2])
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    run(tmp_path, range(3, 4), resumed_at=2)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
    assert kept_trees(tmp_path) == json_of(1, 2, 3)
    assert kept_trees(tmp_path, "trees.discarded.jsonl") == [first]  # a whole tree, without its step
    run(tmp_path, range(3, 4), resumed_at=2)
    assert kept_trees(tmp_path, "trees.discarded.jsonl") == [first, *json_of(3)]


def test_no_metrics_yet(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []


def test_evaluations_add_up(tmp_path: Path) -> None:
    figures = {"exact_match": 0.25, "f1": 0.5, "answer_rate": 1.0, "questions": 8.0}
    with Reporter(tmp_path, 9) as reporter:
        reporter.evaluated("before", 0, figures)
    with Reporter(tmp_path, 9, 4) as reporter:
        reporter.evaluated("after", 9, figures | {"f1": 0.75})
    record = json.loads((tmp_path / "evaluations.json").read_text())
    assert record == {"before": {"step": 0, **figures}, "after": {"step": 9, **figures, "f1": 0.75}}
    assert scalars(tmp_path, "evaluation/f1") == [(0, 0.5), (9, 0.75)]


def test_a_failed_starts_evaluation_is_not_drawn(tmp_path: Path) -> None:
    for f1 in (0.5, 0.75):
        with Reporter(tmp_path, 9) as reporter:
            reporter.evaluated("before", 0, {"f1": f1, "answer_rate": 1.0, "questions": 8.0})
    assert scalars(tmp_path, "evaluation/f1") == [(0, 0.75)]


def test_a_summary_is_whole_or_not_there(tmp_path: Path) -> None:
    with Reporter(tmp_path, 9) as reporter:
        reporter.write_json("summary.json", {"steps": 9})
        with pytest.raises(TypeError):
            reporter.write_json("summary.json", {"steps": object()})
        assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 9}
        reporter.write_json("summary.json", {"steps": 10})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 10}
    assert not list(tmp_path.glob("*.part"))


def test_a_step_says_where_the_run_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter(tmp_path, 4) as reporter:
        reporter.step(1, [], {**metrics_of(1), "phase/policy update": 20.0, "phase/weight sync": 10.0})
        reporter.say("[bold]not markup[/bold]")
    line, said = capsys.readouterr().out.splitlines()
    assert line.startswith("step    1/4  reward 1.000  ")
    assert "30.0 s" in line
    assert line.endswith("1:30 left")
    assert said == "[bold]not markup[/bold]"


def test_what_a_failing_tool_ended_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trees = trees_of(1)
    leaves = [tree.nodes[leaf] for tree in trees for leaf in tree.leaves()]
    leaves[1].error, leaves[2].error = "connection refused", "no reply"
    figures = {"exact_match": 0.25, "answer_rate": 1.0, "questions": 8.0}
    with Reporter(tmp_path, 4) as reporter:
        reporter.step(1, trees, metrics_of(1))
        reporter.evaluated("before", 0, figures | {"tool_errors": 3.0})
        reporter.evaluated("after", 4, figures)
    _, warned, _, evaluation, sound = capsys.readouterr().out.splitlines()
    assert warned.startswith(f"warning: 2 rollouts ({2 / len(leaves):.1%}) were ended by their tool")
    assert warned.endswith("connection refused")
    assert evaluation.startswith("warning: 3 of these rollouts were ended by their tool")
    assert sound.startswith("evaluation after: exact match 0.250, answered")


class Notes:
    """A watcher that writes down what it is told."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def start(self, name: str, total: int | None) -> None:
        self.heard.append((name, total))

    def advance(self) -> None:
        self.heard.append("+")

    def stop(self) -> None:
        self.heard.append("stop")


def test_phases_add_up_and_start_over() -> None:
    notes = Notes()
    phases = Phases(notes)
    with phases("sample", 2) as advance:
        advance()
        advance()
    with phases("learn"):
        pass
    with pytest.raises(KeyError), phases("sample"):
        raise KeyError("broke off")
    assert notes.heard == [("sample", 2), "+", "+", "stop", ("learn", None), "stop", ("sample", None), "stop"]
    first = phases.take()
    assert first.keys() == {"sample", "learn"}
    assert all(seconds > 0 for seconds in first.values())
    assert phases.take() == {}


def test_phases_drive_the_reporter(tmp_path: Path) -> None:
    with Reporter(tmp_path, 4) as reporter:
        phases = Phases(reporter)
        with phases("sample", 2) as advance:
            advance()
        with phases("learn"):
            pass
        reporter.stop()  # nothing under way: nothing happens
    assert phases.take().keys() == {"sample", "learn"}
