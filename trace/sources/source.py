"""What a run needs of the outside: tasks to train and test on, and environments to play them in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trace_rl.environments.protocol import Environment
from trace_rl.tasks.task import Task
from trace_rl.tasks.world import World

CountTokens = Callable[[str], int]
"""Tokens of a text under the policy's tokenizer; safe to call from any thread."""


@dataclass(frozen=True)
class Source:
    """Tasks and the environments they are played in.

    Attributes:
        train: tasks to train on; may be empty for an evaluation.
        test: held-out tasks, none of them in `train`.
        environments: given the tokenizer's count, a maker of environments: one for each rollout, all sharing
            what is costly (an index, a sandbox). Raises ValueError for settings that cannot work.
        skipped: which records could not be read, and why.
        world: the synthetic world, if that is where the tasks come from.
    """

    train: Sequence[Task]
    test: Sequence[Task]
    environments: Callable[[CountTokens], Callable[[], Environment]]
    skipped: Sequence[str] = ()
    world: World | None = None
