"""The advantage estimators on a checked forest, in tensors (algorithm.md, section 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .forest import FloatArray, path_sums
from .tree_reductions import LeafRanges, Moments, ancestor_sums, range_moments, segments, subtree_moments

FloatSequence = Sequence[float] | NDArray[np.floating]
BoolSequence = Sequence[bool] | NDArray[np.bool_]
RootBaseline = Literal["all", "bare"]


class Rewards(NamedTuple):
    """Rewards as the estimators take them: none minds a shift of a tree's rewards, or a scale of them and eps."""

    value: Tensor  # [L], minus the tree's reward nearest 0 and in units of the tree: within [-1, 1]
    eps: Tensor  # [trees]
    nodes: Moments  # [N], of the leaves at or below each node
    baseline: Moments  # [trees], of the leaves that the root group is compared with


def per_leaf_values(values: FloatSequence, forest: LeafRanges, name: str) -> Tensor:
    array = np.array(values, dtype=np.float64)
    if array.shape != (forest.leaf_nodes.numel(),):
        raise ValueError(
            f"{name}: expected one per leaf, [{forest.leaf_nodes.numel()}], got {list(array.shape)}"
        )
    if not np.isfinite(array).all():
        place = int(np.flatnonzero(~np.isfinite(array))[0])
        raise ValueError(f"{name}[{place}] = {array[place]}: expected a finite number")
    return torch.from_numpy(array)


def _in_baseline(forest: LeafRanges, root_baseline: RootBaseline, bare: BoolSequence | None) -> Tensor | None:
    """bool [L]: the leaves that the mean and std of the root group are taken over; None for all."""
    if root_baseline == "all":
        return None
    if root_baseline != "bare":
        raise ValueError(f"root_baseline: expected 'all' or 'bare', got {root_baseline!r}")
    if bare is None:
        raise ValueError("bare: root_baseline='bare' needs to know which leaves are bare rollouts")
    chosen = np.array(bare)
    if chosen.dtype != np.bool_ or chosen.shape != (forest.leaf_nodes.numel(),):
        raise ValueError(
            f"bare: expected bool [{forest.leaf_nodes.numel()}], got {chosen.dtype} {list(chosen.shape)}"
        )
    return torch.from_numpy(chosen)


def normalised(
    forest: LeafRanges,
    rewards: FloatSequence,
    root_baseline: RootBaseline,
    bare: BoolSequence | None,
    eps: float,
) -> Rewards:
    value = per_leaf_values(rewards, forest, "rewards")
    chosen = _in_baseline(forest, root_baseline, bare)
    of_leaf = forest.trees.segment
    # A quarter, so that the difference of two finite numbers is one too; what rounds is subnormal.
    least, largest = (
        torch.zeros(len(forest.roots), dtype=value.dtype).scatter_reduce_(
            0, of_leaf, value / 4, extreme, include_self=False
        )
        for extreme in ("amin", "amax")
    )
    nearest = torch.clamp(torch.zeros_like(least), least, largest)
    spread = torch.maximum((least - nearest).abs(), (largest - nearest).abs())
    unit = torch.ldexp(torch.ones_like(spread), torch.frexp(spread)[1].clamp(-1000, 1000))
    value = (value / 4 - nearest[of_leaf]) / unit[of_leaf]
    nodes = subtree_moments(value, forest)
    baseline = Moments(*(x[forest.roots] for x in nodes))
    if chosen is not None:
        members = torch.zeros_like(forest.roots).index_add_(0, of_leaf, chosen.long())
        baseline = range_moments(value[chosen], segments(members))
    return Rewards(value, eps / 4 / unit, nodes, baseline)


def _inverse(std: Tensor, eps: Tensor) -> Tensor:
    # Exactly 0 without contrast. With root_baseline="bare" the others may still differ from an all-equal
    # baseline: dividing that difference by eps alone would be an explosion, not an advantage.
    return torch.where(std > 0, 1 / (std + eps), 0.0)


def depth_one(forest: LeafRanges) -> Tensor:
    """bool [N]"""
    return (forest.parents >= 0) & (forest.parents == forest.roots[forest.tree])


def leaves_of(nodes: Tensor, forest: LeafRanges) -> tuple[Tensor, Tensor]:
    """The leaves below nodes that hold no leaf in common, and for each the node it is below."""
    count = forest.count[nodes]
    # From the place among all of them to the number of the leaf.
    shift = forest.low[nodes] - (count.cumsum(0) - count)
    owner = nodes.repeat_interleave(count)
    return torch.arange(len(owner)) + shift.repeat_interleave(count), owner


def leaf_estimates(forest: LeafRanges, reward: Rewards, estimator: str) -> FloatArray:
    if estimator == "treepo":
        return _nested(forest, reward).numpy()
    tree = forest.trees.segment
    inverse = _inverse(reward.baseline.std, reward.eps)
    total = (reward.value - reward.baseline.mean[tree]) * inverse[tree]
    if estimator == "tree_grpo":
        leaf, owner = leaves_of(depth_one(forest).nonzero().squeeze(1), forest)
        inverse = _inverse(reward.nodes.std, reward.eps[forest.tree])
        total[leaf] += (reward.value[leaf] - reward.nodes.mean[owner]) * inverse[owner]
    return total.numpy()


def _nested(forest: LeafRanges, reward: Rewards) -> Tensor:
    """[L]: the mean of the leaf's z-scores in the groups it is nested in."""
    first = forest.starts_group.nonzero().squeeze(1)  # [G], a node of each distinct leaf range
    shared = forest.count[first] >= 2
    number = torch.where(shared, shared.cumsum(0) - 1, -1)
    above = torch.where(forest.parents[first] >= 0, forest.group[forest.parents[first].clamp(min=0)], -1)
    node, parent = first[shared], above[shared]
    parent = torch.where(parent >= 0, number[parent.clamp(min=0)], -1)
    centre, std = (x[node] for x in reward.nodes)
    tree = forest.tree[node]
    is_root = parent < 0
    centre[is_root], std[is_root] = (x[tree[is_root]] for x in reward.baseline)
    slope, offset = ancestor_sums(_inverse(std, reward.eps[tree]), centre, parent)
    groups = torch.from_numpy(path_sums(parent.numpy(), np.ones(len(parent), dtype=np.int64)))
    # The leaf's own range, or the one around it; none where it is alone in its tree.
    own = forest.group[forest.leaf_nodes]
    own = torch.where(shared[own], own, above[own])
    nested = own >= 0
    own = number[own[nested]]
    total = torch.zeros_like(reward.value)
    total[nested] = (slope[own] * (reward.value[nested] - centre[own]) + offset[own]) / groups[own]
    return total


def turn_estimates(forest: LeafRanges, reward: Rewards) -> FloatArray:
    value = reward.nodes.mean.clone()
    value[forest.roots] = reward.baseline.mean
    inverse = _inverse(reward.baseline.std, reward.eps)[forest.tree]
    difference = value - value[forest.parents.clamp(min=0)]
    return torch.where(forest.parents >= 0, difference * inverse, 0.0).numpy()
