"""One TRACE step (algorithm.md, section 6)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import ledger
from .learning import compare_with_sampler, score_trees, sync, update_policy, update_predictor
from .metrics import rollout_metrics
from .policy.batch import Forest
from .rollout.tree import RolloutTree
from .sampling import (
    allocate_prefixes,
    allocate_roots,
    compare_with_engine,
    plant_pool,
    sample_bare,
    sample_continuations,
    score_anchors,
    score_roots,
    sound_trees,
)
from .state import Run


@dataclass(frozen=True)
class StepReport:
    trees: list[RolloutTree]
    metrics: dict[str, float]


def trace_step(run: Run, step: int) -> StepReport:
    """Sample, score, branch, learn, sync. The same on every rank."""
    rng = np.random.default_rng([run.config.seed, step])
    counters = run.ranks.attempt(run.engine.counters)

    pool, skipped = plant_pool(run)
    v_root = score_roots(run, pool)
    counts = allocate_roots(run, v_root, rng)
    trees, owners = sample_bare(run, pool, counts, step)
    anchors = score_anchors(run, trees)
    trees = sample_continuations(run, trees, owners, allocate_prefixes(run, trees, anchors, rng), step)
    spent = ledger.count(trees)
    disagreement = compare_with_engine(run, spent, counters)

    forest = Forest.of(sound_trees(trees, step))
    old_logprobs, features, scored = score_trees(run, forest)
    agreement = compare_with_sampler(run, forest, old_logprobs, step)
    predictor = update_predictor(run, forest, features)
    learned = update_policy(run, forest, old_logprobs)
    synced = sync(run, trees[0].nodes[0].token_ids)

    run.totals += spent
    return StepReport(
        trees,
        rollout_metrics(trees)
        | agreement
        | scored
        | learned
        | synced
        | {f"predictor/{name}": value for name, value in predictor.items()}
        | {f"ledger/{name}": float(value) for name, value in spent.to_dict().items()}
        | {f"ledger/engine_minus_ledger/{name}": float(value) for name, value in disagreement.items()}
        | {"num_tokens": float(run.totals.generated_tokens), "prompts_too_long": float(skipped)}
        | {"allocation/unspent": float(run.config.allocation.leaves - spent.leaves)}
        | {"packing/tokens": float(run.policy.forwarded_tokens(forest))}
        | {"packing/flat_tokens": float(forest.flat_tokens)}
        | {f"phase/{name}": seconds for name, seconds in run.phases.take().items()},
    )
