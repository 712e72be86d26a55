"""Mathematical problems from files, solved with a Python tool."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from trace_rl.config.environments import PythonConfig
from trace_rl.config.tasks import MathTask
from trace_rl.environments.math_check import MathChecker
from trace_rl.environments.math_python import PythonMath
from trace_rl.environments.protocol import Environment
from trace_rl.sandbox.limits import Limits
from trace_rl.sandbox.tool import PythonTool
from trace_rl.tasks.math_sets import read_math

from .files import read_splits
from .source import CountTokens, Source


def call_limits(e: PythonConfig) -> Limits:
    """Limits of one call: a call of an episode repeats at most all calls before it."""
    return Limits(
        cpu_seconds=math.ceil(e.call_seconds),
        idle_seconds=e.call_seconds,
        replay_seconds=e.max_calls * e.call_seconds,
        memory_mib=e.memory_mib,
    )


@functools.cache
def tried_tools(limits: Limits, check_seconds: float) -> tuple[PythonTool, MathChecker]:
    """The sandbox and the checker of this process for these limits, which have each done one trivial task.

    Raises SandboxError or MathCheckError, and is not cached, if one cannot work here.
    """
    checker = MathChecker(seconds=check_seconds)
    tool = PythonTool(limits)
    checker.probe()
    tool.probe()
    return tool, checker


def math_source(task: MathTask, e: PythonConfig) -> Source:
    """Problems from files. All environments of a process with equal limits share a sandbox and a checker.

    ``environments`` tries both and raises SandboxError or MathCheckError if one cannot work here.
    """
    read = read_splits(task, read_math)

    def environments(count_tokens: CountTokens) -> Callable[[], Environment]:
        # What cannot work here is to be known now, not from the first rollouts.
        tool, checker = tried_tools(call_limits(e), e.check_seconds)

        def make() -> Environment:
            return PythonMath(
                tool,
                checker,
                max_calls=e.max_calls,
                max_observation_tokens=e.max_observation_tokens,
                count_tokens=count_tokens,
                instructions=e.instructions,
            )

        return make

    return Source(read.train, read.test, environments, read.skipped)
