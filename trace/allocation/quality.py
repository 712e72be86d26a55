"""How good the success predictor is, reported every step (algorithm.md section 4)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .contrast import probabilities, root_contrast, whole_numbers

Floats = NDArray[np.float64]


def predictor_quality(
    v_root: ArrayLike,
    root_success: ArrayLike,
    root_trials: ArrayLike,
    *,
    kappa: float = math.inf,
    bins: int = 10,
) -> dict[str, float]:
    """Figures on the bare rollouts of one step, all of them finite whatever the input.

    Args:
        v_root: predicted success [n] in [0, 1], before the update that saw these rollouts.
        root_success: successful bare rollouts [n].
        root_trials: bare rollouts [n]; prompts with 0 are ignored.
        kappa: concentration of the contrast in force; inf is the plug-in rule.
        bins: equal-width bins of the calibration error.

    Returns:
        `brier` mean squared error per rollout; `ece` expected calibration error, bins weighted by rollouts;
        `correlation` Pearson, prediction with observed success rate, prompts weighted by rollouts, 0 where
        either is constant; `mixed_predicted` and `mixed_observed`, shares of prompts with a success and a
        failure, the first by the contrast in force; `mixed_plug_in`, the first by the paper's rule. All 0
        without rollouts.

    Raises:
        ValueError: unequal lengths, v outside [0, 1], negative counts, or more successes than trials.
    """
    chance = probabilities(v_root, "v_root")
    won, tried = whole_numbers(root_success, "root_success"), whole_numbers(root_trials, "root_trials")
    if not (chance.ndim == 1 and chance.shape == won.shape == tried.shape):
        raise ValueError(f"the three lists must have one length: {chance.shape}, {won.shape}, {tried.shape}")
    if (won > tried).any():
        raise ValueError("root_success must not exceed root_trials")
    seen = tried > 0
    chance, won, tried = chance[seen], won[seen], tried[seen]
    if not chance.size:
        names = ("brier", "ece", "correlation", "mixed_predicted", "mixed_observed", "mixed_plug_in")
        return dict.fromkeys(names, 0.0)
    return {
        "brier": float((won * (1.0 - chance) ** 2 + (tried - won) * chance**2).sum() / tried.sum()),
        "ece": _calibration_error(chance, won, tried, bins),
        "correlation": _correlation(chance, won / tried, tried / tried.sum()),
        "mixed_predicted": float(root_contrast(chance, tried, kappa).mean()),
        "mixed_observed": float(((won > 0) & (won < tried)).mean()),
        "mixed_plug_in": float(root_contrast(chance, tried).mean()),
    }


def _calibration_error(chance: Floats, won: NDArray[np.int64], tried: NDArray[np.int64], bins: int) -> float:
    place = np.minimum((chance * bins).astype(np.int64), bins - 1)
    expected = np.bincount(place, weights=chance * tried, minlength=bins)
    observed = np.bincount(place, weights=won, minlength=bins)
    return float(np.abs(expected - observed).sum() / tried.sum())


def _correlation(x: Floats, y: Floats, weight: Floats) -> float:
    x, y = x - (weight * x).sum(), y - (weight * y).sum()
    x_var, y_var = float((weight * x * x).sum()), float((weight * y * y).sum())
    # Means of equal numbers round to a variance near 1e-33: that is no correlation.
    if min(x_var, y_var) < 1e-20:
        return 0.0
    return float(np.clip((weight * x * y).sum() / math.sqrt(x_var * y_var), -1.0, 1.0))
