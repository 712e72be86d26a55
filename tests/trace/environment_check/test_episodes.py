"""Mistakes in messages, results and ends; none in an environment without mistakes."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from trace_rl.environment_check import check_environment
from trace_rl.environments.protocol import Environment, StepResult
from trace_rl.tasks.task import Task

from .checking import check, mutant, serious, words
from .guess_number import ACTIONS, TASK, TURNS, GuessNumber


def test_an_environment_without_mistakes_has_no_problem() -> None:
    assert check(GuessNumber) == []


def test_actions_of_the_checks_own_find_nothing_wrong_either() -> None:
    assert serious(check(GuessNumber, actions=None)) == []


def test_a_policy_writes_the_actions_from_what_it_is_shown() -> None:
    shown = []

    def policy(text: str) -> str:
        shown.append(text)
        return ACTIONS[len(shown) - 1]

    assert check(GuessNumber, actions=policy) == []
    assert shown == [TASK.question, "higher, after 3", "what?, after 3 ?", "lower, after 3 ? 9"]


def test_actions_that_reach_little_are_remarked() -> None:
    problems = check(GuessNumber, actions=["hm"])
    assert serious(problems) == []
    assert [problem.expected for problem in problems] == [
        "one that ends the episode",
        "one that calls a tool",
    ]


MESSAGES: list[tuple[Any, str]] = [
    ([], "a list of messages, got []"),
    (({"role": "user", "content": "x"},), "a list of messages, got ("),
    ([{"role": "user", "content": ""}], "non-empty strings, got {'role'"),
    ([{"role": "user"}], "non-empty strings, got {'role'"),
    (["question"], "non-empty strings, got 'question'"),
    ([{"role": "user", "content": ["x"]}], "non-empty strings"),
    ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "from the user"),
]


@pytest.mark.parametrize(("messages", "said"), MESSAGES)
def test_messages(messages: Any, said: str) -> None:
    [problem] = check(mutant(messages=lambda self, task: messages))
    assert problem.method == "reset"
    assert said in str(problem)


HINTS: list[tuple[Any, str]] = [
    ("higher", "a StepResult, got 'higher'"),
    (StepResult("", False, None, "guess"), "an observation, as the episode goes on, got ''"),
    (StepResult(b"x", False, None, "guess"), "an observation that is a string, got b'x'"),  # type: ignore[arg-type]
    (StepResult("\ud800", False, None, "guess"), "an observation that UTF-8 can encode"),
    (StepResult("x " * 21, False, None, "guess"), "at most 20 tokens of observation, got 21"),
    (StepResult("x", False, None, "a guess"), "one word as outcome, got 'a guess'"),
    (StepResult("x", False, None, "guess", answer="7"), "only at the end, got '7'"),
    (StepResult("x", False, None, "guess", scores={"a": 1.0}), "scores at the end only"),
    (StepResult("", True, 0.0, "tool_error", error="down"), "a tool that works, got the tool error 'down'"),
]


@pytest.mark.parametrize(("result", "said"), HINTS)
def test_results_of_turns(result: Any, said: str) -> None:
    problems = check(mutant(hint=lambda *_: result))
    assert any(problem.method == "step" and said in str(problem) for problem in problems)
    assert "action '<guess> 3 </guess>' after 0 turns since reset" in str(problems[0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reward": 0.5}, "a reward of 0.0 or 1.0, got 0.5"),
        ({"scores": {"accuracy": 2.0}}, "scores in [0, 1] by name, got 'accuracy': 2.0"),
        ({"scores": {"accuracy": float("nan")}}, "scores in [0, 1] by name, got 'accuracy': nan"),
        ({"answer": 7}, "an answer that is a string"),
    ],
)
def test_results_of_the_end(change: dict[str, Any], said: str) -> None:
    assert any(said in text for text in serious(check(mutant(end=lambda self, r: replace(r, **change)))))


def test_chance() -> None:
    rng = random.Random(0)
    hinting = mutant(hint=lambda *_: StepResult(f"{rng.random()}", False, None, "guess"))
    assert any("two new instances were given the same actions" in text for text in serious(check(hinting)))
    asking = mutant(messages=lambda *_: [{"role": "user", "content": f"{rng.random()}"}])
    assert any("called on two instances with one task" in text for text in serious(check(asking)))


def test_steps_outside_an_episode() -> None:
    class Lenient(GuessNumber):
        def step(self, action: str) -> Any:
            self.task, self.done = TASK, False
            return super().step(action)

    texts = serious(check(Lenient))
    assert any("step: called before reset: expected RuntimeError, got StepResult" in text for text in texts)
    assert any("step: called after the end, after 4 turns" in text for text in texts)


@pytest.mark.parametrize(
    ("reads", "said"),
    [
        (lambda text: text.encode(), "got UnicodeEncodeError"),
        (lambda text: int(text.strip("<>/gues \n\t")), "got ValueError"),
        (lambda text: text.strip()[0], "got IndexError"),
    ],
)
def test_nonsense_that_raises(reads: Callable[[str], Any], said: str) -> None:
    class Raises(GuessNumber):
        def step(self, action: str) -> Any:
            reads(action) if action not in ("hm", "no action") else None
            return super().step(action)

    texts = serious(check(Raises))
    assert texts
    assert all(
        text.startswith("step: action ") and said in text for text in texts if "before reset" not in text
    )


def test_a_step_that_hangs_ends_the_check() -> None:
    forever = threading.Event()

    class Hangs(GuessNumber):
        def step(self, action: str) -> Any:
            if len(action) > 1000:
                forever.wait()
            return super().step(action)

    problems = check_environment(Hangs, TASK, ACTIONS, count_tokens=words, max_turns=TURNS, seconds=1)
    forever.set()
    assert [problem.expected for problem in problems] == ["an end within 1 s"]
    assert problems[0].method == "step"


def test_an_episode_without_end() -> None:
    class Endless(GuessNumber):
        def step(self, action: str) -> Any:
            self.guesses = self.guesses[-2:]
            return super().step(action)

    texts = serious(check(Endless))
    assert (
        "step: 5 times the action 'no action': expected the episode to be over, got an observation" in texts
    )


def test_what_cannot_even_start() -> None:
    def broken(*_: Any) -> Any:
        raise OSError("no database")

    [problem] = check(broken)
    assert str(problem) == "make_environment: called: expected no exception, got OSError: 'no database'"
    [problem] = check(mutant(reset=broken))
    assert str(problem).startswith("reset: called on a new instance: expected no exception, got OSError")
    [problem] = check(mutant(stop="</guess>"))
    assert str(problem) == "stop: read after reset: expected a tuple of non-empty strings, got '</guess>'"


def test_tasks() -> None:
    texts = serious(check(GuessNumber, replace(TASK, extra={"bounds": (1, 9)})))
    assert any(text.startswith("task: written to JSON and read back") for text in texts)
    texts = serious(check(GuessNumber, replace(TASK, extra={"bounds": {1, 9}})))
    assert any(text.startswith("task: ") and text.endswith("got what JSON cannot hold") for text in texts)

    class Changes(GuessNumber):
        def reset(self, task: Task) -> Any:
            task.extra["seen"] = True
            return super().reset(task)

    assert any("the task left as it was" in text for text in serious(check(Changes)))


def test_an_instance_that_is_slow_to_make_is_remarked() -> None:
    numbers = itertools.count()

    def slow() -> Environment:
        time.sleep(0.06 if next(numbers) < 3 else 0)  # the first three are timed
        return GuessNumber()

    problems = check(slow)
    assert serious(problems) == []
    assert [problem.method for problem in problems] == ["make_environment"]
