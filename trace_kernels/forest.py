"""Checks and reductions shared by everything that describes a forest as arrays in DFS pre-order.

A forest is `parents [N]`: node i's parent is a smaller index, or -1 for a root, and every subtree is a
contiguous range of indices that starts at its root. Nothing here recurses or loops over nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


def as_int_vector(values: Sequence[int] | NDArray[np.integer], name: str) -> IntArray:
    """One-dimensional int64 copy-or-view of `values`; ValueError naming `name` for anything else."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, got shape {array.shape}")
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{name}: expected integers, got dtype {array.dtype}")
    return array.astype(np.int64, copy=False)


def check_parents(parents: Sequence[int] | NDArray[np.integer]) -> IntArray:
    """`parents` as int64 [N]; ValueError where the order is not DFS pre-order."""
    return checked_ends(parents)[0]


def checked_ends(parents: Sequence[int] | NDArray[np.integer]) -> tuple[IntArray, IntArray]:
    """`check_parents` and the `node_ends` it needs: (parents [N], ends [N])."""
    array = as_int_vector(parents, "parents")
    index = np.arange(array.size)
    wrong = (array < -1) | (array >= index)
    if wrong.any():
        node = int(np.argmax(wrong))
        raise ValueError(
            f"parents[{node}] = {array[node]}: a parent must come before its child (-1 for a root)"
        )
    ends = node_ends(array)
    # Every subtree is one range if and only if where one ends its next sibling stands, or its parent's ends too.
    # What is appended stands for the parent of the roots, and for its subtree's end.
    above, end = np.append(array, -1), np.append(ends, array.size)
    if not ((above.take(ends) == array) | (end.take(array) == ends)).all():
        raise ValueError(_first_out_of_order(array))
    return array, ends


def _first_out_of_order(parents: IntArray) -> str:
    path: list[int] = []  # the ancestors-or-self of the previous node: the only legal parents
    for node, parent in enumerate(parents.tolist()):
        while path and path[-1] != parent:
            path.pop()
        if parent != -1 and not path:
            break
        path.append(node)
    return f"parents[{node}] = {parent}: not DFS pre-order, node {parent}'s subtree was left before"


def check_lengths(lengths: Sequence[int] | NDArray[np.integer], nodes: int) -> IntArray:
    """`lengths` as int64 [N], all >= 0; ValueError otherwise."""
    array = as_int_vector(lengths, "lengths")
    if array.size != nodes:
        raise ValueError(f"lengths: expected {nodes} entries like parents, got {array.size}")
    negative = np.flatnonzero(array < 0)
    if negative.size:
        raise ValueError(f"lengths[{negative[0]}] = {array[negative[0]]}: a length must not be negative")
    return array


def node_ends(parents: IntArray) -> IntArray:
    """[N]: one past the last descendant of each node, in node indices.

    The last descendant is reached over last children; every round doubles how many of them it skips.
    """
    last = np.arange(parents.size + 1)
    # The last one written stays, and they ascend; roots write at the end.
    last[parents] = np.arange(parents.size)
    last = last[:-1]
    for _ in range(2):  # most nodes take part in the first rounds
        last = last.take(last)
    active = np.flatnonzero(last.take(last) > last)
    while active.size:
        beyond = last.take(last.take(active))
        last[active] = beyond
        active = active.compress(last.take(beyond) > beyond)
    return last + 1


def childless(parents: IntArray) -> IntArray:
    """The nodes without children, ascending: the forest's leaves in DFS order."""
    has_child = np.zeros(parents.size, dtype=bool)
    has_child[parents[parents >= 0]] = True
    return np.flatnonzero(~has_child)


def roots_of(parents: IntArray) -> IntArray:
    """[N]: the root above each node."""
    is_root = parents < 0
    return np.flatnonzero(is_root)[np.cumsum(is_root) - 1]


def path_sums(parents: IntArray, values: IntArray) -> IntArray:
    """[N]: the sum of `values` from the root down to and including each node.

    A node adds its value where its subtree begins and takes it back where that ends: exact, in integers.
    """
    change = np.zeros(parents.size + 1, dtype=np.int64)
    change[:-1] = values
    np.subtract.at(change, node_ends(parents), values)
    return np.cumsum(change[:-1])
