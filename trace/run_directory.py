"""The directory of a run: one run, one config."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .checkpoint import LATEST, latest_step
from .config.differences import Difference, differences, in_words
from .config.load import ConfigError, dump_config, load_config
from .config.schema import Config

# What a resumed run may do otherwise without its figures becoming another run's.
MAY_CHANGE = {"steps", "evaluation", "engine", "checkpoint_every", "keep_checkpoints", "run_dir"}

# What a cold start makes its policy from; what changes it by rounding alone (attention, micro-batches) is left out.
COLD_START_READS: Any = {
    **dict.fromkeys(("seed", "task", "environment", "cold_start", "deepspeed"), True),
    "model": {"path", "dtype", "observations"},
    "sampling": {"context_tokens"},
}


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Within it no other process gets `directory`; raises ConfigError when one has it. A crash gives it back."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise ConfigError(
                f"run_dir: a process is running in {directory}; wait for it, stop it, or choose another run_dir"
            ) from error
        except OSError:
            pass  # a file system without locks
        yield


def prepare(config: Config, resume: bool) -> int:
    """Write the resolved config; returns the step of the checkpoint to resume from (0: none).

    A directory without a checkpoint and without a finished step holds no run, only what a failed start left: there
    the run begins anew, with or without `resume`. A policy that a cold start made there is used again.

    Raises ConfigError when the directory holds a run and `resume` is not set, or a run of another config; when
    its policy may come from another cold start; and when its config.yaml cannot be read.
    """
    directory = config.run_dir
    begun = _holds_a_run(directory)
    if begun and not resume:
        raise ConfigError(
            f"run_dir: {directory} already holds a run; pass --resume to go on with it, delete that directory to "
            "start anew, or choose another run_dir"
        )
    before = _last_config(directory / "config.yaml")
    if before and begun:
        _refuse_changes(before, config)
    elif before:
        _refuse_another_cold_start(before, config)
        if _changes(before, config):
            (directory / "evaluations.json").unlink(missing_ok=True)  # another policy's, perhaps
    done = latest_step(directory / "checkpoints") if begun else 0
    if config.steps < done:
        raise ConfigError(
            f"steps: {config.steps}, but {directory} has already done {done}; choose another run_dir"
        )
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.yaml").write_text(dump_config(config))
    return done


def _holds_a_run(directory: Path) -> bool:
    """Whether there is a checkpoint or a finished step: something a new start could spoil."""
    metrics = directory / "metrics.jsonl"
    stepped = metrics.is_file() and metrics.stat().st_size > 0
    return stepped or (directory / "checkpoints" / LATEST).is_file()


def _last_config(file: Path) -> Config | None:
    """What the directory was last started with; None when it never was."""
    if not file.is_file():
        return None
    try:
        # Through the schema: keys that are new since the run was started have their defaults.
        return load_config(file)
    except ConfigError as error:
        raise ConfigError(
            f"run_dir: {file}, which tells what this directory was started with, is no valid config; choose "
            f"another run_dir, or delete or mend that file:\n{error}"
        ) from error


def _changes(before: Config, now: Config) -> list[Difference]:
    old, new = (one.model_dump(mode="json", exclude=MAY_CHANGE) for one in (before, now))
    return list(differences(old, new))


def _refuse_changes(before: Config, now: Config) -> None:
    changed = _changes(before, now)
    if changed:
        raise ConfigError(
            f"run_dir: {now.run_dir} was run with another {in_words(changed)}; choose another run_dir, delete that "
            "directory to start anew, or resume with the values in its config.yaml"
        )


def _refuse_another_cold_start(before: Config, now: Config) -> None:
    path = now.model.path
    if now.cold_start is None or not (path / "config.json").is_file():
        return
    if not path.is_relative_to(now.run_dir):
        return  # made by another run, and chosen by name
    old, new = (one.model_dump(mode="json", include=COLD_START_READS) for one in (before, now))
    changed = list(differences(old, new))
    if changed:
        raise ConfigError(
            f"run_dir: {path} is there, but {now.run_dir} was last started with another {in_words(changed)}: "
            f"delete {path} to have the cold start make it anew, or choose another run_dir"
        )
