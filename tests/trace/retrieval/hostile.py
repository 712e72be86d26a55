"""A server that answers each connection as a test says, byte by byte if need be."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Talk = Callable[[socket.socket, int], None]
"""``talk(connection, n)`` answers the n-th request (from 1), which has been read; the connection is then closed."""


def reply(body: bytes | str, status: str = "200 OK", headers: str = "", length: int | None = None) -> bytes:
    """A whole HTTP reply, which may lie about its length."""
    raw = body if isinstance(body, bytes) else body.encode()
    length = len(raw) if length is None else length
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n{headers}"
    return f"{head}Connection: close\r\n\r\n".encode() + raw


def good(*contents: str) -> bytes:
    """The reply that finds these."""
    hits = [{"document": {"id": str(i), "contents": c}, "score": 1.0} for i, c in enumerate(contents)]
    return reply(json.dumps({"result": [hits]}))


class Hostile:
    """Its address, and how many requests have come."""

    def __init__(self, talk: Talk, port: int = 0) -> None:
        self._talk = talk
        self._lock = threading.Lock()
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.requests: list[Any] = []
        self.closing = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                head, _, body = _read_head(connection)
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                while len(body) < length:
                    body += connection.recv(65_536)
                with self._lock:
                    self.requests.append(json.loads(body))
                    number = len(self.requests)
                self._talk(connection, number)
            except (OSError, ValueError):
                pass  # the client has gone

    def close(self) -> None:
        self.closing.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for thread in self._threads:
            thread.join(10)


def _read_head(connection: socket.socket) -> tuple[bytes, bytes, bytes]:
    read = b""
    while b"\r\n\r\n" not in read:
        more = connection.recv(65_536)
        if not more:
            raise OSError("closed")
        read += more
    return read.partition(b"\r\n\r\n")


@contextmanager
def hostile(talk: Talk | bytes, port: int = 0) -> Iterator[Hostile]:
    """Runs one; bytes are sent in answer to every request."""
    if isinstance(talk, bytes):
        answer = talk
        server = Hostile(lambda connection, _: connection.sendall(answer), port)
    else:
        server = Hostile(talk, port)
    try:
        yield server
    finally:
        server.close()
