r"""Mathematics with a Python tool: turns, actions, snapshots, and who is to blame for a failure."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest

from trace_rl.environments.math_check import MathCheckError, Verdict
from trace_rl.environments.math_python import (
    DEFAULT_INSTRUCTIONS,
    INVALID,
    LAST_TURN,
    NOTHING_PRINTED,
    STOPPED,
    PythonMath,
)
from trace_rl.environments.protocol import Environment, StepResult
from trace_rl.sandbox.limits import CellResult, SandboxError
from trace_rl.tasks.task import Task

TASK = Task("t", "What is $2 + 3$?", ("5",), "math")
CODE, ANSWER = "<think> hm </think> <python> print(2 + 3) </python>", r"<answer> \boxed{5} </answer>"
WRONG = r"<answer> \boxed{6} </answer>"
FAILED = {"tool_calls": 1, "tool_failures": 1}


@dataclass
class Tool:
    """Answers with what it was given, in order, and writes down what it was asked."""

    results: list[CellResult | Exception] = field(default_factory=list)
    asked: list[tuple[tuple[str, ...], str]] = field(default_factory=list)

    def run(self, history, code):
        self.asked.append((history, code))
        result = self.results.pop(0) if self.results else CellResult(f"ran {code}", "ok", True)
        if isinstance(result, Exception):
            raise result
        return result


class Checker:
    """Compares texts, so that most tests need no process."""

    def check(self, answer, golds):
        correct = answer.replace(r"\boxed{", "").replace("}", "") in golds
        return Verdict(correct, "")


def words(text):
    return len(text.split())


def make(tool=None, checker=None, **options):
    tool = Tool() if tool is None else tool
    environment = PythonMath(tool, checker or Checker(), **{"count_tokens": words, **options})
    environment.reset(TASK)
    return environment


def ended(reward, outcome, answer=""):
    return StepResult("", True, reward, outcome, answer=answer, scores={"accuracy": reward})


def test_it_is_an_environment():
    environment: Environment = make()
    assert environment.stop == ("</python>", "</answer>")


def test_prompt():
    (message,) = make(max_calls=3).reset(TASK)
    assert message == {
        "role": "user",
        "content": f"{DEFAULT_INSTRUCTIONS.replace('{max_calls}', '3')}\nProblem: What is $2 + 3$?",
    }
    assert r"<answer> \boxed{\frac{1}{2}} </answer>" in message["content"]
    assert make(instructions="").reset(TASK)[0]["content"] == TASK.question


def test_code_and_its_output():
    tool = Tool()
    result = make(tool).step(CODE)
    assert [(history, code.strip()) for history, code in tool.asked] == [((), "print(2 + 3)")]
    expected = f"\n\n<result>ran {tool.asked[0][1]}</result>\n\n"
    assert result == StepResult(expected, False, None, "python", tool_calls=1)


@pytest.mark.parametrize(("action", "reward"), [(ANSWER, 1.0), (WRONG, 0.0), ("<answer>5</answer>", 1.0)])
def test_answers(action, reward):
    content = action.removeprefix("<answer>").removesuffix("</answer>").strip()
    assert make().step(action) == ended(reward, "answer", content)


def test_the_last_turn_has_the_tool_off():
    tool = Tool()
    environment = make(tool, max_calls=2)
    assert LAST_TURN not in environment.step(CODE).observation
    assert environment.step(CODE).observation.endswith(f"</result>\n\n{LAST_TURN}\n\n")
    assert environment.step(CODE) == ended(0.0, "no_answer")
    assert len(tool.asked) == 2
    with pytest.raises(RuntimeError, match="after the end"):
        environment.step(ANSWER)


def test_an_answer_on_the_last_turn_counts():
    environment = make(max_calls=1)
    environment.step(CODE)
    assert environment.step(ANSWER).reward == 1.0
    assert make(max_calls=0).step(ANSWER).reward == 1.0
    assert make(max_calls=0).step(CODE).outcome == "no_answer"


def test_invalid_actions_use_up_turns():
    environment = make(max_calls=2)
    first = environment.step("no tag")
    assert first == StepResult(f"\n\n<result>{INVALID}</result>\n\n", False, None, "invalid")
    assert LAST_TURN in environment.step("<python> never closed").observation
    assert environment.step("still none") == ended(0.0, "invalid")


def test_search_tags_mean_nothing_here():
    assert make().step("<search> 2 + 3 </search>").outcome == "invalid"
    assert make().step("<python>1</python><result>5</result>").outcome == "invalid"


def test_history_holds_the_cells_to_keep():
    keep, drop = CellResult("a", "ok", True), CellResult("b", "timeout", False)
    tool = Tool([keep, drop, CellResult("c", "exception", True)])
    environment = make(tool)
    for name in "abcd":
        environment.step(f"<python>{name}</python>")
    assert tool.asked == [((), "a"), (("a",), "b"), (("a",), "c"), (("a", "c"), "d")]


def test_a_history_that_cannot_be_replayed_is_given_up():
    tool = Tool([CellResult("a", "ok", True), CellResult("lost", "replay_failed", False)])
    environment = make(tool)
    for name in "abc":
        environment.step(f"<python>{name}</python>")
    assert tool.asked[1:] == [(("a",), "b"), ((), "c")]


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        (CellResult("", "ok", True), NOTHING_PRINTED),
        (CellResult("\n\n", "ok", True), NOTHING_PRINTED),
        (CellResult("", "killed", False), STOPPED),
        (CellResult("5\n", "ok", True), "5"),
        (CellResult("  5\n  6", "ok", True), "  5\n  6"),
        (
            CellResult("ZeroDivisionError: division by zero", "exception", True),
            "ZeroDivisionError: division by zero",
        ),
        (CellResult("a\ud800b", "ok", True), "a?b"),
    ],
)
def test_what_is_shown(result, shown):
    step = make(Tool([result])).step(CODE)
    counts = {"tool_calls": 1} if result.ended == "ok" else FAILED
    assert step == StepResult(f"\n\n<result>{shown}</result>\n\n", False, None, "python", **counts)


def test_a_broken_sandbox_ends_the_episode_without_blame():
    environment = make(Tool([SandboxError("no user namespaces")]))
    failed = StepResult("", True, 0.0, "tool_error", error="no user namespaces", **FAILED)
    assert environment.step(CODE) == failed
    with pytest.raises(RuntimeError, match="after the end"):
        environment.step(ANSWER)


def test_a_broken_checker_ends_the_episode_without_blame():
    class Broken:
        def check(self, answer, golds):
            raise MathCheckError("no math-verify")

    failed = StepResult("", True, 0.0, "tool_error", error="no math-verify", **FAILED)
    assert make(checker=Broken()).step(ANSWER) == failed


def test_a_bug_in_the_tool_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        make(Tool([ZeroDivisionError()])).step(CODE)


def test_a_snapshot_continues_elsewhere():
    tool = Tool([CellResult("a", "ok", True), CellResult("b", "timeout", False)])
    environment = make(tool)
    environment.step("<python>a</python>")
    environment.step("<python>b</python>")
    environment.step("nothing")
    state = json.loads(json.dumps(environment.snapshot()))
    assert state == {"turns": 3, "calls": 2, "cells": ["a"], "done": False}
    environment.step("<python>c</python>")
    assert state["cells"] == ["a"]

    other_tool = Tool()
    other = make(other_tool)
    other.restore(state)
    assert other.snapshot() == state
    assert other.step("<python>d</python>").observation.endswith(f"{LAST_TURN}\n\n")
    assert other_tool.asked == [(("a",), "d")]
    assert state["cells"] == ["a"]
    assert other.step(ANSWER) == ended(1.0, "answer", r"\boxed{5}")
    assert other.snapshot()["done"]
    other.reset(TASK)
    assert other.snapshot() == {"turns": 0, "calls": 0, "cells": [], "done": False}


GOOD = {"turns": 2, "calls": 1, "cells": ["a"], "done": False}


@pytest.mark.parametrize(
    "change",
    [
        {"turns": None},
        {"turns": "2"},
        {"turns": True},
        {"calls": 1.0},
        {"calls": -1},
        {"calls": 3},
        {"cells": None},
        {"cells": ["a", "b"]},
        {"cells": [1]},
        {"cells": "a"},
        {"done": 0},
        {"turns": 5},
        {"turns": 6, "done": True},
        {"turns": 5, "calls": 5, "done": True},
    ],
)
def test_impossible_snapshots(change):
    environment = make()
    environment.restore(GOOD)
    with pytest.raises(ValueError, match="snapshot"):
        environment.restore({**GOOD, **change})
    assert environment.snapshot() == GOOD


def test_order_of_calls():
    environment = PythonMath(Tool(), Checker(), count_tokens=words)
    for call in (lambda: environment.step(CODE), environment.snapshot, lambda: environment.restore(GOOD)):
        with pytest.raises(RuntimeError, match="before reset"):
            call()


def test_arguments():
    with pytest.raises(ValueError, match="max_calls >= 0, got -1"):
        make(max_calls=-1)
    with pytest.raises(ValueError, match="max_observation_tokens = 9, but the notices alone need"):
        make(max_observation_tokens=9)
