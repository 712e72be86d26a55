"""Figures of a step, under TRL's names where TRL has one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .rollout.tree import RolloutTree


def rollout_metrics(trees: Sequence[RolloutTree]) -> dict[str, float]:
    """Rewards, contrast, lengths and behaviour of one step's trees. Observation tokens never count.

    Rollouts that a tool's failure ended have no reward: they are counted in `tools/error_rate` and wherever
    behaviour, not reward, is meant.
    """
    rewards = [np.array(rewards) for tree in trees if (rewards := tree.rewards())]
    everything = np.concatenate(rewards)
    turns = [node for tree in trees for node in tree.nodes[1:]]
    lengths = [
        sum(sum(tree.nodes[i].loss_mask) for i in tree.path(leaf)) for tree in trees for leaf in tree.leaves()
    ]
    ends = [tree.nodes[leaf] for tree in trees for leaf in tree.leaves()]
    calls = sum(node.tool_calls for node in turns)
    mixed = float(np.mean([len(set(r)) > 1 for r in rewards]))
    bare = [tree.bare_rewards() for tree in trees]
    return {
        "reward": float(everything.mean()),
        "reward_std": float(np.mean([r.std() for r in rewards])),
        "frac_reward_zero_std": 1.0 - mixed,
        "effective_ratio": mixed,
        "effective_ratio_bare": float(np.mean([len(set(r)) > 1 for r in bare])),
        "completions/mean_length": float(np.mean(lengths)),
        "completions/min_length": float(np.min(lengths)),
        "completions/max_length": float(np.max(lengths)),
        "completions/clipped_ratio": float(np.mean([node.truncation is not None for node in ends])),
        "turns_per_rollout": float(np.mean([node.depth for node in ends])),
        "answer_rate": float(np.mean([node.outcome == "answer" for node in ends])),
        "invalid_action_rate": float(np.mean([node.outcome == "invalid" for node in turns])),
        "tools/call_frequency": calls / len(ends),
        "tools/failure_frequency": sum(node.tool_failures for node in turns) / max(1, calls),
        "tools/error_rate": float(np.mean([bool(node.error) for node in ends])),
        "prompts": float(len(trees)),
    }


def mismatch_metrics(old: np.ndarray, sampler: np.ndarray, cap: float) -> dict[str, float]:
    """Trainer's against sampler's log-probs [E] of the sampled tokens, in nats and as ratios."""
    difference = np.abs(old - sampler)
    ratio = np.minimum(np.exp(old - sampler), cap)
    return {
        "sampling/sampling_logp_difference/mean": float(difference.mean()),
        "sampling/sampling_logp_difference/max": float(difference.max()),
        "sampling/importance_sampling_ratio/min": float(ratio.min()),
        "sampling/importance_sampling_ratio/mean": float(ratio.mean()),
        "sampling/importance_sampling_ratio/max": float(ratio.max()),
    }
