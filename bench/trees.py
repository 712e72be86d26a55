"""Rollout trees to measure on: those of a run's step, or made up in the shape of a task's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trace_rl.rollout.tree import Kind, Node, RolloutTree
from trace_rl.tasks.task import Task

from .workloads import Workload


class Shape(NamedTuple):
    """Mean lengths in tokens (each is drawn from +-20 %) and counts per prompt."""

    prompt: int
    turns: int
    sampled: int  # of a turn
    observation: int  # after every turn but the last
    bare: int
    continuations: int  # each from a random inner turn of a bare rollout


HOTPOTQA = Shape(prompt=250, turns=3, sampled=50, observation=200, bare=3, continuations=3)
SMALL = Shape(prompt=40, turns=3, sampled=10, observation=25, bare=2, continuations=2)


def made_up_trees(shape: Shape, prompts: int, vocab_size: int, seed: int) -> list[RolloutTree]:
    """Trees of random tokens and random rewards."""
    rng = np.random.default_rng(seed)
    return [_tree(shape, str(number), vocab_size, rng) for number in range(prompts)]


def _tree(shape: Shape, name: str, vocab_size: int, rng: np.random.Generator) -> RolloutTree:
    tree = RolloutTree(Task(name, "made up", ("made up",), "bench"))

    def add(parent: int, kind: Kind, sampled: int, appended: int) -> int:
        counts = [round(count * rng.uniform(0.8, 1.2)) for count in (sampled, appended)]
        depth = tree.nodes[parent].depth + 1 if parent >= 0 else 0
        ids = rng.integers(vocab_size, size=sum(counts)).tolist()
        mask = [1] * counts[0] + [0] * counts[1]
        tree.nodes.append(Node(parent, depth, kind, ids, mask, [0.0] * len(ids)))
        return len(tree.nodes) - 1

    def rollout(node: int, kind: Kind) -> None:
        for turn in range(tree.nodes[node].depth + 1, shape.turns + 1):
            node = add(node, kind, shape.sampled, shape.observation if turn < shape.turns else 0)
        tree.nodes[node].reward = float(rng.integers(2))

    add(-1, "root", 0, shape.prompt)
    for _ in range(shape.bare):
        rollout(0, "bare")
    anchors = [node for node, _ in tree.anchors()]
    for _ in range(shape.continuations):
        rollout(int(rng.choice(anchors)), "continuation")
    tree.check()
    return tree


def step_trees(path: Path, step: int | None) -> tuple[list[RolloutTree], int]:
    """The trees of one step of a run (default: its last) and the step's number.

    `path` is the run's `trees.jsonl`; the `metrics.jsonl` beside it says where each step's trees end.

    Raises:
        ValueError: no such step, or not the trees that the metrics speak of.
        OSError: a file that cannot be read.
    """
    metrics = path.with_name("metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    ends = {int(row["step"]): int(row["trees_end"]) for row in rows if "trees_end" in row}
    if not ends:
        raise ValueError(f"{metrics} holds no finished step")
    chosen = max(ends) if step is None else step
    if chosen not in ends:
        raise ValueError(f"--step {chosen}: {metrics} holds steps {min(ends)}..{max(ends)}")
    begin = max((end for end in ends.values() if end < ends[chosen]), default=0)
    with path.open("rb") as file:
        file.seek(begin)
        lines = file.read(ends[chosen] - begin).splitlines()
    trees = [RolloutTree.from_json(line.decode()) for line in lines]
    if not trees:
        raise ValueError(f"{path}: step {chosen} has no trees")
    return trees, chosen


def workload_trees(work: Workload, vocab_size: int, seed: int) -> list[RolloutTree]:
    """A workload's forest with random tokens and rewards; the segments that it calls sampled carry the loss."""
    rng = np.random.default_rng(seed)
    inner = set(work.parents)
    trees: list[RolloutTree] = []
    number: dict[int, int] = {}  # of a segment within its tree
    for segment, (parent, length) in enumerate(zip(work.parents, work.lengths, strict=True)):
        if parent < 0:
            trees.append(RolloutTree(Task(str(segment), work.name, ("made up",), "bench")))
        nodes = trees[-1].nodes
        above = number.get(parent, -1)
        number[segment] = len(nodes)
        nodes.append(
            Node(
                above,
                nodes[above].depth + 1 if above >= 0 else 0,
                "bare" if above >= 0 else "root",
                rng.integers(vocab_size, size=length).tolist(),
                [int(work.sampled[segment])] * length,
                [0.0] * length,
                reward=None if segment in inner else float(rng.integers(2)),
            )
        )
    for tree in trees:
        tree.check()
    return trees
