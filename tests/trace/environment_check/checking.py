"""The check with the limits of GuessNumber, and environments that differ from it in one thing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
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


def write_failing_source(folder: Path, place: str, error: str) -> str:
    """A custom source that raises `error` as it is made, or as its environments are; its `task.source`."""
    raised = {"here": "pass", "environments": "pass"} | {place: f"raise {error}"}
    (folder / "failing.py").write_text(
        "from trace_rl.environments.math_check import MathCheckError\n"
        "from trace_rl.sandbox import SandboxError\n"
        "from trace_rl.sources import Source\n"
        "from trace_rl.tasks.task import Task\n"
        "def environments(count):\n"
        f"    {raised['environments']}\n"
        "def source():\n"
        f"    {raised['here']}\n"
        "    tasks = [Task(str(i), 'Who?', ('x',), 'test') for i in range(2)]\n"
        "    return Source(tasks[:1], tasks[1:], environments)\n"
    )
    return f"{folder}/failing.py:source"
