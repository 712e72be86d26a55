"""Forests and groups as ranges of an array: the leaves below every node, and segments one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .backends.ranges import Ranges
from .forest import as_int_vector, checked_ends


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
        first: [G], the topmost node of each distinct range.
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
    first: Tensor
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
        falls = leaves[1:] < leaves[:-1]
        if falls.any():
            raise ValueError(f"leaf_nodes[{int(falls.argmax()) + 1}]: leaves must be in DFS order, ascending")
        before = np.zeros(parent.size + 1, dtype=np.int64)
        np.cumsum(np.bincount(leaves, minlength=parent.size), out=before[1:])
        low, high = before[:-1], before.take(ends)
        empty = low == high
        if empty.any():
            raise ValueError(
                f"leaf_nodes: node {int(empty.argmax())} has no leaf at or below it, so it has no value"
            )
        # A node with its parent's range is an only child, so it stands right after its parent.
        starts = np.ones(parent.size, dtype=bool)
        np.logical_or(low[1:] != low[:-1], high[1:] != high[:-1], out=starts[1:])
        is_root = parent < 0
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
            first=torch.from_numpy(first),
            distinct=trees._replace(
                low=torch.from_numpy(low.take(first)),
                high=torch.from_numpy(high.take(first)),
                owner=torch.from_numpy(tree.take(first)),
            ),
            trees=trees,
        )

    @property
    def count(self) -> Tensor:
        """int64 [N]: leaves at or below each node."""
        return self.high - self.low

    def below(self, nodes: Tensor) -> Ranges:
        """The ranges of the leaves at or below nodes, int64 [G]."""
        return self.trees._replace(low=self.low[nodes], high=self.high[nodes], owner=self.tree[nodes])

    def to(self, device: torch.device | str) -> LeafRanges:
        return LeafRanges(**{name: x.to(device) for name, x in vars(self).items()})


def segments(sizes: Tensor) -> Ranges:
    """Consecutive groups of these sizes [G], int64, each a segment of its own; 0 is a size too.

    Raises ValueError: not an int64 vector, or a size below 0.
    """
    if not isinstance(sizes, Tensor) or sizes.ndim != 1 or sizes.dtype != torch.int64:
        raise ValueError(f"sizes: expected an int64 tensor [G], got {described(sizes)}")
    if bool((sizes < 0).any()):
        raise ValueError(f"sizes: expected 0 or more, got {int(sizes.min())}")
    high = sizes.cumsum(0)
    low = high - sizes
    number = torch.arange(len(sizes), device=sizes.device)
    # The power of two from `size` up: frexp counts the bits of size - 1.
    room = torch.ones_like(sizes) << torch.frexp((sizes - 1).clamp(min=0).double())[1]
    longest_first = room.argsort(descending=True, stable=True)
    start = torch.empty_like(sizes)
    start[longest_first] = room[longest_first].cumsum(0) - room[longest_first]
    return Ranges(low, high, number, number.repeat_interleave(sizes), start - low, int(room.sum()))


def described(x: object) -> str:
    """A tensor's type and shape, for messages; of anything else its class."""
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
