"""Tree advantages and the loss terms they give every node of a forest.

Arrays in DFS pre-order, float64: `parents [N]` (-1 for a root; one tree per prompt), `leaf_nodes [L]` the
node at which each rollout ends, ascending, `rewards [L]`. A node's leaves are a contiguous range of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from .estimators import (
    BoolSequence,
    FloatSequence,
    RootBaseline,
    depth_one,
    leaf_estimates,
    leaves_of,
    normalised,
    per_leaf_values,
    turn_estimates,
)
from .forest import FloatArray, IntArray, as_int_vector
from .leaf_ranges import LeafRanges
from .tree_reductions import subtree_means, subtree_sums

IntSequence = Sequence[int] | NDArray[np.integer]
LeafWeighting = Literal["per_leaf", "per_subtree"]

LEAF_ESTIMATORS = ("grpo", "tree_grpo", "treepo")
ESTIMATORS = (*LEAF_ESTIMATORS, "turn")


def node_values(
    parents: IntSequence, leaf_nodes: IntSequence, rewards: FloatSequence
) -> tuple[FloatArray, IntArray]:
    """(V_hat [N], leaf count [N]): the mean reward and the number of the leaves at or below each node."""
    forest = LeafRanges.of(parents, leaf_nodes)
    value = subtree_means(per_leaf_values(rewards, forest, "rewards"), forest)
    return value.numpy(), forest.count.numpy()


def leaf_weights(
    parents: IntSequence, leaf_nodes: IntSequence, mode: LeafWeighting = "per_leaf"
) -> FloatArray:
    """[L] weights: 1, or with "per_subtree" 1 / (leaves of the depth-1 subtree), so that each counts once."""
    forest = LeafRanges.of(parents, leaf_nodes)
    weights = torch.ones(forest.leaf_nodes.numel(), dtype=torch.float64)
    if mode == "per_leaf":
        return weights.numpy()
    if mode != "per_subtree":
        raise ValueError(f"mode: expected 'per_leaf' or 'per_subtree', got {mode!r}")
    node = depth_one(forest).nonzero().squeeze(1)
    leaf, at = leaves_of(node, forest)
    weights[leaf] = 1.0 / forest.count[node][at].double()
    return weights.numpy()


def leaf_advantages(
    parents: IntSequence,
    leaf_nodes: IntSequence,
    rewards: FloatSequence,
    estimator: str,
    *,
    root_baseline: RootBaseline = "all",
    bare: BoolSequence | None = None,
    eps: float = 1e-6,
) -> FloatArray:
    """[L] advantages; std is the population std, and a group of one or without contrast gives exactly 0.

    Args:
        estimator: "grpo": z-score among the tree's leaves. "tree_grpo": that plus the z-score within the
            leaf's depth-1 subtree. "treepo": mean of the z-scores over the nested groups (the leaves below
            each ancestor, root first; distinct groups of at least two leaves), 0 if there is none.
        root_baseline: "bare" takes the root group's mean and std over the bare leaves only.
        bare: [L] bool, needed for "bare".
        eps: added to every std, finite and >= 0.

    Raises:
        ValueError: malformed arrays or an unknown name.
    """
    if estimator not in LEAF_ESTIMATORS:
        raise ValueError(f"estimator: expected one of {LEAF_ESTIMATORS}, got {estimator!r}")
    forest = LeafRanges.of(parents, leaf_nodes)
    return leaf_estimates(forest, normalised(forest, rewards, root_baseline, bare, eps), estimator)


def turn_advantages(
    parents: IntSequence,
    leaf_nodes: IntSequence,
    rewards: FloatSequence,
    *,
    root_baseline: RootBaseline = "all",
    bare: BoolSequence | None = None,
    eps: float = 1e-6,
) -> FloatArray:
    """[N] credit per node: (V_hat(node) - V_hat(parent)) / (std of the tree's leaf rewards + eps), 0 at
    roots.

    With `root_baseline="bare"` the tree's std, and the root's value as its children's baseline, come from
    the bare leaves. A tree without contrast there gives exactly 0.
    """
    forest = LeafRanges.of(parents, leaf_nodes)
    return turn_estimates(forest, normalised(forest, rewards, root_baseline, bare, eps))


@dataclass(frozen=True, eq=False)
class TreeAdvantages:
    """Advantages of a forest: one per leaf, or (estimator "turn") one per node for all leaves below it.

    Attributes:
        leaf: [L], or None for "turn".
        node: [N] for "turn", else None.
        num_leaves: L.
    """

    leaf: FloatArray | None
    node: FloatArray | None
    _forest: LeafRanges

    @property
    def num_leaves(self) -> int:
        return self._forest.leaf_nodes.numel()

    def terms(
        self, leaves: IntSequence | None = None, leaf_weight: FloatSequence | None = None
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """(positive [N], negative [N], weight [N]): sums over each node's leaves i of `w_i max(A_i, 0)`,
        `w_i min(A_i, 0)` and `w_i`.

        As rho and clip(rho) are positive, `sum_i w_i min(rho A_i, clip(rho) A_i)` of a shared token is
        exactly `positive * min(rho, clip(rho)) + negative * max(rho, clip(rho))`: one loss term per leaf,
        without expanding the token.

        Args:
            leaves: leaf numbers to restrict the sums to (a part's `leaves`); the terms of the parts of a
                cut tree add up to the whole tree's. Default: all.
            leaf_weight: [L] weights w; default 1.
        """
        count = self.num_leaves
        weight = np.ones(count)
        if leaf_weight is not None:
            weight = per_leaf_values(leaf_weight, self._forest, "leaf_weight").numpy()
        if leaves is not None:
            chosen = as_int_vector(leaves, "leaves")
            if chosen.size and (chosen.min() < 0 or chosen.max() >= count):
                raise ValueError(f"leaves: {chosen.min()}..{chosen.max()} outside the {count} leaves")
            mask = np.zeros(count, dtype=bool)
            mask[chosen] = True
            weight[~mask] = 0.0
        total = self._sums(weight)
        if self.node is not None:
            return total * np.maximum(self.node, 0.0), total * np.minimum(self.node, 0.0), total
        assert self.leaf is not None
        positive = self._sums(weight * np.maximum(self.leaf, 0.0))
        return positive, self._sums(weight * np.minimum(self.leaf, 0.0)), total

    def _sums(self, per_leaf: FloatArray) -> FloatArray:
        return subtree_sums(torch.from_numpy(per_leaf), self._forest).numpy()


def advantages(
    parents: IntSequence,
    leaf_nodes: IntSequence,
    rewards: FloatSequence,
    estimator: str = "treepo",
    *,
    root_baseline: RootBaseline = "all",
    bare: BoolSequence | None = None,
    eps: float = 1e-6,
) -> TreeAdvantages:
    """Advantages of a forest by the estimator's name: "grpo", "tree_grpo", "treepo" or "turn".

    Arguments and errors as `leaf_advantages` and `turn_advantages`.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator: expected one of {ESTIMATORS}, got {estimator!r}")
    forest = LeafRanges.of(parents, leaf_nodes)
    reward = normalised(forest, rewards, root_baseline, bare, eps)
    if estimator == "turn":
        return TreeAdvantages(None, turn_estimates(forest, reward), forest)
    return TreeAdvantages(leaf_estimates(forest, reward, estimator), None, forest)
