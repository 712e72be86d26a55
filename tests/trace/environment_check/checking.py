"""The check with the limits of GuessNumber, and environments that differ from it in one thing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from trace_rl.environment_check import Problem, check_environment
from trace_rl.environments.protocol import Environment
from trace_rl.tasks.task import Task

from .guess_number import ACTIONS, TASK, TURNS, GuessNumber


def words(text: str) -> int:
    return len(text.split())


def check(make: Callable[[], Environment], task: Task = TASK, actions: Any = ACTIONS) -> list[Problem]:
    return check_environment(
        make,
        copy.deepcopy(task),
        actions,
        count_tokens=words,
        max_turns=TURNS,
        max_observation_tokens=20,
        seconds=60,
    )


def serious(problems: list[Problem]) -> list[str]:
    return [str(problem) for problem in problems if problem.serious]


def mutant(**members: Any) -> Any:
    """A GuessNumber with other members."""
    return type("Mutant", (GuessNumber,), members)
