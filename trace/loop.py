"""One TRACE step (algorithm.md, section 6): read `trace_step` first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from trace_kernels.advantages import node_values
from trace_kernels.packing import balance

from . import ledger
from .allocation.predictor import SuccessPredictor
from .allocation.quality import predictor_quality
from .allocation.strategies import STRATEGIES, PrefixStage, RootStage
from .config.schema import Config
from .engines.protocol import Engine, EngineCounters
from .metrics import mismatch_metrics, rollout_metrics
from .phases import Phases
from .policy.batch import Forest, LossTerms, NodeKey, prompt_forest
from .policy.sync import probe, sync_weights
from .policy.zero3 import Zero3Policy, split_minibatches
from .ranks import Ranks
from .rollout.collector import Collector
from .rollout.tree import RolloutTree
from .tasks.order import TaskOrder
from .tasks.task import Task

Features = dict[NodeKey, NDArray[np.float32]]


@dataclass
class Run:
    """Everything a step works with. Pool, budget and predictor are global: rank 0 decides for all."""

    config: Config
    ranks: Ranks
    tasks: Sequence[Task]
    order: TaskOrder
    collector: Collector
    engine: Engine
    policy: Zero3Policy
    reference: Zero3Policy | None
    predictor: SuccessPredictor
    phases: Phases
    version: int = 0  # of the weights the engine samples with
    totals: ledger.Ledger = field(default_factory=ledger.Ledger)


@dataclass(frozen=True)
class StepReport:
    trees: list[RolloutTree]
    metrics: dict[str, float]


def trace_step(run: Run, step: int) -> StepReport:
    """Sample, score, branch, learn, sync. The same on every rank."""
    rng = np.random.default_rng([run.config.seed, step])
    counters = run.engine.counters()

    pool, skipped = plant_pool(run)
    v_root = score_roots(run, pool)
    counts = allocate_roots(run, v_root, rng)
    trees, owners = sample_bare(run, pool, counts, step)
    anchors = score_anchors(run, trees)
    trees = sample_continuations(run, trees, owners, allocate_prefixes(run, trees, anchors, rng), step)
    spent = ledger.count(trees)
    disagreement = compare_with_engine(run, spent, counters)

    forest = Forest.of(trees)
    old_logprobs, features, scored = score_trees(run, forest)
    predictor = update_predictor(run, forest, features, v_root[counts > 0])
    learned = update_policy(run, forest, old_logprobs)
    synced = sync(run, trees[0].nodes[0].token_ids)

    run.totals += spent
    return StepReport(
        trees,
        rollout_metrics(trees)
        | mismatch(forest, old_logprobs, run.config.loss.importance_cap)
        | scored
        | learned
        | synced
        | {f"predictor/{name}": value for name, value in predictor.items()}
        | {f"ledger/{name}": float(value) for name, value in spent.to_dict().items()}
        | {f"ledger/engine_minus_ledger/{name}": float(value) for name, value in disagreement.items()}
        | {"num_tokens": float(run.totals.generated_tokens), "prompts_too_long": float(skipped)}
        | {"packing/tokens": float(forest.tokens), "packing/flat_tokens": float(forest.flat_tokens)}
        | {f"phase/{name}": seconds for name, seconds in run.phases.take().items()},
    )


def plant_pool(run: Run) -> tuple[list[RolloutTree], int]:
    """B candidate prompts, all different, and how many were left out because they do not fit the context."""
    trees: dict[str, RolloutTree] = {}
    skipped: set[str] = set()
    while len(trees) < run.config.allocation.pool_size:
        if len(trees) + len(skipped) >= len(run.tasks):
            break
        for index in run.order.take(1):
            task = run.tasks[index]
            if task.id in trees or task.id in skipped:
                continue
            tree = run.collector.plant(task)
            if run.collector.fits(tree):
                trees[task.id] = tree
            else:
                skipped.add(task.id)
    if not trees:
        raise ValueError(
            f"none of the {len(skipped)} prompts fits sampling.context_tokens={run.config.sampling.context_tokens} "
            f"beside a turn of sampling.turn_tokens={run.config.sampling.turn_tokens}"
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


def score_anchors(run: Run, trees: list[RolloutTree]) -> Features:
    """Final hidden states at the turn prefixes of the bare rollouts."""
    if not STRATEGIES[run.config.allocation.strategy].needs_prefix_scores or not run.config.allocation.continuations:
        return {}
    with run.phases("score anchors"):
        return run.policy.score(Forest.of(trees))[1]


def allocate_prefixes(
    run: Run, trees: list[RolloutTree], features: Features, rng: np.random.Generator
) -> list[dict[int, int]]:
    """Continuations of each anchor of each tree (section 3)."""
    a = run.config.allocation
    anchors = [(t, node, reward) for t, tree in enumerate(trees) for node, reward in tree.anchors()]
    if not anchors or not a.continuations:
        return [{} for _ in trees]

    def decide() -> list[dict[int, int]]:
        v = np.full(len(anchors), 0.5)
        if features:
            v = run.predictor.predict(torch.from_numpy(np.stack([features[t, node] for t, node, _ in anchors])))
        bare = [sum(n.kind == "bare" and n.reward is not None for n in tree.nodes) for tree in trees]
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
        run.collector.continuations([trees[i] for i in mine], [counts[i] for i in mine], _seed(run, step), run.version)

    with run.phases("continuations", sum(sum(counts[i].values()) for i in mine)):
        return share_trees(run, trees, mine, sample)


def score_trees(run: Run, forest: Forest) -> tuple[Features, Features, dict[str, float]]:
    """Old log-probs and features of every node under the weights that sampled them."""
    with run.phases("log-prob pass"):
        return run.policy.score(forest)


def update_predictor(
    run: Run, forest: Forest, features: Features, v_root: NDArray[np.float64]
) -> dict[str, float]:
    """Report how good the predictions of this step were, then learn from its outcomes (section 4)."""

    def learn() -> dict[str, float]:
        bare = [[n.reward for n in t.nodes if n.kind == "bare" and n.reward is not None] for t in forest.trees]
        won, tried = np.array([int(sum(r)) for r in bare]), np.array([len(r) for r in bare])
        quality = predictor_quality(v_root, won, tried, kappa=run.predictor.kappa)
        values, leaves = node_values(forest.parents, forest.leaves, forest.rewards)
        update = run.predictor.update(
            torch.from_numpy(np.stack([features[key] for key in forest.keys])),
            torch.from_numpy(values).float(),
            torch.from_numpy(np.asarray(leaves)).float(),
        )
        kappa = run.predictor.update_kappa(v_root, won, tried)
        return quality | {"loss": update.loss, "kappa": kappa}

    with run.phases("predictor update"):
        return run.ranks.from_main(learn)


def update_policy(run: Run, forest: Forest, old_logprobs: Features) -> dict[str, float]:
    """Advantages, then one optimiser step per minibatch (section 5)."""
    loss = run.config.loss
    if run.config.engine.sleep:
        run.engine.sleep()
    figures: list[dict[str, float]] = []
    with run.phases("policy update"):
        reference = run.reference.score(forest)[0] if run.reference else None
        for batch in split_minibatches(forest, run.config.optimizer.minibatches):
            offset = _key_map(forest, batch)
            terms = LossTerms(
                batch.advantages(loss),
                batch.leaf_weights(loss),
                {key: old_logprobs[offset[key]] for key in batch.keys},
            )
            of_batch = {key: reference[offset[key]] for key in batch.keys} if reference else None
            figures.append(run.policy.update(batch, terms, loss, of_batch))
    totals = {name: sum(f[name] for f in figures) for name in figures[0]}
    weight, tokens = max(1.0, totals["weight"]), max(1.0, totals["tokens"])
    return {
        "loss": totals["loss"] / len(figures),
        "grad_norm": totals["grad_norm"] / len(figures),
        "learning_rate": figures[-1]["learning_rate"],
        "clip_ratio/region_mean": totals["clipped"] / tokens,
        "kl": totals["kl"] / weight,
    }


def sync(run: Run, prompt_ids: list[int]) -> dict[str, float]:
    """New weights to every engine, and the proof that it samples with them."""
    c = run.config
    run.version += 1
    with run.phases("weight sync"):
        sync_weights(run.policy, run.engine, run.version)
        mean, largest = probe(
            run.policy,
            run.engine,
            prompt_ids,
            temperature=c.sampling.temperature,
            dtype=c.model.dtype,
            tolerance=c.sync.tolerance,
            version=run.version,
        )
    return {"sync/probe_logp_difference/mean": mean, "sync/probe_logp_difference/max": largest}


def share_trees(run: Run, trees: list[RolloutTree], mine: list[int], sample: Callable[[], None]) -> list[RolloutTree]:
    """Let every rank sample its own trees, then give all trees to all. One rank's failure fails all."""
    error: Exception | None = None
    try:
        sample()
    except Exception as caught:
        error = caught
    run.ranks.agree(error)
    shared = list(trees)
    for share in run.ranks.gather({i: trees[i] for i in mine}):
        for index, tree in share.items():
            shared[index] = tree
    return shared


