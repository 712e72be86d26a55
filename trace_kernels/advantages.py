"""Tree advantages and the loss terms they give every node of a forest.

Arrays in DFS pre-order, float64: `parents [N]` (-1 for a root; one tree per prompt), `leaf_nodes [L]` the
node at which each rollout ends, ascending, `rewards [L]`. A node's leaves are a contiguous range of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .forest import FloatArray, IntArray, as_int_vector, check_parents, node_ends, roots_of

IntSequence = Sequence[int] | NDArray[np.integer]
FloatSequence = Sequence[float] | NDArray[np.floating]
BoolSequence = Sequence[bool] | NDArray[np.bool_]
RootBaseline = Literal["all", "bare"]
LeafWeighting = Literal["per_leaf", "per_subtree"]

LEAF_ESTIMATORS = ("grpo", "tree_grpo", "treepo")
ESTIMATORS = (*LEAF_ESTIMATORS, "turn")


@dataclass(frozen=True, eq=False)
class _Forest:
    """Checked arrays: the leaves of node n are `[low[n], high[n])`."""

    parents: IntArray
    leaf_nodes: IntArray
    low: IntArray
    high: IntArray

    @property
    def roots(self) -> IntArray:
        return np.flatnonzero(self.parents < 0)

    def sums(self, per_leaf: FloatArray) -> FloatArray:
        """[N]: the sum over each node's leaves, by prefix sums."""
        running = np.concatenate([[0.0], np.cumsum(per_leaf)])
        return running[self.high] - running[self.low]


def _forest(parents: IntSequence, leaf_nodes: IntSequence) -> _Forest:
    parent = check_parents(parents)
    leaves = as_int_vector(leaf_nodes, "leaf_nodes")
    if leaves.size and (leaves.min() < 0 or leaves.max() >= parent.size):
        raise ValueError(f"leaf_nodes: {leaves.min()}..{leaves.max()} outside the {parent.size} nodes")
    if (np.diff(leaves) < 0).any():
        place = int(np.flatnonzero(np.diff(leaves) < 0)[0]) + 1
        raise ValueError(f"leaf_nodes[{place}]: leaves must be in DFS order, ascending")
    low = np.searchsorted(leaves, np.arange(parent.size))
    high = np.searchsorted(leaves, node_ends(parent))
    empty = np.flatnonzero(low == high)
    if empty.size:
        raise ValueError(f"leaf_nodes: node {empty[0]} has no leaf at or below it, so it has no value")
    return _Forest(parent, leaves, low, high)


def _per_leaf(values: FloatSequence, forest: _Forest, name: str) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    if array.shape != forest.leaf_nodes.shape:
        raise ValueError(
            f"{name}: expected one per leaf, [{forest.leaf_nodes.size}], got {list(array.shape)}"
        )
    if not np.isfinite(array).all():
        place = int(np.flatnonzero(~np.isfinite(array))[0])
        raise ValueError(f"{name}[{place}] = {array[place]}: expected a finite number")
    return array


def _root_group(forest: _Forest, root_baseline: RootBaseline, bare: BoolSequence | None) -> NDArray[np.bool_]:
    """[L]: the leaves that the mean and std of the root group are taken over."""
    if root_baseline == "all":
        return np.ones(forest.leaf_nodes.size, dtype=bool)
    if root_baseline != "bare":
        raise ValueError(f"root_baseline: expected 'all' or 'bare', got {root_baseline!r}")
    if bare is None:
        raise ValueError("bare: root_baseline='bare' needs to know which leaves are bare rollouts")
    chosen = np.asarray(bare)
    if chosen.dtype != np.bool_ or chosen.shape != forest.leaf_nodes.shape:
        raise ValueError(
            f"bare: expected bool [{forest.leaf_nodes.size}], got {chosen.dtype} {list(chosen.shape)}"
        )
    return chosen


def _moments(rewards: FloatArray) -> tuple[float, float]:
    """(mean, population std) of a group; the std is exactly 0 for one member, none, or equal rewards."""
    if rewards.size < 2 or (rewards == rewards[0]).all():
        return float(rewards[0]) if rewards.size else 0.0, 0.0
    return float(rewards.mean()), float(rewards.std())


def _z(rewards: FloatArray, mean: float, std: float, eps: float) -> FloatArray:
    # Exactly 0 without contrast. With root_baseline="bare" the others may still differ from an all-equal
    # baseline: dividing that difference by eps alone would be an explosion, not an advantage.
    return (rewards - mean) / (std + eps) if std else np.zeros_like(rewards)


def _starts_group(forest: _Forest) -> NDArray[np.bool_]:
    """[N]: the node's leaves differ from its parent's, so a chain of only children counts once."""
    above = np.maximum(forest.parents, 0)
    same = (forest.low == forest.low[above]) & (forest.high == forest.high[above])
    return (forest.parents < 0) | ~same


