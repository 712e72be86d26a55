"""Greedy rollouts on held-out tasks, inside a training run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trace_rl.phases import Phases
from trace_rl.ranks import Ranks
from trace_rl.rollout.collector import Collector
from trace_rl.rollout.tree import RolloutTree
from trace_rl.tasks.task import Task


def evaluate(
    collector: Collector, tasks: Sequence[Task], ranks: Ranks, phases: Phases, *, version: int
) -> dict[str, float]:
    """One greedy rollout per task, spread over the ranks; means over all tasks.

    Keys: `reward`, `answer_rate`, `turns`, `questions`, and whatever the environment scores (`exact_match`,
    `f1`, `accuracy`). A prompt that does not fit and a rollout without an answer count as 0 everywhere.
    """
    mine = list(tasks)[ranks.rank :: ranks.world]
    with phases("evaluation", len(mine)) as advance:
        greedy = replace(
            collector, limits=replace(collector.limits, temperature=0.0), on_rollout=lambda *_: advance()
        )

        def answer() -> list[dict[str, float]]:
            trees = [greedy.plant(task) for task in mine]
            fitting = [tree for tree in trees if greedy.fits(tree)]
            greedy.bare(fitting, [1] * len(fitting), seed=0, version=version)
            return [_figures(tree) for tree in trees]

        rows = ranks.attempt(answer)
    table = [row for share in ranks.gather(rows) for row in share]
    names = dict.fromkeys(name for row in table for name in row)
    means = {name: float(np.mean([row.get(name, 0.0) for row in table])) for name in names}
    return means | {"questions": float(len(table))}


def _figures(tree: RolloutTree) -> dict[str, float]:
    leaves = tree.leaves()
    if not leaves:
        return {"reward": 0.0, "answer_rate": 0.0, "turns": 0.0}
    leaf = tree.nodes[leaves[0]]
    return {
        **leaf.scores,
        "reward": leaf.reward or 0.0,
        "answer_rate": float(leaf.outcome == "answer"),
        "turns": float(leaf.depth),
    }
