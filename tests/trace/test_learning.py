"""The learning half of a step, with a policy that writes down what it is asked. (The real one: policy/.)"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trace_rl import learning
from trace_rl.allocation.predictor import SuccessPredictor
from trace_rl.config.schema import LossConfig
from trace_rl.phases import Phases
from trace_rl.policy.batch import Features, Forest, LossTerms
from trace_rl.policy.sync import SyncError
from trace_rl.ranks import Ranks

from .policy.oracle import random_trees, treepo

ALONE = Ranks(0, 1, 0, None)
FOREST = Forest.of(random_trees(2, 5))


def one_per_token(forest: Forest, shift: float = 0.0) -> Features:
    """Log-probs that tell which tree and node they belong to."""
    return {
        (t, n): np.full(sum(forest.trees[t].nodes[n].loss_mask), shift - t - n / 64, dtype=np.float32)
        for t, n in forest.keys
    }


class RecordingPolicy:
    """Returns made-up figures, one set per update, and keeps what it was given."""

    def __init__(self, figures: list[dict[str, float]]) -> None:
        self.figures = figures
        self.calls: list[tuple[Forest, LossTerms, LossConfig, Features | None]] = []

    def update(
        self,
        forest: Forest,
        terms: LossTerms,
        loss: LossConfig,
        reference: Features | None,
        on_batch: Callable[[], None],
    ) -> dict[str, float]:
        on_batch()
        self.calls.append((forest, terms, loss, reference))
        return self.figures[len(self.calls) - 1]


def figures(n: int) -> dict[str, float]:
    return {
        "loss": 1.0 * n,
        "grad_norm": 3.0 * n,
        "learning_rate": 0.1 * n,
        "clipped": 2.0 * n,
        "tokens": 10.0 * n,
        "weight": 20.0 * n,
        "kl": 5.0 * n,
    }


def update(
    minibatches: int, reference: bool = False, sleep: bool = False
) -> tuple[Any, dict[str, float], list[str]]:
    heard: list[str] = []
    policy = RecordingPolicy([figures(1), figures(2), figures(3)])
    run: Any = SimpleNamespace(
        config=SimpleNamespace(
            loss=LossConfig(kl=0.1 if reference else 0.0),
            optimizer=SimpleNamespace(minibatches=minibatches),
            engine=SimpleNamespace(sleep=sleep),
        ),
        engine=SimpleNamespace(sleep=lambda: heard.append("sleep")),
        ranks=ALONE,
        phases=Phases(),
        policy=policy,
        reference=SimpleNamespace(score=lambda forest: (one_per_token(forest, -50), {}, {}))
        if reference
        else None,
    )
    return policy, learning.update_policy(run, FOREST, one_per_token(FOREST)), heard


@pytest.mark.parametrize("minibatches", [1, 2, 3])
@pytest.mark.parametrize("reference", [False, True])
def test_every_minibatch_gets_its_own_trees_and_their_log_probs(minibatches: int, reference: bool) -> None:
    policy, _, _ = update(minibatches, reference)
    assert len(policy.calls) == minibatches
    seen = []
    for forest, terms, _, of_batch in policy.calls:
        assert terms.old_logprobs.keys() == set(forest.keys)
        for t, tree in enumerate(forest.trees):
            (number,) = [i for i, other in enumerate(FOREST.trees) if other is tree]
            seen.append(number)
            for n in range(len(tree.nodes)):
                assert (terms.old_logprobs[t, n] == np.float32(-number - n / 64)).all()
                if reference:
                    assert (of_batch[t, n] == np.float32(-50 - number - n / 64)).all()
            mine = [row for row, leaf in enumerate(forest.leaves) if forest.keys[leaf][0] == t]
            by_node = dict(zip(tree.leaves(), treepo(tree), strict=True))
            want = [by_node[forest.keys[forest.leaves[row]][1]] for row in mine]
            np.testing.assert_allclose(terms.advantages.leaf[mine], want, atol=1e-6)
        assert (of_batch is not None) is reference
    assert sorted(seen) == list(range(len(FOREST.trees)))


def test_figures_of_minibatches_are_put_together() -> None:
    got = update(2)[1]
    assert got == {
        "loss": 1.5,
        "grad_norm": 4.5,
        "learning_rate": 0.2,  # the last one
        "clip_ratio/region_mean": pytest.approx(6 / 30),
        "kl": pytest.approx(15 / 60),
    }


def test_the_engine_sleeps_only_when_told() -> None:
    assert update(1, sleep=True)[2] == ["sleep"]
    assert update(1, sleep=False)[2] == []


PLUG_IN = SimpleNamespace(allocation=SimpleNamespace(contrast="plug_in"))


def agreement_config(tolerance: float | None) -> Any:
    return SimpleNamespace(
        loss=SimpleNamespace(importance_cap=2.0),
        model=SimpleNamespace(dtype="float32"),
        sync=SimpleNamespace(tolerance=tolerance),
    )


def test_trees_that_the_trainer_scores_otherwise_stop_the_run() -> None:
    """A wrong attention on branches passes the short probe after a sync: the step's own trees must agree too."""
    sampler = {
        (t, n): np.array([lp for lp, m in zip(x.logprobs, x.loss_mask, strict=True) if m], dtype=np.float32)
        for (t, n), x in ((key, FOREST.trees[key[0]].nodes[key[1]]) for key in FOREST.keys)
    }
    run: Any = SimpleNamespace(config=agreement_config(tolerance=None))
    learning.compare_with_sampler(run, FOREST, sampler, 3)
    wrong = next(key for key, values in sampler.items() if len(values))
    sampler[wrong] = sampler[wrong] + np.float32(0.5)
    with pytest.raises(SyncError, match=r"on the trees of step 3 .* largest difference 0\.5 nats"):
        learning.compare_with_sampler(run, FOREST, sampler, 3)


