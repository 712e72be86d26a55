"""`checkpoint_worker.py POLICIES OUT`: two runs of one optimiser step each, OUT/untied in float32 and OUT/tied in
bfloat16, with a checkpoint and a policy to hold it against."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from trace_rl.allocation.predictor import SuccessPredictor
from trace_rl.checkpoint import save_checkpoint
from trace_rl.config.environments import SearchConfig
from trace_rl.config.load import dump_config
from trace_rl.config.schema import Config, ModelConfig, OptimizerConfig, SamplingConfig, WorldTask
from trace_rl.phases import Phases
from trace_rl.policy.batch import Forest
from trace_rl.policy.zero3 import Zero3Policy
from trace_rl.ranks import Ranks, connect, end_process
from trace_rl.rollout.tree import Node, RolloutTree
from trace_rl.state import Run
from trace_rl.tasks.order import TaskOrder
from trace_rl.tasks.task import Task


def trained(model: ModelConfig, out: Path, ranks: Ranks) -> None:
    config = Config(
        run_dir=out,
        steps=1,
        model=model,
        task=WorldTask(kind="world"),
        environment=SearchConfig(),
        sampling=SamplingConfig(turn_tokens=8, context_tokens=64),
        optimizer=OptimizerConfig(learning_rate=0.05, micro_batch_tokens=64),
    )
    policy = Zero3Policy(
        model,
        model.path,
        ranks=ranks,
        device=torch.device("cpu"),
        temperature=1.0,
        micro_batch_tokens=64,
        optimizer=config.optimizer,
        deepspeed_overrides={"zero_optimization": {"stage3_param_persistence_threshold": 0}},
    )
    run = Run(
        config=config,
        ranks=ranks,
        tasks=[],
        order=TaskOrder(5, seed=3),
        collector=None,  # type: ignore[arg-type]
        engine=None,  # type: ignore[arg-type]
        policy=policy,
        reference=None,
        predictor=SuccessPredictor(policy.hidden_size, width=16, window=3, seed=5),
        phases=Phases(),
    )
    prompt = Node(-1, 0, "root", [3, 4, 5], [0] * 3, [0.0] * 3)
    turn = Node(0, 1, "bare", [6, 7, 8], [1] * 3, [-1.0] * 3, reward=1.0)
    trees = [RolloutTree(Task(f"t{i}", "Who?", ("x",), "test"), [prompt, turn]) for i in range(2)]
    policy.step(Forest.of(trees), None, lambda batch, logprob, reference: (-logprob.sum(), {}))
    if ranks.is_main:
        out.mkdir(parents=True)
        (out / "config.yaml").write_text(dump_config(config))
    save_checkpoint(run, out / "checkpoints", 1)
    policy.save_pretrained(out / "expected")
    policy.close()


def main() -> None:
    torch.set_num_threads(1)
    policies, out = map(Path, sys.argv[1:])
    ranks = connect(torch.device("cpu"))
    trained(ModelConfig(path=policies / "untied"), out / "untied", ranks)
    trained(ModelConfig(path=policies / "tied", dtype="bfloat16"), out / "tied", ranks)
    ranks.barrier()
    end_process(0)


if __name__ == "__main__":
    main()