def node_values(
    parents: IntSequence, leaf_nodes: IntSequence, rewards: FloatSequence
) -> tuple[FloatArray, IntArray]:
    """(V_hat [N], leaf count [N]): the mean reward and the number of the leaves at or below each node."""
    forest = _forest(parents, leaf_nodes)
    count = forest.high - forest.low
    return forest.sums(_per_leaf(rewards, forest, "rewards")) / count, count


def leaf_weights(
    parents: IntSequence, leaf_nodes: IntSequence, mode: LeafWeighting = "per_leaf"
) -> FloatArray:
    """[L] weights: 1, or with "per_subtree" 1 / (leaves of the depth-1 subtree), so that each counts once."""
    forest = _forest(parents, leaf_nodes)
    if mode == "per_leaf":
        return np.ones(forest.leaf_nodes.size)
    if mode != "per_subtree":
        raise ValueError(f"mode: expected 'per_leaf' or 'per_subtree', got {mode!r}")
    weights = np.ones(forest.leaf_nodes.size)
    for node in _depth_one(forest):
        weights[forest.low[node] : forest.high[node]] = 1.0 / (forest.high[node] - forest.low[node])
    return weights


def _depth_one(forest: _Forest) -> IntArray:
    is_root = forest.parents < 0
    return np.flatnonzero(~is_root & is_root[np.maximum(forest.parents, 0)])


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
        eps: added to every std.

    Raises:
        ValueError: malformed arrays or an unknown name.
    """
    forest = _forest(parents, leaf_nodes)
    reward = _per_leaf(rewards, forest, "rewards")
    in_baseline = _root_group(forest, root_baseline, bare)
    if estimator not in LEAF_ESTIMATORS:
        raise ValueError(f"estimator: expected one of {LEAF_ESTIMATORS}, got {estimator!r}")

    total = np.zeros_like(reward)
    for root in forest.roots:
        leaves = slice(forest.low[root], forest.high[root])
        total[leaves] = _z(reward[leaves], *_moments(reward[leaves][in_baseline[leaves]]), eps)
    if estimator == "grpo":
        return total

    size = forest.high - forest.low
    if estimator == "tree_grpo":
        inner = _depth_one(forest)
    else:
        inner = np.flatnonzero(_starts_group(forest) & (forest.parents >= 0) & (size >= 2))
    groups = np.zeros_like(reward)
    for root in forest.roots:
        groups[forest.low[root] : forest.high[root]] = size[root] >= 2
    for node in inner:
        leaves = slice(forest.low[node], forest.high[node])
        total[leaves] += _z(reward[leaves], *_moments(reward[leaves]), eps)
        groups[leaves] += 1
    return total if estimator == "tree_grpo" else total / np.maximum(groups, 1)


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
    forest = _forest(parents, leaf_nodes)
    reward = _per_leaf(rewards, forest, "rewards")
    in_baseline = _root_group(forest, root_baseline, bare)
    value = forest.sums(reward) / (forest.high - forest.low)
    std = np.zeros_like(value)
    for root in forest.roots:
        leaves = slice(forest.low[root], forest.high[root])
        value[root], std[root] = _moments(reward[leaves][in_baseline[leaves]])
    std = std[roots_of(forest.parents)]
    difference = value - value[np.maximum(forest.parents, 0)]
    # Equal leaf ranges have equal values; the prefix sums of the two nodes may still differ in the last bit.
    moves = _starts_group(forest) | (root_baseline == "bare")
    return np.where((forest.parents >= 0) & (std > 0) & moves, difference / (std + eps), 0.0)


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
    _forest: _Forest

    @property
    def num_leaves(self) -> int:
        return self._forest.leaf_nodes.size

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
            weight = _per_leaf(leaf_weight, self._forest, "leaf_weight").copy()
        if leaves is not None:
            chosen = as_int_vector(leaves, "leaves")
            if chosen.size and (chosen.min() < 0 or chosen.max() >= count):
                raise ValueError(f"leaves: {chosen.min()}..{chosen.max()} outside the {count} leaves")
            mask = np.zeros(count, dtype=bool)
            mask[chosen] = True
            weight[~mask] = 0.0
        total = self._forest.sums(weight)
        if self.node is not None:
            return total * np.maximum(self.node, 0.0), total * np.minimum(self.node, 0.0), total
        assert self.leaf is not None
        positive = self._forest.sums(weight * np.maximum(self.leaf, 0.0))
        return positive, self._forest.sums(weight * np.minimum(self.leaf, 0.0)), total


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
    forest = _forest(parents, leaf_nodes)
    leaf = node = None
    if estimator == "turn":
        node = turn_advantages(parents, leaf_nodes, rewards, root_baseline=root_baseline, bare=bare, eps=eps)
    else:
        leaf = leaf_advantages(
            parents, leaf_nodes, rewards, estimator, root_baseline=root_baseline, bare=bare, eps=eps
        )
    return TreeAdvantages(leaf, node, forest)
