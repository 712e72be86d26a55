"""What goes together in a scenario, in training and in evaluations alike."""

from __future__ import annotations

from .environments import EnvironmentConfig, SearchConfig
from .tasks import BfclTask, TaskConfig, WorldTask


def check_scenario(task: TaskConfig, environment: EnvironmentConfig, observations: str) -> None:
    """Raise ValueError for sections that are each right and do not fit one another."""
    if isinstance(task, BfclTask) and observations != "chat":
        raise ValueError(
            "task.kind=bfcl needs model.observations=chat: tool results and the user's messages are chat "
            "turns (and model.chat_template, if the model's own template rewrites earlier turns)"
        )
    if isinstance(task, WorldTask) and isinstance(environment, SearchConfig) and environment.retriever:
        raise ValueError(
            "environment.retriever does not go with task.kind=world, whose facts no server knows: "
            "leave it out (they are searched in memory)"
        )
