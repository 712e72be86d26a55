"""The directory of a run: one run, one config."""

from __future__ import annotations

from .checkpoint import latest_step
from .config.differences import differences, in_words
from .config.load import ConfigError, dump_config, load_config
from .config.schema import Config

# What a resumed run may do otherwise without its figures becoming another run's.
MAY_CHANGE = {"steps", "evaluation", "engine", "checkpoint_every", "keep_checkpoints", "run_dir"}


def prepare(config: Config, resume: bool) -> int:
    """Write the resolved config; returns the step of the checkpoint to resume from (0: none).

    Raises ConfigError when the directory holds a run and `resume` is not set, or a run of another config.
    """
    directory = config.run_dir
    if not resume and (directory / "metrics.jsonl").is_file():
        raise ConfigError(
            f"run_dir: {directory} already holds a run; pass --resume to go on with it, or choose another run_dir"
        )
    done = latest_step(directory / "checkpoints") if resume else 0
    if resume and (directory / "config.yaml").is_file():
        _refuse_changes(config)
    if config.steps < done:
        raise ConfigError(
            f"steps: {config.steps}, but {directory} has already done {done}; choose another run_dir"
        )
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.yaml").write_text(dump_config(config))
    return done


def _refuse_changes(config: Config) -> None:
    file = config.run_dir / "config.yaml"
    try:
        # Through the schema: keys that are new since the run was started have their defaults.
        before = load_config(file)
    except ConfigError as error:
        raise ConfigError(
            f"run_dir: {file}, which this run was started with, is no valid config any more; choose another "
            f"run_dir, or mend that file:\n{error}"
        ) from error
    old, new = (one.model_dump(mode="json", exclude=MAY_CHANGE) for one in (before, config))
    changed = list(differences(old, new))
    if changed:
        raise ConfigError(
            f"run_dir: {config.run_dir} was run with another {in_words(changed)}; choose another run_dir, or "
            "resume with the values in its config.yaml"
        )
