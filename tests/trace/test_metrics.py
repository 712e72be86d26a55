"""Step metrics against values worked out by hand."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

from trace_rl.metrics import mismatch_metrics, rollout_metrics
from trace_rl.rollout.tree import RolloutTree

from .trees import TASK, root, turn

# Those of TRL's names that come from trees alone and from the log-probs of sampler and trainer.
TRL_TREES = {
    "reward", "reward_std", "frac_reward_zero_std", "completions/mean_length", "completions/min_length",
    "completions/max_length", "completions/clipped_ratio", "tools/call_frequency", "tools/failure_frequency",
}  # fmt: skip
TRL_MISMATCH = {
    "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/min", "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/max",
}  # fmt: skip


def forest(observed: int = 20) -> list[RolloutTree]:
    """A tree mixed only by its continuation, and one whose two rollouts both fail."""
    flipped = RolloutTree(TASK, [root(10)])
    first = turn(flipped, 0, "bare", 5, observed, tool_calls=1, outcome="search", state={})
    turn(flipped, first, "bare", 3, reward=1.0, outcome="answer")
    turn(flipped, first, "continuation", 9, reward=0.0, outcome="answer")
    failed = RolloutTree(TASK, [root(10)])
    turn(failed, 0, "bare", 7, reward=0.0, outcome="truncated", truncation="generation_limit")
    invalid = turn(failed, 0, "bare", 2, observed, outcome="invalid", state={})
    searched = turn(
        failed, invalid, "bare", 1, observed, outcome="search", tool_calls=1, tool_failures=1, state={}
    )
    turn(failed, searched, "bare", 1, reward=0.0, outcome="no_answer")
    for tree in (flipped, failed):
        tree.check()
    return [flipped, failed]


def test_by_hand() -> None:
    lengths = [8, 14, 7, 4]  # sampled tokens from root to leaf
    assert rollout_metrics(forest()) == pytest.approx(
        {
            "reward": 1 / 4,
            "reward_std": (0.5 + 0.0) / 2,
            "frac_reward_zero_std": 1 / 2,
            "effective_ratio": 1 / 2,
            "effective_ratio_bare": 0.0,
            "completions/mean_length": sum(lengths) / 4,
            "completions/min_length": 4,
            "completions/max_length": 14,
            "completions/clipped_ratio": 1 / 4,
            "turns_per_rollout": (2 + 2 + 1 + 3) / 4,
            "answer_rate": 2 / 4,
            "invalid_action_rate": 1 / 7,
            "tools/call_frequency": 2 / 4,
            "tools/failure_frequency": 1 / 2,
            "tools/error_rate": 0.0,
            "prompts": 2,
        }
    )


def test_the_names_dashboards_know() -> None:
    assert rollout_metrics(forest()).keys() >= TRL_TREES
    assert mismatch_metrics(np.zeros(3), np.zeros(3), 2.0).keys() == TRL_MISMATCH


def test_observation_tokens_never_count() -> None:
    assert rollout_metrics(forest(observed=0)) == rollout_metrics(forest(observed=300))


def test_one_rollout_without_tools() -> None:
    tree = RolloutTree(TASK, [root()])
    turn(tree, 0, "bare", 4, reward=1.0, outcome="answer")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no mean of nothing, no division by zero
        metrics = rollout_metrics([tree])
    assert metrics["frac_reward_zero_std"] == 1.0
    assert metrics["effective_ratio"] == metrics["effective_ratio_bare"] == 0.0
    assert metrics["tools/failure_frequency"] == 0.0
    assert all(math.isfinite(value) for value in metrics.values())


def test_mismatch_by_hand() -> None:
    old = np.array([-1.0, -2.0, -3.0])
    sampler = np.array([-1.0, -2.5, -2.0])
    ratios = [1.0, min(math.exp(0.5), 1.5), math.exp(-1.0)]
    assert mismatch_metrics(old, sampler, 1.5) == pytest.approx(
        {
            "sampling/sampling_logp_difference/mean": 0.5,
            "sampling/sampling_logp_difference/max": 1.0,
            "sampling/importance_sampling_ratio/min": math.exp(-1.0),
            "sampling/importance_sampling_ratio/mean": sum(ratios) / 3,
            "sampling/importance_sampling_ratio/max": 1.5,
        }
    )
    same = mismatch_metrics(old, old, 2.0)
    assert same["sampling/sampling_logp_difference/max"] == 0.0
    assert same["sampling/importance_sampling_ratio/mean"] == 1.0
