"""What a rollout needs from an environment: four methods, plain strings in, plain data out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from trace_rl.tasks.task import Task

Message = dict[str, str]
"""One chat message: ``{"role": ..., "content": ...}``."""


@dataclass(frozen=True)
class StepResult:
    """What the environment answers to one action.

    Attributes:
        observation: text to append after the action; ``""`` when ``done``.
        done: the episode is over.
        reward: 0.0 or 1.0, set exactly when ``done``.
        outcome: one word for the turn. Metrics know ``"answer"`` (the policy ended the episode itself),
            ``"invalid"`` (malformed action), ``"no_answer"`` (the last turn did something well-formed other
            than answering) and ``"tool_error"``; other words (``"search"``, ``"python"``) are free.
        tool_calls: tool calls made by this action.
        tool_failures: of these, calls that the tool could not carry out or answered with an error.
        oversized: the tool's result was replaced by a notice because no part of it fitted.
        answer: what was scored, when ``done``; ``""`` if there was nothing to score.
        scores: named figures of the finished episode, each in [0, 1]; evaluations average them.
        error: why a tool, not the policy, ended the episode; with it go ``done``, reward 0 and the outcome
            ``"tool_error"``. Such a rollout teaches nothing: it is counted, and then left out of its tree.
    """

    observation: str
    done: bool
    reward: float | None
    outcome: str
    tool_calls: int = 0
    tool_failures: int = 0
    oversized: bool = False
    answer: str = ""
    scores: dict[str, float] = field(default_factory=dict)
    error: str = ""

    def __post_init__(self) -> None:
        if self.done != (self.reward is not None):
            raise ValueError(f"reward must be set exactly when done, got {self.reward} with done={self.done}")
        if self.done and self.observation:
            raise ValueError("a finished episode has no observation")
        if bool(self.error) != (self.outcome == "tool_error") or (self.error and not self.done):
            raise ValueError(
                f"an error ends the episode with the outcome 'tool_error', got {self.outcome!r} with "
                f"done={self.done} and the error {self.error!r}"
            )


class ToolOutageError(RuntimeError):
    """The tool is down: too many rollouts were ended by its failures for the others to be trusted."""


class Environment(Protocol):
    """One instance serves one rollout and is cheap to make.

    The caller ends truncated rollouts (generation or context limit) itself, with reward 0, without
    calling :meth:`step`: a cut-off action is never acted upon.
    """

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a turn; the action passed to :meth:`step` includes the one that ended it."""
        ...

    def reset(self, task: Task) -> list[Message]:
        """Starts an episode and returns the prompt."""
        ...

    def step(self, action: str) -> StepResult:
        """Acts on the text generated in this turn, and on nothing else.

        Raises RuntimeError before :meth:`reset` and after the episode's end.
        """
        ...

    def snapshot(self) -> dict[str, Any]:
        """The episode's state as JSON-able data, enough to continue it on another instance."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from a snapshot of the same task; valid after ``reset(task)`` on any instance.

        Raises ValueError if the state is not one this environment could have written.
        """
        ...
