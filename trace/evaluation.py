"""Greedy answers to held-out questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .environments.actions import parse_action
from .environments.scoring import exact_match, token_f1
from .phases import Phases
from .ranks import Ranks
from .rollout.collector import Collector
from .rollout.tree import RolloutTree
from .tasks.task import Task


def evaluate(
    collector: Collector, tasks: Sequence[Task], ranks: Ranks, phases: Phases, *, version: int
) -> dict[str, float]:
    """One greedy rollout per task, spread over the ranks; means over all tasks.

    Keys: `exact_match`, `f1`, `reward`, `answer_rate`, `turns`, `questions`. A prompt that does not fit
    counts as unanswered. Scores are taken from the generated answer alone.
    """
    mine = list(tasks)[ranks.rank :: ranks.world]
    with phases("evaluation", len(mine)) as advance:
        greedy = replace(collector, limits=replace(collector.limits, temperature=0.0), on_rollout=advance)

        def answer() -> list[tuple[float, float, float, float, float]]:
            trees = [greedy.plant(task) for task in mine]
            fitting = [tree for tree in trees if greedy.fits(tree)]
            greedy.bare(fitting, [1] * len(fitting), seed=0, version=version)
            return [_score(collector, tree) if len(tree.nodes) > 1 else (0.0,) * 5 for tree in trees]

        rows = ranks.attempt(answer)
    table = np.array([row for share in ranks.gather(rows) for row in share], dtype=np.float64)
    names = ("exact_match", "f1", "reward", "answer_rate", "turns")
    means = table.mean(axis=0) if len(table) else np.zeros(len(names))
    return dict(zip(names, map(float, means), strict=True)) | {"questions": float(len(table))}


def _score(collector: Collector, tree: RolloutTree) -> tuple[float, float, float, float, float]:
    leaf = tree.nodes[tree.leaves()[0]]
    sampled = [token for token, m in zip(leaf.token_ids, leaf.loss_mask, strict=True) if m]
    kind, text = parse_action(collector.transcript.text(sampled))
    answered = kind == "answer" and leaf.truncation is None
    return (
        exact_match(text, tree.task.answers) if answered else 0.0,
        token_f1(text, tree.task.answers) if answered else 0.0,
        leaf.reward or 0.0,
        float(answered),
        float(leaf.depth),
    )
