"""A search index that is a server: `POST /retrieve` in the format of Search-R1's retrieval server."""

from __future__ import annotations

import json
import random
import threading
import time
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from trace_rl.tasks.task import Passage

from .poster import Poster, PostError
from .protocol import RetrievalError, check_k
from .query_cache import QueryCache
from .reply import parse_reply

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 2.0


@dataclass(frozen=True)
class RetrieverCounts:
    """What has happened so far, in whole numbers.

    Attributes:
        searches: calls of ``search`` with a query.
        requests: HTTP requests sent, repeated ones included.
        cache_hits: searches answered without a request of their own.
        failures: searches that ended in a RetrievalError.
    """

    searches: int = 0
    requests: int = 0
    cache_hits: int = 0
    failures: int = 0


class HttpRetriever:
    """Searches by asking a server; any number of threads may share one.

    A search takes at most ``(retries + 1) * timeout_s`` and a few seconds of pauses, whatever the server does.
    It is tried again after what may pass (no connection, a broken one, status 5xx, no reply in time), not
    after other statuses or a reply that is not of the format.

    Args:
        url: of the server, http or https; ``/retrieve`` is added unless the path ends so.
        timeout_s: seconds for one try, from asking for a connection to the last byte of the reply.
        retries: further tries, after pauses of 0.2 s, 0.4 s, ... at most 2 s, shortened at random.
        connections: most at a time.
        max_bytes: largest reply that is read.
        cache_size: replies kept, the least recently used go first; two searches for the same at the same time
            make one request.

    Raises ValueError for values out of range and ImportError without httpx.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 10.0,
        retries: int = 2,
        connections: int = 64,
        max_bytes: int = 4 * 2**20,
        cache_size: int = 65_536,
    ) -> None:
        self.url = _retrieve_url(url)
        if not timeout_s > 0 or retries < 0 or connections < 1 or max_bytes < 1 or cache_size < 0:
            raise ValueError(
                "need timeout_s > 0, retries >= 0, connections >= 1, max_bytes >= 1, cache_size >= 0, got "
                f"{timeout_s}, {retries}, {connections}, {max_bytes}, {cache_size}"
            )
        self._retries = retries
        self._poster = Poster(self.url, timeout_s=timeout_s, connections=connections, max_bytes=max_bytes)
        self._cache: QueryCache[tuple[str, int], tuple[Passage, ...]] = QueryCache(cache_size)
        self._counts = RetrieverCounts()
        self._lock = threading.Lock()

    @property
    def counts(self) -> RetrieverCounts:
        """What has happened so far."""
        return self._counts

    def search(self, query: str, k: int) -> list[Passage]:
        """At most ``k`` passages in the server's order; ``[]`` for a blank query, without asking.

        Raises RetrievalError naming the address, what happened and after how many tries; ValueError for k < 1.
        """
        check_k(k)
        if not query.strip():
            return []
        self._count(searches=1)
        try:
            passages, origin = self._cache.get((query, k), lambda: self._ask(query, k))
        except RetrievalError as error:
            self._count(failures=1)
            raise RetrievalError(
                str(error)
            ) from error  # threads that share a failure must not share an object
        self._count(cache_hits=origin != "new")
        return list(passages)

    def close(self) -> None:
        """Drops the connections; searches that are not kept fail from then on."""
        self._poster.close()

    def _ask(self, query: str, k: int) -> tuple[Passage, ...]:
        body = json.dumps({"queries": [query], "topk": k, "return_scores": True}).encode()
        for tries in range(1, self._retries + 2):
            self._count(requests=1)
            try:
                return tuple(parse_reply(self._poster.post(body), k))
            except ValueError as error:
                raise self._error(str(error), tries) from error
            except PostError as error:
                if not error.may_pass or tries > self._retries:
                    raise self._error(str(error), tries) from error
            pause = min(_FIRST_PAUSE_SECONDS * 2 ** (tries - 1), _LONGEST_PAUSE_SECONDS)
            time.sleep(pause * random.uniform(0.5, 1.0))
        raise AssertionError("the last try returns or raises")

    def _error(self, problem: str, tries: int) -> RetrievalError:
        return RetrievalError(f"{self.url}: {problem} (after {tries} {'try' if tries == 1 else 'tries'})")

    def _count(self, searches: int = 0, requests: int = 0, cache_hits: int = 0, failures: int = 0) -> None:
        with self._lock:
            c = self._counts
            self._counts = replace(
                c,
                searches=c.searches + searches,
                requests=c.requests + requests,
                cache_hits=c.cache_hits + cache_hits,
                failures=c.failures + failures,
            )


def _retrieve_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        usable = usable and "@" not in parts.netloc  # passwords would end up in logs
    except ValueError:  # a port that is no number, half an IPv6 address
        usable = False
    if not usable or not url.isprintable() or " " in url:
        raise ValueError(f"the server's url must be like http://127.0.0.1:8000, got {url!r}")
    path = parts.path.rstrip("/")
    return parts._replace(path=path if path.endswith("/retrieve") else f"{path}/retrieve").geturl()
