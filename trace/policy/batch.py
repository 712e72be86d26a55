"""Rollout trees into packed batches: what one forward and backward pass of one rank works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trace_kernels.advantages import TreeAdvantages, advantages, leaf_weights
from trace_kernels.forest import path_sums
from trace_kernels.layout import TreeLayout
from trace_kernels.packing import CostModel, Part, balance, cut_forest

from ..config.schema import LossConfig
from ..rollout.tree import Node, RolloutTree

NodeKey = tuple[int, int]  # (tree, node) in the step's list of trees
Features = dict[
    NodeKey, NDArray[np.float32]
]  # one vector per node: log-probs of its tokens, or a hidden state


@dataclass(frozen=True)
class Forest:
    """Trees as arrays over their N nodes in DFS pre-order, one tree after the other.

    `keys[n]` says which node of which tree row n is; `leaves` are rows; `rewards` and `bare` belong to them.
    """

    trees: Sequence[RolloutTree]
    keys: list[NodeKey]
    parents: NDArray[np.int64]
    lengths: NDArray[np.int64]
    leaves: NDArray[np.int64]
    rewards: NDArray[np.float64]
    bare: NDArray[np.bool_]

    @classmethod
    def of(cls, trees: Sequence[RolloutTree]) -> Forest:
        keys: list[NodeKey] = []
        parents: list[int] = []
        for number, tree in enumerate(trees):
            order = tree.dfs_order()
            row = {node: len(keys) + position for position, node in enumerate(order)}
            keys += [(number, node) for node in order]
            parents += [row.get(tree.nodes[node].parent, -1) for node in order]
        nodes = [trees[t].nodes[n] for t, n in keys]
        leaves = [row for row, node in enumerate(nodes) if node.reward is not None]
        return cls(
            trees=trees,
            keys=keys,
            parents=np.array(parents, dtype=np.int64),
            lengths=np.array([len(node.token_ids) for node in nodes], dtype=np.int64),
            leaves=np.array(leaves, dtype=np.int64),
            rewards=np.array([nodes[row].reward for row in leaves], dtype=np.float64),
            bare=np.array([nodes[row].kind == "bare" for row in leaves], dtype=np.bool_),
        )

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def flat_tokens(self) -> int:
        """Tokens if every rollout were a sequence of its own."""
        return sum(len(tree.prefix_ids(leaf)) for tree in self.trees for leaf in tree.leaves())

    def advantages(self, loss: LossConfig) -> TreeAdvantages:
        """Advantages by `loss.advantage` over the whole forest (design note, section 5)."""
        return advantages(
            self.parents,
            self.leaves,
            self.rewards,
            estimator=loss.advantage,
            root_baseline=loss.root_baseline,
            bare=self.bare,
        )

    def leaf_weights(self, loss: LossConfig) -> NDArray[np.float64]:
        """[L] weight of each leaf's loss terms."""
        return leaf_weights(self.parents, self.leaves, mode=loss.leaf_weighting)


@dataclass
class PackedBatch:
    """T packed tokens, E sampled tokens (loss edges) and n nodes. Weights are zero in a dummy."""

    input_ids: torch.Tensor  # int64 [T]
    layout: TreeLayout
    edges: torch.Tensor  # int64 [E], packed positions of sampled tokens
    node_ends: torch.Tensor  # int64 [n], packed position of each node's last token
    rows: list[int]  # [n] rows of the forest, in packed order
    edge_counts: list[int]  # [n] sampled tokens of each node
    sampler_logprob: torch.Tensor  # float32 [E]
    old_logprob: torch.Tensor  # float32 [E]
    positive: torch.Tensor  # float32 [E], sum over leaves below of weight * max(A, 0)
    negative: torch.Tensor  # float32 [E], sum over leaves below of weight * min(A, 0)
    weight: torch.Tensor  # float32 [E], sum over leaves below of weight
    is_dummy: bool = False

    @property
    def edge_src(self) -> torch.Tensor:
        """int64 [E]: the position whose hidden state predicts each edge's label."""
        return self.layout.predecessor[self.edges]

    @property
    def labels(self) -> torch.Tensor:
        return self.input_ids[self.edges]

    def to(self, device: torch.device) -> PackedBatch:
        moved = {
            k: v.to(device) for k, v in self.__dict__.items() if isinstance(v, torch.Tensor | TreeLayout)
        }
        return PackedBatch(**(self.__dict__ | moved))


@dataclass(frozen=True)
class LossTerms:
    """Per-leaf inputs of the loss over a forest, and what earlier passes found for each node."""

    advantages: TreeAdvantages
    leaf_weight: NDArray[np.float64]  # [L]
    old_logprobs: dict[NodeKey, NDArray[np.float32]]


