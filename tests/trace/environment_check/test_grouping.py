"""Problems of one kind are one line of the command's; different kinds keep theirs."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from trace_rl.environment_check import Problem
from trace_rl.environments.protocol import StepResult

from .checking import check, mutant, serious
from .guess_number import GuessNumber
from .test_command import EXAMPLE, NO_MODEL, ROOT, command

SOURCE = """
import random
from trace_rl.environments.protocol import StepResult
from trace_rl.sources import Source
from trace_rl.tasks.task import Task

class Env:
    stop = ("</guess>",)
    task, turns, done = None, 0, False

    def reset(self, task):
        self.task, self.turns, self.done = task, 0, False
        return [{"role": "user", "content": task.question}]

    def step(self, action):
        if self.task is None or self.done:
            raise RuntimeError("not now")
        self.turns += 1
        self.done = self.turns == 3
        return StepResult("", True, 1.0, "answer") if self.done else self.hint(action)

    def hint(self, action):
        return StepResult("higher", False, None, "guess", tool_calls=1)

    def snapshot(self):
        return {"turns": self.turns, "done": self.done}

    def restore(self, state):
        if type(state.get("turns")) is not int or type(state.get("done")) is not bool:
            raise ValueError("not a state")
        self.turns, self.done = state["turns"], state["done"]

class Random(Env):
    def hint(self, action):
        return StepResult(str(random.random()), False, None, "guess", tool_calls=1)

class Raising(Env):
    def hint(self, action):
        return StepResult("higher" + 1, False, None, "guess", tool_calls=1)

class KeyErrors(Raising):
    def restore(self, state):
        self.turns, self.done = state["turns"], state["done"]

TASKS = [Task(f"guess-{i}", f"Game {i}.", (), "guess", extra={"number": i}) for i in range(3)]
def right(): return Source(TASKS, [], lambda count: Env)
def by_chance(): return Source(TASKS, [], lambda count: Random)
def raising(): return Source(TASKS, [], lambda count: Raising)
def key_errors(): return Source(TASKS, [], lambda count: KeyErrors)
"""


def lines_of(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    (folder / "games.py").write_text(SOURCE)
    options = ["--set", f"task.source={folder}/games.py:{name}", "--set", "task.options={}"]
    code = command("--config", EXAMPLE, *options, *NO_MODEL)
    return code, capsys.readouterr().out.splitlines()


@pytest.fixture(autouse=True)
def _in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_tasks_as_the_page_writes_them_are_fine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lines_of("right", tmp_path, capsys) == (0, ["3 tasks played, 0 problems, 0 remarks"])


def test_a_random_observation_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, [line, last] = lines_of("by_chance", tmp_path, capsys)
    assert code == 1
    assert line.startswith("problem (task guess-0): step: two new instances were given the same actions")
    assert line.endswith(" (and 2 like it)")
    assert last == "3 tasks played, 1 problems, 0 remarks"


def test_an_exception_in_step_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, [line, last] = lines_of("raising", tmp_path, capsys)
    assert code == 1
    assert re.fullmatch(r"problem .* got TypeError: .* \(and \d\d like it\)", line)
    assert last == "3 tasks played, 1 problems, 0 remarks"


def test_mistakes_of_different_kinds_keep_their_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, [*lines, last] = lines_of("key_errors", tmp_path, capsys)
    assert code == 1
    assert sorted(line.split(": ")[1] for line in lines) == ["restore", "restore", "step"]
    assert sum("expected ValueError, got KeyError" in line for line in lines) == 1
    assert sum("expected ValueError, got None" in line for line in lines) == 1
    assert last == "3 tasks played, 3 problems, 0 remarks"


def test_what_makes_problems_alike() -> None:
    first = Problem("step", "action 'a'", "no exception", "KeyError: 'a'", error="KeyError")
    assert first.like(Problem("step", "action 'b'", "no exception", "KeyError: 'b'", error="KeyError"))
    assert not first.like(Problem("step", "action 'b'", "no exception", "TypeError: 'b'", error="TypeError"))
    assert not first.like(Problem("restore", "given {}", "no exception", "KeyError: 'b'", error="KeyError"))
    same = Problem("step", "played", "the same observation, 'x'", "'y'")
    assert same.like(Problem("step", "played", "the same observation, 'z'", "'y'"))
    assert not same.like(Problem("step", "played", "the same reward, 1.0", "0.0"))
    assert not same.like(Problem("step", "played", "the same observation, 'z'", "'y'", serious=False))


def test_chance_is_not_reported_as_restores_mistake() -> None:
    rng = random.Random(0)
    texts = serious(check(mutant(hint=lambda *_: StepResult(f"{rng.random()}", False, None, "guess"))))
    assert len(texts) == 1
    assert "two new instances were given the same actions" in texts[0]


def test_what_was_found_before_the_check_had_to_end_is_kept() -> None:
    class Both(GuessNumber):
        stop: Any = "</guess>"

        def step(self, action: str) -> Any:
            return StepResult("x", False, None, "guess")

    assert [problem.method for problem in check(Both)] == ["step", "stop"]


def test_a_snapshot_that_changes_the_episode() -> None:
    class Counting(GuessNumber):
        def snapshot(self) -> Any:
            self.guesses.append("?")
            return super().snapshot()

    assert serious(check(Counting))
