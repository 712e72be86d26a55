"""Answers by query, where threads that ask the same at once share one computation."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, Literal, TypeVar

from .protocol import RetrievalError

Key = TypeVar("Key")
Value = TypeVar("Value")


class QueryCache(Generic[Key, Value]):
    """Keeps the ``size`` most recently used values (0: none). Failures are not kept."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: OrderedDict[Key, Value] = OrderedDict()
        self._under_way: dict[Key, Future[Value]] = {}
        self._lock = threading.Lock()

    def get(self, key: Key, compute: Callable[[], Value]) -> tuple[Value, Literal["kept", "shared", "new"]]:
        """The value and where it came from. Raises what ``compute`` raises, in every thread that waits for it."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key], "kept"
            other = self._under_way.get(key)
            if other is None:
                own: Future[Value] = Future()
                self._under_way[key] = own
        if other is not None:
            return other.result(), "shared"
        try:
            value = compute()
        except BaseException as error:
            with self._lock:
                del self._under_way[key]
            interrupted = RetrievalError("the thread that asked was interrupted")
            own.set_exception(error if isinstance(error, Exception) else interrupted)
            raise
        with self._lock:
            del self._under_way[key]
            self._kept[key] = value
            while len(self._kept) > self._size:
                self._kept.popitem(last=False)
        own.set_result(value)
        return value, "new"
