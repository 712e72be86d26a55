"""A whole run: set up, evaluate, step, checkpoint, finish."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch

from .allocation.predictor import SuccessPredictor
from .checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from .cold_start import cold_start
from .config.load import ConfigError
from .config.schema import Config
from .evaluation.held_out import evaluate
from .learning import sync
from .loop import trace_step
from .missing_library import missing_libraries_named
from .phases import Phases, Silent
from .policy.module import check_model_directory
from .policy.sync import SyncError
from .policy.zero3 import Zero3Policy
from .ranks import Ranks, connect
from .report import Reporter, read_metrics
from .rollout.collector import Collector, Limits
from .run_directory import held, prepare
from .sampler import load_transcript, make_engine, this_device, wait_ready
from .sources.load import load_source, make_environments
from .sources.source import Source
from .state import Run
from .tasks.order import TaskOrder
from .user_errors import SAMPLING_ERRORS

# What a user can mend: shown as one message, without a traceback.
USER_ERRORS = (*SAMPLING_ERRORS, CheckpointError, SyncError)


@missing_libraries_named()
def run(config: Config, *, resume: bool = False) -> None:
    """Train as `config` says. Every rank calls this."""
    begun = time.perf_counter()
    device = this_device()
    ranks = connect(device)
    if device.type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks.world))
    with ExitStack() as holding:

        def enter() -> int:
            holding.enter_context(held(config.run_dir))
            return prepare(config, resume)

        done = ranks.from_main(enter)
        reporter = None
        if ranks.is_main:
            reporter = holding.enter_context(Reporter(config.run_dir, config.steps, done))
        _run(config, ranks, device, reporter, begun, done)
    ranks.barrier()  # nobody goes while another still needs it


def _run(
    config: Config, ranks: Ranks, device: torch.device, reporter: Reporter | None, begun: float, done: int
) -> None:
    say = reporter.say if reporter else lambda text: None
    phases = Phases(reporter or Silent())
    source = load_source(config.task, config.environment)
    if source.skipped:
        say(f"records left out, {len(source.skipped)} notes, first: {source.skipped[0]}")
    check_source(config, source)
    if config.cold_start and not ranks.from_main(lambda: (config.model.path / "config.json").is_file()):
        say(f"cold start: {config.cold_start.steps} supervised steps on expert traces -> {config.model.path}")
        cold_start(config, source, ranks, device, phases)
    startup = phases.take()

    check_model_directory(config.model.path)
    transcript = load_transcript(config.model)
    make_environment = ranks.attempt(lambda: make_environments(source, transcript.count))
    engine = make_engine(
        config.model, config.engine, config.sampling.context_tokens, config.run_dir, ranks, device
    )
    try:
        with phases("start"):
            if device.type == "cuda":
                # vLLM sizes its cache by what is free while it starts: the trainer must not allocate meanwhile.
                ranks.attempt(lambda: wait_ready(engine))
                if config.engine.sleep:
                    ranks.attempt(engine.sleep)
            policy = _policy(config, ranks, device, trainable=True)
            reference = _policy(config, ranks, device, trainable=False) if config.loss.kl else None
            if device.type == "cpu":
                ranks.attempt(lambda: wait_ready(engine))
        current = Run(
            config=config,
            ranks=ranks,
            tasks=source.train,
            order=TaskOrder(len(source.train), config.seed),
            collector=Collector(
                engine,
                transcript,
                make_environment,
                Limits(
                    config.sampling.temperature, config.sampling.turn_tokens, config.sampling.context_tokens
                ),
                lambda *_: phases.watcher.advance(),
            ),
            engine=engine,
            policy=policy,
            reference=reference,
            predictor=SuccessPredictor(
                policy.hidden_size,
                width=config.predictor.hidden,
                learning_rate=config.predictor.learning_rate,
                epochs=config.predictor.epochs,
                batch_size=config.predictor.batch,
                window=config.predictor.replay_steps + 1,
                seed=config.seed,
            ).to(device),
            phases=phases,
        )
        _train(current, source, reporter, _added(startup, phases.take()), begun, done)
    finally:
        engine.close()


def _train(
    run: Run, source: Source, reporter: Reporter | None, startup: dict[str, float], begun: float, done: int
) -> None:
    config, directory = run.config, run.config.run_dir / "checkpoints"
    held_out = list(source.test)[: config.evaluation.questions]
    first = load_checkpoint(run, directory) if done else 0
    if first:
        run.version -= 1  # the sync below brings the weights of this version once more
    prompt = run.collector.plant(source.train[0]).nodes[0].token_ids
    sync(run, prompt[: config.sampling.context_tokens // 2])  # the engine proves itself before it samples
    if held_out and first == 0:
        figures = evaluate(run.collector, held_out, run.ranks, run.phases, version=run.version)
        if reporter:
            reporter.evaluated("before", 0, figures)
    around = _added(startup, run.phases.take())
    for step in range(first + 1, config.steps + 1):
        report = trace_step(run, step)
        if reporter:
            reporter.step(step, report.trees, report.metrics)
            for warning in step_warnings(report.metrics):
                reporter.say(f"warning: {warning}")
        if config.checkpoint_every and (step % config.checkpoint_every == 0 or step == config.steps):
            with run.phases("checkpoint"):
                save_checkpoint(run, directory, step)
            around = _added(around, run.phases.take())
    run.policy.save_pretrained(config.run_dir / "policy")  # first of all: an evaluation may still fail
    if held_out:
        figures = evaluate(run.collector, held_out, run.ranks, run.phases, version=run.version)
        if reporter:
            reporter.evaluated("after", config.steps, figures)
    if reporter:
        around = _added(around, run.phases.take())
        content = summary(run, around, time.perf_counter() - begun, resumed_from_step=first)
        reporter.write_json("summary.json", content)
        reporter.say(f"policy: {config.run_dir / 'policy'}   summary: {config.run_dir / 'summary.json'}")


def summary(run: Run, around: dict[str, float], wall_s: float, resumed_from_step: int) -> dict[str, Any]:
    """The run in a few figures. `wall_s` is this process's; figures of steps are of the whole run."""
    rows = read_metrics(run.config.run_dir)
    path = run.config.run_dir / "evaluations.json"
    evaluations = json.loads(path.read_text()) if path.is_file() else {}
    phases = around
    for row in rows:
        times = {k.removeprefix("phase/"): v for k, v in row.items() if k.startswith("phase/")}
        phases = _added(phases, times)
    totals = run.totals
    return {
        **{
            f"{name}_{when}": value
            for when in ("before", "after")
            for name, value in evaluations.get(when, {}).items()
            if name != "step"
        },
        "effective_ratio_mean": sum(r["effective_ratio"] for r in rows) / max(1, len(rows)),
        "prefix_cache_hit_rate": totals.cached_tokens / max(1, totals.prompt_tokens),
        "continuation_cache_hit_rate": totals.continuation_cached_tokens
        / max(1, totals.continuation_prompt_tokens),
        "logprob_diff_max": max((r["sampling/sampling_logp_difference/max"] for r in rows), default=math.nan),
        "generated_tokens": totals.generated_tokens,
        "leaves": totals.leaves,
        "steps": len(rows),
        "resumed_from_step": resumed_from_step,
        "wall_s": wall_s,
        "phase_s": phases,
    }


