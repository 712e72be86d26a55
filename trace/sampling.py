"""The sampling half of a step: whom to sample, and the rollouts themselves (algorithm.md, sections 2 and 3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import torch
from numpy.typing import NDArray

from trace_kernels.packing import balance

from . import ledger
from .allocation.strategies import STRATEGIES, PrefixStage, RootStage
from .config.load import ConfigError
from .engines.protocol import EngineCounters
from .environments.protocol import ToolOutageError
from .policy.batch import Features, Forest, prompt_forest
from .rollout.tree import RolloutTree
from .state import Run

MAX_ERROR_SHARE = 0.5  # of a step's rollouts that a failing tool may end before the run stops


def plant_pool(run: Run) -> tuple[list[RolloutTree], int]:
    """B candidate prompts, all different, and how many were left out because they do not fit the context."""
    trees: dict[str, RolloutTree] = {}
    skipped: set[str] = set()
    a, s = run.config.allocation, run.config.sampling
    while len(trees) < a.pool_size and len(trees) + len(skipped) < len(run.tasks):
        task = run.tasks[run.order.take(1)[0]]
        if task.id in trees or task.id in skipped:
            continue
        tree = run.collector.plant(task)
        if run.collector.fits(tree):
            trees[task.id] = tree
        else:
            skipped.add(task.id)
    if (a.strategy == "trace" and len(trees) * a.max_per_prompt < a.bare_rollouts) or not trees:
        raise ConfigError(
            f"{len(skipped)} prompts do not fit sampling.context_tokens={s.context_tokens} beside a turn of "
            f"sampling.turn_tokens={s.turn_tokens}; the {len(trees)} that do cannot take "
            f"allocation.bare_rollouts={a.bare_rollouts}"
        )
    return list(trees.values()), len(skipped)


def score_roots(run: Run, pool: list[RolloutTree]) -> NDArray[np.float64]:
    """[B] predicted success of the pool's prompts (0.5 where the strategy does not look at it)."""
    if not STRATEGIES[run.config.allocation.strategy].needs_root_scores:
        return np.full(len(pool), 0.5)
    with run.phases("score roots"):
        forest, rows = prompt_forest(pool)
        _, hidden, _ = run.policy.score(forest)
        features = np.stack([hidden[forest.keys[row]] for row in rows])
    with run.phases("predictor scoring"):
        return run.ranks.from_main(lambda: run.predictor.predict(torch.from_numpy(features)))


def allocate_roots(run: Run, v_root: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.int64]:
    """[B] bare rollouts of each prompt (section 2)."""
    a = run.config.allocation
    stage = RootStage(
        v=v_root,
        budget=a.bare_rollouts,
        expansion=a.continuations,
        group_size=a.group_size,
        m_max=a.max_per_prompt,
        contrast=a.contrast,
        kappa=run.predictor.kappa,
        exploration=a.exploration,
    )
    return run.ranks.from_main(lambda: STRATEGIES[a.strategy].roots(stage, rng))


def sample_bare(
    run: Run, pool: list[RolloutTree], counts: NDArray[np.int64], step: int
) -> tuple[list[RolloutTree], list[list[int]]]:
    """The active trees with their bare rollouts, and which of them each rank owns."""
    trees = [tree for tree, n in zip(pool, counts, strict=True) if n]
    active = [int(n) for n in counts if n]
    owners = balance(active, run.ranks.world)
    mine = owners[run.ranks.rank]

    def sample() -> None:
        run.collector.bare([trees[i] for i in mine], [active[i] for i in mine], _seed(run, step), run.version)

    with run.phases("bare rollouts", sum(active[i] for i in mine)):
        return share_trees(run, trees, mine, sample), owners


