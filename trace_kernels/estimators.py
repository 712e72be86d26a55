"""The advantage estimators on a checked forest, in tensors (algorithm.md, section 5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .backends.ranges import Ranges, ancestor_sums_by_level
from .forest import FloatArray, IntArray
from .leaf_ranges import LeafRanges, segments
from .range_reductions import Moments, moments_in_units
from .tree_reductions import subtree_means

FloatSequence = Sequence[float] | NDArray[np.floating]
BoolSequence = Sequence[bool] | NDArray[np.bool_]
RootBaseline = Literal["all", "bare"]


class Rewards(NamedTuple):
    """Rewards as the estimators take them: none minds a shift of a tree's rewards, or a scale of them and eps."""

    value: Tensor  # [L], minus the tree's reward nearest 0 and in units of the tree: within [-1, 1]
    eps: Tensor  # [trees]
    bare: Tensor | None  # bool [L], the leaves that the root group is compared with; None for all


def per_leaf_values(values: FloatSequence, forest: LeafRanges, name: str) -> Tensor:
    given = np.asarray(values)
    if given.size and given.dtype.kind not in "biuf":
        raise ValueError(f"{name}: expected real numbers, got dtype {given.dtype}")
    array = np.array(given, dtype=np.float64)
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
    if not 0.0 <= eps < math.inf:
        raise ValueError(f"eps: expected a finite number from 0, got {eps}")
    value = per_leaf_values(rewards, forest, "rewards").numpy()
    chosen = _in_baseline(forest, root_baseline, bare)
    size = (forest.trees.high - forest.trees.low).numpy()
    # A quarter, so that the difference of two finite numbers is one too; what rounds is subnormal.
    value *= 0.25
    first = forest.trees.low.numpy()  # every tree has leaves
    least, largest = np.minimum.reduceat(value, first), np.maximum.reduceat(value, first)
    nearest = np.clip(0.0, least, largest)
    spread = np.maximum(np.abs(least - nearest), np.abs(largest - nearest))
    unit = np.ldexp(1.0, np.clip(np.frexp(spread)[1], -1000, 1000))
    value -= np.repeat(nearest, size)
    value /= np.repeat(unit, size)
    return Rewards(torch.from_numpy(value), torch.from_numpy(eps / 4 / unit), chosen)


def _baseline(forest: LeafRanges, reward: Rewards) -> Moments:
    """[trees], of the leaves that the root group is compared with."""
    if reward.bare is None:
        return moments_in_units(reward.value, forest.trees)
    members = torch.zeros_like(forest.roots).index_add_(0, forest.trees.segment, reward.bare.long())
    return moments_in_units(reward.value[reward.bare], segments(members))


def _inverse(std: Tensor, eps: Tensor) -> Tensor:
    # Exactly 0 without contrast. With root_baseline="bare" the others may still differ from an all-equal
    # baseline: dividing that difference by eps alone would be an explosion, not an advantage.
    return torch.where(std > 0, 1 / (std + eps), 0.0)


def depth_one(forest: LeafRanges) -> Tensor:
    """bool [N]"""
    return (forest.parents >= 0) & (forest.parents == forest.roots[forest.tree])


def leaves_of(nodes: Tensor, forest: LeafRanges) -> tuple[Tensor, Tensor]:
    """The leaves below nodes that hold no leaf in common, and the place in `nodes` of the one each is below."""
    count = forest.count[nodes]
    # From the place among all of them to the number of the leaf.
    shift = forest.low[nodes] - (count.cumsum(0) - count)
    at = torch.arange(len(nodes)).repeat_interleave(count)
    return torch.arange(len(at)) + shift[at], at


def leaf_estimates(forest: LeafRanges, reward: Rewards, estimator: str) -> FloatArray:
    if estimator == "treepo":
        return _nested(forest, reward)
    tree, baseline = forest.trees.segment, _baseline(forest, reward)
    inverse = _inverse(baseline.std, reward.eps)
    total = (reward.value - baseline.mean[tree]) * inverse[tree]
    if estimator == "tree_grpo":
        node = depth_one(forest).nonzero().squeeze(1)
        leaf, at = leaves_of(node, forest)
        mean, std = moments_in_units(reward.value, forest.below(node))
        inverse = _inverse(std, reward.eps[forest.tree[node]])
        total[leaf] += (reward.value[leaf] - mean[at]) * inverse[at]
    return total.numpy()


def _nested(forest: LeafRanges, reward: Rewards) -> FloatArray:
    """[L]: the mean of the leaf's z-scores in the groups it is nested in."""
    shared = (forest.distinct.high - forest.distinct.low).numpy() >= 2
    number = np.cumsum(shared) - 1  # [G], of each shared group; S of them
    parents, of_node = forest.parents.numpy(), forest.group.numpy()

    def above(nodes: IntArray) -> IntArray:
        """The group around those that begin with these nodes, -1 for none; all above a node of one is shared."""
        parent = parents.take(nodes)
        return np.where(parent < 0, -1, number.take(of_node.take(parent)))

    first = forest.first.numpy()
    node = first.compress(shared)
    parent, ranges = above(node), forest.below(torch.from_numpy(node))
    mean, std = moments_in_units(reward.value, ranges)
    if reward.bare is not None:
        is_root = torch.from_numpy(parent < 0)
        tree = ranges.owner[is_root]
        mean[is_root], std[is_root] = (x[tree] for x in _baseline(forest, reward))
    slope, offset = ancestor_sums_by_level(
        _inverse(std, reward.eps[ranges.owner]),
        mean,
        torch.from_numpy(parent),
        _depths(ranges, len(reward.value)),
    )
    # The leaf's own range, or the one around it; none where it is alone in its tree.
    group = of_node.take(forest.leaf_nodes.numpy())
    own = np.where(shared.take(group), number.take(group), above(first.take(group)))
    value = reward.value.numpy()
    if not node.size:
        return np.zeros_like(value)
    total = value - mean.numpy().take(own)
    total *= slope.numpy().take(own)
    total += offset.numpy().take(own)
    total /= np.maximum(_nesting(ranges, value.size), 1)
    total[own < 0] = 0.0
    return total


def _depths(ranges: Ranges, count: int) -> IntArray:
    """[S]: how many of nested ranges of `count` elements, in DFS pre-order, each is within."""
    ended = np.cumsum(np.bincount(ranges.high.numpy(), minlength=count + 1))
    return np.arange(len(ranges.low)) - ended.take(ranges.low.numpy())


def _nesting(ranges: Ranges, count: int) -> IntArray:
    """[L]: in how many of the ranges each of `count` elements is."""
    begin, end = (np.bincount(x.numpy(), minlength=count + 1) for x in (ranges.low, ranges.high))
    begin -= end
    return np.cumsum(begin[:-1])


def turn_estimates(forest: LeafRanges, reward: Rewards) -> FloatArray:
    baseline = _baseline(forest, reward)
    value = subtree_means(reward.value, forest)
    value[forest.roots] = baseline.mean
    inverse = _inverse(baseline.std, reward.eps)[forest.tree]
    difference = value - value[forest.parents.clamp(min=0)]
    return torch.where(forest.parents >= 0, difference * inverse, 0.0).numpy()
