"""The typed configuration of an evaluation: one model, any number of question sets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from .environments import EnvironmentConfig, with_environment_kind
from .load import read_config, validated
from .scenario import check_scenario
from .schema import EngineConfig, ModelConfig
from .section import Section
from .tasks import TaskConfig

_SET_NAME = re.compile(r"[A-Za-z0-9_-]+")


class AnswerSampling(Section):
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy."""
    samples: PositiveInt = 1
    """Rollouts per question: the k of avg@k and pass@k. More than 1 needs a temperature above 0."""
    turn_tokens: PositiveInt = 500
    """Most tokens of one thought and action; a longer turn is truncated and ends its rollout."""
    context_tokens: PositiveInt = 4096
    """Most tokens of a whole rollout, prompt included."""

    @model_validator(mode="after")
    def _sensible(self) -> AnswerSampling:
        if self.samples > 1 and self.temperature == 0.0:
            raise ValueError(
                f"samples={self.samples} at temperature=0 would be the same greedy rollout {self.samples} times; "
                "set a temperature above 0, or samples=1"
            )
        if self.turn_tokens >= self.context_tokens:
            raise ValueError(
                f"turn_tokens={self.turn_tokens} leaves no room for a prompt in "
                f"context_tokens={self.context_tokens}"
            )
        return self


class EvaluationSet(Section):
    """One set of questions; the held-out ones of `task` are asked."""

    task: TaskConfig
    """Where the questions come from, as in a training run; `train` may stay empty."""
    environment: EnvironmentConfig
    """Rules and success of a rollout; its keys follow from `task.kind`."""
    questions: PositiveInt | None = None
    """The first so many questions of this set; null takes the evaluation's `questions`."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, raw: Any) -> Any:
        return with_environment_kind(raw)


class EvaluateConfig(Section):
    """A whole evaluation."""

    out: Path
    """Directory of everything the evaluation writes: records, eval.md, eval.json."""
    seed: int = 0
    """Seed of sampling and of the bootstrap."""
    model: ModelConfig
    """What is evaluated. `path` may also be a training run's directory (its final policy, else its latest
    checkpoint) or one of its checkpoints."""
    engine: EngineConfig = EngineConfig()
    """What samples the rollouts."""
    sampling: AnswerSampling = AnswerSampling()
    """How, how often and how far questions are answered."""
    questions: PositiveInt | None = None
    """The first so many questions of each set; null asks all."""
    bootstrap_resamples: PositiveInt = 1000
    """Resamples of the questions behind each 95 % interval."""
    sets: dict[str, EvaluationSet] = Field(min_length=1)
    """Question sets by name; a name is letters, digits, - and _, and also names the set's record files."""

    @model_validator(mode="after")
    def _consistent(self) -> EvaluateConfig:
        for name, one in self.sets.items():
            if not _SET_NAME.fullmatch(name):
                raise ValueError(f"sets: {name!r} is not a set's name; use letters, digits, - and _")
            try:
                check_scenario(one.task, one.environment, self.model.observations)
            except ValueError as error:
                raise ValueError(f"sets.{name}: {error}") from None
        return self

    def most_questions(self, name: str) -> int | None:
        """How many questions of a set to ask, None for all of them."""
        return self.sets[name].questions or self.questions


def load_evaluation(path: Path, overrides: Sequence[str] = ()) -> EvaluateConfig:
    """Read `path`, apply `a.b=value` overrides, validate. Raises ConfigError with every problem, one a line."""
    return validated(EvaluateConfig, read_config(path, overrides))
