"""Where a question is searched: paragraphs, a corpus file, an index, a server; what cannot be is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trace_rl.config.environments import RetrieverConfig, SearchConfig
from trace_rl.config.tasks import QaTask
from trace_rl.retrieval.index_build import build_index
from trace_rl.sources.search import qa_source

DATA = Path(__file__).resolve().parents[2] / "data"
SEARCH = "<search> a red barn </search>"


def observation(task: QaTask, environment: SearchConfig | None = None) -> str:
    source = qa_source(task, environment or SearchConfig())
    one = source.environments(len)()
    one.reset(source.test[0])
    return one.step(SEARCH).observation


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    rows = [{"id": str(i), "contents": f'"Barn {i}"\nA red barn, number {i}.'} for i in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_corpus_file_and_its_index_on_disk_are_searched(corpus: Path, tmp_path: Path) -> None:
    index = tmp_path / "index"
    assert build_index(corpus, index) == 3
    for where in (corpus, index):
        found = observation(QaTask(kind="bamboogle", test=[DATA / "bamboogle.jsonl"], corpus=where))
        assert "Title: Barn 0" in found


def test_records_without_paragraphs_need_a_corpus() -> None:
    with pytest.raises(ValueError, match=r"bamboogle bring no paragraphs: set task\.corpus"):
        observation(QaTask(kind="bamboogle", test=[DATA / "bamboogle.jsonl"]))


def test_a_server_that_is_down_is_found_before_anything_is_sampled() -> None:
    down = SearchConfig(retriever=RetrieverConfig(url="http://127.0.0.1:9", timeout_s=0.5, retries=0))
    with pytest.raises(ValueError, match=r"environment\.retriever: .*127\.0\.0\.1:9"):
        observation(QaTask(kind="bamboogle", test=[DATA / "bamboogle.jsonl"]), down)
