"""Segmented reductions over a forest in DFS pre-order: what lies below each node, beside it and above it.

A node's leaves are a contiguous range of the leaf array, so all that lies below nodes is one operation, a reduction
over ranges; siblings are ranges of the nodes sorted by parent; what lies above is one more, a sum along paths.

Inputs are real tensors [L] or [N] on the forest's device; ValueError says which is not, and results are float64.
They depend, to the bit, on a node's own tree alone (for siblings: on the group), not on what it is batched with;
counts are exact and sums compensated. Finite input gives no NaN, and no spread exactly 0. An infinity or a NaN
reaches what it is part of and nothing else, as in plain sums (infinities of both signs make a NaN); the std is NaN
then.

Sums, means, moments and lines are differentiable once; a std of 0 gives no gradient. Extrema, and reductions over
bare ranges, refuse input that requires one. On CUDA tensors the programs in `kernels/tree_reductions.py` do the
work.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import range_reductions as reduce
from .backends.ranges import Ranges
from .leaf_ranges import LeafRanges, described, segments
from .range_reductions import Moments
from .reduction_gradients import Lines, Means, NodeMoments, Sums, ToMembers

__all__ = [
    "LeafRanges",
    "Moments",
    "Ranges",
    "ancestor_sums",
    "range_extrema",
    "range_moments",
    "range_sums",
    "segments",
    "sibling_moments",
    "subtree_extrema",
    "subtree_means",
    "subtree_moments",
    "subtree_sums",
    "to_tokens",
]


def range_sums(values: Tensor, ranges: Ranges) -> Tensor:
    """[G]: the sums of values [L] over ranges."""
    _check_ranges(values, ranges)
    return reduce.sums(values, ranges)


def range_moments(values: Tensor, ranges: Ranges) -> Moments:
    """Mean and std [G] of values [L] over ranges; both 0 of an empty one.

    A spread below 1e-150 of the segment's largest magnitude is 0 as well: its square is no number.
    """
    _check_ranges(values, ranges)
    return reduce.moments(values, ranges)


def range_extrema(values: Tensor, ranges: Ranges) -> tuple[Tensor, Tensor]:
    """(least, largest) [G] of values [L] over ranges; (inf, -inf) of an empty one, NaN of one that holds a NaN."""
    _check_ranges(values, ranges)
    return reduce.extrema(values, ranges)


def subtree_sums(per_leaf: Tensor, forest: LeafRanges) -> Tensor:
    """[N]: the sum of per_leaf [L] over the leaves at or below each node."""
    _check("per_leaf", per_leaf, forest.leaf_nodes, "leaf")
    total: Tensor = Sums.apply(per_leaf, forest)
    return total


def subtree_means(per_leaf: Tensor, forest: LeafRanges) -> Tensor:
    """[N]: the mean of per_leaf [L] over the leaves at or below each node.

    Of rewards it is V_hat (algorithm.md, section 4): the children's V_hat weighted by their leaves.
    """
    _check("per_leaf", per_leaf, forest.leaf_nodes, "leaf")
    mean: Tensor = Means.apply(per_leaf, forest)
    return mean


def subtree_moments(per_leaf: Tensor, forest: LeafRanges) -> Moments:
    """Mean and std [N] of per_leaf [L] over the leaves at or below each node."""
    _check("per_leaf", per_leaf, forest.leaf_nodes, "leaf")
    return Moments(*NodeMoments.apply(per_leaf, forest))


def subtree_extrema(per_leaf: Tensor, forest: LeafRanges) -> tuple[Tensor, Tensor]:
    """(least, largest) [N] of per_leaf [L] among the leaves at or below each node; NaN of one above a NaN."""
    _check("per_leaf", per_leaf, forest.leaf_nodes, "leaf")
    _check_no_gradient("per_leaf", per_leaf)
    least, largest = reduce.extrema(per_leaf, forest.distinct)
    return least.index_select(0, forest.group), largest.index_select(0, forest.group)


def sibling_moments(per_node: Tensor, forest: LeafRanges) -> Moments:
    """Mean and std [N] of per_node [N] over each node and its siblings; a root has none."""
    _check("per_node", per_node, forest.parents, "node")
    # Roots share the parent -1 and are groups of their own: node numbers stand in for it.
    nodes = torch.arange(len(forest.parents), device=per_node.device)
    family, order = torch.where(forest.parents < 0, nodes + len(nodes), forest.parents).sort(stable=True)
    groups = segments(family.unique_consecutive(return_counts=True)[1])
    number = groups.owner
    # Families as trees of one node each.
    families = LeafRanges(
        parents=torch.full_like(number, -1), leaf_nodes=groups.segment, low=groups.low, high=groups.high,
        roots=number, tree=number, group=number, first=number, distinct=groups, trees=groups,
    )  # fmt: skip
    found = subtree_moments(per_node.index_select(0, order), families)
    return Moments(*(ToMembers.apply(x, order, groups) for x in found))


def ancestor_sums(slope: Tensor, centre: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    """(S [N], C [N]): lines in x, summed over each node and its ancestors.

    The sum of `slope[h] (x - centre[h])` over n and all above it is `S[n] (x - centre[n]) + C[n]`: one line stands
    for all the groups that a leaf is nested in. Only differences of centres are formed: nothing
    cancels that the single terms would not lose as well.

    Args:
        slope, centre: [N].
        parents: int64 [N], -1 for a root, else before the node; on a GPU another value is not refused, its node is
            NaN. Gradients need DFS pre-order.
    """
    if not isinstance(parents, Tensor) or parents.ndim != 1 or parents.dtype != torch.int64:
        raise ValueError(f"parents: expected an int64 tensor [N], got {described(parents)}")
    _check("slope", slope, parents, "node")
    _check("centre", centre, parents, "node")
    if not parents.is_cuda:
        wrong = (parents < -1) | (parents >= torch.arange(len(parents)))
        if wrong.any():
            node = int(wrong.nonzero()[0])
            raise ValueError(f"parents[{node}] = {int(parents[node])}: a parent must come before its child")
    total, offset = Lines.apply(slope, centre, parents)
    return total, offset


def to_tokens(per_node: Tensor, lengths: Tensor) -> Tensor:
    """[T]: per_node [N], of any type, repeated for each node's tokens; `lengths` int64 [N]. Differentiable."""
    if not isinstance(lengths, Tensor) or lengths.ndim != 1 or lengths.dtype != torch.int64:
        raise ValueError(f"lengths: expected an int64 tensor [N], got {described(lengths)}")
    _check_vector("per_node", per_node, lengths, "node")
    if bool((lengths < 0).any()):
        raise ValueError(f"lengths: expected 0 or more, got {int(lengths.min())}")
    return per_node.repeat_interleave(lengths)


