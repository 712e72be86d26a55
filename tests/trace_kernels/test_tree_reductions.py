"""Reductions against exact fractions, on the trees alone and in batches, and at the ends of the floats."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_kernels.backends import ranges
from trace_kernels.forest import childless, node_ends, path_sums
from trace_kernels.reference import tree_reductions as python
from trace_kernels.tree_reductions import (
    LeafRanges,
    ancestor_sums,
    range_extrema,
    range_moments,
    range_sums,
    segments,
    sibling_moments,
    subtree_extrema,
    subtree_moments,
    subtree_sums,
    to_tokens,
)

from .drawn_forests import forests
from .forests import random_forest

FINITE = st.floats(allow_nan=False, allow_infinity=False)
SCALES = [
    st.sampled_from([0.0, 1.0]),
    st.floats(-1.0, 1.0),
    st.sampled_from([1e30, 1e30 * (1 + 2**-50), -1e30, 1.0, 0.0]),
    st.sampled_from([0.1, 0.1 + 2**-50]),
    FINITE,
]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[int], list[float]]:
    """Parents, leaf nodes (inner nodes and repeats among them) and a value per leaf."""
    parents = draw(forests(max_nodes=14)).parents
    more = draw(st.lists(st.integers(0, len(parents) - 1), max_size=4))
    leaves = sorted([*childless(np.array(parents)).tolist(), *more])
    values = draw(st.lists(draw(st.sampled_from(SCALES)), min_size=len(leaves), max_size=len(leaves)))
    return parents, leaves, values


def leaves_below(parents: list[int], leaf_nodes: list[int], node: int) -> list[int]:
    below = [i for i, n in enumerate(leaf_nodes) if n == node]
    for child in (c for c, p in enumerate(parents) if p == node):
        below += leaves_below(parents, leaf_nodes, child)
    return sorted(below)


def exact(values: list[float]) -> tuple[Fraction, float]:
    """(sum, std) with one rounding of the std."""
    parts = [Fraction(v) for v in values]
    mean = sum(parts, Fraction(0)) / len(parts)
    variance = sum(((v - mean) ** 2 for v in parts), Fraction(0)) / len(parts)
    if not variance:
        return sum(parts, Fraction(0)), 0.0
    # A square root of integers keeps its digits where a float would over- or underflow.
    shift = max(0, 240 + variance.denominator.bit_length() - variance.numerator.bit_length())
    shift += shift % 2
    root = math.isqrt((variance.numerator << shift) // variance.denominator)
    return sum(parts, Fraction(0)), float(Fraction(root, 1 << (shift // 2)))


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@settings(max_examples=200, deadline=None)
@given(case=cases())
def test_what_lies_below_a_node_equals_exact_arithmetic(
    case: tuple[list[int], list[int], list[float]],
) -> None:
    parents, leaf_nodes, values = case
    forest = LeafRanges.of(parents, leaf_nodes)
    total = subtree_sums(tensor(values), forest)
    mean, std = subtree_moments(tensor(values), forest)
    least, largest = subtree_extrema(tensor(values), forest)
    assert not any(x.isnan().any() for x in (total, mean, std, least, largest))
    for node in range(len(parents)):
        below = leaves_below(parents, leaf_nodes, node)
        mine = [values[i] for i in below]
        want_sum, want_std = exact(mine)
        # What doubles lose of numbers a million times smaller than the tree's largest is not asked for.
        tiny, squared = (max(map(abs, values)) * small + 5e-324 for small in (1e-290, 1e-150))
        room = Fraction(1, 10**15) * sum(map(abs, map(Fraction, mine))) + Fraction(tiny)
        assert range(int(forest.low[node]), int(forest.high[node])) == range(below[0], below[-1] + 1)
        assert forest.count[node] == len(below)
        if total[node].isfinite():
            assert abs(Fraction(float(total[node])) - want_sum) <= room
        else:
            assert abs(want_sum) > Fraction(1.79e308)
        assert abs(Fraction(float(mean[node])) - want_sum / len(mine)) <= room / len(mine) + Fraction(tiny)
        assert least[node] == min(mine)
        assert largest[node] == max(mine)
        spread = max(map(abs, mine))
        assert float(std[node]) == pytest.approx(want_std, rel=1e-12, abs=1e-15 * spread + squared)
        if len(set(mine)) == 1:
            assert std[node] == 0.0


@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_v_hat_is_its_bottom_up_definition(case: tuple[list[int], list[int], list[float]]) -> None:
    parents, leaf_nodes, values = case
    rewards = [math.tanh(v) for v in values]
    mean, std = subtree_moments(tensor(rewards), LeafRanges.of(parents, leaf_nodes))
    nodes = python.below(parents, leaf_nodes, rewards)
    np.testing.assert_allclose(mean, [python.value(n) for n in nodes], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(std, [python.std(n) for n in nodes], rtol=1e-7, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_siblings(case: tuple[list[int], list[int], list[float]]) -> None:
    parents, leaf_nodes, values = case
    per_node = [math.tanh(values[i % len(values)]) + i % 3 for i in range(len(parents))]
    mean, std = sibling_moments(tensor(per_node), LeafRanges.of(parents, leaf_nodes))
    for node, parent in enumerate(parents):
        family = (
            [per_node[c] for c, p in enumerate(parents) if p == parent] if parent >= 0 else [per_node[node]]
        )
        assert float(mean[node]) == pytest.approx(np.mean(family), rel=1e-12, abs=1e-12)
        assert float(std[node]) == pytest.approx(np.std(family), rel=1e-7, abs=1e-12)
        if len(set(family)) == 1:
            assert std[node] == 0.0


@settings(max_examples=100, deadline=None)
@given(case=cases(), seed=st.integers(0, 2**32))
def test_lines_summed_along_a_path(case: tuple[list[int], list[int], list[float]], seed: int) -> None:
    parents, leaf_nodes, _ = case
    rng = np.random.default_rng(seed)
    slope, centre = rng.exponential(size=len(parents)), rng.normal(size=len(parents))
    forest = LeafRanges.of(parents, leaf_nodes)
    total, offset = ancestor_sums(torch.from_numpy(slope), torch.from_numpy(centre), forest.parents)
    for node in range(len(parents)):
        above, at = [], node
        while at >= 0:
            above.append(at)
            at = parents[at]
        for x in (-2.0, 0.3):
            got = float(total[node]) * (x - centre[node]) + float(offset[node])
            want = sum(slope[h] * (x - centre[h]) for h in above)
            assert got == pytest.approx(want, rel=1e-10, abs=1e-10)


def batch(count: int, seed: int) -> list[tuple[list[int], list[int], list[float]]]:
    """Single trees of 1 to 60 nodes."""
    rng, trees = random.Random(seed), []
    while len(trees) < count:
        parents = random_forest(rng, rng.randint(1, 60), 1).parents
        parents = parents[: [*parents, -1].index(-1, 1)]
        leaves = childless(np.array(parents)).tolist()
        trees.append((parents, leaves, [rng.gauss(0.1, 1e3 ** rng.randint(-3, 3)) for _ in leaves]))
    return trees


def joined(
    trees: list[tuple[list[int], list[int], list[float]]],
) -> tuple[list[int], list[int], list[float]]:
    parents: list[int] = []
    leaf_nodes: list[int] = []
    values: list[float] = []
    for p, leaves, v in trees:
        start = len(parents)
        parents += [x + start if x >= 0 else -1 for x in p]
        leaf_nodes += [x + start for x in leaves]
        values += v
    return parents, leaf_nodes, values


def everything(case: tuple[list[int], list[int], list[float]]) -> torch.Tensor:
    """[fields, N], all that is computed of nodes."""
    parents, leaf_nodes, values = case
    forest, x = LeafRanges.of(parents, leaf_nodes), tensor(values)
    mean, std = subtree_moments(x, forest)
    lines = ancestor_sums(1 / (std + 1e-6), mean, forest.parents)
    siblings = sibling_moments(mean, forest)
    return torch.stack([subtree_sums(x, forest), mean, std, *subtree_extrema(x, forest), *lines, *siblings])


def test_a_tree_gets_the_same_bits_whatever_it_is_batched_with() -> None:
    trees = batch(40, seed=1)
    alone = [everything(tree) for tree in trees]
    for seed in range(3):
        order = random.Random(seed).sample(range(len(trees)), len(trees))
        together = everything(joined([trees[i] for i in order]))
        assert torch.equal(together, torch.cat([alone[i] for i in order], dim=1))
        assert torch.equal(together, everything(joined([trees[i] for i in order])))


def test_sums_are_compensated() -> None:
    values = [1.0, *[1e-17] * 1000, -1.0, 3e-20] * 50
    got = range_sums(tensor(values), segments(torch.tensor([len(values)])))
    assert float(got) == pytest.approx(float(sum(map(Fraction, values))), rel=1e-15)


def test_empty_ranges_and_arrays() -> None:
    ranges = segments(torch.tensor([0, 2, 0]))
    assert range_sums(tensor([1.0, 2.0]), ranges).tolist() == [0.0, 3.0, 0.0]
    assert [x.tolist() for x in range_moments(tensor([1.0, 2.0]), ranges)] == [[0, 1.5, 0], [0, 0.5, 0]]
    assert range_extrema(tensor([1.0, 2.0]), ranges)[0].tolist() == [math.inf, 1.0, math.inf]
    nothing = segments(torch.tensor([0]))
    assert [x.tolist() for x in range_moments(tensor([]), nothing)] == [[0], [0]]


def test_tokens_get_what_their_node_has() -> None:
    assert to_tokens(tensor([1.5, 2.5, 3.5]), torch.tensor([2, 0, 1])).tolist() == [1.5, 1.5, 3.5]


def test_a_chain_of_100_000_nodes_with_a_leaf_at_each() -> None:
    nodes = 100_000
    parents, leaf_nodes = list(range(-1, nodes - 1)), list(range(nodes))
    values = np.arange(nodes, dtype=np.float64)
    forest = LeafRanges.of(parents, leaf_nodes)
    below = np.arange(nodes, 0, -1)
    assert forest.count.tolist() == below.tolist()
    np.testing.assert_array_equal(
        subtree_sums(torch.from_numpy(values), forest), values * below + below * (below - 1) / 2
    )
    mean, std = subtree_moments(torch.from_numpy(values), forest)
    np.testing.assert_allclose(std, np.sqrt((below.astype(float) ** 2 - 1) / 12), rtol=1e-12)
    slope, _ = ancestor_sums(torch.ones(nodes, dtype=torch.float64), mean, forest.parents)
    assert slope.tolist() == list(range(1, nodes + 1))


@settings(max_examples=200, deadline=None)
@given(parents=st.lists(st.integers(-1, 6), min_size=1, max_size=8))
def test_ends_and_order_against_the_definition(parents: list[int]) -> None:
    below = [[n for n in range(len(parents)) if node in _path(parents, n)] for node in range(len(parents))]
    before = all(parent < node for node, parent in enumerate(parents))
    if before and all(nodes == list(range(nodes[0], nodes[-1] + 1)) for nodes in below):
        array = np.array(parents)
        assert node_ends(array).tolist() == [nodes[-1] + 1 for nodes in below]
        depth = path_sums(array, np.ones_like(array))
        assert depth.tolist() == [len(_path(parents, n)) for n in range(len(parents))]
        LeafRanges.of(parents, range(len(parents)))
    else:
        with pytest.raises(ValueError, match=r"parents\[\d\] = "):
            LeafRanges.of(parents, range(len(parents)))


def _path(parents: list[int], node: int) -> list[int]:
    path = [node]
    while 0 <= parents[path[-1]] < path[-1]:
        path.append(parents[path[-1]])
    return path


def test_ancestor_sums_of_single_precision_are_float64() -> None:
    slope, centre, parents = torch.tensor([0.1, 0.2]), torch.tensor([1.0, 3.0]), torch.tensor([-1, 0])
    got = ancestor_sums(slope, centre, parents)
    want = ancestor_sums(slope.double(), centre.double(), parents)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@settings(max_examples=100, deadline=None)
@given(case=cases(), levels=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_lines_by_level(case: tuple[list[int], list[int], list[float]], levels: int, seed: int) -> None:
    parents, rng = np.array(case[0]), np.random.default_rng(seed)
    depth = path_sums(parents, np.ones_like(parents)) - 1
    slope, centre = (torch.from_numpy(rng.normal(size=len(parents))) for _ in range(2))
    want = ancestor_sums(slope, centre, torch.from_numpy(parents))
    with mock.patch.object(ranges, "LEVELS", levels):
        got = ranges.ancestor_sums_by_level(slope, centre, torch.from_numpy(parents), depth)
    for mine, line in zip(got, want, strict=True):
        torch.testing.assert_close(mine, line, rtol=1e-12, atol=1e-12)
