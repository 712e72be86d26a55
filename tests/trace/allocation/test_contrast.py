"""Utilities against exact rational arithmetic, kappa against simulated groups."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trace_kernels.reference import score_anchors
from trace_rl.allocation import contrast

CHANCE = st.floats(0.0, 1.0, allow_subnormal=False)
COUNT = st.integers(0, 64)
KAPPA = st.one_of(st.just(math.inf), st.floats(1e-3, 1e6))


def rising(a: Fraction, m: int) -> Fraction:
    return math.prod((a + j for j in range(m)), start=Fraction(1))


def alike(v: Fraction, m: int, kappa: float, observed: int = 0) -> Fraction:
    """P(m trials all succeed) after `observed` successes, exactly."""
    if math.isinf(kappa):
        return v**m
    k = Fraction(kappa)
    return rising(v * k + observed, m) / rising(k + observed, m)


def exact_root(v: float, m: int, kappa: float) -> Fraction:
    p = Fraction(v)
    return Fraction(0) if m == 0 else 1 - alike(p, m, kappa) - alike(1 - p, m, kappa)


def exact_prefix(q: float, k: int, kappa: float) -> Fraction:
    return 1 - alike(Fraction(q), k, kappa, observed=1)


def assert_close(value: np.ndarray, exact: Fraction) -> None:
    # Below 1e-290 doubles lose digits of their own; nothing there can matter to an allocation.
    assert abs(Fraction(float(value)) - exact) <= Fraction(1, 10**9) * abs(exact) + Fraction(1, 10**290)


@settings(max_examples=300, deadline=None)
@given(v=CHANCE, m=COUNT, kappa=KAPPA)
@example(v=1e-12, m=64, kappa=math.inf)
@example(v=1.0 - 2**-53, m=2, kappa=math.inf)
@example(v=1e-12, m=64, kappa=1e-3)
@example(v=0.5, m=64, kappa=1e6)
@example(v=0.0, m=2, kappa=math.inf)
@example(v=1.0, m=1, kappa=2.0)
def test_root_contrast_and_gain_match_exact_arithmetic(v: float, m: int, kappa: float) -> None:
    assert_close(contrast.root_contrast(v, m, kappa), exact_root(v, m, kappa))
    assert_close(
        contrast.root_marginal_gain(v, m, kappa), exact_root(v, m + 1, kappa) - exact_root(v, m, kappa)
    )


@settings(max_examples=300, deadline=None)
@given(q=CHANCE, k=COUNT, kappa=KAPPA)
@example(q=1.0 - 2**-53, k=1, kappa=math.inf)
@example(q=0.0, k=0, kappa=math.inf)
@example(q=0.0, k=3, kappa=math.inf)
@example(q=1.0, k=64, kappa=5.0)
def test_prefix_contrast_and_gain_match_exact_arithmetic(q: float, k: int, kappa: float) -> None:
    assert_close(contrast.prefix_contrast(q, k, kappa), exact_prefix(q, k, kappa))
    assert_close(
        contrast.prefix_marginal_gain(q, k, kappa), exact_prefix(q, k + 1, kappa) - exact_prefix(q, k, kappa)
    )


@settings(deadline=None)
@given(q=st.floats(0.01, 0.99), k=st.integers(0, 30), kappa=KAPPA)
def test_gain_ratio_chains_prefix_gains(q: float, k: int, kappa: float) -> None:
    step = contrast.prefix_gain_ratio(q, k, contrast.inverse_kappa(kappa))
    expected = contrast.prefix_marginal_gain(q, k + 1, kappa)
    assert contrast.prefix_marginal_gain(q, k, kappa) * step == pytest.approx(float(expected), rel=1e-12)


@settings(deadline=None)
@given(v=st.lists(CHANCE, min_size=1, max_size=4), m_max=st.integers(2, 20), kappa=KAPPA)
def test_gain_table_is_the_gains_side_by_side_and_never_rises_after_two(
    v: list[float], m_max: int, kappa: float
) -> None:
    table = contrast.root_gain_table(np.array(v), m_max, kappa)
    np.testing.assert_array_equal(
        table, contrast.root_marginal_gain(np.array(v)[:, None], np.arange(m_max), kappa)
    )
    assert (np.diff(table[:, 1:], axis=1) <= 1e-16).all()


def test_shapes_broadcast() -> None:
    v, m = np.array([[0.1], [0.5]]), np.array([0, 1, 2, 3, 4])
    u = v * (1 - v)
    np.testing.assert_allclose(
        contrast.root_contrast(v, m), np.hstack([0 * u, 0 * u, 2 * u, 3 * u, 4 * u - 2 * u * u]), rtol=1e-14
    )
    assert contrast.root_contrast(np.zeros(0), 3).shape == (0,)


def test_repeat_probability_follows_the_observed_outcome() -> None:
    np.testing.assert_array_equal(
        contrast.prefix_repeat_probability([0.9, 0.9, 1.0], [1, 0, 0]), [0.9, 1 - 0.9, 0]
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: contrast.root_contrast(1.1, 2), "v must be probabilities"),
        (lambda: contrast.root_contrast(math.nan, 2), "v must be probabilities"),
        (lambda: contrast.root_contrast(0.5, -1), "m must be whole"),
        (lambda: contrast.root_contrast(0.5, 1.5), "m must be whole"),
        (lambda: contrast.root_contrast(0.5, 2, 0.0), "kappa must be above 0"),
        (lambda: contrast.prefix_contrast(0.5, 2, math.nan), "kappa must be above 0"),
        (lambda: contrast.prefix_repeat_probability([0.5], [0.3]), "reward must be 0 or 1"),
        (lambda: contrast.fit_kappa([0.5], [3], [2]), "exceed"),
        (lambda: contrast.fit_kappa([0.5, 0.5], [1], [2]), "equal lists"),
    ],
)
def test_bad_values_are_named(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("kappa", [0.5, 3.0, 20.0])
def test_kappa_is_recovered_from_simulated_groups(kappa: float) -> None:
    rng = np.random.default_rng(7)
    v = rng.uniform(0.05, 0.95, 30_000)
    trials = rng.integers(2, 17, 30_000)
    success = rng.binomial(trials, rng.beta(v * kappa, (1 - v) * kappa))
    assert contrast.fit_kappa(v, success, trials) == pytest.approx(kappa, rel=0.1)


def test_kappa_stays_within_its_bounds() -> None:
    rng = np.random.default_rng(8)
    v, trials = rng.uniform(0.1, 0.9, 2000), np.full(2000, 8)
    assert contrast.fit_kappa(v, rng.binomial(trials, v), trials) > 100
    assert contrast.fit_kappa(np.full(50, 0.5), np.full(50, 4), np.full(50, 8)) == contrast.KAPPA_CAP
    assert contrast.fit_kappa(np.full(50, 0.5), np.repeat([0, 8], 25), np.full(50, 8)) == pytest.approx(
        contrast.KAPPA_FLOOR
    )
    assert contrast.fit_kappa([0.5, 0.5], [1, 0], [1, 0]) == contrast.KAPPA_CAP
    assert contrast.fit_kappa([], [], []) == contrast.KAPPA_CAP


@pytest.mark.parametrize("kappa", [math.inf, 1000.0, 8.0, 0.5])
def test_gains_are_those_of_the_anchor_op(kappa: float) -> None:
    """Two implementations of one formula, for the reason in their docstrings."""
    v = np.array([0.0, 0.01, 0.1, 1 / 3, 0.5, 0.8, 0.99, 1.0])
    counts, chance = 65, torch.from_numpy(v)
    got = score_anchors.root_gains(chance, 1 - chance, counts, 1 / kappa).numpy()
    np.testing.assert_allclose(got, contrast.root_gain_table(v, counts, kappa), rtol=1e-12, atol=1e-300)
    for reward in (0, 1):
        q = contrast.prefix_repeat_probability(v, reward)
        want = contrast.prefix_marginal_gain(q[:, None], np.arange(counts), kappa)
        outcomes = torch.full((len(v),), reward)
        got = score_anchors.prefix_gains(chance, 1 - chance, outcomes, counts, 1 / kappa).numpy()
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-300)
