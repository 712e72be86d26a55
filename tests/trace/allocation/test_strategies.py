"""Every strategy spends the same leaves, and each does what its name says."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_rl.allocation.contrast import prefix_contrast, prefix_repeat_probability, root_contrast
from trace_rl.allocation.strategies import STRATEGIES, PrefixStage, RootStage, fixed_groups


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def prefix_stage(roots: np.ndarray, expansion: int, seed: int, turns: int = 3) -> PrefixStage:
    """Candidates of simulated bare rollouts; every third active prompt has rollouts of one turn."""
    draw = rng(seed)
    active = roots[roots > 0]
    rollouts = [p for p, n in enumerate(active) for _ in range(n) if p % 3 != 1]
    prompt = np.repeat(np.array(rollouts, np.int64), turns)
    reward = np.repeat(draw.integers(0, 2, len(rollouts)), turns)
    return PrefixStage(draw.random(len(prompt)), reward, prompt, active * expansion)


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(sorted(STRATEGIES)),
    pool=st.integers(1, 40),
    budget=st.integers(2, 90),
    expansion=st.integers(0, 4),
    group_size=st.integers(2, 9),
    contrast=st.sampled_from(["plug_in", "beta_binomial"]),
    exploration=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
def test_leaves_are_equal_for_every_strategy(
    name: str,
    pool: int,
    budget: int,
    expansion: int,
    group_size: int,
    contrast: str,
    exploration: float,
    seed: int,
) -> None:
    budget = min(budget, 16 * pool)
    strategy = STRATEGIES[name]
    stage = RootStage(
        rng(seed).random(pool),
        budget,
        expansion,
        group_size,
        contrast=contrast,
        kappa=3.0,
        exploration=exploration,
    )
    roots = strategy.roots(stage, rng(seed))
    assert roots.shape == (pool,)
    assert roots.dtype == np.int64
    assert (roots != 1).all()
    assert (roots >= 0).all()
    prefixes = strategy.prefixes(prefix_stage(roots, expansion, seed), rng(seed))
    assert roots.sum() + prefixes.sum() == budget * (1 + expansion)
    assert strategy.expands or not prefixes.any()
    np.testing.assert_array_equal(roots, strategy.roots(stage, rng(seed)))


@pytest.mark.parametrize(
    ("total", "group_size", "pool", "expected"),
    [
        (8, 4, 4, [4, 4, 0, 0]),
        (9, 4, 4, [5, 4, 0, 0]),
        (11, 4, 4, [6, 5, 0, 0]),
        (3, 4, 4, [3, 0, 0, 0]),
        (20, 4, 3, [7, 7, 6]),
    ],
)
def test_groups_take_the_remainder_evenly(
    total: int, group_size: int, pool: int, expected: list[int]
) -> None:
    assert fixed_groups(np.arange(pool), total, group_size).tolist() == expected


def test_uniform_and_random_prefix_take_the_pool_in_order() -> None:
    stage = RootStage(rng().random(10), budget=4, expansion=2, group_size=4)
    assert STRATEGIES["uniform"].roots(stage, rng()).tolist() == [4, 4, 4] + [0] * 7
    assert STRATEGIES["random_prefix"].roots(stage, rng()).tolist() == [4] + [0] * 9


def test_pcl_takes_the_prompts_nearest_half_and_draws_ties() -> None:
    stage = RootStage(np.array([0.9, 0.45, 0.1, 0.6, 0.5]), budget=4, expansion=2, group_size=4)
    assert STRATEGIES["pcl"].roots(stage, rng()).tolist() == [0, 4, 0, 4, 4]
    tied = dataclasses.replace(stage, v=np.array([0.2, 0.8, 1 - 0.8, 0.2]), expansion=0)
    chosen = np.sum([STRATEGIES["pcl"].roots(tied, rng(s)) > 0 for s in range(400)], axis=0)
    assert chosen.min() > 60  # 100 expected


def test_score_needs() -> None:
    assert {n for n, s in STRATEGIES.items() if s.needs_root_scores} == {"pcl", "trace"}
    assert {n for n, s in STRATEGIES.items() if s.needs_prefix_scores} == {"trace"}
    assert {n for n, s in STRATEGIES.items() if s.expands} == {"random_prefix", "trace"}


@pytest.mark.parametrize("name", ["uniform", "random_prefix"])
def test_strategies_without_scores_ignore_v(name: str) -> None:
    stage = RootStage(np.full(12, 0.5), 16, 2, 4)
    other = dataclasses.replace(stage, v=rng(1).random(12))
    roots = STRATEGIES[name].roots(stage, rng())
    np.testing.assert_array_equal(roots, STRATEGIES[name].roots(other, rng()))
    prefixes = prefix_stage(roots, 2, seed=0)
    blank = dataclasses.replace(prefixes, v=np.full(len(prefixes.v), 0.5))
    np.testing.assert_array_equal(
        STRATEGIES[name].prefixes(prefixes, rng(5)), STRATEGIES[name].prefixes(blank, rng(5))
    )


@pytest.mark.parametrize("name", ["random_prefix", "trace"])
def test_prompts_keep_their_budget_and_empty_ones_give_theirs_back(name: str) -> None:
    stage = PrefixStage(
        v=np.array([0.5, 0.9, 0.2]),
        reward=np.array([1, 0, 1]),
        prompt=np.array([0, 0, 2]),
        budget=np.array([4, 6, 5]),
    )
    counts = STRATEGIES[name].prefixes(stage, rng())
    assert counts.sum() == 15
    assert counts[:2].sum() >= 4
    assert counts[2] >= 5
    nobody = PrefixStage(np.zeros(0), np.zeros(0, int), np.zeros(0, int), np.array([4, 6]))
    assert STRATEGIES[name].prefixes(nobody, rng()).shape == (0,)


def test_random_prefix_is_uniform_over_candidates() -> None:
    prompt = np.array([0, 0, 0, 1])
    stage = PrefixStage(np.zeros(4), np.ones(4, int), prompt, np.array([9000, 10]))
    counts = STRATEGIES["random_prefix"].prefixes(stage, rng())
    assert counts[3] == 10
    assert np.abs(counts[:3] - 3000).max() < 250


def test_trace_has_more_contrast_than_the_baselines_by_its_own_measure() -> None:
    v = rng(2).beta(0.6, 0.6, 64)
    stage = RootStage(v, budget=64, expansion=2, group_size=8)
    trace, baseline = (STRATEGIES[n].roots(stage, rng()) for n in ("trace", "random_prefix"))
    assert root_contrast(v, trace).sum() > 1.5 * root_contrast(v, baseline).sum()
    prefixes = prefix_stage(trace, 2, seed=0)
    q = prefix_repeat_probability(prefixes.v, prefixes.reward)
    flips = {n: prefix_contrast(q, STRATEGIES[n].prefixes(prefixes, rng())).sum() for n in STRATEGIES}
    assert flips["trace"] > flips["random_prefix"] > flips["uniform"] == 0


def test_exploration_is_a_floor_for_random_prompts() -> None:
    v = np.array([0.5] * 4 + [0.01] * 60)
    stage = RootStage(v, budget=32, expansion=0, exploration=0.5)
    reached = np.zeros(64, bool)
    for seed in range(60):
        counts = STRATEGIES["trace"].roots(stage, rng(seed))
        assert counts.sum() == 32
        assert 4 <= (counts[4:] > 0).sum() <= 9
        reached |= counts > 0
    assert reached.all()
    none = STRATEGIES["trace"].roots(dataclasses.replace(stage, exploration=0.0), rng())
    assert none[:4].min() > 4


def test_contrast_switch_reaches_both_solvers() -> None:
    roots = RootStage(np.array([0.5, 0.3, 0.2]), 16, 1, contrast="beta_binomial", kappa=0.2)
    plug_in = dataclasses.replace(roots, contrast="plug_in")
    trace = STRATEGIES["trace"]
    assert trace.roots(roots, rng()).tolist() != trace.roots(plug_in, rng()).tolist()
    prefixes = PrefixStage(
        np.array([0.1, 0.6]), np.array([0, 0]), np.zeros(2, int), np.array([12]), "beta_binomial", 2.0
    )
    ignored = dataclasses.replace(prefixes, contrast="plug_in")
    assert trace.prefixes(prefixes, rng()).tolist() != trace.prefixes(ignored, rng()).tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": np.zeros(0)}, "pool is empty"),
        ({"v": np.array([math.nan])}, "v must be"),
        ({"budget": 1}, "M = 1"),
        ({"expansion": -1}, "N = -1"),
        ({"group_size": 1}, "group_size = 1"),
        ({"exploration": 1.5}, "exploration = 1.5"),
        ({"contrast": "other"}, "contrast = 'other'"),
        ({"kappa": 0.0}, "kappa"),
    ],
)
def test_bad_stages_are_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(RootStage(np.full(4, 0.5), 8, 2), **change)


def test_prefix_stage_checks_shapes() -> None:
    with pytest.raises(ValueError, match="reward"):
        PrefixStage(np.zeros(2), np.zeros(1, int), np.zeros(2, int), np.array([1]))
    with pytest.raises(ValueError, match="prompt index"):
        PrefixStage(np.zeros(1), np.zeros(1, int), np.array([3]), np.array([1]))
