"""Both solvers against the enumeration of every feasible allocation."""

import itertools
import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_rl.allocation.contrast import prefix_contrast, root_contrast
from trace_rl.allocation.solvers import allocate_prefixes, allocate_roots

KAPPAS = (math.inf, 0.3, 2.0, 40.0)


@cache
def feasible_roots(prompts: int, budget: int, m_max: int) -> np.ndarray:
    choices = itertools.product([0, *range(2, m_max + 1)], repeat=prompts)
    return np.array([c for c in choices if sum(c) == budget], np.int64).reshape(-1, prompts)


@cache
def compositions(parts: int, total: int) -> np.ndarray:
    return np.array(
        [c for c in itertools.product(range(total + 1), repeat=parts) if sum(c) == total], np.int64
    )


def root_utility(v: np.ndarray, counts: np.ndarray, kappa: float) -> np.ndarray:
    return root_contrast(np.clip(v, 0.01, 0.99), counts, kappa).sum(axis=-1)


def draw_chances(rng: np.random.Generator, n: int) -> np.ndarray:
    """Spread, tied, mirrored and near-certain predictions in turn."""
    kind = rng.integers(4)
    if kind == 0:
        return rng.random(n)
    if kind == 1:
        return rng.choice([0.2, 0.5, 0.8, 1 - 0.8], n)
    if kind == 2:
        return rng.choice([0.0, 1e-6, 0.011, 0.98, 1.0], n)
    return 0.5 + rng.normal(0, 0.02, n)


def test_roots_equal_brute_force() -> None:
    rng = np.random.default_rng(0)
    solved = 0
    for _ in range(8000):
        prompts, budget, m_max = int(rng.integers(1, 6)), int(rng.integers(0, 14)), int(rng.integers(2, 7))
        v, kappa = draw_chances(rng, prompts), KAPPAS[rng.integers(len(KAPPAS))]
        required = rng.random(prompts) < rng.choice([0.0, 0.0, 0.4])
        every = feasible_roots(prompts, budget, m_max)
        every = every[(every[:, required] >= 2).all(axis=1)]
        if budget < 2 or not len(every):
            with pytest.raises(ValueError, match="M = "):
                allocate_roots(v, budget, m_max, rng=rng, kappa=kappa, required=required)
            continue
        counts = allocate_roots(v, budget, m_max, rng=rng, kappa=kappa, required=required)
        assert (every == counts).all(axis=1).any(), (v, budget, m_max, counts)
        best = root_utility(v, every, kappa)
        assert best.max() - root_utility(v, counts, kappa) <= 1e-12, (v, budget, m_max, kappa, counts)
        # Ties: of all optima the one with most prompts.
        optima = every[best >= best.max() - 1e-14]
        assert (counts > 0).sum() >= (optima > 0).sum(axis=1).max()
        solved += 1
    assert solved > 4000


@settings(max_examples=40, deadline=None)
@given(
    v=st.lists(st.floats(0, 1), min_size=40, max_size=40),
    budget=st.integers(2, 200),
    m_max=st.integers(3, 16),
    kappa=st.sampled_from(KAPPAS),
)
def test_roots_equal_dynamic_programme_at_medium_size(
    v: list[float], budget: int, m_max: int, kappa: float
) -> None:
    budget = min(budget, 40 * m_max)
    chance = np.array(v)
    best = np.full(budget + 1, -np.inf)
    best[0] = 0.0
    table = root_contrast(np.clip(chance, 0.01, 0.99)[:, None], np.arange(m_max + 1), kappa)
    for row in table:
        options = [best] + [
            np.concatenate([np.full(m, -np.inf), best[:-m]]) + row[m]
            for m in range(2, m_max + 1)
            if m <= budget
        ]
        best = np.max(options, axis=0)
    counts = allocate_roots(chance, budget, m_max, rng=np.random.default_rng(0), kappa=kappa)
    assert counts.sum() == budget
    assert counts.max() <= m_max
    assert not (counts == 1).any()
    assert root_utility(chance, counts, kappa) == pytest.approx(best[budget], abs=1e-12)


