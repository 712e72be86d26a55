"""The learning half of a step: log-probs, predictor, policy, sync (algorithm.md, sections 4 and 5)."""

from __future__ import annotations

import numpy as np
import torch

from trace_kernels.advantages import node_values

from .allocation.quality import predictor_quality
from .allocation.strategies import effective_kappa
from .metrics import mismatch_metrics
from .policy.batch import Features, Forest, LossTerms, NodeKey, split_minibatches
from .policy.sync import check_agreement, probe, sync_weights
from .state import Run


def score_trees(run: Run, forest: Forest) -> tuple[Features, Features, dict[str, float]]:
    """Old log-probs and features of every node under the weights that sampled them."""
    with run.phases("log-prob pass") as advance:
        return run.policy.score(forest, advance)


def update_predictor(run: Run, forest: Forest, features: Features) -> dict[str, float]:
    """Report how good the predictions of this step were, then learn from its outcomes (section 4)."""

    def learn() -> dict[str, float]:
        bare = [tree.bare_rewards() for tree in forest.trees]
        # The head is judged whether or not the strategy looked at it.
        roots = np.stack([features[tree, 0] for tree in range(len(forest.trees))])
        v_root = run.predictor.predict(torch.from_numpy(roots))
        won, tried = np.array([int(sum(r)) for r in bare]), np.array([len(r) for r in bare])
        kappa = effective_kappa(run.config.allocation.contrast, run.predictor.kappa)
        quality = predictor_quality(v_root, won, tried, kappa=kappa)
        values, leaves = node_values(forest.parents, forest.leaves, forest.rewards)
        update = run.predictor.update(
            torch.from_numpy(np.stack([features[key] for key in forest.keys])),
            torch.from_numpy(values).float(),
            torch.from_numpy(np.asarray(leaves)).float(),
        )
        fitted = run.predictor.update_kappa(v_root, won, tried)
        return quality | {"loss": update.loss, "kappa": fitted}

    with run.phases("predictor update"):
        return run.ranks.from_main(learn)


def update_policy(run: Run, forest: Forest, old_logprobs: Features) -> dict[str, float]:
    """Advantages, then one optimiser step per minibatch (section 5)."""
    loss = run.config.loss
    if run.config.engine.sleep:
        run.ranks.attempt(run.engine.sleep)
    figures: list[dict[str, float]] = []
    with run.phases("advantages"):
        minibatches = split_minibatches(forest, run.config.optimizer.minibatches)
        per_leaf = [(batch.advantages(loss), batch.leaf_weights(loss)) for batch in minibatches]
    with run.phases("policy update") as advance:
        reference = run.reference.score(forest)[0] if run.reference else None
        for batch, (advantages, leaf_weight) in zip(minibatches, per_leaf, strict=True):
            offset = _key_map(forest, batch)
            old = {key: old_logprobs[offset[key]] for key in batch.keys}
            terms = LossTerms(advantages, leaf_weight, old)
            of_batch = {key: reference[offset[key]] for key in batch.keys} if reference else None
            figures.append(run.policy.update(batch, terms, loss, of_batch, advance))
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
            max_tokens=c.sampling.turn_tokens,
            version=run.version,
        )
    return {"sync/probe_logp_difference/mean": mean, "sync/probe_logp_difference/max": largest}


def compare_with_sampler(run: Run, forest: Forest, old_logprobs: Features, step: int) -> dict[str, float]:
    """Trainer against sampler over every sampled token of the step; SyncError beyond the dtype's tolerance."""
    nodes = [forest.trees[t].nodes[i] for t, i in forest.keys]
    sampler = [lp for node in nodes for lp, m in zip(node.logprobs, node.loss_mask, strict=True) if m]
    old = np.concatenate([old_logprobs[key] for key in forest.keys])
    figures = mismatch_metrics(old, np.array(sampler, dtype=np.float32), run.config.loss.importance_cap)
    mean, largest = (figures[f"sampling/sampling_logp_difference/{name}"] for name in ("mean", "max"))
    c = run.config
    check_agreement(mean, largest, c.model.dtype, c.sync.tolerance, f"on the trees of step {step}")
    return figures


def _key_map(forest: Forest, batch: Forest) -> dict[NodeKey, NodeKey]:
    """Node keys of a minibatch -> keys in the whole step's forest."""
    place = {id(tree): number for number, tree in enumerate(forest.trees)}
    return {(t, node): (place[id(batch.trees[t])], node) for t, node in batch.keys}
