"""Passage search: BM25 in memory beside the index on disk, on real questions and on a large made-up corpus.

`peak_bytes` is resident memory, which counts the pages of the index's files that are in memory.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trace_rl.retrieval.bm25 import Bm25Index
from trace_rl.retrieval.contents import join_contents
from trace_rl.retrieval.corpus import load_corpus_jsonl
from trace_rl.retrieval.disk_index import DiskIndex
from trace_rl.retrieval.index_build import build_index
from trace_rl.retrieval.protocol import SearchIndex
from trace_rl.tasks.task import Passage
from trace_rl.tasks.world import build_world

from .arguments import positive
from .measure import PeakMemory
from .retrieval_sets import QaSet, qa_sets
from .rows import Row

SUBJECT = "retrieval"
TOP_K = 3
QUERIES = 1000
THREADS = 8
WORDS = 100  # of a made-up passage, as in the Wikipedia dump that search agents are trained on


def add_arguments(group: Any) -> None:
    group.add_argument(
        "--passages", type=positive, help="of the made-up corpus (default 100,000, with --quick 2,000)"
    )


def run(options: argparse.Namespace) -> list[Row]:
    """Without --data the corpus is made of the synthetic world's sentences, and there are no real questions."""
    sets = qa_sets(options.data) if options.data else []
    rows = []
    for qa_set in sets:
        rows += _on_real_questions(qa_set)
    if sets:
        passages = [passage for qa_set in sets for passage in qa_set.passages]
        queries = [task.question for qa_set in sets for task in qa_set.tasks]
    else:
        world = build_world(0)
        passages, queries = list(world.passages), [f"{entity} {relation}" for entity, relation in world.facts]
    count = options.passages or (2_000 if options.quick else 100_000)
    return rows + _on_a_large_corpus(passages, queries, count)


def _on_real_questions(qa_set: QaSet) -> list[Row]:
    workload = f"{qa_set.name}, {len(qa_set.tasks)} questions, {len(qa_set.passages)} passages"
    questions = [task.question for task in qa_set.tasks]
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_index(_write(qa_set.passages, folder / "corpus.jsonl"), folder / "index")
        indexes = {"in memory": Bm25Index(qa_set.passages), "on disk": DiskIndex(folder / "index")}
        for method, index in indexes.items():
            ms, found = _timed(questions, index)
            shares = [qa_set.found(task, top) for task, top in zip(qa_set.tasks, found, strict=True)]
            all_found = statistics.fmean(share == 1 for share in shares)
            figures = {qa_set.figure: statistics.fmean(shares), "all_found": all_found}
            rows.append(Row(SUBJECT, workload, method, "search", ms, len(found), figures=figures))
    return rows


def _on_a_large_corpus(passages: Sequence[Passage], queries: Sequence[str], count: int) -> list[Row]:
    asked = [queries[i % len(queries)] for i in range(QUERIES)]
    workload = f"{count} passages of {WORDS} words, {QUERIES} queries"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = _write(_recombined(passages, count, random.Random(0)), folder / "corpus.jsonl")

        def on_disk() -> DiskIndex:
            build_index(corpus, folder / "index")
            return DiskIndex(folder / "index")

        # The one on disk first: memory that the other had taken before would hide what it takes.
        rows, found = _measured(workload, "on disk", on_disk, asked)
        others, exact = _measured(workload, "in memory", lambda: Bm25Index(load_corpus_jsonl(corpus)), asked)
        shared = [len({*a} & {*b}) / max(1, len(b)) for a, b in zip(found, exact, strict=True)]
        index_bytes = sum(file.stat().st_size for file in (folder / "index").rglob("*") if file.is_file())
        figures = {
            "corpus_mb": corpus.stat().st_size / 1e6,
            "index_mb": index_bytes / 1e6,
            "shared_with_in_memory@3": statistics.fmean(shared),
        }
    return [replace(rows[0], figures=figures), *rows[1:], *others]


def _measured(
    workload: str, method: str, build: Callable[[], SearchIndex], queries: Sequence[str]
) -> tuple[list[Row], list[list[Passage]]]:
    """Rows of building, of one search and of all searches from several threads; and what was found."""
    peak = PeakMemory(torch.device("cpu"))
    peak.start()
    start = time.perf_counter()
    index = build()
    ms = 1e3 * (time.perf_counter() - start)
    rows = [Row(SUBJECT, workload, method, "build", ms, 1, peak_bytes=peak.stop())]
    peak.start()
    ms, found = _timed(queries, index)
    rows.append(Row(SUBJECT, workload, method, "search", ms, len(queries), peak_bytes=peak.stop()))
    start = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda query: index.search(query, TOP_K), queries))
    ms = 1e3 * (time.perf_counter() - start)
    return [*rows, Row(SUBJECT, workload, method, f"all, {THREADS} threads", ms, 1)], found


def _timed(queries: Sequence[str], index: SearchIndex) -> tuple[float, list[list[Passage]]]:
    """Median ms of a search, and what each found."""
    index.search(queries[0], TOP_K)
    times, found = [], []
    for query in queries:
        start = time.perf_counter()
        found.append(index.search(query, TOP_K))
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times), found


def _recombined(passages: Sequence[Passage], count: int, rng: random.Random) -> Iterator[Passage]:
    """Made-up passages: a real title over real sentences of others."""
    titles = [passage.title for passage in passages]
    sentences = [s for passage in passages for s in passage.text.split(". ") if s]
    for i in range(count):
        text: list[str] = []
        while sum(len(sentence.split()) for sentence in text) < WORDS:
            text.append(rng.choice(sentences))
        yield Passage(str(i), rng.choice(titles), ". ".join(text))


def _write(passages: Iterator[Passage] | Sequence[Passage], file: Path) -> Path:
    with file.open("w") as out:
        for passage in passages:
            out.write(json.dumps({"id": passage.id, "contents": join_contents(passage)}) + "\n")
    return file
