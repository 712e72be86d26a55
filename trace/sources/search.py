"""Search question answering: the synthetic world, and questions from files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from trace_rl.config.environments import RetrieverConfig, SearchConfig
from trace_rl.config.tasks import QaTask, WorldTask
from trace_rl.environments.protocol import Environment
from trace_rl.environments.search_qa import SHORT_NOTICES, Notices, SearchQA
from trace_rl.retrieval.bm25 import Bm25Index
from trace_rl.retrieval.corpus import load_corpus_jsonl
from trace_rl.retrieval.protocol import RetrievalError, SearchIndex
from trace_rl.tasks.readers import READERS
from trace_rl.tasks.task import Passage
from trace_rl.tasks.world import World, WorldConfig, build_world
from trace_rl.tasks.world_tokenizer import world_tokenizer

from .files import read_splits
from .source import CountTokens, Source


def qa_source(task: QaTask, environment: SearchConfig) -> Source:
    """Questions from files, searched by a server, an index on disk, a corpus file or their own paragraphs."""
    read = read_splits(task, READERS[task.kind])
    index = partial(_index, task, environment, read.passages)
    return Source(read.train, read.test, _environments(environment, index), read.skipped)


def world_source(task: WorldTask, environment: SearchConfig) -> Source:
    """Questions about a generated world."""
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
    # The world's tokenizer knows the words of the short notices only.
    make = _environments(environment, lambda: Bm25Index(world.passages), SHORT_NOTICES)
    return Source(world.train, world.test, make, world=world)


def new_tokenizer(world: World, environment: SearchConfig) -> Any:
    """A tokenizer for a policy that is to be trained from nothing on the synthetic world."""
    return world_tokenizer(world, environment.instructions or "", max_documents=environment.top_k)


def _index(task: QaTask, environment: SearchConfig, passages: Sequence[Passage]) -> SearchIndex:
    if environment.retriever:
        return _client(environment.retriever)
    if task.corpus:
        return _corpus_index(task.corpus)
    if not passages:
        raise ValueError(
            f"records of the kind {task.kind} bring no paragraphs: set task.corpus or environment.retriever"
        )
    return Bm25Index(passages)


@cache  # several sets of an evaluation may search one corpus
def _corpus_index(path: Path) -> SearchIndex:
    if path.is_dir():
        from trace_rl.retrieval.disk_index import DiskIndex

        return DiskIndex(path)
    return Bm25Index(load_corpus_jsonl(path))


@cache
def _client(server: RetrieverConfig) -> SearchIndex:
    from trace_rl.retrieval.http_client import HttpRetriever

    client = HttpRetriever(
        server.url, timeout_s=server.timeout_s, retries=server.retries, connections=server.connections
    )
    try:
        client.search("a first search, to see that the server answers", 1)
    except RetrievalError as error:
        client.close()
        raise ValueError(f"environment.retriever: {error}") from error
    return client


def _environments(
    e: SearchConfig, make_index: Callable[[], SearchIndex], notices: Notices | None = None
) -> Callable[[CountTokens], Callable[[], Environment]]:
    def environments(count_tokens: CountTokens) -> Callable[[], Environment]:
        index = make_index()

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
                notices=notices,
            )

        return make

    return environments
