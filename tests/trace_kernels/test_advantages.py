from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_kernels import (
    advantages,
    cut_forest,
    leaf_advantages,
    leaf_weights,
    node_values,
    turn_advantages,
)
from trace_kernels.advantages import ESTIMATORS, LEAF_ESTIMATORS

from .drawn_forests import forests
from .rewarded_forests import Case, joined, random_case


@st.composite
def cases(draw: st.DrawFn) -> Case:
    parents = draw(forests(max_nodes=16)).parents
    leaves = len([i for i in range(len(parents)) if i not in parents])
    values = draw(st.sampled_from([(0.0, 1.0), (0.1, 0.3, 0.7), (-2.0, 0.0, 0.5, 1e3), (0.1,)]))
    rewards = draw(st.lists(st.sampled_from(values), min_size=leaves, max_size=leaves))
    bare = draw(st.lists(st.booleans(), min_size=leaves, max_size=leaves))
    return Case(parents, rewards, bare, draw(st.sampled_from(["all", "bare"])))


def test_every_estimator_on_1000_random_forests() -> None:
    everything = [random_case(seed) for seed in range(1000)]
    for baseline in ("all", "bare"):
        batch = [case for case in everything if case.baseline == baseline]
        assert len(batch) > 400
        arrays, _ = joined(batch)
        for estimator in LEAF_ESTIMATORS:
            got = leaf_advantages(**arrays, estimator=estimator, root_baseline=baseline)
            want = [case.leaf(i, estimator) for case in batch for i in range(len(case.rewards))]
            np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
        got = turn_advantages(**arrays, root_baseline=baseline)
        want = [case.turn(node) for case in batch for node in range(len(case.parents))]
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("baseline", ["all", "bare"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_bits_depend_on_the_tree_alone(estimator: str, baseline: str) -> None:
    trees = [case for case in map(random_case, range(60)) if case.parents.count(-1) == 1]
    assert len(trees) > 10

    def terms(batch: list[Case]) -> list[np.ndarray]:
        arrays, ends = joined(batch)
        found, again = (
            np.stack(advantages(**arrays, estimator=estimator, root_baseline=baseline).terms())
            for _ in range(2)
        )
        assert np.array_equal(found, again)
        return np.split(found, ends[:-1], axis=1)

    together = terms(trees)
    for tree, mine in zip(trees, together, strict=True):
        assert np.array_equal(terms([tree])[0], mine)
    for backwards, mine in zip(terms(trees[::-1])[::-1], together, strict=True):
        assert np.array_equal(backwards, mine)


@settings(max_examples=150, deadline=None)
@given(
    case=cases(),
    data=st.data(),
    estimator=st.sampled_from(ESTIMATORS),
    eps=st.sampled_from([0.0, 1e-6]),
    scale=st.sampled_from([1e-300, 1e-30, 1.0, 1e30, 1e308]),
)
def test_finite_rewards_give_finite_advantages(
    case: Case, data: st.DataObject, estimator: str, eps: float, scale: float
) -> None:
    count = len(case.rewards)
    rewards = data.draw(st.lists(st.floats(-1.7, 1.7), min_size=count, max_size=count))
    one = advantages(case.parents, case.leaf_nodes, [r * scale for r in rewards], estimator, eps=eps)
    assert all(np.isfinite(term).all() for term in one.terms())


def test_a_chain_of_1000_nested_groups_alone_and_in_a_batch() -> None:
    nodes = 1000
    parents = list(range(-1, nodes - 1))
    rewards = np.random.default_rng(0).normal(size=nodes)
    alone = leaf_advantages(parents, range(nodes), rewards, "treepo")
    groups = [rewards[start:] for start in range(nodes - 1)]
    scores = [(rewards - g.mean()) / (g.std() + 1e-6) for g in groups]
    want = [np.mean([s[leaf] for s in scores[: leaf + 1]]) for leaf in range(nodes)]
    np.testing.assert_allclose(alone, want, rtol=1e-9, atol=1e-9)
    batch = [-1, 0, 0, *(p + 3 if p >= 0 else -1 for p in parents)]
    found = leaf_advantages(batch, [1, 2, *range(3, nodes + 3)], [0.0, 1.0, *rewards], "treepo")
    assert np.array_equal(found[2:], alone)


def test_a_tiny_variance_around_a_large_mean() -> None:
    step = np.spacing(1e30)
    got = leaf_advantages([-1, 0, 0], [1, 2], [1e30, 1e30 + step], "treepo")
    assert got.tolist() == [-1.0, 1.0]


@settings(max_examples=150, deadline=None)
@given(case=cases(), estimator=st.sampled_from(LEAF_ESTIMATORS))
def test_leaf_advantages(case: Case, estimator: str) -> None:
    got = leaf_advantages(
        case.parents, case.leaf_nodes, case.rewards, estimator, root_baseline=case.baseline, bare=case.bare
    )
    want = [case.leaf(i, estimator) for i in range(len(case.rewards))]
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
    zero = [w == 0.0 for w in want]
    if all(zero):
        assert not got.any()  # exactly 0 without contrast, not nearly


@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_node_values_and_turn_advantages(case: Case) -> None:
    nodes = range(len(case.parents))
    value, count = node_values(case.parents, case.leaf_nodes, case.rewards)
    np.testing.assert_allclose(value, [case.value(n) for n in nodes], rtol=1e-9, atol=1e-9)
    assert count.tolist() == [len(case.below(n)) for n in nodes]
    got = turn_advantages(
        case.parents, case.leaf_nodes, case.rewards, root_baseline=case.baseline, bare=case.bare
    )
    np.testing.assert_allclose(got, [case.turn(n) for n in nodes], rtol=1e-7, atol=1e-7)


@settings(max_examples=150, deadline=None)
@given(case=cases(), estimator=st.sampled_from(ESTIMATORS), data=st.data())
def test_terms_equal_the_expanded_loss(case: Case, estimator: str, data: st.DataObject) -> None:
    count = len(case.rewards)
    weight = data.draw(st.lists(st.floats(0.0, 3.0), min_size=count, max_size=count))
    chosen = data.draw(st.lists(st.integers(0, count - 1), unique=True) | st.none())
    kwargs = {"root_baseline": case.baseline, "bare": case.bare}
    tree = advantages(case.parents, case.leaf_nodes, case.rewards, estimator, **kwargs)
    positive, negative, total = tree.terms(chosen, leaf_weight=weight)
    for node in range(len(case.parents)):
        leaves = [i for i in case.below(node) if chosen is None or i in chosen]
        adv = [case.turn(node) if estimator == "turn" else case.leaf(i, estimator) for i in leaves]
        assert total[node] == pytest.approx(sum(weight[i] for i in leaves), abs=1e-9)
        for rho in (0.3, 1.0, 1.27, 4.0):
            clipped = min(max(rho, 0.8), 1.28)
            expanded = sum(weight[i] * min(rho * a, clipped * a) for i, a in zip(leaves, adv, strict=True))
            merged = positive[node] * min(rho, clipped) + negative[node] * max(rho, clipped)
            assert merged == pytest.approx(expanded, rel=1e-7, abs=1e-6)


@settings(max_examples=150, deadline=None)
@given(case=cases(), estimator=st.sampled_from(ESTIMATORS), slack=st.integers(0, 6))
def test_the_parts_of_a_cut_forest_add_up(case: Case, estimator: str, slack: int) -> None:
    lengths = [1 + n % 3 for n in range(len(case.parents))]
    limit = max(sum(lengths[n] for n in case.path(leaf)) for leaf in case.leaf_nodes) + slack
    tree = advantages(case.parents, case.leaf_nodes, case.rewards, estimator)
    parts = cut_forest(case.parents, lengths, max_tokens=limit)
    for whole, *pieces in zip(tree.terms(), *(tree.terms(part.leaves) for part in parts), strict=True):
        np.testing.assert_allclose(sum(pieces), whole, rtol=1e-9, atol=1e-9)
    for part in parts:  # a part's terms live on the part's own nodes
        outside = np.setdiff1d(np.arange(len(case.parents)), part.nodes)
        assert not tree.terms(part.leaves)[2][outside].any()


@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_leaf_weights(case: Case) -> None:
    assert leaf_weights(case.parents, case.leaf_nodes).tolist() == [1.0] * len(case.rewards)
    want = []
    for leaf in case.leaf_nodes:
        path = case.path(leaf)
        want.append(1.0 / len(case.below(path[1])) if len(path) > 1 else 1.0)
    assert leaf_weights(case.parents, case.leaf_nodes, "per_subtree").tolist() == want


def test_known_values() -> None:
    #      0            root with two bare rollouts; the first has two more continuations below node 1
    #    1     5
    #  2 3 4
    parents, leaves, rewards = [-1, 0, 1, 1, 1, 0], [2, 3, 4, 5], [1.0, 0.0, 0.0, 0.0]
    grpo = leaf_advantages(parents, leaves, rewards, "grpo", eps=0.0)
    np.testing.assert_allclose(grpo, np.array([3, -1, -1, -1]) / np.sqrt(3))
    inner = np.array([2, -1, -1]) / np.sqrt(2)
    tree = leaf_advantages(parents, leaves, rewards, "tree_grpo", eps=0.0)
    np.testing.assert_allclose(tree, grpo + np.append(inner, 0.0))
    treepo = leaf_advantages(parents, leaves, rewards, "treepo", eps=0.0)
    np.testing.assert_allclose(treepo, [*((grpo[:3] + inner) / 2), grpo[3]])
    turn = turn_advantages(parents, leaves, rewards, eps=0.0)
    std = np.sqrt(3) / 4
    np.testing.assert_allclose(turn, np.array([0, 1 / 12, 2 / 3, -1 / 3, -1 / 3, -1 / 4]) / std, atol=1e-12)
    bare = leaf_advantages(
        parents, leaves, rewards, "grpo", root_baseline="bare", bare=[True, False, False, True], eps=0.0
    )
    np.testing.assert_allclose(bare, [1, -1, -1, -1])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_no_contrast_is_exactly_zero(estimator: str) -> None:
    parents, leaves = [-1, 0, 1, 1, 0, -1], [2, 3, 4, 5]
    for term in advantages(parents, leaves, [0.1, 0.1, 0.1, 0.7], estimator).terms()[:2]:
        assert not term.any()
    # An all-equal bare baseline gives 0 as well, not a difference over eps.
    terms = advantages(
        parents, leaves, [0.0, 1.0, 0.0, 1.0], "grpo", root_baseline="bare", bare=[True, False, True, True]
    ).terms()
    assert not terms[0].any()


def test_a_rollout_may_end_inside_the_tree() -> None:
    value, count = node_values([-1, 0, 1], [1, 2], [1.0, 0.0])
    assert value.tolist() == [0.5, 0.5, 0.0]
    assert count.tolist() == [2, 2, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"estimator": "best"}, "estimator: expected one of .*treepo.*, got 'best'"),
        ({"rewards": [1.0]}, r"rewards: expected one per leaf, \[2\], got \[1\]"),
        ({"rewards": [1.0, float("nan")]}, r"rewards\[1\] = nan: expected a finite number"),
        ({"leaf_nodes": [2, 1]}, r"leaf_nodes\[1\]: leaves must be in DFS order"),
        ({"leaf_nodes": [1, 3]}, r"leaf_nodes: 1\.\.3 outside the 3 nodes"),
        ({"leaf_nodes": [1], "rewards": [1.0]}, "leaf_nodes: node 2 has no leaf at or below it"),
        ({"root_baseline": "bare"}, "bare: root_baseline='bare' needs to know"),
        ({"root_baseline": "bare", "bare": [1, 0]}, r"bare: expected bool \[2\]"),
        ({"root_baseline": "some"}, "root_baseline: expected 'all' or 'bare', got 'some'"),
        ({"parents": [-1, 1, 0]}, r"parents\[1\] = 1: a parent must come before"),
        ({"eps": -0.5}, r"eps: expected a finite number from 0, got -0\.5"),
        ({"eps": float("nan")}, "eps: expected a finite number from 0, got nan"),
        ({"eps": float("inf")}, "eps: expected a finite number from 0, got inf"),
        ({"rewards": [1.0, 1j]}, "rewards: expected real numbers, got dtype complex128"),
        ({"rewards": ["1.0", "0.0"]}, "rewards: expected real numbers, got dtype <U3"),
        ({"rewards": [1.0, None]}, "rewards: expected real numbers, got dtype object"),
    ],
)
def test_errors_name_the_argument(changes: dict, message: str) -> None:
    call = {
        "parents": [-1, 0, 0],
        "leaf_nodes": [1, 2],
        "rewards": [1.0, 0.0],
        "estimator": "grpo",
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        advantages(**call)


def test_terms_check_their_arguments() -> None:
    tree = advantages([-1, 0, 0], [1, 2], [1.0, 0.0])
    with pytest.raises(ValueError, match=r"leaves: 0\.\.2 outside the 2 leaves"):
        tree.terms([0, 2])
    with pytest.raises(ValueError, match="leaf_weight: expected one per leaf"):
        tree.terms(leaf_weight=[1.0])