def pack(forest: Forest, part: Part, terms: LossTerms | None = None) -> PackedBatch:
    """One part of a forest. Without `terms` all loss weights are zero (a scoring pass)."""
    rows = [int(row) for row in part.nodes]
    nodes = [forest.trees[t].nodes[n] for t, n in (forest.keys[row] for row in rows)]
    layout = TreeLayout.from_segments(
        part.local_parents(forest.parents), [len(node.token_ids) for node in nodes]
    )
    ids = np.concatenate([np.asarray(node.token_ids, dtype=np.int64) for node in nodes])
    mask = np.concatenate([np.asarray(node.loss_mask, dtype=np.bool_) for node in nodes])
    sampled = np.concatenate([np.asarray(node.logprobs, dtype=np.float32) for node in nodes])
    counts = [sum(node.loss_mask) for node in nodes]
    per_node = np.zeros((3, len(rows)), dtype=np.float64)
    old = sampled[mask]
    if terms is not None:
        positive, negative, weight = terms.advantages.terms(leaves=part.leaves, leaf_weight=terms.leaf_weight)
        per_node = np.stack([positive, negative, weight])[:, rows]
        old = np.concatenate([terms.old_logprobs[forest.keys[row]] for row in rows])
    per_edge = torch.from_numpy(np.repeat(per_node, counts, axis=1).astype(np.float32))
    return PackedBatch(
        input_ids=torch.from_numpy(ids),
        layout=layout,
        edges=torch.from_numpy(np.flatnonzero(mask)),
        node_ends=torch.from_numpy(np.cumsum([len(node.token_ids) for node in nodes]) - 1),
        rows=rows,
        edge_counts=counts,
        sampler_logprob=torch.from_numpy(sampled[mask]),
        old_logprob=torch.from_numpy(old.astype(np.float32)),
        positive=per_edge[0],
        negative=per_edge[1],
        weight=per_edge[2],
    )


def dummy_batch() -> PackedBatch:
    """Two tokens whose zero loss stays in the graph: keeps a rank with less work in step with the others."""
    zero = torch.zeros(1)
    return PackedBatch(
        input_ids=torch.zeros(2, dtype=torch.int64),
        layout=TreeLayout.from_segments([-1], [2]),
        edges=torch.tensor([1]),
        node_ends=torch.tensor([1]),
        rows=[],
        edge_counts=[],
        sampler_logprob=zero,
        old_logprob=zero,
        positive=zero,
        negative=zero,
        weight=zero,
        is_dummy=True,
    )


def schedule(forest: Forest, max_tokens: int, world: int) -> list[list[Part | None]]:
    """Parts for every rank, the same number on each (None: a dummy), balanced by the cost model.

    Every rank computes the same schedule; unequal counts would hang ZeRO-3 for ever.
    """
    longest = int(path_sums(forest.parents, forest.lengths).max())
    share = -(-forest.tokens // world)  # so that one large part does not leave the other ranks idle
    cost = CostModel()
    parts = cut_forest(forest.parents, forest.lengths, max_tokens=max(longest, min(max_tokens, share)))
    bins = balance([cost(part.tokens, part.pairs) for part in parts], world)
    most = max(len(bin) for bin in bins)
    return [[parts[i] for i in bin] + [None] * (most - len(bin)) for bin in bins]


def prompt_forest(trees: Sequence[RolloutTree]) -> tuple[Forest, NDArray[np.int64]]:
    """The trees' prompts as one tree that shares their common beginning (the system prompt).

    Returns the forest and, for each tree, the row whose last token ends its prompt.
    """
    prompts = [tree.nodes[0].token_ids for tree in trees]
    shared = 0
    shortest = min(len(p) for p in prompts)
    while shared < shortest - 1 and len({p[shared] for p in prompts}) == 1:
        shared += 1

    def node(parent: int, ids: list[int]) -> Node:
        return Node(parent, int(parent >= 0), "root", ids, [0] * len(ids), [0.0] * len(ids))

    joint = RolloutTree(trees[0].task, [node(-1, prompts[0][:shared])] if shared else [])
    if not shared:
        forest = Forest.of([RolloutTree(tree.task, [tree.nodes[0]]) for tree in trees])
        return forest, np.arange(len(trees))
    joint.nodes += [node(0, p[shared:]) for p in prompts]
    return Forest.of([joint]), np.arange(1, len(trees) + 1)


def split_minibatches(forest: Forest, count: int) -> Sequence[Forest]:
    """The forest's trees dealt into `count` forests (fewer when there are fewer trees)."""
    count = min(count, len(forest.trees))
    return [Forest.of(list(forest.trees[i::count])) for i in range(count)]
