"""Checkpoints of real runs on this rank: `resume_worker.py MODELS OUT [FOREIGN]`.

FOREIGN holds checkpoints that another number of ranks wrote. Rank 0 writes what happened to OUT/results.pt.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from oracle import EPS, TEMPERATURE, random_trees

from trace_rl import checkpoint, ledger
from trace_rl.allocation.predictor import SuccessPredictor
from trace_rl.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from trace_rl.config.schema import Config, ModelConfig, OptimizerConfig, SamplingConfig, WorldTask
from trace_rl.learning import score_trees, update_policy, update_predictor
from trace_rl.phases import Phases
from trace_rl.policy.batch import Forest
from trace_rl.policy.zero3 import Zero3Policy
from trace_rl.ranks import Ranks, connect, end_process
from trace_rl.state import Run
from trace_rl.tasks.order import TaskOrder


def new_run(models: Path, out: Path, ranks: Ranks, seed: int) -> Run:
    """A run without a sampler; its global generators stand where `seed` and the rank put them."""
    config = Config(
        run_dir=out,
        steps=9,
        model=ModelConfig(path=models / "untied"),
        task=WorldTask(kind="world"),
        sampling=SamplingConfig(temperature=TEMPERATURE, turn_tokens=8, context_tokens=64),
        optimizer=OptimizerConfig(
            learning_rate=5e-3, warmup_steps=7, weight_decay=0.1, minibatches=2, micro_batch_tokens=64
        ),
        keep_checkpoints=2,
        deepspeed={
            "zero_optimization": {"stage3_param_persistence_threshold": 0},
            "optimizer": {"params": {"eps": EPS}},
        },
    )
    policy = Zero3Policy(
        config.model,
        config.model.path,
        ranks=ranks,
        device=torch.device("cpu"),
        temperature=TEMPERATURE,
        micro_batch_tokens=config.optimizer.micro_batch_tokens,
        optimizer=config.optimizer,
        deepspeed_overrides=config.deepspeed,
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
    random.seed(100 * seed + ranks.rank)
    np.random.seed(100 * seed + ranks.rank)
    torch.manual_seed(100 * seed + ranks.rank)
    return run


def advance(run: Run) -> dict[str, Any]:
    """One step's learning, on trees that hang on every rank's generators and on the order."""
    run.version += 1
    mine = (random.random(), random.gauss(0, 1), float(np.random.rand()), float(torch.rand(())))
    draws = run.ranks.gather(mine)
    tasks = run.order.take(3)
    forest = Forest.of(random_trees(hash((*draws, *tasks)), 4))
    old, features, figures = score_trees(run, forest)
    quality = update_predictor(run, forest, features)
    learned = update_policy(run, forest, old)
    run.totals += ledger.count(forest.trees)
    return {"draws": draws, "tasks": tasks, "learned": figures | learned, "predictor": quality}


def state(run: Run) -> dict[str, Any]:
    return {
        "order": run.order.state_dict(),
        "totals": run.totals,
        "version": run.version,
        "optimizer_steps": run.policy.steps,
        "predictor": run.predictor.state_dict(),
        "weights": dict(run.policy.weights()),
    }


def refusal(run: Run, directory: Path) -> list[Any]:
    """What `load_checkpoint` does on every rank."""
    try:
        outcome: Any = load_checkpoint(run, directory)
    except Exception as error:
        outcome = (type(error).__name__, str(error))
    return run.ranks.gather(outcome)


def crashes(run: Run, directory: Path) -> dict[str, Any]:
    """Saves that break off, alone on one rank, and what is left of them."""
    found: dict[str, Any] = {}

    def note(name: str) -> None:
        found[name] = (
            (directory / "latest").read_text(),
            sorted(p.name for p in directory.glob("step_*")),
            checkpoints(directory),
        )

    def half(root: str, tag: str, **_: Any) -> None:
        (Path(root) / tag).mkdir()
        (Path(root) / tag / "zero_pp_rank_0").write_bytes(b"half")
        raise OSError("disk full")

    save_checkpoint(run, directory, 1)
    note("one")
    with mock.patch.object(checkpoint.os, "replace", side_effect=KeyboardInterrupt):
        try:
            save_checkpoint(run, directory, 2)
        except KeyboardInterrupt:
            note("before the pointer")
    with mock.patch.object(run.policy.engine, "save_checkpoint", side_effect=half):
        try:
            save_checkpoint(run, directory, 3)
        except OSError:
            note("half")
    found["loaded"] = load_checkpoint(run, directory)
    shutil.copytree(directory / "step_2", directory / "step_9")  # of a run that went further, then lost it
    for step in (4, 5, 6):
        save_checkpoint(run, directory, step)
        note(f"step {step}")
    found["loaded again"] = load_checkpoint(run, directory)
    return found


def main() -> None:
    torch.set_num_threads(1)
    models, out, *foreign = map(Path, sys.argv[1:])
    ranks = connect(torch.device("cpu"))
    directory = out / "checkpoints"
    results: dict[str, Any] = {}

    run = new_run(models, out, ranks, seed=1)
    results["missing"] = load_checkpoint(run, directory)
    results["before"] = [advance(run) for _ in range(2)]
    save_checkpoint(run, directory, 2)
    results["saved"] = state(run)
    results["on"] = [advance(run) for _ in range(2)]
    results["on_state"] = state(run)
    run.policy.close()

    run = new_run(models, out, ranks, seed=2)
    results["fresh"] = state(run)
    if foreign:
        results["foreign"] = refusal(run, foreign[0])
    results["step"] = load_checkpoint(run, directory)
    results["loaded"] = state(run)
    results["again"] = [advance(run) for _ in range(2)]
    results["again_state"] = state(run)
    if ranks.world == 1:
        results["crashes"] = crashes(run, out / "crashes")
        other = out / "other"
        shutil.copytree(directory, other)
        (other / "step_2" / "world.json").write_text(json.dumps({"ranks": 4}))
        results["other"] = refusal(run, other)
        (other / "latest").write_text("step_7")
        results["gone"] = refusal(run, other)
    if ranks.is_main:
        torch.save(results, out / "results.pt")
    ranks.barrier()
    end_process(0)


if __name__ == "__main__":
    main()
