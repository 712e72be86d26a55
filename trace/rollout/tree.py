"""The rollout tree: the one type that flows from sampling to allocation, advantages and packing.

A tree holds one prompt and every rollout sampled from it. A node is one ReAct turn (thought, action,
observation) and stores only the tokens it adds, so a prefix shared by many rollouts exists once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..tasks.task import Task

Kind = Literal["root", "bare", "continuation"]
Truncation = Literal["generation_limit", "context_limit"]


@dataclass
class Node:
    """One turn: the tokens it adds to its parent's history, and what happened in it.

    `token_ids`, `loss_mask` and `logprobs` have one entry per token: the ids exactly as sampled or
    appended, 1 where the token was sampled from the policy (0: prompt or observation), and the
    sampler's log-prob in nats (0.0 where `loss_mask` is 0).
    """

    parent: int  # index into the tree's nodes; -1 for the root
    depth: int  # turns taken so far; 0 for the root
    kind: Kind
    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    state: dict[str, Any] | None = None  # environment snapshot after this turn; None once the episode ended
    reward: float | None = None  # set exactly at leaves
    truncation: Truncation | None = None
    outcome: str = ""  # the environment's word for the turn: search, answer, invalid, ...
    answer: str = ""  # at a leaf: what was scored
    scores: dict[str, float] = field(default_factory=dict)  # at a leaf: the environment's figures
    error: str = ""  # at a leaf: why a tool, not the policy, ended the rollout
    tool_calls: int = 0
    tool_failures: int = 0
    oversized_results: int = 0
    prompt_tokens: int = 0  # prompt length of the turn's generation request
    cached_tokens: int = 0  # of these, served from the engine's prefix cache
    weight_version: int = 0  # policy weights that sampled the turn


@dataclass
class RolloutTree:
    """A prompt (node 0) and its rollouts; parents come before their children."""

    task: Task
    nodes: list[Node] = field(default_factory=list)

    def children(self) -> list[list[int]]:
        """Child indices of every node, in order."""
        children: list[list[int]] = [[] for _ in self.nodes]
        for index, node in enumerate(self.nodes[1:], start=1):
            children[node.parent].append(index)
        return children

    def dfs_order(self) -> list[int]:
        """Node indices in depth-first pre-order, children in order of their index."""
        children, order, stack = self.children(), [], [0]
        while stack:
            index = stack.pop()
            order.append(index)
            stack.extend(reversed(children[index]))
        return order

    def leaves(self) -> list[int]:
        """Indices of the nodes that ended a rollout."""
        return [i for i, node in enumerate(self.nodes) if node.reward is not None]

    def path(self, index: int) -> list[int]:
        """Node indices from the root to `index`, both included."""
        path = []
        while index >= 0:
            path.append(index)
            index = self.nodes[index].parent
        return path[::-1]

    def prefix_ids(self, index: int) -> list[int]:
        """Token ids of the whole history up to and including node `index`."""
        return [token for i in self.path(index) for token in self.nodes[i].token_ids]

    def rewards(self) -> list[float]:
        """Rewards of the leaves that the policy, not a failing tool, brought to their end, in order."""
        return [n.reward for n in self.nodes if n.reward is not None and not n.error]

    def bare_rewards(self) -> list[float]:
        """Rewards of the bare rollouts alone, which no look at an outcome has selected."""
        return [n.reward for n in self.nodes if n.kind == "bare" and n.reward is not None and not n.error]

    def anchors(self) -> list[tuple[int, float]]:
        """Stage-2 candidates `(node, observed reward)`: the non-leaf turns of bare rollouts (section 3).

        Before any continuation is sampled each such turn has one bare leaf below it. Rollouts that a tool's
        failure ended show no outcome to flip, and give none.
        """
        reward_below: dict[int, float] = {}
        for leaf in self.leaves():
            if self.nodes[leaf].kind == "bare" and not self.nodes[leaf].error:
                for index in self.path(leaf)[1:-1]:
                    reward_below[index] = self.nodes[leaf].reward or 0.0
        return sorted(reward_below.items())

    def is_mixed(self) -> bool:
        """Whether the tree holds both a success and a failure: what contrastive learning needs."""
        return len(set(self.rewards())) > 1

    def without_errors(self) -> RolloutTree:
        """The tree without the rollouts that a tool's failure ended, and the turns only they have."""
        if not any(node.error for node in self.nodes):
            return self
        kept = sorted(
            {0} | {i for leaf in self.leaves() if not self.nodes[leaf].error for i in self.path(leaf)}
        )
        place = {old: new for new, old in enumerate(kept)} | {-1: -1}
        nodes = [replace(self.nodes[old], parent=place[self.nodes[old].parent]) for old in kept]
        return RolloutTree(self.task, nodes)

    def check(self) -> None:
        """Raise ValueError when the tree breaks its invariants, naming the node."""
        if not self.nodes:
            raise ValueError(f"tree of task {self.task.id!r}: not even a root")
        has_child = {node.parent for node in self.nodes}
        for index, node in enumerate(self.nodes):
            where = f"tree of task {self.task.id!r}, node {index}"
            if (node.parent < 0) != (index == 0) or node.parent >= index:
                raise ValueError(f"{where}: parent {node.parent} must come before it (root first, -1)")
            expected_depth = self.nodes[node.parent].depth + 1 if index else 0
            if node.depth != expected_depth:
                raise ValueError(f"{where}: depth {node.depth}, expected {expected_depth}")
            if not len(node.token_ids) == len(node.loss_mask) == len(node.logprobs):
                raise ValueError(f"{where}: token_ids, loss_mask and logprobs differ in length")
            if index in has_child and node.reward is not None:
                raise ValueError(f"{where}: an inner node carries a reward")
            if index and index not in has_child and node.reward is None:
                raise ValueError(f"{where}: a leaf without a reward")

    def to_json(self) -> str:
        """The tree as one JSON line (without the newline)."""
        return json.dumps(
            {"task": self.task.to_json(), "nodes": [asdict(n) for n in self.nodes]}, separators=(",", ":")
        )

    @classmethod
    def from_json(cls, line: str) -> RolloutTree:
        """Read back what `to_json` wrote; raises ValueError on anything else."""
        try:
            record = json.loads(line)
            tree = cls(Task.from_json(record["task"]), [Node(**node) for node in record["nodes"]])
            tree.check()
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"not a rollout tree: {error} in {line[:80]!r}") from error
        return tree


def read_trees(path: Path) -> Iterator[RolloutTree]:
    """Trees of a `trees.jsonl`, in order; a bad line is named by its number."""
    with path.open() as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield RolloutTree.from_json(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
