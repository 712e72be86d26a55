"""HTTP POST with a deadline for the whole exchange, and a limit on what is read of the reply."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any

try:
    import httpx
except ImportError as error:
    raise ImportError("searching with a server needs httpx: pip install 'trace-kernels[train]'") from error

_MARGIN_SECONDS = 5.0
_SHOWN_BYTES = 200


class PostError(Exception):
    """A POST that brought no reply; ``may_pass`` if the same one may succeed later."""

    def __init__(self, problem: str, *, may_pass: bool) -> None:
        self.may_pass = may_pass
        super().__init__(problem)


class Poster:
    """Sends to one address, from any number of threads.

    The exchanges run on an event loop in a thread of its own: only there can all of one (name look-up,
    waiting for a connection, headers, body) be put under one deadline. Limits on single reads, which is what
    blocking clients have, let a server that sends a byte a second hold its caller for hours.

    Redirects are not followed and the environment's proxy settings are not used.

    Args:
        url: http or https.
        timeout_s: for a whole exchange.
        connections: most at a time; an exchange waits for one within its deadline.
        max_bytes: of a reply.
    """

    def __init__(self, url: str, *, timeout_s: float, connections: int, max_bytes: int) -> None:
        self._url, self._timeout_s, self._connections = url, timeout_s, connections
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: httpx.AsyncClient | None = None
        self._closed = False

    def post(self, body: bytes) -> bytes:
        """The body of the reply with status 200 to a JSON ``body``. Raises PostError, nothing else."""
        try:
            waiting = self._submit(self._exchange(body))
        except RuntimeError as error:
            raise PostError(str(error), may_pass=False) from error
        try:
            return waiting.result(self._timeout_s + _MARGIN_SECONDS)
        except concurrent.futures.TimeoutError:
            waiting.cancel()
            raise PostError("the exchange could not be ended at its deadline", may_pass=False) from None
        except concurrent.futures.CancelledError:
            raise PostError("closed during the exchange", may_pass=False) from None

    def close(self) -> None:
        """Ends exchanges under way and drops all connections; later posts fail."""
        with self._lock:
            self._closed = True
            loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self._end(), loop).result(_MARGIN_SECONDS)
            loop.call_soon_threadsafe(loop.stop)

    def _submit(self, coroutine: Coroutine[Any, Any, bytes]) -> concurrent.futures.Future[bytes]:
        with self._lock:
            if self._closed:
                coroutine.close()
                raise RuntimeError("the connection was closed by its owner")
            if self._loop is None:  # not before the first use: a fork before it would lose the thread
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(self._loop,), name="retriever", daemon=True).start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _end(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()

    async def _exchange(self, body: bytes) -> bytes:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._unlimited_exchange(body)
        except (TimeoutError, httpx.TimeoutException):
            raise PostError(f"no complete reply within {self._timeout_s:g} s", may_pass=True) from None
        except httpx.TransportError as error:
            problem = str(error) or type(error).__name__
            raise PostError(problem, may_pass=not isinstance(error, httpx.UnsupportedProtocol)) from error
        except PostError:
            raise
        except Exception as error:  # whatever else the layers below raise: a rollout can only take PostError
            may_pass = isinstance(error, OSError)
            raise PostError(f"{type(error).__name__}: {error}", may_pass=may_pass) from error

    async def _unlimited_exchange(self, body: bytes) -> bytes:
        if self._client is None:
            limits = httpx.Limits(
                max_connections=self._connections, max_keepalive_connections=self._connections
            )
            self._client = httpx.AsyncClient(limits=limits, timeout=None, trust_env=False)
        # Nothing compressed: a small reply could unpack to any size.
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        async with self._client.stream("POST", self._url, content=body, headers=headers) as reply:
            status = reply.status_code
            if status != 200:
                shown = await _read(reply, _SHOWN_BYTES)
                problem = f"HTTP status {status} {shown[:_SHOWN_BYTES].decode(errors='replace')!r}"
                raise PostError(problem, may_pass=status >= 500)
            if reply.headers.get("Content-Encoding", "identity") != "identity":
                raise PostError("the reply is compressed, which was not asked for", may_pass=False)
            read = await _read(reply, self._max_bytes)
            if len(read) > self._max_bytes:
                raise PostError(f"the reply is larger than {self._max_bytes} bytes", may_pass=False)
            return read


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


async def _read(reply: httpx.Response, limit: int) -> bytes:
    """The body, or somewhat more than ``limit`` bytes of it."""
    read = bytearray()
    async for chunk in reply.aiter_raw():
        read += chunk
        if len(read) > limit:
            break
    return bytes(read)
