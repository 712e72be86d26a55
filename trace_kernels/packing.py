"""Cuts a forest into micro-batches under a token limit, and spreads micro-batches over ranks.

Pure functions on arrays: `parents [N]` in DFS pre-order (-1 for a root) and `lengths [N]` tokens per node.
Leaves are the nodes without children, numbered in DFS order; a rollout that ends inside the tree is an
empty leaf.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .forest import FloatArray, IntArray, check_lengths, check_parents, childless, path_sums, roots_of

IntSequence = Sequence[int] | NDArray[np.integer]


@dataclass(frozen=True)
class CostModel:
    """Time of a packed pass: `token * tokens + pair * attended pairs`, in any unit.

    The default weighs a pair by attention's share of the work per token in a model of 4,096 channels: about
    24 d^2 + 4 d per pair, so one pair costs 1 / (6 d) of a token.
    """

    token: float = 1.0
    pair: float = 1.0 / (6 * 4096)

    def __call__(self, tokens: float, pairs: float) -> float:
        return self.token * tokens + self.pair * pairs


@dataclass(frozen=True, eq=False)
class Part:
    """One micro-batch of a forest.

    Attributes:
        nodes: [n] node indices in DFS order, closed under ancestors.
        leaves: [m] leaf numbers (positions among the forest's leaves) it owns, a contiguous run.
        leaf_nodes: [m] the same leaves as node indices.
        tokens: tokens in `nodes`.
        pairs: attended (query, key) pairs.
        cost: the cost model's value.
    """

    nodes: IntArray
    leaves: IntArray
    leaf_nodes: IntArray
    tokens: int
    pairs: int
    cost: float

    def local_parents(self, parents: IntSequence) -> IntArray:
        """[n]: the parents of `nodes` as positions within `nodes`, ready for `TreeLayout.from_segments`."""
        above = np.asarray(parents, dtype=np.int64)[self.nodes]
        return np.where(above < 0, -1, np.searchsorted(self.nodes, above))


@dataclass(frozen=True)
class _Totals:
    """What the cutter needs about each node; sums over a DFS run of nodes are differences of the cumulated
    ones."""

    path_tokens: IntArray  # [N] tokens on the path down to and including the node
    tokens: IntArray  # [N] cumulated over the nodes in order
    path_pairs: IntArray
    pairs: IntArray


def _totals(parents: IntArray, lengths: IntArray) -> _Totals:
    path_tokens = path_sums(parents, lengths)
    # A token at depth t attends to t + 1 tokens, whichever part it is in: pairs add up over nodes.
    pairs = lengths * (path_tokens - lengths) + lengths * (lengths + 1) // 2
    return _Totals(path_tokens, np.cumsum(lengths), path_sums(parents, pairs), np.cumsum(pairs))


def cut_forest(
    parents: IntSequence, lengths: IntSequence, *, max_tokens: int, cost: CostModel | None = None
) -> list[Part]:
    """Micro-batches of at most `max_tokens` tokens in which every leaf is owned exactly once.

    A tree that fits is never cut, and neighbouring trees share a part while they fit. A larger tree is cut
    into runs of consecutive leaves whose shared path is forwarded again in each: as few runs as possible,
    and among those the cuts of least total cost. Leaves keep their order over the parts.

    Args:
        parents: [N], DFS pre-order, -1 for a root.
        lengths: [N] tokens per node, >= 0.
        max_tokens: limit per part.
        cost: default `CostModel()`.

    Raises:
        ValueError: malformed arrays, no token at all, or one root-to-leaf path longer than the limit.
    """
    parent = check_parents(parents)
    length = check_lengths(lengths, parent.size)
    if not length.sum():
        raise ValueError(f"lengths: the {parent.size} nodes hold no token")
    cost = cost or CostModel()
    totals = _totals(parent, length)
    leaf_nodes = childless(parent)
    longest = int(leaf_nodes[np.argmax(totals.path_tokens[leaf_nodes])])
    if totals.path_tokens[longest] > max_tokens:
        raise ValueError(
            f"max_tokens = {max_tokens}: the path to leaf node {longest} alone is "
            f"{totals.path_tokens[longest]} tokens long and cannot be cut"
        )

    runs: list[tuple[int, int, int]] = []  # (first leaf, one past the last leaf, tokens)
    tree_of_leaf = roots_of(parent)[leaf_nodes]
    bounds = np.flatnonzero(np.diff(tree_of_leaf)) + 1
    for first, last in zip([0, *bounds.tolist()], [*bounds.tolist(), leaf_nodes.size], strict=True):
        for a, b in _cut_tree(leaf_nodes[first:last], totals, max_tokens, cost):
            tokens = int(_run_sum(totals.path_tokens, totals.tokens, leaf_nodes, first + a, first + b))
            if runs and tree_of_leaf[runs[-1][0]] != tree_of_leaf[first + a]:
                start, _, so_far = runs[-1]
                if so_far + tokens <= max_tokens:
                    runs[-1] = (start, first + b, so_far + tokens)
                    continue
            runs.append((first + a, first + b, tokens))
    return [_part(parent, length, leaf_nodes, start, stop, cost) for start, stop, _ in runs]


def _run_sum(path: IntArray, cumulated: IntArray, leaf_nodes: IntArray, first: int, last: int) -> int:
    """Sum over the nodes of one tree's leaves [first, last): the first path, then nodes up to the last."""
    return path[leaf_nodes[first]] + cumulated[leaf_nodes[last - 1]] - cumulated[leaf_nodes[first]]


def _cut_tree(
    leaf_nodes: IntArray, totals: _Totals, max_tokens: int, cost: CostModel
) -> list[tuple[int, int]]:
    """Runs [a, b) of one tree's leaves: fewest parts, then least cost, by dynamic programming."""
    count = leaf_nodes.size
    # Between two leaves of a run lie exactly the nodes of the later leaf's path that are new to the run.
    head_tokens = totals.path_tokens[leaf_nodes] - totals.tokens[leaf_nodes]
    head_cost = cost.token * head_tokens + cost.pair * (totals.path_pairs - totals.pairs)[leaf_nodes]
    ends = totals.tokens[leaf_nodes]
    end_cost = cost.token * ends + cost.pair * totals.pairs[leaf_nodes]
    if head_tokens[0] + ends[-1] <= max_tokens:
        return [(0, count)]
    best: list[tuple[int, float]] = [(0, 0.0)]  # (parts, cost) of the first b leaves
    came_from = [0]
    for b in range(1, count + 1):
        option, start = (count + 1, 0.0), b - 1
        # A longer run never needs fewer tokens, so the scan may stop at the first start that does not fit.
        for a in range(b - 1, -1, -1):
            if head_tokens[a] + ends[b - 1] > max_tokens:
                break
            candidate = (best[a][0] + 1, best[a][1] + float(head_cost[a] + end_cost[b - 1]))
            if candidate < option:
                option, start = candidate, a
        best.append(option)
        came_from.append(start)
    runs = []
    b = count
    while b:
        runs.append((came_from[b], b))
        b = came_from[b]
    return runs[::-1]


def _part(
    parents: IntArray, lengths: IntArray, leaf_nodes: IntArray, first: int, last: int, cost: CostModel
) -> Part:
    path: list[int] = []
    node = int(leaf_nodes[first])
    while node >= 0:
        path.append(node)
        node = int(parents[node])
    nodes = np.concatenate([path[::-1], np.arange(leaf_nodes[first] + 1, leaf_nodes[last - 1] + 1)])
    nodes = nodes.astype(np.int64)
    local = np.where(parents[nodes] < 0, -1, np.searchsorted(nodes, parents[nodes]))
    totals = _totals(local, lengths[nodes])
    tokens, pairs = int(totals.tokens[-1]), int(totals.pairs[-1])
    leaves = np.arange(first, last, dtype=np.int64)
    return Part(nodes, leaves, leaf_nodes[first:last], tokens, pairs, cost(tokens, pairs))


def reforward_factor(parts: Sequence[Part], lengths: IntSequence) -> float:
    """Tokens forwarded by all parts over tokens of the forest: 1.0 when no tree was cut."""
    return sum(part.tokens for part in parts) / int(np.sum(lengths))


def balance(costs: Sequence[float] | FloatArray, bins: int) -> list[list[int]]:
    """Spreads items over `bins`: longest first, each to the least loaded bin.

    Deterministic: equal costs go by index, equal loads to the lower bin. Returns each bin's item indices,
    ascending; bins may be empty. ValueError for `bins` < 1.
    """
    if bins < 1:
        raise ValueError(f"bins: expected at least 1, got {bins}")
    result: list[list[int]] = [[] for _ in range(bins)]
    loads = [(0.0, b) for b in range(bins)]
    for item in sorted(range(len(costs)), key=lambda i: (-float(costs[i]), i)):
        load, b = heapq.heappop(loads)
        result[b].append(item)
        heapq.heappush(loads, (load + float(costs[item]), b))
    return [sorted(items) for items in result]
