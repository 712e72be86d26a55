from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_rl.retrieval.bm25 import Bm25Index
from trace_rl.tasks.task import Passage
from trace_rl.tasks.world import build_world

from .oracle import bm25, check_ranking, made_up_passages

CORPUS = [
    Passage("0", "Alû", "A demon of the night."),
    Passage("1", "Moon", "The night is lit by it."),
    Passage("2", "The Who", "A band."),
    Passage("3", "Twin", "same words"),
    Passage("4", "Twin", "same words"),
    Passage("5", "Twin", "same words"),
]


@pytest.fixture(scope="module")
def index():
    return Bm25Index(CORPUS)


def ids(passages):
    return [p.id for p in passages]


def test_search(index):
    assert ids(index.search("demon", 3)) == ["0"]
    assert ids(index.search("ALU", 3)) == ["0"]
    assert ids(index.search("moon at night", 2)) == ["1", "0"]
    assert ids(index.search("Who?", 1)) == ["2"]
    assert len(index) == 6


def test_scores_are_bm25():
    passages = made_up_passages(120, seed=0, longest=90)
    index = Bm25Index(passages)
    documents = [f"{p.title} {p.title} {p.text}" for p in passages]
    for query in ("w1", "w2 w3 title4", "w5 w5 w9"):
        scores = bm25(documents, query, k1=1.5, b=0.75, kept_length=lambda length: length)
        found = index.scored_search(query, 120)
        ranks = [int(p.id[1:]) for p, _ in found]
        check_ranking(ranks, scores)
        # The library leaves the factor k1 + 1 out.
        assert [2.5 * score for _, score in found] == pytest.approx([scores[i] for i in ranks], rel=1e-5)


def test_ties_go_by_position(index):
    for k in (1, 2, 3, 6, 99):
        assert ids(index.search("same twin", k)) == ["3", "4", "5"][:k]


@pytest.mark.parametrize("query", ["", "   ", "?!", "zebra", "\n", "</search>", "\ud83e"])
def test_nothing_to_find(query, index):
    assert index.search(query, 3) == []


def test_very_long_query(index):
    assert ids(index.search("demon " * 100_000, 1)) == ["0"]
    assert index.search("zebra " * 300 + "demon", 1) == []


def test_refusals(index):
    with pytest.raises(ValueError, match="k must be"):
        index.search("demon", 0)
    for passages in ([], [Passage("0", "", " ?")]):
        with pytest.raises(ValueError, match="no word"):
            Bm25Index(passages)
    with pytest.raises(ValueError, match="title_weight"):
        Bm25Index(CORPUS, title_weight=0)


@given(st.text(alphabet="night demon band twin same the", max_size=30), st.integers(1, 7))
def test_prefix_property(query, k):
    """Fewer results are the first of more results."""
    index = Bm25Index(CORPUS)
    assert index.search(query, k) == index.search(query, 99)[:k]


def test_threads_agree():
    world = build_world(0)
    index = Bm25Index(world.passages)
    queries = [f"{r} {e}" for e, r in world.facts]
    expected = [index.search(q, 3) for q in queries]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda q: index.search(q, 3), queries)) == expected


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_world_queries_find_the_fact_and_two_distractors(seed):
    world = build_world(seed)
    index = Bm25Index(world.passages)
    for (entity, relation), value in world.facts.items():
        found = index.search(f"{relation} {entity}", 3)
        gold = [p for p in found if (p.title, p.text) == (entity, f"{relation} {value}")]
        distractors = [p for p in found if p not in gold]
        assert (len(gold), len(distractors)) == (1, 2)
        assert all((p.title == entity) != (p.text.split()[0] == relation) for p in distractors)
