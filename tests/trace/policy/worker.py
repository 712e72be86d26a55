"""Real ZeRO-3 policies on this rank: `worker.py MODELS OUT`, alone or under the deepspeed launcher.

Rank 0 writes what happened to OUT/results.pt; the tests compare it with plain torch.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from oracle import EPS, TEMPERATURE, random_trees
from transformers.integrations import is_deepspeed_zero3_enabled

from trace_rl.cold_start import negative_log_likelihood
from trace_rl.config.schema import LossConfig, ModelConfig, OptimizerConfig
from trace_rl.engines.protocol import Completion, EngineError, Sampling
from trace_rl.engines.transformers_engine import TransformersEngine
from trace_rl.policy import zero3
from trace_rl.policy.batch import Features, Forest, LossTerms, schedule
from trace_rl.policy.sync import probe, sync_weights
from trace_rl.policy.zero3 import Zero3Policy
from trace_rl.ranks import Ranks, connect

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
        trainable: bool = True,
    ) -> Iterator[Zero3Policy]:
        path = self.models / model
        policy = Zero3Policy(
            ModelConfig(path=path, gradient_checkpointing=checkpointing),
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


class Odd:
    """The engine, with one thing wrong."""

    def __init__(self, engine: TransformersEngine, wrong: str) -> None:
        self.engine, self.wrong = engine, wrong

    async def generate(self, prefix: list[int], sampling: Sampling) -> Completion:
        if self.wrong == "dies":
            raise EngineError("the engine died of thirst")
        completion = await self.engine.generate(prefix, sampling)
        shift = {"stale": 0.5, "nan": float("nan")}.get(self.wrong, 0.0)
        logprobs = [lp + shift for lp in completion.logprobs]
        return Completion(completion.token_ids, logprobs, completion.truncated, completion.cached_tokens)

    def load_weights(self, source: Path, version: int) -> None:
        if self.wrong == "does not load":
            raise EngineError("no room for the weights")
        self.engine.load_weights(source, version)


def synced(w: Worker) -> dict[str, Any]:
    """Each case: for every rank, the probe's figures or (type, message) of what it raised.

    Whatever is wrong is wrong on the last rank only.
    """
    last = w.ranks.rank == w.ranks.world - 1
    forest = Forest.of(random_trees(0, 3))
    found: dict[str, Any] = {}
    with w.policy("tied", optimizer=OPTIMIZER.model_copy(update={"learning_rate": 0.1})) as policy:
        engine = TransformersEngine(w.models / "tied", dtype=torch.float32)

        def check(tolerance: float | None = None) -> Any:
            return probe(
                policy,
                wrong,
                [5, 6, 7],
                temperature=TEMPERATURE,
                dtype="float32",
                tolerance=tolerance,
                max_tokens=16,
                version=7,
            )

        def outcome(act: Callable[[], Any]) -> list[Any]:
            try:
                result: Any = act()
            except Exception as error:
                result = (type(error).__name__, str(error))
            return w.ranks.gather(result)

        old = policy.score(forest)[0]
        policy.update(forest, terms(forest, LOSS, old), LOSS)
        wrong = Odd(engine, "")
        found["never loaded"] = outcome(check)
        found["load"] = outcome(lambda: sync_weights(policy, wrong, 1))
        found["good"] = outcome(check)
        for case in ("stale", "nan", "dies"):
            wrong = Odd(engine, case if last else "")
            found[case] = outcome(check)
        wrong = Odd(engine, "stale" if last else "")
        found["tolerated"] = outcome(lambda: check(0.6))
        wrong = Odd(engine, "does not load" if last else "")
        found["does not load"] = outcome(lambda: sync_weights(policy, wrong, 2))
    return found


SCENARIOS = (
    plain,
    micro_batches,
    checkpointing,
    saved,
    saved_untied,
    against_reference,
    zero_variance,
    fewer_trees_than_ranks,
    synced,
)


def main() -> None:
    torch.set_num_threads(1)
    ranks = connect(torch.device("cpu"))
    worker = Worker(Path(sys.argv[1]), Path(sys.argv[2]), ranks)
    results = {scenario.__name__: scenario(worker) for scenario in SCENARIOS}
    if ranks.is_main:
        torch.save(results, worker.out / "results.pt")
    ranks.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
