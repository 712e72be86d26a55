"""The predictor's figures by hand, and finite on degenerate input."""

import math

import numpy as np
import pytest

from trace_rl.allocation.quality import predictor_quality


def test_figures_by_hand() -> None:
    report = predictor_quality([0.25, 0.75, 0.5], [0, 4, 0], [4, 4, 0])
    assert report["brier"] == pytest.approx(0.0625)
    assert report["ece"] == pytest.approx(0.25)
    assert report["correlation"] == pytest.approx(1.0)
    assert report["mixed_observed"] == 0.0
    assert report["mixed_predicted"] == pytest.approx(1 - 0.75**4 - 0.25**4)


def test_figures_match_rollout_by_rollout_computation() -> None:
    rng = np.random.default_rng(0)
    v, trials = rng.random(50), rng.integers(1, 9, 50)
    won = rng.binomial(trials, v)
    report = predictor_quality(v, won, trials)
    each_v = np.repeat(v, trials)
    each_r = np.concatenate([np.arange(n) < s for s, n in zip(won, trials, strict=True)]).astype(float)
    rate = np.repeat(won / trials, trials)
    assert report["brier"] == pytest.approx(np.mean((each_v - each_r) ** 2))
    assert report["correlation"] == pytest.approx(np.corrcoef(each_v, rate)[0, 1])
    bins = np.digitize(each_v, np.linspace(0, 1, 11)[1:-1])
    gaps = [abs((each_v - each_r)[bins == b].sum()) for b in range(10)]
    assert report["ece"] == pytest.approx(sum(gaps) / len(each_v))


def test_beta_binomial_explains_correlated_groups_that_plug_in_over_predicts() -> None:
    rng = np.random.default_rng(1)
    v = rng.uniform(0.2, 0.8, 3000)
    trials = np.full(3000, 6)
    won = rng.binomial(trials, rng.beta(v, 1 - v))
    report = predictor_quality(v, won, trials, kappa=1.0)
    assert report["mixed_plug_in"] > report["mixed_observed"] + 0.2
    assert report["mixed_predicted"] == pytest.approx(report["mixed_observed"], abs=0.03)


@pytest.mark.parametrize(
    ("v", "won", "trials"),
    [
        ([], [], []),
        ([0.5], [1], [2]),
        ([0.5], [0], [0]),
        ([0.3, 0.3, 0.3], [1, 0, 2], [2, 2, 2]),
        ([0.1, 0.9], [1, 1], [2, 2]),
        ([0.0, 1.0], [0, 1], [1, 1]),
    ],
)
def test_degenerate_input_is_finite(v: list, won: list, trials: list) -> None:
    report = predictor_quality(v, won, trials)
    assert set(report) == {
        "brier",
        "ece",
        "correlation",
        "mixed_predicted",
        "mixed_observed",
        "mixed_plug_in",
    }
    assert all(math.isfinite(x) for x in report.values())


def test_constant_prediction_has_no_correlation() -> None:
    assert predictor_quality(np.full(7, 0.3), [1, 0, 2, 1, 0, 2, 1], np.full(7, 2))["correlation"] == 0.0


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="one length"):
        predictor_quality([0.5], [1, 1], [2, 2])
    with pytest.raises(ValueError, match="exceed"):
        predictor_quality([0.5], [3], [2])
