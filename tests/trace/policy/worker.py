"""Real ZeRO-3 policies on this rank: `worker.py MODELS OUT`, alone or under the deepspeed launcher.

Rank 0 writes what happened to OUT/results.pt; the tests compare it with plain torch.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
from odd_engines import outcomes
from oracle import EPS, TEMPERATURE, random_trees
from transformers.integrations import is_deepspeed_zero3_enabled

from trace_rl.cold_start import negative_log_likelihood
from trace_rl.config.schema import LossConfig, ModelConfig, OptimizerConfig
from trace_rl.learning import update_policy
from trace_rl.phases import Phases
from trace_rl.policy import zero3
from trace_rl.policy.batch import Features, Forest, LossTerms, schedule
from trace_rl.policy.module import ModelError
from trace_rl.policy.zero3 import Zero3Policy
from trace_rl.ranks import Ranks, connect, end_process

LOSS = LossConfig()
KL_LOSS = LossConfig(kl=0.1)
OPTIMIZER = OptimizerConfig(learning_rate=5e-3, weight_decay=0.1, gradient_clipping=0.3)
OVERRIDES = {
    "zero_optimization": {"stage3_param_persistence_threshold": 0},  # tiny parameters too are partitioned
    "optimizer": {"params": {"eps": EPS}},
}
ONE_BATCH = 1 << 20


class Worker:
    """The models, this rank, and where to write."""

    def __init__(self, models: Path, out: Path, ranks: Ranks) -> None:
        self.models, self.out, self.ranks = models, out, ranks

    @contextmanager
    def policy(
        self,
        model: str,
        *,
        optimizer: OptimizerConfig = OPTIMIZER,
        micro_batch_tokens: int = ONE_BATCH,
        checkpointing: bool = False,
        dtype: Literal["float32", "bfloat16"] = "float32",
        trainable: bool = True,
    ) -> Iterator[Zero3Policy]:
        path = self.models / model
        policy = Zero3Policy(
            ModelConfig(path=path, gradient_checkpointing=checkpointing, dtype=dtype),
            path,
            ranks=self.ranks,
            device=torch.device("cpu"),
            temperature=TEMPERATURE,
            micro_batch_tokens=micro_batch_tokens,
            optimizer=optimizer if trainable else None,
            deepspeed_overrides=OVERRIDES
            if trainable
            else {"zero_optimization": OVERRIDES["zero_optimization"]},
            trainable=trainable,
        )
        try:
            yield policy
        finally:
            policy.close()


def terms(forest: Forest, loss: LossConfig, old: Features) -> LossTerms:
    return LossTerms(forest.advantages(loss), forest.leaf_weights(loss), old)


def train(
    policy: Zero3Policy, forest: Forest, loss: LossConfig = LOSS, reference: Features | None = None
) -> dict[str, Any]:
    """Two updates on the same trees and old log-probs, as `oracle.train_flat`."""
    old, hidden, scored = policy.score(forest)
    figures = [policy.update(forest, terms(forest, loss, old), loss, reference) for _ in range(2)]
    return {
        "logprobs": old,
        "hidden": hidden,
        "entropy": scored["entropy"],
        "figures": figures,
        "weights": dict(policy.weights()),
        "parts": len(schedule(forest, policy.micro_batch_tokens, policy.ranks.world)[0]),
        "dummies": sum(
            part is None
            for bin in schedule(forest, policy.micro_batch_tokens, policy.ranks.world)
            for part in bin
        ),
    }


def plain(w: Worker) -> dict[str, Any]:
    with w.policy("untied") as policy:
        parameters = list(policy.engine.module.parameters())
        held = [p.ds_tensor.numel() / p.ds_numel for p in parameters]
        return train(policy, Forest.of(random_trees(0, 6))) | {
            "held": max(held),
            "zero3": is_deepspeed_zero3_enabled(),
        }


def micro_batches(w: Worker) -> dict[str, Any]:
    with w.policy("untied", micro_batch_tokens=1) as policy:  # no more than the longest path
        return train(policy, Forest.of(random_trees(0, 6)))


def checkpointing(w: Worker) -> dict[str, Any]:
    with w.policy("untied", checkpointing=True) as policy:
        return train(policy, Forest.of(random_trees(0, 6)))


def bfloat16(w: Worker) -> dict[str, Any]:
    with w.policy("untied", dtype="bfloat16") as policy:
        return train(policy, Forest.of(random_trees(0, 6)))


def saved(w: Worker) -> dict[str, Any]:
    """The tied model, its weights written twice over, and a save that breaks off."""
    with w.policy("tied") as policy:
        found = train(policy, Forest.of(random_trees(0, 6)))
        policy.write_weights(w.out / "weights")
        final = w.out / "tied"
        if w.ranks.is_main:
            final.mkdir()
            (final / "stale.txt").write_text("of an earlier policy")
        policy.save_pretrained(final)
        found["after"] = policy.score(Forest.of(random_trees(0, 6)))[0]
        if w.ranks.world == 1:
            shutil.copytree(final, w.out / "survivor")
            with mock.patch.object(zero3, "save_file", side_effect=OSError("disk full")):
                try:
                    policy.save_pretrained(w.out / "survivor")
                except OSError as error:
                    found["broken_off"] = str(error)
        return found


def saved_untied(w: Worker) -> dict[str, Any]:
    with w.policy("untied") as policy:
        found = train(policy, Forest.of(random_trees(0, 6)))
        policy.save_pretrained(w.out / "untied")
        return found | {"after": policy.score(Forest.of(random_trees(0, 6)))[0]}


def against_reference(w: Worker) -> dict[str, Any]:
    forest = Forest.of(random_trees(0, 6))
    with w.policy("untied") as policy, w.policy("other", trainable=False) as reference:
        logprobs = reference.score(forest)[0]
        found = train(policy, forest, KL_LOSS, logprobs)
        return found | {"reference": logprobs, "reference_after": reference.score(forest)[0]}


def minibatches(w: Worker, loss: LossConfig = LOSS) -> dict[str, Any]:
    """`learning.update_policy` on a run that has no more than that needs."""
    forest = Forest.of(random_trees(0, 6))
    settings = OPTIMIZER.model_copy(update={"minibatches": 2})
    with w.policy("untied") as policy, w.policy("other", trainable=False) as reference:
        run = SimpleNamespace(
            config=SimpleNamespace(loss=loss, optimizer=settings, engine=SimpleNamespace(sleep=False)),
            phases=Phases(),
            policy=policy,
            reference=reference if loss.kl else None,
        )
        figures = update_policy(run, forest, policy.score(forest)[0])  # type: ignore[arg-type]
        return {"figures": figures, "weights": dict(policy.weights()), "phases": set(run.phases.take())}


def minibatches_against_reference(w: Worker) -> dict[str, Any]:
    return minibatches(w, KL_LOSS)


def zero_variance(w: Worker) -> dict[str, Any]:
    trees = random_trees(0, 3)
    for tree in trees:
        for leaf in tree.leaves():
            tree.nodes[leaf].reward = 1.0
    still = OPTIMIZER.model_copy(update={"weight_decay": 0.0})
    with w.policy("untied", optimizer=still) as policy:
        return train(policy, Forest.of(trees))


def fewer_trees_than_ranks(w: Worker) -> dict[str, Any]:
    """One trace, whose log-likelihood is raised: on two ranks, one has nothing but a dummy."""
    forest = Forest.of(random_trees(0, 1))
    tree = forest.trees[0]
    del tree.nodes[2:]
    tree.nodes[1].reward = 1.0
    forest = Forest.of([tree])
    warm = OPTIMIZER.model_copy(update={"warmup_steps": 4, "gradient_clipping": 0.0, "weight_decay": 0.0})
    bins = schedule(forest, ONE_BATCH, w.ranks.world)
    with w.policy("untied", optimizer=warm) as policy:
        loss = negative_log_likelihood(sum(tree.nodes[1].loss_mask))
        figures = [policy.step(forest, None, loss) for _ in range(6)]
        logprobs, _, _ = policy.score(forest)
        return {
            "figures": figures,
            "logprobs": logprobs,
            "tree": tree.to_json(),
            "dummies": sum(part is None for bin in bins for part in bin),
            "steps": policy.steps,
        }


def synced(w: Worker) -> dict[str, Any]:
    """Engines of all kinds against a policy that has just moved."""
    forest = Forest.of(random_trees(0, 3))
    with w.policy("tied", optimizer=OPTIMIZER.model_copy(update={"learning_rate": 0.1})) as policy:
        policy.update(forest, terms(forest, LOSS, policy.score(forest)[0]), LOSS)
        return outcomes(policy, w.models / "tied")


def refused(w: Worker) -> str:
    try:
        with w.policy("scaled"):
            return ""
    except ModelError as error:
        return str(error)


SCENARIOS = (
    plain,
    micro_batches,
    checkpointing,
    bfloat16,
    saved,
    saved_untied,
    against_reference,
    minibatches,
    minibatches_against_reference,
    zero_variance,
    fewer_trees_than_ranks,
    synced,
    refused,
)


def main() -> None:
    torch.set_num_threads(1)
    ranks = connect(torch.device("cpu"))
    worker = Worker(Path(sys.argv[1]), Path(sys.argv[2]), ranks)
    results = {}
    for scenario in SCENARIOS:
        begun = time.perf_counter()
        results[scenario.__name__] = scenario(worker)
        print(f"{scenario.__name__}: {time.perf_counter() - begun:.1f} s", flush=True)
    if ranks.is_main:
        torch.save(results, worker.out / "results.pt")
    ranks.barrier()
    end_process(0)


if __name__ == "__main__":
    main()
