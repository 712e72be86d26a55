"""How many processes that compute this process may have."""

from __future__ import annotations

import os


def processor_share() -> int:
    """Processors for this process: those it may run on, divided among the ranks of this machine; at least 1.

    The number of ranks is LOCAL_WORLD_SIZE, which torchrun sets, by default 1. Raises ValueError if that is
    no positive whole number.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not ranks.isdecimal() or int(ranks) < 1:
        raise ValueError(f"LOCAL_WORLD_SIZE must be the number of ranks on this machine, got {ranks!r}")
    return max(1, len(os.sched_getaffinity(0)) // int(ranks))
