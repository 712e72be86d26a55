"""The allocation rules a run can name, behind one signature. Every rule spends M (1 + N) leaves per step.

| name            | roots                            | continuations                  | scores read     |
|-----------------|----------------------------------|--------------------------------|-----------------|
| `uniform`       | M(1+N) in groups, first of pool  | none (GRPO)                    | none            |
| `pcl`           | M(1+N) in groups, v nearest 1/2  | none                           | roots           |
| `random_prefix` | M in groups, first of pool       | MN, random (TreePO, Tree-GRPO) | none            |
| `trace`         | M, exact optimum of section 2    | MN, exact optimum of section 3 | roots, prefixes |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from .contrast import inverse_kappa, prefix_repeat_probability, probabilities, whole_numbers
from .solvers import Counts, allocate_prefixes, allocate_roots, check_owners

Contrast = Literal["plug_in", "beta_binomial"]


@dataclass(frozen=True)
class RootStage:
    """What stage 1 knows.

    Attributes:
        v: predicted success [B] of the pool's prompts; rules that read no root scores use its length only.
        budget: M, bare rollouts of a tree strategy.
        expansion: N, continuations per bare rollout.
        group_size: rollouts per prompt of the strategies with fixed groups.
        m_max: most bare rollouts of one prompt (`trace` only; fixed groups have their own size).
        contrast: `plug_in` is the paper's rule, `beta_binomial` uses kappa.
        kappa: concentration, read when contrast is `beta_binomial`.
        exploration: share of M in [0, 1] spread over random prompts of the pool, 2 each (`trace` only).

    Raises:
        ValueError: a value outside its range; the message names it.
    """

    v: NDArray[np.float64]
    budget: int
    expansion: int
    group_size: int = 8
    m_max: int = 16
    contrast: Contrast = "plug_in"
    kappa: float = math.inf
    exploration: float = 0.0

    def __post_init__(self) -> None:
        if probabilities(self.v, "v").ndim != 1 or not len(self.v):
            raise ValueError("the pool is empty or v is no list: give at least one prompt")
        if self.budget < 2:
            raise ValueError(
                f"root budget M = {self.budget}: a mixed group needs 2 rollouts, set M to 2 or more"
            )
        if self.expansion < 0:
            raise ValueError(f"expansion N = {self.expansion} must not be negative")
        if self.group_size < 2:
            raise ValueError(f"group_size = {self.group_size}: a group needs 2 rollouts to have contrast")
        if not 0.0 <= self.exploration <= 1.0:
            raise ValueError(f"exploration = {self.exploration} must be a share in [0, 1]")
        effective_kappa(self.contrast, self.kappa)


@dataclass(frozen=True)
class PrefixStage:
    """What stage 2 knows. Candidates are the non-leaf turn prefixes of the bare rollouts, roots excluded.

    Attributes:
        v: predicted success [A] at each candidate; rules that read no prefix scores use its length only.
        reward: outcome [A], 0 or 1, of the bare rollout each candidate belongs to.
        prompt: index [A] of its active prompt, in [0, P).
        budget: continuations [P] of each active prompt, m_i N.
        contrast: as in `RootStage`.
        kappa: as in `RootStage`.

    Raises:
        ValueError: shapes that do not match or a value outside its range.
    """

    v: NDArray[np.float64]
    reward: NDArray[np.int64]
    prompt: NDArray[np.int64]
    budget: NDArray[np.int64]
    contrast: Contrast = "plug_in"
    kappa: float = math.inf

    def __post_init__(self) -> None:
        v, budgets = probabilities(self.v, "v"), whole_numbers(self.budget, "budget")
        check_owners(v, whole_numbers(self.prompt, "prompt"), budgets)
        if np.shape(self.reward) != v.shape:
            raise ValueError(f"reward {np.shape(self.reward)} and v {v.shape} must have one length")
        effective_kappa(self.contrast, self.kappa)


class Strategy(NamedTuple):
    """One allocation rule: counts [B] of root rollouts, then counts [A] of continuations.

    `prefixes` spends the whole `budget` of its stage whenever there is a candidate at all (strategies that do
    not expand spend none of it). The two flags say which predictor scores the rule reads, so that a trainer
    can skip the forward pass that makes them; `expands` says whether stage 2 does anything.
    """

    roots: Callable[[RootStage, np.random.Generator], Counts]
    prefixes: Callable[[PrefixStage, np.random.Generator], Counts]
    needs_root_scores: bool = False
    needs_prefix_scores: bool = False
    expands: bool = True


def effective_kappa(contrast: str, kappa: float) -> float:
    """The kappa for the contrast functions: inf for `plug_in`. Raises ValueError for an unknown name."""
    if contrast not in get_args(Contrast):
        raise ValueError(f"contrast = {contrast!r}: choose one of {', '.join(get_args(Contrast))}")
    inverse_kappa(kappa)
    return math.inf if contrast == "plug_in" else kappa


def fixed_groups(order: Counts, total: int, group_size: int) -> Counts:
    """`total` rollouts in groups of at least `group_size` on the leading prompts of `order` [B] -> [B].

    What `group_size` leaves over enlarges the groups evenly, first ones first, so no group has 1; so does a
    pool with too few prompts. A total below group_size is one group.
    """
    groups = min(max(total // group_size, 1), len(order))
    counts = np.zeros(len(order), np.int64)
    counts[order[:groups]] = total // groups
    counts[order[: total % groups]] += 1
    return counts


def first_in_pool(stage: RootStage, rng: np.random.Generator) -> Counts:
    """`uniform` roots: all M(1+N) leaves on the first prompts (pool order is random already)."""
    return fixed_groups(np.arange(len(stage.v)), stage.budget * (1 + stage.expansion), stage.group_size)


def nearest_half(stage: RootStage, rng: np.random.Generator) -> Counts:
    """`pcl` roots: all M(1+N) leaves on the prompts nearest 1/2, equal ones in seeded random order."""
    # 0.2 and 0.8 are equally far from 1/2 but not in the last bit.
    distance = np.round(np.abs(np.asarray(stage.v, np.float64) - 0.5), 15)
    order = np.lexsort((rng.permutation(len(distance)), distance))
    return fixed_groups(order, stage.budget * (1 + stage.expansion), stage.group_size)


def first_in_pool_bare(stage: RootStage, rng: np.random.Generator) -> Counts:
    """`random_prefix` roots: M bare rollouts on the first prompts, the rest of the leaves is stage 2's."""
    return fixed_groups(np.arange(len(stage.v)), stage.budget, stage.group_size)