def test_root_ties_go_to_breadth_then_to_the_seed() -> None:
    even = np.full(8, 0.5)
    first = allocate_roots(even, 12, rng=np.random.default_rng(1))
    assert sorted(first) == [0, 0, 2, 2, 2, 2, 2, 2]
    np.testing.assert_array_equal(first, allocate_roots(even, 12, rng=np.random.default_rng(1)))
    chosen = np.sum([allocate_roots(even, 4, rng=np.random.default_rng(s)) > 0 for s in range(400)], axis=0)
    assert chosen.min() > 60  # 100 expected for each prompt
    mirrored = np.array([0.2, 0.8, 1 - 0.8, 1 - 0.2])
    chosen = np.sum(
        [allocate_roots(mirrored, 2, rng=np.random.default_rng(s)) > 0 for s in range(400)], axis=0
    )
    assert chosen.min() > 60


@pytest.mark.parametrize(
    ("prompts", "budget", "m_max", "message"),
    [
        (4, 1, 16, r"M = 1: .*set M to 2"),
        (4, 0, 16, r"M = 0"),
        (3, 49, 16, r"M = 49 exceeds 3 prompts x m_max = 16: .*pool to 4"),
        (1, 3, 2, r"M = 3 exceeds 1 prompts"),
        (4, 3, 2, r"M = 3 is odd but m_max = 2"),
        (4, 4, 1, r"m_max = 1"),
        (0, 2, 16, r"exceeds 0 prompts"),
    ],
)
def test_infeasible_budgets_are_explained(prompts: int, budget: int, m_max: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        allocate_roots(np.full(prompts, 0.5), budget, m_max, rng=np.random.default_rng(0))


def test_required_prompts_are_served_or_refused() -> None:
    v = np.array([0.5, 0.5, 0.01, 0.99])
    counts = allocate_roots(v, 9, rng=np.random.default_rng(0), required=v != 0.5)
    assert counts[2] == counts[3] == 2
    with pytest.raises(ValueError, match="2 required prompts need 4"):
        allocate_roots(v, 3, rng=np.random.default_rng(0), required=v != 0.5)


def test_prefixes_equal_brute_force_with_give_back() -> None:
    rng = np.random.default_rng(3)
    for _ in range(3000):
        prompts, candidates = int(rng.integers(1, 4)), int(rng.integers(0, 5))
        budget = rng.integers(0, 4, prompts)
        owner, q = rng.integers(0, prompts, candidates), draw_chances(rng, candidates).clip(0, 1)
        kappa = KAPPAS[rng.integers(len(KAPPAS))]
        counts, unspent = allocate_prefixes(q, owner, budget, rng=rng, kappa=kappa)
        assert counts.sum() + unspent == budget.sum()
        if not candidates:
            assert unspent == budget.sum()
            continue
        assert unspent == 0
        every = compositions(candidates, int(budget.sum()))
        for prompt in set(owner.tolist()):
            every = every[every[:, owner == prompt].sum(axis=1) >= budget[prompt]]
        assert (every == counts).all(axis=1).any()
        best = prefix_contrast(q, every, kappa).sum(axis=1).max()
        assert best - prefix_contrast(q, counts, kappa).sum() <= 1e-12


def test_prefix_ties_are_seeded_and_spread() -> None:
    q, owner = np.full(6, 0.5), np.zeros(6, np.int64)
    picks = [allocate_prefixes(q, owner, [2], rng=np.random.default_rng(s)).counts for s in range(300)]
    assert np.max(picks) == 1
    assert np.sum(picks, axis=0).min() > 60  # 100 expected
    certain = allocate_prefixes(np.ones(6), owner, [12], rng=np.random.default_rng(0)).counts
    np.testing.assert_array_equal(certain, 2)


@pytest.mark.parametrize(
    ("q", "owner", "budget", "message"),
    [
        ([0.5], [1], [2], "prompt index 1 but there are 1"),
        ([0.5, 0.5], [0], [2], "one length"),
        ([1.5], [0], [2], "q must be"),
        ([0.5], [0], [-1], "budget_per_prompt"),
    ],
)
def test_bad_prefix_input_is_named(q: list, owner: list, budget: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        allocate_prefixes(q, owner, budget, rng=np.random.default_rng(0))
