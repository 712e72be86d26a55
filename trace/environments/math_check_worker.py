r"""The process in which mathematical answers are compared; :mod:`math_check` starts it and talks to it.

Run by its path, so that it imports nothing of this package. One JSON object a line: first it writes
``{"ready": true}``, or ``{"error": why}`` and ends; then it answers ``{"answer": str, "golds": [str]}`` with
``{"correct": bool, "reason": str, "retire": bool}``, where ``retire`` asks to be replaced.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import select
import signal
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

# One "$" or "\(" that is not escaped; "\\[2pt]" in a matrix is a line break with a length.
_MATH_DELIMITER = re.compile(r"(?<!\\)(?:\\\\)*(?:\$|\\[(\[])")
_LOOK_SECONDS = 1.0  # between two looks whether the parent lives
_RETIRE_ABOVE = 1 / 4  # of the memory limit; sympy's caches only ever grow
_SMALL, _RELATIVE = 1e-3, 1e-6  # numbers that small must agree to so much of their size
_COMMAND = re.compile(r"\\[A-Za-z]+")
_LABEL = re.compile(r"(?:\\(?:text|mathrm|textbf)\{\s*[A-Za-z]{2,}\s*\}|[A-Z]{2,})")


def main(memory_bytes: int, seconds: float) -> None:
    """Serves until its input ends or its parent does; SIGPROF ends a check of over ``seconds`` of CPU time."""
    parent = os.getppid()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what libraries print is no reply
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)

    def reply(value: dict[str, object]) -> None:
        print(json.dumps(value), file=replies, flush=True)

    try:
        compare("x = 1", ["2"])  # so that no check pays for the imports
    except ImportError as error:
        reply({"error": f"comparing answers needs math-verify: pip install math-verify ({error})"})
        return
    reply({"ready": True})
    while True:
        # The parent's end of the pipe may live on in other children of a parent that died.
        while not select.select([0], [], [], _LOOK_SECONDS)[0]:
            if os.getppid() != parent:
                return
        line = sys.stdin.buffer.readline()
        if not line:
            return
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # without a handler it ends C code too
        try:
            correct, reason = compare(request["answer"], request["golds"])
        except Exception as error:  # the library's own failure on hostile text: the answer is not correct
            correct, reason = False, f"not comparable ({type(error).__name__})"
        signal.setitimer(signal.ITIMER_PROF, 0)
        used = _resident_bytes()
        reply({"correct": correct, "reason": reason, "retire": used > _RETIRE_ABOVE * memory_bytes})


def _resident_bytes() -> int:
    # Not ru_maxrss: a new process inherits that from the trainer that started it.
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def compare(answer: str, golds: list[str]) -> tuple[bool, str]:
    """Whether ``answer`` equals one of ``golds`` by math-verify, and why."""
    verify = _verify()
    parsed = _parse(answer)
    if not parsed:
        return False, "no mathematics found in it"
    for gold in golds:
        expected = _parse(gold)
        if not expected or not _spelled_like(answer, gold):
            continue
        meaningful = [value for value in parsed if not _states_nothing(value, expected)]
        # Gold first: the comparison is not symmetric. "x <= 2" is as good as "(-oo, 2]".
        if verify(expected, meaningful, allow_set_relation_comp=True, timeout_seconds=None):
            return True, f"equal to {gold}"
    return False, "equal to no gold answer"


@cache
def _verify() -> Callable[..., bool]:
    """math-verify's comparison, made stricter in two places where it takes almost anything for equal."""
    from math_verify import grader

    solve, numeric_eq = grader.solve, grader.sympy_numeric_eq

    def solve_or_fail(*arguments: Any) -> Any:
        # It takes equations for equal if their solutions are: all without any would be, "0 = 1" among them.
        solutions = solve(*arguments)
        if not solutions:
            raise ValueError("no solution to compare")
        return solutions

    def numeric_eq_of_small_too(a: Any, b: Any, *precision: int) -> bool:
        # It rounds decimals to six places and takes differences under 1e-15 for none.
        return bool(numeric_eq(a, b, *precision)) and _close_if_small(a, b)

    grader.solve, grader.sympy_numeric_eq = solve_or_fail, numeric_eq_of_small_too
    verify: Callable[..., bool] = grader.verify
    return verify


def _close_if_small(gold: Any, value: Any) -> bool:
    if not (getattr(gold, "is_number", False) and getattr(value, "is_number", False)):
        return True
    exact, other = gold.doit().evalf(30), value.doit().evalf(30)
    if exact == other or not 0 < abs(exact) < _SMALL:
        return True
    return bool(abs(exact - other) <= _RELATIVE * abs(exact))


def _states_nothing(value: Any, expected: list[Any]) -> bool:
    """Whether it is a statement on no unknown ("0 = 1", "1 < 5 < 42") where a gold has unknowns or is a set."""
    from math_verify.grader import is_relation
    from sympy import Set
    from sympy.logic.boolalg import BooleanAtom

    if not isinstance(value, BooleanAtom) and not (is_relation(value) and not value.free_symbols):
        return False
    return any(isinstance(gold, Set) or getattr(gold, "free_symbols", None) for gold in expected)


def _spelled_like(answer: str, gold: str) -> bool:
    """False if the gold is a word or a row of letters that do not stand so in the answer, whatever their case.

    To math-verify bare letters are factors, which commute: it takes BAC for ABC.
    """
    if not _LABEL.fullmatch(gold.strip().strip("$")):
        return True
    return _letters(gold) in _letters(answer)


def _letters(text: str) -> str:
    return "".join(filter(str.isalpha, _COMMAND.sub("", text))).casefold()


def _parse(text: str) -> list[object]:
    r"""LaTeX only: the library's reader of plain text would take the 6 out of ``3\sqrt{3} - 6``."""
    from math_verify import LatexExtractionConfig, parse

    text = text.strip().removesuffix(".").strip()
    if not _MATH_DELIMITER.search(text):
        text = rf"\boxed{{{text}}}"
    config = LatexExtractionConfig(boxed_match_priority=0)
    return list(parse(text, [config], parsing_timeout=None))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