def most_contrast(stage: RootStage, rng: np.random.Generator) -> Counts:
    """`trace` roots: the exact optimum, with `exploration` M / 2 random prompts that get at least 2 each.

    An explored prompt that also deserves more gets more: exploration is a floor, so it costs contrast only
    where the optimum would have left the prompt out.
    """
    explored = min(math.floor(stage.exploration * stage.budget / 2 + 1e-9), len(stage.v))
    required = np.zeros(len(stage.v), bool)
    if explored:
        required[rng.choice(len(stage.v), explored, replace=False)] = True
    kappa = effective_kappa(stage.contrast, stage.kappa)
    return allocate_roots(stage.v, stage.budget, stage.m_max, rng=rng, kappa=kappa, required=required)


def no_prefixes(stage: PrefixStage, rng: np.random.Generator) -> Counts:
    """`uniform` and `pcl` prefixes: no continuations."""
    return np.zeros(len(stage.v), np.int64)


def random_prefixes(stage: PrefixStage, rng: np.random.Generator) -> Counts:
    """`random_prefix` prefixes: each continuation from a uniformly random candidate of its prompt.

    The budgets of prompts without candidates go to uniformly random candidates of all the others.
    """
    prompt = np.asarray(stage.prompt, np.int64)
    counts = np.zeros(len(prompt), np.int64)
    given_back = 0
    for index, amount in enumerate(np.asarray(stage.budget).tolist()):
        own = np.flatnonzero(prompt == index)
        if len(own):
            counts[own] += rng.multinomial(amount, np.full(len(own), 1.0 / len(own)))
        else:
            given_back += amount
    if given_back and len(counts):
        counts += rng.multinomial(given_back, np.full(len(counts), 1.0 / len(counts)))
    return counts


def most_flips(stage: PrefixStage, rng: np.random.Generator) -> Counts:
    """`trace` prefixes: the exact optimum."""
    q = prefix_repeat_probability(stage.v, stage.reward)
    kappa = effective_kappa(stage.contrast, stage.kappa)
    return allocate_prefixes(q, stage.prompt, stage.budget, rng=rng, kappa=kappa).counts


STRATEGIES: dict[str, Strategy] = {
    "uniform": Strategy(first_in_pool, no_prefixes, expands=False),
    "pcl": Strategy(nearest_half, no_prefixes, needs_root_scores=True, expands=False),
    "random_prefix": Strategy(first_in_pool_bare, random_prefixes),
    "trace": Strategy(most_contrast, most_flips, needs_root_scores=True, needs_prefix_scores=True),
}
