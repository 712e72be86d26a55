"""Plain Python, one node at a time, bottom-up: what `tree_reductions` is measured and checked against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Below(NamedTuple):
    """Of the leaves at or below one node."""

    leaves: int
    total: float
    squares: float  # of the distances from the mean
    least: float
    largest: float


def below(parents: Sequence[int], leaf_nodes: Sequence[int], per_leaf: Sequence[float]) -> list[Below]:
    """[N], of per_leaf [L]: every node is its own leaves and its children together."""
    found: list[Below | None] = [None] * len(parents)
    for node, value in zip(leaf_nodes, per_leaf, strict=True):
        found[node] = _together(found[node], Below(1, value, 0.0, value, value))
    for node in range(len(parents) - 1, -1, -1):
        mine, parent = found[node], parents[node]
        if mine is None:
            raise ValueError(f"leaf_nodes: node {node} has no leaf at or below it, so it has no value")
        if parent >= 0:
            found[parent] = _together(found[parent], mine)
    return [mine for mine in found if mine is not None]


def value(node: Below) -> float:
    """V_hat."""
    return node.total / node.leaves


def std(node: Below) -> float:
    return math.sqrt(node.squares / node.leaves) if node.least < node.largest else 0.0


def _together(one: Below | None, other: Below) -> Below:
    if one is None:
        return other
    count = one.leaves + other.leaves
    apart = other.total / other.leaves - one.total / one.leaves
    return Below(
        count,
        one.total + other.total,
        one.squares + other.squares + apart * apart * one.leaves * other.leaves / count,
        min(one.least, other.least),
        max(one.largest, other.largest),
    )
