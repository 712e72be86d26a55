"""Paths of a configuration that do not exist here, found without reading any of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from .config.environments import SearchConfig
from .config.schema import Config
from .config.tasks import CustomTask, FileTask, QaTask


def missing_paths(config: Config) -> Iterator[str]:
    """`key: path is not there` for each path that a run of `config` would read and that does not exist."""
    for key, path in _read_paths(config):
        if not path.exists():
            yield f"{key}: {path} is not there"


def _read_paths(config: Config) -> Iterable[tuple[str, Path]]:
    task, environment, model = config.task, config.environment, config.model
    if config.cold_start is None:
        yield "model.path", model.path
    if model.chat_template:
        yield "model.chat_template", model.chat_template
    if isinstance(task, FileTask):
        yield from (("task.train", path) for path in task.train)
        yield from (("task.test", path) for path in task.test)
    # A server is searched in place of the corpus, which is then never opened.
    served = isinstance(environment, SearchConfig) and environment.retriever
    if isinstance(task, QaTask) and task.corpus and not served:
        yield "task.corpus", task.corpus
    if isinstance(task, CustomTask):
        where = task.source.rpartition(":")[0]
        if where.endswith(".py"):  # else it is a module, found by importing it
            yield "task.source", Path(where)