def compare_with_engine(run: Run, spent: ledger.Ledger, before: EngineCounters | None) -> dict[str, int]:
    """The engines' own counts of this step minus the ledger's: zeros, or something sampled unseen."""
    after = run.engine.counters()
    if before is None or after is None:
        return {}
    mine = {name: getattr(after, name) - getattr(before, name) for name in asdict(before)}
    totals = {name: sum(share[name] for share in run.ranks.gather(mine)) for name in mine}
    return spent.disagreement(EngineCounters(**totals))


def mismatch(forest: Forest, old_logprobs: Features, cap: float) -> dict[str, float]:
    """Trainer against sampler over every sampled token of the step."""
    sampler = [
        np.array([lp for lp, m in zip(n.logprobs, n.loss_mask, strict=True) if m], dtype=np.float32)
        for n in (forest.trees[t].nodes[i] for t, i in forest.keys)
    ]
    old = np.concatenate([old_logprobs[key] for key in forest.keys])
    return mismatch_metrics(old, np.concatenate(sampler), cap)


def _key_map(forest: Forest, batch: Forest) -> dict[NodeKey, NodeKey]:
    """Node keys of a minibatch -> keys in the whole step's forest."""
    place = {id(tree): number for number, tree in enumerate(forest.trees)}
    return {(t, node): (place[id(batch.trees[t])], node) for t, node in batch.keys}


def _seed(run: Run, step: int) -> int:
    return run.config.seed * 1_000_003 + step