def _check(name: str, x: Any, like: Tensor, what: str) -> None:
    _check_vector(name, x, like, what)
    if x.is_complex():
        raise ValueError(f"{name}: expected real numbers, got {x.dtype}")


def _check_vector(name: str, x: Any, like: Tensor, what: str) -> None:
    if not isinstance(x, Tensor) or x.shape != like.shape:
        raise ValueError(f"{name}: expected a tensor [{len(like)}], one per {what}, got {described(x)}")
    if x.device != like.device:
        raise ValueError(f"{name}: expected the device {like.device} like the forest, got {x.device}")


def _check_no_gradient(name: str, x: Tensor) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: this reduction has no gradient, pass {name}.detach()")


def _check_ranges(values: Tensor, ranges: Ranges) -> None:
    _check("values", values, ranges.segment, "element of the ranges")
    _check_no_gradient("values", values)
    low, high, owner = ranges.low, ranges.high, ranges.owner
    if not low.shape == high.shape == owner.shape:
        raise ValueError(
            f"ranges: low, high and owner are {[list(x.shape) for x in (low, high, owner)]}: not one per range"
        )
    inside = (low >= 0) & (low <= high) & (high <= len(values)) & (owner >= 0) & (owner < len(ranges.shift))
    if len(values):
        last = len(values) - 1
        ends = (ranges.segment[low.clamp(0, last)], ranges.segment[(high - 1).clamp(0, last)])
        inside &= (low == high) | ((ends[0] == owner) & (ends[1] == owner))
    if not bool(inside.all()):
        at = int((~inside).nonzero()[0])
        raise ValueError(
            f"ranges: [{int(low[at])}, {int(high[at])}) of segment {int(owner[at])} is not within that segment of "
            f"the {len(values)} elements"
        )
