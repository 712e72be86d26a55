"""A whole evaluation: `trace-rl evaluate`. Interrupted at any point, it goes on from the recorded rollouts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from trace_rl.config.evaluate import EvaluateConfig
from trace_rl.config.load import ConfigError, dump_config
from trace_rl.missing_library import missing_libraries_named
from trace_rl.ranks import TIMEOUT, Ranks
from trace_rl.rollout.collector import Collector, Limits
from trace_rl.sampler import load_transcript, make_engine, this_device, wait_ready
from trace_rl.sources.load import load_source, make_environments
from trace_rl.sources.source import Source
from trace_rl.tasks.task import Task
from trace_rl.user_errors import SAMPLING_ERRORS

from .asking import ask
from .identity import RECORDS, check_questions, claim, identity
from .model import find_model, fingerprint
from .progress import Watch
from .records import (
    Key,
    Record,
    RecordsError,
    done,
    drop_torn_line,
    read_records,
    record_file,
    record_files,
)
from .results import Results, results, write

# What a user can mend: shown as one message, without a traceback.
USER_ERRORS = (*SAMPLING_ERRORS, RecordsError)


@dataclass(frozen=True)
class QuestionSet:
    """What is asked of one set: its tasks, in order, and the rollouts they need."""

    name: str
    tasks: Sequence[Task]
    keys: Sequence[Key]
    source: Source


@missing_libraries_named()
def run(config: EvaluateConfig) -> Results:
    """Sample what is not recorded yet, write `out/eval.md` and `out/eval.json`, return the figures.

    Under a launcher (`torchrun`) every rank calls this, and the ranks share the rollouts.
    """
    device = this_device()
    ranks = join()
    if device.type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks.world))
    with Watch(show=ranks.is_main) as watch:
        directory = ranks.from_main(lambda: find_model(config.model, config.out, watch.say))
        weights = ranks.from_main(lambda: _claimed(config, directory))
        sets = [_question_set(config, name, watch.say) for name in config.sets]
        finished = ranks.from_main(lambda: _finished(config, sets))
        waiting = {one.name: [key for key in one.keys if key not in finished[one.name]] for one in sets}
        ranks.attempt(lambda: _sample(config, directory, sets, waiting, ranks, device, watch))
        outcome = ranks.from_main(lambda: _conclude(config, sets, directory, weights))
        for line in outcome.text.splitlines():
            watch.say(line)
    return outcome


def join() -> Ranks:
    """This process among its launcher's, or alone. No rank needs another's tensors, so that gloo is enough."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Ranks(0, 1, 0, None)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return Ranks(dist.get_rank(), dist.get_world_size(), local, dist.group.WORLD)


def _claimed(config: EvaluateConfig, directory: Path) -> str:
    weights = fingerprint(directory)
    claim(config.out, identity(config, weights))
    (config.out / "config.yaml").write_text(dump_config(config))
    return weights


def _question_set(config: EvaluateConfig, name: str, say: Callable[[str], None]) -> QuestionSet:
    one = config.sets[name]
    source = load_source(one.task, one.environment, f"sets.{name}.")
    if source.skipped:
        say(f"{name}: records left out, {len(source.skipped)} notes, first: {source.skipped[0]}")
    tasks = list(source.test)[: config.most_questions(name)]
    if not tasks:
        raise ConfigError(f"sets.{name}.task.test: no usable question, nothing to ask")
    keys = [(task.id, number) for task in tasks for number in range(config.sampling.samples)]
    return QuestionSet(name, tasks, keys, source)


def _finished(config: EvaluateConfig, sets: Sequence[QuestionSet]) -> dict[str, set[Key]]:
    finished = {}
    for one in sets:
        for file in record_files(config.out / RECORDS, one.name):
            drop_torn_line(file)
        records = read_records(config.out / RECORDS, one.name)
        check_questions(one.name, one.tasks, records)
        finished[one.name] = done(records.values())
    return finished


def _sample(
    config: EvaluateConfig,
    directory: Path,
    sets: Sequence[QuestionSet],
    waiting: dict[str, list[Key]],
    ranks: Ranks,
    device: torch.device,
    watch: Watch,
) -> None:
    """Ask what this rank is to ask. A set that is complete costs nothing: no index, no engine."""
    mine = {name: keys[ranks.rank :: ranks.world] for name, keys in waiting.items()}
    if not any(mine.values()):
        return
    model = config.model.model_copy(update={"path": directory})
    transcript = load_transcript(model)
    made = {
        one.name: make_environments(one.source, transcript.count, f"sets.{one.name}.")
        for one in sets
        if mine[one.name]
    }
    limits = Limits(config.sampling.temperature, config.sampling.turn_tokens, config.sampling.context_tokens)
    watch.say(f"starting {config.engine.kind} ...")
    with closing(
        make_engine(model, config.engine, limits.context_tokens, config.out, ranks, device)
    ) as engine:
        wait_ready(engine)
        for one in sets:
            if mine[one.name]:
                earlier = (len(one.keys) - len(waiting[one.name])) // ranks.world
                watch.start(one.name, earlier + len(mine[one.name]), earlier)
                # Not kept for the sets to come: what a set searches in or runs code with ends with it.
                collector = Collector(engine, transcript, made.pop(one.name), limits)
                file = record_file(config.out / RECORDS, one.name, ranks.rank, ranks.world)
                _ask(collector, one, mine[one.name], config.seed, file, watch)


def _ask(
    collector: Collector, one: QuestionSet, keys: Sequence[Key], seed: int, file: Path, watch: Watch
) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as records:

        def keep(record: Record) -> None:
            records.write(record.to_line())
            records.flush()
            watch.advance()

        ask(collector, one.tasks, keys, seed, keep)


def _conclude(config: EvaluateConfig, sets: Sequence[QuestionSet], directory: Path, weights: str) -> Results:
    records = {one.name: read_records(config.out / RECORDS, one.name) for one in sets}
    outcome = results(config, {one.name: one.tasks for one in sets}, records)
    write(config, outcome, directory, weights)
    return outcome
