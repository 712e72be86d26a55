"""Segmented reductions over a forest in DFS pre-order: what lies below each node, beside it and above it.

A node's leaves are a contiguous range of the leaf array, so all that lies below nodes is one operation, a reduction
over ranges; siblings are ranges of the nodes sorted by parent; what lies above is one more, a sum along paths.

Results are float64. They depend, to the bit, on a node's own tree alone (for siblings: on the group), not on what
it is batched with; counts are exact and sums compensated. Finite input gives no NaN, and no spread exactly 0.
On CUDA tensors the programs in `kernels/tree_reductions.py` do the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import interpreter
from .backends import ranges as eager
from .backends.ranges import Ranges
from .forest import as_int_vector, checked_ends


class Moments(NamedTuple):
    """Of groups of numbers; `std` is that of the population, exactly 0 for one member, none, or equal ones."""

    mean: Tensor
    std: Tensor


@dataclass(frozen=True, eq=False)
class LeafRanges:
    """A forest of N nodes and L leaves, checked: the leaves at or below node n are `[low[n], high[n])`. All int64.

    Attributes:
        parents: [N], -1 for a root.
        leaf_nodes: [L], the node at which each leaf stands, ascending.
        low: [N].
        high: [N].
        roots: [trees], nodes.
        tree: [N], number of the node's tree.
        group: [N], number of its leaf range among the distinct ones: an only child shares its parent's.
        distinct: those G ranges.
        trees: the ranges of whole trees.
    """

    parents: Tensor
    leaf_nodes: Tensor
    low: Tensor
    high: Tensor
    roots: Tensor
    tree: Tensor
    group: Tensor
    distinct: Ranges
    trees: Ranges

    @staticmethod
    def of(
        parents: Sequence[int] | NDArray[np.integer], leaf_nodes: Sequence[int] | NDArray[np.integer]
    ) -> LeafRanges:
        """Raises ValueError: not DFS pre-order, leaves that do not ascend, a node without a leaf at or below it."""
        parent, ends = checked_ends(parents)
        leaves = as_int_vector(leaf_nodes, "leaf_nodes")
        if leaves.size and (leaves.min() < 0 or leaves.max() >= parent.size):
            raise ValueError(f"leaf_nodes: {leaves.min()}..{leaves.max()} outside the {parent.size} nodes")
        if (np.diff(leaves) < 0).any():
            place = int(np.flatnonzero(np.diff(leaves) < 0)[0]) + 1
            raise ValueError(f"leaf_nodes[{place}]: leaves must be in DFS order, ascending")
        before = np.concatenate([[0], np.cumsum(np.bincount(leaves, minlength=parent.size))])
        low, high = before[:-1], before[ends]
        empty = np.flatnonzero(low == high)
        if empty.size:
            raise ValueError(f"leaf_nodes: node {empty[0]} has no leaf at or below it, so it has no value")
        is_root = parent < 0
        # A node with its parent's range is an only child, so it stands right after its parent.
        starts = is_root.copy()
        starts[1:] |= (low[1:] != low[:-1]) | (high[1:] != high[:-1])
        roots, tree, first = np.flatnonzero(is_root), np.cumsum(is_root) - 1, np.flatnonzero(starts)
        trees = segments(torch.from_numpy(high[roots] - low[roots]))
        return LeafRanges(
            parents=torch.from_numpy(parent),
            leaf_nodes=torch.from_numpy(leaves),
            low=torch.from_numpy(low),
            high=torch.from_numpy(high),
            roots=torch.from_numpy(roots),
            tree=torch.from_numpy(tree),
            group=torch.from_numpy(np.cumsum(starts) - 1),
            distinct=trees._replace(
                low=torch.from_numpy(low[first]),
                high=torch.from_numpy(high[first]),
                owner=torch.from_numpy(tree[first]),
            ),
            trees=trees,
        )

    @property
    def count(self) -> Tensor:
        """int64 [N]: leaves at or below each node."""
        return self.high - self.low

    @property
    def starts_group(self) -> Tensor:
        """bool [N]: the node's leaves differ from its parent's, so that a chain of only children counts once."""
        return self.group.diff(prepend=self.group.new_full((1,), -1)) > 0

    def to(self, device: torch.device | str) -> LeafRanges:
        return LeafRanges(**{name: x.to(device) for name, x in vars(self).items()})


def segments(sizes: Tensor) -> Ranges:
    """Consecutive groups of these sizes [G], int64, each a segment of its own; 0 is a size too."""
    high = sizes.cumsum(0)
    low = high - sizes
    number = torch.arange(len(sizes), device=sizes.device)
    # The power of two from `size` up: frexp counts the bits of size - 1.
    room = torch.ones_like(sizes) << torch.frexp((sizes - 1).clamp(min=0).double())[1]
    longest_first = room.argsort(descending=True, stable=True)
    start = torch.empty_like(sizes)
    start[longest_first] = room[longest_first].cumsum(0) - room[longest_first]
    return Ranges(low, high, number, number.repeat_interleave(sizes), start - low, int(room.sum()))


def range_sums(values: Tensor, ranges: Ranges) -> Tensor:
    """[G]: the sums of values [L] over ranges."""
    scaled, unit = _scaled(values, ranges)
    return _program(values).sums(scaled, ranges) * unit


def range_moments(values: Tensor, ranges: Ranges) -> Moments:
    """Mean and std [G] of values [L] over ranges; both 0 of an empty one.

    A spread below 1e-150 of the segment's largest magnitude is 0 as well: its square is no number.
    """
    scaled, unit = _scaled(values, ranges)
    total, squares = _program(values).moments(scaled, ranges)
    members = (ranges.high - ranges.low).clamp(min=1)
    # [k + 1]: changes between neighbours up to element k; one more at the end for empty ranges.
    changes = torch.zeros(len(scaled) + 2, dtype=torch.int64, device=scaled.device)
    torch.cumsum(scaled[1:] != scaled[:-1], 0, out=changes[2:-1])
    changes[-1] = changes[-2]
    varied = changes.index_select(0, ranges.high) > changes[1:].index_select(0, ranges.low)
    std = squares.div_(members).sqrt_().mul_(unit)
    return Moments(total.div_(members).mul_(unit), std.masked_fill_(~varied, 0.0))


def range_extrema(values: Tensor, ranges: Ranges) -> tuple[Tensor, Tensor]:
    """(least, largest) [G] of values [L] over ranges; (inf, -inf) of an empty one."""
    return _program(values).extrema(values.double(), ranges)


def subtree_sums(per_leaf: Tensor, forest: LeafRanges) -> Tensor:
    """[N]: the sum of per_leaf [L] over the leaves at or below each node."""
    return _of_nodes(range_sums(per_leaf, forest.distinct), forest)


def subtree_moments(per_leaf: Tensor, forest: LeafRanges) -> Moments:
    """Mean and std [N] of per_leaf [L] over the leaves at or below each node.

    The mean of rewards is V_hat (algorithm.md, section 4): the children's V_hat weighted by their leaves.
    """
    return Moments(*(_of_nodes(x, forest) for x in range_moments(per_leaf, forest.distinct)))


def subtree_extrema(per_leaf: Tensor, forest: LeafRanges) -> tuple[Tensor, Tensor]:
    """(least, largest) [N] of per_leaf [L] among the leaves at or below each node."""
    least, largest = range_extrema(per_leaf, forest.distinct)
    return _of_nodes(least, forest), _of_nodes(largest, forest)


def sibling_moments(per_node: Tensor, forest: LeafRanges) -> Moments:
    """Mean and std [N] of per_node [N] over each node and its siblings; a root has none."""
    # Roots share the parent -1 and are groups of their own: node numbers stand in for it.
    nodes = torch.arange(len(forest.parents), device=per_node.device)
    family = torch.where(forest.parents < 0, nodes + len(nodes), forest.parents)
    family, order = family.sort(stable=True)
    _, number, sizes = family.unique_consecutive(return_inverse=True, return_counts=True)
    back = torch.empty_like(order)
    back[order] = number
    groups = range_moments(per_node.index_select(0, order), segments(sizes))
    return Moments(*(x.index_select(0, back) for x in groups))


def ancestor_sums(slope: Tensor, centre: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    """(S [N], C [N]): lines in x, summed over each node and its ancestors.

    The sum of `slope[h] (x - centre[h])` over n and all above it is `S[n] (x - centre[n]) + C[n]`: one line stands
    for all the groups that a leaf is nested in. Only differences of centres are formed: nothing
    cancels that the single terms would not lose as well.
    """
    return _program(slope).ancestor_sums(slope, centre, parents)


def to_tokens(per_node: Tensor, lengths: Tensor) -> Tensor:
    """[T]: per_node [N] repeated for each node's tokens; `lengths` int64 [N]."""
    return per_node.repeat_interleave(lengths)


def _program(values: Tensor) -> Any:
    if values.device.type != "cuda" and not interpreter.is_on():
        return eager
    from .backends import ranges_triton

    return ranges_triton


def _scaled(values: Tensor, ranges: Ranges) -> tuple[Tensor, Tensor]:
    """(values [L] in units of their segment, the units [G]): powers of two, so that no square overflows."""
    wide = values.double()
    largest = torch.zeros(len(ranges.shift), dtype=torch.float64, device=wide.device)
    largest.scatter_reduce_(0, ranges.segment, wide.abs(), "amax")
    unit = torch.ldexp(torch.ones_like(largest), (torch.frexp(largest)[1] - 1).clamp(-1000, 1023))
    return wide / unit.index_select(0, ranges.segment), unit.index_select(0, ranges.owner)


def _of_nodes(per_range: Tensor, forest: LeafRanges) -> Tensor:
    return per_range.index_select(0, forest.group)
