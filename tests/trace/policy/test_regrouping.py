"""Forests regrouped: the prompts of a pool as one tree, and a step's trees as minibatches."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_kernels.packing import cut_forest
from trace_rl.policy.batch import Forest, pack, prompt_forest, schedule, split_minibatches
from trace_rl.rollout.tree import Node, RolloutTree

from .oracle import TASK, random_trees


def prompts(*ids: list[int]) -> list[RolloutTree]:
    return [RolloutTree(TASK, [Node(-1, 0, "root", i, [0] * len(i), [0.0] * len(i))]) for i in ids]


def row_prefix(forest: Forest, row: int) -> list[int]:
    t, n = forest.keys[row]
    return forest.trees[t].prefix_ids(n)


@pytest.mark.parametrize(
    ("ids", "tokens"),
    [
        ([[1, 2, 3, 4], [1, 2, 5], [1, 2, 6, 7]], 2 + 2 + 1 + 2),
        ([[1, 2], [3, 4, 5]], 5),
        ([[1, 2, 3]], 3),
        ([[7]], 1),
        ([[1, 2, 3]] * 3, 2 + 3),
        ([[1, 2], [1, 2, 3, 4], [1, 2, 3]], 1 + 1 + 3 + 2),
        ([[1], [1, 2]], 3),
    ],
    ids=[
        "common",
        "nothing common",
        "one",
        "one token",
        "identical",
        "prefix of another",
        "one token prefix",
    ],
)
def test_prompts_share_their_beginning(ids: list[list[int]], tokens: int) -> None:
    forest, rows = prompt_forest(prompts(*ids))
    assert [row_prefix(forest, row) for row in rows] == ids
    assert len(set(rows.tolist())) == len(ids)
    assert forest.tokens == tokens
    assert forest.leaves.size == 0
    for world in (1, 2, 3):
        (one, *others) = schedule(forest, 1 << 20, world)
        covered = {int(row) for bin in (one, *others) for part in bin if part for row in part.nodes}
        assert covered == set(range(len(forest.keys)))


@given(st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=6), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_any_prompts_come_back_whole(ids: list[list[int]]) -> None:
    trees = prompts(*ids)
    forest, rows = prompt_forest(trees)
    assert [row_prefix(forest, row) for row in rows] == ids
    assert forest.tokens <= sum(map(len, ids))
    assert [tree.nodes[0].token_ids for tree in trees] == ids  # untouched
    (part,) = cut_forest(forest.parents, forest.lengths, max_tokens=forest.tokens)
    ends = pack(forest, part).node_ends
    assert len(ends) == len(forest.keys)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_minibatches_share_out_the_trees(count: int) -> None:
    trees = random_trees(0, 4)
    found = split_minibatches(Forest.of(trees), count)
    assert len(found) == min(count, 4)
    sizes = [len(forest.trees) for forest in found]
    assert max(sizes) - min(sizes) <= 1
    assert sorted(id(tree) for forest in found for tree in forest.trees) == sorted(map(id, trees))
