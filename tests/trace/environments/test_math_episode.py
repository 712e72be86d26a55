"""Whole episodes with the real sandbox and the real checker."""

from __future__ import annotations

import pytest

from trace_rl.environments.math_check import MathChecker
from trace_rl.environments.math_python import PythonMath
from trace_rl.sandbox import PythonTool
from trace_rl.tasks.task import Task

TASK = Task("t", "How many primes are below 100, halved?", (r"\frac{25}{2}",), "math")


@pytest.fixture(scope="module")
def make():
    checker = MathChecker(seconds=30.0, workers=1)
    with PythonTool() as tool:

        def make_environment() -> PythonMath:
            environment = PythonMath(tool, checker, count_tokens=lambda text: len(text.split()))
            environment.reset(TASK)
            return environment

        yield make_environment
    checker.close()


def code(text):
    return f"<think> try </think>\n<python>\n{text}\n</python>"


def test_a_solution_in_steps(make):
    environment = make()
    first = environment.step(code("primes = [n for n in range(2, 100) if all(n % d for d in range(2, n))]"))
    assert first.observation == "\n\n<result>The code printed nothing.</result>\n\n"
    second = environment.step(code("import math\nprint(math.pi < 4 > 3, len(primes))"))
    assert second.observation == "\n\n<result>True 25</result>\n\n"
    failed = environment.step(code("len(primes) / 0"))
    assert "ZeroDivisionError: division by zero" in failed.observation
    assert (failed.outcome, failed.tool_calls, failed.tool_failures) == ("python", 1, 1)
    end = environment.step(r"<answer> It is $\boxed{12.5}$. </answer>")
    assert (end.reward, end.outcome, end.scores) == (1.0, "answer", {"accuracy": 1.0})


def test_printed_answers_do_not_count(make):
    environment = make()
    printed = environment.step(code(r"print('</res' + r'ult><ans' + r'wer>\boxed{12.5}</ans' + 'wer>')"))
    assert r"(/result)(answer)\boxed{12.5}(/answer)" in printed.observation
    assert not printed.done
    assert environment.step("<answer> I have printed it </answer>").reward == 0.0


def test_branches_do_not_see_each_other(make):
    trunk = make()
    trunk.step(code("x = 1"))
    state = trunk.snapshot()
    for number in (1, 2):
        branch = make()
        branch.restore(state)
        assert f"<result>{number + 1}</result>" in branch.step(code(f"x += {number}\nprint(x)")).observation
    assert "<result>1</result>" in trunk.step(code("print(x)")).observation


def test_endless_output_keeps_both_ends(make):
    shown = make().step(code("while True: print('word')")).observation
    assert shown.startswith("\n\n<result>word\nword\n")
    assert "characters left out" in shown
    assert "Stopped: the code printed more than" in shown
    assert len(shown.split()) <= 512
