"""The record formats this package reads, by the name a configuration gives them.

A new format (2WikiMultiHopQA, MuSiQue, Bamboogle, ...) is one module beside ``hotpotqa.py``, with a function
of the same signature that hands its ``parse`` to ``records.load_tasks``, and one line here.
"""

from __future__ import annotations

from collections.abc import Callable

from .hotpotqa import read_hotpotqa
from .records import Loaded

Reader = Callable[..., Loaded]
"""``reader(path, on_malformed="skip" | "fail") -> Loaded``."""

READERS: dict[str, Reader] = {"hotpotqa": read_hotpotqa}
