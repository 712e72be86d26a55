from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_rl.retrieval.bm25 import Bm25Index
from trace_rl.retrieval.disk_index import DiskIndex, in_order
from trace_rl.retrieval.index_build import build_index
from trace_rl.retrieval.index_folder import DiskIndexError
from trace_rl.tasks.task import Passage

from .oracle import bm25, byte_length, check_ranking, made_up_passages, write_corpus

PASSAGES = [
    Passage("0", "Alû", "A demon of the night."),
    Passage("1", "Moon", "The night is lit by it."),
    Passage("2", "The Who", "A band.\nOf four."),
    Passage("3", "Twin", "same words"),
    Passage("4", "Twin", "same words"),
    Passage("5", "Twin", "same words"),
    Passage("6", "Long", "x" * 70_000),
]

IN_MEMORY = Bm25Index(PASSAGES)


def build(folder: Path, passages: list[Passage], commit_every: int = 100_000) -> DiskIndex:
    corpus = write_corpus(folder / "corpus.jsonl", passages)
    assert build_index(corpus, folder / "index", commit_every=commit_every) == len(passages)
    return DiskIndex(folder / "index")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> DiskIndex:
    return build(tmp_path_factory.mktemp("small"), PASSAGES, commit_every=2)


def ids(passages: list[Passage]) -> list[str]:
    return [p.id for p in passages]


def test_search(index: DiskIndex) -> None:
    assert len(index) == 7
    assert index.search("demon", 3) == [PASSAGES[0]]
    assert ids(index.search("ALU", 3)) == ["0"]
    assert ids(index.search("moon at night", 2)) == ["1", "0"]
    assert index.search("Who?", 1) == [PASSAGES[2]]
    with pytest.raises(ValueError, match="k must be"):
        index.search("demon", 0)


def test_ties_go_by_position_over_segments(index: DiskIndex) -> None:
    for k in (1, 2, 3, 6, 10**12):
        assert ids(index.search("same twin", k)) == ["3", "4", "5"][:k]


@pytest.mark.parametrize(
    "query", ["", "   ", "?!", "zebra", "\n", "</search>", "\ud83e", "\x00", "x" * 70_000]
)
def test_nothing_to_find(query: str, index: DiskIndex) -> None:
    assert index.search(query, 3) == []


@pytest.mark.parametrize(
    "query",
    [
        "demon AND (",
        '+demon -"',
        "words:demon^",
        "demon\ud83e",
        "[demon TO *}",
        "demon " * 100_000,
        "demon\\",
    ],
)
def test_queries_have_no_syntax(query: str, index: DiskIndex) -> None:
    assert ids(index.search(query, 3))[0] == "0"


@given(
    query=st.text(alphabet='night demon band\ud83e\u0301*()-:"', max_size=40) | st.text(), k=st.integers(1, 9)
)
def test_any_text_is_a_query(query: str, k: int, index: DiskIndex) -> None:
    found = index.search(query, 99)
    assert index.search(query, k) == found[:k]
    assert {p.id for p in found} == {p.id for p in IN_MEMORY.search(query, 99)}


@pytest.mark.parametrize(("seed", "longest"), [(0, 30), (1, 400)])
def test_scores_are_bm25(seed: int, longest: int, tmp_path: Path) -> None:
    """Also across segments, for lengths that one byte cannot hold, and for words that a query repeats."""
    passages = made_up_passages(300, seed, longest)
    index = build(tmp_path, passages, commit_every=70)
    documents = [f"{p.title} {p.title} {p.text}" for p in passages]
    rng = random.Random(seed)
    for _ in range(40):
        query = " ".join(
            rng.choices([f"w{i}" for i in range(30)] + ["title3", "title4"], k=rng.randint(1, 6))
        )
        scores = bm25(documents, query, k1=1.2, b=0.75, kept_length=byte_length)
        found = index.scored_search(query, 300)
        ranks = [int(p.id[1:]) for p, _ in found]
        check_ranking(ranks, scores)
        assert [score for _, score in found] == pytest.approx([scores[i] for i in ranks], rel=2e-5)
        assert ids(index.search(query, 5)) == [p.id for p, _ in found[:5]]


def test_more_ties_than_a_first_look_shows(tmp_path: Path) -> None:
    passages = [Passage(str(i), "same", "text") for i in range(500)]
    index = build(tmp_path, passages, commit_every=60)
    assert ids(index.search("same", 3)) == ["0", "1", "2"]
    assert ids(index.search("text same", 400)) == [str(i) for i in range(400)]


@given(st.lists(st.sampled_from([1.0, 2.0, 2.0 + 1e-7, 2.0 - 1e-7, 5.0]), max_size=30), st.randoms())
def test_in_order(scores: list[float], rng: random.Random) -> None:
    scores = sorted(scores, reverse=True)
    positions = rng.sample(range(100), len(scores))
    found = in_order(scores, positions)
    assert [i for i, _ in found] == sorted(
        range(len(scores)), key=lambda i: (-round(scores[i]), positions[i])
    )
    assert [score for _, score in found] == sorted([score for _, score in found], reverse=True)
    assert all(abs(score - scores[i]) < 1e-5 for i, score in found)


def test_threads_agree(index: DiskIndex) -> None:
    queries = ["night", "same words", "the who", "a band of four", "twin"] * 40
    expected = [index.search(q, 3) for q in queries]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda q: index.search(q, 3), queries)) == expected


def test_folders_that_are_no_index(tmp_path: Path) -> None:
    with pytest.raises(DiskIndexError, match=r"no index in .*build one with"):
        DiskIndex(tmp_path / "nothing")
    with pytest.raises(DiskIndexError, match="no index in"):
        DiskIndex(tmp_path)
    build(tmp_path, PASSAGES)
    manifest = tmp_path / "index" / "manifest.json"
    good = json.loads(manifest.read_text())
    for broken, message in (
        (good | {"passages": None}, "half built.*again"),
        (good | {"passages": 99}, "damaged.*holds 7 passages"),
        (good | {"format": 2}, "not of an index of format 1"),
        (good | {"surprise": 1}, "not of an index of format 1"),
        (["?"], "not of an index of format 1"),
    ):
        manifest.write_text(json.dumps(broken))
        with pytest.raises(DiskIndexError, match=message):
            DiskIndex(tmp_path / "index")
    manifest.write_text("{")
    with pytest.raises(DiskIndexError, match="cannot be read"):
        DiskIndex(tmp_path / "index")
    manifest.write_text(json.dumps(good))
    next((tmp_path / "index" / "tantivy").glob("*.idx")).unlink()
    with pytest.raises(DiskIndexError, match="damaged"):
        DiskIndex(tmp_path / "index")
