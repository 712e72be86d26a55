"""`trace-rl check-environment`: the check from the command line."""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trace_rl.config.load import ConfigError, load_config
from trace_rl.config.schema import Config
from trace_rl.environments.math_check import MathCheckError
from trace_rl.environments.protocol import Environment
from trace_rl.missing_library import MissingLibraryError, missing_libraries_named
from trace_rl.sandbox.limits import SandboxError
from trace_rl.sources.source import CountTokens
from trace_rl.tasks.task import Task

from .checks import check_environment
from .problem import Problem

CALL_SECONDS = 30.0
USER_MESSAGES = 10  # BFCL's limit of steps is for each message of the user; no entry has more messages


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of `trace-rl`."""
    parser = commands.add_parser(
        "check-environment",
        help="play an environment through its protocol and say what is wrong; needs no model",
    )
    parser.add_argument("--config", type=Path, required=True, help="YAML file of the run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one value")
    parser.add_argument(
        "--tasks", type=_positive, default=3, help="tasks to play, the first ones (default 3)"
    )
    parser.add_argument(
        "--actions", type=Path, help="JSON list of the actions of one episode, as a policy would write them"
    )
    parser.set_defaults(run=run)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0 if nothing serious was found, 1 if something was, 2 for wrong arguments or configuration."""
    try:
        config = load_config(arguments.config, arguments.set)
        actions = read_actions(arguments.actions) if arguments.actions else None
    except (ConfigError, ActionsError) as error:
        print(f"trace-rl check-environment: {error}", file=sys.stderr)
        return 2
    try:
        count_tokens = _token_counter(config)
        with missing_libraries_named():
            make, tasks = _environments_and_tasks(config, count_tokens, arguments.tasks)
    except (ValueError, FileNotFoundError, MathCheckError, MissingLibraryError, SandboxError) as error:
        print(f"trace-rl check-environment: {error}", file=sys.stderr)
        return 1
    try:
        return _report(config, make, tasks, actions, count_tokens)
    finally:
        faulthandler.cancel_dump_traceback_later()


class ActionsError(ValueError):
    """The file of actions cannot be used."""


def read_actions(file: Path) -> list[str]:
    """Actions from a JSON list of strings; raises ActionsError."""
    try:
        actions = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ActionsError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise ActionsError(f"{file} is not JSON: {error}") from error
    if not isinstance(actions, list) or not actions or not all(isinstance(a, str) for a in actions):
        raise ActionsError(f"{file} must hold a list of strings, one for each turn of an episode")
    return actions


def _environments_and_tasks(
    config: Config, count_tokens: CountTokens, number: int
) -> tuple[Callable[[], Environment], Sequence[Task]]:
    from trace_rl.sources.load import load_source

    source = load_source(config.task, config.environment)
    tasks = list(source.train or source.test)[:number]
    if not tasks:
        raise ValueError(f"the source has {len(source.train)} training and {len(source.test)} held-out tasks")
    return source.environments(count_tokens), tasks


def _report(
    config: Config,
    make: Callable[[], Environment],
    tasks: Sequence[Task],
    actions: list[str] | None,
    count_tokens: CountTokens,
) -> int:
    e = config.environment
    # A user's message comes whole, and the limit of steps starts anew with it.
    limit = None if e.kind == "functions" else e.max_observation_tokens
    max_turns = (e.tool_turns + 1) * (USER_MESSAGES if e.kind == "functions" else 1)
    found: dict[Problem, str] = {}
    for task in tasks:
        problems = check_environment(
            lambda: _Watched(make()),
            task,
            actions,
            count_tokens=count_tokens,
            max_turns=max_turns,
            max_observation_tokens=limit,
            seconds=CALL_SECONDS,
        )
        found |= {problem: task.id for problem in problems if problem not in found}
    groups: list[list[Problem]] = []
    for problem in found:
        if group := next((group for group in groups if group[0].like(problem)), None):
            group.append(problem)
        else:
            groups.append([problem])
    for first, *others in groups:
        more = f" (and {len(others)} like it)" if others else ""
        print(f"{'problem' if first.serious else 'remark'} (task {found[first]}): {first}{more}")
    serious = sum(first.serious for first, *_ in groups)
    print(f"{len(tasks)} tasks played, {serious} problems, {len(groups) - serious} remarks")
    return 1 if serious else 0


class _Watched:
    """An environment that must not stop the whole process: some calls (a slow regular expression) let no
    other thread run, so only the interpreter's watchdog can end them, and show where they are."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def __getattr__(self, name: str) -> Any:
        faulthandler.dump_traceback_later(2 * CALL_SECONDS, exit=True, file=sys.__stderr__ or 2)
        return getattr(self._environment, name)


def _token_counter(config: Config) -> CountTokens:
    if not (config.model.path / "tokenizer_config.json").is_file():
        return lambda text: len(text.split())
    from trace_rl.sampler import load_transcript

    return load_transcript(config.model).count
