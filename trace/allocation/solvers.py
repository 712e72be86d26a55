"""Exact optima of both stages (algorithm.md sections 2 and 3): predictions and budgets in, counts out."""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .contrast import (
    clip_success,
    inverse_kappa,
    prefix_gain_ratio,
    prefix_marginal_gain,
    probabilities,
    root_gain_table,
    whole_numbers,
)

Counts = NDArray[np.int64]

# Gains are compared as integers of this unit: sums are then exact, so equal optima are seen as equal and the
# tie rule decides, not rounding. An optimum is off by at most M * 2**-53.
_FIXED_POINT = float(2**52)


class PrefixAllocation(NamedTuple):
    """Continuations per candidate [A] and the budget that found no candidate anywhere."""

    counts: Counts
    unspent: int


def allocate_roots(
    v: ArrayLike,
    budget: int,
    m_max: int = 16,
    *,
    rng: np.random.Generator,
    kappa: float = math.inf,
    required: ArrayLike | None = None,
) -> Counts:
    """Root rollouts per prompt that maximise the expected number of mixed groups, exactly (section 2).

    maximise    sum_i root_contrast(v_i, m_i, kappa)
    subject to  sum_i m_i = budget, m_i in {0} u {2 .. m_max}

    Why the sweep below is exact: the utility depends on v through |v - 1/2| alone and falls with it at every
    m, so handing an active prompt's rollouts to an idle one nearer 1/2 never loses: some optimum activates
    the n prompts nearest 1/2. For a fixed n everybody has 2 and the rest goes to separable gains that never
    rise, where taking the largest is optimal. From n to n + 1 gains join and two rollouts leave, so a gain
    once left out stays out, and one heap serves all n: O(B m_max log M).

    Args:
        v: predicted success [B] in [0, 1], clipped to [0.01, 0.99].
        budget: M, rollouts to place; all of them are placed.
        m_max: most rollouts of one prompt.
        rng: seeded order of equal prompts. Equal optima: most prompts first, then lower m, then this order.
        kappa: concentration of the beta-binomial contrast; inf is the plug-in rule.
        required: prompts [B] (bool) that get at least 2 rollouts whatever their v.

    Returns:
        int64 [B] that sums to `budget`.

    Raises:
        ValueError: no counts fulfil the constraints; the message names the value and what to change.
    """
    chance = clip_success(v)
    forced = np.zeros(chance.shape, bool) if required is None else np.asarray(required, bool)
    if chance.ndim != 1 or forced.shape != chance.shape:
        raise ValueError(f"v and required must be lists of one length, got {chance.shape} and {forced.shape}")
    _check_root_budget(len(chance), budget, m_max, int(forced.sum()))

    # 0.2 and 1 - 0.8 differ in the last bit and must still tie.
    folded = np.round(np.minimum(chance, 1.0 - chance), 15)
    unit, extra = _fixed_point_gains(folded, m_max, kappa)
    shuffled = rng.permutation(len(chance))
    order = np.lexsort((shuffled, -unit, ~forced))[: budget // 2]
    extra = extra[order]

    best_first = np.lexsort((np.repeat(shuffled[order], m_max - 2), _levels(extra), -extra.ravel()))
    merit = np.empty(extra.size, np.int64)
    merit[best_first] = np.arange(extra.size, 0, -1)
    active = _best_active_count(
        (2 * unit[order]).tolist(),
        extra.tolist(),
        merit.reshape(extra.shape).tolist(),
        budget,
        int(forced.sum()),
    )

    counts = np.zeros(len(chance), np.int64)
    ranked = np.argsort(-merit[: active * (m_max - 2)])[: budget - 2 * active]
    counts[order[:active]] = 2 + np.bincount(ranked // max(m_max - 2, 1), minlength=active)
    return counts


def allocate_prefixes(
    q: ArrayLike,
    prompt: ArrayLike,
    budget_per_prompt: ArrayLike,
    *,
    rng: np.random.Generator,
    kappa: float = math.inf,
) -> PrefixAllocation:
    """Continuations per candidate prefix that maximise the expected flips, exactly (section 3).

    Each prompt spends its own budget on its own candidates by the largest marginal gain, which is optimal
    since gains fall. The budgets of prompts without candidates are then spread over all candidates by the
    same rule.

    Args:
        q: repeat probability of each candidate [A] in [0, 1], before the posterior
            (`prefix_repeat_probability`).
        prompt: index of its active prompt [A] in [0, P).
        budget_per_prompt: continuations [P], m_i N.
        rng: order among equal candidates; among equal gains the candidate with fewer continuations comes
            first.
        kappa: concentration of the beta-binomial contrast; inf is the plug-in rule.

    Returns:
        counts int64 [A] and the unspent budget, which is 0 unless there is no candidate at all.

    Raises:
        ValueError: shapes that do not match, q outside [0, 1], a prompt index outside [0, P), a negative
            budget.
    """
    repeat, owner = probabilities(q, "q"), whole_numbers(prompt, "prompt")
    budgets = whole_numbers(budget_per_prompt, "budget_per_prompt")
    check_owners(repeat, owner, budgets)
    rho = inverse_kappa(kappa)
    counts = np.zeros(len(repeat), np.int64)
    heaps: list[list[tuple[float, int, int, int]]] = [[] for _ in budgets]
    first_gain = prefix_marginal_gain(repeat, 0, kappa)
    for index, tie in enumerate(rng.permutation(len(repeat)).tolist()):
        heaps[owner[index]].append((-float(first_gain[index]), 0, tie, index))

    def spend(heap: list[tuple[float, int, int, int]], amount: int) -> None:
        heapq.heapify(heap)
        for _ in range(amount):
            gain, k, tie, index = heap[0]
            counts[index] = k + 1
            heapq.heapreplace(
                heap, (gain * prefix_gain_ratio(float(repeat[index]), k, rho), k + 1, tie, index)
            )

    given_back = 0
    for heap, amount in zip(heaps, budgets.tolist(), strict=True):
        if heap:
            spend(heap, amount)
        else:
            given_back += amount
    everyone = [entry for heap in heaps for entry in heap]
    if not everyone:
        return PrefixAllocation(counts, given_back)
    spend(everyone, given_back)
    return PrefixAllocation(counts, 0)


def check_owners(values: NDArray[np.float64], owner: Counts, budgets: Counts) -> None:
    """Raises ValueError unless values and owner are [A], budgets is [P] and every owner is in [0, P)."""
    if values.ndim != 1 or values.shape != owner.shape or budgets.ndim != 1:
        raise ValueError(
            f"candidates and prompt must be lists of one length and budget a list, "
            f"got {values.shape}, {owner.shape}, {budgets.shape}"
        )
    if owner.size and owner.max() >= len(budgets):
        raise ValueError(f"prompt index {owner.max()} but there are {len(budgets)} active prompts")


def _check_root_budget(prompts: int, budget: int, m_max: int, forced: int) -> None:
    if m_max < 2:
        raise ValueError(f"m_max = {m_max}: a mixed group needs 2 rollouts, set m_max to 2 or more")
    if budget < 2:
        raise ValueError(f"root budget M = {budget}: a mixed group needs 2 rollouts, set M to 2 or more")
    if budget > prompts * m_max:
        raise ValueError(
            f"root budget M = {budget} exceeds {prompts} prompts x m_max = {m_max}: "
            f"lower M, raise m_max, or enlarge the pool to {-(-budget // m_max)} prompts"
        )
    if m_max == 2 and budget % 2:
        raise ValueError(
            f"root budget M = {budget} is odd but m_max = 2 allows pairs only: make M even or raise m_max"
        )
    if 2 * forced > budget:
        raise ValueError(
            f"{forced} required prompts need {2 * forced} rollouts, root budget M = {budget}: raise M"
        )


def _fixed_point_gains(folded: NDArray[np.float64], m_max: int, kappa: float) -> tuple[Counts, Counts]:
    """Integer gains: unit [B] = V(2) / 2 = V(3) - V(2), and extra [B, m_max - 2], those from 2, 3, ... on."""
    table = root_gain_table(folded, m_max, kappa)
    unit = np.rint(table[:, 1] / 2.0 * _FIXED_POINT).astype(np.int64)
    extra = np.rint(table[:, 2:] * _FIXED_POINT).astype(np.int64)
    if m_max > 2:
        # Both equal v(1-v) / (1 + rho) and differ by rounding; the tie between three pairs and two triples
        # needs one.
        extra[:, 0] = unit
        extra = np.minimum.accumulate(extra, axis=1)
    return unit, extra


def _levels(extra: Counts) -> Counts:
    return np.tile(np.arange(extra.shape[1]), extra.shape[0])


def _best_active_count(
    base: list[int], extra: list[list[int]], merit: list[list[int]], budget: int, forced: int
) -> int:
    """Number of leading prompts to activate; merit ranks the extra gains (higher is better, all distinct)."""
    held: list[tuple[int, int]] = []
    total, best, best_total = 0, 0, -1
    for n, (pair, gains, merits) in enumerate(zip(base, extra, merit, strict=True), start=1):
        room = budget - 2 * n
        total += pair
        for entry in zip(merits, gains, strict=True):
            heapq.heappush(held, entry)
            total += entry[1]
        while len(held) > room:
            total -= heapq.heappop(held)[1]
        if n >= forced and len(held) == room and total >= best_total:
            best, best_total = n, total
    return best
