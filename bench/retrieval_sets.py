"""Questions with a corpus to find their passages in, from a folder of public records."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trace_rl.environments.scoring import normalize_answer
from trace_rl.retrieval.corpus import load_corpus_jsonl
from trace_rl.tasks.readers import READERS
from trace_rl.tasks.task import Passage, Task

OWN_PARAGRAPHS = (
    ("hotpotqa", "hotpotqa/hotpotqa_public.json"),
    ("hotpotqa", "hotpotqa/hotpotqa_train100_public.json"),
    ("hotpotqa", "hotpotqa/hotpotqa_hfformat_public.json"),
    ("2wikimultihopqa", "2wikimultihopqa/2wikimultihopqa_public.json"),
    ("musique", "musique/musique_ans_public.jsonl"),
    ("musique", "musique/musique_train100_public.jsonl"),
)
WIDER = (
    "2wikimultihopqa/2wikimultihopqa_public.json",
    "2wikimultihopqa/2wikimultihopqa_corpus6119_public.json",
)
BAMBOOGLE = ("bamboogle/bamboogle_public.jsonl", "bamboogle/bamboogle_corpus_public.jsonl")
ANSWERABLE = "bamboogle/bamboogle_answerable_ids.json"
NQ = ("search_r1_nq/nq_search_public.jsonl", "search_r1_nq/nq_corpus_public.jsonl")

Found = Callable[[Task, Sequence[Passage]], float]


@dataclass(frozen=True)
class QaSet:
    """``found`` says how much of what a question needs is among the passages, from 0 to 1; its mean is called
    ``figure``."""

    name: str
    tasks: list[Task]
    passages: list[Passage]
    figure: str
    found: Found


def gold_titles(task: Task, passages: Sequence[Passage]) -> float:
    """Share of the supporting passages' titles among these."""
    titles = {passage.title for passage in passages}
    return sum(title in titles for title in task.titles) / len(task.titles)


def holds_an_answer(task: Task, passages: Sequence[Passage]) -> float:
    """1 if one of these has a gold answer in it, both normalised, as whole words."""
    texts = [f" {normalize_answer(f'{p.title} {p.text}')} " for p in passages]
    return float(any(f" {normalize_answer(answer)} " in text for answer in task.answers for text in texts))


def qa_sets(folder: Path) -> list[QaSet]:
    """All of them. Raises FileNotFoundError where one is missing and ValueError for a malformed one."""
    sets = []
    for kind, file in OWN_PARAGRAPHS:
        loaded = READERS[kind](folder / file)
        sets.append(QaSet(Path(file).stem, loaded.tasks, loaded.passages, "gold_recall@3", gold_titles))
    questions, corpus = WIDER
    loaded = READERS["2wikimultihopqa"](folder / questions)
    wider = {(p.title, p.text): p for p in [*load_corpus_jsonl(folder / corpus), *loaded.passages]}
    sets.append(
        QaSet(
            "2wikimultihopqa_public and corpus6119",
            loaded.tasks,
            [*wider.values()],
            "gold_recall@3",
            gold_titles,
        )
    )
    for kind, (questions, corpus) in (("bamboogle", BAMBOOGLE), ("search_r1", NQ)):
        tasks, passages = READERS[kind](folder / questions).tasks, load_corpus_jsonl(folder / corpus)
        sets.append(QaSet(Path(questions).stem, tasks, passages, "answer_in_top3", holds_an_answer))
    listed = json.loads((folder / ANSWERABLE).read_text())
    answerable = set(listed if isinstance(listed, list) else listed["public"])
    tasks = [task for task in READERS["bamboogle"](folder / BAMBOOGLE[0]).tasks if task.id in answerable]
    passages = load_corpus_jsonl(folder / BAMBOOGLE[1])
    sets.append(QaSet("bamboogle_public, answerable", tasks, passages, "answer_in_top3", holds_an_answer))
    return sets
