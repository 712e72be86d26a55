import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_kernels import CostModel, Part, TreeLayout, balance, cut_forest, reforward_factor

from .drawn_forests import forests
from .forests import Forest

COST = CostModel(token=2.0, pair=0.25)


def ancestors(parents: list[int], node: int) -> list[int]:
    return [*ancestors(parents, parents[node]), node] if node >= 0 else []


def leaves_of(parents: list[int]) -> list[int]:
    return [i for i in range(len(parents)) if i not in parents]


def longest_path(forest: Forest) -> int:
    return max(len(r) for r in forest.rollouts())


@settings(max_examples=200, deadline=None)
@given(forest=forests(), slack=st.integers(0, 30))
def test_parts_hold_every_leaf_once_under_the_limit(forest: Forest, slack: int) -> None:
    limit = longest_path(forest) + slack
    parts = cut_forest(forest.parents, forest.lengths, max_tokens=limit, cost=COST)
    leaves = leaves_of(forest.parents)
    assert [x for part in parts for x in part.leaves.tolist()] == list(range(len(leaves)))
    for part in parts:
        assert part.leaf_nodes.tolist() == [leaves[i] for i in part.leaves]
        closure = sorted({a for leaf in part.leaf_nodes.tolist() for a in ancestors(forest.parents, leaf)})
        assert part.nodes.tolist() == closure
        tokens = sum(forest.lengths[n] for n in closure)
        assert part.tokens == tokens <= limit
        if tokens:
            layout = TreeLayout.from_segments(
                part.local_parents(forest.parents), [forest.lengths[n] for n in closure]
            )
            assert layout.pairs == part.pairs
        assert part.cost == pytest.approx(2.0 * part.tokens + 0.25 * part.pairs)
    total = sum(part.tokens for part in parts)
    assert reforward_factor(parts, forest.lengths) == pytest.approx(total / forest.num_tokens)


def owner(parts: list[Part], leaf: int) -> int:
    return next(i for i, part in enumerate(parts) if leaf in part.leaves)


@settings(max_examples=200, deadline=None)
@given(forest=forests(), slack=st.integers(0, 30))
def test_a_tree_that_fits_is_not_cut(forest: Forest, slack: int) -> None:
    limit = longest_path(forest) + slack
    parts = cut_forest(forest.parents, forest.lengths, max_tokens=limit)
    leaves = leaves_of(forest.parents)
    roots = [ancestors(forest.parents, leaf)[0] for leaf in leaves]
    for root in set(roots):
        tree = [n for n in range(len(forest.parents)) if ancestors(forest.parents, n)[0] == root]
        owners = {owner(parts, i) for i, r in enumerate(roots) if r == root}
        if sum(forest.lengths[n] for n in tree) <= limit:
            assert len(owners) == 1
        else:
            assert len(owners) > 1
    if forest.num_tokens <= limit:
        assert len(parts) == 1
        assert reforward_factor(parts, forest.lengths) == 1.0


@settings(max_examples=150, deadline=None)
@given(forest=forests(max_nodes=10), slack=st.integers(0, 12))
def test_cuts_of_one_tree_are_the_best_of_all_cuts(forest: Forest, slack: int) -> None:
    parents = [-1, *(p + 1 for p in forest.parents)]  # everything under one new root
    lengths = [2, *forest.lengths]
    limit = longest_path(forest) + 2 + slack
    leaves = leaves_of(parents)
    parts = cut_forest(parents, lengths, max_tokens=limit, cost=COST)

    def price(run: list[int]) -> tuple[int, float]:
        nodes = sorted({a for leaf in run for a in ancestors(parents, leaf)})
        tokens = sum(lengths[n] for n in nodes)
        pairs = sum(
            lengths[n] * sum(lengths[a] for a in ancestors(parents, n)[:-1])
            + lengths[n] * (lengths[n] + 1) // 2
            for n in nodes
        )
        return tokens, COST(tokens, pairs)

    best = (len(leaves) + 1, 0.0)
    for cuts in itertools.product([False, True], repeat=len(leaves) - 1):
        runs = [[leaves[0]]]
        for leaf, cut in zip(leaves[1:], cuts, strict=True):
            if cut:
                runs.append([])
            runs[-1].append(leaf)
        prices = [price(run) for run in runs]
        if all(tokens <= limit for tokens, _ in prices):
            best = min(best, (len(runs), round(sum(c for _, c in prices), 6)))
    assert (len(parts), round(sum(part.cost for part in parts), 6)) == best


def test_neighbouring_trees_share_a_part() -> None:
    parts = cut_forest([-1, 0, 0, -1, -1, 4, 4], [10, 5, 5, 30, 20, 25, 25], max_tokens=50)
    assert [part.nodes.tolist() for part in parts] == [[0, 1, 2, 3], [4, 5], [4, 6]]
    assert [part.tokens for part in parts] == [50, 45, 45]
    assert parts[2].local_parents([-1, 0, 0, -1, -1, 4, 4]).tolist() == [-1, 0]
    assert reforward_factor(parts, [10, 5, 5, 30, 20, 25, 25]) == pytest.approx(140 / 120)


def test_a_path_over_the_limit_is_an_error() -> None:
    with pytest.raises(ValueError, match="max_tokens = 11: the path to leaf node 2 alone is 12 tokens long"):
        cut_forest([-1, 0, 1], [3, 4, 5], max_tokens=11)
    with pytest.raises(ValueError, match="lengths: the 1 nodes hold no token"):
        cut_forest([-1], [0], max_tokens=4)


@settings(max_examples=150, deadline=None)
@given(costs=st.lists(st.integers(0, 50), max_size=20), bins=st.integers(1, 6))
def test_balance(costs: list[int], bins: int) -> None:
    result = balance(costs, bins)
    assert result == balance(np.array(costs, dtype=np.float64), bins)
    assert len(result) == bins
    assert sorted(i for items in result for i in items) == list(range(len(costs)))
    assert all(items == sorted(items) for items in result)
    loads = [sum(costs[i] for i in items) for items in result]
    # The last item went to the least loaded bin, so no bin is above the mean by more than its smallest item.
    for items, load in zip(result, loads, strict=True):
        if items:
            assert load - min(costs[i] for i in items) <= sum(costs) / bins


def test_balance_breaks_ties_by_index() -> None:
    assert balance([3.0, 3.0, 3.0, 3.0, 1.0], 2) == [[0, 2, 4], [1, 3]]
    with pytest.raises(ValueError, match="bins: expected at least 1, got 0"):
        balance([1.0], 0)
