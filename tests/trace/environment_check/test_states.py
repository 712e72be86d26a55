"""Mistakes in snapshots, in restoring them, and in what instances share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from trace_rl.environments.protocol import StepResult
from trace_rl.tasks.task import Task

from .checking import check, mutant, serious
from .guess_number import TURNS, GuessNumber


@pytest.mark.parametrize(
    ("snapshot", "said"),
    [
        (lambda self: (1,), "a dict, got (1,)"),
        (lambda self: {"guesses": tuple(self.guesses), "done": False}, "it unchanged"),
        (lambda self: {1: "x"}, "it unchanged, {1: 'x'}, got {'1': 'x'}"),
        (lambda self: {"guesses": set(self.guesses)}, "plain data, got TypeError"),
        (lambda self: {"guesses": float("nan")}, "plain data, got ValueError"),
        (lambda self: {"guesses": self.guesses, "done": self.done}, "a copy that stays"),
    ],
)
def test_snapshots(snapshot: Callable[[Any], Any], said: str) -> None:
    assert any(
        text.startswith("snapshot: ") and said in text for text in serious(check(mutant(snapshot=snapshot)))
    )


def _keeps_the_list(self: Any, state: Any) -> None:
    GuessNumber.restore(self, state)
    self.guesses = state["guesses"]


def _adds(self: Any, state: Any) -> None:
    GuessNumber.restore(self, state)
    self.guesses += state["guesses"]


def _key_error(self: Any, state: Any) -> None:
    self.guesses, self.done = list(state["guesses"]), state["done"]


def _fresh_only(self: Any, state: Any) -> None:
    if self.guesses:
        raise RuntimeError("used")
    GuessNumber.restore(self, state)


@pytest.mark.parametrize(
    ("restore", "said"),
    [
        (_keeps_the_list, "it untouched"),
        (_adds, "a new instance restored the snapshot after turn 1, turn 1 from there: expected the same"),
        (_key_error, "given {'no such key': 1}: expected ValueError, got KeyError"),
        (_key_error, "given {'guesses': 'not a state', 'done': False}: expected ValueError, got None"),
        (
            _fresh_only,
            "given the snapshot taken after 0 turns: expected no exception, got RuntimeError: 'used'",
        ),
        (lambda self, state: None, "the same observation, 'what?, after 3 ?', got 'what?, after ?'"),
    ],
)
def test_restoring(restore: Callable[[Any, Any], None], said: str) -> None:
    assert any(
        text.startswith("restore: ") and said in text for text in serious(check(mutant(restore=restore)))
    )


def test_a_state_that_the_snapshot_leaves_out() -> None:
    class Forgets(GuessNumber):
        spoken = 0

        def hint(self, word: str, outcome: str, tool_calls: int) -> StepResult:
            self.spoken += 1
            return StepResult(f"{word} {self.spoken}", False, None, outcome, tool_calls=tool_calls)

    assert any("restored the snapshot after turn 1" in text for text in serious(check(Forgets)))


def test_instances_that_share_a_list() -> None:
    class Shared(GuessNumber):
        everyones: ClassVar[list[str]] = []

        def reset(self, task: Task) -> Any:
            messages = super().reset(task)
            self.everyones.clear()
            self.guesses = self.everyones
            return messages

    assert any("turn by turn beside each other" in text for text in serious(check(Shared)))


def test_instances_that_share_a_tool_without_a_lock() -> None:
    class Racing(GuessNumber):
        tool: ClassVar[dict[str, str]] = {}

        def hint(self, word: str, outcome: str, tool_calls: int) -> StepResult:
            self.tool["said"] = f"{word}, after {' '.join(self.guesses)}"
            time.sleep(0.02)  # a slow tool
            return StepResult(self.tool["said"], False, None, outcome, tool_calls=tool_calls)

    texts = serious(check(Racing))
    assert texts
    assert all("instances played in as many threads" in text for text in texts)


def test_an_instance_bound_to_the_thread_that_reset_it() -> None:
    class Bound(GuessNumber):
        def reset(self, task: Task) -> Any:
            self.thread = threading.current_thread()
            return super().reset(task)

        def hint(self, word: str, outcome: str, tool_calls: int) -> Any:
            if threading.current_thread() is not self.thread:
                raise OSError("made in another thread")
            return super().hint(word, outcome, tool_calls)

    assert any("got OSError: 'made in another thread'" in text for text in serious(check(Bound)))


def test_a_count_of_turns_that_only_matters_at_the_limit() -> None:
    class Generous(GuessNumber):
        turns = 0

        def reset(self, task: Task) -> Any:
            self.turns = 0
            return super().reset(task)

        def step(self, action: str) -> Any:
            self.turns += 1
            result = super().step(action)
            self.guesses = self.guesses[-1:] if self.turns < TURNS else ["?"] * TURNS
            return result

        def hint(self, word: str, outcome: str, tool_calls: int) -> Any:
            if self.turns < TURNS:
                return StepResult(word, False, None, outcome, tool_calls=tool_calls)
            self.done = True
            return StepResult("", True, 0.0, "no_answer", scores={"accuracy": 0.0})

    assert any(
        "a new instance restored the snapshot after turn 1" in text for text in serious(check(Generous))
    )
