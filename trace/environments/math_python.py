r"""Mathematics with a Python tool: code between tags, its output shown, the answer in ``\boxed{...}``."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from trace_rl.sandbox.limits import SandboxError
from trace_rl.tasks.task import Task

from .actions import parse_action
from .math_check import MathChecker, MathCheckError
from .neutralize import neutralize
from .protocol import Message, StepResult

DEFAULT_INSTRUCTIONS = (
    "Solve the problem below. First reason about it between <think> and </think>. To calculate, write Python "
    "code between <python> and </python>; what it prints is shown to you between <result> and </result>. "
    "Variables and imports of earlier code stay. You may run code {max_calls} times. When you know the answer, "
    "give it between <answer> and </answer>, in \\boxed{} and without explanation. For example: <answer> "
    "\\boxed{\\frac{1}{2}} </answer>."
)
INVALID = (
    "That was not a valid action. To run code, write it between <python> and </python>. To answer, write the "
    "answer between <answer> and </answer>. Do one of the two."
)
LAST_TURN = "No code can be run any more. Give your answer now between <answer> and </answer>."
NOTHING_PRINTED = "The code printed nothing."
LEFT_OUT = "... {} characters left out ..."
STOPPED = "The code was stopped."

_FENCE = "```"
_FENCED_AS = ("", "python", "python3", "py")


class CellResult(Protocol):
    """``output`` with the traceback or what stopped the code in it, ``ended`` "ok" or how else it ended.

    ``keep`` says whether the code is part of the state: it then belongs into the history of the next call.
    "replay_failed" says that the history is of no use any more: the next one starts empty.
    """

    @property
    def output(self) -> str: ...
    @property
    def ended(self) -> str: ...
    @property
    def keep(self) -> bool: ...


class CellRunner(Protocol):
    """What runs the code; shared, thread-safe."""

    def run(self, history: Sequence[str], code: str) -> CellResult:
        """Runs ``code`` where the pieces of ``history`` have run before. Raises SandboxError."""
        ...


class PythonMath:
    r"""Environment for one problem: up to ``max_calls`` turns with the tool on, then one with it off.

    A turn that is no valid action also uses up one of these turns. The answer is scored from the action it
    stands in, never from prompt or output: its last ``\boxed{...}``, or the whole of it without one. Code
    that cannot be run, or an answer that cannot be checked, for no fault of its own ends the episode.

    Args:
        tool: shared, thread-safe.
        checker: shared, thread-safe.
        max_calls: turns with the tool on, >= 0; an episode has at most ``max_calls + 1`` turns.
        max_observation_tokens: limit of one observation, tags and notices included. Of longer output the
            beginning and the end are kept, half each; if no character fits it is ``oversized``.
        count_tokens: tokens of a string in the policy's tokenizer.
        instructions: text before the problem, where ``{max_calls}`` is replaced; None for the default,
            ``""`` for the bare problem.

    Raises ValueError for values out of range, or if not even the notices fit the observation limit.
    """

    stop: tuple[str, ...] = ("</python>", "</answer>")

    def __init__(
        self,
        tool: CellRunner,
        checker: MathChecker,
        *,
        max_calls: int = 4,
        max_observation_tokens: int = 512,
        count_tokens: Callable[[str], int],
        instructions: str | None = None,
    ) -> None:
        if max_calls < 0:
            raise ValueError(f"need max_calls >= 0, got {max_calls}")
        self._tool = tool
        self._checker = checker
        self._max_calls = max_calls
        self._limit = max_observation_tokens
        self._count_tokens = count_tokens
        instructions = DEFAULT_INSTRUCTIONS if instructions is None else instructions
        self._instructions = instructions.replace("{max_calls}", str(max_calls))
        self._check_notices_fit()
        self._task: Task | None = None
        self._start()

    def _check_notices_fit(self) -> None:
        texts = (INVALID, NOTHING_PRINTED, STOPPED, LEFT_OUT.format(10**9))
        needed = max(self._count_tokens(_observation(text, last=True)) for text in texts)
        if needed > self._limit:
            raise ValueError(f"max_observation_tokens = {self._limit}, but the notices alone need {needed}")

    def _start(self) -> None:
        self._turns = self._calls = 0
        self._cells: list[str] = []
        self._done = False

    def reset(self, task: Task) -> list[Message]:
        """Starts ``task``; the prompt is one user message, instructions first so that prompts share them."""
        self._task = task
        self._start()
        prompt = f"{self._instructions}\nProblem: {task.question}" if self._instructions else task.question
        return [{"role": "user", "content": prompt}]

    def step(self, action: str) -> StepResult:
        """Answers one turn; see :class:`StepResult` for the outcomes and the protocol for errors."""
        if self._task is None:
            raise RuntimeError("step() before reset()")
        if self._done:
            raise RuntimeError("step() after the end of the episode")
        last = self._is_last()
        self._turns += 1
        kind, content = parse_action(action, tool="python", observation="result", code=True)
        if kind == "answer":
            return self._answer(content, self._task.answers)
        if last:
            return self._end(0.0, "invalid" if kind == "invalid" else "no_answer")
        if kind == "python":
            self._calls += 1
            return self._run(_program(content))
        return StepResult(_observation(INVALID, self._is_last()), False, None, "invalid")

    def _is_last(self) -> bool:
        return self._turns == self._max_calls

    def _answer(self, answer: str, golds: tuple[str, ...]) -> StepResult:
        try:
            verdict = self._checker.check(answer, golds)
        except MathCheckError as error:
            return self._fail(error)
        return self._end(float(verdict.correct), "answer", answer)

    def _end(self, reward: float, outcome: str, answer: str = "") -> StepResult:
        self._done = True
        return StepResult("", True, reward, outcome, answer=answer, scores={"accuracy": reward})

    def _fail(self, error: Exception) -> StepResult:
        self._done = True
        return StepResult("", True, 0.0, "tool_error", tool_calls=1, tool_failures=1, error=str(error))

    def _run(self, code: str) -> StepResult:
        try:
            result = self._tool.run(tuple(self._cells), code)
        except SandboxError as error:
            return self._fail(error)
        if result.ended == "replay_failed":
            self._cells = []  # the state is lost; a history that fails once fails every time
        if result.keep:
            self._cells.append(code)
        printed = result.output.encode(errors="replace").decode()  # lone surrogates stop tokenizers
        output = neutralize(printed).strip("\n") or (NOTHING_PRINTED if result.ended == "ok" else STOPPED)
        text, shown = self._shorten(output)
        failures = int(result.ended != "ok")
        return StepResult(
            text, False, None, "python", tool_calls=1, tool_failures=failures, oversized=shown == 0
        )

    def _shorten(self, output: str) -> tuple[str, int]:
        """The observation, and how many characters of ``output`` it shows."""

        def observation(shown: int) -> str:
            text = output
            if shown < len(output):
                head, tail = output[: (shown + 1) // 2], output[len(output) - shown // 2 :]
                text = "\n".join(filter(None, (head, LEFT_OUT.format(len(output) - shown), tail)))
            return _observation(text, self._is_last())

        def fits(shown: int) -> bool:
            return self._count_tokens(observation(shown)) <= self._limit

        if fits(len(output)):
            return observation(len(output)), len(output)
        shown, too_many = 0, len(output)  # the notice alone fits, see _check_notices_fit
        while too_many - shown > 1:
            middle = (shown + too_many) // 2
            shown, too_many = (middle, too_many) if fits(middle) else (shown, middle)
        return observation(shown), shown

    def snapshot(self) -> dict[str, Any]:
        """``{"turns": int, "calls": int, "cells": [str], "done": bool}``; ``cells`` is the code to replay."""
        if self._task is None:
            raise RuntimeError("snapshot() before reset()")
        return {"turns": self._turns, "calls": self._calls, "cells": list(self._cells), "done": self._done}

    def restore(self, state: dict[str, Any]) -> None:
        """See the protocol."""
        if self._task is None:
            raise RuntimeError("restore() before reset()")
        turns, calls, cells, done = (state.get(name) for name in ("turns", "calls", "cells", "done"))
        if type(turns) is not int or type(calls) is not int or type(done) is not bool:
            raise ValueError(f"not a PythonMath snapshot: {state!r}")
        if not isinstance(cells, list) or not all(isinstance(cell, str) for cell in cells):
            raise ValueError(f"not a PythonMath snapshot: {state!r}")
        if not len(cells) <= calls <= min(turns, self._max_calls) or turns > self._max_calls + done:
            raise ValueError(f"snapshot {state!r} is impossible with max_calls = {self._max_calls}")
        self._turns, self._calls, self._cells, self._done = turns, calls, list(cells), done


def _program(content: str) -> str:
    """The code without a Markdown fence and without an indentation that all lines share."""
    opening, _, fenced = content.strip().partition(
        "\n"
    )  # no regular expression: they take quadratic time here
    language = opening.removeprefix(_FENCE).rstrip(" \t\r").lower()
    if opening.startswith(_FENCE) and language in _FENCED_AS and fenced.endswith(_FENCE):
        return textwrap.dedent(fenced.removesuffix(_FENCE).rstrip(" \t").removesuffix("\n"))
    beside_tag, _, below = content.partition("\n")
    return content.strip() if beside_tag.strip() else textwrap.dedent(below).strip("\n")


def _observation(text: str, last: bool) -> str:
    shown = f"\n\n<result>{text}</result>\n\n"
    return f"{shown}{LAST_TURN}\n\n" if last else shown
