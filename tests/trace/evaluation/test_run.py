"""Evaluations from start to end, interrupted and not, with a scripted policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trace_rl.config.evaluate import EvaluateConfig
from trace_rl.config.load import ConfigError
from trace_rl.engines.protocol import EngineError
from trace_rl.environments.official_scores import official_scores
from trace_rl.environments.protocol import ToolOutageError
from trace_rl.evaluation.asking import OUTAGE
from trace_rl.evaluation.records import RecordsError, read_records
from trace_rl.tasks.task import Task

from . import examinee
from .examinee import QUESTIONS, Bench

ROLLOUTS = 3 * sum(map(len, QUESTIONS.values()))


def figures(directory: Path) -> dict[str, Any]:
    written = json.loads((directory / "eval.json").read_text())
    return {name: written[name] for name in ("sets", "sources", "average")}


def lines(directory: Path) -> list[dict[str, Any]]:
    files = sorted((directory / "records").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_every_rollout_is_recorded_with_its_story(bench: Bench) -> None:
    engine = bench.run(bench.config())
    rows = lines(bench.path / "out")
    assert len(rows) == ROLLOUTS == len({(row["task"], row["sample"]) for row in rows})
    tasks = {task.id: task for some in QUESTIONS.values() for task in some}
    for row in rows:
        task = tasks[row["task"]]
        assert (row["question"], tuple(row["answers"])) == (task.question, task.answers)
        said = [turn["action"] for turn in row["rollout"]]
        assert row["turns"] == len(said) <= 2
        assert row["generated_tokens"] == sum(len(examinee.BYTES(text)["input_ids"]) for text in said)
        assert row["tool_calls"] == sum("search" in text for text in said[:1])
        assert row["invalid_turns"] == said.count("hm")
        answered = "answer" in said[-1]
        assert row["answer"] == (said[-1][9:-10] if answered else "")
        assert row["official"] == official_scores(task.source, row["answer"], task.answers)
        assert row["reward"] == float(any(gold.split()[0] in row["answer"] for gold in task.answers))
        if len(said) == 2 and "search" in said[0]:
            assert "author Marla Voss" in row["rollout"][0]["observation"]
    assert sum(len(row["rollout"]) for row in rows) == len(engine.requests)
    assert engine.closed == 1


def test_figures_are_those_of_the_records(bench: Bench) -> None:
    bench.run(bench.config())
    found, rows = figures(bench.path / "out"), lines(bench.path / "out")
    hotpotqa = [row for row in rows if row["source"] == "hotpotqa"]
    scores = found["sets"]["hotpotqa"]["scores"]
    assert 0 < scores["success"]["mean"] < 1
    assert scores["success"]["mean"] == pytest.approx(sum(r["reward"] for r in hotpotqa) / 24)
    assert scores["exact_match"]["mean"] == pytest.approx(
        sum(r["scores"].get("exact_match", 0) for r in hotpotqa) / 24
    )
    assert scores["hotpotqa_f1"]["mean"] == pytest.approx(
        sum(r["official"]["hotpotqa_f1"] for r in hotpotqa) / 24
    )
    assert set(found["sources"]["mixed"]) == {"nq", "musique"}
    assert found["sources"].keys() == {"mixed"}
    assert found["sources"]["mixed"]["nq"]["questions"] == 3
    both = [found["sets"][name]["scores"]["success"]["mean"] for name in QUESTIONS]
    assert found["average"]["success"]["mean"] == pytest.approx(sum(both) / 2)
    table = (bench.path / "out" / "eval.md").read_text()
    assert f"| hotpotqa | 8 | {100 * both[0]:.1f} [" in table
    assert "success (avg@3)" in table


@pytest.mark.parametrize("why", [EngineError("gone"), KeyboardInterrupt()])
def test_an_interrupted_evaluation_goes_on(bench: Bench, why: BaseException) -> None:
    whole = bench.run(bench.config("whole"))
    config = bench.config()
    records = config.out / "records"
    with pytest.raises(type(why)):
        bench.run(config, broken=why, records=records)
    assert bench.engine.closed == 1
    kept = lines(config.out)
    assert 2 <= len(kept) < ROLLOUTS
    assert not (config.out / "eval.json").exists()
    with (records / "hotpotqa.jsonl").open("a") as file:
        file.write('{"task": "h3", "sam')  # the process died while it wrote
    second = bench.run(config)
    rows = lines(config.out)
    assert rows[: len(kept)] == kept
    assert len(rows) == ROLLOUTS
    asked = sum(len(row["rollout"]) for row in rows[len(kept) :])
    assert len(second.requests) == asked < len(whole.requests)
    assert figures(config.out) == figures(bench.path / "whole")


def test_a_finished_evaluation_asks_nothing_more(bench: Bench) -> None:
    bench.run(bench.config())
    before = figures(bench.path / "out")
    (bench.path / "out" / "eval.json").unlink()
    engine = bench.run(bench.config())
    assert (engine.requests, engine.closed) == ([], 0)
    assert figures(bench.path / "out") == before


def test_more_questions_and_samples_add_to_what_is_there(bench: Bench) -> None:
    bench.run(bench.config("whole"))
    small = {"temperature": 1.0, "samples": 1, "turn_tokens": 40, "context_tokens": 600}
    bench.run(bench.config(questions=2, sampling=small))
    few = lines(bench.path / "out")
    assert len(few) == 2 * 2
    bench.run(bench.config())
    assert len(lines(bench.path / "out")) == ROLLOUTS
    assert figures(bench.path / "out") == figures(bench.path / "whole")


def test_a_rollout_does_not_depend_on_its_company(bench: Bench) -> None:
    bench.run(bench.config())
    bench.run(bench.config("alone", questions=1))
    together = read_records(bench.path / "out" / "records", "hotpotqa")
    alone = read_records(bench.path / "alone" / "records", "hotpotqa")
    assert len(alone) == 3
    assert all(together[key] == record for key, record in alone.items())
    assert len({str(record.rollout) for record in together.values()}) > 2  # or the seeds would do nothing


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 1}, r"another seed \(0, now 1\)"),
        ({"sampling": {"turn_tokens": 41}}, r"sampling\.turn_tokens \(40, now 41\)"),
        ({"engine": {"kind": "transformers"}}, r"engine\.kind \('vllm', now 'transformers'\)"),
        ({"sets": {"mixed": {"task": {"kind": "search_r1", "test": ["mixed"]}, "environment": {"top_k": 9}}}},
         r"sets\.mixed\.environment\.\w+ .*sets\.mixed\.environment\.top_k \(3, now 9\)"),
    ],
)  # fmt: skip
def test_another_evaluation_is_refused(bench: Bench, changed: dict[str, Any], message: str) -> None:
    bench.run(bench.config(questions=1))
    before = lines(bench.path / "out")
    with pytest.raises(ConfigError, match=message + r".*choose another out"):
        bench.run(bench.config(questions=1, **changed))
    assert lines(bench.path / "out") == before


def test_a_search_server_may_move(bench: Bench) -> None:
    def config(**retriever: Any) -> EvaluateConfig:
        environment = {"max_searches": 1, "retriever": retriever or None}
        one = {"task": {"kind": "search_r1", "test": ["mixed"]}, "environment": environment}
        return bench.config(questions=1, sets={"mixed": one})

    bench.run(config(url="http://one:8000"))
    assert bench.run(config(url="http://two:9000", timeout_s=3)).requests == []
    with pytest.raises(
        ConfigError, match=r"another sets\.mixed\.environment\.retriever \(.*two:9000.*now None"
    ):
        bench.run(config())


def test_another_model_or_file_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.run(bench.config(questions=1))
    monkeypatch.setitem(examinee.QUESTIONS, "hotpotqa", [QUESTIONS["mixed"][0], *QUESTIONS["hotpotqa"]])
    bench.run(bench.config(questions=1))  # another first question is one more question
    renamed = [Task(task.id, task.question, ("Oro",), "nq") for task in QUESTIONS["hotpotqa"]]
    monkeypatch.setitem(examinee.QUESTIONS, "hotpotqa", renamed)
    with pytest.raises(RecordsError, match=r"set hotpotqa: question m0 .*the set's file has changed"):
        bench.run(bench.config(questions=1))
    weights = bench.path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[::-1])
    with pytest.raises(ConfigError, match=r"another model\.weights"):
        bench.run(bench.config(questions=1))


def test_engine_size_new_sets_and_unrecorded_mistakes_are_not(bench: Bench) -> None:
    both = bench.config().sets
    one = {"hotpotqa": both["hotpotqa"].model_dump()}
    wrong = {"hotpotqa": one["hotpotqa"] | {"task": {"kind": "search_r1", "test": ["nothing"]}}}
    with pytest.raises(KeyError):
        bench.run(bench.config().model_copy(update={"sets": bench.config(sets=wrong).sets}))
    bench.run(bench.config(questions=1).model_copy(update={"sets": {"hotpotqa": both["hotpotqa"]}}))
    bench.run(bench.config(questions=1, engine={"max_sequences": 3}))
    assert set(figures(bench.path / "out")["sets"]) == {"hotpotqa", "mixed"}


def test_rollouts_that_a_tool_ended_are_tried_again(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.run(bench.config("sound"))
    bench.failures = 2  # of each set's index
    bench.run(bench.config())
    failed = [row for row in lines(bench.path / "out") if row["error"]]
    assert [row["error"] for row in failed] == ["the server is down"] * 4
    assert {row["reward"] for row in failed} == {0.0}
    assert figures(bench.path / "out")["sets"]["hotpotqa"]["rollouts"]["tool_errors"] == 2 / 24
    assert "2 of hotpotqa, 2 of mixed" in capsys.readouterr().out
    bench.failures = 0
    bench.run(bench.config())
    again = lines(bench.path / "out")
    assert len(again) == ROLLOUTS + 4
    assert figures(bench.path / "out") == figures(bench.path / "sound")
    assert "start the evaluation again" not in capsys.readouterr().out.split("hotpotqa: 24/24")[-1]


def test_a_dead_tool_ends_the_evaluation(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.failures = 10_000
    monkeypatch.setattr(examinee.SeededEngine, "generate", _search)
    config = bench.config(sampling={"samples": 8})
    with pytest.raises(ToolOutageError, match=rf"{OUTAGE} rollouts in a row.*the server is down"):
        bench.run(config)
    assert bench.engine.closed == 1
    assert len(lines(config.out)) >= OUTAGE


async def _search(self: Any, prefix_ids: Any, sampling: Any) -> Any:
    return examinee.completion(examinee.BYTES("<search> x </search>")["input_ids"])


def test_a_prompt_that_does_not_fit_is_a_failure(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    long = [Task("long", "x" * 700, ("Oro",), "hotpotqa"), *QUESTIONS["hotpotqa"][:1]]
    monkeypatch.setitem(examinee.QUESTIONS, "hotpotqa", long)
    bench.run(bench.config())
    rows = [row for row in lines(bench.path / "out") if row["task"] == "long"]
    assert [(row["outcome"], row["reward"], row["turns"]) for row in rows] == [("too_long", 0.0, 0)] * 3
    assert figures(bench.path / "out")["sets"]["hotpotqa"]["rollouts"]["too_long"] == 0.5
    assert bench.run(bench.config()).requests == []


def test_a_set_that_nobody_answers_has_the_scores_of_the_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfit = [Task("long", "x" * 700, ("Oro",), "nq")]
    monkeypatch.setitem(examinee.QUESTIONS, "mixed", unfit)
    bench.run(bench.config())
    found = figures(bench.path / "out")
    assert found["sets"]["mixed"]["scores"]["f1"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert "hotpotqa_em" not in found["sets"]["mixed"]["scores"]
    f1 = found["sets"]["hotpotqa"]["scores"]["f1"]["mean"]
    assert found["average"]["f1"]["mean"] == pytest.approx(f1 / 2)


def test_a_set_without_questions_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(examinee.QUESTIONS, "mixed", [])
    with pytest.raises(ConfigError, match=r"sets\.mixed\.task\.test: no usable question"):
        bench.run(bench.config())
