"""Contrast utilities of roots and prefixes (algorithm.md sections 2 to 4): pure numpy, no cancellation.

Every function takes `kappa`, the concentration of the Beta law of a prompt's success around the prediction.
`inf` (the default) is the paper's plug-in rule; a finite value is the beta-binomial form. Inside, `rho = 1 /
kappa` makes both one formula: after j successes in j trials the next one succeeds with (v + j rho) / (1 + j
rho).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

V_CLIP = (0.01, 0.99)
KAPPA_FLOOR = 1e-2
KAPPA_CAP = 1e4


def clip_success(v: ArrayLike) -> Floats:
    """Predicted success clipped to `V_CLIP` (section 2): no prompt is ever written off as certain."""
    return np.clip(probabilities(v, "v"), *V_CLIP)


def root_contrast(v: ArrayLike, m: ArrayLike, kappa: float = math.inf) -> Floats:
    """P(m root rollouts hold a success and a failure), plug-in `1 - v^m - (1-v)^m` (section 2).

    Args:
        v: predicted success in [0, 1], any shape.
        m: rollouts, integers >= 0, broadcastable with v; 0 and 1 give 0.
        kappa: concentration > 0; finite gives `1 - B(a+m,b)/B(a,b) - B(a,b+m)/B(a,b)` with a = v kappa and
            b = (1-v) kappa.

    Returns:
        float64 of the broadcast shape. Summed from the gains, all of one sign, so small values keep their
        digits.

    Raises:
        ValueError: v outside [0, 1], m negative or not whole, kappa not above 0.
    """
    chance, count = np.broadcast_arrays(probabilities(v, "v"), whole_numbers(m, "m"))
    total = np.zeros(chance.shape)
    for j, gain in enumerate(islice(_root_gains(chance, inverse_kappa(kappa)), _largest(count) - 1), start=1):
        total += np.where(j < count, gain, 0.0)
    return total


def root_marginal_gain(v: ArrayLike, m: ArrayLike, kappa: float = math.inf) -> Floats:
    """`root_contrast(v, m + 1) - root_contrast(v, m)` without the subtraction; arguments as there."""
    chance, count = np.broadcast_arrays(probabilities(v, "v"), whole_numbers(m, "m"))
    total = np.zeros(chance.shape)
    for j, gain in enumerate(islice(_root_gains(chance, inverse_kappa(kappa)), _largest(count)), start=1):
        total = np.where(j == count, gain, total)
    return total


def root_gain_table(v: ArrayLike, m_max: int, kappa: float = math.inf) -> Floats:
    """Gains of all steps up to m_max: v [B] -> [B, m_max], column m is the gain from m to m + 1 rollouts.

    `trace_kernels.score_anchors` has the same formula in tensors, beside the logit it reads. Allocation keeps its
    own: it takes v from any source and needs NumPy alone. A test holds the two together.
    """
    chance = probabilities(v, "v")
    gains = list(islice(_root_gains(chance, inverse_kappa(kappa)), m_max - 1))
    return np.stack([np.zeros_like(chance), *gains], axis=-1)


def prefix_repeat_probability(v: ArrayLike, reward: ArrayLike) -> Floats:
    """q = P(a fresh continuation repeats the observed outcome) (section 3).

    Args:
        v: predicted success at the prefix in [0, 1], any shape.
        reward: reward of the bare rollout the prefix belongs to, 0 or 1, broadcastable with v.

    Raises:
        ValueError: v outside [0, 1] or a reward that is neither 0 nor 1.
    """
    chance, outcome = np.broadcast_arrays(probabilities(v, "v"), np.asarray(reward))
    if not np.isin(outcome, (0, 1)).all():
        raise ValueError(
            "reward must be 0 or 1: the contrast is defined for outcome rewards, threshold yours first"
        )
    return np.where(outcome == 1, chance, 1.0 - chance)


def prefix_contrast(q: ArrayLike, k: ArrayLike, kappa: float = math.inf) -> Floats:
    """P(at least one of k continuations flips the observed outcome), plug-in `1 - q^k` (section 3).

    Args:
        q: repeat probability in [0, 1] under the *prior*, any shape (`prefix_repeat_probability`).
        k: continuations, integers >= 0, broadcastable with q.
        kappa: concentration > 0; finite uses the posterior after the one observed outcome, a Beta with kappa
            q + 1 on the repeating side: `1 - prod_(j<k) (kappa q + 1 + j) / (kappa + 1 + j)` (section 4).

    Raises:
        ValueError: q outside [0, 1], k negative or not whole, kappa not above 0.
    """
    repeat, count = np.broadcast_arrays(probabilities(q, "q"), whole_numbers(k, "k"))
    return -np.expm1(_log_repeat(repeat, count, inverse_kappa(kappa)))


def prefix_marginal_gain(q: ArrayLike, k: ArrayLike, kappa: float = math.inf) -> Floats:
    """`prefix_contrast(q, k + 1) - prefix_contrast(q, k)`, plug-in `q^k (1 - q)`; arguments as there.

    In `trace_kernels.score_anchors` too, for the reason in `root_gain_table`.
    """
    repeat, count = np.broadcast_arrays(probabilities(q, "q"), whole_numbers(k, "k"))
    rho = inverse_kappa(kappa)
    return np.exp(_log_repeat(repeat, count, rho)) * (1.0 - repeat) / (1.0 + (count + 1) * rho)


def prefix_gain_ratio(q: float, k: int, rho: float) -> float:
    """Gain of continuation k + 2 over gain of k + 1, at `rho = 1 / kappa`; q itself in the plug-in case."""
    return (q + (k + 1) * rho) / (1.0 + (k + 2) * rho)


def fit_kappa(v: ArrayLike, successes: ArrayLike, trials: ArrayLike) -> float:
    """Concentration kappa that makes the observed groups most likely (section 4 "Beyond the paper").

    Each group is beta-binomial with a = v kappa, b = (1 - v) kappa, so kappa also absorbs the predictor's
    error.

    Args:
        v: predicted success [n] in [0, 1], clipped to `V_CLIP`.
        successes: successful rollouts [n], integers.
        trials: rollouts [n], integers; groups of 0 or 1 say nothing about kappa and are ignored.

    Returns:
        kappa in [KAPPA_FLOOR, KAPPA_CAP]; KAPPA_CAP when the groups look binomial or there are none.

    Raises:
        ValueError: unequal lengths, negative counts, or more successes than trials.
    """
    chance, won, tried = (
        clip_success(v),
        whole_numbers(successes, "successes"),
        whole_numbers(trials, "trials"),
    )
    if not (chance.ndim == 1 and chance.shape == won.shape == tried.shape):
        raise ValueError(
            f"v, successes and trials must be equal lists: {chance.shape}, {won.shape}, {tried.shape}"
        )
    if (won > tried).any():
        raise ValueError("successes must not exceed trials")
    informative = tried >= 2
    chance, won, tried = chance[informative], won[informative], tried[informative]
    if not chance.size:
        return KAPPA_CAP
    step = np.arange(int(tried.max()))
    in_won, in_lost = step < won[:, None], step < (tried - won)[:, None]
    in_tried = (step < tried[:, None]).sum(axis=0)

    def log_likelihood(log_kappa: float) -> float:
        pulled = step * math.exp(-log_kappa)
        terms = np.log(chance[:, None] + pulled, where=in_won, out=np.zeros(in_won.shape))
        terms += np.log((1.0 - chance)[:, None] + pulled, where=in_lost, out=np.zeros(in_lost.shape))
        return float(terms.sum() - (in_tried * np.log1p(pulled)).sum())

    grid = np.linspace(math.log(KAPPA_FLOOR), math.log(KAPPA_CAP), 29)
    peak = int(np.argmax([log_likelihood(x) for x in grid]))
    low, high = grid[max(peak - 1, 0)], grid[min(peak + 1, len(grid) - 1)]
    best = _golden_section(log_likelihood, float(low), float(high))
    ends = [math.log(KAPPA_FLOOR), best, math.log(KAPPA_CAP)]
    return float(np.clip(math.exp(max(reversed(ends), key=log_likelihood)), KAPPA_FLOOR, KAPPA_CAP))


def inverse_kappa(kappa: float) -> float:
    """rho = 1 / kappa, 0 for the plug-in rule. Raises ValueError unless kappa > 0 with a finite inverse."""
    if not kappa > 0 or not math.isfinite(1.0 / kappa):
        raise ValueError(f"kappa must be above 0, got {kappa}: use inf for the plug-in contrast")
    return 1.0 / kappa


def probabilities(values: ArrayLike, name: str) -> Floats:
    """`values` as float64. Raises ValueError when one is not a number or lies outside [0, 1]."""
    array = np.asarray(values, dtype=np.float64)
    if not ((array >= 0) & (array <= 1)).all():
        raise ValueError(
            f"{name} must be probabilities in [0, 1], got values from {array.min()} to {array.max()}"
        )
    return array


def whole_numbers(values: ArrayLike, name: str) -> NDArray[np.int64]:
    """`values` as int64. Raises ValueError when one is negative or not whole."""
    array = np.asarray(values)
    whole = array.astype(np.int64)
    if (whole != array).any() or (whole < 0).any():
        raise ValueError(f"{name} must be whole numbers >= 0")
    return whole


def _root_gains(v: Floats, rho: float) -> Iterator[Floats]:
    """Yield the gains from j to j + 1 rollouts, j = 1, 2, ...: P(j alike) times P(the next one differs)."""
    fail = 1.0 - v
    all_won, all_lost, j = v, fail, 1
    while True:
        scale = 1.0 + j * rho
        yield (all_won * fail + all_lost * v) / scale
        all_won, all_lost = all_won * (v + j * rho) / scale, all_lost * (fail + j * rho) / scale
        j += 1


def _log_repeat(q: Floats, k: NDArray[np.int64], rho: float) -> Floats:
    """log P(k continuations all repeat)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        if rho == 0.0:
            return np.where(k == 0, 0.0, k * np.log(q))
        total = np.zeros(q.shape)
        for j in range(1, _largest(k) + 1):
            scale = 1.0 + j * rho
            # Each form keeps its digits on one side only.
            log_next = np.where(q < 0.5, np.log((q + j * rho) / scale), np.log1p(-(1.0 - q) / scale))
            total += np.where(j <= k, log_next, 0.0)
    return total


def _largest(counts: NDArray[np.int64]) -> int:
    return max(int(counts.max(initial=0)), 1)


def _golden_section(function: Callable[[float], float], low: float, high: float) -> float:
    """Argument of the maximum of a function with one peak in [low, high], to 1e-6."""
    ratio = (math.sqrt(5.0) - 1.0) / 2.0
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > 1e-6:
        if at_left >= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return (low + high) / 2.0
