"""What the model reads, and the limits themselves."""

from __future__ import annotations

import sys
import sysconfig

import pytest

from trace_rl.sandbox import CellResult, Limits, PythonTool


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("1 + 1", "2\n"),
        ("x = 1", ""),
        ("None", ""),
        ("print('a')\n'b'", "a\n'b'\n"),
        ("", ""),
        ("# only a comment", ""),
        ("for i in range(2): i", ""),
        ("1;2", "2\n"),
        ("import sympy\nsympy.sqrt(8)", "2*sqrt(2)\n"),
        ("import numpy as np\nnp.arange(3)", "array([0, 1, 2])\n"),
        ("len(str(2**100000))", "30103\n"),
        ("print('é∑')", "é∑\n"),
        ("import warnings\nwarnings.warn('mind')", "UserWarning: mind\n"),
        ("__name__", "'__main__'\n"),
        ("f'{annotations}' if 'annotations' in globals() else 0", "0\n"),
    ],
)
def test_shown_like_in_a_notebook(tool: PythonTool, code: str, shown: str) -> None:
    assert tool.run([], code) == CellResult(shown, "ok", keep=True)


def test_a_traceback_shows_the_cells_own_lines(tool: PythonTool) -> None:
    result = tool.run(["def f(n):\n    return 1 / n"], "print('a')\nf(\n  0)")
    assert result.output == (
        'a\nTraceback (most recent call last):\n  File "<cell 2>", line 2, in <module>\n    f(\n'
        '  File "<cell 1>", line 2, in f\n    return 1 / n\nZeroDivisionError: division by zero\n'
    )


def test_a_long_traceback_is_cut_in_the_middle(tool: PythonTool) -> None:
    output = tool.run([], "def f(): return f()\nf()").output
    assert " more ...\n" in output
    assert output.count("in f\n") == 7


def test_a_syntax_error_points_at_its_place(tool: PythonTool) -> None:
    result = tool.run(["a = 1"], "if a:\n    b = = 2")
    expected = '  File "<cell 2>", line 2\n    b = = 2\n        ^\nSyntaxError: invalid syntax\n'
    assert result == CellResult(expected, "exception", keep=False)


def test_messages_hide_where_libraries_lie(tool: PythonTool) -> None:
    result = tool.run([], "from numpy import nothing")
    assert result.output.splitlines()[-1].startswith("ImportError: cannot import name 'nothing' from 'numpy'")
    assert sys.prefix not in result.output
    assert sysconfig.get_path("stdlib") not in result.output


def test_output_ends_at_exactly_the_limit(tool: PythonTool) -> None:
    assert tool.run([], "print('é' * 3000, end='')") == CellResult("é" * 3000, "ok", keep=True)
    notice = "\nStopped: the code printed more than 3000 characters."
    assert tool.run([], "print('é' * 3001, end='')") == CellResult("é" * 3000 + notice, "output", keep=False)


def test_a_caught_memory_error_is_no_end(tool: PythonTool) -> None:
    code = "try: bytearray(10**12)\nexcept MemoryError: print('caught')"
    assert tool.run([], code) == CellResult("caught\n", "ok", keep=True)


def test_memory_below_the_limit_can_be_used(tool: PythonTool) -> None:
    assert tool.run([], "len(bytearray(250 * 2**20))").output == "262144000\n"


def test_the_standard_library_can_be_imported(tool: PythonTool) -> None:
    code = "import xml.dom.minidom, unittest, numpy.ma, sympy.plotting, mpmath.libmp, zoneinfo, asyncio\n1"
    assert tool.run([], code).output == "1\n"


@pytest.mark.parametrize(
    "name", ["cpu_seconds", "idle_seconds", "replay_seconds", "memory_mib", "file_mib", "output_chars"]
)
def test_a_limit_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be positive, got 0"):
        Limits(**{name: 0})
