"""The record formats this package reads, by the name a configuration gives them.

A new format is one module beside these, with a function of the same signature that hands its ``parse`` to
``records.load_tasks``, and one line here.
"""

from __future__ import annotations

from collections.abc import Callable

from .bamboogle import read_bamboogle
from .hotpotqa import read_hotpotqa
from .musique import read_musique
from .records import Loaded
from .search_r1 import read_search_r1
from .wiki_multihop import read_wiki_multihop

Reader = Callable[..., Loaded]
"""``reader(path, on_malformed="skip" | "fail") -> Loaded``."""

READERS: dict[str, Reader] = {
    "hotpotqa": read_hotpotqa,
    "2wikimultihopqa": read_wiki_multihop,
    "musique": read_musique,
    "bamboogle": read_bamboogle,
    "search_r1": read_search_r1,
}