def step_warnings(metrics: dict[str, float]) -> Iterator[str]:
    """What makes "equal sampling cost" untrue in a step: other counts than the engine's, leaves not sampled."""
    prefix = "ledger/engine_minus_ledger/"
    off = {k.removeprefix(prefix): v for k, v in metrics.items() if k.startswith(prefix) and v}
    if off:
        yield f"the engine's counters differ from the ledger, engine minus ledger: {off}"
    if metrics["allocation/unspent"]:
        which = " other than those that their tool ended" if metrics["tools/error_rate"] else ""
        yield (
            f"{metrics['allocation/unspent']:.0f} leaves not sampled: no rollout{which} had a second turn to "
            "branch from"
        )


def _added(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in one | other}


def check_source(config: Config, source: Source) -> None:
    """Refuse a data set the run could not use; raises ConfigError."""
    if not source.train:
        raise ConfigError("task.train: no usable record, nothing to train on")
    if config.evaluation.questions and not source.test:
        raise ConfigError(
            "task.test: no usable record; set evaluation.questions=0 to train without evaluation"
        )
    if config.allocation.pool_size > len(source.train):
        raise ConfigError(
            f"allocation.pool: {config.allocation.pool_size} prompts per step, but there are only "
            f"{len(source.train)} training questions; lower allocation.pool or allocation.bare_rollouts"
        )


def _policy(config: Config, ranks: Ranks, device: torch.device, *, trainable: bool) -> Zero3Policy:
    return Zero3Policy(
        config.model,
        config.model.path,
        ranks=ranks,
        device=device,
        temperature=config.sampling.temperature,
        micro_batch_tokens=config.optimizer.micro_batch_tokens,
        optimizer=config.optimizer if trainable else None,
        deepspeed_overrides=config.deepspeed,
        trainable=trainable,
    )
