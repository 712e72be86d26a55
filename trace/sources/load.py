"""From the `task` and `environment` sections to a source and its environments."""

from __future__ import annotations

from collections.abc import Callable

from trace_rl.config.environments import (
    CustomConfig,
    EnvironmentConfig,
    FunctionsConfig,
    PythonConfig,
    SearchConfig,
)
from trace_rl.config.load import ConfigError
from trace_rl.config.tasks import BfclTask, CustomTask, MathTask, QaTask, TaskConfig, WorldTask
from trace_rl.environments.protocol import Environment
from trace_rl.tasks.records import RecordError

from .search import qa_source, world_source
from .source import CountTokens, Source


def load_source(task: TaskConfig, environment: EnvironmentConfig, within: str = "") -> Source:
    """Read or generate tasks.

    Raises RecordError or FileNotFoundError for files that cannot be used, and ConfigError for settings; it names
    them from `within` on ("sets.math.").
    """
    try:
        return _source(task, environment)
    except RecordError:
        raise
    except ValueError as error:
        raise ConfigError(f"{within}task: {error}") from error


def make_environments(
    source: Source, count_tokens: CountTokens, within: str = ""
) -> Callable[[], Environment]:
    """A maker of environments that has made one already; raises ConfigError for settings that cannot work."""
    try:
        make = source.environments(count_tokens)
        make()
    except ValueError as error:
        raise ConfigError(f"{within}environment: {error}") from error
    return make


def _source(task: TaskConfig, environment: EnvironmentConfig) -> Source:
    # What only one scenario needs (sympy, BFCL's wheel) is imported where that scenario is played.
    match task, environment:
        case WorldTask(), SearchConfig():
            return world_source(task, environment)
        case QaTask(), SearchConfig():
            return qa_source(task, environment)
        case MathTask(), PythonConfig():
            from .mathematics import math_source

            return math_source(task, environment)
        case BfclTask(), FunctionsConfig():
            from .functions import function_source

            return function_source(task, environment)
        case CustomTask(), CustomConfig():
            from .custom import custom_source

            return custom_source(task)
    raise ValueError(f"environment.kind={environment.kind} does not go with task.kind={task.kind}")
