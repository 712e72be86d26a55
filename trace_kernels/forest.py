"""Checks and reductions shared by everything that describes a forest as arrays in DFS pre-order.

A forest is `parents [N]`: node i's parent is a smaller index, or -1 for a root, and every subtree is a
contiguous range of indices that starts at its root.
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
    array = as_int_vector(parents, "parents")
    path: list[int] = []  # the ancestors-or-self of the previous node: the only legal parents
    for node, parent in enumerate(array.tolist()):
        if parent < -1 or parent >= node:
            raise ValueError(
                f"parents[{node}] = {parent}: a parent must come before its child (-1 for a root)"
            )
        while path and path[-1] != parent:
            path.pop()
        if parent != -1 and not path:
            raise ValueError(
                f"parents[{node}] = {parent}: not DFS pre-order, node {parent}'s subtree was left before"
            )
        path.append(node)
    return array


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
    """[N]: one past the last descendant of each node, in node indices."""
    ends = list(range(1, parents.size + 1))
    for node, parent in zip(range(parents.size - 1, -1, -1), parents[::-1].tolist(), strict=True):
        if parent >= 0 and ends[node] > ends[parent]:
            ends[parent] = ends[node]
    return np.array(ends, dtype=np.int64)


def childless(parents: IntArray) -> IntArray:
    """The nodes without children, ascending: the forest's leaves in DFS order."""
    has_child = np.zeros(parents.size, dtype=bool)
    has_child[parents[parents >= 0]] = True
    return np.flatnonzero(~has_child)


def roots_of(parents: IntArray) -> IntArray:
    """[N]: the root above each node."""
    roots = np.flatnonzero(parents < 0)
    return roots[np.searchsorted(roots, np.arange(parents.size), side="right") - 1]


def path_sums(parents: IntArray, values: IntArray) -> IntArray:
    """[N]: the sum of `values` from the root down to and including each node."""
    sums: list[int] = []
    for parent, value in zip(parents.tolist(), values.tolist(), strict=True):
        sums.append(value + (sums[parent] if parent >= 0 else 0))
    return np.array(sums, dtype=np.int64)
