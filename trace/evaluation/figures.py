"""Figures of an evaluation: means with bootstrap intervals. Numbers in, numbers out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .records import Key, Record

Array = NDArray[np.float64]
SUCCESS = "success"
"""The score that is the environment's reward."""


@dataclass(frozen=True)
class Estimate:
    """A mean over questions and its 95 % percentile bootstrap interval, in the score's own unit."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Figures:
    """Figures of one set, or of one source within it.

    `scores`, each in [0, 1]: "success" (the reward), the environment's own, the set's official metrics, and
    "pass@k" where there are k > 1 samples. They are means over the samples of a question (avg@k), then over
    questions; a rollout without a score (cut off, too long, ended by its tool) counts as 0. `rollouts` are means
    over rollouts: shares in [0, 1] (of all turns for "invalid"), and turns, tool calls and generated tokens.
    """

    questions: int
    samples: int
    scores: dict[str, Estimate]
    rollouts: dict[str, float]


def score_table(
    records: Mapping[Key, Record], questions: Sequence[str], samples: int, expected: Collection[str] = ()
) -> dict[str, Array]:
    """Score name -> [questions, samples]. Raises KeyError for a rollout that is not recorded.

    The scores are those that any rollout has, and the `expected` ones even if none has them. A published metric is
    left out where it is not that of all questions: it says nothing of the others.
    """
    rows = [[_scores(records[question, k]) for k in range(samples)] for question in questions]
    official = [set(records[question, 0].official) for question in questions]
    partial = set().union(*official) - set(official[0]).intersection(*official)
    found = dict.fromkeys(name for row in rows for cell in row for name in cell if name not in partial)
    names = dict.fromkeys([SUCCESS, *expected, *found])
    return {name: np.array([[cell.get(name, 0.0) for cell in row] for row in rows]) for name in names}


def per_question(table: Mapping[str, Array]) -> dict[str, Array]:
    """Score name -> [questions]: means over the samples, and "pass@k", whether any of k > 1 samples succeeded."""
    means = {name: values.mean(axis=1) for name, values in table.items()}
    samples = table[SUCCESS].shape[1]
    if samples == 1:
        return means
    return means | {f"pass@{samples}": (table[SUCCESS] > 0).any(axis=1).astype(float)}


def resampled_means(values: Mapping[str, Array], resamples: int, seed: Sequence[int]) -> dict[str, Array]:
    """Score name -> [resamples]: means of as many questions, drawn with replacement, alike for all scores."""
    matrix = np.stack(list(values.values()), axis=1)  # [questions, scores]
    count = len(matrix)
    rng = np.random.default_rng(list(seed))
    # How often each question is drawn is all that its mean depends on.
    drawn = rng.multinomial(count, np.full(count, 1 / count), size=resamples)  # [resamples, questions]
    means = drawn @ matrix / count
    return {name: means[:, column] for column, name in enumerate(values)}


def interval(means: Array) -> tuple[float, float]:
    """The middle 95 % of resampled means."""
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def figures(
    records: Mapping[Key, Record],
    questions: Sequence[str],
    samples: int,
    resamples: int,
    seed: Sequence[int],
    expected: Collection[str] = (),
) -> tuple[Figures, dict[str, Array]]:
    """Figures of the rollouts of `questions`, and the resampled means they come from."""
    values = per_question(score_table(records, questions, samples, expected))
    means = resampled_means(values, resamples, seed)
    estimates = {
        name: Estimate(float(column.mean()), *interval(means[name])) for name, column in values.items()
    }
    rollouts = [records[question, k] for question in questions for k in range(samples)]
    return Figures(len(questions), samples, estimates, _rollout_figures(rollouts)), means


def average(sets: Sequence[Figures], means: Sequence[Mapping[str, Array]]) -> dict[str, Estimate]:
    """Means over sets, every set counting once, of the scores that all have; each set is resampled on its own."""
    shared = [name for name in sets[0].scores if all(name in one.scores for one in sets)]
    return {
        name: Estimate(
            float(np.mean([one.scores[name].mean for one in sets])),
            *interval(np.mean([resampled[name] for resampled in means], axis=0)),
        )
        for name in shared
    }


def _scores(record: Record) -> dict[str, float]:
    return {SUCCESS: record.reward, **record.scores, **record.official}


def _rollout_figures(rollouts: Sequence[Record]) -> dict[str, float]:
    count, turns = len(rollouts), sum(record.turns for record in rollouts)
    return {
        "answered": sum(record.outcome == "answer" for record in rollouts) / count,
        "turns": turns / count,
        "tool_calls": sum(record.tool_calls for record in rollouts) / count,
        "generated_tokens": sum(record.generated_tokens for record in rollouts) / count,
        "invalid": sum(record.invalid_turns for record in rollouts) / max(1, turns),
        "truncated": sum(record.truncation is not None for record in rollouts) / count,
        "too_long": sum(record.outcome == "too_long" for record in rollouts) / count,
        "tool_errors": sum(bool(record.error) for record in rollouts) / count,
    }
