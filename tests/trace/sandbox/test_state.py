"""State is the history: it carries, repeats anywhere, and branches never meet."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from trace_rl.sandbox import PythonTool


def outputs(tool: PythonTool, *cells: str) -> list[str]:
    history: list[str] = []
    shown = []
    for cell in cells:
        result = tool.run(history, cell)
        shown.append(result.output)
        if result.keep:
            history.append(cell)
    return shown


def test_variables_functions_and_imports_carry(tool: PythonTool) -> None:
    cells = ("import math", "def f(n):\n    return math.factorial(n) + k", "k = 2", "f(5)")
    assert outputs(tool, *cells) == ["", "", "", "122\n"]


def test_classes_and_their_module_carry(tool: PythonTool) -> None:
    first = "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: 'int'\np = P(3)"
    assert outputs(tool, first, "import pickle\npickle.loads(pickle.dumps(p))") == ["", "P(x=3)\n"]


def test_effects_up_to_an_exception_carry(tool: PythonTool) -> None:
    shown = outputs(tool, "a = 1\nb = a / 0\nc = 3", "a, 'c' in globals()")
    assert shown[0].endswith("ZeroDivisionError: division by zero\n")
    assert shown[1] == "(1, False)\n"


def test_files_carry(tool: PythonTool) -> None:
    cells = ("with open('a.txt', 'w') as f:\n    f.write('xxx')\n1", "open('a.txt').read()")
    assert outputs(tool, *cells) == ["1\n", "'xxx'\n"]


@pytest.mark.parametrize(
    "stopped", ["a = 2\nimport os\nos._exit(0)", "a = 2\nbytearray(10**12)", "a = 2\nx = ("]
)
def test_a_stopped_cell_leaves_the_state_as_it_was(tool: PythonTool, stopped: str) -> None:
    assert outputs(tool, "a = 1", stopped, "a")[2] == "1\n"


def test_replayed_output_is_not_shown_again(tool: PythonTool) -> None:
    assert outputs(
        tool, "print('one')\nimport sys\nprint('err', file=sys.stderr)", "print('two', end='')", "3"
    ) == [
        "one\nerr\n",
        "two",
        "3\n",
    ]


def test_branches_do_not_see_each_other(tool: PythonTool) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda i: tool.run(["a = [0]"], f"a.append({i})\na"), range(8)))
    assert [result.output for result in made] == [f"[0, {i}]\n" for i in range(8)]
    assert tool.run(["a = [0]"], "a").output == "[0]\n"


def test_chance_repeats_in_every_process_and_replay(tool: PythonTool, strict: PythonTool) -> None:
    draw = (
        "import random, secrets, numpy, sympy.core.random\n"
        "x = (random.random(), numpy.random.rand(), numpy.random.default_rng().random(), secrets.randbits(64),\n"
        "     sympy.core.random.random(), hash('text'), list({'a', 'b', 'c', 'd'}))"
    )
    first = tool.run([draw], "x")
    assert (first.ended, tool.run([], draw + "\nx").output) == ("ok", first.output)
    assert strict.run([draw], "x").output == first.output  # another zygote
    assert tool.run([draw], "random.random() == x[0]").output == "False\n"


@pytest.mark.parametrize(
    "cell", ["import os\nos._exit(90)", "bytearray(10**12)", "import os\nos.abort()", "x = ("]
)
def test_a_replay_that_ends_otherwise_says_so(tool: PythonTool, cell: str) -> None:
    result = tool.run(["a = 1", cell], "a")
    assert (result.ended, result.keep) == ("replay_failed", False)
    assert result.output.startswith("Stopped: the state of the earlier code is lost")


def test_a_replaced_standard_output_carries_like_other_state(tool: PythonTool) -> None:
    cells = ("import io, sys\nsys.stdout = io.StringIO()\nprint('hidden')", "sys.stdout.getvalue()")
    assert outputs(tool, *cells) == ["", "'hidden\\n'\n"]
