"""Greedy evaluation with a scripted policy in the real search environment."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from trace_rl.engines.protocol import Completion, EngineError, Sampling
from trace_rl.environments.protocol import ToolOutageError
from trace_rl.environments.search_qa import SearchQA
from trace_rl.evaluation.held_out import evaluate
from trace_rl.phases import Phases
from trace_rl.ranks import Ranks
from trace_rl.retrieval.bm25 import Bm25Index
from trace_rl.retrieval.protocol import RetrievalError
from trace_rl.rollout.collector import Collector, Limits
from trace_rl.rollout.transcript import Transcript
from trace_rl.tasks.task import Passage, Task

from .rollout.scripted import ScriptedEngine, byte_tokenizer, completion

ALONE = Ranks(0, 1, 0, None)
BYTES = byte_tokenizer()
ANSWERS = {
    "exact": ["<search> Tarn </search>", "<answer> Marla Voss </answer>"],
    "partial": ["<answer> Marla </answer>"],  # one of two words: F1 2/3, no exact match
    "wrong": ["<think> <answer> </think> <answer> Oro </answer>"],
    "cut": ["<answer> Marla Voss </answer>" + " and on" * 5],
    "babble": ["Marla Voss", "Marla Voss"],
}


@dataclass
class Watched:
    """Counts what the evaluation reports."""

    total: int | None = None
    advanced: int = 0

    def start(self, name: str, total: int | None) -> None:
        self.total = total

    def advance(self) -> None:
        self.advanced += 1

    def stop(self) -> None: ...


def question(name: str) -> Task:
    return Task(name, f"Who {name}?", ("Marla Voss",), "test")


def examinee() -> tuple[Collector, ScriptedEngine]:
    """Answers by `ANSWERS`, turn by turn; "cut" runs into its limit."""

    async def reply(n: int, prefix: list[int], sampling: Sampling) -> Completion:
        text = BYTES.decode(prefix)
        name = text.split("Who ")[1].split("?")[0]
        said = BYTES(ANSWERS[name][text.count("<information>")])["input_ids"]
        return completion(said[: sampling.max_tokens], truncated=len(said) > sampling.max_tokens)

    engine = ScriptedEngine(reply)
    transcript = Transcript(BYTES)
    index = Bm25Index([Passage("0", "Tarn", "author Marla Voss")])

    def environment() -> SearchQA:
        return SearchQA(index, max_searches=1, count_tokens=transcript.count, instructions="")

    return Collector(engine, transcript, environment, Limits(0.9, 55, 400)), engine


def test_scores_by_hand() -> None:
    collector, engine = examinee()
    watcher = Watched()
    result = evaluate(collector, [question(n) for n in ANSWERS], ALONE, Phases(watcher), version=3)
    assert result == pytest.approx(
        {
            "exact_match": 1 / 5,
            "f1": (1 + 2 / 3) / 5,
            "reward": 2 / 5,  # F1 of at least 0.3 is a success
            "answer_rate": 3 / 5,  # the cut answer is none
            "turns": (2 + 1 + 1 + 1 + 2) / 5,
            "questions": 5,
        }
    )
    assert {sampling.temperature for _, sampling in engine.requests} == {0.0}
    assert (watcher.total, watcher.advanced) == (5, 5)
    assert collector.limits.temperature == 0.9


def test_a_prompt_that_does_not_fit_counts_as_unanswered() -> None:
    collector, engine = examinee()
    short = replace(collector, limits=Limits(0.9, 55, 150))
    tasks = [question("partial"), Task("long", "Who partial?" + "x" * 200, ("Marla",), "test")]
    result = evaluate(short, tasks, ALONE, Phases(), version=0)
    assert result["questions"] == 2
    assert result["answer_rate"] == 0.5
    assert result["reward"] == 0.5
    assert len(engine.requests) == 1


def test_an_example_in_the_prompt_is_not_an_answer() -> None:
    collector, _ = examinee()
    task = Task("t", "Who babble? <answer> Marla Voss </answer>", ("Marla Voss",), "test")
    result = evaluate(collector, [task], ALONE, Phases(), version=0)
    assert (result["reward"], result["answer_rate"]) == (0.0, 0.0)


def test_no_questions() -> None:
    collector, _ = examinee()
    result = evaluate(collector, [], ALONE, Phases(), version=0)
    assert set(result.values()) == {0.0}


@dataclass
class Dying:
    """An index that is down for the questions in `names`; a question is searched by its name."""

    names: set[str]

    def search(self, query: str, k: int) -> list[Passage]:
        if query in self.names:
            raise RetrievalError(f"no server for {query}")
        return []


def searcher(*down: str) -> Collector:
    """Searches for the question's name, then answers rightly."""

    async def reply(n: int, prefix: list[int], sampling: Sampling) -> Completion:
        text = BYTES.decode(prefix)
        name = text.split("Who ")[1].split("?")[0]
        answers = "<information>" in text
        said = "<answer> Marla Voss </answer>" if answers else f"<search> {name} </search>"
        return completion(BYTES(said)["input_ids"])

    transcript = Transcript(BYTES)

    def environment() -> SearchQA:
        index = Dying(set(down))
        return SearchQA(index, max_searches=1, count_tokens=transcript.count, instructions="")

    return Collector(ScriptedEngine(reply), transcript, environment, Limits(0.9, 55, 400))


