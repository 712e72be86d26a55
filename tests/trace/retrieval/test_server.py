"""The server, asked over HTTP: its format, its refusals, its end, and the client against it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from trace_rl.retrieval.bm25 import Bm25Index
from trace_rl.retrieval.disk_index import DiskIndex
from trace_rl.retrieval.http_client import HttpRetriever
from trace_rl.retrieval.index_build import build_index
from trace_rl.retrieval.protocol import RetrievalError, ScoredIndex
from trace_rl.retrieval.request import Limits
from trace_rl.retrieval.server import create_app
from trace_rl.tasks.task import Passage

from .oracle import made_up_passages, write_corpus

DATA = Path(__file__).resolve().parents[2] / "data"
PASSAGES = [
    Passage("a", "Paris", "is the capital of France"),
    Passage("b", 'Neural "networks"', "learn\nfrom \u00e9xamples, explain \ud83e"),
    Passage("c", "Lyon", "is in France"),
]


class Broken(Bm25Index):
    def scored_search(self, query: str, k: int) -> list[tuple[Passage, float]]:
        raise RetrievalError("the disk is gone")


@contextmanager
def served(index: ScoredIndex, limits: Limits | None = None) -> Iterator[str]:
    """The address of a server in a thread."""
    app = create_app(index, top_k=2, limits=limits)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while not server.started and thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.started
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    limits = Limits(queries=5, top_k=50, passages=100, body_bytes=2000, body_seconds=0.5)
    with served(Bm25Index(PASSAGES), limits) as address:
        yield address


def post(url: str, data: Any) -> httpx.Response:
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    return httpx.post(f"{url}/retrieve", content=body, timeout=30, trust_env=False)


def shape(value: Any) -> Any:
    """Keys and types, without repetitions."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shape(inner) for inner in value[:1]]
    return type(value).__name__


def test_a_public_request_and_the_form_of_a_real_reply(url: str) -> None:
    asked = json.loads((DATA / "retrieve_request.json").read_text())
    answer = post(url, asked)
    assert answer.status_code == 200
    assert shape(answer.json()) == shape(json.loads((DATA / "retrieve_response.json").read_text()))
    first, second = answer.json()["result"]
    assert [hit["document"]["id"] for hit in first] == ["a", "c"]
    assert first[0]["document"]["contents"] == '"Paris"\nis the capital of France'
    assert first[0]["score"] > first[1]["score"] > 0
    assert second[0]["document"] == {
        "id": "b",
        "contents": '"Neural "networks""\nlearn\nfrom \u00e9xamples, explain \ud83e',
    }


def test_without_scores(url: str) -> None:
    bare = [
        {"id": "c", "contents": '"Lyon"\nis in France'},
        {"id": "a", "contents": '"Paris"\nis the capital of France'},
    ]
    for extra in ({}, {"topk": None}, {"topk": 0}, {"topk": 7}, {"return_scores": False}, {"other": 1}):
        assert post(url, {"queries": ["is France", "zebra"]} | extra).json() == {"result": [bare, []]}
    assert post(url, {"queries": ["is France"], "topk": 1}).json() == {"result": [bare[:1]]}
    assert post(url, {"queries": []}).json() == {"result": []}


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b"", 400, "the body is not JSON"),
        (b"{", 400, "the body is not JSON"),
        (b"\xff", 400, "the body is not JSON"),
        (b"[" * 1999, 400, "the body is not JSON"),
        ([], 422, "must be an object"),
        ({}, 422, "queries must be a list of strings"),
        ({"queries": "France"}, 422, "queries must be a list of strings"),
        ({"queries": ["a", 1]}, 422, "queries must be a list of strings"),
        ({"queries": ["a"] * 6}, 422, "at most 5 queries a request, got 6"),
        ({"queries": ["a"], "topk": 51}, 422, "topk must be a whole number from 1 to 50"),
        ({"queries": ["a"], "topk": -1}, 422, "topk must be a whole number"),
        ({"queries": ["a"], "topk": 2.5}, 422, "topk must be a whole number"),
        ({"queries": ["a"], "topk": True}, 422, "topk must be a whole number"),
        ({"queries": ["a"], "topk": "3"}, 422, "topk must be a whole number"),
        (
            {"queries": ["a"] * 3, "topk": 40},
            422,
            "at most 100 passages a request, got 3 queries with topk 40",
        ),
        ({"queries": ["a"], "return_scores": 1}, 422, "return_scores must be true or false"),
        ({"queries": ["a" * 3000]}, 413, "larger than 2000 bytes"),
    ],
)
def test_malformed_requests(body: Any, status: int, sentence: str, url: str) -> None:
    answer = post(url, body)
    assert answer.status_code == status
    assert sentence in answer.json()["detail"]


def test_a_body_that_does_not_arrive(url: str) -> None:
    def never() -> Iterator[bytes]:
        yield b"{"
        released.wait(30)

    released = threading.Event()
    with httpx.Client(timeout=30, trust_env=False) as client, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.post, f"{url}/retrieve", content=never())
        while post(url, {"queries": ["France"]}).status_code != 200:
            pass  # the server answers others meanwhile
        time.sleep(1.0)
        released.set()
        assert asked.result(30).status_code == 408


def test_health(url: str) -> None:
    assert httpx.get(f"{url}/health", trust_env=False).json() == {"status": "ok", "passages": 3}
    assert httpx.get(f"{url}/nothing", trust_env=False).status_code == 404


def test_a_broken_index_is_unavailable() -> None:
    with served(Broken(PASSAGES)) as url:
        answer = post(url, {"queries": ["France"]})
        assert (answer.status_code, answer.json()) == (503, {"detail": "the disk is gone"})
        index = HttpRetriever(url, retries=0)
        with pytest.raises(RetrievalError, match=r"HTTP status 503 .*the disk is gone"):
            index.search("France", 3)
        index.close()


def test_top_k_must_be_within_the_limits() -> None:
    with pytest.raises(ValueError, match="top_k must be from 1 to 1000"):
        create_app(Bm25Index(PASSAGES), top_k=1001)


def test_client_against_server_on_disk(tmp_path: Path) -> None:
    passages = made_up_passages(200, seed=0, longest=60)
    build_index(write_corpus(tmp_path / "corpus.jsonl", passages), tmp_path / "index")
    local = DiskIndex(tmp_path / "index")
    queries = [f"w{i} title{i % 9}" for i in range(60)]
    with served(local) as url, ThreadPoolExecutor(8) as pool:
        index = HttpRetriever(url, timeout_s=30)
        assert list(pool.map(lambda q: index.search(q, 3), queries)) == [local.search(q, 3) for q in queries]
        index.close()
