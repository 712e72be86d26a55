"""Multi-turn function calling as in BFCL v4: a simulated user, simulated APIs, the official verdict."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Literal, TypeGuard

from trace_rl.tasks.bfcl import Entry, bfcl_entry
from trace_rl.tasks.task import Task

from .bfcl.official import official_score
from .bfcl.simulators import Simulators
from .bfcl.wheel import revelation
from .calls import parse_call, render_call
from .neutralize import neutralize
from .protocol import Message, StepResult
from .tool_formats import MAX_CALLS_PER_ACTION, Hermes, PythonCalls, ToolFormat

OVERSIZED = "The result is too long to show."
_CHARACTERS_PER_TOKEN = 16  # more than any text has; what is beyond is not even tokenised

_FORMATS: dict[str, ToolFormat] = {"hermes": Hermes(), "python": PythonCalls()}


class FunctionCalling:
    """Environment for one BFCL multi-turn entry, by the rules of the benchmark's handlers.

    The policy answers a user's message in steps: a step with calls is executed and answered with the results,
    a step without calls (a message, or text that cannot be decoded) ends the user's turn. The next message of
    the user follows as the observation; in ``miss_func`` one of them hands over functions held back so far.
    After the last turn the official checker decides: reward 1.0 or 0.0, ``scores["accuracy"]`` alike.

    Outcomes: ``"call"``; ``"message"`` (turn ended by text); ``"invalid"`` (turn ended by a malformed call);
    ``"answer"`` (the last turn ended by text, so the episode was scored); ``"step_limit"`` (one more step with
    calls than allowed in a turn: the episode ends there, which fails the entry unless it was the last turn, as
    in the benchmark's runner). Where a malformed call ends the last turn, the episode is scored as well, with
    outcome ``"invalid"``.

    Observations are meant as user messages (``model.observations: chat``).

    Args:
        tool_format: ``"hermes"`` or ``"python"``, see :mod:`.tool_formats`.
        max_steps_per_turn: steps with calls per user turn, >= 1; the benchmark allows 20.
        max_observation_tokens: limit of the results of one step. The longest results are replaced whole by a
            notice until they fit (``oversized``); all together are taken to be too long at more than 16
            characters per token. Messages of the user are never cut.
        count_tokens: tokens of a string in the policy's tokenizer.
        instructions: added to the system message; None or ``""`` for the benchmark's prompt as it is.

    Raises ValueError for values out of range.
    """

    stop: tuple[str, ...] = ()

    def __init__(
        self,
        *,
        tool_format: Literal["hermes", "python"] = "hermes",
        max_steps_per_turn: int = 20,
        max_observation_tokens: int = 16384,
        count_tokens: Callable[[str], int],
        instructions: str | None = None,
    ) -> None:
        if tool_format not in _FORMATS:
            raise ValueError(f"unknown tool format {tool_format!r}: choose 'hermes' or 'python'")
        if max_steps_per_turn < 1:
            raise ValueError(f"max_steps_per_turn must be >= 1, got {max_steps_per_turn}")
        self._format = _FORMATS[tool_format]
        self._max_steps = max_steps_per_turn
        self._limit = max_observation_tokens
        self._count_tokens = count_tokens
        self._instructions = instructions or ""
        needed = count_tokens(self._format.results(["f()"], [OVERSIZED]))
        if needed > max_observation_tokens:
            raise ValueError(
                f"max_observation_tokens = {max_observation_tokens}, but the notice alone needs {needed}"
            )
        self._entry: Entry | None = None
        self._simulators: Simulators | None = None
        self._turns: list[list[list[str]]] = []  # calls of each step of each user turn so far
        self._done = False

    def reset(self, task: Task) -> list[Message]:
        """Starts the entry ``task.id``; errors as in :func:`~trace_rl.tasks.bfcl.bfcl_entry`."""
        self._start(bfcl_entry(task.id))
        entry = self._running()[0]
        system = self._format.system(entry.functions, self._instructions)
        return [{"role": "system", "content": system}, {"role": "user", "content": self._question(0)}]

    def step(self, action: str) -> StepResult:
        """Answers one step; see the class for outcomes and the protocol for errors."""
        _, simulators = self._running()
        if self._done:
            raise RuntimeError("step() after the end of the episode")
        parsed = self._format.parse(action)
        if not parsed.calls:
            return self._end_turn(malformed=parsed.malformed)
        # Rendered first: simulators may keep and change arguments.
        calls = [render_call(call) for call in parsed.calls]
        if len(self._turns[-1]) == self._max_steps:
            self._turns[-1].append(calls)
            return self._end("step_limit")
        results = [simulators.call(call) for call in parsed.calls]
        self._turns[-1].append(calls)
        shown = [neutralize(call) for call in calls]  # the `python` format repeats them beside their results
        observation, oversized = self._observation(shown, [result.text for result in results])
        return StepResult(
            observation,
            False,
            None,
            "call",
            tool_calls=len(calls),
            tool_failures=sum(result.failed for result in results),
            oversized=oversized,
        )

    def snapshot(self) -> dict[str, Any]:
        """``{"turns": [[[call]]], "done": bool}``: what was called; simulators are rebuilt by calling again."""
        self._running()
        return {"turns": [[list(step) for step in turn] for turn in self._turns], "done": self._done}

    def restore(self, state: dict[str, Any]) -> None:
        """See the protocol."""
        entry, _ = self._running()
        turns, done = state.get("turns"), state.get("done")
        if type(done) is not bool or not _is_turns(turns):
            raise ValueError(f"not a FunctionCalling snapshot: {state!r}")
        steps = max(map(len, turns), default=0)
        calls_per_step = max((len(step) for turn in turns for step in turn), default=0)
        possible = steps <= self._max_steps + done and calls_per_step <= MAX_CALLS_PER_ACTION
        if not possible or not 1 <= len(turns) <= len(entry.questions):
            raise ValueError(f"snapshot is impossible for {entry.id} with {self._max_steps} steps per turn")
        calls = [parse_call(text) for turn in turns for step in turn for text in step]
        self._start(entry)
        for call in calls:
            self._running()[1].call(call)
        self._turns = [[list(step) for step in turn] for turn in turns]
        self._done = done

    def _start(self, entry: Entry) -> None:
        self._entry, self._simulators = entry, Simulators(entry)
        self._turns, self._done = [[]], False

    def _running(self) -> tuple[Entry, Simulators]:
        if self._entry is None or self._simulators is None:
            raise RuntimeError("the environment was used before reset()")
        return self._entry, self._simulators

    def _question(self, turn: int) -> str:
        entry = self._running()[0]
        revealed = entry.revealed.get(turn)
        return entry.questions[turn] if revealed is None else revelation(list(revealed))

    def _end_turn(self, malformed: bool) -> StepResult:
        entry = self._running()[0]
        if len(self._turns) < len(entry.questions):
            self._turns.append([])
            question = self._question(len(self._turns) - 1)
            return StepResult(question, False, None, "invalid" if malformed else "message")
        return self._end("invalid" if malformed else "answer")

    def _end(self, outcome: str) -> StepResult:
        """The official verdict: turns that were never reached fail the entry, whatever was called before."""
        entry = self._running()[0]
        self._done = True
        solved, _ = official_score(entry, self._turns)
        scores = {"accuracy": float(solved)}
        return StepResult("", True, float(solved), outcome, answer=json.dumps(self._turns), scores=scores)

    def _observation(self, calls: Sequence[str], texts: list[str]) -> tuple[str, bool]:
        """Shows as many of the shortest results as fit: their number is found by bisection."""
        by_size = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        sizes = list(accumulate(len(texts[i]) for i in by_size))
        most = bisect_right(sizes, self._limit * _CHARACTERS_PER_TOKEN)
        least = sum(len(text) <= len(OVERSIZED) for text in texts)  # a notice would take more room
        shown = {i: neutralize(texts[i]) for i in by_size[:most]}

        def rendered(kept: int) -> str | None:
            whole = set(by_size[:kept])
            lines = [shown[i] if i in whole else OVERSIZED for i in range(len(texts))]
            text = self._format.results(calls, lines)
            return text if self._count_tokens(text) <= self._limit else None

        if least <= most and (text := rendered(most)) is not None:
            return text, most < len(texts)
        if least >= most or (best := rendered(least)) is None:  # one notice stands for all
            return self._format.results(["..."], [OVERSIZED]), True
        while most - least > 1:
            middle = (least + most) // 2
            if (text := rendered(middle)) is None:
                most = middle
            else:
                least, best = middle, text
        return best, True


def _is_turns(value: Any) -> TypeGuard[list[list[list[str]]]]:
    return isinstance(value, list) and all(
        isinstance(turn, list)
        and all(
            isinstance(step, list) and step and all(isinstance(call, str) for call in step) for step in turn
        )
        for turn in value
    )
