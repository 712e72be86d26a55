"""Segmented tree reductions beside per-node Python and beside the usual way in tensor operations.

`forest` checks parents and leaves and finds every node's leaf range: every call that begins with parents pays it.
`V_hat and std` are of all nodes, the forest being known. `treepo` gives the advantages with the deepest nesting,
from parents and rewards, the forest included. Both `forest` and `treepo` run on the CPU whatever the device, and
say so under another one.

Python works on lists, on a sample of whole trees; its time is scaled. `per node` looks at each node's leaves (for
treepo, each leaf's ancestors), `bottom-up` at each node's children, without checks. The tensor way goes level by
level from the deepest nodes up, with `index_add_` into the parents, the levels being known; to nested groups it has
no answer. `error` is the largest deviation from Python's results on the sample, relative above 1.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trace_kernels.advantages import leaf_advantages
from trace_kernels.forest import childless, path_sums
from trace_kernels.reference import tree_reductions as python
from trace_kernels.tree_reductions import LeafRanges, subtree_moments

from .layout import random_parents
from .measure import median_ratio
from .rows import Row

SUBJECT = "tree_reductions"
SAMPLE = 20_000

Ints = NDArray[np.int64]


class Method(NamedTuple):
    phase: str
    name: str
    run: Callable[[], Any]
    scale: float = 1.0  # of its time
    error: Callable[[Any], float] | None = None


def add_arguments(group: Any) -> None:
    """No options of its own."""


def run(options: argparse.Namespace) -> list[Row]:
    device = torch.device(options.device)
    sizes = (20_000,) if options.quick else (250_000, 1_000_000)
    return [row for nodes in sizes for row in _rows(nodes, device, options.runs)]


def _rows(nodes: int, device: torch.device, runs: int) -> list[Row]:
    parents = random_parents(nodes, nodes // 1000, np.random.default_rng(0))
    leaves = childless(parents)
    workload = f"{nodes} nodes, {leaves.size} leaves, {nodes // 1000} trees"
    rows = []
    methods = _methods(parents, leaves, device)
    for phase in dict.fromkeys(method.phase for method in methods):
        own, *peers = (method for method in methods if method.phase == phase)
        times: dict[str, list[float]] = {method.name: [] for method in (own, *peers)}
        error = own.error(own.run()) if own.error else None
        for _ in range(runs):  # side by side, so that a slow spell of the machine hits all of them
            for method in (own, *peers):
                times[method.name].append(_milliseconds(method, device))
        for method, against in ((own, peers[0]), *((peer, own) for peer in peers)):
            mine = times[method.name]
            rows.append(
                Row(SUBJECT, workload, method.name, phase, statistics.median(mine), runs, peer=against.name,
                    ratio=median_ratio(times[against.name], mine), error=error if method is own else None)
            )  # fmt: skip
    return rows


def _milliseconds(method: Method, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    method.run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * method.scale * (time.perf_counter() - start)


def _methods(parents: Ints, leaves: Ints, device: torch.device) -> list[Method]:
    rewards = np.random.default_rng(1).normal(size=leaves.size)
    on_device = torch.from_numpy(rewards).to(device)
    forest = LeafRanges.of(parents, leaves).to(device)
    # Whole trees from the front, as lists: what a loop over Python objects would have.
    starts = np.flatnonzero(parents < 0)
    end = int(np.append(starts, parents.size)[np.searchsorted(starts, min(SAMPLE, parents.size))])
    few = int(np.searchsorted(leaves, end))
    sample = parents[:end].tolist(), leaves[:few].tolist(), rewards[:few].tolist()
    scale = parents.size / end
    truth = python.below(*sample)

    def moments() -> tuple[Tensor, Tensor]:
        return subtree_moments(on_device, forest)

    def python_moments() -> list[tuple[float, float]]:
        return [(python.value(node), python.std(node)) for node in python.below(*sample)]

    def moments_error(got: tuple[Tensor, Tensor]) -> float:
        return _error(got, [[python.value(node) for node in truth], [python.std(node) for node in truth]])

    def treepo_error(got: NDArray[np.float64]) -> float:
        return _error([torch.from_numpy(got)], [_python_treepo(*sample)])

    sample_ranges = forest.low[:end].tolist(), forest.high[:end].tolist()
    levels = _levels(parents, device)
    above, at = torch.from_numpy(parents).to(device), torch.from_numpy(leaves).to(device)
    own, loop, up = "tree_reductions", "Python per node (sample, scaled)", "Python bottom-up (sample, scaled)"
    job, host = "V_hat and std", "" if device.type == "cpu" else ", on the CPU"
    return [
        Method("forest" + host, own, lambda: LeafRanges.of(parents, leaves)),
        Method("forest" + host, up, lambda: _python_ranges(*sample[:2]), scale),
        Method(job, own, moments, error=moments_error),
        Method(job, loop, lambda: _python_moments(*sample_ranges, sample[2]), scale),
        Method(job, up, python_moments, scale),
        Method(job, "index_add_ by level", lambda: _by_level(levels, above, at, on_device)),
        Method(
            "treepo" + host,
            own,
            lambda: leaf_advantages(parents, leaves, rewards, "treepo"),
            error=treepo_error,
        ),
        Method("treepo" + host, loop, lambda: _python_treepo(*sample), scale),
    ]


def _error(got: Sequence[Tensor], want: Sequence[Sequence[float]]) -> float:
    pairs = ((x[: len(y)].cpu().numpy(), np.array(y)) for x, y in zip(got, want, strict=True))
    return max(float((np.abs(x - y) / np.maximum(np.abs(y), 1.0)).max()) for x, y in pairs)


def _levels(parents: Ints, device: torch.device) -> list[Tensor]:
    """The nodes of every depth, roots first."""
    depth = path_sums(parents, np.ones_like(parents))
    order = np.argsort(depth, kind="stable")
    cuts = np.flatnonzero(np.diff(depth[order])) + 1
    return [torch.from_numpy(level).to(device) for level in np.split(order, cuts)]


def _by_level(levels: list[Tensor], above: Tensor, at: Tensor, per_leaf: Tensor) -> tuple[Tensor, Tensor]:
    """From sums and sums of squares, with the digits that their difference leaves."""
    fields = torch.ones_like(per_leaf), per_leaf, per_leaf * per_leaf
    totals = [per_leaf.new_zeros(len(above)).index_add_(0, at, field) for field in fields]
    for level in reversed(levels[1:]):
        for total in totals:
            total.index_add_(0, above[level], total[level])
    count, total, square = totals
    mean = total / count
    return mean, (square / count - mean * mean).clamp(min=0).sqrt()


def _python_moments(low: list[int], high: list[int], per_leaf: list[float]) -> list[tuple[float, float]]:
    """A node's mean and std from its own leaves."""
    found = []
    for first, last in zip(low, high, strict=True):
        mine = per_leaf[first:last]
        mean = sum(mine) / len(mine)
        varied = min(mine) < max(mine)
        found.append((mean, math.sqrt(sum((x - mean) ** 2 for x in mine) / len(mine)) if varied else 0.0))
    return found


