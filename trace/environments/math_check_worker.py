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

# One "$" or "\(" that is not escaped; "\\[2pt]" in a matrix is a line break with a length.
_MATH_DELIMITER = re.compile(r"(?<!\\)(?:\\\\)*(?:\$|\\[(\[])")
_LOOK_SECONDS = 1.0  # between two looks whether the parent lives
_RETIRE_ABOVE = 1 / 4  # of the memory limit; sympy's caches only ever grow


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
    from math_verify import verify

    parsed = _parse(answer)
    if not parsed:
        return False, "no mathematics found in it"
    for gold in golds:
        expected = _parse(gold)
        # Gold first: the comparison is not symmetric. "x <= 2" is as good as "(-oo, 2]".
        if expected and verify(expected, parsed, allow_set_relation_comp=True, timeout_seconds=None):
            return True, f"equal to {gold}"
    return False, "equal to no gold answer"


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