def sound_trees(trees: list[RolloutTree], step: int) -> list[RolloutTree]:
    """The trees without the rollouts that a tool's failure ended; trees with no other are left out.

    Raises ToolOutageError, with the tool's own words, if these were more than half: the others are those that
    needed the tool least, and learning from them alone would teach not to use it.
    """
    leaves = sum(len(tree.leaves()) for tree in trees)
    errors = [node.error for tree in trees for node in tree.nodes if node.error]
    if len(errors) > MAX_ERROR_SHARE * leaves:
        raise ToolOutageError(
            f"{len(errors)} of the {leaves} rollouts of step {step} were ended by their tool, the first by: "
            f"{errors[0]}"
        )
    return [tree for tree in (tree.without_errors() for tree in trees) if tree.leaves()]


def score_anchors(run: Run, trees: list[RolloutTree]) -> Features:
    """Final hidden states at the turn prefixes of the bare rollouts."""
    if (
        not STRATEGIES[run.config.allocation.strategy].needs_prefix_scores
        or not run.config.allocation.continuations
    ):
        return {}
    with run.phases("score anchors"):
        return run.policy.score(Forest.of(trees))[1]


def allocate_prefixes(
    run: Run, trees: list[RolloutTree], features: Features, rng: np.random.Generator
) -> list[dict[int, int]]:
    """Continuations of each anchor of each tree (section 3)."""
    a = run.config.allocation
    if not STRATEGIES[a.strategy].expands or not a.continuations:
        return [{} for _ in trees]
    anchors = [(t, node, reward) for t, tree in enumerate(trees) for node, reward in tree.anchors()]
    if not anchors:
        return [{} for _ in trees]

    def decide() -> list[dict[int, int]]:
        v = np.full(len(anchors), 0.5)
        if features:
            with run.phases("predictor scoring"):
                v = run.predictor.predict(
                    torch.from_numpy(np.stack([features[t, node] for t, node, _ in anchors]))
                )
        bare = [len(tree.bare_rewards()) for tree in trees]
        stage = PrefixStage(
            v=v,
            reward=np.array([int(reward) for _, _, reward in anchors]),
            prompt=np.array([t for t, _, _ in anchors]),
            budget=np.array(bare) * a.continuations,
            contrast=a.contrast,
            kappa=run.predictor.kappa,
        )
        counts: list[dict[int, int]] = [{} for _ in trees]
        for (t, node, _), n in zip(anchors, STRATEGIES[a.strategy].prefixes(stage, rng), strict=True):
            if n:
                counts[t][node] = int(n)
        return counts

    return run.ranks.from_main(decide)


def sample_continuations(
    run: Run, trees: list[RolloutTree], owners: list[list[int]], counts: list[dict[int, int]], step: int
) -> list[RolloutTree]:
    """The trees with their continuations. Each stays with the rank whose engine has cached its prefixes."""
    mine = owners[run.ranks.rank]

    def sample() -> None:
        run.collector.continuations(
            [trees[i] for i in mine], [counts[i] for i in mine], _seed(run, step), run.version
        )

    with run.phases("continuations", sum(sum(counts[i].values()) for i in mine)):
        return share_trees(run, trees, mine, sample)


def share_trees(
    run: Run, trees: list[RolloutTree], mine: list[int], sample: Callable[[], None]
) -> list[RolloutTree]:
    """Let every rank sample its own trees, then give all trees to all. One rank's failure fails all."""
    run.ranks.attempt(sample)
    shared = list(trees)
    for share in run.ranks.gather({i: trees[i] for i in mine}):
        for index, tree in share.items():
            shared[index] = tree
    return shared


def compare_with_engine(run: Run, spent: ledger.Ledger, before: EngineCounters | None) -> dict[str, int]:
    """The engines' own counts of this step minus the ledger's: zeros, or something sampled unseen."""
    after = run.ranks.attempt(run.engine.counters)
    if before is None or after is None:
        return {}
    mine = {name: getattr(after, name) - getattr(before, name) for name in asdict(before)}
    totals = {name: sum(share[name] for share in run.ranks.gather(mine)) for name in mine}
    return spent.disagreement(EngineCounters(**totals))


def _seed(run: Run, step: int) -> int:
    return run.config.seed * 1_000_003 + step
