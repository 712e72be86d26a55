"""The learning half of a step: log-probs, predictor, policy, sync (algorithm.md, sections 4 and 5)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from trace_kernels.advantages import node_values

from .allocation.quality import predictor_quality
from .metrics import mismatch_metrics
from .policy.batch import Features, Forest, LossTerms, NodeKey
from .policy.sync import probe, sync_weights
from .policy.zero3 import split_minibatches
from .state import Run


def score_trees(run: Run, forest: Forest) -> tuple[Features, Features, dict[str, float]]:
    """Old log-probs and features of every node under the weights that sampled them."""
    with run.phases("log-prob pass"):
        return run.policy.score(forest)


def update_predictor(
    run: Run, forest: Forest, features: Features, v_root: NDArray[np.float64]
) -> dict[str, float]:
    """Report how good the predictions of this step were, then learn from its outcomes (section 4)."""

    def learn() -> dict[str, float]:
        bare = [
            [n.reward for n in t.nodes if n.kind == "bare" and n.reward is not None] for t in forest.trees
        ]
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
            max_tokens=c.sampling.turn_tokens,
            version=run.version,
        )
    return {"sync/probe_logp_difference/mean": mean, "sync/probe_logp_difference/max": largest}


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
