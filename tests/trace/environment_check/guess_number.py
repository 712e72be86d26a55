"""An environment without a mistake, to make mistakes in."""

from __future__ import annotations

import re
from typing import Any

from trace_rl.environments.protocol import Message, StepResult
from trace_rl.tasks.task import Task

TURNS = 5
TASK = Task("guess-7", "a number from 1 to 9", ("7",), "guess", extra={"low": 1, "bounds": [1, 9]})
ACTIONS = ["<guess> 3 </guess>", "hm", "<guess> 9 </guess>", "<guess> 7 </guess>"]


class GuessNumber:
    """Guess a number: every guess is answered by "higher" or "lower", and by how many there were."""

    stop: Any = ("</guess>",)

    def __init__(self) -> None:
        self.task: Task | None = None
        self.guesses: list[str] = []
        self.done = False

    def reset(self, task: Task) -> Any:
        self.task, self.guesses, self.done = task, [], False
        return self.messages(task)

    def messages(self, task: Task) -> list[Message]:
        return [{"role": "system", "content": "Guess."}, {"role": "user", "content": task.question}]

    def step(self, action: str) -> Any:
        if self.task is None or self.done:
            raise RuntimeError("step() outside an episode")
        found = re.fullmatch(r"<guess> ([0-9]) </guess>", action)
        self.guesses.append(found[1] if found else "?")
        if found and found[1] in self.task.answers:
            self.done = True
            return self.end(StepResult("", True, 1.0, "answer", answer=found[1], scores={"accuracy": 1.0}))
        if len(self.guesses) >= TURNS:
            self.done = True
            return self.end(StepResult("", True, 0.0, "no_answer", scores={"accuracy": 0.0}))
        if not found:
            return self.hint("what?", "invalid", 0)
        return self.hint("higher" if found[1] < self.task.answers[0] else "lower", "guess", 1)

    def hint(self, word: str, outcome: str, tool_calls: int) -> Any:
        said = f"{word}, after {' '.join(self.guesses)}"
        return StepResult(said, False, None, outcome, tool_calls=tool_calls)

    def end(self, result: StepResult) -> Any:
        return result

    def snapshot(self) -> Any:
        return {"guesses": list(self.guesses), "done": self.done}

    def restore(self, state: Any) -> None:
        guesses, done = state.get("guesses"), state.get("done")
        if not isinstance(guesses, list) or type(done) is not bool or len(guesses) > TURNS:
            raise ValueError(f"not a state of GuessNumber: {state!r}")
        self.guesses, self.done = list(guesses), done
