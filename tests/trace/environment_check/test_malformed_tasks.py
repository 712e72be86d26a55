"""Tasks of wrong types end the check with a problem, never with a traceback."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from trace_rl.environment_check import check_environment
from trace_rl.tasks.task import Task

from .checking import words
from .guess_number import ACTIONS, TASK, TURNS, GuessNumber


def only_problem(task: Any) -> str:
    [problem] = check_environment(GuessNumber, task, ACTIONS, count_tokens=words, max_turns=TURNS)
    assert problem.method == "task"
    return str(problem)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"id": 7}, 'id must be a string, got 7; write id="..."'),
        ({"question": None}, "question must be a string, got None"),
        ({"source": ()}, "source must be a string, got ()"),
        ({"answers": "7"}, """answers must be a tuple of strings, got '7'; write answers=("...",)"""),
        ({"answers": ["7"]}, "answers must be a tuple of strings, got ['7']"),
        ({"answers": (7,)}, "answers must be a tuple of strings, got (7,)"),
        ({"titles": {"number": 7}}, "write extra={'number': 7} by name, as the fifth argument is titles"),
        ({"extra": None}, "extra must be a dict, got None"),
    ],
)
def test_fields_of_another_type(change: dict[str, Any], said: str) -> None:
    assert said in only_problem(replace(TASK, **change))


def test_the_fifth_argument_is_titles() -> None:
    task = Task("guess-1", "Game 1.", (), "guess", {"number": 7})  # type: ignore[arg-type]
    assert "titles must be a tuple of strings, got {'number': 7}" in only_problem(task)


def test_what_is_no_task() -> None:
    assert "expected a Task, got {'id': 'guess-1'}" in only_problem({"id": "guess-1"})


def test_extra_that_cannot_even_be_copied() -> None:
    task = replace(TASK, extra={"lock": threading.Lock()})
    problems = check_environment(GuessNumber, task, ACTIONS, count_tokens=words, max_turns=TURNS)
    assert [(problem.method, problem.got) for problem in problems] == [("task", "what JSON cannot hold")]
