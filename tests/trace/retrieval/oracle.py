"""BM25 in plain Python, and a made-up corpus to try it on."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from trace_rl.tasks.task import Passage


def byte_length(length: int) -> int:
    """A length as an index that has one byte for it keeps it: exact up to 40, then a float of four bits over 24."""
    if length < 40:
        return length
    shift = max(0, (length - 24).bit_length() - 4)
    return ((length - 24 >> shift) << shift) + 24


def bm25(
    documents: Sequence[str], query: str, k1: float, b: float, kept_length: Callable[[int], int]
) -> list[float]:
    """Score of each document, both of blank-separated words; the (k1 + 1) of the formula is left in."""
    counts = [Counter(document.split()) for document in documents]
    lengths = [sum(count.values()) for count in counts]
    average = sum(lengths) / len(lengths)
    scores = [0.0] * len(counts)
    for word in query.split():
        containing = sum(word in count for count in counts)
        idf = math.log(1 + (len(counts) - containing + 0.5) / (containing + 0.5))
        for i, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            norm = k1 * (1 - b + b * kept_length(length) / average)
            scores[i] += idf * count[word] * (k1 + 1) / (count[word] + norm)
    return scores


def check_ranking(ranks: Sequence[int], scores: Sequence[float]) -> None:
    """All documents with a score, best first; equal ones by position, those that float32 confuses anyhow."""
    assert sorted(ranks) == [i for i, score in enumerate(scores) if score > 0]
    for first, second in pairwise(ranks):
        assert scores[first] > scores[second] * (1 - 2e-5)
        assert first < second or scores[first] != scores[second]


def made_up_passages(count: int, seed: int, longest: int) -> list[Passage]:
    """Passages of skewed made-up words; some are equal but for their ids."""
    rng = random.Random(seed)
    passages: list[Passage] = []
    for i in range(count):
        if i % 7 == 6:
            passages.append(Passage(f"p{i}", passages[-1].title, passages[-1].text))
            continue
        words = [f"w{int(rng.paretovariate(0.6)) % 200}" for _ in range(rng.randint(1, longest))]
        passages.append(Passage(f"p{i}", f"title{i % 30}", " ".join(words)))
    return passages


def write_corpus(path: Path, passages: Sequence[Passage]) -> Path:
    """The corpus file of these passages."""
    records: list[dict[str, Any]] = [{"id": p.id, "contents": f'"{p.title}"\n{p.text}'} for p in passages]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
