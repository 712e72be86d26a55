"""`trace-rl evaluate` as a user runs it, with a tiny random model: alone, on two ranks, and its refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from trace_rl.cli import main
from trace_rl.config.evaluate import load_evaluation

from ..environment_check.checking import write_failing_source
from .forking import RankServer

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def config(tiny_policy: Path, tmp_path: Path) -> Path:
    task = {
        "kind": "world",
        "entities": 18,
        "min_hops": 1,
        "max_hops": 2,
        "train_questions": 8,
        "test_questions": 5,
    }
    environment = {"max_searches": 1, "max_observation_tokens": 64, "instructions": ""}
    raw: dict[str, Any] = {
        "out": str(tmp_path / "out"),
        "model": {"path": str(tiny_policy)},
        "engine": {"kind": "transformers"},
        "sampling": {"turn_tokens": 16, "context_tokens": 200},
        "sets": {
            "short": {"task": task, "environment": environment, "questions": 3},
            "all": {"task": task | {"seed": 1}, "environment": environment},
        },
    }
    file = tmp_path / "evaluate.yaml"
    file.write_text(yaml.safe_dump(raw, sort_keys=False))
    return file


def written(out: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / "eval.json").read_text())
    return content


def test_alone_then_on_two_ranks(
    config: Path,
    rank_server: RankServer,
    tiny_policy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["evaluate", "--config", str(config), "--set", "questions=2"]) == 0
    out = capsys.readouterr().out
    table = (tmp_path / "out" / "eval.md").read_text()
    assert out[out.index("Scores in percent") :].strip() == table[table.index("Scores in percent") :].strip()
    first = written(tmp_path / "out")
    assert [one["questions"] for one in first["sets"].values()] == [3, 2]
    assert first["model"]["directory"] == str(tiny_policy)
    assert {"torch", "transformers", "trace-kernels"} <= first["versions"].keys()
    records = tmp_path / "out" / "records"
    assert len((records / "short.jsonl").read_text().splitlines()) == 3

    # Two ranks, as torchrun starts them, share what is left.
    command = str(Path(sys.executable).with_name("trace-rl"))
    codes, outputs = rank_server.run(command, "evaluate", "--config", str(config), ranks=2, logs=tmp_path)
    assert codes == [0, 0], outputs
    assert "average of sets" in outputs[0]
    assert "average of sets" not in outputs[1]
    assert len((records / "all.jsonl").read_text().splitlines()) == 2
    shares = [len((records / f"all.rank{rank}.jsonl").read_text().splitlines()) for rank in range(2)]
    assert sorted(shares) == [1, 2]
    assert written(tmp_path / "out")["sets"]["all"]["questions"] == 5

    # Started once more, alone, it finds everything there.
    assert main(["evaluate", "--config", str(config)]) == 0
    assert "starting" not in capsys.readouterr().out
    again = ("sets", "average", "model", "config")
    assert main(["evaluate", "--config", str(config), "--set", f"out={tmp_path / 'fresh'}"]) == 0
    shared, alone = (written(tmp_path / name) for name in ("out", "fresh"))
    assert {k: shared[k] for k in again[:3]} == {k: alone[k] for k in again[:3]}


@pytest.mark.parametrize(
    ("override", "code", "message"),
    [
        ("sampling.samples=4", 2, "sampling: samples=4 at temperature=0"),
        ("sampling.turn_tokens=200", 2, "turn_tokens=200 leaves no room"),
        ("sets.short.task.kind=hotpot", 2, "sets.short.task.kind: got 'hotpot'; did you mean hotpotqa?"),
        ("sets.short.environment.kind=python", 2, "sets.short: environment.kind=python does not go with"),
        ("sets.short.environment.topk=1", 2, "did you mean sets.short.environment.top_k?"),
        ("sets={a/b: {task: {kind: world}}}", 2, "'a/b' is not a set's name"),
        ("sets={}", 2, "sets: got {}"),
        (
            "sets.all.environment.retriever={url: 'http://s:1'}",
            2,
            "sets.all: environment.retriever does not go",
        ),
        ("sets.all={task: {kind: bfcl}}", 2, "sets.all: task.kind=bfcl needs model.observations=chat"),
        (
            "sets.all.environment.max_observation_tokens=1",
            2,
            "sets.all.environment: max_observation_tokens = 1",
        ),
        ("sets.all.task={kind: hotpotqa, test: [gone.json]}", 1, "gone.json"),
        ("model.path=gone", 1, "model.path: there is no directory gone"),
    ],
)
def test_refusals(
    config: Path, override: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", "--config", str(config), "--set", override]) == code
    assert message in capsys.readouterr().err
    assert not (config.parent / "out" / "records").exists()


@pytest.mark.parametrize(
    ("place", "error", "code"),
    [
        ("here", "ImportError('cubes need rubik: pip install rubik')", 1),
        ("environments", "MathCheckError('math-verify is broken')", 1),
        ("environments", "SandboxError('no user namespaces')", 1),
        ("environments", "ValueError('too many cubes')", 2),
    ],
)
def test_what_a_source_lacks_is_one_message(
    config: Path, place: str, error: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_failing_source(tmp_path, place, error)
    override = f"sets={{mine: {{task: {{kind: custom, source: '{source}'}}}}}}"
    assert main(["evaluate", "--config", str(config), "--set", override]) == code
    assert error.partition("'")[2].rstrip("')") in capsys.readouterr().err


def test_an_override_changes_one_of_the_sets_that_share_a_section(config: Path) -> None:
    assert "*id" in config.read_text()  # YAML's aliases, as in the committed configs
    sets = load_evaluation(config, ["sets.all.environment.max_searches=7"]).sets
    assert [one.environment.tool_turns for one in sets.values()] == [1, 7]


def test_an_interrupt_says_how_to_go_on(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trace_rl.evaluation.run.find_model", interrupt)
    assert main(["evaluate", "--config", str(config)]) == 130
    assert "the same command goes on" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["smollm2_cpu", "qwen3_8b", "custom_example_cpu"])
def test_committed_configs_are_valid(name: str) -> None:
    config = load_evaluation(ROOT / "configs" / "evaluate" / f"{name}.yaml")
    assert config.sets
    if name == "smollm2_cpu":
        files = [file for one in config.sets.values() for file in one.task.test]  # type: ignore[union-attr]
        assert all((ROOT / file).is_file() for file in files)
