"""Greedy rollouts on held-out tasks, inside a training run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trace_rl.environments.protocol import ToolOutageError
from trace_rl.phases import Phases
from trace_rl.ranks import Ranks
from trace_rl.rollout.collector import Collector
from trace_rl.rollout.tree import Node, RolloutTree
from trace_rl.tasks.task import Task


def evaluate(
    collector: Collector, tasks: Sequence[Task], ranks: Ranks, phases: Phases, *, version: int
) -> dict[str, float]:
    """One greedy rollout per task, spread over the ranks; means over all tasks.

    Keys: `reward`, `answer_rate`, `turns`, `questions`, and whatever the environment scores (`exact_match`,
    `f1`, `accuracy`). A prompt that does not fit and a rollout without an answer count as 0 everywhere. So does a
    rollout that its tool ended: `tool_errors` counts these, where there are any. Raises ToolOutageError, on every
    rank, if all rollouts ended so.
    """
    mine = list(tasks)[ranks.rank :: ranks.world]
    with phases("evaluation", len(mine)) as advance:
        greedy = replace(
            collector, limits=replace(collector.limits, temperature=0.0), on_rollout=lambda *_: advance()
        )

        def answer() -> list[Node | None]:
            trees = [greedy.plant(task) for task in mine]
            fitting = [tree for tree in trees if greedy.fits(tree)]
            greedy.bare(fitting, [1] * len(fitting), seed=0, version=version)
            return [_leaf(tree) for tree in trees]

        leaves = ranks.attempt(answer)
    everyones = [leaf for share in ranks.gather(leaves) for leaf in share]
    ended = [leaf for leaf in everyones if leaf]
    errors = [leaf.error for leaf in ended if leaf.error]
    if errors and len(errors) == len(ended):
        raise ToolOutageError(
            f"all {len(errors)} rollouts on held-out questions were ended by their tool, the first by: {errors[0]}"
        )
    table = [_figures(leaf) for leaf in everyones]
    names = dict.fromkeys(name for row in table for name in row)
    means = {name: float(np.mean([row.get(name, 0.0) for row in table])) for name in names}
    counts = {"questions": float(len(table))}
    return means | counts | ({"tool_errors": float(len(errors))} if errors else {})


def _leaf(tree: RolloutTree) -> Node | None:
    """How the one rollout ended; None where the prompt did not fit."""
    return next((tree.nodes[leaf] for leaf in tree.leaves()), None)


def _figures(leaf: Node | None) -> dict[str, float]:
    if leaf is None:
        return {"reward": 0.0, "answer_rate": 0.0, "turns": 0.0}
    return {
        **leaf.scores,
        "reward": leaf.reward or 0.0,
        "answer_rate": float(leaf.outcome == "answer"),
        "turns": float(leaf.depth),
    }
