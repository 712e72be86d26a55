"""A source of the user's own, named in the config."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from trace_rl.config.tasks import CustomTask

from .source import Source


def custom_source(task: CustomTask) -> Source:
    """Call the function that `task.source` names. Raises ValueError if that does not give a Source."""
    where, colon, name = task.source.rpartition(":")
    if not colon or not where or not name:
        raise ValueError(
            f"task.source: got {task.source!r}, expected `package.module:function` or `path/to/file.py:function`"
        )
    function = getattr(_module(where), name, None)
    if not callable(function):
        raise ValueError(f"task.source: {where} has no function {name!r}")
    source = function(**task.options)
    if not isinstance(source, Source):
        raise ValueError(f"task.source: {task.source} returned a {type(source).__name__}, expected a Source")
    return source


def _module(where: str) -> ModuleType:
    if not where.endswith(".py"):
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise ValueError(f"task.source: there is no module {where!r} ({error})") from error
    path = Path(where).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"task.source: there is no file {path}")
    name = f"trace_rl_custom_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module
