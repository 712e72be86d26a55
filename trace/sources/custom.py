"""A source of the user's own, named in the config."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from trace_rl.config.explain import nearest
from trace_rl.config.tasks import CustomTask
from trace_rl.tasks.task import Task

from .source import Source


def custom_source(task: CustomTask) -> Source:
    """Call the function that `task.source` names.

    Raises ValueError if `task.options` are not its arguments, or if it does not give a Source of Tasks, and
    FileNotFoundError if there is no such file.
    """
    where, colon, name = task.source.rpartition(":")
    if not colon or not where or not name:
        raise ValueError(
            f"task.source: got {task.source!r}, expected `package.module:function` or `path/to/file.py:function`"
        )
    function = getattr(_module(where), name, None)
    if not callable(function):
        raise ValueError(f"task.source: {where} has no function {name!r}")
    _check_options(function, name, task.options)
    source = function(**task.options)
    if not isinstance(source, Source):
        raise ValueError(f"task.source: {task.source} returned a {type(source).__name__}, expected a Source")
    for split, tasks in (("train", source.train), ("test", source.test)):
        _check_tasks(split, tasks)
    return source


def _check_options(function: Callable[..., Any], name: str, options: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(function, follow_wrapped=False)  # a decorator may take other arguments
    except ValueError:  # some builtins have none
        return
    try:
        signature.bind(**options)
    except TypeError as error:
        kinds = {p.name: p.kind for p in signature.parameters.values()}
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        known = [n for n, kind in kinds.items() if kind in named]
        unknown = [option for option in options if option not in known]
        if unknown and inspect.Parameter.VAR_KEYWORD not in kinds.values():
            hint = nearest(unknown[0], known) if known else "it takes none"
            raise ValueError(f"task.options: {unknown[0]!r} is no argument of {name}(); {hint}") from error
        raise ValueError(
            f"task.options: {error} of {name}(); it takes {', '.join(known) or 'none'}"
        ) from error


def _check_tasks(split: str, tasks: Sequence[Task]) -> None:
    if not (hasattr(tasks, "__len__") and hasattr(tasks, "__getitem__")):
        raise ValueError(f"Source.{split} must be a list of Tasks, got a {type(tasks).__name__}")
    # Of a container that makes its tasks on demand the first one has to do.
    for number in range(len(tasks) if isinstance(tasks, list | tuple) else min(1, len(tasks))):
        task = tasks[number]
        if not isinstance(task, Task):
            raise ValueError(f"Source.{split}[{number}] must be a Task, got a {type(task).__name__}")
        if wrong := task.wrong_field():
            raise ValueError(f"Source.{split}[{number}], the task {task.id!r}: {wrong}")


def _module(where: str) -> ModuleType:
    if not where.endswith(".py"):
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise ValueError(f"task.source: there is no module {where!r} ({error})") from error
    path = Path(where).resolve()
    if not path.is_file():
        looked = (
            "" if Path(where).is_absolute() else f" (looked from {Path.cwd()}, where the command was started)"
        )
        raise FileNotFoundError(f"task.source: there is no file {where}{looked}")
    name = f"trace_rl_custom_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module
