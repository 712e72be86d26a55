"""One episode under check: every call as a run makes it, every result looked at."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from trace_rl.environments.protocol import Environment, Message, StepResult
from trace_rl.tasks.task import Task

from .problem import Problem, ProblemFoundError, shown

T = TypeVar("T")


@dataclass(frozen=True)
class Subject:
    """What is checked: environments from `make` playing `task`, within limits.

    Attributes:
        seconds: longest time of one call.
        max_turns: turns by which every episode must be over.
        max_observation_tokens: length of the longest observation in `count_tokens`; None for no limit.
    """

    make: Callable[[], Environment]
    task: Task
    count_tokens: Callable[[str], int]
    seconds: float
    max_turns: int
    max_observation_tokens: int | None

    def call(self, method: str, done: str, function: Callable[[], T]) -> T:
        """`function()` in another thread, as runs call `step`; ProblemFoundError if it raises or hangs."""
        outcome, error = self._outcome(method, done, function)
        if error is not None:
            got = f"{type(error).__name__}: {shown(str(error))}"
            problem = Problem(method, done, "no exception", got, error=type(error).__name__)
            raise ProblemFoundError(problem) from error
        return outcome[0]

    def call_refused(
        self, method: str, done: str, function: Callable[[], Any], error: type[Exception]
    ) -> None:
        """`function()` must raise `error`; raises ProblemFoundError otherwise."""
        outcome, raised = self._outcome(method, done, function)
        if not isinstance(raised, error):
            name = "" if raised is None else type(raised).__name__
            got = f"{name}: {shown(str(raised))}" if name else shown(outcome[0])
            raise ProblemFoundError(Problem(method, done, error.__name__, got, error=name)) from raised

    def _outcome(
        self, method: str, done: str, function: Callable[[], T]
    ) -> tuple[list[T], BaseException | None]:
        results: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                results.append(function())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work, daemon=True)  # one that hangs must not keep the process alive
        thread.start()
        thread.join(self.seconds)
        if thread.is_alive():
            problem = Problem(method, done, f"an end within {self.seconds:g} s", "none yet")
            raise ProblemFoundError(problem, hopeless=True)
        return results, errors[0] if errors else None


class Episode:
    """An instance after ``reset``, possibly restored from ``state``, taken after ``turns`` turns."""

    def __init__(self, subject: Subject, state: Any = None, turns: int = 0) -> None:
        self._subject = subject
        self._environment = subject.call("make_environment", "called", subject.make)
        self.done = False
        self.messages: list[Message] = subject.call(
            "reset", "called on a new instance", lambda: self._environment.reset(subject.task)
        )
        self._where = "reset"
        self._turns = 0
        if state is not None:
            self.restore(state, turns)

    @property
    def stop(self) -> Any:
        """The attribute as it is."""
        return self._subject.call("stop", "read after reset", lambda: self._environment.stop)

    def step(self, action: str) -> StepResult:
        """One turn; raises ProblemFoundError if the result is not as the protocol has it."""
        done = f"action {shown(action, 80)} {self._after()}"
        result = self._subject.call("step", done, lambda: self._environment.step(action))
        wrong = result_problem(self._subject, result)
        if wrong:
            raise ProblemFoundError(Problem("step", done, *wrong))
        self._turns += 1
        self.done = result.done
        return result

    def play(self, actions: Sequence[str]) -> list[StepResult]:
        """Turns until the actions are used up or the episode is over."""
        results: list[StepResult] = []
        for action in actions:
            if self.done:
                break
            results.append(self.step(action))
        return results

    def step_refused(self) -> None:
        """A further step must raise RuntimeError."""
        self._subject.call_refused(
            "step",
            f"called after the end, {self._after()}",
            lambda: self._environment.step("no action"),
            RuntimeError,
        )

    def snapshot(self) -> dict[str, Any]:
        """The state as the environment returns it; raises ProblemFoundError if JSON would change it."""
        done = f"taken {self._after()} and passed through JSON"
        state = self._subject.call("snapshot", done, self._environment.snapshot)
        if not isinstance(state, dict):
            raise ProblemFoundError(Problem("snapshot", done, "a dict", shown(state)))
        try:
            back = json.loads(json.dumps(state, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            got = f"{type(error).__name__}: {error} for {shown(state)}"
            raise ProblemFoundError(Problem("snapshot", done, "plain data", got)) from error
        if back != state:
            raise ProblemFoundError(Problem("snapshot", done, f"it unchanged, {shown(state)}", shown(back)))
        return state

    def restore(self, state: Any, turns: int) -> None:
        """Go on from `state`, taken after `turns` turns."""
        done = f"given the snapshot taken after {_count(turns)}"
        self._subject.call("restore", done, lambda: self._environment.restore(state))
        self._where, self._turns, self.done = f"restore of the snapshot taken after {_count(turns)}", 0, False

    def restore_refused(self, state: Any) -> None:
        """A state that is none must raise ValueError."""
        self._subject.call_refused(
            "restore", f"given {shown(state)}", lambda: self._environment.restore(state), ValueError
        )

    def _after(self) -> str:
        return f"after {_count(self._turns)} since {self._where}"


def _count(turns: int) -> str:
    return f"{turns} turn{'' if turns == 1 else 's'}"


def result_problem(subject: Subject, result: Any) -> tuple[str, str] | None:
    """What a step's result should be and what it is, or None if it is fine."""
    if not isinstance(result, StepResult):
        return "a StepResult", shown(result)
    if not isinstance(result.observation, str):
        return "an observation that is a string", shown(result.observation)
    try:
        result.observation.encode()
    except UnicodeEncodeError:
        return "an observation that UTF-8 can encode", shown(result.observation)
    if result.error:
        return "a tool that works", f"the tool error {shown(result.error)}"
    if not isinstance(result.outcome, str) or len(result.outcome.split()) != 1:
        return "one word as outcome", shown(result.outcome)
    if result.done and result.reward not in (0.0, 1.0):
        return "a reward of 0.0 or 1.0", shown(result.reward)
    if not result.done and not result.observation.strip():
        return "an observation, as the episode goes on", shown(result.observation)
    if not isinstance(result.answer, str) or (result.answer and not result.done):
        return "an answer that is a string, and only at the end", shown(result.answer)
    if result.scores and not result.done:
        return "scores at the end only", shown(result.scores)
    for name, score in result.scores.items():
        if not isinstance(name, str) or not isinstance(score, int | float) or not 0 <= score <= 1:
            return "scores in [0, 1] by name", f"{shown(name)}: {shown(score)}"
    limit, length = subject.max_observation_tokens, subject.count_tokens(result.observation)
    if length > (math.inf if limit is None else limit):
        return f"at most {limit} tokens of observation", f"{length}: {shown(result.observation)}"
    return None
