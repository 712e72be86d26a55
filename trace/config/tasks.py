"""Where a run's tasks come from: one section for each `task.kind`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from .section import Section


class WorldTask(Section):
    """The synthetic multi-hop world."""

    kind: Literal["world"]
    """Selects the synthetic world."""
    seed: int = 0
    """Seed of the world's facts and questions."""
    entities: PositiveInt = 120
    """Number of people, places and works together."""
    min_hops: Annotated[int, Field(ge=1, le=4)] = 2
    """Fewest facts a question needs."""
    max_hops: Annotated[int, Field(ge=1, le=4)] = 3
    """Most facts a question needs."""
    train_questions: PositiveInt = 2000
    """Training questions, drawn from all that the facts allow."""
    test_questions: PositiveInt = 200
    """Held-out questions, none of them among the training questions."""

    @model_validator(mode="after")
    def _ordered(self) -> WorldTask:
        if self.min_hops > self.max_hops:
            raise ValueError(f"min_hops={self.min_hops} exceeds max_hops={self.max_hops}")
        return self


class FileTask(Section):
    """What all tasks read from record files have in common."""

    train: list[Path] = Field(default=[])
    """Files with training records (JSON, JSONL, CSV or parquet); an evaluation needs none."""
    test: list[Path] = Field(default=[])
    """Files with held-out records, for evaluation only."""
    on_malformed: Literal["skip", "fail"] = "skip"
    """A record that cannot be read is skipped and counted, or ends the run."""
    limit: PositiveInt | None = None
    """Use only the first so many records of each split."""

    @model_validator(mode="after")
    def _some_file(self) -> FileTask:
        if not self.train and not self.test:
            raise ValueError("give at least one file in `train` or `test`")
        return self


class QaTask(FileTask):
    """Questions to answer by searching, from files in their official layout."""

    kind: Literal["hotpotqa", "2wikimultihopqa", "musique", "bamboogle", "search_r1"]
    """Record layout of the files; `search_r1` is the row layout of Search-R1, ARPO and verl."""
    corpus: Path | None = None
    """What to search: JSONL of `{"id", "contents"}`, held in memory, or a directory made by `trace-rl index`; by
    default the records' own paragraphs. `environment.retriever` replaces it by a server."""
    ability: str | None = None
    """Use only rows whose `ability` is this (`search_r1` only): ARPO's and verl's files mix mathematics and
    questions."""

    @model_validator(mode="after")
    def _has_abilities(self) -> QaTask:
        if self.ability is not None and self.kind != "search_r1":
            raise ValueError(
                f"ability={self.ability}: only rows of kind=search_r1 have one, not {self.kind}'s"
            )
        return self


class MathTask(FileTask):
    """Mathematical problems with checkable answers."""

    kind: Literal["math"]
    """Selects the readers of DeepScaleR, AIME, AMC, MATH-500 and verl-style rows."""


BfclSubset = Literal["base", "miss_func", "miss_param", "long_context"]


class BfclTask(Section):
    """Berkeley Function Calling Leaderboard v4, multi-turn, from the `bfcl-eval` wheel."""

    kind: Literal["bfcl"]
    """Selects BFCL."""
    subsets: list[BfclSubset] = Field(
        default=["base", "miss_func", "miss_param", "long_context"], min_length=1
    )
    """Subsets to draw entries from."""
    train_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.8
    """Share of the entries to train on; the others are held out."""
    seed: NonNegativeInt = 0
    """Seed of the split."""
    split_file: Path | None = None
    """JSON file of the split: written if it is absent, obeyed if it is there."""
    limit: PositiveInt | None = None
    """Use only the first so many entries of each split."""


class CustomTask(Section):
    """One's own tasks and environment (docs/environments.md)."""

    kind: Literal["custom"]
    """Selects a function of yours."""
    source: str
    """`package.module:function` or `path/to/file.py:function`, which returns a `trace_rl.sources.Source`."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments of that function."""


TaskConfig = Annotated[WorldTask | QaTask | MathTask | BfclTask | CustomTask, Field(discriminator="kind")]
