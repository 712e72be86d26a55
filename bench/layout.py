"""Host work between sampling and the model: layouts, cutting, advantages and the two allocation solvers.

No peers; `limit_ms` among the figures is the most a method may take. `error` is a self-check: 0 is right.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trace_kernels.advantages import advantages
from trace_kernels.block_lists import KeyItems, QueryLists, key_items, query_lists
from trace_kernels.forest import childless, node_ends
from trace_kernels.layout import TreeLayout
from trace_kernels.packing import cut_forest
from trace_kernels.rollouts import pack_rollouts
from trace_rl.allocation import allocate_prefixes, allocate_roots

from .measure import median_ms
from .rows import Row

SUBJECT = "layout"

Ints = NDArray[np.int64]


class Case(NamedTuple):
    """`error` looks at the result of `run`."""

    workload: str
    method: str
    run: Callable[[], Any]
    error: Callable[[Any], float]
    limit_ms: float | None = None


def add_arguments(group: Any) -> None:
    """No options of its own."""


def random_parents(nodes: int, trees: int, rng: np.random.Generator) -> Ints:
    """Parents [nodes] of random trees in DFS pre-order: each node hangs on a random node of the last path."""
    parents = np.full(nodes, -1, dtype=np.int64)
    roots = set(np.linspace(0, nodes, trees, endpoint=False).astype(int).tolist())
    path: list[int] = []
    for node in range(nodes):
        if node in roots:
            path = [node]
            continue
        path = path[: max(1, len(path) - int(rng.geometric(0.5)) + 1)]
        parents[node] = path[-1]
        path.append(node)
    return parents


def cases(quick: bool) -> list[Case]:
    """All of them; small with `quick`."""
    scale = 16 if quick else 1
    rng = np.random.default_rng(0)
    return [
        *_forest_cases(65_536 // scale, 2_000 // scale, rng, 20.0),
        _rollout_case(1_000 // scale, rng),
        *_allocation_cases(1_024 // scale, rng, 100.0),
    ]


def _forest_cases(tokens: int, segments: int, rng: np.random.Generator, limit_ms: float) -> list[Case]:
    parents = random_parents(segments, max(1, segments // 100), rng)
    lengths = rng.multinomial(tokens, np.full(segments, 1 / segments)).astype(np.int64)
    index = np.arange(tokens, dtype=np.int64)
    end = np.cumsum(lengths)[node_ends(parents) - 1]
    pairs = int((np.repeat(end, lengths) - index).sum())

    nodes = 2 * segments
    forest = random_parents(nodes, max(1, nodes // 100), rng)
    node_tokens = rng.integers(50, 400, size=nodes)
    leaves = childless(forest)
    rewards = rng.integers(2, size=leaves.size).astype(float)
    size = f"{nodes} nodes, {leaves.size} leaves"
    found = [
        Case(
            f"{tokens} tokens, {segments} segments",
            "TreeLayout.from_segments",
            lambda: TreeLayout.from_segments(parents, lengths),
            lambda layout: abs(layout.pairs - pairs),
            limit_ms,
        ),
        Case(
            f"{tokens} tokens, {segments} segments",
            "layout, block lists and dK/dV items",
            lambda: _lists(parents, lengths),
            _unlisted_blocks,
            limit_ms,
        ),
        Case(
            f"{tokens} tokens, {segments} segments",
            "TreeLayout.from_subtree_end",
            lambda: TreeLayout.from_subtree_end(np.repeat(end, lengths)),
            lambda layout: abs(layout.pairs - pairs),
            limit_ms,
        ),
        Case(
            size,
            "cut_forest",
            lambda: cut_forest(forest, node_tokens, max_tokens=16_384),
            lambda parts: float(
                np.abs(np.concatenate([p.leaves for p in parts]) - np.arange(leaves.size)).max()
            ),
        ),
    ]
    for estimator in ("grpo", "tree_grpo", "treepo", "turn"):
        found.append(
            Case(
                size,
                f"advantages {estimator}",
                partial(_terms, forest, leaves, rewards, estimator),
                lambda terms: abs(float(terms[2][forest < 0].sum()) - leaves.size),
            )
        )
    return found


def _rollout_case(rollouts: int, rng: np.random.Generator) -> Case:
    """Groups of 20 rollouts, each group with a prompt of 300 tokens and answers of 200."""
    groups = -(-rollouts // 20)
    prompts = rng.integers(150_000, size=(groups, 300))
    answers = rng.integers(150_000, size=(rollouts, 200))
    answers[:, 0] = np.arange(rollouts)  # no two answers of a group start alike
    tokens = [np.concatenate([prompts[r // 20], answers[r]]) for r in range(rollouts)]
    packed = 300 * groups + 200 * rollouts
    return Case(
        f"{rollouts} rollouts of 500 tokens, {packed} packed",
        "pack_rollouts",
        lambda: pack_rollouts(tokens),
        lambda found: abs(found.layout.num_tokens - packed),
    )


def _lists(parents: Ints, lengths: Ints) -> tuple[QueryLists, KeyItems]:
    """All that the Triton backend derives from a layout, at three tile shapes."""
    layout = TreeLayout.from_segments(parents, lengths)
    chains, tokens = layout.chains, layout.num_tokens
    query_lists(chains, tokens, 128, 128)
    query_lists(chains, tokens, 128, 64)
    return query_lists(chains, tokens, 64, 128), key_items(chains, tokens, 64, 128, programs=66)


def _unlisted_blocks(found: tuple[QueryLists, KeyItems]) -> float:
    """Pairs of blocks that the forward's lists and the items of dK/dV do not have in common."""
    lists, (items, _, _) = found
    return abs(len(lists.key_blocks) - int((-(-(items[:, 4] - items[:, 1]) // 64)).sum()))


def _terms(parents: Ints, leaves: Ints, rewards: NDArray[np.float64], estimator: str) -> tuple[Any, ...]:
    return advantages(parents, leaves, rewards, estimator).terms()


def _allocation_cases(prompts: int, rng: np.random.Generator, limit_ms: float) -> list[Case]:
    chance = rng.uniform(size=prompts)
    candidates = 2 * prompts
    owner = rng.integers(prompts, size=candidates)
    repeat = rng.uniform(size=candidates)
    budgets = np.ones(prompts, dtype=np.int64)
    size = f"B = M = {prompts}"
    return [
        Case(
            size,
            "allocate_roots",
            lambda: allocate_roots(chance, prompts, rng=np.random.default_rng(0), kappa=20.0),
            lambda counts: abs(int(counts.sum()) - prompts),
            limit_ms,
        ),
        Case(
            f"{size}, {candidates} candidates",
            "allocate_prefixes",
            lambda: allocate_prefixes(repeat, owner, budgets, rng=np.random.default_rng(0), kappa=20.0),
            lambda found: abs(int(found.counts.sum()) + found.unspent - prompts),
            limit_ms,
        ),
    ]


def run(options: argparse.Namespace) -> list[Row]:
    rows = []
    for case in cases(options.quick):
        limits = {} if case.limit_ms is None or options.quick else {"limit_ms": case.limit_ms}
        rows.append(
            Row(
                SUBJECT,
                case.workload,
                case.method,
                "host",
                median_ms(case.run, options.runs),
                options.runs,
                error=float(case.error(case.run())),
                figures=limits,
            )
        )
    return rows
