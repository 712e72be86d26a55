"""Which keys of two configurations differ: what has been begun goes on under the same ones."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Difference = tuple[str, Any, Any]
"""A key with its dots, its old value, its new value."""

_SERVER = re.compile(r"(sets\.[^.]+\.)?environment\.retriever")


def differences(before: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> Iterator[Difference]:
    """Every key whose values differ, down to single values, in the order of `before`; an absent key is null.

    Of a search server only its presence counts: one that has moved or is asked otherwise is no other environment.
    """
    for key in dict.fromkeys([*before, *now]):
        where, old, new = f"{path}{key}", before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            if not _SERVER.fullmatch(where):
                yield from differences(old, new, f"{where}.")
        elif old != new:
            yield where, old, new


def in_words(found: Iterable[Difference]) -> str:
    """`key (old, now new)` of each, for a message."""
    return ", ".join(f"{key} ({_SHORT.repr(old)}, now {_SHORT.repr(new)})" for key, old, new in found)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
