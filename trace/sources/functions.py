"""Function calling on BFCL's multi-turn entries."""

from __future__ import annotations

from collections.abc import Callable

from trace_rl.config.environments import FunctionsConfig
from trace_rl.config.tasks import BfclTask
from trace_rl.environments.function_calling import FunctionCalling
from trace_rl.environments.protocol import Environment
from trace_rl.tasks.bfcl import load_bfcl

from .source import CountTokens, Source


def function_source(task: BfclTask, e: FunctionsConfig) -> Source:
    """Entries of the chosen subsets, split by seed."""
    train, test = load_bfcl(
        task.subsets, train_share=task.train_share, seed=task.seed, split_file=task.split_file
    )

    def environments(count_tokens: CountTokens) -> Callable[[], Environment]:
        def make() -> Environment:
            return FunctionCalling(
                tool_format=e.tool_format,
                max_steps_per_turn=e.max_steps,
                max_observation_tokens=e.max_observation_tokens,
                count_tokens=count_tokens,
                instructions=e.instructions,
            )

        return make

    return Source(train[: task.limit], test[: task.limit], environments)