def _python_ranges(parents: list[int], leaf_nodes: list[int]) -> list[tuple[int, int]]:
    """A node's leaves, as a range, from those of its children."""
    low, high = [len(leaf_nodes)] * len(parents), [0] * len(parents)
    for leaf, node in enumerate(leaf_nodes):
        low[node], high[node] = min(low[node], leaf), leaf + 1
    for node in range(len(parents) - 1, -1, -1):
        parent = parents[node]
        if parent >= node or high[node] == 0:
            raise ValueError(f"node {node}: no leaf below it, or its parent after it")
        if parent >= 0:
            low[parent], high[parent] = min(low[parent], low[node]), max(high[parent], high[node])
    return list(zip(low, high, strict=True))


def _python_treepo(parents: list[int], leaf_nodes: list[int], per_leaf: list[float]) -> list[float]:
    nodes = python.below(parents, leaf_nodes, per_leaf)
    groups = [(python.value(node), python.std(node), node.leaves) for node in nodes]
    found = []
    for leaf, reward in zip(leaf_nodes, per_leaf, strict=True):
        node, total, count, size = leaf, 0.0, 0, 1
        while node >= 0:
            mean, std, members = groups[node]
            if members > size:  # a chain of only children is one group
                total += (reward - mean) / (std + 1e-6) if std else 0.0
                count, size = count + 1, members
            node = parents[node]
        found.append(total / max(count, 1))
    return found
