"""Tasks and environments of a run, from its config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .config.schema import Config, QaTask, WorldTask
from .environments.protocol import Environment
from .environments.search_qa import SHORT_NOTICES, SearchQA
from .retrieval.bm25 import Bm25Index
from .retrieval.corpus import load_corpus_jsonl
from .tasks.readers import READERS
from .tasks.task import Passage, Task
from .tasks.world import World, WorldConfig, build_world
from .tasks.world_tokenizer import world_tokenizer


@dataclass(frozen=True)
class Source:
    """Questions and what they are searched in. `skipped` says which records could not be read, and why."""

    train: Sequence[Task]
    test: Sequence[Task]
    passages: Sequence[Passage]
    skipped: Sequence[str] = ()
    world: World | None = None

    def environments(self, config: Config, count_tokens: Callable[[str], int]) -> Callable[[], Environment]:
        """A maker of environments over one shared index; `count_tokens` is the policy's tokenizer."""
        e = config.environment
        index = Bm25Index(self.passages)

        def make() -> Environment:
            return SearchQA(
                index,
                max_searches=e.max_searches,
                top_k=e.top_k,
                max_observation_tokens=e.max_observation_tokens,
                count_tokens=count_tokens,
                reward=e.reward,
                f1_threshold=e.f1_threshold,
                instructions=e.instructions,
                notices=SHORT_NOTICES if self.world else None,  # words the world's tokenizer knows
            )

        return make

    def tokenizer(self, config: Config) -> Any:
        """A tokenizer for a policy that is to be trained from nothing on the synthetic world."""
        assert self.world is not None
        return world_tokenizer(
            self.world, config.environment.instructions or "", max_documents=config.environment.top_k
        )


def load_source(config: Config) -> Source:
    """Read or generate the run's questions; raises RecordError or ValueError with what is wrong."""
    task = config.task
    if isinstance(task, WorldTask):
        third = max(5, task.entities // 3)
        world = build_world(
            task.seed,
            WorldConfig(
                people=third,
                places=third,
                works=third,
                min_hops=task.min_hops,
                max_hops=task.max_hops,
                train_questions=task.train_questions,
                test_questions=task.test_questions,
            ),
        )
        return Source(world.train, world.test, world.passages, world=world)
    return _read(task)


def _read(task: QaTask) -> Source:
    splits: list[list[Task]] = []
    passages: dict[tuple[str, str], Passage] = {}
    skipped: list[str] = []
    seen: set[str] = set()  # a question counts once, and one of the training set is never tested
    for files in (task.train, task.test):
        tasks: list[Task] = []
        for file in files:
            loaded = READERS[task.kind](file, on_malformed=task.on_malformed)
            tasks += [task for task in loaded.tasks if task.id not in seen]
            seen |= {task.id for task in loaded.tasks}
            skipped += loaded.skipped
            passages |= {(p.title, p.text): p for p in loaded.passages}
        splits.append(tasks[: task.limit])
    corpus = load_corpus_jsonl(task.corpus) if task.corpus else list(passages.values())
    return Source(splits[0], splits[1], corpus, skipped)
