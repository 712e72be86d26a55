"""From the `task` and `environment` sections to a source."""

from __future__ import annotations

from trace_rl.config.environments import (
    CustomConfig,
    EnvironmentConfig,
    FunctionsConfig,
    PythonConfig,
    SearchConfig,
)
from trace_rl.config.tasks import BfclTask, CustomTask, MathTask, QaTask, TaskConfig, WorldTask

from .search import qa_source, world_source
from .source import Source


def load_source(task: TaskConfig, environment: EnvironmentConfig) -> Source:
    """Read or generate tasks. Raises RecordError, FileNotFoundError or ValueError with what is wrong."""
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