def test_the_predictor_learns_the_share_of_successful_leaves() -> None:
    """After enough updates on one-hot features it says for every node what its leaves say."""
    trees = random_trees(4, 3)
    forest = Forest.of(trees)
    features = {key: np.eye(len(forest.keys), dtype=np.float32)[row] for row, key in enumerate(forest.keys)}
    predictor = SuccessPredictor(len(forest.keys), width=32, learning_rate=0.02, epochs=300, window=1)
    run: Any = SimpleNamespace(predictor=predictor, ranks=ALONE, phases=Phases(), config=PLUG_IN)
    got = learning.update_predictor(run, forest, features)
    assert got["loss"] < 1e-2
    assert got["kappa"] == predictor.kappa
    assert {"brier", "ece", "correlation"} <= got.keys()
    predicted = predictor.predict(torch.from_numpy(np.stack([features[key] for key in forest.keys])))
    for (t, n), chance in zip(forest.keys, predicted, strict=True):
        below = [leaf for leaf in trees[t].leaves() if n in trees[t].path(leaf)]
        assert chance == pytest.approx(np.mean([trees[t].nodes[leaf].reward for leaf in below]), abs=0.1)


def test_the_predictors_quality_is_that_before_its_update() -> None:
    """Brier score of the head's own predictions, over the bare rollouts, whether or not a strategy used them."""
    trees = random_trees(4, 6)
    forest = Forest.of(trees)
    rng = np.random.default_rng(0)
    features = {key: rng.standard_normal(4).astype(np.float32) for key in forest.keys}
    predictor = SuccessPredictor(4, width=4)
    torch.nn.init.constant_(predictor.output.weight, 1.0)
    v = predictor.predict(torch.from_numpy(np.stack([features[t, 0] for t in range(6)])))
    assert len(set(v)) == 6
    run: Any = SimpleNamespace(predictor=predictor, ranks=ALONE, phases=Phases(), config=PLUG_IN)
    got = learning.update_predictor(run, forest, features)
    leaves = [(v[t], tree.nodes[leaf]) for t, tree in enumerate(trees) for leaf in tree.leaves()]
    bare = [(chance, node.reward) for chance, node in leaves if node.kind == "bare"]
    assert len(bare) < len(leaves)  # continuations are left out
    assert got["brier"] == pytest.approx(np.mean([(chance - reward) ** 2 for chance, reward in bare]))


def test_sampler_and_trainer_are_compared_token_by_token() -> None:
    old = one_per_token(FOREST)
    gaps, ratios = [], []
    for (t, n), values in old.items():
        node = FOREST.trees[t].nodes[n]
        sampler = [lp for lp, m in zip(node.logprobs, node.loss_mask, strict=True) if m]
        gaps += [abs(a - b) for a, b in zip(values, sampler, strict=True)]
        ratios += [min(2.0, float(np.exp(a - b))) for a, b in zip(values, sampler, strict=True)]
    run: Any = SimpleNamespace(config=agreement_config(tolerance=1e9))
    got = learning.compare_with_sampler(run, FOREST, old, 3)
    assert got["sampling/sampling_logp_difference/mean"] == pytest.approx(np.mean(gaps), rel=1e-5)
    assert got["sampling/sampling_logp_difference/max"] == pytest.approx(max(gaps), rel=1e-5)
    assert got["sampling/importance_sampling_ratio/min"] == pytest.approx(min(ratios), rel=1e-5)
    assert got["sampling/importance_sampling_ratio/mean"] == pytest.approx(np.mean(ratios), rel=1e-5)
    assert got["sampling/importance_sampling_ratio/max"] == 2.0


def test_every_sync_is_a_new_version(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def probe(*_: Any, **options: Any) -> tuple[float, float]:
        calls.append(options)
        return 0.25, 0.5

    def loaded(policy: Any, engine: Any, version: int) -> None:
        calls.append(version)

    monkeypatch.setattr(learning, "probe", probe)
    monkeypatch.setattr(learning, "sync_weights", loaded)
    run: Any = SimpleNamespace(
        config=SimpleNamespace(
            sampling=SimpleNamespace(temperature=0.7, turn_tokens=9),
            model=SimpleNamespace(dtype="bfloat16"),
            sync=SimpleNamespace(tolerance=None),
        ),
        policy=None,
        engine=None,
        phases=Phases(),
        version=4,
    )
    got = learning.sync(run, [1, 2])
    assert run.version == 5
    assert calls[0] == 5  # loaded before it is asked
    assert calls[1]["version"] == 5
    assert (calls[1]["temperature"], calls[1]["dtype"], calls[1]["max_tokens"]) == (0.7, "bfloat16", 9)
    assert got == {"sync/probe_logp_difference/mean": 0.25, "sync/probe_logp_difference/max": 0.5}