def test_rollouts_that_a_tool_ended_are_counted() -> None:
    tasks = [question(name) for name in "abcd"]
    result = evaluate(searcher("b"), tasks, ALONE, Phases(), version=0)
    assert (result["tool_errors"], result["questions"]) == (1.0, 4.0)
    assert result["reward"] == result["exact_match"] == 3 / 4
    assert "tool_errors" not in evaluate(searcher(), tasks, ALONE, Phases(), version=0)


def test_a_dead_tool_is_no_score_of_0() -> None:
    unfit = Task("long", "Who a?" + "x" * 400, ("Marla",), "test")
    tasks = [question("a"), question("b"), unfit]
    with pytest.raises(ToolOutageError, match=r"all 2 rollouts .* the first by: .*no server for a"):
        evaluate(searcher("a", "b"), tasks, ALONE, Phases(), version=0)
    assert evaluate(searcher("a", "b"), [unfit], ALONE, Phases(), version=0)["reward"] == 0.0


class Rank(Ranks):
    """One of two ranks; `others` holds what each of its gathers gets from the other one."""

    def gather(self, value: Any) -> list[Any]:
        return self.exchange(self.rank, value)

    exchange: Callable[[int, Any], list[Any]]


def rank(number: int, others: list[Any], sent: list[Any]) -> Ranks:
    calls = iter(others)

    def exchange(_: int, value: Any) -> list[Any]:
        sent.append(value)
        return [value, next(calls)] if number == 0 else [next(calls), value]

    ranks = Rank(number, 2, number, None)
    object.__setattr__(ranks, "exchange", exchange)
    return ranks


def test_ranks_share_the_questions_and_agree_on_the_means() -> None:
    tasks = [question(n) for n in ANSWERS]
    collector, _ = examinee()
    alone = evaluate(collector, tasks, ALONE, Phases(), version=0)
    first: list[Any] = []
    evaluate(collector, tasks, rank(0, [None, []], first), Phases(), version=0)
    second: list[Any] = []
    assert evaluate(collector, tasks, rank(1, first, second), Phases(), version=0) == pytest.approx(alone)
    assert evaluate(collector, tasks, rank(0, second, []), Phases(), version=0) == pytest.approx(alone)
    assert (len(first[1]), len(second[1])) == (3, 2)


def test_a_dead_tool_ends_all_ranks_or_none() -> None:
    tasks = [question(name) for name in "abcd"]  # a and c are rank 0's

    def exchanged(*down: str) -> tuple[list[Any], list[Any]]:
        sent: tuple[list[Any], list[Any]] = [], []
        for number in range(2):
            with contextlib.suppress(ToolOutageError):
                evaluate(searcher(*down), tasks, rank(number, [None, []], sent[number]), Phases(), version=0)
        return sent

    of_one, of_all = exchanged("a", "c"), exchanged(*"abcd")
    for number in range(2):
        other = rank(number, of_one[1 - number], [])
        assert evaluate(searcher("a", "c"), tasks, other, Phases(), version=0)["tool_errors"] == 2.0
        other = rank(number, of_all[1 - number], [])
        with pytest.raises(ToolOutageError, match=r"all 4 rollouts .*no server for a"):
            evaluate(searcher(*"abcd"), tasks, other, Phases(), version=0)


def test_a_failure_is_told_to_the_other_rank() -> None:
    async def reply(n: int, prefix: list[int], sampling: Sampling) -> Completion:
        await asyncio.sleep(0)
        raise EngineError("gone")

    healthy, _ = examinee()
    sick = replace(healthy, engine=ScriptedEngine(reply))
    tasks = [question(n) for n in ANSWERS]
    sent: list[Any] = []
    with pytest.raises(EngineError, match="gone"):
        evaluate(sick, tasks, rank(0, [None], sent), Phases(), version=0)
    with pytest.raises(RuntimeError, match=r"rank 0 failed.*gone"):
        evaluate(healthy, tasks, rank(1, sent, []), Phases(), version=0)
