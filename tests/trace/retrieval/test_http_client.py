"""Every search with a server ends within its bound, in passages or in a RetrievalError."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from trace_rl.retrieval import http_client
from trace_rl.retrieval.http_client import HttpRetriever, RetrieverCounts
from trace_rl.retrieval.protocol import RetrievalError
from trace_rl.tasks.task import Passage

from .hostile import Hostile, good, hostile, reply

DATA = Path(__file__).resolve().parents[2] / "data"
REAL = (DATA / "retrieve_response.json").read_bytes()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "_FIRST_PAUSE_SECONDS", 0.01)


def retriever(server: Hostile | str, **options: Any) -> HttpRetriever:
    url = server if isinstance(server, str) else server.url
    return HttpRetriever(url, **{"timeout_s": 30.0, "retries": 2} | options)


def failure(server: Hostile | str, **options: Any) -> str:
    index = retriever(server, **options)
    with pytest.raises(RetrievalError) as caught:
        index.search("q", 3)
    index.close()
    assert index.counts.failures == 1
    return str(caught.value)


def test_a_real_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with hostile(reply(REAL)) as server:
        index = retriever(server)
        found = index.search("There's a Guy Works Down the Chip Shop lyrics writer", 3)
        index.close()
        assert [p.id for p in found] == ["18848813", "7201900", "5005422"]
        assert found[2].title == "Kirsty MacColl"
        assert found[2].text.startswith("label shortly before the song was to be released. The single")
        asked = json.loads((DATA / "retrieve_request.json").read_text())
        assert server.requests[0].keys() == asked.keys()
        assert {k: type(v) for k, v in server.requests[0].items()} == {k: type(v) for k, v in asked.items()}
        assert server.requests[0]["topk"] == 3


def test_replies_of_another_format_are_not_asked_for_again() -> None:
    with hostile(reply("<html>hello</html>")) as server:
        message = failure(server)
        assert message.startswith(f"{server.url}/retrieve: the reply is not JSON")
        assert message.endswith("(after 1 try)")
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("answer", "tries", "message"),
    [
        (reply("{}", "400 Bad Request"), 1, "HTTP status 400 '{}'"),
        (reply("", "429 Too Many Requests"), 1, "HTTP status 429"),
        (reply("", "204 No Content"), 1, "HTTP status 204"),
        (reply("no\nindex" + "x" * 1000, "503 Service Unavailable"), 3, r"HTTP status 503 'no\\nindexx+' \("),
        (reply("", "302 Found", "Location: http://127.0.0.1:1/\r\n"), 1, "HTTP status 302"),
        (reply("", "307 Temporary Redirect", "Location: /retrieve\r\n"), 1, "HTTP status 307"),
        (reply(REAL, length=len(REAL) + 10), 3, "peer closed"),
        (reply(REAL, length=len(REAL) - 10), 1, "not JSON"),
        (reply(REAL, headers="Content-Encoding: gzip\r\n"), 1, "compressed"),
        (b"", 3, "disconnected"),
        (b"HTTP/1.1 200 OK\r\n", 3, "disconnected"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", 3, "illegal"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", 3, "Content-Length"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 3, "chunk"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200_000, 3, "."),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 5, 3, "disconnected"),
    ],
)
def test_wrong_replies(answer: bytes, tries: int, message: str) -> None:
    with hostile(answer) as server:
        text = failure(server)
        assert text.endswith(f"(after {tries} {'try' if tries == 1 else 'tries'})"), text
        assert re.search(message, text), text
        assert len(server.requests) == tries


def _sleep(connection: socket.socket, server: Hostile) -> None:
    server.closing.wait(20)


def _drip_body(connection: socket.socket, server: Hostile) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while not server.closing.wait(0.02):
        connection.sendall(b" ")


def _drip_head(connection: socket.socket, server: Hostile) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
    while not server.closing.wait(0.02):
        connection.sendall(b"y")


def _continue_for_ever(connection: socket.socket, server: Hostile) -> None:
    while not server.closing.wait(0.001):
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")


@pytest.mark.parametrize("talk", [_sleep, _drip_body, _drip_head, _continue_for_ever])
def test_the_deadline_holds_for_the_whole_exchange(talk: Callable[[socket.socket, Hostile], None]) -> None:
    """Without it these servers would hold the search for minutes: the alarm is far above the deadline."""
    with hostile(lambda connection, _: talk(connection, server)) as server:
        start = time.monotonic()
        message = failure(server, timeout_s=0.3, retries=1)
        assert time.monotonic() - start < 15
        assert message.endswith("no complete reply within 0.3 s (after 2 tries)")


def test_a_reply_without_end_is_not_read_to_its_end() -> None:
    def pour(connection: socket.socket, number: int) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while not server.closing.is_set():
            connection.sendall(b" " * 65_536)

    with hostile(pour) as server:
        assert "the reply is larger than 100000 bytes (after 1 try)" in failure(server, max_bytes=100_000)
    with hostile(reply(b" " * 100_001)) as server:
        assert "larger than" in failure(server, max_bytes=100_000)
    with hostile(good("T\nx")) as server:
        index = retriever(server, max_bytes=len(good("T\nx").partition(b"\r\n\r\n")[2]))
        assert index.search("q", 3) == [Passage("0", "T", "x")]
        index.close()


def test_errors_that_pass() -> None:
    def recovering(connection: socket.socket, number: int) -> None:
        connection.sendall(reply("", "500 Oops") if number == 1 else b"" if number == 2 else good("T\nx"))

    with hostile(recovering) as server:
        index = retriever(server)
        assert index.search("q", 3) == [Passage("0", "T", "x")]
        index.close()
        assert index.counts == RetrieverCounts(searches=1, requests=3)


def test_down_then_up() -> None:
    with hostile(good("T\nx")) as server:
        port = server.port
    index = retriever(f"http://127.0.0.1:{port}")
    with pytest.raises(RetrievalError, match=r"attempts failed \(after 3 tries\)"):
        index.search("q", 3)
    with hostile(good("T\nx"), port):
        assert index.search("q", 3) == [Passage("0", "T", "x")]
    with pytest.raises(RetrievalError):
        index.search("other", 3)
    assert index.search("q", 3) == [Passage("0", "T", "x")]
    index.close()
    assert index.counts == RetrieverCounts(searches=4, requests=7, cache_hits=1, failures=2)


def test_no_such_host() -> None:
    assert "(after 1 try)" in failure("http://no-such-host.invalid", retries=0)


def test_kept_replies() -> None:
    def numbered(connection: socket.socket, number: int) -> None:
        connection.sendall(good(f"T\n{number}"))

    with hostile(numbered) as server:
        index = retriever(server, cache_size=2)
        asked = [("a", 1), ("a", 2), ("a", 1), ("b", 1), ("a", 2), ("a", 1)]
        texts = [index.search(query, k)[0].text for query, k in asked]
        index.search("a", 1).clear()  # the caller's list is its own
        assert index.search("a", 1) != []
        index.close()
        assert texts == ["1", "2", "1", "3", "4", "5"]
        assert index.counts == RetrieverCounts(searches=8, requests=5, cache_hits=3)


def test_many_threads() -> None:
    """Twice as many as connections; those that ask the same share a request."""

    def echo(connection: socket.socket, number: int) -> None:
        query = server.requests[number - 1]["queries"][0]
        connection.sendall(good(f"{query}\nx"))

    with hostile(echo) as server:
        index = retriever(server, connections=4)
        queries = [f"q{i % 40}" for i in range(200)]
        with ThreadPoolExecutor(8) as pool:
            assert [f[0].title for f in pool.map(lambda q: index.search(q, 3), queries)] == queries
        index.close()
        assert len(server.requests) == 40
        assert index.counts == RetrieverCounts(searches=200, requests=40, cache_hits=160)


def test_threads_share_a_failure() -> None:
    started = threading.Barrier(8)

    def slow_error(connection: socket.socket, number: int) -> None:
        server.closing.wait(0.5)
        connection.sendall(reply("", "404 Not Found"))

    def ask(_: int) -> str:
        started.wait(20)
        with pytest.raises(RetrievalError) as caught:
            index.search("q", 3)
        return str(caught.value)

    with hostile(slow_error) as server:
        index = retriever(server)
        with ThreadPoolExecutor(8) as pool:
            messages = set(pool.map(ask, range(8)))
        assert messages == {f"{server.url}/retrieve: HTTP status 404 '' (after 1 try)"}
        assert index.counts.failures == 8
        assert index.counts.requests < 8
        index.close()


def test_closing_ends_searches() -> None:
    with hostile(lambda connection, _: _sleep(connection, server)) as server:
        index = retriever(server)
        with ThreadPoolExecutor(1) as pool:
            search = pool.submit(index.search, "q", 3)
            while not server.requests:
                time.sleep(0.01)
            index.close()
            assert isinstance(search.exception(20), RetrievalError)
        with pytest.raises(RetrievalError, match="closed"):
            index.search("q", 3)
        index.close()


def test_arguments() -> None:
    for url in (
        "127.0.0.1:8000",
        "ftp://host",
        "http://",
        "http://a b",
        "http://h:port",
        "http://u:p@h",
        "",
        "http://[::1",
    ):
        with pytest.raises(ValueError, match="must be like http://127"):
            HttpRetriever(url)
    wrong = {"timeout_s": 0.0, "retries": -1, "connections": 0, "max_bytes": 0, "cache_size": -1}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match="need timeout_s > 0"):
            retriever("http://h", **{name: value})
    urls = {
        "http://h": "http://h/retrieve",
        "https://h:1/a/": "https://h:1/a/retrieve",
        "http://h/retrieve": "http://h/retrieve",
    }
    assert {url: HttpRetriever(url).url for url in urls} == urls
    with pytest.raises(ValueError, match="k must be"):
        HttpRetriever("http://h").search("q", 0)
    assert HttpRetriever("http://h").search(" \n", 3) == []
